"""Reads a run's history from its file, whether finished, truncated or still being written, and follows its growth.

A `.wandb` file is a LevelDB log: a header of 7 bytes, then blocks of 32 KiB with records. A record is cut into parts,
each with a checksum, a length, and whether it begins or ends the record. A record is a protocol buffer of wandb.
"""

import json
import os
import re
import struct
import time
import zlib
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, TypeGuard

import numpy as np

from .._judgement.incident import Incident
from .._judgement.verdict import MAX_INCIDENTS
from ..snapshot import keys
from .history import MAX_KEY, OwnSeries, RecordedAlert, RecordedTable, RunHistory, flat
from .packing import HistogramCollector, OwnColumns, RowColumns, SampleColumns
from .step_axis import steps_between

HEADER: Final = b":W&B\xe1\xbe\x00"
PART: Final = struct.Struct("<IHB")  # checksum of everything after it, length of the data, kind
_BLOCK: Final = 32 * 1024
_WHOLE, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4
_NUMBER_STARTS: Final = frozenset("-0123456789NI")  # W&B writes NaN and Infinity
MAX_STEP: Final = 2**53  # larger ones have no exact float64
MAX_KEYS: Final = 100_000  # of numbers, and of one row
MAX_INCIDENTS_TEXT: Final = 100_000  # characters of the summary's incidents; the sink writes at most a fifth
_COMMIT: Final = re.compile(r"[0-9a-f]{7,64}")
UNREADABLE: Final = (ValueError, TypeError, RecursionError, KeyError, AttributeError, OverflowError)


def read_run(path: str | os.PathLike[str], *, progress: Callable[[int], None] | None = None) -> RunHistory:
    """Read a run from its own file: all rows of a finished one, and those so far of any other, with a note.

    `path` is as for find_run_file; `progress` is called every 100 rows with the number of history rows read so far.

    Raises:
        ValueError: there is no run at `path`, or its file cannot be read; the message says what to do.
    """
    reader = reader_of(find_run_file(Path(path)))
    reader.read_on(progress=progress)
    return reader.history()


def reader_of(file: Path) -> "RunReader":
    """Return the reader of W&B's file, or of that of a JSONLSink."""
    if file.suffix == ".jsonl":
        from .jsonl import FileReader

        return FileReader(file)
    return RunReader(file)


def read_finished_run(path: str | os.PathLike[str], *, seconds: float = 10.0) -> RunHistory:
    """Read a run that this process has just finished, waiting for W&B's own process to write the last rows."""
    deadline = time.monotonic() + seconds
    while not (history := read_run(path)).finished and time.monotonic() < deadline:
        time.sleep(0.05)
    return history


def find_run_file(path: Path) -> Path:
    """Return the newest `.wandb` file of a path: the file, a run's directory, wandb/, or what holds it."""
    return find_run_files(path)[0]


def find_run_files(path: Path) -> list[Path]:
    """Return all files of runs of a path, as for find_run_file; the newest first.

    Raises:
        ValueError: there is none.
    """
    if path.is_file():
        if path.suffix not in (".wandb", ".jsonl"):
            raise ValueError(f"{path} is not a run: give a W&B run's .wandb file, its directory, or a JSONLSink's file")
        return [path.resolve()]
    if not path.is_dir():
        raise ValueError(f"there is no file or directory {path}")
    for patterns in (("*.wandb", "*run-*/*.wandb", "*.jsonl"), ("wandb/*run-*/*.wandb",)):
        found = {file.resolve() for pattern in patterns for file in path.glob(pattern) if file.is_file()}
        if files := [file for file in found if file.suffix == ".wandb" or is_jsonl(file)]:
            return sorted(files, key=lambda file: (file.stat().st_mtime_ns, file.name), reverse=True)
    raise ValueError(
        f"{path} holds no run: there is no .wandb file in it, nor in a wandb/ directory below it, and no JSONLSink's "
        "file; give the directory that wandb.init() or the end of the run printed, or a file"
    )


