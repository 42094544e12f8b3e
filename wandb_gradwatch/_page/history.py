"""The data that wandb_gradwatch has logged to a finished or running W&B run, as arrays for the pictures."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from .._judgement.incident import Incident
from .._judgement.verdict import Verdict, verdict_of
from .._measure.columns import FloatArray, IntArray
from ..snapshot import keys

# R rows (flushes) of the run, P watched names, H histograms of one name, B bins of a histogram

MAX_KEY: Final = 1_000  # characters
MAX_DEPTH: Final = 50  # of modules within modules
LAYER_NAMES: Final = "gradwatch.names"  # the key of the run's configuration


@dataclass(frozen=True)
class RecordedAlert:
    """An alert of the run, of this package or of the user's script.

    `step` is that of the last row before it; None if there is none.
    """

    title: str
    text: str
    level: str
    step: int | None


@dataclass(frozen=True)
class RecordedTable:
    """A W&B table: its columns and rows, as stored."""

    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]


@dataclass(frozen=True, eq=False)
class OwnSeries:
    """A scalar that the user logged, at every row that has it, including NaN and infinity."""

    steps: FloatArray  # [N] optimizer steps, ascending
    values: FloatArray  # [N]


@dataclass(frozen=True, eq=False)
class Samples:
    """Measured steps of the whole model, ascending and unique."""

    steps: IntArray  # [N]
    norms: FloatArray  # [N] NaN if missing
    num_bad: IntArray  # [N] number of NaN and Inf elements

    def __iter__(self) -> Iterator[Any]:
        return iter((self.steps, self.norms, self.num_bad))


@dataclass(frozen=True, eq=False)
class HistogramSeries:
    """Histograms of one name over time, in the mergeable bins of columns.histogram_edges."""

    steps: IntArray  # [H]
    low: FloatArray  # [H] the smallest element; NaN if unknown
    high: FloatArray  # [H] the largest element; NaN if unknown
    counts: NDArray[np.float32]  # [H, B] number of elements in each bin


@dataclass(frozen=True, eq=False)
class RunHistory:
    """All data of a run that the pictures need."""

    path: Path  # the `.wandb` file
    run_id: str  # W&B's id of the run
    steps: IntArray  # [R] steps of the rows with `gradwatch/step`, ascending and unique
    values: Mapping[str, FloatArray]  # by scalar key of wandb_gradwatch: values [R]; NaN if missing
    name: str = ""  # the run's display name, or its id
    project: str = ""  # "" if unknown
    started_at: str = ""  # ISO time of the start; "" if unknown
    commit: str = ""  # of the script's git repository; "" if unknown
    config: Mapping[str, Any] = field(default_factory=dict)  # the run's configuration
    finished: bool = True  # whether the file ends with the run's exit record
    exit_code: int | None = None  # from the exit record; None without one
    num_rows: int = 0  # rows of the whole history, including the user's
    times: FloatArray = field(
        default_factory=lambda: np.empty(0)
    )  # [R] in seconds since 1970; NaN, or empty, if unknown
    wandb_steps: OwnSeries | None = None  # W&B's own step of our rows, at the sample's step; None if unknown
    own: Mapping[str, OwnSeries] = field(default_factory=dict)  # by scalar key of the user
    listed: Samples | None = None  # the samples that the rows list; None if they list none
    histograms: Mapping[str, HistogramSeries] = field(default_factory=dict)  # by name as in the key
    # By family of watch(metrics=...), then by name
    family_histograms: Mapping[str, Mapping[str, HistogramSeries]] = field(default_factory=dict)
    alerts: tuple[RecordedAlert, ...] = ()  # in the order in which they were sent
    incidents: tuple[Incident, ...] = ()  # of the run's summary, as they were known when it was last written
    flight_recorder: RecordedTable | None = None  # the last table logged as `gradwatch/flight_recorder`
    notes: tuple[str, ...] = ()  # problems of the file that a viewer must know: truncated, damaged, still open

    @cached_property
    def samples(self) -> Samples:
        """The measured steps. A row that lists none stands for its last step, with its largest norm and its counts."""
        norms = self.first_of(keys.GRAD_NORM_MAX, keys.GRAD_NORM)
        num_bad = sum(np.nan_to_num(self.first_of(key)) for key in (keys.NUM_NAN, keys.NUM_INF))
        rows = Samples(self.steps, norms, np.asarray(num_bad, dtype=np.int64))
        if self.listed is None:
            return rows
        steps, first = np.unique(np.concatenate([self.listed.steps, rows.steps]), return_index=True)
        return Samples(steps, *(np.concatenate(both)[first] for both in list(zip(self.listed, rows, strict=True))[1:]))

    @cached_property
    def first_samples(self) -> IntArray:
        """The first step of each row: [R]; a row that does not tell it begins with its last step."""
        first = self.first_of(keys.FIRST_SAMPLE)
        return np.asarray(np.where((first > -(2**53)) & (first <= self.steps), first, self.steps).astype(np.int64))

    @cached_property
    def measured(self) -> tuple[IntArray, IntArray]:
        """The first and the last step of each interval in which every step was measured: two [K], ascending."""
        first, count = self.first_samples, self.first_of(keys.NUM_SAMPLES)
        is_whole = count == self.steps - first + 1  # a long row lists only some of its samples
        steps, whole = self.samples.steps, first[is_whole]
        recorded = np.array(self.recorded_steps, dtype=np.int64)
        return intervals(
            np.concatenate([steps, recorded, whole]), np.concatenate([steps, recorded, self.steps[is_whole]])
        )

    @property
    def num_measured(self) -> int:
        """The number of steps that were measured."""
        counts = self.first_of(keys.NUM_SAMPLES)
        return int(np.where(np.isfinite(counts), counts, 1).sum())

    @property
    def num_steps(self) -> int:
        """The number of steps from the first to the last one of the samples and of the user's longest series."""
        if not len(self.steps):
            return 0
        longest = max((series.steps for series in self.own.values()), key=len, default=self.samples.steps)
        known: list[float] = [end for steps in (self.samples.steps, longest) for end in steps[[0, -1]].tolist()]
        return round(max(known)) - round(min(known)) + 1

    @cached_property
    def verdict(self) -> Verdict:
        """What the incidents and the number of measured steps, as far as they are in the file, say of the run."""
        verdict = verdict_of(self.incidents, num_steps=self.num_steps, num_measured=self.num_measured)
        if not self.exit_code:
            return verdict
        return replace(verdict, sentence=f"{verdict.sentence}; the process ended with exit code {self.exit_code}")

    @property
    def nonfinite_rows(self) -> NDArray[np.bool_]:
        """A mask of rows with NaN or Inf in gradients: [R].

        A loss scaler overflows and skips steps by design, so rows with skipped steps do not count.
        """
        counts = (self.first_of(key) for key in (keys.NUM_NAN, keys.NUM_INF, keys.NUM_SKIPPED_STEPS))
        nan, inf, skipped = map(np.nan_to_num, counts)
        return np.asarray((nan + inf > 0) & (skipped == 0))

    @cached_property
    def recorded_steps(self) -> list[int]:
        """The steps of the flight recorder's table, ascending."""
        table = self.flight_recorder
        return [] if table is None else sorted({row["step"] for row in recorded_rows(table)})

    @cached_property
    def names(self) -> list[str]:
        """The watched names as in the keys, with `/` for `.`, in the model's order; see in_order."""
        parts = (key.partition("/") for key in self.values)
        found = dict.fromkeys(name for family, slash, name in parts if slash and family in keys.LAYER_SCALARS)
        return self.in_order(found | dict.fromkeys(self.histograms))

    @property
    def in_model_order(self) -> bool:
        """Whether `names` is in the model's order, from input to output."""
        return bool(self.names) and all(name in self._places for name in self.names)

    def spelled(self, names: Iterable[str]) -> list[str]:
        """Return names from keys as spelled in the model and in alerts, with dots."""
        return [self._told_names.get(name, name.replace("/", ".")) for name in names]

    @cached_property
    def _told_names(self) -> dict[str, str]:
        """The model's spelling by the name in a key, in the model's order, which a W&B history does not keep."""
        told = dict(flat(self.config)).get(LAYER_NAMES)
        names = [str(name)[:MAX_KEY] for name in told] if isinstance(told, list) else []
        return {keys.in_key(name): name for name in names}

    @cached_property
    def _places(self) -> dict[str, int]:
        """The position in the model of each name, and of each module that contains a name."""
        prefixes = dict.fromkeys(prefix for name in self._told_names for prefix in _with_modules(name))
        return {prefix: place for place, prefix in enumerate(prefixes)}

    def first_of(self, *names: str) -> FloatArray:
        """Return the values of the first of these keys that the run has: [R]; NaN if it has none."""
        found = (self.values[name] for name in names if name in self.values)
        return next(found, np.full(len(self.steps), np.nan))

    def family(self, family: str) -> dict[str, dict[str, FloatArray]]:
        """Return one family of watch(metrics=...): by name, then by metric, values [R]; in the model's order."""
        found: dict[str, dict[str, FloatArray]] = {}
        for key, values in self.values.items():
            of, name, metric = keys.split_metric(key) or ("", "", "")
            if of == family:
                found.setdefault(name, {})[metric] = values
        return {name: found[name] for name in self.in_order(found)}

    def in_order(self, names: Iterable[str]) -> list[str]:
        """Sort names in the model's order; a module without parameters goes where its parent module is.

        Names that the run's configuration does not place follow in natural order (2 before 10).
        """

        def order(name: str) -> tuple[int, list[tuple[int, int, str]]]:
            known = (self._places[prefix] for prefix in _with_modules(name) if prefix in self._places)
            return next(known, len(self._places)), natural_order(name)

        return sorted(names, key=order)


