"""The flight recorder: the last samples of every layer, and the file that preserves them after a crash."""

import json
import math
import os
import tempfile
from collections import deque
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from .._interruptions import raise_interruption
from .._judgement.incident import Incident
from .._measure.columns import COLUMN_NAMES, NUM_BINS, IntArray
from ..rules import Alert
from ..snapshot import Snapshot, keys
from ..snapshot._shapes import merge_snapshots, select_samples

# S samples, P watched parameters, C columns, B histogram bins

MAX_SAMPLES: Final = 256
MAX_NOTE_CHARACTERS: Final = 2000  # enough for the description of the first bad operation
MAX_ALERTS: Final = 100
TABLE_COLUMNS: Final = (
    *("step", "name", "grad_norm", "grad_norm_clipped", "grad_abs_max", "param_norm", "dead_ratio"),
    *("num_nan", "num_inf", "loss_scale", "skipped"),
)
FORMAT: Final = 2  # of the file, which recording.py reads
ARRAYS: Final = ("steps", "rows", "loss_scale", "skipped", "trainable")  # arrays that are saved in the file
OF_PARAMETERS: Final = "fact/"  # begins the arrays of Snapshot.per_parameter in the file
_KEPT: Final = (*ARRAYS, "names", "metrics", "overhead_ratio", "per_parameter")

Note = dict[str, str | int | float | bool | None]


