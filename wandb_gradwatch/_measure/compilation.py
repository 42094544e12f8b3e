"""Compiles slow code once per process, in the background. If several processes (ranks) need it, one compiles first.

The other processes then find the result in a cache on disk.
"""

import logging
import os
import platform
import stat
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final, Generic, TypeVar

logger: Final = logging.getLogger("wandb_gradwatch")

Made = TypeVar("Made")

_LONGEST_FORK: Final = 60.0  # seconds; the longest time that a fork waits for this process's own compiler
_LONGEST_WAIT: Final = 60.0  # seconds; the longest time to wait for another process that compiles
_PAUSE: Final = 0.1  # seconds between attempts to get another process's lock


class Compilation(Generic[Made]):
    """The result of a function that compiles, or the exception that it raised.

    A fork waits while this process compiles: otherwise the child would inherit the compiler's locks without the thread
    that holds them, and its own first compilation would wait forever. The exit of the process waits too. Neither waits
    for another process.

    Args:
        make: compiles, and returns the result.
        name: processes that compile something of this name compile it one after the other; None: at the same time.
    """

    def __init__(self, make: Callable[[], Made], *, name: str | None = None) -> None:
        self.made: Made | None = None
        self.failure: Exception | None = None
        self._make = make
        self._name = name
        self._thread: threading.Thread | None = None
        self._compiles = threading.Lock()  # held by the compilation, except while it waits; and by a fork
        self._fork_holds_lock = False
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(
                before=self._before_fork, after_in_parent=self._after_fork, after_in_child=self._in_forked_child
            )

    def start(self) -> threading.Thread:
        """Start the compilation in a thread, unless it was started before; return the thread."""
        if self._thread is None:
            # Not a daemon thread: an interpreter that exits while a compiler runs may crash.
            thread = threading.Thread(target=self._run, name="gradwatch-compile", daemon=False)
            self._compiles.acquire()  # the thread releases it
            try:
                thread.start()
            except BaseException:
                self._compiles.release()
                raise
            self._thread = thread
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
            with ExitStack() as stack:
                if self._name is not None:
                    turn = after_other_processes(self._name, longest=_LONGEST_WAIT, pause=self._pause)
                    stack.enter_context(turn)
                self.made = self._make()
        except Exception as error:
            self.failure = error
        finally:
            self._compiles.release()

    def _pause(self, seconds: float) -> None:
        """Wait a moment for another process. Meanwhile this process may fork or exit."""
        self._compiles.release()
        time.sleep(seconds)
        self._compiles.acquire()
        if not threading.main_thread().is_alive():
            raise RuntimeError("the program ended while another process compiled")

    def _before_fork(self) -> None:
        if self._thread is not threading.current_thread():
            self._fork_holds_lock = self._compiles.acquire(timeout=_LONGEST_FORK)

    def _after_fork(self) -> None:
        if self._fork_holds_lock:
            self._fork_holds_lock = False
            self._compiles.release()

    def _in_forked_child(self) -> None:
        if self._thread is not threading.current_thread():
            self._compiles, self._fork_holds_lock = threading.Lock(), False
            if self.made is None and self.failure is None:
                self._thread = None  # the child has no such thread; it may start its own


@contextmanager
def after_other_processes(
    what: str, *, longest: float, pause: Callable[[float], object] = time.sleep
) -> Iterator[None]:
    """Wait while another process of this user on this machine compiles the same; then all waiting processes continue.

    A process that has ended blocks nobody, and nobody waits once the program has ended.

    Args:
        what: the name of the compiled code, and so of the lock.
        longest: the longest time to wait, in seconds, because the other process may be suspended.
        pause: called between attempts to get the lock, with the seconds to wait.
    """
    until = time.monotonic() + longest
    with ExitStack() as stack:
        try:
            import fcntl

            file = _open_lock(what)
            stack.callback(os.close, file)
            stack.callback(fcntl.flock, file, fcntl.LOCK_UN)  # otherwise a forked child would keep the lock
            if not _has_locked(file, fcntl.LOCK_EX):
                while time.monotonic() < until and threading.main_thread().is_alive():
                    if _has_locked(file, fcntl.LOCK_SH):
                        break
                    pause(_PAUSE)
                stack.close()
        except (ImportError, OSError) as error:  # on Windows; or no private folder, or one without locks
            logger.debug("wandb_gradwatch: compiling %s beside other processes: %r", what, error)
        yield


def _has_locked(file: int, how: int) -> bool:
    import fcntl

    try:
        fcntl.flock(file, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _open_lock(what: str) -> int:
    """Open the file of a lock. The open neither follows a link nor waits, as it would for the reader of a FIFO.

    Raises:
        OSError: there is no private folder, or something else has the lock's name.
    """
    path = _private_folder() / f"{what}-{platform.node()}.lock"  # computers may share the folder
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
    found = os.fstat(file)
    if stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid():
        return file
    os.close(file)
    raise OSError(f"{path} is not a file of this user")


def _private_folder() -> Path:
    """Return this user's cache folder of this package; if there can be none, one among the temporary files.

    Nobody else can write there: names in a shared folder can be taken in advance by other users.
    """
    caches = Path(os.environ.get("XDG_CACHE_HOME", "")), Path(os.path.expanduser("~/.cache"))
    in_temporary = Path(tempfile.gettempdir()) / f"wandb-gradwatch-{os.geteuid()}"
    for folder in (*(cache / "wandb-gradwatch" for cache in caches if cache.is_absolute()), in_temporary):
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            found = folder.lstat()
        except OSError:
            continue
        is_private = stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o022
        if is_private and os.access(folder, os.W_OK):
            return folder
    raise OSError("there is no folder that only this user can write to")
