"""The compiled loops of the CPU backend: one call measures a whole list of tensors, block by block.

The first loop reads a block of BLOCK elements into the first-level cache and finds all that most blocks need; other
loops then read the block from the cache. The compiler vectorises the loops. Floats are read as integers ("words",
float_bits.py) wherever only their order matters, which is exact for every value, including subnormal numbers in a
process that flushes them to zero. Squares are computed in float64, where those of float32 neither overflow nor vanish.

numba keeps compiled code on disk and compiles again when this file changes, but not when another file does. Therefore
this file imports nothing from the rest of the package and is not split, in spite of its length. Values that depend on
other files (edges of bins, thresholds, places of columns) are arguments.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any, Final

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

# M pieces, C columns, B histogram bins, K codes, E elements of one block; N tensors, P parameters, W witnesses of each

BLOCK: Final = 2048  # elements: 8 KB of float32, which leaves room for as much scratch in the first-level cache
SMALL: Final = 1 << 12  # elements; values of smaller tensors are counted directly: summing pairs would cost more
WINDOW: Final = 64  # magnitude codes (32 octaves) that the table of pairs covers; more would not fit in the cache
SLOTS: Final = 2 * WINDOW  # a slot is a code modulo WINDOW, and the sign
FOLD_EVERY: Final = 2**16 - BLOCK // 2  # pairs; the table is then added up, because its counters hold up to 2**16 - 1
HEADROOM: Final = 16  # codes of the window that lie above the largest of the first block

FLOAT32, BFLOAT16, FLOAT16, FLOAT64 = 0, 1, 2, 3  # kinds of tensors

COLUMNS: Final = (  # that the loops measure
    *("NUM_ELEMENTS", "NUM_NAN", "NUM_INF", "NUM_ZERO", "NUM_DEAD", "GRAD_SUM", "GRAD_SUM_SQ"),
    *("GRAD_MIN", "GRAD_MAX", "GRAD_ABS_MIN_NONZERO", "RECEIVED_SUM_SQ", "RECEIVED_NUM_NAN", "RECEIVED_NUM_INF"),
    *("PARAM_SUM_SQ", "PARAM_NUM_NONFINITE"),
)
PLACES: Final = np.dtype([(name, np.int64) for name in COLUMNS])  # of the columns in a row

# The first index of the table of tensors.
ADDRESS, SIZE, KIND = 0, 1, 2

SIGN32, INFINITY32, SHIFT32 = np.uint32(1 << 31), np.uint32(0x7F800000), 22
SIGN64, INFINITY64, SHIFT64 = np.uint64(1 << 63), np.uint64(0x7FF << 52), 51

_ONLY_FOR_LOOPS: Final = {"nogil": True, "no_cpython_wrapper": True, "no_cfunc_wrapper": True}  # wrappers take time
_jit: Final = numba.njit(**_ONLY_FOR_LOOPS)
# The compiler may reorder additions, which it needs to vectorise them. NaN and Inf keep their meaning.
_jit_sums: Final = numba.njit(**_ONLY_FOR_LOOPS, fastmath={"reassoc", "contract", "nsz"})

# Words: numba widens 32-bit integers in arithmetic, which would waste half of each vector.


def _word_intrinsic(build: Callable[..., Any], result: Any = None) -> Any:
    """Make a function of LLVM instructions from words of one type to that type, or to `result`."""

    @intrinsic
    @wraps(build)  # numba takes the number of arguments from the signature
    def of_words(typing_context, *words):
        if not isinstance(words[0], types.Integer) or len(set(words)) > 1:
            return None
        return (result or words[0])(*words), lambda context, builder, signature, args: build(builder, *args)

    return of_words


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


@_word_intrinsic
def _pair_of(builder, first, second):
    """Return the index in the table of pairs of two 32-bit words."""

    def slot(word: Any) -> Any:
        code = builder.and_(builder.lshr(word, ir.Constant(word.type, SHIFT32 - 1)), ir.Constant(word.type, SLOTS - 2))
        return builder.or_(code, builder.lshr(word, ir.Constant(word.type, 31)))

    return builder.add(builder.mul(slot(first), ir.Constant(first.type, SLOTS)), slot(second))


@intrinsic
def _words_at(typing_context, address, like):
    """Return a pointer to words of the type of `like`."""
    if not isinstance(address, types.Integer) or not isinstance(like, types.Integer):
        return None

    def build(context, builder, signature, args):
        return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

    return types.CPointer(like)(address, like), build


def _value_of(builder, word):
    """Return the float with these bits, as float64."""
    if word.type.width == 64:
        return builder.bitcast(word, ir.DoubleType())
    return builder.fpext(builder.bitcast(word, ir.FloatType()), ir.DoubleType())


_value = _word_intrinsic(_value_of, types.float64)


@_word_intrinsic
def _widened_half(builder, half):
    """Convert the bits of a float16 to those of float32 with integers: some processors have no instruction for it."""

    def word(value: int) -> Any:
        return ir.Constant(half.type, value)

    magnitude = builder.and_(half, word(0x7FFF))
    normal = builder.add(builder.shl(magnitude, word(13)), word(112 << 23))
    nonfinite = builder.add(normal, word(112 << 23))
    # 2**-14 * (1 + magnitude / 1024) - 2**-14: both operands are normal, so no processor flushes them to zero.
    above = builder.bitcast(builder.add(normal, word(1 << 23)), ir.FloatType())
    offset = builder.bitcast(word(113 << 23), ir.FloatType())
    subnormal = builder.bitcast(builder.fsub(above, offset), half.type)
    finite = builder.select(builder.icmp_unsigned("<", magnitude, word(0x400)), subnormal, normal)
    wide = builder.select(builder.icmp_unsigned(">=", magnitude, word(0x7C00)), nonfinite, finite)
    return builder.or_(wide, builder.shl(builder.and_(half, word(0x8000)), word(16)))


@_jit
def _magnitude(word, sign):
    """Return the float with these bits (without sign) as float64; a conversion may flush subnormal numbers of float32.

    Args:
        sign: the sign bit, which tells float32 from float64.
    """
    return np.float64(word) * 2.0**-149 if sign == SIGN32 and word < 1 << 23 else _value(word)


@_jit
def _block(address, start, count, kind, scratch):
    """Return the words of `count` elements: [E]; 16-bit elements are widened into scratch, others read in place."""
    zero = scratch.dtype.type(0)
    if kind in (FLOAT32, FLOAT64):
        return numba.carray(_words_at(address + start * scratch.itemsize, zero), count)
    halves = numba.carray(_words_at(address + start * 2, np.uint16(0)), count)
    if kind == BFLOAT16:
        for i in range(count):
            scratch[i] = np.uint32(halves[i]) << np.uint32(16)
    else:
        for i in range(count):
            scratch[i] = _widened_half(np.uint32(halves[i]))
    return scratch[:count]


@_jit_sums
def _statistics(words):
    """Return the smallest and largest word, the largest signed word, the smallest doubled magnitude, and two sums.

    One loop does everything: memory limits its speed, so a second loop would only add time.

    Returns:
        lowest, highest, outermost, smallest: words.
        total, squares: the sum and the sum of squares; meaningless if a word is NaN or Inf.
    """
    lowest = highest = outermost = words[0]
    smallest = _doubled(words[0])
    total = squares = 0.0
    for i in range(words.size):
        word = words[i]
        lowest = _smaller(lowest, word)
        highest = _larger(highest, word)
        outermost = _larger_signed(outermost, word)
        smallest = _smaller(smallest, _doubled(word))
        value = _value(word)
        total += value
        squares += value * value
    return lowest, highest, outermost, smallest, total, squares


@_jit
def _num_within(words, doubled_limit):
    """Count the magnitudes that are at most the limit; both are doubled."""
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
    """Return the smallest magnitude above zero, doubled, minus one."""
    smallest = _minus_one(words.dtype.type(0))
    for i in range(words.size):
        smallest = _smaller(smallest, _minus_one(_doubled(words[i])))  # zero wraps around to the largest integer
    return smallest


@_jit
def _without_nonfinite(words, doubled_infinity, instead, place):
    """Write the words to `place`, with NaN and Inf replaced by `instead`: [E]. `place` may be the words themselves."""
    for i in range(words.size):
        place[i] = words[i] if _doubled(words[i]) < doubled_infinity else instead
    return place[: words.size]


@_jit
def _count_pairs(words, spare, pairs):
    """Count an even number of 32-bit words in pairs, which halves the number of counter updates."""
    half = words.size // 2
    for i in range(half):
        spare[i] = _pair_of(words[i], words[half + i])
    for i in range(half):
        pairs[spare[i]] += 1


@_jit
def _count_bins(words, shift, bins, histogram):
    for i in range(words.size):
        place = bins[words[i] >> shift]
        if place < histogram.size:  # NaN and Inf have no bin
            histogram[place] += 1


@_jit
def _code_of(slot, first, bins):
    """Return the code of a slot, in the window that begins with code `first`."""
    return first + ((slot // 2 - first) & (WINDOW - 1)) + (slot & 1) * (bins.size // 2)


@_jit
def _add_pairs(pairs, first, spare, bins, histogram):
    """Add the table of pairs to the bins, and clear it."""
    spare[:SLOTS] = 0
    for slot in range(SLOTS):
        row = pairs[slot * SLOTS : (slot + 1) * SLOTS]
        count = np.int64(0)
        for i in range(SLOTS):
            count += row[i]
            spare[i] += row[i]
        row[:] = 0
        histogram[bins[_code_of(slot, first, bins)]] += count
    for slot in range(SLOTS):
        histogram[bins[_code_of(slot, first, bins)]] += np.int64(spare[slot])


@_jit
def _gradient(address, size, kind, layout, dead, scratch, spare, row, at, pairs, bins, histogram):
    """Fill in the gradient's columns of a row, and the histogram if it is not empty.

    Args:
        layout: the sign bit and the bits of infinity, as words, and the shift from a word to its code.
        dead: the bits of the largest dead magnitude.
        scratch, spare: one block of words each.
        at: the places of the columns in the row.
        pairs: SLOTS * SLOTS zeros; zero again on return.
        bins: the bin of each code: [K].
        histogram: zeros: [B], or [0] for no histogram.
    """
    sign, infinity, shift = layout
    zero = scratch.dtype.type(0)
    doubled_infinity = _doubled(infinity)
    lowest, highest, outermost, smallest = _minus_one(zero), zero, sign, _minus_one(zero)
    num_finite = num_zero = num_dead = num_inf = np.int64(0)
    total = squares = 0.0
    num_pairs, first = np.int64(0), np.int64(-1)
    for start in range(0, size, BLOCK):
        count = min(BLOCK, size - start)
        words = _block(address, start, count, kind, scratch)
        low, high, outer, small, total_here, squares_here = _statistics(words)
        finite, finite_here = words, np.int64(count)
        if high >= sign + infinity or infinity <= outer < sign:
            finite_here = _num_within(words, _minus_one(doubled_infinity))
            num_inf += _num_within(words, doubled_infinity) - finite_here
            if finite_here == 0:
                continue
            lowest_finite = _statistics(_without_nonfinite(words, doubled_infinity, _minus_one(zero), spare))[0]
            total_here, squares_here = _statistics(_without_nonfinite(words, doubled_infinity, zero, spare))[4:]
            finite = _without_nonfinite(words, doubled_infinity, lowest_finite, spare)
            low, high, outer, small = _statistics(finite)[:4]
        num_finite += finite_here
        total += total_here
        squares += squares_here
        lowest, highest, outermost = _smaller(lowest, low), _larger(highest, high), _larger_signed(outermost, outer)
        zeros_here = np.int64(0)
        nonzero = _minus_one(small)
        if high == zero or (high == sign and outer in (zero, sign)):  # nothing but zeros
            zeros_here = finite_here
        elif small == zero:
            zeros_here = _num_within(words, zero)
            nonzero = _smallest_nonzero(finite)
        num_zero += zeros_here
        if dead == zero or zeros_here == finite_here:
            num_dead += zeros_here
        elif small <= _doubled(dead):
            num_dead += _num_within(words, _doubled(dead))
        smallest = _smaller(smallest, nonzero)
        if histogram.size and zeros_here < finite_here:
            largest = outer if outer < sign else zero
            if high >= sign:
                largest = _larger(largest, _minus_sign(high))
            last_code, first_code = np.int64(largest >> shift), np.int64(_halved_above(nonzero) >> shift)
            if first < 0:
                first = min(max(last_code + HEADROOM + 1 - WINDOW, 0), np.int64(infinity >> shift) - WINDOW)
            zero_code = np.int64(0)
            fits = finite_here == count and first <= first_code and last_code < first + WINDOW
            if fits and size >= SMALL and count % 2 == 0 and kind != FLOAT64:
                if num_pairs >= FOLD_EVERY:
                    _add_pairs(pairs, first, spare, bins, histogram)
                    num_pairs = np.int64(0)
                _count_pairs(words, spare, pairs)
                num_pairs += count // 2
                zero_code = _code_of(0, first, bins)
            else:
                _count_bins(words, shift, bins, histogram)
            if zeros_here:  # zeros share their codes with subnormal values
                positive_here = _num_positive_zero(words)
                histogram[bins[zero_code]] -= positive_here
                histogram[bins[zero_code + bins.size // 2]] -= zeros_here - positive_here
    if histogram.size:
        if num_pairs:
            _add_pairs(pairs, first, spare, bins, histogram)
        histogram[histogram.size // 2] += num_zero
    row[at.NUM_ELEMENTS], row[at.NUM_NAN], row[at.NUM_INF] = size, size - num_finite - num_inf, num_inf
    row[at.NUM_ZERO], row[at.NUM_DEAD] = num_zero, num_dead
    row[at.GRAD_SUM], row[at.GRAD_SUM_SQ], row[at.RECEIVED_SUM_SQ] = total, squares, squares
    row[at.RECEIVED_NUM_NAN], row[at.RECEIVED_NUM_INF] = row[at.NUM_NAN], row[at.NUM_INF]
    row[at.GRAD_MIN], row[at.GRAD_MAX], row[at.GRAD_ABS_MIN_NONZERO] = np.inf, -np.inf, np.inf
    if num_finite:
        # Positive floats sort like integers, negative ones in reverse.
        row[at.GRAD_MIN] = -_magnitude(_minus_sign(highest), sign) if highest >= sign else _magnitude(lowest, sign)
        row[at.GRAD_MAX] = _magnitude(outermost, sign) if lowest < sign else -_magnitude(_minus_sign(lowest), sign)
    if num_zero < num_finite:
        row[at.GRAD_ABS_MIN_NONZERO] = _magnitude(_halved_above(smallest), sign)


@_jit
def _parameter(address, size, kind, infinity, scratch, row, at):
    """Fill in the parameter's columns of a row."""
    row[at.PARAM_SUM_SQ], row[at.PARAM_NUM_NONFINITE] = 0.0, 0.0
    for start in range(0, size, BLOCK):
        words = _block(address, start, min(BLOCK, size - start), kind, scratch)
        squares = _statistics(words)[5]
        if not np.isfinite(squares):
            row[at.PARAM_NUM_NONFINITE] += words.size - _num_within(words, _minus_one(_doubled(infinity)))
            squares = _statistics(_without_nonfinite(words, _doubled(infinity), words.dtype.type(0), scratch))[5]
        row[at.PARAM_SUM_SQ] += squares


