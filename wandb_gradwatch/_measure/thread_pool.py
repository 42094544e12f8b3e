"""Threads that lend a hand with work that is divided into pieces, and on which nothing depends."""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Final, TypeVar

Work = Callable[[], None]
Piece = TypeVar("Piece")

_MAX_HELPERS: Final = 7  # they all read one memory
_give_way: Final[Callable[[], None]] = getattr(os, "sched_yield", lambda: time.sleep(0))


class ThreadPool:
    """Threads that wait for work, started when there is some for them.

    The work takes pieces for itself until none is left, so that a helper that comes late, or never (the process was
    forked, the interpreter ends, no processor is free), only leaves more of them to the caller.
    """

    def __init__(self) -> None:
        self._waiting: queue.SimpleQueue[Work] = queue.SimpleQueue()
        self._helpers: list[threading.Thread] = []

    def each(self, pieces: Sequence[Piece], read: Callable[[Piece], object], num_threads: int) -> None:
        """Call a function that lets go of the interpreter's lock for each piece; return when all of it is done."""
        numbers, under_way, lock = iter(range(len(pieces))), set[int](), threading.Lock()
        failures: list[BaseException] = []

        def work() -> None:
            number = 0
            while number >= 0:
                try:
                    with lock:
                        number = next(numbers, -1)
                        under_way.add(number)
                    if number >= 0 and not failures:
                        read(pieces[number])
                except BaseException as error:  # the caller's to raise, also what a helper meets
                    failures.append(error)
                finally:
                    under_way.discard(number)

        for _ in range(self._ready(num_threads - 1)):
            self._waiting.put(work)
        try:
            work()
        finally:  # also where the user interrupts: what is read must stay as it is until nobody reads it
            while under_way:
                _give_way()
            pieces, read = (), lambda _: None  # a helper that wakes later is to find nothing, and to keep nothing
        if failures:
            raise failures[0]

    def _ready(self, wanted: int) -> int:
        """How many of these helpers there are, started if need be."""
        helpers = [helper for helper in self._helpers if helper.is_alive()]
        if not helpers:  # none yet; or the process was forked, and what waits was for the parent's
            self._waiting = queue.SimpleQueue()
        while len(helpers) < min(wanted, _MAX_HELPERS):
            helper = threading.Thread(target=_help, args=(self._waiting,), name="gradwatch-measure", daemon=True)
            try:
                helper.start()
            except RuntimeError:  # no more threads: the interpreter ends, or a limit is reached
                break
            helpers.append(helper)
        self._helpers = helpers
        return max(min(wanted, len(helpers)), 0)


def _help(waiting: queue.SimpleQueue[Work]) -> None:
    while True:
        work = waiting.get()
        work()
        del work  # what it holds is not kept until the next


THREAD_POOL: Final = ThreadPool()
