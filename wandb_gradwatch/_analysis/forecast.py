"""What a gradient would lose in a smaller number format, counted exactly from the fixed histogram bins."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

import numpy as np

from .._measure.columns import FloatArray, IntArray, magnitude_edges
from ..snapshot import Snapshot

# P watched parameters, Q them and their total, M magnitude bins, F formats, L limits


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
_LIMITS_L: Final = np.array([limit for ends in FORMATS.values() for limit in (ends.min_normal, ends.flush)])
_LARGEST_F1: Final = np.array([[ends.max_value] for ends in FORMATS.values()])


@dataclass(frozen=True, eq=False)
class PrecisionForecast:
    """One format's losses. Shares are of the finite elements that are not 0; NaN where they cannot be known.

    Args:
        names: [P].
        underflow_ratio: [P] share below the smallest normal number: it loses digits, or becomes 0.
        flush_ratio: [P] share that becomes 0.
        headroom: [P] octaves between the largest element and the format's end; negative where it overflows.
        total_underflow_ratio, total_flush_ratio, total_headroom: the same over all names together.
    """

    names: tuple[str, ...]
    underflow_ratio: FloatArray
    flush_ratio: FloatArray
    headroom: FloatArray
    total_underflow_ratio: float
    total_flush_ratio: float
    total_headroom: float


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
    names = snapshot.names
    if counts_PM is None or not names:
        counts_PM = np.zeros((len(names), len(magnitude_edges()) - 1), dtype=np.int64)
    largest_P = np.fmax.reduce(snapshot.grad_abs_max, axis=0, initial=np.nan) * scale
    largest_Q = np.append(largest_P, np.fmax.reduce(largest_P, initial=np.nan))
    with np.errstate(divide="ignore", invalid="ignore"):
        octaves_FQ = np.log2(_LARGEST_F1) - np.log2(largest_Q)
    headroom_FQ = np.where(np.isfinite(octaves_FQ), octaves_FQ, np.nan)  # missing where nothing is left to compare
    shares_LQ = _shares_below(np.concatenate([counts_PM, counts_PM.sum(axis=0, keepdims=True)]), _LIMITS_L / scale)
    return {
        key: PrecisionForecast(
            names=names,
            underflow_ratio=underflow_Q[:-1],
            flush_ratio=flush_Q[:-1],
            headroom=headroom_Q[:-1],
            total_underflow_ratio=float(underflow_Q[-1]),
            total_flush_ratio=float(flush_Q[-1]),
            total_headroom=float(headroom_Q[-1]),
        )
        for key, underflow_Q, flush_Q, headroom_Q in zip(
            FORMATS, shares_LQ[::2], shares_LQ[1::2], headroom_FQ, strict=True
        )
    }


def _shares_below(counts_QM: IntArray, limits_L: FloatArray) -> FloatArray:
    """Share of the counted magnitudes below each limit: [L, Q]; NaN where none is counted or the limit's bin is mixed.

    Example: with edges 1 and 2, and 4 magnitudes in [1, 2), the share below 1.5 is not known; below 1 it is 0.
    """
    edges = magnitude_edges()
    bins_L = np.searchsorted(edges, limits_L, side="right") - 1
    up_to_MQ = np.cumsum(counts_QM.T, axis=0)
    in_bin_LQ = counts_QM.T[bins_L]
    mixed_LQ = (edges[bins_L] < limits_L)[:, None] & (in_bin_LQ > 0)
    total_Q = up_to_MQ[-1]
    return np.where((total_Q > 0) & ~mixed_LQ, (up_to_MQ[bins_L] - in_bin_LQ) / np.maximum(total_Q, 1), np.nan)
