"""Of several processes that need the same code compiled, as ranks do, one compiles it; a cache on disk has it then."""

from __future__ import annotations

import logging
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Final

logger: Final = logging.getLogger("wandb_gradwatch")

_PAUSE: Final = 0.02  # seconds between two looks at what another process does


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
