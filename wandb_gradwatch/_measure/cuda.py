"""The Triton kernels of the CUDA backend, launched by cuda_launch.py. The only file that imports Triton.

The file is long because everything in it is compiled into a few kernels, which share nearly all of it.

    measure_chunks     ordinary chunks, in float32              --> partials [NUM_PARTIALS, M] --> fold --> rows [N, C]
    measure_carefully  float64, tensors' ends, refused chunks   -->

A chunk is a part of one tensor. Its sums run in float32, a few terms per lane, if no square can overflow or vanish.
Otherwise measure_chunks refuses the chunk, and measure_carefully reads it again in float64 with masks. NaN and Inf
therefore cost an ordinary chunk no instructions and no registers. Partials are added in a fixed order, so results are
reproducible bit for bit. Histograms use integer atomics, whose order does not matter.

Each lane keeps its own sum per column, and has 64 bytes of loads in flight: one sum per element would need so many
registers that too few programs would run at once to keep the memory busy. No integer overflows, so Triton's own checks
for that (TRITON_DEBUG=1) report nothing.
"""

# Kernels are not typed for mypy: their arguments are pointers and numbers of the device.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, import-untyped, import-not-found"
# Nested ifs are intended: the outer one is resolved when the kernel is compiled, and an `and` would compile both.
# ruff: noqa: SIM102, SIM108
# No `from __future__ import annotations`: the interpreters of Triton 3.0 and 3.1 know tl.constexpr only by its class.

from typing import Any, Final

import triton
import triton.language as tl

from .columns import NUM_BINS, ZERO_BIN, Column
from .cuda_plan import CAREFUL_ONLY

# N tensors (gradients, then parameters), M chunks, C columns, B histogram bins

_VERSION: Final = tuple(int(part) for part in triton.__version__.split(".")[:2])

# The places of the columns in a row. Only fold knows them: Triton compares every constant of a kernel at each launch.
_NUM_ELEMENTS: Final = tl.constexpr(Column.NUM_ELEMENTS.value)
_NUM_NAN: Final = tl.constexpr(Column.NUM_NAN.value)
_NUM_INF: Final = tl.constexpr(Column.NUM_INF.value)
_NUM_ZERO: Final = tl.constexpr(Column.NUM_ZERO.value)
_NUM_DEAD: Final = tl.constexpr(Column.NUM_DEAD.value)
_GRAD_SUM: Final = tl.constexpr(Column.GRAD_SUM.value)
_GRAD_SUM_SQ: Final = tl.constexpr(Column.GRAD_SUM_SQ.value)
_GRAD_MIN: Final = tl.constexpr(Column.GRAD_MIN.value)
_GRAD_MAX: Final = tl.constexpr(Column.GRAD_MAX.value)
_GRAD_ABS_MIN_NONZERO: Final = tl.constexpr(Column.GRAD_ABS_MIN_NONZERO.value)
_RECEIVED_SUM_SQ: Final = tl.constexpr(Column.RECEIVED_SUM_SQ.value)
_RECEIVED_NUM_NAN: Final = tl.constexpr(Column.RECEIVED_NUM_NAN.value)
_RECEIVED_NUM_INF: Final = tl.constexpr(Column.RECEIVED_NUM_INF.value)
_PARAM_SUM_SQ: Final = tl.constexpr(Column.PARAM_SUM_SQ.value)
_PARAM_NUM_NONFINITE: Final = tl.constexpr(Column.PARAM_NUM_NONFINITE.value)

_BFLOAT16: Final = tl.constexpr(1)
_CAREFUL_ONLY: Final = tl.constexpr(CAREFUL_ONLY)
_REFUSED: Final = tl.constexpr(-1.0)  # stored as the chunk's number of NaN

# A chunk's float32 sum of squares is accurate if it exceeds this times the number of elements: what squares below
# 2**-126 lose is then less than 2**-28 of the sum.
_ORDINARY: Final = tl.constexpr(2.0**-98)
_INFINITY: Final = tl.constexpr(0x7FF0000000000000)
_MAGNITUDE: Final = tl.constexpr(0x7FFFFFFFFFFFFFFF)
_LARGEST: Final = tl.constexpr(0xFFFFFFFF)
_ZERO_BIN: Final = tl.constexpr(ZERO_BIN)
_NUM_BINS: Final = tl.constexpr(NUM_BINS)

