"""The schema of rows: how columns merge, and the edges of the histogram's bins."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from windows import MISSING_C

from wandb_gradwatch._measure.columns import (
    AS_LEFT,
    GRADIENT_COLUMNS,
    IDENTITY_C,
    MAGNITUDE_BINS,
    MAX_COLUMNS,
    MIN_COLUMNS,
    NUM_BINS,
    NUM_COLUMNS,
    PARAMETER_COLUMNS,
    RECEIVED_COLUMNS,
    SUM_COLUMNS,
    ZERO_BIN,
    ZERO_C,
    Column,
    Elements,
    arranged,
    bins_of,
    define,
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


# Rounded, because the smallest numbers and their squares become 0 when they are scaled.
parts = st.lists(
    st.floats(-1e3, 1e3).map(lambda value: round(value, 6)) | st.sampled_from([math.nan, math.inf, -math.inf, 0.0]),
    max_size=8,
)


def defined(values: list[float], scale: float = 1.0) -> np.ndarray:
    array = np.array(values, dtype=np.float64) * scale
    elements = Elements(array, array[np.isfinite(array)], 0.5 * scale)
    return define(elements, "gradient", "received", "parameter")


@given(first=parts, second=parts)
def test_the_definition_of_every_column_merges_as_the_schema_says(first: list[float], second: list[float]) -> None:
    merged = merge_rows(np.stack([defined(first), defined(second)]), axis=0)
    np.testing.assert_allclose(merged, defined(first + second), rtol=1e-12, atol=1e-9)


@given(values=parts)
def test_the_definition_of_every_column_scales_with_the_power_that_the_schema_says(values: list[float]) -> None:
    powers = np.array([0 if column.of == "parameter" else column.power for column in Column], dtype=float)
    scaled = defined(values) * 0.25**powers  # a power of two: no rounding
    of_parameter = [column.of == "parameter" for column in Column]
    np.testing.assert_array_equal(scaled[np.invert(of_parameter)], defined(values, 0.25)[np.invert(of_parameter)])


def test_the_empty_row_and_the_row_of_a_zero_are_those_of_the_definitions() -> None:
    # One element, which is zero and dead; 0 is the smallest and the largest, and none is not zero.
    of_zero = row(num_elements=1, num_zero=1, num_dead=1, grad_min=0, grad_max=0)
    np.testing.assert_array_equal(ZERO_C, of_zero)
    np.testing.assert_array_equal(IDENTITY_C, [{"sum": 0, "min": math.inf, "max": -math.inf}[c.merge] for c in Column])


def test_the_columns_of_one_tensor_are_neighbours() -> None:
    columns = list(Column)
    for places, of in (
        (GRADIENT_COLUMNS, "gradient"),
        (RECEIVED_COLUMNS, "received"),
        (PARAMETER_COLUMNS, "parameter"),
    ):
        assert columns[places] == [column for column in Column if column.of == of]
    assert columns[RECEIVED_COLUMNS] == [Column.RECEIVED_SUM_SQ, Column.RECEIVED_NUM_NAN, Column.RECEIVED_NUM_INF]
    assert AS_LEFT == (Column.GRAD_SUM_SQ, Column.NUM_NAN, Column.NUM_INF)


def test_rows_of_another_version_are_read_by_the_names_of_their_columns() -> None:
    names = [column.name for column in reversed(Column) if column is not Column.GRAD_MAX]
    theirs = np.arange(2 * (len(names) + 1), dtype=np.float64).reshape(2, -1)
    ours = arranged(theirs, [*names, "GRAD_SUM_CUBED"])
    assert ours.shape == (2, NUM_COLUMNS)
    assert np.isnan(ours[:, Column.GRAD_MAX]).all()
    for place, name in enumerate(names):
        assert ours[:, Column[name]].tolist() == theirs[:, place].tolist()


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
