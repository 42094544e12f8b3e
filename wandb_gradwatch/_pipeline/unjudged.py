"""Which samples wait to be judged together: 16 take half of the time, and reach the processor's caches once."""

import math
from collections.abc import Sequence
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


def notable(sample: ArrivedSample, total_C: Sequence[float]) -> Notable:
    """Return what may be notable about a sample with these sums over the parameters: [C]."""
    bad = sum(_NONFINITE(total_C)) + sample.metrics.get(keys.NUM_NONFINITE_LOSS, 0.0)
    has_gradient_P = sample.rows[:, Column.NUM_DEAD] < sample.rows[:, Column.NUM_ELEMENTS]
    is_sound = not bad > 0 and not sample.skipped and not sample.sample.left_out
    return Notable(is_sound, has_gradient_P.tobytes(), total_C[Column.GRAD_SUM_SQ])


def may_wait(new: Notable, last: Notable, *, judged_sum_sq: float) -> bool:
    """Whether nothing is notable: a sound sample like the last one, with at most twice the norm judged last."""
    return new.is_sound and new.gradients_of == last.gradients_of and new.sum_sq <= judged_sum_sq * 4


class Unjudged:
    """The samples that have arrived and that the rules have not judged yet.

    A sample waits only where the next one is expected `LONGEST_WAIT` after the oldest waiting one at the latest.
    """

    def __init__(self) -> None:
        self.samples: list[ArrivedSample] = []
        self.begin()

    def begin(self) -> None:
        """Judge the next samples one by one: the training begins, or continues from a saved state."""
        self._num_judged = 0
        self._last = Notable(False, b"", math.nan)
        self._judged_sum_sq = math.nan
        self._oldest = self._newest = -math.inf  # times of arrival

    def add(self, sample: ArrivedSample, total_C: Sequence[float], *, now: float) -> bool:
        """Add a sample that arrives at time `now`, in seconds. Returns whether the samples may wait for another one."""
        new, last, since = notable(sample, total_C), self._last, now - self._newest
        self._last, self._newest = new, now
        self._oldest = self._oldest if self.samples else now
        self.samples.append(sample)
        return (
            self._num_judged >= FIRST_ONE_BY_ONE
            and len(self.samples) < MOST_WAITING
            and now + since - self._oldest <= LONGEST_WAIT
            and may_wait(new, last, judged_sum_sq=self._judged_sum_sq)
        )

    def pop(self) -> list[ArrivedSample]:
        """Return the samples to judge now."""
        samples, self.samples = self.samples, []
        self._num_judged += len(samples)
        self._judged_sum_sq = self._last.sum_sq
        return samples
