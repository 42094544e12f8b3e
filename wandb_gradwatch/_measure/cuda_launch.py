"""Statistics on CUDA: one read of every gradient by fused Triton kernels, a handful of launches, no host sync.

    table of addresses --> measure_chunks: one program per chunk
                       --> measure_carefully: the chunks that are left       --> partials [9, M]
                       --> fold: one program per gradient and its parameter  --> rows [N, C]

Where chunks lie depends on sizes and dtypes alone and is uploaded once per plan. A sample uploads the addresses only,
and only if one changed (AddressTable). The kernels are in cuda.py, the plans in cuda_plan.py.
"""

from __future__ import annotations

import os
import tempfile
import threading
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache, lru_cache, partial
from operator import attrgetter
from typing import Any, Final

import torch
from torch import Tensor

from . import cuda as kernels
from .columns import NUM_BINS, NUM_COLUMNS, RECEIVED_COLUMNS
from .compilation import after_other_processes
from .cuda_plan import ALIGNMENT, LOADS, Plan, plan_for
from .elements import Measurement, Scale, Tensors, add_implicit_zeros, elements_of, readable
from .float_bits import FLOAT32, FLOAT64, largest_magnitude_within

# N tensors, M chunks, C columns, B histogram bins

LANES: Final = 128  # of a program: four warps, and in each lane four loads of 16 bytes at once
CHUNK: Final = 65_536  # elements of a program at most: what it does before and after its loop is little beside them
CAREFUL_LANES: Final = 512  # elements that the careful kernel holds at once
FOLD_BLOCK: Final = 512  # partials of one column that a program of the fold holds at once

# Variants of kernels that are compiled. Two threads must not compile at once, and one that needs what the other is busy
# with had better wait for it. So had another rank: Triton keeps what it has compiled on disk.
_compiled: Final[set[tuple[Any, ...]]] = set()
_compiling: Final = threading.Lock()
_LONGEST: Final = 10.0  # seconds that another process may take for one variant, a second or two as a rule

# Watchers of models with the same shapes share a plan, and a thread must not find another one's addresses in its table:
# held from when the addresses are written until what reads them is queued.
_one_at_a_time: Final = threading.Lock()

_DTYPE: Final = attrgetter("dtype")


def prepare(gradients: Sequence[Tensor], parameters: Sequence[Tensor] = (), dead_threshold: float = 0.0) -> Plan:
    """Upload the addresses of tensors, if they changed: the part of a sample that a CUDA graph must leave out.

    Args:
        gradients, parameters: contiguous, of NATIVE_DTYPES, on one device; they must live until the launch that reads
            them is queued.
        dead_threshold: of the gradients.
    """
    tensors = [*gradients, *parameters]
    addresses = list(map(Tensor.data_ptr, tensors))
    plan = plan_for(
        addresses,
        list(map(Tensor.numel, tensors)),
        list(map(_DTYPE, tensors)),
        num_gradients=len(gradients),
        device=tensors[0].device,
        lanes=LANES,
        chunk=CHUNK,
    )
    plan.table.write([*_dead_words(dead_threshold), *addresses])
    return plan


@lru_cache(maxsize=16)
def _dead_words(dead_threshold: float) -> tuple[int, int]:
    """The threshold in the bits of floats; of float32 doubled and 1 more: the doubled bits of a dead one lie below."""
    of_float32 = largest_magnitude_within(dead_threshold, FLOAT32)
    return max(2 * of_float32 + 1, 0), largest_magnitude_within(dead_threshold, FLOAT64)


