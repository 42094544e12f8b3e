"""The schema of a row: its columns, how each one merges, and the fixed histogram bins.

A row holds the statistics of one parameter's gradient at one sample. Every column is a sum, a minimum or a
maximum, and the histogram's bins never move, so rows merge exactly:

    merge(row(a), row(b)) == row(concat(a, b))

Missing is NaN. A row whose NUM_ELEMENTS is NaN is absent (no gradient arrived), and merging skips it. NaN in another
column of a present row means that the value is unknown, and every merge with it gives NaN.

A complex element counts as one element, by its magnitude.
"""

from collections.abc import Callable, Sequence
from enum import IntEnum
from functools import cache
from typing import Final, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

# S samples in the window, P watched parameters, C columns, B histogram bins, E elements of one tensor

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]


class Elements(NamedTuple):
    """The elements of a tensor, from which its columns are defined."""

    values: FloatArray  # [E]
    finite: FloatArray  # the finite ones among them
    dead_threshold: float = 0.0


def _num_nan(elements: Elements) -> float:
    return int(np.count_nonzero(np.isnan(elements.values)))


def _num_inf(elements: Elements) -> float:
    return int(np.count_nonzero(np.isinf(elements.values)))


def _sum_sq(elements: Elements) -> float:
    return float(np.square(elements.finite).sum())


class Column(IntEnum):
    """A statistic of a row. Its number is its place in the row, which no other file may know.

    Each has the way in which it merges, the power of the loss scale with which it scales, the tensor whose elements it
    describes (the gradient as the backward left it, the gradient that the optimizer received, after clipping, or the
    parameter), and its definition. The columns of one tensor are neighbours.
    """

    merge: Literal["sum", "min", "max"]
    power: int
    of: Literal["gradient", "received", "parameter"]
    definition: Callable[[Elements], float]

    def __new__(cls, merge: str, power: int, of: str, definition: Callable[[Elements], float]) -> "Column":
        column = int.__new__(cls, len(cls.__members__))
        column._value_ = len(cls.__members__)
        vars(column).update(merge=merge, power=power, of=of, definition=definition)
        return column

    NUM_ELEMENTS = "sum", 0, "gradient", lambda e: e.values.size  # finite or not
    NUM_NAN = "sum", 0, "gradient", _num_nan
    NUM_INF = "sum", 0, "gradient", _num_inf  # of either sign
    NUM_ZERO = "sum", 0, "gradient", lambda e: np.count_nonzero(e.finite == 0)  # of either sign
    NUM_DEAD = "sum", 0, "gradient", lambda e: np.count_nonzero(abs(e.finite) <= e.dead_threshold)
    GRAD_SUM = "sum", 1, "gradient", lambda e: e.finite.sum()
    GRAD_SUM_SQ = "sum", 2, "gradient", _sum_sq
    GRAD_MIN = "min", 1, "gradient", lambda e: e.finite.min(initial=np.inf)
    GRAD_MAX = "max", 1, "gradient", lambda e: e.finite.max(initial=-np.inf)
    GRAD_ABS_MIN_NONZERO = "min", 1, "gradient", lambda e: abs(e.finite[e.finite != 0]).min(initial=np.inf)
    RECEIVED_SUM_SQ = "sum", 2, "received", _sum_sq
    RECEIVED_NUM_NAN = "sum", 0, "received", _num_nan
    RECEIVED_NUM_INF = "sum", 0, "received", _num_inf
    PARAM_SUM_SQ = "sum", 0, "parameter", _sum_sq
    PARAM_NUM_NONFINITE = "sum", 0, "parameter", lambda e: e.values.size - e.finite.size


NUM_COLUMNS: Final = len(Column)
COLUMN_NAMES: Final = tuple(column.name for column in Column)  # travel with all rows that are saved


def _places(of: str) -> slice:
    places = [column for column in Column if column.of == of]
    return slice(int(places[0]), places[-1] + 1)


GRADIENT_COLUMNS: Final = _places("gradient")
RECEIVED_COLUMNS: Final = _places("received")
PARAMETER_COLUMNS: Final = _places("parameter")

# For each received column, the gradient's column with the same definition.
AS_LEFT: Final = tuple(
    next(left for left in Column if left.definition is column.definition) for column in list(Column)[RECEIVED_COLUMNS]
)
NONFINITE_COLUMNS: Final = (Column.NUM_NAN, Column.NUM_INF, Column.RECEIVED_NUM_NAN, Column.RECEIVED_NUM_INF)

SUM_COLUMNS: Final = tuple(column for column in Column if column.merge == "sum")
MIN_COLUMNS: Final = tuple(column for column in Column if column.merge == "min")
MAX_COLUMNS: Final = tuple(column for column in Column if column.merge == "max")
_EXTREMES: Final = tuple((c, np.minimum if c.merge == "min" else np.maximum) for c in MIN_COLUMNS + MAX_COLUMNS)

# Multiplying each column by (1 / loss scale) ** power turns a row of scaled gradients into a row of true gradients. All
# other columns have power 0.
SCALE_POWER: Final = {column: column.power for column in Column if column.power}


def define(elements: Elements, *of: str) -> FloatArray:
    """Return the row of a tensor by the columns' definitions: [C]; NaN in columns that are not `of` this tensor."""
    return np.array([column.definition(elements) if column.of in of else np.nan for column in Column])


_NOTHING: Final = np.zeros(0)
IDENTITY_C: Final = np.array([c.definition(Elements(_NOTHING, _NOTHING)) for c in Column])  # merging it changes nothing
ZERO_C: Final = np.array([c.definition(Elements(np.zeros(1), np.zeros(1))) for c in Column])  # of one element of 0


def arranged(rows: FloatArray, names: Sequence[str]) -> FloatArray:
    """Return rows of another version, whose columns have these names [..., any], in this version's columns: [..., C].

    Columns that it lacked are unknown (NaN); those that this version lacks are dropped.
    """
    arranged_rows: FloatArray = np.full((*rows.shape[:-1], NUM_COLUMNS), np.nan)
    for place, name in enumerate(names):
        if name in Column.__members__:
            arranged_rows[..., Column[name]] = rows[..., place]
    return arranged_rows


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
