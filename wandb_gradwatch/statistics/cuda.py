"""The Triton kernels of the CUDA backend, launched by cuda_launch.py. The only file that imports Triton.

A chunk is CHUNK elements of one tensor. Its sums run in float32, a few terms per lane, where no square can overflow or
vanish; any other chunk, and a tensor's last, is read again in float64 with masks, so that NaN and Inf cost the ordinary
chunk nothing. Partials are added in a fixed order: results repeat bit for bit. Histograms are integer atomics, whose
order does not matter.
"""

# Triton types its own language: the arguments of a kernel are pointers and numbers of the device.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, import-untyped, import-not-found"
# Nested ifs are meant: the outer one is decided when the kernel is compiled, and an `and` would compile both.
# ruff: noqa: SIM102, SIM108

from __future__ import annotations

from typing import Final

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
_NO_BIN: Final = tl.constexpr(511)  # tl.histogram counts a power of two of bins; those from NUM_BINS on are dropped


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
def _is_nan_or_inf(values, DTYPE: tl.constexpr):
    if DTYPE == _FLOAT64:
        magnitude = values.to(tl.int64, bitcast=True) & 0x7FFFFFFFFFFFFFFF
        is_nan, is_inf = magnitude > _INFINITY_64, magnitude == _INFINITY_64
    else:
        magnitude = values.to(tl.int32, bitcast=True) & 0x7FFFFFFF
        is_nan, is_inf = magnitude > _INFINITY_32, magnitude == _INFINITY_32
    return is_nan, is_inf


