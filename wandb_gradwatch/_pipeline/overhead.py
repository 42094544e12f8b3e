"""What the monitor costs: one definition, the share of the time since watch() that it took."""

from __future__ import annotations

import time
from collections.abc import Callable


class Overhead:
    """The monitor's share of the time since watch(). Owns what the clocks said then.

    One number for a run: that of its last row is what the page, summary() and the demo say.

    Args:
        seconds_spent: asks how many seconds the monitor has taken so far.
        clock: seconds, from any zero.
    """

    def __init__(self, seconds_spent: Callable[[], float], clock: Callable[[], float] = time.perf_counter) -> None:
        self._seconds_spent = seconds_spent
        self._clock = clock
        self._began, self._spent = clock(), seconds_spent()

    def ratio(self) -> float:
        """The share so far, between 0 and 1."""
        ratio = (self._seconds_spent() - self._spent) / max(self._clock() - self._began, 1e-9)
        return min(max(ratio, 0.0), 1.0)
