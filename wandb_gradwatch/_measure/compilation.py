"""Something that takes seconds to make: made once per process, in the background, and used when it is there."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Final, Generic, TypeVar

Made = TypeVar("Made")

_LONGEST: Final = 60.0  # seconds that a fork waits at most


class Compilation(Generic[Made]):
    """What a function makes, or why it could not.

    A fork waits until a compilation that has begun is done: a child would inherit the compiler's locks without the
    thread that holds them, and its own first use of the compiler would wait forever. So does the end of the process.

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
            self.made = self._make()
        except Exception as error:
            self.failure = error
            self._on_failure(error)

    def _settle(self) -> None:
        assert self._thread is not None
        if self._thread is not threading.current_thread():
            self._thread.join(_LONGEST)