def _measure(table, dead32, dead64, bins32, bins64, places, rows, histogram):
    """Measure pieces of memory: tensors, or parts of them.

    Args:
        table: address, number of elements and kind of each gradient's piece, and of its parameter's: [3, 1 or 2, M].
        dead32, dead64: the bits of the largest dead magnitude, as float32 and as float64.
        bins32, bins64: the histogram bin of each code, or B for codes without a bin: [K] each.
        places: of the columns in a row: [1] of PLACES.
        rows: the output: [M, C].
        histogram: zeros, to be filled in: [M, B], or [M, 0] for no histogram.
    """
    at = places[0]
    pairs = np.zeros(SLOTS * SLOTS if histogram.shape[1] > 0 else 0, np.uint16)
    scratch32, spare32 = np.empty(BLOCK, np.uint32), np.empty(BLOCK, np.uint32)
    scratch64, spare64 = np.empty(BLOCK, np.uint64), np.empty(BLOCK, np.uint64)
    layout32, layout64 = (SIGN32, INFINITY32, SHIFT32), (SIGN64, INFINITY64, SHIFT64)
    for i in range(len(rows)):
        address, size, kind = table[ADDRESS, 0, i], table[SIZE, 0, i], table[KIND, 0, i]
        row, counts = rows[i], histogram[i]
        if kind == FLOAT64:
            _gradient(address, size, kind, layout64, dead64, scratch64, spare64, row, at, pairs, bins64, counts)
        else:
            _gradient(address, size, kind, layout32, dead32, scratch32, spare32, row, at, pairs, bins32, counts)
        row[at.PARAM_SUM_SQ], row[at.PARAM_NUM_NONFINITE] = np.nan, np.nan
        if table.shape[1] > 1:
            address, size, kind = table[ADDRESS, 1, i], table[SIZE, 1, i], table[KIND, 1, i]
            if kind == FLOAT64:
                _parameter(address, size, kind, INFINITY64, scratch64, row, at)
            else:
                _parameter(address, size, kind, INFINITY32, scratch32, row, at)


