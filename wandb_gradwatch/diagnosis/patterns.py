"""Symptom patterns: each looks at the evidence and names one probable cause, or says nothing."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np

from ..forecast import forecast
from ..rules.words import listing, number
from ..snapshot import FIRST_BAD_RANK_METRIC
from ..statistics.columns import Column
from .evidence import Evidence

# S samples, P watched parameters, L modules, R ranks

_FP16_STEP: Final = 2.0**-24  # the smallest float16 above 0, and the distance of all float16 below 2^-13


@dataclass(frozen=True)
class Diagnosis:
    """One probable cause.

    Args:
        cause: what probably went wrong; one of the CAUSES.
        confidence: between 0 and 1, to rank causes by; no probability.
        evidence: what in the samples says so, with numbers.
        remedy: what to do about it.
    """

    cause: str
    confidence: float
    evidence: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.cause} ({self.evidence}). Remedy: {self.remedy}."


LEARNING_RATE = "learning rate too high"
INITIALISATION = "poor initialisation"
DEPTH = "explosion through depth"
RECURRENCE = "explosion through recurrence"
SATURATION = "saturating activations"
BATCH_NORM = "batch norm on small batches"
UNDERFLOW = "float16 underflow"
SCALE = "loss scale too high or values beyond float16"
DEAD_RELU = "dead ReLUs"
FROZEN = "frozen or unused layers"
ZEROED = "gradients zeroed before the step"
BAD_BATCH = "one bad batch"
BAD_RANK = "one bad rank"
INVALID = "an operation without a finite derivative"

# What each cause can explain, by the titles of the shipped rules.
_EXPLOSION, _FADING = ("Exploding gradient", "NaN gradient", "Inf gradient"), ("Vanishing gradient", "Dead gradient")
CAUSES: Final[dict[str, tuple[str, ...]]] = {
    LEARNING_RATE: (*_EXPLOSION, "Dead gradient", "Loss scale collapse"),
    INITIALISATION: (*_EXPLOSION, *_FADING, "Loss scale collapse"),
    DEPTH: _EXPLOSION,
    RECURRENCE: _EXPLOSION,
    SATURATION: ("Vanishing gradient",),
    BATCH_NORM: (*_EXPLOSION, *_FADING),
    UNDERFLOW: (*_FADING, "No gradient"),
    SCALE: ("Loss scale collapse",),
    DEAD_RELU: _FADING,
    FROZEN: ("No gradient",),
    ZEROED: ("No gradient",),
    BAD_BATCH: _EXPLOSION,
    BAD_RANK: (*_EXPLOSION, "Loss scale collapse"),
    INVALID: ("NaN gradient", "Inf gradient", "Loss scale collapse"),
}


def learning_rate(evidence: Evidence) -> Diagnosis | None:
    """The parameters' norm changes by more per step than any finished training survives, or the norm grew steadily."""
    remedy = "divide the learning rate by 10 or lengthen its warm-up, and clip with clip_grad_norm_"
    if evidence.is_moving and evidence.movement is not None:
        change, sample = evidence.movement
        words = (
            f"the parameters' norm changed by {100 * change:.0f} % per step or more, from step {evidence.step(sample)}"
        )
        return Diagnosis(LEARNING_RATE, 0.85, words, remedy)
    if evidence.leap is not None:
        change, sample = evidence.leap
        words = f"the update of step {evidence.step(sample)} alone changed the parameters' norm by {100 * change:.0f} %"
        return Diagnosis(LEARNING_RATE, 0.8, words, remedy)
    if evidence.jump is not None:
        change, factor, sample = evidence.jump
        words = (
            f"the update of step {evidence.step(sample)}, just before the spike, changed the parameters' norm by "
            f"{100 * change:.1f} %, {number(factor)}x as much as any of the updates before it"
        )
        return Diagnosis(LEARNING_RATE, 0.8, words, remedy)
    if evidence.growth is not None:
        rise, sample = evidence.growth
        words = (
            f"the gradient norm grew {number(rise.factor)}x over {rise.num_samples} samples, step by step, "
            f"up to step {evidence.step(sample)}"
        )
        return Diagnosis(LEARNING_RATE, 0.7, words, remedy)
    return None


