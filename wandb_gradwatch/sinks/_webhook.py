"""Send alerts to a Slack-compatible incoming webhook, for machines that do not reach W&B in time."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final

from ..rules import Alert
from ..snapshot import Snapshot

logger = logging.getLogger("wandb_gradwatch")

_STOP: Final = None
_RETRIED_STATUS: Final = frozenset({408, 425, 429, 500, 502, 503, 504})


class WebhookSink:
    """POST every alert as {"text": ...}, from a background thread that training never waits for.

    The URL of an incoming webhook is a secret: it is neither logged nor part of the repr, and errors are reported
    without it.

    Args:
        url: the incoming webhook.
        prefix: put before each message: the machine or run it comes from.
        timeout: seconds that one request may take.
        max_attempts: requests per alert; a refusal (4xx) is not repeated.
        backoff: seconds before the second attempt; doubled for each one after.
        max_waiting: alerts that may wait while the server does not answer; more are dropped, which is said once.
        close_timeout: seconds that `close` gives waiting alerts.

    Raises:
        ImportError: the extra `webhook` is not installed.
        TypeError: the URL is not a text, or an argument not a number.
        ValueError: it is no URL, or an argument is out of range.
    """

    def __init__(
        self,
        url: str,
        *,
        prefix: str = "",
        timeout: float = 10.0,
        max_attempts: int = 5,
        backoff: float = 1.0,
        max_waiting: int = 100,
        close_timeout: float = 10.0,
    ) -> None:
        if not isinstance(url, str):
            raise TypeError(
                f"WebhookSink(url) must be a text, but is {type(url).__name__}: is the variable that holds it set?"
            )
        if not url.startswith(("https://", "http://")):
            raise ValueError(
                "WebhookSink(url) must begin with https:// or http://; the value is a secret, so not shown"
            )
        for name, value in {"timeout": timeout, "backoff": backoff, "close_timeout": close_timeout}.items():
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise TypeError(f"WebhookSink({name}={value!r}) must be a number of seconds")
        for name, count in {"max_attempts": max_attempts, "max_waiting": max_waiting}.items():
            if isinstance(count, bool) or not isinstance(count, int):
                raise TypeError(f"WebhookSink({name}={count!r}) must be a whole number")
        for name, value in {"timeout": timeout, "max_attempts": max_attempts, "max_waiting": max_waiting}.items():
            if value <= 0:
                raise ValueError(f"WebhookSink({name}={value!r}) must be above 0")
        for name, value in {"backoff": backoff, "close_timeout": close_timeout}.items():
            if value < 0:
                raise ValueError(f"WebhookSink({name}={value!r}) must not be negative")
        self._requests = _import_requests()
        self._url = url
        self._prefix = prefix
        self._timeout = timeout
        self._max_attempts = max_attempts
        self._backoff = backoff
        self._close_timeout = close_timeout
        self._waiting: queue.Queue[Alert | None] = queue.Queue(max_waiting)
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        self._said_full = False

    def __repr__(self) -> str:
        return "WebhookSink(url=<secret>)"

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError("a WebhookSink holds a secret and a thread; it cannot be pickled or copied")

    def write(self, snapshot: Snapshot) -> None:
        """Snapshots do not go to people."""

    def alert(self, alert: Alert) -> None:
        """Hand an alert to the background thread. Never blocks."""
        if self._closing.is_set():
            return
        if self._thread is None:
            # A daemon: at the end of a script close() decides how long to wait, not the interpreter.
            self._thread = threading.Thread(target=self._send_all, name="wandb-gradwatch-webhook", daemon=True)
            self._thread.start()
        try:
            self._waiting.put_nowait(alert)
        except queue.Full:
            if not self._said_full:
                self._said_full = True
                logger.warning(
                    "The webhook does not keep up: %d alerts wait, further ones are dropped.", self._waiting.maxsize
                )

    def close(self) -> None:
        """Wait a bounded time for alerts that are on their way. Idempotent."""
        if self._closing.is_set():
            return
        self._closing.set()
        if self._thread is None:
            return
        with suppress(queue.Full):  # then the thread is awake, and looks at _closing by itself
            self._waiting.put_nowait(_STOP)
        self._thread.join(self._close_timeout)
        if self._thread.is_alive():
            logger.warning(
                "The webhook did not answer within %g s: alerts may not have been sent.", self._close_timeout
            )

    def _send_all(self) -> None:
        with _silent_urllib3(), self._requests.Session() as session:
            while not (self._closing.is_set() and self._waiting.empty()):
                alert = self._waiting.get()
                if alert is _STOP:
                    return
                self._send(session, alert)

    def _send(self, session: Any, alert: Alert) -> None:
        message = {"text": self._text(alert)}
        problem = ""
        for attempt in range(self._max_attempts):
            if attempt and self._closing.wait(self._backoff * 2 ** (attempt - 1)):
                break  # the time to close is for alerts that had no attempt yet
            try:
                response = session.post(self._url, json=message, timeout=self._timeout, allow_redirects=False)
            except Exception as error:  # not only requests': urllib3 raises what it thinks of an address
                problem = type(error).__name__  # its text, and a traceback, hold the URL
                continue
            if response.status_code < 300:
                return
            problem = f"HTTP {response.status_code}"
            if response.status_code not in _RETRIED_STATUS:
                break
        logger.warning("The webhook did not take the alert %r of step %d: %s.", alert.title, alert.step, problem)

    def _text(self, alert: Alert) -> str:
        head = f"{self._prefix} " if self._prefix else ""
        return f"{head}*{alert.level}: {alert.title}* (step {alert.step})\n{alert.text}"


@contextmanager
def _silent_urllib3() -> Iterator[None]:
    """Keep this thread's records out of urllib3's log, which shows the URL's path at DEBUG."""
    ours = threading.get_ident()

    def not_ours(record: logging.LogRecord) -> bool:
        return record.thread != ours

    urllib3_logger = logging.getLogger("urllib3.connectionpool")
    urllib3_logger.addFilter(not_ours)
    try:
        yield
    finally:
        urllib3_logger.removeFilter(not_ours)


def _import_requests() -> Any:
    try:
        import requests
    except ImportError as error:
        raise ImportError("WebhookSink needs the extra `webhook`: pip install 'wandb-gradwatch[webhook]'") from error
    return requests
