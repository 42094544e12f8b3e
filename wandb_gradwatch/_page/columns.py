"""What is kept while a run's file is read: scalars and histograms by key, thinned where they become too many."""

from __future__ import annotations

from array import array
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from operator import itemgetter
from typing import Final

import numpy as np

from .._measure.columns import FloatArray, IntArray
from .history import HistogramSeries
from .packing import pool, pool_extremes

# R rows, H histograms of one name, B bins

MAX_CELLS: Final = 40_000_000  # rows x keys: 320 MB
MAX_OWN_VALUES: Final = 8_000_000  # of all keys together: 128 MB
MIN_OWN_VALUES: Final = 1_000  # of one key, however many there are
NUM_DISPLAY_BINS: Final = 65  # as many as our rows have, zero in the middle one: those stay as they are
MAX_STORED: Final = 100_000  # histograms over all names: about 70 MB


class RowColumns:
    """Our numbers, one row per step. When there are too many, neighbouring rows are merged, as a window is."""

    def __init__(self, max_cells: int = MAX_CELLS) -> None:
        self.merged = 1  # rows of the run in one that is kept
        self._num_in_last = 1  # rows of the run in the last one that is kept
        self._max_cells = max_cells
        self._steps = array("q")
        self._times = array("d")
        self._columns: defaultdict[str, array[float]] = defaultdict(lambda: array("d"))

    def add(self, step: int, time: object, numbers: Mapping[str, float]) -> None:
        """Take numbers of a step; those of the same step belong to one row. `time` is NaN unless it is a number."""
        if not self._steps or self._steps[-1] != step:
            if self._num_in_last == self.merged and len(self._steps) * len(self._columns) > self._max_cells:
                self._merge_neighbours()
            if self._num_in_last == self.merged:
                self._num_in_last = 0
                self._steps.append(step)
                self._times.append(np.nan)
            self._num_in_last += 1
        self._steps[-1], self._times[-1] = step, time if isinstance(time, (int, float)) else np.nan
        place = len(self._steps) - 1
        for key, value in numbers.items():
            column = self._columns[key]
            if len(column) <= place:
                column.extend([np.nan] * (place + 1 - len(column)))
            if self._num_in_last > 1:
                value = pool(np.array([[column[place]], [value]]), 2, key).item()
            column[place] = value

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
        for key, column in self._columns.items():
            self._columns[key] = array("d", pool(np.array(column)[:, None], 2, key)[:, 0].tolist())
        if num_rows % 2 == 0:
            self._num_in_last += self.merged
        self.merged *= 2


class OwnColumns:
    """The user's scalars, each with steps of its own. When one has more than its share, its extremes are kept."""

    def __init__(self, max_values: int = MAX_OWN_VALUES) -> None:
        self._max_values = max_values
        self._columns: defaultdict[str, tuple[array[float], array[float]]]
        self._columns = defaultdict(lambda: (array("d"), array("d")))

    def add(self, key: str, step: float, value: float) -> None:
        """Take one number."""
        steps, values = self._columns[key]
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
        self._seen: Counter[tuple[str, str]] = Counter()
        # By family and name, as keys.split_histogram has them: step, lower and upper limit, counts.
        self._kept: dict[tuple[str, str], list[tuple[int, float, float, FloatArray]]] = {}
        self._num_kept = 0

    def add(self, name: tuple[str, str], step: int, edges: object, counts: object) -> None:
        """Take one histogram as W&B stores it; one whose arrays do not fit together is left out."""
        self._seen[name] += 1
        if (self._seen[name] - 1) % self._stride or (resampled := resample(edges, counts)) is None:
            return
        self._kept.setdefault(name, []).append((step, *resampled))
        self._num_kept += 1
        if self._num_kept > self._max_stored:
            self._stride *= 2
            self._kept = {kept: stored[::2] for kept, stored in self._kept.items()}
            self._num_kept = sum(map(len, self._kept.values()))

    def series(self) -> dict[str, dict[str, HistogramSeries]]:
        """Every family's names with their histograms, in the order of their steps."""
        found: dict[str, dict[str, HistogramSeries]] = {}
        for (family, name), stored in self._kept.items():
            columns = zip(*sorted(stored, key=itemgetter(0)), strict=True)
            found.setdefault(family, {})[name] = HistogramSeries(*map(np.array, columns))
        return found


def resample(edges: object, counts: object) -> tuple[float, float, FloatArray] | None:
    """Bring a histogram to NUM_DISPLAY_BINS bins of equal width, its elements spread evenly within each old bin.

    Returns:
        the lower and the upper limit, and the counts [B]; None where there is no histogram: the arrays do not fit
        together, or an edge is not finite.
    """
    try:
        edge, count = np.asarray(edges, dtype=np.float64), np.asarray(counts, dtype=np.float64)
    except (TypeError, ValueError):
        return None
    if edge.ndim != 1 or count.shape != (edge.size - 1,) or not count.size:
        return None
    if not (np.isfinite(edge).all() and np.isfinite(count).all()):
        return None
    low, high = float(edge[0]), float(edge[-1])
    new_edges = np.linspace(low, high, NUM_DISPLAY_BINS + 1)
    if low == high:
        return low, high, np.append(np.zeros(NUM_DISPLAY_BINS - 1), count.sum())
    if count.size == NUM_DISPLAY_BINS and np.abs(edge - new_edges).max() <= 1e-3 * (new_edges[1] - low):
        return low, high, count
    if not (np.diff(edge) > 0).all():
        return None
    return low, high, np.diff(np.interp(new_edges, edge, np.append(0.0, np.cumsum(count))))