def initialisation(evidence: Evidence) -> Diagnosis | None:
    """At the start of a training, weights far from the size that keeps a signal's size from layer to layer."""
    gains = evidence.gains
    if not gains or evidence.step(0) > 10:
        return None
    typical = float(np.median([gain for _, gain in gains]))
    if 0.04 < typical < 4.0:
        return None
    worst = sorted(gains, key=lambda gain: abs(np.log(max(gain[1], 1e-300))), reverse=True)
    # Layers that are a little too large do no harm but by their number.
    confidence = 0.8 if 4.0 <= typical < 8.0 and len(gains) >= 8 else 0.9
    words = (
        f"at step {evidence.step(0)} the weights are {number(typical)}x the size that keeps a signal's size, "
        f"1/sqrt(fan-in): {listing([f'{name} {number(gain)}x' for name, gain in worst])}"
    )
    return Diagnosis(
        INITIALISATION, confidence, words, "initialise with torch.nn.init.kaiming_normal_ or xavier_uniform_"
    )


def through_depth(evidence: Evidence) -> Diagnosis | None:
    """From the first sample on, the norm grows from the last layer back to the first, or every layer multiplies what
    passes it and the first norm is huge (equal gains on both ways leave no trend over the depth)."""
    if not evidence.clean.size:
        return None
    remedy = "add residual connections or normalisation, lower the layers' gain at initialisation, and clip"
    trend = evidence.first_depth
    if trend is not None and trend.factor <= 0.01 and trend.order < -0.9:
        words = f"norm grows {number(1 / trend.factor)}x from {trend.last} back to {trend.first}, layer by layer"
        return Diagnosis(DEPTH, 0.85, words, remedy)
    first_norm = float(evidence.history.total_grad_norm[evidence.clean[0]])
    gains = [gain / np.sqrt(2) for _, gain in evidence.gains if gain > 0]  # sqrt(2) keeps the size through ReLUs
    chain = float(np.exp(np.sum(np.log(gains)))) if len(gains) >= 4 else 0.0
    if first_norm < 1e4 or chain < 100 or evidence.step(0) > 10:
        return None
    words = (
        f"the first gradient norm is {number(first_norm)}, and {len(gains)} layers in a row multiply what passes them "
        f"by {number(chain)} at least"
    )
    return Diagnosis(DEPTH, 0.85, words, remedy)


def through_recurrence(evidence: Evidence) -> Diagnosis | None:
    """An explosion, or NaN after one, most of it in a recurrent layer, and nobody clips."""
    recurrent = evidence.recurrent()
    exploded = evidence.spikes or evidence.growth or evidence.first_bad is not None
    if not recurrent or not exploded or evidence.clean.size == 0 or evidence.history.clip_ratio > 0:
        return None
    peak = int(evidence.clean[np.argmax(evidence.log_norm_N)])
    square_P = evidence.history.column(Column.GRAD_SUM_SQ)[peak]
    share = float(np.nansum(square_P[recurrent]) / np.nansum(square_P))
    rise = float(np.exp(min(evidence.log_norm_N.max() - np.median(evidence.log_norm_N), 700.0)))
    if share < 0.3 or rise < 5:
        return None
    worst = recurrent[int(np.nanargmax(square_P[recurrent]))]
    words = (
        f"at step {evidence.step(peak)} the norm was {number(rise)}x the usual one, {100 * share:.0f} % of its square "
        f"in recurrent layers, most in {evidence.history.names[worst]}, and no gradient was clipped"
    )
    remedy = "clip with clip_grad_norm_(parameters, 1.0), shorten the unrolled sequence, use an LSTM or GRU"
    return Diagnosis(RECURRENCE, 0.95, words, remedy)