@triton.jit
def _bins(values, WIDE: tl.constexpr):
    """Histogram bin of float32 or (WIDE) float64 values by their leading bits; _NO_BIN for NaN and Inf."""
    if WIDE:
        bits = values.to(tl.int64, bitcast=True)
        magnitude = bits & 0x7FFFFFFFFFFFFFFF
        code = (magnitude >> 51).to(tl.int32)
        window = code - 1950  # (1023 - 47) * 2 is magnitude bin 2
        lowest = code < 1794  # (1023 - 126) * 2
        nonfinite = magnitude >= _INFINITY_64
    else:
        bits = values.to(tl.int32, bitcast=True)
        magnitude = bits & 0x7FFFFFFF
        code = magnitude >> 22
        window = code - 158  # (127 - 47) * 2 is magnitude bin 2
        lowest = code < 2
        nonfinite = magnitude >= _INFINITY_32
    magnitude_bin = tl.where(lowest, 0, tl.minimum(tl.maximum(window, 1), 127))
    signed_bin = tl.where(bits < 0, _ZERO_BIN - 1 - magnitude_bin, _ZERO_BIN + 1 + magnitude_bin)
    return tl.where(nonfinite, _NO_BIN, tl.where(magnitude == 0, _ZERO_BIN, signed_bin))


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
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
):
    chunk, tensor, address, count = _chunk(table, chunk_tensor, chunk_start, sizes, first, ITEMSIZE, CHUNK)
    WIDE: tl.constexpr = SCALED or DTYPE == _FLOAT64
    dead_bits = tl.load(table + WIDE)
    scale = 1.0
    if SCALED:
        scale = tl.load(inverse_scale).to(tl.float64)
    lanes = tl.arange(0, BLOCK)
    counts = tl.zeros([512], dtype=tl.int32)
    ordinary = count < 0  # no: what follows must make it so

    if DTYPE != _FLOAT64:
        if count == CHUNK:
            total = tl.zeros([BLOCK], dtype=tl.float32)
            total_sq = tl.zeros([BLOCK], dtype=tl.float32)
            lowest = tl.full([BLOCK], float("inf"), dtype=tl.float32)
            highest = tl.full([BLOCK], float("-inf"), dtype=tl.float32)
            smallest = tl.full([BLOCK], 0xFFFFFFFF, dtype=tl.uint32)  # of doubled magnitude bits, less 1
            num_zero = tl.zeros([BLOCK], dtype=tl.int32)
            num_dead = tl.zeros([BLOCK], dtype=tl.int32)
            for begin in range(0, CHUNK, BLOCK):
                values = _read(address, begin + lanes, True, DTYPE, ALIGNED, False)
                doubled = values.to(tl.uint32, bitcast=True) << 1  # drops the sign
                total += values
                total_sq += values * values
                lowest = tl.minimum(lowest, values)
                highest = tl.maximum(highest, values)
                smallest = tl.minimum(smallest, doubled - 1)  # zero wraps around to the largest integer
                num_zero += (doubled == 0).to(tl.int32)
                if WIDE:
                    wide = values.to(tl.float64) * scale
                    if DEAD:
                        magnitude = wide.to(tl.int64, bitcast=True) & 0x7FFFFFFFFFFFFFFF
                        num_dead += (magnitude <= dead_bits).to(tl.int32)
                    if HISTOGRAM:
                        counts += tl.histogram(_bins(wide, True), 512)
                else:
                    if DEAD:
                        num_dead += ((doubled >> 1).to(tl.int64) <= dead_bits).to(tl.int32)
                    if HISTOGRAM:
                        counts += tl.histogram(_bins(values, False), 512)
            chunk_sq = tl.sum(total_sq.to(tl.float64), axis=0)
            zeros = tl.sum(num_zero, axis=0)
            ordinary = ((chunk_sq > CHUNK * _ORDINARY) & (chunk_sq < float("inf"))) | (zeros == CHUNK)
            if ordinary:
                tl.store(partials + 0 * num_chunks + chunk, 0.0)
                tl.store(partials + 1 * num_chunks + chunk, 0.0)
                tl.store(partials + 2 * num_chunks + chunk, zeros.to(tl.float64))
                if DEAD:
                    tl.store(partials + 3 * num_chunks + chunk, tl.sum(num_dead, axis=0).to(tl.float64))
                else:
                    tl.store(partials + 3 * num_chunks + chunk, zeros.to(tl.float64))
                tl.store(partials + 4 * num_chunks + chunk, tl.sum(total.to(tl.float64), axis=0))
                tl.store(partials + 5 * num_chunks + chunk, chunk_sq)
                tl.store(partials + 6 * num_chunks + chunk, tl.min(lowest, axis=0).to(tl.float64))
                tl.store(partials + 7 * num_chunks + chunk, tl.max(highest, axis=0).to(tl.float64))
                bits = (tl.min(smallest, axis=0) + 1) >> 1
                magnitude = bits.to(tl.float32, bitcast=True).to(tl.float64)
                tl.store(partials + 8 * num_chunks + chunk, tl.where(bits == 0, float("inf"), magnitude))

    if ordinary == 0:
        nans, infs, zeros, deads = 0, 0, 0, 0
        chunk_sum = tl.zeros([BLOCK], dtype=tl.float64)
        chunk_sum_sq = tl.zeros([BLOCK], dtype=tl.float64)
        lowest = tl.full([BLOCK], float("inf"), dtype=tl.float64)
        highest = tl.full([BLOCK], float("-inf"), dtype=tl.float64)
        smallest = tl.full([BLOCK], float("inf"), dtype=tl.float64)
        counts = tl.zeros([512], dtype=tl.int32)
        for begin in range(0, count, BLOCK):
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
                    bins = _bins(true, True)
                else:
                    bins = _bins(values, False)
                counts += tl.histogram(tl.where(mask, bins, _NO_BIN), 512)
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
        bin_numbers = tl.arange(0, 512)
        row = histogram + tensor.to(tl.int64) * _NUM_BINS
        tl.atomic_add(row + bin_numbers, counts.to(tl.int64), mask=(bin_numbers < _NUM_BINS) & (counts > 0))


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
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
):
    chunk, _, address, count = _chunk(table, chunk_tensor, chunk_start, sizes, first, ITEMSIZE, CHUNK)
    lanes = tl.arange(0, BLOCK)
    ordinary = count < 0
    if DTYPE != _FLOAT64:
        if count == CHUNK:
            total_sq = tl.zeros([BLOCK], dtype=tl.float32)
            for begin in range(0, CHUNK, BLOCK):
                values = _read(address, begin + lanes, True, DTYPE, ALIGNED, False)
                total_sq += values * values
            chunk_sq = tl.sum(total_sq.to(tl.float64), axis=0)
            ordinary = (chunk_sq > CHUNK * _ORDINARY) & (chunk_sq < float("inf"))
            if ordinary:
                tl.store(partials + chunk, chunk_sq)
                tl.store(partials + num_chunks + chunk, 0.0)
    if ordinary == 0:
        nonfinite = 0
        chunk_sum_sq = tl.zeros([BLOCK], dtype=tl.float64)
        for begin in range(0, count, BLOCK):
            mask = begin + lanes < count
            values = _read(address, begin + lanes, mask, DTYPE, ALIGNED, True)
            is_nan, is_inf = _is_nan_or_inf(values, DTYPE)
            bad = (is_nan | is_inf) & mask
            clean = tl.where(bad, 0.0, values.to(tl.float64))
            nonfinite += tl.sum(bad.to(tl.int32), axis=0)
            chunk_sum_sq += clean * clean
        tl.store(partials + chunk, tl.sum(chunk_sum_sq, axis=0))
        tl.store(partials + num_chunks + chunk, nonfinite * 1.0)


