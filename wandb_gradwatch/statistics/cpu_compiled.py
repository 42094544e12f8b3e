"""Statistics on the CPU by loops that numba compiles: one call for all tensors, from a table of their addresses.

numba is an optional extra. The loops are compiled in the background (compilation.py); until they are there, and where
they fail, torch and numpy measure (cpu.py), with the same counts and histograms.
"""

from __future__ import annotations

import importlib.util
import logging
import math
from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from operator import attrgetter
from typing import Final

import numpy as np
import torch
from torch import Tensor

from . import cpu
from .bits import FLOAT32, FLOAT64, bin_of_code, largest_magnitude_within
from .columns import NUM_BINS, NUM_COLUMNS, SCALE_POWER, ZERO_BIN, Column, IntArray
from .compilation import Compilation
from .elements import elements_of

logger: Final = logging.getLogger("wandb_gradwatch")

# N tensors, C columns, B histogram bins

_KIND: Final = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.float64: 3}  # of a dtype, in the loops
_Loops = tuple[Callable[..., None], Callable[..., None]]  # of measure() and of sum_sq()


@cache
def is_installed() -> bool:
    """Whether numba is there; it is not imported."""
    return importlib.util.find_spec("numba") is not None


def _compile() -> _Loops:
    from .cpu_loops import compile_loops

    try:
        loops = compile_loops(cache=True)
    except Exception as error:  # no folder to write to, a full disk, a damaged file: not needed to compile
        logger.debug("wandb_gradwatch: compiling without a cache on disk: %r", error)
        loops = compile_loops(cache=False)
    _check(loops)
    return loops


def _say_failure(error: Exception) -> None:
    logger.warning(
        "wandb_gradwatch: numba is installed, but the compiled CPU backend could not be made (%r); torch and numpy "
        "measure instead, more slowly. Upgrade numba, or say backend='cpu'.",
        error,
    )


LOOPS: Final = Compilation(_compile, _say_failure)


def measure(
    gradients: Sequence[Tensor],
    parameters: Sequence[Tensor] | None,
    *,
    dead_threshold: float,
    inverse_scale: Tensor | None,
    histogram: bool,
) -> tuple[Tensor, Tensor | None]:
    """Measure each gradient: rows [N, C] in float64 and, if asked for, the histogram [N, B] in int64.

    Cost: one read of the gradients and of the parameters, on this thread, without the interpreter's lock.
    """
    return _measure(LOOPS.wait(), gradients, parameters, dead_threshold, inverse_scale, histogram)


def sum_sq(gradients: Sequence[Tensor], *, inverse_scale: Tensor | None) -> Tensor:
    """Sum the squares of each gradient's finite elements: [N]."""
    _, sum_sq_all = LOOPS.wait()
    elements, _, exponent = _readable(gradients, inverse_scale)
    sums_N2 = np.empty((len(elements), 2))
    sum_sq_all(_table(elements), sums_N2)
    return torch.from_numpy(sums_N2)[:, 0] * math.ldexp(1.0, 2 * exponent)


def _measure(
    loops: _Loops,
    gradients: Sequence[Tensor],
    parameters: Sequence[Tensor] | None,
    dead_threshold: float,
    inverse_scale: Tensor | None,
    histogram: bool,
) -> tuple[Tensor, Tensor | None]:
    measure_all, _ = loops
    elements, num_implicit_zeros, exponent = _readable(gradients, inverse_scale)
    parameter_elements = _readable(parameters, None)[0] if parameters is not None else ()
    rows_NC = np.empty((len(elements), NUM_COLUMNS))
    histogram_NB = np.zeros((len(elements), NUM_BINS if histogram else 0), dtype=np.int64)
    measure_all(
        _table(elements),
        _table(parameter_elements),
        *_dead_words(dead_threshold, exponent),
        bin_of_code(FLOAT32, exponent),
        bin_of_code(FLOAT64, exponent),
        rows_NC,
        histogram_NB,
    )
    if not dead_threshold >= 0:
        rows_NC[:, Column.NUM_DEAD] = 0
    if num_implicit_zeros:
        cpu.add_implicit_zeros(rows_NC, num_implicit_zeros)
        if histogram:
            histogram_NB[:, ZERO_BIN] = rows_NC[:, Column.NUM_ZERO]
    if exponent:
        for column, power in SCALE_POWER.items():
            rows_NC[:, column] *= math.ldexp(1.0, exponent * power)
        rows_NC[:, Column.RECEIVED_SUM_SQ] = rows_NC[:, Column.GRAD_SUM_SQ]
    return torch.from_numpy(rows_NC), torch.from_numpy(histogram_NB) if histogram else None


