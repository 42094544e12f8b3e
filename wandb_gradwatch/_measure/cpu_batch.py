"""The passes of numpy and torch that every statistic on the CPU is made of, over one batch of elements.

A batch is a buffer of one dtype that stays in the second-level cache: a chunk of a large tensor, or many small tensors
one after the other, because the calls, not the reading, are what a bias of 64 elements costs.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from .columns import IDENTITY_C, NUM_COLUMNS, Column, FloatArray, IntArray
from .float_bits import FLOAT32, FloatBits

# G tensors of one batch, C columns, K codes, E elements of one batch

BATCH: Final = 1 << 17  # elements: half a megabyte of float32, beside its scratch copy in the second-level cache
SMALL: Final = 1 << 13  # elements; a larger tensor is worth passes of its own
SEGMENT: Final = 512  # elements summed in float32 before float64 takes over: constant gradients stay right to 2e-7
_MAX_TENSORS: Final = 512  # bounds the code counts: 4 MB in float32

# Squares may be summed in float32 if the largest magnitude lies between these: BATCH * 2**110 does not overflow, and
# what BATCH squares below 2**-126 lose is less than 2**-28 of 2**-80.
_LARGE: Final = FLOAT32.bits_of(2.0**55)
_SMALL: Final = FLOAT32.bits_of(2.0**-40)
# The same for squares alone, where the largest magnitude is not known: a share of their number.
_SMALL_SQ: Final = 2.0**-98

Floats = npt.NDArray[Any]  # float32 or float64


def batches(elements: Sequence[Tensor]) -> Iterator[tuple[list[int], Floats, IntArray]]:
    """Cut large tensors into chunks and put small ones together.

    Yields:
        The indices of the tensors in the batch [G]; their elements [E], valid until the next batch is taken; and where
        each tensor's begin [G]. Empty tensors are in no batch, and the chunks of one tensor follow each other.
    """
    small: dict[torch.dtype, list[int]] = {}
    for index, tensor in enumerate(elements):
        if 0 < tensor.numel() < SMALL:
            small.setdefault(tensor.dtype, []).append(index)
    for of_dtype in small.values():
        batch: list[int] = []
        num_elements = 0
        for index in of_dtype:
            if num_elements + elements[index].numel() > BATCH or len(batch) == _MAX_TENSORS:
                yield _together(elements, batch)
                batch, num_elements = [], 0
            batch.append(index)
            num_elements += elements[index].numel()
        yield _together(elements, batch)
    widened = torch.empty(BATCH, dtype=torch.float32, device="cpu")
    for index, tensor in enumerate(elements):
        for start in range(0, tensor.numel() if tensor.numel() >= SMALL else 0, BATCH):
            chunk = tensor[start : start + BATCH]
            if chunk.element_size() < 4:
                chunk = widened[: chunk.numel()].copy_(chunk)
            yield [index], chunk.numpy(), _ONE


_ONE: Final = np.zeros(1, dtype=np.int64)  # where the only tensor of a batch begins


def _together(elements: Sequence[Tensor], batch: list[int]) -> tuple[list[int], Floats, IntArray]:
    values = torch.cat([elements[index] for index in batch])
    values = values if values.dtype is torch.float64 else values.to(torch.float32)
    ends = itertools.accumulate(elements[index].numel() for index in batch[:-1])
    return batch, values.numpy(), np.array([0, *ends])


def measure_batch(
    values: Floats, starts: IntArray, layout: FloatBits, dead_magnitude: int, *, count_codes: bool = False
) -> tuple[FloatArray, IntArray | None]:
    """Measure every tensor of a batch.

    Args:
        values: [E], not empty.
        starts: where each tensor begins: [G].
        layout: of the values.
        dead_magnitude: bits of the largest magnitude that counts as dead; -1 for none.
        count_codes: count the codes too.

    Returns:
        rows: [G, C] without the received and parameter columns.
        codes: [G, K] counts of the codes of all elements but zeros, if asked for.
    """
    sign = layout.unsigned.type(layout.sign)
    unsigned, signed = values.view(layout.unsigned), values.view(layout.signed)
    # Without a sign bit floats sort like integers, with one in reverse: the smallest and the largest integer of either
    # kind are the outermost and the innermost element on either side of zero.
    lowest, highest = np.minimum.reduceat(unsigned, starts), np.maximum.reduceat(unsigned, starts)
    has_positive, has_negative = lowest < sign, highest >= sign
    inner_positive, outer_positive, outer_negative, inner_negative = lowest, highest, highest & ~sign, highest
    if has_negative.any():
        outer_positive = np.maximum.reduceat(signed, starts).view(layout.unsigned)
        inner_negative = np.minimum.reduceat(signed, starts).view(layout.unsigned) & ~sign
    largest = np.where(has_positive, np.maximum(outer_positive, outer_negative * has_negative), outer_negative)
    smallest = np.where(has_negative, np.minimum(inner_negative, np.where(has_positive, lowest, sign)), lowest)

    sizes = np.diff(starts, append=values.size)
    rows_GC = np.zeros((len(starts), NUM_COLUMNS))
    rows_GC[:, Column.NUM_ELEMENTS] = sizes
    if smallest.min() <= max(dead_magnitude, 0):
        doubled = np.left_shift(unsigned, 1)  # drops the sign
        rows_GC[:, Column.NUM_ZERO] = num_dead = _count(doubled == 0, starts)
        if dead_magnitude > 0:
            num_dead = _count(doubled <= 2 * dead_magnitude, starts)
        rows_GC[:, Column.NUM_DEAD] = num_dead if dead_magnitude >= 0 else 0
        doubled -= 1  # zero wraps around to the largest integer, and the next line back
        smallest = (np.minimum.reduceat(doubled, starts) + 1) >> 1
    codes_GK = _codes(unsigned, starts, sizes, lowest, rows_GC[:, Column.NUM_ZERO], layout) if count_codes else None
    rows_GC[:, Column.GRAD_MIN] = np.where(has_negative, -layout.values(outer_negative), layout.values(inner_positive))
    rows_GC[:, Column.GRAD_MAX] = np.where(has_positive, layout.values(outer_positive), -layout.values(inner_negative))
    nothing = (smallest == 0) | (smallest >= layout.infinity)  # nothing but zeros, NaN and Inf
    rows_GC[:, Column.GRAD_ABS_MIN_NONZERO] = np.where(nothing, np.inf, layout.values(smallest))
    rows_GC[:, Column.GRAD_SUM], rows_GC[:, Column.GRAD_SUM_SQ] = _sums(values, starts, largest, layout)
    for place in np.flatnonzero(largest >= layout.infinity):
        _measure_finite_rest(values[starts[place] :][: sizes[place]], layout, rows_GC[place])
    return rows_GC, codes_GK


def _count(flags: npt.NDArray[np.bool_], starts: IntArray) -> Any:
    """How many are set of every tensor: [G], or their number where there is one tensor, which is quicker."""
    return np.count_nonzero(flags) if len(starts) == 1 else np.add.reduceat(flags, starts, dtype=np.int64)


def _codes(
    unsigned: npt.NDArray[Any],
    starts: IntArray,
    sizes: IntArray,
    lowest: npt.NDArray[Any],
    num_zero: FloatArray,
    layout: FloatBits,
) -> IntArray:
    codes = np.right_shift(unsigned, layout.code_shift).view(layout.signed)
    if len(sizes) > 1:
        codes += np.repeat(np.arange(len(sizes), dtype=layout.signed) * layout.num_codes, sizes)
    counts = torch.bincount(torch.from_numpy(codes), minlength=len(sizes) * layout.num_codes).numpy()
    codes_GK: IntArray = counts.reshape(len(sizes), layout.num_codes)
    if num_zero.any():  # zeros share their codes with subnormal values
        num_positive = _count(unsigned == 0, starts) if not lowest.all() else 0
        codes_GK[:, 0] -= num_positive
        codes_GK[:, layout.num_codes // 2] -= num_zero.astype(np.int64) - num_positive
    return codes_GK


def _sums(values: Floats, starts: IntArray, largest: npt.NDArray[Any], layout: FloatBits) -> tuple[Any, Any]:
    """Sums and sums of squares of every tensor; of one that is not finite they mean nothing."""
    if values.size < SMALL or len(starts) > 1:
        wide = values.astype(np.float64, copy=False)
        return np.add.reduceat(wide, starts), np.add.reduceat(wide * wide, starts)
    if largest[0] == 0:
        return 0.0, 0.0
    if layout is FLOAT32 and not _SMALL <= largest[0] <= _LARGE:
        values = values.astype(np.float64)
    return float(torch.from_numpy(values).sum()), _dot(values)


def _measure_finite_rest(values: Floats, layout: FloatBits, row_C: FloatArray) -> None:
    """Correct the row of a tensor that is not finite."""
    finite = values[np.isfinite(values)]
    row_C[Column.NUM_NAN] = np.count_nonzero(np.isnan(values))
    row_C[Column.NUM_INF] = values.size - finite.size - row_C[Column.NUM_NAN]
    rest_C = measure_batch(finite, _ONE, layout, -1)[0][0] if finite.size else IDENTITY_C
    row_C[Column.GRAD_SUM : Column.RECEIVED_SUM_SQ] = rest_C[Column.GRAD_SUM : Column.RECEIVED_SUM_SQ]


def sum_sq_batch(values: Floats, starts: IntArray) -> FloatArray:
    """Sum of squares of every tensor's finite elements, number of NaN and number of Inf: [G, 3]."""
    if values.size >= SMALL and len(starts) == 1:
        total_sq = _dot(values)
        if values.size * _SMALL_SQ < total_sq < np.inf:
            return np.array([[total_sq, 0, 0]])
    wide = values.astype(np.float64, copy=False)
    finite = np.isfinite(wide)
    num_nan = num_inf = np.zeros(len(starts), dtype=np.int64)
    if not finite.all():
        num_nan = np.add.reduceat(np.isnan(wide), starts, dtype=np.int64)
        num_inf = np.add.reduceat(np.isinf(wide), starts, dtype=np.int64)
        wide = np.where(finite, wide, 0.0)
    return np.stack([np.add.reduceat(wide * wide, starts), num_nan, num_inf], axis=1)


def _dot(values: Floats) -> float:
    """Sum of squares in segments: float32 within one (if that is the dtype), float64 between them."""
    whole = values.size - values.size % SEGMENT
    rest = values[whole:].astype(np.float64)
    total_sq = float(np.dot(rest, rest))
    if whole:
        segments = values[:whole].reshape(-1, 1, SEGMENT)
        squares = np.matmul(segments, segments.transpose(0, 2, 1))
        total_sq += float(squares.sum(dtype=np.float64))
    return total_sq
