"""Where everything comes out: sinks, the user's callbacks, the flight recorder's file, the log."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from .._runtime.error_boundary import CallbackError
from ..rules import Alert
from ..sinks import Sink
from ..snapshot import Snapshot
from .recorder import FlightRecorder

logger: Final = logging.getLogger("wandb_gradwatch")

_RECORDER_FILE: Final = "gradwatch-flight-recorder.npz"


class Dispatcher:
    """Tells whoever listens. Owns the sinks, the flight recorder, and what has been said and is said once.

    Args:
        sinks: where snapshots and alerts go; one that raises is dropped, with its traceback, and the others go on.
        on_alert: the user's callbacks; what they raise is raised as CallbackError.
    """

    def __init__(self, sinks: Sequence[Sink], on_alert: Sequence[Callable[[Alert], object]]) -> None:
        self.recorder = FlightRecorder()
        self.said: set[str] = set()  # by kind
        self._sinks = list(sinks)
        self._on_alert = tuple(on_alert)

    def namespaces_in(self, run: object) -> set[str]:
        """See Watcher."""
        return {getattr(sink, "namespace", "") for sink in self._sinks if getattr(sink, "run", None) is run}

    def before_runs_end(self, flush: Callable[[], object]) -> None:
        """Have a run that is finished while watched call this first, so that it gets what it is owed."""
        for sink in self._sinks:
            before_run_ends = getattr(sink, "before_run_ends", None)
            if before_run_ends is not None:
                before_run_ends(flush)

    def write(self, snapshot: Snapshot) -> None:
        """A window, to every sink."""
        self._call_sinks("write", snapshot)

    def send(self, alert: Alert) -> None:
        """To every sink, to the recorder and to the user's callbacks; an error also leaves the evidence."""
        self.recorder.alert(alert)
        self._call_sinks("alert", alert)
        if alert.level == "ERROR":
            self.record(table=True)
        raised: Exception | None = None
        for callback in self._on_alert:
            try:
                callback(alert)
            except Exception as error:
                raised = raised or error
        if raised is not None:
            raise CallbackError from raised

    def record(self, path: str | Path | None = None, *, table: bool = False) -> list[Path]:
        """Write what the flight recorder holds: to a path, or beside the run of every sink that has one.

        Args:
            path: a file; None for the runs' own folders.
            table: also log it as a table to sinks that take one.

        Returns:
            The files written.
        """
        directories = [directory for sink in self._sinks if (directory := getattr(sink, "directory", None))]
        targets = [Path(path)] if path is not None else [Path(directory) / _RECORDER_FILE for directory in directories]
        written = []
        for target in targets:
            try:
                written.append(self.recorder.write(target))
            except OSError as error:  # a full disk must not end the training
                self.notice("recorder", f"the flight recorder could not be written to {target}: {error}")
        if table:
            self._call_sinks("log_table", *self.recorder.table())
        return written

    def alert_once(self, title: str, text: str, step: int) -> None:
        """Once for each title: what the capture is certain of."""
        if title not in self.said:
            self.said.add(title)
            self.send(Alert(title, f"Step {step}: {text}", step, "WARN"))

    def notice(self, kind: str, text: str) -> None:
        """Say something once."""
        if kind not in self.said:
            self.said.add(kind)
            logger.warning("wandb_gradwatch: %s", text)

    def close(self) -> None:
        """Close the sinks."""
        self._call_sinks("close")

    def _call_sinks(self, method: str, *arguments: object) -> None:
        """Call a method of every sink that has it."""
        for sink in list(self._sinks):
            try:
                if hasattr(sink, method):
                    getattr(sink, method)(*arguments)
            except Exception as error:
                self._drop(sink, error)

    def _drop(self, sink: Sink, error: Exception) -> None:
        if sink in self._sinks:
            self._sinks.remove(sink)
            logger.error(
                "wandb_gradwatch: %s failed and is dropped; training and the other sinks go on.",
                type(sink).__name__,
                exc_info=error,
            )
