"""Messages of the capture and the guard: they queue messages here, and the watcher passes them to the dispatcher."""

from collections import deque
from dataclasses import dataclass
from typing import ClassVar, Literal


class CannotWatchError(ValueError):
    """The user's arguments or training loop make watching impossible. The monitor itself has not failed."""


@dataclass(frozen=True)
class Notice:
    """A log message or an alert that is reported once for each kind."""

    kind: str  # for an alert, its title
    text: str
    step: int | None = None  # the step of an alert; None: a log message
    level: Literal["WARN", "ERROR"] = "WARN"  # the level of an alert
    cause: str = ""  # the identifiers of an alert's cause, and of another one that the facts allow as well
    rival: str = ""


class Notices(deque[Notice]):
    """The queue of messages, oldest first."""

    said_in_process: ClassVar[set[str]] = set()  # the kinds of messages that are said once per process

    def say(self, kind: str, text: str) -> None:
        """Queue a log message."""
        self.append(Notice(kind, text))

    def say_once_per_process(self, kind: str, text: str) -> None:
        """Queue a log message unless this process has queued one of its kind, for this model or another."""
        if kind not in self.said_in_process:
            self.said_in_process.add(kind)
            self.say(kind, text)

    def alert(
        self,
        title: str,
        fact: str,
        step: int,
        level: Literal["WARN", "ERROR"] = "WARN",
        *,
        cause: str = "",
        rival: str = "",
    ) -> None:
        """Queue an alert about a fault that the capture or the guard has itself detected at this step."""
        self.append(Notice(title, fact, step, level, cause, rival))
