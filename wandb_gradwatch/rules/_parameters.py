"""Rule for how far updates move the parameters."""

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final

import numpy as np
import numpy.typing as npt

from .._analysis.formatting import clip_advice, listing, number, worst_first
from .._analysis.layers import MIN_WEIGHTS, are_weights
from .._analysis.memory import PerName
from .._analysis.movement import Movement, Progress, Update, any_parameter, small_squares
from .._measure.columns import Column, FloatArray
from ..snapshot import Snapshot, keys
from ..snapshot._overview import Overview
from ._base import FROM_1, MIN_ELEMENTS, SHARE, Alert, Bounds, Level, PerKindRule, values_of

# S samples, P watched parameters

_EARLY: Final = 20  # first steps, in which parameters may move fast: adaptive optimizers begin with full steps
_FROM_0: Final = 50  # steps after all weights were 0, as in a logistic regression, whose relative growth means nothing
_SHRINKS, _SHRINK_SAMPLES = 0.02, 8  # share of its norm that a weight loses per step, in so many updates in a row
_NOTICED: Final = 0.01  # smallest change of a log norm per step that is looked at
_OF_TYPICAL: Final = 0.3  # share of a typical weight, or of a small one (`small_squares`): smaller ones may shrink
_MANY: Final = 5  # number of weights from which half of a weight's limit holds for the norm of all together
_AT_ONCE: Final = math.log(2.0)  # change of a log norm by one update
_OF_LAST: Final = 5  # number of updates of which two have to be too large: a single one may be a bad batch
_TOGETHER: Final = 10  # number of updates whose changes are added up
_CAUSE: Final = (
    "not clear: either a learning rate that is too high, or a large scale of the inputs, targets or loss; the size of "
    "the loss at the first step tells them apart"
)
_REMEDY: Final = (
    "normalise the inputs and the targets, take the mean in the loss; divide the learning rate by 10 or lengthen its "
    "warm-up, and "
)
JUMP: Final = (  # the cause and the remedy of weights that have leapt
    "not clear: either too large an update, or weights that were loaded or rescaled; the gradient and the learning "
    "rate of the step before tell them apart",
    "check the learning rate's schedule, the batch before, and other code that writes to parameters",
)


