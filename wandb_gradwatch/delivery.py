"""From samples that have arrived on the host to snapshots, rules, the flight recorder and the sinks."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from .capture.containment import CallbackError
from .desk import AlertDesk
from .diagnosis import Diagnosis, diagnose, with_diagnosis
from .recorder import FlightRecorder
from .reduction import LocalWindow, MergedWindow, Reducer
from .rules import Alert
from .shipments import ArrivedFlush, ArrivedSample
from .sinks import Sink
from .snapshot import Snapshot
from .statistics.columns import Column, FloatArray
from .statistics.found import MetricHistogram, merge_histograms

# S samples in the window, P watched parameters, C columns, B histogram bins

logger: Final = logging.getLogger("wandb_gradwatch")

Number = TypeVar("Number", np.float64, np.int64)

# Healthy samples wait for each other before the rules look at them: once for several costs little more than for one.
_JUDGED_TOGETHER: Final = 32
# One whose norm has grown this much since the last look, or that is not finite, is judged at once.
_SUSPICIOUS_GROWTH: Final = 1.5

# A norm above float16's largest value may overflow in the user's clipping, which then multiplies with 0: not zeroed.
_CLIPPED_TO_NOTHING: Final = 65504.0

_RECORDER_FILE: Final = "gradwatch-flight-recorder.npz"


@dataclass(frozen=True)
class Names:
    """What is known of the watched parameters at a moment: names [P] and which are trainable [P]."""

    names: tuple[str, ...]
    trainable: tuple[bool, ...]


class Delivery:
    """Owns what happens on the host after a sample's arrival.

    Args:
        sinks: where snapshots and alerts go; one that raises is dropped.
        desk: the rules and what is sent of their findings.
        on_alert: the user's callbacks; what they raise is raised as CallbackError.
        names: asks for the names as they are now.
        modules: class names of the model's modules by name, for the diagnosis.
        judge_at_once: judge every sample when it arrives, as rules of the user's may need.
        keep_newest_histogram: a new histogram of the probes replaces the window's instead of being added to it.
    """

    def __init__(
        self,
        sinks: Sequence[Sink],
        desk: AlertDesk,
        *,
        on_alert: Sequence[Callable[[Alert], object]],
        names: Callable[[], Names],
        modules: Mapping[str, str],
        judge_at_once: bool,
        keep_newest_histogram: bool,
    ) -> None:
        self.sinks = list(sinks)
        self.recorder = FlightRecorder()
        self.latest: Snapshot | None = None
        self._desk = desk
        self._on_alert = tuple(on_alert)
        self._names = names
        self._modules = modules
        self._batch = 1 if judge_at_once else _JUDGED_TOGETHER
        self._keep_newest_histogram = keep_newest_histogram
        self._window: list[ArrivedSample] = []  # arrived since the last flush
        self._unjudged: list[ArrivedSample] = []
        self._judged_sum_sq = math.inf  # of the last sample that the rules have seen
        self.said: set[str] = set()  # what is said once, by kind

    # ---- samples

    @property
    def window(self) -> tuple[ArrivedSample, ...]:
        """What has arrived since the last flush."""
        return tuple(self._window)

    @window.setter
    def window(self, samples: Sequence[ArrivedSample]) -> None:
        self._window = list(samples)

    @np.errstate(over="ignore", invalid="ignore")
    def take(self, sample: ArrivedSample, *, whole: bool) -> None:
        """A sample has arrived; `whole`: its rows are those of the whole model, not of this rank's shards."""
        total_C: list[float] = np.add.reduce(sample.rows, axis=0).tolist()
        some_are_missing = math.isnan(total_C[Column.GRAD_SUM_SQ])
        # Nearly always one optimizer has received something for everything: no need to look closer.
        if some_are_missing or not total_C[Column.RECEIVED_SUM_SQ] or len(sample.sample.updated) > 1:
            self._drop_zeroed(sample)
            total_C = np.nansum(sample.rows, axis=0).tolist()
        if sample.histograms:
            sample = self._with_earlier_histograms(sample)
        self._window.append(sample)
        if whole:
            self._judge_soon(sample, total_C)

    def _with_earlier_histograms(self, sample: ArrivedSample) -> ArrivedSample:
        """The window's histograms are those of its newest sample that has any: as many as there are keys, no more."""
        earlier: list[Mapping[str, MetricHistogram]] = []
        for index, other in enumerate(self._window):
            if other.histograms:
                earlier.append(other.histograms)
                self._window[index] = replace(other, histograms={})
        if self._keep_newest_histogram:
            return sample
        return replace(sample, histograms=merge_histograms([*earlier, sample.histograms]))

    def end_window(self) -> tuple[ArrivedSample, ...]:
        """The window's samples; the next window begins."""
        samples, self._window = tuple(self._window), []
        return samples

    def write(self, samples: Sequence[ArrivedSample], flush: ArrivedFlush, overhead_ratio: float) -> Snapshot:
        """A window of the whole model is complete: hand it to the sinks."""
        self.latest = snapshot = self.snapshot(samples, flush, overhead_ratio)
        self.recorder.picture(snapshot)  # before the rules: what an alert says may quote it
        self.judge()
        for sink in list(self.sinks):
            self.guarded(sink, "write", snapshot)
        return snapshot

    def snapshot(
        self, samples: Sequence[ArrivedSample], flush: ArrivedFlush | None = None, overhead_ratio: float = math.nan
    ) -> Snapshot:
        """These samples, at least one, under the names of now."""
        known = self._names()
        num_names = len(known.names)
        histogram = None
        if flush is not None and flush.histogram is not None:
            histogram = padded(flush.histogram, num_names, fill=0)
        return Snapshot(
            steps=np.array([arrived.sample.step for arrived in samples], dtype=np.int64),
            names=known.names,
            rows=np.stack([padded(arrived.rows, num_names) for arrived in samples]),
            histogram=histogram,
            histogram_steps=flush.histogram_steps if flush is not None else (),
            loss_scale=np.array([arrived.loss_scale for arrived in samples]),
            skipped=np.array([arrived.skipped for arrived in samples]),
            trainable=np.array(known.trainable, dtype=bool),
            metrics=_stacked([arrived.metrics for arrived in samples]),
            overhead_ratio=overhead_ratio,
            metric_histograms=merge_histograms(arrived.histograms for arrived in samples),
        )

    def _drop_zeroed(self, arrived: ArrivedSample) -> None:
        """An optimizer whose every gradient was zeroed before its step received nothing: missing, not 0."""
        # Zeros that no backward was seen to make are what zero_grad() left.
        unseen = np.isnan(arrived.rows[:, Column.GRAD_SUM_SQ]) & (arrived.rows[:, Column.RECEIVED_SUM_SQ] == 0)
        finite = _num_nonfinite(arrived.rows) == 0
        arrived.rows[unseen & finite] = np.nan
        for slots in map(list, arrived.sample.updated):
            rows = arrived.rows[slots]
            received = rows[:, Column.RECEIVED_SUM_SQ]
            if arrived.skipped or np.nansum(received) != 0 or np.nansum(_num_nonfinite(rows)):
                continue
            if 0 < np.nansum(rows[:, Column.GRAD_SUM_SQ]) < _CLIPPED_TO_NOTHING**2:
                arrived.rows[slots] = np.nan
                self.say_no_gradient(
                    f"in step {arrived.sample.step} every gradient was already zero when the optimizer stepped, though "
                    "the backward had computed them. Call zero_grad() after step(), or before backward().",
                    arrived.sample.step,
                )

    # ---- rules

    def _judge_soon(self, sample: ArrivedSample, total_C: Sequence[float]) -> None:
        self._unjudged.append(sample)
        sum_sq = total_C[Column.GRAD_SUM_SQ]
        nonfinite = total_C[Column.NUM_NAN] + total_C[Column.NUM_INF] > 0
        grown = not sum_sq <= self._judged_sum_sq * _SUSPICIOUS_GROWTH**2
        if nonfinite or grown or sample.skipped or len(self._unjudged) >= self._batch:
            self._judged_sum_sq = sum_sq
            self.judge()

    def judge(self) -> None:
        """Let the rules look at what they have not seen yet, and send what they find."""
        samples, self._unjudged = self._unjudged, []
        if not samples:
            return
        snapshot = self.snapshot(samples)
        self.recorder.add(snapshot)  # before the desk: the history of an alert has the alert's own sample
        raised: CallbackError | None = None
        for alert in self._desk.process(snapshot):
            try:
                self.send(with_diagnosis(alert, self.recorder.history(), **self._context))
            except CallbackError as error:
                raised = raised or error
        if raised is not None:
            raise raised

    def judge_merged(self, merged: MergedWindow) -> None:
        """The same for a window that was merged over ranks."""
        self._unjudged.extend(merged.samples)
        self.judge()

    @property
    def healthy(self) -> bool:
        """No rule found an error in the newest sample."""
        self.judge()
        return self._desk.healthy

    def diagnose(self) -> list[Diagnosis]:
        """Probable causes of what the last samples show, most probable first."""
        self.judge()
        history = self.recorder.history()
        return [] if history is None else diagnose(history, **self._context)

    @property
    def _context(self) -> dict[str, Any]:
        return {"modules": self._modules, "notes": self.recorder.notes}

    # ---- what is said

    def send(self, alert: Alert) -> None:
        """To every sink, to the recorder and to the user's callbacks; an error also leaves the evidence."""
        self.recorder.alert(alert)
        for sink in list(self.sinks):
            self.guarded(sink, "alert", alert)
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
        directories = [directory for sink in self.sinks if (directory := getattr(sink, "directory", None))]
        targets = [Path(path)] if path is not None else [Path(directory) / _RECORDER_FILE for directory in directories]
        written = []
        for target in targets:
            try:
                written.append(self.recorder.write(target))
            except OSError as error:  # a full disk must not end the training
                self.notice("recorder", f"the flight recorder could not be written to {target}: {error}")
        if table:
            columns, rows = self.recorder.table()
            for sink in list(self.sinks):
                if hasattr(sink, "log_table"):
                    self.guarded(sink, "log_table", columns, rows)
        return written

    def say_no_gradient(self, text: str, step: int) -> None:
        """Once: gradients lead to no update."""
        if "No gradient" not in self.said:
            self.said.add("No gradient")
            self.send(Alert("No gradient", f"Step {step}: {text}", step, "WARN"))

    def notice(self, kind: str, text: str) -> None:
        """Say something once."""
        if kind not in self.said:
            self.said.add(kind)
            logger.warning("wandb_gradwatch: %s", text)

    def guarded(self, sink: Sink, method: str, *arguments: object) -> None:
        """Call a sink; one that raises is dropped, with its traceback, and the others go on."""
        try:
            getattr(sink, method)(*arguments)
        except Exception as error:
            if sink in self.sinks:
                self.sinks.remove(sink)
                logger.error(
                    "wandb_gradwatch: %s failed and is dropped; training and the other sinks go on.",
                    type(sink).__name__,
                    exc_info=error,
                )

    def close(self) -> None:
        """Close the sinks."""
        for sink in list(self.sinks):
            self.guarded(sink, "close")


