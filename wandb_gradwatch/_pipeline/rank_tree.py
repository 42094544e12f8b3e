"""An all-reduce over any number of ranks in which no rank is connected to more than a few dozen others.

A gloo group connects each of its ranks to all others: in one group of ten thousand ranks, each rank would hold ten
thousand sockets, more than a process may open. Therefore neighbouring ranks form groups of at most `GROUP`, the first
ranks of these groups form groups again, and so on up to a single group:

    size 3, 8 ranks     0 1 2 | 3 4 5 | 6 7        values are reduced to the first of each group,
                        0       3       6          all-reduced among these,
                                                   and broadcast back to each group

Neighbouring ranks are usually on the same or on near machines, so most messages travel short distances.
"""

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
    """A rank's place in a group: the group's name, the rank in it, its size, and whether it is the top group."""

    group: str
    rank: int
    size: int
    is_top: bool


def places(rank: int, world: int, size: int) -> Iterator[Place]:
    """The groups of a rank, from the leaves to the top. Only the first rank of a group is in the next group as well.

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
    """A tree of separate process groups over all ranks. The constructor waits for the ranks of this rank's groups.

    Args:
        store: the store through which the ranks exchange addresses; nothing else may use its keys.
        wait: the time limit of each connection and each message.
        size: the largest size of a group, at least 2; the same on every rank.

    Raises:
        RuntimeError: a rank did not respond within the limit; raised by torch, possibly as a subclass.
    """

    def __init__(self, store: Store, rank: int, world: int, wait: timedelta, *, size: int = GROUP) -> None:
        self._groups: list[tuple[Place, Any]] = [
            (place, dist.ProcessGroupGloo(PrefixStore(place.group, store), place.rank, place.size, wait))
            for place in places(rank, world, size)
        ]

    def all_reduce(self, values: FloatArray, operation: Any) -> None:
        """All-reduce a contiguous array [N] in place; all ranks get bitwise equal results.

        Cost: a rank sends about three times the size of the values, the first rank of a group five to ten times,
        because gloo broadcasts along a binomial tree: docs/growth.md.
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
