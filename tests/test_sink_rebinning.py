"""Histograms for W&B: accurate to a bin, not collapsed by outliers, and comparable from row to row."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import wandb
from hypothesis import given
from hypothesis import strategies as st
from windows import window

from wandb_gradwatch._page.read import RunReader
from wandb_gradwatch.sinks import _history_row
from wandb_gradwatch.sinks._history_row import HALF_BINS, NUM_LOGGED_BINS, HistoryRow, Rebinner
from wandb_gradwatch.snapshot import Snapshot, keys


def drawn(snapshot: Snapshot, rebinner: Rebinner | None = None) -> dict[str, tuple[list[int], list[float]]]:
    return (rebinner or Rebinner()).draw(HistoryRow.of(snapshot).histograms)


def picture(values: list[float]) -> tuple[list[int], list[float]]:
    return drawn(window({"a": values}, histogram=True))["gradients/a"]


def test_zero_is_in_the_middle_bin() -> None:
    counts, edges = picture([0.0, 0.0, 1.0, -1.0])
    assert len(counts) == NUM_LOGGED_BINS == 65
    assert edges == [-edge for edge in reversed(edges)]
    assert edges[HALF_BINS] < 0 < edges[HALF_BINS + 1]
    assert counts[HALF_BINS] == 2


def test_the_range_is_the_next_power_of_two() -> None:
    # |g| up to 0.75 gives the range [-1, 1]: bins of 1/32 centred on 0, so the outermost bins end half a bin beyond 1.
    _, edges = picture([0.5, -0.75, 0.1])
    assert edges[-1] == 1 + 0.5 / HALF_BINS
    assert edges[1] - edges[0] == 1 / HALF_BINS


def test_a_largest_value_that_is_a_power_of_two_needs_no_wider_range() -> None:
    assert picture([1.0, -1.0])[1][-1] == 1 + 0.5 / HALF_BINS


def test_values_are_in_their_bin_to_the_width_of_a_fixed_bin() -> None:
    # The fixed bin of 0.6 is [0.5, 0.75): its elements are spread evenly over the new bins from 0.5 to 0.75, cut off at
    # the maximum, 0.6.
    counts, edges = picture([0.6] * 1000)
    middle = (np.array(edges[:-1]) + np.array(edges[1:])) / 2
    inside = np.array(counts) > 0
    assert middle[inside].min() >= 0.5 - 1 / HALF_BINS
    assert middle[inside].max() <= 0.6 + 1 / HALF_BINS


def test_one_outlier_does_not_collapse_the_picture() -> None:
    rng = np.random.default_rng(0)
    counts, edges = picture([*(1e-3 * rng.standard_normal(100_000)), 1e3])
    # 99.9 % of |g| lie within 3.29 standard deviations, in the fixed bin [2.9e-3, 3.9e-3): the range is 2^-8 = 3.9e-3.
    assert edges[-1] == 2**-8 * (1 + 0.5 / HALF_BINS)
    assert 1 <= counts[-1] < 100  # the outermost bin holds the outlier and all else beyond the range
    assert sum(counts) == 100_001
    assert np.count_nonzero(counts) > 20


def test_mostly_zeros_do_not_collapse_the_picture() -> None:
    counts, edges = picture([0.0] * 99_990 + [0.3, -0.4, 0.2, 0.1, -0.1] * 2)
    assert edges[-1] == 0.5 + 0.25 / HALF_BINS
    assert counts[HALF_BINS] == 99_990
    assert np.count_nonzero(counts) > 5


@pytest.mark.parametrize("scale", [1e-300, 1e-40, 1e-15, 1e-8, 1.0, 1e6, 1e30])
def test_any_magnitude_makes_a_picture_of_its_own_size(scale: float) -> None:
    counts, edges = picture([scale, -scale, scale / 2, -scale / 2])
    assert sum(counts) == 4
    assert scale <= edges[-1] <= 2.1 * scale or scale == 1e-300
    assert all(math.isfinite(edge) for edge in edges)
    assert counts[HALF_BINS] < 4 or scale == 1e-300


def test_only_zeros_are_a_bar_in_the_middle() -> None:
    counts, edges = picture([0.0] * 7)
    assert counts[HALF_BINS] == 7
    assert edges[-1] > 0


def test_a_name_without_elements_has_no_picture() -> None:
    assert drawn(window({"a": [1.0], "frozen": None}, histogram=True)).keys() == {"gradients/a"}
    assert drawn(window({"a": [1.0]})) == {}


def test_the_range_is_sticky() -> None:
    rebinner = Rebinner()

    def reach(largest: float) -> float:
        edges = drawn(window({"a": [largest]}, histogram=True), rebinner)["gradients/a"][1]
        return edges[-1] / (1 + 0.5 / HALF_BINS)

    assert reach(0.9) == 1
    assert reach(0.4) == 1  # one octave less: comparable
    assert reach(0.2) == 1  # two octaves less
    assert reach(0.1) == 0.125  # three: too coarse
    assert reach(3.0) == 4  # never too narrow


_value = st.floats(-1e6, 1e6) | st.sampled_from([0.0, 1e-45, -1e-20])


@given(st.lists(_value, min_size=1, max_size=200))
def test_no_element_is_lost_or_changes_its_sign(values: list[float]) -> None:
    counts, _ = picture(values)
    assert sum(counts) == len(values)
    assert min(counts) >= 0
    negative, positive = sum(counts[:HALF_BINS]), sum(counts[HALF_BINS + 1 :])
    assert negative <= sum(value < 0 for value in values)
    assert positive <= sum(value > 0 for value in values)


def test_without_known_extremes_the_open_bins_still_have_a_place() -> None:
    known = window({"a": [1e30, 1.0, -1e30]}, histogram=True)
    unknown = Snapshot(steps=known.steps, names=known.names, rows=known.rows, histogram=known.histogram)
    counts, edges = drawn(unknown)["gradients/a"]
    assert sum(counts) == 3
    assert all(math.isfinite(edge) for edge in edges)


@pytest.mark.parametrize("namespace", ["", "critic"])
@pytest.mark.parametrize("most", [10_000_000, 10_000])
def test_the_page_gets_the_counts_themselves(most: int, namespace: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_history_row, "MAX_ROW_BYTES", most)
    gradients = {f"layer.{place}": [2.0**place, -1e-3 * place, 0.0] for place in range(20)}
    snapshot = window(gradients | {"frozen": None}, histogram=True)
    parts = HistoryRow.of(snapshot, rebinner=Rebinner(), namespace=namespace).parts()
    assert (len(parts) > 1) == (most == 10_000)
    lists = [key for part in parts for key in part if keys.holds_histograms(key)]
    assert lists[0] == keys.in_namespace(keys.HISTOGRAMS, namespace)
    assert len(set(lists)) == len(lists)  # W&B may store the parts in one row
    reader = RunReader(Path("run-x.wandb"))
    for part in parts:
        plain = {key: value for key, value in part.items() if not isinstance(value, wandb.Histogram)}
        assert len(json.dumps(plain)) <= most
        reader.take_row(json.loads(json.dumps(plain), parse_int=float))
    found = reader.history().histograms
    assert list(found) == [name.replace(".", "/") for name in gradients]
    assert snapshot.histogram is not None
    for series, counts, values in zip(found.values(), snapshot.histogram, gradients.values(), strict=False):
        np.testing.assert_array_equal(series.counts, [counts])
        np.testing.assert_allclose([series.low[0], series.high[0]], [min(values), max(values)], rtol=1e-5)
