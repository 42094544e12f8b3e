"""Arrays for the page's script: neighbouring rows pooled to what a picture has columns for, packed and compressed.

Matrices of positive numbers are stored as 16-bit steps of their logarithm, each with its own range; half a step is
at most 0.05 % of the value for up to 26 decades. Missing, zero and infinity have codes of their own, in an order in
which the largest code is also what must win when cells are pooled.
"""

from __future__ import annotations

import base64
import math
import zlib
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from .._measure.columns import FloatArray, IntArray
from .history import HistogramSeries

# R rows of the run, P names, W columns of a picture

MIN_COLUMNS: Final = 50
CODE_MISSING: Final = 0
CODE_ZERO: Final = 1
CODE_FIRST: Final = 2
CODE_LAST: Final = 65534
CODE_INFINITE: Final = 65535
_SUMMED: Final = frozenset({"num_nan", "num_inf", "num_nonfinite", "num_skipped_steps", "num_guarded_steps"})


class Blob:
    """Arrays one after the other; what goes into the JSON is where each one lies."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._size = 0

    def add(self, data: bytes) -> int:
        """Append bytes and return their offset."""
        self._parts.append(data)
        self._size += len(data)
        return self._size - len(data)

    def add_floats(self, values: FloatArray) -> int:
        """Append values as float32; what is too large for it becomes infinite."""
        with np.errstate(over="ignore"):
            return self.add(values.astype("<f4").tobytes())

    def add_matrix(self, values: FloatArray, *, signed: bool = False) -> dict[str, Any]:
        """Append a matrix of any shape; where it lies, and what its codes mean."""
        codes, start, step = quantise(values, signed=signed)
        # The low bytes, then the high bytes: the high ones hardly change and compress well.
        parts = (codes & 0xFF, codes >> 8)
        return {"start": start, "step": step, "offset": self.add(b"".join(p.astype(np.uint8).tobytes() for p in parts))}

    def encoded(self) -> str:
        """Everything compressed (gzip, which browsers unpack), as base64."""
        packer = zlib.compressobj(6, zlib.DEFLATED, zlib.MAX_WBITS | 16)
        packed = b"".join([*(packer.compress(part) for part in self._parts), packer.flush()])
        return base64.b64encode(packed).decode("ascii")


def quantise(values: FloatArray, *, signed: bool) -> tuple[npt.NDArray[np.uint16], float, float]:
    """Store values >= 0 as steps of their logarithm; of both signs, as even steps.

    Half a step is at most a hundred-thousandth of the range.

    Returns:
        codes of the same shape, and (start, step): a code of CODE_FIRST or more, below CODE_INFINITE, is the value
        10 ** (start + step * (code - CODE_FIRST)), or without the power. NaN and -Inf, and negative values where there
        should be none, are CODE_MISSING.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        scaled = values if signed else np.log10(values)
    known = np.isfinite(scaled)
    low, high = (float(scaled[known].min()), float(scaled[known].max())) if known.any() else (0.0, 0.0)
    step = (high / 2 - low / 2) / ((CODE_LAST - CODE_FIRST) / 2)  # halves: the difference may overflow
    # Half a step of 0.0004 decades is 0.05 %: more than the eye or a tooltip of three digits can tell.
    step = step or 1.0 if signed else max(step, 0.0004)
    codes = np.full(values.shape, CODE_MISSING, dtype=np.uint16)
    codes[known] = np.rint(scaled[known] / step - low / step).astype(np.uint16) + CODE_FIRST
    if not signed:
        codes[values == 0] = CODE_ZERO
    codes[values == np.inf] = CODE_INFINITE
    return codes, low, step


def pack_histograms(
    histograms: Mapping[str, HistogramSeries], names: list[str], max_bytes: int, blob: Blob
) -> dict[str, Any]:
    """Each name's histograms, thinned to a common budget: limits as float32, shares as bytes of their square root."""
    series = [(index, histograms[name]) for index, name in enumerate(names) if name in histograms]
    bins = series[0][1].counts.shape[1] if series else 0
    items = []
    for index, one in series:
        stride = pool_width(len(one.steps), max(8, max_bytes // (bins * len(series))))
        kept = slice((len(one.steps) - 1) % stride, None, stride)  # the last one always
        counts = one.counts[kept]
        total = counts.sum(axis=1, keepdims=True)
        share = np.divide(counts, total, out=np.zeros_like(counts), where=total > 0)
        items.append(
            {
                "name": index,
                "total": len(one.steps),
                "steps": one.steps[kept].tolist(),
                "limits": blob.add_floats(np.concatenate([one.low[kept], one.high[kept]])),
                "shares": blob.add(np.rint(255 * np.sqrt(share)).astype(np.uint8).tobytes()),
            }
        )
    return {"bins": bins, "items": items}


# ---- more rows than a picture has columns: neighbours become one, and nothing that matters is lost


def pool_width(num_rows: int, max_columns: int) -> int:
    """How many neighbouring rows become one column so that there are at most `max_columns`."""
    return max(1, math.ceil(num_rows / max_columns))


def picture_width(num_rows: int, num_names: int, max_cells: int) -> int:
    """The same for a names x steps picture of at most `max_cells`, which has MIN_COLUMNS for any number of names."""
    return pool_width(num_rows, max(MIN_COLUMNS, max_cells // max(num_names, 1)))


def pool_steps(steps: IntArray, width: int) -> tuple[IntArray, IntArray]:
    """First and last step of every column: two [W]."""
    return steps[::width], np.append(steps[width - 1 :: width], steps[-1:] if len(steps) % width else steps[:0])


def is_summed(key: str) -> bool:
    """Whether the values of this key are counts, which are added up over neighbouring rows."""
    return key.partition("/")[0] in _SUMMED or key.rpartition("/")[2] in _SUMMED


def pool(values_RP: FloatArray, width: int, key: str) -> FloatArray:
    """Pool neighbouring rows: counts are added, everything else keeps its largest value, so a spike stays seen.

    Infinity wins over every number, a number over a missing value.
    """
    if width == 1:
        return values_RP
    starts = np.arange(0, len(values_RP), width)
    if not is_summed(key):
        return np.fmax.reduceat(values_RP, starts, axis=0)
    missing = np.logical_and.reduceat(np.isnan(values_RP), starts, axis=0)
    return np.where(missing, np.nan, np.add.reduceat(np.nan_to_num(values_RP, nan=0.0), starts, axis=0))


def pool_extremes(steps_N: FloatArray, values_N: FloatArray, most: int) -> tuple[FloatArray, FloatArray]:
    """A line of at most `most` points, two at least: the smallest and the largest of neighbours.

    What is not finite wins as the largest, so that no NaN is lost.
    """
    if len(values_N) <= most:
        return steps_N, values_N
    starts = np.arange(0, len(values_N), pool_width(len(values_N), most // 2))
    ends = np.append(starts[1:] - 1, len(values_N) - 1)
    num_points = 2 * len(starts) - int(starts[-1] == ends[-1])  # a last neighbour alone is one point
    extremes = (np.fmin.reduceat(values_N, starts), np.maximum.reduceat(values_N, starts))
    pairs = ((steps_N[starts], steps_N[ends]), extremes)
    steps, values = (np.stack(pair, axis=1).ravel()[:num_points] for pair in pairs)
    return steps, values
