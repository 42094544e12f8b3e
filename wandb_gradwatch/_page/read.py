"""Read an offline run's history, finished, truncated or still being written.

`wandb leet inspect --json` is W&B's supported reader of `.wandb` files. Its records are streamed: memory holds the
scalars as packed arrays and a bounded number of histograms, never the file.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, cast

import numpy as np

from .._measure.columns import FloatArray
from ..snapshot import keys
from .histograms import HistogramCollector
from .history import (
    HistogramSeries,
    OwnSeries,
    RecordedAlert,
    RecordedTable,
    RunHistory,
)

_RECORD_TYPE: Final = re.compile(r'^\{"num":\d+,"type":"(\w+)"')
_WANTED: Final = frozenset({"run", "config", "history", "alert", "exit"})
_STEP_IN_TEXT: Final = re.compile(r"\bstep[ =]+(\d{1,18})\b", re.IGNORECASE)
_NON_FINITE: Final = {"NaN": float("nan"), "Infinity": float("inf"), "-Infinity": float("-inf")}
_INCOMPLETE: Final = "incomplete .wandb file"


class UnreadableRunError(ValueError):
    """The path holds no run that can be read; the message tells a user what to do."""


def read_run(path: str | os.PathLike[str], *, progress: Callable[[int], None] | None = None) -> RunHistory:
    """Read everything that the package logged into a run from the run's own file.

    A file that is still being written, or that was cut off, gives what is in it; `RunHistory.notes` says so.

    Args:
        path: a `.wandb` file, an offline run's directory, a `wandb/` directory (its newest run), or the directory
            that holds one.
        progress: called with the number of history rows read so far, every 100 rows.

    Raises:
        UnreadableRunError: a ValueError; there is no run at `path`, or its file cannot be read.

    Cost: about 20 MB of file per second; W&B's reader takes nearly all of it.
    """
    file = find_run_file(Path(path))
    reading = _Reading(file)
    for kind, record in _records(file, reading.notes):
        reading.take(kind, record)
        if progress is not None and kind == "history" and reading.num_rows % 100 == 0:
            progress(reading.num_rows)
    return reading.finish()


def find_run_file(path: Path) -> Path:
    """The `.wandb` file that `path` means: the newest one where a directory holds several.

    Raises:
        UnreadableRunError: there is none.
    """
    if path.is_file():
        if path.suffix != ".wandb":
            raise UnreadableRunError(f"{path} is not a W&B run: give its .wandb file or the directory that holds it")
        return path.resolve()
    if not path.is_dir():
        raise UnreadableRunError(f"there is no file or directory {path}")
    for pattern in ("*.wandb", "*run-*/*.wandb", "wandb/*run-*/*.wandb"):
        files = [file for file in path.glob(pattern) if file.is_file()]
        if files:
            return max(files, key=lambda file: (file.stat().st_mtime_ns, file.name)).resolve()
    raise UnreadableRunError(
        f"{path} holds no W&B run: there is no .wandb file in it, nor in a wandb/ directory below it; "
        "give the directory that wandb.init() or the end of the run printed"
    )


def _records(file: Path, notes: list[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (type, content) of the wanted records of a `.wandb` file; warnings of the reader go to `notes`."""
    command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(file)]
    # The reader's messages go to a file: a pipe that nobody empties would stop it.
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as messages:
        process = subprocess.Popen(
            command,
            cwd=file.parent,  # a script named wandb.py in the user's directory must not be taken for wandb
            env={**os.environ, "WANDB_ERROR_REPORTING": "false"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=messages,
            encoding="utf-8",
            errors="replace",
        )
        try:
            assert process.stdout is not None
            for line in process.stdout:
                match = _RECORD_TYPE.match(line)
                # Summaries are half the bytes; they are told by their first characters and never parsed.
                if match is None or match[1] not in _WANTED:
                    continue
                yield match[1], cast(dict[str, Any], json.loads(line)[match[1]])
            status = process.wait()
        finally:
            if process.poll() is None:
                process.kill()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()
        messages.seek(0)
        said = [line.strip() for line in messages.read().splitlines() if line.strip()]
    if status != 0:
        raise UnreadableRunError(_why_unreadable(file, said))
    notes.extend(line.removeprefix("wandb leet inspect: ") for line in said if _INCOMPLETE not in line)


def _why_unreadable(file: Path, said: list[str]) -> str:
    if any("No such command" in line for line in said):
        import wandb

        return (
            f"reading a run's file needs `wandb leet inspect` of wandb 0.31 or newer, but this is {wandb.__version__}"
        )
    return f"{file} cannot be read as a W&B run: {said[-1] if said else 'the reader said nothing'}"


def steps_between(own_N: FloatArray, placed_K: FloatArray, sampled_K: FloatArray) -> FloatArray:
    """Optimizer steps of rows that tell only W&B's step, from those that tell both: [N].

    Evenly between two that tell, and on at the same rate before the first and after the last. One of them alone gives
    no rate: the user then logs every step. None: W&B's steps as they are.

    Example:
        A row of every step, counted from 0, with ours at steps 10 and 20: W&B's step 150 is the optimizer's 151.

        >>> steps_between(np.array([0.0, 14, 150]), np.array([9.0, 19]), np.array([10.0, 20])).tolist()
        [1.0, 15.0, 151.0]
    """
    if not len(placed_K):
        return own_N
    placed_K, first = np.unique(placed_K, return_index=True)
    sampled_K = np.maximum.accumulate(sampled_K[first])
    if len(placed_K) == 1:
        return own_N - placed_K + sampled_K
    left_N = np.clip(np.searchsorted(placed_K, own_N, side="right") - 1, 0, len(placed_K) - 2)
    rate_K = np.diff(sampled_K) / np.diff(placed_K)
    return np.asarray(sampled_K[left_N] + rate_K[left_N] * (own_N - placed_K[left_N]))


class _Scalars:
    """(step, key, value) triples: packed, a tenth of a list of dicts."""

    def __init__(self) -> None:
        self.index: dict[str, int] = {}
        self.steps = array("q")
        self.keys = array("q")
        self.values = array("d")

    def add(self, step: int, key: str, value: float) -> None:
        self.steps.append(step)
        self.keys.append(self.index.setdefault(key, len(self.index)))
        self.values.append(value)


class _Reading:
    """The state of one pass over a file's records."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.notes: list[str] = []
        self.num_rows = 0
        self.run: dict[str, Any] = {}
        self.config: dict[str, Any] = {}
        self.exit_code: int | None = None
        self.finished = False
        self.alerts: list[RecordedAlert] = []
        self.last_step: int | None = None
        self.table_path: str | None = None
        self.histograms = HistogramCollector()
        self.scalars = _Scalars()  # ours, by the sample's step
        self.own = _Scalars()  # the user's, by W&B's step
        self.placed = (array("q"), array("q"))  # W&B's step of every row of ours, and the sample's step

    def take(self, kind: str, record: dict[str, Any]) -> None:
        if kind == "history":
            self.num_rows += 1
            self._take_row(record.get("item", {}))
        elif kind == "alert":
            self._take_alert(record)
        elif kind == "run":
            self.run.update(record)
            self.config |= _updated(record.get("config", {}))
        elif kind == "config":  # what was set after the run began, the names of the layers among it
            self.config |= _updated(record)
        else:
            self.finished = True
            self.exit_code = record.get("exit_code", 0)

    def _take_row(self, row: dict[str, Any]) -> None:
        placed_at = _number(row.get("_step"))
        if placed_at is not None and np.isfinite(placed_at):
            self._take_own(row, int(placed_at))
        step_value = _number(row.get(keys.STEP))
        if step_value is not None and np.isfinite(step_value):
            step = int(step_value)
            if placed_at is not None and np.isfinite(placed_at):
                self.placed[0].append(int(placed_at))
                self.placed[1].append(step)
        table_path = row.get(f"{keys.FLIGHT_RECORDER}.path")
        if isinstance(table_path, str):
            self.table_path = table_path
            return  # the table has a row of its own: no gap in the curves
        if step_value is None or not np.isfinite(step_value):
            return  # a row of the user's alone
        self.last_step = step
        for key, value in row.items():
            number = _number(value)
            if number is not None:
                if keys.is_ours(key):
                    self.scalars.add(step, key, number)
            elif value == "histogram" and key.endswith("._type"):
                stem = key.removesuffix("._type")
                if keys.split_histogram(stem) is not None:
                    self.histograms.add(stem, step, row.get(f"{stem}.bins"), row.get(f"{stem}.values"))

    def _take_own(self, row: dict[str, Any], placed_at: int) -> None:
        for key, value in row.items():
            number = _number(value)
            # What W&B adds, and the sizes of tables and pictures, are no metrics.
            is_metric = not key.startswith("_") and f"{key.rpartition('.')[0]}._type" not in row
            if number is not None and is_metric and not keys.is_ours(key):
                self.own.add(placed_at, key, number)

    def _take_alert(self, record: dict[str, Any]) -> None:
        text = str(record.get("text", ""))
        match = _STEP_IN_TEXT.search(text)
        # An alert record has neither step nor time; ours name their step in the text.
        step = int(match[1]) if match else self.last_step
        self.alerts.append(RecordedAlert(str(record.get("title", "")), text, str(record.get("level", "INFO")), step))

    def finish(self) -> RunHistory:
        steps, row_of = np.unique(np.array(self.scalars.steps, dtype=np.int64), return_inverse=True)
        matrix = np.full((len(self.scalars.index), len(steps)), np.nan)
        matrix[np.array(self.scalars.keys, dtype=np.int64), row_of] = np.array(self.scalars.values)
        if not self.finished:
            self.notes.insert(
                0,
                "The file has no end record: the run is still going on, or it was cut off. "
                "The pictures show what was written so far.",
            )
        histograms: dict[str, dict[str, HistogramSeries]] = {}
        for key, series in self.histograms.series().items():
            if (parts := keys.split_histogram(key)) is not None:
                histograms.setdefault(parts[0], {})[parts[1]] = series
        run_id = str(self.run.get("run_id", "")) or self.file.stem.removeprefix("run-")
        return RunHistory(
            path=self.file,
            run_id=run_id,
            name=str(self.run.get("display_name", "")) or run_id,
            project=str(self.run.get("project", "")),
            started_at=str(self.run.get("start_time", "")),
            config=self.config,
            finished=self.finished,
            exit_code=self.exit_code,
            num_rows=self.num_rows,
            steps=steps,
            values={key: matrix[index] for key, index in self.scalars.index.items()},
            own=self._own_series(),
            histograms=histograms.pop("", {}),
            family_histograms=histograms,
            alerts=tuple(self.alerts),
            flight_recorder=self._flight_recorder(),
            notes=tuple(self.notes),
        )

    def _own_series(self) -> dict[str, OwnSeries]:
        """The user's scalars at optimizer steps: between two rows of ours, W&B's steps are spread evenly."""
        own_steps, own_keys, own_values = (np.array(part) for part in (self.own.steps, self.own.keys, self.own.values))
        placed, sampled = (np.array(part, dtype=np.float64) for part in self.placed)
        if not len(own_keys):
            return {}
        order = np.argsort(own_keys, kind="stable")
        parts = zip(self.own.index, np.split(order, np.cumsum(np.bincount(own_keys))[:-1]), strict=True)
        return {
            key: OwnSeries(steps_between(own_steps[chosen].astype(np.float64), placed, sampled), own_values[chosen])
            for key, chosen in parts
        }

    def _flight_recorder(self) -> RecordedTable | None:
        if self.table_path is None:
            return None
        files = (self.file.parent / "files").resolve()
        table = (files / self.table_path).resolve()
        # The path comes out of the file: one that leads outside the run's own directory is not followed.
        if not table.is_relative_to(files) or not table.is_file():
            self.notes.append(f"The flight recorder's table {self.table_path!r} is not in the run's directory.")
            return None
        try:
            content = json.loads(table.read_text(encoding="utf-8"))
            return RecordedTable([str(name) for name in content["columns"]], content["data"])
        except (ValueError, KeyError, TypeError) as error:
            self.notes.append(f"The flight recorder's table {self.table_path!r} cannot be read: {error!r}.")
            return None


def _number(value: object) -> float | None:
    """A scalar of a record as a float; None for everything else. The reader writes NaN and Inf as strings."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    return _NON_FINITE.get(value) if isinstance(value, str) else None


def _updated(config: dict[str, Any]) -> dict[str, Any]:
    """What a record sets in the run's configuration, but for W&B's own."""
    update = config.get("update", {})
    return {key: value for key, value in update.items() if not key.startswith("_")} if isinstance(update, dict) else {}
