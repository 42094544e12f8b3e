"""Patterns of gradients that are 0, that are missing, or that underflow in float16; and of a loss scale too high."""

import math
from typing import Final

import numpy as np

from ..._analysis.forecast import forecast
from ..._analysis.formatting import listing, number
from ..._analysis.layers import cancelled_biases
from ...snapshot.keys import forecast_key
from ..causes import DEAD_UNITS, DYING, FROZEN, LARGE_DATA, SCALE, UNDERFLOW, Diagnosis
from ..evidence import Evidence
from ..parameters import FIRST_STEPS
from .parameters import FIRST_SCALE, initialisation

# S samples, P watched parameters, L modules, N newest clean samples

_FP16_STEP: Final = 2.0**-24  # the smallest float16 above 0, and the spacing of float16 below 2^-13

_SATURATED: Final = "a softmax or a gate after them that is saturated; their outputs tell them apart"
_CUT_OFF: Final = (
    "an operation that no gradient passes, such as round(), sign(), argmax() or detach(), since the layer after them "
    "has inputs other than 0; their outputs tell them apart"
)


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
        f"{number(float(steps_NP.min()))} x 2^-24, where float16 ends" + _lost_digits(evidence, float(scale_N[-1]))
    )
    octaves = forecast(history)[forecast_key("fp16", "headroom")]
    fits = f" (up to 2^{int(octaves)} the largest gradient seen still fits)" if octaves >= 1 else ""
    remedy = f"use torch.amp.GradScaler or a larger loss scale{fits}, divide the loss by less, or use bfloat16"
    return Diagnosis(UNDERFLOW, 0.95, words, remedy)


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
    return Diagnosis(SCALE, 0.8, words, remedy)


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
        return Diagnosis(LARGE_DATA, 0.9, words, remedy, rival)
    # Half of an untrained layer may be dead. Of the layers that are wholly dead the one nearest the output counts.
    last = max((index for index in dead if dead_L[index] == 1.0), default=dead[-1])
    is_fed = evidence.layers.is_next_fed(last)
    rival = "" if is_fed is False or evidence.layers.is_before_relu(names[last]) else _SATURATED
    if is_fed:
        rival, remedy = _CUT_OFF, f"{remedy}; use a straight-through estimator for operations without a derivative"
    # A mask, a bias or other data switch many units off in one step; training switches them off one by one.
    one_by_one = False if rival else evidence.layers.died_one_by_one(last)
    if one_by_one:
        remedy = "divide the learning rate by 10; normalise the inputs and the targets, take the mean in the loss; clip"
        return Diagnosis(DYING, 0.75, words, remedy, FIRST_SCALE)
    if one_by_one is None:
        rival = f"{DYING}; a run with sample_every=1 tells them apart"
    # Parameters that move too far kill units: then their speed is the first cause. Small ones may do so at first.
    movement = evidence.parameters.movement
    is_consequence = movement is not None and evidence.step(movement[1]) > FIRST_STEPS
    return Diagnosis(DEAD_UNITS, 0.65 if is_consequence else 0.75, words, remedy, rival)


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
    return Diagnosis(FROZEN, 0.6, words, remedy)
