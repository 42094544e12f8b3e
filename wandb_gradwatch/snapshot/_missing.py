"""Arithmetic in which NaN is what is missing: never 0, and never a number made of nothing."""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from .._measure.columns import FloatArray

# S samples in the window, P watched parameters (or groups)


# Below it, a sum of squares may have lost digits, or all of it, to squares that float64 cannot hold: elements below
# 1e-154, which only float64 gradients have.
LEAST_SUM_SQ: Final = 2.0**-970


def ratio(numerator: FloatArray, denominator: FloatArray) -> FloatArray:
    """numerator / denominator, NaN where the denominator is 0 or infinite, or either is missing."""
    undefined = ~((denominator > 0) & (denominator < np.inf))
    return np.where(undefined, np.nan, numerator / np.where(undefined, 1.0, denominator))


def finite_or_missing(extremes: FloatArray) -> FloatArray:
    """The identity of a minimum or maximum (nothing entered it) as missing."""
    return np.where(np.isinf(extremes), np.nan, extremes)


def too_small(sum_sq_SP: FloatArray) -> npt.NDArray[np.bool_] | None:
    """Where a sum of squares is 0 or may have lost digits: [S, P]; None for nowhere, as nearly always."""
    tiny_SP: npt.NDArray[np.bool_] = sum_sq_SP < LEAST_SUM_SQ
    return tiny_SP if np.count_nonzero(tiny_SP) else None


def last_present(values_SP: FloatArray, present_SP: npt.NDArray[np.bool_] | None = None) -> FloatArray:
    """Each name's value in the last sample that it is present in: [P]; NaN where it never is.

    Args:
        values_SP: what the samples have.
        present_SP: where a gradient arrived: a value that is missing there is missing, and no earlier one takes its
            place; None: wherever there is a value.
    """
    if len(values_SP) < 2:
        return values_SP[0] if len(values_SP) else np.full(values_SP.shape[1:], np.nan)
    present_SP = ~np.isnan(values_SP) if present_SP is None else present_SP
    last_P = len(values_SP) - 1 - np.argmax(present_SP[::-1], axis=0)
    result: FloatArray = values_SP[last_P, np.arange(len(last_P))]
    return result


def sum_of_present(counts_SP: FloatArray) -> FloatArray:
    """Each name's count over the samples in which it is present: [P]; NaN where it never is."""
    absent = np.isnan(counts_SP).all(axis=0)
    return np.where(absent, np.nan, np.nansum(counts_SP, axis=0))
