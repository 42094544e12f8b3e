"""What is remembered of earlier samples: numbers of samples, and rows of numbers by parameter or module."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from .._analysis.baseline import evenly_apart
from .._analysis.memory import Remembers, Streaks
from .._measure.columns import FloatArray

# N remembered samples, P names

WINDOW: Final = 64  # samples that define what is usual
ROWS: Final = 16  # samples of which every parameter is remembered
_FIRST: Final = 5  # norms of a run's beginning, which are forgotten when as many have followed
_FADING: Final = math.log(2) / 100  # of the log record per sample: an old norm excuses nothing

# The numbers of a sample that later ones are compared with.
SCALARS: Final = (
    *("step", "norm", "raised", "record", "usual", "weights", "moved", "grows", "leap", "clip"),
    *("loss", "rate", "change", "cosine", "inputs", "growth", "shrinkage"),
)


class Rows:
    """The newest rows of numbers, each with the names of its columns."""

    def __init__(self, most: int) -> None:
        self._rows: deque[tuple[tuple[str, ...], FloatArray]] = deque(maxlen=most)

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, names: tuple[str, ...], values_P: FloatArray) -> None:
        self._rows.append((names, values_P))

    def of(self, names: tuple[str, ...], newest: int = WINDOW) -> FloatArray:
        """The newest rows, oldest first: [N, P]; NaN for names that a row lacks."""
        rows = list(self._rows)[-newest:]
        if not rows:
            return np.full((0, len(names)), np.nan)
        return np.array([values if own is names or own == names else _placed(own, values, names) for own, values in rows])

    def newest(self, names: tuple[str, ...]) -> FloatArray:
        """The newest row: [P]; NaN where it is not known."""
        if not self._rows:
            return np.full(len(names), np.nan)
        own, values = self._rows[-1]
        return values if own is names or own == names else _placed(own, values, names)

    def state_dict(self) -> list[Any]:
        return [[list(names), values.tolist()] for names, values in self._rows]

    def load_state_dict(self, state: Sequence[Any]) -> None:
        loaded = [(tuple(map(str, names)), np.array(values, dtype=np.float64)) for names, values in state]
        if any(values.shape != (len(names),) for names, values in loaded):
            raise ValueError("the rows of earlier samples do not fit their names")
        self._rows = deque(loaded, self._rows.maxlen)


def _placed(own: tuple[str, ...], values: FloatArray, names: tuple[str, ...]) -> FloatArray:
    known = dict(zip(own, values.tolist(), strict=True))
    return np.array([known.get(name, math.nan) for name in names])


class Past(Remembers):
    """The earlier samples of one kind: those of mostly the same parameters, as of a GAN's critic."""

    def __init__(self) -> None:
        self.scalars: dict[str, list[float]] = {name: [] for name in SCALARS}
        self.g_P, self.w_P, self.change_P = Rows(ROWS), Rows(ROWS), Rows(ROWS)  # log norms, and changes per step
        self.zeros_P = Rows(1)  # numbers of elements that are 0
        self.dead_L, self.g_L = Rows(WINDOW), Rows(WINDOW)  # shares of dead units, and log norms
        self.num_seen = 0  # samples
        self.record = -math.inf  # the largest log norm so far; it fades
        self.largest = -math.inf  # the largest log norm of all
        self.first: dict[str, float] = {}  # the numbers of the first sample in which each was known
        self.beginning = -math.inf  # the largest of the first log norms
        self.num_norms = 0
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
        if gap <= 1 or all([after - before >= gap / 2 for before, after in zip(steps, steps[1:], strict=False)]):
            return range(len(steps))
        return evenly_apart([*map(int, steps), step])[:-1]

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
        if self.num_norms <= _FIRST:
            self.beginning = max(self.beginning, raised)
        self.record = max(self.record - _FADING, raised)
        if self.num_norms == 2 * _FIRST:
            # The first norms of a run are often 100 times as large as all later ones, and would hide an explosion.
            newest = [value for value in self.scalars["raised"] if value == value][-_FIRST:]
            self.record = min(self.record, max(newest))