def saturation(evidence: Evidence) -> Diagnosis | None:
    """The typical norm falls layer by layer on its way back to the input, with weights of an ordinary size."""
    trend = evidence.depth
    if trend is None or trend.factor < 30 or trend.order < 0.9:
        return None
    kind = evidence.has_kind(("Sigmoid", "Tanh", "Hardsigmoid", "Softsign", "LogSigmoid"))
    words = f"norm falls {number(trend.factor)}x from {trend.last} back to {trend.first}, layer by layer" + (
        f", and the model has {kind} layers" if kind else ""
    )
    remedy = "use ReLU or GELU, residual connections or normalisation between the layers"
    return Diagnosis(SATURATION, 0.85 if kind else 0.8, words, remedy)


def batch_norm(evidence: Evidence) -> Diagnosis | None:
    """The gradient jumps from sample to sample before a batch norm and is calm after it: two inputs that happen to be
    close are blown up by the division by their deviation, all others are flattened to plus and minus 1."""
    scatter_L, norms = evidence.scatter_L, evidence.batch_norms()
    if not norms or evidence.clean.size < 8 or evidence.is_moving:  # a model that moves wildly scatters everywhere
        return None
    last = norms[-1]
    before, after = scatter_L[: norms[-1]], scatter_L[last:]
    if np.all(np.isnan(before)) or np.all(np.isnan(after)):
        return None
    wild, calm = int(np.nanargmax(before)), float(np.nanmin(after))
    typical = float(np.nanmedian(before))  # of all layers before it, or it is one layer's own unrest
    if not (typical > 1.5 and typical > 3 * float(np.nanmax(after))):
        return None
    name = evidence.by_module.names
    words = (
        f"from one sample to the next the norm of {name[wild]}, before the normalisation {name[last]}, changes "
        f"{number(float(np.exp(scatter_L[wild])))}x, after it {number(float(np.exp(calm)))}x"
        + (f"; the batch has {evidence.batch_size} samples" if evidence.batch_size else "")
    )
    return Diagnosis(BATCH_NORM, 0.9, words, "use batches of at least 8, GroupNorm or LayerNorm, or SyncBatchNorm")


def underflow(evidence: Evidence) -> Diagnosis | None:
    """The smallest elements are exact multiples of float16's smallest number, and many others are exactly 0."""
    history = evidence.history
    if not evidence.clean.size:
        return None
    newest = evidence.clean[-20:]
    scale_N = np.where(np.isnan(history.loss_scale[newest]), 1.0, history.loss_scale[newest])
    smallest_NP = history.grad_abs_min_nonzero[newest] * scale_N[:, None]
    small_NP = smallest_NP < 2.0**-14
    if not small_NP.any():
        return None
    steps_NP = smallest_NP[small_NP] / _FP16_STEP
    zeros = float(np.median(history.total.zero_ratio[newest, 0]))
    if zeros < 0.05 or not np.allclose(steps_NP, np.round(steps_NP), rtol=0, atol=1e-6) or steps_NP.min() < 0.5:
        return None
    words = (
        f"{100 * zeros:.0f} % of the elements are exactly 0 and the smallest others are "
        f"{number(float(steps_NP.min()))} x 2^-24, where float16 ends" + _lost_digits(evidence, float(scale_N[-1]))
    )
    octaves = forecast(history)["fp16"].total_headroom
    fits = f" (up to 2^{int(octaves)} the largest gradient seen still fits)" if octaves >= 1 else ""
    remedy = f"use torch.amp.GradScaler or a larger loss scale{fits}, do not divide the loss so far, or use bfloat16"
    return Diagnosis(UNDERFLOW, 0.95, words, remedy)


def _lost_digits(evidence: Evidence, scale: float) -> str:
    """What float16 did to the elements that it kept, by the newest histogram, as the end of a sentence."""
    steps = evidence.history.histogram_steps
    if not steps or math.frexp(scale)[0] != 0.5:  # other scales move the format's limits off the bins' edges
        return ""
    share = forecast(evidence.history, scale=scale)["fp16"].total_underflow_ratio
    return "" if math.isnan(share) else f"; {100 * share:.0f} % of the others have lost digits (step {steps[-1]})"


