"""The schema of a row: its columns, how each one merges, and the fixed histogram bins.

A row holds the statistics of one parameter's gradient at one sample. Every column is a sum, a minimum or a
maximum, and the histogram's bins never move, so rows merge exactly:

    merge(row(a), row(b)) == row(concat(a, b))

Missing is NaN. A row whose NUM_ELEMENTS is NaN is absent (no gradient arrived), and merging skips it. NaN in another
column of a present row means that the value is unknown, and every merge with it gives NaN.

A complex element counts as one element, by its magnitude.
"""

from enum import IntEnum
from functools import cache
from typing import Final

import numpy as np
import numpy.typing as npt

# S samples in the window, P watched parameters, C columns, B histogram bins

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]


class Column(IntEnum):
    """A statistic of a row. Sums and extremes cover only the finite elements."""

    NUM_ELEMENTS = 0  # all elements, finite or not
    NUM_NAN = 1
    NUM_INF = 2  # of either sign
    NUM_ZERO = 3  # exactly 0 (of either sign)
    NUM_DEAD = 4  # |g| <= dead threshold, zeros included
    GRAD_SUM = 5
    GRAD_SUM_SQ = 6
    GRAD_MIN = 7  # +inf where no element is finite
    GRAD_MAX = 8  # -inf where no element is finite
    GRAD_ABS_MIN_NONZERO = 9  # +inf where no finite element is non-zero
    RECEIVED_SUM_SQ = 10  # of the gradient that the optimizer received, after clipping
    RECEIVED_NUM_NAN = 11
    RECEIVED_NUM_INF = 12
    PARAM_SUM_SQ = 13
    PARAM_NUM_NONFINITE = 14


NUM_COLUMNS: Final = len(Column)

# The columns of the gradient that the optimizer received, and the same columns of the gradient from the backward.
RECEIVED_COLUMNS: Final = slice(Column.RECEIVED_SUM_SQ, Column.RECEIVED_NUM_INF + 1)
AS_LEFT: Final = (Column.GRAD_SUM_SQ, Column.NUM_NAN, Column.NUM_INF)
NONFINITE_COLUMNS: Final = (Column.NUM_NAN, Column.NUM_INF, Column.RECEIVED_NUM_NAN, Column.RECEIVED_NUM_INF)

# How columns merge: by minimum, by maximum, and all others by sum.
MIN_COLUMNS: Final = (Column.GRAD_MIN, Column.GRAD_ABS_MIN_NONZERO)
MAX_COLUMNS: Final = (Column.GRAD_MAX,)
SUM_COLUMNS: Final = tuple(column for column in Column if column not in MIN_COLUMNS + MAX_COLUMNS)
_EXTREMES: Final = tuple((c, np.minimum if c in MIN_COLUMNS else np.maximum) for c in MIN_COLUMNS + MAX_COLUMNS)

# The power of the gradient's unit in a column: multiplying each column by (1 / loss scale) ** power turns a row of
# scaled gradients into a row of true gradients. Counts and parameter columns have power 0.
SCALE_POWER: Final[dict[Column, int]] = {
    Column.GRAD_SUM: 1,
    Column.GRAD_SUM_SQ: 2,
    Column.GRAD_MIN: 1,
    Column.GRAD_MAX: 1,
    Column.GRAD_ABS_MIN_NONZERO: 1,
}

IDENTITY_C: Final[FloatArray] = np.zeros(NUM_COLUMNS)  # the row of an empty tensor: merging it changes nothing
IDENTITY_C[list(MIN_COLUMNS)] = np.inf
IDENTITY_C[list(MAX_COLUMNS)] = -np.inf


# A gradient counts as clipped if it shrank by more than this, relative to its norm. Rounding shrinks less:
# clip_grad_norm_ multiplies a norm equal to its limit by 1 - 2e-7.
CLIP_TOLERANCE: Final = 1e-5


def merge_rows(rows: FloatArray, axis: int) -> FloatArray:
    """Merge rows along one axis. Absent rows are skipped; if all rows are absent, the result is absent.

    Args:
        rows: [..., C], with any leading dimensions.
        axis: the leading dimension to reduce.

    Returns:
        The rows without `axis`.
    """
    axis = axis % rows.ndim
    absent = np.isnan(rows[..., Column.NUM_ELEMENTS])
    present = np.where(absent[..., None], IDENTITY_C, rows)
    merged: FloatArray = np.add.reduce(present, axis=axis)
    for column, merge in _EXTREMES:  # np.minimum, unlike np.fmin, keeps the NaN of an unknown value
        merged[..., column] = merge.reduce(present[..., column], axis=axis, initial=IDENTITY_C[column])
    merged[np.logical_and.reduce(absent, axis=axis)] = np.nan
    return merged


def merge_adjacent_rows(rows: FloatArray, starts: IntArray) -> FloatArray:
    """Merge each run of adjacent present rows [M, C] into one row: [N, C]; `starts` has the run's first rows: [N]."""
    merged: FloatArray = np.add.reduceat(rows, starts, axis=0)
    for column, merge in _EXTREMES:
        merged[:, column] = merge.reduceat(rows[:, column], starts)
    return merged


# Histogram bins are made of leading bits of the float. Per sign: one bin below float32's smallest normal number, one up
# to the window, then two per octave (the exponent and the first bit of the mantissa); the last is open. Zero has a bin.
#
#   magnitude bin  covers
#   0              (0, 2^-126)
#   1              [2^-126, 2^-47)
#   2, 3           [2^-47, 1.5 * 2^-47), [1.5 * 2^-47, 2^-46)
#   ...
#   126, 127       [2^15, 1.5 * 2^15), [1.5 * 2^15, inf)
#
# The index of a value in the histogram of B = 257 bins: 128 for zero, 129 + m for positive and 127 - m for negative
# values, where m is the magnitude bin. NaN and Inf have no bin: the sum over the bins counts the finite elements.
MAGNITUDE_BINS: Final = 128
ZERO_BIN: Final = MAGNITUDE_BINS
NUM_BINS: Final = 2 * MAGNITUDE_BINS + 1
MIN_WINDOW_EXPONENT: Final = -47  # magnitude bin 2 starts at 2 ** this


@cache
def magnitude_edges() -> FloatArray:
    """The edges of the magnitude bins, from 0 to +inf: [MAGNITUDE_BINS + 1]. Read-only."""
    octave = np.arange(2, MAGNITUDE_BINS) // 2 - 1 + MIN_WINDOW_EXPONENT
    mantissa = np.where(np.arange(2, MAGNITUDE_BINS) % 2 == 0, 1.0, 1.5)
    edges = np.concatenate([[0.0, 2.0**-126], mantissa * 2.0**octave, [np.inf]])
    edges.flags.writeable = False
    return edges


@cache
def histogram_edges() -> FloatArray:
    """The edges of the signed histogram, from -inf to +inf: [B + 1]. The zero bin has both edges at 0. Read-only."""
    edges = np.concatenate([-magnitude_edges()[::-1], magnitude_edges()])
    edges.flags.writeable = False
    return edges


def bins_of(values: FloatArray) -> IntArray:
    """Return the histogram bin of each finite value. This is the specification that all backends are tested against."""
    magnitude = np.abs(values)
    bins = np.searchsorted(magnitude_edges()[1:-1], magnitude, side="right")
    return np.asarray(np.where(magnitude == 0, ZERO_BIN, ZERO_BIN + np.copysign(1 + bins, values)), dtype=np.int64)