@dataclass(kw_only=True)
class FastParameters(PerKindRule):
    """Raises the alert "Parameters grow too fast" or "Parameters shrink" if updates change weights too much.

    Growth: for each weight, the second largest of five updates is checked, and the product of ten without the largest.
    Shrinking: most weights lose 2 % or more per step in eight updates in a row, one weight loses half of its norm in
    them, or too little is left of the first norm of all parameters. A weight that begins at or near 0 may grow at any
    speed to the model's typical weight, or to the size that preserves a signal, half of it while the loss rises; and
    all weights may grow while the loss falls, or by a single update after which it has not risen. With five or more
    weights, the norm of all together may grow only half as fast as that of a single weight.

    Args:
        max_growth: largest growth of a weight's norm per step after step 20. Healthy: at most 11 % (LSTM, rate 20).
        max_first_growth: the same up to step 20. Healthy: at most 11 %; faults: from 26 %.
        max_factor: largest growth factor of a weight's norm over 10 updates without the largest, which may be a bad
            batch or a change by the user; and by a single update after step 20. Healthy: at most 1.7. Its square is the
            limit for all updates between two samples with other steps between them. Healthy: at most 2.7.
        min_left: smallest share of the first norm that is left. Healthy: at least 0.44; faults: 0.001.
    """

    max_growth: float = 0.12
    max_first_growth: float = 0.2
    max_factor: float = 2.5
    min_left: float = 0.2
    _movement: Movement = field(default_factory=Movement, init=False, repr=False)
    _progress: Progress = field(default_factory=Progress, init=False, repr=False)
    _names: tuple[str, ...] = field(default=(), init=False, repr=False)
    # Change of each weight's log norm per step, 0 if unknown; last that of all together, doubled for many weights.
    _recent: deque[FloatArray] = field(default_factory=lambda: deque(maxlen=_TOGETHER), init=False, repr=False)
    # Later updates that are too small for a finding: their changes are computed when a larger one comes, from the
    # update, the sizes of the parameters and `_may_grow`.
    _ordinary: deque[tuple[Update, FloatArray, float]] = field(
        default_factory=lambda: deque(maxlen=_TOGETHER), init=False, repr=False
    )
    _left_sq: float = field(default=0.0, init=False)  # at least this share of the squared first norm is left
    _largest: PerName = field(default_factory=PerName, init=False, repr=False)
    _step_at_0: float = field(default=-math.inf, init=False)  # the last step at which all weights were 0

    title: ClassVar[str] = "Parameters grow too fast"
    judges_updates: ClassVar[bool] = True
    shrinking: ClassVar[str] = "Parameters shrink"
    metric: ClassVar[str] = keys.LOSS
    bounds: ClassVar[Bounds] = {"max_growth": SHARE, "max_first_growth": SHARE, "min_left": SHARE, "max_factor": FROM_1}

    def prepared(self, snapshot: Snapshot, samples: Sequence[Overview]) -> Iterable[tuple[Overview, Any]]:
        large = [sample for sample in samples if not sample.sums[Column.NUM_ELEMENTS] < MIN_ELEMENTS]
        updates, losses = self._movement.see(snapshot, large), values_of(snapshot, self.metric)
        share_N1 = np.array([[2 * _NOTICED * update.num_steps] for update in updates])
        are_P = are_weights(snapshot.names)  # a bias that jumps switches units off, which other rules find
        with np.errstate(invalid="ignore"):
            have_moved = any_parameter(lambda before, now: (np.abs(now - before) > share_N1 * before) & are_P, updates)
        updated = iter(zip(updates, have_moved, strict=True))
        for sample in samples:
            self._progress.see(losses[sample.place])
            if sample.sums[Column.NUM_ELEMENTS] < MIN_ELEMENTS:
                continue
            update, has_moved = next(updated)
            if sample.weights_sq == 0:
                self._step_at_0 = sample.step
            if sample.step <= self._step_at_0 + _FROM_0:
                continue
            if sample.step - update.num_steps <= _EARLY < sample.step - 1:  # another limit held before
                self._recent.clear()
                self._ordinary.clear()
            if has_moved or not self._is_ordinary(snapshot, sample, update):
                self._left_sq = 0.0
                yield sample, update

    def check_sample(self, snapshot: Snapshot, sample: Overview, update: Update, /) -> Iterable[Alert]:
        size_P = sample.rows[:, Column.NUM_ELEMENTS]
        if not self._follow(snapshot.names, update, size_P):
            self._left(snapshot, sample.place)  # the first sample's norms are those to compare with
            self._left_sq = 0.0
            return
        if np.maximum.reduce(self._recent[-1]) > _NOTICED:
            yield from self._growing(snapshot, sample, update.num_steps)
        if np.count_nonzero(sample.rows[:, Column.PARAM_NUM_NONFINITE] > 0):
            return  # the norm that is left is that of the elements which are finite
        left, shrinking = self._left(snapshot, sample.place), np.zeros(0, dtype=np.intp)
        if np.minimum.reduce(self._recent[-1]) < math.log1p(-_SHRINKS):
            last = np.array(list(self._recent)[-_SHRINK_SAMPLES:])[:, :-1]
            shrinks_P = (last.max(axis=0) < math.log1p(-_SHRINKS)) & (len(last) == _SHRINK_SAMPLES)
            # A decay shrinks most weights. The loss may shrink single ones, but does not halve them so quickly.
            num_weights = np.count_nonzero(are_weights(snapshot.names) & (size_P >= MIN_WEIGHTS))
            if 2 * np.count_nonzero(shrinks_P) <= num_weights:
                shrinks_P &= last.sum(axis=0) < -_AT_ONCE
            shrinking = np.flatnonzero(shrinks_P)
        if left < self.min_left or shrinking.size:
            yield self._shrinking(sample.step, left, shrinking)

    def _is_ordinary(self, snapshot: Snapshot, sample: Overview, update: Update) -> bool:
        """Whether this update, which moves no weight far, is too small for a finding, the usual case."""
        share, growth = 2 * _NOTICED * update.num_steps, update.total_after - update.total_before
        is_known = self._left_sq > 0 and 0 < share < 0.6  # over more, shrinking takes as much
        is_known = is_known and sample.sums[Column.PARAM_NUM_NONFINITE] == 0
        if not (is_known and growth <= share / 2 * update.total_before):
            return False
        self._left_sq, may_grow = self._left_sq * (1 - share), 1.0
        if self._left_sq <= self.min_left**2:
            self._left_sq = 0.0
            if self._left(snapshot, sample.place) < self.min_left:
                return False
            may_grow = self._may_grow()
        self._ordinary.append((update, sample.rows[:, Column.NUM_ELEMENTS], may_grow))
        return True

    def _may_grow(self) -> float:
        """Return the share of the size that preserves a signal up to which weights may grow at any speed."""
        return 0.5 if self._progress.may_have_risen() else 1.0

    def _follow(self, names: tuple[str, ...], update: Update, size_P: FloatArray) -> bool:
        """Record how much each weight has changed since the previous sample. Returns whether any change is known."""
        if names != self._names:
            self._names, self._recent = names, deque(maxlen=_TOGETHER)
            self._ordinary.clear()
        self._work_out()
        if (change_P := _change(names, update, size_P, self._may_grow())) is not None:
            self._recent.append(change_P)
        return change_P is not None

    def _work_out(self) -> None:
        changes = [_change(self._names, *ordinary) for ordinary in self._ordinary]
        self._recent.extend(change_P for change_P in changes if change_P is not None)
        self._ordinary.clear()

    def _growing(self, snapshot: Snapshot, sample: Overview, num_steps: int) -> Iterable[Alert]:
        """Yield the alert of weights that have grown too fast, if there are any; the last change took `num_steps`."""
        step, recent = sample.step, np.sort(list(self._recent), axis=0)
        rate = self.max_first_growth if step <= _EARLY else self.max_growth
        last_P = np.sort(list(self._recent)[-_OF_LAST:], axis=0)[-2 if len(recent) > 1 else -1]
        product_P, since_P, most = recent[:-1].sum(axis=0), num_steps * self._recent[-1], math.log(self.max_factor)
        most_since = most if num_steps == 1 else 2 * most
        cause, remedy = _CAUSE, _REMEDY + clip_advice(clips=snapshot.clipped[sample.place] == 1)
        level: Level = "ERROR"
        is_learning = self._progress.has_fallen()
        if len(recent) > 1 and not is_learning and last_P.max() > math.log1p(rate):
            words = f"grown by {number(100 * rate)} % per step or more, twice within {_OF_LAST} samples"
            grown_P, limit = last_P, math.log1p(rate)
        elif step - num_steps >= _EARLY and since_P[:-1].max() > most_since and self._progress.may_have_risen(1):
            words = f"grown {number(math.exp(most_since))} times or more since the sample before"
            grown_P, limit, level, (cause, remedy) = since_P, most_since, "WARN", JUMP
        elif not is_learning and product_P.max() > most:
            words = (
                f"grown {number(self.max_factor)} times or more in all by {len(recent) - 1} of the last {len(recent)} "
                "updates, without the largest"
            )
            grown_P, limit = product_P, most
        else:
            return
        grown = worst_first(grown_P, np.flatnonzero(grown_P[:-1] > limit))
        norms, have = ("norm", "has") if len(grown) == 1 else ("norms", "have")
        what = f"the {norms} of {len(grown)} of {len(self._names)} parameters {have}"
        fact = f"{what if grown else 'the norm of all parameters together has'} {words}."
        layers = listing(grown, lambda p: f"{self._names[p]} {number(math.exp(min(grown_P[p], 700.0)))} times")
        yield self._finding(step, fact, cause, remedy, layers=layers, level=level)

    def _left(self, snapshot: Snapshot, sample: int) -> float:
        """Return the share of the first norm that is left, of parameters that are present since the first sample."""
        largest_P = self._largest.of(snapshot.names)
        left_sq = float(snapshot.column(Column.PARAM_SUM_SQ)[sample].sum(where=largest_P > 0))
        if left_sq > 0 and snapshot.column_sums[sample, Column.PARAM_NUM_NONFINITE] == 0:  # usual: all present
            whole_sq, are_known_P = float(largest_P @ largest_P), (largest_P > 0) & are_weights(snapshot.names)
            self._left_sq = float(snapshot.column(Column.PARAM_SUM_SQ)[sample].sum(where=are_known_P)) / whole_sq
            return math.sqrt(left_sq / whole_sq)
        norm_P = snapshot.param_norm[sample]
        if not largest_P.any():
            np.copyto(largest_P, norm_P, where=norm_P > 0)
        here_P = (largest_P > 0) & (norm_P >= 0)
        whole = float(np.linalg.norm(largest_P[here_P]))
        return float(np.linalg.norm(norm_P[here_P])) / whole if whole > 0 else 1.0

    def _shrinking(self, step: int, left: float, shrinking: npt.NDArray[np.intp]) -> Alert:
        cause = "too strong a weight decay, or a penalty on the parameters that outweighs the loss"
        fact = (
            f"{number(100 * left)} % of the parameters' first norm is left (threshold {number(100 * self.min_left)} %)."
        )
        if shrinking.size:
            have = "weight has" if len(shrinking) == 1 else "weights have"
            lost = f"lost {number(100 * _SHRINKS)} % or more in each of the last {_SHRINK_SAMPLES} updates"
            fact = f"{len(shrinking)} {have} {lost}."
        elif self._recent[-1].min() < -_AT_ONCE:  # a decay by learning rate times weight decay takes less
            cause = (
                f"not clear: either {cause}, or weights that were loaded or rescaled; what the script does at this "
                "step tells them apart"
            )
        lost_P = -self._recent[-1]
        layers = listing(
            worst_first(lost_P, shrinking),
            lambda p: f"{self._names[p]} {number(-100 * math.expm1(-lost_P[p]))} % per step",
        )
        remedy = "divide the weight decay by 10; if it is decoupled (AdamW), its product with the learning rate counts"
        return self._finding(step, fact, cause, remedy, layers=layers, title=self.shrinking)


