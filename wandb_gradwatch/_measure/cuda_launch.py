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
from functools import cache, lru_cache, partial
from itertools import product
from operator import attrgetter
from typing import Any, Final, NamedTuple

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
_launched: Final[dict[tuple[Any, ...], Any]] = {}  # the same variants, as Triton's launch has returned them
_LONGEST: Final = 10.0  # seconds to wait for another process to compile a variant, which usually takes one or two

# Watchers of models with the same shapes share a plan and its table. A thread holds this lock from writing its
# addresses until the kernels that read them are queued, so that another thread does not overwrite them.
_one_at_a_time: Final = threading.Lock()

_DTYPE: Final = attrgetter("dtype")

_FEW: Final = 2  # most tensors of a list that is measured for each of many shapes
# The lists of tensors that were measured last, by their lengths, and the plan for each: what is to be the same, and the
# plan.
_known: Final[dict[tuple[Any, ...], tuple[Any, Plan]]] = {}
_MAX_KNOWN: Final = 32


def prepare(gradients: Sequence[Tensor], parameters: Sequence[Tensor] = (), dead_threshold: float | None = 0.0) -> Plan:
    """Upload the addresses of tensors, if they changed; the part of a sample that a CUDA graph must not capture.

    Args:
        gradients, parameters: contiguous, with dtypes in NATIVE_DTYPES, on one device; they must be kept alive until
            the launch that reads them is queued.
        dead_threshold: the dead threshold of the gradients; None leaves the one that was uploaded last.
    """
    return _laid_out([*gradients, *parameters], len(gradients), _dead_words(dead_threshold))


def _laid_out(tensors: Sequence[Tensor], num_gradients: int, dead_words: tuple[int, ...]) -> Plan:
    addresses = list(map(Tensor.data_ptr, tensors))
    sizes, dtypes, device = tuple(map(Tensor.numel, tensors)), tuple(map(_DTYPE, tensors)), tensors[0].device
    plan_of = plan_for_few if len(tensors) <= _FEW else plan_for
    plan = plan_of(
        sizes, dtypes, _aligned_addresses(addresses), num_gradients, LANES, CHUNK, device, current_stream(device)
    )
    _write(plan, dead_words, addresses)
    return plan


def _write(plan: Plan, dead_words: tuple[int, ...], addresses: list[int]) -> None:
    plan.table.write([*(dead_words or plan.table.last[:2] or (0, 0)), *addresses])


def _aligned_addresses(addresses: list[int]) -> tuple[bool, ...]:
    return tuple([address % ALIGNMENT == 0 for address in addresses])


class _Prepared(NamedTuple):
    plan: Plan
    num_implicit_zeros: Sequence[int]
    kept: Sequence[Tensor]  # the memory that the kernels read


def _prepare_any(gradients: Tensors, parameters: Tensors, dead_threshold: float | None) -> _Prepared:
    """Do what prepare() does, for tensors of any layout and dtype.

    Lists like those of the sample before are recognised by a single call: asking every tensor for its type, dtype,
    layout and size would take most of the host's time.
    """
    tensors, dead_words = [*gradients, *parameters], _dead_words(dead_threshold)
    device = tensors[0].device
    key = (len(gradients), len(tensors), LANES, CHUNK, device, current_stream(device))
    known = _known.get(key)
    if known is not None and known[0].check(*tensors):
        addresses, plan = list(map(Tensor.data_ptr, tensors)), known[1]
        if plan.table.last[2:] == addresses or plan.aligned == _aligned_addresses(addresses):
            _write(plan, dead_words, addresses)
            return _Prepared(plan, (), tensors)
    elements, num_implicit_zeros = readable(gradients, device.type)
    parameter_elements, _ = readable(parameters, device.type)
    kept = [*elements, *parameter_elements]
    plan = _laid_out(kept, len(gradients), dead_words)
    if elements is gradients and parameter_elements is parameters and len(tensors) > _FEW:
        if len(_known) >= _MAX_KNOWN:
            del _known[next(iter(_known))]
        _known[key] = (_guards_of(tensors), plan)
    return _Prepared(plan, num_implicit_zeros, kept)


def _guards_of(tensors: Sequence[Tensor]) -> Any:
    """Return torch's own check of whether tensors have the type, dtype, device, sizes and strides of these."""
    return torch._C._dynamo.guards.TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None)


@lru_cache(maxsize=16)
def _dead_words(dead_threshold: float | None) -> tuple[int, ...]:
    """Return the threshold as float bits: float32 bits doubled plus 1 (dead ones are below), and float64 bits.

    Nothing for None.
    """
    if dead_threshold is None:
        return ()
    of_float32 = largest_magnitude_within(dead_threshold, FLOAT32)
    return max(2 * of_float32 + 1, 0), largest_magnitude_within(dead_threshold, FLOAT64)


