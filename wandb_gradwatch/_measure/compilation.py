"""Code that takes seconds to compile: once per process, in the background; of several processes, as ranks are, by one.

A cache on disk has it for the others then.
"""

from __future__ import annotations

import logging
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Final, Generic, TypeVar

logger: Final = logging.getLogger("wandb_gradwatch")

Made = TypeVar("Made")

_LONGEST_FORK: Final = 60.0  # seconds that a fork waits at most
_PAUSE: Final = 0.02  # seconds between two looks at what another process does


class Compilation(Generic[Made]):
    """What a function makes, or why it could not.

    A fork waits until a compilation that has begun is done: a child would inherit the compiler's locks without the
    thread that holds them, and its own first use of the compiler would wait forever. So does the end of the process.
    """

    def __init__(self, make: Callable[[], Made], on_failure: Callable[[Exception], None]) -> None:
        self.made: Made | None = None
        self.failure: Exception | None = None
        self._make = make
        self._on_failure = on_failure
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin in the background, if that has not been done before."""
        if self._thread is not None:
            return
        # No daemon: an interpreter that ends while a compiler runs may crash.
        self._thread = threading.Thread(target=self._run, name="gradwatch-compile", daemon=False)
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(before=self._settle)
        self._thread.start()

    def wait(self) -> Made:
        """Return what was made, and make it if nobody has begun.

        Raises:
            RuntimeError: it could not be made, now or before.
        """
        if self.made is not None:
            return self.made
        self.start()
        assert self._thread is not None
        self._thread.join()
        if self.made is None:
            raise RuntimeError(f"the compiled loops could not be made: {self.failure!r}") from self.failure
        return self.made

    def fail(self, error: Exception) -> None:
        """What was made does not work: it is not used again."""
        self.made, self.failure = None, error

    def _run(self) -> None:
        try:
            self.made = self._make()
        except Exception as error:
            self.failure = error
            self._on_failure(error)

    def _settle(self) -> None:
        assert self._thread is not None
        if self._thread is not threading.current_thread():
            self._thread.join(_LONGEST_FORK)


@contextmanager
def after_other_processes(what: str, *, longest: float) -> Iterator[None]:
    """Go on when no other process of this user on this machine compiles this; those that have waited go on together.

    A process that has ended holds nobody up.

    Args:
        what: is compiled: the name of the lock.
        longest: seconds that a process is waited for, which may have been stopped.
    """
    until = time.monotonic() + longest
    with ExitStack() as stack:
        try:
            import fcntl

            file = stack.enter_context(_lock_file(what).open("a"))
            stack.callback(fcntl.flock, file, fcntl.LOCK_UN)  # a forked child that has the file too would keep the lock
            if not _has_locked(file, fcntl.LOCK_EX):
                while time.monotonic() < until and not _has_locked(file, fcntl.LOCK_SH):
                    time.sleep(_PAUSE)
                stack.close()
        except (ImportError, OSError) as error:  # Windows; no folder to write to, or one that knows no locks
            logger.debug("wandb_gradwatch: compiling %s beside other processes: %r", what, error)
        yield


def _has_locked(file: IO[str], how: int) -> bool:
    import fcntl

    try:
        fcntl.flock(file, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _lock_file(what: str) -> Path:
    folder = Path(tempfile.gettempdir()) / f"wandb-gradwatch-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder / f"{what}.lock"
