"""What the monitor costs, as a share of the training's time."""

from __future__ import annotations

import time
from collections.abc import Callable


class Overhead:
    """The monitor's share of the time since the last flush. Owns what the clocks said then.

    Args:
        seconds_spent: asks how many seconds the monitor has taken so far.
        clock: seconds, from any zero.
    """

    def __init__(self, seconds_spent: Callable[[], float], clock: Callable[[], float] = time.perf_counter) -> None:
        self._seconds_spent = seconds_spent
        self._clock = clock
        self._began, self._spent = clock(), seconds_spent()

    def ratio(self) -> float:
        """The share since the last call, between 0 and 1."""
        now, spent = self._clock(), self._seconds_spent()
        ratio = (spent - self._spent) / max(now - self._began, 1e-9)
        self._began, self._spent = now, spent
        return min(max(ratio, 0.0), 1.0)
