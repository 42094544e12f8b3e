"""What a gradient would lose in a smaller number format, counted exactly from the fixed histogram bins."""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

import numpy as np

from .._measure.columns import magnitude_edges
from ..snapshot import Snapshot

# M magnitude bins


@dataclass(frozen=True)
class NumberFormat:
    """Where a format ends.

    Args:
        min_normal: the smallest magnitude with full precision.
        flush: a magnitude below it rounds to 0: half the smallest subnormal number.
        max_value: the largest finite magnitude.
    """

    min_normal: float
    flush: float
    max_value: float


# IEEE 754 binary16; the top half of binary32; the two formats of the OCP 8-bit floating point specification.
FORMATS: Final[Mapping[str, NumberFormat]] = MappingProxyType(
    {
        "fp16": NumberFormat(2.0**-14, 2.0**-25, 65504.0),
        "bf16": NumberFormat(2.0**-126, 2.0**-134, (2 - 2.0**-7) * 2.0**127),
        "fp8_e5m2": NumberFormat(2.0**-14, 2.0**-17, 57344.0),
        "fp8_e4m3": NumberFormat(2.0**-6, 2.0**-10, 448.0),
    }
)
_EDGES: Final[list[float]] = magnitude_edges().tolist()


@dataclass(frozen=True)
class PrecisionForecast:
    """One format's losses, over all names together; NaN where one cannot be known.

    Args:
        underflow_ratio: share of the finite elements that are not 0 below the smallest normal number: it loses digits,
            or becomes 0.
        flush_ratio: share of them that becomes 0.
        headroom: octaves between the largest element and the format's end; negative where it overflows.
    """

    underflow_ratio: float
    flush_ratio: float
    headroom: float


def forecast(snapshot: Snapshot, *, scale: float = 1.0) -> dict[str, PrecisionForecast]:
    """What each format in FORMATS would do to these gradients.

    Shares are exact, because every limit of fp16 and of both fp8 formats is an edge of a bin. What bf16 flushes lies
    within the lowest bin: the share is known, and 0, only if that is empty, else missing. A magnitude that is exactly
    the flush limit counts as kept, though round-to-even flushes it. A complex element counts by its magnitude.

    Args:
        snapshot: with a histogram; without one all shares are missing. Headroom is of all its samples.
        scale: a loss scale that would be applied; a power of two.

    Returns:
        By format name.

    Raises:
        ValueError: scale is not a positive power of two.
    """
    if not (scale > 0 and math.isfinite(scale) and math.frexp(scale)[0] == 0.5):
        raise ValueError(f"scale={scale!r} must be a positive power of two: others move the limits off the bins' edges")
    counts_PM = snapshot.magnitude_histogram
    counts_M = [0] * (len(_EDGES) - 1) if counts_PM is None else np.add.reduce(counts_PM, axis=0).tolist()
    below = list(itertools.accumulate(counts_M, initial=0))
    largest = float(np.fmax.reduce(snapshot.grad_abs_max, axis=None, initial=math.nan)) * scale
    octaves = math.log2(largest) if 0 < largest < math.inf else math.nan  # otherwise nothing is left to compare
    return {
        name: PrecisionForecast(
            underflow_ratio=_share_below(below, ends.min_normal / scale),
            flush_ratio=_share_below(below, ends.flush / scale),
            headroom=math.log2(ends.max_value) - octaves,
        )
        for name, ends in FORMATS.items()
    }


def _share_below(below: Sequence[int], limit: float) -> float:
    """Share of the magnitudes below a limit, of how many are below each edge; NaN where the limit's bin is mixed.

    Example: with edges 1 and 2, and 4 magnitudes in [1, 2), the share below 1.5 is not known; below 1 it is 0.
    """
    place = bisect_right(_EDGES, limit) - 1
    is_mixed = _EDGES[place] < limit and below[place + 1] > below[place]
    return math.nan if is_mixed or not below[-1] else below[place] / below[-1]
