"""Statistics on the CPU with torch and numpy: few passes over pieces of tensors that stay in the cache (cpu_pieces.py).

Extremes, zeros and NaN are found from the float's bits as integers (float_bits.py), which is exact for every value.
Sums run in float32 if no square can overflow or vanish, otherwise in float64. Pieces with NaN or Inf are measured again
without them. The rows of a tensor's pieces merge.
"""

import itertools
import math
from bisect import bisect_left
from collections.abc import Sequence
from typing import Final

import numpy as np
import torch
from torch import Tensor
from torch._utils import _flatten_dense_tensors

from .columns import (
    AS_LEFT,
    IDENTITY_C,
    NUM_BINS,
    NUM_COLUMNS,
    RECEIVED_COLUMNS,
    SCALE_POWER,
    ZERO_BIN,
    Column,
    FloatArray,
    IntArray,
    merge_adjacent_rows,
)
from .cpu_pieces import PIECE, SMALL, Floats, measure_pieces, sum_sq_pieces
from .elements import Measurement, Scale, Tensors, add_implicit_zeros, readable
from .float_bits import FLOAT32, FLOAT64, bins_from_codes, largest_magnitude_within
from .thread_pool import for_each

# N tensors, M pieces of them, C columns, B histogram bins

_MAX_TOGETHER: Final = 128  # tensors; limits the counts of codes to 1 MB for float32, 8 MB for float64
_SHARED_FROM: Final = 8  # batches; with fewer, one thread is done before another has woken up

Batch = tuple[list[int], list[Tensor]]  # the numbers of pieces, from 0 to M - 1; the pieces


def measure(
    gradients: Tensors, parameters: Tensors | None, *, dead_threshold: float, inverse_scale: Scale, histogram: bool
) -> Measurement:
    """Measure each gradient: rows [N, C] in float64; with `histogram` also the histogram [N, B] in int64."""
    elements, num_implicit_zeros, exponent = scaled_elements(gradients, parameters or (), inverse_scale)
    num, threshold = len(gradients), math.ldexp(dead_threshold, -exponent)
    rows_NC, histogram_NB, others_N3 = _read(elements, num, threshold, exponent if histogram else None)
    rows_NC[:, RECEIVED_COLUMNS] = rows_NC[:, AS_LEFT]
    rows_NC[:, Column.PARAM_SUM_SQ :] = np.nan
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
    batches, starts, num_pieces = _batches(elements)
    num_whole = starts[num] if len(elements) > num else num_pieces  # pieces of the first N tensors
    rows_MC = np.empty((num_pieces, NUM_COLUMNS))
    rows_MC[:] = IDENTITY_C
    dead = {layout.float_dtype: largest_magnitude_within(threshold, layout) for layout in (FLOAT32, FLOAT64)}
    counted: list[tuple[list[int], IntArray]] = []  # pieces, and the counts of their codes

    def read(batch: Batch) -> None:
        pieces, tensors = batch
        values, num = _floats(tensors), bisect_left(pieces, num_whole)
        bounds = np.array([0, *itertools.accumulate(map(Tensor.numel, tensors))])
        # Overflow in float32 is detected in the result, and the piece is read again in float64.
        with np.errstate(over="ignore", invalid="ignore"):  # numpy's error state is per thread
            if num:
                magnitude, end = dead[values.dtype], bounds[num]
                whole = measure_pieces(values[:end], bounds[: num + 1], magnitude, count_codes=exponent is not None)
                rows_MC[pieces[:num]], codes_GK = whole
                if codes_GK is not None:
                    counted.append((pieces[:num], codes_GK))
            if num < len(pieces):
                received = sum_sq_pieces(values[bounds[num] :], bounds[num:-1] - bounds[num])
                rows_MC[pieces[num:], RECEIVED_COLUMNS] = received

    for_each(batches, read, torch.get_num_threads() if len(batches) >= _SHARED_FROM else 1)
    histogram_MB = None if exponent is None else _histogram(counted, rows_MC[:num_whole], exponent)
    starts_N, starts_of_others = np.array(starts[:num]), np.array(starts[num:]) - num_whole
    rows_NC, histogram_NB = merged(rows_MC[:num_whole], histogram_MB, starts_N)
    of_others, _ = merged(rows_MC[num_whole:], None, starts_of_others)
    return rows_NC, histogram_NB, of_others[:, RECEIVED_COLUMNS]


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


def _histogram(counted: Sequence[tuple[list[int], IntArray]], rows_MC: FloatArray, exponent: int) -> IntArray:
    histogram_MB = np.zeros((len(rows_MC), NUM_BINS), dtype=np.int64)
    for layout in (FLOAT32, FLOAT64):
        alike = [one for one in counted if one[1].shape[1] == layout.num_codes]
        if alike:
            codes = np.concatenate([codes_GK for _, codes_GK in alike])
            numbers = [number for pieces, _ in alike for number in pieces]
            histogram_MB[numbers] = bins_from_codes(codes, layout, exponent)
    histogram_MB[:, ZERO_BIN] = rows_MC[:, Column.NUM_ZERO]
    return histogram_MB


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
        rows_NC[:, Column.RECEIVED_SUM_SQ] = rows_NC[:, Column.GRAD_SUM_SQ]
    return measured


def _batches(elements: Sequence[Tensor]) -> tuple[list[Batch], list[int], int]:
    """Cut large tensors, and put small ones of one dtype together.

    Returns:
        batches: the pieces that are not empty, each in one batch.
        starts: the number of each tensor's first piece, of which an empty tensor has one, too.
        num_pieces: M.
    """
    batches: list[Batch] = []
    small: dict[torch.dtype, Batch] = {}
    starts: list[int] = []
    num_pieces = 0
    for tensor in elements:
        starts.append(num_pieces)
        size = tensor.numel()
        if size >= SMALL:
            pieces = torch.split(tensor.view(-1), PIECE)
            batches += [([number], [piece]) for number, piece in enumerate(pieces, num_pieces)]
            num_pieces += len(pieces)
            continue
        if size:
            batch = small.get(tensor.dtype)
            if batch is None or len(batch[0]) == _MAX_TOGETHER:
                batch = small[tensor.dtype] = ([], [])
                batches.append(batch)
            batch[0].append(num_pieces)
            batch[1].append(tensor)
        num_pieces += 1
    return batches, starts, num_pieces


def _floats(tensors: list[Tensor]) -> Floats:
    """Concatenate tensors of one dtype; half precision becomes float32."""
    flat: Tensor = _flatten_dense_tensors(tensors).detach()  # type: ignore[no-untyped-call]
    if flat.dtype is torch.bfloat16:  # which numpy does not have; it is the upper half of a float32
        values: Floats = np.left_shift(flat.view(torch.uint16).numpy(), 16, dtype=np.uint32).view(np.float32)
        return values
    values = flat.numpy()
    return values.astype(np.float32) if flat.dtype is torch.float16 else values
