"""Something that takes seconds to make: made once per process, in the background, and used when it is there."""

from __future__ import annotations

import logging
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final, Generic, TypeVar

logger: Final = logging.getLogger("wandb_gradwatch")

Made = TypeVar("Made")

_LONGEST: Final = 60.0  # seconds that a fork waits at most, or a process for another, which may have been stopped
_PAUSE: Final = 0.02  # seconds between two looks at what another process does


class Compilation(Generic[Made]):
    """What a function makes, or why it could not.

    A fork waits until a compilation that has begun is done: a child would inherit the compiler's locks without the
    thread that holds them, and its own first use of the compiler would wait forever. So does the end of the process.
    Of several processes that begin at once, as ranks do, one makes it, and the others find it in the cache on disk.

    Args:
        make: called at most once, in a thread.
        on_failure: called with what it raised, in that thread.
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
            with _after_other_processes():
                self.made = self._make()
        except Exception as error:
            self.failure = error
            self._on_failure(error)

    def _settle(self) -> None:
        assert self._thread is not None
        if self._thread is not threading.current_thread():
            self._thread.join(_LONGEST)


@contextmanager
def _after_other_processes() -> Iterator[None]:
    """Go on when no other process of this user on this machine is in here; those that have waited go on together."""
    until = time.monotonic() + _LONGEST
    with ExitStack() as stack:
        try:
            import fcntl

            file = stack.enter_context(_lock_file().open("a"))
            stack.callback(fcntl.flock, file, fcntl.LOCK_UN)  # a forked child that has the file too would keep the lock
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                while time.monotonic() < until:
                    try:
                        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                        break
                    except BlockingIOError:
                        time.sleep(_PAUSE)
                stack.close()
        except (ImportError, OSError) as error:  # Windows; no folder to write to, or one that knows no locks
            logger.debug("wandb_gradwatch: compiling beside other processes: %r", error)
        yield


def _lock_file() -> Path:
    return Path(tempfile.gettempdir()) / f"wandb-gradwatch-compiles-{os.getuid()}.lock"
