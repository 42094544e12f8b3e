"""Statistics on the CPU with torch and numpy: few passes over chunks that stay in the cache.

Extremes, zeros and NaN are found from the float's bits as integers (float_bits.py), which is exact for every value.
Sums run in float32 if no square can overflow or vanish, otherwise in float64. Chunks with NaN or Inf are measured again
without them. Small tensors are measured together (cpu_small.py), because a pass for each would cost too much.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from typing import Any, Final

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
from .cpu_chunks import CHUNK, CHUNK_COLUMNS, ChunkReader, ChunkRow, Floats, sum_sq_chunk
from .cpu_small import SMALL, batches, concatenated, measure_batch, sum_sq_batch
from .elements import Measurement, Scale, Tensors, add_implicit_zeros, readable
from .float_bits import FLOAT32, FLOAT64, FloatBits, bins_from_codes, largest_magnitude_within
from .thread_pool import THREAD_POOL

# N tensors, C columns, B histogram bins, K codes, M chunks

_SHARED_FROM: Final = 8  # chunks; with fewer, one thread is done before another has woken up

# Overflow in float32 is detected in the result, and the chunk is read again in float64.
_QUIET: Final[Any] = {"over": "ignore", "invalid": "ignore"}


@np.errstate(**_QUIET)
def measure(
    gradients: Tensors, parameters: Tensors | None, *, dead_threshold: float, inverse_scale: Scale, histogram: bool
) -> Measurement:
    """Measure each gradient: rows [N, C] in float64; with `histogram` also the histogram [N, B] in int64."""
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

    if histogram_NB is not None:
        histogram_NB[:, ZERO_BIN] = rows_NC[:, Column.NUM_ZERO]
    rows_NC[:, RECEIVED_COLUMNS] = rows_NC[:, AS_LEFT]
    rows_NC[:, Column.PARAM_SUM_SQ :] = np.nan
    if parameters is not None:
        sums_N3 = _sums_of_squares(readable(parameters, "cpu")[0])
        rows_NC[:, Column.PARAM_SUM_SQ], rows_NC[:, Column.PARAM_NUM_NONFINITE] = sums_N3[:, 0], sums_N3[:, 1:].sum(1)
    return of_gradients(rows_NC, histogram_NB, num_implicit_zeros, exponent)


def of_gradients(
    rows_NC: FloatArray, histogram_NB: IntArray | None, num_implicit_zeros: Sequence[int], exponent: int
) -> Measurement:
    """Turn the statistics of `scaled_elements` into those of the gradients, in place."""
    counts = None if histogram_NB is None else torch.from_numpy(histogram_NB)
    measured = Measurement(torch.from_numpy(rows_NC), counts)
    add_implicit_zeros(*measured, num_implicit_zeros)
    if exponent:
        for column, power in SCALE_POWER.items():
            rows_NC[:, column] *= math.ldexp(1.0, exponent * power)
        rows_NC[:, Column.RECEIVED_SUM_SQ] = rows_NC[:, Column.GRAD_SUM_SQ]
    return measured


@np.errstate(**_QUIET)
def measure_received(gradients: Tensors, *, inverse_scale: Scale) -> Tensor:
    """Sum the squares of each gradient's finite elements, and count NaN and Inf: [N, 3]."""
    elements, _, exponent = scaled_elements(gradients, inverse_scale)
    sums_N3 = _sums_of_squares(elements)
    sums_N3[:, 0] *= math.ldexp(1.0, 2 * exponent)
    return torch.from_numpy(sums_N3)


