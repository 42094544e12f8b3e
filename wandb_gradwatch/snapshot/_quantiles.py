"""Quantiles out of the fixed histogram bins: right to a bin, and narrowed by the extremes where they are known."""

from __future__ import annotations

import numpy as np

from .._measure.columns import ZERO_BIN, FloatArray, IntArray, histogram_edges, magnitude_edges

# P names, B bins of the signed histogram, M magnitude bins


def fold_signs(histogram_PB: IntArray) -> IntArray:
    """The histogram of |g| without the zeros: [P, M]."""
    return histogram_PB[:, ZERO_BIN + 1 :] + histogram_PB[:, ZERO_BIN - 1 :: -1]


def signed_quantile(histogram_PB: IntArray, q: float, low_P: FloatArray, high_P: FloatArray) -> FloatArray:
    """The q-quantile of the signed elements, between the smallest and the largest: [P]; NaN where none is counted."""
    return _quantile(histogram_PB, histogram_edges(), q, low_P, high_P)


def magnitude_quantile(histogram_PB: IntArray, q: float, low_P: FloatArray, high_P: FloatArray) -> FloatArray:
    """The q-quantile of the magnitudes, zeros included, between the smallest that is not 0 and the largest: [P]."""
    zeros_P1 = histogram_PB[:, ZERO_BIN, None]
    counts = np.concatenate([zeros_P1, fold_signs(histogram_PB)], axis=1)
    low_P = np.where(zeros_P1[:, 0] > 0, 0.0, low_P)
    return _quantile(counts, np.concatenate([[0.0], magnitude_edges()]), q, low_P, high_P)


def _quantile(counts_PB: IntArray, edges: FloatArray, q: float, low_P: FloatArray, high_P: FloatArray) -> FloatArray:
    """Find the bin that holds the q-quantile and interpolate in it linearly, within the known extremes: [P]."""
    cumulative = np.cumsum(counts_PB, axis=1)
    total = cumulative[:, -1]
    # The rank counts elements from 1, so q = 0 is the first element and q = 1 the last.
    rank = np.clip(np.ceil(q * total), 1, None)
    bins = np.minimum(np.sum(cumulative < rank[:, None], axis=1), counts_PB.shape[1] - 1)
    names = np.arange(len(counts_PB))
    count = counts_PB[names, bins]
    inside = (rank - (cumulative[names, bins] - count) - 0.5) / np.maximum(count, 1)
    left = np.maximum(edges[bins], low_P)
    right = np.maximum(np.minimum(edges[bins + 1], high_P), left)
    with np.errstate(invalid="ignore"):  # an open bin without known extremes has no inside
        value = left + inside * (right - left)
    return np.where(total > 0, value, np.nan)
