"""Statistics on the CPU: few passes over chunks that stay in the cache.

Extremes, zeros and NaN are read from the float's bits as integers (float_bits.py): exact for every value. Sums run in
float32 where no square can overflow or vanish and in float64 elsewhere. Chunks with NaN or Inf are measured again
without them.
Tensors too small to be worth a pass each are measured together (cpu_small.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from .columns import (
    AS_LEFT,
    IDENTITY_C,
    MAX_COLUMNS,
    MIN_COLUMNS,
    NUM_BINS,
    NUM_COLUMNS,
    RECEIVED_COLUMNS,
    SCALE_POWER,
    ZERO_BIN,
    Column,
    FloatArray,
    IntArray,
)
from .cpu_chunks import CHUNK, CHUNK_COLUMNS, ChunkReader, ChunkRow, sum_sq_chunk
from .cpu_small import SMALL, batches, concatenated, measure_batch, sum_sq_batch
from .elements import elements_of
from .float_bits import FLOAT32, FLOAT64, FloatBits, bins_from_codes, largest_magnitude_within

# N tensors, C columns, B histogram bins, K codes, M chunks


@np.errstate(over="ignore", invalid="ignore")  # what overflows in float32 is seen in the result and read in float64
def measure(
    gradients: Sequence[Tensor],
    parameters: Sequence[Tensor] | None,
    *,
    dead_threshold: float,
    inverse_scale: Tensor | None,
    histogram: bool,
) -> tuple[Tensor, Tensor | None]:
    """Measure each gradient: rows [N, C] in float64 and, if asked for, the histogram [N, B] in int64."""
    elements, num_implicit_zeros, exponent = scaled_elements(gradients, inverse_scale)
    rows_NC = np.empty((len(gradients), NUM_COLUMNS))
    rows_NC[:] = IDENTITY_C
    histogram_NB = np.zeros((len(gradients), NUM_BINS), dtype=np.int64) if histogram else None
    for layout in {_layout_of(e) for e in elements}:
        dead_magnitude = largest_magnitude_within(math.ldexp(dead_threshold, -exponent), layout)
        codes_NK = np.zeros((len(elements), layout.num_codes), dtype=np.int64) if histogram else None
        _read(elements, layout, dead_magnitude, rows_NC, codes_NK)
        if histogram_NB is not None and codes_NK is not None:
            histogram_NB += bins_from_codes(codes_NK, layout, exponent)

    add_implicit_zeros(rows_NC, num_implicit_zeros)
    if exponent:
        for column, power in SCALE_POWER.items():
            rows_NC[:, column] *= math.ldexp(1.0, exponent * power)
    rows_NC[:, RECEIVED_COLUMNS] = rows_NC[:, AS_LEFT]
    if histogram_NB is not None:
        histogram_NB[:, ZERO_BIN] = rows_NC[:, Column.NUM_ZERO]
    rows_NC[:, Column.PARAM_SUM_SQ :] = np.nan
    if parameters is not None:
        sums_N3 = _sums_of_squares([elements_of(p)[0] for p in parameters])
        rows_NC[:, Column.PARAM_SUM_SQ], rows_NC[:, Column.PARAM_NUM_NONFINITE] = sums_N3[:, 0], sums_N3[:, 1:].sum(1)
    return torch.from_numpy(rows_NC), None if histogram_NB is None else torch.from_numpy(histogram_NB)


@np.errstate(over="ignore", invalid="ignore")
def measure_received(gradients: Sequence[Tensor], *, inverse_scale: Tensor | None) -> Tensor:
    """Sum the squares of each gradient's finite elements, and count NaN and Inf: [N, 3]."""
    elements, _, exponent = scaled_elements(gradients, inverse_scale)
    sums_N3 = _sums_of_squares(elements)
    sums_N3[:, 0] *= math.ldexp(1.0, 2 * exponent)
    return torch.from_numpy(sums_N3)


def scaled_elements(gradients: Sequence[Tensor], inverse_scale: Tensor | None) -> tuple[list[Tensor], list[int], int]:
    """The elements, their implicit zeros, and the power of two with which the elements are still to be multiplied."""
    pairs = [elements_of(gradient) for gradient in gradients]
    elements, num_implicit_zeros = [p[0] for p in pairs], [p[1] for p in pairs]
    if inverse_scale is None:
        return elements, num_implicit_zeros, 0
    scale = float(inverse_scale)
    mantissa, exponent = math.frexp(scale)
    if mantissa == 0.5 and -400 < exponent <= 1:
        # A power of two only moves exponents: the bits are read as they are, and sums and bins are moved afterwards.
        return elements, num_implicit_zeros, exponent - 1
    return [e.to(torch.float64) * scale for e in elements], num_implicit_zeros, 0


