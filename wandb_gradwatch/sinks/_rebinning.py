"""The picture of a gradient's distribution: few even bins around zero, out of the snapshot's many uneven ones.

The bins that merge are two per octave, from 2^-126 on: exact, and unreadable as a heat map. A picture has 65 even bins,
zero in the middle one. Its range is a power of two above the 99.9 % quantile of |g|, so a few outliers, which are
counted in the outermost bins, do not press everything else into one bin; and it is sticky, so that the rows of a heat
map are comparable.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from typing import Final

import numpy as np

from .._measure.columns import FloatArray, IntArray, histogram_edges, magnitude_edges
from .._measure.probe_values import MetricHistogram
from ..snapshot._arrays import fold_signs

# P names, B bins of the snapshot, K bins of the picture

HALF_BINS: Final = 32
NUM_PICTURE_BINS: Final = 2 * HALF_BINS + 1
_SHOWN: Final = 0.999
_STICKY_OCTAVES: Final = 2  # a range stays until it is more than this many octaves too wide, or too narrow at all
_LOWER_EDGES_K: Final = np.arange(NUM_PICTURE_BINS + 1) - HALF_BINS - 0.5  # in bin widths; dyadic, so short as JSON


class Rebinner:
    """Make pictures of snapshots, and remember each name's range from one to the next."""

    def __init__(self) -> None:
        self._exponent_of: dict[str, int] = {}

    def draw(self, histograms: Mapping[str, MetricHistogram]) -> dict[str, tuple[list[int], list[float]]]:
        """Counts [K] and edges [K + 1] of every histogram that counts an element, by its key."""
        if not histograms:
            return {}
        all_PB = np.stack([histogram.counts for histogram in histograms.values()])
        counted_P = np.logical_or.reduce(all_PB, axis=1)
        names, histogram_PB = list(itertools.compress(histograms, counted_P)), all_PB[counted_P]
        low_P, high_P = np.array([(histograms[name].low, histograms[name].high) for name in names]).reshape(-1, 2).T
        widths_P = np.array(
            [
                math.ldexp(1.0, self._exponent(name, reach)) / HALF_BINS
                for name, reach in zip(names, _reach(histogram_PB, low_P, high_P).tolist(), strict=True)
            ]
        )
        edges_PK = widths_P[:, None] * _LOWER_EDGES_K
        counts_PK = _redistribute(histogram_PB, edges_PK, low_P, high_P)
        return dict(zip(names, zip(counts_PK.tolist(), edges_PK.tolist(), strict=True), strict=True))

    def _exponent(self, name: str, reach: float) -> int:
        """The sticky exponent of the range that covers `reach`."""
        needed = max(math.frexp(reach)[1] - (math.frexp(reach)[0] == 0.5), -1000) if reach > 0 else None
        known = self._exponent_of.get(name)
        if needed is None:  # nothing but zeros
            return 0 if known is None else known
        if known is None or not needed <= known <= needed + _STICKY_OCTAVES:
            known = self._exponent_of[name] = needed
        return known


def _reach(histogram_PB: IntArray, low_P: FloatArray, high_P: FloatArray) -> FloatArray:
    """The end of the bin that holds the shown quantile of |g|, or the largest |g| where that is nearer: [P]."""
    # Zeros are left out: where nearly all elements are zero (an embedding), the others make the picture.
    up_to_PM = np.cumsum(fold_signs(histogram_PB), axis=1)
    shown_P = _SHOWN * up_to_PM[:, -1]
    last_bin_P = np.argmax(up_to_PM >= shown_P[:, None], axis=1)
    edges = magnitude_edges()
    largest_P = np.maximum(np.abs(low_P), np.abs(high_P))
    reach_P = np.minimum(edges[last_bin_P + 1], largest_P)
    reach_P = np.where(np.isinf(reach_P), 2 * edges[-2], reach_P)  # the open bin, and not even the extremes are known
    return np.where(up_to_PM[:, -1] > 0, reach_P, 0.0)


def _redistribute(histogram_PB: IntArray, edges_PK: FloatArray, low_P: FloatArray, high_P: FloatArray) -> IntArray:
    """Count again in other bins, as if each bin's elements lay evenly in the part of it that holds any: [P, K]."""
    fixed, inner_PK = histogram_edges(), edges_PK[:, 1:-1]
    # No inner edge is 0, so the zero bin, which has no width, lies on one side of each of them as a whole.
    bin_PK = np.searchsorted(fixed, inner_PK, side="right") - 1
    finite = np.clip(fixed, -np.finfo(np.float64).max, np.finfo(np.float64).max)
    left_PK = np.maximum(finite[bin_PK], low_P[:, None])
    right_PK = np.minimum(finite[bin_PK + 1], high_P[:, None])
    width_PK = right_PK / 2 - left_PK / 2  # halves, as the open bins' difference may overflow
    with np.errstate(divide="ignore", invalid="ignore"):
        share_PK = np.where(width_PK > 0, (inner_PK / 2 - left_PK / 2) / width_PK, inner_PK >= left_PK)
    up_to_PB = np.cumsum(histogram_PB, axis=1)
    place_PK = bin_PK + np.arange(0, histogram_PB.size, histogram_PB.shape[1])[:, None]  # in the flat histograms
    inside_PK = histogram_PB.take(place_PK)
    below_PK = np.zeros(edges_PK.shape, dtype=np.int64)
    below_PK[:, 1:-1] = up_to_PB.take(place_PK) - inside_PK
    below_PK[:, 1:-1] += np.rint(np.minimum(np.maximum(share_PK, 0.0), 1.0) * inside_PK).astype(np.int64)
    below_PK[:, -1] = up_to_PB[:, -1]
    return below_PK[:, 1:] - below_PK[:, :-1]
