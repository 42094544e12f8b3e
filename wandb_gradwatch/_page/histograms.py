"""Histograms over time, in bounded memory and one shape."""

from __future__ import annotations

from typing import Final

import numpy as np

from .._measure.columns import FloatArray
from .history import HistogramSeries

# H histograms of one name, B bins

NUM_DISPLAY_BINS: Final = 65  # as many as our rows have, zero in the middle one: those stay as they are
_PLACES: Final = np.arange(NUM_DISPLAY_BINS + 1.0)
MAX_STORED: Final = 100_000  # histograms over all names: about 70 MB

_Stored = tuple[int, float, float, FloatArray]


class HistogramCollector:
    """Keeps histograms evenly thinned in time: when there are too many, every second one of each name goes."""

    def __init__(self, max_stored: int = MAX_STORED) -> None:
        self._max_stored = max_stored
        self._stride = 1
        self._seen: dict[str, int] = {}
        self._kept: dict[str, list[_Stored]] = {}
        self._num_kept = 0

    def add(self, name: str, step: int, edges: object, counts: object) -> None:
        """Take one histogram as W&B stores it; one whose arrays do not fit together is left out."""
        place = self._seen.get(name, 0)
        self._seen[name] = place + 1
        if place % self._stride:
            return
        resampled = resample(edges, counts)
        if resampled is None:
            return
        self._kept.setdefault(name, []).append((step, *resampled))
        self._num_kept += 1
        if self._num_kept > self._max_stored:
            self._stride *= 2
            self._kept = {kept: stored[::2] for kept, stored in self._kept.items()}
            self._num_kept = sum(map(len, self._kept.values()))

    def series(self) -> dict[str, HistogramSeries]:
        """Every name's histograms in the order of their steps."""
        return {name: _series(stored) for name, stored in self._kept.items()}


def _series(stored: list[_Stored]) -> HistogramSeries:
    stored = sorted(stored, key=lambda histogram: histogram[0])
    return HistogramSeries(
        steps=np.array([step for step, *_ in stored], dtype=np.int64),
        low=np.array([low for _, low, _, _ in stored]),
        high=np.array([high for _, _, high, _ in stored]),
        counts=np.stack([counts for *_, counts in stored]),
    )


def resample(edges: object, counts: object) -> tuple[float, float, FloatArray] | None:
    """Bring a histogram to NUM_DISPLAY_BINS bins of equal width, its elements spread evenly within each old bin.

    Returns:
        the lower and the upper limit, and the counts [B]; None where there is no histogram: the arrays do not fit
        together, or an edge is not finite.
    """
    try:
        edge = np.asarray(edges, dtype=np.float64)
        count = np.asarray(counts, dtype=np.float64)
    except (TypeError, ValueError):
        return None
    if edge.ndim != 1 or count.ndim != 1 or len(edge) != len(count) + 1 or not len(count):
        return None
    if not (np.isfinite(edge).all() and np.isfinite(count).all()):
        return None
    low, high = float(edge[0]), float(edge[-1])
    if len(count) == NUM_DISPLAY_BINS and low < high:
        width = (high - low) / NUM_DISPLAY_BINS
        if np.abs(edge - low - width * _PLACES).max() <= 1e-3 * width:
            return low, high, count
    if low == high:
        return low, high, np.append(np.zeros(NUM_DISPLAY_BINS - 1), count.sum())
    if not (np.diff(edge) > 0).all():
        return None
    cumulative = np.concatenate([[0.0], np.cumsum(count)])
    new_edges = np.linspace(low, high, NUM_DISPLAY_BINS + 1)
    return low, high, np.diff(np.interp(new_edges, edge, cumulative))
