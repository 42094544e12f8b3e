"""What a sample collects on the device, merged over micro-batches: values by key, and rows of tensors by name."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, Final, Generic, TypeVar

import torch
from torch import Tensor

from .._capture.probes import Found
from .._measure.columns import MAX_COLUMNS, MIN_COLUMNS, NUM_COLUMNS, ZERO_BIN, Column, magnitude_edges
from .._measure.elements import onto, wide_dtype
from .._measure.measure import measure
from .._measure.probe_values import ProbeHistogram

# M tensors, C columns, B histogram bins

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")
Columns = Callable[[Column], Tensor]


class Store(Generic[Key, Value]):
    """Values by key that merge: those of the open sample, and apart what may belong to the next one.

    No value is ever changed in place, so that copies may share them.
    """

    def __init__(self, merge: Callable[[Value, Value], Value]) -> None:
        self.sample: dict[Key, Value] = {}
        self.pending: dict[Key, Value] = {}
        self._marked: dict[Key, Value] = {}
        self._merge = merge

    def add(self, key: Key, value: Value, *, pending: bool = True) -> None:
        """Merge a value with what the key has."""
        values = self.pending if pending else self.sample
        values[key] = self._merge(values[key], value) if key in values else value

    def settle(self) -> None:
        """What is pending belongs to the open sample."""
        for key, value in self.pending.items():
            self.add(key, value, pending=False)
        self.forget_pending()

    def forget_pending(self) -> None:
        self.pending, self._marked = {}, {}

    def take(self) -> dict[Key, Value]:
        """Return the sample's values, and forget them."""
        taken, self.sample = self.sample, {}
        return taken

    def mark(self) -> None:
        """A forward begins: remember what is pending."""
        self._marked = dict(self.pending)

    def go_back(self) -> None:
        """The forward has failed: what was pending at `mark` is pending again."""
        self.pending, self._marked = self._marked, {}


def add_on_device(one: Tensor, other: Tensor) -> Tensor:
    return one + onto(other, one.device)


def square_of(tensor: Tensor) -> Tensor:
    """The squared norm, without an overflow of the squares."""
    norm: Tensor = torch.linalg.vector_norm(tensor, dtype=wide_dtype(tensor.device))
    return norm.square()


def widened(tensor: Tensor) -> Tensor:
    """Half precision and less as float32, everything else as it is."""
    return tensor.float() if tensor.is_floating_point() and tensor.element_size() < 4 else tensor


def _of_finite(column: Columns, total: Column) -> Tensor:
    num_finite = column(Column.NUM_ELEMENTS) - column(Column.NUM_NAN) - column(Column.NUM_INF)
    return column(total) / num_finite  # 0 / 0 is NaN: missing


def _std(column: Columns) -> Tensor:
    variance = _of_finite(column, Column.GRAD_SUM_SQ) - _of_finite(column, Column.GRAD_SUM) ** 2
    return variance.clamp_min(0.0).sqrt()  # rounding leaves a constant a hair below zero


def _present(extreme: Tensor) -> Tensor:
    return torch.where(extreme.isinf(), torch.nan, extreme)  # nothing entered it


# Of the finite elements, as for gradients.
STATISTICS: Final[Mapping[str, Callable[[Columns], Tensor]]] = {
    "norm": lambda c: c(Column.GRAD_SUM_SQ).sqrt(),
    "rms": lambda c: _of_finite(c, Column.GRAD_SUM_SQ).sqrt(),
    "mean": lambda c: _of_finite(c, Column.GRAD_SUM),
    "std": _std,
    "min": lambda c: _present(c(Column.GRAD_MIN)),
    "max": lambda c: _present(c(Column.GRAD_MAX)),
    "abs_max": lambda c: _present(torch.maximum(c(Column.GRAD_MIN).abs(), c(Column.GRAD_MAX).abs())),
    "dead_ratio": lambda c: c(Column.NUM_DEAD) / c(Column.NUM_ELEMENTS),
    "zero_ratio": lambda c: c(Column.NUM_ZERO) / c(Column.NUM_ELEMENTS),
    "num_nonfinite": lambda c: c(Column.NUM_NAN) + c(Column.NUM_INF),
}

# Of the magnitudes, zeros included: the upper edge of the histogram bin that holds them, so right to half an octave.
QUANTILES: Final[Mapping[str, float]] = {"abs_p01": 0.01, "abs_p50": 0.5, "abs_p99": 0.99}

# Not a number: the counts in the fixed bins, at the steps that have histograms of gradients too.
HISTOGRAM: Final = "histogram"

DEFAULT_STATISTICS: Final = ("norm", "mean", "std", "min", "max", "dead_ratio", "num_nonfinite", HISTOGRAM)


def check_statistics(owner: str, statistics: Sequence[str], *, histogram: bool) -> tuple[str, ...]:
    """The statistics as they will be measured; `histogram`: whether that is one of the names."""
    known = (*STATISTICS, *QUANTILES, *([HISTOGRAM] if histogram else []))
    if isinstance(statistics, str) or not statistics or not set(statistics) <= set(known):
        raise ValueError(f"{owner}: statistics={statistics!r} must be a sequence of names out of {known}")
    return tuple(statistics)


