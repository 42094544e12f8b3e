"""Patterns of faults at one place: one batch, one rank, one update or one operation."""

import math
from typing import Final

import numpy as np

from ..._analysis.formatting import number
from ..._measure.columns import Column
from ...rules._base import values_of
from ...snapshot import keys
from .. import causes
from ..causes import Diagnosis
from ..evidence import Evidence
from ..facts import NEIGHBOURS

# S samples, L modules

OTHER_DATA: Final = "the data has changed; whether the norm falls back tells them apart"
_BACKWARD: Final = (
    "something in the backward that multiplies the gradient, as the loss is the usual one; a look at the batch tells "
    "them apart"
)
_OVERFLOWS: Final = 1e10  # multiple of the largest loss before
_TRACE: Final = 'watch(model, on_nonfinite="trace") names the operation'
_APART: Final = 'watch(model, on_nonfinite="trace") tells them apart'


def bad_batch(evidence: Evidence) -> Diagnosis | None:
    """Bad batch: one or two samples are lone spikes, or the norm jumps after an ordinary update."""
    confidence, spikes, last = 0.75, evidence.spikes, evidence.last_spike
    if len(spikes) in (1, 2):
        sample, factor = max(spikes, key=lambda spike: spike[1])
        if evidence.parameters.leapt_unseen(sample):
            return None
        lone = "a lone spike" if len(spikes) == 1 else "one of two spikes"
        words = f"{lone} of {number(factor)}x at step {evidence.step(sample)}"
        is_moved = evidence.parameters.movement or evidence.parameters.jump
        confidence = 0.5 if is_moved and not evidence.gradient_came_first else 0.75
    elif evidence.onset is not None and evidence.gradient_came_first:
        sample, factor = evidence.onset
        words = f"at step {evidence.step(sample)} the norm was {number(factor)}x the usual one"
        words += ", after an ordinary update"
    elif last is not None and evidence.parameters.leapt(last) is not None:
        sample, words, confidence = last, f"at step {evidence.step(last)} the norm is far above all before it", 0.5
    else:
        return None
    words += evidence.note_of(sample)
    return Diagnosis(causes.BAD_BATCH, confidence, words, *_or_other_data(evidence, sample))


def _or_other_data(evidence: Evidence, sample: int) -> tuple[str, str]:
    """Return the remedy against a bad batch, and the cause that the samples do not tell apart from it."""
    remedy = _against_a_bad_batch(evidence, sample)
    if (leap := evidence.parameters.leapt(sample)) is not None:
        name, before, now = leap
        rival = (
            f"too large an update of {name}, whose norm had just changed from {number(before)} to {number(now)}; a run "
            "with a tenth of its learning rate tells them apart"
        )
        return f"{remedy}; lower the learning rate of {name}", rival
    if evidence.has_usual_loss(sample):
        return f"{remedy}; test the backward with torch.autograd.gradcheck", _BACKWARD
    return f"{remedy}; if the norm stays high, look at what has changed in the data", OTHER_DATA


def _against_a_bad_batch(evidence: Evidence, sample: int) -> str:
    """Return the remedy against the batch of a sample; it depends on what a guard has done already."""
    history = evidence.history
    if history.guarded[sample]:
        return "look at the batch of this step and take it out of the data; the guard has left it out"
    skip = "skip such steps with guard='skip'"
    if not math.isnan(history.num_guarded_steps):
        skip = "have the guard skip such steps too: guard=SkipGuard(is_bad=...)"
    # No clipping for NaN: clip_grad_norm_ would spread a NaN norm to every gradient.
    clip = "" if sample == evidence.first_bad else f"{evidence.clip_advice}, or "
    return f"look at the batch of this step; {clip}{skip}"


def nonfinite_batch(evidence: Evidence) -> Diagnosis | None:
    """Non-finite batch or forward: the parameters are finite, but not the loss or, if it is unknown, any gradient."""
    sample = evidence.first_bad
    if sample is None or evidence.is_broken(sample) or evidence.growth is not None or evidence.has_good_loss(sample):
        return None
    is_everywhere = evidence.layers.all_bad(sample)
    if not is_everywhere and not evidence.has_bad_loss(sample):
        return None
    before = np.exp(evidence.log_norms_before(sample)[-NEIGHBOURS:])
    words = f"at step {evidence.step(sample)} {'every layer' if is_everywhere else 'the loss'} is non-finite"
    if len(before):
        words += f", after norms of {number(before.min())} to {number(before.max())} before it"
    words += evidence.note_of(sample)
    remedy = (
        "check the inputs, the labels and the loss of this step (log 0, division by 0, an exponential): "
        f"{_against_a_bad_batch(evidence, sample)}; {_TRACE}: add an epsilon to it, or clamp its inputs"
    )
    return Diagnosis(causes.NONFINITE_BATCH, 0.75, words, remedy, f"{causes.NONFINITE_FORWARD}; {_APART}")


