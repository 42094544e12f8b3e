"""Patterns in the gradients of layers: over the depth; and gradients that are 0, missing or too small for float16."""

import math
from typing import Final

import numpy as np

from ..._analysis.forecast import forecast
from ..._analysis.formatting import listing, number
from ..._analysis.layers import branch_of, cancelled_biases, modules_of
from ..._measure.columns import Column
from ...snapshot.keys import forecast_key
from .. import causes
from ..causes import Diagnosis
from ..evidence import DEEP, FIRST_GRADIENT, Evidence
from ..facts import FIRST_UPDATES, NEIGHBOURS
from .incidents import OTHER_DATA
from .parameters import FIRST_SCALE, initialisation

# P watched parameters, L modules, N clean samples

_MIN_PAST: Final = 5  # least number of samples that define what is usual
_RAISED, _USUAL = 30.0, 3.0  # multiples of a layer's usual norm: from the first it is raised, up to the second usual
_CONTRAST, _MOST_USUAL = 100.0, 10.0  # where a layer is raised so many times further, up to the second is usual, too
_MULTIPLIED: Final = 1.5  # least rise of an exploding recurrence / rise of the layers after it
_OTHER_TERM: Final = (
    "a term of the loss that acts there, with another weight or the wrong sign; the values of the loss's terms tell "
    "them apart"
)
_OTHER_INPUTS: Final = "one bad batch, in what these layers alone get; the loss of this step tells them apart"
_SATURATING: Final = ("Sigmoid", "Tanh", "Hardsigmoid", "Softsign", "LogSigmoid")
_OTHERS: Final = ("ReLU", "LeakyReLU", "PReLU", "GELU", "SiLU", "Mish", "ELU", "CELU", "SELU", "Softplus")
_FP16_STEP: Final = 2.0**-24  # the smallest float16 above 0, and the spacing of float16 below 2^-13
_PADDING: Final = "an embedding that is given padding alone; the indices of a batch tell them apart"
_SATURATED: Final = "a softmax or a gate after them that is saturated; their outputs tell them apart"
_CUT_OFF: Final = (
    "an operation that no gradient passes, such as round(), sign(), argmax() or detach(), since the layer after them "
    "has inputs other than 0; their outputs tell them apart"
)


def through_depth(evidence: Evidence) -> Diagnosis | None:
    """Explosion through depth: the first norm grows from the last layer to the first; or, in a deep model, is far above
    the parameters' (if forward and backward have equal gains, there is no trend over depth)."""
    remedy = "add residual connections or normalisation, lower the layers' gain at initialisation, and clip"
    trend = evidence.layers.first_depth
    if trend is not None and trend.factor <= 0.01 and trend.order < -0.9:
        words = f"norm grows {number(1 / trend.factor)}x from {trend.last} back to {trend.first}, layer by layer"
        return Diagnosis(causes.DEPTH, 0.85, words, remedy)
    num_layers = sum(gain > 0 for gain in evidence.parameters.gains.values())
    if num_layers < DEEP or not evidence.first_ratio > FIRST_GRADIENT:
        return None
    words = f"the first gradient has {number(evidence.first_ratio)}x the parameters' norm, behind {num_layers} layers"
    rival = "a large scale of the inputs, targets or loss; a look at the inputs and targets tells them apart"
    if evidence.grows_inside:
        return Diagnosis(causes.DEPTH, 0.85, f"{words}; {evidence.grows_inside}", remedy)
    return Diagnosis(causes.DEPTH, 0.85, words, f"{remedy}; normalise the inputs and the targets", rival)


def through_recurrence(evidence: Evidence) -> Diagnosis | None:
    """Explosion through recurrence: recurrent layers have a large part of the peak norm, and no gradient is clipped."""
    recurrent = evidence.layers.recurrent()
    exploded = evidence.spikes or evidence.growth or evidence.first_bad is not None
    if not recurrent or not exploded or evidence.clean.size == 0 or evidence.history.clip_ratio > 0:
        return None
    peak = int(evidence.clean[np.argmax(evidence.log_norm_N)])
    if evidence.first_bad is not None and int(np.sum(evidence.clean > peak)) > _MIN_PAST:
        return None  # the peak was long before
    square_P = evidence.history.column(Column.GRAD_SUM_SQ)[peak]
    share = float(np.nansum(square_P[recurrent]) / np.nansum(square_P))
    if _comes_from_above(evidence, recurrent) or _comes_from_below(evidence, recurrent, peak):
        return None
    rise = float(np.exp(min(evidence.log_norm_N.max() - np.median(evidence.log_norm_N), 700.0)))
    if share < 0.3 or rise < 5:
        return None
    worst = recurrent[int(np.nanargmax(square_P[recurrent]))]
    words = (
        f"at step {evidence.step(peak)} the norm was {number(rise)}x the usual one, {100 * share:.0f} % of its square "
        f"in recurrent layers, most in {evidence.history.names[worst]}, and no gradient was clipped"
    )
    remedy = "clip with clip_grad_norm_(parameters, 1.0), shorten the unrolled sequence, use an LSTM or GRU"
    if evidence.gradient_came_first:  # then the batch may be the cause as well
        return Diagnosis(causes.RECURRENCE, 0.8, words, remedy, OTHER_DATA)
    rival = "a learning rate that is too high; a run with a tenth of the learning rate tells them apart"
    return Diagnosis(causes.RECURRENCE, 0.95, words, f"{remedy}; lower the learning rate", rival)


