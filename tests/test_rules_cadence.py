"""Rules compare a sample with samples that are as far apart: ten consecutive steps say little about a step 100 later.

The default cadence samples the first ten steps, and then as often as a budget allows: every 100th for a tiny model.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from grad_samples import of_norms, sample_of, together
from torch import nn
from wandb_gradwatch._diagnosis import diagnose, with_diagnosis

import wandb_gradwatch
from wandb_gradwatch import MemorySink
from wandb_gradwatch._analysis.baseline import evenly_apart, steady_growth
from wandb_gradwatch.rules import ExplodingGradient, FastParameters, VanishingGradient
from wandb_gradwatch.snapshot import Snapshot, keys

FIRST = list(range(1, 11))


def at(steps: Sequence[int], norms: list[float]) -> Snapshot:
    return replace(of_norms(norms), steps=np.array(steps))


@pytest.mark.parametrize(
    ("steps", "kept"),
    [
        ([], []),
        ([7], [7]),
        (FIRST, FIRST),
        ([*FIRST, 110], [10, 110]),  # at least 50 apart, half of 110 - 10
        ([*FIRST, 110, 210, 310], [10, 110, 210, 310]),
        ([*FIRST, 110, 150, 210], [10, 110, 150, 210]),  # 30 apart
        ([100, 200, 201, 202, 203], [100, 200, 201, 202, 203]),  # a sample in a burst is compared with all samples
        ([100, 200, 201, 202, 302], [100, 202, 302]),  # later samples take the burst as one sample
    ],
)
def test_samples_that_are_half_as_far_apart_as_the_last_two_are_the_measure(steps: list[int], kept: list[int]) -> None:
    assert [steps[place] for place in evenly_apart(steps)] == kept


@pytest.mark.parametrize(("gap", "factor", "told"), [(1, 18, 1), (100, 18, 0), (100, 180, 0), (100, 220, 1)])
def test_what_ten_steps_in_a_row_have_shown_is_no_limit_for_the_hundredth_after_them(
    gap: int, factor: float, told: int
) -> None:
    """Norms often grow tenfold in the first hundred steps. At that distance the limit is a factor of 20 * sqrt(100)."""
    later = [10 + gap * number for number in (1, 2, 3)]
    alerts = list(ExplodingGradient().check(at([*FIRST, *later], [1.0] * 10 + [factor] * 3)))
    assert bool(alerts) == told


def test_after_five_samples_at_its_own_distance_a_spike_is_told_as_in_any_run() -> None:
    steps = [*FIRST, *range(110, 1010, 100)]
    norms = [1.0] * 10 + [5.0] * 7 + [60.0] * 2  # 12 times the record, twice
    assert [alert.step for alert in ExplodingGradient().check(at(steps, norms))] == [810]


@pytest.mark.parametrize(
    ("steps", "is_rise"), [(range(12), True), (range(0, 240, 20), False), ([*range(0, 220, 20), 201], False)]
)
def test_a_rise_over_hundreds_of_steps_is_a_slow_one_however_few_samples_show_it(
    steps: Sequence[int], is_rise: bool
) -> None:
    """A factor of 30 in 7 samples: too much for 7 steps, but below the limit for 120 steps, which is 5 * 20.

    Nor do two consecutive samples at the end, as at the beginning of a burst, make it a fast one.
    """
    norms = np.log([1.0] * 5 + [30 ** (number / 6) for number in range(7)])
    assert (steady_growth(norms.tolist(), steps, factor=20.0) is not None) is is_rise


def test_a_training_that_converges_between_two_samples_has_not_vanished() -> None:
    """The norm falls tenfold in 20 steps, down to 1e-8. The mean of the norms above the floor lags ten samples behind.

    A norm that falls from 1 to 1e-8 between two of these samples has vanished.
    """
    steps = range(0, 600, 20)
    converging = [max(10.0**-number, 1e-8) for number in range(len(steps))]
    assert not list(VanishingGradient().check(at(steps, converging)))
    vanished = [1.0] * 10 + [1e-8] * (len(steps) - 10)
    assert next(iter(VanishingGradient().check(at(steps, vanished)))).step == steps[19]


def test_parameters_that_moved_a_fifth_in_a_hundred_steps_were_not_written_at_once() -> None:
    """A change of 0.2 in 100 updates is 0.2 % each, as in the first updates: the optimizer has not lost its state."""
    steps = [*range(1, 11), 110, 210]
    sizes = [1.0 + 0.001 * step if step <= 10 else 1.2 + 0.001 * step for step in steps]
    norms = [1.0] * 10 + [300.0] * 2
    history = together(
        [
            sample_of({"a": [norm]}, step=step, parameters={"a": np.array([size])})
            for step, norm, size in zip(steps, norms, sizes, strict=True)
        ]
    )
    history = replace(history, metrics={keys.LEARNING_RATE: np.full(len(steps), 0.1)})
    found = list(ExplodingGradient().check(history))
    assert found
    assert "lost" not in with_diagnosis(found[0], history).text


def every_20th(
    sizes: list[float], *, rates: list[float] | None = None, gradients: list[float] | None = None
) -> Snapshot:
    """Return samples of one parameter of these sizes, 20 steps apart."""
    samples = [
        sample_of({"a.weight": [gradient] * 4}, step=20 * number, parameters={"a.weight": np.full(4, size)})
        for number, (size, gradient) in enumerate(zip(sizes, gradients or [1.0] * len(sizes), strict=True), 1)
    ]
    history = together(samples)
    return history if rates is None else replace(history, metrics={keys.LEARNING_RATE: np.array(rates)})


@pytest.mark.parametrize(("size", "is_the_rate"), [(3.0, True), (1.1, False)])
def test_units_that_died_after_a_rate_that_rose_between_samples_died_of_it(size: float, is_the_rate: bool) -> None:
    """Three times the norm in 20 updates is 5.6 % each: large for all updates together, but not for each alone."""
    history = every_20th([1.0] * 6 + [size] * 3, rates=[0.01] * 5 + [1.0] * 4, gradients=[1.0] * 6 + [0.0] * 3)
    found = [one.cause for one in diagnose(history) if one.explains("Dead gradient")]
    assert (found[:1] == ["learning rate too high"]) is is_the_rate


def test_what_no_sample_has_seen_is_said_of_all_its_steps_and_may_be_a_batch() -> None:
    (found,) = diagnose(every_20th([1.0] * 6 + [1e6] * 3))
    assert "the updates of steps 120 to 139 changed the parameters' norm by 1e8 %" in found.in_words
    assert "or one bad batch that was not measured" in found.in_words


def test_of_steps_that_were_not_measured_nobody_knows_that_the_gradient_was_usual() -> None:
    rates = [0.01] * 12
    written = [one.cause for one in diagnose(every_20th([1.0 + 1e-3 * n for n in range(8)] + [9.0] * 4, rates=rates))]
    assert not [cause for cause in written if "lost" in cause]


@pytest.mark.parametrize(("later", "told"), [([110, 111], []), ([110, 111, 112, 113], [113])])
def test_what_the_first_steps_may_grow_is_not_held_against_them_later(later: list[int], told: list[int]) -> None:
    """Growth of 15 % in steps 8 to 10, where the limit is 20 %, then 1.1 % per step up to 110, and 15 % from 112 on."""
    steps, size, history = [*FIRST, *later], 1.0, []
    for before, step in itertools.pairwise([0, *steps]):
        size *= 1.15 if step in (8, 9, 10, 112, 113) else 1.011 ** (step - before) if step > 10 else 1.0
        gradients, parameters = dict.fromkeys("ab", np.ones(300)), {"a": np.full(300, size), "b": np.ones(300)}
        history.append(sample_of(gradients, step=step, parameters=parameters))
    assert [alert.step for alert in FastParameters().check(together(history))] == told


@pytest.mark.parametrize("gap", [50, 100])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_deep_mlp_whose_gradient_grows_as_it_learns_is_silent(seed: int, gap: int) -> None:
    """The parameter's norm is 0.06 in the first ten steps, and 1 a hundred steps later."""
    torch.manual_seed(seed)
    sizes = [16, *[60] * 8, 8]
    layers = [layer for pair in itertools.pairwise(sizes) for layer in (nn.Linear(*pair), nn.ReLU())][:-1]
    model = nn.Sequential(*layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    inputs, targets = torch.randn(64, 16), torch.randn(64, 8)
    memory = MemorySink()
    with wandb_gradwatch.watch(model, sinks=[memory], sample_every=lambda step: 1 if step <= 10 else gap):
        for _ in range(410):
            optimizer.zero_grad()
            (model(inputs) - targets).square().mean().backward()
            optimizer.step()
    assert [alert.title for alert in memory.alerts if alert.level != "INFO"] == []
