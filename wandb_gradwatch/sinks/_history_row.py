"""One window as a row of the W&B history: plain numbers under the keys that users see, which become W&B's types later.

History rows are mergeable: HistoryRow.of(a.merge(b)) equals HistoryRow.of(a).merge(HistoryRow.of(b)). The size of a row
is bounded, whatever the number of samples. A missing value has no key; it is never logged as NaN or 0.
"""

import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from .._analysis.forecast import forecast
from .._measure.columns import (
    NUM_BINS,
    ZERO_BIN,
    Column,
    FloatArray,
    IntArray,
    histogram_edges,
    magnitude_edges,
    merge_rows,
)
from .._measure.probe_values import MetricHistogram, merge_histograms
from ..snapshot import Snapshot, keys
from ..snapshot._arrays import LEAST_SUM_SQ, last_present, sum_of_present

# S samples in the window, P watched parameters or groups, C columns, B bins of the snapshot, K bins of a W&B histogram

Number = int | float

MAX_ROW_BYTES: Final = 1_000_000  # W&B drops a row above 10.4 MB completely, including the user's keys in it
_NUMBER_BYTES: Final = 24  # size of a float and its comma in JSON

HALF_BINS: Final = 32
NUM_LOGGED_BINS: Final = 2 * HALF_BINS + 1
_HISTOGRAM_BYTES: Final = 34 * (NUM_LOGGED_BINS + 1)  # 34: size of an edge and a count up to 10^8 in JSON
_COUNT_BYTES: Final = 10  # size of a count up to 10^8 and its comma in JSON
_SHOWN: Final = 0.999
_STICKY_OCTAVES: Final = 2  # a range is kept until it is too narrow, or more than this many octaves too wide
_LOWER_EDGES_K: Final = np.arange(NUM_LOGGED_BINS + 1) - HALF_BINS - 0.5  # in bin widths; dyadic, so short in JSON
_FINITE_EDGES: Final = np.nan_to_num(histogram_edges())  # of the snapshot's bins

_FAMILIES: Final = (keys.LAYER_GRAD_NORM, keys.LAYER_GRAD_PARAM_RATIO, keys.LAYER_PARAM_NORM, keys.LAYER_DEAD_RATIO)
MAX_LISTED_SAMPLES: Final = 512  # about 10 kB
# Values of single samples. The row holds counts and ratios of some instead, and the loss of the last sample.
_OF_SAMPLES: Final = (
    *(keys.GUARDED, keys.LEFT_OUT, keys.INFERRED, keys.CLIPPED, keys.CHANGED, keys.LEARNING_RATE),
    *(keys.LOSS, keys.NUM_NONFINITE_LOSS),
)


class Rebinner:
    """Converts the mergeable histograms, of two bins per octave, to W&B histograms with 65 even bins around zero.

    The range of a W&B histogram is a power of two above the 99.9 % quantile of |g|, so that a few outliers do not press
    all other elements into one bin; the outermost bins count the outliers. The range of a key seldom changes, so that
    the rows of a heat map are comparable.
    """

    def __init__(self) -> None:
        self._exponent_of: dict[str, int] = {}

    def draw(self, histograms: Mapping[str, MetricHistogram]) -> dict[str, tuple[list[int], list[float]]]:
        """Counts [K] and edges [K + 1] of every histogram that is not empty, by key."""
        if not histograms:
            return {}
        histogram_PB = np.concatenate([one.counts for one in histograms.values()]).reshape(len(histograms), -1)
        below_PB = np.zeros((len(histograms), NUM_BINS + 1), dtype=np.int64)  # elements below each bin edge
        histogram_PB.cumsum(axis=1, out=below_PB[:, 1:])
        if not (counts_any_P := below_PB[:, -1] > 0).all():
            return self.draw(dict(itertools.compress(histograms.items(), counts_any_P)))
        low_P = np.array([histogram.low for histogram in histograms.values()])
        high_P = np.array([histogram.high for histogram in histograms.values()])
        # E distinct ranges: many layers share one.
        exponents = self._exponents(histograms, _reach(below_PB, low_P, high_P))
        place_of = {exponent: place for place, exponent in enumerate(dict.fromkeys(exponents))}
        ranges = [place_of[exponent] for exponent in exponents]
        edges_EK = np.ldexp(_LOWER_EDGES_K / HALF_BINS, np.array(list(place_of))[:, None])
        counts_PK = _redistribute(below_PB, edges_EK, np.array(ranges), low_P, high_P)
        edges = edges_EK.tolist()
        pictures = zip(counts_PK.tolist(), map(edges.__getitem__, ranges), strict=True)
        return dict(zip(histograms, pictures, strict=True))

    def _exponents(self, names: Iterable[str], reach_P: FloatArray) -> list[int]:
        """The exponents of the power-of-two ranges that cover `reach_P`; a key keeps its last exponent if that fits."""
        mantissa_P, exponent_P = np.frexp(reach_P)
        needed_P = np.maximum(exponent_P - (mantissa_P == 0.5), -1000)
        exponents = []
        for name, needed, is_zero in zip(names, needed_P.tolist(), (reach_P == 0).tolist(), strict=True):
            known = self._exponent_of.get(name)
            if not is_zero and (known is None or not needed <= known <= needed + _STICKY_OCTAVES):
                known = self._exponent_of[name] = needed
            exponents.append(known or 0)  # None for a key that has had nothing but zeros
        return exponents


