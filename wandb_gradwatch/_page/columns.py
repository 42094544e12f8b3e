"""What is kept while a run's file is read: scalars and histograms by key, thinned where they become too many."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from operator import itemgetter
from typing import Final

import numpy as np

from .._measure.columns import FloatArray, IntArray
from .history import HistogramSeries
from .packing import is_summed, pool, pool_extremes

# R rows, H histograms of one name, B bins

MAX_CELLS: Final = 40_000_000  # rows x keys: 320 MB
MAX_OWN_VALUES: Final = 8_000_000  # of all keys together: 128 MB
MIN_OWN_VALUES: Final = 1_000  # of one key, however many there are
NUM_DISPLAY_BINS: Final = 65  # as many as our rows have, zero in the middle one: those stay as they are
_PLACES: Final = np.arange(NUM_DISPLAY_BINS + 1.0)
MAX_STORED: Final = 100_000  # histograms over all names: about 70 MB


class RowColumns:
    """Our numbers, one row per step. When there are too many, neighbouring rows are merged, as a window is."""

    def __init__(self, max_cells: int = MAX_CELLS) -> None:
        self.merged = 1  # rows of the run in one that is kept
        self._max_cells = max_cells
        self._steps = array("q")
        self._times = array("d")
        self._columns: dict[str, array[float]] = {}
        self._num_in_last = 0  # rows of the run in the last one that is kept

    def begin(self, step: int, time: float | None) -> None:
        """Begin a row; numbers of the same step belong to one."""
        known = np.nan if time is None else time
        if self._steps and (self._steps[-1] == step or self._num_in_last < self.merged):
            self._num_in_last += self._steps[-1] != step
            self._steps[-1], self._times[-1] = step, known
        elif len(self._steps) * len(self._columns) > self._max_cells:
            self._merge_neighbours()
            self.begin(step, time)
        else:
            self._steps.append(step)
            self._times.append(known)
            self._num_in_last = 1

    def add(self, key: str, value: float) -> None:
        """Take one number of the row that has begun."""
        column = self._columns.setdefault(key, array("d"))
        place = len(self._steps) - 1
        if len(column) <= place:
            column.extend([np.nan] * (place - len(column)))
            column.append(value)
        elif self._num_in_last == 1:
            column[place] = value  # the same step once more
        else:
            column[place] = np.nansum([column[place], value]) if is_summed(key) else np.fmax(column[place], value)

    def matrix(self) -> tuple[IntArray, FloatArray, dict[str, FloatArray]]:
        """Ascending steps [R], the times at which their rows were logged [R], and each key's values [R]."""
        steps, last, row_of = np.unique(
            np.array(self._steps, dtype=np.int64)[::-1], return_index=True, return_inverse=True
        )
        row_of = row_of[::-1]
        times = np.array(self._times)[::-1][last]
        values = {}
        for key, column in self._columns.items():
            found, values[key] = np.array(column), np.full(len(steps), np.nan)
            known = ~np.isnan(found)  # a run that was resumed has steps twice, and not every key each time
            values[key][row_of[: len(found)][known]] = found[known]
        return steps, times, values

    def _merge_neighbours(self) -> None:
        """Halve the rows. The last one stays open when their number is odd."""
        num_rows = len(self._steps)
        last = np.minimum(np.arange(1, num_rows + 1, 2), num_rows - 1)
        self._steps = array("q", np.array(self._steps)[last].tolist())
        self._times = array("d", np.array(self._times)[last].tolist())
        self._columns = {
            key: array("d", pool(np.array(column)[:, None], 2, key)[:, 0].tolist())
            for key, column in self._columns.items()
        }
        if num_rows % 2 == 0:
            self._num_in_last += self.merged
        self.merged *= 2


class OwnColumns:
    """The user's scalars, each with steps of its own. When one has more than its share, its extremes are kept."""

    def __init__(self, max_values: int = MAX_OWN_VALUES) -> None:
        self._max_values = max_values
        self._columns: dict[str, tuple[array[float], array[float]]] = {}

    def add(self, key: str, step: float, value: float) -> None:
        """Take one number."""
        steps, values = self._columns.setdefault(key, (array("d"), array("d")))
        steps.append(step)
        values.append(value)
        most = max(self._max_values // len(self._columns), MIN_OWN_VALUES)
        if len(values) > most:
            thinned = pool_extremes(np.array(steps), np.array(values), most // 2)
            self._columns[key] = (array("d", thinned[0].tolist()), array("d", thinned[1].tolist()))

    def arrays(self) -> Iterator[tuple[str, tuple[FloatArray, FloatArray]]]:
        """Yield each key with its steps and its values."""
        for key, (steps, values) in self._columns.items():
            yield key, (np.array(steps), np.array(values))


class HistogramCollector:
    """Keeps histograms evenly thinned in time: when there are too many, every second one of each name goes."""

    def __init__(self, max_stored: int = MAX_STORED) -> None:
        self._max_stored = max_stored
        self._stride = 1
        self._seen: dict[str, int] = {}
        self._kept: dict[str, list[tuple[int, float, float, FloatArray]]] = {}  # step, lower and upper limit, counts
        self._num_kept = 0

    def add(self, name: str, step: int, edges: object, counts: object) -> None:
        """Take one histogram as W&B stores it; one whose arrays do not fit together is left out."""
        place = self._seen.get(name, 0)
        self._seen[name] = place + 1
        if place % self._stride:
            return
        if (resampled := resample(edges, counts)) is None:
            return
        self._kept.setdefault(name, []).append((step, *resampled))
        self._num_kept += 1
        if self._num_kept > self._max_stored:
            self._stride *= 2
            self._kept = {kept: stored[::2] for kept, stored in self._kept.items()}
            self._num_kept = sum(map(len, self._kept.values()))

    def series(self) -> dict[str, HistogramSeries]:
        """Every name's histograms in the order of their steps."""
        by_step = {name: sorted(stored, key=itemgetter(0)) for name, stored in self._kept.items()}
        return {name: HistogramSeries(*map(np.array, zip(*stored, strict=True))) for name, stored in by_step.items()}


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
