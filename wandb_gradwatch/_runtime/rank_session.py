"""Finds which watchers of the ranks belong together, through the store of the process groups. No rank waits.

One rank may call watch() more often than the others, and a store may outlive its ranks, so numbers that each rank
counts for itself would not match. Instead, the store has:

    rank/<rank>               the watchers of this rank in the order of watch(): [[number, digest], ...]
    watching                  how many ranks have a watcher
    alike/<digest>/<place>    how many ranks have more than <place> watchers of parameters with this digest
    what/<digest>             a description of parameters
    number                    the number of the newest watcher of all ranks
    final/<number>            the digest of the parameters of this watcher when they are trained
    answer/<number>           the session of this watcher, as rank 0 has found it
    whole/<session>           what all ranks watch together, as rank 0 has united it

At its first step, a rank looks up rank 0's watcher of the same training, whose number identifies the session. By then
every other rank that watches has called watch(), because the gradient depends on all ranks. If all ranks watch the same
parameters, a few requests show it. Otherwise rank 0 alone reads what the ranks watch, in the background, and answers.
"""

import contextlib
import hashlib
import json
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, cast

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store, _get_default_store

from .store_thread import Request, StoreThread

# R ranks

_Listed = tuple[int, str]  # the number of a watcher, and the digest of its parameters
Unite = Callable[[Mapping[str, Sequence[int]]], str]  # from the ranks of each description to a description of the whole


