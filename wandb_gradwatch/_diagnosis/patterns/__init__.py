"""Symptom patterns: each function returns one probable cause that the evidence shows, or None."""

from collections.abc import Callable
from typing import Final

from ..causes import Diagnosis
from ..evidence import Evidence
from .depth import batch_norm, fading, inside_the_backward, through_depth, through_recurrence
from .incidents import bad_batch, bad_rank, broken_by_update, forward_overflow, invalid_operation, nonfinite_batch
from .parameters import (
    data_scale,
    initialisation,
    leapt_unseen,
    learning_rate,
    loss_multiplied,
    multiplied,
    unbounded,
    written,
)
from .silence import dead_units, frozen, scale_too_high, underflow

# Of two equally probable causes the earlier one is named first.
PATTERNS: Final[tuple[Callable[[Evidence], Diagnosis | None], ...]] = (
    learning_rate, initialisation, through_depth, through_recurrence, fading, batch_norm, underflow, scale_too_high,
    dead_units, frozen, bad_batch, bad_rank, invalid_operation, nonfinite_batch,
    broken_by_update, data_scale, forward_overflow, inside_the_backward, loss_multiplied, written, multiplied,
    unbounded, leapt_unseen,
)  # fmt: skip
