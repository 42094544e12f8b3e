"""The schema of rows: how columns merge, and the edges of the histogram's bins."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from windows import MISSING_C

from wandb_gradwatch._measure.columns import (
    IDENTITY_C,
    MAGNITUDE_BINS,
    MAX_COLUMNS,
    MIN_COLUMNS,
    NUM_BINS,
    NUM_COLUMNS,
    SUM_COLUMNS,
    ZERO_BIN,
    Column,
    bins_of,
    histogram_edges,
    magnitude_edges,
    merge_rows,
)


def row(**columns: float) -> np.ndarray:
    result = IDENTITY_C.copy()
    for name, value in columns.items():
        result[Column[name.upper()]] = value
    return result


def test_every_column_merges_in_exactly_one_way() -> None:
    assert sorted(SUM_COLUMNS + MIN_COLUMNS + MAX_COLUMNS) == list(Column)


def test_sums_add_minima_and_maxima_choose() -> None:
    a = row(num_elements=2, grad_sum=3, grad_sum_sq=5, grad_min=1, grad_max=2, grad_abs_min_nonzero=1)
    b = row(num_elements=1, grad_sum=-4, grad_sum_sq=16, grad_min=-4, grad_max=-4, grad_abs_min_nonzero=4)
    expected = row(num_elements=3, grad_sum=-1, grad_sum_sq=21, grad_min=-4, grad_max=2, grad_abs_min_nonzero=1)
    np.testing.assert_array_equal(merge_rows(np.stack([a, b]), axis=0), expected)


def test_the_empty_row_and_absent_rows_change_nothing() -> None:
    present = row(num_elements=2, grad_sum=3, grad_min=1, grad_max=2)
    for neutral in (IDENTITY_C, MISSING_C):
        np.testing.assert_array_equal(merge_rows(np.stack([neutral, present, neutral]), axis=0), present)


def test_nothing_but_absent_rows_is_absent_not_zero() -> None:
    assert np.isnan(merge_rows(np.stack([MISSING_C, MISSING_C]), axis=0)).all()


def test_a_column_that_could_not_be_seen_stays_unseen_in_every_merge() -> None:
    seen = row(num_elements=1)
    for column in Column:
        if column is Column.NUM_ELEMENTS:
            continue
        unseen = seen.copy()
        unseen[column] = np.nan
        merged = merge_rows(np.stack([seen, unseen, seen]), axis=0)
        assert np.isnan(merged[column])
        assert not np.isnan(np.delete(merged, column)).any()


def test_merging_keeps_the_other_dimensions() -> None:
    rows = np.tile(row(num_elements=1), (2, 3, 4, 1))
    for axis, shape in ((0, (3, 4)), (1, (2, 4)), (-2, (2, 3))):
        merged = merge_rows(rows, axis=axis)
        assert merged.shape == (*shape, NUM_COLUMNS)
        assert (merged[..., Column.NUM_ELEMENTS] == rows.shape[axis]).all()


def test_the_edges_are_the_documented_ones() -> None:
    edges = magnitude_edges()
    assert edges[:4].tolist() == [0.0, 2.0**-126, 2.0**-47, 1.5 * 2.0**-47]
    assert edges[-3:].tolist() == [2.0**15, 1.5 * 2.0**15, math.inf]
    assert len(edges) == MAGNITUDE_BINS + 1
    assert (np.diff(edges[:-1]) > 0).all()
    signed = histogram_edges()
    assert len(signed) == NUM_BINS + 1
    assert signed[ZERO_BIN] == signed[ZERO_BIN + 1] == 0


@pytest.mark.parametrize("sign", [1, -1])
def test_an_edge_belongs_to_the_bin_above_it_and_its_predecessor_to_the_bin_below(sign: int) -> None:
    for index, edge in enumerate(magnitude_edges()[1:-1], start=1):
        below = np.nextafter(edge, 0)
        assert bins_of(np.array([sign * edge, sign * below])).tolist() == [
            (ZERO_BIN + 1 + index if sign > 0 else ZERO_BIN - 1 - index),
            (ZERO_BIN + index if sign > 0 else ZERO_BIN - index),
        ]


def test_zeros_of_both_signs_have_a_bin_that_the_smallest_values_do_not_share() -> None:
    assert bins_of(np.array([0.0, -0.0, 5e-324, -5e-324])).tolist() == [128, 128, 129, 127]


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_a_value_lies_between_the_edges_of_its_bin(value: float) -> None:
    edges = histogram_edges()
    index = int(bins_of(np.array([value]))[0])
    if value == 0:
        assert index == ZERO_BIN
    elif value > 0:
        assert edges[index] <= value < edges[index + 1]
        assert index > ZERO_BIN
    else:
        assert edges[index] < value <= edges[index + 1]
        assert index < ZERO_BIN
