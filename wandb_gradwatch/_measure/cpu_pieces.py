"""The statistics of pieces of tensors on the CPU: each pass of numpy reads all pieces of a batch, one after the other.

A batch is one piece of a large tensor, or many small tensors, for which a call each would cost more than the reading.
"""

from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from .columns import IDENTITY_C, NUM_BINS, NUM_COLUMNS, ZERO_BIN, BoolArray, Column, FloatArray, IntArray
from .float_bits import FLOAT32, FLOAT64, FloatBits, bin_of_code, largest_magnitude_within

# G pieces of one batch, C columns, B histogram bins, K codes (float_bits.py), E elements of one batch

PIECE: Final = 1 << 19  # most elements: two megabytes of float32, which fit in the second- or third-level cache
SMALL: Final = 1 << 13  # elements; smaller tensors are measured together
SEGMENT: Final = 512  # elements summed in float32, before float64 sums the segments: accurate to 2e-7 for constants

# A large piece's squares are summed in float32 if their sum is finite and more than this per element: the squares below
# 2**-126, which lose digits or vanish, are less than 2**-28 of it.
_SMALL_SQ: Final = 2.0**-98

Floats = npt.NDArray[Any]  # float32 or float64


def measure_pieces(
    values: Floats, bounds: IntArray, threshold: float | None, exponent: int | None
) -> tuple[FloatArray, IntArray | None]:
    """Measure every piece.

    Args:
        values: the elements of all pieces: [E].
        bounds: where each piece begins and the last one ends, strictly ascending: [G + 1].
        threshold: the dead threshold for the elements as they are; None to fill only the received columns.
        exponent: count a histogram of the elements multiplied by 2**exponent; None for no histogram.

    Returns:
        The rows [G, C], without numbers of elements and parameter columns, and the histogram [G, B].
    """
    whole, starts = threshold is not None, bounds[:-1]
    sum_G, sum_sq_G = _sums(values, starts, whole)
    total_sq = sum(sum_sq_G.tolist())
    if not total_sq < np.inf:
        finite = np.isfinite(values)
        if not finite.all():  # otherwise, finite values have squares that overflow
            return _measure_finite(values, finite, bounds, threshold, exponent)
    layout = FLOAT32 if values.dtype == FLOAT32.float_dtype else FLOAT64
    unsigned, no_sign = values.view(layout.unsigned), layout.sign - 1
    in_range = values.size * _SMALL_SQ < total_sq < np.inf or not _is_large(values, starts)
    # Two times as fast as values.any(). As a Python number, because NumPy 1 combines no uint64 with one.
    if not in_range and (total_sq or int(np.bitwise_or.reduce(unsigned)) & no_sign):
        sum_G, sum_sq_G = _sums(values.astype(np.float64, copy=False), starts, whole)
    rows_GC = np.zeros((len(starts), NUM_COLUMNS))
    rows_GC[:, Column.RECEIVED_SUM_SQ] = sum_sq_G
    if threshold is None:
        return rows_GC, None
    rows_GC[:, Column.GRAD_SUM], rows_GC[:, Column.GRAD_SUM_SQ] = sum_G, sum_sq_G

    signed = values.view(layout.signed)
    # Positive floats sort like integers, negative ones in reverse: for each sign, the smallest and the largest integer
    # (signed or unsigned) are the elements nearest to zero and farthest from it.
    lowest_G, highest_G = np.minimum.reduceat(unsigned, starts), np.maximum.reduceat(unsigned, starts)
    nearest_G = np.minimum.reduceat(signed, starts).view(layout.unsigned)
    farthest_G = np.maximum.reduceat(signed, starts).view(layout.unsigned)
    least_G = np.where(highest_G > no_sign, highest_G, lowest_G)
    most_G = np.where(farthest_G > no_sign, lowest_G, farthest_G)
    smallest_G = np.minimum(np.bitwise_and(lowest_G, no_sign), np.bitwise_and(nearest_G, no_sign))
    smallest, dead_magnitude = min(smallest_G.tolist()), largest_magnitude_within(threshold, layout)
    if smallest <= max(dead_magnitude, 0):
        doubled = np.left_shift(unsigned, 1)  # drops the sign
        if dead_magnitude > 0:
            rows_GC[:, Column.NUM_DEAD] = _count(doubled <= 2 * dead_magnitude, starts)
        if smallest == 0:
            rows_GC[:, Column.NUM_ZERO] = _count(doubled == 0, starts)
            doubled -= 1  # zero wraps around to the largest integer
            smallest_G = (np.minimum.reduceat(doubled, starts) >> 1) + 1
            np.minimum(smallest_G, layout.infinity, out=smallest_G)  # where all elements are zero
    if dead_magnitude == 0:
        rows_GC[:, Column.NUM_DEAD] = rows_GC[:, Column.NUM_ZERO]
    extremes_3G = np.array([least_G, most_G, smallest_G])
    is_normal = min(smallest_G.tolist()) >> layout.mantissa_bits > 0
    extremes = extremes_3G.view(values.dtype) if is_normal else layout.values(extremes_3G)
    rows_GC[:, Column.GRAD_MIN], rows_GC[:, Column.GRAD_MAX], rows_GC[:, Column.GRAD_ABS_MIN_NONZERO] = extremes
    if exponent is None:
        return rows_GC, None
    return rows_GC, _histogram(unsigned, bounds, rows_GC[:, Column.NUM_ZERO], layout, exponent)


