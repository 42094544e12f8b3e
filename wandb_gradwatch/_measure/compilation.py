"""Compiles slow code once per process, in the background. If several processes (ranks) need it, one compiles first.

The other processes then find the result in a cache on disk.
"""

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

_LONGEST_FORK: Final = 60.0  # seconds; the longest time that a fork waits
_PAUSE: Final = 0.02  # seconds between attempts to get another process's lock


class Compilation(Generic[Made]):
    """The result of a function that compiles, or the exception that it raised.

    A fork waits until a running compilation has ended: otherwise the child would inherit the compiler's locks without
    the thread that holds them, and its own first compilation would wait forever. The exit of the process waits too.
    """

    def __init__(self, make: Callable[[], Made]) -> None:
        self.made: Made | None = None
        self.failure: Exception | None = None
        self._make = make
        self._thread: threading.Thread | None = None

    def start(self) -> threading.Thread:
        """Start the compilation in a thread, unless it was started before; return the thread."""
        if self._thread is None:
            # Not a daemon thread: an interpreter that exits while a compiler runs may crash.
            self._thread = threading.Thread(target=self._run, name="gradwatch-compile", daemon=False)
            if hasattr(os, "register_at_fork"):
                os.register_at_fork(before=self._settle)
            self._thread.start()
        return self._thread

    def wait(self) -> Made:
        """Return the result; start the compilation if necessary and wait for it.

        Raises:
            RuntimeError: the compilation failed, now or earlier.
        """
        if self.made is not None:
            return self.made
        self.start().join()
        if self.made is None:
            raise RuntimeError(f"the compiled loops could not be made: {self.failure!r}") from self.failure
        return self.made

    def fail(self, error: Exception) -> None:
        """Discard the result, because it does not work."""
        self.made, self.failure = None, error

    def _run(self) -> None:
        try:
            self.made = self._make()
        except Exception as error:
            self.failure = error

    def _settle(self) -> None:
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(_LONGEST_FORK)


@contextmanager
def after_other_processes(what: str, *, longest: float) -> Iterator[None]:
    """Wait while another process of this user on this machine compiles the same; then all waiting processes continue.

    A process that has ended blocks nobody.

    Args:
        what: the name of the compiled code, and so of the lock.
        longest: the longest time to wait, in seconds, because the other process may be suspended.
    """
    until = time.monotonic() + longest
    with ExitStack() as stack:
        try:
            import fcntl

            file = stack.enter_context(_lock_file(what).open("a"))
            stack.callback(fcntl.flock, file, fcntl.LOCK_UN)  # otherwise a forked child would keep the lock
            if not _has_locked(file, fcntl.LOCK_EX):
                while time.monotonic() < until and not _has_locked(file, fcntl.LOCK_SH):
                    time.sleep(_PAUSE)
                stack.close()
        except (ImportError, OSError) as error:  # on Windows; or no writable folder, or one without locks
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
