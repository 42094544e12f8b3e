"""A sink that sends alerts to a Slack-compatible incoming webhook, for machines without a live connection to W&B."""

import logging
import queue
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final

from ..rules import Alert
from ._base import Sink

logger = logging.getLogger("wandb_gradwatch")

_TIMEOUT: Final = 10.0  # seconds for one request
_CLOSING: Final = 5.0  # seconds that close(), and so the end of the script, may wait
_MAX_WAITING: Final = 100  # alerts in the queue while the server does not answer
_PAUSES: Final = (1.0, 2.0, 4.0, 8.0)  # seconds between the attempts to send one alert
_MAX_PAUSE: Final = 15.0  # seconds; a server may ask for a longer pause, but at most a minute in all
_RETRIED_STATUS: Final = (408, 425, 429, 500, 502, 503, 504)


class WebhookSink(Sink):
    """POST every alert as {"text": ...} from a background thread, so that training never waits for the server.

    Beside the text, the JSON has "incident": what the alert tells of as data, as `Incident.to_dict()` returns it.

    The URL of an incoming webhook is a secret: logs, error messages and the repr do not contain it. If the server
    cannot be reached, fails or is busy (408, 425, 429, 500, 502-504), an alert is sent up to five times within a
    minute, with the same `Idempotency-Key` header. It is not sent again if the server has not answered in time, because
    it may have arrived. At the end one message says how many alerts the server has not confirmed.

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
        self._waiting: queue.SimpleQueue[Alert | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._closing = threading.Event()
        self._num_alerts = self._num_confirmed = 0
        self._has_told = False  # of the first alert that the server has not confirmed

    def __repr__(self) -> str:
        return "WebhookSink(url=<secret>)"

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError("a WebhookSink holds a secret and a thread; it cannot be pickled or copied")

    def alert(self, alert: Alert) -> None:
        """Put an alert into the background thread's queue. This method never blocks."""
        if self._closing.is_set():
            return
        if self._thread is None:
            # A daemon thread, so that close(), and not the interpreter, decides how long the script's end waits.
            self._thread = threading.Thread(target=self._send_all, name="wandb-gradwatch-webhook", daemon=True)
            self._thread.start()
        self._num_alerts += 1
        if self._waiting.qsize() < _MAX_WAITING:
            self._waiting.put(alert)
        else:
            self._tell(alert, f"{_MAX_WAITING} others wait for the server")

    def close(self) -> None:
        """Send the queued alerts at once, for at most a few seconds, and log how many are lost. Idempotent."""
        if self._closing.is_set() or self._thread is None:
            self._closing.set()
            return
        self._closing.set()  # ends the pauses
        self._waiting.put(None)  # ends the thread
        self._thread.join(_CLOSING)
        if num_lost := self._num_alerts - self._num_confirmed:
            text = "the webhook has confirmed %d of %d alerts; the other %d may be lost."
            logger.warning(f"wandb_gradwatch: {text}", self._num_confirmed, self._num_alerts, num_lost)

    def _send_all(self) -> None:
        import requests

        with _silenced(), requests.Session() as session:
            for scheme in ("https://", "http://"):
                session.mount(scheme, _adapter())
            while (alert := self._waiting.get()) is not None:
                if problem := self._send(session, alert):
                    self._tell(alert, problem)
                else:
                    self._num_confirmed += 1

    def _send(self, session: Any, alert: Alert) -> str:
        """Send an alert, again if that is of use; return why the server has not confirmed it, or ""."""
        import requests

        head = f"{self._prefix} " if self._prefix else ""
        text = f"{head}*{alert.level}: {alert.title}* (step {alert.step})\n{alert.text}"
        incident = {} if alert.incident is None else {"incident": alert.incident.to_dict()}
        options = {
            "json": {"text": text} | incident,
            "headers": {"Idempotency-Key": str(uuid.uuid4())},
            "timeout": _TIMEOUT,
            "allow_redirects": False,
            "stream": True,  # do not read the answer's body, which has no end on a hostile server
        }
        for pause in (*_PAUSES, None):
            try:
                with session.post(self._url, **options) as response:
                    if response.status_code < 300:
                        return ""
                    problem, asked = f"HTTP {response.status_code}", _asked_pause(response)
                    if response.status_code not in _RETRIED_STATUS:
                        return problem
            except requests.ReadTimeout:
                return f"no answer in {_TIMEOUT:g} s"
            except requests.ConnectionError as error:
                problem, asked = type(error).__name__, 0.0  # the error's text and traceback contain the URL
            except Exception as error:  # requests does not wrap every error: urllib3 raises its own for a bad address
                return type(error).__name__
            if pause is not None and self._closing.wait(min(max(pause, asked), _MAX_PAUSE)):
                time.sleep(_PAUSES[0])  # close() waits: the remaining attempts follow each other soon
        return problem

    def _tell(self, alert: Alert, problem: str) -> None:
        if not self._has_told:
            self._has_told = True
            text = "the webhook has not confirmed alert %r of step %d: %s."
            logger.warning(f"wandb_gradwatch: {text}", alert.title, alert.step, problem)


def _asked_pause(response: Any) -> float:
    """The pause in seconds that the server asks for; 0 if it asks for none that can be understood."""
    from urllib3.exceptions import InvalidHeader
    from urllib3.util import Retry

    with suppress(InvalidHeader):
        return Retry().parse_retry_after(response.headers.get("Retry-After", "0"))
    return 0.0


@contextmanager
def _silenced() -> Iterator[None]:
    """Drop what requests and urllib3 log in this thread: they log the path of the URL, which is the secret."""
    thread, loggers = threading.get_ident(), logging.root.manager.loggerDict
    silenced = [logging.getLogger(name) for name in [*loggers] if name.partition(".")[0] in ("requests", "urllib3")]

    def is_of_another_thread(_: logging.LogRecord) -> bool:
        return threading.get_ident() != thread

    for each in silenced:
        each.addFilter(is_of_another_thread)
    try:
        yield
    finally:
        for each in silenced:
            each.removeFilter(is_of_another_thread)


def _adapter() -> Any:
    """An adapter for `requests` whose connections print nothing even if `http.client` is told to print requests."""
    from requests.adapters import HTTPAdapter

    class SilentAdapter(HTTPAdapter):
        def get_connection_with_tls_context(self, *args: Any, **kwargs: Any) -> Any:
            pool: Any = super().get_connection_with_tls_context(*args, **kwargs)
            if pool.ConnectionCls.debuglevel:
                pool.ConnectionCls = type("SilentConnection", (pool.ConnectionCls,), {"debuglevel": 0})
            return pool

    return SilentAdapter()