@triton.jit
def _fold_sum(partials, first, count, BLOCK: tl.constexpr):
    total = tl.zeros([BLOCK], dtype=tl.float64)
    for begin in range(0, count, BLOCK):
        index = begin + tl.arange(0, BLOCK)
        total += tl.load(partials + first + index, mask=index < count, other=0.0)
    return tl.sum(total, axis=0)


@triton.jit
def _fold_min(partials, first, count, BLOCK: tl.constexpr):
    lowest = tl.full([BLOCK], float("inf"), dtype=tl.float64)
    for begin in range(0, count, BLOCK):
        index = begin + tl.arange(0, BLOCK)
        lowest = tl.minimum(lowest, tl.load(partials + first + index, mask=index < count, other=float("inf")))
    return tl.min(lowest, axis=0)


@triton.jit
def _fold_max(partials, first, count, BLOCK: tl.constexpr):
    highest = tl.full([BLOCK], float("-inf"), dtype=tl.float64)
    for begin in range(0, count, BLOCK):
        index = begin + tl.arange(0, BLOCK)
        highest = tl.maximum(highest, tl.load(partials + first + index, mask=index < count, other=float("-inf")))
    return tl.max(highest, axis=0)


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
    total_sq = _fold_sum(partials + 5 * num_chunks, first, count, BLOCK) * scale * scale
    size = tl.load(sizes + tensor)
    missing = (tl.load(table + 2 + tensor) == 0) & (size > 0)
    tl.store(row + 0, tl.where(missing, float("nan"), size.to(tl.float64)))
    for column in tl.static_range(0, 4):
        tl.store(row + 1 + column, _fold_sum(partials + column * num_chunks, first, count, BLOCK))
    tl.store(row + 5, _fold_sum(partials + 4 * num_chunks, first, count, BLOCK) * scale)
    tl.store(row + 6, total_sq)
    tl.store(row + 7, _fold_min(partials + 6 * num_chunks, first, count, BLOCK) * scale)
    tl.store(row + 8, _fold_max(partials + 7 * num_chunks, first, count, BLOCK) * scale)
    tl.store(row + 9, _fold_min(partials + 8 * num_chunks, first, count, BLOCK) * scale)
    tl.store(row + 10, total_sq)
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
    sums += tensor * STRIDE + OFFSET
    tl.store(sums, _fold_sum(partials, first, count, BLOCK) * scale * scale)
    tl.store(sums + 1, _fold_sum(partials + num_chunks, first, count, BLOCK))
