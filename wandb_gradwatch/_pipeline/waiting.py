"""Which arrived samples wait for the next ones: samples processed together reach the processor's caches once.

Judged one by one, each sample of a series would cost a small model half as much again.
"""

import math
from operator import itemgetter
from typing import Final

from .._measure.columns import NONFINITE_COLUMNS, Column
from .._transfer.transfers import ArrivedSample
from ..snapshot import keys

LONGEST_WAIT: Final = 0.2  # seconds
MOST_WAITING: Final = 64
FIRST_ONE_BY_ONE: Final = 100  # samples after the start: most faults of a training show there
_FOLLOWED: Final = 5  # samples after a notable one: they show rules whether its norm stays, grows or falls back

_NONFINITE: Final = itemgetter(*NONFINITE_COLUMNS, Column.PARAM_NUM_NONFINITE)


class WaitingSamples:
    """Decides which samples may wait until they are processed and judged together.

    A sample waits only if nothing about it or the five before is notable: it is finite, its update was applied, it has
    as many elements as the last one, and its norm is not 0 and at most twice the norm judged last. The next sample must
    be expected `LONGEST_WAIT` after the oldest waiting one at the latest.
    """

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Judge the next samples one by one: the training begins, or continues from a saved state."""
        self._num_judged = self._num_waiting = self._num_followed = 0
        self._last_sum_sq = self._judged_sum_sq = self._num_elements = math.nan  # of all gradients
        self._oldest = self._newest = -math.inf  # times of arrival

    def add(self, sample: ArrivedSample, *, now: float) -> bool:
        """Add a sample that arrives at time `now`, in seconds. Returns whether the samples may wait for another one."""
        total_C, since = sample.total_C, now - self._newest
        bad = sum(_NONFINITE(total_C)) + sample.metrics.get(keys.NUM_NONFINITE_LOSS, 0.0)
        is_like_the_last = total_C[Column.NUM_ELEMENTS] == self._num_elements
        self._num_elements, self._last_sum_sq = total_C[Column.NUM_ELEMENTS], total_C[Column.GRAD_SUM_SQ]
        self._newest = now
        self._oldest = self._oldest if self._num_waiting else now
        self._num_waiting += 1
        is_usual = is_like_the_last and 0 < self._last_sum_sq <= self._judged_sum_sq * 4
        is_notable = bad > 0 or sample.skipped or sample.sample.left_out or not is_usual
        self._num_followed = 0 if is_notable else self._num_followed + 1
        return (
            self._num_judged >= FIRST_ONE_BY_ONE
            and self._num_waiting < MOST_WAITING
            and self._num_followed > _FOLLOWED
            and now + since - self._oldest <= LONGEST_WAIT
        )

    def end(self) -> None:
        """Record that all samples so far are judged."""
        self._num_judged, self._num_waiting = self._num_judged + self._num_waiting, 0
        self._judged_sum_sq = self._last_sum_sq