def _change(names: tuple[str, ...], update: Update, size_P: FloatArray, share: float) -> FloatArray | None:
    """Return each weight's change of log norm per step, 0 if unknown, then that of all, doubled if many: [P + 1].

    Weights may grow at any speed to this share of the size that preserves a signal.
    """
    before_P, now_P, *_, num_steps = update
    known_P = are_weights(names) & (size_P >= MIN_WEIGHTS) & (before_P >= 0) & (now_P > 0)
    if num_steps < 1 or not np.count_nonzero(known_P):
        return None
    before, now = np.add.reduce(before_P), np.add.reduce(now_P)
    typical_sq = before / np.add.reduce(size_P)
    if np.isnan(before + now):  # some parameters are missing in one of them
        both_P = before_P + now_P >= 0
        before, now = before_P.sum(where=both_P), now_P.sum(where=both_P)
        typical_sq = np.nansum(before_P) / np.nansum(size_P)
    # A weight that begins at or near 0, as half of a LoRA pair, may grow to a typical or a small size at any speed.
    small_P, typical_P = small_squares(size_P, share=share), typical_sq * size_P
    least_P = np.where(
        now_P > before_P, np.maximum(typical_P, small_P), _OF_TYPICAL**2 * np.minimum(typical_P, small_squares(size_P))
    )
    ratio_P = np.ones(len(names) + 1)
    np.divide(np.maximum(now_P, least_P), np.maximum(before_P, least_P), ratio_P[:-1], where=known_P)
    small = small_P.sum(where=before_P + now_P >= 0) if now > before else 0.0
    ratio_P[-1] = (max(now, small) / max(before, small)) ** (2 if np.count_nonzero(known_P) >= _MANY else 1)
    return 0.5 * np.log(ratio_P) / num_steps
