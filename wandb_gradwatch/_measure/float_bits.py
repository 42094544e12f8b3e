"""Floats read as integers: the bits of floats are ordered like the floats, and a histogram bin is a few leading bits.

Integer comparisons are exact for every value, including subnormal numbers in a process that flushes them to zero.
"""

from bisect import bisect_right
from functools import cache, lru_cache
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from .columns import NUM_BINS, FloatArray, IntArray, bins_of

# K codes: the sign, the exponent and the first mantissa bit of a float; histogram bins are unions of codes


class FloatBits:
    """The layout of the bits of a floating-point dtype."""

    def __init__(self, float_dtype: type[np.floating[Any]], unsigned: type[Any], signed: type[Any]) -> None:
        self.float_dtype, self.unsigned, self.signed = map(np.dtype, (float_dtype, unsigned, signed))
        info = np.finfo(float_dtype)
        self.mantissa_bits, self.exponent_bias = int(info.nmant), int(info.maxexp) - 1
        self.sign = 1 << (info.bits - 1)  # the highest bit, which equals the bits of negative zero
        self.infinity = self.sign - (1 << self.mantissa_bits)  # the bits of +inf; larger magnitudes are NaN
        self.code_shift = self.mantissa_bits - 1  # the right shift that turns the bits into the code
        self.num_codes = 1 << (info.bits - self.code_shift)  # K

    def values(self, bits: npt.NDArray[Any]) -> FloatArray:
        """Return the floats with these bits, in float64."""
        if self.mantissa_bits == 52:
            return bits.view(self.float_dtype)
        values = bits.view(self.float_dtype).astype(np.float64)
        magnitude = bits & (self.sign - 1)
        subnormal = magnitude < 1 << self.mantissa_bits
        if subnormal.any():  # the conversion flushed them to zero in a process that enabled flushing
            values = np.where(subnormal, np.copysign(magnitude * 2.0**-149, values), values)
        return values


FLOAT32: Final = FloatBits(np.float32, np.uint32, np.int32)
FLOAT64: Final = FloatBits(np.float64, np.uint64, np.int64)


@lru_cache(maxsize=64)
def largest_magnitude_within(threshold: float, layout: FloatBits) -> int:
    """Return the bits of the largest finite float whose magnitude is <= threshold; -1 if there is none."""
    if not threshold > 0:  # the usual case
        return 0 if threshold == 0 else -1

    def value(magnitude: int) -> float:
        return float(layout.values(np.array([magnitude], dtype=layout.unsigned))[0])

    # Search the bits: converting the threshold could round it up.
    return bisect_right(range(layout.infinity), threshold, key=value) - 1


@cache
def bin_of_code(layout: FloatBits, exponent: int) -> IntArray:
    """Return the histogram bin of value * 2**exponent for every code of a non-zero value: [K].

    NaN and Inf get NUM_BINS, which is not a bin. Valid for exponent <= 0: scaled up, a code of subnormal values spans
    several bins.
    """
    code = np.arange(layout.num_codes // 2)
    finite = code < layout.infinity >> layout.code_shift
    biased, mantissa = code[finite] >> 1, code[finite] & 1
    lower_edge = np.ldexp(1.0 + mantissa / 2, biased - layout.exponent_bias + exponent)
    lower_edge = np.maximum(np.where(biased == 0, 0.0, lower_edge), 2.0**-1000)  # not zero, but in the lowest bin
    bins_of_sign = np.full((2, code.size), NUM_BINS)
    bins_of_sign[:, finite] = bins_of(lower_edge), bins_of(-lower_edge)
    bins = bins_of_sign.ravel()
    bins.setflags(write=False)
    return bins
