"""Statistics on CUDA where Triton is installed: fused kernels read every gradient once, in a few launches.

    table of addresses --> measure_chunks: one program per chunk
                       --> measure_carefully: the remaining chunks           --> partials
                       --> fold: one program per gradient or parameter       --> rows [N, C]
                       --> take_witnesses: one program per tensor            --> a few of its elements

The chunks depend only on sizes and dtypes, and are uploaded once per plan. A sample uploads only the addresses, and
only if one changed (AddressTable). The kernels are in cuda.py, the plans in cuda_plan.py.
"""

import os
import tempfile
import threading
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial
from itertools import product
from operator import attrgetter
from typing import Any, Final

import torch
from torch import Tensor

from . import cuda as kernels
from .columns import NUM_BINS, NUM_COLUMNS, RECEIVED_COLUMNS
from .compilation import after_other_processes
from .cuda_plan import ALIGNMENT, LOADS, Plan, plan_for, plan_for_few
from .elements import (
    MAX_WITNESSES,
    Measurement,
    Scale,
    Tensors,
    add_implicit_zeros,
    current_stream,
    elements_of,
    readable,
)
from .float_bits import FLOAT32, FLOAT64, largest_magnitude_within

# N tensors, M chunks, C columns, B histogram bins

LANES: Final = 128  # of a program: four warps; each lane has four loads of 16 bytes in flight
CHUNK: Final = 65_536  # most elements of a program: the work outside of its loop is then comparatively small
CAREFUL_LANES: Final = 512  # elements that measure_carefully processes at once
WITNESS_LANES: Final = MAX_WITNESSES  # a power of two
FOLD_BLOCK: Final = 512  # partials of one column that a program of fold processes at once

# The kernel variants that are compiled. Two threads must not compile at once, and a thread that needs the variant which
# another is compiling should wait for it. So should another rank: Triton keeps compiled kernels on disk.
_compiled: Final[set[tuple[Any, ...]]] = set()
_compiling: Final = threading.Lock()
_LONGEST: Final = 10.0  # seconds to wait for another process to compile a variant, which usually takes one or two

# Watchers of models with the same shapes share a plan and its table. A thread holds this lock from writing its
# addresses until the kernels that read them are queued, so that another thread does not overwrite them.
_one_at_a_time: Final = threading.Lock()

_DTYPE: Final = attrgetter("dtype")


def prepare(gradients: Sequence[Tensor], parameters: Sequence[Tensor] = (), dead_threshold: float | None = 0.0) -> Plan:
    """Upload the addresses of tensors, if they changed; the part of a sample that a CUDA graph must not capture.

    Args:
        gradients, parameters: contiguous, with dtypes in NATIVE_DTYPES, on one device; they must be kept alive until
            the launch that reads them is queued.
        dead_threshold: the dead threshold of the gradients; None leaves the one that was uploaded last.
    """
    tensors = [*gradients, *parameters]
    addresses = list(map(Tensor.data_ptr, tensors))
    sizes, dtypes, device = tuple(map(Tensor.numel, tensors)), tuple(map(_DTYPE, tensors)), tensors[0].device
    aligned = tuple([address % ALIGNMENT == 0 for address in addresses])
    plan_of = plan_for_few if len(tensors) <= 2 else plan_for
    plan = plan_of(sizes, dtypes, aligned, len(gradients), LANES, CHUNK, device, current_stream(device))
    dead_words = plan.table.last[:2] or [0, 0] if dead_threshold is None else _dead_words(dead_threshold)
    plan.table.write([*dead_words, *addresses])
    return plan


def _dead_words(dead_threshold: float) -> tuple[int, int]:
    """Return the threshold as float bits: float32 bits doubled plus 1 (dead ones are below), and float64 bits."""
    of_float32 = largest_magnitude_within(dead_threshold, FLOAT32)
    return max(2 * of_float32 + 1, 0), largest_magnitude_within(dead_threshold, FLOAT64)


