"""Columns of numbers: thinned while a file is read, pooled to the columns of a picture, and packed for the script.

Matrices of positive numbers are stored as 16-bit steps of their logarithm, with a range per matrix; half a step is at
most 0.05 % of the value for up to 26 decades. Missing values, zero and infinity have their own codes, ordered so that
the largest code is the one to keep when cells are pooled.
"""

import base64
import gzip
import math
from array import array
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from .._measure.columns import NUM_BINS, ZERO_BIN, FloatArray, IntArray, magnitude_edges
from ..snapshot import keys
from .history import MAX_KEY, HistogramSeries, Samples

# R rows of the run, P names, W columns of a picture, H histograms of one name, B bins

MIN_COLUMNS: Final = 50
CODE_MISSING: Final = 0
CODE_ZERO: Final = 1
CODE_FIRST: Final = 2
CODE_LAST: Final = 65534
CODE_INFINITE: Final = 65535
_COUNTS: Final = frozenset(
    {"num_nan", "num_inf", "num_nonfinite", "num_skipped_steps", "num_guarded_steps", "num_samples"}
)

MAX_KEPT_CELLS: Final = 40_000_000  # rows x keys: 320 MB
MAX_OWN_VALUES: Final = 8_000_000  # of all keys together: 128 MB
MIN_OWN_VALUES: Final = 1_000  # of one key, even if there are many keys
MAX_SAMPLES: Final = 1_000_000  # 24 MB
MAX_STORED: Final = 50_000  # histograms over all names: about 65 MB


class Blob:
    """Concatenated arrays: what is added is known by its offset."""

    def __init__(self) -> None:
        self._data = bytearray()

    def add(self, data: bytes) -> int:
        self._data += data
        return len(self._data) - len(data)

    def add_floats(self, values: FloatArray) -> int:
        """Append values as float32; values too large for float32 become infinite."""
        with np.errstate(over="ignore"):
            return self.add(values.astype("<f4").tobytes())

    def add_steps(self, steps: IntArray | FloatArray) -> int:
        """Append steps as float64, which JavaScript has too."""
        return self.add(steps.astype("<f8").tobytes())

    def add_matrix(self, values: FloatArray, *, signed: bool = False) -> dict[str, Any]:
        """Append a matrix of any shape; return its offset and the meaning of its codes."""
        codes, start, step = quantise(values, signed=signed)
        # First all low bytes, then all high bytes, which hardly change and so compress well.
        parts = (codes & 0xFF, codes >> 8)
        return {"start": start, "step": step, "offset": self.add(b"".join(p.astype(np.uint8).tobytes() for p in parts))}

    def encoded(self) -> str:
        """Return all data compressed (gzip, which browsers can unpack), as base64."""
        return base64.b64encode(gzip.compress(self._data, 6, mtime=0)).decode("ascii")


