"""One cadence for all ranks: rank 0 publishes what its budget allows, and all follow it from the next flush on.

A flush happens at the same step everywhere. What rank 0 says at one flush takes effect at the following one: by then it
has been in the store for a whole window, and reading it waits for nobody.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Final

from torch.distributed.distributed_c10d import Store

from .cadence import Plan

_WAIT: Final = timedelta(seconds=60)  # for a rank 0 that is a whole window behind, where ranks must not differ
_KEPT: Final = 4  # plans in the store


class RankPlans:
    """Plans of rank 0, by the number of the flush.

    Args:
        store: where ranks meet; nothing else has these keys.
        leads: whether this is rank 0.
    """

    def __init__(self, store: Store, *, leads: bool) -> None:
        self._store = store
        self._leads = leads
        self._num_flushes = 0
        self._published: Plan | None = None

    def exchange(self, own: Plan, *, must_agree: bool) -> Plan | None:
        """Publish this rank's plan, if it leads; return the one that takes effect now, None for the one in force.

        Args:
            own: what this rank's budget allows.
            must_agree: ranks that hold shards must sample the same steps; others go on alone if rank 0 says nothing.

        Raises:
            RuntimeError: ranks must agree, and rank 0 is not heard of.
        """
        number, self._num_flushes = self._num_flushes, self._num_flushes + 1
        if self._leads:
            self._store.set(str(number), f"{own.every} {own.samples_per_row}")
            if number >= _KEPT:
                self._store.delete_key(str(number - _KEPT))
            before, self._published = self._published, own
            return before
        key = str(number - 1)
        if number == 0:
            return None
        if must_agree:
            self._store.wait([key], _WAIT)
        elif not self._store.check([key]):
            return own
        every, samples_per_row = map(int, self._store.get(key).split())
        return Plan(every, samples_per_row)
