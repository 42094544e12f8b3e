"""Arrays as packed and compressed bytes, which the page's script unpacks.

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

from .._measure.columns import FloatArray
from .history import HistogramSeries

CODE_MISSING: Final = 0
CODE_ZERO: Final = 1
CODE_FIRST: Final = 2
CODE_LAST: Final = 65534
CODE_INFINITE: Final = 65535


class Blob:
    """Arrays one after the other; what goes into the JSON is where each one lies."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._size = 0

    def add(self, data: bytes) -> int:
        """Append bytes and return their offset."""
        offset = self._size
        self._parts.append(data)
        self._size += len(data)
        return offset

    def add_uint16(self, codes: npt.NDArray[np.uint16]) -> int:
        """Append the low bytes, then the high bytes: the high ones hardly change and compress well."""
        little = codes.astype("<u2").reshape(-1)
        return self.add((little & 0xFF).astype(np.uint8).tobytes() + (little >> 8).astype(np.uint8).tobytes())

    def add_floats(self, values: FloatArray) -> int:
        """Append values as float32; what is too large for it becomes infinite."""
        with np.errstate(over="ignore"):
            return self.add(values.astype("<f4").tobytes())

    def encoded(self) -> str:
        """Everything compressed (gzip, which browsers unpack), as base64."""
        packer = zlib.compressobj(6, zlib.DEFLATED, zlib.MAX_WBITS | 16)
        packed = b"".join([*(packer.compress(part) for part in self._parts), packer.flush()])
        return base64.b64encode(packed).decode("ascii")

    def add_matrix(self, values: FloatArray, *, signed: bool = False) -> dict[str, Any]:
        """Append a matrix of any shape; where it lies, and what its codes mean."""
        codes, start, step = quantise(values, signed=signed)
        return {"start": start, "step": step, "offset": self.add_uint16(codes)}


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
    series = {name: histograms[name] for name in names if name in histograms}
    if not series:
        return {"bins": 0, "items": []}
    bins = next(iter(series.values())).counts.shape[1]
    per_name = max(8, max_bytes // (bins * len(series)))
    items = []
    for index, name in enumerate(names):
        if name in series:
            items.append({"name": index, "total": len(series[name].steps), **_histogram(series[name], per_name, blob)})
    return {"bins": bins, "items": items}


def _histogram(series: HistogramSeries, most: int, blob: Blob) -> dict[str, Any]:
    stride = max(1, math.ceil(len(series.steps) / most))
    kept = np.arange(len(series.steps) - 1, -1, -stride)[::-1]  # the last one always
    counts = series.counts[kept]
    total = counts.sum(axis=1, keepdims=True)
    share = np.divide(counts, total, out=np.zeros_like(counts), where=total > 0)
    limits = np.concatenate([series.low[kept], series.high[kept]])
    return {
        "steps": series.steps[kept].tolist(),
        "limits": blob.add_floats(limits),
        "shares": blob.add(np.rint(255 * np.sqrt(share)).astype(np.uint8).tobytes()),
    }
