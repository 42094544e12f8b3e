"""Whether a training moves and makes progress: the change of the parameters by each update, and of the loss."""

import math
import statistics
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import numpy as np

from .._measure.columns import BoolArray, Column, FloatArray
from ..snapshot import Snapshot
from ..snapshot._overview import Overview
from .memory import PerName, Remembers

# P watched parameters, N updates

_UPDATES: Final = 10  # number of updates over which the loss is compared
_LOSSES: Final = 3  # number of losses at either end, whose medians are compared
_CLEARLY: Final = 1.05  # a loss that is hardly falling yet scatters by less


class Update(NamedTuple):
    """Sums of squares of the parameters before and after an update: of each one (NaN if unknown) and of all."""

    before: FloatArray  # [P]
    after: FloatArray
    total_before: float  # NaN if one parameter's is missing, or if the last sample had other parameters
    total_after: float
    num_steps: int


def any_parameter(question: Callable[[FloatArray, FloatArray], BoolArray], updates: Sequence[Update]) -> list[bool]:
    """Whether the answer, given the sums of squares before and after, [N, P] each, is yes for any parameter: N."""
    if len(updates) < 2:  # without copies, which would take a large part of the time that rules take for one sample
        return [bool(np.count_nonzero(question(one.before[None], one.after[None]))) for one in updates]
    found_NP = question(np.array([one.before for one in updates]), np.array([one.after for one in updates]))
    found: list[bool] = np.logical_or.reduce(found_NP, axis=1).tolist()
    return found


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

    def see(self, snapshot: Snapshot, samples: Sequence[Overview]) -> list[Update]:
        """Return the update before each of these samples, and store the last sample."""
        if not samples:
            return []
        updates, after_SP = [], snapshot.column(Column.PARAM_SUM_SQ)
        if self._sum_sq.names is not snapshot.names:
            self._total = math.nan
        before_P = self._sum_sq.of(snapshot.names)
        for sample in samples:
            after_P = after_SP[sample.place]
            updates.append(Update(before_P, after_P, self._total, sample.weights_sq, sample.step - self._step))
            before_P, self._total, self._step = after_P, sample.weights_sq, sample.step
        self._sum_sq.values_P = before_P
        return updates

    def is_beyond(self, limit: float, update: Update, sample: Overview) -> bool:
        """Whether the parameters' norm changed by more than the share `limit` per step before this sample.

        Of parameters in both samples: False if there are none. True if elements became non-finite.
        """
        before_P, after_P, before, after, num_steps = update
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


class Progress(Remembers):
    """The newest losses of a training."""

    def __init__(self) -> None:
        self._losses: deque[float] = deque(maxlen=_UPDATES + _LOSSES)

    def see(self, loss: float) -> None:
        """Add the loss of a sample; NaN if it is not known."""
        self._losses.append(loss)

    def has_fallen(self) -> bool:
        """Whether the last losses are below those of ten updates before, or the first ones.

        False if losses are not known, or below 0: a loss without a lower bound falls while the parameters explode.
        """
        losses = list(self._losses)
        return 0.0 <= _median(losses[-_LOSSES:]) < _median(losses[:_LOSSES])

    def may_have_risen(self, newest: int = _LOSSES) -> bool:
        """Whether the newest losses are clearly above all of the ten updates before; True if not known, or below 0."""
        losses = list(self._losses)
        before = [loss for loss in losses[:-newest] or losses[:1] if not math.isnan(loss)]
        return not 0.0 <= _median(losses[-newest:]) <= _CLEARLY * max(before, default=math.nan)


def _median(losses: list[float]) -> float:
    """Return the median; NaN if there are none, or one is NaN."""
    return math.nan if not losses or any(map(math.isnan, losses)) else statistics.median(losses)
