"""Diagnosis: finds the probable causes of a symptom, and their remedies. Pure; needs neither torch nor a W&B run."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from .._analysis.baseline import evenly_apart, median_and_scatter
from .._analysis.formatting import CAUSE_PREFIX, FOUND_PREFIX, number, when
from .._measure.columns import BoolArray, FloatArray
from ..rules import Alert
from ..rules._base import Finding
from ..rules._exploding import SPIKES, ExplodingGradient
from ..rules._nonfinite import NONFINITE_TITLES
from ..snapshot import Snapshot, keys
from ..snapshot._shapes import select_samples
from .causes import APART, BAD_BATCH, CAUSES, Diagnosis
from .evidence import Evidence
from .patterns import incidents, layers, parameters

__all__ = ["CAUSES", "FIRST_BAD_OPERATION", "Diagnosis", "diagnose", "with_diagnosis"]

FIRST_BAD_OPERATION: Final = "first_bad_operation"  # the note of a step that was run again, with the operation found

# Of two equally probable causes the earlier one is named first.
_PATTERNS: Final[tuple[Callable[[Evidence], Diagnosis | None], ...]] = (
    parameters.learning_rate, parameters.initialisation,
    layers.through_depth, layers.through_recurrence, layers.fading, layers.batch_norm,
    layers.underflow, layers.scale_too_high, layers.dead_units, layers.frozen,
    incidents.bad_batch, incidents.bad_rank, incidents.invalid_operation, incidents.nonfinite_batch,
    incidents.broken_by_update, parameters.data_scale, incidents.forward_overflow, layers.inside_the_backward,
    parameters.loss_multiplied, parameters.written, parameters.multiplied, parameters.unbounded,
    parameters.leapt_unseen,
)  # fmt: skip

_WITHHELD: Final = (
    "The guard did not apply this step: parameters and optimizer state are as they were before it. After a single such "
    "step nothing else is needed; if more follow, the batch is not the cause: act on the cause."
)

_MOVEMENTS: Final = ("Exploding gradient", "Loss spike", "Non-finite loss", *NONFINITE_TITLES)
_EPISODE: Final = 40  # number of samples before an alert that are searched for its cause
_FEW: Final = 5  # number of samples evenly apart below which all are searched: they would not show what is usual
_LASTING: Final = ("Optimizer without the model",)  # titles of faults that stay, however long ago they were reported
_NOT_CLEAR: Final = "not clear"
_WAKE: Final = 'as in the earlier alert "'
_AS_PROBABLE: Final = 0.1  # difference in confidence up to which two causes are equally probable
_LEAST_BOTH: Final = 12  # least number of samples with loss and norm; the older half defines what is usual
_DEVIATIONS: Final = 6.0
_PRECISION: Final = 1e-2  # smallest deviation, as a share of the median


def diagnose(
    history: Snapshot,
    *,
    modules: Mapping[str, str] | None = None,
    notes: Mapping[int, Mapping[str, object]] | None = None,
    num_ranks: int = 1,
) -> list[Diagnosis]:
    """Return the probable causes of what a history shows, most probable first; [] for a healthy history.

    Layers are compared in the order of `history.names`, the model's order: the first is nearest the input. Parameters
    are merged into modules first. A trend over the depth, such as "norm falls 40x from layer 9 back to layer 1", is a
    line through all modules, not the distance of two extremes.

    Args:
        history: samples of one training, oldest first, as a FlightRecorder keeps them.
        modules: class names of the modules by name, `{n: type(m).__name__ for n, m in model.named_modules()}`.
        notes: the user's notes by step: FlightRecorder.notes.
        num_ranks: number of ranks that make the gradient together; the history's loss is that of one rank.
    """
    if not len(history) or not history.names:
        return []
    evidence = Evidence(history, modules=modules or {}, notes=notes or {}, num_ranks=num_ranks)
    found = [diagnosis for pattern in _PATTERNS if (diagnosis := pattern(evidence)) is not None]
    return sorted(found, key=lambda diagnosis: -diagnosis.confidence)


def with_diagnosis(alert: Alert, history: Snapshot | None, *, earlier: Sequence[Alert] = (), **context: Any) -> Alert:
    """Return the alert with the cause that this history shows instead of its general one, and what the guard has done.

    Only samples up to the alert's are used, and of these only samples with mostly the same parameters (a GAN's two
    kinds of updates differ in norm and learning rate). Only causes that can explain an alert of this title are named.
    Without a finding the text stays the same. The result is a plain Alert, without the parts of a Finding.

    Args:
        history: samples, including the alert's own.
        earlier: the alerts that were sent before this one, oldest first.
        context: the keyword arguments of `diagnose`.
    """
    if history is not None:
        alert = _diagnosed(alert, history, context)
        alert = _in_the_wake(alert, history, earlier)
    return Alert(alert.title, alert.text, alert.step, alert.level)


def _diagnosed(alert: Alert, history: Snapshot, context: Mapping[str, Any]) -> Alert:
    newest = max(alert.step, alert.seen if isinstance(alert, Finding) else 0)
    until = select_samples(history, np.flatnonzero(history.steps <= newest))
    alike = _of_one_kind(until.present)
    even = evenly_apart(until.steps[alike].tolist())
    recent = select_samples(until, (alike[even] if len(even) >= _FEW else alike)[-_EPISODE:].tolist())
    lines = []
    if len(until) and until.steps[-1] == alert.step and until.guarded[-1]:
        lines.append(_WITHHELD)
    if alert.title in _MOVEMENTS and (order := which_moved_first(recent)):
        lines.append(order)
    if not isinstance(alert, Finding):
        return replace(alert, text="\n".join([alert.text, *lines]))
    fitting = [d for d in diagnose(recent, **context) if d.explains(alert.title)]
    # The rule knows whether a spike has passed; the samples up to the alert's step do not show it.
    is_no_spike = alert.title == ExplodingGradient.title and alert.kind not in SPIKES
    fitting = [d for d in fitting if d.cause != BAD_BATCH or not is_no_spike]
    if alert.kind == "passed":  # so the data has no new level
        fitting = [replace(d, rival="") if d.cause == BAD_BATCH else d for d in fitting]
    if fitting and not (len(until) and until.arose_after_backward[-1]):
        cause, remedy = _in_words(fitting)
        alert = alert.but(cause=cause, remedy=remedy)
    if alert.title in NONFINITE_TITLES and (
        found := (context.get("notes") or {}).get(alert.step, {}).get(FIRST_BAD_OPERATION)
    ):
        alert = alert.but(cause=f"{FOUND_PREFIX}{found}", remedy="")
    return alert.but(more=(*alert.more, *lines)) if lines else alert


def _in_the_wake(alert: Alert, history: Snapshot, earlier: Sequence[Alert]) -> Alert:
    """Replace an unclear cause by the known cause of an earlier error nearby, which probably caused this alert, too."""
    if not isinstance(alert, Finding) or not alert.cause.startswith(_NOT_CLEAR):
        return alert
    for one in earlier:
        cause, _, remedy = one.text.partition(CAUSE_PREFIX)[2].partition(". Remedy: ")
        num_since = np.count_nonzero((history.steps > one.step) & (history.steps <= alert.step))
        is_near = one.title in _LASTING or (one.level == "ERROR" and num_since <= _EPISODE)
        if is_near and one.step <= alert.step and cause and not cause.startswith(_NOT_CLEAR):
            words = cause if cause.startswith(_WAKE) else f'{_WAKE}{one.title}": {cause}'
            return alert.but(cause=words, remedy=remedy.partition("\n")[0].removesuffix("."))
    return alert


def _of_one_kind(present_SP: BoolArray) -> npt.NDArray[np.intp]:
    """Return the samples that share at least half of their parameters with the last one; all if that has none."""
    if not len(present_SP) or not present_SP[-1].any():
        return np.arange(len(present_SP))
    common_S, either_S = (present_SP & present_SP[-1]).sum(axis=1), (present_SP | present_SP[-1]).sum(axis=1)
    return np.flatnonzero(2 * common_S >= either_S)


def _in_words(fitting: Sequence[Diagnosis]) -> tuple[str, str]:
    """Return the most probable cause, or two if the samples do not tell them apart, and the remedy."""
    first, *others = fitting
    if not others or others[0].confidence < first.confidence - _AS_PROBABLE:
        return first.in_words, first.remedy
    second = others[0]
    apart = next((f"; {APART[d.cause]} tells them apart" for d in (first, second) if d.cause in APART), "")
    one, other = (f"{d.cause.removeprefix(f'{_NOT_CLEAR}: ')} ({d.evidence})" for d in (first, second))
    cause = f"{_NOT_CLEAR}: either {one}, or {other}{apart}"
    if second.remedy in first.remedy:
        return cause, first.remedy
    return cause, f"{first.remedy}; if that changes nothing, {second.remedy}"


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
        return "" if loss is None else f"The loss left its usual level first, {_at(history, loss, loss_S)}."
    if loss is None:
        left = f"The gradient norm left its usual level {_at(history, gradient, norm_S)}"
        return f"{left}." if np.isnan(loss_S[-1]) else f"{left}; the loss has not yet."
    if gradient == loss:
        return f"The gradient norm and the loss left their usual levels together, {when(history.steps, loss)}."
    first, then = ("gradient norm", "loss") if gradient < loss else ("loss", "gradient norm")
    begin, end = (when(history.steps, sample) for sample in sorted((gradient, loss)))
    return f"The {first} left its usual level first, {begin}, the {then} {end}."


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
    return f"{when(history.steps, sample)} ({number(values_S[sample])})"