def scale_too_high(evidence: Evidence) -> Diagnosis | None:
    """AMP skips update after update because of Inf, and of NaN only where Inf has come to on its way back."""
    history = evidence.history
    num_skipped = _length_of_last_run(history.skipped)
    samples = range(len(history) - num_skipped, len(history))
    if num_skipped < 3 or not all(evidence.began_with_inf(sample) for sample in samples):
        return None
    words = f"the last {num_skipped} updates were skipped for Inf, the loss scale is {number(history.loss_scale[-1])}"
    remedy = "wait for a scaler that started too high; below a scale of 1 clip, or use bfloat16"
    return Diagnosis(SCALE, 0.8, words, remedy)


def dead_relu(evidence: Evidence) -> Diagnosis | None:
    """Half of a layer's units or more get no gradient at all, in sample after sample."""
    names, dead_L = evidence.dead_L
    dead = [index for index in range(len(names)) if dead_L[index] > 0.5]
    if not dead:
        return None
    words = "no gradient at all for " + listing([f"{100 * dead_L[index]:.0f} % of {names[index]}" for index in dead])
    remedy = "lower the learning rate, start with small or zero biases, use LeakyReLU or GELU"
    return Diagnosis(DEAD_RELU, 0.75, words, remedy)


def frozen(evidence: Evidence) -> Diagnosis | None:
    """Some parameters never had a gradient while others had one every time."""
    present_SP = ~np.isnan(evidence.history.num_elements)
    never = np.flatnonzero(~present_SP.any(axis=0))
    if not never.size or not present_SP.any(axis=1).all() or len(evidence.history) < 3:
        return None
    names = [evidence.history.names[index] for index in never]
    words = f"no gradient in any of {len(evidence.history)} samples: {listing(names)}"
    remedy = "check requires_grad, detach() and torch.no_grad(); exclude= what is frozen on purpose"
    return Diagnosis(FROZEN, 0.6, words, remedy)


def zeroed(evidence: Evidence) -> Diagnosis | None:
    """All gradients are exactly 0 in nearly all samples."""
    zero_S = (evidence.history.total_grad_norm == 0) & ~evidence.bad_S
    if zero_S.mean() < 0.9 or len(zero_S) < 3:
        return None
    words = f"all elements of all gradients are exactly 0 in {zero_S.sum()} of {len(zero_S)} samples"
    remedy = "call zero_grad() before backward() and not between backward() and step(); else the loss is constant"
    return Diagnosis(ZEROED, 0.9, words, remedy)


def bad_batch(evidence: Evidence) -> Diagnosis | None:
    """One sample stands out from calm neighbours, or the first NaN came out of a calm norm into every layer."""
    if evidence.first_bad is not None and evidence.growth is None:
        before = evidence.log_norm_N[evidence.clean < evidence.first_bad][-16:]
        if len(before) >= 5:
            words = (
                f"NaN or Inf at step {evidence.step(evidence.first_bad)} out of a calm norm, "
                f"{number(float(np.exp(before.min())))} to {number(float(np.exp(before.max())))} in the {len(before)} "
                f"samples before{evidence.note_of(evidence.first_bad)}"
            )
            return Diagnosis(BAD_BATCH, 0.65, words, _against_a_bad_batch(evidence, evidence.first_bad))
    if len(evidence.spikes) in (1, 2):
        sample, factor = max(evidence.spikes, key=lambda spike: spike[1])
        lone = "a lone spike" if len(evidence.spikes) == 1 else "one of two spikes"
        words = f"{lone} of {number(factor)}x at step {evidence.step(sample)}{evidence.note_of(sample)}"
        confidence = 0.5 if evidence.is_moving else 0.75
        return Diagnosis(BAD_BATCH, confidence, words, _against_a_bad_batch(evidence, sample))
    return None


