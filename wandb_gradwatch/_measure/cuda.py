"""The Triton kernels of the CUDA backend, launched by cuda_launch.py. The only file that imports Triton.

A chunk is CHUNK elements of one tensor. Its sums run in float32, a few terms per lane, where no square can overflow or
vanish; any other chunk, and a tensor's last, is read again in float64 with masks, so that NaN and Inf cost the ordinary
chunk nothing. Partials are added in a fixed order: results repeat bit for bit. Histograms are integer atomics, whose
order does not matter.

A lane keeps sums of its own, one per column, and has 64 bytes under way: a sum per element would take so many registers
that too few programs ran at once to keep the memory busy.
"""

# Triton types its own language: the arguments of a kernel are pointers and numbers of the device.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, import-untyped, import-not-found"
# Nested ifs are meant: the outer one is decided when the kernel is compiled, and an `and` would compile both.
# ruff: noqa: SIM102, SIM108
# No `from __future__ import annotations`: the interpreters of Triton 3.0 and 3.1 know tl.constexpr by its class only.

from typing import Any, Final

import triton
import triton.language as tl

from .columns import NUM_BINS, ZERO_BIN

# N tensors, M chunks, C columns, B histogram bins

NUM_PARTIALS: Final = 9  # columns NUM_NAN to GRAD_ABS_MIN_NONZERO, in their order

_FLOAT64: Final = tl.constexpr(3)

# A chunk's sum of squares in float32 is ordinary above this share of the number of its elements: what squares below
# 2**-126 lose is then less than 2**-28 of it.
_ORDINARY: Final = tl.constexpr(2.0**-98)
_INFINITY_32: Final = tl.constexpr(0x7F800000)
_INFINITY_64: Final = tl.constexpr(0x7FF0000000000000)
_ZERO_BIN: Final = tl.constexpr(ZERO_BIN)
_NUM_BINS: Final = tl.constexpr(NUM_BINS)


def build_launcher(compiled: Any) -> None:
    """Build what launches a kernel that `warmup` has compiled: up to Triton 3.6 a C compiler does, most of a second.

    Without this that happens at the first launch. Loading the kernel onto the device is left to that: a CUDA graph
    that is being captured may not stand it.
    """
    if compiled is not None:  # interpreters compile nothing
        triton.runtime.driver.active.launcher_cls(compiled.src, compiled.metadata)


