"""The webhook: alerts arrive, training does not wait, and the URL is not revealed."""

from __future__ import annotations

import http.client
import json
import logging
import math
import pickle
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
import requests
import responses
from windows import window

from wandb_gradwatch._judgement.incident import Incident
from wandb_gradwatch.rules import Alert
from wandb_gradwatch.sinks import Sink, _webhook
from wandb_gradwatch.sinks._webhook import WebhookSink

URL = "https://hooks.example.com/services/T000/B000/the-secret"
ALERT = Alert("NaN gradient", "layer b holds 1 NaN", step=7, level="ERROR")
NOT_CONFIRMED = "wandb_gradwatch: the webhook has not confirmed alert 'NaN gradient' of step 7:"


def lost(number: int, *, of: int) -> str:
    return f"wandb_gradwatch: the webhook has confirmed {of - number} of {of} alerts; the other {number} may be lost."


@pytest.fixture
def hook(monkeypatch: pytest.MonkeyPatch) -> Iterator[responses.RequestsMock]:
    monkeypatch.setattr(_webhook, "_PAUSES", (0.0,) * 4)
    with responses.RequestsMock(assert_all_requests_are_fired=False) as mock:
        yield mock


def texts(hook: responses.RequestsMock) -> list[str]:
    return [json.loads(call.request.body)["text"] for call in hook.calls]


def test_an_alert_arrives_as_text(hook: responses.RequestsMock) -> None:
    hook.post(URL, body="ok")
    sink = WebhookSink(URL, prefix="[node 3]")
    assert isinstance(sink, Sink)
    sink.write(window({"a": [1.0]}))
    sink.alert(ALERT)
    sink.close()
    assert texts(hook) == ["[node 3] *ERROR: NaN gradient* (step 7)\nlayer b holds 1 NaN"]


def test_the_incident_is_beside_the_text_as_data(hook: responses.RequestsMock) -> None:
    hook.post(URL, body="ok")
    incident = Incident("nan_gradient", "NaN gradient", "ERROR", 7, 7, 7, "a fact", values={"norm": math.nan})
    sink = WebhookSink(URL)
    sink.alert(replace(ALERT, incident=incident))
    sink.close()
    told = json.loads(hook.calls[0].request.body)
    assert told["text"] == "*ERROR: NaN gradient* (step 7)\nlayer b holds 1 NaN"
    assert told["incident"] == incident.to_dict()


def test_trouble_is_met_with_another_attempt(hook: responses.RequestsMock) -> None:
    hook.post(URL, status=500)
    hook.post(URL, status=429)
    accepted = threading.Event()
    hook.add_callback(responses.POST, URL, lambda _: accepted.set() or (200, {}, "ok"))
    sink = WebhookSink(URL)
    sink.alert(ALERT)
    assert accepted.wait(30)
    sink.close()
    assert len(hook.calls) == 3
    assert len(set(texts(hook))) == 1


def test_a_connection_that_breaks_is_met_with_another_attempt(monkeypatch: pytest.MonkeyPatch, said: Any) -> None:
    monkeypatch.setattr(_webhook, "_PAUSES", (0.0,) * 4)
    with socket.create_server(("127.0.0.1", 0)) as server:
        sink = WebhookSink(f"http://127.0.0.1:{server.getsockname()[1]}/hook")
        sink.alert(ALERT)
        server.accept()[0].close()  # the first attempt gets no answer
        connection, _ = server.accept()
        with connection:
            assert connection.recv(65536).startswith(b"POST /hook")
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
            sink.close()
    assert said() == []


def test_a_refusal_is_not_repeated_and_said(hook: responses.RequestsMock, said: Any) -> None:
    hook.post(URL, status=404)
    sink = WebhookSink(URL)
    sink.alert(ALERT)
    sink.close()
    assert len(hook.calls) == 1
    assert said() == [f"{NOT_CONFIRMED} HTTP 404.", lost(1, of=1)]


def test_attempts_are_bounded(hook: responses.RequestsMock, said: Any) -> None:
    refused = threading.Semaphore(0)

    def refuse(_: Any) -> tuple[int, dict[str, str], str]:
        refused.release()
        return 503, {}, ""

    hook.add_callback(responses.POST, URL, refuse)
    sink = WebhookSink(URL)
    sink.alert(ALERT)
    for _ in range(5):  # the first request and four more
        assert refused.acquire(timeout=30)
    sink.close()
    assert len(hook.calls) == 5
    assert said() == [f"{NOT_CONFIRMED} HTTP 503.", lost(1, of=1)]