def measure(
    gradients: Tensors, parameters: Tensors | None, *, dead_threshold: float, inverse_scale: Scale, histogram: bool
) -> Measurement:
    """Measure each gradient: rows [N, C] in float64 and, if asked for, the histogram [N, B] in int64.

    Cost: one launch per dtype and alignment of the gradients, one per that of the parameters, and two more; one read of
    the gradients and of the parameters; no host sync unless a gradient is sparse.
    """
    kind = gradients[0].device.type
    elements, num_implicit_zeros = readable(gradients, kind)
    parameter_elements, _ = readable(parameters or (), kind)
    with _one_at_a_time:
        plan = prepare(elements, parameter_elements, dead_threshold)
        rows_NC, histogram_NB = launch(plan, dead=dead_threshold != 0, inverse_scale=inverse_scale, histogram=histogram)
    add_implicit_zeros(rows_NC, histogram_NB, num_implicit_zeros)
    return Measurement(rows_NC, histogram_NB)


def measure_received(gradients: Tensors, *, inverse_scale: Scale) -> Tensor:
    """Sum the squares of finite elements, and count NaN and Inf: [N, 3]. Three launches for gradients of one dtype."""
    elements, _ = readable(gradients, gradients[0].device.type)
    with _one_at_a_time:  # as parameters, of which nothing else is asked
        rows_NC, _ = launch(prepare([], elements), dead=False, inverse_scale=inverse_scale, histogram=False)
    return rows_NC[:, RECEIVED_COLUMNS]


