"""An exception that the user's signal handler raises reaches the training, even if the monitor's code is running."""

from __future__ import annotations

import functools
import gc
import inspect
import itertools
import os
import signal
import sys
from collections.abc import Callable, Iterator
from types import FrameType, SimpleNamespace
from typing import Any

import pytest
import torch
from gradients import Chosen, step, watch
from torch.optim import SGD

import wandb_gradwatch
from wandb_gradwatch import MemorySink, Sink, rule
from wandb_gradwatch._measure import measure as measure_module
from wandb_gradwatch._measure import reference
from wandb_gradwatch._runtime import error_boundary
from wandb_gradwatch.metrics import Activations, Metric, Updates


class PreemptedError(Exception):
    """Raised by a signal handler, like handlers for preemption on clusters."""


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
    """Send the signal at the second call."""

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


def interrupted_at_call(number: int, run: Callable[[], object]) -> bool:
    """Run a function with Ctrl-C at the n-th call in the package; return False if there are fewer calls."""
    calls = 0

    def count(frame: FrameType, event: str, _: object) -> None:
        nonlocal calls
        code = frame.f_code
        is_ours = "wandb_gradwatch" in code.co_filename and not code.co_flags & inspect.CO_GENERATOR
        if event in ("call", "c_return") and is_ours:
            calls += 1
            if calls == number:
                raise KeyboardInterrupt

    gc.disable()  # in the callbacks of what it frees, Python swallows Ctrl-C
    sys.setprofile(count)
    try:
        run()
    except KeyboardInterrupt:
        pass
    finally:
        sys.setprofile(None)
        gc.enable()
    return calls >= number


def number_of_hooks(model: torch.nn.Module) -> int:
    on_parameters = sum(len(parameter._backward_hooks or ()) for parameter in model.parameters())
    return on_parameters + sum(len(module._forward_hooks) for module in model.modules())


@pytest.mark.parametrize("interrupted", ["watch", "a step", "remove"])
def test_ctrl_c_at_any_call_leaves_no_hook_behind_that_remove_does_not_find(interrupted: str) -> None:
    for number in itertools.count(1, 7):
        model = torch.nn.Sequential(Chosen(a=1), Chosen(a=1))
        optimizer = SGD(model.parameters(), lr=0.0)
        watchers: list[wandb_gradwatch.Watcher] = []

        def start(model: torch.nn.Module = model, watchers: list[wandb_gradwatch.Watcher] = watchers) -> None:
            watchers.append(watch(model, metrics=[Activations(r"^\d$"), Updates()])[0])

        def train(model: Any = model, optimizer: SGD = optimizer) -> None:
            optimizer.zero_grad()
            (model[0].loss(a=[1.0]) + model[1].loss(a=[1.0])).backward()
            optimizer.step()

        if interrupted == "watch":
            goes_on = interrupted_at_call(number, start)
        else:
            start()
            train()
            goes_on = interrupted_at_call(number, train if interrupted == "a step" else watchers[0].remove)
        assert torch.is_grad_enabled()
        train()
        wandb_gradwatch.unwatch()
        for watcher in watchers:
            watcher.remove()
        assert number_of_hooks(model) == 0, f"after Ctrl-C at call {number}"
        if not goes_on:
            break
    assert number > 100
