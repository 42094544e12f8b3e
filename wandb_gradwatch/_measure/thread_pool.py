"""A thread pool for work divided into pieces, which the calling thread can also finish alone."""

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Final, TypeVar

Piece = TypeVar("Piece")

_MAX_HELPERS: Final = 7  # more would not be faster, because all share one memory


class ThreadPool:
    """Helper threads, started when there is work for them.

    Every thread takes pieces until none is left. A helper that starts late or never (the interpreter exits, no
    processor is free) therefore only leaves more pieces to the caller.
    """

    def __init__(self) -> None:
        self._pid = -1  # of the process whose threads the executor has: a forked child has none of them
        self._executor: ThreadPoolExecutor

    def each(self, pieces: Sequence[Piece], read: Callable[[Piece], object], num_threads: int) -> None:
        """Call a function, which should release the GIL, for each piece; return when all pieces are done."""
        numbers, lock = iter(range(len(pieces))), threading.Lock()
        failures: list[BaseException] = []

        def work() -> None:
            try:
                while not failures:
                    with lock:
                        number = next(numbers, None)
                    if number is None:
                        return
                    read(pieces[number])
            except BaseException as error:  # raised by the caller, also if it occurs in a helper
                failures.append(error)

        helpers = [self._help(work) for _ in range(min(num_threads - 1, _MAX_HELPERS))]
        try:
            work()
        finally:  # also after an interruption: the memory must stay valid until no helper reads it
            wait([helper for helper in helpers if helper is not None and not helper.cancel()])
            pieces, read = (), lambda _: None  # so that a helper that wakes up later holds no tensor
        if failures:
            raise failures[0]

    def _help(self, work: Callable[[], None]) -> Future[None] | None:
        """Let a helper do the work; None if there is no helper."""
        if self._pid != os.getpid():
            self._pid, self._executor = os.getpid(), ThreadPoolExecutor(_MAX_HELPERS, "gradwatch-measure")
        try:
            return self._executor.submit(work)
        except RuntimeError:  # no more threads: the interpreter exits, or a limit is reached
            return None


THREAD_POOL: Final = ThreadPool()