def _comes_from_below(evidence: Evidence, recurrent: list[int], peak: int) -> bool:
    """Whether the gradients of the input weights rose, but not those of the state weights: the inputs are large."""
    rise_P, names = evidence.layers.rise_at(peak, of_parameters=True), evidence.history.names
    inputs, states = (
        np.fmax.reduce([rise_P[p] for p in recurrent if kind in names[p]], initial=np.nan)
        for kind in ("weight_ih", "weight_hh")
    )
    return bool(inputs > 2 * _USUAL * states)


def _comes_from_above(evidence: Evidence, recurrent: list[int]) -> bool:
    """Whether layers after the last recurrent layer rose as much at first: then the recurrence only passes it on."""
    past_N = evidence.log_norm_N
    rises = [n for n in range(1, len(past_N)) if past_N[n] - np.median(past_N[max(n - NEIGHBOURS, 0) : n]) > np.log(5)]
    if not rises:
        return False
    rise_L = evidence.layers.rise_at(int(evidence.clean[rises[0]]))
    place = int(modules_of(evidence.history.names).of_parameter[recurrent].max())
    return bool(np.fmax.reduce(rise_L[place + 1 :], initial=0.0) > rise_L[place] / _MULTIPLIED)


def inside_the_backward(evidence: Evidence) -> Diagnosis | None:
    """Fault inside the backward: a spike begins between two layers; the norms are usual after it, and large before."""
    sample = evidence.spike_began
    if sample is None or (evidence.parameters.jump is not None and evidence.parameters.jump[1] < sample):
        return None
    names, rise_L = evidence.layers.by_module.names, evidence.layers.rise_at(sample)
    # A single number, such as a temperature, has no place in the depth.
    known = np.flatnonzero(np.isfinite(rise_L) & (evidence.layers.by_module.num_elements[sample] > 1))
    raised = known[rise_L[known] > _RAISED].tolist()
    after = known[known > raised[-1]].tolist() if raised else []
    if not after:
        return None
    if float(rise_L[after].max()) > np.clip(float(rise_L[raised].min()) / _CONTRAST, _USUAL, _MOST_USUAL):
        return None
    num_before = len(known) - len(after)
    # Of parallel branches one can rise alone for reasons of its own, together with the loss.
    is_one_branch = branch_of(names[raised[-1]]) == branch_of(names[after[0]])
    is_loss_known, has_usual_loss = evidence.is_loss_known(sample), evidence.has_usual_loss(sample)
    if len(raised) < 0.8 * num_before or not (is_one_branch or has_usual_loss or not is_loss_known):
        return None
    weights, biases = evidence.layers.split(raised[-1])
    rise_P = evidence.layers.rise_at(sample, of_parameters=True)
    if biases and np.nanmax(rise_P[biases], initial=0.0) <= _USUAL:
        return None  # the gradient of the layer's output is usual: its input was large
    if any(place in evidence.layers.recurrent() for place in weights):
        return None  # a recurrence multiplies the gradient itself
    words = (
        f"at step {evidence.step(sample)} the norm is the usual one from {names[after[-1]]} back to {names[after[0]]}, "
        f"and {number(rise_L[raised].max())}x the usual one from {names[raised[-1]]} back"
    )
    remedy = (
        f"check the code between {names[raised[-1]]} and {names[after[0]]}: a custom torch.autograd.Function, a "
        "gradient hook, a division by almost 0; torch.autograd.gradcheck tests a backward"
    )
    if evidence.layers.is_normalisation(after[0]):
        rival = f"{causes.BACKWARD}; the deviation of what {names[after[0]]} receives tells them apart"
        remedy = f"look at this step's batch and at the layer's eps; {remedy}"
        return Diagnosis(causes.DEVIATION, 0.9, words, remedy, rival)
    if is_loss_known and not has_usual_loss:  # a backward does not change the loss of its own step
        return Diagnosis(causes.BACKWARD, 0.8, words, remedy, _OTHER_TERM)
    if not (is_loss_known or is_one_branch):
        return Diagnosis(causes.BACKWARD, 0.8, words, remedy, _OTHER_INPUTS)
    return Diagnosis(causes.BACKWARD, 0.9, words, remedy)


