"""The W&B history row of a window: each value by its definition, and no missing values."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from functools import reduce
from pathlib import Path

import numpy as np
import pytest
import wandb
from grad_samples import sample_of
from hypothesis import given
from hypothesis import strategies as st
from offline import records
from windows import window

from wandb_gradwatch._analysis.forecast import FORMATS
from wandb_gradwatch._measure.columns import Column
from wandb_gradwatch._page.read import RunReader
from wandb_gradwatch.sinks._history_row import HistoryRow, Rebinner, TableRow, ZerosLeftOut
from wandb_gradwatch.sinks._wandb_run import WandbSink
from wandb_gradwatch.snapshot import Snapshot, keys
from wandb_gradwatch.snapshot._shapes import select_samples

FORECASTS = ("underflow_ratio", "flush_ratio", "headroom")
NAN, INF = math.nan, math.inf
PRECISION = {keys.PRECISION: ""}
EVERYTHING = dict.fromkeys((*keys.DETAILS, keys.PRECISION), "")


def test_layers_of_norm_5_and_12_make_13() -> None:
    scalars = HistoryRow.of(window({"a.weight": [3, 4], "b.weight": [12]})).scalars()
    # sqrt(9 + 16) = 5, sqrt(144) = 12, sqrt(25 + 144) = 13
    assert scalars == pytest.approx(
        {
            "gradwatch/step": 1,
            "gradwatch/first_sample": 1,
            "gradwatch/num_samples": 1,
            "gradwatch/alert_level": 0,
            "gradwatch/grad_norm": 13,
            "gradwatch/grad_norm_max": 13,
            "gradwatch/grad_norm_clipped": 13,
            "gradwatch/clip_ratio": 0,
            "gradwatch/dead_ratio": 0,
            "gradwatch/param_norm": math.sqrt(2),  # of two norms of 1
            "gradwatch/num_nan": 0,
            "gradwatch/num_inf": 0,
            "gradwatch/num_skipped_steps": 0,
            "grad_norm/a/weight": 5,
            "grad_norm/b/weight": 12,
            "grad_norm_max/a/weight": 5,
            "grad_norm_max/b/weight": 12,
            "grad_param_ratio/a/weight": 5,
            "grad_param_ratio/b/weight": 12,
            "param_norm/a/weight": 1,
            "param_norm/b/weight": 1,
            "dead_ratio/a/weight": 0,
            "dead_ratio/b/weight": 0,
            "num_nonfinite/a/weight": 0,
            "num_nonfinite/b/weight": 0,
        }
    )


values = st.lists(st.sampled_from([0.0, 1.0, -3.0, 1e-160, -1e160, 5e-324, NAN, INF, -INF]), min_size=1, max_size=4)


@given(st.lists(st.none() | values, min_size=1, max_size=4), st.lists(values, min_size=4, max_size=4))
def test_the_values_of_the_model_are_the_statistics_of_its_total(
    gradients: list[list[float] | None], parameters: list[list[float]]
) -> None:
    names = [f"layer{number}" for number in range(len(gradients))]
    held = {name: np.array(one) for name, one in zip(names, parameters, strict=False)}
    with np.errstate(over="ignore", invalid="ignore"):
        sample = sample_of(dict(zip(names, gradients, strict=True)), parameters=held)
        total, scalars = sample.total, HistoryRow.of(sample, dict.fromkeys(keys.MODEL_DETAILS, "")).scalars()
    for statistic in ("grad_norm", "grad_mean", "grad_std", "grad_abs_max", "dead_ratio", "param_norm"):
        expected = float(getattr(total, statistic)[0, 0])
        assert scalars.get(keys.PREFIX + statistic, NAN) == pytest.approx(expected, rel=1e-14, nan_ok=True)


def test_a_spike_inside_the_window_stays_visible() -> None:
    scalars = HistoryRow.of(window({"a": [1.0]}, {"a": [100.0]}, {"a": [2.0]})).scalars()
    assert scalars["gradwatch/grad_norm"] == 2
    assert scalars["gradwatch/grad_norm_max"] == scalars["grad_norm_max/a"] == 100


def test_non_finite_elements_are_counted_over_the_window() -> None:
    scalars = HistoryRow.of(window({"a": [1, NAN], "b": [INF]}, {"a": [NAN, NAN], "b": [-INF]})).scalars()
    assert (scalars["gradwatch/num_nan"], scalars["gradwatch/num_inf"]) == (3, 2)
    assert (scalars["num_nonfinite/a"], scalars["num_nonfinite/b"]) == (3, 2)
    assert not {"grad_norm/a", "grad_norm/b", "gradwatch/grad_norm"} & set(scalars)  # no finite element


def test_a_name_keeps_its_last_present_value() -> None:
    scalars = HistoryRow.of(
        window({"generator": [3.0], "critic": None}, {"generator": None, "critic": [4.0]})
    ).scalars()
    assert (scalars["grad_norm/generator"], scalars["grad_norm/critic"]) == (3, 4)
    assert scalars["gradwatch/grad_norm"] == 4  # of the last sample


def test_what_is_missing_has_no_key() -> None:
    scalars = HistoryRow.of(window({"a": [1.0], "frozen": None})).scalars()
    assert not [key for key in scalars if "frozen" in key]
    assert "gradwatch/grad_scale" not in scalars
    assert "gradwatch/overhead_ratio" not in scalars


def test_a_norm_that_could_not_be_seen_is_missing_and_the_clipped_one_is_there() -> None:
    snapshot = window({"a": [3.0, 4.0]}, {"a": [NAN, 1.0]})
    rows = snapshot.rows.copy()
    rows[1, 0, 5:10] = NAN  # the gradient before clipping was not seen in the last sample
    scalars = HistoryRow.of(replace(snapshot, rows=rows)).scalars()
    assert "gradwatch/grad_norm" not in scalars
    assert scalars["gradwatch/grad_norm_clipped"] == 1
    assert scalars["gradwatch/grad_norm_max"] == 5


def test_half_of_the_samples_clipped() -> None:
    clipped = window({"a": [5.0]})
    rows = clipped.rows.copy()
    rows[0, 0, Column.RECEIVED_SUM_SQ] = 1.0
    clipped = replace(clipped, rows=rows)
    scalars = HistoryRow.of(window({"a": [1.0]}, first_step=0).merge(clipped)).scalars()
    assert scalars["gradwatch/clip_ratio"] == 0.5
    assert (scalars["gradwatch/grad_norm"], scalars["gradwatch/grad_norm_clipped"]) == (5, 1)


def test_a_zero_initialised_parameter_has_no_ratio() -> None:
    snapshot = window({"bias": [1.0]})
    rows = snapshot.rows.copy()
    rows[0, 0, Column.PARAM_SUM_SQ] = 0.0
    assert "grad_param_ratio/bias" not in HistoryRow.of(replace(snapshot, rows=rows)).scalars()


def test_loss_scale_skipped_steps_and_metrics() -> None:
    snapshot = window(
        {"a": [1.0]},
        {"a": [1.0]},
        loss_scale=np.array([65536.0, 32768.0]),
        skipped=np.array([True, False]),
        metrics={"head.rank": np.array([2.0, NAN]), "gradwatch/own": np.array([NAN, NAN])},
        overhead_ratio=0.004,
    )
    scalars = HistoryRow.of(snapshot).scalars()
    assert scalars["gradwatch/grad_scale"] == 32768
    assert scalars["gradwatch/num_skipped_steps"] == 1
    assert scalars["head/rank"] == 2
    assert "gradwatch/own" not in scalars
    assert scalars["gradwatch/overhead_ratio"] == 0.004


def test_quantiles_of_the_magnitude_cover_everything_watched() -> None:
    # 98 elements of 1e-3 and two of 1e3: the median and the 1 % quantile are 1e-3 up to a half-octave bin, and the 99 %
    # quantile has rank 99, one of the two large ones.
    snapshot = window({"a": [1e-3] * 98, "b": [1e3, -1e3]}, histogram=True)
    scalars = HistoryRow.of(snapshot, PRECISION).scalars()
    assert scalars["gradwatch/grad_abs_p50"] == pytest.approx(1e-3, rel=0.5)
    assert scalars["gradwatch/grad_abs_p01"] == pytest.approx(1e-3, rel=0.5)
    assert scalars["gradwatch/grad_abs_p99"] == pytest.approx(1e3, rel=0.5)


def test_every_value_is_a_python_number() -> None:
    snapshot = window({"a": [1.0]}, histogram=True, overhead_ratio=np.float32(0.1))
    scalars = HistoryRow.of(snapshot, EVERYTHING).scalars()
    assert {type(value) for value in scalars.values()} == {int, float}


def listed(*snapshots: Snapshot) -> list[list[float | None]]:
    """The samples in the row of these windows, merged one after the other as a queue merges them."""
    (part,) = reduce(HistoryRow.merge, map(HistoryRow.of, snapshots)).parts()
    return part[keys.SAMPLES]


def test_a_row_lists_its_samples_with_six_digits_and_the_elements_that_are_not_finite() -> None:
    # norms 5, sqrt(2), sqrt(1) of the finite rest, and none where nothing is finite
    row = window({"a": [3, 4]}, {"a": [1, 1]}, {"a": [1, NAN, INF]}, {"a": [NAN]}, first_step=7)
    assert listed(row) == [[7, 5.0], [8, 1.41421], [9, 1.0, 2], [10, None, 1]]
    (part,) = HistoryRow.of(row).parts()
    assert (part[keys.FIRST_SAMPLE], part[keys.STEP], part[keys.NUM_SAMPLES]) == (7, 10, 4)


def test_merged_rows_hold_the_samples_of_all_and_nothing_between_them() -> None:
    first, later = window({"a": [1.0]}, first_step=64), window({"a": [2.0]}, {"a": [3.0]}, first_step=132)
    (part,) = HistoryRow.of(first).merge(HistoryRow.of(later)).parts()
    assert part[keys.SAMPLES] == [[64, 1.0], [132, 2.0], [133, 3.0]]
    assert (part[keys.FIRST_SAMPLE], part[keys.STEP], part[keys.NUM_SAMPLES]) == (64, 133, 3)


def test_a_second_model_says_what_its_own_rows_hold() -> None:
    (part,) = HistoryRow.of(window({"a": [1.0]}), namespace="critic").parts()
    assert part["gradwatch/critic/samples"] == [[1, 1.0]]
    assert (part["gradwatch/critic/first_sample"], part["gradwatch/critic/num_samples"]) == (1, 1)
    assert keys.SAMPLES not in part


def test_a_row_of_thousands_of_samples_is_small_and_keeps_the_conspicuous_ones() -> None:
    # Norms of 1 in 5,000 steps, but 9 at step 1,001, and NaN at step 3,001. Blocks of 16 steps are the first of which
    # at most 512 cover them: 313. The first sample of a block stays where all are equal.
    gradients: list[dict[str, list[float]]] = [{"a": [1.0]} for _ in range(5000)]
    gradients[1000], gradients[3000] = {"a": [9.0]}, {"a": [NAN]}
    row = window(*gradients)
    found = listed(row)
    assert len(found) == 313
    assert found[:2] == [[1, 1.0], [16, 1.0]]
    assert [sample for sample in found if sample[1] != 1] == [[1001, 9.0], [3001, None, 1]]
    assert len(json.dumps(found)) < 20_000
    parts = [select_samples(row, range(begin, min(begin + 700, 5000))) for begin in range(0, 5000, 700)]
    assert listed(*parts) == found
    (part,) = HistoryRow.of(row).parts()
    assert part[keys.NUM_SAMPLES] == 5000


def test_wandb_stores_the_samples_of_a_row_and_makes_no_scalar_of_them(tmp_path: Path) -> None:
    run = wandb.init(mode="offline", dir=str(tmp_path), settings=wandb.Settings(silent=True, console="off"))
    sink = WandbSink(run)
    sink.write(window({"a": [3, 4]}, {"a": [NAN]}))
    sink.close()
    run.finish()
    found = records(run)
    rows = [one["history"]["item"] for one in found if "history" in one]
    assert [row[keys.SAMPLES] for row in rows] == [[[1, 5], [2, None, 1]]]
    summary = {key for one in found if "summary" in one for key in one["summary"].get("update", {})}
    assert keys.GRAD_NORM_MAX in summary
    assert not [key for key in summary if key.startswith(keys.SAMPLES)]


_values = st.one_of(
    st.none(), st.lists(st.sampled_from([0.0, 1.0, -2.5, 1e-30, 1e6, NAN, INF, -INF]), min_size=1, max_size=4)
)
_samples = st.lists(st.fixed_dictionaries({}, optional={"a": _values, "b.c": _values}), min_size=1, max_size=4)


@given(first=_samples, second=_samples, histograms=st.tuples(st.booleans(), st.booleans()))
def test_the_row_of_two_windows_is_the_merge_of_their_rows(first: list, second: list, histograms: tuple) -> None:
    a = window(*first, histogram=histograms[0])
    b = window(*second, first_step=len(first) + 1, histogram=histograms[1])
    merged = HistoryRow.of(a, EVERYTHING).merge(HistoryRow.of(b, EVERYTHING))
    whole = HistoryRow.of(a.merge(b), EVERYTHING)
    assert merged.scalars() == pytest.approx(whole.scalars())
    assert merged.listed.as_json() == whole.listed.as_json()
    assert merged.histograms.keys() == whole.histograms.keys()
    for key, histogram in merged.histograms.items():
        np.testing.assert_array_equal(histogram.packed(), whole.histograms[key].packed())


def test_the_precision_forecast_is_logged_for_every_format() -> None:
    # Three elements are not 0. 2^-30 and 2^-20 are below fp16's smallest normal number 2^-14, 2^-30 is below half its
    # smallest subnormal number, 2^-25, and 1 can double log2(65504) times. For fp8 e4m3: 2^-6, 2^-10 and 448.
    snapshot = window({"a": [2.0**-30, 0.0], "b": [2.0**-20, 1.0]}, histogram=True)
    vitals = HistoryRow.of(snapshot, PRECISION).scalars()
    assert vitals["gradwatch/fp16_underflow_ratio"] == pytest.approx(2 / 3)
    assert vitals["gradwatch/fp16_flush_ratio"] == pytest.approx(1 / 3)
    assert vitals["gradwatch/fp16_headroom"] == pytest.approx(math.log2(65504))
    assert vitals["gradwatch/fp8_e4m3_flush_ratio"] == pytest.approx(2 / 3)
    assert vitals["gradwatch/fp8_e4m3_headroom"] == pytest.approx(math.log2(448))
    assert (vitals["gradwatch/bf16_underflow_ratio"], vitals["gradwatch/bf16_flush_ratio"]) == (0, 0)
    assert {f"gradwatch/{name}_{what}" for name in FORMATS for what in FORECASTS} <= set(vitals)


def test_a_forecast_that_cannot_be_made_is_missing() -> None:
    without = HistoryRow.of(window({"a": [1.0]}), PRECISION).scalars()
    zeros = HistoryRow.of(window({"a": [0.0, 0.0]}, histogram=True), PRECISION).scalars()
    lowest_bin = HistoryRow.of(window({"a": [2.0**-130]}, histogram=True), PRECISION).scalars()
    assert not [key for key in (*without, *zeros) if key.endswith(FORECASTS[:2])]
    assert "gradwatch/bf16_flush_ratio" not in lowest_bin  # unknown, because the lowest bin has no lower edge
    assert lowest_bin["gradwatch/bf16_underflow_ratio"] == 1


def test_the_forecast_of_two_windows_is_that_of_their_elements() -> None:
    first, later = window({"a": [2.0**-30]}, histogram=True), window({"a": [1.0]}, first_step=2, histogram=True)
    vitals = HistoryRow.of(first, PRECISION).merge(HistoryRow.of(later, PRECISION)).scalars()
    assert (vitals["gradwatch/fp16_flush_ratio"], vitals["gradwatch/fp16_headroom"]) == (0.5, math.log2(65504))


def test_details_are_logged_on_request_each_by_its_definition() -> None:
    # of -1, 0, 3: mean 2/3, E[g^2] - mean^2 = 10/3 - 4/9 = 26/9; the received gradient has the same norm sqrt(10)
    snapshot = window({"a.b": [-1, 0, 3]})
    details = {
        "grad_mean/a/b": 2 / 3,
        "grad_std/a/b": math.sqrt(26 / 9),
        "grad_min/a/b": -1,
        "grad_max/a/b": 3,
        "grad_abs_max/a/b": 3,
        "grad_abs_min_nonzero/a/b": 1,
        "zero_ratio/a/b": 1 / 3,
        "grad_norm_clipped/a/b": math.sqrt(10),
        "gradwatch/grad_mean": 2 / 3,  # there is one layer
        "gradwatch/grad_std": math.sqrt(26 / 9),
        "gradwatch/grad_abs_max": 3,
    }
    plain = HistoryRow.of(snapshot).scalars()
    every = HistoryRow.of(snapshot, dict.fromkeys(keys.DETAILS, "")).scalars()
    assert {key: value for key, value in every.items() if key not in plain} == pytest.approx(details)
    some = HistoryRow.of(snapshot, {"mean": "", "received": ""}).scalars()
    assert some.keys() - plain.keys() == {"grad_mean/a/b", "gradwatch/grad_mean", "grad_norm_clipped/a/b"}


def test_details_by_pattern_are_those_of_the_layers_that_match() -> None:
    snapshot = window({"a.weight": [1.0], "b.weight": [2.0], "b.bias": [3.0]})
    some = HistoryRow.of(snapshot, {"mean": r"^b\.", "max": "weight$"}).scalars()
    assert some.keys() - HistoryRow.of(snapshot).scalars().keys() == {
        *("grad_mean/b/weight", "grad_mean/b/bias", "gradwatch/grad_mean"),
        *("grad_max/a/weight", "grad_max/b/weight"),
    }
    assert HistoryRow.of(window({}), {"mean": "weight"}).step == 1  # a window without layers is valid


def test_the_table_of_many_rows_is_the_one_that_wandb_makes_of_them_row_by_row():
    columns = ["step", "name", "norm", "skipped"]
    rows = [[s, f"layer{s % 3}", None if s % 5 == 0 else s / 2, s % 2 == 0] for s in range(40)]
    (part,) = TableRow(columns, rows).parts()
    table, expected = part[keys.FLIGHT_RECORDER], wandb.Table(columns=columns, data=rows)
    assert (table.columns, table.data) == (expected.columns, rows)
    assert table._column_types == expected._column_types
    assert part[keys.STEP] == 39


def sent(*snapshots: Snapshot) -> list[dict[str, object]]:
    """The rows that a sink logs of these windows."""
    zeros = ZerosLeftOut()
    return [part for one in snapshots for part in HistoryRow.of(one, zeros=zeros).parts()]


def test_zeros_of_a_layer_are_left_out_until_its_first_other_value() -> None:
    quiet, dead, broken = {"a.w": [1.0, 2.0], "b": [1.0]}, {"a.w": [0.0, 2.0], "b": [1.0]}, {"a.w": [NAN], "b": [1.0]}
    rows = sent(
        *(window(one, first_step=step) for step, one in enumerate((quiet, dead, quiet, broken, quiet), start=1))
    )
    assert [row.get("dead_ratio/a/w") for row in rows] == [None, 0.5, 0, None, 0]  # nothing finite in the fourth
    assert [row.get("num_nonfinite/a/w") for row in rows] == [None, None, None, 1, 0]
    assert not [key for row in rows for key in row if key in ("dead_ratio/b", "num_nonfinite/b")]
    assert [row["gradwatch/num_nan"] for row in rows] == [0, 0, 0, 1, 0]  # of the model, always


def test_a_reader_sees_zeros_where_the_layer_was_measured_and_nowhere_else() -> None:
    windows = [{"a": [1.0]}, {"a": None}, {"a": [0.0, NAN]}, {"a": [NAN]}, {"a": [1.0]}]
    snapshots = [window(one | {"b": [2.0]}, first_step=step) for step, one in enumerate(windows, start=1)]
    reader = RunReader(Path("x"))
    for row in sent(*snapshots):
        reader.take_row(row)
    found = reader.history().values
    np.testing.assert_array_equal(found["num_nonfinite/a"], [0, NAN, 1, 1, 0])
    np.testing.assert_array_equal(found["dead_ratio/a"], [0, NAN, 0.5, NAN, 0])
    for family in keys.ONCE_NOT_ZERO:
        np.testing.assert_array_equal(found[f"{family}/b"], np.zeros(5))


def test_a_model_of_four_parameters_has_at_most_47_keys() -> None:
    healthy = {"0.weight": [1.0], "0.bias": [1.0], "2.weight": [1.0], "2.bias": [1.0]}
    broken = {name: [0.0, NAN, 1.0] for name in healthy}
    known = {keys.LOSS: np.ones(1), keys.NUM_NONFINITE_LOSS: np.zeros(1), keys.SAMPLE_EVERY: np.ones(1)}
    options = {"histogram": True, "metrics": known, "loss_scale": np.array([8.0]), "overhead_ratio": 0.01}
    rebinner, zeros = Rebinner(), ZerosLeftOut()
    found = [
        set().union(*HistoryRow.of(window(one, **options), {}, rebinner, "", zeros).parts())
        for one in (healthy, broken)
    ]
    # 19 of the model, with the loss, the scale and the list of histograms; of each layer four norms and the histogram,
    # and two where it is sick
    assert [len(one) for one in found] == [19 + 4 * 5, 19 + 4 * 7]
