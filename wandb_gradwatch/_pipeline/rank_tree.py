"""An all-reduce over any number of ranks in which no rank is connected with more than a few dozen others.

A gloo group connects each of its ranks with every other: ten thousand ranks in one group would hold ten thousand
sockets each, more than a process may open. So neighbours make groups of at most `GROUP`, the first ranks of the groups
make groups again, and so on up to a single one:

    size 3, 8 ranks     0 1 2 | 3 4 5 | 6 7        values are reduced to the first of each group,
                        0       3       6          all-reduced among those,
                                                   and broadcast on the same ways back

Neighbours in rank are neighbours in the machine room as a rule, so most of the traffic stays near.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from .._measure.columns import FloatArray

# R ranks, N numbers

GROUP: Final = 32  # three levels reach 32,768 ranks, with at most 3 * 31 connections


class Place(NamedTuple):
    """A rank's place in a group: the group's name, the place, how many there are, and whether no group is above it."""

    group: str
    rank: int
    size: int
    is_top: bool


def places(rank: int, world: int, size: int) -> Iterator[Place]:
    """The groups that a rank is in, from the leaves to the top; only the first of a group is in the next as well.

    >>> for place in places(3, world=8, size=3): print(place)
    Place(group='0.1', rank=0, size=3, is_top=False)
    Place(group='1.0', rank=1, size=3, is_top=True)
    >>> for place in places(7, world=8, size=3): print(place)
    Place(group='0.2', rank=1, size=2, is_top=False)
    """
    level, members = 0, world
    while True:
        group, position = divmod(rank, size)
        is_top = members <= size
        yield Place(f"{level}.{group}", position, min(size, members - group * size), is_top)
        if is_top or position:
            return
        level, rank, members = level + 1, group, -(-members // size)


class RankTree:
    """Groups of our own over all ranks. Making one waits for the ranks of this rank's groups.

    Args:
        store: where the ranks meet; nothing else may use these keys.
        wait: the limit for every single step, a connection or a message.
        size: of a group, 2 or more; the same on every rank.

    Raises:
        RuntimeError: torch's, or one of its subclasses: a rank did not come within the limit.
    """

    def __init__(self, store: Store, rank: int, world: int, wait: timedelta, *, size: int = GROUP) -> None:
        self._groups: list[tuple[Place, Any]] = [
            (place, dist.ProcessGroupGloo(PrefixStore(place.group, store), place.rank, place.size, wait))
            for place in places(rank, world, size)
        ]

    def all_reduce(self, values: FloatArray, operation: Any) -> None:
        """Combine the values of all ranks, contiguous, in place, the same bits on each: [N].

        Cost: what a rank sends is in docs/growth.md: about three times the values, and five to ten times where it is
        the first of a group, as gloo broadcasts along a binomial tree.
        """
        tensor = torch.from_numpy(values)
        for place, group in self._groups:
            if place.is_top:
                everywhere = dist.AllreduceOptions()
                everywhere.reduceOp = operation
                group.allreduce([tensor], everywhere).wait()
            else:
                to_the_first = dist.ReduceOptions()
                to_the_first.reduceOp, to_the_first.rootRank = operation, 0
                group.reduce([tensor], to_the_first).wait()
        for place, group in reversed(self._groups):
            if not place.is_top:
                from_the_first = dist.BroadcastOptions()
                from_the_first.rootRank, from_the_first.rootTensor = 0, 0
                group.broadcast([tensor], from_the_first).wait()
