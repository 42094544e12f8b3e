"""Finds when a norm left its usual level, and what came first: an update or the gradient, the gradient or the loss."""

import math
from dataclasses import dataclass
from typing import Final

import numpy as np

from .._analysis.baseline import median_and_scatter
from .._analysis.formatting import number
from .._measure.columns import BoolArray, FloatArray, IntArray
from ..snapshot import Snapshot, keys

# S samples, N clean samples

_NEIGHBOURS: Final = 16  # number of samples before that define what is usual
_LEAST: Final = 5
_SUDDEN, _CALM = math.log(5.0), math.log(3.0)  # log of norm / usual norm: least at an onset, most in the sample before
_RECENT: Final = 12  # number of newest samples in which the fault of an alert begins
_ROSE: Final = 3.0  # least learning rate / previous one at a rise; a warm-up schedule reaches 2 at most
_LEAST_BOTH: Final = 12  # least number of samples with loss and norm; the older half defines what is usual
_DEVIATIONS: Final = 6.0
_PRECISION: Final = 1e-2  # smallest deviation, as a share of the median


@dataclass(frozen=True)
class RateRise:
    """A rise of the learning rate: at once in the update of a sample, or step by step up to it, since another one."""

    before: float
    after: float
    since: int
    sample: int
    at_once: bool


@dataclass(frozen=True)
class Onset:
    """A clean sample whose norm is far above the norms before it."""

    sample: int
    factor: float  # its norm / the median of the norms before it


def rate_rise(history: Snapshot) -> RateRise | None:
    """Return the newest rise of the learning rate: at once among the last samples, otherwise over the whole history."""
    rate_S = history.metrics.get(keys.LEARNING_RATE)
    if rate_S is None:
        return None
    like_last_S = (history.present == history.present[-1:]).all(axis=1)  # other optimizers have other rates
    known = np.flatnonzero((rate_S > 0) & like_last_S)
    for before, now in zip(known[-2::-1].tolist(), known[:0:-1].tolist(), strict=True):
        if now < len(history) - _RECENT:
            break
        if rate_S[now] >= _rise_of_a_schedule(history, before, now) * rate_S[before]:
            return RateRise(float(rate_S[before]), float(rate_S[now]), before, now, at_once=True)
    if not known.size:
        return None
    last = int(known[-1])
    rises = [(float(rate_S[last] / rate_S[s]) / _rise_of_a_schedule(history, s, last), s) for s in known.tolist()]
    rise, before = max(rises)
    return RateRise(float(rate_S[before]), float(rate_S[last]), before, last, at_once=False) if rise >= 1 else None


def _rise_of_a_schedule(history: Snapshot, before: int, now: int) -> float:
    """Return the factor by which a learning rate has to rise between two samples to be unusual.

    A linear warm-up rises by the ratio of their steps. If every step in between is known, a steeper rise would show.
    """
    steps = history.steps[[before, now]]
    return _ROSE * float(steps[1] / max(steps[0], 1)) if np.ptp(steps) > now - before else _ROSE


def onset_of(log_norm_N: FloatArray, clean_N: IntArray) -> Onset | None:
    """Return the newest onset among the last clean samples; None if there is none."""
    for place in range(len(log_norm_N) - 1, max(_LEAST, len(log_norm_N) - _RECENT) - 1, -1):
        usual = float(np.median(log_norm_N[max(place - _NEIGHBOURS, 0) : place]))
        if log_norm_N[place] - usual >= _SUDDEN and log_norm_N[place - 1] - usual <= _CALM:
            return Onset(int(clean_N[place]), math.exp(min(float(log_norm_N[place]) - usual, 700.0)))
    return None


def which_moved_first(history: Snapshot) -> str:
    """Return in words whether the gradient or the loss rose first in the history before an alert; "" if unknown."""
    loss_S = history.metrics.get(keys.LOSS)
    if loss_S is None or not len(history):
        return ""
    norm_S = np.where(history.has_nonfinite, np.inf, history.total_grad_norm)
    loss_S = np.where(history.metrics.get(keys.NUM_NONFINITE_LOSS, np.zeros(1)) > 0, np.inf, loss_S)
    seen_S = np.isfinite(loss_S) & np.isfinite(norm_S)
    if np.count_nonzero(seen_S) < _LEAST_BOTH:
        return ""
    gradient, loss = _onset_in(norm_S, seen_S), _onset_in(loss_S, seen_S)
    if gradient is None:
        return "" if loss is None else f"The loss left its usual level first, at step {_at(history, loss, loss_S)}."
    if loss is None:
        left = f"The gradient norm left its usual level at step {_at(history, gradient, norm_S)}"
        return f"{left}." if np.isnan(loss_S[-1]) else f"{left}; the loss has not yet."
    if gradient == loss:
        return f"The gradient norm and the loss left their usual levels together, at step {int(history.steps[loss])}."
    first, then = ("gradient norm", "loss") if gradient < loss else ("loss", "gradient norm")
    begin, end = sorted((int(history.steps[gradient]), int(history.steps[loss])))
    return f"The {first} left its usual level first, at step {begin}, the {then} at step {end}."


def _onset_in(values_S: FloatArray, seen_S: BoolArray) -> int | None:
    """Return the first of the last samples in a row that are far above usual; None if the newest two are not."""
    usual = values_S[seen_S][: np.count_nonzero(seen_S) // 2]
    median, scatter = median_and_scatter(usual)
    far = _DEVIATIONS * max(scatter, _PRECISION * abs(median))
    moved_S = values_S > max(median + far, float(usual.max()))  # a missing value has not moved
    if not moved_S[-2:].any():
        return None
    end = int(np.flatnonzero(moved_S)[-1])
    calm = np.flatnonzero(~moved_S[:end])
    return int(calm[-1]) + 1 if calm.size else 0


def _at(history: Snapshot, sample: int, values_S: FloatArray) -> str:
    return f"{int(history.steps[sample])} ({number(float(values_S[sample]))})"
