"""The statistics of pieces of tensors on the CPU: each pass of numpy reads all pieces of a batch, one after the other.

A batch is one piece of a large tensor, or many small tensors, for which a call each would cost more than the reading.
"""

from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from .columns import IDENTITY_C, NUM_COLUMNS, Column, FloatArray, IntArray
from .float_bits import FLOAT32, FLOAT64, FloatBits

# G pieces of one batch, C columns, K codes, E elements of one batch

PIECE: Final = 1 << 19  # most elements: two megabytes of float32, which fit in the second- or third-level cache
SMALL: Final = 1 << 13  # elements; smaller tensors are measured together
SEGMENT: Final = 512  # elements summed in float32, before float64 sums the segments: accurate to 2e-7 for constants

# A piece's squares may be summed in float32 if the bits of its largest magnitude lie between these limits: the sum of a
# segment, SEGMENT * 2**110, does not overflow, and PIECE squares below 2**-126 lose less than 2**-26 of the smallest
# possible sum, 2**-80.
_LARGE: Final = int(np.float32(2.0**55).view(np.uint32))
_SMALL: Final = int(np.float32(2.0**-40).view(np.uint32))
# The lower limit for sum_sq_pieces, where the largest magnitude is unknown: sum of squares / number of elements.
_SMALL_SQ: Final = 2.0**-98

Floats = npt.NDArray[Any]  # float32 or float64


def measure_pieces(
    values: Floats, bounds: IntArray, dead_magnitude: int, *, count_codes: bool
) -> tuple[FloatArray, IntArray | None]:
    """Measure every piece.

    Args:
        values: the elements of all pieces: [E].
        bounds: where each piece begins and the last one ends, strictly ascending: [G + 1].
        dead_magnitude: the bits of the largest dead magnitude; -1 for none.
        count_codes: count the codes (float_bits.py) of the finite elements other than 0.

    Returns:
        The rows [G, C], without received and parameter columns, and with `count_codes` the counts [G, K].
    """
    layout, starts = FLOAT32 if values.dtype == FLOAT32.float_dtype else FLOAT64, bounds[:-1]
    unsigned, signed, no_sign = values.view(layout.unsigned), values.view(layout.signed), layout.sign - 1
    # Positive floats sort like integers, negative ones in reverse: for each sign, the smallest and the largest integer
    # (signed or unsigned) are the elements nearest to zero and farthest from it.
    lowest_G, highest_G = np.minimum.reduceat(unsigned, starts), np.maximum.reduceat(unsigned, starts)
    nearest_G = np.minimum.reduceat(signed, starts).view(layout.unsigned)
    farthest_G = np.maximum.reduceat(signed, starts).view(layout.unsigned)
    magnitudes_4G = np.array([lowest_G, nearest_G, highest_G, farthest_G]) & no_sign
    largest = int(np.maximum.reduce(magnitudes_4G, axis=None))
    if largest >= layout.infinity:
        return _measure_finite(values, bounds, dead_magnitude, layout if count_codes else None)
    smallest_G = np.minimum(magnitudes_4G[0], magnitudes_4G[1])
    least_G = np.where(highest_G > no_sign, highest_G, lowest_G)
    most_G = np.where(farthest_G > no_sign, lowest_G, farthest_G)

    rows_GC = np.zeros((len(starts), NUM_COLUMNS))
    rows_GC[:, Column.NUM_ELEMENTS] = bounds[1:] - starts
    if np.minimum.reduce(smallest_G) <= max(dead_magnitude, 0):
        doubled = np.left_shift(unsigned, 1)  # drops the sign
        if dead_magnitude > 0:
            rows_GC[:, Column.NUM_DEAD] = _count(doubled <= 2 * dead_magnitude, starts)
        if not smallest_G.all():
            rows_GC[:, Column.NUM_ZERO] = _count(doubled == 0, starts)
            doubled -= 1  # zero wraps around to the largest integer
            smallest_G = (np.minimum.reduceat(doubled, starts) >> 1) + 1
            np.minimum(smallest_G, layout.infinity, out=smallest_G)  # where all elements are zero
    if dead_magnitude == 0:
        rows_GC[:, Column.NUM_DEAD] = rows_GC[:, Column.NUM_ZERO]
    extremes_3G = layout.values(np.array([least_G, most_G, smallest_G]))
    rows_GC[:, Column.GRAD_MIN], rows_GC[:, Column.GRAD_MAX], rows_GC[:, Column.GRAD_ABS_MIN_NONZERO] = extremes_3G
    if not _is_large(values, starts) or not (_SMALL <= largest <= _LARGE or largest == 0):
        values = values.astype(np.float64, copy=False)
    rows_GC[:, Column.GRAD_SUM] = _sum(values, starts)
    rows_GC[:, Column.GRAD_SUM_SQ] = _sum(values, starts, of_squares=True)
    return rows_GC, _codes(unsigned, bounds, rows_GC[:, Column.NUM_ZERO], layout) if count_codes else None


