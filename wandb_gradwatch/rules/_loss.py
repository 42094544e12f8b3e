"""Rule for the loss: a jump far above its recent level, or a fall below 0."""

import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import ClassVar, Final

import numpy as np

from .._analysis.baseline import median_and_scatter
from .._analysis.formatting import number
from .._analysis.memory import PerKind, Remembers
from ..snapshot import Snapshot, keys
from ._base import FROM_0, FROM_1, Alert, Bounds, Finding, ShippedRule, values_of

# S samples

_WINDOW: Final = 64  # number of newest losses that are kept
_NEWEST: Final = 32  # of these, compared with a rise: in older ones the progress of the training looks like scatter
_TURNED, _FAR = 16, 6.0  # samples within which a loss falls below 0, and by how many deviations
# With fewer losses: the least number, the newest that show the level, and how much faster than before they fall. A
# healthy likelihood falls 1.7 times as fast, one of the wrong sign from 11 times.
_FEWEST, _LAST, _FASTER = 8, 4, 5.0
_BLOCK, _RISES, _FAR_ABOVE = 8, 8, 5.0  # losses per group, groups that rise in a row, and by which factor in all
_PHASE: Final = 32  # samples of other parameters after which another phase may have another loss
_LEAST: Final = 1e-2  # share of the largest first loss below which nothing is a spike: the training has converged
_PRECISION: Final = 1e-3  # smallest deviation, as a share of the median: equal losses have no scatter to compare with
UNBOUNDED: Final = (
    "the wrong sign of the loss, or a loss without a lower bound",
    "check the sign of the loss: what is maximised needs a minus; give the loss a lower bound, which a binary "
    "cross-entropy of labels below 0 or above 1 does not have",
)