def quantise(values: FloatArray, *, signed: bool) -> tuple[npt.NDArray[np.uint16], float, float]:
    """Store non-negative values as steps of their logarithm; values of both signs as linear steps.

    Returns the codes, of the same shape, start and step. A code from CODE_FIRST to CODE_LAST is the value
    10 ** (start + step * (code - CODE_FIRST)), or without the power for signed values. NaN, -Inf, and negative values
    in an unsigned matrix are CODE_MISSING.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        scaled = values if signed else np.log10(values)
    known = np.isfinite(scaled)
    low, high = (float(scaled[known].min()), float(scaled[known].max())) if known.any() else (0.0, 0.0)
    step = (high / 2 - low / 2) / ((CODE_LAST - CODE_FIRST) / 2)  # halves: the difference may overflow
    # Half a step of 0.0004 decades is 0.05 %, which is invisible in a picture or a tooltip of three digits.
    step = step or 1.0 if signed else max(step, 0.0004)
    codes = np.full(values.shape, CODE_MISSING, dtype=np.uint16)
    codes[known] = np.rint(scaled[known] / step - low / step).astype(np.uint16) + CODE_FIRST
    if not signed:
        codes[values == 0] = CODE_ZERO
    codes[values == np.inf] = CODE_INFINITE
    return codes, low, step


def pack_histograms(
    histograms: Mapping[str, HistogramSeries], names: list[str], max_bytes: int, blob: Blob
) -> dict[str, Any]:
    """Thin each name's histograms to a common budget; pack extremes as float32, shares as bytes of their square root.

    Bins of sizes that no histogram has are left out, on both sides of zero; of those near zero, one bin is left.
    """
    series = [(index, histograms[name]) for index, name in enumerate(names) if name in histograms]
    filled_B = np.zeros(NUM_BINS, dtype=bool)
    for _, one in series:
        filled_B |= (one.counts > 0).any(axis=0)
    filled = np.abs(np.flatnonzero(filled_B) - ZERO_BIN)  # 1: the bin of the smallest sizes
    last = int(filled.max(initial=1))
    first = max(int(filled[filled > 0].min(initial=last)) - 1, 1)
    outwards = np.arange(first, last + 1)
    bins = ZERO_BIN + np.concatenate([-outwards[::-1], [0], outwards])
    items = []
    for index, one in series:
        stride = pool_width(len(one.steps), max(8, max_bytes // (len(bins) * len(series))))
        kept = slice((len(one.steps) - 1) % stride, None, stride)  # always includes the last one
        counts = one.counts[kept][:, bins].astype(np.float64)
        share = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)  # counts are whole
        extremes = blob.add_floats(np.concatenate([one.low[kept], one.high[kept]]))
        shares = blob.add(np.rint(255 * np.sqrt(share)).astype(np.uint8).tobytes())
        steps = one.steps[kept].tolist()
        items.append({"name": index, "total": len(one.steps), "steps": steps, "extremes": extremes, "shares": shares})
    edges = magnitude_edges()[first : last + 1]
    edges = np.minimum(edges, 2 * magnitude_edges()[-2])  # the last bin may be open
    return {"edges": [0.0, *edges.tolist()], "items": items}


def pool_width(num_rows: int, max_columns: int) -> int:
    """Return how many neighbouring rows to pool so that at most `max_columns` remain."""
    return max(1, math.ceil(num_rows / max_columns))


def picture_width(num_rows: int, num_names: int, max_cells: int) -> int:
    """Like pool_width, for a names x steps picture of at most `max_cells`, but with at least MIN_COLUMNS."""
    return pool_width(num_rows, max(MIN_COLUMNS, max_cells // max(num_names, 1)))


def pool_steps(steps: IntArray, width: int) -> tuple[IntArray, IntArray]:
    """Return the first and the last step of every column: two [W]."""
    return steps[::width], np.append(steps[width - 1 :: width], steps[-1:] if len(steps) % width else steps[:0])


def pool(values_R: FloatArray, width: int, key: str) -> FloatArray:
    """Pool neighbouring rows [R, ...]: counts are added; otherwise the largest value is kept, so that spikes stay.
    Only of first samples the smallest is kept.

    Infinity is larger than every number, and a number larger than a missing value.
    """
    if width == 1:
        return values_R
    starts = np.arange(0, len(values_R), width)
    if key.endswith("/first_sample"):
        return np.fmin.reduceat(values_R, starts, axis=0)
    if not {key.partition("/")[0], key.rpartition("/")[2]} & _COUNTS:
        return np.fmax.reduceat(values_R, starts, axis=0)
    missing = np.logical_and.reduceat(np.isnan(values_R), starts, axis=0)
    return np.where(missing, np.nan, np.add.reduceat(np.nan_to_num(values_R, nan=0.0), starts, axis=0))


def pool_extremes(steps_N: FloatArray, values_N: FloatArray, most: int) -> tuple[FloatArray, FloatArray]:
    """Reduce a line to at most `most` points (at least two): the smallest and the largest of neighbouring values.

    Values that are not finite count as the largest, so that no NaN is lost.
    """
    if len(values_N) <= most:
        return steps_N, values_N
    starts = np.arange(0, len(values_N), pool_width(len(values_N), most // 2))
    ends = np.append(starts[1:] - 1, len(values_N) - 1)
    num_points = 2 * len(starts) - int(starts[-1] == ends[-1])  # a single last value is one point
    extremes = (np.fmin.reduceat(values_N, starts), np.maximum.reduceat(values_N, starts))
    pairs = ((steps_N[starts], steps_N[ends]), extremes)
    steps, values = (np.stack(pair, axis=1).ravel()[:num_points] for pair in pairs)
    return steps, values


class SampleColumns:
    """The samples that rows list. Of too many, every second of a block of neighbours stays: the most conspicuous."""

    def __init__(self) -> None:
        self._steps, self._norms, self._num_bad = array("q"), array("d"), array("q")

    def add(self, listed: object) -> None:
        """Add the list of a row, as far as it is one of ours: [step, norm or None] or [step, norm or None, count]."""
        for sample in listed if isinstance(listed, list) else ():
            if not (isinstance(sample, list) and 2 <= len(sample) <= 3):
                continue
            step, norm, num_bad = map(number_of, [*sample, 0][:3])
            if abs(step) < 2**53 and 0 <= num_bad < 2**53:
                self._steps.append(int(step))
                self._norms.append(norm)
                self._num_bad.append(int(num_bad))
        if len(self._steps) > MAX_SAMPLES:
            steps, norms, num_bad = thinned_samples(self.arrays(), MAX_SAMPLES // 2)
            self._steps, self._num_bad = array("q", steps.tolist()), array("q", num_bad.tolist())
            self._norms = array("d", norms.tolist())

    def arrays(self) -> Samples:
        """Return the samples by ascending step; of the samples of one step, the last one."""
        steps, last = np.unique(np.array(self._steps, dtype=np.int64)[::-1], return_index=True)
        columns = (np.array(self._norms)[::-1][last], np.array(self._num_bad, dtype=np.int64)[::-1][last])
        return Samples(steps, *columns)


def number_of(value: object) -> float:
    """Return a number as float; NaN for anything else."""
    try:
        return float(value) if isinstance(value, (int, float)) else math.nan
    except OverflowError:  # a whole number of more than 308 digits
        return math.inf


def thinned_samples(samples: Samples, most: int) -> Samples:
    """Return at most `most` samples: of neighbours, the one with the most bad elements, then with the largest norm.

    Neighbours are those in 2, 4, 8, ... steps, as in a row of many samples.
    """
    if len(samples.steps) <= most:
        return samples
    block = samples.steps
    while np.count_nonzero(np.diff(block)) >= most:
        block = block // 2
    order = np.lexsort((np.nan_to_num(samples.norms, nan=np.inf), samples.num_bad))
    rank = np.empty(len(order), dtype=np.int64)
    rank[order] = np.arange(len(order))
    starts = np.flatnonzero(np.append(True, np.diff(block)))
    kept = order[np.maximum.reduceat(rank, starts)]
    return Samples(samples.steps[kept], samples.norms[kept], samples.num_bad[kept])


def with_zeros(logged: Sequence[float], norms: Sequence[float]) -> FloatArray:
    """Add the zeros that rows leave out to a series of keys.ONCE_NOT_ZERO: those in rows with the layer's norm.

    Examples:
        >>> with_zeros([math.nan, math.nan, 0.5], [1.0, math.nan, 2.0, 3.0]).tolist()
        [0.0, nan, 0.5, 0.0]
    """
    values = np.full(max(len(logged), len(norms)), np.nan)
    values[: len(norms)] = np.where(np.isnan(norms), np.nan, 0.0)
    known = ~np.isnan(logged)
    values[: len(logged)][known] = np.array(logged)[known]
    return values


class RowColumns:
    """The values of wandb_gradwatch's keys, one row per step. Too many rows are merged with their neighbours."""

    def __init__(self) -> None:
        self.merged = 1  # steps per row; the last row may have fewer
        self._num_steps = 0
        self._steps = array("q")
        self._times = array("d")
        self._columns: defaultdict[str, array[float]] = defaultdict(lambda: array("d"))

    def add(self, step: int, time: object, numbers: Mapping[str, float]) -> None:
        """Add the numbers of a step; numbers of the same step share one row."""
        if not self._steps or self._steps[-1] != step:
            if self._num_steps % self.merged == 0 and len(self._steps) * len(self._columns) > MAX_KEPT_CELLS:
                self._merge_neighbours()
            if self._num_steps % self.merged == 0:
                self._steps.append(step)
                self._times.append(np.nan)
            self._num_steps += 1
        at = time if isinstance(time, (int, float)) and math.isfinite(time) else np.nan
        self._steps[-1], self._times[-1] = step, at
        place = len(self._steps) - 1
        for key, value in numbers.items():
            column = self._columns[key]
            column.extend([np.nan] * (place + 1 - len(column)))
            if self.merged > 1:
                value = pool(np.array([column[place], value]), 2, key).item()
            column[place] = value

    def matrix(self) -> tuple[IntArray, FloatArray, dict[str, FloatArray]]:
        """Return ascending steps [R], the times at which the rows were logged [R], and each key's values [R]."""
        steps, row_of = np.unique(np.array(self._steps, dtype=np.int64), return_inverse=True)

        def by_step(column: "array[float] | FloatArray") -> FloatArray:
            found, values = np.array(column), np.full(len(steps), np.nan)
            known = ~np.isnan(found)  # a resumed run repeats steps, and may not have all keys each time
            values[row_of[: len(found)][known]] = found[known]  # the last of a step's values stays
            return values

        values = {key: by_step(column) for key, column in self._columns.items()}
        for key, norms in self._columns.items():
            family, _, name = key.partition("/")
            for zero in (f"{one}/{name}" for one in keys.ONCE_NOT_ZERO if family == keys.LAYER_GRAD_NORM):
                values[zero] = by_step(with_zeros(self._columns.get(zero, ()), norms))
        return steps, by_step(self._times), values

    def num_repeated(self, prefix: str) -> int:
        """Return how many rows repeat the step of an earlier one; counted in the first column with this prefix."""
        column = next((column for key, column in self._columns.items() if key.startswith(prefix)), ())
        steps = np.array(self._steps)[: len(column)][~np.isnan(column)]
        return len(steps) - len(np.unique(steps))

    def _merge_neighbours(self) -> None:
        """Halve the number of rows. If it is odd, the last row stays open for the next steps."""
        self._steps = array("q", pool_steps(np.array(self._steps), 2)[1].tolist())
        self._times = array("d", pool_steps(np.array(self._times), 2)[1].tolist())
        for key, column in self._columns.items():
            self._columns[key] = array("d", pool(np.array(column), 2, key).tolist())
        self.merged *= 2


