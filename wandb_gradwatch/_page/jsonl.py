"""Reads a run from the file of a JSONLSink, as read.py does from W&B's: what a line tells becomes the same values."""

import json
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Final

from .._judgement.verdict import MAX_INCIDENTS
from ..snapshot import keys
from .history import RecordedTable, flat
from .packing import number_of
from .read import MAX_KEYS, UNREADABLE, RunReader, cell_of, is_jsonl

MAX_LINE: Final = 50_000_000  # bytes
_NOT_FINITE: Final = {"NaN": float("nan"), "Infinity": float("inf"), "-Infinity": float("-inf")}


class FileReader(RunReader):
    """Reads the file of a JSONLSink incrementally, in bounded memory."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._told["run_id"] = path.stem
        self._table: RecordedTable | None = None

    def read_on(self, *, progress: Callable[[int], None] | None = None) -> int:
        """Read what was written since the last call, and return the number of lines."""
        num_lines = 0
        for line in self._lines():
            num_lines += 1
            try:
                self._take(json.loads(line, parse_int=_whole_or_float))
            except UNREADABLE:
                self._num_damaged += 1
            if progress is not None and self.num_rows and self.num_rows % 100 == 0:
                progress(self.num_rows)
        return num_lines

    def _lines(self) -> Iterator[bytes]:
        """Yield each complete line after the current position; one that is still being written waits."""
        if not self._place and not is_jsonl(self._path):
            raise ValueError(f"{self._path} is not a file of JSONLSink: its first line is another one")
        with self._path.open("rb") as file:
            file.seek(self._place)
            while line := file.readline(MAX_LINE):
                if not line.endswith(b"\n"):
                    if len(line) == MAX_LINE:
                        raise ValueError(f"{self._path} has a line of more than {MAX_LINE} bytes")
                    return
                self._place = file.tell()
                yield line

    def _take(self, told: Any) -> None:
        if told.get("wandb_gradwatch", keys.JSONL_FORMAT) != keys.JSONL_FORMAT:
            raise ValueError(f"format {told['wandb_gradwatch']!r:.20}")
        if "run" in told:
            run = told["run"]
            self._told |= {"name": str(run["name"]), "started_at": _time_of(run["started_at"])}
            self._config |= _settings_of(run["config"])
        if "config" in told:
            self._config |= _settings_of(told["config"])
        if "row" in told:
            self.finished = False  # the training was continued
            values = dict(told["row"])
            if len(values) > MAX_KEYS:
                raise ValueError("too many keys")
            self.take_row({key: _number_of(value) for key, value in values.items()})
            for name in ("loss", "learning_rate"):
                for step, value in told.get("series", {}).get(name, ()):
                    self._own.add(name, number_of(step), number_of(_number_of(value)))
        if "summary" in told:
            incidents = list(told["summary"].get(keys.INCIDENTS, ()))[:MAX_INCIDENTS]
            self._incidents = tuple(self._readable(incidents))
        if "table" in told:
            rows = [[cell_of(value) for value in row] for row in told["table"]["data"]]
            self._table = RecordedTable([str(name) for name in told["table"]["columns"]], rows)
        self.finished |= "end" in told

    def _flight_recorder(self) -> tuple[RecordedTable | None, str]:
        return self._table, ""


def _whole_or_float(text: str) -> int | float:
    return int(text) if len(text) < 20 else float(text)  # int() takes quadratic time


def _number_of(value: Any) -> Any:
    return _NOT_FINITE.get(value, value) if isinstance(value, str) else value


def _settings_of(config: Mapping[str, Any]) -> dict[str, Any]:
    for _ in flat(config):  # raises an error if it is nested too deeply
        pass
    return dict(config)


def _time_of(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, timezone.utc).isoformat()
