"""Send alerts to a Slack-compatible incoming webhook, for machines that do not reach W&B in time."""

from __future__ import annotations

import logging
import queue
import threading
from contextlib import suppress
from typing import Any, Final

from ..rules import Alert
from ._base import Sink

logger = logging.getLogger("wandb_gradwatch")

_STOP: Final = None
_TIMEOUT: Final = 10.0  # seconds that one request may take, and that closing waits
_MAX_WAITING: Final = 100  # alerts that may wait while the server does not answer
_MAX_RETRIES: Final = 4
_PAUSE: Final = 1.0  # seconds before the second retry; doubled for each one after
_RETRIED_STATUS: Final = (408, 425, 429, 500, 502, 503, 504)


class WebhookSink(Sink):
    """POST every alert as {"text": ...}, from a background thread that training never waits for.

    The URL of an incoming webhook is a secret: it is neither logged nor part of the repr, and errors are reported
    without it. A server in trouble is asked five times, with growing pauses; a refusal (4xx) is not repeated.

    Args:
        url: the incoming webhook.
        prefix: put before each message: the machine or run that it comes from.

    Raises:
        TypeError: `url` is not a string.
        ValueError: `url` does not begin with https:// or http://.
    """

    def __init__(self, url: str, *, prefix: str = "") -> None:
        if not isinstance(url, str):
            raise TypeError(
                f"WebhookSink(url) must be a text, but is {type(url).__name__}: is the variable that holds it set?"
            )
        if not url.startswith(("https://", "http://")):
            raise ValueError(
                "WebhookSink(url) must begin with https:// or http://; the value is a secret, so not shown"
            )
        self._url, self._prefix = url, prefix
        self._waiting: queue.Queue[Alert | None] = queue.Queue(_MAX_WAITING)
        self._thread: threading.Thread | None = None
        self._closed = self._said_full = False

    def __repr__(self) -> str:
        return "WebhookSink(url=<secret>)"

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError("a WebhookSink holds a secret and a thread; it cannot be pickled or copied")

    def alert(self, alert: Alert) -> None:
        """Hand an alert to the background thread. Never blocks."""
        if self._closed:
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
                logger.warning("The webhook does not keep up: %d alerts wait; others are dropped.", _MAX_WAITING)

    def close(self) -> None:
        """Wait a bounded time for alerts that are on their way. Idempotent."""
        if self._closed or self._thread is None:
            self._closed = True
            return
        self._closed = True
        with suppress(queue.Full):  # then the thread is alive, which is said below
            self._waiting.put(_STOP, timeout=_TIMEOUT)
            self._thread.join(_TIMEOUT)
        if self._thread.is_alive():
            logger.warning("The webhook did not answer within %g s: alerts may not have been sent.", _TIMEOUT)

    def _send_all(self) -> None:
        import requests
        from requests.adapters import HTTPAdapter
        from urllib3.util import Retry

        retry = Retry(
            _MAX_RETRIES,
            backoff_factor=_PAUSE,
            status_forcelist=_RETRIED_STATUS,
            allowed_methods=None,  # POST too
            raise_on_status=False,
        )
        ours = threading.get_ident()
        # urllib3 writes the URL's path into its log; this thread's records stay out of it.
        logging.getLogger("urllib3.connectionpool").addFilter(silence := lambda record: record.thread != ours)
        try:
            with requests.Session() as session:
                for scheme in ("https://", "http://"):
                    session.mount(scheme, HTTPAdapter(max_retries=retry))
                while (alert := self._waiting.get()) is not _STOP:
                    self._send(session, alert)
        finally:
            logging.getLogger("urllib3.connectionpool").removeFilter(silence)

    def _send(self, session: Any, alert: Alert) -> None:
        head = f"{self._prefix} " if self._prefix else ""
        text = f"{head}*{alert.level}: {alert.title}* (step {alert.step})\n{alert.text}"
        try:
            response = session.post(self._url, json={"text": text}, timeout=_TIMEOUT, allow_redirects=False)
            problem = "" if response.status_code < 300 else f"HTTP {response.status_code}"
        except Exception as error:  # not only requests': urllib3 raises what it thinks of an address
            problem = type(error).__name__  # its text, and a traceback, hold the URL
        if problem:
            logger.warning("The webhook did not take the alert %r of step %d: %s.", alert.title, alert.step, problem)