# A program counts in 1024 cells, one for each sign, exponent and first mantissa bit of float32; they become bins at the
# program's end. On NVIDIA they are in shared memory, in two copies: lanes that hit the same cell at once wait for each
# other, so neighbours use different copies. Behind the cells each lane has its own for elements that are not counted,
# so that many zeros make no lane wait. tl.histogram takes ballots up to Triton 3.7, some 60 instructions per element,
# and the language's own atomics all go to global memory.
_NUM_CELLS: Final = tl.constexpr(1024)
_NO_CELL: Final = tl.constexpr(511)  # a code of NaN, which is ignored
_ALLOCATE: Final = tl.constexpr("""{
    .shared .align 16 .b32 gradwatch_cells[2080];
    .reg .b32 copy;
    mov.u32 copy, %laneid;
    and.b32 copy, copy, 1;
    mov.u32 $0, gradwatch_cells;
    mad.lo.u32 $0, copy, 4, $0;
}""")
_CLEAR: Final = tl.constexpr("""{
    .reg .b32 place;
    and.b32 place, $2, -8;
    mad.lo.u32 place, $1, 8, place;
    mov.u32 $0, 0;
    st.shared.v2.u32 [place], {$0, $0};
}""")
_COUNT: Final = tl.constexpr("""{
    .reg .b32 place, nowhere;
    .reg .pred counted;
    mov.u32 nowhere, %laneid;
    and.b32 place, $3, -8;
    mad.lo.u32 nowhere, nowhere, 4, place;
    add.u32 nowhere, nowhere, 8192;
    mad.lo.u32 place, $1, 8, $3;
    setp.ne.u32 counted, $2, 0;
    selp.b32 place, place, nowhere, counted;
    red.relaxed.cta.shared.add.u32 [place], 1;
    mov.u32 $0, 0;
}""")
_READ: Final = tl.constexpr("""{
    .reg .b32 place, other;
    and.b32 place, $2, -8;
    mad.lo.u32 place, $1, 8, place;
    ld.shared.v2.u32 {$0, other}, [place];
    add.u32 $0, $0, other;
}""")


def counts_in_shared_memory() -> bool:
    """Return whether the cells are in shared memory, for which the kernels use NVIDIA's own instructions."""
    driver = active_driver()
    return driver is not None and driver.get_current_target().backend == "cuda"


def active_driver() -> Any:
    """Return the driver for which kernels are compiled and launched; None in the interpreter."""
    return triton.runtime.driver.active if isinstance(measure_chunks, triton.JITFunction) else None


def launch_again(compiled: Any, num_programs: int, arguments: tuple[Any, ...]) -> None:
    """Launch what an earlier launch has returned, with arguments of the same types and alignment, constants included.

    Triton's own launch would look at every argument again, to find the kernel that was compiled for such arguments.
    """
    compiled[(num_programs, 1, 1)](*arguments)


def can_launch_again(compiled: Any) -> bool:
    """Whether `launch_again` works: not in the interpreter; before Triton 3.4 the launchers took no constants."""
    return compiled is not None and _VERSION >= (3, 4)


def build_launcher(compiled: Any) -> None:
    """Build the launcher of a kernel that `warmup` has compiled; up to Triton 3.6 a C compiler takes most of a second.

    Otherwise the first launch would build it. Only the launch loads the kernel onto the device, because a CUDA graph
    that is being captured may forbid that.
    """
    if compiled is not None:  # an interpreter compiles nothing
        triton.runtime.driver.active.launcher_cls(compiled.src, compiled.metadata)


@triton.jit
def _chunk(table, chunks, num_chunks, chunk):
    """Return a chunk's tensor, address, number of elements (0 if the tensor's address is 0) and dtype."""
    tensor = tl.load(chunks + chunk)
    start = tl.load(chunks + num_chunks + chunk)
    size = tl.load(chunks + 2 * num_chunks + chunk)
    dtype = tl.load(chunks + 3 * num_chunks + chunk)
    address = tl.load(table + 2 + tensor)
    return tensor, address + start, tl.where(address == 0, 0, size).to(tl.int32), dtype