class RowTally(Store[str, Tensor]):
    """One row per name, [C] each, and the histogram's [B] behind it where there is one, for these statistics."""

    def __init__(self, statistics: Sequence[str], dead_threshold: float = 0.0) -> None:
        super().__init__(_merged)
        self._numbers = [name for name in statistics if name != HISTOGRAM]
        self._has_histograms = HISTOGRAM in statistics
        self._dead_threshold = dead_threshold
        self._needs_bins = any(name in QUANTILES for name in statistics)
        self.measures_histograms = False  # of what is pending
        self.reads_histograms = False  # of the sample

    def measure(self, tensors: Mapping[str, Tensor]) -> None:
        """Measure tensors, all on one device, in one batched pass. None of them is kept."""
        if not tensors:
            return
        histogram = self._needs_bins or (self._has_histograms and self.measures_histograms)
        measured = measure(list(tensors.values()), None, dead_threshold=self._dead_threshold, histogram=histogram)
        rows = measured.rows
        if measured.histogram is not None:
            rows = torch.cat([rows, measured.histogram.to(rows.dtype)], dim=1)
        for name, row in zip(tensors, rows, strict=True):
            self.add(name, row)

    def read(self, order: Callable[[str], Any] | None = None) -> Iterable[tuple[str, str, Found]]:
        """Take the sample: name, statistic and value, by name in the order given, otherwise in that of arrival."""
        rows = self.take()
        alike: dict[tuple[torch.device, int], list[str]] = {}
        for name in rows if order is None else sorted(rows, key=order):
            alike.setdefault((rows[name].device, len(rows[name])), []).append(name)
        for (_, size), group in alike.items():
            rows_MC = torch.stack([rows[name] for name in group])
            values: dict[str, Sequence[Found]] = {name: _read(rows_MC, name).unbind() for name in self._numbers}
            if self._has_histograms and self.reads_histograms and size > NUM_COLUMNS:
                values[HISTOGRAM] = histograms_of(rows_MC, rows_MC[:, NUM_COLUMNS:])
            for index, name in enumerate(group):
                for statistic, of_names in values.items():
                    yield name, statistic, of_names[index]


def _read(rows_MC: Tensor, statistic: str) -> Tensor:
    if statistic in QUANTILES:
        return _abs_quantile(rows_MC[:, NUM_COLUMNS:], QUANTILES[statistic])
    return STATISTICS[statistic](lambda column: rows_MC[:, column])


def _merged(one: Tensor, other: Tensor) -> Tensor:
    """Two rows as one. Columns are selected one by one: a list of them would have to be uploaded, and waited for."""
    # A forward that began before the sample before was closed may have been measured without a histogram: half of one
    # would be wrong, so there is none.
    size = min(len(one), len(other))
    one, other = one[:size], onto(other[:size], one.device)
    merged = one + other
    for column in MIN_COLUMNS:
        merged[column] = torch.minimum(one[column], other[column])
    for column in MAX_COLUMNS:
        merged[column] = torch.maximum(one[column], other[column])
    return merged


def histograms_of(rows_MC: Tensor, histogram_MB: Tensor) -> list[ProbeHistogram]:
    """Histograms with the extremes of their rows."""
    extremes = [rows_MC[:, column, None] for column in (Column.GRAD_MIN, Column.GRAD_MAX)]
    return list(map(ProbeHistogram, torch.cat([histogram_MB.to(rows_MC.dtype), *extremes], dim=1)))


def _abs_quantile(histogram_MB: Tensor, q: float) -> Tensor:
    """The upper edge of the bin of magnitudes that holds the q-quantile: [M]; 0 for the zeros, NaN without elements."""
    zeros, positive = histogram_MB[:, ZERO_BIN : ZERO_BIN + 1], histogram_MB[:, ZERO_BIN + 1 :]
    # In integers: CUDA has no deterministic sum of that kind in floats, and may have been told to use no other.
    counts = torch.cat([zeros, positive + histogram_MB[:, :ZERO_BIN].flip(1)], dim=1).to(torch.int64)
    cumulative = counts.cumsum(1).to(histogram_MB.dtype)
    total = cumulative[:, -1]
    bins = (cumulative < (q * total).ceil().clamp_min(1.0)[:, None]).sum(1)
    edges = _upper_edges(histogram_MB.device, histogram_MB.dtype)
    return torch.where(total > 0, edges[bins.clamp_max(len(edges) - 1)], torch.nan)


@functools.cache
def _upper_edges(device: torch.device, dtype: torch.dtype) -> Tensor:
    """Uploaded once per device: 0 for the zeros, then the upper edge of every magnitude bin, the last one open."""
    edges = torch.cat([torch.zeros(1, device="cpu"), torch.tensor(magnitude_edges()[1:], device="cpu")]).to(dtype)
    return (edges.pin_memory() if device.type == "cuda" else edges).to(device, non_blocking=True)