_PLAIN: Final = frozenset([Tensor, torch.nn.Parameter])
_DTYPE: Final = attrgetter("dtype")
_FORMAT: Final = attrgetter("dtype", "layout", "is_cpu")
_READABLE: Final = frozenset((dtype, torch.strided, True) for dtype in _KIND)


def _readable(tensors: Sequence[Tensor], inverse_scale: Tensor | None) -> tuple[Sequence[Tensor], list[int], int]:
    """Tensors whose memory holds their elements, their implicit zeros (none: []), and a power of two still to apply."""
    if inverse_scale is not None:
        elements, num_implicit_zeros, exponent = cpu.scaled_elements(tensors, inverse_scale)
        return elements, num_implicit_zeros, exponent
    if _all_readable(tensors):
        return tensors, [], 0
    pairs = [(t, 0) if _all_readable([t]) else elements_of(t) for t in tensors]
    return [pair[0] for pair in pairs], [pair[1] for pair in pairs], 0


def _all_readable(tensors: Sequence[Tensor]) -> bool:
    """Whether the elements lie one after the other where data_ptr() says; asked of all at once: each takes 0.1 us."""
    return (
        _PLAIN.issuperset(map(type, tensors))
        and _READABLE.issuperset(map(_FORMAT, tensors))
        and all(map(Tensor.is_contiguous, tensors))
        and not any(map(Tensor.is_neg, tensors))
    )


def _table(elements: Sequence[Tensor]) -> IntArray:
    """Address, number of elements and kind of each tensor: [N, 3]."""
    table = np.empty((len(elements), 3), dtype=np.int64)
    addresses = list(map(Tensor.data_ptr, elements))
    if 0 in addresses and any(e.numel() for e, address in zip(elements, addresses, strict=True) if not address):
        raise RuntimeError("a tensor with elements has no memory: its storage was freed or is not allocated yet")
    table[:, 0] = addresses
    table[:, 1] = list(map(Tensor.numel, elements))
    table[:, 2] = list(map(_KIND.__getitem__, map(_DTYPE, elements)))
    return table


@lru_cache(maxsize=16)
def _dead_words(dead_threshold: float, exponent: int) -> tuple[np.uint32, np.uint64]:
    threshold = math.ldexp(dead_threshold, -exponent)
    return (
        np.uint32(max(largest_magnitude_within(threshold, FLOAT32), 0)),
        np.uint64(max(largest_magnitude_within(threshold, FLOAT64), 0)),
    )


def _check(loops: _Loops) -> None:
    """Compare with torch and numpy: they read raw memory, so a compiler that is wrong must not be believed."""
    values = torch.linspace(-3, 3, 2999, dtype=torch.float64, device="cpu")
    values[::7], values[1::50], values[2::50], values[3::50] = 0, math.nan, math.inf, 1e-30
    tensors = [values.to(dtype) for dtype in _KIND]
    expected_rows, expected_histogram = cpu.measure(
        tensors, tensors, dead_threshold=0.5, inverse_scale=None, histogram=True
    )
    rows, histogram = _measure(loops, tensors, tensors, 0.5, None, True)
    assert expected_histogram is not None
    assert histogram is not None
    if not (torch.allclose(rows, expected_rows, rtol=1e-5) and torch.equal(histogram, expected_histogram)):
        raise RuntimeError("the compiled loops do not measure what torch does")
