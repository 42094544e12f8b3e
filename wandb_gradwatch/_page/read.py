"""Read a run's history, finished, truncated or still being written, and read it on while it grows."""

from __future__ import annotations

import json
import os
import re
import time
from array import array
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, Final

import numpy as np

from .._measure.columns import FloatArray
from ..snapshot import keys
from .columns import HistogramCollector, OwnColumns, RowColumns
from .history import HistogramSeries, OwnSeries, RecordedAlert, RecordedTable, RunHistory
from .wandb_file import UnreadableRunError, WandbFile, scalars_of, settings_of

_STEP_IN_TEXT: Final = re.compile(r"\bstep[ =]+(\d{1,18})\b", re.IGNORECASE)


def read_run(path: str | os.PathLike[str], *, progress: Callable[[int], None] | None = None) -> RunHistory:
    """Read everything that the package logged into a run from the run's own file.

    A file that is still being written, or that was cut off, gives what is in it; `RunHistory.notes` says so.

    Args:
        path: a `.wandb` file, an offline run's directory, a `wandb/` directory (its newest run), or the directory
            that holds one.
        progress: called with the number of history rows read so far, every 100 rows.

    Raises:
        UnreadableRunError: a ValueError; there is no run at `path`, or its file cannot be read.
    """
    reader = RunReader(find_run_file(Path(path)))
    reader.read_on(progress=progress)
    return reader.history()


def read_finished_run(path: str | os.PathLike[str], *, seconds: float = 10.0) -> RunHistory:
    """Read a run that this program has just finished: W&B's own process may still write its last rows for a moment."""
    deadline = time.monotonic() + seconds
    while not (history := read_run(path)).finished and time.monotonic() < deadline:
        time.sleep(0.05)
    return history


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