class _Blocked:
    """A webhook that answers when the test allows it."""

    def __init__(self, hook: responses.RequestsMock) -> None:
        self.asked = threading.Event()
        self.answer = threading.Event()
        hook.add_callback(responses.POST, URL, self._request)

    def _request(self, _: Any) -> tuple[int, dict[str, str], str]:
        self.asked.set()
        assert self.answer.wait(30)
        return 200, {}, "ok"


def test_training_never_waits_and_the_queue_is_bounded(
    hook: responses.RequestsMock, said: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_webhook, "_MAX_WAITING", 2)
    blocked = _Blocked(hook)
    sink = WebhookSink(URL)
    sink.alert(ALERT)
    assert blocked.asked.wait(30)  # the first alert is being sent, so the queue is empty
    for _ in range(10):
        sink.alert(ALERT)  # would not return if it waited for the answer
    blocked.answer.set()
    sink.close()
    assert len(hook.calls) == 3
    assert said() == [f"{NOT_CONFIRMED} 2 others wait for the server.", lost(8, of=11)]


def test_closing_takes_a_bounded_time(hook: responses.RequestsMock, said: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    blocked = _Blocked(hook)
    sink = WebhookSink(URL)
    sink.alert(ALERT)
    assert blocked.asked.wait(30)
    monkeypatch.setattr(_webhook, "_CLOSING", 0.01)
    sink.close()
    assert said() == [lost(1, of=1)]
    blocked.answer.set()
    sink.close()  # closing twice does nothing
    sink.alert(ALERT)  # an alert after close() does nothing


def test_the_url_is_in_no_log_and_no_repr(hook: responses.RequestsMock, caplog: pytest.LogCaptureFixture) -> None:
    hook.post(URL, body=requests.ConnectionError(f"cannot connect to {URL}"))
    with caplog.at_level(logging.DEBUG):
        sink = WebhookSink(URL)
        sink.alert(ALERT)
        sink.close()
    assert repr(sink) == "WebhookSink(url=<secret>)"
    assert "has not confirmed alert" in caplog.text
    assert "the-secret" not in caplog.text
    with pytest.raises(TypeError, match="holds a secret and a thread; it cannot be pickled or copied"):
        pickle.dumps(sink)


class _Server:
    """A webhook on the loopback interface that answers with one status after the other, and 200 after them."""

    def __init__(self, *statuses: int, retry_after: str = "0") -> None:
        self.keys: list[str | None] = []  # the idempotency key of each request
        self.paths: list[str] = []
        self.goes_on = threading.Event()  # a status of 0 is answered with 200, but only then
        remaining = list(statuses)
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                self.rfile.read(int(self.headers["Content-Length"]))
                server.keys.append(self.headers["Idempotency-Key"])
                server.paths.append(self.path)
                status = remaining.pop(0) if remaining else 200
                assert status or server.goes_on.wait(30)
                with suppress(OSError):  # the client may have gone
                    self.send_response(status or 200)
                    self.send_header("Content-Length", "0")
                    self.send_header("Retry-After", retry_after)
                    self.send_header("Location", "/elsewhere")
                    self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/services/the-secret"

    def __enter__(self) -> _Server:
        threading.Thread(target=self._server.serve_forever, args=[0.01], daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.goes_on.set()
        self._server.shutdown()
        self._server.server_close()


@pytest.mark.parametrize("status", [200, 307, 404, 429, 503])
def test_no_library_logs_or_prints_the_url(
    status: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    # A real request: urllib3 logs "POST /services/..." and each retry at DEBUG, and http.client prints requests.
    monkeypatch.setattr(_webhook, "_PAUSES", (0.0,) * 4)
    monkeypatch.setattr(http.client.HTTPConnection, "debuglevel", 1)
    monkeypatch.setattr(logging, "logThreads", False)  # records without a thread
    with _Server(status, status) as server, caplog.at_level(logging.DEBUG):
        requests.post(server.url, json={}, allow_redirects=False)
        assert "the-secret" in caplog.text  # the control
        assert "the-secret" in capfd.readouterr().out
        caplog.clear()
        sink = WebhookSink(server.url)
        sink.alert(ALERT)
        sink.close()
    assert set(server.paths) == {"/services/the-secret"}, "the alert must not follow a redirection"
    assert len(server.paths) == (3 if status in (429, 503) else 2)
    assert "the-secret" not in caplog.text + "".join(capfd.readouterr())


def test_a_server_that_cannot_be_reached_reveals_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(_webhook, "_PAUSES", (0.0,) * 4)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]  # nobody listens after the block
    with caplog.at_level(logging.DEBUG):
        sink = WebhookSink(f"http://127.0.0.1:{port}/the-secret")
        sink.alert(ALERT)
        sink.close()
    assert f"{NOT_CONFIRMED} ConnectionError." in caplog.text
    assert "the-secret" not in caplog.text


def test_an_alert_that_may_have_arrived_is_not_sent_again(said: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_webhook, "_TIMEOUT", 0.5)
    with _Server(0) as server:  # the server accepts the first alert, but answers late
        sink = WebhookSink(server.url)
        sink.alert(ALERT)
        sink.alert(ALERT)
        sink.close()
    assert len(server.keys) == len(set(server.keys)) == 2  # two alerts, two requests, each with a key of its own
    assert said() == [f"{NOT_CONFIRMED} no answer in 0.5 s.", lost(1, of=2)]


def test_attempts_to_send_one_alert_have_the_same_idempotency_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_webhook, "_PAUSES", (0.0,) * 4)
    with _Server(500, 502) as server:
        sink = WebhookSink(server.url)
        sink.alert(ALERT)
        sink.close()
    assert len(server.keys) == 3
    assert len(set(server.keys)) == 1
    assert server.keys[0]


@pytest.mark.parametrize("wish", ["3600", "Fri, 31 Dec 2100 23:59:59 GMT", "soon", "-5", "inf"])
def test_the_server_cannot_ask_for_more_than_a_minute(wish: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pauses = []

    def wait(self: threading.Event, timeout: float | None = None) -> bool:
        if threading.current_thread().name == "wandb-gradwatch-webhook":
            pauses.append(timeout)
            return False
        return real_wait(self, timeout)

    real_wait = threading.Event.wait
    monkeypatch.setattr(threading.Event, "wait", wait)
    with _Server(429, 429, 503, 429, 429, retry_after=wish) as server:
        sink = WebhookSink(server.url)
        sink.alert(ALERT)
        sink.close()
    assert len(server.keys) == 5
    assert len(pauses) == 4
    assert sum(pauses) <= 60


def test_closing_cuts_a_pause_short(said: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_webhook, "_PAUSES", (0.01, 1000.0))
    monkeypatch.setattr(_webhook, "_MAX_PAUSE", 1000.0)
    with _Server(503, 503) as server:
        sink = WebhookSink(server.url)
        for _ in range(3):
            sink.alert(ALERT)
        sink.close()
    assert len(server.keys) == 5  # the first alert three times
    assert said() == []


def test_an_error_that_is_not_requests_own_ends_nothing_and_shows_nothing(
    hook: responses.RequestsMock, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    # Like urllib3's LocationParseError, which requests does not catch.
    hook.post(URL, body=ValueError(f"cannot parse {URL}"))
    hook.post(URL, body="ok")
    sink = WebhookSink(URL)
    sink.alert(ALERT)
    sink.alert(ALERT)
    sink.close()
    assert f"{NOT_CONFIRMED} ValueError" in caplog.text
    assert len(hook.calls) == 2
    assert "the-secret" not in caplog.text + "".join(capfd.readouterr())


def test_a_variable_that_is_not_set_is_asked_for() -> None:
    with pytest.raises(TypeError, match=r"must be a string, but got NoneType; check that the variable is set"):
        WebhookSink(None)  # type: ignore[arg-type]  # what os.environ.get gives


def test_a_url_that_is_none_is_not_shown() -> None:
    with pytest.raises(ValueError, match=r"must begin with https:// or http://") as caught:
        WebhookSink("the-secret")
    assert "the-secret" not in str(caught.value)
