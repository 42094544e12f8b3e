"""What a sink is: every method that is ever called on one, each with a default that does nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..rules import Alert
from ..snapshot import Snapshot


class Sink:
    """Receives every flushed snapshot and every alert. A sink that raises is dropped, with one message.

    Derive from it and write the methods that the sink needs. They are called by the training's own thread: what may
    have to wait belongs in a thread of the sink's own, as in `WebhookSink`.
    """

    def write(self, snapshot: Snapshot) -> None:
        """Take a flushed window."""

    def alert(self, alert: Alert) -> None:
        """Take an alert, as soon as it is sent."""

    def log_table(self, columns: list[str], rows: list[list[Any]]) -> None:
        """Take the flight recorder's samples: one row for each layer at each step."""

    def close(self) -> None:
        """Release what the sink holds. Nothing is called after it."""

    @property
    def directory(self) -> str | None:
        """The folder in which the flight recorder's file is written; None for none."""
        return None

    @property
    def is_terminal(self) -> bool:
        """Whether a person reads this sink's alerts in the terminal, where an ERROR need not be said twice."""
        return False

    def namespace_in(self, run: object) -> str | None:
        """The namespace of the whole model's numbers in this W&B run, "" for none; None where it is not this run."""
        return None

    def pop_seconds(self) -> float:
        """Seconds of the training's time that the sink has taken outside of these methods since the last call."""
        return 0.0

    def before_run_ends(self, callback: Callable[[], object]) -> None:
        """Call back once before what the sink writes to comes to its end, for a last flush."""
