"""Histograms of sharded parameters over the ranks: counts add up, and of the extremes the largest count."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from .._measure.columns import NUM_BINS, FloatArray
from .._measure.probe_values import MetricHistogram
from ..snapshot import keys

# P watched parameters, B histogram bins

_NOTHING = MetricHistogram(np.zeros(NUM_BINS, dtype=np.int64), np.inf, -np.inf)


def keys_of(names: Sequence[str]) -> list[str]:
    """The key of each parameter's histogram: [P]."""
    return [f"{keys.PARAMETER_HISTOGRAMS}/{name}" for name in names]


def pack(
    histograms: Mapping[str, MetricHistogram], names: Sequence[str], counted: npt.NDArray[np.bool_]
) -> tuple[FloatArray, FloatArray]:
    """What this rank adds to the sums, and to the maxima (minima negated): [P, B] and [2, P], both flat."""
    found = [
        histograms.get(key, _NOTHING) if counts else _NOTHING
        for key, counts in zip(keys_of(names), counted.tolist(), strict=True)
    ]
    counts_PB = np.stack([one.counts for one in found]).astype(np.float64)
    return counts_PB.ravel(), np.array([[-one.low for one in found], [one.high for one in found]]).ravel()


def unpack(counts: FloatArray, extremes: FloatArray, names: Sequence[str]) -> dict[str, MetricHistogram]:
    """The histograms of the whole parameters, by key; none where no rank has counted an element."""
    counts_PB = counts.reshape(len(names), NUM_BINS).astype(np.int64)
    low_P, high_P = extremes.reshape(2, len(names)) * [[-1.0], [1.0]]
    whole = zip(keys_of(names), counts_PB, low_P.tolist(), high_P.tolist(), strict=True)
    return {key: MetricHistogram(counts_B, low, high) for key, counts_B, low, high in whole if counts_B.any()}
