"""A W&B server on the loopback interface for the real SDK and wandb-core. Tests read what it has received.

    with LoopbackServer() as server:
        run = wandb.init(settings=server.settings(), dir=tmp_path)
        run.log({"loss": 1.0})
        run.finish()
        assert server.runs[run.id].history[0]["loss"] == 1.0

The server answers the GraphQL operations that wandb-core uses. A test adds an operation like this:

    server.graphql["Viewer"] = {"viewer": {"username": "someone"}}          # or a function from variables to data

and plants a fault like this:

    server.fault("file_stream", "500", times=3)
"""

from __future__ import annotations

import gzip
import json
import re
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal
from urllib.parse import unquote

API_KEY = "loopback" * 5  # 40 characters, like a real key
ENTITY, PROJECT = "someone", "loopback"
_WAITS = {  # in seconds, except the first
    "x_graphql_retry_max": 2,
    "x_graphql_retry_wait_min_seconds": 1,
    "x_graphql_retry_wait_max_seconds": 1,
    "x_file_stream_retry_wait_min_seconds": 0.1,
    "x_file_stream_retry_wait_max_seconds": 0.1,
    "x_file_stream_transmit_interval": 0.1,
}
Trouble = Literal["500", "hang", "drop"]
Reply = dict[str, Any] | Callable[[dict[str, Any]], dict[str, Any]]


@dataclass
class RecordedRun:
    """The data that one run has sent."""

    name: str
    rows: dict[int, dict[str, Any]] = field(default_factory=dict)  # by offset: an upload may be repeated
    summary: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    files: dict[str, bytes] = field(default_factory=dict)
    alerts: list[dict[str, Any]] = field(default_factory=list)
    exit_code: int | None = None
    complete: bool = False

    @property
    def history(self) -> list[dict[str, Any]]:
        """The history rows in order."""
        first = min(self.rows, default=0)  # a resumed run continues at its offset
        assert sorted(self.rows) == list(range(first, first + len(self.rows))), f"gaps: {sorted(self.rows)}"
        return [self.rows[offset] for offset in sorted(self.rows)]

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """The run's define_metric() definitions, as stored in its config (key `1` is the name, `2` a glob)."""
        wandb_config = self.config.get("_wandb", {}).get("value", {})
        return list(wandb_config.get("m", []))


@dataclass
class Request:
    """One request; `operation` is the name of a GraphQL operation, "file_stream" or "upload"."""

    operation: str
    path: str
    body: Any


@dataclass
class _Fault:
    operation: str
    trouble: Trouble
    times: int | None


