"""What a probe finds in a sample besides plain numbers: values that merge, over micro-batches, samples and shards.

On the device a value is a small tensor; all of a sample travel to the host in one copy, and get their meaning there.
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
    """A histogram on its device."""

    values: Tensor  # [B + 2]: the counts in the fixed bins, the smallest and the largest finite element


class Meaning(Protocol):
    """What sums say when they are complete: a frozen dataclass, whose repr is the same on every rank."""

    @property
    def num_sums(self) -> int:
        """K."""

    @property
    def of_every_rank(self) -> bool:
        """Whether each rank has its own part, also of what all ranks have alike; otherwise one counts for all."""

    def __call__(self, sums: Sequence[float]) -> Mapping[str, float]:
        """Numbers by name; NaN where there is none."""


@dataclass(frozen=True, eq=False)
class ProbeSums:
    """Sums over a tensor's elements, on its device, that merge over shards: they get their meaning when they have."""

    values: Tensor  # the sums [K]; NaN is missing
    meaning: Meaning  # what the sums say
    # The parameter that these are the sums of, or of this rank's shard of; None: of something else, which is whole on
    # every rank
    parameter: str | None = None


@dataclass(frozen=True)
class Distance:
    """How far a tensor is from another: its sums are the squares of the difference, and of what it is compared with."""

    # What the difference's norm, and its ratio to the other norm, are called:
    norm: str
    ratio: str
    num_sums = 2
    of_every_rank = False

    def __call__(self, sums: Sequence[float]) -> Mapping[str, float]:
        of_difference, compared_with = sums
        return {self.norm: math.sqrt(of_difference), self.ratio: root_of_ratio(of_difference, compared_with)}


def root_of_ratio(above: float, below: float) -> float:
    """The square root of a ratio of sums; that to nothing is missing."""
    return math.sqrt(above / below) if below > 0 and above >= 0 else math.nan


@dataclass(frozen=True, eq=False)
class MetricHistogram:
    """A histogram on the host."""

    counts: IntArray  # [B] in the fixed bins; finite elements only
    # The smallest and the largest of them; infinite where there is none:
    low: float
    high: float

    @classmethod
    def of(cls, packed: FloatArray) -> MetricHistogram:
        """From the layout on the device: [B + 2]."""
        return cls(packed[:NUM_BINS].astype(np.int64), float(packed[-2]), float(packed[-1]))

    def packed(self) -> FloatArray:
        """Back into that layout: [B + 2]."""
        return np.concatenate([self.counts.astype(np.float64), [self.low, self.high]])

    def merge(self, other: MetricHistogram) -> MetricHistogram:
        """Of both tensors' elements together."""
        return MetricHistogram(self.counts + other.counts, min(self.low, other.low), max(self.high, other.high))


@dataclass(frozen=True)
class ArrivedSums:
    """ProbeSums on the host."""

    sums: tuple[float, ...]
    meaning: Meaning
    parameter: str | None

    def metrics(self, key: str) -> dict[str, float]:
        """What they say, by key."""
        return {f"{key}/{name}": value for name, value in self.meaning(self.sums).items()}


def merge_histograms(samples: Iterable[Mapping[str, MetricHistogram]]) -> dict[str, MetricHistogram]:
    """The histograms of several samples, or windows, by key."""
    merged: dict[str, MetricHistogram] = {}
    for histograms in samples:
        for key, histogram in histograms.items():
            merged[key] = merged[key].merge(histogram) if key in merged else histogram
    return merged
