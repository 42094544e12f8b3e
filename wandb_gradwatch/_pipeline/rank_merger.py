"""Merges the windows of all ranks in a thread, in rounds that begin only when every rank takes part.

The training never waits for a round. The store shows whether all ranks have come:

    <round>          the number of ranks that have come to this round, plus _LEFT for each rank that has left instead
    <round>/begins   set by the last rank that comes: every rank then merges; or by the first that leaves: no rank does

A rank comes to a round when it has a window that is not merged. If one rank alone has flushed, its window waits until
the other ranks have ended one, too; then the steps that all of them have are merged. So what one rank does alone never
pairs a window with one of other steps.
"""

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Final

from torch.distributed.distributed_c10d import Store

from .._transfer.transfers import ArrivedSample
from .rank_merge import Outcome, RankWindow, merge_in_step
from .rank_tree import GROUP, RankTree

# Seconds that the user's calls wait for other ranks; together two.
FLUSH_SECONDS: Final = 0.5  # all calls of flush() together, until one of them is not in vain: the row may come later
LAST_SECONDS: Final = 1.2  # remove() or the end of the script, for the last window
END_SECONDS: Final = 0.3  # the end of the thread, which would crash the process by destroying its groups at exit

_MESSAGE: Final = timedelta(seconds=60)  # time limit of the thread for each message, when all ranks have come
_LOOK: Final = timedelta(minutes=10)  # time after which the thread looks whether the store still answers
_LEFT: Final = 1 << 32  # more than any number of ranks
_ALL: Final = "all"
_MAX_SAMPLES: Final = 256  # number of samples that wait for other ranks, in two windows or more: memory is bounded


class RankMerger:
    """Merges windows in order, in a thread, over separate process groups (`rank_tree.py`).

    Args:
        store: the keys of the ranks that merge; nothing else may use them.
        finish: called in the thread with each merged sample, in order, to read what grows with the number of ranks.
    """

    def __init__(
        self, store: Store, rank: int, world: int, finish: Callable[[ArrivedSample], ArrivedSample] = lambda one: one
    ) -> None:
        self._store, self._rank, self._world, self._finish = store, rank, world, finish
        self._changed = threading.Condition()  # holds its lock whoever uses what follows
        self._waiting: deque[RankWindow] = deque()
        self._outcomes: list[Outcome] = []
        self._round = 0
        self._obstacle = ""  # why no window can be merged any more
        self._is_ending = False
        self._seconds_in_vain = 0.0  # that flush() has waited
        self._thread = threading.Thread(target=self._run, name="gradwatch-merger", daemon=True)
        self._thread.start()

    def submit(self, window: RankWindow) -> None:
        """Queue a window, which is merged when all ranks have its steps; returns at once."""
        with self._changed:
            num_samples = sum(len(other.samples) for other in self._waiting)
            if self._obstacle:
                self._outcomes.append(Outcome(window, self._obstacle))
            elif len(self._waiting) > 1 and num_samples > _MAX_SAMPLES:
                self._outcomes.append(Outcome(window, "other ranks are too far behind"))
            else:
                self._waiting.append(window)
                self._changed.notify_all()

    @property
    def has_outcomes(self) -> bool:
        """Whether `take` returns anything."""
        return bool(self._outcomes)

    def take(self) -> list[Outcome]:
        """Return the outcomes since the last call, in order."""
        with self._changed:
            outcomes, self._outcomes = self._outcomes, []
        return outcomes

    def wait(self) -> None:
        """Wait a limited time until every window has an outcome."""
        began = time.monotonic()
        is_done = self._wait_for_outcomes(FLUSH_SECONDS - self._seconds_in_vain)
        self._seconds_in_vain = 0.0 if is_done else self._seconds_in_vain + time.monotonic() - began

    def end(self, *, merge: bool) -> None:
        """Give every window its outcome, and end the thread. Idempotent.

        With `merge`, wait a limited time for windows that other ranks have, too.
        """
        deadline = time.monotonic() + END_SECONDS + (LAST_SECONDS if merge else 0.0)
        if merge:
            self._wait_for_outcomes(LAST_SECONDS)
        with self._changed:
            was_ending, self._is_ending = self._is_ending, True
            self._changed.notify_all()
        if was_ending:
            return
        # Wakes the thread, too. Not here, because a store whose process hangs does not answer.
        threading.Thread(target=self._leave, args=(self._round,), daemon=True).start()
        self._thread.join(max(deadline - time.monotonic(), 0.0))
        self._give_up("other ranks did not end theirs in time" if merge else "this rank has ended without the others")

    def _wait_for_outcomes(self, seconds: float) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: not self._waiting, max(seconds, 0.0))

    def _give_up(self, reason: str) -> None:
        with self._changed:
            self._obstacle = self._obstacle or reason
            self._outcomes += [Outcome(window, self._obstacle) for window in self._waiting]
            self._waiting.clear()
            self._changed.notify_all()

    def _run(self) -> None:
        try:
            clone = getattr(self._store, "clone", None)
            own_store = None if clone is None else clone()
            if self._all_come(own_store):  # the first round forms the groups, before there is a window
                tree = RankTree(own_store or self._store, self._rank, self._world, _MESSAGE, size=GROUP)
                while self._has_window() and self._all_come(own_store):
                    self._merge(tree)
        except Exception as error:
            self._give_up(f"the connection to other ranks has failed ({error})")
        self._leave(self._round + 1)

    def _has_window(self) -> bool:
        """Wait for a window. Returns False if this rank ends."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._is_ending)
            return not self._is_ending

    def _all_come(self, own_store: Store | None) -> bool:
        """Come to the next round and wait for all ranks. Returns False if a rank has left instead.

        `own_store` is a connection of this thread: waiting blocks a connection.
        """
        with self._changed:
            if self._is_ending:
                return False
            self._round = number = self._round + 1
        key = f"{number}/begins"
        if self._store.add(str(number), 1) == self._world:
            self._store.set(key, _ALL)
            for name in (str(number - 1), f"{number - 1}/begins"):  # every rank has read them
                self._store.delete_key(name)
        if own_store is None:  # torch < 2.6
            while not self._store.check([key]):
                time.sleep(0.05)
        is_there = False
        while own_store is not None and not is_there:
            with contextlib.suppress(RuntimeError):  # nothing has come, or the store is gone: then check() raises
                own_store.wait([key], _LOOK)
            is_there = own_store.check([key])
        who = self._store.get(key).decode()
        if who not in (_ALL, str(self._rank)):  # this rank itself knows why it leaves
            self._give_up(f"rank {who} no longer watches")
        return who == _ALL

    def _leave(self, number: int) -> None:
        """Tell the other ranks that this one does not come to a round, unless all have come."""
        with contextlib.suppress(RuntimeError):  # the process with the store may have ended
            if self._store.add(str(number), _LEFT) % _LEFT < self._world:
                self._store.set(f"{number}/begins", str(self._rank))

    def _finished(self, window: RankWindow) -> Outcome:
        return Outcome(replace(window, samples=tuple(map(self._finish, window.samples))))

    def _merge(self, tree: RankTree) -> None:
        with self._changed:
            if not self._waiting:  # given up right when the last rank came, whose next message fails at once
                raise RuntimeError("this rank has ended")
            window = self._waiting[0]
        outcomes, rest = merge_in_step(window, tree, self._rank, self._world)
        outcomes = [one if one.reason else self._finished(one.window) for one in outcomes]
        with self._changed:
            if self._waiting:
                self._waiting.popleft()
                self._waiting.extendleft(rest)
                self._outcomes += outcomes
                self._changed.notify_all()