def _measure_finite(
    values: Floats, finite: BoolArray, bounds: IntArray, threshold: float | None, exponent: int | None
) -> tuple[FloatArray, IntArray | None]:
    """Measure pieces without their NaN and Inf, and count these."""
    starts = bounds[:-1]
    num_finite_G, num_nan_G = _count(finite, starts), _count(np.isnan(values), starts)
    left = np.flatnonzero(num_finite_G)  # the pieces of which anything is left
    rows_GC, histogram_GB = np.tile(IDENTITY_C, (len(starts), 1)), None
    if left.size:
        bounds_left = np.cumsum([0, *num_finite_G[left]])
        rows_GC[left], of_left = measure_pieces(values[finite], bounds_left, threshold, exponent)
        if of_left is not None:
            histogram_GB = np.zeros((len(starts), NUM_BINS), dtype=np.int64)
            histogram_GB[left] = of_left
    for nan, inf in ((Column.NUM_NAN, Column.NUM_INF), (Column.RECEIVED_NUM_NAN, Column.RECEIVED_NUM_INF)):
        rows_GC[:, nan], rows_GC[:, inf] = num_nan_G, bounds[1:] - starts - num_finite_G - num_nan_G
    return rows_GC, histogram_GB


def _histogram(
    unsigned: npt.NDArray[Any], bounds: IntArray, num_zero_G: FloatArray, layout: FloatBits, exponent: int
) -> IntArray:
    """Count each piece's elements, multiplied by 2**exponent, in the fixed bins: [G, B]."""
    num_pieces, bins_K = len(num_zero_G), bin_of_code(layout, exponent)
    codes = np.right_shift(unsigned, layout.code_shift).view(layout.signed)
    # torch's bincount is twice as fast as numpy's, and releases the GIL.
    if num_pieces == 1:
        counts_K = torch.bincount(torch.from_numpy(codes), minlength=layout.num_codes).numpy()
        histogram_GB = np.bincount(bins_K, counts_K, NUM_BINS)[None, :NUM_BINS].astype(np.int64)
    else:
        bins = bins_K[codes]
        bins += np.repeat(np.arange(num_pieces) * NUM_BINS, bounds[1:] - bounds[:-1])
        counts = torch.bincount(torch.from_numpy(bins), minlength=num_pieces * NUM_BINS)
        histogram_GB = counts.numpy().reshape(num_pieces, NUM_BINS)
    if num_zero_G.any():  # zeros share two codes with subnormal values
        num_positive_G = _count(unsigned == 0, bounds[:-1])
        histogram_GB[:, ZERO_BIN + 1] -= num_positive_G
        histogram_GB[:, ZERO_BIN - 1] -= num_zero_G.astype(np.int64) - num_positive_G
        histogram_GB[:, ZERO_BIN] = num_zero_G
    return histogram_GB


def _is_large(values: Floats, starts: IntArray) -> bool:
    """Whether this is a piece of a large tensor. A small tensor has the same sums alone as together with others."""
    return len(starts) == 1 and values.size >= SMALL


def _count(found: BoolArray, starts: IntArray) -> npt.NDArray[Any]:
    if len(starts) == 1:  # reduceat takes ten times as long
        return np.array([np.count_nonzero(found)])
    return np.add.reduceat(found, starts, dtype=np.uint16)  # holds any number below SMALL


def _sums(values: Floats, starts: IntArray, whole: bool) -> tuple[FloatArray | None, FloatArray]:
    """Sum each piece, if `whole`, and its squares: [G].

    A large piece is summed in segments, within a segment in its dtype, between in float64. The sums of segments are
    written as products of vectors, for which numpy uses vector instructions.
    """
    if not _is_large(values, starts):
        wide = values.astype(np.float64)
        sum_G = np.add.reduceat(wide, starts) if whole else None
        wide *= wide
        return sum_G, np.add.reduceat(wide, starts)
    end = values.size - values.size % SEGMENT
    segments, rest = values[:end].reshape(-1, 1, SEGMENT), values[end:].astype(np.float64)
    ones = np.ones((SEGMENT, 1), dtype=values.dtype)
    sum_G = np.array([np.matmul(segments, ones).sum(dtype=np.float64) + rest.sum()]) if whole else None
    squares = np.matmul(segments, segments.transpose(0, 2, 1))
    return sum_G, np.array([squares.sum(dtype=np.float64) + rest @ rest])
