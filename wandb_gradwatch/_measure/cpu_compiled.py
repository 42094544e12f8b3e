"""Statistics on the CPU for who has installed numba: one call of compiled loops for all tensors.

The loops get a table of the tensors' addresses.

If there is much to read, large tensors are cut into pieces, which as many threads share as torch uses; the rows of the
pieces merge, always in the same order.

numba is an optional extra. The loops are compiled in the background (compilation.py). Until they are ready, and if they
fail, torch and numpy measure instead (cpu.py), with identical counts and histograms.
"""

import importlib.util
import logging
import math
import time
from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from . import cpu
from .columns import NUM_BINS, NUM_COLUMNS, RECEIVED_COLUMNS, Column, FloatArray, IntArray
from .compilation import Compilation
from .elements import ITEMSIZES, NATIVE_DTYPES, Measurement, Scale, Tensors
from .float_bits import FLOAT32, FLOAT64, bin_of_code, largest_magnitude_within
from .thread_pool import for_each

logger: Final = logging.getLogger("wandb_gradwatch")

# N tensors, M pieces of them, C columns, B histogram bins; P parameters, W witnesses of each

_PIECE: Final = 1 << 18  # elements; takes tens of microseconds
_BATCH: Final = 8  # pieces that a thread takes at once
_SHARED_FROM: Final = 1 << 21  # elements; with fewer, one thread is done before another has woken up

_BEFORE_ANOTHER_TRY: Final = 2.0  # seconds


class Loops(NamedTuple):
    """The functions of cpu_loops.py, compiled."""

    measure: Callable[..., None]
    take_witnesses: Callable[..., None]


@cache
def is_installed() -> bool:
    """Return whether numba is installed, without importing it."""
    return importlib.util.find_spec("numba") is not None


def _compile() -> Loops:
    try:
        return _compiled()
    except Exception as error:
        # Another thread may have replaced functions that the compiler uses for a moment, as torch.export does.
        logger.debug("wandb_gradwatch: compiling once more, after %r", error)
        time.sleep(_BEFORE_ANOTHER_TRY)
    try:
        return _compiled()
    except Exception as error:
        logger.warning(
            "wandb_gradwatch: numba is installed, but the compiled CPU backend could not be made (%r); torch and numpy "
            "measure instead, which is slower. Upgrade numba, or pass backend='cpu'.",
            error,
        )
        raise


def _compiled() -> Loops:
    from .cpu_loops import compile_loops

    try:
        loops = Loops(*compile_loops(cache=True))
    except Exception as error:  # no writable folder, a full disk or a damaged file: compile without the cache
        logger.debug("wandb_gradwatch: compiling without a cache on disk: %r", error)
        loops = Loops(*compile_loops(cache=False))
    _check(loops)
    return loops


LOOPS: Final = Compilation(_compile, name="loops")


def measure(
    gradients: Tensors, parameters: Tensors | None, *, dead_threshold: float, inverse_scale: Scale, histogram: bool
) -> Measurement:
    """Measure each gradient: rows [N, C] in float64; with `histogram` also the histogram [N, B] in int64.

    Cost: one read of the gradients and of the parameters, without holding the GIL.
    """
    return _measure(LOOPS.wait(), gradients, parameters, dead_threshold, inverse_scale, histogram)


def measure_received(gradients: Tensors, *, inverse_scale: Scale) -> Tensor:
    """Sum the squares of each gradient's finite elements, and count NaN and Inf: [N, 3]."""
    return _measure(LOOPS.wait(), gradients, None, 0.0, inverse_scale, False).rows[:, RECEIVED_COLUMNS]


def _measure(
    loops: Loops, gradients: Tensors, parameters: Tensors | None, dead_threshold: float, scale: Scale, histogram: bool
) -> Measurement:
    elements, num_zeros, exponent = cpu.scaled_elements(gradients, parameters or (), scale)
    table, starts_N = _pieces(_table(elements, len(gradients)))
    num_pieces = table.shape[2]
    rows = np.empty((num_pieces, NUM_COLUMNS))
    counts = np.zeros((num_pieces, NUM_BINS if histogram else 0), dtype=np.int64)
    limits = _limits(dead_threshold, exponent)
    if starts_N is None:
        loops.measure(table, *limits, rows, counts)
    else:
        # It holds the tensors, which a helper may still read.
        def loop(some: slice, _held: object = elements) -> None:
            loops.measure(table[:, :, some], *limits, rows[some], counts[some])

        batches = [slice(begin, begin + _BATCH) for begin in range(0, num_pieces, _BATCH)]
        for_each(batches, loop, torch.get_num_threads())
    rows_NC, histogram_NB = cpu.merged(rows, counts, starts_N)
    if not dead_threshold >= 0:
        rows_NC[:, Column.NUM_DEAD] = 0
    return cpu.of_gradients(rows_NC, histogram_NB if histogram else None, num_zeros, exponent)


