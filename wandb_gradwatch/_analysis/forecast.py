"""The precision forecast: the elements that a gradient would lose in a smaller number format, from its histogram."""

import itertools
import math
from bisect import bisect_right
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np

from .._measure.columns import magnitude_edges
from ..snapshot import Snapshot
from ..snapshot.keys import forecast_key

# M magnitude bins


class NumberFormat(NamedTuple):
    """The range of a number format."""

    min_normal: float  # the smallest magnitude with full precision
    flush: float  # half the smallest subnormal number; magnitudes below it are rounded to 0
    max_value: float  # the largest finite magnitude


# IEEE 754 binary16; the top half of binary32; the two formats of the OCP 8-bit floating point specification.
FORMATS: Final = {
    "fp16": NumberFormat(2.0**-14, 2.0**-25, 65504.0),
    "bf16": NumberFormat(2.0**-126, 2.0**-134, (2 - 2.0**-7) * 2.0**127),
    "fp8_e5m2": NumberFormat(2.0**-14, 2.0**-17, 57344.0),
    "fp8_e4m3": NumberFormat(2.0**-6, 2.0**-10, 448.0),
}
_EDGES: Final[list[float]] = magnitude_edges().tolist()


def forecast(snapshot: Snapshot, *, scale: float = 1.0) -> dict[str, float]:
    """The losses of these gradients in each format of FORMATS, over all names together, by the keys of a W&B row.

    `underflow_ratio` is the share of the finite non-zero elements below the smallest normal number, which lose digits
    or become 0; `flush_ratio` the share that become 0; `headroom` the octaves from the largest element of all samples
    to the format's largest number, negative if it overflows. NaN where unknown, as all shares without a histogram.

    Shares are exact, because every limit of fp16 and of both fp8 formats is a bin edge, also divided by a `scale` (the
    loss scale to assume) that is a power of two. The flush limit of bf16 lies inside the lowest bin: the share is 0 if
    that bin is empty, otherwise missing. A magnitude equal to the flush limit counts as kept, although round-to-even
    flushes it. A complex element counts by its magnitude.
    """
    counts_PM = snapshot.magnitude_histogram
    counts_M = [0] * (len(_EDGES) - 1) if counts_PM is None else np.add.reduce(counts_PM, axis=0).tolist()
    below = list(itertools.accumulate(counts_M, initial=0))
    largest = float(np.fmax.reduce(snapshot.grad_abs_max, axis=None, initial=math.nan)) * scale
    octaves = math.log2(largest) if 0 < largest < math.inf else math.nan  # otherwise unknown
    found = {}
    for name, ends in FORMATS.items():
        found[forecast_key(name, "underflow_ratio")] = _share_below(below, ends.min_normal / scale)
        found[forecast_key(name, "flush_ratio")] = _share_below(below, ends.flush / scale)
        found[forecast_key(name, "headroom")] = math.log2(ends.max_value) - octaves
    return found


def _share_below(below: Sequence[int], limit: float) -> float:
    """The share of magnitudes below a limit, from the number below each edge; NaN if the limit divides a filled bin.

    Example: with edges 1 and 2, and 4 magnitudes in [1, 2), the share below 1.5 is unknown; the share below 1 is 0.
    """
    place = bisect_right(_EDGES, limit) - 1
    is_mixed = _EDGES[place] < limit and below[place + 1] > below[place]
    return math.nan if is_mixed or not below[-1] else below[place] / below[-1]
