"""What a probe finds in a sample besides plain numbers: values that merge, over micro-batches, samples and shards.

On the device a value is a small tensor; all of a sample travel to the host in one copy, and get their meaning there.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from .columns import NUM_BINS, FloatArray, IntArray

if TYPE_CHECKING:
    from torch import Tensor

# B histogram bins

HISTOGRAM_SIZE: Final = NUM_BINS + 2


@dataclass(frozen=True, eq=False)
class ProbeHistogram:
    """A histogram on its device.

    Args:
        packed: [B + 2]: the counts in the fixed bins, the smallest and the largest finite element.
    """

    packed: Tensor


@dataclass(frozen=True, eq=False)
class ProbeDistance:
    """How far a tensor is from another, on its device, as sums that merge over shards.

    Args:
        sums: [2]: sum of the squares of the difference, and of what the difference is compared with.
        names: what the difference's norm, and its ratio to the other norm, are called.
        parameter: the parameter that these are the sums of, or of this rank's shard of; None: of something else, which
            is whole on every rank.
    """

    sums: Tensor
    names: tuple[str, str]
    parameter: str | None = None


@dataclass(frozen=True, eq=False)
class MetricHistogram:
    """A histogram on the host.

    Args:
        counts: [B] in the fixed bins; finite elements only.
        low, high: the smallest and the largest of them; infinite where there is none.
    """

    counts: IntArray
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
class Distance:
    """A ProbeDistance on the host."""

    sums: tuple[float, float]
    names: tuple[str, str]
    parameter: str | None

    def metrics(self, key: str) -> dict[str, float]:
        """The norm of the difference and its ratio to the other norm, by key; the ratio to nothing is missing."""
        of_difference, compared_with = self.sums
        ratio = math.sqrt(of_difference / compared_with) if compared_with > 0 else math.nan
        return {f"{key}/{self.names[0]}": math.sqrt(of_difference), f"{key}/{self.names[1]}": ratio}


def merge_histograms(samples: Iterable[Mapping[str, MetricHistogram]]) -> dict[str, MetricHistogram]:
    """The histograms of several samples, or windows, by key."""
    merged: dict[str, MetricHistogram] = {}
    for histograms in samples:
        for key, histogram in histograms.items():
            merged[key] = merged[key].merge(histogram) if key in merged else histogram
    return merged
