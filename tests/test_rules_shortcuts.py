"""Rules skip a closer look at unremarkable samples: their alerts equal those of looking closely at all samples."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from wandb_gradwatch._measure.columns import NUM_COLUMNS, Column
from wandb_gradwatch._pipeline.alert_manager import AlertManager
from wandb_gradwatch.rules import default_rules
from wandb_gradwatch.snapshot import Snapshot, keys
from wandb_gradwatch.snapshot._shapes import select_samples

# S samples, P parameters, C columns

LAYERS, STEPS, FAULT = 8, 180, 60
NAMES = tuple(f"layers.{number}.{part}" for number in range(LAYERS) for part in ("weight", "bias"))
SIZE_P = np.array([4096.0, 64.0] * LAYERS)

Change = Callable[[np.ndarray, dict[str, np.ndarray]], None]  # changes rows [S, P, C] from the fault on, and metrics


def training(change: Change) -> Snapshot:
    """Return samples of layers with norms that scatter by a tenth and slowly growing parameters, then with a fault."""
    chance = np.random.default_rng(0)
    norm_SP = np.exp(np.linspace(-3, -2, len(NAMES)) + chance.normal(0, 0.1, (STEPS, len(NAMES))))
    rows = np.zeros((STEPS, len(NAMES), NUM_COLUMNS))
    rows[..., Column.NUM_ELEMENTS] = SIZE_P
    rows[..., Column.NUM_ZERO] = rows[..., Column.NUM_DEAD] = np.round(0.2 * SIZE_P)
    rows[..., Column.GRAD_SUM] = 0.1 * norm_SP
    rows[..., Column.GRAD_SUM_SQ] = rows[..., Column.RECEIVED_SUM_SQ] = norm_SP**2
    rows[..., Column.GRAD_MIN], rows[..., Column.GRAD_MAX] = -norm_SP / 3, norm_SP / 3
    rows[..., Column.GRAD_ABS_MIN_NONZERO] = norm_SP / 1000
    rows[..., Column.PARAM_SUM_SQ] = SIZE_P / 64 + 1e-4 * np.arange(STEPS)[:, None]
    metrics = {keys.LOSS: 2.0 + chance.normal(0, 0.01, STEPS), keys.NUM_NONFINITE_LOSS: np.zeros(STEPS)}
    change(rows[FAULT:], metrics)
    return Snapshot(steps=np.arange(1, STEPS + 1), names=NAMES, rows=rows, metrics=metrics)


def times(factor: np.ndarray | float, which: slice = slice(None)) -> Change:
    """Multiply the norms of these parameters, from the fault on."""

    def change(rows: np.ndarray, _: dict[str, np.ndarray]) -> None:
        for column, power in ((Column.GRAD_SUM_SQ, 2), (Column.RECEIVED_SUM_SQ, 2), (Column.GRAD_MAX, 1)):
            rows[:, which, column] *= np.asarray(factor).reshape(-1, 1) ** power

    return change


def put(column: Column, values: np.ndarray | float, which: slice = slice(None), since: int = 0) -> Change:
    """Set a column of these parameters, from the fault on."""

    def change(rows: np.ndarray, _: dict[str, np.ndarray]) -> None:
        rows[since:, which, column] = values

    return change


def loses_its_gradient(rows: np.ndarray, _: dict[str, np.ndarray]) -> None:
    rows[:, 6:8] = np.nan


def fades(rows: np.ndarray, _: dict[str, np.ndarray]) -> None:
    rows[..., Column.GRAD_SUM_SQ] *= np.repeat(10.0 ** np.arange(-LAYERS, 0), 2) ** 2


def is_coarse(rows: np.ndarray, _: dict[str, np.ndarray]) -> None:
    rows[..., Column.GRAD_MIN], rows[..., Column.GRAD_MAX] = -(2.0**-20), 2.0**-20
    rows[..., Column.GRAD_ABS_MIN_NONZERO] = 2.0**-24


def grows(rows: np.ndarray, _: dict[str, np.ndarray]) -> None:
    rows[..., Column.PARAM_SUM_SQ] *= 1.5 ** np.minimum(np.arange(len(rows)), 40)[:, None]


def shrinks(rows: np.ndarray, _: dict[str, np.ndarray]) -> None:
    rows[..., Column.PARAM_SUM_SQ] *= 1e-3


def decays(rows: np.ndarray, _: dict[str, np.ndarray]) -> None:
    rows[:, 4, Column.PARAM_SUM_SQ] *= 0.9 ** (2 * np.arange(len(rows)))  # 10 % of one weight's norm per step


def decays_slowly(rows: np.ndarray, _: dict[str, np.ndarray]) -> None:
    # The norm halves at once, then shrinks by 1 % per step: too little to trigger a closer look. After 92 steps
    # 0.5 * 0.99^92 = 0.198 is left.
    rows[..., Column.PARAM_SUM_SQ] *= 0.25 * 0.99 ** (2 * np.arange(len(rows)))[:, None]


def moves(rows: np.ndarray, metrics: dict[str, np.ndarray]) -> None:
    times(50.0)(rows, metrics)
    rows[..., Column.PARAM_SUM_SQ] *= 0.94 ** (2 * np.minimum(np.arange(len(rows)), 3))[:, None]


def climbs(rows: np.ndarray, metrics: dict[str, np.ndarray]) -> None:
    metrics[keys.LEARNING_RATE] = np.where(np.arange(STEPS) < FAULT, 0.1, -0.1)


def is_carried(rows: np.ndarray, metrics: dict[str, np.ndarray]) -> None:
    metrics[keys.WIRING_CARRIED] = np.where(np.arange(STEPS) < FAULT, 0.0, 1.0)


def is_not_finite(rows: np.ndarray, metrics: dict[str, np.ndarray]) -> None:
    metrics[keys.NUM_NONFINITE_LOSS][FAULT:] = 1


def rises(rows: np.ndarray, metrics: dict[str, np.ndarray]) -> None:
    metrics[keys.LOSS][FAULT:] = 9


NUM_LEFT = STEPS - FAULT
FAULTS: dict[str, tuple[Change, str]] = {
    "NaN": (put(Column.NUM_NAN, 1.0, slice(3, 4)), "NaN gradient"),
    "Inf": (put(Column.NUM_INF, 1.0, slice(3, 4)), "Inf gradient"),
    "one spike": (times(np.where(np.arange(NUM_LEFT) == 5, 1e3, 1.0)), "Exploding gradient"),
    "a new level": (times(50.0), "Exploding gradient"),
    "a steady rise": (times(1.2 ** np.arange(NUM_LEFT)), "Exploding gradient"),
    "a cliff": (times(1e-9), "Vanishing gradient"),
    "fading by layer": (fades, "Vanishing gradient"),
    "one faint gradient": (times(1e-22, slice(2, 3)), "Vanishing gradient"),
    "nothing but float16's smallest steps": (is_coarse, "Vanishing gradient"),
    "a dead layer": (put(Column.NUM_DEAD, SIZE_P[4:6], slice(4, 6)), "Dead gradient"),
    "dead units": (put(Column.NUM_DEAD, SIZE_P[4:6] * 0.75, slice(4, 6)), "Dead gradient"),
    "no inputs": (put(Column.NUM_DEAD, SIZE_P[4], slice(4, 5)), "Dead gradient"),
    "no gradient": (loses_its_gradient, "No gradient"),
    "unchanged": (put(Column.PARAM_SUM_SQ, SIZE_P / 64), "Parameters unchanged"),
    "one unchanged": (put(Column.PARAM_SUM_SQ, 1.0, slice(4, 5)), ""),
    "growing parameters": (grows, "Parameters grow too fast"),
    "shrunk parameters": (shrinks, "Parameters shrink"),
    "one weight that decays": (decays, "Parameters shrink"),
    "slowly shrinking parameters": (decays_slowly, "Parameters shrink"),
    "a new level that moves the parameters": (moves, "Exploding gradient"),
    "tight clipping": (put(Column.RECEIVED_SUM_SQ, 1e-9), "Clipping too tight"),
    "a broken parameter": (put(Column.PARAM_NUM_NONFINITE, 1.0, slice(2, 3)), ""),
    "a learning rate below 0": (climbs, "Learning rate below 0"),
    "gradients that are not reset": (is_carried, "Gradients not reset"),
    "a loss that is not finite": (is_not_finite, "Non-finite loss"),
    "a new level of the loss": (rises, "Loss spike"),
    "healthy": (times(1.0), ""),
}


def told(samples: Snapshot) -> list[tuple[int, str, str]]:
    """Return the step, title and level of every alert, checking one sample at a time."""
    found = []
    for rule in default_rules():
        for sample in range(len(samples)):
            found += [(alert.step, alert.title, alert.level) for alert in rule.check(samples.sample(sample))]
    return found


@pytest.mark.parametrize("fault", FAULTS)
def test_a_frozen_parameter_that_nothing_is_known_of_changes_no_verdict(fault):
    change, title = FAULTS[fault]
    complete = training(change)
    # With a missing gradient no rule may use the shortcut for complete samples.
    nothing = np.full((STEPS, 1, NUM_COLUMNS), np.nan)
    incomplete = replace(
        complete,
        names=(*NAMES, "frozen"),
        rows=np.concatenate([complete.rows, nothing], axis=1),
        trainable=np.array([True] * len(NAMES) + [False]),
    )
    expected = told(complete)
    assert told(incomplete) == expected
    assert {found[1] for found in expected} == ({title} if title else set())
    assert all(found[0] > FAULT for found in expected)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_rule_that_is_not_called_has_nothing_to_say(fault):
    samples = training(FAULTS[fault][0])
    manager, found = AlertManager(default_rules()), []
    for sample in range(len(samples)):
        manager.process(samples.sample(sample))
        found += [(alert.step, alert.title, alert.level) for alert in manager.last_findings]
    # The alert manager orders alerts by sample, `told` by rule.
    assert sorted(found) == sorted(told(samples))


@pytest.mark.parametrize("fault", FAULTS)
def test_samples_that_are_judged_together_raise_the_alerts_of_samples_that_come_one_by_one(fault):
    samples, told = training(FAULTS[fault][0]), []
    for together in (1, 3, 16):
        manager, batches = AlertManager(default_rules(), clock=lambda: 0.0), range(0, len(samples), together)
        parts = [select_samples(samples, range(len(samples))[first : first + together]) for first in batches]
        told.append([alert for part in parts for alert in manager.process(part)])
        told[-1].append([episode.num_healthy for episode in manager._episodes.values()])
    assert told[1] == told[0]
    assert told[2] == told[0]


def test_a_saved_rule_has_what_it_has_not_looked_at_closely():
    samples = training(FAULTS["growing parameters"][0])
    for whole, parts in zip(default_rules(), default_rules(), strict=True):
        expected, found = [], []
        for sample in range(len(samples)):
            expected += [alert.text for alert in whole.check(samples.sample(sample))]
            found += [alert.text for alert in parts.check(samples.sample(sample))]
            if sample % 7 == 3:  # at samples without a closer look
                resumed = type(parts)()
                resumed.load_state_dict(json.loads(json.dumps(parts.state_dict())))
                parts = resumed
        assert found == expected, whole
