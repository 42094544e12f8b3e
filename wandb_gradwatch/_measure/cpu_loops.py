"""The compiled loops of the CPU backend: one call measures a whole list of tensors, block by block.

A block of BLOCK elements is read into the first-level cache by the first loop and from there by the others, each of
which the compiler turns into vector instructions. Floats are read as integers ("words", float_bits.py) wherever their
order is all that counts: exact for every value, also for subnormal ones in a process that flushes them to zero. Squares
are taken in float64, where no float32 overflows or vanishes.

numba keeps what it compiled on disk and compiles again when this file changes, but not when another one does: nothing
is imported here from the rest of the package, and this is one file, however long. What depends on other files (edges
of bins, thresholds) comes in as an argument.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NamedTuple

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

# M pieces, C columns, B histogram bins, K codes, E elements of one block

BLOCK: Final = 2048  # elements: 8 KB of float32, beside as much scratch in the first-level cache
SMALL: Final = 1024  # elements; below, a value goes straight to its bin: adding up tables of codes would cost more
TABLES: Final = 4  # tables of codes, used in turn: the next value need not wait until the last one's count is stored
CODES32: Final = 1 << 10  # K of float32
FOLD_EVERY: Final = 1 << 26  # elements counted, after which the tables are added up: they count to 2**32

FLOAT32, BFLOAT16, FLOAT16, FLOAT64 = 0, 1, 2, 3  # kinds of tensors

# The columns of a row, in the order of columns.py, and those of the table of tensors.
NUM_ELEMENTS, NUM_NAN, NUM_INF, NUM_ZERO, NUM_DEAD, GRAD_SUM, GRAD_SUM_SQ, GRAD_MIN, GRAD_MAX, GRAD_ABS_MIN_NONZERO = (
    range(10)
)
RECEIVED_SUM_SQ, RECEIVED_NUM_NAN, RECEIVED_NUM_INF, PARAM_SUM_SQ, PARAM_NUM_NONFINITE = range(10, 15)
ADDRESS, SIZE, KIND = 0, 1, 2

SIGN32, INFINITY32, SHIFT32 = np.uint32(1 << 31), np.uint32(0x7F800000), 22
SIGN64, INFINITY64, SHIFT64 = np.uint64(1 << 63), np.uint64(0x7FF << 52), 51

_ONLY_FOR_LOOPS: Final = {"nogil": True, "no_cpython_wrapper": True, "no_cfunc_wrapper": True}  # wrappers take time
_jit: Final = numba.njit(**_ONLY_FOR_LOOPS)
# The order of additions is left to the compiler, or it could not add in vectors. NaN and Inf keep their meaning.
_jit_sums: Final = numba.njit(**_ONLY_FOR_LOOPS, fastmath={"reassoc", "contract", "nsz"})

# ---- words: numba widens 32-bit integers in arithmetic, and half of each vector would be empty


def _word_intrinsic(build: Callable[..., Any]) -> Any:
    """A function of words of one type that gives such a word, made of LLVM instructions."""

    def unary(typing_context, a):
        if not isinstance(a, types.Integer):
            return None
        return a(a), lambda context, builder, signature, args: build(builder, *args)

    def binary(typing_context, a, b):
        if not isinstance(a, types.Integer) or a != b:
            return None
        return a(a, b), lambda context, builder, signature, args: build(builder, *args)

    def ternary(typing_context, a, b, c):
        if not isinstance(a, types.Integer) or not a == b == c:
            return None
        return a(a, b, c), lambda context, builder, signature, args: build(builder, *args)

    arity = build.__code__.co_argcount - 1
    return intrinsic({1: unary, 2: binary, 3: ternary}[arity])


def _one(word: Any) -> Any:
    return ir.Constant(word.type, 1)


_smaller = _word_intrinsic(lambda b, x, y: b.select(b.icmp_unsigned("<", x, y), x, y))
_larger = _word_intrinsic(lambda b, x, y: b.select(b.icmp_unsigned(">", x, y), x, y))
_larger_signed = _word_intrinsic(lambda b, x, y: b.select(b.icmp_signed(">", x, y), x, y))
_doubled = _word_intrinsic(lambda b, x: b.shl(x, _one(x)))  # drops the sign
_minus_one = _word_intrinsic(lambda b, x: b.sub(x, _one(x)))
_minus_sign = _word_intrinsic(lambda b, x: b.lshr(b.shl(x, _one(x)), _one(x)))
_halved_above = _word_intrinsic(lambda b, x: b.lshr(b.add(x, _one(x)), _one(x)))
_plus_if_within = _word_intrinsic(lambda b, n, x, limit: b.add(n, b.zext(b.icmp_unsigned("<=", x, limit), n.type)))


@intrinsic
def _words_at(typing_context, address, like):
    """A pointer to words of the type of `like`."""
    if not isinstance(address, types.Integer) or not isinstance(like, types.Integer):
        return None

    def build(context, builder, signature, args):
        return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

    return types.CPointer(like)(address, like), build


@intrinsic
def _value(typing_context, word):
    """The float with these bits, in float64."""
    if word not in (types.uint32, types.uint64):
        return None
    narrow = word is types.uint32

    def build(context, builder, signature, args):
        if not narrow:
            return builder.bitcast(args[0], ir.DoubleType())
        return builder.fpext(builder.bitcast(args[0], ir.FloatType()), ir.DoubleType())

    return types.float64(word), build


@intrinsic
def _magnitude(typing_context, word):
    """The float with these bits, which have no sign, in float64; no conversion flushes it."""
    if word not in (types.uint32, types.uint64):
        return None
    narrow = word is types.uint32

    def build(context, builder, signature, args):
        double, i64 = ir.DoubleType(), ir.IntType(64)
        if not narrow:
            return builder.bitcast(args[0], double)
        subnormal = builder.fmul(builder.uitofp(args[0], double), ir.Constant(double, 2.0**-149))
        moved = builder.shl(builder.zext(args[0], i64), ir.Constant(i64, 29))
        normal = builder.bitcast(builder.add(moved, ir.Constant(i64, (1023 - 127) << 52)), double)
        is_subnormal = builder.icmp_unsigned("<", args[0], ir.Constant(args[0].type, 1 << 23))
        return builder.select(is_subnormal, subnormal, normal)

    return types.float64(word), build


@intrinsic
def _widened_half(typing_context, half):
    """The bits of the float32 that equals a float16, in integers: an instruction for it is not on every processor."""
    if half is not types.uint16:
        return None

    def build(context, builder, signature, args):
        i32 = ir.IntType(32)

        def word(value: int) -> Any:
            return ir.Constant(i32, value)

        bits = builder.zext(args[0], i32)
        magnitude = builder.and_(bits, word(0x7FFF))
        normal = builder.add(builder.shl(magnitude, word(13)), word(112 << 23))
        nonfinite = builder.add(normal, word(112 << 23))
        # 2**-14 * (1 + magnitude / 1024) - 2**-14; both are normal, so that no processor flushes them.
        above = builder.bitcast(builder.add(normal, word(1 << 23)), ir.FloatType())
        offset = builder.bitcast(word(113 << 23), ir.FloatType())
        subnormal = builder.bitcast(builder.fsub(above, offset), i32)
        finite = builder.select(builder.icmp_unsigned("<", magnitude, word(0x400)), subnormal, normal)
        wide = builder.select(builder.icmp_unsigned(">=", magnitude, word(0x7C00)), nonfinite, finite)
        return builder.or_(wide, builder.shl(builder.and_(bits, word(0x8000)), word(16)))

    return types.uint32(half), build


# ---- one block


@_jit
def _block(address, start, count, kind, scratch):
    """The words of `count` elements, where they are or, of 16 bits each, widened into scratch: [E]."""
    zero = scratch.dtype.type(0)
    if kind in (FLOAT32, FLOAT64):
        return numba.carray(_words_at(address + start * scratch.itemsize, zero), count)
    halves = numba.carray(_words_at(address + start * 2, np.uint16(0)), count)
    if kind == BFLOAT16:
        for i in range(count):
            scratch[i] = np.uint32(halves[i]) << np.uint32(16)
    else:
        for i in range(count):
            scratch[i] = _widened_half(halves[i])
    return scratch[:count]


@_jit
def _extremes(words):
    """The smallest and the largest word, the largest as a signed number, and the smallest magnitude doubled."""
    lowest = highest = outermost = words[0]
    smallest = _doubled(words[0])
    for i in range(words.size):
        word = words[i]
        lowest = _smaller(lowest, word)
        highest = _larger(highest, word)
        outermost = _larger_signed(outermost, word)
        smallest = _smaller(smallest, _doubled(word))
    return lowest, highest, outermost, smallest


@_jit
def _num_within(words, doubled_limit):
    """How many magnitudes are at most the limit; both doubled."""
    count = words.dtype.type(0)
    for i in range(words.size):
        count = _plus_if_within(count, _doubled(words[i]), doubled_limit)
    return np.int64(count)


@_jit
def _num_positive_zero(words):
    count = words.dtype.type(0)
    for i in range(words.size):
        count = _plus_if_within(count, words[i], words.dtype.type(0))
    return np.int64(count)


@_jit
def _smallest_nonzero(words):
    """The smallest magnitude above zero, doubled, less one."""
    smallest = _minus_one(words.dtype.type(0))
    for i in range(words.size):
        smallest = _smaller(smallest, _minus_one(_doubled(words[i])))  # zero wraps around to the largest integer
    return smallest


@_jit_sums
def _sums(words):
    """Sum and sum of squares."""
    total = squares = 0.0
    for i in range(words.size):
        value = _value(words[i])
        total += value
        squares += value * value
    return total, squares


@_jit_sums
def _finite_sums(words, doubled_infinity):
    """Sum and sum of squares of the finite elements."""
    total = squares = 0.0
    for i in range(words.size):
        value = _value(words[i]) if _doubled(words[i]) < doubled_infinity else 0.0
        total += value
        squares += value * value
    return total, squares


@_jit_sums
def _squares(words):
    squares = 0.0
    for i in range(words.size):
        value = _value(words[i])
        squares += value * value
    return squares


@_jit
def _without_nonfinite(words, doubled_infinity, spare):
    """The words with NaN and Inf replaced by a finite one of them, which there must be: [E], in spare."""
    finite = largest = _minus_one(words.dtype.type(0))
    for i in range(words.size):
        finite = _smaller(finite, words[i] if _doubled(words[i]) < doubled_infinity else largest)
    for i in range(words.size):
        spare[i] = words[i] if _doubled(words[i]) < doubled_infinity else finite
    return spare[: words.size]


@_jit
def _count_codes(words, codes):
    """Count the leading bits of 32-bit words: two words a load, four tables in turn."""
    whole = words.size - words.size % 4
    pairs = words[:whole].view(np.uint64)
    for i in range(0, pairs.size, 2):
        first, second = pairs[i], pairs[i + 1]
        codes[(first >> SHIFT32) & (CODES32 - 1)] += 1
        codes[CODES32 + (first >> (32 + SHIFT32))] += 1
        codes[2 * CODES32 + ((second >> SHIFT32) & (CODES32 - 1))] += 1
        codes[3 * CODES32 + (second >> (32 + SHIFT32))] += 1
    for i in range(whole, words.size):
        codes[words[i] >> SHIFT32] += 1


@_jit
def _count_bins(words, shift, bins, histogram):
    for i in range(words.size):
        place = bins[words[i] >> shift]
        if place < histogram.size:  # NaN and Inf have no bin
            histogram[place] += 1


@_jit
def _add_codes(codes, first, last, bins, histogram):
    """Add up the tables' codes from first to last in the bins, and clear them."""
    for code in range(first, last + 1):
        count = np.int64(0)
        for place in range(code, TABLES * CODES32, CODES32):
            count += codes[place]
            codes[place] = 0
        if bins[code] < histogram.size:
            histogram[bins[code]] += count