@dataclass(frozen=True)
class _Session:
    """`number` is that of rank 0's watcher; None if no session is known: see `is_ambiguous`."""

    number: int | None
    is_ambiguous: bool = False  # it is unknown which of several watchers of a rank takes part
    whole: str = ""  # the description of the whole; "" if all ranks watch the same


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
        self.description, self._digest = description, _digest_of(description)
        self._session: _Session | None = None
        self._is_asked = False  # rank 0
        self._is_answered = threading.Event()
        self._has_ended = False
        self._thread = StoreThread(self._everything, self.rank)
        for one in [one for one in _LIVE if one._has_ended]:
            one.end()
        self._publish_description(description, self._everything)
        self._number = self._everything.add("number", 1)
        listed = self._listed(self.rank, self._watchers)
        if not listed:
            self._watchers.add("watching", 1)
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
                rest = self._without(self._listed(self.rank, self._watchers), self._number)
                self._write(rest)
                if not rest:
                    self._watchers.add("watching", -1)

    @property
    def is_found(self) -> bool:
        """Whether a watcher of every rank is known to take part. Not to be called before the first step."""
        if self._session is None and (found := self._find()) is not None:
            self._session = found  # not None, in place of an answer that has come meanwhile
        return self._session is not None

    @property
    def is_open(self) -> bool:
        """Whether ranks watch different parameters, and rank 0 has not answered how they belong together.

        Then `settle` asks it.
        """
        return not self.is_found and self._num_watching() == self.world

    def settle(self, description: str, unite: Unite, *, seconds: float = 0.0) -> None:
        """Ask rank 0 in the background, once, and wait so long for the answer.

        Args:
            description: what this rank watches, as it is trained.
            unite: used by rank 0.
        """
        if not self._is_asked:
            self._is_asked = True
            digest = _digest_of(description)

            def ask(everything: Store) -> bool:
                self._publish_description(description, everything)
                everything.set(f"final/{self._number}", digest)
                if self.is_found:  # the ranks are alike by now
                    return True
                if self._num_watching() < self.world:
                    return False
                if self.rank == 0 and not self._answer(everything, unite):
                    return False
                return self._read_answer(everything)

            self._thread.ask("settle", ask)
        self._is_answered.wait(seconds)

    @property
    def whole(self) -> str:
        """What `unite` has returned, once the session is found; "" if all ranks watch the same."""
        return "" if self._session is None else self._session.whole

    @property
    def is_ambiguous(self) -> bool:
        """Whether ranks watch different parameters, and it is unknown which of their watchers belong together."""
        return self._session is not None and self._session.is_ambiguous

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
        """The session, if all ranks watch the same parameters. The number of requests does not grow with the ranks."""
        listed = [(one._number, one._digest) for one in _LIVE if one._default is self._default]
        before = [one for one in listed if one[0] < self._number]
        place = _num_of(self._digest, before)
        if self._watchers.add(f"alike/{self._digest}/{place}", 0) < self.world:
            return None
        numbers = [number for number, digest in self._listed(0, self._watchers) if digest == self._digest]
        return _Session(numbers[place]) if place < len(numbers) else None

    def _answer(self, everything: Store, unite: Unite) -> bool:
        """Find out which watchers belong together, and tell all ranks. False if a rank has not come so far."""
        watchers: Store = PrefixStore(f"of {self.world}", everything)
        keys = [f"rank/{rank}" for rank in range(self.world)]
        if not watchers.check(keys):
            return False
        different = _without_common([json.loads(text) for text in watchers.multi_get(keys)])
        own = [number for number, _ in different[0]]
        if self._number not in own:  # alike by now
            return False
        answer: dict[str, Any] = {"session": None, "is_ambiguous": False}
        asking = [number for of_rank in different for number, _ in of_rank]
        if len({len(of_rank) for of_rank in different}) > 1:
            answer["is_ambiguous"] = all(different)  # otherwise some ranks watch something of their own
        else:
            place = own.index(self._number)
            asking = [of_rank[place][0] for of_rank in different]
            answer["session"] = self._number
            finals = [f"final/{number}" for number in asking]
            if not everything.check(finals):
                return False
            ranks: dict[str, list[int]] = {}
            for rank, digest in enumerate(everything.multi_get(finals)):
                ranks.setdefault(digest.decode(), []).append(rank)
            texts = everything.multi_get([f"what/{digest}" for digest in ranks])
            united = unite(dict(zip([text.decode() for text in texts], ranks.values(), strict=True)))
            everything.set(f"whole/{self._number}", united)
        asked = [f"answer/{number}" for number in asking]
        cast("Any", everything).multi_set(asked, [json.dumps(answer)] * len(asking))
        return True

    def _read_answer(self, everything: Store) -> bool:
        if not everything.check([f"answer/{self._number}"]):
            listed = self._listed(0, PrefixStore(f"of {self.world}", everything))
            is_alone = self.rank > 0 and not self._is_expected(listed, everything)
            if is_alone:
                self._settled(_Session(None))
            return is_alone
        answer = json.loads(everything.get(f"answer/{self._number}"))
        number = answer["session"]
        whole = "" if number is None else everything.get(f"whole/{number}").decode()
        self._settled(_Session(number, answer["is_ambiguous"], whole))
        return True

    def _is_expected(self, of_rank_0: Sequence[_Listed], everything: Store) -> bool:
        """Whether rank 0 watches something that not all ranks watch, so that it will answer."""
        watchers: Store = PrefixStore(f"of {self.world}", everything)
        places = [(digest, _num_of(digest, of_rank_0[:at])) for at, (_, digest) in enumerate(of_rank_0)]
        return any(watchers.add(f"alike/{digest}/{place}", 0) < self.world for digest, place in places)

    def _settled(self, session: _Session) -> None:
        self._session = session
        self._is_answered.set()

    def _num_watching(self) -> int:
        return self._watchers.add("watching", 0)

    def _publish_description(self, description: str, everything: Store) -> None:
        key = f"what/{_digest_of(description)}"
        if not everything.check([key]):
            everything.set(key, description)

    def _listed(self, rank: int, watchers: Store) -> list[_Listed]:
        text = watchers.get(f"rank/{rank}") if watchers.check([f"rank/{rank}"]) else "[]"
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


def _digest_of(description: str) -> str:
    return hashlib.sha256(description.encode()).hexdigest()


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
