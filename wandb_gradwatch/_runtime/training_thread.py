"""Which thread trains: no other one may look at a gradient, which it may be writing to, or resetting."""

from __future__ import annotations

import sys
from threading import get_ident

from .autograd import is_called_here


class TrainingThread:
    """The thread that has made the last step, or called the last backward; until then, the one that watches."""

    def __init__(self) -> None:
        self._identity = get_ident()

    def step_begins(self) -> None:
        """An optimizer is about to step, in this thread."""
        self._identity = get_ident()

    def backward_begins(self) -> None:
        """A backward is under way, in this thread or in a device's."""
        if is_called_here():
            self._identity = get_ident()

    @property
    def is_another(self) -> bool:
        """Whether it is alive, and not the one that asks."""
        return self._identity != get_ident() and self._identity in sys._current_frames()
