"""Patterns in the differences of the norm from layer to layer."""

from typing import Final

import numpy as np

from ..._analysis.formatting import number
from ..._analysis.layers import branch_of, modules_of
from ..._measure.columns import Column
from ..causes import BACKWARD, BATCH_NORM, DEPTH, DEVIATION, FADING, RECURRENCE, SATURATION, Diagnosis
from ..evidence import DEEP, FIRST_GRADIENT, Evidence
from .incidents import OTHER_DATA

# P watched parameters, N clean samples, L modules

_MIN_PAST: Final = 5  # least number of samples that define what is usual
_RAISED, _USUAL = 30.0, 3.0  # multiples of a layer's usual norm: from the first it is raised, up to the second usual
_CONTRAST, _MOST_USUAL = 100.0, 10.0  # where a layer is raised so many times further, up to the second is usual, too
_MULTIPLIED: Final = 1.5  # least rise of an exploding recurrence / rise of the layers after it
_OTHER_TERM: Final = (
    "a term of the loss that acts there, with another weight or the wrong sign; the values of the loss's terms tell "
    "them apart"
)
_OTHER_INPUTS: Final = "one bad batch, in what these layers alone get; the loss of this step tells them apart"
_SATURATED: Final = ("Sigmoid", "Tanh", "Hardsigmoid", "Softsign", "LogSigmoid")
_UNSATURATED: Final = ("ReLU", "LeakyReLU", "PReLU", "GELU", "SiLU", "Mish", "ELU", "CELU", "SELU", "Softplus")


def through_depth(evidence: Evidence) -> Diagnosis | None:
    """Explosion through depth: in the first sample the norm grows from the last layer to the first; or a deep model has
    a first norm far above the parameters' (if forward and backward have equal gains, there is no trend over depth)."""
    remedy = "add residual connections or normalisation, lower the layers' gain at initialisation, and clip"
    trend = evidence.layers.first_depth
    if trend is not None and trend.factor <= 0.01 and trend.order < -0.9:
        words = f"norm grows {number(1 / trend.factor)}x from {trend.last} back to {trend.first}, layer by layer"
        return Diagnosis(DEPTH, 0.85, words, remedy)
    num_layers = sum(gain > 0 for gain in evidence.parameters.gains.values())
    if num_layers < DEEP or not evidence.first_ratio > FIRST_GRADIENT:
        return None
    words = f"the first gradient has {number(evidence.first_ratio)}x the parameters' norm, behind {num_layers} layers"
    rival = "a large scale of the inputs, targets or loss; a look at the inputs and targets tells them apart"
    if evidence.grows_inside:
        return Diagnosis(DEPTH, 0.85, f"{words}; {evidence.grows_inside}", remedy)
    return Diagnosis(DEPTH, 0.85, words, f"{remedy}; normalise the inputs and the targets", rival)


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
        return Diagnosis(RECURRENCE, 0.8, words, remedy, OTHER_DATA)
    rival = "a learning rate that is too high; a run with a tenth of the learning rate tells them apart"
    return Diagnosis(RECURRENCE, 0.95, words, f"{remedy}; lower the learning rate", rival)


def _comes_from_below(evidence: Evidence, recurrent: list[int], peak: int) -> bool:
    """Whether the gradients of the input weights rose, but not those of the state weights: the inputs are large."""
    rise_P, names = evidence.layers.rise_at(peak, of_parameters=True), evidence.history.names
    inputs, states = (
        np.array([rise_P[p] for p in recurrent if kind in names[p]]) for kind in ("weight_ih", "weight_hh")
    )
    if not (np.isfinite(inputs).any() and np.isfinite(states).any()):
        return False
    return bool(np.nanmax(inputs) > 2 * _USUAL * np.nanmax(states))


def _comes_from_above(evidence: Evidence, recurrent: list[int]) -> bool:
    """Whether layers after the last recurrent layer rose as much at first: then the recurrence only passes it on."""
    past_N = evidence.log_norm_N
    rises = [n for n in range(1, len(past_N)) if past_N[n] - np.median(past_N[max(n - 16, 0) : n]) > np.log(5)]
    if not rises:
        return False
    rise_L = evidence.layers.rise_at(int(evidence.clean[rises[0]]))
    place = int(modules_of(evidence.history.names).of_parameter[recurrent].max())
    after = rise_L[place + 1 :]
    return bool(np.isfinite(after).any()) and bool(np.nanmax(after) > rise_L[place] / _MULTIPLIED)


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
        f"and {number(float(rise_L[raised].max()))}x the usual one from {names[raised[-1]]} back"
    )
    remedy = (
        f"check the code between {names[raised[-1]]} and {names[after[0]]}: a custom torch.autograd.Function, a "
        "gradient hook, a division by almost 0; torch.autograd.gradcheck tests a backward"
    )
    if evidence.layers.is_normalisation(after[0]):
        rival = f"{BACKWARD}; the deviation of what {names[after[0]]} receives tells them apart"
        return Diagnosis(DEVIATION, 0.9, words, f"look at this step's batch and at the layer's eps; {remedy}", rival)
    if is_loss_known and not has_usual_loss:  # a backward does not change the loss of its own step
        return Diagnosis(BACKWARD, 0.8, words, remedy, _OTHER_TERM)
    if not (is_loss_known or is_one_branch):
        return Diagnosis(BACKWARD, 0.8, words, remedy, _OTHER_INPUTS)
    return Diagnosis(BACKWARD, 0.9, words, remedy)


def fading(evidence: Evidence) -> Diagnosis | None:
    """Saturation or small weights: the typical norm falls layer by layer towards the input. The cause is saturating
    activations, or weights that are too small if they alone explain half of the fall on a log scale."""
    trend = evidence.fading
    if trend is None or (evidence.began_to_fade and evidence.is_early):  # the learning rate is the cause
        return None
    layers = evidence.layers
    kind, unsaturated = layers.has_kind(_SATURATED), layers.has_kind(_UNSATURATED)
    words = f"norm falls {number(trend.factor)}x from {trend.last} back to {trend.first}, layer by layer"
    # Nearly linear layers preserve the size of a signal with a gain of 1, ReLU layers with sqrt(2).
    usual = 1.0 if kind or not unsaturated else np.sqrt(2)
    gains = [gain / usual for gain in evidence.parameters.gains.values() if gain > 0]
    shrinks = -float(np.sum(np.log(gains))) if len(gains) >= 4 else 0.0
    if evidence.step(0) <= 10 and not evidence.began_to_fade and shrinks > 0.5 * np.log(trend.factor):
        words += f", and the weights of {len(gains)} layers alone make it {number(float(np.exp(shrinks)))}x"
        rival = "" if unsaturated and not kind else f"{SATURATION}; the outputs of the layers tell them apart"
        remedy = "use residual connections or normalisation, and Kaiming or Xavier initialisation"
        return Diagnosis(FADING, 0.85, words, remedy, rival)
    if unsaturated and not kind:
        return None
    remedy = "use ReLU or GELU, residual connections or normalisation between the layers"
    if kind and gains:
        return Diagnosis(SATURATION, 0.85, f"{words}, and the model has {kind} layers", remedy)
    rival = "too small an initialisation for the depth; the outputs of the layers tell them apart"
    return Diagnosis(SATURATION, 0.8, words + (f", and the model has {kind} layers" if kind else ""), remedy, rival)


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
        f"{number(float(np.exp(scatter_L[wild])))}x, after it {number(float(np.exp(calm)))}x"
    )
    return Diagnosis(BATCH_NORM, 0.9, words, "use batches of at least 8, GroupNorm or LayerNorm, or SyncBatchNorm")
