"""A thread pool for work divided into pieces, which the calling thread can also finish alone."""

import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Final, TypeVar

Work = Callable[[], None]
Piece = TypeVar("Piece")

_MAX_HELPERS: Final = 7  # more would not be faster, because all share one memory
_give_way: Final[Callable[[], None]] = getattr(os, "sched_yield", lambda: time.sleep(0))


class ThreadPool:
    """Helper threads, started when there is work for them.

    Every thread takes pieces until none is left. A helper that starts late or never (the process was forked, the
    interpreter exits, no processor is free) therefore only leaves more pieces to the caller.
    """

    def __init__(self) -> None:
        self._waiting: queue.SimpleQueue[Work] = queue.SimpleQueue()
        self._helpers: list[threading.Thread] = []

    def each(self, pieces: Sequence[Piece], read: Callable[[Piece], object], num_threads: int) -> None:
        """Call a function, which should release the GIL, for each piece; return when all pieces are done."""
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
                except BaseException as error:  # raised by the caller, also if it occurs in a helper
                    failures.append(error)
                finally:
                    under_way.discard(number)

        for _ in range(self._ready(num_threads - 1)):
            self._waiting.put(work)
        try:
            work()
        finally:  # also after an interruption: the memory must stay valid until no helper reads it
            while under_way:
                _give_way()
            pieces, read = (), lambda _: None  # so that a helper that wakes up later finds no work and holds no tensor
        if failures:
            raise failures[0]

    def _ready(self, wanted: int) -> int:
        """Return how many of the wanted helpers are running, after starting missing ones."""
        helpers = [helper for helper in self._helpers if helper.is_alive()]
        if not helpers:  # none yet, or the process was forked and the queue holds the parent's work
            self._waiting = queue.SimpleQueue()
        while len(helpers) < min(wanted, _MAX_HELPERS):
            helper = threading.Thread(target=_help, args=(self._waiting,), name="gradwatch-measure", daemon=True)
            try:
                helper.start()
            except RuntimeError:  # no more threads: the interpreter exits, or a limit is reached
                break
            helpers.append(helper)
        self._helpers = helpers
        return max(min(wanted, len(helpers)), 0)


def _help(waiting: queue.SimpleQueue[Work]) -> None:
    while True:
        work = waiting.get()
        work()
        del work  # so that its tensors are not held until the next work arrives


THREAD_POOL: Final = ThreadPool()