def _against_a_bad_batch(evidence: Evidence, sample: int) -> str:
    """What to do about the batch of a sample, by what a guard has done already."""
    history = evidence.history
    if history.guarded[sample]:
        return "look at the batch of this step and take it out of the data; the guard has left it out"
    if math.isnan(history.num_guarded_steps):
        return "look at the batch of this step; clip, or skip such steps with guard='skip'"
    return "look at the batch of this step; clip, or have the guard skip such steps too: guard=SkipGuard(is_bad=...)"


def bad_rank(evidence: Evidence) -> Diagnosis | None:
    """The same rank is the first with NaN or Inf again and again, or its norm is far from the others'."""
    remedy = "look at that rank's data shard and hardware; run it on another device"
    ranks_S = evidence.history.metrics.get(FIRST_BAD_RANK_METRIC)
    if ranks_S is not None:
        known = [s for s in np.flatnonzero(np.isfinite(ranks_S)) if not evidence.is_broken(int(s))]
        ranks = ranks_S[known]
        if len(ranks) >= 2 and np.all(ranks == ranks[0]):
            words = f"rank {int(ranks[0])} was the first with NaN or Inf in all of {len(ranks)} bad samples"
            return Diagnosis(BAD_RANK, 0.9, words, remedy)
    norm_SR = evidence.rank_grad_norm
    if norm_SR is not None and norm_SR.ndim == 2 and norm_SR.shape[1] >= 2 and len(norm_SR):
        newest = np.where(np.isnan(norm_SR[-1]), np.inf, norm_SR[-1])
        rank = int(np.argmax(newest))
        others = float(np.median(np.delete(newest, rank)))
        if np.isfinite(others) and newest[rank] > 10 * others:
            words = f"rank {rank} has a norm of {number(float(newest[rank]))}, the others {number(others)}"
            return Diagnosis(BAD_RANK, 0.9, words, remedy)
    return None


def invalid_operation(evidence: Evidence) -> Diagnosis | None:
    """NaN from one layer back to the input, but not in the layers after it: it arose on the way back."""
    sample = evidence.first_bad
    skipped = _length_of_last_run(evidence.history.skipped)
    if sample is None and skipped >= 3:  # AMP skips at any scale because the NaN does not depend on it
        sample = len(evidence.history) - 1
        if evidence.began_with_inf(sample):
            return None
    if sample is None or evidence.is_broken(sample):
        return None
    nan_L = evidence.by_module.num_nonfinite[sample] > 0
    present = np.flatnonzero(~np.isnan(evidence.by_module.num_elements[sample]))
    bad = [int(index) for index in present if nan_L[index]]
    clean_after = [int(index) for index in present if bad and index > bad[-1]]
    remedy = (
        "add an epsilon inside sqrt, log and divisions; torch.autograd.set_detect_anomaly(True) names the operation"
    )
    names, step = evidence.by_module.names, evidence.step(sample)
    if bad and clean_after:
        words = (
            f"at step {step} the gradient is finite in {names[clean_after[0]]} "
            f"and non-finite from {names[bad[-1]]} back"
        )
        return Diagnosis(INVALID, 0.85, words, remedy)
    if skipped >= 3 and np.all(np.any(evidence.history.num_nan[-skipped:] > 0, axis=1)):
        words = f"NaN in each of the last {skipped} samples, at whatever loss scale"
        return Diagnosis(INVALID, 0.7, words, remedy)
    return None


def _length_of_last_run(flags_S: np.typing.NDArray[np.bool_]) -> int:
    """How many flags at the end are set."""
    return len(flags_S) if flags_S.all() else int(np.argmin(flags_S[::-1]))


PATTERNS: Final[tuple[Callable[[Evidence], Diagnosis | None], ...]] = (
    learning_rate, initialisation, through_depth, through_recurrence, saturation, batch_norm, underflow, scale_too_high,
    dead_relu, frozen, zeroed, bad_batch, bad_rank, invalid_operation,
)  # fmt: skip
