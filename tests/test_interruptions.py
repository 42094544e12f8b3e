"""What a signal handler of the user's raises reaches the training, wherever the signal has come."""

from __future__ import annotations

import functools
import gc
import os
import signal
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
import torch
from gradients import Chosen, step, watch
from torch.optim import SGD

from wandb_gradwatch import MemorySink, Sink, rule
from wandb_gradwatch._measure import measure as measure_module
from wandb_gradwatch._measure import reference
from wandb_gradwatch._runtime import error_boundary
from wandb_gradwatch.metrics import Metric


class PreemptedError(Exception):
    """As clusters announce it: by a signal, whose handler raises."""


def handle(*_: object) -> None:
    raise PreemptedError


class Handler:
    def __call__(self, *_: object) -> None:
        raise PreemptedError

    method = __call__


HANDLERS = {
    "a function": handle,
    "a partial function": functools.partial(handle, 1),
    "an object": Handler(),
    "a method": Handler().method,
}


class Once:
    """Sends the signal at its second call."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, *_: object) -> None:
        self.calls += 1
        if self.calls == 2:
            os.kill(os.getpid(), signal.SIGUSR1)


class SignalledSink(Sink):
    def __init__(self, send: Callable[[], None]) -> None:
        self.write = lambda snapshot: send()


def signalled(where: str, send: Once) -> dict[str, object]:
    if where == "a sink":
        return {"sinks": [SignalledSink(send), MemorySink()]}
    if where == "a rule":
        return {"rules": [rule(title="any")(send)]}
    return {"metrics": [Metric("any", lambda tensor: (send(), tensor.sum())[1], on="gradient")]}


@pytest.mark.skipif(not hasattr(signal, "SIGUSR1"), reason="the system has no such signal")
def test_kernels_that_a_signal_interrupts_have_not_failed(
    handler: None, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    send = Once()
    kernels = SimpleNamespace(measure=lambda *given, **options: (send(), reference.measure(*given, **options))[1])
    monkeypatch.setattr(measure_module, "resolve_backend", lambda *_: "compiled")
    monkeypatch.setattr(measure_module, "_module", lambda _: kernels)
    measure_module.measure([torch.ones(2)], None)
    with pytest.raises(PreemptedError):
        measure_module.measure([torch.ones(2)], None)
    assert send.calls == 2
    assert not recwarn


@pytest.fixture(params=HANDLERS)
def handler(request: pytest.FixtureRequest) -> Iterator[None]:
    before = signal.signal(signal.SIGUSR1, HANDLERS[request.param])
    yield
    signal.signal(signal.SIGUSR1, before)


@pytest.mark.skipif(not hasattr(signal, "SIGUSR1"), reason="the system has no such signal")
@pytest.mark.parametrize("where", ["a sink", "a rule", "a metric"])
def test_what_a_signal_handler_raises_reaches_the_training_and_watching_goes_on(where: str, handler: None) -> None:
    model = Chosen(a=1)
    send = Once()
    watcher, _ = watch(model, **signalled(where, send))
    optimizer = SGD(model.parameters(), lr=0.5)
    raised = 0
    for _ in range(6):
        try:
            step(model, optimizer, a=[1.0])
        except PreemptedError:
            raised += 1
    assert raised == 1
    assert send.calls > 2, "what was interrupted is not dropped"
    assert watcher.step == (5 if where == "a metric" else 6)  # whose backward raises, so that the loop makes no step
    watcher.remove()


@pytest.mark.parametrize(
    ("owner", "name", "which"),
    [
        (gc, "disable", 1),
        (torch, "is_grad_enabled", 1),
        (error_boundary, "_set_grad_enabled", 1),
        (error_boundary, "_set_grad_enabled", 2),
        (gc, "enable", 1),
    ],
)
def test_ctrl_c_leaves_autograd_the_collector_and_the_watcher_as_they_were(
    owner: object, name: str, which: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, calls = getattr(owner, name), 0

    def then_interrupted(*given: object) -> object:
        nonlocal calls
        calls += 1
        answer = original(*given)
        if calls == which:
            raise KeyboardInterrupt  # Python looks for signals when a call of a function of C has returned
        return answer

    boundary = error_boundary.ErrorBoundary(lambda error: None)
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, then_interrupted)
        with pytest.raises(KeyboardInterrupt):
            boundary.run(list)
    try:
        assert torch.is_grad_enabled(), "otherwise no backward works any more"
        assert gc.isenabled(), "otherwise memory grows for good"
    finally:
        torch.set_grad_enabled(True)
        gc.enable()
    before = boundary.seconds_spent
    boundary.run(list)
    assert boundary.seconds_spent > before, "the next call is no call inside another"
