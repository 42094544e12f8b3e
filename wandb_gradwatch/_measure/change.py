"""Classify what changed gradients between two measurements: clipping or something else. A pure function of rows.

Clipping multiplies a parameter's gradient by one factor of at most 1, or limits each of its elements. Both are visible
in a row: the sum, the extremes and the norm shrink by the same factor, or the extremes equal the limit. Noise, a
projection or a replaced gradient do neither.
"""

import math
from dataclasses import dataclass
from typing import Final

import numpy as np

from .columns import CLIP_TOLERANCE, Column, FloatArray

# N gradients, C columns

_FLOAT16_EPS, _FLOAT16_SPACING = 2.0**-10, 2.0**-24  # smallest float16: values scaled near it lose digits or become 0
_LIMIT_TOLERANCE: Final = 1e-5  # relative, of a clipped norm: torch divides by (norm + 1e-6)

_SUMS_AND_EXTREMES: Final = (
    *(Column.GRAD_SUM, Column.GRAD_SUM_SQ, Column.GRAD_MIN, Column.GRAD_MAX, Column.GRAD_ABS_MIN_NONZERO),
)

# The value of `keys.CLIPPED`, instead of 1, for a sample that may have been clipped:
MULTIPLIED: Final = 0.5  # one factor below 1, but not by torch's functions: clipping, or a change of unit


@dataclass(frozen=True)
class Change:
    """How the gradients of a sample changed between two measurements."""

    shrunk: bool  # some gradients shrank in the way that clipping does
    other: bool  # some gradients changed in a way that no clipping does
    factor: float  # the factor by which every gradient was multiplied; NaN if there is none

    @property
    def is_clipping(self) -> bool:
        """Whether clipping explains all changes."""
        return self.shrunk and not self.other

    @property
    def is_common(self) -> bool:
        """Whether a single factor other than 1 explains all changes."""
        return not math.isnan(self.factor) and abs(self.factor - 1) > CLIP_TOLERANCE


def change_between(before_NC: FloatArray, after_NC: FloatArray, eps: float) -> Change:
    """Compare rows of the same gradients; ignore gradients that are missing or not finite in either row.

    Args:
        before_NC, after_NC: the rows before and after the change.
        eps: the relative precision of the gradients' dtype; of several dtypes, the coarsest.
    """
    nonfinite = [Column.NUM_NAN, Column.NUM_INF]
    known = ~(before_NC[:, nonfinite].any(axis=1) | after_NC[:, nonfinite].any(axis=1))  # NaN is True as well
    num = before_NC[known, Column.NUM_ELEMENTS]
    total, sum_sq, low, high, least = before_NC[known][:, _SUMS_AND_EXTREMES].T
    after_total, after_sum_sq, after_low, after_high, after_least = after_NC[known][:, _SUMS_AND_EXTREMES].T
    was_zero, tolerance = sum_sq == 0, 4 * eps + CLIP_TOLERANCE
    spacing = _FLOAT16_SPACING if eps == _FLOAT16_EPS else 0.0
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        factor = np.where(was_zero, 1.0, np.sqrt(after_sum_sq / sum_sq))
        slack = tolerance * factor * np.maximum(np.abs(low), np.abs(high)) + spacing
        slack_of_total = tolerance * factor * np.sqrt(num * sum_sq) + num * spacing
        multiplied = (was_zero & (after_sum_sq == 0)) | (
            (np.abs(after_low - factor * low) <= slack)
            & (np.abs(after_high - factor * high) <= slack)
            & (np.abs(after_total - factor * total) <= slack_of_total)
        )
        # Elements may first be scaled (by the factor of the smallest element) and then limited (to the largest left).
        first = np.minimum(after_least / least, 1.0)
        limit = np.maximum(np.abs(after_low), np.abs(after_high))
        slack = tolerance * limit + spacing
        limited = (
            (np.abs(after_high - np.minimum(first * high, limit)) <= slack)
            & (np.abs(after_low - np.maximum(first * low, -limit)) <= slack)
            & (after_least <= least * (1 + tolerance))
            & (after_sum_sq <= first**2 * sum_sq * (1 + tolerance))
        )
    same = multiplied & (np.abs(factor - 1) <= CLIP_TOLERANCE)
    clipped = (factor < 1 - CLIP_TOLERANCE) & (multiplied | limited)
    factors, common = factor[~was_zero], math.nan
    if factors.size and multiplied.all() and np.ptp(factors) <= tolerance * factors.max():
        common = float(np.median(factors))
    return Change(bool(clipped.any()), not (same | clipped).all(), common)


def is_limit(norm: float) -> bool:
    """Return whether a norm looks like a limit that a person chose: at most two significant digits, as 1, 0.5 or 25."""
    if not 0 < norm < math.inf:
        return False
    digits = norm / 10.0 ** (math.floor(math.log10(norm)) - 1)  # 10 to 100
    return abs(digits - round(digits)) <= _LIMIT_TOLERANCE * digits
