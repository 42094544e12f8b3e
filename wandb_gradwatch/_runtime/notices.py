"""What the capture and the guard have to say: they put it here, and the watcher's loop carries it to the dispatcher."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Literal


class CannotWatchError(ValueError):
    """What the user gave, or does, leaves nothing to watch, and this says why: no failure of the monitor."""


@dataclass(frozen=True)
class Notice:
    """Something to be said once for each kind."""

    kind: str  # of an alert, its title
    text: str  # what is said
    step: int | None = None  # the step of an alert; None: it is none, but a line in the log
    level: Literal["WARN", "ERROR"] = "WARN"  # of an alert


class Notices(deque[Notice]):
    """What is to be said, oldest first."""

    def say(self, kind: str, text: str) -> None:
        """Have this line in the log."""
        self.append(Notice(kind, text))

    def alert(self, title: str, text: str, step: int, level: Literal["WARN", "ERROR"] = "WARN") -> None:
        """Have this alert sent: the capture is certain of what it says about this step."""
        self.append(Notice(title, text, step, level))
