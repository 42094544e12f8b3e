"""Values that a snapshot derives from its rows: closed forms, grouping, merging, quantiles, and missing values."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from statistics_oracle import expected_histogram, expected_row
from windows import MISSING_C

from wandb_gradwatch._measure.columns import NUM_BINS, NUM_COLUMNS, Column, histogram_edges
from wandb_gradwatch._measure.measure import measure
from wandb_gradwatch.sinks import MemorySink
from wandb_gradwatch.snapshot import Snapshot
from wandb_gradwatch.snapshot._arrays import last_present
from wandb_gradwatch.snapshot._shapes import group_function, merge_snapshots

NAN, INF = math.nan, math.inf


def sample(step: int = 1, histogram: bool = True, **gradients: list[float] | None) -> Snapshot:
    """Return a snapshot of one sample; None: a missing gradient. Underscores in names become dots."""
    rows = [MISSING_C if values is None else expected_row(values) for values in gradients.values()]
    histograms = [expected_histogram(values or []) for values in gradients.values()]
    return Snapshot(
        steps=np.array([step]),
        names=tuple(name.replace("_", ".") for name in gradients),
        rows=np.array(rows).reshape(1, len(gradients), NUM_COLUMNS),
        histogram=np.array(histograms).reshape(len(gradients), NUM_BINS) if histogram else None,
        histogram_steps=(step,) if histogram else (),
    )


def test_derived_values_have_their_closed_forms() -> None:
    snapshot = sample(a=[3.0, -4.0, 0.0, NAN, INF])
    expected = {
        "num_elements": 5,
        "num_nan": 1,
        "num_inf": 1,
        "num_nonfinite": 2,
        "num_finite": 3,
        "grad_norm": 5,
        "grad_norm_clipped": 5,
        "grad_mean": -1 / 3,
        "grad_std": math.sqrt(25 / 3 - 1 / 9),
        "grad_min": -4,
        "grad_max": 3,
        "grad_abs_max": 4,
        "grad_abs_min_nonzero": 3,
        "dead_ratio": 1 / 5,
        "zero_ratio": 1 / 5,
    }
    for name, value in expected.items():
        derived = getattr(snapshot, name)
        assert derived.shape == (1, 1), name
        assert derived.item() == pytest.approx(value), name


def test_every_array_is_frozen_because_rules_and_sinks_share_it() -> None:
    whole = sample(a=[3.0, -4.0], b=[0.0])
    for snapshot in (whole, whole.by_group("module"), whole.sample(0), whole.merge(whole)):
        arrays = {name: getattr(snapshot, name) for name in dir(snapshot) if not name.startswith("_")}
        frozen = {name: values.flags.writeable is False for name, values in arrays.items() if hasattr(values, "flags")}
        assert {"rows", "steps", "skipped", "grad_norm", "total_grad_norm", "clipped"} <= frozen.keys()
        assert all(frozen.values())
        with pytest.raises(ValueError, match="read-only"):
            snapshot.grad_norm[:] = 0


def test_a_missing_gradient_is_missing_in_every_derived_value() -> None:
    snapshot = sample(a=None, b=[3.0, 4.0])
    for name in ("num_elements", "num_nan", "grad_norm", "grad_mean", "grad_std", "grad_min", "grad_max", "dead_ratio"):
        assert np.isnan(getattr(snapshot, name)[0, 0]), name
        assert not np.isnan(getattr(snapshot, name)[0, 1]), name
    assert np.isnan(snapshot.grad_abs_max[0, 0])
    assert snapshot.total_grad_norm.tolist() == [5.0]


def test_a_model_without_any_gradient_has_no_norm() -> None:
    assert np.isnan(sample(a=None, b=None).total_grad_norm).all()


def test_no_names_and_no_samples_are_no_error() -> None:
    assert np.isnan(sample().total_grad_norm).all()
    assert sample().by_group("module").histogram.shape == (0, NUM_BINS)
    empty = Snapshot(steps=np.zeros(0, dtype=np.int64), names=("a",), rows=np.zeros((0, 1, NUM_COLUMNS)))
    assert empty.total_grad_norm.shape == (0,)
    assert math.isnan(empty.clip_ratio)
    assert last_present(empty.grad_norm, empty.present).shape == (1,)
    assert repr(empty) == "Snapshot(no samples, 1 names, histogram=no)"


def test_parameter_norm_and_its_ratio() -> None:
    snapshot = sample(a=[3.0, 4.0], b=[1.0], c=[2.0])
    rows = snapshot.rows.copy()
    rows[0, :, Column.PARAM_SUM_SQ] = [4.0, 0.0, NAN]
    snapshot = replace(snapshot, rows=rows)
    np.testing.assert_array_equal(snapshot.param_norm, [[2.0, 0.0, NAN]])
    # a parameter of zeros has no ratio, nor has one whose norm was not measured
    np.testing.assert_array_equal(snapshot.grad_param_ratio, [[2.5, NAN, NAN]])


@pytest.mark.parametrize(
    ("gradient", "norm"),
    [
        ([3e150, 4e150], 5e150),
        ([3e-140, 4e-140], 5e-140),
        ([1e200, -1e200], INF),  # 1e400 is beyond float64
        ([3e-150, 4e-150], NAN),  # 9e-300 is exact, but squares of smaller elements may be subnormal
        ([1e-200, 1e-200], NAN),
        ([0.0, 0.0], 0.0),
    ],
)
@pytest.mark.parametrize("backend", ["reference", "torch", "cpu", "compiled"])
def test_a_norm_whose_squares_float64_cannot_hold_is_no_wrong_number(gradient, norm, backend) -> None:
    gradients = [torch.tensor(values, dtype=torch.float64) for values in (gradient, [1.0, 0.0])]
    rows = measure(gradients, gradients, backend=backend).rows.numpy()[None]
    snapshot = Snapshot(steps=np.array([1]), names=("a", "b"), rows=rows)
    for snapshot_of_a in (snapshot, snapshot.by_group(lambda name: name)):
        assert snapshot_of_a.grad_norm[0, 0] == pytest.approx(norm, rel=1e-12, nan_ok=True)
        assert snapshot_of_a.grad_norm_clipped[0, 0] == pytest.approx(norm, rel=1e-12, nan_ok=True)
    assert snapshot.num_inf.sum() == 0
    assert snapshot.grad_norm[0, 1] == 1.0
    assert snapshot.total_grad_norm[0] == pytest.approx(INF if norm == INF else max(np.nan_to_num(norm), 1.0))
    if not 0 <= norm < INF:
        assert snapshot.grad_std[0, 0] in (INF,) or math.isnan(snapshot.grad_std[0, 0])
    if norm == INF:  # NaN or 0 if it were computed by division
        assert math.isnan(snapshot.grad_param_ratio[0, 0])


def test_a_number_by_an_infinite_norm_is_no_ratio() -> None:
    rows = sample(a=[3.0, 4.0]).rows.copy()
    rows[0, 0, Column.PARAM_SUM_SQ] = INF
    assert math.isnan(replace(sample(a=[3.0, 4.0]), rows=rows).grad_param_ratio[0, 0])


def test_clipping_is_seen_sample_by_sample_and_rounding_is_not_clipping() -> None:
    snapshot = merge_snapshots([sample(step, a=[3.0], b=[4.0]) for step in range(1, 5)])
    assert snapshot is not None
    rows = snapshot.rows.copy()
    received = rows[..., Column.RECEIVED_SUM_SQ]
    received[0] *= 1 / 25  # to a norm of 1
    received[1] *= (1 - 2e-7) ** 2  # the effect of clip_grad_norm_ on a norm equal to its limit
    received[2, 1] *= 0.5  # one of two parameters is clipped by value
    received[3] = NAN
    snapshot = replace(snapshot, rows=rows)
    np.testing.assert_array_equal(snapshot.clipped, [1, 0, 1, NAN])
    assert snapshot.clip_ratio == pytest.approx(2 / 3)
    assert snapshot.total_grad_norm_clipped[0] == pytest.approx(1)
    assert snapshot.total_grad_norm[0] == pytest.approx(5)


def test_the_last_present_value_skips_missing_samples() -> None:
    values = np.array([[1.0, NAN, 3.0], [2.0, NAN, NAN]])
    np.testing.assert_array_equal(last_present(values, ~np.isnan(values)), [2.0, NAN, 3.0])


def test_groups_merge_rows_and_histograms_in_order_of_appearance() -> None:
    snapshot = sample(fc_weight=[3.0, 4.0], head_weight=[1.0], fc_bias=[12.0], scale=[2.0])
    modules = snapshot.by_group("module")
    assert modules.names == ("fc", "head", "scale")
    assert modules.grad_norm.tolist() == [[13.0, 1.0, 2.0]]
    assert modules.histogram is not None
    np.testing.assert_array_equal(modules.histogram[0], expected_histogram([3.0, 4.0, 12.0]))
    assert snapshot.by_group("parameter") is snapshot
    assert snapshot.by_group(lambda name: name[0]).names == ("f", "h", "s")


def test_a_group_of_a_missing_and_a_present_parameter_is_the_present_one() -> None:
    snapshot = sample(fc_weight=None, fc_bias=[3.0, 4.0], head_weight=None)
    np.testing.assert_array_equal(snapshot.by_group("module").grad_norm, [[5.0, NAN]])


@given(st.lists(st.lists(st.floats(-1e6, 1e6), max_size=5), min_size=1, max_size=6), st.integers(1, 3))
def test_grouping_first_or_not_gives_the_same_total(gradients: list[list[float]], num_groups: int) -> None:
    snapshot = sample(**{f"p{index}": values for index, values in enumerate(gradients)})
    grouped = snapshot.by_group(lambda name: str(int(name[1:]) % num_groups))
    np.testing.assert_allclose(grouped.total.rows, snapshot.total.rows, rtol=1e-12, atol=1e-6)
    np.testing.assert_array_equal(grouped.total.histogram, snapshot.total.histogram)


def test_an_unknown_grouping_is_refused() -> None:
    with pytest.raises(ValueError, match='group_by=\'layer\' must be "parameter", "module" or a function'):
        group_function("layer")


def test_an_epoch_is_made_of_windows() -> None:
    windows = [sample(1, a=[1.0], b=[2.0]), sample(2, b=[4.0], c=[8.0]), sample(3, histogram=False, a=[16.0])]
    epoch = merge_snapshots(windows)
    assert epoch.steps.tolist() == [1, 2, 3]
    assert epoch.names == ("a", "b", "c")
    np.testing.assert_array_equal(epoch.grad_norm, [[1, 2, NAN], [NAN, 4, 8], [16, NAN, NAN]])
    assert epoch.histogram_steps == (1, 2)
    assert epoch.histogram is not None
    np.testing.assert_array_equal(
        epoch.histogram, [expected_histogram(values) for values in ([1.0], [2.0, 4.0], [8.0])]
    )
    assert MemorySink().merged() is None


def test_merging_keeps_scales_skips_and_metrics_of_each_sample() -> None:
    first, second = sample(1, a=[1.0]), sample(2, a=[1.0])
    object.__setattr__(first, "loss_scale", np.array([8.0]))
    object.__setattr__(second, "skipped", np.array([True]))
    object.__setattr__(second, "metrics", {"loss": np.array([0.5])})
    merged = first.merge(second)
    np.testing.assert_array_equal(merged.loss_scale, [8.0, NAN])
    assert merged.skipped.tolist() == [False, True]
    np.testing.assert_array_equal(merged.metrics["loss"], [NAN, 0.5])
    last = merged.sample(-1)
    assert last.steps.tolist() == [2]
    assert last.metrics["loss"].tolist() == [0.5]
    assert last.histogram is None


@given(
    st.lists(st.floats(-1e4, 1e4, allow_subnormal=False), min_size=1, max_size=50),
    st.sampled_from([0.0, 0.1, 0.5, 0.9, 1.0]),
)
def test_a_quantile_lies_in_the_bin_of_the_element_with_its_rank(gradient: list[float], q: float) -> None:
    snapshot = sample(a=gradient)
    edges = histogram_edges()
    for values, quantile in ((gradient, snapshot.quantile(q)), (list(map(abs, gradient)), snapshot.abs_quantile(q))):
        element = sorted(values)[max(math.ceil(q * len(values)), 1) - 1]
        index = int(np.flatnonzero(expected_histogram([element]))[0])
        assert edges[index] <= quantile.item() <= edges[index + 1]
        assert min(values) <= quantile.item() <= max(values)


def test_a_constant_gradient_has_one_quantile_exactly() -> None:
    for q in (0.0, 0.5, 1.0):
        assert sample(a=[1.25] * 7).quantile(q).item() == 1.25
        assert sample(a=[-1.25] * 7).abs_quantile(q).item() == 1.25


def test_several_quantiles_are_those_of_each_at_a_time() -> None:
    snapshot, several = sample(a=[1.0, -2.0, 0.0, 3.0], b=[0.5, 7.0]), [0.0, 0.3, 0.99]
    for of in (snapshot.quantile, snapshot.abs_quantile):
        np.testing.assert_array_equal(of(several), [of(q) for q in several])
    assert np.isnan(sample(histogram=False, a=[1.0], b=[2.0]).quantile(several)).tolist() == [[True, True]] * 3
    with pytest.raises(ValueError, match=r"q=\[0.5, 2\] must be between 0 and 1"):
        snapshot.quantile([0.5, 2])


def test_without_histogram_or_elements_a_quantile_is_missing() -> None:
    assert np.isnan(sample(histogram=False, a=[1.0]).quantile(0.5)).all()
    assert np.isnan(sample(histogram=False, a=[1.0]).abs_quantile(0.5)).all()
    assert np.isnan(sample(a=None).quantile(0.5)).all()
    assert np.isnan(sample(a=[]).abs_quantile(0.5)).all()
    assert sample(histogram=False, a=[1.0]).magnitude_histogram is None


def test_the_magnitude_histogram_folds_both_signs_and_leaves_out_zeros() -> None:
    snapshot = sample(a=[1.0, -1.0, 0.0, 2.0])
    assert snapshot.magnitude_histogram is not None
    folded = expected_histogram([1.0, 1.0, 2.0])[129:]
    np.testing.assert_array_equal(snapshot.magnitude_histogram[0], folded)


@pytest.mark.parametrize("q", [-0.1, 1.1, NAN])
@pytest.mark.parametrize("histogram", [True, False])
def test_a_quantile_outside_zero_and_one_is_refused(q: float, histogram: bool) -> None:
    for quantile in (sample(histogram=histogram, a=[1.0]).quantile, sample(histogram=histogram, a=[1.0]).abs_quantile):
        with pytest.raises(ValueError, match=f"q={q!r} must be between 0 and 1"):
            quantile(q)


def test_rows_and_histograms_of_wrong_shape_are_refused() -> None:
    steps = np.array([1])
    with pytest.raises(
        ValueError, match=rf"rows must be \[S, P, C\] = \(1, 1, {NUM_COLUMNS}\), but are \(1, 2, {NUM_COLUMNS}\)"
    ):
        Snapshot(steps=steps, names=("a",), rows=np.zeros((1, 2, NUM_COLUMNS)))
    with pytest.raises(ValueError, match=r"histogram must be \[P, B\] = \(1, 257\), but is \(1, 3\)"):
        Snapshot(steps, ("a",), np.zeros((1, 1, NUM_COLUMNS)), histogram=np.zeros((1, 3), dtype=np.int64))
