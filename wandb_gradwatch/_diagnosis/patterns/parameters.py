"""Patterns in the parameters: their size, and how far each update moves them."""

import math
from typing import Final

import numpy as np

from ..._analysis.formatting import listing, number
from ...rules._loss import UNBOUNDED
from .. import causes
from ..causes import Diagnosis
from ..evidence import DEEP, FIRST_GRADIENT, Evidence
from ..facts import FIRST_UPDATES, MAX_LEAP, NEIGHBOURS

_MULTIPLIED: Final = 10.0  # multiple of the usual loss and gradient; less may be an unusual batch
_ALIKE: Final = 2.0  # largest ratio between the factors of the loss and of all layers
_LOWER: Final = 1.2  # multiple of the lowest loss, below 0; less may be due to the batch
_FAR_LOWER, _FEW = 10.0, 4  # the same for a loss and a gradient that grew together, after so many samples
_OR_RATE: Final = "a learning rate that is too high; whether the loss has a lower bound tells them apart"
_FAR_SINCE: Final = 2.0  # factor of the parameters' norm since a learning rate began to rise: the rise is felt
_TOO_SMALL: Final = 0.04  # share of the size that preserves a signal
_MIN_ELEMENTS: Final = 16  # smaller parameters are scales, which may begin anywhere
_INITIALISE: Final = "initialise with torch.nn.init.kaiming_normal_ or xavier_uniform_"
_NORMALISE: Final = "normalise the inputs and the targets, and take the mean in the loss"
_LATE_RISE: Final = "the data has changed; a run with the learning rate of before tells them apart"
_NEW_SCALE: Final = (
    "a new scale of the inputs, targets or loss; whether the loss rose before the gradient tells them apart"
)
FIRST_SCALE: Final = f"{causes.DATA_SCALE}; {causes.APART[causes.DATA_SCALE]} tells them apart"
_FIRST_DEPTH: Final = "activations that grow with the depth; the size of the loss at the first step tells them apart"
_UPHILL: Final = (
    "the wrong sign of the loss (or maximize=True in the optimizer), as the loss has risen from the first samples on; "
    "a run with a tenth of the learning rate tells them apart"
)
_UNMEASURED: Final = "one bad batch that was not measured; a run with sample_every=1 tells them apart"
_BY_HAND: Final = (
    "parameters that were loaded or rescaled, or an optimizer's state that was lost; what the script does at that step "
    "tells them apart"
)