@triton.jit
def _load(address, DTYPE: tl.constexpr, ALIGNED: tl.constexpr, LANES: tl.constexpr):
    """Load a tile: 16 bytes per lane; bfloat16 in pairs, as 32-bit words, if the address is aligned.

    If aligned, the elements of a lane lie along one axis: [LANES, 16 bytes]. Otherwise loads of 16 bytes are not
    possible, and neighbouring lanes read neighbouring elements: [any, LANES].
    """
    if DTYPE == 0:
        pointer = address.to(tl.pointer_type(tl.float32))
    elif DTYPE == 2:
        pointer = address.to(tl.pointer_type(tl.float16))
    elif ALIGNED:
        pointer = address.to(tl.pointer_type(tl.uint32))
    else:
        pointer = address.to(tl.pointer_type(tl.uint16))
    WORDS: tl.constexpr = DTYPE == 0 or (DTYPE == _BFLOAT16 and ALIGNED)
    VECTOR: tl.constexpr = 4 if WORDS else 8
    if ALIGNED:
        offsets = tl.arange(0, LANES)[:, None] * VECTOR + tl.arange(0, VECTOR)[None, :]
        values = tl.load(tl.multiple_of(pointer, 16) + offsets)
    else:
        offsets = tl.arange(0, VECTOR)[:, None] * LANES + tl.arange(0, LANES)[None, :]
        values = tl.load(pointer + offsets)
    return values


@triton.jit
def _load_round(address, DTYPE: tl.constexpr, ALIGNED: tl.constexpr, LANES: tl.constexpr):
    """Load four tiles, all in flight before the first is used: one at a time would not keep the memory busy."""
    TILE: tl.constexpr = LANES * 16  # bytes
    a = _load(address + 0 * TILE, DTYPE, ALIGNED, LANES)
    b = _load(address + 1 * TILE, DTYPE, ALIGNED, LANES)
    c = _load(address + 2 * TILE, DTYPE, ALIGNED, LANES)
    d = _load(address + 3 * TILE, DTYPE, ALIGNED, LANES)
    return a, b, c, d