def fading(evidence: Evidence) -> Diagnosis | None:
    """Saturation or small weights: the typical norm falls layer by layer towards the input. The cause is saturating
    activations, or weights that are too small if they alone explain half of the fall on a log scale."""
    trend = evidence.fading
    if trend is None or (evidence.began_to_fade and evidence.is_early):  # the learning rate is the cause
        return None
    layers = evidence.layers
    kind, unsaturated = layers.has_kind(_SATURATING), layers.has_kind(_OTHERS)
    words = f"norm falls {number(trend.factor)}x from {trend.last} back to {trend.first}, layer by layer"
    # Nearly linear layers preserve the size of a signal with a gain of 1, ReLU layers with sqrt(2).
    usual = 1.0 if kind or not unsaturated else np.sqrt(2)
    gains = [gain / usual for gain in evidence.parameters.gains.values() if gain > 0]
    shrinks = -float(np.sum(np.log(gains))) if len(gains) >= 4 else 0.0
    if evidence.step(0) <= 10 and not evidence.began_to_fade and shrinks > 0.5 * np.log(trend.factor):
        words += f", and the weights of {len(gains)} layers alone make it {number(np.exp(shrinks))}x"
        rival = "" if unsaturated and not kind else f"{causes.SATURATION}; the outputs of the layers tell them apart"
        remedy = "use residual connections or normalisation, and Kaiming or Xavier initialisation"
        return Diagnosis(causes.FADING, 0.85, words, remedy, rival)
    if unsaturated and not kind:
        return None
    remedy = "use ReLU or GELU, residual connections or normalisation between the layers"
    words += f", and the model has {kind} layers" if kind else ""
    if kind and gains:
        return Diagnosis(causes.SATURATION, 0.85, words, remedy)
    rival = "too small an initialisation for the depth; the outputs of the layers tell them apart"
    return Diagnosis(causes.SATURATION, 0.8, words, remedy, rival)


def batch_norm(evidence: Evidence) -> Diagnosis | None:
    """Batch norm on small batches: the gradient jumps from sample to sample before a batch norm and is calm after it,
    because the division by the deviation blows up inputs that happen to be close."""
    scatter_L, norms = evidence.layers.scatter_L, evidence.layers.batch_norms()
    if not norms or evidence.clean.size < 8 or evidence.parameters.movement:  # one that moves scatters everywhere
        return None
    last = norms[-1]
    before, after = scatter_L[:last], scatter_L[last:]
    if np.all(np.isnan(before)) or np.all(np.isnan(after)):
        return None
    wild, calm = int(np.nanargmax(before)), float(np.nanmin(after))
    typical = float(np.nanmedian(before))  # over all layers before it, not just one
    if not (typical > 1.5 and typical > 3 * float(np.nanmax(after))):
        return None
    name = evidence.layers.by_module.names
    words = (
        f"from one sample to the next the norm of {name[wild]}, before the normalisation {name[last]}, changes "
        f"{number(np.exp(scatter_L[wild]))}x, after it {number(np.exp(calm))}x"
    )
    remedy = "use batches of at least 8, GroupNorm or LayerNorm, or SyncBatchNorm"
    return Diagnosis(causes.BATCH_NORM, 0.9, words, remedy)


def underflow(evidence: Evidence) -> Diagnosis | None:
    """Float16 underflow: the smallest elements are multiples of the smallest float16, and many are exactly 0."""
    history, newest = evidence.history, evidence.clean[-20:]
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
        f"{number(steps_NP.min())} x 2^-24, where float16 ends" + _lost_digits(evidence, float(scale_N[-1]))
    )
    octaves = forecast(history)[forecast_key("fp16", "headroom")]
    fits = f" (up to 2^{int(octaves)} the largest gradient seen still fits)" if octaves >= 1 else ""
    remedy = f"use torch.amp.GradScaler or a larger loss scale{fits}, divide the loss by less, or use bfloat16"
    return Diagnosis(causes.UNDERFLOW, 0.95, words, remedy)