@dataclass(frozen=True)
class ListedSamples:
    """The steps of a row's samples and their norms, thinned to MAX_LISTED_SAMPLES.

    Of the samples of each block of `width` steps, the one with the most NaN and Inf elements is listed; of equal ones,
    the one with the largest norm. A missing norm is larger than any other.
    """

    samples: tuple[tuple[int, float, int], ...]  # step, norm (NaN: missing), number of NaN and Inf elements
    width: int = 1  # a power of two

    @classmethod
    def of(cls, snapshot: Snapshot) -> "ListedSamples":
        num_bad_S = np.nansum(snapshot.num_nonfinite, axis=1) if snapshot.has_nonfinite.any() else snapshot.steps * 0
        columns = (snapshot.steps, snapshot.total_grad_norm, num_bad_S.astype(np.int64))
        return cls(tuple(zip(*(column.tolist() for column in columns), strict=True))).thinned()

    def merge(self, later: "ListedSamples") -> "ListedSamples":
        return ListedSamples(self.samples + later.samples, max(self.width, later.width)).thinned()

    def thinned(self) -> "ListedSamples":
        """Double the width until the samples are few enough."""
        width = self.width
        while len({step // width for step, *_ in self.samples}) > MAX_LISTED_SAMPLES:
            width *= 2
        if width == 1:
            return self
        blocks = itertools.groupby(self.samples, lambda sample: sample[0] // width)
        return ListedSamples(tuple(max(block, key=_conspicuousness) for _, block in blocks), width)

    def as_json(self) -> list[list[Number | None]]:
        """The value of keys.SAMPLES."""
        return [
            [step, float(f"{norm:.6g}") if math.isfinite(norm) else None, *([num_bad] if num_bad else [])]
            for step, norm, num_bad in self.samples
        ]


def _conspicuousness(sample: tuple[int, float, int]) -> tuple[int, float]:
    _, norm, num_bad = sample
    return num_bad, math.inf if math.isnan(norm) else norm


class ZerosLeftOut:
    """Leaves keys of the families in keys.ONCE_NOT_ZERO out of rows, each up to its first value that is not 0."""

    def __init__(self) -> None:
        self._known: set[str] = set()  # keys that were not 0 once

    def shown(self, scalars: Mapping[str, Number]) -> dict[str, Number]:
        shown = {}
        for key, value in scalars.items():
            if key.partition("/")[0] in keys.ONCE_NOT_ZERO and key not in self._known:
                if not value:
                    continue
                self._known.add(key)
            shown[key] = value
        return shown


@dataclass(frozen=True)
class HistoryRow:
    """One history row before it is logged."""

    first_sample: int  # step
    step: int  # step of the last sample
    listed: ListedSamples
    last: dict[str, Number]  # the last value of each key; NaN if it is missing there, and no earlier one replaces it
    largest: dict[str, Number]  # maxima over the window
    summed: dict[str, Number]  # sums over the window
    samples: dict[str, int]  # number of samples: "all", "known" (clipping is known), "clipped", "changed" (otherwise)
    # The samples of the histogram and the histogram, merged to one layer and one sample; None unless keys.PRECISION is
    # asked for.
    whole: Snapshot | None
    histograms: dict[str, MetricHistogram]
    rebinner: Rebinner | None = None  # makes W&B's histograms; None: no histograms are logged
    namespace: str = ""  # inserted into the model-wide keys
    zeros: ZerosLeftOut | None = None  # None: zeros of healthy layers are logged

    @classmethod
    def of(
        cls,
        snapshot: Snapshot,
        details: Mapping[str, str] = {},
        rebinner: Rebinner | None = None,
        namespace: str = "",
        zeros: ZerosLeftOut | None = None,
        alert_level: int = 0,
    ) -> "HistoryRow":
        """Make the row of a window with at least one sample; `details` as check_details returns them."""
        names = snapshot.names
        latest = snapshot  # one sample with each name's last present row
        if len(snapshot) > 1:
            latest = Snapshot(snapshot.steps[-1:], names, last_present(snapshot.rows, snapshot.present)[None])
        shown_P = np.logical_or.reduce(snapshot.present, axis=0).tolist()
        last = _newest(snapshot)
        for name, key in keys.MODEL_DETAILS.items():
            if name not in details:
                del last[key]
        largest = {keys.GRAD_NORM_MAX: float(np.fmax.reduce(snapshot.total_grad_norm)), keys.ALERT_LEVEL: alert_level}
        largest |= _named(keys.LAYER_GRAD_NORM_MAX, names, np.fmax.reduce(snapshot.grad_norm, axis=0))
        summed: dict[str, Number] = {keys.NUM_SKIPPED_STEPS: int(np.count_nonzero(snapshot.skipped))}
        for name, values_S in snapshot.metrics.items():
            if name in _OF_SAMPLES or name.startswith((keys.WIRING, keys.FACT)):
                continue
            if keys.is_count(name):
                summed[name] = int(sum(_known(values_S)))
            elif known := _known(values_S):
                last[keys.in_key(name)] = known[-1]
            if name.startswith(keys.TOTAL):
                total_max = keys.in_key(keys.TOTAL_MAX + name.removeprefix(keys.TOTAL))
                largest[total_max] = float(np.fmax.reduce(values_S))
        summed |= _num_nonfinite(snapshot, shown_P)
        patterns = dict.fromkeys(_FAMILIES, "")
        patterns |= {family: details[name] for name, family in keys.DETAILS.items() if name in details}
        for family, pattern in patterns.items():
            asked_P = shown_P
            if pattern:
                asked_P = [shown and bool(re.search(pattern, name)) for shown, name in zip(shown_P, names, strict=True)]
            last |= itertools.compress(_named(family, names, getattr(latest, family)[0]), asked_P)
        clipped = _known(snapshot.clipped)
        changed = int(np.count_nonzero(snapshot.changed))
        counted_PC = _counted_rows(snapshot)
        return cls(
            first_sample=int(snapshot.steps[0]),
            step=int(snapshot.steps[-1]),
            listed=ListedSamples.of(snapshot),
            last=last,
            largest=_present(largest),
            summed=summed,
            samples={"known": len(clipped), "clipped": int(sum(clipped)), "changed": changed, "all": len(snapshot)},
            whole=_whole(snapshot, counted_PC) if keys.PRECISION in details else None,
            histograms=_histograms_of_layers(snapshot, counted_PC)
            | {keys.in_key(key): value for key, value in snapshot.metric_histograms.items()},
            rebinner=rebinner,
            namespace=namespace,
            zeros=zeros,
        )

    def merge(self, later: "HistoryRow") -> "HistoryRow":
        """Merge this row with a later one into the row of both windows."""
        wholes = [whole for whole in (self.whole, later.whole) if whole is not None]
        both = wholes[0].merge(*wholes[1:]) if wholes else None
        largest = {key: max(value, self.largest.get(key, value)) for key, value in later.largest.items()}
        return replace(
            later,
            first_sample=self.first_sample,
            listed=self.listed.merge(later.listed),
            last=self.last | later.last,
            largest=self.largest | largest,
            summed=self.summed | {key: value + self.summed.get(key, 0) for key, value in later.summed.items()},
            samples={key: value + later.samples[key] for key, value in self.samples.items()},
            whole=None if both is None else _whole(both, _counted_rows(both)),
            histograms=merge_histograms([self.histograms, later.histograms]),
        )

    def scalars(self) -> dict[str, Number]:
        """All scalars of the row with all zeros; the step and the model-wide scalars of the last sample come first."""
        held = {keys.STEP: self.step, keys.FIRST_SAMPLE: self.first_sample, keys.NUM_SAMPLES: self.samples["all"]}
        scalars: dict[str, Number] = {**held, **_present(self.last)}
        if self.samples["known"]:
            scalars[keys.CLIP_RATIO] = self.samples["clipped"] / self.samples["known"]
        if self.samples["changed"]:
            scalars[keys.CHANGED_RATIO] = self.samples["changed"] / self.samples["all"]
        if self.whole is not None:
            quantiles = self.whole.abs_quantile(list(keys.GRAD_ABS_QUANTILES.values()))[:, 0].tolist()
            quantiles_of_whole = dict(zip(keys.GRAD_ABS_QUANTILES, quantiles, strict=True))
            scalars |= _present(quantiles_of_whole | forecast(self.whole))
        scalars |= self.summed | self.largest
        if not self.namespace:
            return scalars
        return {keys.in_namespace(key, self.namespace): value for key, value in scalars.items()}

    def parts(self) -> list[dict[str, Any]]:
        """The dictionaries to log: one, or several where W&B's size limit requires it, each with the step."""
        import wandb

        listed = {keys.in_namespace(keys.SAMPLES, self.namespace): self.listed.as_json()}
        scalars = self.scalars()
        values: dict[str, Any] = (scalars if self.zeros is None else self.zeros.shown(scalars)) | listed
        drawn = {} if self.rebinner is None else self.rebinner.draw(self.histograms)
        for key, picture in drawn.items():
            # The annotation demands arrays, which wandb.Histogram converts to lists; these are lists already.
            values[key] = wandb.Histogram(np_histogram=picture)  # type: ignore[arg-type]
        counted = {key: counted_histogram(key, self.histograms[key]) for key in drawn}
        lists_key = keys.in_namespace(keys.HISTOGRAMS, self.namespace)
        size_of = {key: _HISTOGRAM_BYTES + len(key) + _COUNT_BYTES * len(entry) for key, entry in counted.items()}
        total = sum(map(len, values)) + (len(values) - len(drawn)) * _NUMBER_BYTES + sum(size_of.values())
        if total <= MAX_ROW_BYTES:  # the usual case
            return [values | {lists_key: [*counted.values()]} if counted else values]
        parts: list[dict[str, Any]] = []
        filled = MAX_ROW_BYTES
        for key, value in values.items():
            size = len(key) + size_of.get(key, _NUMBER_BYTES)
            filled += size
            if filled > MAX_ROW_BYTES:
                parts.append({keys.STEP: self.step})
                filled = size
            parts[-1][key] = value
            if key in counted:  # every list has a key of its own: parts may become one row of W&B
                lists = f"{lists_key}/{len(parts) - 1}" if len(parts) > 1 else lists_key
                parts[-1].setdefault(lists, []).append(counted[key])
        return parts


def counted_histogram(key: str, histogram: MetricHistogram) -> list[Any]:
    """A histogram's entry in the list of keys.HISTOGRAMS.

    Examples:
        Two elements of -1 (in bin 31 of 257), three of 0 and one of 1.5.

        >>> from wandb_gradwatch._measure.columns import bins_of
        >>> counts = np.bincount(bins_of(np.array([-1, -1, 0, 0, 0, 1.5])))
        >>> counted_histogram("gradients/a", MetricHistogram(counts, -1.0, 1.5))
        ['gradients/a', -1.0, 1.5, -31, 2, -96, 3, -97, 1]
    """
    extremes = [float(f"{one:.6g}") if math.isfinite(one) else None for one in (histogram.low, histogram.high)]
    runs: list[int] = []
    after = 0  # the bin after the last one that is listed
    for place, count in enumerate(histogram.counts.tolist()):
        if count:
            runs += [after - place, count] if place > after else [count]
            after = place + 1
    return [key, *extremes, *runs]


def _newest(snapshot: Snapshot) -> dict[str, Number]:
    """The model-wide values of the last sample; a value that is missing there is not taken from an earlier sample."""
    # The formulas are those of the snapshot's statistics, in plain numbers: for one row, arrays take ten times as long.
    rows_PC, is_complete = snapshot.rows[-1], bool(snapshot.names) and snapshot.present[-1].all()
    whole = (snapshot.column_sums[-1] if is_complete else merge_rows(rows_PC, axis=0)).tolist()
    low, high = whole[Column.GRAD_MIN], whole[Column.GRAD_MAX]
    if is_complete:  # the usual case
        low = float(np.minimum.reduce(rows_PC[:, Column.GRAD_MIN]))
        high = float(np.maximum.reduce(rows_PC[:, Column.GRAD_MAX]))
    num, sum_sq, num_broken = whole[Column.NUM_ELEMENTS], whole[Column.GRAD_SUM_SQ], whole[Column.PARAM_NUM_NONFINITE]
    num_finite = num - whole[Column.NUM_NAN] - whole[Column.NUM_INF]
    abs_max = max(abs(low), abs(high)) if math.isfinite(low) and math.isfinite(high) else math.nan
    mean, mean_sq = math.nan, math.nan
    if num_finite > 0:
        mean, mean_sq = whole[Column.GRAD_SUM] / num_finite, sum_sq / num_finite
    has_norm = not (sum_sq < LEAST_SUM_SQ and (num > num_finite == 0 or abs_max > 0))
    return {
        keys.LOSS_SCALE: float(snapshot.loss_scale[-1]),
        keys.OVERHEAD_RATIO: float(snapshot.overhead_ratio),
        keys.LOSS: float(snapshot.metrics[keys.LOSS][-1]) if keys.LOSS in snapshot.metrics else math.nan,
        keys.GRAD_NORM: math.sqrt(sum_sq) if has_norm else math.nan,
        keys.GRAD_NORM_CLIPPED: math.sqrt(whole[Column.RECEIVED_SUM_SQ]) if has_norm else math.nan,
        keys.GRAD_MEAN: mean,
        keys.GRAD_STD: math.sqrt(max(mean_sq - mean * mean, 0.0)) if has_norm else math.nan,
        keys.GRAD_ABS_MAX: abs_max,
        keys.DEAD_RATIO: whole[Column.NUM_DEAD] / num if num and num_finite else math.nan,
        keys.PARAM_NORM: math.nan if 0 < num_broken == num else math.sqrt(whole[Column.PARAM_SUM_SQ]),
    }


def _num_nonfinite(snapshot: Snapshot, shown_P: Sequence[bool]) -> dict[str, int]:
    """Counts over the window: NaN and Inf separately for the whole model, and NaN plus Inf for each layer."""
    if not snapshot.has_nonfinite.any():  # the usual case: 0 wherever a gradient arrived
        of_layers = itertools.compress(keys.layer_keys(keys.LAYER_NUM_NONFINITE, snapshot.names), shown_P)
        return dict.fromkeys((keys.NUM_NAN, keys.NUM_INF, *of_layers), 0) if any(shown_P) else {}
    of_model = {keys.NUM_NAN: snapshot.total.num_nan, keys.NUM_INF: snapshot.total.num_inf}
    counts = {key: float(sum_of_present(values_S1)[0]) for key, values_S1 in of_model.items()}
    counts |= _named(keys.LAYER_NUM_NONFINITE, snapshot.names, sum_of_present(snapshot.num_nonfinite))
    return {key: int(value) for key, value in _present(counts).items()}


def _counted_rows(snapshot: Snapshot) -> FloatArray | None:
    """Each layer's rows merged over the samples in the histogram: [P, C]; None without a histogram."""
    if snapshot.histogram is None or not snapshot.names:
        return None
    counted = snapshot.rows if snapshot.is_counted.all() else snapshot.rows[snapshot.is_counted]
    return counted[0] if len(counted) == 1 else merge_rows(counted, axis=0)


def _whole(snapshot: Snapshot, counted_PC: FloatArray | None) -> Snapshot | None:
    if snapshot.histogram is None or counted_PC is None:
        return None
    return Snapshot(
        steps=snapshot.steps[-1:],
        names=("total",),
        rows=merge_rows(counted_PC, axis=0)[None, None],
        histogram=np.add.reduce(snapshot.histogram, axis=0, keepdims=True),
        histogram_steps=(int(snapshot.steps[-1]),) if snapshot.is_counted.any() else (),
    )


def _histograms_of_layers(snapshot: Snapshot, counted_PC: FloatArray | None) -> dict[str, MetricHistogram]:
    """The histograms of all layers with a finite element, by key; unknown extremes are -inf and inf."""
    if snapshot.histogram is None or counted_PC is None:
        return {}
    low_P, high_P = counted_PC[:, Column.GRAD_MIN], counted_PC[:, Column.GRAD_MAX]
    low_P = np.where(np.isfinite(low_P), low_P, -np.inf).tolist()
    high_P = np.where(np.isfinite(high_P), high_P, np.inf).tolist()
    layer_keys = keys.layer_keys(keys.GRADIENT_HISTOGRAMS, snapshot.names)
    layers = map(MetricHistogram, snapshot.histogram, low_P, high_P)
    is_there_P = np.logical_or.reduce(snapshot.histogram, axis=1).tolist()
    return dict(itertools.compress(zip(layer_keys, layers, strict=True), is_there_P))


def _named(family: str, names: tuple[str, ...], values_P: FloatArray) -> Iterable[tuple[str, Number]]:
    return zip(keys.layer_keys(family, names), values_P.tolist(), strict=True)


def _present(values: dict[str, Number]) -> dict[str, Number]:
    return {key: value for key, value in values.items() if value == value}


def _known(values_S: FloatArray) -> list[float]:
    """The values that are not NaN."""
    return [value for value in values_S.tolist() if value == value]


@dataclass(frozen=True)
class TableRow:
    """The flight recorder's table. A later table replaces an earlier one."""

    columns: list[str]
    rows: list[list[Any]]
    step = None  # the table shares a W&B row with no other row

    def merge(self, later: "TableRow") -> "TableRow":
        return later

    def parts(self) -> list[dict[str, Any]]:
        import wandb

        newest = max(row[self.columns.index("step")] for row in self.rows)
        # W&B infers column types row by row, about 1 s for 10,000 rows: one row per combination of types is enough.
        kinds = {tuple(map(type, row)): row for row in self.rows}
        table = wandb.Table(columns=[*self.columns], data=[*kinds.values()])
        table.data[:] = self.rows
        return [{keys.STEP: newest, keys.FLIGHT_RECORDER: table}]


def _reach(below_PB: IntArray, low_P: FloatArray, high_P: FloatArray) -> FloatArray:
    """The upper edge of the bin with the 99.9 % quantile of |g|, or the largest |g| if that is smaller: [P]."""
    # Zeros are excluded: if nearly all elements are zero (an embedding), the quantile is that of the other elements.
    zeros_P1 = below_PB[:, ZERO_BIN + 1, None] - below_PB[:, ZERO_BIN, None]
    up_to_PM = below_PB[:, ZERO_BIN + 2 :] - below_PB[:, ZERO_BIN - 1 :: -1] - zeros_P1
    shown_P = _SHOWN * up_to_PM[:, -1]
    last_bin_P = np.argmax(up_to_PM >= shown_P[:, None], axis=1)
    edges = magnitude_edges()
    largest_P = np.maximum(np.abs(low_P), np.abs(high_P))
    reach_P = np.minimum(edges[last_bin_P + 1], largest_P)
    reach_P = np.where(np.isinf(reach_P), 2 * edges[-2], reach_P)  # infinite: the open bin with unknown extremes
    return np.where(up_to_PM[:, -1] > 0, reach_P, 0.0)


def _redistribute(
    below_PB: IntArray, edges_EK: FloatArray, range_P: IntArray, low_P: FloatArray, high_P: FloatArray
) -> IntArray:
    """Convert counts to other bins, as if elements lay evenly in each bin, or its part between low and high: [P, K]."""
    inner_EK = edges_EK[:, 1:-1]
    # No inner edge is 0, so no inner edge divides the zero bin, which has no width.
    bin_EK = np.searchsorted(histogram_edges(), inner_EK, side="right") - 1
    inner_PK = inner_EK[range_P]
    left_PK = np.maximum(_FINITE_EDGES[bin_EK][range_P], low_P[:, None])
    right_PK = np.minimum(_FINITE_EDGES[bin_EK + 1][range_P], high_P[:, None])
    width_PK = right_PK / 2 - left_PK / 2  # halves, because the width of an open bin may overflow
    with np.errstate(divide="ignore", invalid="ignore"):
        share_PK = np.where(width_PK > 0, (inner_PK / 2 - left_PK / 2) / width_PK, inner_PK >= left_PK)
    place_PK = bin_EK[range_P] + np.arange(0, below_PB.size, below_PB.shape[1])[:, None]  # indices into the flat array
    before_PK = below_PB.take(place_PK)
    inside_PK = below_PB.take(place_PK + 1) - before_PK
    below_PK = np.zeros((len(below_PB), edges_EK.shape[1]), dtype=np.int64)
    below_PK[:, 1:-1] = np.rint(np.minimum(np.maximum(share_PK, 0.0), 1.0) * inside_PK)
    below_PK[:, 1:-1] += before_PK
    below_PK[:, -1] = below_PB[:, -1]
    return below_PK[:, 1:] - below_PK[:, :-1]
