"""Which arrived samples wait for the next ones: 16 processed together reach the processor's caches once."""

import math
from operator import itemgetter
from typing import Final, NamedTuple

from .._measure.columns import NONFINITE_COLUMNS, Column
from .._transfer.transfers import ArrivedSample
from ..snapshot import keys

LONGEST_WAIT: Final = 0.05  # seconds
MOST_WAITING: Final = 16
FIRST_ONE_BY_ONE: Final = 100  # samples after the start: most faults of a training show there

_NONFINITE: Final = itemgetter(*NONFINITE_COLUMNS, Column.PARAM_NUM_NONFINITE)


class Notable(NamedTuple):
    """What makes a sample notable, compared with the last one."""

    is_sound: bool  # everything is finite, and the update was applied
    gradients_of: bytes  # whether each parameter has a gradient that is not dead
    sum_sq: float  # of all gradients


def notable(sample: ArrivedSample) -> Notable:
    """Return what may be notable about a sample."""
    total_C = sample.total_C
    bad = sum(_NONFINITE(total_C)) + sample.metrics.get(keys.NUM_NONFINITE_LOSS, 0.0)
    has_gradient_P = sample.rows[:, Column.NUM_DEAD] < sample.rows[:, Column.NUM_ELEMENTS]
    is_sound = not bad > 0 and not sample.skipped and not sample.sample.left_out
    return Notable(is_sound, has_gradient_P.tobytes(), total_C[Column.GRAD_SUM_SQ])


def may_wait(new: Notable, last: Notable, *, judged_sum_sq: float) -> bool:
    """Whether nothing is notable: a sound sample like the last one, with at most twice the norm judged last."""
    return new.is_sound and new.gradients_of == last.gradients_of and new.sum_sq <= judged_sum_sq * 4


class WaitingSamples:
    """Decides which samples may wait until they are processed and judged together.

    A sample waits only where the next one is expected `LONGEST_WAIT` after the oldest waiting one at the latest.
    """

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Judge the next samples one by one: the training begins, or continues from a saved state."""
        self._num_judged = self._num_waiting = 0
        self._last = Notable(False, b"", math.nan)
        self._judged_sum_sq = math.nan
        self._oldest = self._newest = -math.inf  # times of arrival

    def add(self, sample: ArrivedSample, *, now: float) -> bool:
        """Add a sample that arrives at time `now`, in seconds. Returns whether the samples may wait for another one."""
        new, last, since = notable(sample), self._last, now - self._newest
        self._last, self._newest = new, now
        self._oldest = self._oldest if self._num_waiting else now
        self._num_waiting += 1
        return (
            self._num_judged >= FIRST_ONE_BY_ONE
            and self._num_waiting < MOST_WAITING
            and now + since - self._oldest <= LONGEST_WAIT
            and may_wait(new, last, judged_sum_sq=self._judged_sum_sq)
        )

    def end(self) -> None:
        """Record that all samples so far are judged."""
        self._num_judged, self._num_waiting = self._num_judged + self._num_waiting, 0
        self._judged_sum_sq = self._last.sum_sq
