"""What one window looks like as a row of the W&B history: plain numbers under the names that users see.

A row is mergeable, like everything here: HistoryRow.of(a.merge(b)) equals HistoryRow.of(a).merge(HistoryRow.of(b)), but
its memory does not grow with the number of samples. A value that is missing has no key; it is never NaN and never 0.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from .._analysis.forecast import forecast
from .._measure.columns import NUM_COLUMNS, FloatArray, merge_rows
from .._measure.probe_values import MetricHistogram, merge_histograms
from ..snapshot import Snapshot, keys, last_present
from ..snapshot._missing import sum_of_present

# S samples in the window, P watched parameters or groups, C columns

Number = int | float

# Further numbers of every layer; or of those whose name matches: a regular expression (searched) by the number's name.
Details = Sequence[str] | Mapping[str, str]

# What one sample is; the row has the counts and ratios, and the loss of the last one.
_OF_SAMPLES: Final = (keys.GUARDED, keys.LEFT_OUT, keys.CLIPPED, keys.CHANGED, keys.LOSS, keys.LEARNING_RATE)


@dataclass(frozen=True)
class HistoryRow:
    """One row before it is logged.

    Args:
        step: the step of the last sample.
        newest: values of the last sample; a later row replaces them all, missing ones too.
        last: values that last until a newer sample has the name, NaN where that one has no value.
        largest: maxima over the window.
        summed: counts over the window.
        num_clipped: samples of the window whose gradient was clipped.
        num_clip_known: samples of the window where that is known.
        num_changed: samples of the window whose gradient something else than clipping changed after the backward.
        num_samples: of the window.
        pictured: one sample, merged from those that the histogram counts, with the histogram; None without one.
        metric_histograms: those of the window's metrics, by key.
    """

    step: int
    newest: dict[str, Number]
    last: dict[str, Number]
    largest: dict[str, Number]
    summed: dict[str, Number]
    num_clipped: int
    num_clip_known: int
    num_changed: int
    num_samples: int
    pictured: Snapshot | None
    metric_histograms: dict[str, MetricHistogram] = field(default_factory=dict)

    @classmethod
    def of(cls, snapshot: Snapshot, details: Details = ()) -> HistoryRow:
        """Make the row of a window that holds at least one sample, with what is asked for of keys.DETAILS."""
        total = snapshot.total
        clip_known = ~np.isnan(snapshot.clipped)
        names = snapshot.names
        counts = {name: values for name, values in snapshot.metrics.items() if keys.is_count(name)}
        last = {
            keys.in_key(name): _last(values)
            for name, values in snapshot.metrics.items()
            if name not in counts and name not in _OF_SAMPLES and not name.startswith(keys.WIRING)
        }
        last = _present(last)
        present_SP = ~np.isnan(snapshot.num_elements)
        patterns = {keys.DETAILS[name]: details[name] for name in details} if isinstance(details, Mapping) else {}
        for family in (
            *(keys.LAYER_GRAD_NORM, keys.LAYER_GRAD_PARAM_RATIO),
            *(keys.LAYER_PARAM_NORM, keys.LAYER_DEAD_RATIO),
            *(keys.DETAILS[name] for name in details),
        ):
            values = _named(family, names, last_present(getattr(snapshot, family), present_SP))
            shown_P = np.logical_or.reduce(present_SP, axis=0)
            if family in patterns:
                shown_P = shown_P & [re.search(patterns[family], name) is not None for name in names]
            last |= dict(itertools.compress(values.items(), shown_P))
        largest = {keys.GRAD_NORM_MAX: float(np.fmax.reduce(snapshot.total_grad_norm))}
        largest |= _named(keys.LAYER_GRAD_NORM_MAX, names, np.fmax.reduce(snapshot.grad_norm, axis=0))
        largest |= {
            keys.in_key(keys.TOTAL_MAX + name.removeprefix(keys.TOTAL)): float(np.fmax.reduce(values))
            for name, values in snapshot.metrics.items()
            if name.startswith(keys.TOTAL)
        }
        summed = {
            keys.NUM_SKIPPED_STEPS: float(np.count_nonzero(snapshot.skipped)),
            **{name: float(np.nansum(values)) for name, values in counts.items()},
        }
        if snapshot.names:
            summed[keys.NUM_NAN] = float(sum_of_present(total.num_nan)[0])
            summed[keys.NUM_INF] = float(sum_of_present(total.num_inf)[0])
        summed |= _named(keys.LAYER_NUM_NONFINITE, names, sum_of_present(snapshot.num_nonfinite))
        return cls(
            step=int(snapshot.steps[-1]),
            newest=_present(_newest(snapshot)),
            last=last,
            largest=_present(largest),
            summed={key: int(value) for key, value in _present(summed).items()},
            num_clipped=int(snapshot.clipped[clip_known].sum()),
            num_clip_known=int(np.count_nonzero(clip_known)),
            num_changed=int(np.count_nonzero(snapshot.changed)),
            num_samples=len(snapshot),
            pictured=_pictured(snapshot),
            metric_histograms={keys.in_key(key): value for key, value in snapshot.metric_histograms.items()},
        )

    def merge(self, later: HistoryRow) -> HistoryRow:
        """This row and a later one as one: the row of both windows."""
        pictures = [picture for picture in (self.pictured, later.pictured) if picture is not None]
        return HistoryRow(
            step=later.step,
            newest=later.newest,
            last=self.last | later.last,
            largest=self.largest
            | {key: max(value, self.largest.get(key, value)) for key, value in later.largest.items()},
            summed=self.summed | {key: value + self.summed.get(key, 0) for key, value in later.summed.items()},
            num_clipped=self.num_clipped + later.num_clipped,
            num_clip_known=self.num_clip_known + later.num_clip_known,
            num_changed=self.num_changed + later.num_changed,
            num_samples=self.num_samples + later.num_samples,
            pictured=_pictured(pictures[0].merge(*pictures[1:])) if pictures else None,
            metric_histograms=merge_histograms([self.metric_histograms, later.metric_histograms]),
        )

    def vitals(self) -> dict[str, Number]:
        """The numbers of the whole model, under `gradwatch/`, the step first."""
        vitals: dict[str, Number] = {keys.STEP: self.step, **self.newest}
        vitals |= {
            key: value
            for values in (_present(self.last), self.largest, self.summed)
            for key, value in values.items()
            if key.startswith(keys.PREFIX)
        }
        if self.num_clip_known:
            vitals[keys.CLIP_RATIO] = self.num_clipped / self.num_clip_known
        if self.num_changed:
            vitals[keys.CHANGED_RATIO] = self.num_changed / self.num_samples
        if self.pictured is not None and self.pictured.names:
            total = self.pictured.total
            vitals |= _present({key: float(total.abs_quantile(q)[0]) for key, q in keys.GRAD_ABS_QUANTILES.items()})
            vitals |= _present(_precision(total))
        return vitals

    def scalars(self) -> dict[str, Number]:
        """Every number of the row, the step first."""
        return self.vitals() | _present(self.last) | self.largest | self.summed


def _newest(snapshot: Snapshot) -> dict[str, Number]:
    """The whole model in the last sample. What could not be seen there is missing, not taken from an earlier sample."""
    total = snapshot.total
    values: dict[str, Number] = {
        keys.LOSS_SCALE: float(snapshot.loss_scale[-1]),
        keys.OVERHEAD_RATIO: float(snapshot.overhead_ratio),
        keys.LOSS: float(snapshot.metrics[keys.LOSS][-1]) if keys.LOSS in snapshot.metrics else math.nan,
    }
    if snapshot.names:
        values |= {
            keys.GRAD_NORM: float(total.grad_norm[-1, 0]),
            keys.GRAD_NORM_CLIPPED: float(total.grad_norm_clipped[-1, 0]),
            keys.GRAD_MEAN: float(total.grad_mean[-1, 0]),
            keys.GRAD_STD: float(total.grad_std[-1, 0]),
            keys.GRAD_ABS_MAX: float(total.grad_abs_max[-1, 0]),
            keys.DEAD_RATIO: float(total.dead_ratio[-1, 0]),
            keys.PARAM_NORM: float(total.param_norm[-1, 0]),
        }
    return values


def _precision(total: Snapshot) -> dict[str, Number]:
    """What smaller number formats would do to the gradient that the histogram counts."""
    values: dict[str, Number] = {}
    for name, of_format in forecast(total).items():
        totals = (of_format.total_underflow_ratio, of_format.total_flush_ratio, of_format.total_headroom)
        values |= {keys.forecast_key(name, what): total for what, total in zip(keys.FORECASTS, totals, strict=True)}
    return values


def _pictured(snapshot: Snapshot) -> Snapshot | None:
    """The histogram, with one row per name that knows its extremes."""
    if snapshot.histogram is None:
        return None
    counted = snapshot.is_counted
    rows_SPC = np.full((1, len(snapshot.names), NUM_COLUMNS), np.nan)
    if counted.any():
        rows_SPC[0] = merge_rows(snapshot.rows[counted], axis=0)
    return Snapshot(
        steps=snapshot.steps[-1:],
        names=snapshot.names,
        rows=rows_SPC,
        histogram=snapshot.histogram,
        histogram_steps=(int(snapshot.steps[-1]),) if counted.any() else (),
    )


def _named(family: str, names: Iterable[str], values_P: FloatArray) -> dict[str, Number]:
    return {keys.layer_key(family, name): value for name, value in zip(names, values_P.tolist(), strict=True)}


def _present(values: dict[str, Number]) -> dict[str, Number]:
    return {key: value for key, value in values.items() if value == value}


def _last(values_S: FloatArray) -> float:
    return float(last_present(np.asarray(values_S, dtype=np.float64)[:, None])[0])