def scaled_elements(
    gradients: Sequence[Tensor], inverse_scale: Tensor | None
) -> tuple[Sequence[Tensor], Sequence[int], int]:
    """Return tensors whose memory holds the elements, implicit zeros, and n of a factor 2**n still to be applied."""
    elements, num_implicit_zeros = readable(gradients, "cpu")
    if inverse_scale is None:
        return elements, num_implicit_zeros, 0
    scale = float(inverse_scale)
    mantissa, exponent = math.frexp(scale)
    if mantissa == 0.5 and -400 < exponent <= 1:
        # A power of two only shifts exponents: the bits are read unscaled; sums and bins are shifted afterwards.
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
    """Fill in the rows and the code counts of the non-empty tensors with this layout."""
    sizes = [e.numel() if _layout_of(e) is layout else 0 for e in elements]
    large = [i for i, size in enumerate(sizes) if size >= SMALL]
    for batch in batches(elements, sizes):
        values, bounds = concatenated([elements[i] for i in batch])
        rows_GC, codes_GK, nonfinite_G = measure_batch(values, bounds, layout, dead_magnitude, codes_NK is not None)
        rows_NC[batch] = rows_GC
        if codes_NK is not None and codes_GK is not None:
            codes_NK[batch] = codes_GK
        if nonfinite_G.any():
            large += [batch[g] for g in np.flatnonzero(nonfinite_G)]
    if not large:
        return
    reader, lock = ChunkReader(layout, dead_magnitude, counts_codes=codes_NK is not None), threading.Lock()

    def read(index: int, chunk: Floats) -> ChunkRow:
        row, codes_K = reader.read(chunk)
        if codes_NK is not None:
            with lock:
                codes_NK[index] += codes_K
        return row

    if codes_NK is not None:
        codes_NK[large] = 0
    firsts, parts = _each_chunk(elements, large, read)
    for place, column in enumerate(CHUNK_COLUMNS):  # chunks merge as defined in columns.py
        merge = np.minimum if column in MIN_COLUMNS else np.maximum if column in MAX_COLUMNS else np.add
        rows_NC[large, column] = merge.reduceat(parts[:, place], firsts)


def _sums_of_squares(elements: Sequence[Tensor]) -> FloatArray:
    """Return the sum of squares of the finite elements, the number of NaN and the number of Inf: [N, 3]."""
    sums_N3 = np.zeros((len(elements), 3))
    sizes = [e.numel() for e in elements]
    for batch in batches(elements, sizes):
        values, bounds = concatenated([elements[i] for i in batch])
        sums_N3[batch] = np.stack(sum_sq_batch(values, bounds[:-1]), axis=1)
    if large := [index for index, size in enumerate(sizes) if size >= SMALL]:
        firsts, parts = _each_chunk(elements, large, lambda _, chunk: sum_sq_chunk(chunk))
        sums_N3[large] = np.add.reduceat(parts, firsts)
    return sums_N3


def _each_chunk(
    elements: Sequence[Tensor], large: Sequence[int], read: Callable[[int, Floats], ChunkRow]
) -> tuple[list[int], FloatArray]:
    """Read these tensors in chunks; return the index of each tensor's first chunk, and all results [M, any]."""
    firsts: list[int] = []
    chunks: list[tuple[int, Floats]] = []
    for index in large:
        firsts.append(len(chunks))
        memory = _memory(elements[index])
        chunks += [(index, memory[begin : begin + CHUNK]) for begin in range(0, memory.size, CHUNK)]
    found: list[ChunkRow] = [()] * len(chunks)

    def read_chunk(number: int) -> None:
        index, chunk = chunks[number]
        with np.errstate(**_QUIET):  # numpy's error state is per thread
            found[number] = read(index, _floats(chunk))

    num_threads = torch.get_num_threads() if len(chunks) >= _SHARED_FROM else 1
    THREAD_POOL.each(range(len(chunks)), read_chunk, num_threads)
    return firsts, np.array(found)


def _memory(elements: Tensor) -> npt.NDArray[Any]:
    """Return the elements as stored; bfloat16, which numpy does not have, as uint16."""
    flat = elements.view(-1)
    memory: npt.NDArray[Any] = (flat.view(torch.uint16) if flat.dtype is torch.bfloat16 else flat).numpy()
    return memory


def _floats(chunk: npt.NDArray[Any]) -> Floats:
    if chunk.dtype == np.uint16:  # bfloat16 is the upper half of a float32
        chunk = np.left_shift(chunk, 16, dtype=np.uint32).view(np.float32)
    return chunk.astype(np.float32) if chunk.dtype == np.float16 else chunk
