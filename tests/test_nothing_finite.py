"""A gradient without finite elements has no norm, ratio or dead share: they are missing everywhere, never 0."""

from __future__ import annotations

import math
import warnings

import numpy as np
import torch
from gradients import Chosen, step, watch

from wandb_gradwatch.sinks._base import summary_line
from wandb_gradwatch.sinks._history_row import HistoryRow
from wandb_gradwatch.snapshot import Snapshot

NAN = math.nan
OF_NUMBERS = ("grad_norm", "grad_param_ratio", "dead_ratio")


def windows(*values: dict[str, list[float]], log_every: int):
    """The windows of a training with these gradients, one per step, and its summary."""
    model = Chosen(a=2, b=2)
    watcher, sink = watch(model, log_every=log_every)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for gradients in values:
        step(model, optimizer, **gradients)
    summary = watcher.summary()
    watcher.remove()
    return sink.snapshots, summary


def row_of(snapshot: Snapshot) -> dict[str, float]:
    return dict(HistoryRow.of(snapshot).scalars())


GOOD, BAD = {"a": [3.0, 4.0], "b": [0.0, 12.0]}, {"a": [NAN, math.inf], "b": [NAN, NAN]}


def test_everything_not_finite_is_missing_from_its_step_on_though_the_window_began_well():
    snapshots, summary = windows(GOOD, BAD, BAD, BAD, log_every=2)
    first, second = map(row_of, snapshots)
    for row in (first, second):
        for family in OF_NUMBERS:
            assert not {f"{family}/a", f"{family}/b"} & set(row), family
        for key in ("grad_norm", "grad_norm_clipped", "grad_mean", "grad_std", "grad_abs_max", "dead_ratio"):
            assert f"gradwatch/{key}" not in row
    assert first["gradwatch/grad_norm_max"] == 13  # 3, 4 and 12 at step 1
    assert not [key for key in second if "grad_norm" in key]
    assert (second["gradwatch/num_nan"], second["gradwatch/num_inf"]) == (6, 2)  # two steps of 3 NaN and 1 Inf
    assert "grad_norm 0" not in summary_line(snapshots[1])
    assert summary.total is not None
    for layer in (summary.total, *summary.worst):
        assert all(math.isnan(value) for value in (layer.norm, layer.grad_param_ratio, layer.dead_ratio)), layer
    for name in (*OF_NUMBERS, "zero_ratio", "grad_norm_clipped", "total_grad_norm", "total_grad_norm_clipped"):
        assert np.isnan(getattr(snapshots[1], name)).all(), name


def test_rows_that_are_logged_as_one_have_what_their_newest_sample_has():
    (first, second), _ = windows(GOOD, BAD, log_every=1)
    merged = HistoryRow.of(first).merge(HistoryRow.of(second)).scalars()
    assert merged == HistoryRow.of(first.merge(second)).scalars()
    assert "grad_norm/a" not in merged


def test_a_layer_that_is_not_finite_leaves_the_others_and_a_finite_rest_known():
    (snapshot,), _ = windows({"a": [NAN, NAN], "b": [5.0, NAN]}, log_every=1)
    row = row_of(snapshot)
    assert "grad_norm/a" not in row
    assert row["grad_norm/b"] == row["gradwatch/grad_norm"] == 5
    assert row["num_nonfinite/a"] == 2


def test_a_gradient_of_zeros_and_one_without_elements_are_0_and_not_missing():
    model = Chosen(a=2, nothing=0)
    watcher, sink = watch(model)
    step(model, torch.optim.SGD(model.parameters(), lr=0.0), a=[0.0, 0.0], nothing=[])
    watcher.remove()
    row = row_of(sink.snapshots[0])
    assert row["grad_norm/a"] == row["grad_norm/nothing"] == row["gradwatch/grad_norm"] == 0
    assert row["dead_ratio/a"] == 1


def test_a_parameter_without_a_finite_element_has_no_norm():
    model = Chosen(a=2)
    with torch.no_grad():
        model.a.fill_(NAN)
    watcher, sink = watch(model)
    model.a.grad = None
    (model.a.nan_to_num() @ torch.tensor([1.0, 1.0])).backward()
    torch.optim.SGD(model.parameters(), lr=0.0).step()
    watcher.remove()
    assert np.isnan(sink.snapshots[0].param_norm).all()


def test_gradients_whose_squares_overflow_float64_warn_of_no_arithmetic():
    model = torch.nn.Linear(3, 2).double()
    watcher, sink = watch(model, rules=None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", RuntimeWarning)
        for exponent in range(0, 240, 4):
            optimizer.zero_grad()
            (model(torch.ones(4, 3).double()) * 10.0**exponent).sum().backward()
            optimizer.step()
        watcher.remove()
    assert not told
    assert sink.merged().total_grad_norm[-1] == math.inf
