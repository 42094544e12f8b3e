"""Scalars by key while a run's file is read: packed, and thinned where they become too many."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from typing import Final

import numpy as np

from .._measure.columns import FloatArray, IntArray
from .pooling import is_summed, pool, pool_extremes

# R rows

MAX_CELLS: Final = 40_000_000  # rows x keys: 320 MB
MAX_OWN_VALUES: Final = 8_000_000  # of all keys together: 128 MB
MIN_OWN_VALUES: Final = 1_000  # of one key, however many there are


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
        values = {key: np.full(len(steps), np.nan) for key in self._columns}
        for key, column in self._columns.items():
            found = np.array(column)
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
