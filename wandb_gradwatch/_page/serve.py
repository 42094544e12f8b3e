"""Serves the page of a running run to this machine only, and updates it in place."""

import secrets
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final
from urllib.parse import urlsplit

from .history import RunHistory
from .page import render_data, render_page

LOOPBACK: Final = "127.0.0.1"
MAX_CONNECTIONS: Final = 16  # at once; a browser opens at most six
SOCKET_SECONDS: Final = 10.0  # the longest wait for a client's next byte
_HEADERS: Final = {
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cross-Origin-Resource-Policy": "same-origin",
}


class PageServer(ThreadingHTTPServer):
    """Serves one page to this machine. The address contains a token, without which nothing is served."""

    daemon_threads = True

    def __init__(self, history: RunHistory) -> None:
        self.token: Final = secrets.token_urlsafe(18)
        self.history, self.version = history, 1
        self.fetched = -1  # the newest version that a page has fetched
        self._free = threading.BoundedSemaphore(MAX_CONNECTIONS)
        super().__init__((LOOPBACK, 0), _Handler)  # port 0: the system chooses one
        self.address: Final = f"http://{LOOPBACK}:{self.server_port}/{self.token}/"
        self._thread = threading.Thread(target=self.serve_forever, name="gradwatch page", daemon=True)
        self._thread.start()

    def update(self, history: RunHistory) -> None:
        self.history = history
        self.version += 1

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer in a thread of its own; close the connection at once if there are too many."""
        if not self._free.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:
            self._free.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print nothing about a client that has gone or does not read on."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)

    def close(self) -> None:
        self.shutdown()
        self.server_close()
        self._thread.join()


class _Handler(BaseHTTPRequestHandler):
    server: PageServer
    timeout = SOCKET_SECONDS

    def do_GET(self) -> None:
        page, target = self.server, urlsplit(self.path)
        version, history = page.version, page.history  # updated in the other order: content is never older than told
        # A foreign host name that resolves to this server is another origin, whose pages must not read this one.
        hosts = {f"{LOOPBACK}:{page.server_port}", f"localhost:{page.server_port}"}
        origin = self.headers.get("Origin")
        if self.headers.get("Host") not in hosts or (origin and urlsplit(origin).netloc not in hosts):
            return self._send(403, "text/plain", "Only pages of this very address are answered.")
        if target.path not in (f"/{page.token}/", f"/{page.token}/data"):
            return self._send(404, "text/plain", "The address lacks its token, or this page is not there.")
        page.fetched = version
        if target.path.endswith("/"):
            return self._send(200, "text/html", render_page(history, version=version))
        if target.query == f"after={version}":
            return self._send(204, "application/json", "")
        return self._send(200, "application/json", render_data(history, version))

    def _send(self, status: int, kind: str, text: str) -> None:
        body = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        for name, value in _HEADERS.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing: the terminal belongs to the command."""