def learning_rate(evidence: Evidence) -> Diagnosis | None:
    """Learning rate too high: it has just risen; or the parameters move further per step than any training survives,
    or the gradient norm grew steadily, and no gradient that was far too large came first."""
    remedy = f"divide the learning rate by 10 or lengthen its warm-up, and {evidence.clip_advice}"
    if (rose := evidence.rate_rise) is not None:
        when = evidence.when(rose.sample) if rose.at_once else f"up to step {evidence.step(rose.sample)}"
        words = f"it rose from {number(rose.before)} to {number(rose.after)} {when}"
        parameters = evidence.parameters
        has_leapt = parameters.leap is not None or parameters.change_from(rose.sample) > MAX_LEAP
        has_leapt = has_leapt or parameters.factor_since(rose.since) > _FAR_SINCE
        is_felt = parameters.movement or has_leapt or parameters.jump or evidence.growth
        if evidence.is_broken(-1) and not is_felt:
            return None  # nothing shows that the rise has broken the parameters
        rival = "" if is_felt or rose.at_once else _LATE_RISE  # a warm-up rises, too
        confidence = 0.98 if is_felt and rose.at_once else 0.85
        # An explosion saturates and kills units: dead units right after it are its consequence.
        also = causes.SILENCE if is_felt else ()
        return Diagnosis(causes.LEARNING_RATE, confidence, words, f"look at its schedule; {remedy}", rival, also)
    if evidence.gradient_came_first or any(one(evidence) for one in (written, leapt_unseen, multiplied, unbounded)):
        return None
    less = 0.05 if evidence.first_ratio > FIRST_GRADIENT else 0.0  # a learning rate does not cause the first gradient
    if evidence.parameters.movement is not None:
        change, sample = evidence.parameters.movement
        words = (
            f"the parameters' norm changed by {number(100 * change)} % per step or more, "
            f"from step {evidence.step(sample)}"
        )
        return Diagnosis(
            causes.LEARNING_RATE, 0.85 - less, words, *_or_scale(evidence, remedy, sample, _NEW_SCALE), causes.SILENCE
        )
    if (leapt := evidence.parameters.leap) is not None:
        update, moved, rival = _update(evidence, leapt)
        words = f"{update} changed the parameters' norm by {moved} %"
        return Diagnosis(causes.LEARNING_RATE, 0.8 - less, words, *_or_scale(evidence, remedy, leapt, rival))
    if evidence.parameters.jump is not None:
        factor, sample = evidence.parameters.jump
        update, moved, rival = _update(evidence, sample)
        words = (
            f"{update}, just before the spike, changed the parameters' norm by {moved} %, {number(factor)}x as much "
            "per update as any before it"
        )
        return Diagnosis(causes.LEARNING_RATE, 0.8, words, remedy, rival)
    if evidence.growth is not None:
        rise, sample = evidence.growth
        words = (
            f"the gradient norm grew {number(rise.factor)}x over {rise.num_samples} samples, step by step, "
            f"up to step {evidence.step(sample)}"
        )
        return Diagnosis(causes.LEARNING_RATE, 0.7 - less, words, *_or_scale(evidence, remedy, sample, _NEW_SCALE))
    if evidence.began_to_fade and evidence.is_early and (trend := evidence.fading) is not None:
        words = (
            f"the norm falls {number(trend.factor)}x from {trend.last} back to {trend.first}, layer by layer, and did "
            f"not at step {evidence.step(int(evidence.clean[0]))}: the updates have caused it"
        )
        return Diagnosis(causes.LEARNING_RATE, 0.8, words, remedy, also=causes.SILENCE)
    return None


def _update(evidence: Evidence, sample: int) -> tuple[str, str, str]:
    """Return the updates from a sample to the next in words, their change of the norm in percent, and a rival."""
    change = number(100 * evidence.parameters.change_from(sample))
    if evidence.parameters.num_updates_from(sample) == 1:
        return f"the update of step {evidence.step(sample)}", change, _BY_HAND
    return f"the updates of steps {evidence.step(sample)} to {evidence.step(sample + 1) - 1}", change, _UNMEASURED


def _or_scale(evidence: Evidence, remedy: str, sample: int, later: str) -> tuple[str, str]:
    """Return the remedy and the rival of a high learning rate that did not rise, by the step where its effect began."""
    rival = _UPHILL if later == _NEW_SCALE and evidence.loss_only_rises else later
    if evidence.step(sample) <= FIRST_UPDATES:
        is_deep = len(evidence.parameters.gains) >= DEEP
        rival = (_FIRST_DEPTH if is_deep else FIRST_SCALE) if evidence.first_ratio > 1 else ""
    other = "check the sign of the loss" if rival == _UPHILL else ""
    other = _NORMALISE if "scale" in rival else other
    return f"{remedy}; if that changes nothing, {other}" if other else remedy, rival


def written(evidence: Evidence) -> Diagnosis | None:
    """Lost state or rewritten weights: an update far larger than all before, from an ordinary gradient and rate."""
    found = evidence.parameters.unexplained
    if found is None:
        return None
    change, sample = found
    words = (
        f"after step {evidence.step(sample)} the parameters' norm has changed by {number(100 * change)} %, and neither "
        "the gradient nor the learning rate was unusual"
    )
    remedy = (
        "check what else the script does at that step: it loads or rescales weights, or loses the optimizer's state; "
        "load the last good checkpoint"
    )
    return Diagnosis(causes.WRITTEN, 0.9, words, remedy)


