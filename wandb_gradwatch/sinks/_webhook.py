"""A sink that sends alerts to a Slack-compatible incoming webhook, for machines without a live connection to W&B."""

import logging
import queue
import threading
from contextlib import suppress
from typing import Any, Final

from ..rules import Alert
from ._base import Sink

logger = logging.getLogger("wandb_gradwatch")

_TIMEOUT: Final = 10.0  # seconds, for one request and for each wait of close()
_MAX_WAITING: Final = 100  # alerts in the queue while the server does not answer
_MAX_RETRIES: Final = 4
_PAUSE: Final = 1.0  # seconds; urllib3's backoff factor, doubled for each further retry
_RETRIED_STATUS: Final = (408, 425, 429, 500, 502, 503, 504)


class WebhookSink(Sink):
    """POST every alert as {"text": ...} from a background thread, so that training never waits for the server.

    The URL of an incoming webhook is a secret: logs, error messages and the repr do not contain it. If the server fails
    or is busy (408, 425, 429, 500, 502-504), a request is sent up to five times, with growing pauses.

    Args:
        url: the URL of the incoming webhook.
        prefix: text before each message, such as the name of the machine or run.

    Raises:
        TypeError: `url` is not a string.
        ValueError: `url` does not begin with https:// or http://.
    """

    def __init__(self, url: str, *, prefix: str = "") -> None:
        if not isinstance(url, str):
            raise TypeError(
                f"WebhookSink(url) must be a string, but got {type(url).__name__}; check that the variable is set"
            )
        if not url.startswith(("https://", "http://")):
            raise ValueError(
                "WebhookSink(url) must begin with https:// or http://; the value is a secret and is not shown"
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
        """Put an alert into the background thread's queue. This method never blocks."""
        if self._closed:
            return
        if self._thread is None:
            # A daemon thread, so that close(), and not the interpreter, decides how long the script's end waits.
            self._thread = threading.Thread(target=self._send_all, name="wandb-gradwatch-webhook", daemon=True)
            self._thread.start()
        try:
            self._waiting.put_nowait(alert)
        except queue.Full:
            if not self._said_full:
                self._said_full = True
                logger.warning(
                    "wandb_gradwatch: the webhook is too slow: %d alerts wait; new ones are dropped.", _MAX_WAITING
                )

    def close(self) -> None:
        """Wait a bounded time for queued alerts to be sent. Idempotent."""
        was_closed, self._closed = self._closed, True
        if was_closed or self._thread is None:
            return
        with suppress(queue.Full):  # a full queue means that the thread is alive, which the warning below reports
            self._waiting.put(None, timeout=_TIMEOUT)  # ends the thread
            self._thread.join(_TIMEOUT)
        if self._thread.is_alive():
            logger.warning("wandb_gradwatch: the webhook did not answer in %g s: alerts may be missing.", _TIMEOUT)

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
        # urllib3 logs the path of the URL, which is part of the secret: drop the records of this thread.
        logging.getLogger("urllib3.connectionpool").addFilter(silence := lambda record: record.thread != ours)
        try:
            with requests.Session() as session:
                for scheme in ("https://", "http://"):
                    session.mount(scheme, HTTPAdapter(max_retries=retry))
                while (alert := self._waiting.get()) is not None:
                    self._send(session, alert)
        finally:
            logging.getLogger("urllib3.connectionpool").removeFilter(silence)

    def _send(self, session: Any, alert: Alert) -> None:
        head = f"{self._prefix} " if self._prefix else ""
        text = f"{head}*{alert.level}: {alert.title}* (step {alert.step})\n{alert.text}"
        try:
            response = session.post(self._url, json={"text": text}, timeout=_TIMEOUT, allow_redirects=False)
            problem = "" if response.status_code < 300 else f"HTTP {response.status_code}"
        except Exception as error:  # requests does not wrap every error: urllib3 raises its own for a bad address
            problem = type(error).__name__  # the error's text and traceback contain the URL
        if problem:
            logger.warning(
                "wandb_gradwatch: the webhook did not accept alert %r of step %d: %s.", alert.title, alert.step, problem
            )
