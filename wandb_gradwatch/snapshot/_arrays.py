"""Read-only arrays, arithmetic in which NaN means missing (never 0), and quantiles of histograms."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, TypeVar

import numpy as np
import numpy.typing as npt

from .._measure.columns import ZERO_BIN, FloatArray, IntArray

# S samples in the window, P watched parameters (or groups), B bins of the signed histogram, M magnitude bins

Array = TypeVar("Array", bound=np.ndarray)

# A sum of squares below this value may be inaccurate or 0, because float64 cannot represent the squares of elements
# below 1e-154. Only float64 gradients have such elements.
LEAST_SUM_SQ: Final = 2.0**-970


def frozen(values: Array) -> Array:
    """A read-only view of the values; the array itself if it is read-only already."""
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
        """A property that is computed once; an array result is made read-only.

        Unlike functools.cached_property, it takes no lock (as before Python 3.12) and needs no wrapper for freezing:
        derived properties are a large part of the time that the rules take per sample.
        """

        def __init__(self, compute: Callable[[Any], Any]) -> None:
            self._compute, self._name, self.__doc__ = compute, compute.__name__, compute.__doc__

        def __get__(self, owner: object | None, kind: type) -> Any:
            if owner is None:
                return self
            value = self._compute(owner)
            # The descriptor has no __set__, so later reads find this entry and do not call __get__ again.
            vars(owner)[self._name] = value
            if isinstance(value, np.ndarray):
                value.setflags(write=False)
            return value


def ratio(numerator: FloatArray, denominator: FloatArray) -> FloatArray:
    """numerator / denominator; NaN where the denominator is 0 or infinite, or either value is missing."""
    return divided_where((denominator > 0) & (denominator < np.inf), numerator, denominator)


def divided_where(known: npt.NDArray[np.bool_], numerator: FloatArray, denominator: FloatArray) -> FloatArray:
    """numerator / denominator where `known` is True, otherwise NaN; all arrays have one shape."""
    quotient: FloatArray = np.divide(numerator, denominator, out=np.full(known.shape, np.nan), where=known)
    return quotient


def finite_or_missing(extremes: FloatArray) -> FloatArray:
    """Replace infinite values by NaN: a minimum or maximum over no elements is infinite and means missing."""
    return np.where(np.isinf(extremes), np.nan, extremes)


def too_small(sum_sq_SP: FloatArray) -> npt.NDArray[np.bool_] | None:
    """Where a sum of squares is below LEAST_SUM_SQ, so 0 or inaccurate: [S, P]; None if nowhere, the usual case."""
    tiny_SP: npt.NDArray[np.bool_] = sum_sq_SP < LEAST_SUM_SQ
    return tiny_SP if np.count_nonzero(tiny_SP) else None


def last_present(values_SP: FloatArray, present_SP: npt.NDArray[np.bool_]) -> FloatArray:
    """Each name's value, or row, in its last sample with a gradient: [P], or [P, C]; NaN if it has no such sample.

    If the value in that sample is NaN, the result is NaN: no value of an earlier sample replaces it.
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
    """Each name's count, summed over the samples in which it is present: [P]; NaN if it is present in none."""
    absent = np.isnan(counts_SP).all(axis=0)
    return np.where(absent, np.nan, np.nansum(counts_SP, axis=0))


def fold_signs(histogram_PB: IntArray) -> IntArray:
    """The histogram of |g| without zeros: [P, M]."""
    return histogram_PB[:, ZERO_BIN + 1 :] + histogram_PB[:, ZERO_BIN - 1 :: -1]


def quantile_of(
    counts_PB: IntArray, edges: FloatArray, q: npt.ArrayLike, low_P: FloatArray, high_P: FloatArray
) -> FloatArray:
    """The q-quantiles of histograms, interpolated linearly in a bin between the known extremes: [P], or [Q, P]."""
    cumulative = np.cumsum(counts_PB, axis=1)
    total = cumulative[:, -1]
    # Ranks start at 1, so q = 0 is the first element and q = 1 the last.
    rank = np.maximum(np.ceil(np.asarray(q)[..., None] * total), 1)
    bins = np.minimum(np.add.reduce(cumulative < rank[..., None], axis=-1), counts_PB.shape[1] - 1)
    names = np.arange(len(counts_PB))
    count = counts_PB[names, bins]
    inside = (rank - (cumulative[names, bins] - count) - 0.5) / np.maximum(count, 1)
    left = np.maximum(edges[bins], low_P)
    right = np.maximum(np.minimum(edges[bins + 1], high_P), left)
    with np.errstate(invalid="ignore"):  # an open bin without known extremes has no finite width
        value = left + inside * (right - left)
    return np.where(total > 0, value, np.nan)