@_jit
def _take(address, size, kind, witnesses):
    """Copy elements at a fixed stride of a tensor, followed by zeros if it has fewer: [W]."""
    stride = max(size // witnesses.size, 1)
    witnesses[:] = 0.0
    for i in range(min(size, witnesses.size)):
        place = address + i * stride * (8 if kind == FLOAT64 else 4 if kind == FLOAT32 else 2)
        if kind == FLOAT64:
            witnesses[i] = _value(_words_at(place, np.uint64(0))[0])
        elif kind == FLOAT32:
            witnesses[i] = _value(_words_at(place, np.uint32(0))[0])
        elif kind == BFLOAT16:
            witnesses[i] = _value(np.uint32(np.uint32(_words_at(place, np.uint16(0))[0]) << np.uint32(16)))
        else:
            witnesses[i] = _value(_widened_half(np.uint32(_words_at(place, np.uint16(0))[0])))


def _take_witnesses(table, slots, now, before, sums):
    """Take elements of gradients and parameters, and compare them with those of the sample before.

    Args:
        table: address, number of elements and kind of each gradient, and of its parameter: [3, 2, N].
        slots: their places among all parameters: [N].
        now: the output, of gradients and of parameters: [2, P, W].
        before: those of the sample before: [2, P, W].
        sums: the output: of the gradient times the one before, the squares of both, of the parameter's difference and
            of the parameter before; and the number of elements of the parameter whose bits have changed: [6, P].
    """
    bits, bits_before = now.view(np.int64), before.view(np.int64)
    for i in range(len(slots)):
        slot = slots[i]
        for which in range(2):
            _take(table[ADDRESS, which, i], table[SIZE, which, i], table[KIND, which, i], now[which, slot])
        product = square = square_before = difference = parameter = 0.0
        num_moved = np.int64(0)
        for k in range(now.shape[2]):
            one, other = now[0, slot, k], before[0, slot, k]
            product += one * other
            square += one * one
            square_before += other * other
            change = now[1, slot, k] - before[1, slot, k]
            difference += change * change
            parameter += before[1, slot, k] * before[1, slot, k]
            num_moved += bits[1, slot, k] != bits_before[1, slot, k]
        sums[0, slot], sums[1, slot], sums[2, slot] = product, square, square_before
        sums[3, slot], sums[4, slot], sums[5, slot] = difference, parameter, num_moved


def compile_loops(*, cache: bool) -> tuple[Callable[..., None], Callable[..., None]]:
    """Compile `_measure` and `_take_witnesses`: seconds, or a fraction of a second if numba finds them on disk.

    Args:
        cache: keep the result on disk; raises an exception if there is no writable folder.
    """
    table = types.int64[:, :, :]  # its rows are not adjacent in a part of a table
    rows, histogram = types.float64[:, ::1], types.int64[:, ::1]
    bins = types.Array(types.int64, 1, "C", readonly=True)
    places = numba.from_dtype(PLACES)[::1]
    of_measure = types.void(table, types.uint32, types.uint64, bins, bins, places, rows, histogram)
    witnesses = types.float64[:, :, ::1]
    of_witnesses = types.void(table, types.int64[::1], witnesses, witnesses, types.float64[:, ::1])
    return (
        numba.njit(of_measure, nogil=True, cache=cache)(_measure),
        numba.njit(of_witnesses, nogil=True, cache=cache)(_take_witnesses),
    )