@triton.jit
def _first(tile, DTYPE: tl.constexpr):
    """Return the elements of a tile in float32; of a tile of pairs, the first elements."""
    if DTYPE == _BFLOAT16:  # by shifting bits: a conversion may flush subnormal numbers
        values = (tile.to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    else:
        values = tile.to(tl.float32)
    return values


@triton.jit
def _second(tile):
    """Return the second elements of a tile of pairs."""
    return (tile & 0xFFFF0000).to(tl.float32, bitcast=True)


@triton.jit
def _no_counts(SHARED: tl.constexpr):
    """Return a program's counters, all 0: the address of its cells, or the counts themselves."""
    if SHARED:
        counts = tl.inline_asm_elementwise(_ALLOCATE, "=r", [], dtype=tl.int32, is_pure=False, pack=1)
        cells = tl.arange(0, _NUM_CELLS)
        tl.inline_asm_elementwise(_CLEAR, "=r,r,r", [cells, counts], dtype=tl.int32, is_pure=False, pack=1)
        tl.debug_barrier()
    else:
        counts = tl.zeros([_NUM_CELLS], dtype=tl.int32)
    return counts


@triton.jit
def _count(counts, cells, counted, SHARED: tl.constexpr):
    """Count the cells of a tile's elements for which `counted` is not 0."""
    if SHARED:
        tl.inline_asm_elementwise(_COUNT, "=r,r,r,r", [cells, counted, counts], dtype=tl.int32, is_pure=False, pack=1)
    else:
        counts += tl.histogram(tl.ravel(tl.where(counted != 0, cells.to(tl.int32), _NO_CELL)), _NUM_CELLS)
    return counts


@triton.jit
def _counts_of_cells(counts, SHARED: tl.constexpr):
    """Return a program's counts: [_NUM_CELLS]; 0 in the cells of NaN and Inf."""
    cells = tl.arange(0, _NUM_CELLS)
    if SHARED:
        tl.debug_barrier()
        counts = tl.inline_asm_elementwise(_READ, "=r,r,r", [cells, counts], dtype=tl.int32, is_pure=False, pack=1)
    return tl.where((cells & 511) < 510, counts, 0)


@triton.jit
def _add_histogram(histogram, tensor, counts, zeros):
    """Add the counts of cells, and the number of zeros, to the tensor's histogram."""
    cells = tl.arange(0, _NUM_CELLS)
    code = cells & 511
    magnitude_bin = tl.minimum(tl.maximum(code - 158, tl.minimum(code >> 1, 1)), 127)  # (127 - 47) * 2 is bin 2
    bins = tl.where(cells < 512, _ZERO_BIN + 1 + magnitude_bin, _ZERO_BIN - 1 - magnitude_bin)
    row = histogram + tensor * _NUM_BINS
    tl.atomic_add(row + bins, counts.to(tl.int64), mask=counts > 0, sem="relaxed")
    tl.atomic_add(row + _ZERO_BIN, zeros.to(tl.int64), mask=zeros > 0, sem="relaxed")


@triton.jit
def _cells_of_float64(values):
    """Return cells of finite non-zero float64 values: those float32 cells that map to the values' bins."""
    bits = values.to(tl.int64, bitcast=True)
    code = ((bits & _MAGNITUDE) >> 51).to(tl.int32) - 1792  # (1023 - 127) * 2 converts the exponent to float32's
    code = tl.where(code < 2, 0, tl.minimum(code, 509))
    return tl.where(bits < 0, code + 512, code)


@triton.jit
def _is_finite_and_not_zero(values):
    magnitude = values.to(tl.int64, bitcast=True) & _MAGNITUDE
    return ((magnitude > 0) & (magnitude < _INFINITY)).to(tl.int32)


@triton.jit
def _store_partials(partials, num_chunks, nans, infs, zeros, deads, total, total_sq, lowest, highest, smallest):
    tl.store(partials + 0 * num_chunks, nans)
    tl.store(partials + 1 * num_chunks, infs)
    tl.store(partials + 2 * num_chunks, zeros)
    tl.store(partials + 3 * num_chunks, deads)
    tl.store(partials + 4 * num_chunks, total)
    tl.store(partials + 5 * num_chunks, total_sq)
    tl.store(partials + 6 * num_chunks, lowest)
    tl.store(partials + 7 * num_chunks, highest)
    tl.store(partials + 8 * num_chunks, smallest)


# Four tiles are reduced to one value per lane. A loop with `total += tl.sum(load)` would crash Triton 3.6's compiler.


@triton.jit
def _sums(a, b, c, d, AXIS: tl.constexpr):
    return (tl.sum(a, axis=AXIS) + tl.sum(b, axis=AXIS)) + (tl.sum(c, axis=AXIS) + tl.sum(d, axis=AXIS))


@triton.jit
def _minima(a, b, c, d, AXIS: tl.constexpr):
    return tl.minimum(
        tl.minimum(tl.min(a, axis=AXIS), tl.min(b, axis=AXIS)), tl.minimum(tl.min(c, axis=AXIS), tl.min(d, axis=AXIS))
    )


@triton.jit
def _maxima(a, b, c, d, AXIS: tl.constexpr):
    return tl.maximum(
        tl.maximum(tl.max(a, axis=AXIS), tl.max(b, axis=AXIS)), tl.maximum(tl.max(c, axis=AXIS), tl.max(d, axis=AXIS))
    )


@triton.jit
def _doubled(tile):
    """Return the bits of a magnitude, times 2: the bits of a float32 without its sign."""
    return tile.to(tl.uint32, bitcast=True) << 1


@triton.jit
def _is_zero(tile):
    return (_doubled(tile) == 0).to(tl.int32)


@triton.jit
def _or_largest(tile):
    """Return the doubled bits; for zeros a value above all others."""
    return tl.where(_doubled(tile) == 0, _LARGEST, _doubled(tile))


@triton.jit
def _is_dead(tile, dead, scale, SCALED: tl.constexpr):
    """Return whether |tile| * scale is at most the dead threshold."""
    if SCALED:  # in float64, so that the scaled gradient is not rounded
        is_dead = ((tile.to(tl.float64) * scale).to(tl.int64, bitcast=True) & _MAGNITUDE) <= dead
    else:
        is_dead = _doubled(tile) < dead.to(tl.uint32)
    return is_dead.to(tl.int32)


@triton.jit
def _count_tile(counts, true_zeros, tile, scale, AXIS: tl.constexpr, SCALED: tl.constexpr, SHARED: tl.constexpr):
    if SCALED:
        wide = tile.to(tl.float64) * scale
        counts = _count(counts, _cells_of_float64(wide), _is_finite_and_not_zero(wide), SHARED)
        true_zeros += tl.sum((wide == 0.0).to(tl.int32), axis=AXIS)
    else:
        counts = _count(counts, tile.to(tl.uint32, bitcast=True) >> 22, _doubled(tile), SHARED)
    return counts, true_zeros


@triton.jit
def _add_tiles(
    total, total_sq, lowest, highest, smallest, zeros, deads, counts, true_zeros, a, b, c, d, dead, scale,
    AXIS: tl.constexpr, SQUARES: tl.constexpr, ZEROS: tl.constexpr, DEAD: tl.constexpr, SCALED: tl.constexpr,
    HISTOGRAM: tl.constexpr, SHARED: tl.constexpr,
):  # fmt: skip
    if not SQUARES:
        total += _sums(a, b, c, d, AXIS)
    total_sq += _sums(a * a, b * b, c * c, d * d, AXIS)
    if not SQUARES:
        lowest = tl.minimum(lowest, _minima(a, b, c, d, AXIS))
        highest = tl.maximum(highest, _maxima(a, b, c, d, AXIS))
        da, db, dc, dd = _or_largest(a), _or_largest(b), _or_largest(c), _or_largest(d)
        smallest = tl.minimum(smallest, _minima(da, db, dc, dd, AXIS))
    if ZEROS:
        zeros += _sums(_is_zero(a), _is_zero(b), _is_zero(c), _is_zero(d), AXIS)
    if DEAD:
        deads += _sums(
            _is_dead(a, dead, scale, SCALED),
            _is_dead(b, dead, scale, SCALED),
            _is_dead(c, dead, scale, SCALED),
            _is_dead(d, dead, scale, SCALED),
            AXIS,
        )
    if HISTOGRAM:
        counts, true_zeros = _count_tile(counts, true_zeros, a, scale, AXIS, SCALED, SHARED)
        counts, true_zeros = _count_tile(counts, true_zeros, b, scale, AXIS, SCALED, SHARED)
        counts, true_zeros = _count_tile(counts, true_zeros, c, scale, AXIS, SCALED, SHARED)
        counts, true_zeros = _count_tile(counts, true_zeros, d, scale, AXIS, SCALED, SHARED)
    return total, total_sq, lowest, highest, smallest, zeros, deads, counts, true_zeros


@triton.jit(do_not_specialize=["first", "num_chunks"])  # otherwise it is compiled again for every model
def measure_chunks(
    table,  # [2 + N] int64: dead threshold as twice its float32 bits + 1 and as its float64 bits, addresses
    chunks,  # [4, M] int64: tensor, first byte, elements, dtype
    inverse_scale,  # 0-dim float64; read if SCALED
    partials,  # [NUM_PARTIALS, M] float64
    histogram,  # [gradients, B] int64, zeroed; written if HISTOGRAM
    first,  # the chunk of the first program
    num_chunks,  # M
    DTYPE: tl.constexpr,
    ALIGNED: tl.constexpr,
    LANES: tl.constexpr,
    SQUARES: tl.constexpr,  # for parameters: measure only the sum of squares
    DEAD: tl.constexpr,  # the dead threshold is not 0
    SCALED: tl.constexpr,
    HISTOGRAM: tl.constexpr,
    SHARED: tl.constexpr,
):
    chunk = first + tl.program_id(0)
    tensor, address, count, dtype = _chunk(table, chunks, num_chunks, chunk)
    if dtype < _CAREFUL_ONLY:
        AXIS: tl.constexpr = 1 if ALIGNED else 0
        ITEMSIZE: tl.constexpr = 4 if DTYPE == 0 else 2
        # Without ZEROS, the number of zeros is the number of elements that the histogram has not counted.
        ZEROS: tl.constexpr = SCALED if HISTOGRAM else not SQUARES
        if SCALED:
            scale = tl.load(inverse_scale)
            dead = tl.load(table + 1)
        else:
            scale = 1.0
            dead = tl.load(table)
        total = tl.zeros([LANES], dtype=tl.float32)
        total_sq = tl.zeros([LANES], dtype=tl.float32)
        lowest = tl.full([LANES], float("inf"), dtype=tl.float32)
        highest = tl.full([LANES], float("-inf"), dtype=tl.float32)
        # In doubled magnitude bits. _LARGEST remains if all elements are 0; with SQUARES that is unknown.
        smallest = tl.full([LANES], 0 if SQUARES else _LARGEST, dtype=tl.uint32)
        zeros = tl.zeros([LANES], dtype=tl.int32)
        deads = tl.zeros([LANES], dtype=tl.int32)
        true_zeros = tl.zeros([LANES], dtype=tl.int32)
        counts = zeros
        if HISTOGRAM:
            counts = _no_counts(SHARED)
        for begin in range(0, count * ITEMSIZE, LANES * 64):
            a, b, c, d = _load_round(address + begin, DTYPE, ALIGNED, LANES)
            total, total_sq, lowest, highest, smallest, zeros, deads, counts, true_zeros = _add_tiles(
                total, total_sq, lowest, highest, smallest, zeros, deads, counts, true_zeros,
                _first(a, DTYPE), _first(b, DTYPE), _first(c, DTYPE), _first(d, DTYPE), dead, scale,
                AXIS, SQUARES, ZEROS, DEAD, SCALED, HISTOGRAM, SHARED,
            )  # fmt: skip
            if ALIGNED:
                if DTYPE == _BFLOAT16:
                    total, total_sq, lowest, highest, smallest, zeros, deads, counts, true_zeros = _add_tiles(
                        total, total_sq, lowest, highest, smallest, zeros, deads, counts, true_zeros,
                        _second(a), _second(b), _second(c), _second(d), dead, scale,
                        AXIS, SQUARES, ZEROS, DEAD, SCALED, HISTOGRAM, SHARED,
                    )  # fmt: skip
        chunk_sq = tl.sum(total_sq.to(tl.float64), axis=0)
        num_zero = tl.sum(zeros, axis=0)
        if HISTOGRAM:
            counts = _counts_of_cells(counts, SHARED)
            if ZEROS == 0:
                num_zero = count - tl.sum(counts, axis=0)
        bits = tl.min(smallest, axis=0)
        partials += chunk
        if ((chunk_sq > count * _ORDINARY) & (chunk_sq < float("inf"))) | (bits == _LARGEST):
            num_dead = num_zero
            if DEAD:
                num_dead = tl.sum(deads, axis=0)
            magnitude = (bits >> 1).to(tl.float32, bitcast=True).to(tl.float64)
            _store_partials(
                partials, num_chunks, 0.0, 0.0, num_zero, num_dead, tl.sum(total.to(tl.float64), axis=0), chunk_sq,
                tl.min(lowest, axis=0), tl.max(highest, axis=0), tl.where(bits == _LARGEST, float("inf"), magnitude),
            )  # fmt: skip
            if HISTOGRAM:
                if SCALED:
                    num_zero = tl.sum(true_zeros, axis=0)
                _add_histogram(histogram, tensor, counts, num_zero)
        else:
            tl.store(partials, _REFUSED)


@triton.jit
def _load_carefully(address, offsets, mask, dtype):
    """Load elements as float64; 0 where masked."""
    if dtype == 0:
        values = tl.load(address.to(tl.pointer_type(tl.float32)) + offsets, mask=mask, other=0.0).to(tl.float64)
    elif dtype == 1:
        halves = tl.load(address.to(tl.pointer_type(tl.uint16)) + offsets, mask=mask, other=0)
        values = (halves.to(tl.uint32) << 16).to(tl.float32, bitcast=True).to(tl.float64)
    elif dtype == 2:
        values = tl.load(address.to(tl.pointer_type(tl.float16)) + offsets, mask=mask, other=0.0).to(tl.float64)
    else:
        values = tl.load(address.to(tl.pointer_type(tl.float64)) + offsets, mask=mask, other=0.0)
    return values


@triton.jit(do_not_specialize=["num_gradients", "num_chunks"])
def measure_carefully(
    table,
    chunks,
    inverse_scale,  # 0-dim float64, for gradients
    partials,
    histogram,
    num_gradients,
    num_chunks,
    LANES: tl.constexpr,
    HISTOGRAM: tl.constexpr,
    SHARED: tl.constexpr,
):
    """Measure, in float64, all partials of chunks that measure_chunks has refused or does not read."""
    chunk = tl.program_id(0)
    partials += chunk
    # Nearly all programs end here, before the loads that depend on each other.
    if (tl.load(chunks + 3 * num_chunks + chunk) >= _CAREFUL_ONLY) | (tl.load(partials) == _REFUSED):
        tensor, address, count, dtype = _chunk(table, chunks, num_chunks, chunk)
        dtype = dtype & 3
        scale = tl.load(inverse_scale)
        dead = tl.load(table + 1)
        lanes = tl.arange(0, LANES)
        nans = tl.zeros([LANES], dtype=tl.int32)
        infs = tl.zeros([LANES], dtype=tl.int32)
        zeros = tl.zeros([LANES], dtype=tl.int32)
        deads = tl.zeros([LANES], dtype=tl.int32)
        true_zeros = tl.zeros([LANES], dtype=tl.int32)
        chunk_sum = tl.zeros([LANES], dtype=tl.float64)
        chunk_sum_sq = tl.zeros([LANES], dtype=tl.float64)
        lowest = tl.full([LANES], float("inf"), dtype=tl.float64)
        highest = tl.full([LANES], float("-inf"), dtype=tl.float64)
        smallest = tl.full([LANES], float("inf"), dtype=tl.float64)
        counts = zeros
        if HISTOGRAM:
            counts = _no_counts(SHARED)
        for begin in range(0, count, LANES):
            mask = begin + lanes < count
            values = _load_carefully(address, begin + lanes, mask, dtype)
            magnitude = values.to(tl.int64, bitcast=True) & _MAGNITUDE
            finite = mask & (magnitude < _INFINITY)
            nans += (magnitude > _INFINITY).to(tl.int32)  # masked lanes hold 0
            infs += (magnitude == _INFINITY).to(tl.int32)
            zeros += (mask & (magnitude == 0)).to(tl.int32)
            clean = tl.where(finite, values, 0.0)
            chunk_sum += clean
            chunk_sum_sq += clean * clean
            lowest = tl.minimum(lowest, tl.where(finite, values, float("inf")))
            highest = tl.maximum(highest, tl.where(finite, values, float("-inf")))
            smallest = tl.minimum(smallest, tl.where(clean == 0.0, float("inf"), tl.abs(clean)))
            true = values * scale
            true_magnitude = true.to(tl.int64, bitcast=True) & _MAGNITUDE
            deads += (finite & (true_magnitude <= dead)).to(tl.int32)
            if HISTOGRAM:
                counts = _count(counts, _cells_of_float64(true), _is_finite_and_not_zero(true), SHARED)
                true_zeros += (mask & (true_magnitude == 0)).to(tl.int32)
        _store_partials(
            partials, num_chunks, tl.sum(nans, axis=0), tl.sum(infs, axis=0), tl.sum(zeros, axis=0),
            tl.sum(deads, axis=0), tl.sum(chunk_sum, axis=0), tl.sum(chunk_sum_sq, axis=0),
            tl.min(lowest, axis=0), tl.max(highest, axis=0), tl.min(smallest, axis=0),
        )  # fmt: skip
        if HISTOGRAM:
            if tensor < num_gradients:
                _add_histogram(histogram, tensor, _counts_of_cells(counts, SHARED), tl.sum(true_zeros, axis=0))


@triton.jit(do_not_specialize=["num_gradients", "num_tensors", "num_chunks"])
def fold(
    table,
    tensors,  # [4, N] int64: elements, first chunk, number of chunks, dtype
    partials,
    gradient_scale,  # 0-dim float64
    parameter_scale,  # 0-dim float64
    rows,  # [any, C] float64
    num_gradients,
    num_tensors,  # N
    num_chunks,  # M
    NUM_COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Merge the partials of a gradient, or of a parameter, whose columns are in the row of its gradient.

    Without gradients the parameters' sums are also written to the received columns, NaN and Inf separately.
    """
    tensor = tl.program_id(0)
    size = tl.load(tensors + tensor)
    here = partials + tl.load(tensors + num_tensors + tensor)
    count = tl.load(tensors + 2 * num_tensors + tensor).to(tl.int32)
    nans = tl.zeros([BLOCK], dtype=tl.float64)
    infs = tl.zeros([BLOCK], dtype=tl.float64)
    zeros = tl.zeros([BLOCK], dtype=tl.float64)
    deads = tl.zeros([BLOCK], dtype=tl.float64)
    total = tl.zeros([BLOCK], dtype=tl.float64)
    total_sq = tl.zeros([BLOCK], dtype=tl.float64)
    lowest = tl.full([BLOCK], float("inf"), dtype=tl.float64)
    highest = tl.full([BLOCK], float("-inf"), dtype=tl.float64)
    smallest = tl.full([BLOCK], float("inf"), dtype=tl.float64)
    for begin in range(0, count, BLOCK):  # all columns in one loop: nine loops would wait nine times as often
        index = begin + tl.arange(0, BLOCK)
        mask = index < count
        nans += tl.load(here + 0 * num_chunks + index, mask=mask, other=0.0)
        infs += tl.load(here + 1 * num_chunks + index, mask=mask, other=0.0)
        zeros += tl.load(here + 2 * num_chunks + index, mask=mask, other=0.0)
        deads += tl.load(here + 3 * num_chunks + index, mask=mask, other=0.0)
        total += tl.load(here + 4 * num_chunks + index, mask=mask, other=0.0)
        total_sq += tl.load(here + 5 * num_chunks + index, mask=mask, other=0.0)
        lowest = tl.minimum(lowest, tl.load(here + 6 * num_chunks + index, mask=mask, other=float("inf")))
        highest = tl.maximum(highest, tl.load(here + 7 * num_chunks + index, mask=mask, other=float("-inf")))
        smallest = tl.minimum(smallest, tl.load(here + 8 * num_chunks + index, mask=mask, other=float("inf")))
    missing = (tl.load(table + 2 + tensor) == 0) & (size > 0)
    if tensor < num_gradients:
        row = rows + tensor * NUM_COLUMNS
        scale = tl.load(gradient_scale)
        true_sq = tl.sum(total_sq, axis=0) * scale * scale
        tl.store(row + _NUM_ELEMENTS, tl.where(missing, float("nan"), size.to(tl.float64)))
        tl.store(row + _NUM_NAN, tl.sum(nans, axis=0))
        tl.store(row + _NUM_INF, tl.sum(infs, axis=0))
        tl.store(row + _NUM_ZERO, tl.sum(zeros, axis=0))
        tl.store(row + _NUM_DEAD, tl.sum(deads, axis=0))
        tl.store(row + _GRAD_SUM, tl.sum(total, axis=0) * scale)
        tl.store(row + _GRAD_SUM_SQ, true_sq)
        tl.store(row + _GRAD_MIN, tl.min(lowest, axis=0) * scale)
        tl.store(row + _GRAD_MAX, tl.max(highest, axis=0) * scale)
        tl.store(row + _GRAD_ABS_MIN_NONZERO, tl.min(smallest, axis=0) * scale)
        tl.store(row + _RECEIVED_SUM_SQ, true_sq)
        tl.store(row + _RECEIVED_NUM_NAN, tl.sum(nans, axis=0))
        tl.store(row + _RECEIVED_NUM_INF, tl.sum(infs, axis=0))
        if num_tensors == num_gradients:  # no parameters
            tl.store(row + _PARAM_SUM_SQ, float("nan"))
            tl.store(row + _PARAM_NUM_NONFINITE, float("nan"))
    else:
        row = rows + (tensor - num_gradients) * NUM_COLUMNS
        scale = tl.load(parameter_scale)
        true_sq = tl.where(missing, float("nan"), tl.sum(total_sq, axis=0) * scale * scale)
        tl.store(row + _PARAM_SUM_SQ, true_sq)
        tl.store(row + _PARAM_NUM_NONFINITE, tl.where(missing, float("nan"), tl.sum(nans + infs, axis=0)))
        if num_gradients == 0:
            tl.store(row + _RECEIVED_SUM_SQ, true_sq)
            tl.store(row + _RECEIVED_NUM_NAN, tl.sum(nans, axis=0))
            tl.store(row + _RECEIVED_NUM_INF, tl.sum(infs, axis=0))


@triton.jit(do_not_specialize=["num_tensors", "num_witnesses"])
def take_witnesses(
    table,
    tensors,  # [4, N] int64: elements, first chunk, number of chunks, dtype
    witnesses,  # [N, any] float64
    num_tensors,  # N
    num_witnesses,  # at most LANES
    LANES: tl.constexpr,
):
    """Copy elements at a fixed stride of a tensor, followed by zeros if it has fewer."""
    tensor = tl.program_id(0)
    address = tl.load(table + 2 + tensor)
    size = tl.where(address == 0, 0, tl.load(tensors + tensor))
    dtype = tl.load(tensors + 3 * num_tensors + tensor)
    lanes = tl.arange(0, LANES)
    is_taken = (lanes < num_witnesses) & (lanes < size)
    taken = _load_carefully(address, lanes * tl.maximum(size // num_witnesses, 1), is_taken, dtype)
    tl.store(witnesses + tensor * num_witnesses + lanes, taken, mask=lanes < num_witnesses)