def measure(
    gradients: Tensors, parameters: Tensors | None, *, dead_threshold: float, inverse_scale: Scale, histogram: bool
) -> Measurement:
    """Measure each gradient: rows [N, C] in float64; with `histogram` also the histogram [N, B] in int64.

    Cost: one launch per dtype and alignment of the gradients, and of the parameters, plus two; one read of the
    gradients and of the parameters; no host sync unless a gradient is sparse.
    """
    with _one_at_a_time:
        prepared = _prepare_any(gradients, parameters or (), dead_threshold)
        rows_NC, histogram_NB = launch(
            prepared.plan, dead=dead_threshold != 0, inverse_scale=inverse_scale, histogram=histogram
        )
    add_implicit_zeros(rows_NC, histogram_NB, prepared.num_implicit_zeros)
    return Measurement(rows_NC, histogram_NB)


def measure_received(gradients: Tensors, *, inverse_scale: Scale) -> Tensor:
    """Sum the squares of finite elements, and count NaN and Inf: [N, 3]. Three launches for gradients of one dtype."""
    with _one_at_a_time:  # the kernels measure only these columns for parameters
        prepared = _prepare_any((), gradients, 0.0)
        rows_NC, _ = launch(prepared.plan, dead=False, inverse_scale=inverse_scale, histogram=False)
    return rows_NC[:, RECEIVED_COLUMNS]


def take_witnesses(gradients: Tensors, parameters: Tensors, num_witnesses: int) -> Tensor:
    """Copy elements at a fixed stride of each tensor, as `generic.take_witnesses`: [2, N, any]. One launch."""
    with _one_at_a_time:
        prepared = _prepare_any(gradients, parameters, None)
        return _launch_witnesses(prepared.plan, num_witnesses).view(2, len(gradients), num_witnesses)


def _launch_witnesses(plan: Plan, num_witnesses: int, only_compile_for: torch.device | None = None) -> Tensor:
    shape = (plan.num_tensors, num_witnesses)
    device = plan.chunks.device
    witnesses = torch.empty(shape, dtype=torch.float64, device=device)
    given = (plan.table.device_table, plan.tensors, witnesses, plan.num_tensors, num_witnesses)
    with _on(only_compile_for or device):
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
    with _on(only_compile_for or plan.chunks.device):
        return _launch_all(plan, dead, inverse_scale, histogram, only_compile_for)


def _launch_all(
    plan: Plan, dead: bool, inverse_scale: Tensor | None, histogram: bool, only_compile_for: torch.device | None
) -> tuple[Tensor, Tensor | None]:
    device, num_chunks = plan.chunks.device, plan.num_chunks
    num_rows = max(plan.num_gradients, plan.num_tensors - plan.num_gradients)
    rows_NC = torch.empty((num_rows, NUM_COLUMNS), dtype=torch.float64, device=device)
    histogram_NB = torch.zeros((plan.num_gradients, NUM_BINS), dtype=torch.int64, device=device) if histogram else None
    partials = plan.partials
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
    """Launch a kernel on the current stream of the current device, to which its tensors belong."""
    if not num_programs:
        return
    values = (*constants.values(),)  # in the order of the kernel's arguments
    variant = (kernel, kernels.active_driver(), only_compile_for or arguments[0].device, *values)
    if only_compile_for is None and (launched := _launched.get(variant)) is not None:
        kernels.launch_again(launched, num_programs, (*arguments, *values))
        return
    constants["enable_fp_fusion"] = True  # overrides TRITON_DEFAULT_FP_FUSION, so that sums are the same in all runs
    if only_compile_for is None and variant in _compiled:
        _remember(variant, kernel[(num_programs,)](*arguments, **constants))
        return
    name = "-".join(map(str, (kernel.fn.__name__, *variant[2:])))
    with _compiling, after_other_processes(name, longest=_LONGEST):
        if only_compile_for is None:
            _remember(variant, _whatever_happens(lambda: kernel[(num_programs,)](*arguments, **constants)))
        elif variant not in _compiled:
            _whatever_happens(
                lambda: kernels.build_launcher(kernel.warmup(*arguments, grid=(num_programs,), **constants))
            )
        _compiled.add(variant)


def _remember(variant: tuple[Any, ...], launched: Any) -> None:
    if kernels.can_launch_again(launched):
        _launched[variant] = launched


def _whatever_happens(compile_kernel: Callable[[], Any]) -> Any:
    """Compile even if warnings are errors, and even if the folder for compiled kernels is not writable."""
    try:
        return compile_kernel()
    except Warning:  # from Triton, under `python -W error`
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return compile_kernel()
    except OSError:  # a read-only home, or a full disk
        before = os.environ.get("TRITON_CACHE_DIR")
        os.environ["TRITON_CACHE_DIR"] = _temporary_folder().name
        try:
            return compile_kernel()
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
