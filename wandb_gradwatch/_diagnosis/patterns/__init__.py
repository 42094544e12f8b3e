"""Symptom patterns: each function returns one probable cause that the evidence shows, or None."""

from collections.abc import Callable
from typing import Final

from ..causes import Diagnosis
from ..evidence import Evidence
from . import depth, incidents, parameters, silence

# Of two equally probable causes the earlier one is named first.
PATTERNS: Final[tuple[Callable[[Evidence], Diagnosis | None], ...]] = (
    parameters.learning_rate, parameters.initialisation,
    depth.through_depth, depth.through_recurrence, depth.fading, depth.batch_norm,
    silence.underflow, silence.scale_too_high, silence.dead_units, silence.frozen,
    incidents.bad_batch, incidents.bad_rank, incidents.invalid_operation, incidents.nonfinite_batch,
    incidents.broken_by_update, parameters.data_scale, incidents.forward_overflow, depth.inside_the_backward,
    parameters.loss_multiplied, parameters.written, parameters.multiplied, parameters.unbounded,
    parameters.leapt_unseen,
)  # fmt: skip
