"""The statistics of one chunk of a large tensor on the CPU, pass by pass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from .columns import Column, IntArray
from .float_bits import FLOAT32, FloatBits

CHUNK: Final = 1 << 18  # elements: a megabyte of float32, which fits in the second- or third-level cache
SEGMENT: Final = 512  # elements summed in float32, before float64 sums the segments: accurate to 2e-7 for constants

# A chunk's squares may be summed in float32 if its largest magnitude lies between these limits: CHUNK * 2**110 does not
# overflow, and CHUNK squares below 2**-126 lose less than 2**-28 of the smallest possible sum, 2**-80.
_LARGE: Final = FLOAT32.bits_of(2.0**55)
_SMALL: Final = FLOAT32.bits_of(2.0**-40)
# The lower limit for sum_sq_chunk, where the largest magnitude is unknown: sum of squares / number of elements.
_SMALL_SQ: Final = 2.0**-98

Floats = npt.NDArray[Any]  # float32 or float64
ChunkRow = tuple[float, ...]
CHUNK_COLUMNS: Final = tuple(c for c in Column if c <= Column.GRAD_ABS_MIN_NONZERO)  # in this order


@dataclass(frozen=True)
class ChunkReader:
    """Reads chunks of one float layout."""

    layout: FloatBits  # of the chunks
    dead_magnitude: int  # bits of the largest dead magnitude; -1 for none
    counts_codes: bool  # whether to count the codes of the non-zero finite elements

    def read(self, chunk: Floats) -> tuple[ChunkRow, IntArray | int]:
        """Measure a chunk of 1 to CHUNK elements: return the CHUNK_COLUMNS and the count of each code: [K]."""
        layout, sign = self.layout, self.layout.sign
        unsigned = chunk.view(layout.unsigned)
        signed = chunk.view(layout.signed)
        # Positive floats sort like integers, negative ones in reverse: for each sign, the smallest and the largest
        # integer (signed or unsigned) are the elements nearest to zero and farthest from it.
        lowest, highest = int(np.minimum.reduce(unsigned)), int(np.maximum.reduce(unsigned))
        inner_positive, outer_positive, inner_negative, outer_negative = lowest, highest, lowest ^ sign, highest ^ sign
        if highest >= sign:
            outer_positive = int(np.maximum.reduce(signed))
            inner_negative = int(np.minimum.reduce(signed)) + sign
        has_positive, has_negative = lowest < sign, highest >= sign
        largest = max(outer_positive if has_positive else 0, outer_negative if has_negative else 0)
        if largest >= layout.infinity:
            return self._read_finite_rest(chunk, unsigned)
        smallest = min(inner_positive if has_positive else sign, inner_negative if has_negative else sign)

        num_zero = num_dead = 0
        smallest_nonzero = smallest
        if smallest <= max(self.dead_magnitude, 0):
            num_zero, num_dead, smallest_nonzero = self._count_small(unsigned, smallest)
        codes: IntArray | int = 0
        if self.counts_codes and num_zero < unsigned.size:
            positive_zeros = unsigned.size - int(np.count_nonzero(unsigned)) if lowest == 0 else 0
            codes = self._codes(unsigned, positive_zeros, num_zero - positive_zeros)
        total, total_sq = self._sums(chunk, largest)
        row = (
            chunk.size,
            0,
            0,
            num_zero,
            num_dead,
            total,
            total_sq,
            -layout.value(outer_negative) if has_negative else layout.value(inner_positive),
            layout.value(outer_positive) if has_positive else -layout.value(inner_negative),
            layout.value(smallest_nonzero) if smallest_nonzero < layout.infinity else np.inf,
        )
        return row, codes

    def _read_finite_rest(self, chunk: Floats, unsigned: npt.NDArray[Any]) -> tuple[ChunkRow, IntArray | int]:
        doubled = np.left_shift(unsigned, 1)  # drops the sign
        infinity = 2 * self.layout.infinity
        finite = chunk[doubled < infinity]
        num_inf = int(np.count_nonzero(doubled == infinity))
        num_nan = chunk.size - finite.size - num_inf
        nothing = (0, 0, 0, 0, 0, 0.0, 0.0, np.inf, -np.inf, np.inf)
        row, codes = self.read(finite) if finite.size else (nothing, 0)
        return (chunk.size, num_nan, num_inf, *row[3:]), codes

    def _count_small(self, unsigned: npt.NDArray[Any], smallest: int) -> tuple[int, int, int]:
        """Return the number of zeros, the number of dead elements, and the bits of the smallest non-zero magnitude."""
        doubled = np.left_shift(unsigned, 1)
        num_zero = doubled.size - int(np.count_nonzero(doubled)) if smallest == 0 else 0
        num_dead = num_zero if self.dead_magnitude == 0 else 0
        if self.dead_magnitude > 0:
            num_dead = int(np.count_nonzero(doubled <= 2 * self.dead_magnitude))
        if smallest == 0:
            if num_zero == doubled.size:
                return num_zero, num_dead, self.layout.infinity
            doubled -= 1  # zero wraps around to the largest integer
            smallest = (int(np.minimum.reduce(doubled)) + 1) // 2
        return num_zero, num_dead, smallest

    def _codes(self, unsigned: npt.NDArray[Any], positive_zeros: int, negative_zeros: int) -> IntArray:
        codes = np.right_shift(unsigned, self.layout.code_shift).view(self.layout.signed)
        # torch's bincount is twice as fast as numpy's, and releases the GIL.
        counts_K: IntArray = torch.bincount(torch.from_numpy(codes), minlength=self.layout.num_codes).numpy()
        counts_K[0] -= positive_zeros  # zeros share these codes with subnormal values
        counts_K[self.layout.num_codes // 2] -= negative_zeros
        return counts_K

    def _sums(self, chunk: Floats, largest: int) -> tuple[float, float]:
        if largest == 0:
            return 0.0, 0.0
        if self.layout is FLOAT32 and not _SMALL <= largest <= _LARGE:
            chunk = chunk.astype(np.float64)
        return _sum(chunk), _sum(chunk, of_squares=True)


def sum_sq_chunk(chunk: Floats) -> tuple[float, int, int]:
    """Return the sum of squares of a chunk's finite elements, the number of NaN and the number of Inf."""
    total_sq = _sum(chunk, of_squares=True)
    if chunk.size * _SMALL_SQ < total_sq < np.inf:
        return total_sq, 0, 0
    if total_sq == 0 and not chunk.any():
        return 0.0, 0, 0
    finite = chunk[np.isfinite(chunk)].astype(np.float64)
    num_nan = int(np.count_nonzero(np.isnan(chunk)))
    return _sum(finite, of_squares=True), num_nan, chunk.size - finite.size - num_nan


def _sum(chunk: Floats, *, of_squares: bool = False) -> float:
    """Sum in segments: within a segment in the chunk's dtype, between segments in float64.

    The sums are written as products of vectors, for which numpy uses vector instructions.
    """
    whole = chunk.size - chunk.size % SEGMENT
    segments, rest = chunk[:whole].reshape(-1, 1, SEGMENT), chunk[whole:].astype(np.float64)
    columns = segments.transpose(0, 2, 1) if of_squares else np.ones((SEGMENT, 1), dtype=chunk.dtype)
    total = np.matmul(segments, columns).sum(dtype=np.float64)
    return float(total + (np.dot(rest, rest) if of_squares else rest.sum()))