class Merger:
    """Windows of shards on their way through the reduction over ranks, with their overhead."""

    def __init__(self, name: str) -> None:
        self._reducer = Reducer(name)
        self._overhead: list[float] = []

    def submit(
        self,
        samples: tuple[ArrivedSample, ...],
        flush: ArrivedFlush,
        names: tuple[str, ...],
        counted: NDArray[np.bool_],
        overhead_ratio: float,
    ) -> None:
        """Merge this window with those of the other ranks, in the background."""
        rows = tuple(replace(sample, rows=padded(sample.rows, len(names))) for sample in samples)
        if flush.histogram is not None:
            flush = replace(flush, histogram=padded(flush.histogram, len(names), fill=0))
        self._overhead.append(overhead_ratio)
        self._reducer.submit(LocalWindow(rows, flush, names, counted))

    def poll(self, *, wait: bool) -> list[tuple[MergedWindow, float]]:
        """Merged windows, each with its overhead."""
        return [(merged, self._overhead.pop(0)) for merged in self._reducer.poll(wait=wait)]

    def close(self) -> None:
        """End the thread."""
        self._reducer.close()


class Overhead:
    """The monitor's share of the time since the last flush.

    Args:
        seconds_spent: asks how many seconds the monitor has taken so far.
        clock: seconds, from any zero.
    """

    def __init__(self, seconds_spent: Callable[[], float], clock: Callable[[], float] = time.perf_counter) -> None:
        self._seconds_spent = seconds_spent
        self._clock = clock
        self._began, self._spent = clock(), seconds_spent()

    def ratio(self) -> float:
        """The share since the last call, between 0 and 1."""
        now, spent = self._clock(), self._seconds_spent()
        ratio = (spent - self._spent) / max(now - self._began, 1e-9)
        self._began, self._spent = now, spent
        return min(max(ratio, 0.0), 1.0)


def padded(values: NDArray[Number], num_names: int, *, fill: float = math.nan) -> NDArray[Number]:
    """Room for names that appeared after these values were measured: [P, any]."""
    missing = num_names - len(values)
    return np.pad(values, ((0, missing), (0, 0)), constant_values=fill) if missing else values


def _num_nonfinite(rows_PC: FloatArray) -> FloatArray:
    """How many elements of each gradient are NaN or Inf: [P], NaN for a missing one."""
    return rows_PC[:, Column.NUM_NAN] + rows_PC[:, Column.NUM_INF]


def _stacked(metrics: Collection[Mapping[str, float]]) -> dict[str, FloatArray]:
    """Values by key over samples, NaN where a sample has none: each [S]."""
    keys = dict.fromkeys(key for values in metrics for key in values)
    return {key: np.array([values.get(key, math.nan) for values in metrics]) for key in keys}