def _lost_digits(evidence: Evidence, scale: float) -> str:
    """Return the share of non-zero elements that lost digits in float16, by the newest histogram, as a text."""
    steps = evidence.history.histogram_steps
    if not steps or math.frexp(scale)[0] != 0.5:  # no power of 2: the format's limits are not at bin edges
        return ""
    share = forecast(evidence.history, scale=scale)[forecast_key("fp16", "underflow_ratio")]
    return "" if math.isnan(share) else f"; {100 * share:.0f} % of the others have lost digits (step {steps[-1]})"


def scale_too_high(evidence: Evidence) -> Diagnosis | None:
    """Loss scale too high: AMP skips update after update because of Inf; NaN appears only further back than Inf."""
    history = evidence.history
    num_skipped = evidence.num_last_skipped
    samples = range(len(history) - num_skipped, len(history))
    if num_skipped < 3 or evidence.is_broken(-1) or not all(evidence.began_with_inf(sample) for sample in samples):
        return None
    words = f"the last {num_skipped} updates were skipped for Inf, the loss scale is {number(history.loss_scale[-1])}"
    remedy = "wait if the scaler started too high; if the scale is below 1, clip or use bfloat16"
    return Diagnosis(causes.SCALE, 0.8, words, remedy)


def dead_units(evidence: Evidence) -> Diagnosis | None:
    """Dead units: more than half of a layer's units get no gradient at all, in sample after sample."""
    names, dead_L = evidence.layers.by_module.names, evidence.layers.dead_L
    dead = np.flatnonzero(dead_L > 0.5).tolist()
    if not dead:
        return None
    words = "units without gradient: " + listing([f"{100 * dead_L[index]:.0f} % of {names[index]}" for index in dead])
    remedy = (
        "check what follows the layer (masks, dropout, its use) and its bias; lower the learning rate, use LeakyReLU "
        "or GELU"
    )
    if evidence.is_of_large_data and initialisation(evidence) is None:
        words, remedy = f"{evidence.first_gradient}; {words}", f"normalise the inputs and the targets; {remedy}"
        rival = "dead units for another reason; a look at the inputs and the targets tells them apart"
        return Diagnosis(causes.LARGE_DATA, 0.9, words, remedy, rival)
    # Half of an untrained layer may be dead. Of the layers that are wholly dead the one nearest the output counts.
    last = max((index for index in dead if dead_L[index] == 1.0), default=dead[-1])
    is_fed = evidence.layers.is_next_fed(last)
    rival = "" if is_fed is False or evidence.layers.is_before_relu(names[last]) else _SATURATED
    if is_fed:
        rival, remedy = _CUT_OFF, f"{remedy}; use a straight-through estimator for operations without a derivative"
    if all(evidence.layers.kinds.get(names[index], "").startswith("Embedding") for index in dead):
        rival, remedy = _PADDING, f"look at the indices of a batch; {remedy}"
    # A mask, a bias or other data switch many units off in one step; training switches them off one by one.
    one_by_one = False if rival else evidence.layers.died_one_by_one(last)
    if one_by_one:
        remedy = "divide the learning rate by 10; normalise the inputs and the targets, take the mean in the loss; clip"
        return Diagnosis(causes.DYING, 0.75, words, remedy, FIRST_SCALE)
    if one_by_one is None:
        rival = f"{causes.DYING}; a run with sample_every=1 tells them apart"
    # Parameters that move too far kill units: then their speed is the first cause. Small ones may do so at first.
    movement = evidence.parameters.movement
    is_consequence = movement is not None and evidence.step(movement[1]) > FIRST_UPDATES
    return Diagnosis(causes.DEAD_UNITS, 0.65 if is_consequence else 0.75, words, remedy, rival)


def frozen(evidence: Evidence) -> Diagnosis | None:
    """Frozen or unused layers: some parameters never had a gradient, while others had one in every sample."""
    present_SP = evidence.history.present
    never_P = ~present_SP.any(axis=0) & evidence.history.trainable
    never = np.flatnonzero(never_P & ~cancelled_biases(evidence.history.names, never_P))
    if not never.size or not present_SP.any(axis=1).all() or len(evidence.history) < 3:
        return None
    names = [evidence.history.names[index] for index in never]
    words = f"no gradient in any of {len(evidence.history)} samples: {listing(names)}"
    remedy = "check requires_grad, detach() and torch.no_grad(); pass exclude= for layers frozen on purpose"
    return Diagnosis(causes.FROZEN, 0.6, words, remedy)