class LoopbackServer:
    """Answer wandb-core on 127.0.0.1 and record what it sends.

    Attributes:
        runs: the data that each run has sent, by run id.
        requests: every request, in the order of arrival.
        graphql: GraphQL operation -> its `data`, or a function from variables to data. Other operations get `errors`.
        resumable: run id -> the `RunResumeStatus` bucket of a run that can be resumed.
    """

    def __init__(self) -> None:
        self.runs: dict[str, RecordedRun] = {}
        self.requests: list[Request] = []
        self.resumable: dict[str, dict[str, Any]] = {}
        self.graphql: dict[str, Reply] = {
            "Viewer": {"viewer": {"id": "viewer", "entity": ENTITY, "username": ENTITY, "flags": "{}"}},
            "UpsertBucket": self._upsert_bucket,
            "CreateRunFiles": self._create_run_files,
            "NotifyScriptableRunAlert": self._notify_alert,
            "RunResumeStatus": self._resume_status,
            "OrganizationCoreWeaveOrganizationID": {"entity": {"organization": {"coreWeaveOrganizationId": None}}},
            "ServerFeaturesQuery": {"serverInfo": {"features": []}},
            "ArtifactType": {"project": {"artifactType": {"name": "run_table"}}},
            "CreateArtifact": {
                "createArtifact": {"artifact": {"id": "artifact", "state": "COMMITTED", "artifactSequence": None}}
            },
        }
        self._lock = threading.RLock()
        self._faults: list[_Fault] = []
        self._hanging_ends = threading.Event()
        self._server = _QuietServer(("127.0.0.1", 0), _handler(self))
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)

    def __enter__(self) -> LoopbackServer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.heal()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def _settings(self, mode: str) -> dict[str, Any]:
        return {"base_url": self.url, "api_key": API_KEY, "entity": ENTITY, "project": PROJECT, "mode": mode} | _WAITS

    def environment(self) -> dict[str, str]:
        """Return environment variables that make a process's runs use this server, with short retry waits."""
        return {f"WANDB_{name.upper()}": str(value) for name, value in self._settings("online").items()}

    def settings(self, *, mode: str = "online", **more: Any) -> Any:
        """Return settings that make one `wandb.init(settings=...)` use this server, with short retry waits."""
        import wandb

        return wandb.Settings(**self._settings(mode) | more)

    def fault(self, operation: str, trouble: Trouble, *, times: int | None = None) -> None:
        """Make an operation fail, for `times` requests or until `heal`.

        Args:
            operation: a GraphQL operation, "file_stream", "upload", or "*" for everything.
            trouble: "500", "hang" (no answer until `heal`) or "drop" (the connection closes).
        """
        with self._lock:
            self._faults.append(_Fault(operation, trouble, times))

    def heal(self) -> None:
        """End all faults. Connections that hang are closed, so that the client tries again."""
        with self._lock:
            self._faults.clear()
            self._hanging_ends.set()
            self._hanging_ends = threading.Event()

    def resume(self, run_name: str, *, last_step: int) -> None:
        """Make a run resumable, as if it had logged the steps 0 to `last_step`."""
        last_row = {"_step": last_step, "_runtime": 1.0, "_timestamp": 1.0}
        self.resumable[run_name] = {
            "id": f"bucket-{run_name}",
            "name": run_name,
            "summaryMetrics": json.dumps(last_row),
            "displayName": run_name,
            "logLineCount": 0,
            "historyLineCount": last_step + 1,
            "eventsLineCount": 0,
            "historyTail": json.dumps([json.dumps(last_row)]),
            "eventsTail": "[]",
            "config": "{}",
            "tags": [],
            "wandbConfig": json.dumps({"t": 1}),
        }

    def trouble_for(self, operation: str) -> Trouble | None:
        with self._lock:
            for fault in self._faults:
                if fault.operation in (operation, "*") and fault.times != 0:
                    fault.times = None if fault.times is None else fault.times - 1
                    return fault.trouble
        return None

    def hang(self) -> None:
        with self._lock:
            ends = self._hanging_ends if self._faults else None
        if ends is not None:
            ends.wait()

    def record(self, operation: str, path: str, body: Any) -> None:
        with self._lock:
            self.requests.append(Request(operation, path, body))

    def answer_graphql(self, operation: str, variables: dict[str, Any]) -> dict[str, Any]:
        with self._lock:
            reply = self.graphql.get(operation)
            if reply is None:
                return {"data": None, "errors": [{"message": f"the loopback server does not know {operation!r}"}]}
            return {"data": reply(variables) if callable(reply) else reply}

    def take_stream(self, run_name: str, body: dict[str, Any]) -> dict[str, Any]:
        with self._lock:
            run = self._run(run_name)
            for name, chunk in (body.get("files") or {}).items():
                if name == "wandb-history.jsonl":
                    rows = map(json.loads, chunk["content"])
                    run.rows.update(enumerate(rows, start=chunk["offset"]))
                elif name == "wandb-summary.json":
                    run.summary = json.loads(chunk["content"][-1])
            if body.get("complete"):
                run.complete, run.exit_code = True, body.get("exitcode")
            return {}

    def take_file(self, path: str, content: bytes) -> None:
        with self._lock:
            run_name, _, file_name = unquote(path).removeprefix("/upload/").partition("/")
            self._run(run_name).files[file_name] = content

    def _run(self, name: str) -> RecordedRun:
        return self.runs.setdefault(name, RecordedRun(name))

    def _upsert_bucket(self, variables: dict[str, Any]) -> dict[str, Any]:
        name = variables.get("name") or variables.get("id")
        run = self._run(name)
        if variables.get("config"):
            run.config |= json.loads(variables["config"])
        resumable = self.resumable.get(name, {})
        bucket = {
            "id": f"bucket-{name}",
            "name": name,
            "displayName": variables.get("displayName") or name,
            "description": "",
            "config": resumable.get("config", "{}"),
            "sweepName": None,
            "project": {"id": "project", "name": PROJECT, "entity": {"id": "entity", "name": ENTITY}},
            "historyLineCount": resumable.get("historyLineCount", 0),
        }
        return {"upsertBucket": {"bucket": bucket, "inserted": not resumable}}

    def _create_run_files(self, variables: dict[str, Any]) -> dict[str, Any]:
        name = variables["run"]
        files = [{"name": file, "uploadUrl": f"{self.url}/upload/{name}/{file}"} for file in variables["files"]]
        return {"createRunFiles": {"runID": f"bucket-{name}", "uploadHeaders": [], "files": files}}

    def _notify_alert(self, variables: dict[str, Any]) -> dict[str, Any]:
        self._run(variables["runName"]).alerts.append(variables)
        return {"notifyScriptableRunAlert": {"success": True}}

    def _resume_status(self, variables: dict[str, Any]) -> dict[str, Any]:
        return {"model": {"id": "project", "name": PROJECT, "bucket": self.resumable.get(variables["name"])}}


class _QuietServer(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *_: object) -> None:
        """Ignore closed connections: wandb-core closes them when it ends, and planted faults close them."""


def _handler(server: LoopbackServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self._body()
            if self.path == "/graphql":
                request = json.loads(body)
                match = re.search(r"\b(?:query|mutation)\s+(\w+)", request["query"])
                operation = request.get("operationName") or (match.group(1) if match else "")
                variables = request.get("variables") or {}
                self._answer(operation, variables, lambda: server.answer_graphql(operation, variables))
            elif self.path.endswith("/file_stream"):
                stream, run_name = json.loads(body), self.path.split("/")[-2]
                self._answer("file_stream", stream, lambda: server.take_stream(run_name, stream))
            else:
                self._send(404, {})

        def do_PUT(self) -> None:
            body = self._body()
            self._answer("upload", body, lambda: server.take_file(self.path, body) or {})

        def do_GET(self) -> None:
            self._send(404, {})

        def _body(self) -> bytes:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            return gzip.decompress(body) if self.headers.get("Content-Encoding") == "gzip" else body

        def _answer(self, operation: str, body: Any, reply: Callable[[], dict[str, Any]]) -> None:
            server.record(operation, self.path, body)
            trouble = server.trouble_for(operation)
            if trouble == "500":
                self._send(500, {"error": "asked for by the test"})
            elif trouble is None:
                self._send(200, reply())
            else:
                if trouble == "hang":
                    server.hang()
                self.close_connection = True
                self.connection.shutdown(socket.SHUT_RDWR)

        def _send(self, status: int, reply: dict[str, Any]) -> None:
            content = json.dumps(reply).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            """Log nothing to the terminal: tests read `requests`."""

    return Handler
