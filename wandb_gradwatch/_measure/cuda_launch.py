"""Statistics on CUDA: one read of every gradient by fused Triton kernels, a handful of launches, no host sync.

    table of addresses --> measure_chunks, one program per chunk --> partials [9, M] --> fold, one program per tensor
                           square_chunks, the same for parameters -> partials [2, M] --> fold_squares   --> rows [N, C]

Where chunks lie depends on sizes and dtypes alone and is uploaded once per plan. A sample uploads the addresses only,
and only if one changed (table.py). The kernels are in cuda.py, the plans in cuda_plan.py.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from . import cuda as kernels
from .columns import NUM_BINS, NUM_COLUMNS, Column
from .cuda_plan import Group, Plan, plan_for
from .elements import elements_of
from .float_bits import FLOAT32, FLOAT64, largest_magnitude_within
from .generic import add_implicit_zeros
from .tiling import upload

# N tensors, M chunks, C columns, B histogram bins

LANES: Final = 128  # of a program: four warps, and in each lane four loads of 16 bytes at once
CHUNK: Final = 128 * LANES  # elements of a program: in each lane CHUNK / LANES squares add up in float32
FOLD_BLOCK: Final = 512  # partials of one column that a program of the fold holds at once

_CODE: Final = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.float64: 3}  # of a dtype, in the kernels


# Variants of kernels that are compiled. Two threads must not compile at once, and one that needs what the other is busy
# with had better wait for it.
_compiled: Final[set[tuple[Any, ...]]] = set()
_compiling: Final = threading.Lock()

# Watchers of models with the same shapes share a plan, and a thread must not find another one's addresses in its table:
# held from when the addresses are written until what reads them is queued.
_one_at_a_time: Final = threading.Lock()


def prepare(elements: Sequence[Tensor], role: str, dead_threshold: float = 0.0) -> Plan:
    """Upload the addresses of flat tensors, if they changed: the part of a sample that a CUDA graph must leave out.

    Args:
        elements: of NATIVE_DTYPES, on one device; they must live until the launch that reads them is queued.
        role: "gradients", "squares" or "parameters": each has tables of its own.
        dead_threshold: of the gradients.
    """
    addresses = [tensor.data_ptr() for tensor in elements]
    plan = plan_for(elements, addresses, role, CHUNK)
    plan.table.write([*_dead_words(dead_threshold), *addresses])
    return plan


@lru_cache(maxsize=16)
def _dead_words(dead_threshold: float) -> tuple[int, int]:
    return largest_magnitude_within(dead_threshold, FLOAT32), largest_magnitude_within(dead_threshold, FLOAT64)


def measure(
    gradients: Sequence[Tensor],
    parameters: Sequence[Tensor] | None,
    *,
    dead_threshold: float,
    inverse_scale: Tensor | None,
    histogram: bool,
) -> tuple[Tensor, Tensor | None]:
    """Measure each gradient: rows [N, C] in float64 and, if asked for, the histogram [N, B] in int64.

    Cost: one launch per dtype and alignment of the gradients, one per that of the parameters, a fold for each; one read
    of the gradients and of the parameters; no host sync unless a gradient is sparse.
    """
    pairs = [elements_of(gradient) for gradient in gradients]
    elements = [pair[0] for pair in pairs]
    parameter_elements = [elements_of(parameter)[0] for parameter in parameters or ()]
    with _one_at_a_time:
        plan = prepare(elements, "gradients", dead_threshold)
        parameter_plan = prepare(parameter_elements, "parameters") if parameters is not None else None
        rows_NC, histogram_NB = launch(
            plan, parameter_plan, dead=dead_threshold != 0, inverse_scale=inverse_scale, histogram=histogram
        )
    num_implicit_zeros = [pair[1] for pair in pairs]
    if any(num_implicit_zeros):
        counts_N = upload(np.array(num_implicit_zeros, dtype=np.int64), elements[0].device)
        rows_NC[:, Column.NUM_ELEMENTS] += counts_N
        add_implicit_zeros(rows_NC, histogram_NB, counts_N)
    return rows_NC, histogram_NB


def sum_sq(gradients: Sequence[Tensor], *, inverse_scale: Tensor | None) -> Tensor:
    """Sum the squares of each gradient's finite elements: [N]. Two launches for gradients of one dtype."""
    elements = [elements_of(gradient)[0] for gradient in gradients]
    with _one_at_a_time:
        plan = prepare(elements, "squares")
        sums_N2 = torch.empty((len(elements), 2), dtype=torch.float64, device=elements[0].device)
        _launch_squares(plan, sums_N2, 0, inverse_scale)
    return sums_N2[:, 0]


