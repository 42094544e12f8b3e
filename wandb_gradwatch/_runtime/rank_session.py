"""Finds which watchers of the ranks belong together, through the store of the process groups. No rank waits.

One rank may call watch() more often than the others, and a store may outlive its ranks, so numbers that each rank
counts for itself would not match. Instead, the store has:

    rank/<rank>               the watchers of this rank in the order of watch(): [[number, digest], ...]
    alike/<digest>/<place>    how many ranks have more than <place> watchers of parameters with this digest
    what/<digest>             the description of the parameters
    number                    the number of the newest watcher of all ranks

At its first step, a rank looks up rank 0's watcher of the same training, whose number identifies the session. By then
every other rank that watches has called watch(), because the gradient depends on all ranks.
"""

import contextlib
import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store, _get_default_store

from .store_thread import Request, StoreThread

# R ranks

_Listed = tuple[int, str]  # the number of a watcher, and the digest of its parameters


@dataclass(frozen=True)
class _Session:
    """`number` is that of rank 0's watcher; None if it is unknown which of several watchers of a rank takes part."""

    number: int | None
    digests: tuple[str, ...] = ()  # [R] of the parameters of each rank; empty if all ranks watch the same


class RankSession:
    """The part of one watcher in a training on several ranks.

    Args:
        description: the parameters that this rank watches, as text.
    """

    def __init__(self, description: str) -> None:
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self._default = _get_default_store()  # kept: the user may destroy the default group before remove()
        self._everything: Store = PrefixStore("gradwatch", self._default)
        self._watchers: Store = PrefixStore(f"of {self.world}", self._everything)  # an elastic job may change its size
        self._digest = hashlib.sha256(description.encode()).hexdigest()
        self._session: _Session | None = None
        self._has_ended = False
        self._thread = StoreThread(self._everything, self.rank)
        for one in [one for one in _LIVE if one._has_ended]:
            one.end()
        if not self._everything.check([f"what/{self._digest}"]):
            self._everything.set(f"what/{self._digest}", description)
        self._number = self._everything.add("number", 1)
        listed = self._listed(self.rank)
        own = {one._number for one in _LIVE if one._default is self._default}
        for number in {number for number, _ in listed} - own:  # of an earlier process of this rank
            listed = self._without(listed, number)
        self._write([*listed, (self._number, self._digest)])
        self._watchers.add(f"alike/{self._digest}/{_num_of(self._digest, listed)}", 1)
        _LIVE.append(self)

    def end(self, *, at_once: bool = True) -> None:
        """Take this watcher from the list of its rank, `at_once` or when this process watches again. Idempotent.

        A watcher that refuses to go on stays in the list until then: other ranks that have yet to look must find it, to
        refuse alike.
        """
        self._has_ended = True
        self._thread.end()
        if self in _LIVE and at_once:
            _LIVE.remove(self)
            with contextlib.suppress(RuntimeError):  # the process with the store may have ended
                self._write(self._without(self._listed(self.rank), self._number))

    @property
    def is_found(self) -> bool:
        """Whether a watcher of every rank takes part. Not to be called before the first step."""
        if self._session is None:
            self._session = self._find()
        return self._session is not None

    @property
    def descriptions(self) -> list[str]:
        """The descriptions of all ranks [R], once the session is found; empty if they are equal or do not match."""
        digests = self._session.digests if self._session is not None else ()
        texts = {digest: self._everything.get(f"what/{digest}").decode() for digest in set(digests)}
        return [texts[digest] for digest in digests]

    @property
    def is_ambiguous(self) -> bool:
        """Whether ranks watch different parameters, and it is unknown which of their watchers belong together."""
        return self._session is not None and self._session.number is None

    def store(self, name: str) -> Store | None:
        """A set of keys that only the watchers of this session share; None if not every rank is known to watch."""
        if not self.is_found or self._session is None or self._session.number is None:
            return None
        return PrefixStore(f"{self._session.number}/{name}", self._everything)

    def ask(self, name: str, request: Request) -> None:
        """Make a request to the keys of `store(name)` in the background, as soon as every rank watches."""

        def ask_session(everything: Store) -> bool:
            if not self.is_found or self._session is None:
                return False
            number = self._session.number
            return number is None or request(PrefixStore(f"{number}/{name}", everything))

        self._thread.ask(name, ask_session)

    def _find(self) -> _Session | None:
        listed = self._listed(self.rank)
        before = listed[: [number for number, _ in listed].index(self._number)]
        place = _num_of(self._digest, before)
        if self._watchers.add(f"alike/{self._digest}/{place}", 0) == self.world:
            numbers = [number for number, digest in self._listed(0) if digest == self._digest]
            return _Session(numbers[place]) if place < len(numbers) else None
        keys = [f"rank/{rank}" for rank in range(self.world)]
        if not self._watchers.check(keys):
            return None
        different = _without_common([json.loads(text) for text in self._watchers.multi_get(keys)])
        mine = [number for number, _ in different[self.rank]]
        if self._number not in mine or not all(different):
            return None
        if len({len(of_rank) for of_rank in different}) > 1:
            return _Session(None)
        place = mine.index(self._number)
        return _Session(different[0][place][0], tuple(of_rank[place][1] for of_rank in different))

    def _listed(self, rank: int) -> list[_Listed]:
        text = self._watchers.get(f"rank/{rank}") if self._watchers.check([f"rank/{rank}"]) else "[]"
        return [(number, digest) for number, digest in json.loads(text)]

    def _write(self, listed: Sequence[_Listed]) -> None:
        self._watchers.set(f"rank/{self.rank}", json.dumps(listed))

    def _without(self, listed: Sequence[_Listed], number: int) -> list[_Listed]:
        """The list without this watcher, which is no longer counted either."""
        rest = [one for one in listed if one[0] != number]
        for digest in {digest for _, digest in listed if _num_of(digest, listed) > _num_of(digest, rest)}:
            self._watchers.add(f"alike/{digest}/{_num_of(digest, rest)}", -1)
        return rest


_LIVE: Final[list[RankSession]] = []  # the watchers of this process that have not ended


def _num_of(digest: str, listed: Sequence[_Listed]) -> int:
    return sum(other == digest for _, other in listed)


def _without_common(of_ranks: Sequence[Sequence[_Listed]]) -> list[list[_Listed]]:
    """The watchers of each rank, without those of parameters that every rank watches: [R]."""
    counts = [Counter(digest for _, digest in listed) for listed in of_ranks]
    common = {digest: min(count[digest] for count in counts) for digest in counts[0]}
    return [
        [one for place, one in enumerate(listed) if _num_of(one[1], listed[:place]) >= common.get(one[1], 0)]
        for listed in of_ranks
    ]
