"""Patterns of gradients that are zero, or never come."""

from __future__ import annotations

import numpy as np

from ..._analysis.formatting import listing
from ..causes import DEAD_UNITS, FROZEN, Diagnosis
from ..evidence import Evidence

# S samples, P watched parameters, L modules


def dead_units(evidence: Evidence) -> Diagnosis | None:
    """Half of a layer's units or more get no gradient at all, in sample after sample."""
    names, dead_L = evidence.layers.dead_L
    dead = [index for index in range(len(names)) if dead_L[index] > 0.5]
    if not dead:
        return None
    words = "no gradient at all for " + listing([f"{100 * dead_L[index]:.0f} % of {names[index]}" for index in dead])
    remedy = (
        "check what follows the layer (masks, dropout, its use) and its bias; lower the learning rate, use LeakyReLU "
        "or GELU"
    )
    rival = "a softmax or a gate after them that is saturated; their outputs tell them apart"
    return Diagnosis(DEAD_UNITS, 0.75, words, remedy, "" if evidence.layers.is_before_relu(names[dead[-1]]) else rival)


def frozen(evidence: Evidence) -> Diagnosis | None:
    """Some parameters never had a gradient while others had one every time."""
    present_SP = ~np.isnan(evidence.history.num_elements)
    never = np.flatnonzero(~present_SP.any(axis=0) & evidence.history.trainable)
    if not never.size or not present_SP.any(axis=1).all() or len(evidence.history) < 3:
        return None
    names = [evidence.history.names[index] for index in never]
    words = f"no gradient in any of {len(evidence.history)} samples: {listing(names)}"
    remedy = "check requires_grad, detach() and torch.no_grad(); exclude= what is frozen on purpose"
    return Diagnosis(FROZEN, 0.6, words, remedy)
