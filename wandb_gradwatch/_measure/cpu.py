"""Statistics on the CPU with torch and numpy, for everybody without numba, and until its loops are compiled.

Few passes over pieces of tensors that stay in the cache (cpu_pieces.py). The loops need a fraction of the time,
plain torch many times as much: `python -m benchmarks.cpu_rows --backends cpu compiled torch`.

Extremes, zeros and NaN are found from the float's bits as integers (float_bits.py), which is exact for every value.
Sums run in float32 if no square can overflow or vanish, otherwise in float64. Pieces with NaN or Inf are measured again
without them. The rows of a tensor's pieces merge.
"""

import itertools
import math
from collections import defaultdict
from collections.abc import Sequence
from functools import lru_cache
from operator import attrgetter
from typing import Final, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch._utils import _flatten_dense_tensors

from .columns import (
    IDENTITY_C,
    NUM_BINS,
    NUM_COLUMNS,
    PARAMETER_COLUMNS,
    RECEIVED_COLUMNS,
    SCALE_POWER,
    Column,
    FloatArray,
    IntArray,
    merge_adjacent_rows,
)
from .cpu_pieces import PIECE, SMALL, Floats, measure_pieces
from .elements import Measurement, Scale, Tensors, add_implicit_zeros, readable
from .thread_pool import for_each

# N tensors, M pieces of them, C columns, B histogram bins

_MAX_TOGETHER: Final = 128  # tensors; limits their copy in float64 to 8 MB
_SHARED_FROM: Final = 8  # batches; with fewer, one thread is done before another has woken up

_dtype_of: Final = attrgetter("dtype")


class _Batch(NamedTuple):
    """Pieces that are read together."""

    tensors: list[int]  # the numbers of the tensors
    part: slice  # of the tensors' elements
    pieces: slice | list[int]  # the numbers of the pieces, from 0 to M - 1: [G]
    bounds: IntArray  # where each piece begins in the part and the last one ends: [G + 1]


def measure(
    gradients: Tensors, parameters: Tensors | None, *, dead_threshold: float, inverse_scale: Scale, histogram: bool
) -> Measurement:
    """Measure each gradient: rows [N, C] in float64; with `histogram` also the histogram [N, B] in int64."""
    elements, num_implicit_zeros, exponent = scaled_elements(gradients, parameters or (), inverse_scale)
    num, threshold = len(gradients), math.ldexp(dead_threshold, -exponent)
    rows_NC, histogram_NB, others_N3 = _read(elements, num, threshold, exponent if histogram else None)
    rows_NC[:, PARAMETER_COLUMNS] = np.nan
    if parameters is not None:
        rows_NC[:, Column.PARAM_SUM_SQ] = others_N3[:, 0]
        rows_NC[:, Column.PARAM_NUM_NONFINITE] = others_N3[:, 1] + others_N3[:, 2]
    return of_gradients(rows_NC, histogram_NB, num_implicit_zeros, exponent)


def measure_received(gradients: Tensors, *, inverse_scale: Scale) -> Tensor:
    """Sum the squares of each gradient's finite elements, and count NaN and Inf: [N, 3]."""
    elements, _, exponent = scaled_elements(gradients, (), inverse_scale)
    sums_N3 = _read(elements, 0)[2]
    sums_N3[:, 0] *= math.ldexp(1.0, 2 * exponent)
    return torch.from_numpy(sums_N3)


def _read(
    elements: Sequence[Tensor], num: int, threshold: float = 0.0, exponent: int | None = None
) -> tuple[FloatArray, IntArray | None, FloatArray]:
    """Read N tensors for whole rows, and others only for what the received columns contain, all in one pass.

    Args:
        elements: the N tensors, and then the others.
        num: N.
        threshold: the dead threshold for the elements as they are.
        exponent: count a histogram of the N tensors multiplied by 2**exponent; None for no histogram.

    Returns:
        The rows [N, C], the histogram [N, B], and of the others the received columns [any, 3].
    """
    sizes, dtypes = tuple(map(Tensor.numel, elements)), tuple(map(_dtype_of, elements))
    batches, starts, num_pieces, sizes_N = _plan(sizes, dtypes, num)
    num_whole = starts[num] if len(elements) > num else num_pieces  # pieces of the first N tensors
    rows_MC = np.empty((num_pieces, NUM_COLUMNS))
    if 0 in sizes:  # no batch has a piece of an empty tensor
        rows_MC[:] = IDENTITY_C
    histogram_MB = None if exponent is None else np.zeros((num_whole, NUM_BINS), dtype=np.int64)

    def read(batch: _Batch) -> None:
        values = _floats([elements[tensor] for tensor in batch.tensors], batch.part)
        limit = threshold if batch.tensors[0] < num else None
        # Overflow in float32 is detected in the result, and the piece is read again in float64.
        with np.errstate(over="ignore", invalid="ignore"):  # numpy's error state is per thread
            rows_MC[batch.pieces], histogram = measure_pieces(values, batch.bounds, limit, exponent)
        if histogram_MB is not None and histogram is not None:
            histogram_MB[batch.pieces] = histogram

    for_each(batches, read, torch.get_num_threads() if len(batches) >= _SHARED_FROM else 1)
    rows_NC, others = rows_MC[:num_whole], rows_MC[num_whole:]
    if num_pieces > len(elements):
        rows_NC, histogram_MB = merged(rows_NC, histogram_MB, np.array(starts[:num]))
        others, _ = merged(others, None, np.array(starts[num:]) - num_whole)
    rows_NC[:, Column.NUM_ELEMENTS] = sizes_N
    return rows_NC, histogram_MB, others[:, RECEIVED_COLUMNS]