@triton.jit
def _read(address, offsets, mask, DTYPE: tl.constexpr, ALIGNED: tl.constexpr, MASKED: tl.constexpr):
    """Elements at an address in float32, or float64 if that is what they are; 0 where masked."""
    if DTYPE == 0:
        pointer = address.to(tl.pointer_type(tl.float32))
    elif DTYPE == 1:
        pointer = address.to(tl.pointer_type(tl.uint16))
    elif DTYPE == 2:
        pointer = address.to(tl.pointer_type(tl.float16))
    else:
        pointer = address.to(tl.pointer_type(tl.float64))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    if MASKED:
        values = tl.load(pointer + offsets, mask=mask, other=0)
    else:
        values = tl.load(pointer + offsets)
    if DTYPE == 1:  # by its bits: a conversion may flush subnormal numbers
        values = (values.to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    elif DTYPE == 2:
        values = values.to(tl.float32)
    return values


@triton.jit
def _tile_offsets(ITEMSIZE: tl.constexpr, ALIGNED: tl.constexpr, LANES: tl.constexpr):
    """Offsets of LANES loads of 16 bytes, so that the elements of a lane lie along one axis: [LANES, 16 bytes].

    Where the address does not allow such loads, lanes beside each other read elements beside each other: [any, LANES].
    """
    VECTOR: tl.constexpr = 16 // ITEMSIZE
    if ALIGNED:
        offsets = tl.arange(0, LANES)[:, None] * VECTOR + tl.arange(0, VECTOR)[None, :]
    else:
        offsets = tl.arange(0, VECTOR)[:, None] * LANES + tl.arange(0, LANES)[None, :]
    return offsets


@triton.jit
def _is_nan_or_inf(values, DTYPE: tl.constexpr):
    if DTYPE == _FLOAT64:
        magnitude = values.to(tl.int64, bitcast=True) & 0x7FFFFFFFFFFFFFFF
        is_nan, is_inf = magnitude > _INFINITY_64, magnitude == _INFINITY_64
    else:
        magnitude = values.to(tl.int32, bitcast=True) & 0x7FFFFFFF
        is_nan, is_inf = magnitude > _INFINITY_32, magnitude == _INFINITY_32
    return is_nan, is_inf


@triton.jit
def _cells(values, WIDE: tl.constexpr):
    """Histogram cell of float32 or (WIDE) float64 values by their leading bits: 128 for the sign and the magnitude bin.

    Zeros, NaN and Inf go to cell 0, and the second result says which they are: `_add_histogram` takes them out again.
    tl.histogram counts a power of two of cells; with cells of their own there would be twice as many.
    """
    if WIDE:
        bits = values.to(tl.int64, bitcast=True)
        magnitude = bits & 0x7FFFFFFFFFFFFFFF
        code = (magnitude >> 51).to(tl.int32)
        window = code - 1950  # (1023 - 47) * 2 is magnitude bin 2
        lowest = code < 1794  # (1023 - 126) * 2
        nowhere = (magnitude == 0) | (magnitude >= _INFINITY_64)
    else:
        bits = values.to(tl.int32, bitcast=True)
        magnitude = bits & 0x7FFFFFFF
        code = magnitude >> 22
        window = code - 158  # (127 - 47) * 2 is magnitude bin 2
        lowest = code < 2
        nowhere = (magnitude == 0) | (magnitude >= _INFINITY_32)
    magnitude_bin = tl.where(lowest, 0, tl.minimum(tl.maximum(window, 1), 127))
    return tl.where(nowhere, 0, tl.where(bits < 0, magnitude_bin + 128, magnitude_bin)), nowhere


@triton.jit
def _ordinary_cells(values, doubled):
    """The same for float32 values none of which is NaN or Inf, in half as many instructions: they are what limits."""
    code = (doubled >> 23).to(tl.int32)
    lowest = tl.minimum(code >> 1, 1)
    magnitude_bin = tl.minimum(tl.maximum(code - 158, lowest), 127)
    return tl.where(values < 0.0, magnitude_bin + 128, magnitude_bin)  # -0.0 is not below 0: it goes to cell 0 too


@triton.jit
def _add_histogram(histogram, tensor, counts, nowhere, zeros):
    """Add a chunk's cells to the tensor's histogram; `nowhere` of those in cell 0 are in no magnitude bin."""
    row = histogram + tensor.to(tl.int64) * _NUM_BINS
    cell = tl.arange(0, 256)
    counts = tl.where(cell == 0, counts - nowhere, counts)
    bins = tl.where(cell < 128, _ZERO_BIN + 1 + cell, _ZERO_BIN + 127 - cell)
    tl.atomic_add(row + bins, counts.to(tl.int64), mask=counts > 0, sem="relaxed")
    tl.atomic_add(row + _ZERO_BIN, zeros.to(tl.int64), mask=zeros > 0, sem="relaxed")


@triton.jit
def _chunk(table, chunk_tensor, chunk_start, sizes, first, ITEMSIZE: tl.constexpr, CHUNK: tl.constexpr):
    """This program's chunk: its number, its tensor, its address, and how many elements it has (0 at address 0)."""
    chunk = first + tl.program_id(0)
    tensor = tl.load(chunk_tensor + chunk)
    start = tl.load(chunk_start + chunk)
    address = tl.load(table + 2 + tensor)
    rest = tl.minimum(tl.load(sizes + tensor) - start, CHUNK)
    count = tl.where(address == 0, 0, rest).to(tl.int32)
    return chunk, tensor, address + start * ITEMSIZE, count


# Four tiles to one value per lane. A loop that ended in `total += tl.sum(load)` would crash the compiler (Triton 3.6).


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
def _is_dead(doubled, dead_bits):
    return ((doubled >> 1).to(tl.int64) <= dead_bits).to(tl.int32)


@triton.jit
def _count_scaled(
    tile,
    scale,
    dead_bits,
    counts,
    deads,
    nowheres,
    true_zeros,
    AXIS: tl.constexpr,
    DEAD: tl.constexpr,
    HISTOGRAM: tl.constexpr,
):
    """What depends on the loss scale: counts of a tile in float64, where the scaled gradient is what it really is."""
    wide = tile.to(tl.float64) * scale
    if DEAD:
        magnitude = wide.to(tl.int64, bitcast=True) & 0x7FFFFFFFFFFFFFFF
        deads += tl.sum((magnitude <= dead_bits).to(tl.int32), axis=AXIS)
    if HISTOGRAM:
        cells, is_nowhere = _cells(wide, True)
        nowheres += tl.sum(is_nowhere.to(tl.int32), axis=AXIS)
        true_zeros += tl.sum((wide == 0.0).to(tl.int32), axis=AXIS)
        counts += tl.histogram(tl.ravel(cells), 256)
    return counts, deads, nowheres, true_zeros


@triton.jit(do_not_specialize=["first", "num_chunks"])  # or every model and dtype would compile its own
def measure_chunks(
    table,  # [2 + N] int64: bits of the dead threshold in float32 and in float64, addresses
    chunk_tensor,  # [M] int32
    chunk_start,  # [M] int64: elements
    sizes,  # [N] int64: elements
    inverse_scale,  # 0-dim; read if SCALED
    partials,  # [NUM_PARTIALS, M] float64
    histogram,  # [N, B] int64, zeroed; written if HISTOGRAM
    first,  # chunk of the first program
    num_chunks,  # M
    DTYPE: tl.constexpr,
    ITEMSIZE: tl.constexpr,
    ALIGNED: tl.constexpr,
    DEAD: tl.constexpr,  # the dead threshold is not 0
    SCALED: tl.constexpr,
    HISTOGRAM: tl.constexpr,
    LANES: tl.constexpr,
    CHUNK: tl.constexpr,
):
    chunk, tensor, address, count = _chunk(table, chunk_tensor, chunk_start, sizes, first, ITEMSIZE, CHUNK)
    WIDE: tl.constexpr = SCALED or DTYPE == _FLOAT64
    TILE: tl.constexpr = LANES * (16 // ITEMSIZE)
    AXIS: tl.constexpr = 1 if ALIGNED else 0
    dead_bits = tl.load(table + WIDE)
    scale = 1.0
    if SCALED:
        scale = tl.load(inverse_scale).to(tl.float64)
    counts = tl.zeros([256], dtype=tl.int32)
    nowhere, bin_zeros = count * 0, count * 0  # elements in no magnitude bin, and those of them that are 0
    ordinary = count < 0  # no: what follows must make it so

    if DTYPE != _FLOAT64:
        if count == CHUNK:
            total = tl.zeros([LANES], dtype=tl.float32)
            total_sq = tl.zeros([LANES], dtype=tl.float32)
            lowest = tl.full([LANES], float("inf"), dtype=tl.float32)
            highest = tl.full([LANES], float("-inf"), dtype=tl.float32)
            smallest = tl.full([LANES], 0xFFFFFFFF, dtype=tl.uint32)  # of doubled magnitude bits, less 1
            zeros = tl.zeros([LANES], dtype=tl.int32)
            deads = tl.zeros([LANES], dtype=tl.int32)
            nowheres = tl.zeros([LANES], dtype=tl.int32)
            true_zeros = tl.zeros([LANES], dtype=tl.int32)
            offsets = _tile_offsets(ITEMSIZE, ALIGNED, LANES)
            for begin in range(0, CHUNK, 4 * TILE):
                # All four loads are under way before the first is used: one at a time would not keep the memory busy.
                tile0 = _read(address + (begin + 0 * TILE) * ITEMSIZE, offsets, True, DTYPE, ALIGNED, False)
                tile1 = _read(address + (begin + 1 * TILE) * ITEMSIZE, offsets, True, DTYPE, ALIGNED, False)
                tile2 = _read(address + (begin + 2 * TILE) * ITEMSIZE, offsets, True, DTYPE, ALIGNED, False)
                tile3 = _read(address + (begin + 3 * TILE) * ITEMSIZE, offsets, True, DTYPE, ALIGNED, False)
                double0 = tile0.to(tl.uint32, bitcast=True) << 1  # drops the sign
                double1 = tile1.to(tl.uint32, bitcast=True) << 1
                double2 = tile2.to(tl.uint32, bitcast=True) << 1
                double3 = tile3.to(tl.uint32, bitcast=True) << 1
                total += _sums(tile0, tile1, tile2, tile3, AXIS)
                total_sq += _sums(tile0 * tile0, tile1 * tile1, tile2 * tile2, tile3 * tile3, AXIS)
                lowest = tl.minimum(lowest, _minima(tile0, tile1, tile2, tile3, AXIS))
                highest = tl.maximum(highest, _maxima(tile0, tile1, tile2, tile3, AXIS))
                # Zero wraps around to the largest integer.
                smallest = tl.minimum(smallest, _minima(double0 - 1, double1 - 1, double2 - 1, double3 - 1, AXIS))
                zeros += _sums(
                    (double0 == 0).to(tl.int32),
                    (double1 == 0).to(tl.int32),
                    (double2 == 0).to(tl.int32),
                    (double3 == 0).to(tl.int32),
                    AXIS,
                )
                if WIDE:
                    counts, deads, nowheres, true_zeros = _count_scaled(
                        tile0, scale, dead_bits, counts, deads, nowheres, true_zeros, AXIS, DEAD, HISTOGRAM
                    )
                    counts, deads, nowheres, true_zeros = _count_scaled(
                        tile1, scale, dead_bits, counts, deads, nowheres, true_zeros, AXIS, DEAD, HISTOGRAM
                    )
                    counts, deads, nowheres, true_zeros = _count_scaled(
                        tile2, scale, dead_bits, counts, deads, nowheres, true_zeros, AXIS, DEAD, HISTOGRAM
                    )
                    counts, deads, nowheres, true_zeros = _count_scaled(
                        tile3, scale, dead_bits, counts, deads, nowheres, true_zeros, AXIS, DEAD, HISTOGRAM
                    )
                else:
                    if DEAD:
                        deads += _sums(
                            _is_dead(double0, dead_bits),
                            _is_dead(double1, dead_bits),
                            _is_dead(double2, dead_bits),
                            _is_dead(double3, dead_bits),
                            AXIS,
                        )
                    if HISTOGRAM:
                        counts += tl.histogram(tl.ravel(_ordinary_cells(tile0, double0)), 256)
                        counts += tl.histogram(tl.ravel(_ordinary_cells(tile1, double1)), 256)
                        counts += tl.histogram(tl.ravel(_ordinary_cells(tile2, double2)), 256)
                        counts += tl.histogram(tl.ravel(_ordinary_cells(tile3, double3)), 256)
            chunk_sq = tl.sum(total_sq.to(tl.float64), axis=0)
            num_zero = tl.sum(zeros, axis=0)
            if WIDE:
                nowhere, bin_zeros = tl.sum(nowheres, axis=0), tl.sum(true_zeros, axis=0)
            else:
                nowhere, bin_zeros = num_zero, num_zero
            ordinary = ((chunk_sq > CHUNK * _ORDINARY) & (chunk_sq < float("inf"))) | (num_zero == CHUNK)
            if ordinary:
                tl.store(partials + 0 * num_chunks + chunk, 0.0)
                tl.store(partials + 1 * num_chunks + chunk, 0.0)
                tl.store(partials + 2 * num_chunks + chunk, num_zero.to(tl.float64))
                if DEAD:
                    tl.store(partials + 3 * num_chunks + chunk, tl.sum(deads, axis=0).to(tl.float64))
                else:
                    tl.store(partials + 3 * num_chunks + chunk, num_zero.to(tl.float64))
                tl.store(partials + 4 * num_chunks + chunk, tl.sum(total.to(tl.float64), axis=0))
                tl.store(partials + 5 * num_chunks + chunk, chunk_sq)
                tl.store(partials + 6 * num_chunks + chunk, tl.min(lowest, axis=0).to(tl.float64))
                tl.store(partials + 7 * num_chunks + chunk, tl.max(highest, axis=0).to(tl.float64))
                bits = (tl.min(smallest, axis=0) + 1) >> 1
                magnitude = bits.to(tl.float32, bitcast=True).to(tl.float64)
                tl.store(partials + 8 * num_chunks + chunk, tl.where(bits == 0, float("inf"), magnitude))

    if ordinary == 0:
        CAREFUL: tl.constexpr = 4 * LANES  # float64 takes registers, and those of the way above decide how many run
        lanes = tl.arange(0, CAREFUL)
        nans, infs, zeros, deads = 0, 0, 0, 0
        nowhere, bin_zeros = count * 0, count * 0
        chunk_sum = tl.zeros([CAREFUL], dtype=tl.float64)
        chunk_sum_sq = tl.zeros([CAREFUL], dtype=tl.float64)
        lowest = tl.full([CAREFUL], float("inf"), dtype=tl.float64)
        highest = tl.full([CAREFUL], float("-inf"), dtype=tl.float64)
        smallest = tl.full([CAREFUL], float("inf"), dtype=tl.float64)
        counts = tl.zeros([256], dtype=tl.int32)
        for begin in range(0, count, CAREFUL):
            mask = begin + lanes < count
            values = _read(address, begin + lanes, mask, DTYPE, ALIGNED, True)
            is_nan, is_inf = _is_nan_or_inf(values, DTYPE)
            finite = mask & (is_nan == 0) & (is_inf == 0)
            wide = values.to(tl.float64)
            clean = tl.where(finite, wide, 0.0)
            nans += tl.sum((is_nan & mask).to(tl.int32), axis=0)
            infs += tl.sum((is_inf & mask).to(tl.int32), axis=0)
            zeros += tl.sum((finite & (wide == 0.0)).to(tl.int32), axis=0)
            chunk_sum += clean
            chunk_sum_sq += clean * clean
            lowest = tl.minimum(lowest, tl.where(finite, wide, float("inf")))
            highest = tl.maximum(highest, tl.where(finite, wide, float("-inf")))
            magnitude = tl.abs(clean)
            smallest = tl.minimum(smallest, tl.where(magnitude > 0.0, magnitude, float("inf")))
            true = wide * scale
            if DEAD:
                if WIDE:
                    bits = true.to(tl.int64, bitcast=True) & 0x7FFFFFFFFFFFFFFF
                else:
                    bits = (values.to(tl.int32, bitcast=True) & 0x7FFFFFFF).to(tl.int64)
                deads += tl.sum((finite & (bits <= dead_bits)).to(tl.int32), axis=0)
            if HISTOGRAM:
                if WIDE:
                    cells, is_nowhere = _cells(true, True)
                else:
                    cells, is_nowhere = _cells(values, False)
                nowhere += tl.sum(is_nowhere.to(tl.int32), axis=0)  # masked lanes hold 0
                bin_zeros += tl.sum((mask & (true == 0.0)).to(tl.int32), axis=0)
                counts += tl.histogram(cells, 256)
        tl.store(partials + 0 * num_chunks + chunk, nans * 1.0)
        tl.store(partials + 1 * num_chunks + chunk, infs * 1.0)
        tl.store(partials + 2 * num_chunks + chunk, zeros * 1.0)
        if DEAD:
            tl.store(partials + 3 * num_chunks + chunk, deads * 1.0)
        else:
            tl.store(partials + 3 * num_chunks + chunk, zeros * 1.0)
        tl.store(partials + 4 * num_chunks + chunk, tl.sum(chunk_sum, axis=0))
        tl.store(partials + 5 * num_chunks + chunk, tl.sum(chunk_sum_sq, axis=0))
        tl.store(partials + 6 * num_chunks + chunk, tl.min(lowest, axis=0))
        tl.store(partials + 7 * num_chunks + chunk, tl.max(highest, axis=0))
        tl.store(partials + 8 * num_chunks + chunk, tl.min(smallest, axis=0))

    if HISTOGRAM:
        _add_histogram(histogram, tensor, counts, nowhere, bin_zeros)


@triton.jit(do_not_specialize=["first", "num_chunks"])
def square_chunks(
    table,
    chunk_tensor,
    chunk_start,
    sizes,
    partials,  # [2, M] float64: sum of squares, number of NaN and Inf
    first,
    num_chunks,
    DTYPE: tl.constexpr,
    ITEMSIZE: tl.constexpr,
    ALIGNED: tl.constexpr,
    LANES: tl.constexpr,
    CHUNK: tl.constexpr,
):
    chunk, _, address, count = _chunk(table, chunk_tensor, chunk_start, sizes, first, ITEMSIZE, CHUNK)
    TILE: tl.constexpr = LANES * (16 // ITEMSIZE)
    AXIS: tl.constexpr = 1 if ALIGNED else 0
    ordinary = count < 0
    if DTYPE != _FLOAT64:
        if count == CHUNK:
            total_sq = tl.zeros([LANES], dtype=tl.float32)
            offsets = _tile_offsets(ITEMSIZE, ALIGNED, LANES)
            for begin in range(0, CHUNK, 4 * TILE):
                tile0 = _read(address + (begin + 0 * TILE) * ITEMSIZE, offsets, True, DTYPE, ALIGNED, False)
                tile1 = _read(address + (begin + 1 * TILE) * ITEMSIZE, offsets, True, DTYPE, ALIGNED, False)
                tile2 = _read(address + (begin + 2 * TILE) * ITEMSIZE, offsets, True, DTYPE, ALIGNED, False)
                tile3 = _read(address + (begin + 3 * TILE) * ITEMSIZE, offsets, True, DTYPE, ALIGNED, False)
                total_sq += _sums(tile0 * tile0, tile1 * tile1, tile2 * tile2, tile3 * tile3, AXIS)
            chunk_sq = tl.sum(total_sq.to(tl.float64), axis=0)
            ordinary = (chunk_sq > CHUNK * _ORDINARY) & (chunk_sq < float("inf"))
            if ordinary:
                tl.store(partials + chunk, chunk_sq)
                tl.store(partials + num_chunks + chunk, 0.0)
    if ordinary == 0:
        CAREFUL: tl.constexpr = 4 * LANES
        lanes = tl.arange(0, CAREFUL)
        nonfinite = 0
        chunk_sum_sq = tl.zeros([CAREFUL], dtype=tl.float64)
        for begin in range(0, count, CAREFUL):
            mask = begin + lanes < count
            values = _read(address, begin + lanes, mask, DTYPE, ALIGNED, True)
            is_nan, is_inf = _is_nan_or_inf(values, DTYPE)
            bad = (is_nan | is_inf) & mask
            clean = tl.where(bad, 0.0, values.to(tl.float64))
            nonfinite += tl.sum(bad.to(tl.int32), axis=0)
            chunk_sum_sq += clean * clean
        tl.store(partials + chunk, tl.sum(chunk_sum_sq, axis=0))
        tl.store(partials + num_chunks + chunk, nonfinite * 1.0)


@triton.jit(do_not_specialize=["num_chunks"])
def fold(
    table,  # as above; a tensor with elements at address 0 is missing
    partials,  # [NUM_PARTIALS, M] float64
    first_chunk,  # [N] int32
    num_chunks_of,  # [N] int32
    sizes,  # [N] int64
    inverse_scale,
    rows,  # [N, C] float64
    num_chunks,  # M
    SCALED: tl.constexpr,
    NUM_COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    tensor = tl.program_id(0)
    first, count = tl.load(first_chunk + tensor), tl.load(num_chunks_of + tensor)
    row = rows + tensor * NUM_COLUMNS
    scale = 1.0
    if SCALED:
        scale = tl.load(inverse_scale).to(tl.float64)
    nans = tl.zeros([BLOCK], dtype=tl.float64)
    infs = tl.zeros([BLOCK], dtype=tl.float64)
    zeros = tl.zeros([BLOCK], dtype=tl.float64)
    deads = tl.zeros([BLOCK], dtype=tl.float64)
    total = tl.zeros([BLOCK], dtype=tl.float64)
    total_sq = tl.zeros([BLOCK], dtype=tl.float64)
    lowest = tl.full([BLOCK], float("inf"), dtype=tl.float64)
    highest = tl.full([BLOCK], float("-inf"), dtype=tl.float64)
    smallest = tl.full([BLOCK], float("inf"), dtype=tl.float64)
    partials += first
    for begin in range(0, count, BLOCK):  # all columns at once: a loop for each would wait nine times as often
        index = begin + tl.arange(0, BLOCK)
        mask = index < count
        nans += tl.load(partials + 0 * num_chunks + index, mask=mask, other=0.0)
        infs += tl.load(partials + 1 * num_chunks + index, mask=mask, other=0.0)
        zeros += tl.load(partials + 2 * num_chunks + index, mask=mask, other=0.0)
        deads += tl.load(partials + 3 * num_chunks + index, mask=mask, other=0.0)
        total += tl.load(partials + 4 * num_chunks + index, mask=mask, other=0.0)
        total_sq += tl.load(partials + 5 * num_chunks + index, mask=mask, other=0.0)
        lowest = tl.minimum(lowest, tl.load(partials + 6 * num_chunks + index, mask=mask, other=float("inf")))
        highest = tl.maximum(highest, tl.load(partials + 7 * num_chunks + index, mask=mask, other=float("-inf")))
        smallest = tl.minimum(smallest, tl.load(partials + 8 * num_chunks + index, mask=mask, other=float("inf")))
    size = tl.load(sizes + tensor)
    missing = (tl.load(table + 2 + tensor) == 0) & (size > 0)
    true_sq = tl.sum(total_sq, axis=0) * scale * scale
    tl.store(row + 0, tl.where(missing, float("nan"), size.to(tl.float64)))
    tl.store(row + 1, tl.sum(nans, axis=0))
    tl.store(row + 2, tl.sum(infs, axis=0))
    tl.store(row + 3, tl.sum(zeros, axis=0))
    tl.store(row + 4, tl.sum(deads, axis=0))
    tl.store(row + 5, tl.sum(total, axis=0) * scale)
    tl.store(row + 6, true_sq)
    tl.store(row + 7, tl.min(lowest, axis=0) * scale)
    tl.store(row + 8, tl.max(highest, axis=0) * scale)
    tl.store(row + 9, tl.min(smallest, axis=0) * scale)
    tl.store(row + 10, true_sq)
    tl.store(row + 11, float("nan"))
    tl.store(row + 12, float("nan"))


@triton.jit(do_not_specialize=["num_chunks"])
def fold_squares(
    partials,  # [2, M] float64
    first_chunk,
    num_chunks_of,
    inverse_scale,
    sums,  # [N, STRIDE] float64
    num_chunks,
    SCALED: tl.constexpr,
    STRIDE: tl.constexpr,
    OFFSET: tl.constexpr,  # column of the sum of squares; the number of NaN and Inf goes to the next
    BLOCK: tl.constexpr,
):
    tensor = tl.program_id(0)
    first, count = tl.load(first_chunk + tensor), tl.load(num_chunks_of + tensor)
    scale = 1.0
    if SCALED:
        scale = tl.load(inverse_scale).to(tl.float64)
    total_sq = tl.zeros([BLOCK], dtype=tl.float64)
    nonfinite = tl.zeros([BLOCK], dtype=tl.float64)
    partials += first
    for begin in range(0, count, BLOCK):
        index = begin + tl.arange(0, BLOCK)
        total_sq += tl.load(partials + index, mask=index < count, other=0.0)
        nonfinite += tl.load(partials + num_chunks + index, mask=index < count, other=0.0)
    sums += tensor * STRIDE + OFFSET
    tl.store(sums, tl.sum(total_sq, axis=0) * scale * scale)
    tl.store(sums + 1, tl.sum(nonfinite, axis=0))