def recorded_rows(table: RecordedTable) -> Iterator[dict[str, Any]]:
    """Yield the rows of the flight recorder's table by column, as far as they have a step and a name."""
    for row in table.rows:
        found = dict(zip(table.columns, row, strict=False)) if isinstance(row, (list, tuple)) else {}
        step = found.get("step")
        if isinstance(step, int) and abs(step) < 2**53 and isinstance(found.get("name"), str):
            yield found


def intervals(first_N: IntArray, last_N: IntArray) -> tuple[IntArray, IntArray]:
    """Join intervals of whole numbers that touch or overlap, and return them ascending.

    Examples:
        >>> [part.tolist() for part in intervals(np.array([7, 1, 2, 9]), np.array([7, 1, 4, 9]))]
        [[1, 7, 9], [4, 7, 9]]
    """
    order = np.argsort(first_N, kind="stable")
    first, last = first_N[order], np.maximum.accumulate(last_N[order])
    begins = np.append(True, first[1:] > last[:-1] + 1)[: len(first)]
    ends = np.append(begins[1:], True)[: len(first)]
    return first[begins], last[ends]


def _with_modules(name: str) -> Iterator[str]:
    """Yield a name, and the modules that contain it, innermost first; at most MAX_DEPTH."""
    for _ in range(MAX_DEPTH):
        if not name:
            return
        yield name
        name = name.rpartition("/")[0]


def flat(nested: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values of nested mappings with their keys joined by dots.

    Raises:
        ValueError: a key has more than MAX_KEY characters. Otherwise a small file could make a huge number of them.
    """
    for key, value in nested.items():
        if len(prefix) + len(key) > MAX_KEY:
            raise ValueError(f"a key has more than {MAX_KEY} characters")
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def natural_order(name: str) -> list[tuple[int, int, str]]:
    """Return a sort key that compares runs of digits as numbers; keys of any two names can be compared."""
    parts = re.split(r"([0-9]+)", name)
    return [(0, int(part), "") if part.isdigit() and part.isascii() else (1, 0, part) for part in parts]
