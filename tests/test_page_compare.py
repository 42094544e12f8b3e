"""Comparing two runs: where they differ by more than their own scatter, for any lengths, cadences and layers."""

from __future__ import annotations

import re
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trainings
from grad_samples import Training

from wandb_gradwatch import MemorySink, watch
from wandb_gradwatch._judgement.incident import Incident, Layer
from wandb_gradwatch._page.compare import MAX_RUNS, build_comparison, compare, differing_settings, sentence
from wandb_gradwatch._page.history import OwnSeries, RunHistory
from wandb_gradwatch._page.read import RunReader
from wandb_gradwatch.sinks._history_row import HistoryRow

LAYERS = ("a", "b", "c")


def run_of(
    seed: int = 0, *, every: int = 10, last: int = 400, layers: tuple[str, ...] = LAYERS, **more: Any
) -> RunHistory:
    """Return a run whose norms scatter by 20 % around 1; each row has the largest norm of its window."""
    norms = np.exp(0.2 * np.random.default_rng(seed).normal(size=(len(layers), last)))
    steps = np.arange(every, last + 1, every)
    values = {
        f"grad_norm_max/{name}": norm.reshape(-1, every).max(axis=1) for name, norm in zip(layers, norms, strict=True)
    }
    return RunHistory(Path(f"run-{seed}.wandb"), str(seed), steps, values, **more)


def changed(history: RunHistory, name: str, at: slice, value: Any) -> RunHistory:
    """Return the run with other values of one key in these rows."""
    values = {key: column.copy() for key, column in history.values.items()}
    values.setdefault(name, np.zeros(len(history.steps)))[at] = value
    return replace(history, values=values)


@pytest.mark.parametrize("seed", range(1, 6))
def test_runs_that_differ_by_chance_alone_are_alike(seed: int) -> None:
    found = compare(run_of(0), run_of(seed))
    assert found.alike
    assert found.parting is None
    assert found.equal_until is None
    assert sentence(found) == "No layer of A and B differs beyond its own scatter up to step 400"


@pytest.mark.parametrize(("every", "last"), [(10, 400), (40, 400), (10, 200), (20, 280)])
def test_the_same_training_is_equal_whatever_its_cadence_and_length(every: int, last: int) -> None:
    # The largest norm of 20 steps is the larger one of two windows of 10 steps; both runs use the coarser windows.
    short = run_of(0, last=400, every=every)
    rows = short.steps <= last
    short = replace(short, steps=short.steps[rows], values={key: value[rows] for key, value in short.values.items()})
    for found in (compare(run_of(0), short), compare(short, run_of(0))):
        assert found.alike
        assert found.steps.tolist() == list(range(every, last + 1, every))
        assert found.equal_until == last
        assert sentence(found) == f"A and B are equal to six digits up to step {last}"


@pytest.mark.parametrize(
    ("key", "rows", "value", "step", "how"),
    [
        # The logarithm of the largest of 10 norms scatters by less than 0.15, so a factor of 4 is more than 5 scatters.
        ("grad_norm_max/b", slice(20, None), 6.0, 210, r"is [3-6]\.?\d* times as large in B"),
        ("grad_norm_max/b", slice(20, 23), 0.1, 210, r"is 1\d\.?\d* times as large in A"),
        (
            "grad_norm_max/b",
            slice(20, 21),
            5e3,
            210,
            r"is .*e\+03 times as large in B",
        ),  # a single window is enough for so large a difference
        ("grad_norm_max/b", slice(20, 21), 6.0, None, ""),  # a single outlier of this size may occur in any run
        ("grad_norm_max/b", slice(20, 21), np.nan, None, ""),
        ("grad_norm_max/b", slice(20, 23), np.nan, 210, "is missing in B alone"),
        ("grad_norm_max/b", slice(20, 23), 0.0, 210, "is 0 in B alone"),
        ("num_nonfinite/b", slice(20, 21), 7.0, 210, "has NaN or Inf in B alone"),
    ],
)
def test_runs_part_where_a_layer_leaves_its_own_scatter(
    key: str, rows: slice, value: float, step: int | None, how: str
) -> None:
    first, second = run_of(0), changed(run_of(1), key, rows, value)
    if key.startswith("num_nonfinite"):
        second = changed(second, "gradwatch/num_nan", rows, value)
    found = compare(first, second)
    if step is None:
        assert found.parting is None
        return
    assert (found.parting.step, found.parting.name, found.parting.num_layers) == (step, "b", 1)
    assert not found.alike
    prefix = f"A and B part at step {step}: the gradient of b "
    assert sentence(found).startswith(prefix)
    assert re.fullmatch(how, sentence(found).removeprefix(prefix)), sentence(found)
    mirrored = compare(second, first).parting
    assert (mirrored.step, mirrored.name) == (step, "b")


def test_a_loss_scaler_that_skips_an_overflow_does_not_part_runs() -> None:
    at = slice(20, 21)
    second = run_of(1)
    for key, value in (("num_nonfinite/b", 7.0), ("gradwatch/num_inf", 7.0), ("gradwatch/num_skipped_steps", 1.0)):
        second = changed(second, key, at, value)
    assert compare(run_of(0), second).parting is None


