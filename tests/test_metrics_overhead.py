"""The measured overhead includes the time that metrics take in forwards, shown with a simulated clock."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from metric_probes import train, watch
from torch import nn

from wandb_gradwatch.metrics import Metric, Reference, Updates
from wandb_gradwatch.sinks import MemorySink


class Clock:
    """A clock that advances only when a test advances it."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def passes(self, seconds: float):
        def work(tensor: torch.Tensor) -> torch.Tensor:
            self.now += seconds
            return tensor.sum()

        return work


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    for user in (
        "_runtime.error_boundary",
        "_capture.sampler",
        "_capture.commits",
        "_capture.probes",
        "_pipeline.pipeline",
    ):
        monkeypatch.setattr(f"wandb_gradwatch.{user}.time", SimpleNamespace(perf_counter=clock))
    return clock


class Slow(nn.Module):
    """A model whose own forward takes six seconds."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.linear, self.clock = nn.Linear(2, 1), clock

    def forward(self, x):
        self.clock.now += 6.0
        return self.linear(x)


def ratios(metrics, clock, model=None, **options):
    model = Slow(clock) if model is None else model
    watcher, sink = watch(model, metrics(model), **options)
    train(model, [torch.ones(1, 2)] * 2)
    watcher.remove()
    return [snapshot.overhead_ratio for snapshot in sink.snapshots]


def test_a_metric_of_activations_is_counted(clock):
    # Two seconds in the hook, and six in the model's own forward.
    on_activation = lambda model: [Metric("x", clock.passes(2), on="activation", match="linear")]  # noqa: E731
    assert ratios(on_activation, clock) == [0.25, 0.25]


def test_the_watcher_reports_the_seconds_of_each_metric_of_a_dropped_one_too(clock, monkeypatch):
    model = Slow(clock)
    metrics = [
        Metric("forward", clock.passes(2), on="activation", match="linear"),
        Metric("backward", clock.passes(3), on="gradient", match="bias"),
        Updates(),
    ]
    watcher, _ = watch(model, metrics)
    before = sum(watcher.metric_seconds.values())
    train(model, [torch.ones(1, 2)] * 2)
    found = watcher.metric_seconds
    assert before == 0
    assert found == {"FunctionMetrics(forward, backward)": 2 * (2 + 3), "Updates()": 0}
    probes = watcher._sampler.parts.probes
    (with_hooks,) = [probe for probe in probes.active if probe.seconds_spent]
    monkeypatch.setattr(type(with_hooks), "take", lambda self: 1 / 0)
    train(model, [torch.ones(1, 2)])
    watcher.remove()
    assert with_hooks not in probes.active
    assert watcher.metric_seconds == {"FunctionMetrics(forward, backward)": 3 * (2 + 3), "Updates()": 0}


def test_the_forward_of_a_reference_is_counted_once(clock):
    model = Slow(clock)
    frozen = Slow(clock)
    assert ratios(lambda model: [Reference(model, frozen, activations="linear")], clock, model) == [0.5, 0.5]


def test_there_is_one_overhead_that_of_the_time_since_watch(clock):
    slow, fast = clock.passes(2), clock.passes(0)
    metric = Metric("x", slow, on="activation", match="linear")
    model = Slow(clock)
    watcher, sink = watch(model, [metric])
    train(model, [torch.ones(1, 2)])
    object.__setattr__(metric, "fn", fast)
    train(model, [torch.ones(1, 2)] * 2)
    # 2 of 8 seconds, then 2 of 14 and 2 of 20: not 0 of the second and third window's 6.
    assert [snapshot.overhead_ratio for snapshot in sink.snapshots] == pytest.approx([2 / 8, 2 / 14, 2 / 20])
    assert watcher.summary().overhead_ratio == sink.snapshots[-1].overhead_ratio
    watcher.remove()


def test_what_a_sink_takes_in_the_users_own_calls_is_counted(clock, monkeypatch):
    owed = []
    monkeypatch.setattr(MemorySink, "pop_seconds", lambda _: owed.pop() if owed else 0.0)
    model = Slow(clock)
    watcher, sink = watch(model, [])
    train(model, [torch.ones(1, 2)])
    clock.now += 2.0  # the sink works while the user logs
    owed.append(2.0)
    train(model, [torch.ones(1, 2)])
    watcher.remove()
    assert [snapshot.overhead_ratio for snapshot in sink.snapshots] == pytest.approx([0.0, 2 / 14])


def test_without_probes_no_forward_is_counted(clock):
    assert ratios(lambda model: [], clock) == [0.0, 0.0]


def test_max_overhead_thins_samples_whose_cost_is_in_the_forward(clock):
    model = Slow(clock)
    metrics = [Metric("x", clock.passes(6), on="activation", match="linear")]
    watcher, sink = watch(model, metrics, sample_every=None, log_every=None, max_overhead=0.1)
    train(model, [torch.ones(1, 2)] * 400)
    watcher.remove()
    # A sample takes six seconds, and so does a step. A tenth of the 2,400 seconds of 400 steps, and one more, pay
    # for 40 samples, of which a quarter may be kept back.
    assert 30 <= len(sink.merged()) <= 40
