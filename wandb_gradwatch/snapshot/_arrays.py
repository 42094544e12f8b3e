"""Arrays that many read and nobody writes, arithmetic where NaN is what is missing (never 0), and quantiles of bins."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, TypeVar

import numpy as np
import numpy.typing as npt

from .._measure.columns import ZERO_BIN, FloatArray, IntArray

# S samples in the window, P watched parameters (or groups), B bins of the signed histogram, M magnitude bins

Array = TypeVar("Array", bound=np.ndarray)

# Below it, a sum of squares may have lost digits, or all of it, to squares that float64 cannot hold: elements below
# 1e-154, which only float64 gradients have.
LEAST_SUM_SQ: Final = 2.0**-970


def frozen(values: Array) -> Array:
    """The same values, which cannot be written through this array."""
    if not values.flags.writeable:
        return values
    view = values.view()
    view.setflags(write=False)
    return view


if TYPE_CHECKING:
    from functools import cached_property

    derived = cached_property
else:

    class derived:  # noqa: N801  # a decorator, as cached_property is
        """A property that is computed once; an array is frozen.

        Like functools.cached_property, but for its lock (before Python 3.12) and without a wrapper that freezes: what
        is derived of each sample is a large part of what judging it takes.
        """

        def __init__(self, compute: Callable[[Any], Any]) -> None:
            self._compute, self._name, self.__doc__ = compute, compute.__name__, compute.__doc__

        def __get__(self, owner: object | None, kind: type) -> Any:
            if owner is None:
                return self
            value = self._compute(owner)
            # Beside this descriptor, which sets nothing: the next look does not come here any more.
            vars(owner)[self._name] = value = frozen(value) if isinstance(value, np.ndarray) else value
            return value


def ratio(numerator: FloatArray, denominator: FloatArray) -> FloatArray:
    """numerator / denominator, NaN where the denominator is 0 or infinite, or either is missing."""
    return divided_where((denominator > 0) & (denominator < np.inf), numerator, denominator)


def divided_where(known: npt.NDArray[np.bool_], numerator: FloatArray, denominator: FloatArray) -> FloatArray:
    """numerator / denominator where that is known, NaN elsewhere; all of one shape."""
    quotient: FloatArray = np.divide(numerator, denominator, out=np.full(known.shape, np.nan), where=known)
    return quotient


def finite_or_missing(extremes: FloatArray) -> FloatArray:
    """The identity of a minimum or maximum (nothing entered it) as missing."""
    return np.where(np.isinf(extremes), np.nan, extremes)


def too_small(sum_sq_SP: FloatArray) -> npt.NDArray[np.bool_] | None:
    """Where a sum of squares is 0 or may have lost digits: [S, P]; None for nowhere, as nearly always."""
    tiny_SP: npt.NDArray[np.bool_] = sum_sq_SP < LEAST_SUM_SQ
    return tiny_SP if np.count_nonzero(tiny_SP) else None


def last_present(values_SP: FloatArray, present_SP: npt.NDArray[np.bool_]) -> FloatArray:
    """Each name's value, or row, in the last sample that it is present in: [P], or [P, C]; NaN where it never is.

    Where a name is present and has no value the value is missing: no earlier one takes its place.
    """
    if not len(values_SP):
        return np.full(values_SP.shape[1:], np.nan)
    if present_SP[-1].all():
        last: FloatArray = values_SP[-1]
        return last
    last_P = len(values_SP) - 1 - np.argmax(present_SP[::-1], axis=0)
    last = values_SP[last_P, np.arange(len(last_P))]
    return last


def sum_of_present(counts_SP: FloatArray) -> FloatArray:
    """Each name's count over the samples in which it is present: [P]; NaN where it never is."""
    absent = np.isnan(counts_SP).all(axis=0)
    return np.where(absent, np.nan, np.nansum(counts_SP, axis=0))


def fold_signs(histogram_PB: IntArray) -> IntArray:
    """The histogram of |g| without the zeros: [P, M]."""
    return histogram_PB[:, ZERO_BIN + 1 :] + histogram_PB[:, ZERO_BIN - 1 :: -1]


def quantile_of(
    counts_PB: IntArray, edges: FloatArray, q: npt.ArrayLike, low_P: FloatArray, high_P: FloatArray
) -> FloatArray:
    """Find the bin that holds the q-quantile; in it go linearly between the known extremes: [P], or [Q, P]."""
    cumulative = np.cumsum(counts_PB, axis=1)
    total = cumulative[:, -1]
    # The rank counts elements from 1, so q = 0 is the first element and q = 1 the last.
    rank = np.maximum(np.ceil(np.asarray(q)[..., None] * total), 1)
    bins = np.minimum(np.add.reduce(cumulative < rank[..., None], axis=-1), counts_PB.shape[1] - 1)
    names = np.arange(len(counts_PB))
    count = counts_PB[names, bins]
    inside = (rank - (cumulative[names, bins] - count) - 0.5) / np.maximum(count, 1)
    left = np.maximum(edges[bins], low_P)
    right = np.maximum(np.minimum(edges[bins + 1], high_P), left)
    with np.errstate(invalid="ignore"):  # an open bin without known extremes has no inside
        value = left + inside * (right - left)
    return np.where(total > 0, value, np.nan)