def _measure_finite(
    values: Floats, bounds: IntArray, dead_magnitude: int, counted: FloatBits | None
) -> tuple[FloatArray, IntArray | None]:
    """Measure pieces without their NaN and Inf, and count these; `counted` is the layout of codes to count."""
    finite, starts = np.isfinite(values), bounds[:-1]
    num_finite_G = _count(finite, starts)
    left = np.flatnonzero(num_finite_G)  # the pieces of which anything is left
    rows_GC = np.tile(IDENTITY_C, (len(starts), 1))
    codes_GK = None if counted is None else np.zeros((len(starts), counted.num_codes), dtype=np.int64)
    if left.size:
        bounds_left = np.cumsum([0, *num_finite_G[left]])
        rows_GC[left], codes = measure_pieces(
            values[finite], bounds_left, dead_magnitude, count_codes=counted is not None
        )
        if codes_GK is not None and codes is not None:
            codes_GK[left] = codes
    rows_GC[:, Column.NUM_ELEMENTS] = bounds[1:] - starts
    rows_GC[:, Column.NUM_NAN] = _count(np.isnan(values), starts)
    rows_GC[:, Column.NUM_INF] = bounds[1:] - starts - num_finite_G - rows_GC[:, Column.NUM_NAN]
    return rows_GC, codes_GK


def _codes(unsigned: npt.NDArray[Any], bounds: IntArray, num_zero_G: FloatArray, layout: FloatBits) -> IntArray:
    """Count the codes of each piece's elements other than 0: [G, K]."""
    num_pieces, num_codes = len(num_zero_G), layout.num_codes
    codes = np.right_shift(unsigned, layout.code_shift).view(layout.signed)
    if num_pieces > 1:
        codes += np.repeat(np.arange(num_pieces, dtype=layout.signed) * num_codes, np.diff(bounds))
    # torch's bincount is twice as fast as numpy's, and releases the GIL.
    counts = torch.bincount(torch.from_numpy(codes), minlength=num_pieces * num_codes)
    codes_GK: IntArray = counts.numpy().reshape(num_pieces, num_codes)
    if num_zero_G.any():  # zeros share two codes with subnormal values
        num_positive_G = _count(unsigned == 0, bounds[:-1])
        codes_GK[:, 0] -= num_positive_G
        codes_GK[:, num_codes // 2] -= num_zero_G.astype(np.int64) - num_positive_G
    return codes_GK


def sum_sq_pieces(values: Floats, starts: IntArray) -> FloatArray:
    """Return each piece's sum of squares of finite elements, number of NaN and number of Inf: [G, 3]."""
    sums_G3 = np.zeros((len(starts), 3))
    if _is_large(values, starts):
        sums_G3[0, 0] = total_sq = _sum(values, starts, of_squares=True)[0]
        if values.size * _SMALL_SQ < total_sq < np.inf or (total_sq == 0 and not values.any()):
            return sums_G3
    wide = values.astype(np.float64, copy=False)
    sums_G3[:, 0] = _sum(wide, starts, of_squares=True)
    if not np.isfinite(sums_G3[:, 0]).all():
        sums_G3[:, 0] = _sum(np.where(np.isfinite(wide), wide, 0.0), starts, of_squares=True)
        sums_G3[:, 1], sums_G3[:, 2] = _count(np.isnan(wide), starts), _count(np.isinf(wide), starts)
    return sums_G3


def _is_large(values: Floats, starts: IntArray) -> bool:
    """Whether this is a piece of a large tensor. A small tensor has the same sums alone as together with others."""
    return len(starts) == 1 and values.size >= SMALL


def _count(found: npt.NDArray[np.bool_], starts: IntArray) -> IntArray:
    if len(starts) == 1:  # reduceat takes ten times as long
        return np.array([np.count_nonzero(found)])
    return np.add.reduceat(found, starts, dtype=np.uint32).astype(np.int64)  # half of the time of int64


def _sum(values: Floats, starts: IntArray, *, of_squares: bool = False) -> FloatArray:
    """Sum each piece: [G]. A large piece is summed in segments, within a segment in its dtype, between in float64.

    The sums of segments are written as products of vectors, for which numpy uses vector instructions.
    """
    if not _is_large(values, starts):
        return np.add.reduceat(values * values if of_squares else values, starts)
    whole = values.size - values.size % SEGMENT
    segments, rest = values[:whole].reshape(-1, 1, SEGMENT), values[whole:].astype(np.float64)
    columns = segments.transpose(0, 2, 1) if of_squares else np.ones((SEGMENT, 1), dtype=values.dtype)
    total = np.matmul(segments, columns).sum(dtype=np.float64)
    return np.array([total + (rest @ rest if of_squares else rest.sum())])
