"""Rows of tensors that are no gradients, on their device: merged over micro-batches, and read as numbers by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from ..statistics.columns import MAX_COLUMNS, MIN_COLUMNS, ZERO_BIN, Column, magnitude_edges
from ..statistics.measure import measure

# M tensors, C columns, B histogram bins

Columns = Callable[[Column], Tensor]


def _num_finite(column: Columns) -> Tensor:
    return column(Column.NUM_ELEMENTS) - column(Column.NUM_NAN) - column(Column.NUM_INF)


def _mean(column: Columns) -> Tensor:
    return column(Column.GRAD_SUM) / _num_finite(column)  # 0 / 0 is NaN: missing


def _std(column: Columns) -> Tensor:
    mean_sq = column(Column.GRAD_SUM_SQ) / _num_finite(column)
    return (mean_sq - _mean(column) ** 2).clamp_min(0.0).sqrt()  # rounding leaves a constant a hair below zero


def _present(extreme: Tensor) -> Tensor:
    return torch.where(extreme.isinf(), torch.nan, extreme)  # nothing entered it


# Of the finite elements, as for gradients.
STATISTICS: Final[Mapping[str, Callable[[Columns], Tensor]]] = {
    "norm": lambda c: c(Column.GRAD_SUM_SQ).sqrt(),
    "rms": lambda c: (c(Column.GRAD_SUM_SQ) / _num_finite(c)).sqrt(),
    "mean": _mean,
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

DEFAULT_STATISTICS: Final = ("norm", "mean", "std", "min", "max", "dead_ratio", "num_nonfinite")


def check_statistics(owner: str, statistics: Sequence[str]) -> tuple[str, ...]:
    """The statistics as they will be measured.

    Raises:
        ValueError: a name that is none.
    """
    known = (*STATISTICS, *QUANTILES)
    unknown = [s for s in ([statistics] if isinstance(statistics, str) else statistics) if s not in known]
    if unknown or isinstance(statistics, str) or not statistics:
        raise ValueError(f"{owner}: statistics={statistics!r} must be a sequence of names out of {known}")
    return tuple(statistics)


class RowTally:
    """One row per name, of one sample or of what may become part of one.

    Args:
        statistics: what will be read from the rows.
        dead_threshold: |a| <= this counts as dead.
    """

    def __init__(self, statistics: Sequence[str], dead_threshold: float = 0.0) -> None:
        self._statistics = statistics
        self._dead_threshold = dead_threshold
        self._with_histogram = any(name in QUANTILES for name in statistics)
        self._rows: dict[str, Tensor] = {}  # [C], and the histogram's [B] behind it where there is one

    def add(self, tensors: Mapping[str, Tensor]) -> None:
        """Measure tensors, all on one device, in one batched pass. None of them is kept."""
        if not tensors:
            return
        measured = measure(
            list(tensors.values()), None, dead_threshold=self._dead_threshold, histogram=self._with_histogram
        )
        rows = measured.rows
        if measured.histogram is not None:
            rows = torch.cat([rows, measured.histogram.to(rows.dtype)], dim=1)
        for name, row in zip(tensors, rows, strict=True):
            self._put(name, row)

    def absorb(self, other: RowTally) -> None:
        """Merge everything of another tally into this one and empty it."""
        for name, row in other._rows.items():
            self._put(name, row)
        other.clear()

    def clear(self) -> None:
        """Forget everything."""
        self._rows = {}

    def read(self, order: Callable[[str], Any] | None = None) -> Iterable[tuple[str, str, Tensor]]:
        """Name, statistic and scalar of everything, by name in the order given, else in that of arrival."""
        names = list(self._rows) if order is None else sorted(self._rows, key=order)
        by_device: dict[torch.device, list[str]] = {}
        for name in names:
            by_device.setdefault(self._rows[name].device, []).append(name)
        for device_names in by_device.values():
            rows_MC = torch.stack([self._rows[name] for name in device_names])
            values = [self._read(rows_MC, statistic).unbind() for statistic in self._statistics]
            for index, name in enumerate(device_names):
                for statistic, scalars in zip(self._statistics, values, strict=True):
                    yield name, statistic, scalars[index]

    def _read(self, rows_MC: Tensor, statistic: str) -> Tensor:
        if statistic in QUANTILES:
            return _abs_quantile(rows_MC[:, len(Column) :], QUANTILES[statistic])
        return STATISTICS[statistic](lambda column: rows_MC[:, column])

    def _put(self, name: str, row: Tensor) -> None:
        known = self._rows.get(name)
        self._rows[name] = row if known is None else _merged(known, row.to(known.device, non_blocking=True))


def _merged(one: Tensor, other: Tensor) -> Tensor:
    """Two rows as one. Columns are selected one by one: a list of them would have to be uploaded, and waited for."""
    merged = one + other
    for column in MIN_COLUMNS:
        merged[column] = torch.minimum(one[column], other[column])
    for column in MAX_COLUMNS:
        merged[column] = torch.maximum(one[column], other[column])
    return merged


def _abs_quantile(histogram_MB: Tensor, q: float) -> Tensor:
    """The upper edge of the bin of magnitudes that holds the q-quantile: [M]; 0 for the zeros, NaN without elements."""
    zeros, positive, negative = (
        histogram_MB[:, ZERO_BIN : ZERO_BIN + 1],
        histogram_MB[:, ZERO_BIN + 1 :],
        histogram_MB[:, :ZERO_BIN].flip(1),
    )
    cumulative = torch.cat([zeros, positive + negative], dim=1).cumsum(1)
    total = cumulative[:, -1]
    bins = (cumulative < (q * total).ceil().clamp_min(1.0)[:, None]).sum(1)
    edges = _upper_edges(histogram_MB.device, histogram_MB.dtype)
    return torch.where(total > 0, edges[bins.clamp_max(len(edges) - 1)], torch.nan)


_edges: Final[dict[tuple[torch.device, torch.dtype], Tensor]] = {}


def _upper_edges(device: torch.device, dtype: torch.dtype) -> Tensor:
    """Uploaded once per device: 0 for the zeros, then the upper edge of every magnitude bin, the last one open."""
    key = (device, dtype)
    if key not in _edges:
        edges = torch.cat([torch.zeros(1), torch.from_numpy(magnitude_edges()[1:])]).to(dtype)
        _edges[key] = (edges.pin_memory() if device.type == "cuda" else edges).to(device, non_blocking=True)
    return _edges[key]