def scaled_elements(
    gradients: Tensors, parameters: Tensors, inverse_scale: Scale
) -> tuple[Sequence[Tensor], Sequence[int], int]:
    """Return tensors whose memory holds the elements of the gradients, and then those of the parameters.

    Also the gradients' numbers of implicit zeros, and n of a factor 2**n that is still to be applied to them.
    """
    elements, num_implicit_zeros = readable([*gradients, *parameters], "cpu")
    num_implicit_zeros = num_implicit_zeros[: len(gradients)]
    if inverse_scale is None:
        return elements, num_implicit_zeros, 0
    scale = float(inverse_scale)
    mantissa, exponent = math.frexp(scale)
    if mantissa == 0.5 and -400 < exponent <= 1:
        # A power of two only shifts exponents: the bits are read unscaled; sums and bins are shifted afterwards.
        return elements, num_implicit_zeros, exponent - 1
    scaled = [one.to(torch.float64) * scale for one in elements[: len(gradients)]]
    return [*scaled, *elements[len(gradients) :]], num_implicit_zeros, 0


def merged(
    rows_MC: FloatArray, histogram_MB: IntArray | None, starts_N: IntArray | None
) -> tuple[FloatArray, IntArray | None]:
    """Merge the rows and the histograms of each tensor's pieces; `starts_N` has the number of its first piece.

    None for `starts_N`: every tensor is one piece.
    """
    if starts_N is None or len(starts_N) == len(rows_MC):
        return rows_MC, histogram_MB
    histogram_NB = None if histogram_MB is None else np.add.reduceat(histogram_MB, starts_N, axis=0)
    return merge_adjacent_rows(rows_MC, starts_N), histogram_NB


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
    return measured


@lru_cache(maxsize=8)
def _plan(
    sizes: tuple[int, ...], dtypes: tuple[torch.dtype, ...], num: int
) -> tuple[list[_Batch], list[int], int, FloatArray]:
    """Cut large tensors, and put small ones of one dtype together, the first `num` apart from the others.

    Returns:
        batches: the pieces that are not empty, each in one batch.
        starts: the number of each tensor's first piece, of which an empty tensor has one, too.
        num_pieces: M.
        sizes_N: the sizes of the first `num` tensors.
    """
    batches: list[_Batch] = []
    small: defaultdict[tuple[torch.dtype, bool], list[tuple[int, int]]] = defaultdict(list)
    starts: list[int] = []
    num_pieces = 0
    for tensor, size in enumerate(sizes):
        starts.append(num_pieces)
        if 0 < size < SMALL:
            small[dtypes[tensor], tensor < num].append((tensor, num_pieces))
        for begin in range(0, size, PIECE) if size >= SMALL else ():
            piece, bounds = num_pieces + begin // PIECE, np.array([0, min(PIECE, size - begin)])
            batches.append(_Batch([tensor], slice(begin, begin + PIECE), [piece], bounds))
        num_pieces += max(-(-size // PIECE), 1)
    for alike in small.values():
        for begin in range(0, len(alike), _MAX_TOGETHER):
            tensors, pieces = map(list, zip(*alike[begin : begin + _MAX_TOGETHER], strict=True))
            bounds = np.array([0, *itertools.accumulate(sizes[tensor] for tensor in tensors)])
            run = slice(pieces[0], pieces[-1] + 1)  # an index that is faster than a list
            is_run = run.stop - run.start == len(pieces)
            batches.append(_Batch(tensors, slice(None), run if is_run else pieces, bounds))
    return batches, starts, num_pieces, np.array(sizes[:num], dtype=np.float64)


def _floats(tensors: list[Tensor], part: slice) -> Floats:
    """Concatenate tensors of one dtype, and return a part; half precision becomes float32."""
    flat: Tensor = _flatten_dense_tensors(tensors).detach()  # type: ignore[no-untyped-call]  # helpers have autograd on
    if flat.dtype is torch.bfloat16:  # which numpy does not have; it is the upper half of a float32
        upper = flat.view(torch.uint16).numpy()[part]
        values: Floats = np.left_shift(upper, 16, dtype=np.uint32).view(np.float32)
        return values
    values = flat.numpy()[part]
    return values.astype(np.float32) if flat.dtype is torch.float16 else values