def _layout_of(elements: Tensor) -> FloatBits:
    return FLOAT64 if elements.dtype is torch.float64 else FLOAT32


def _read(
    elements: Sequence[Tensor],
    layout: FloatBits,
    dead_magnitude: int,
    rows_NC: FloatArray,
    codes_NK: IntArray | None,
) -> None:
    """Fill in the rows and the code counts of the non-empty tensors of one layout."""
    sizes = [e.numel() if _layout_of(e) is layout else 0 for e in elements]
    large = [i for i, size in enumerate(sizes) if size >= SMALL]
    for batch in batches(elements, sizes):
        values, starts = concatenated([elements[i] for i in batch])
        rows_GC, codes_GK, nonfinite_G = measure_batch(values, starts, layout, dead_magnitude, codes_NK is not None)
        rows_NC[batch] = rows_GC
        if codes_NK is not None and codes_GK is not None:
            codes_NK[batch] = codes_GK
        if nonfinite_G.any():
            large += [batch[g] for g in np.flatnonzero(nonfinite_G)]
    if not large:
        return
    reader = ChunkReader(layout, dead_magnitude)
    parts: list[ChunkRow] = []
    starts_of_large = []
    for index in large:
        if codes_NK is not None:
            codes_NK[index] = 0
            reader.counts = codes_NK[index]
        starts_of_large.append(len(parts))
        parts += [reader.read(chunk) for chunk in _chunks(elements[index])]
    _merge_parts(np.array(parts), np.array(starts_of_large), large, rows_NC)


def _merge_parts(parts_MC: FloatArray, starts: IntArray, indices: list[int], rows_NC: FloatArray) -> None:
    """Merge the chunks of each large tensor into its row, as columns.py says for every column."""
    for place, column in enumerate(CHUNK_COLUMNS):
        merge: np.ufunc = np.add
        if column in MIN_COLUMNS:
            merge = np.minimum
        elif column in MAX_COLUMNS:
            merge = np.maximum
        rows_NC[indices, column] = merge.reduceat(parts_MC[:, place], starts)


def _sums_of_squares(elements: Sequence[Tensor]) -> FloatArray:
    """Sum of squares of the finite elements, number of NaN and number of Inf: [N, 3]."""
    sums_N3 = np.zeros((len(elements), 3))
    sizes = [e.numel() for e in elements]
    for batch in batches(elements, sizes):
        values, starts = concatenated([elements[i] for i in batch])
        sums_N3[batch] = np.stack(sum_sq_batch(values, starts), axis=1)
    for index, size in enumerate(sizes):
        if size >= SMALL:
            sums_N3[index] = np.sum([sum_sq_chunk(chunk) for chunk in _chunks(elements[index])], axis=0)
    return sums_N3


def _chunks(elements: Tensor) -> Iterator[npt.NDArray[Any]]:
    """Chunks of a non-empty tensor in a dtype that numpy knows; each is valid until the next one is taken."""
    if elements.dtype in (torch.float32, torch.float64):
        values = elements.numpy()
        for start in range(0, values.size, CHUNK):
            yield values[start : start + CHUNK]
        return
    widened = torch.empty(CHUNK, dtype=torch.float32, device="cpu")
    for start in range(0, elements.numel(), CHUNK):
        piece = elements[start : start + CHUNK]
        yield widened[: piece.numel()].copy_(piece).numpy()


def add_implicit_zeros(rows_NC: FloatArray, num_implicit_zeros: Sequence[int]) -> None:
    """Count the zeros that a sparse gradient does not store."""
    counts_N = np.array(num_implicit_zeros)
    if not counts_N.any():
        return
    some = counts_N > 0
    for column in (Column.NUM_ELEMENTS, Column.NUM_ZERO, Column.NUM_DEAD):
        rows_NC[:, column] += counts_N
    rows_NC[some, Column.GRAD_MIN] = np.minimum(rows_NC[some, Column.GRAD_MIN], 0.0)
    rows_NC[some, Column.GRAD_MAX] = np.maximum(rows_NC[some, Column.GRAD_MAX], 0.0)