class _Past(Remembers):
    """The losses of one kind of sample, and what they have shown."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.above: list[float] = []  # losses in a row above the limit
        self.began = 0  # the step of the first of these
        # The losses since the loss went below 0, a few samples long; and what was expected before that.
        self.below: list[float] = []
        self.was_below = False  # whether any loss before was below 0: then it is no news
        self.before_0: tuple[float, ...] = ()
        self.first_step = self.last_step = 0  # of the losses before that
        self.newest = 0  # the number of the newest sample

    def expected_below_0(self) -> tuple[float, float, float]:
        """Return the median of the last losses, how far below 0 no loss is expected, and by how much no loss falls per
        step: 0 if there are enough losses to know their scatter."""
        if len(self.losses) >= _NEWEST:
            median, deviation = _median_and_deviation(self.losses[-_TURNED:])
            return median, min(-0.5 * median, median - _FAR * deviation), 0.0
        median, largest = float(np.median(self.losses[-_LAST:])), max(self.losses)
        return median, -largest, _FASTER * (largest - median) / max(self.last_step - self.first_step, 1)


@dataclass(kw_only=True)
class LossSpike(ShippedRule):
    """Raises the alert "Loss spike" if the loss is far above its recent level for several samples.

    Far: above the largest of the last 32 losses by `deviations` robust standard deviations (1.4826 times the median
    distance from the median), and by at least their range. The alert is INFO while the loss falls again, because the
    training copes with the change. A loss of less than a hundredth of the first ones is none: the training has
    converged. A loss has no scale of its own and may be negative, so it is compared only with itself, and only in
    samples of the same parameters, without a long break: another phase or another model may have another loss. A single
    hard batch is no spike. "Non-finite loss" reports NaN and Inf.

    It also raises "Loss below 0" if the loss was never below 0, and above 0 for at least 32 samples, and falls far
    faster than it has approached 0; after 8 to 31 samples if it falls as far below 0 as it was above, five times as
    fast. And "Loss spike" if the loss has risen in eight groups of eight samples in a row, to five times the largest of
    its first 16.

    Args:
        deviations: limit above the largest recent loss, in robust standard deviations.
        patience: number of losses that must be known before a loss is judged.
        stays: number of losses in a row above the limit that raises the alert.
        adapt_after: after this many losses in a row above the limit, their level counts as usual.
    """

    deviations: float = 10.0
    patience: int = 32
    stays: int = 8
    adapt_after: int = 20
    _pasts: PerKind[_Past] = field(default_factory=lambda: PerKind(_Past), init=False, repr=False)
    _num_samples: int = field(default=0, init=False, repr=False)
    # Of all samples: a critic's loss alone may rise as the rewards do.
    _first: float = field(default=-math.inf, init=False, repr=False)  # the largest of the first losses
    _num_first: int = field(default=0, init=False, repr=False)
    _block: list[float] = field(default_factory=list, init=False, repr=False)  # the newest losses, a few samples long
    _last_block: float = field(default=math.inf, init=False, repr=False)  # the median of the block before
    _num_rises: int = field(default=0, init=False, repr=False)  # blocks in a row, each above the one before

    title: ClassVar[str] = "Loss spike"
    judges_updates: ClassVar[bool] = True
    negative: ClassVar[str] = "Loss below 0"
    bounds: ClassVar[Bounds] = dict.fromkeys(("stays", "adapt_after"), FROM_1) | {
        "deviations": FROM_0,
        "patience": (2.0, _WINDOW),
    }

    def check(self, snapshot: Snapshot) -> Iterable[Alert]:
        for sample, loss in zip(snapshot.overview, values_of(snapshot, keys.LOSS), strict=True):
            if sample.skipped or not math.isfinite(loss):
                continue
            past = self._pasts.of(snapshot.names, None if sample.is_complete else snapshot.present[sample.place])
            self._num_samples += 1
            if self._num_samples - past.newest > _PHASE:
                past.losses, past.above = [], []
            past.newest = self._num_samples
            if past.below or (loss < 0 and not past.was_below):
                yield from self._look_below_0(past, sample.step, loss)
            past.was_below |= loss < 0
            if loss >= 0:
                past.first_step, past.last_step = past.first_step or sample.step, sample.step
            yield from self._look_for_rise(sample.step, loss)
            limit = self._limit(past, loss)
            if loss > limit:
                if not past.above:
                    past.began = sample.step
                past.above.append(loss)
                if len(past.above) >= self.stays:
                    yield replace(self._alert(past, limit), found_in=sample.step)
                if len(past.above) < self.adapt_after:
                    continue
            past.losses += past.above or [loss]
            del past.losses[:-_WINDOW]
            past.above = []

    def _look_for_rise(self, step: int, loss: float) -> Iterable[Alert]:
        """Alert if the loss rises all the time, far above where it began: something follows the gradient uphill."""
        if self._num_first < _TURNED:
            self._num_first, self._first = self._num_first + 1, max(self._first, loss)
            return
        self._block.append(loss)
        if len(self._block) < _BLOCK:
            return
        median, least = statistics.median(self._block), min(self._block)
        self._num_rises = self._num_rises + 1 if median > self._last_block else 0
        self._block, self._last_block = [], median
        if self._num_rises >= _RISES and least > _FAR_ABOVE * self._first > 0:
            fact = (
                f"the loss has risen to {number(median)}, from at most {number(self._first)} in the first {_TURNED} "
                f"samples; each of the last {self._num_rises} groups of {_BLOCK} samples is above the one before."
            )
            cause = (
                "not clear: either the wrong sign of the loss (or maximize=True in the optimizer), or a learning rate "
                "that is too high; a run with a tenth of the learning rate tells them apart"
            )
            remedy = "check the sign of the loss and the optimizer's settings; lower the learning rate"
            yield self._finding(step, fact, cause, remedy)

    def _limit(self, past: _Past, loss: float) -> float:
        """Return the limit for this loss; infinity if the loss is too small for the deviation to matter."""
        newest = past.losses[-_NEWEST:]
        if len(past.losses) < self.patience or loss <= (largest := max(newest)):
            return math.inf
        if min(newest) >= 0 and loss < _LEAST * self._first:
            return math.inf
        apart = largest - min(newest)
        if loss <= largest + apart:
            return math.inf
        return largest + max(self.deviations * _median_and_deviation(newest)[1], apart)

    def _look_below_0(self, past: _Past, step: int, loss: float) -> Iterable[Alert]:
        """Alert if a loss that was always above 0 falls through 0 faster than it has approached 0."""
        if not past.below:
            if loss >= 0 or len(past.losses) < _FEWEST or min(past.losses) <= 0:
                return
            past.before_0 = past.expected_below_0()
        median, limit, speed = past.before_0
        limit = min(limit, median - speed * (step - past.last_step))
        past.below = [*past.below, loss]
        if len(past.below) > _TURNED or loss >= 0:
            past.below = []
        elif len(past.below) > 1 and max(past.below[-2:]) < limit:
            fact = (
                f"within {len(past.below)} samples the loss has fallen to {number(loss)}; the {len(past.losses)} "
                f"samples before were all above 0, the newest about {number(median)}."
            )
            yield self._finding(step, fact, *UNBOUNDED, title=self.negative)

    def _alert(self, past: _Past, limit: float) -> Finding:
        half, before = len(past.above) // 2, past.losses[-_NEWEST:]
        is_falling = half > 0 and sum(past.above[-half:]) < sum(past.above[:half])
        now = "falls again" if is_falling else "stays there"
        fact = (
            f"the loss has risen to {number(max(past.above))} and {now}; the {len(before)} losses before were between "
            f"{number(min(before))} and {number(max(before))} (threshold {number(limit)})."
        )
        cause = (
            "not clear: either a learning rate that is too high, or the data has changed; whether the learning rate "
            "rose before this step tells them apart"
        )
        remedy = "look at what changed in the data at this step; lower the learning rate, and clip the gradients"
        return self._finding(past.began, fact, cause, remedy, level="INFO" if is_falling else "WARN")


def _median_and_deviation(losses: list[float]) -> tuple[float, float]:
    median, scatter = median_and_scatter(np.array(losses))
    return median, max(scatter, _PRECISION * abs(median))
