"""What is remembered of earlier samples: numbers of samples, and rows of numbers by parameter or module."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, Final

import numpy as np

from .._analysis.baseline import evenly_apart
from .._analysis.memory import PerName, Remembers, Streaks
from .._measure.columns import COLUMN_NAMES, FloatArray, arranged

# N remembered samples, P watched parameters, C columns

WINDOW: Final = 64  # samples that define what is usual
SAVED: Final = 16  # samples whose rows a saved state contains
_FIRST: Final = 5  # norms of a run's beginning, which are forgotten when as many have followed
_FADING: Final = math.log(2) / 100  # of the log record per sample: an old norm excuses nothing

# The numbers of a sample that later ones are compared with.
SCALARS: Final = (
    *("step", "norm", "raised", "record", "usual", "weights", "moved", "grows", "leap", "clip"),
    *("loss", "rate", "change", "cosine", "inputs", "growth", "shrinkage"),
)


class Rows:
    """The rows of the newest samples: [P, C] each, with the names of their parameters."""

    def __init__(self) -> None:
        self._rows: deque[tuple[tuple[str, ...], FloatArray]] = deque(maxlen=WINDOW)

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, names: tuple[str, ...], rows_PC: FloatArray) -> None:
        """Keep the rows of a sample, which must not change later."""
        self._rows.append((names, rows_PC))

    def column(self, column: int, names: tuple[str, ...], newest: int = WINDOW) -> FloatArray:
        """One column of the newest samples, oldest first: [N, P]; NaN for names that a sample lacks."""
        rows = list(self._rows)[-newest:]
        if not rows:
            return np.full((0, len(names)), np.nan)
        same = all([own is names or own == names for own, _ in rows])
        if same:
            return np.array([rows_PC[:, column] for _, rows_PC in rows])
        return np.array([_placed(own, rows_PC[:, column], names) for own, rows_PC in rows])

    def back(self, column: int, names: tuple[str, ...], samples: int = 1) -> FloatArray:
        """One column of so many samples ago: [P]; NaN if it is not known."""
        if len(self._rows) < samples:
            return np.full(len(names), np.nan)
        own, rows_PC = self._rows[-samples]
        values_P: FloatArray = rows_PC[:, column]
        return values_P if own is names or own == names else _placed(own, values_P, names)

    def state_dict(self) -> dict[str, Any]:
        rows = [[list(names), rows_PC.copy()] for names, rows_PC in list(self._rows)[-SAVED:]]
        return {"columns": list(COLUMN_NAMES), "rows": rows}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        columns = state["columns"]
        loaded = [(tuple(map(str, names)), np.array(rows, dtype=np.float64)) for names, rows in state["rows"]]
        if any(rows.shape != (len(names), len(columns)) for names, rows in loaded):
            raise ValueError("the rows of earlier samples do not fit their names")
        self._rows = deque([(names, arranged(rows, columns)) for names, rows in loaded], WINDOW)


def _placed(own: tuple[str, ...], values: FloatArray, names: tuple[str, ...]) -> FloatArray:
    known = dict(zip(own, values.tolist(), strict=True))
    return np.array([known.get(name, math.nan) for name in names])


class Past(Remembers):
    """The earlier samples of one kind: those of mostly the same parameters, as of a GAN's critic."""

    def __init__(self) -> None:
        self.scalars: dict[str, list[float]] = {name: [] for name in SCALARS}
        self.rows = Rows()
        self.known_sq = PerName(math.nan)  # squared norm of each parameter when it was last seen
        self.num_seen = 0  # samples
        self.record = -math.inf  # the largest log norm so far; it fades
        self.largest = -math.inf  # the largest log norm of all
        self.first: dict[str, float] = {}  # the numbers of the first sample in which each was known
        self.beginning = -math.inf  # the largest of the first log norms
        self.num_norms = 0
        self.first_dead = PerName(math.nan)  # share of each module's units that were dead in the first sample
        # Modules of which nearly all units are dead, and modules without any gradient before one whose inputs are 0.
        self.dead, self.cut = Streaks(), Streaks()

    def __len__(self) -> int:
        return len(self.scalars["step"])

    @property
    def last_step(self) -> int:
        return int(self.scalars["step"][-1]) if len(self) else 0

    def places(self, step: int) -> Sequence[int]:
        """The remembered samples that are about as far apart as the newest one is from this step.

        Ten samples in a row say little about what is usual a hundred steps later.
        """
        steps = self.scalars["step"]
        if not steps:
            return range(0)
        gap = step - steps[-1]
        if gap <= 1 or all([after - before >= gap / 2 for before, after in pairwise(steps)]):
            return range(len(steps))
        return evenly_apart([*map(int, steps), step])[:-1]

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a saved state.

        Raises:
            ValueError: it is none, or that of another version, which remembers other numbers.
        """
        super().load_state_dict(state)
        columns = self.scalars.values()
        is_whole = [*self.scalars] == [*SCALARS] and all(isinstance(values, list) for values in columns)
        if not is_whole or len({len(values) for values in columns}) > 1 or len(self) > WINDOW:
            raise ValueError("the numbers of earlier samples are not those that this version remembers")
        if not all(isinstance(value, int | float) for values in (*columns, self.first.values()) for value in values):
            raise ValueError("what is remembered of earlier samples must be numbers")

    def add(self, scalars: Mapping[str, float]) -> None:
        """Remember a sample's numbers."""
        for name in SCALARS:
            values, value = self.scalars[name], scalars[name]
            values.append(value)
            if len(values) > WINDOW:
                del values[0]
            if name not in self.first and value == value:
                self.first[name] = value
        self.num_seen += 1
        raised = scalars["raised"]
        if raised != raised:
            return
        self.num_norms += 1
        self.largest = max(self.largest, scalars["norm"]) if scalars["norm"] == scalars["norm"] else self.largest
        if self.num_norms <= _FIRST and scalars["norm"] > 0:
            self.beginning = max(self.beginning, math.log(scalars["norm"]))
        self.record = max(self.record - _FADING, raised)
        if self.num_norms == 2 * _FIRST:
            # The first norms of a run are often 100 times as large as all later ones, and would hide an explosion.
            newest = [value for value in self.scalars["raised"] if value == value][-_FIRST:]
            self.record = min(self.record, max(newest))