def broken_by_update(evidence: Evidence) -> Diagnosis | None:
    """NaN made by the update: parameters are not finite after an update with ordinary or unmeasured gradients."""
    sample = evidence.first_bad
    if not sample or not evidence.is_broken(sample) or evidence.growth is not None:
        return None
    earlier, step = evidence.step(sample - 1), evidence.step(sample)
    if step - earlier > 1:
        words = f"they were finite at step {earlier}, and step {step} is the first measured after it"
        remedy = (
            "load the last good checkpoint and continue with guard='skip' or sample_every=1: the gradient of the first "
            "bad step then shows whether the data, an operation or the optimizer caused it"
        )
        return Diagnosis(causes.UNMEASURED, 0.8, words, remedy)
    before = evidence.log_norms_before(sample)
    if not len(before) or evidence.had_grown(sample):
        return None
    num_bad_P = evidence.history.column(Column.PARAM_NUM_NONFINITE)[sample]
    broken = np.flatnonzero(num_bad_P > 0)
    words = (
        f"{len(broken)} of {len(num_bad_P)} parameters are no longer finite at step {step}, first "
        f"{evidence.history.names[broken[0]]}, but the gradients of the update before it were finite, with a norm of "
        f"{number(np.exp(before[-1]))}"
    )
    remedy = (
        "load the last good checkpoint, keep parameters and the optimizer's state in float32, and check its eps and "
        "other code that writes to the parameters"
    )
    # With eps = 0 the optimizer computes 0 / 0 for every element whose gradient is 0: compare these numbers.
    num_broken, num_zero = (
        evidence.history.column(column)[at, broken].sum()
        for column, at in ((Column.PARAM_NUM_NONFINITE, sample), (Column.NUM_ZERO, sample - 1))
    )
    rival = "weights that were loaded or rescaled; what else the script does at that step tells them apart"
    return Diagnosis(causes.OPTIMIZER, 0.8, words, remedy, "" if num_broken == num_zero else rival)


def bad_rank(evidence: Evidence) -> Diagnosis | None:
    """Bad rank: the same rank is the first with NaN or Inf in every bad sample."""
    ranks_S = values_of(evidence.history, keys.FIRST_NONFINITE_RANK)
    ranks = [rank for s, rank in enumerate(ranks_S) if math.isfinite(rank) and not evidence.is_broken(s)]
    if len(ranks) < 2 or len(set(ranks)) > 1:
        return None
    words = f"rank {int(ranks[0])} was the first with NaN or Inf in all of {len(ranks)} bad samples"
    remedy = "look at that rank's data shard and hardware; run it on another device"
    return Diagnosis(causes.BAD_RANK, 0.9, words, remedy)


def invalid_operation(evidence: Evidence) -> Diagnosis | None:
    """Invalid operation: the gradient is non-finite from one layer back to the input, but finite after it or in the
    loss. So it arose in the backward, or in inputs of a layer that do not reach the loss."""
    sample, skipped = evidence.first_bad, evidence.num_last_skipped
    if sample is None and skipped >= 3:  # AMP skips at any scale: the NaN does not depend on the scale
        sample = len(evidence.history) - 1
        if evidence.began_with_inf(sample):
            return None
    if sample is None or evidence.is_broken(sample) or evidence.has_bad_loss(sample):
        return None
    modules, step = evidence.layers.by_module, evidence.step(sample)
    present = np.flatnonzero(modules.present[sample])
    bad = np.flatnonzero(modules.num_nonfinite[sample] > 0).tolist()
    clean_after = [modules.names[place] for place in present if place > bad[-1]] if bad else []
    remedy = f"add an epsilon inside sqrt, log and divisions, and look for values that overflow before these; {_TRACE}"
    if bad and (clean_after or evidence.has_good_loss(sample)):
        where = f"the gradient is finite in {clean_after[0]} and" if clean_after else "the loss is finite, the gradient"
        words = f"at step {step} {where} non-finite from {modules.names[bad[-1]]} back"
        weights, biases = evidence.layers.split(bad[-1])
        if weights and biases and not np.any(evidence.history.num_nonfinite[sample, biases] > 0):
            words += ", in its weights but not in its bias: the inputs of this layer are not finite"
            cause = causes.NONFINITE_BATCH if bad[-1] == present[0] else causes.NONFINITE_FORWARD
            return Diagnosis(cause, 0.85, words, f"look at the batch of this step; {remedy}")
        if (factor := evidence.loss_factor(sample)) > _OVERFLOWS:
            words = f"at step {step} the loss is {number(factor)}x the largest before it"
            rival = "one bad batch; a look at that batch tells them apart"
            remedy = f"look at the batch and the loss of this step; {_TRACE}"
            return Diagnosis(causes.OVERFLOW, 0.9, words, remedy, rival)
        rival = ""
        if evidence.growth is not None or evidence.had_grown(sample):
            rival = f"an overflow of gradients that had grown; {_APART}"
        elif clean_after and not evidence.has_good_loss(sample):
            rival = f"layers side by side, of which some have a loss that is not finite; {_APART}"
        return Diagnosis(causes.INVALID, 0.85, words, remedy, rival)
    if skipped >= 3 and (evidence.history.num_nan[-skipped:] > 0).any(axis=1).all():
        words = f"NaN in each of the last {skipped} samples, at whatever loss scale"
        return Diagnosis(causes.INVALID, 0.7, words, remedy)
    return None


def forward_overflow(evidence: Evidence) -> Diagnosis | None:
    """Overflow in the forward: NaN in every layer from the last one back, at any loss scale: no derivative made it."""
    skipped = evidence.num_last_skipped
    has_nan_S = (evidence.history.num_nan[-skipped:] > 0).any(axis=1)  # a missing gradient has none
    if skipped < 3 or not has_nan_S.all() or not evidence.layers.all_bad(-1):
        return None
    if evidence.began_with_inf(-1) or evidence.is_broken(-1):
        return None
    words = f"every layer is non-finite in the last of {skipped} skipped updates, at whatever loss scale"
    remedy = "look for the first activation that is not finite; use bfloat16 there"
    if not evidence.has_bad_loss(-1):
        return Diagnosis(causes.FORWARD, 0.7, words, remedy)
    rival = "the loss or its inputs are not finite at any precision; a step with autocast off tells them apart"
    words, remedy = f"{words}, and so is the loss", f"{remedy}; look at the loss, its inputs and labels"
    return Diagnosis(causes.FORWARD, 0.85, words, remedy, rival)
