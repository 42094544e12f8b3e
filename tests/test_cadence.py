"""When to sample, when to take a histogram, when to flush; and how a budget stretches that."""

from __future__ import annotations

import re

import pytest
import torch
from gradients import Chosen, step, watch

from wandb_gradwatch._capture.cadence import Budget, Cadence


def due(question, steps=range(1, 13)):
    return [number for number in steps if question(number)]


def test_everything_is_counted_in_optimizer_steps():
    cadence = Cadence(sample_every=3, log_every=6)
    assert due(cadence.sample_due) == [3, 6, 9, 12]
    assert due(cadence.flush_due) == [6, 12]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"sample_every": 1, "log_every": 4}, [4, 8, 12]),
        ({"sample_every": 3, "log_every": 4}, [3, 6, 12]),  # 9 is not the last sample before the flush at 12
        ({"sample_every": 1, "log_every": 4, "histogram_every": 0}, []),
        ({"sample_every": 1, "log_every": 4, "histogram_every": 6}, [6, 12]),
        ({"sample_every": 4, "log_every": 4, "histogram_every": 6}, [8, 12]),  # rounded up to the next sample
    ],
)
def test_histograms(options, expected):
    cadence = Cadence(**options)
    samples = due(cadence.sample_due)
    assert [number for number in samples if cadence.histogram_due(number, first_of_window=False)] == expected


def test_the_first_sample_of_a_window_has_a_histogram_by_default_only():
    assert Cadence().histogram_due(1, first_of_window=True)
    assert not Cadence(histogram_every=10).histogram_due(1, first_of_window=True)


@pytest.mark.parametrize("value", [0, -0.1, 1, 1.5, True, "1%"])
def test_a_budget_that_makes_no_sense(value):
    with pytest.raises(ValueError, match=re.escape(f"max_overhead={value!r} must be a share between 0 and 1")):
        Budget(Cadence(), value)


def simulate(budget, cadence, *, step_seconds, sample_seconds, steps=4000, histogram_seconds=0.0):
    """A training with a clock of its own; returns the last cadence and the overhead of the second half."""
    now = spent = 0.0
    half = None
    for number in range(1, steps + 1):
        now += step_seconds
        if cadence.sample_due(number):
            cost = sample_seconds
            if cadence.histogram_every == 1:
                cost += histogram_seconds
            now, spent = now + cost, spent + cost
            cadence = budget.after_sample(cadence, number, now, spent)
        if number == steps // 2:
            half = (now, spent)
    return cadence, (spent - half[1]) / (now - half[0] - (spent - half[1]))


@pytest.mark.parametrize("ratio", [0.001, 0.03, 0.3, 2.0])
def test_the_budget_holds(ratio):
    asked = Cadence()
    cadence, overhead = simulate(Budget(asked, 0.01), asked, step_seconds=0.1, sample_seconds=0.1 * ratio)
    assert overhead <= 0.01 * (1 + 1e-6)
    # No more is thinned than needed: a cadence twice as fast would break the limit, unless it is the user's own.
    assert cadence.sample_every == 1 or 2 * overhead > 0.01 * (1 + 1e-6)


def test_histograms_are_thinned_before_samples():
    asked = Cadence(histogram_every=1)
    budget = Budget(asked, 0.01)
    cadence, overhead = simulate(budget, asked, step_seconds=0.1, sample_seconds=0.0005, histogram_seconds=0.05)
    assert cadence.histogram_every is None
    assert cadence.sample_every == 1
    assert overhead <= 0.01


def test_nothing_is_measured_oftener_than_asked():
    asked = Cadence(sample_every=7)
    cadence, _ = simulate(Budget(asked, 0.5), asked, step_seconds=0.1, sample_seconds=1e-6)
    assert cadence.sample_every == 7


def test_the_cadence_comes_back_when_steps_become_slow():
    asked = Cadence()
    budget = Budget(asked, 0.01)
    stretched, _ = simulate(budget, asked, step_seconds=0.001, sample_seconds=0.001)
    assert stretched.sample_every >= 100
    now, spent = 1e6, 1e3
    cadence = stretched
    for number in range(10_000, 200_000, 1):
        now += 10.0
        if cadence.sample_due(number):
            now, spent = now + 0.001, spent + 0.001
            cadence = budget.after_sample(cadence, number, now, spent)
    assert cadence.sample_every == 1


def test_the_cadence_that_results_is_logged():
    model = Chosen(a=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    watcher, sink = watch(model, max_overhead=1e-6)
    for _ in range(40):
        step(model, optimizer, a=[1])
    watcher.remove()
    cadences = sink.merged().metrics["gradwatch/sample_every"]
    assert cadences[0] == 1
    assert cadences[-1] > 1
    assert len(sink.merged()) < 40
