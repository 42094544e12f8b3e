"""Who is told of what torch does: what tells of it is put into torch for the first, and taken out after the last."""

from __future__ import annotations

import threading
from typing import Generic, TypeVar

Listener = TypeVar("Listener")


class Listeners(Generic[Listener]):
    """The listeners. Any thread may come, go, or be told: a tuple is gone through as it was."""

    def __init__(self) -> None:
        self._listeners: tuple[Listener, ...] = ()
        # Re-entrant: the collector may find a watched model in here, and with it a listener that goes.
        self._lock = threading.RLock()

    def subscribe(self, listener: Listener) -> None:
        """Tell this listener from now on."""
        with self._lock:
            self._listeners = (*self._listeners, listener)
            self._install()

    def unsubscribe(self, listener: Listener) -> None:
        """Tell it no more. Idempotent."""
        with self._lock:
            self._listeners = tuple(other for other in self._listeners if other is not listener)
            if not self._listeners:
                self._uninstall()

    def _install(self) -> None:
        """Put into torch what tells of it, unless it is there."""
        raise NotImplementedError

    def _uninstall(self) -> None:
        """Take it out again, if it is there."""
        raise NotImplementedError
