"""What a finished or running W&B run holds of ours, as arrays: the one thing that the pictures are drawn from."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from .._measure.columns import FloatArray, IntArray
from ..snapshot import keys

# R rows (flushes) of the run, P watched names, H histograms of one name, B bins of a stored histogram


@dataclass(frozen=True)
class RecordedAlert:
    """An alert of the run. `step` is None where neither its text nor an earlier row tells it."""

    title: str
    text: str
    level: str
    step: int | None


@dataclass(frozen=True)
class RecordedTable:
    """A W&B table: its columns and its rows, as stored."""

    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]


@dataclass(frozen=True, eq=False)
class OwnSeries:
    """One scalar that the user logged, at every row that has it, NaN and infinity included."""

    steps: FloatArray  # [N] optimizer steps, ascending
    values: FloatArray  # [N]


@dataclass(frozen=True, eq=False)
class HistogramSeries:
    """Histograms of one name over time, each with bins of equal width between its own limits."""

    steps: IntArray  # [H] the step of each
    # [H] the limits:
    low: FloatArray
    high: FloatArray
    counts: FloatArray  # [H, B] elements in each bin


@dataclass(frozen=True, eq=False)
class RunHistory:
    """Everything of a run that the pictures need."""

    path: Path  # the `.wandb` file that it was read from
    run_id: str  # W&B's id of the run
    steps: IntArray  # [R] steps of the rows that carry `gradwatch/step`, ascending, each once
    values: Mapping[str, FloatArray]  # scalar key of ours to its [R] values; NaN where missing
    name: str = ""  # the run's display name; the id where it has none
    project: str = ""  # the project; "" where the file does not tell
    started_at: str = ""  # ISO time of the start; "" where the file does not tell
    config: Mapping[str, Any] = field(default_factory=dict)  # the run's configuration
    finished: bool = True  # the file ends with the run's exit record
    exit_code: int | None = None  # of that record; None without one
    num_rows: int = 0  # rows of the whole history, the user's included
    # [R] seconds since 1970 at which the rows were logged; NaN, or empty, where the file does not tell
    times: FloatArray = field(default_factory=lambda: np.empty(0))
    # W&B's own step of every row of ours, at the sample's step; None where the file does not tell
    wandb_steps: OwnSeries | None = None
    # Scalar key of the user to all that was logged of it, in rows with or without `gradwatch/step`
    own: Mapping[str, OwnSeries] = field(default_factory=dict)
    # Name (as in the key, without the prefix) to its histograms
    histograms: Mapping[str, HistogramSeries] = field(default_factory=dict)
    # The same for the families of watch(metrics=...): family to name to its histograms
    family_histograms: Mapping[str, Mapping[str, HistogramSeries]] = field(default_factory=dict)
    alerts: tuple[RecordedAlert, ...] = ()  # in the order in which they were sent
    flight_recorder: RecordedTable | None = None  # the last table logged as `gradwatch/flight_recorder`
    # What a reader of the pictures must know about this file: truncated, damaged, still open
    notes: tuple[str, ...] = ()

    @cached_property
    def names(self) -> list[str]:
        """The watched names, as they stand in the keys (`/` for `.`).

        In the model's order where the run tells it, the others after them in natural order: layer 2 before layer 10.
        """
        found = dict.fromkeys(
            key.split("/", 1)[1] for key in self.values if key.split("/", 1)[0] in keys.LAYER_FAMILIES and "/" in key
        )
        found.update(dict.fromkeys(self.histograms))
        return self.in_order(found)

    @property
    def in_model_order(self) -> bool:
        """Whether the order of the names is the model's, from input to output."""
        return bool(self.names) and all(name in self._places for name in self.names)

    def spelled(self, names: Iterable[str]) -> list[str]:
        """Names of keys as people know them from the model and from alerts, with dots."""
        return [self._told_names.get(name, name.replace("/", ".")) for name in names]

    @cached_property
    def _told_names(self) -> dict[str, str]:
        """By the name in a key, in the model's order.

        A W&B history forgets the order of its keys; the run's configuration has a list of the names.
        """
        settings = self.config.get("gradwatch")
        told: object = settings.get("names") if isinstance(settings, Mapping) else None
        return {keys.in_key(str(name)): str(name) for name in told} if isinstance(told, list) else {}

    @cached_property
    def _places(self) -> dict[str, int]:
        """Names, and the modules that they are in, with their place in the model."""
        place: dict[str, int] = {}
        for name in self._told_names:
            for prefix in _with_modules(name):
                place.setdefault(prefix, len(place))
        return place

    def first_of(self, *names: str) -> FloatArray:
        """The values of the first of these keys that the run has: [R]; NaN where it has none."""
        found = (self.values[name] for name in names if name in self.values)
        return next(found, np.full(len(self.steps), np.nan))

    def family(self, family: str) -> dict[str, dict[str, FloatArray]]:
        """What watch(metrics=...) measured of one kind: name to metric to its [R] values, in the model's order."""
        found: dict[str, dict[str, FloatArray]] = {}
        for key, values in self.values.items():
            parts = keys.split_metric(key)
            if parts is not None and parts[0] == family:
                found.setdefault(parts[1], {})[parts[2]] = values
        return {name: found[name] for name in self.in_order(found)}

    def in_order(self, names: Iterable[str]) -> list[str]:
        """Names in the model's order; a module without parameters stands where the module that it is in does."""
        place = self._places

        def order(name: str) -> tuple[int, list[tuple[int, int, str]]]:
            known = (place[prefix] for prefix in _with_modules(name) if prefix in place)
            return next(known, len(place)), natural_order(name)

        return sorted(names, key=order)


def _with_modules(name: str) -> Iterator[str]:
    """Yield a name, and the modules that it is in, the innermost first."""
    while name:
        yield name
        name = name.rpartition("/")[0]


def flat(nested: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the keys of nested mappings, joined by dots, with their values."""
    for key, value in nested.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def natural_order(name: str) -> list[tuple[int, int, str]]:
    """Sort key that compares runs of digits as numbers, and never fails on a mixture."""
    parts = re.split(r"([0-9]+)", name)
    return [(0, int(part), "") if part.isdigit() and part.isascii() else (1, 0, part) for part in parts]
