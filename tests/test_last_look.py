"""Faults after the last sampled step are reported when the watcher is queried, and at the end."""

from __future__ import annotations

import math
import threading

import pytest
import torch
from gradients import Chosen, step, watch
from torch.optim import SGD

from wandb_gradwatch import Watcher
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


def test_the_alert_names_the_parameters_and_what_was_not_measured() -> None:
    model = Chosen(a=2, b=3)
    watcher, sink = watch(model, sample_every=1000)
    step(model, SGD(model.parameters(), lr=0.1), a=[1.0, 1.0], b=[1.0] * 3)
    with torch.no_grad():
        model.b[1] = math.inf
    watcher.remove()
    (alert,) = sink.alerts
    fact, interval, _ = alert.text.split("\n")
    assert fact == "Step 1: NaN or Inf in 1 of 2 parameters: b."
    assert interval == "What happened after step 0 was not measured."


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