class RunReader:
    """What has been read of a run's `.wandb` file so far, in bounded memory."""

    def __init__(self, file: Path) -> None:
        self._file = WandbFile(file)
        self.num_rows = 0
        self._run: dict[str, str] = {}
        self._config: dict[str, Any] = {}
        self._exit_code: int | None = None
        self.finished = False
        self._alerts: list[RecordedAlert] = []
        self._last_step: int | None = None
        self._table_path: str | None = None
        self._histograms = HistogramCollector()
        self._is_ours = cache(keys.is_ours)  # the same keys in every row
        self._rows = RowColumns()  # ours, by the sample's step
        self._own = OwnColumns()  # the user's, by W&B's step
        self._placed = (array("q"), array("q"))  # W&B's step of every row of ours, and the sample's step

    def read_on(self, *, progress: Callable[[int], None] | None = None) -> int:
        """Read what has been written since the last call, and return how many records that was."""
        num_records = 0
        for kind, record in self._file.new_records():
            num_records += 1
            self._take(kind, record)
            if progress is not None and kind == "history" and self.num_rows % 100 == 0:
                progress(self.num_rows)
        return num_records

    def _take(self, kind: str, record: Any) -> None:
        if kind == "history":
            self.take_row(dict(scalars_of(record)))
        elif kind == "alert":
            self.take_alert(record.alert.title, record.alert.text, record.alert.level)
        elif kind == "run":
            told = record.run
            started = told.start_time.ToJsonString() if told.HasField("start_time") else ""
            found = {"id": told.run_id, "name": told.display_name, "project": told.project, "started_at": started}
            self._run |= {key: value for key, value in found.items() if value}
            self._config |= settings_of(told.config)
        elif kind == "config":  # what was set after the run began, the names of the layers among it
            self._config |= settings_of(record.config)
        else:
            self.finished = True
            self._exit_code = record.exit.exit_code

    def take_row(self, row: dict[str, Any]) -> None:
        """Take one row of W&B's history: keys, dotted where they are nested, to values."""
        self.num_rows += 1
        placed_at = _finite(row.get("_step"))
        step_value = _finite(row.get(keys.STEP))
        if placed_at is not None:
            self._take_own(row, int(placed_at))
            if step_value is not None:
                self._placed[0].append(int(placed_at))
                self._placed[1].append(int(step_value))
        table_path = row.get(f"{keys.FLIGHT_RECORDER}.path")
        if isinstance(table_path, str):
            self._table_path = table_path
            return  # the table has a row of its own: no gap in the curves
        if step_value is None:
            return  # a row of the user's alone
        step = int(step_value)
        self._last_step = step
        self._rows.begin(step, _finite(row.get("_timestamp")))
        for key, value in row.items():
            if _is_number(value):
                if self._is_ours(key):
                    self._rows.add(key, value)
            elif value == "histogram" and key.endswith("._type"):
                stem = key.removesuffix("._type")
                if keys.split_histogram(stem) is not None:
                    self._histograms.add(stem, step, row.get(f"{stem}.bins"), row.get(f"{stem}.values"))

    def _take_own(self, row: dict[str, Any], placed_at: int) -> None:
        for key, value in row.items():
            if not _is_number(value) or self._is_ours(key) or key.startswith("_"):
                continue
            # The sizes of tables and pictures are no metrics.
            if "." not in key or f"{key.rpartition('.')[0]}._type" not in row:
                self._own.add(key, placed_at, value)

    def take_alert(self, title: str, text: str, level: str) -> None:
        """Take an alert. Its record has neither step nor time; ours name their step in the text."""
        match = _STEP_IN_TEXT.search(text)
        step = int(match[1]) if match else self._last_step
        self._alerts.append(RecordedAlert(title, text, level or "INFO", step))

    def history(self) -> RunHistory:
        """Everything that has been read so far."""
        notes = []
        if not self.finished:
            notes.append(
                "The file has no end record: the run is still going on, or it was cut off. "
                "The pictures show what was written so far."
            )
        if self._file.num_damaged:
            notes.append(f"The file is damaged: corrupt data was skipped in {self._file.num_damaged} of its blocks.")
        if self._rows.merged > 1:
            notes.append(f"The run is so long that {self._rows.merged} neighbouring rows each were merged into one.")
        histograms: dict[str, dict[str, HistogramSeries]] = {}
        for key, series in self._histograms.series().items():
            if (parts := keys.split_histogram(key)) is not None:
                histograms.setdefault(parts[0], {})[parts[1]] = series
        steps, times, values = self._rows.matrix()
        placed, sampled = (np.array(part, dtype=np.float64) for part in self._placed)
        run_id = self._run.get("id") or self._file.path.stem.removeprefix("run-")
        return RunHistory(
            path=self._file.path,
            run_id=run_id,
            name=self._run.get("name", run_id),
            project=self._run.get("project", ""),
            started_at=self._run.get("started_at", ""),
            config=dict(self._config),
            finished=self.finished,
            exit_code=self._exit_code,
            num_rows=self.num_rows,
            steps=steps,
            times=times,
            values=values,
            wandb_steps=OwnSeries(sampled, placed),
            own={key: OwnSeries(steps_between(at, placed, sampled), own) for key, (at, own) in self._own.arrays()},
            histograms=histograms.pop("", {}),
            family_histograms=histograms,
            alerts=tuple(self._alerts),
            flight_recorder=self._flight_recorder(notes),
            notes=tuple(notes),
        )

    def _flight_recorder(self, notes: list[str]) -> RecordedTable | None:
        if self._table_path is None:
            return None
        files = (self._file.path.parent / "files").resolve()
        table, problem = (files / self._table_path).resolve(), "is not in the run's directory"
        # The path comes out of the file: one that leads outside the run's own directory is not followed.
        if table.is_relative_to(files) and table.is_file():
            try:
                content = json.loads(table.read_text(encoding="utf-8"))
                return RecordedTable([str(name) for name in content["columns"]], content["data"])
            except (ValueError, KeyError, TypeError) as error:
                problem = f"cannot be read: {error!r}"
        notes.append(f"The flight recorder's table {self._table_path!r} {problem}.")
        return None


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _finite(value: Any) -> float | None:
    return float(value) if _is_number(value) and np.isfinite(value) else None