@_jit
def _add_codes_between(smallest, largest, codes, bins, histogram):
    """The same for the codes of either sign between those of two magnitudes, and those of zeros."""
    for beginning in (0, CODES32 // 2):
        if smallest > 0:
            _add_codes(codes, beginning, beginning, bins, histogram)
        _add_codes(codes, beginning + smallest, beginning + largest, bins, histogram)


# ---- one tensor


@_jit
def _gradient(address, size, kind, layout, dead, scratch, spare, row, codes, bins, histogram):
    """Fill in the gradient's columns of a row and, if it is not empty, the histogram.

    Args:
        layout: the sign bit, the bits of infinity, both as words, and how far to shift a word to get its code.
        dead: the bits of the largest dead magnitude.
        scratch, spare: a block of words each.
        codes: TABLES * CODES32 zeros; they are zeros again in the end.
        bins: the bin of each code: [K].
        histogram: zeros: [B], or [0] if none is wanted.
    """
    sign, infinity, shift = layout
    zero = scratch.dtype.type(0)
    doubled_infinity = _doubled(infinity)
    lowest, highest, outermost, smallest = _minus_one(zero), zero, sign, _minus_one(zero)
    num_finite = num_zero = num_dead = num_inf = positive_zeros = negative_zeros = np.int64(0)
    total = squares = 0.0
    in_bins, in_tables = size < SMALL or kind == FLOAT64, 0
    for start in range(0, size, BLOCK):
        count = min(BLOCK, size - start)
        words = _block(address, start, count, kind, scratch)
        low, high, outer, small = _extremes(words)
        if high == zero or (high == sign and outer in (zero, sign)):  # nothing but zeros
            lowest, highest, outermost = _smaller(lowest, low), _larger(highest, high), _larger_signed(outermost, outer)
            num_finite += count
            num_zero += count
            num_dead += count
            continue
        finite = words
        if high >= sign + infinity or infinity <= outer < sign:
            finite_here = _num_within(words, _minus_one(doubled_infinity))
            num_inf += _num_within(words, doubled_infinity) - finite_here
            num_finite += finite_here
            if finite_here == 0:
                continue
            finite = _without_nonfinite(words, doubled_infinity, spare)
            low, high, outer, small = _extremes(finite)
            total_here, squares_here = _finite_sums(words, doubled_infinity)
        else:
            num_finite += count
            total_here, squares_here = _sums(words)
        total += total_here
        squares += squares_here
        zeros_here = np.int64(0)
        nonzero = _minus_one(small)
        if small == zero:
            zeros_here = _num_within(words, zero)
            nonzero = _smallest_nonzero(finite)
        num_zero += zeros_here
        if dead == zero:
            num_dead += zeros_here
        elif small <= _doubled(dead):
            num_dead += _num_within(words, _doubled(dead))
        lowest, highest, outermost = _smaller(lowest, low), _larger(highest, high), _larger_signed(outermost, outer)
        smallest = _smaller(smallest, nonzero)
        if histogram.size:
            if zeros_here:  # they share their codes with subnormal values
                positive_here = _num_positive_zero(words)
                positive_zeros += positive_here
                negative_zeros += zeros_here - positive_here
            if in_bins:
                _count_bins(words, shift, bins, histogram)
            else:
                _count_codes(words, codes)
                in_tables += count
                if in_tables >= FOLD_EVERY:
                    _add_codes(codes, 0, CODES32 - 1, bins, histogram)
                    in_tables = 0
    if histogram.size:
        if in_bins or num_zero == size:
            pass
        elif num_finite < size:
            _add_codes(codes, 0, CODES32 - 1, bins, histogram)
        else:  # most codes are those of magnitudes that no element has
            largest = outermost if outermost < sign else zero
            if highest >= sign:
                largest = _larger(largest, _minus_sign(highest))
            _add_codes_between(_halved_above(smallest) >> shift, largest >> shift, codes, bins, histogram)
        histogram[bins[0]] -= positive_zeros
        histogram[bins[bins.size // 2]] -= negative_zeros
        histogram[histogram.size // 2] += num_zero
    row[NUM_ELEMENTS], row[NUM_NAN], row[NUM_INF] = size, size - num_finite - num_inf, num_inf
    row[NUM_ZERO], row[NUM_DEAD] = num_zero, num_dead
    row[GRAD_SUM], row[GRAD_SUM_SQ], row[RECEIVED_SUM_SQ] = total, squares, squares
    row[RECEIVED_NUM_NAN], row[RECEIVED_NUM_INF] = row[NUM_NAN], row[NUM_INF]
    row[GRAD_MIN], row[GRAD_MAX], row[GRAD_ABS_MIN_NONZERO] = np.inf, -np.inf, np.inf
    if num_finite:
        # Without a sign bit floats sort like integers, with one in reverse.
        row[GRAD_MIN] = -_magnitude(_minus_sign(highest)) if highest >= sign else _magnitude(lowest)
        row[GRAD_MAX] = _magnitude(outermost) if lowest < sign else -_magnitude(_minus_sign(lowest))
    if num_zero < num_finite:
        row[GRAD_ABS_MIN_NONZERO] = _magnitude(_halved_above(smallest))


@_jit
def _sum_of_squares(address, size, kind, infinity, scratch):
    """Sum of squares of the finite elements, number of NaN and number of Inf."""
    total, num_nan, num_inf = 0.0, np.int64(0), np.int64(0)
    for start in range(0, size, BLOCK):
        words = _block(address, start, min(BLOCK, size - start), kind, scratch)
        squares = _squares(words)
        if not np.isfinite(squares):
            num_finite = _num_within(words, _minus_one(_doubled(infinity)))
            num_not_nan = _num_within(words, _doubled(infinity))
            num_nan, num_inf = num_nan + words.size - num_not_nan, num_inf + num_not_nan - num_finite
            squares = _finite_sums(words, _doubled(infinity))[1]
        total += squares
    return total, num_nan, num_inf


# ---- a list of tensors


def _measure_all(table, parameter_table, dead32, dead64, bins32, bins64, rows, histogram):
    """Measure pieces of memory: tensors, or parts of them.

    Args:
        table: address, number of elements and kind of each piece: [M, 3].
        parameter_table: the same of the parameters, or [0, 3].
        dead32, dead64: bits of the largest dead magnitude, as float32 and as float64.
        bins32, bins64: the histogram's bin of each code, B for none: [K] each.
        rows: is filled in: [M, C].
        histogram: zeros: [M, B], or [M, 0] if none is wanted.
    """
    scratch32, spare32 = np.empty(BLOCK, np.uint32), np.empty(BLOCK, np.uint32)
    scratch64, spare64 = np.empty(BLOCK, np.uint64), np.empty(BLOCK, np.uint64)
    codes = np.zeros(TABLES * CODES32 if histogram.shape[1] > 0 else 0, np.uint32)
    layout32, layout64 = (SIGN32, INFINITY32, SHIFT32), (SIGN64, INFINITY64, SHIFT64)
    for i in range(len(table)):
        address, size, kind = table[i, ADDRESS], table[i, SIZE], table[i, KIND]
        row, counts = rows[i], histogram[i]
        if kind == FLOAT64:
            _gradient(address, size, kind, layout64, dead64, scratch64, spare64, row, codes, bins64, counts)
        else:
            _gradient(address, size, kind, layout32, dead32, scratch32, spare32, row, codes, bins32, counts)
        row[PARAM_SUM_SQ], row[PARAM_NUM_NONFINITE] = np.nan, np.nan
        if len(parameter_table):
            row[PARAM_SUM_SQ], num_nan, num_inf = _squares_of(parameter_table, i, scratch32, scratch64)
            row[PARAM_NUM_NONFINITE] = num_nan + num_inf


@_jit
def _squares_of(table, i, scratch32, scratch64):
    address, size, kind = table[i, ADDRESS], table[i, SIZE], table[i, KIND]
    if kind == FLOAT64:
        return _sum_of_squares(address, size, kind, INFINITY64, scratch64)
    return _sum_of_squares(address, size, kind, INFINITY32, scratch32)


def _sum_sq_all(table, sums):
    """Write each piece's sum of squares of finite elements, number of NaN and number of Inf into sums: [M, 3]."""
    scratch32, scratch64 = np.empty(BLOCK, np.uint32), np.empty(BLOCK, np.uint64)
    for i in range(len(table)):
        sums[i, 0], sums[i, 1], sums[i, 2] = _squares_of(table, i, scratch32, scratch64)


class Loops(NamedTuple):
    """`_measure_all` and `_sum_sq_all`, compiled."""

    measure_all: Callable[..., None]
    sum_sq_all: Callable[..., None]


def compile_loops(*, cache: bool) -> Loops:
    """Compile the loops: seconds, or a fraction of one where numba finds them on disk.

    Args:
        cache: keep them on disk; an error where there is no folder that may be written to.
    """
    table, rows = types.int64[:, ::1], types.float64[:, ::1]
    bins = types.Array(types.int64, 1, "C", readonly=True)
    compiler = {"nogil": True, "cache": cache}
    measure = types.void(table, table, types.uint32, types.uint64, bins, bins, rows, table)
    return Loops(
        numba.njit(measure, **compiler)(_measure_all),
        numba.njit(types.void(table, rows), **compiler)(_sum_sq_all),
    )
