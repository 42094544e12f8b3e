"""The webhook: alerts arrive, training does not wait, and the URL is not revealed."""

from __future__ import annotations

import json
import logging
import pickle
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import requests
import responses
from windows import window

from wandb_gradwatch.rules import Alert
from wandb_gradwatch.sinks import Sink, _webhook
from wandb_gradwatch.sinks._webhook import WebhookSink

URL = "https://hooks.example.com/services/T000/B000/the-secret"
ALERT = Alert("NaN gradient", "layer b holds 1 NaN", step=7, level="ERROR")


@pytest.fixture
def hook(monkeypatch: pytest.MonkeyPatch) -> Iterator[responses.RequestsMock]:
    monkeypatch.setattr(_webhook, "_PAUSE", 0.0)
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
    monkeypatch.setattr(_webhook, "_PAUSE", 0.0)
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
    assert said() == ["wandb_gradwatch: the webhook did not accept alert 'NaN gradient' of step 7: HTTP 404."]


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
    assert said() == ["wandb_gradwatch: the webhook did not accept alert 'NaN gradient' of step 7: HTTP 503."]


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
    assert said() == ["wandb_gradwatch: the webhook is too slow: 2 alerts wait; new ones are dropped."]


def test_closing_takes_a_bounded_time(hook: responses.RequestsMock, said: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    blocked = _Blocked(hook)
    sink = WebhookSink(URL)
    sink.alert(ALERT)
    assert blocked.asked.wait(30)
    monkeypatch.setattr(_webhook, "_TIMEOUT", 0.01)
    sink.close()
    assert said() == ["wandb_gradwatch: the webhook did not answer in 0.01 s: alerts may be missing."]
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
    assert "did not accept alert" in caplog.text
    assert "the-secret" not in caplog.text
    with pytest.raises(TypeError, match="holds a secret and a thread; it cannot be pickled or copied"):
        pickle.dumps(sink)


def test_the_url_is_not_in_urllib3s_debug_log(loopback: Any, caplog: pytest.LogCaptureFixture) -> None:
    # A real request, as urllib3 writes "POST /services/..." at DEBUG; the server answers 404.
    secret = f"{loopback.url}/services/the-secret"
    with caplog.at_level(logging.DEBUG):
        requests.post(secret, json={})
        assert "the-secret" in caplog.text  # the control: the log would hold the secret
        caplog.clear()
        sink = WebhookSink(secret)
        sink.alert(ALERT)
        sink.close()
    assert "HTTP 404" in caplog.text
    assert "the-secret" not in caplog.text


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
    assert "did not accept alert 'NaN gradient' of step 7: ValueError" in caplog.text
    assert len(hook.calls) == 2
    assert "the-secret" not in caplog.text + "".join(capfd.readouterr())


def test_a_variable_that_is_not_set_is_asked_for() -> None:
    with pytest.raises(TypeError, match=r"must be a string, but got NoneType; check that the variable is set"):
        WebhookSink(None)  # type: ignore[arg-type]  # what os.environ.get gives


def test_a_url_that_is_none_is_not_shown() -> None:
    with pytest.raises(ValueError, match=r"must begin with https:// or http://") as caught:
        WebhookSink("the-secret")
    assert "the-secret" not in str(caught.value)
