"""Which gradients are compared by value although their version says that nothing has written to them.

Old code clips through `p.grad.data`, which the version counter does not show. So the first samples and the last one of
every window are compared; after one difference every sample is. If flushes follow each other closely, each compares
another part of the gradients: all of them would be a second pass over the gradients for every row.
"""

from collections.abc import Sequence
from typing import Final

from .._runtime.autograd import Entry
from .._runtime.sharding import is_partial

_WHOLE_SAMPLES: Final = 3  # number of samples at the start that are compared whole
_EVERY: Final = 5  # least number of steps between compared samples after that
_WITHIN: Final = 50  # steps within which every gradient is compared once


class Comparisons:
    """Decides how many of the open step's gradients are compared, and which."""

    def __init__(self, step: int) -> None:
        self.trusts_versions = True  # no gradient has been modified so far without a new version
        self.num_updates = 0  # samples with an update: a loss scaler's skipped step shows no clipping
        self._last_step, self._num = step, 0  # of the last compared sample, and their number
        self._one_in = 0  # one in this many gradients that look unmodified is compared at the open step; 0: none

    def open(self, step: int, *, is_last: bool) -> None:
        """Decide for a step. `is_last`: its sample is known to be the last one of its window."""
        steps = step - self._last_step
        of_flushed = max(_WITHIN // steps, 1) if is_last and steps >= _EVERY else 0
        is_whole = not self.trusts_versions or self.num_updates < _WHOLE_SAMPLES
        self._one_in = 1 if is_whole else of_flushed

    def among(self, unmodified: Sequence[Entry]) -> Sequence[Entry]:
        """Return which of the open step's gradients that look unmodified are compared by value with their rows.

        A part is enough: code that clips through `.data` modifies all of them. Partial sums over ranks are left out:
        their values need a collective, but each rank decides on its own how much it compares.
        """
        if not self._one_in:
            return ()
        unmodified = [entry for entry in unmodified if not is_partial(entry[1].grad)]
        if not unmodified:
            return ()
        one_in = min(self._one_in, len(unmodified))
        turn = self._num % one_in
        # Neighbours, because their rows are a slice on the device, which needs no upload of indices.
        return unmodified[len(unmodified) * turn // one_in : len(unmodified) * (turn + 1) // one_in]

    def add_sample(self, step: int, *, skipped: bool) -> None:
        """Record that the sample of this step was committed; `skipped`: a loss scaler has skipped the update."""
        self.num_updates += not skipped
        if self._one_in:
            self._last_step, self._num = step, self._num + 1

    def distrust_versions(self) -> None:
        """Compare every sample from now on: a gradient was modified without a new version."""
        self.trusts_versions, self._one_in = False, 1

    def resume(self, step: int, num_updates: int, *, trusts_versions: bool) -> None:
        """Continue after this step, as saved."""
        self._last_step, self.num_updates, self.trusts_versions = step, num_updates, trusts_versions