def leapt_unseen(evidence: Evidence) -> Diagnosis | None:
    """Leap between samples: the gradient is far above all before it, behind parameters that are many times larger."""
    sample = evidence.spike_began
    if sample is None or evidence.rate_rise is not None or not evidence.parameters.leapt_unseen(sample):
        return None
    update, change, _ = _update(evidence, sample - 1)
    words = f"{update}, of which only the first was measured, changed the parameters' norm by {change} %"
    remedy = "look at the schedule of the learning rate, and at what else the script does at these steps"
    rival = "weights that were loaded or rescaled; a run with sample_every=1 tells them apart"
    return Diagnosis(causes.LEAP, 0.9, words, remedy, rival)


def multiplied(evidence: Evidence) -> Diagnosis | None:
    """Multiplied parameters: parameters of different sizes grow by one factor."""
    movement = evidence.parameters.movement
    if movement is None or not evidence.parameters.grow_alike(movement[1]):
        return None
    factor, step = number(1 + movement[0]), evidence.step(movement[1])
    words = f"all parameters grew by the same factor, {factor} or more per step, from step {step}"
    remedy = "check the sign of weight_decay, and other code that writes to the parameters"
    return Diagnosis(causes.MULTIPLIED, 0.95, words, remedy)


def unbounded(evidence: Evidence) -> Diagnosis | None:
    """Unbounded loss: the gradient grows, or the parameters run away, while the loss falls to new lows below 0."""
    found = _run_away(evidence) if evidence.rate_rise is None else None
    if found is None:
        return None
    words, begins, last, lower = found
    loss_S = evidence.loss_S
    known_S = loss_S[: begins + 1][np.isfinite(loss_S[: begins + 1])]
    if not known_S.size or not loss_S[last] < min(0.0, lower * float(np.min(known_S))):
        return None
    words += f", while the loss fell from {number(known_S[-1])} to {number(loss_S[last])}"
    cause, remedy = UNBOUNDED
    return Diagnosis(cause, 0.95, words, remedy, _OR_RATE if lower == _FAR_LOWER else "")


def _run_away(evidence: Evidence) -> tuple[str, int, int, float] | None:
    """Return how the gradient or the parameters have run away: in words, the sample before, the last sample, and which
    multiple of the lowest loss before has to be reached for the loss to be the cause."""
    onset, half = evidence.onset, len(evidence.clean) // 2
    if evidence.growth is not None:
        growth, last = evidence.growth
        begins = int(evidence.clean[max(int(np.searchsorted(evidence.clean, last)) + 1 - growth.num_samples, 0)])
        return f"the gradient norm grew {number(growth.factor)}x up to step {evidence.step(last)}", begins, last, _LOWER
    if evidence.parameters.movement is not None:
        change, begins = evidence.parameters.movement
        if begins < FIRST_UPDATES and not evidence.is_loss_above_0(begins + 1):
            return None  # a loss that begins below 0 falls further with the first large updates, whatever its sign
        words = f"the parameters' norm changed by {number(100 * change)} % per step or more"
        return words, begins, len(evidence.loss_S) - 1, _LOWER
    # A loss that is below 0 now and then falls there with other data, too.
    if onset is not None and evidence.gradient_came_first and evidence.is_loss_above_0(onset.sample):
        words = f"the gradient norm rose {number(onset.factor)}x {evidence.when(onset.sample)}"
        return None if evidence.has_usual_loss(onset.sample) else (words, onset.sample - 1, onset.sample, _LOWER)
    if half < _FEW:
        return None
    rise = math.exp(min(float(evidence.log_norm_N[-1] - evidence.log_norm_N[:half].max()), 700.0))
    words = f"the gradient norm is {number(rise)}x the largest of the first {half} samples"
    return (words, int(evidence.clean[half]), int(evidence.clean[-1]), _FAR_LOWER) if rise > _FAR_LOWER else None


