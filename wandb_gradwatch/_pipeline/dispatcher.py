"""The outputs of the pipeline: sinks, the user's callbacks, the flight recorder's file, the log."""

import logging
import os
import shlex
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from .._analysis.formatting import visible_text
from .._boundary import CallbackError
from .._interruptions import raise_interruption
from .._judgement.incident import Incident, kind_of
from .._judgement.verdict import Verdict
from ..rules import Alert
from ..sinks import Sink, WandbSink
from ..snapshot import Snapshot
from .recorder import FlightRecorder

logger: Final = logging.getLogger("wandb_gradwatch")

_RECORDER_FILE: Final = "gradwatch-flight-recorder.npz"


@dataclass
class _Said:
    """A kind of message that is logged once: its first text in this process, its newest text, and their number."""

    first: str = ""
    newest: str = ""
    count: int = 0


@dataclass
class News:
    """What a delivery of samples has found and sent, for the capture's schedule."""

    is_unusual: bool = False  # a sample was not finite, or its norm was three times the usual one
    is_untraced: bool = False  # a gradient was modified although its version counter had not changed
    kinds: set[str] = field(default_factory=set)  # of the alerts that were sent
    seconds_on_rows: float = 0.0  # time for writing windows
    seconds_on_alerts: float = 0.0  # time for sending alerts


class Dispatcher:
    """Sends snapshots, alerts and messages. Owns the sinks, the flight recorder, and the messages logged once.

    A sink that raises is removed, and its traceback is logged. An exception of a user's callback becomes CallbackError.
    """

    def __init__(
        self, sinks: Sequence[Sink], on_alert: Sequence[Callable[[Alert], object]], *, to_terminal: bool
    ) -> None:
        self.recorder = FlightRecorder()
        self._said: dict[str, _Said] = {}  # by kind
        self._incidents_said: set[tuple[str, int]] = set()  # on standard error: kind and first step
        self._sinks = list(sinks)
        self._on_alert = tuple(on_alert)
        self._to_terminal = to_terminal
        self.news = News()  # since the last call of `pop_news`

    @property
    def said(self) -> list[str]:
        """The kinds of messages that have been logged and are not repeated."""
        return sorted(self._said)

    def do_not_repeat(self, kinds: Iterable[str]) -> None:
        """Do not log messages of these kinds again: an earlier part of this training has logged them."""
        for kind in kinds:
            self._said.setdefault(kind, _Said(count=1))

    @property
    def logs_to_run(self) -> bool:
        """Whether a W&B run receives the rows."""
        return any(isinstance(sink, WandbSink) for sink in self._sinks)

    def namespaces_in(self, run: object) -> set[str]:
        """The namespaces under which this watcher's sinks write into a W&B run."""
        return {namespace for sink in self._sinks if (namespace := sink.namespace_in(run)) is not None}

    def before_runs_end(self, flush: Callable[[], object]) -> None:
        """Register a callback that flushes before a W&B run ends, so that the run receives its last rows."""
        for sink in self._sinks:
            sink.before_run_ends(flush)

    def write(self, snapshot: Snapshot) -> None:
        self._call_sinks("write", snapshot)

    def tell(self, verdict: Verdict) -> None:
        """Send what is known of the run to the recorder and all sinks."""
        self.recorder.incidents = verdict.incidents
        self._call_sinks("verdict", verdict)

    def send(self, alert: Alert, verdict: Verdict) -> None:
        """Send an alert to the recorder, all sinks and the user's callbacks; an ERROR also writes the recorder.

        The sinks receive the verdict before the callbacks, one of which may end the process.
        """
        self.recorder.alert(alert)
        self.news.kinds.add(kind_of(alert.title) if alert.incident is None else alert.incident.kind)
        if alert.level == "ERROR" and alert.incident is not None:
            self._say_once(alert.incident)
        self._call_sinks("alert", alert)
        self.tell(verdict)
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

    def pop_news(self) -> News:
        """Return the news since the last call of `pop_news`."""
        news, self.news = self.news, News()
        return news

    def pop_seconds(self) -> float:
        """Return the seconds that sinks took outside of the dispatcher's calls since the last call of `pop_seconds`."""
        return sum([sink.pop_seconds() for sink in self._sinks])

    def record(self, path: str | Path | None = None, *, table: bool = False) -> list[Path]:
        """Write the flight recorder to a path, or to the folder of every sink that has one; return the files.

        With `table`, the samples are also passed to all sinks as a table.
        """
        targets = [Path(path)] if path is not None else [folder / _RECORDER_FILE for folder in self._directories()]
        written = []
        for target in targets:
            try:
                written.append(self.recorder.write(target))
            except OSError as error:  # a full disk must not end the training
                self.notice("recorder", f"the flight recorder could not be written to {target}: {error}")
        if table:
            self._call_sinks("log_table", *self.recorder.table())
        return written

    def notice(self, kind: str, text: str) -> None:
        """Log a message of this kind once; `close` logs how often there was one."""
        is_new = kind not in self._said
        self.count(kind, text)
        if is_new:
            logger.warning("wandb_gradwatch: %s", text)

    def count(self, kind: str, text: str) -> None:
        """Count a message of this kind for `close`."""
        said = self._said.setdefault(kind, _Said())
        said.count += text != said.newest  # an equal text names the same step, so it is not counted again
        said.first, said.newest = said.first or text, text

    def close(self, verdict: Verdict) -> None:
        """Log the counts of repeated messages, say the verdict in one line, and close the sinks."""
        for said in self._said.values():
            if said.count > 1:
                logger.warning("wandb_gradwatch: %d times in all measured steps: %s", said.count, said.first)
        if verdict.num_steps or verdict.incidents:
            self._say(self._ending(verdict))
            self.tell(verdict)
        self._call_sinks("close")

    def _ending(self, verdict: Verdict) -> str:
        """The verdict in a line, and the command that shows the page."""
        for path in (Path(sink.viewable) for sink in self._sinks if sink.viewable):
            view = f"wandb-gradwatch view {shlex.quote(str(near(path)))}"
            return f"{verdict.sentence}. To see the page of the run: {view}"
        return f"{verdict.sentence}."

    def _directories(self) -> list[Path]:
        return [Path(directory) for sink in self._sinks if (directory := sink.directory)]

    def _say_once(self, incident: Incident) -> None:
        known = (incident.kind, incident.first_step)
        if known not in self._incidents_said and not any(sink.is_terminal for sink in self._sinks):
            self._say(f"{incident.level}: {incident.message}")
        self._incidents_said.add(known)

    def _say(self, text: str) -> None:
        if self._to_terminal:
            print(f"wandb_gradwatch: {visible_text(text)}", file=sys.stderr, flush=True)

    def _call_sinks(self, method: str, *arguments: object) -> None:
        for sink in list(self._sinks):
            try:
                getattr(sink, method)(*arguments)
            except Exception as error:
                raise_interruption(error)
                if sink in self._sinks:
                    self._sinks.remove(sink)
                    logger.error(
                        "wandb_gradwatch: %s failed and is dropped; training and the other sinks continue.",
                        type(sink).__name__,
                        exc_info=error,
                    )


def near(path: Path) -> Path:
    """The path relative to the working directory, if it is inside of that directory."""
    return path.relative_to(os.getcwd()) if path.is_relative_to(os.getcwd()) else path
