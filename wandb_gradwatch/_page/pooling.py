"""More rows than a picture has columns: neighbours become one, and nothing that matters is lost."""

from __future__ import annotations

import math
from typing import Final

import numpy as np

from .._measure.columns import FloatArray, IntArray

# R rows of the run, P names, W columns of a picture

MIN_COLUMNS: Final = 50
_SUMMED: Final = frozenset({"num_nan", "num_inf", "num_nonfinite", "num_skipped_steps", "num_guarded_steps"})


def pool_width(num_rows: int, max_columns: int) -> int:
    """How many neighbouring rows become one column so that there are at most `max_columns`."""
    return max(1, math.ceil(num_rows / max_columns))


def picture_width(num_rows: int, num_names: int, max_cells: int) -> int:
    """The same for a names x steps picture of at most `max_cells`, which has MIN_COLUMNS for any number of names."""
    return pool_width(num_rows, max(MIN_COLUMNS, max_cells // max(num_names, 1)))


def pool_steps(steps: IntArray, width: int) -> tuple[IntArray, IntArray]:
    """First and last step of every column: two [W]."""
    return steps[::width], np.append(steps[width - 1 :: width], steps[-1:] if len(steps) % width else steps[:0])


def is_summed(key: str) -> bool:
    """Whether the values of this key are counts, which are added up over neighbouring rows."""
    return key.partition("/")[0] in _SUMMED or key.rpartition("/")[2] in _SUMMED


def pool(values_RP: FloatArray, width: int, key: str) -> FloatArray:
    """Pool neighbouring rows: counts are added, everything else keeps its largest value, so a spike stays seen.

    Infinity wins over every number, a number over a missing value.
    """
    if width == 1:
        return values_RP
    starts = np.arange(0, len(values_RP), width)
    if not is_summed(key):
        return np.fmax.reduceat(values_RP, starts, axis=0)
    missing = np.logical_and.reduceat(np.isnan(values_RP), starts, axis=0)
    return np.where(missing, np.nan, np.add.reduceat(np.nan_to_num(values_RP, nan=0.0), starts, axis=0))


def pool_extremes(steps_N: FloatArray, values_N: FloatArray, most: int) -> tuple[FloatArray, FloatArray]:
    """A line of at most `most` points, two at least: the smallest and the largest of neighbours.

    What is not finite wins as the largest, so that no NaN is lost.
    """
    width = pool_width(len(values_N), most)
    if width == 1:
        return steps_N, values_N
    width = pool_width(len(values_N), most // 2)
    starts = np.arange(0, len(values_N), width)
    extremes = (np.fmin.reduceat(values_N, starts), np.maximum.reduceat(values_N, starts))
    ends = np.append(starts[1:] - 1, len(values_N) - 1)
    num_points = 2 * len(starts) - int(starts[-1] == ends[-1])  # a last neighbour alone is one point
    pairs = (np.stack([steps_N[starts], steps_N[ends]], axis=1), np.stack(extremes, axis=1))
    return pairs[0].ravel()[:num_points], pairs[1].ravel()[:num_points]
