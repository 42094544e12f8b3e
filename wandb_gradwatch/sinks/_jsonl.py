"""A sink that writes one file: a line of JSON for each row, verdict and table. The page's commands read it."""

import json
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, TextIO

import numpy as np

from .._judgement.incident import LEVELS
from .._judgement.verdict import Verdict, incidents_within
from ..rules import Alert
from ..snapshot import Snapshot, keys
from ._base import Sink
from ._history_row import HistoryRow, counted_histogram

MAX_INCIDENTS_BYTES: Final = 20_000
_SERIES: Final = {"loss": keys.LOSS, "learning_rate": keys.LEARNING_RATE}  # of every sample: [step, value]


class JSONLSink(Sink):
    """Write every row, the verdict and the flight recorder's table to one file, without W&B.

    `wandb-gradwatch view`, `diff` and `verdict` read the file as they read a W&B run. A line is written as soon as it
    is known, so that a process that is killed loses no row. A training that continues appends to the file.

    Args:
        path: the file; its name ends in .jsonl. Its folder must exist.
        name: the run's name on the page; None: the name of the file.
        config: settings of the run that the page shows and compares, as JSON can hold them.

    Raises:
        ValueError: the name does not end in .jsonl, or the file is there and another one.
        OSError: the file cannot be opened.

    Examples:
        >>> import tempfile, torch, wandb_gradwatch
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> path = tempfile.mkdtemp() + "/run.jsonl"
        >>> with wandb_gradwatch.watch(model, sinks=[wandb_gradwatch.JSONLSink(path)]):
        ...     model(torch.ones(2)).backward()
        ...     optimizer.step()
        >>> len(open(path).readlines()) >= 3  # what the file is, the row, and the verdict
        True
    """

    def __init__(
        self, path: str | os.PathLike[str], *, name: str | None = None, config: Mapping[str, Any] | None = None
    ) -> None:
        self.path: Final = Path(path)
        if self.path.suffix != ".jsonl":
            raise ValueError(f"JSONLSink(path={str(path)!r}): the name of the file must end in .jsonl")
        is_new = not self.path.exists() or not self.path.stat().st_size
        if not is_new:
            with self.path.open(encoding="utf-8", errors="replace") as file:
                if file.read(len(keys.JSONL_BEGIN)) != keys.JSONL_BEGIN:
                    raise ValueError(f"JSONLSink(path={str(path)!r}): the file is there, and not one of this sink")
        self._file: TextIO | None = self.path.open("a", encoding="utf-8")
        self._names: tuple[str, ...] = ()
        self._alert_level = 0  # the worst of the alerts since the last row; 0 without alerts
        if is_new:
            told = {"name": self.path.stem if name is None else name, "started_at": time.time()}
            self._put({"wandb_gradwatch": keys.JSONL_FORMAT, "run": told | {"config": dict(config or {})}})

    def __repr__(self) -> str:
        return f"JSONLSink({str(self.path)!r})"

    def write(self, snapshot: Snapshot) -> None:
        if not len(snapshot):
            return
        if snapshot.names != self._names:
            self._names = snapshot.names
            self._put({"config": {"gradwatch": {"names": list(snapshot.names)}}})
        level, self._alert_level = self._alert_level, 0
        row = HistoryRow.of(snapshot, alert_level=level)
        listed: dict[str, Any] = {keys.SAMPLES: row.listed.as_json(), "_timestamp": time.time()}
        if row.histograms:
            listed[keys.HISTOGRAMS] = [counted_histogram(key, value) for key, value in row.histograms.items()]
        series = {name: _known(snapshot, key) for name, key in _SERIES.items() if key in snapshot.metrics}
        self._put({"row": row.scalars() | listed, "series": series})

    def alert(self, alert: Alert) -> None:
        self._alert_level = max(self._alert_level, LEVELS.index(alert.level) + 1)

    def verdict(self, verdict: Verdict) -> None:
        told = {keys.VERDICT: verdict.sentence}
        self._put({"summary": told | {keys.INCIDENTS: incidents_within(verdict.incidents, MAX_INCIDENTS_BYTES)}})

    def log_table(self, columns: list[str], rows: list[list[Any]]) -> None:
        self._put({"table": {"columns": columns, "data": rows}})

    def close(self) -> None:
        if self._file is not None:
            self._put({"end": time.time()})
            self._file.close()
            self._file = None

    @property
    def directory(self) -> str:
        return str(self.path.resolve().parent)

    @property
    def viewable(self) -> str:
        return str(self.path)

    def _put(self, value: Mapping[str, Any]) -> None:
        if self._file is not None:
            self._file.write(json.dumps(_finite(value), separators=(",", ":"), default=str) + "\n")
            self._file.flush()


def _known(snapshot: Snapshot, key: str) -> list[list[float]]:
    """Steps and values where there is one. A loss that is not finite is a value, NaN, and not a missing one."""
    values_S = snapshot.metrics[key]
    known_S = ~np.isnan(values_S)
    if key == keys.LOSS:
        known_S |= snapshot.metrics.get(keys.NUM_NONFINITE_LOSS, np.zeros(len(snapshot))) > 0
    return [
        [step, value] for step, value in zip(snapshot.steps[known_S].tolist(), values_S[known_S].tolist(), strict=True)
    ]


def _finite(value: Any) -> Any:
    """Numbers that JSON cannot hold become texts: "NaN", "Infinity" and "-Infinity"."""
    if isinstance(value, Mapping):
        return {str(key): _finite(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(one) for one in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value