def launch(
    plan: Plan,
    parameter_plan: Plan | None,
    *,
    dead: bool,
    inverse_scale: Tensor | None,
    histogram: bool,
    only_compile_for: torch.device | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Queue the kernels on the current stream; nothing here reads or writes host memory, so a CUDA graph may hold it.

    Args:
        plan: of the gradients, prepared.
        parameter_plan: of the parameters, prepared; None leaves their columns NaN.
        dead: the dead threshold is not 0.
        only_compile_for: queue nothing.

    Returns:
        rows [N, C] and, if asked for, the histogram [N, B].
    """
    device, num_tensors = plan.sizes.device, plan.sizes.numel()
    rows_NC = torch.empty((num_tensors, NUM_COLUMNS), dtype=torch.float64, device=device)
    histogram_NB = torch.zeros((num_tensors, NUM_BINS), dtype=torch.int64, device=device) if histogram else None
    partials = torch.empty((kernels.NUM_PARTIALS, plan.num_chunks), dtype=torch.float64, device=device)
    scale = _scale_or(partials, inverse_scale)
    scaled = inverse_scale is not None
    for group in plan.groups:
        _queue(
            kernels.measure_chunks,
            group.count,
            *plan.chunks,
            scale,
            partials,
            partials if histogram_NB is None else histogram_NB,
            group.first,
            plan.num_chunks,
            **_reading(group),
            DEAD=dead,
            SCALED=scaled,
            HISTOGRAM=histogram,
            only_compile_for=only_compile_for,
        )
    _queue(
        kernels.fold,
        num_tensors,
        plan.table.device_table,
        partials,
        plan.first_chunk,
        plan.num_chunks_of,
        plan.sizes,
        scale,
        rows_NC,
        plan.num_chunks,
        SCALED=scaled,
        NUM_COLUMNS=NUM_COLUMNS,
        BLOCK=FOLD_BLOCK,
        only_compile_for=only_compile_for,
    )
    if parameter_plan is not None:
        _launch_squares(parameter_plan, rows_NC, Column.PARAM_SUM_SQ, None, only_compile_for)
    return rows_NC, histogram_NB


def _launch_squares(
    plan: Plan,
    sums: Tensor,
    column: int,
    inverse_scale: Tensor | None,
    only_compile_for: torch.device | None = None,
) -> None:
    """Write the sum of squares and the number of NaN and Inf into two columns of sums: [N, ...]."""
    partials = torch.empty((2, plan.num_chunks), dtype=torch.float64, device=sums.device)
    for group in plan.groups:
        _queue(
            kernels.square_chunks,
            group.count,
            *plan.chunks,
            partials,
            group.first,
            plan.num_chunks,
            **_reading(group),
            only_compile_for=only_compile_for,
        )
    _queue(
        kernels.fold_squares,
        len(sums),
        partials,
        plan.first_chunk,
        plan.num_chunks_of,
        _scale_or(partials, inverse_scale),
        sums,
        plan.num_chunks,
        SCALED=inverse_scale is not None,
        STRIDE=sums.shape[1],
        OFFSET=int(column),
        BLOCK=FOLD_BLOCK,
        only_compile_for=only_compile_for,
    )


def _scale_or(some: Tensor, inverse_scale: Tensor | None) -> Tensor:
    """The scale in the one dtype that kernels are compiled for; without one some address, which is not read."""
    return some if inverse_scale is None else inverse_scale.to(torch.float64)


def _queue(
    kernel: Any, num_programs: int, *arguments: Any, only_compile_for: torch.device | None, **constants: Any
) -> None:
    """Launch a kernel on the current stream of its tensors' device, which need not be the current device."""
    device = only_compile_for or arguments[0].device
    variant = (kernel, device, *constants.values())
    if only_compile_for is not None:
        with _compiling, _on(device):
            if variant not in _compiled:
                kernels.build_launcher(kernel.warmup(*arguments, grid=(num_programs,), **constants))
                _compiled.add(variant)
    elif variant in _compiled:
        with _on(device):
            kernel[(num_programs,)](*arguments, **constants)
    else:
        with _compiling, _on(device):
            kernel[(num_programs,)](*arguments, **constants)
            _compiled.add(variant)


def _reading(group: Group) -> dict[str, Any]:
    return {
        "DTYPE": _CODE[group.dtype],
        "ITEMSIZE": group.dtype.itemsize,
        "ALIGNED": group.aligned,
        "LANES": LANES,
        "CHUNK": CHUNK,
    }


def _on(device: torch.device) -> AbstractContextManager[Any]:
    """Triton launches on the current device, which need not be the gradients'."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def warm_up(
    device: torch.device,
    dtypes: Sequence[torch.dtype],
    *,
    dead_threshold: float,
    histogram: bool,
    in_buckets: bool = True,
    goes_on: Callable[[], bool] = lambda: True,
) -> None:
    """Compile what gradients and parameters of these dtypes need, so that the first sample does not: seconds each.

    Touches no memory of the device and queues nothing there: the program may be capturing a graph by then. What a loss
    scale needs comes later, and last what gradients need that do not begin where the allocator begins, as in buckets.

    Args:
        dtypes: any; those that cannot have a gradient need nothing.
        histogram: some samples will want a histogram; the kernel without one is compiled too.
        in_buckets: gradients or parameters may begin anywhere, not only where the allocator lets tensors begin.
        goes_on: asked before each kernel; False when nobody will need it any more.
    """
    # A kernel depends on dtypes and alignment, not on where its arguments lie.
    natives = dict.fromkeys(_native_dtype(dtype) for dtype in dtypes if dtype.is_floating_point or dtype.is_complex)
    scale = torch.ones((), dtype=torch.float64, device="cpu")
    for aligned, inverse_scale in ((True, None), (True, scale), (False, None), (False, scale)):
        if not aligned and not in_buckets:
            continue
        for dtype in natives:
            tensors = [torch.ones(2, dtype=dtype, device="cpu")[0 if aligned else 1 :]]
            plan, squares = prepare(tensors, "gradients", dead_threshold), prepare(tensors, "squares")
            for with_histogram in sorted({False, histogram}, reverse=True):  # the first sample has one
                if not goes_on():
                    return
                launch(
                    plan,
                    squares if inverse_scale is None else None,
                    dead=dead_threshold != 0,
                    inverse_scale=inverse_scale,
                    histogram=with_histogram,
                    only_compile_for=device,
                )
            sums_N2 = torch.empty((len(tensors), 2), dtype=torch.float64, device="cpu")
            _launch_squares(squares, sums_N2, 0, inverse_scale, device)


def _native_dtype(dtype: torch.dtype) -> torch.dtype:
    """The one that a kernel reads instead."""
    return elements_of(torch.zeros(1, dtype=dtype, device="cpu"))[0].dtype
