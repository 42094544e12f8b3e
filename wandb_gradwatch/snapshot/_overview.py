"""A sample in plain Python numbers. With it, rules recognise a healthy sample (nearly all are) without array code."""

from __future__ import annotations

import math
from operator import itemgetter
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from .._measure.columns import NONFINITE_COLUMNS, Column, FloatArray
from . import keys
from ._arrays import LEAST_SUM_SQ

if TYPE_CHECKING:
    from ._snapshot import Snapshot

_NONFINITE: Final = itemgetter(*NONFINITE_COLUMNS)


class Overview(NamedTuple):
    """One sample of a snapshot.

    Args:
        place: index of the sample in the snapshot.
        norm, clipped_norm: the sample's elements of `total_grad_norm` and `total_grad_norm_clipped`.
        has_nonfinite, skipped, left_out, guarded: the sample's elements of the snapshot's arrays of these names.
        is_complete: True if a gradient arrived for every parameter.
        sums: `column_sums` by column.
        rows: the sample's rows, [P, C].
        weights_sq: sum of squares of all parameters; NaN if that of one is missing.
    """

    place: int
    step: int
    norm: float
    clipped_norm: float
    has_nonfinite: bool
    skipped: bool
    left_out: bool
    guarded: bool
    is_complete: bool
    sums: list[float]
    rows: FloatArray
    weights_sq: float


def overview_of(snapshot: Snapshot) -> tuple[Overview, ...]:
    """The overview of every sample."""
    nowhere = [False] * len(snapshot)
    columns = (
        snapshot.steps.tolist(),
        snapshot.skipped.tolist(),
        snapshot.left_out.tolist() if keys.LEFT_OUT in snapshot.metrics else nowhere,
        snapshot.guarded.tolist() if keys.GUARDED in snapshot.metrics else nowhere,
        snapshot.column_sums.tolist(),
        np.minimum.reduce(snapshot.num_elements, axis=1, initial=math.inf).tolist(),
        snapshot.rows,
    )
    overviews = []
    for place, (step, skipped, left_out, guarded, sums, size, rows) in enumerate(zip(*columns, strict=True)):
        if sums[Column.GRAD_SUM_SQ] >= LEAST_SUM_SQ:
            norm, clipped_norm = math.sqrt(sums[Column.GRAD_SUM_SQ]), math.sqrt(sums[Column.RECEIVED_SUM_SQ])
        else:  # the sum may have lost digits
            norm, clipped_norm = float(snapshot.total_grad_norm[place]), float(snapshot.total_grad_norm_clipped[place])
        bad = any(_NONFINITE(sums)) and bool(snapshot.has_nonfinite[place])
        weights_sq = sums[Column.PARAM_SUM_SQ] if size == size else math.nan
        of_sample = (place, step, norm, clipped_norm, bad, skipped, left_out, guarded, size == size)
        overviews.append(Overview._make((*of_sample, sums, rows, weights_sq)))  # faster than its constructor
    return tuple(overviews)
