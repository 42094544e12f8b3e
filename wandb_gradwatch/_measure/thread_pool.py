"""Helper threads for work divided into pieces, which the calling thread can also finish alone.

Every thread takes pieces until none is left. A helper that starts late or never (the interpreter exits, no processor is
free) therefore only leaves more pieces to the caller.
"""

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from functools import lru_cache
from typing import Final, TypeVar

Piece = TypeVar("Piece")

_MAX_HELPERS: Final = 7  # more would not be faster, because all share one memory


def for_each(pieces: Sequence[Piece], read: Callable[[Piece], object], num_threads: int) -> None:
    """Call a function, which should release the GIL, for each piece; return when all pieces are done."""
    if num_threads == 1:
        for piece in pieces:
            read(piece)
        return
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

    helpers: list[Future[None]] = []
    with suppress(RuntimeError):  # no more threads: the interpreter exits, or a limit is reached
        for _ in range(min(num_threads - 1, _MAX_HELPERS)):
            helpers.append(_executor(os.getpid()).submit(work))
    try:
        work()
    finally:  # also after an interruption: the memory must stay valid until no helper reads it
        wait([helper for helper in helpers if not helper.cancel()])
        pieces, read = (), lambda _: None  # so that a helper that wakes up later holds no tensor
    if failures:
        raise failures[0]


@lru_cache(maxsize=1)
def _executor(_pid: int) -> ThreadPoolExecutor:
    """The helper threads of this process: a forked child has none of its parent's."""
    return ThreadPoolExecutor(_MAX_HELPERS, "gradwatch-measure")