def launch(
    plan: Plan,
    *,
    dead: bool,
    inverse_scale: Tensor | None,
    histogram: bool,
    only_compile_for: torch.device | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Queue the kernels on the current stream; nothing here reads or writes host memory, so a CUDA graph may hold it.

    Args:
        plan: prepared.
        dead: the dead threshold is not 0.
        inverse_scale: of the gradients; where there are none, of the parameters.
        only_compile_for: queue nothing.

    Returns:
        rows [N, C] and, if asked for, the histogram [N, B]; without gradients the rows have the parameters' and
        the received columns only.
    """
    device, num_chunks = plan.chunks.device, plan.num_chunks
    rows_NC = torch.empty((plan.num_rows, NUM_COLUMNS), dtype=torch.float64, device=device)
    histogram_NB = torch.zeros((plan.num_gradients, NUM_BINS), dtype=torch.int64, device=device) if histogram else None
    partials = torch.empty((kernels.NUM_PARTIALS, num_chunks), dtype=torch.float64, device=device)
    scale = plan.one if inverse_scale is None else _aligned(inverse_scale.to(torch.float64))
    table, chunks = plan.table.device_table, plan.chunks
    counts = partials if histogram_NB is None else histogram_NB
    shared = histogram and kernels.counts_in_shared_memory()
    queue = partial(_queue, only_compile_for)
    for group in plan.groups:
        compared, counted = (group.are_gradients and asked for asked in (dead, histogram))
        # A scale decides which elements are dead, and their bins; everything else the fold multiplies.
        scaled = inverse_scale is not None and (compared or counted)
        reading = {"DTYPE": group.code, "ALIGNED": group.aligned, "LANES": LANES, "SQUARES": not group.are_gradients}
        counting = {"DEAD": compared, "SCALED": scaled, "HISTOGRAM": counted, "SHARED": counted and shared}
        given = (table, chunks, scale, partials, counts if counted else partials, group.first, num_chunks)
        queue(kernels.measure_chunks, group.count, *given, **reading, **counting)
    given = (table, chunks, scale, partials, counts, plan.num_gradients, num_chunks)
    queue(kernels.measure_carefully, num_chunks, *given, LANES=CAREFUL_LANES, HISTOGRAM=histogram, SHARED=shared)
    scales = (scale, plan.one if plan.num_gradients else scale)
    numbers = (plan.num_gradients, plan.num_tensors, num_chunks)
    shape = {"NUM_COLUMNS": NUM_COLUMNS, "BLOCK": FOLD_BLOCK}
    queue(kernels.fold, plan.num_rows, table, plan.tensors, partials, *scales, rows_NC, *numbers, **shape)
    return rows_NC, histogram_NB


def _aligned(scalar: Tensor) -> Tensor:
    """Kernels are compiled for addresses that are multiples of 16, as whole tensors have them."""
    return scalar.clone() if scalar.data_ptr() % 16 else scalar


def _queue(
    only_compile_for: torch.device | None, kernel: Any, num_programs: int, *arguments: Any, **constants: Any
) -> None:
    """Launch a kernel on the current stream of its tensors' device, which need not be the current device."""
    if not num_programs:
        return
    device = only_compile_for or arguments[0].device
    variant = (kernel, device, *constants.values())
    constants["enable_fp_fusion"] = True  # whatever TRITON_DEFAULT_FP_FUSION says: sums are those of any other run
    if only_compile_for is None and variant in _compiled:
        with _on(device):
            kernel[(num_programs,)](*arguments, **constants)
        return
    name = "-".join(map(str, (kernel.fn.__name__, *variant[2:])))
    with _compiling, after_other_processes(name, longest=_LONGEST), _on(device):
        if only_compile_for is None:
            _whatever_happens(lambda: kernel[(num_programs,)](*arguments, **constants))
        elif variant not in _compiled:
            _whatever_happens(
                lambda: kernels.build_launcher(kernel.warmup(*arguments, grid=(num_programs,), **constants))
            )
        _compiled.add(variant)


def _whatever_happens(compile_kernel: Callable[[], Any]) -> None:
    """Compile where warnings are exceptions, and where the folder for compiled kernels cannot be written to."""
    try:
        compile_kernel()
    except Warning:  # one of Triton's own, with `python -W error`
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            compile_kernel()
    except OSError:  # a home that is read-only, or a disk that is full
        before = os.environ.get("TRITON_CACHE_DIR")
        os.environ["TRITON_CACHE_DIR"] = _temporary_folder().name
        try:
            compile_kernel()
        finally:
            if before is None:
                del os.environ["TRITON_CACHE_DIR"]
            else:
                os.environ["TRITON_CACHE_DIR"] = before


@cache
def _temporary_folder() -> tempfile.TemporaryDirectory[str]:
    """Removed when the process ends."""
    return tempfile.TemporaryDirectory(prefix="gradwatch-kernels-")


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
    """Compile what gradients and parameters of these dtypes need, so that the first sample does not: seconds in all.

    Touches no memory of the device and queues nothing there: the program may be capturing a graph by then. What a loss
    scale needs comes later, and last what gradients need that do not begin where the allocator begins, as in buckets.

    Args:
        dtypes: any; those that cannot have a gradient need nothing.
        histogram: some samples will want a histogram; the kernels without one are compiled too.
        in_buckets: gradients or parameters may begin anywhere, not only where the allocator lets tensors begin.
        goes_on: asked before each launch; False when nobody will need its kernels any more.
    """
    seen = [
        torch.zeros(1, dtype=dtype, device="cpu") for dtype in dtypes if dtype.is_floating_point or dtype.is_complex
    ]
    natives = dict.fromkeys(elements_of(tensor)[0].dtype for tensor in seen)  # what a kernel reads instead
    scale = torch.ones((), dtype=torch.float64, device="cpu")
    for aligned, inverse_scale in ((True, None), (True, scale), (False, None), (False, scale)):
        if not aligned and not in_buckets:
            continue
        for dtype in natives:
            # A kernel depends on dtypes and alignment, not on where its arguments lie or how many elements there are.
            size = LANES * LOADS * ALIGNMENT // dtype.itemsize  # a round, so that there is an ordinary chunk
            tensors = [torch.empty(size + 1, dtype=dtype, device="cpu")[0 if aligned else 1 :]]
            plan = prepare(tensors, tensors, dead_threshold)
            for with_histogram in sorted({False, histogram}, reverse=True):  # the first sample has one
                if not goes_on():
                    return
                launch(
                    plan,
                    dead=dead_threshold != 0,
                    inverse_scale=inverse_scale,
                    histogram=with_histogram,
                    only_compile_for=device,
                )
