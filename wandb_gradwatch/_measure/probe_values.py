"""Values of probes that are more than single numbers, and merge over micro-batches, samples and shards.

On the device a value is a small tensor. One copy sends all values of a sample to the host, which interprets them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

import numpy as np

from .columns import NUM_BINS, FloatArray, IntArray

if TYPE_CHECKING:
    from torch import Tensor

# B histogram bins

HISTOGRAM_SIZE: Final = NUM_BINS + 2


@dataclass(frozen=True, eq=False)
class ProbeHistogram:
    """A histogram on a device."""

    values: Tensor  # [B + 2]: the counts in the fixed bins, then the smallest and the largest finite element


class Meaning(Protocol):
    """Converts complete sums to numbers. A frozen dataclass, whose repr must be the same on every rank."""

    @property
    def num_sums(self) -> int:
        """The number of sums, K."""

    @property
    def of_every_rank(self) -> bool:
        """Whether to add the sums of all ranks even if their tensors are replicas; otherwise one replica counts."""

    @property
    def side_by_side(self) -> bool:
        """Whether those of the ranks are put one after the other, [R K], instead of added; 0 where a rank has none."""

    def __call__(self, sums: Sequence[float]) -> Mapping[str, float]:
        """Return numbers by name; NaN for missing ones."""


@dataclass(frozen=True, eq=False)
class ProbeSums:
    """Sums over a tensor's elements, on its device, that merge over shards before `meaning` reads them."""

    values: Tensor  # the sums [K]; NaN is missing
    meaning: Meaning  # converts the merged sums to numbers
    # The parameter whose elements, or whose shard's elements on this rank, are summed; None: another tensor, which is
    # whole on every rank
    parameter: str | None = None


@dataclass(frozen=True)
class Distance:
    """Converts two sums of squares, of a difference and of the tensor compared with, to a distance and its ratio."""

    # The names of the difference's norm, and of its ratio to the other norm:
    norm: str
    ratio: str
    num_sums = 2
    of_every_rank = side_by_side = False

    def __call__(self, sums: Sequence[float]) -> Mapping[str, float]:
        of_difference, compared_with = sums
        return {self.norm: math.sqrt(of_difference), self.ratio: root_of_ratio(of_difference, compared_with)}


def root_of_ratio(above: float, below: float) -> float:
    """Return the square root of a ratio of sums; NaN if the denominator is 0."""
    return math.sqrt(above / below) if below > 0 and above >= 0 else math.nan


@dataclass(frozen=True, eq=False)
class MetricHistogram:
    """A histogram on the host."""

    counts: IntArray  # [B] in the fixed bins; finite elements only
    # The smallest and the largest finite element; infinite if there is none:
    low: float
    high: float

    @classmethod
    def of(cls, packed: FloatArray) -> MetricHistogram:
        """Read the device's layout: [B + 2]."""
        return cls(packed[:NUM_BINS].astype(np.int64), float(packed[-2]), float(packed[-1]))

    def packed(self) -> FloatArray:
        """Return the device's layout: [B + 2]."""
        return np.concatenate([self.counts.astype(np.float64), [self.low, self.high]])

    def merge(self, other: MetricHistogram) -> MetricHistogram:
        """Return the histogram of both tensors' elements together."""
        return MetricHistogram(self.counts + other.counts, min(self.low, other.low), max(self.high, other.high))


@dataclass(frozen=True)
class ArrivedSums:
    """ProbeSums on the host."""

    sums: tuple[float, ...]
    meaning: Meaning
    parameter: str | None

    def metrics(self, key: str) -> dict[str, float]:
        """Return the numbers by key."""
        return {f"{key}/{name}": value for name, value in self.meaning(self.sums).items()}


def merge_histograms(samples: Iterable[Mapping[str, MetricHistogram]]) -> dict[str, MetricHistogram]:
    """Merge the histograms of several samples or windows by key."""
    merged: dict[str, MetricHistogram] = {}
    for histograms in samples:
        for key, histogram in histograms.items():
            merged[key] = merged[key].merge(histogram) if key in merged else histogram
    return merged
