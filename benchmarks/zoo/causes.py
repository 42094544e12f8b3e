"""The identifiers of causes that are right for the faults of the sets, and those that an incident names."""

from __future__ import annotations

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


def named(alert: Alert) -> tuple[str, ...]:
    """Return the identifiers of the cause and of its rival; a cause that is left open is left out."""
    found = alert.incident
    return () if found is None else tuple(one for one in (found.cause, found.rival) if one and one != "unseen")
