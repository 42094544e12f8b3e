"""Gradients that were zeroed between the backward and the step: the optimizer received nothing, which is missing."""

from __future__ import annotations

from typing import Final

import numpy as np

from .._measure.columns import NONFINITE_COLUMNS, Column, FloatArray
from .._transfer.transfers import ArrivedSample

# P watched parameters, C columns

# A norm above float16's largest value may overflow in the user's clipping, which then multiplies with 0: not zeroed.
_CLIPPED_TO_NOTHING: Final = 65504.0


def drop_zeroed(arrived: ArrivedSample) -> bool:
    """Make rows of gradients that were zeroed before the step missing, in place.

    Returns:
        Whether there is an optimizer whose every gradient the backward had computed, and that received none.
    """
    # Zeros that no backward was seen to make are what zero_grad() left.
    unseen = np.isnan(arrived.rows[:, Column.GRAD_SUM_SQ]) & (arrived.rows[:, Column.RECEIVED_SUM_SQ] == 0)
    arrived.rows[unseen & (_num_nonfinite(arrived.rows) == 0)] = np.nan
    found = False
    for slots in map(list, arrived.sample.updated):
        rows = arrived.rows[slots]
        if arrived.skipped or np.nansum(rows[:, Column.RECEIVED_SUM_SQ]) != 0 or np.nansum(_num_nonfinite(rows)):
            continue
        if 0 < np.nansum(rows[:, Column.GRAD_SUM_SQ]) < _CLIPPED_TO_NOTHING**2:
            arrived.rows[slots] = np.nan
            found = True
    return found


def _num_nonfinite(rows_PC: FloatArray) -> FloatArray:
    """Not 0 where elements were NaN or Inf, as the backward left them or as the optimizer received them: [P]."""
    num_nonfinite: FloatArray = np.add.reduce(rows_PC[:, NONFINITE_COLUMNS], axis=1)
    return num_nonfinite