def is_jsonl(path: Path) -> bool:
    """Whether a file begins as that of a JSONLSink does."""
    with path.open("rb") as file:
        return file.read(len(keys.JSONL_BEGIN)) == keys.JSONL_BEGIN.encode()


def records_from(path: Path, place: int) -> Iterator[tuple[int, Any]]:
    """Yield each complete record after a position in the file, with the position after it; None for damaged bytes.

    A record that is incomplete, because it is still being written or was truncated, is left for the next call.
    """
    from wandb.proto import wandb_internal_pb2

    parse: Callable[[bytes], Any] = wandb_internal_pb2.Record.FromString  # type: ignore[attr-defined]  # generated
    with path.open("rb") as file:
        header = file.read(len(HEADER))
        if not HEADER.startswith(header):
            raise ValueError(f"{path} cannot be read as a W&B run: its header is another one")
        parts: list[bytes] | None = None  # of the current record; None between records
        at = max(place, len(HEADER)) % _BLOCK
        block_start = file.seek(max(place, len(HEADER)) - at)
        while block := file.read(_BLOCK):
            while at + PART.size <= len(block):
                checksum, length, kind = PART.unpack_from(block, at)
                end = at + PART.size + length
                if end > len(block) or zlib.crc32(block[at + 6 : end]) != checksum:
                    if len(block) < _BLOCK:
                        return  # the block is still being written
                    yield block_start + _BLOCK, None
                    parts = None
                    break
                if kind in (_WHOLE, _FIRST):
                    parts = []
                if parts is not None:
                    parts.append(block[at + PART.size : end])
                    if kind in (_WHOLE, _LAST):
                        yield block_start + end, _parsed(parse, b"".join(parts))
                        parts = None
                at = end
            block_start, at = block_start + len(block), 0


def _parsed(parse: Callable[[bytes], Any], data: bytes) -> Any:
    from google.protobuf.message import DecodeError  # type: ignore[import-untyped]  # it has no stubs

    try:
        return parse(data)
    except DecodeError:
        return None