def take_witnesses(
    loops: Loops, elements: Sequence[Tensor], slots_N: IntArray, now: FloatArray, before: FloatArray, sums: FloatArray
) -> IntArray:
    """Take witnesses of gradients and parameters and compare them with those before; return the parameters' sizes: [N].

    Args:
        elements: the contiguous elements of N gradients, and of their parameters.
        slots_N: their places among all parameters.
        now: the output: [2, P, W] in float64, zeros where a tensor has fewer elements.
        before: of the sample before: [2, P, W].
        sums: the output, as in `Compared`: [6, P].
    """
    table = _table(elements, len(slots_N))
    loops.take_witnesses(table, slots_N, now, before, sums)
    sizes: IntArray = table[1, 1]
    return sizes


def _table(elements: Sequence[Tensor], num: int) -> IntArray:
    """The table of `num` gradients and as many parameters, or none: addresses, numbers of elements, and kinds.

    [3, G, N]; G is 1 without parameters and 2 with them.
    """
    addresses, sizes = list(map(Tensor.data_ptr, elements)), list(map(Tensor.numel, elements))
    if 0 in addresses and any(size for size, address in zip(sizes, addresses, strict=True) if not address):
        raise RuntimeError("a tensor with elements has no memory: its storage was freed or is not allocated yet")
    kinds = [NATIVE_DTYPES[tensor.dtype] for tensor in elements]
    return np.array(addresses + sizes + kinds, dtype=np.int64).reshape(3, -1, num)


def _pieces(table: IntArray) -> tuple[IntArray, IntArray | None]:
    """Cut each gradient and its parameter at the same places; return the table of pieces, and the first pieces.

    None for the first pieces: there is little to read, and every tensor is one piece.
    """
    if table[1].sum() < _SHARED_FROM:
        return table, None
    num_pieces_N = np.maximum(-(-table[1].max(axis=0) // _PIECE), 1)
    starts_N = np.cumsum(num_pieces_N) - num_pieces_N
    of_tensor_M = np.repeat(np.arange(len(num_pieces_N)), num_pieces_N)
    pieces = table[:, :, of_tensor_M]
    begin = np.minimum((np.arange(len(of_tensor_M)) - starts_N[of_tensor_M]) * _PIECE, pieces[1])
    pieces[0] += begin * ITEMSIZES[pieces[2]]
    pieces[1] = np.minimum(pieces[1] - begin, _PIECE)
    return pieces, starts_N


@lru_cache(maxsize=8)
def _limits(dead_threshold: float, exponent: int) -> tuple[np.uint32, np.uint64, IntArray, IntArray, Any]:
    """What the loops must know: the largest dead magnitude as float32 and as float64, and the bins of the codes.

    All for elements * 2**exponent. And the places of the columns.
    """
    threshold = math.ldexp(dead_threshold, -exponent)
    from .cpu_loops import COLUMNS, PLACES

    return (
        np.uint32(max(largest_magnitude_within(threshold, FLOAT32), 0)),
        np.uint64(max(largest_magnitude_within(threshold, FLOAT64), 0)),
        bin_of_code(FLOAT32, exponent),
        bin_of_code(FLOAT64, exponent),
        np.array([tuple(Column[name].value for name in COLUMNS)], dtype=PLACES),
    )


def _check(loops: Loops) -> None:
    """Compare the loops with torch and numpy. They read raw memory, so a miscompiled loop must not be used."""
    values = torch.linspace(-3, 3, 2999, dtype=torch.float64, device="cpu")
    values[::7], values[1::50], values[2::50], values[3::50] = 0, math.nan, math.inf, 1e-30
    tensors = [values.to(dtype) for dtype in NATIVE_DTYPES]
    expected_rows, expected_histogram = cpu.measure(
        tensors, tensors, dead_threshold=0.5, inverse_scale=None, histogram=True
    )
    rows, histogram = _measure(loops, tensors, tensors, 0.5, None, True)
    assert expected_histogram is not None
    assert histogram is not None
    taken, sums = np.empty((2, len(tensors), 64)), np.empty((6, len(tensors)))
    take_witnesses(loops, [*tensors, *tensors], np.arange(len(tensors)), taken, np.zeros_like(taken), sums)
    expected = np.stack([one[:: len(one) // 64][:64].double().numpy() for one in tensors])
    are_taken = all(np.array_equal(of_kind, expected, equal_nan=True) for of_kind in taken)
    are_equal = torch.allclose(rows, expected_rows, rtol=1e-5) and torch.equal(histogram, expected_histogram)
    if not (are_equal and are_taken and np.array_equal(sums[5], np.count_nonzero(expected.view(np.int64), axis=1))):
        raise RuntimeError("the compiled loops do not measure what torch does")