def measure(
    gradients: Tensors, parameters: Tensors | None, *, dead_threshold: float, inverse_scale: Scale, histogram: bool
) -> Measurement:
    """Measure each gradient: rows [N, C] in float64; with `histogram` also the histogram [N, B] in int64.

    Cost: one launch per dtype and alignment of the gradients, and of the parameters, plus two; one read of the
    gradients and of the parameters; no host sync unless a gradient is sparse.
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
    with _one_at_a_time:  # the kernels measure only these columns for parameters
        rows_NC, _ = launch(prepare([], elements), dead=False, inverse_scale=inverse_scale, histogram=False)
    return rows_NC[:, RECEIVED_COLUMNS]


def take_witnesses(gradients: Tensors, parameters: Tensors, num_witnesses: int) -> Tensor:
    """Copy elements at a fixed stride of each tensor, as `generic.take_witnesses`: [2, N, any]. One launch."""
    with _one_at_a_time:
        plan = prepare(gradients, parameters, None)
        return _launch_witnesses(plan, num_witnesses).view(2, len(gradients), num_witnesses)


def _launch_witnesses(plan: Plan, num_witnesses: int, only_compile_for: torch.device | None = None) -> Tensor:
    shape = (plan.num_tensors, num_witnesses)
    witnesses = torch.empty(shape, dtype=torch.float64, device=plan.chunks.device)
    given = (plan.table.device_table, plan.tensors, witnesses, plan.num_tensors, num_witnesses)
    _queue(only_compile_for, kernels.take_witnesses, plan.num_tensors, *given, LANES=WITNESS_LANES)
    return witnesses


def launch(
    plan: Plan,
    *,
    dead: bool,
    inverse_scale: Tensor | None,
    histogram: bool,
    only_compile_for: torch.device | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Queue the kernels on the current stream. No host memory is read or written, so a CUDA graph may capture this.

    Args:
        plan: from prepare().
        dead: whether the dead threshold is not 0.
        inverse_scale: of the gradients; without gradients, of the parameters.
        histogram: count the elements in the fixed bins as well.
        only_compile_for: a device to compile the kernels for; nothing is queued.

    Returns:
        The rows [N, C], and with `histogram` the histogram [N, B]. Without gradients the rows have only the parameter
        columns and the received columns.
    """
    device, num_chunks = plan.chunks.device, plan.num_chunks
    num_rows = max(plan.num_gradients, plan.num_tensors - plan.num_gradients)
    rows_NC = torch.empty((num_rows, NUM_COLUMNS), dtype=torch.float64, device=device)
    histogram_NB = torch.zeros((plan.num_gradients, NUM_BINS), dtype=torch.int64, device=device) if histogram else None
    partials = torch.empty((kernels.NUM_PARTIALS, num_chunks), dtype=torch.float64, device=device)
    scale = plan.one if inverse_scale is None else _aligned(inverse_scale.to(torch.float64))
    table, chunks = plan.table.device_table, plan.chunks
    counts = partials if histogram_NB is None else histogram_NB
    shared = histogram and kernels.counts_in_shared_memory()
    queue = partial(_queue, only_compile_for)
    for group in plan.groups:
        compared, counted = (group.are_gradients and asked for asked in (dead, histogram))
        # The scale affects here which elements are dead, and their bins; fold scales all other columns.
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
    queue(kernels.fold, plan.num_tensors, table, plan.tensors, partials, *scales, rows_NC, *numbers, **shape)
    return rows_NC, histogram_NB


def _aligned(scalar: Tensor) -> Tensor:
    """Copy a scalar whose address is not a multiple of 16, because kernels are compiled for addresses that are."""
    return scalar.clone() if scalar.data_ptr() % 16 else scalar


def _queue(
    only_compile_for: torch.device | None, kernel: Any, num_programs: int, *arguments: Any, **constants: Any
) -> None:
    """Launch a kernel on the current stream of its tensors' device, which need not be the current device."""
    if not num_programs:
        return
    device = only_compile_for or arguments[0].device
    variant = (kernel, device, *constants.values())
    constants["enable_fp_fusion"] = True  # overrides TRITON_DEFAULT_FP_FUSION, so that sums are the same in all runs
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
    """Compile even if warnings are errors, and even if the folder for compiled kernels is not writable."""
    try:
        compile_kernel()
    except Warning:  # from Triton, under `python -W error`
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            compile_kernel()
    except OSError:  # a read-only home, or a full disk
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
    """Create a folder that is removed when the process ends."""
    return tempfile.TemporaryDirectory(prefix="gradwatch-kernels-")


def _on(device: torch.device) -> AbstractContextManager[Any]:
    """Make the device current for a launch: Triton launches on the current device."""
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
    """Compile the kernels for gradients and parameters of these dtypes before the first sample; takes seconds.

    No memory of the device is used and nothing is queued, because the program may be capturing a graph meanwhile.
    Variants with a loss scale are compiled later, and last those for gradients at unaligned addresses, as in buckets.

    Args:
        dtypes: any dtypes; those that cannot have a gradient are ignored.
        histogram: compile the variants with a histogram as well.
        in_buckets: gradients or parameters may have unaligned addresses, unlike tensors from the allocator.
        goes_on: called before each launch; returns False if the kernels are no longer needed.
    """
    natives = dict.fromkeys(  # the dtypes that the kernels read
        elements_of(torch.zeros(1, dtype=dtype, device="cpu"))[0].dtype
        for dtype in dtypes
        if dtype.is_floating_point or dtype.is_complex
    )
    scales = (None, torch.ones((), dtype=torch.float64, device="cpu"))
    histograms = (True, False) if histogram else (False,)  # the first sample has a histogram
    variants = product((True, False) if in_buckets else (True,), scales, natives, histograms)
    for aligned, inverse_scale, dtype, with_histogram in variants:
        if not goes_on():
            return
        # Kernels are compiled per dtype and alignment, independent of addresses and sizes.
        size = LANES * LOADS * ALIGNMENT // dtype.itemsize  # one round, so that there is an ordinary chunk
        tensors = [torch.empty(size + 1, dtype=dtype, device="cpu")[0 if aligned else 1 :]]
        plan = prepare(tensors, tensors, dead_threshold)
        launch(
            plan,
            dead=dead_threshold != 0,
            inverse_scale=inverse_scale,
            histogram=with_histogram,
            only_compile_for=device,
        )
        _launch_witnesses(plan, MAX_WITNESSES, only_compile_for=device)
