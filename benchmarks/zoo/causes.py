"""The identifiers of causes: those that an incident may name, and those that are right for a fault."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from wandb_gradwatch import Alert

KNOWN_CAUSES: Final = frozenset(
    {
        "learning_rate_too_high",
        "learning_rate_too_low",
        "learning_rate_zero",
        "learning_rate_negative",
        "schedule",
        "poor_initialisation",
        "constant_initialisation",
        "depth",
        "recurrence",
        "saturation",
        "dead_units",
        "bad_batch",
        "data_changed",
        "data_scale",
        "inputs_zero",
        "inputs_repeated",
        "nonfinite_inputs",
        "loss_reduction",
        "invalid_operation",
        "loss_or_labels",
        "backward_scaled",
        "backward_zeroed",
        "overflow",
        "underflow",
        "loss_scale",
        "unscale_missing",
        "clipping_too_tight",
        "weight_decay",
        "small_batch_norm",
        "attention_logits",
        "routing",
        "optimizer_settings",
        "not_in_optimizer",
        "stale_optimizer",
        "zero_grad_missing",
        "gradients_zeroed",
        "unused_layers",
        "frozen_layers",
        "no_step",
        "updates_undone",
        "wrong_sign",
        "broken_weights",
        "unbounded_loss",
        "bootstrapping",
        "no_signal",  # nothing can be learned: labels or inputs say nothing, or the features are frozen at random
        "vanished_teacher",  # the gradient fades because the opponent or the teacher is saturated
        "dropout",
        "stale_gradients",
        "code_after_backward",
        "memory_of_optimizer",
    }
)

# The words in which the older sets of faults name causes, and the identifiers that say the same.
_IDENTIFIERS: Final[dict[str, frozenset[str]]] = {
    "learning rate": frozenset({"learning_rate_too_high"}),
    "zero learning rate": frozenset({"learning_rate_zero", "learning_rate_too_low"}),
    "schedule": frozenset({"schedule", "learning_rate_negative"}),
    "initialisation": frozenset({"poor_initialisation"}),
    "symmetry": frozenset({"constant_initialisation"}),
    "dead units": frozenset({"dead_units"}),
    "bad batch": frozenset({"bad_batch", "nonfinite_inputs"}),
    "data change": frozenset({"data_changed", "inputs_zero", "inputs_repeated"}),
    "data scale": frozenset({"data_scale", "loss_reduction"}),  # of inputs, of targets, or of a summed loss
    "reduction": frozenset({"loss_reduction"}),
    "invalid operation": frozenset({"invalid_operation"}),
    "loss or inputs": frozenset({"loss_or_labels", "nonfinite_inputs"}),
    "backward": frozenset({"backward_scaled", "backward_zeroed", "code_after_backward"}),
    "loss scale": frozenset({"loss_scale"}),
    "unscale": frozenset({"unscale_missing"}),
    "clipping": frozenset({"clipping_too_tight"}),
    "decay": frozenset({"weight_decay"}),
    "batch norm": frozenset({"small_batch_norm"}),
    "attention": frozenset({"attention_logits"}),
    "optimizer": frozenset({"optimizer_settings", "memory_of_optimizer"}),
    "unowned": frozenset({"not_in_optimizer"}),
    "stale optimizer": frozenset({"stale_optimizer"}),
    "zero_grad": frozenset({"zero_grad_missing"}),
    "zeroed": frozenset({"gradients_zeroed"}),
    "unused": frozenset({"unused_layers", "frozen_layers"}),
    "no step": frozenset({"no_step"}),
    "undone": frozenset({"updates_undone"}),
    "sign": frozenset({"wrong_sign", "unbounded_loss"}),
    "bad parameter": frozenset({"broken_weights"}),
}


def named(alert: Alert) -> tuple[str, ...]:
    """Return the identifiers of the cause and of its rival; a cause that is left open is left out."""
    found = alert.incident
    return () if found is None else tuple(cause for cause in (found.cause, found.rival) if cause)


def acceptable(causes: Iterable[str]) -> frozenset[str]:
    """Return the identifiers that are right for a fault whose causes are identifiers, or words of the older sets.

    Raises:
        ValueError: a cause is neither.
    """
    right = frozenset().union(*(_IDENTIFIERS.get(cause, {cause}) for cause in causes))
    if unknown := right - KNOWN_CAUSES:
        raise ValueError(f"unknown causes: {sorted(unknown)}")
    return right
