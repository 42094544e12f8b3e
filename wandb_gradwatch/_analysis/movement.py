"""The change of the parameters by each update, estimated from their norms."""

import math
from typing import NamedTuple

import numpy as np

from .._measure.columns import Column, FloatArray
from ..snapshot import Snapshot
from ..snapshot._overview import Overview
from .memory import PerName, Remembers

# P watched parameters


class Update(NamedTuple):
    """Sums of squares of the parameters before and after an update: of each one (NaN if unknown) and of all."""

    before: FloatArray  # [P]
    after: FloatArray
    total_before: float  # NaN if one parameter's is missing, or if the last sample had other parameters
    total_after: float
    num_steps: int


def small_squares(num_elements_P: FloatArray, *, share: float = 0.5) -> FloatArray:
    """Sums of squares up to which weights may grow at any rate: [P].

    The limit is a share of the size with which a square weight preserves a signal's size: a root mean square of
    elements^(-1/4). Embeddings and heads that start at a hundredth of it grow many times in Adam's first steps.
    """
    return share**2 * np.sqrt(num_elements_P)


class Movement(Remembers):
    """The parameters' norms in the last sample, before its update. The next sample shows the effect of the update."""

    def __init__(self) -> None:
        self._step = 0
        self._total = math.nan
        self._num_broken = 0.0  # number of non-finite elements in the last sample
        self._sum_sq = PerName(math.nan)

    def see(self, names: tuple[str, ...], sample: Overview) -> Update:
        """Return the update between the last sample and this one, and store this one as the last."""
        before = self._total if self._sum_sq.names is names else math.nan
        after_P = sample.rows[:, Column.PARAM_SUM_SQ]
        update = Update(
            self._sum_sq.replace(names, after_P), after_P, before, sample.weights_sq, sample.step - self._step
        )
        self._total, self._step = sample.weights_sq, sample.step
        return update

    def is_beyond(self, limit: float, snapshot: Snapshot, sample: Overview) -> bool:
        """Whether the parameters' norm changed by more than the share `limit` per step since the last sample.

        Only parameters in both samples are compared. False if there are none; True if elements became non-finite.
        """
        before_P, after_P, before, after, num_steps = self.see(snapshot.names, sample)
        num_broken = sample.sums[Column.PARAM_NUM_NONFINITE]
        if math.isnan(num_broken):
            num_broken = float(np.nansum(sample.rows[:, Column.PARAM_NUM_NONFINITE]))
        already, self._num_broken = self._num_broken, num_broken
        if num_broken > already:
            return True
        if num_steps > 0 and abs(after - before) < limit * before:
            return False  # the usual case; the norm changes by less per step than the sum does in total
        both_P = ~np.isnan(after_P) & ~np.isnan(before_P)
        before, after = float(before_P[both_P].sum()), float(after_P[both_P].sum())
        if after > before:
            small = float(small_squares(sample.rows[both_P, Column.NUM_ELEMENTS]).sum())
            before, after = max(before, small), max(after, small)
        if not 0 < before < math.inf or not after > 0 or num_steps < 1:
            return False
        return abs(math.expm1(min(0.5 * math.log(after / before) / num_steps, 700.0))) > limit