def initialisation(evidence: Evidence) -> Diagnosis | None:
    """Poor initialisation: at the start, weights far from the size that preserves a signal from layer to layer."""
    gains = evidence.parameters.gains
    if evidence.step(0) > 10:
        return None
    if not gains:
        return _too_small(evidence)
    typical = float(np.median(list(gains.values())))
    if _TOO_SMALL < typical < 4.0:
        return None
    worst = sorted(gains.items(), key=lambda gain: abs(np.log(max(gain[1], 1e-300))), reverse=True)
    # Layers that are a little too large do harm only if there are many.
    confidence = 0.8 if 4.0 <= typical < 8.0 and len(gains) >= 8 else 0.9
    words = (
        f"at step {evidence.step(0)} the weights are {number(typical)}x the size that preserves a signal, "
        f"1/sqrt(fan-in): {listing([f'{name} {number(gain)}x' for name, gain in worst])}"
    )
    return Diagnosis(causes.INITIALISATION, confidence, words, _INITIALISE)


def _too_small(evidence: Evidence) -> Diagnosis | None:
    """Too small weights of unknown fan-in: the norm of a weight is an upper limit of its gain."""
    size_P, norm_P = evidence.history.num_elements[0], evidence.history.param_norm[0]
    places = np.flatnonzero((size_P >= _MIN_ELEMENTS) & (norm_P > 0))
    if not places.size or not float(np.median(norm_P[places])) < _TOO_SMALL:
        return None
    norms = listing([f"{evidence.history.names[p]} {number(norm_P[p])}" for p in places])
    words = f"at step {evidence.step(0)} the weights' norms are {norms}: too small at any fan-in"
    return Diagnosis(causes.INITIALISATION, 0.9, words, _INITIALISE)


def data_scale(evidence: Evidence) -> Diagnosis | None:
    """Large data or loss, or explosion inside: the signs of a high learning rate, but a large first gradient."""
    rate = learning_rate(evidence)
    if rate is None or evidence.rate_rise or not evidence.first_ratio > FIRST_GRADIENT:
        return None
    if evidence.grows_inside:
        if len(evidence.parameters.gains) >= DEEP:
            return None  # `through_depth` names it
        remedy = (
            "use smaller initial weights (a gain of 1 in a recurrence), residual connections or normalisation, clip"
        )
        words = f"{evidence.first_gradient}; {evidence.grows_inside}"
        return Diagnosis(causes.INSIDE, rate.confidence + 0.2, words, remedy)
    by = 0.2 if evidence.is_of_large_data else -0.01
    return Diagnosis(causes.DATA_SCALE, rate.confidence + by, evidence.first_gradient, _NORMALISE)


def loss_multiplied(evidence: Evidence) -> Diagnosis | None:
    """New scale of the loss: the loss and the gradient of every layer have risen at once, by one factor, and stay
    there. Other data does not raise them alike."""
    onset, loss_S = evidence.onset, evidence.loss_S
    if onset is None or evidence.rate_rise is not None:
        return None
    since_N = evidence.log_norm_N[evidence.clean >= onset.sample]
    if len(since_N) < 2 or since_N.min() < since_N[0] - np.log(_ALIKE) or len(evidence.layers.by_module.names) < 2:
        return None
    before = evidence.clean[evidence.clean < onset.sample][-NEIGHBOURS:]
    with np.errstate(divide="ignore", invalid="ignore"):
        rise = np.append(evidence.layers.rise_at(onset.sample), loss_S[onset.sample] / np.median(loss_S[before]))
    if not rise[-1] > _MULTIPLIED or not np.nanmax(rise) < _ALIKE * np.nanmin(rise):
        return None
    words = (
        f"at step {evidence.step(onset.sample)} the loss is {number(rise[-1])}x the usual one, and so is the "
        f"gradient of every layer, {number(np.nanmin(rise[:-1]))}x to {number(np.nanmax(rise[:-1]))}x"
    )
    remedy = "check what changed in the loss at this step: its reduction, its weight, a missing division"
    return Diagnosis(causes.LOSS_SCALE, 0.95, words, remedy)