def test_layers_of_only_one_run_and_different_verdicts_are_reported() -> None:
    found = compare(run_of(0), run_of(1, layers=("a", "b", "d")))
    assert (found.names, found.only) == (["a", "b"], (["c"], ["d"]))
    assert not found.alike
    assert sentence(found).endswith("; but not all layers are in both")
    bad = replace(run_of(1), incidents=(Incident("nan_gradient", "NaN gradient", "ERROR", 7, 7, 7, "a fact"),))
    assert sentence(compare(run_of(0), bad)).endswith("; but the verdicts differ")
    with pytest.raises(ValueError, match="no layer of the same name"):
        compare(run_of(0), run_of(1, layers=("x",)))
    late = replace(run_of(1), steps=run_of(1).steps + 1000)
    with pytest.raises(ValueError, match="no steps in common"):
        compare(run_of(0), late)


def test_settings_are_compared_by_their_dotted_names() -> None:
    first: dict[str, Any] = {"lr": 0.1, "model": {"depth": 4, "width": 8}, "seed": 0}
    first["gradwatch"], ours = {"names": ["a"]}, {"gradwatch": {"names": ["b"]}}  # reported as layers, not as a setting
    second: dict[str, Any] = {**ours, "lr": 0.1, "model": {"depth": 6, "width": 8}, "clip": 1.0, "seed": 0}
    assert differing_settings(first, second) == {"clip": [None, 1.0], "model.depth": [4, 6]}


def watched(training: Training, num_steps: int = 100) -> RunHistory:
    """Return the history of a run of this training."""
    memory = MemorySink()
    with watch(training.model, sinks=[memory], sample_every=1, log_every=5) as watcher:
        for step in range(1, num_steps + 1):
            training.optimizer.zero_grad()
            training.loss(training.model, step).backward()  # type: ignore[no-untyped-call]
            training.optimizer.step()
    reading = RunReader(Path("run-x.wandb"))
    for snapshot in memory.snapshots:
        reading.take_row(HistoryRow.of(snapshot).scalars())
    return replace(reading.history(), incidents=watcher.verdict().incidents)


FAULTS = {
    "learning rate too high": lambda: trainings.rate_jumps(0, at=60),
    "one bad batch": lambda: trainings.poisoned_batch(0, at=60),
    "poor initialisation: biases far from 0": lambda: trainings.dead_relus(0),
    "poor initialisation": lambda: trainings.large_initialisation(0),
    "an operation without a finite derivative": lambda: trainings.invalid_operation(0, at=40),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_verdict_tells_of_the_fault_of_a_training(fault: str) -> None:
    assert watched(FAULTS[fault]()).verdict.status in ("warn", "error")


def test_another_seed_is_alike_and_a_jump_of_the_learning_rate_is_found_in_its_window() -> None:
    first = watched(trainings.mlp(0))
    assert compare(first, watched(trainings.mlp(1))).alike
    again = compare(first, watched(trainings.mlp(0)))
    assert again.equal_until == 100
    jumped = compare(first, watched(trainings.rate_jumps(0, at=60)))
    # The first gradients after the update of step 60 are those of step 61: the window of 61 to 65.
    assert jumped.parting.step == 65


def test_the_page_of_several_runs_has_a_row_for_each_and_compares_each_with_each() -> None:
    loss = {"loss": OwnSeries(np.arange(1.0, 401), np.ones(400)), "accuracy": OwnSeries(np.ones(1), np.ones(1))}
    second = changed(run_of(1, own=loss, config={"lr": 3}), "grad_norm_max/b", slice(20, None), 50.0)
    third = run_of(2, own={"loss": loss["loss"]}, incidents=(Incident(*NAN, layers=(Layer("b"),)),))
    content, _ = build_comparison([run_of(0, own=loss, config={"lr": 0.000123456}), second, third])
    said = content["sentences"]
    assert {pair: told["alike"] for pair, told in said.items()} == {"0-1": False, "0-2": False, "1-2": False}
    assert said["0-1"]["sentence"].startswith("A and B part at step 210: the gradient of b")
    assert said["0-1"]["name"] == "b"
    assert said["0-2"]["sentence"].endswith("but the verdicts differ")
    assert content["settings"] == ["lr"]
    assert [one["settings"] for one in content["runs"]] == [["0.0001235"], ["3"], ["not set"]]
    assert [one["told"] for one in content["runs"]] == ["no alert", "no alert", "ERROR: NaN gradient"]
    assert content["runs"][2]["incident"] == {"step": 7, "layer": "b"}
    assert content["order"] == [2, 0, 1]  # the worst first
    assert [[own["key"] for own in one["own"]] for one in content["runs"]] == [["loss"]] * 3


NAN = ("nan_gradient", "NaN gradient", "ERROR", 7, 7, 7, "a fact")


def test_norms_of_any_size_are_compared() -> None:
    tiny, huge = (changed(run_of(0), "grad_norm_max/b", slice(20, None), factor) for factor in (1e-200, 1e200))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # the ratio of their norms is too large for a float
        assert [told["alike"] for told in build_comparison([tiny, huge])[0]["sentences"].values()] == [False]


def test_of_many_runs_the_first_is_compared_with_each() -> None:
    runs = [run_of(seed, last=20) for seed in range(21)]
    assert len(build_comparison(runs[:20])[0]["sentences"]) == 190
    assert list(build_comparison(runs)[0]["sentences"]) == [f"0-{place}" for place in range(1, 21)]
    with pytest.raises(ValueError, match="101 runs are too many"):
        build_comparison([runs[0]] * (MAX_RUNS + 1))


def test_a_setting_that_is_hidden_has_no_column() -> None:
    runs = [run_of(0, config={"api_key": text, "lr": 1.0}) for text in ("abc", "def")]
    assert build_comparison(runs)[0]["settings"] == []
