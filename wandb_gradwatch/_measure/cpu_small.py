"""Small tensors on the CPU: concatenated into one buffer and measured together, one segment each.

For a bias of 64 elements the calls cost more than the reading. Segments with NaN or Inf are left to the caller.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch._utils import _flatten_dense_tensors

from .columns import NUM_COLUMNS, Column, FloatArray, IntArray
from .float_bits import FloatBits

# G tensors of one batch, C columns, K codes, E elements of one batch

SMALL: Final = 1 << 13  # elements; larger tensors are measured separately
_MAX_ELEMENTS: Final = 1 << 17
_MAX_TENSORS: Final = 512  # limits the code counts to 4 MB for float32


def batches(elements: Sequence[Tensor], sizes: Sequence[int]) -> Iterator[list[int]]:
    """Group the small, non-empty tensors into batches of one dtype; yield the indices of each batch."""
    by_dtype: dict[torch.dtype, list[int]] = {}
    for index, size in enumerate(sizes):
        if 0 < size < SMALL:
            by_dtype.setdefault(elements[index].dtype, []).append(index)
    for same_dtype in by_dtype.values():
        batch: list[int] = []
        num_elements = 0
        for index in same_dtype:
            if num_elements + sizes[index] > _MAX_ELEMENTS or len(batch) == _MAX_TENSORS:
                yield batch
                batch, num_elements = [], 0
            batch.append(index)
            num_elements += sizes[index]
        yield batch


def concatenated(elements: Sequence[Tensor]) -> tuple[npt.NDArray[Any], IntArray]:
    """Concatenate the elements of non-empty tensors: [E]; return them with the bounds of each tensor: [G + 1]."""
    values: Tensor = _flatten_dense_tensors(elements)  # type: ignore[no-untyped-call]
    values = values if values.dtype is torch.float64 else values.to(torch.float32)
    return values.numpy(), np.array([0, *itertools.accumulate(map(Tensor.numel, elements))])


def measure_batch(
    values: npt.NDArray[Any], bounds: IntArray, layout: FloatBits, dead_magnitude: int, count_codes: bool
) -> tuple[FloatArray, IntArray | None, npt.NDArray[np.bool_]]:
    """Measure every segment.

    Returns:
        rows: [G, C].
        codes: [G, K] counts of the codes of non-zero elements, if `count_codes`.
        nonfinite: [G] True for segments with NaN or Inf, whose rows and codes are invalid.
    """
    starts, sizes = bounds[:-1], bounds[1:] - bounds[:-1]
    rows_GC = np.zeros((len(starts), NUM_COLUMNS))
    unsigned, signed, most = values.view(layout.unsigned), values.view(layout.signed), layout.sign - 1

    ordered = signed >> layout.sign_shift  # integers in the order of the floats: negative floats get all bits inverted
    ordered &= most
    ordered ^= signed
    extremes_2G = np.array([np.minimum.reduceat(ordered, starts), np.maximum.reduceat(ordered, starts)])
    nonfinite_G = (extremes_2G[0] <= ~layout.infinity) | (extremes_2G[1] >= layout.infinity)

    less = unsigned & most  # the magnitude; the next line makes it one less, so that zero wraps to the largest integer
    less -= 1
    num_zero_G = np.add.reduceat(less >> layout.sign_shift, starts, dtype=layout.unsigned)
    smallest_G = np.minimum.reduceat(less, starts) + 1  # wraps back to zero if the segment has only zeros
    rows_GC[:, Column.NUM_ZERO] = num_zero_G
    if dead_magnitude >= 0:
        rows_GC[:, Column.NUM_DEAD] = num_zero_G
    if dead_magnitude > 0:
        rows_GC[:, Column.NUM_DEAD] += np.add.reduceat(less < dead_magnitude, starts, dtype=np.int64)

    magnitudes = np.where(extremes_2G < 0, ~extremes_2G, extremes_2G)
    found_3G = layout.values(np.concatenate([magnitudes.view(layout.unsigned), smallest_G[None]]))
    rows_GC[:, Column.GRAD_MIN], rows_GC[:, Column.GRAD_MAX] = np.where(extremes_2G < 0, -found_3G[:2], found_3G[:2])
    rows_GC[:, Column.GRAD_ABS_MIN_NONZERO] = np.where(smallest_G == 0, np.inf, found_3G[2])

    wide = values.astype(np.float64, copy=False)
    rows_GC[:, Column.NUM_ELEMENTS] = sizes
    rows_GC[:, Column.GRAD_SUM] = np.add.reduceat(wide, starts)
    rows_GC[:, Column.GRAD_SUM_SQ] = np.add.reduceat(wide * wide, starts)
    codes_GK = _codes(unsigned, sizes, layout) if count_codes else None
    return rows_GC, codes_GK, nonfinite_G


def _codes(unsigned: npt.NDArray[Any], sizes: IntArray, layout: FloatBits) -> IntArray:
    codes = np.right_shift(unsigned, layout.code_shift).astype(np.int64)
    codes += np.repeat(np.arange(sizes.size) * layout.num_codes, sizes)
    # Zeros share their codes with subnormal values, so they get the code of NaN, which has no bin.
    codes[np.left_shift(unsigned, 1) == 0] |= layout.num_codes - 1
    counts = torch.bincount(torch.from_numpy(codes), minlength=sizes.size * layout.num_codes)
    return counts.numpy().reshape(sizes.size, layout.num_codes)


def sum_sq_batch(values: npt.NDArray[Any], starts: IntArray) -> tuple[FloatArray, IntArray, IntArray]:
    """Return each segment's sum of squares of finite elements, number of NaN and number of Inf: three [G]."""
    wide = values.astype(np.float64, copy=False)
    sum_sq_G, num_nan = np.add.reduceat(wide * wide, starts), np.zeros(len(starts), dtype=np.int64)
    if np.isfinite(sum_sq_G).all():  # then every element is finite
        return sum_sq_G, num_nan, num_nan
    num_nan = np.add.reduceat(np.isnan(wide), starts, dtype=np.int64)
    num_inf = np.add.reduceat(np.isinf(wide), starts, dtype=np.int64)
    wide = np.where(np.isfinite(wide), wide, 0.0)
    return np.add.reduceat(wide * wide, starts), num_nan, num_inf