class FlightRecorder:
    """Keeps the last samples of every layer on the host, with the user's notes and the alerts.

    Memory is bounded: `max_samples` rows and facts per parameter (47 MB for 1000 parameters and 256 samples), at most
    one batch of samples more, and the newest histogram.
    """

    def __init__(self, max_samples: int = MAX_SAMPLES) -> None:
        self.max_samples = max_samples
        self._batches: deque[dict[str, Any]] = deque()  # arguments of the Snapshot of each batch of samples
        self._num_samples = 0  # in all batches
        self._newest_histogram: tuple[tuple[str, ...], IntArray, tuple[int, ...]] | None = None  # names, counts, steps
        self._notes: dict[int, Note] = {}
        self._alerts: deque[Alert] = deque(maxlen=MAX_ALERTS)
        self.incidents: tuple[Incident, ...] = ()  # all of the run, as they are known now

    def add(self, snapshot: Snapshot) -> None:
        """Keep these samples, whose arrays must not change later; drop the oldest beyond `max_samples`."""
        self.keep_histogram(snapshot)
        if len(snapshot) > self.max_samples:
            snapshot = select_samples(snapshot, range(len(snapshot))[-self.max_samples :])
        # Not the snapshot itself, which also holds every statistic that the rules have derived from it.
        self._batches.append({name: getattr(snapshot, name) for name in _KEPT})
        self._num_samples += len(snapshot)
        while self._num_samples - len(self._batches[0]["steps"]) >= self.max_samples:
            self._num_samples -= len(self._batches.popleft()["steps"])

    def keep_histogram(self, snapshot: Snapshot) -> None:
        """Keep the histogram of these samples, if there is one, in place of the older one. Does not add samples."""
        if snapshot.histogram is not None:
            self._newest_histogram = snapshot.names, snapshot.histogram.copy(), snapshot.histogram_steps

    def note(self, step: int, /, **context: object) -> None:
        """Keep short texts or numbers about a step: the index of the batch, its file, a learning rate.

        Notes of the same step are combined. Values other than numbers, strings and None are kept as a shortened repr.
        """
        note = self._notes.pop(int(step), {})  # removed and added again, so that it becomes the newest
        self._notes[int(step)] = note | {key: _small(value) for key, value in context.items()}
        while len(self._notes) > self.max_samples:
            del self._notes[next(iter(self._notes))]

    def alert(self, alert: Alert) -> None:
        self._alerts.append(alert)

    @property
    def notes(self) -> dict[int, Note]:
        """The kept notes by step."""
        return {step: dict(note) for step, note in self._notes.items()}

    @property
    def alerts(self) -> tuple[Alert, ...]:
        """The kept alerts, oldest first."""
        return tuple(self._alerts)

    def history(self) -> Snapshot | None:
        """All kept samples as one snapshot, with the newest histogram; None before the first sample.

        A parameter that appeared later is missing (NaN) in earlier samples.
        """
        if not self._batches:
            return None
        merged = merge_snapshots([Snapshot(**kept) for kept in self._batches])
        merged = select_samples(merged, range(len(merged))[-self.max_samples :])
        if self._newest_histogram is None:
            return merged
        names, counts, steps = self._newest_histogram
        place = {name: index for index, name in enumerate(merged.names)}
        known = [index for index, name in enumerate(names) if name in place]
        histogram = np.zeros((len(merged.names), NUM_BINS), dtype=np.int64)
        histogram[[place[names[index]] for index in known]] = counts[known]
        return replace(merged, histogram=histogram, histogram_steps=steps)

    def write(self, path: str | os.PathLike[str]) -> Path:
        """Write everything to a file atomically: after a crash during writing, the old file is still complete.

        The format is numpy's compressed .npz without pickled objects: float64 values are restored bit by bit, including
        NaN, any version of numpy can read the file, and reading runs no code.

        Returns:
            The path of the file; the suffix .npz is appended if it is missing.
        """
        target = Path(path)
        target = target if target.suffix == ".npz" else target.with_name(target.name + ".npz")
        target.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.stem}-", suffix=".tmp")
        try:
            with os.fdopen(handle, "wb") as file:
                np.savez_compressed(file, **self._arrays())
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, target)
        except BaseException:
            os.unlink(temporary)
            raise
        return target

    def _arrays(self) -> dict[str, Any]:
        history = self.history()
        notes = [[step, note] for step, note in self._notes.items()]
        words = {
            "format": FORMAT,
            "notes": notes,
            "alerts": [_told(alert) for alert in self._alerts],
            "incidents": [incident.to_dict() for incident in self.incidents],
        }
        arrays: dict[str, Any] = {"words": np.array(json.dumps(words))}
        if history is not None:
            arrays |= {name: getattr(history, name) for name in ARRAYS}
            arrays["names"] = np.array(history.names, dtype=np.str_)
            arrays["columns"] = np.array(COLUMN_NAMES, dtype=np.str_)
            arrays |= {f"metric/{key}": values for key, values in history.metrics.items()}
            facts = {name: history.per_parameter.get(name) for name in keys.PARAMETER_FACTS}
            arrays |= {OF_PARAMETERS + name: values for name, values in facts.items() if values is not None}
            if history.histogram is not None:
                arrays |= {"histogram": history.histogram, "histogram_steps": np.array(history.histogram_steps)}
        return arrays

    def table(self, *, max_rows: int = 10_000) -> tuple[list[str], list[list[Any]]]:
        """The columns and rows of a W&B table: one row for each layer in each sample, newest sample first.

        If there are more than `max_rows` rows, whole samples are dropped, oldest first. If a single sample has more,
        layers with NaN or Inf are kept first, then those with the largest norms. Missing values are None.
        """
        history = self.history()
        rows: list[list[Any]] = []
        if history is not None:
            for sample in reversed(range(len(history))):
                present = np.flatnonzero(~np.isnan(history.num_elements[sample]))
                if rows and len(rows) + len(present) > max_rows:
                    break
                if len(present) > max_rows:
                    badness = np.lexsort((-history.grad_norm[sample], -history.num_nonfinite[sample]))
                    present = np.sort(badness[np.isin(badness, present)][:max_rows])
                rows += [_table_row(history, sample, int(index)) for index in present]
        return list(TABLE_COLUMNS), rows


def _told(alert: Alert) -> dict[str, Any]:
    known = {"title": alert.title, "text": alert.text, "step": alert.step, "level": alert.level}
    return known if alert.incident is None else known | {"incident": alert.incident.to_dict()}


def _table_row(history: Snapshot, sample: int, index: int) -> list[Any]:
    values = {
        "step": int(history.steps[sample]),
        "name": history.names[index],
        "loss_scale": _or_none(history.loss_scale[sample]),
        "skipped": bool(history.skipped[sample]),
    }
    return [
        values[column] if column in values else _or_none(getattr(history, column)[sample, index])
        for column in TABLE_COLUMNS
    ]


def _or_none(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None


def _small(value: object) -> str | int | float | bool | None:
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else repr(value)
    try:
        text = value if isinstance(value, str) else repr(value)
    except Exception as error:  # of the user's class
        raise_interruption(error)
        text = f"{type(value).__name__} without repr(): {type(error).__name__}"
    return text if len(text) <= MAX_NOTE_CHARACTERS else text[: MAX_NOTE_CHARACTERS - 1] + "…"