class OwnColumns:
    """The user's scalars, each with its own steps. A scalar with too many values is reduced to its extremes."""

    def __init__(self) -> None:
        self._columns: defaultdict[str, tuple[array[float], array[float]]]
        self._columns = defaultdict(lambda: (array("d"), array("d")))

    def add(self, key: str, step: float, value: float) -> None:
        """Add one value."""
        steps, values = self._columns[key]
        steps.append(step)
        values.append(value)
        most = max(MAX_OWN_VALUES // len(self._columns), MIN_OWN_VALUES)
        if len(values) > most:
            thinned = pool_extremes(np.array(steps), np.array(values), most // 2)
            self._columns[key] = (array("d", thinned[0].tolist()), array("d", thinned[1].tolist()))

    def arrays(self) -> Iterator[tuple[str, tuple[FloatArray, FloatArray]]]:
        """Yield each key with its steps and values."""
        for key, (steps, values) in self._columns.items():
            yield key, (np.array(steps), np.array(values))


class HistogramCollector:
    """Keeps histograms, evenly thinned over time: when there are too many, every second one of each name is dropped."""

    def __init__(self) -> None:
        self._stride = 1
        self._seen: Counter[tuple[str, str]] = Counter()
        # By family and name, as from keys.split_histogram: step, smallest and largest element, counts.
        self._kept: dict[tuple[str, str], list[tuple[int, float, float, npt.NDArray[np.float32]]]] = {}
        self._num_kept = 0

    def add(self, step: int, listed: object) -> int:
        """Add the list of a row, see keys.HISTOGRAMS; return how many of its entries are not ours and are left out."""
        entries = listed if isinstance(listed, list) else [listed]
        return sum(not self._add_entry(step, entry) for entry in entries)

    def _add_entry(self, step: int, entry: object) -> bool:
        """Add one entry, unless it is to be thinned; return whether it is one of ours."""
        if not (isinstance(entry, list) and len(entry) > 3 and isinstance(entry[0], str) and len(entry[0]) <= MAX_KEY):
            return False
        key, low, high, *runs = entry
        name, counts = keys.split_histogram(key), counts_of(runs)
        if name is None or counts is None:
            return False
        if name not in self._seen and len(self._seen) >= MAX_STORED // 2:
            return True  # with more names, dropping every second histogram of each would not make room
        self._seen[name] += 1
        if (self._seen[name] - 1) % self._stride:
            return True
        self._kept.setdefault(name, []).append((step, number_of(low), number_of(high), counts))
        self._num_kept += 1
        if self._num_kept > MAX_STORED:
            self._stride *= 2
            self._kept = {kept: stored[::2] for kept, stored in self._kept.items()}
            self._num_kept = sum(map(len, self._kept.values()))
        return True

    def series(self) -> dict[str, dict[str, HistogramSeries]]:
        """Return the histograms by family and name, sorted by step."""
        found: dict[str, dict[str, HistogramSeries]] = {}
        for (family, name), stored in self._kept.items():
            columns = zip(*sorted(stored, key=itemgetter(0)), strict=True)
            found.setdefault(family, {})[name] = HistogramSeries(*map(np.array, columns))
        return found


def counts_of(runs: list[object]) -> npt.NDArray[np.float32] | None:
    """Return the counts [B] that an entry of keys.HISTOGRAMS lists; None if it cannot be one.

    Examples:
        >>> counts = counts_of([-127, 5, 2])
        >>> counts[126:130].tolist()
        [0.0, 5.0, 2.0, 0.0]
    """
    try:
        run = np.asarray(runs, dtype=np.float64)
    except (TypeError, ValueError, OverflowError):
        return None
    if run.ndim != 1 or not (np.abs(run) < 2**53).all() or (run % 1).any():
        return None
    end = np.cumsum(np.where(run < 0, -run, 1))  # the bin after each number's
    if not 0 < end[-1] <= NUM_BINS:
        return None
    counts = np.zeros(NUM_BINS, dtype=np.float32)
    counts[end[run >= 0].astype(np.int64) - 1] = run[run >= 0]
    return counts