class RunReader:
    """Reads a run's `.wandb` file incrementally, in bounded memory."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._place = 0  # position in the file, after the last complete record
        self._num_damaged = 0  # number of blocks with a wrong checksum, and of records that are none
        self._num_left_out, self._first_left_out = 0, ""  # values that cannot be read, and the key of the first
        self.num_rows = 0
        self.finished = False
        # The fields of a RunHistory that records of the file set.
        self._told: dict[str, Any] = {"run_id": path.stem.removeprefix("run-")}
        self._config: dict[str, Any] = {}
        self._alerts: list[RecordedAlert] = []
        self._incidents: tuple[Incident, ...] = ()
        self._last_step: int | None = None
        self._table_path: str | None = None
        self._histograms = HistogramCollector()
        self._is_ours: dict[str, bool] = {}  # every key of a number, and whether it is one of wandb_gradwatch
        self._rows = RowColumns()  # keys of wandb_gradwatch, by the sample's step
        self._samples = SampleColumns()  # those that our rows list
        self._own = OwnColumns()  # keys of the user, by W&B's step
        self._placed = (array("q"), array("q"))  # for every row of wandb_gradwatch: W&B's step, and the sample's step

    def read_on(self, *, progress: Callable[[int], None] | None = None) -> int:
        """Read what was written since the last call, and return the number of relevant records."""
        num_records = 0
        for place, record in records_from(self._path, self._place):
            self._place = place
            kind = "damage" if record is None else record.WhichOneof("record_type")
            if kind == "damage":
                self._num_damaged += 1
            elif kind == "history":
                self.take_row(self._values_of(record.history))
                if progress is not None and self.num_rows % 100 == 0:
                    progress(self.num_rows)
            elif kind == "alert":
                self.take_alert(record.alert.title, record.alert.text, record.alert.level)
            elif kind == "summary":
                self.take_summary(record.summary)
            elif kind == "run":
                told = record.run
                found = {"run_id": told.run_id, "name": told.display_name, "project": told.project}
                found["commit"] = told.git.commit if _COMMIT.fullmatch(told.git.commit) else ""
                found["started_at"] = self._time_of(told)
                self._told |= {key: value for key, value in found.items() if value}
                self._config |= self._settings_of(told.config)
            elif kind == "config":  # settings after the start of the run, including the names of the layers
                self._config |= self._settings_of(record.config)
            elif kind == "exit":
                self.finished, self._told["exit_code"] = True, record.exit.exit_code
            else:
                continue
            num_records += record is not None
        return num_records

    def take_row(self, row: dict[str, Any]) -> None:
        """Add one row of W&B's history: values by key; nested keys are joined by dots."""
        self.num_rows += 1
        placed_at, step = (self._step_of(row, key) for key in ("_step", keys.STEP))
        ours = {}
        for key, value in row.items():
            if not _is_number(value):
                continue
            if (is_ours := self._is_ours.get(key)) is None:
                if len(self._is_ours) >= MAX_KEYS:
                    self._leave_out(key)
                    continue
                is_ours = self._is_ours[key] = keys.is_ours(key)
            if is_ours:
                ours[key] = value
            elif placed_at is None or key.startswith("_"):
                continue
            elif "." not in key or f"{key.rpartition('.')[0]}._type" not in row:  # sizes of media are not metrics
                self._own.add(key, placed_at, value)
        if placed_at is not None and step is not None:
            self._placed[0].append(placed_at)
            self._placed[1].append(step)
        table_path = row.get(f"{keys.FLIGHT_RECORDER}.path")
        if isinstance(table_path, str):
            self._table_path = table_path  # the table has its own row, which must not leave a gap in the curves
        elif step is not None:  # otherwise the row is the user's
            self._last_step = step
            self._rows.add(step, row.get("_timestamp"), ours)
            self._samples.add(row.get(keys.SAMPLES))
            for key in [key for key in row if keys.holds_histograms(key)]:
                for _ in range(self._histograms.add(step, row[key])):
                    self._leave_out(key)

    def _values_of(self, history: Any) -> dict[str, Any]:
        """Return the values of a row by key, numbers as float; nested keys are joined by dots."""
        row: dict[str, Any] = {}
        for item in history.item:
            key, text = item.key or ".".join(item.nested_key), item.value_json
            try:
                if len(row) >= MAX_KEYS or len(key) > MAX_KEY:
                    raise ValueError("too many keys, or too long a key")
                if text[:1] in _NUMBER_STARTS:
                    row[key] = float(text)
                elif text:
                    row |= flat({key: json.loads(text, parse_int=float)})
            except UNREADABLE:
                self._leave_out(key)
        return row

    def _settings_of(self, config: Any) -> dict[str, Any]:
        """Return the settings that a record makes in the run's configuration, without W&B's own."""
        settings: dict[str, Any] = {}
        for item in config.update:
            key, text = item.key or ".".join(item.nested_key), item.value_json
            try:
                if text and not key.startswith("_"):
                    setting = {key: json.loads(text)}
                    deque(flat(setting), maxlen=0)  # raises an error if it is nested too deeply
                    settings |= setting
            except UNREADABLE:
                self._leave_out(key)
        return settings

    def take_summary(self, summary: Any) -> None:
        """Add a record of the run's summary, of which only the incidents are read."""
        for item in summary.update:
            if keys.INCIDENTS in (item.key, ".".join(item.nested_key)):
                try:
                    told = _told_incidents(item.value_json)
                except UNREADABLE:
                    self._leave_out(keys.INCIDENTS)
                else:
                    self._incidents = tuple(self._readable(told))

    def _readable(self, told: list[Any]) -> Iterator[Incident]:
        for one in told:
            try:
                yield Incident.from_dict(one)
            except ValueError:
                self._leave_out(keys.INCIDENTS)

    def _time_of(self, told: Any) -> str:
        try:
            return told.start_time.ToJsonString() if told.HasField("start_time") else ""
        except ValueError:
            self._leave_out("start_time")
            return ""

    def _step_of(self, row: Mapping[str, Any], key: str) -> int | None:
        value = row.get(key)
        if _is_number(value) and 0 <= value < MAX_STEP:
            return int(value)
        if value is not None:
            self._leave_out(key)
        return None

    def _leave_out(self, key: str) -> None:
        self._num_left_out += 1
        self._first_left_out = self._first_left_out or key

    def take_alert(self, title: str, text: str, level: str) -> None:
        """Add an alert, whose record has no step and no time."""
        self._alerts.append(RecordedAlert(title, text, level or "INFO", self._last_step))

    def history(self) -> RunHistory:
        """Return everything that has been read so far."""
        histograms = self._histograms.series()
        steps, times, values = self._rows.matrix()
        placed, sampled = (np.array(part, dtype=np.float64) for part in self._placed)
        flight_recorder, problem = self._flight_recorder()
        merged, repeated = self._rows.merged, self._rows.num_repeated(f"{keys.LAYER_GRAD_NORM}/")
        notes = {
            "The file has no end record that can be read: the run is still running, or the file was truncated or "
            "damaged. The pictures show the rows before that.": not self.finished,
            f"The file is damaged: corrupt data was skipped in {self._num_damaged} of its blocks.": self._num_damaged,
            f"{self._num_left_out} values in {self._path.name} cannot be read and are left out; the first of them has "
            f"the key {self._first_left_out[:100]!r}.": self._num_left_out,
            f"The run is so long that every {merged} neighbouring rows were merged into one.": merged > 1,
            f"Rows whose steps later rows repeat are not shown ({repeated}): a training was resumed from an "
            "earlier step, or several trainings logged to this run; give each training its own W&B run.": repeated,
            f"The flight recorder's table {self._table_path!r} {problem}.": problem,
        }
        return RunHistory(
            path=self._path,
            **({"name": self._told["run_id"]} | self._told),
            finished=self.finished,
            config=dict(self._config),
            num_rows=self.num_rows,
            steps=steps,
            times=times,
            values=values,
            wandb_steps=OwnSeries(sampled, placed),
            listed=self._samples.arrays(),
            own={key: OwnSeries(steps_between(at, placed, sampled), own) for key, (at, own) in self._own.arrays()},
            histograms=histograms.pop("", {}),
            family_histograms=histograms,
            alerts=tuple(self._alerts),
            incidents=self._incidents,
            flight_recorder=flight_recorder,
            notes=tuple(note for note, is_so in notes.items() if is_so),
        )

    def _flight_recorder(self) -> tuple[RecordedTable | None, str]:
        """Return the last table, if any, and why it cannot be read."""
        if self._table_path is None:
            return None, ""
        folder = self._path.parent.resolve()
        table = (folder / "files" / self._table_path).resolve()
        # The path is read from the file, so it is not followed if it leads outside the run's own directory.
        if not (table.is_relative_to(folder) and table.is_file()):
            return None, "is not in the run's directory"
        try:
            content = json.loads(table.read_text(encoding="utf-8"))
            rows = [[cell_of(value) for value in row] for row in content["data"]]
            return RecordedTable([str(name) for name in content["columns"]], rows), ""
        except (OSError, *UNREADABLE) as error:
            return None, f"cannot be read: {error!r}"


def _told_incidents(value_json: str) -> list[Any]:
    """Read the list of incidents in a run's summary: a JSON text within JSON."""
    if len(value_json) > MAX_INCIDENTS_TEXT:
        raise ValueError(f"the incidents have {len(value_json)} characters")
    told = json.loads(json.loads(value_json))
    if not isinstance(told, list) or len(told) > MAX_INCIDENTS:
        raise ValueError(f"the incidents must be a list of at most {MAX_INCIDENTS}")
    return told


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def cell_of(value: Any) -> Any:
    return json.dumps(value) if isinstance(value, (list, dict)) else value
