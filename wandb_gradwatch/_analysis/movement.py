"""How far each update has moved the parameters, as far as their norms show it."""

from __future__ import annotations

import math

import numpy as np

from .._measure.columns import Column
from ..snapshot import Overview, Snapshot
from .memory import PerName, Remembers

# S samples, P watched parameters


class Movement(Remembers):
    """The parameters as the last sample has found them, before its update; the next one shows what the update did."""

    def __init__(self) -> None:
        self._step = 0
        self._num_broken = 0.0  # elements that were not finite then
        self._sum_sq = PerName(math.nan)

    def of(self, snapshot: Snapshot, sample: Overview) -> float:
        """Relative change of the parameters' norm per step since the sample before: of those that both samples hold.

        NaN where nothing can be compared, infinite where an element is not finite any more that was.
        """
        after_P, before_P = snapshot.column(Column.PARAM_SUM_SQ)[sample.place], self._sum_sq.of(snapshot.names)
        before, after = float(np.add.reduce(before_P)), float(np.add.reduce(after_P))
        if math.isnan(before + after):  # some are not in both
            both_P = ~np.isnan(after_P) & ~np.isnan(before_P)
            before, after = float(before_P[both_P].sum()), float(after_P[both_P].sum())
        before_P[:] = after_P
        num_steps, self._step = sample.step - self._step, sample.step
        already, num_broken = self._num_broken, sample.sums[Column.PARAM_NUM_NONFINITE]
        if math.isnan(num_broken):
            num_broken = float(np.nansum(snapshot.column(Column.PARAM_NUM_NONFINITE)[sample.place]))
        self._num_broken = num_broken
        if num_broken > already:
            return math.inf
        if not 0 < before < math.inf or not after > 0 or num_steps < 1:
            return math.nan
        return abs(math.expm1(min(0.5 * math.log(after / before) / num_steps, 700.0)))
