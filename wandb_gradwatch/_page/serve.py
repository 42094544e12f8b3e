"""The page of a run that goes on, served on this machine alone and brought up to date in place."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Final
from urllib.parse import parse_qs, urlsplit

from .history import RunHistory
from .page import render_data, render_page
from .read import RunReader

LOOPBACK: Final = "127.0.0.1"
POLL_SECONDS: Final = 3.0  # between two looks at the file, and at least the fourfold of what one look takes
LAST_LOOK_SECONDS: Final = 15.0  # for open pages to fetch the end of the run
_HEADERS: Final = {
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cross-Origin-Resource-Policy": "same-origin",
}


class PageServer:
    """Serves one page to this machine. Its address holds a token, without which there is nothing to see."""

    def __init__(self, history: RunHistory) -> None:
        self.token: Final = secrets.token_urlsafe(18)
        self.version = 0
        self.fetched = -1  # the newest version that a page has
        self.update(history)
        self._server: Final = ThreadingHTTPServer((LOOPBACK, 0), _handler_of(self))
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, name="gradwatch page", daemon=True)
        self._thread.start()

    @property
    def address(self) -> str:
        """The page's address, with its token."""
        return f"http://{LOOPBACK}:{self.port}/{self.token}/"

    @property
    def port(self) -> int:
        """The port, chosen by the system."""
        return int(self._server.server_address[1])

    def update(self, history: RunHistory) -> None:
        self.version += 1
        self.history = history

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def answer(self, path: str, query: dict[str, list[str]]) -> tuple[HTTPStatus, str, str]:
        """Status, type and text of the answer to a request that may be answered."""
        history, version = self.history, self.version
        if path not in (f"/{self.token}/", f"/{self.token}/data"):
            return HTTPStatus.NOT_FOUND, "text/plain", "The address lacks its token, or this page is not there."
        self.fetched = version
        if path.endswith("/"):
            return HTTPStatus.OK, "text/html", render_page(history, version=version)
        if query.get("after") == [str(version)]:
            return HTTPStatus.NO_CONTENT, "application/json", ""
        return HTTPStatus.OK, "application/json", render_data(history, version)


def _handler_of(page: PageServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            # A name of somebody else's that leads here is another origin: its pages must not read this one.
            hosts = {f"{LOOPBACK}:{page.port}", f"localhost:{page.port}"}
            origin = self.headers.get("Origin")
            if self.headers.get("Host") not in hosts or (origin and urlsplit(origin).netloc not in hosts):
                return self._send(HTTPStatus.FORBIDDEN, "text/plain", "Only pages of this very address are answered.")
            target = urlsplit(self.path)
            return self._send(*page.answer(target.path, parse_qs(target.query)))

        def _send(self, status: HTTPStatus, kind: str, text: str) -> None:
            body = text.encode()
            self.send_response(status)
            for name, value in _HEADERS.items():
                self.send_header(name, value)
            self.send_header("Content-Type", f"{kind}; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Say nothing: the terminal belongs to the command."""

    return Handler


def follow(reader: RunReader, server: PageServer, say: Callable[[RunHistory], None]) -> RunHistory:
    """Read the run on and bring its page up to date until the run has finished, and open pages have its end."""
    pause = POLL_SECONDS
    while not reader.finished:
        time.sleep(pause)
        started = time.monotonic()
        if reader.read_on():
            server.update(reader.history())
            say(server.history)
        pause = max(POLL_SECONDS, 4 * (time.monotonic() - started))
    deadline = time.monotonic() + LAST_LOOK_SECONDS
    while 0 <= server.fetched < server.version and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS / 10)
    return server.history
