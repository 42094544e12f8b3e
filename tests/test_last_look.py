"""Faults after the last sampled step are reported when the watcher is queried, and at the end."""

from __future__ import annotations

import gc
import math
import threading
import weakref

import pytest
import torch
from gradients import Chosen, step, watch
from torch import nn
from torch.optim import SGD

import wandb_gradwatch
from wandb_gradwatch import MemorySink, Watcher
from wandb_gradwatch._capture import wiring


def told(broken_at: int | None, *, sample_every: int, steps: int = 15, ask: object = Watcher.remove) -> list[tuple]:
    """Title, step and level of the alerts of a loop whose gradient is NaN from one step on."""
    model = Chosen(a=2, b=3)
    optimizer = SGD(model.parameters(), lr=0.1)
    watcher, sink = watch(model, rules=None, sample_every=sample_every, log_every=1000)
    for number in range(1, steps + 1):
        step(model, optimizer, a=[math.nan if broken_at and number >= broken_at else 1.0, 1.0], b=[1.0] * 3)
    ask(watcher)
    alerts = [(alert.title, alert.step, alert.level) for alert in sink.alerts]
    watcher.remove()
    assert len(sink.alerts) == len(alerts)  # said once
    return alerts


@pytest.mark.parametrize("ask", [Watcher.remove, Watcher.flush])
@pytest.mark.parametrize("broken_at", [11, 15])
def test_parameters_that_broke_after_the_last_sample_are_told(broken_at: int, ask: object) -> None:
    assert told(broken_at, sample_every=10, ask=ask) == [("NaN gradient", 15, "ERROR")]


def test_a_training_that_was_never_measured_is_told_as_well() -> None:
    assert told(3, sample_every=1000) == [("NaN gradient", 15, "ERROR")]


def test_what_a_sample_has_told_is_not_told_again() -> None:
    assert told(8, sample_every=10) == [("NaN gradient", 10, "ERROR")]


@pytest.mark.parametrize("sample_every", [1, 10, 1000])
def test_a_sound_training_is_silent(sample_every: int) -> None:
    assert told(None, sample_every=sample_every) == []


class Parts(nn.Module):
    """A model with parameters of its own, and of modules that are freed after it."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
        self.scale = nn.Parameter(torch.ones(1))
        self.itself = [self] if FREED_BY_COLLECTOR else None

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(inputs)) * self.scale


FREED_BY_COLLECTOR = False


@pytest.mark.parametrize("in_a_cycle", [False, True])
@pytest.mark.parametrize("sample_every", [7, 1000])
def test_a_model_that_ends_with_its_function_is_looked_at_a_last_time(monkeypatch, in_a_cycle, sample_every) -> None:
    monkeypatch.setitem(globals(), "FREED_BY_COLLECTOR", in_a_cycle)
    sink, held = MemorySink(), []

    def main() -> None:
        model = Parts()
        held.extend(map(weakref.ref, [*model.parameters(), *model.modules()]))
        optimizer = SGD(model.parameters(), lr=0.1)
        wandb_gradwatch.watch(model, sinks=[sink], rules=None, sample_every=sample_every, log_every=10**6)
        for number in range(300):
            optimizer.zero_grad()
            model(torch.full((4, 2), math.nan if number == 297 else 1.0)).square().mean().backward()
            optimizer.step()

    main()
    gc.collect()
    assert [(alert.title, alert.step) for alert in sink.alerts] == [("NaN gradient", 300)]
    assert sink.closed
    assert not [one for one in held if one() is not None]  # and nothing keeps it alive


def test_what_is_removed_from_a_model_is_freed_at_once() -> None:
    model = Parts()
    watcher, _ = watch(model, sample_every=1)
    removed = [weakref.ref(one) for one in (*model.b, *model.b.parameters(), model.scale)]
    model.b, model.scale = nn.Linear(2, 1), nn.Parameter(torch.zeros(1))
    assert not [one for one in removed if one() is not None]
    rest = [weakref.ref(one) for one in model.parameters()]
    watcher.remove()
    del model
    assert not [one for one in rest if one() is not None]


def test_one_of_several_models_is_freed_at_once_and_the_last_is_looked_at() -> None:
    models = [nn.Linear(2, 1), nn.Linear(2, 1)]
    _, sink = watch(models, sample_every=1000)
    first, last = ([weakref.ref(one) for one in model.parameters()] for model in models)
    del models[0]
    assert not [one for one in first if one() is not None]
    models[0](torch.full((1, 2), math.nan)).sum().backward()
    SGD(models[0].parameters(), lr=0.1).step()
    del models[0]
    gc.collect()
    assert [alert.title for alert in sink.alerts] == ["NaN gradient"]
    assert not [one for one in last if one() is not None]


def test_a_training_without_any_gradient_is_told_of_when_its_model_ends(caplog) -> None:
    def main() -> None:
        model = Chosen(a=2)
        watch(model)
        with torch.no_grad():
            for _ in range(20):
                model.a += 0.1

    main()
    assert "no gradient was seen" in caplog.text


def test_the_alert_names_the_parameters_and_what_was_not_measured() -> None:
    model = Chosen(a=2, b=3)
    watcher, sink = watch(model, sample_every=1000)
    step(model, SGD(model.parameters(), lr=0.1), a=[1.0, 1.0], b=[1.0] * 3)
    with torch.no_grad():
        model.b[1] = math.inf
    watcher.remove()
    (alert,) = sink.alerts
    assert alert.step == 1
    assert "NaN or Inf in 1 of 2 parameters: b; what happened after step 0 was not measured" in alert.text


def test_parameters_that_hold_nothing_are_not_asked() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.LazyLinear(2), torch.nn.Linear(2, 2, device="meta"))
    watcher, sink = watch(model, sample_every=1000)
    optimizer = SGD(model[0].parameters(), lr=0.1)
    model[0](torch.ones(1, 2)).sum().backward()
    optimizer.step()
    watcher.remove()
    assert not sink.alerts
    assert sink.closed


def test_nothing_is_looked_at_while_another_thread_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be giving a parameter's memory back: what was asked for is told when that thread is done."""
    looks: list[object] = []
    monkeypatch.setattr(wiring, "_slots_that_are_broken", lambda entries: looks.append(entries) or [])
    model = Chosen(a=2, b=3)
    watcher, _ = watch(model, sample_every=1000)
    has_stepped, may_end = threading.Event(), threading.Event()

    def train() -> None:
        step(model, SGD(model.parameters(), lr=0.1), a=[1.0, 1.0], b=[1.0] * 3)
        has_stepped.set()
        may_end.wait(60)

    thread = threading.Thread(target=train)
    thread.start()
    assert has_stepped.wait(60)
    watcher.flush()
    assert not looks
    may_end.set()
    thread.join()
    watcher.remove()
    assert len(looks) == 1


@pytest.mark.parametrize(("num", "is_told"), [(19, False), (20, True)])
def test_a_run_that_only_accumulates_is_told_at_its_end(num: int, is_told: bool) -> None:
    model = Chosen(a=2)
    watcher, sink = watch(model)
    for _ in range(num):
        (model.a * 1.0).sum().backward()  # step() is never called, nor zero_grad()
    watcher.remove()
    assert [alert.incident.cause for alert in sink.alerts if alert.incident] == ["no_step"] * is_told
