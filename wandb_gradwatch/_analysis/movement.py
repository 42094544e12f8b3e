"""How far each update has moved the parameters, as far as their norms show it."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from .._measure.columns import Column, FloatArray
from ..snapshot import Snapshot
from ..snapshot._overview import Overview
from .memory import PerName, Remembers

# P watched parameters


class Update(NamedTuple):
    """The parameters' sums of squares before and after: of each one, NaN where unknown, and of all together."""

    before: FloatArray  # [P]
    after: FloatArray
    total_before: float  # NaN where that of one parameter is missing, or was, or these are others
    total_after: float
    num_steps: int


def small_squares(num_elements_P: FloatArray) -> FloatArray:
    """The sums of squares up to which weights may grow however fast: [P].

    Half of the size that keeps a signal's, of a square weight: a root mean square of elements^(-1/4) / 2. Tables and
    heads that begin at a hundredth of that grow by the learning rate per step under Adam, which is many times at first.
    """
    return 0.25 * np.sqrt(num_elements_P)


class Movement(Remembers):
    """The parameters as the last sample has found them, before its update; the next one shows what the update did."""

    def __init__(self) -> None:
        self._step = 0
        self._total = math.nan
        self._num_broken = 0.0  # elements that were not finite then
        self._sum_sq = PerName(math.nan)

    def see(self, names: tuple[str, ...], sample: Overview) -> Update:
        """The update between the last sample and this one, which becomes the last."""
        before = self._total if self._sum_sq.names is names else math.nan
        after_P = sample.rows[:, Column.PARAM_SUM_SQ]
        update = Update(
            self._sum_sq.replace(names, after_P), after_P, before, sample.weights_sq, sample.step - self._step
        )
        self._total, self._step = sample.weights_sq, sample.step
        return update

    def is_beyond(self, limit: float, snapshot: Snapshot, sample: Overview) -> bool:
        """Whether the parameters' norm changed by more than a share per step since the sample before.

        Of those that both samples hold. False where nothing can be compared, True where an element is not finite any
        more that was.
        """
        before_P, after_P, before, after, num_steps = self.see(snapshot.names, sample)
        already, num_broken = self._num_broken, sample.sums[Column.PARAM_NUM_NONFINITE]
        if num_broken <= already and num_steps > 0 and abs(after - before) < limit * before:
            self._num_broken = num_broken
            return False  # as nearly always: the norm, a root, changes by less than the sum, and each step by less
        if math.isnan(num_broken):
            num_broken = float(np.nansum(sample.rows[:, Column.PARAM_NUM_NONFINITE]))
        self._num_broken = num_broken
        both_P = ~np.isnan(after_P) & ~np.isnan(before_P)
        before, after = float(before_P[both_P].sum()), float(after_P[both_P].sum())
        if after > before:
            small = float(small_squares(sample.rows[both_P, Column.NUM_ELEMENTS]).sum())
            before, after = max(before, small), max(after, small)
        if num_broken > already:
            return True
        if not 0 < before < math.inf or not after > 0 or num_steps < 1:
            return False
        return abs(math.expm1(min(0.5 * math.log(after / before) / num_steps, 700.0))) > limit
