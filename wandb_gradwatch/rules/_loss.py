"""Rule for the loss: a jump far above its recent level, or a fall below 0."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import ClassVar, Final

import numpy as np

from .._analysis.formatting import number
from .._measure.columns import FloatArray
from ..snapshot import Snapshot, keys
from ._base import FROM_0, FROM_1, Alert, Bounds, Finding, ShippedRule, finding, values_of

# S samples

_WINDOW: Final = 64  # number of newest losses that are kept
_NEWEST: Final = 32  # of these, compared with a rise: in older ones the progress of the training looks like scatter
_TURNED, _FAR = 16, 6.0  # samples within which a loss falls below 0, and by how many deviations
_BLOCK, _RISES, _FAR_ABOVE = 8, 8, 5.0  # losses per group, groups that rise in a row, and by which factor in all
_PRECISION: Final = 1e-3  # smallest deviation, as a share of the median: equal losses have no scatter to compare with
UNBOUNDED: Final = (
    "the wrong sign of the loss, or a loss without a lower bound",
    "check the sign of the loss: what is maximised needs a minus; give the loss a lower bound, which a binary "
    "cross-entropy of labels below 0 or above 1 does not have",
)


@dataclass(kw_only=True)
class LossSpike(ShippedRule):
    """Raises the alert "Loss spike" if the loss is far above its recent level for several samples.

    Far: above the largest of the last 32 losses by `deviations` robust standard deviations (1.4826 times the median
    distance from the median), and by at least their range. The alert is INFO while the loss falls again, because the
    training copes with the change. A loss has no scale of its own and may be negative, so it is compared only with
    itself. A single hard batch is no spike. "Non-finite loss" reports NaN and Inf.

    It also raises "Loss below 0" if the loss was above 0 for at least 32 samples, and falls below 0 far faster than it
    has approached 0. And "Loss spike" if the loss has risen in eight groups of eight samples in a row, to five times
    the largest of its first 16.

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
    _past: list[float] = field(default_factory=list, init=False, repr=False)
    _above: list[float] = field(default_factory=list, init=False, repr=False)  # losses in a row above the limit
    _began: int = field(default=0, init=False, repr=False)  # the step of the first of these
    # The losses since the loss went below 0, a few samples long; and the median and deviation before that.
    _below: list[float] = field(default_factory=list, init=False, repr=False)
    _before_0: tuple[float, ...] = field(default=(), init=False, repr=False)
    _first: float = field(default=-math.inf, init=False, repr=False)  # the largest of the first losses
    _num_first: int = field(default=0, init=False, repr=False)
    _block: list[float] = field(default_factory=list, init=False, repr=False)  # the newest losses, a few samples long
    _last_block: float = field(default=math.inf, init=False, repr=False)  # the median of the block before
    _num_rises: int = field(default=0, init=False, repr=False)  # blocks in a row, each above the one before

    title: ClassVar[str] = "Loss spike"
    negative: ClassVar[str] = "Loss below 0"
    bounds: ClassVar[Bounds] = dict.fromkeys(("stays", "adapt_after"), FROM_1) | {
        "deviations": FROM_0,
        "patience": (2.0, _WINDOW),
    }

    def check(self, snapshot: Snapshot) -> Iterable[Alert]:
        for sample, loss in zip(snapshot.overview, values_of(snapshot, keys.LOSS), strict=True):
            if sample.skipped or not math.isfinite(loss):
                continue
            if self._below or loss < 0:
                yield from self._look_below_0(sample.step, loss)
            yield from self._look_for_rise(sample.step, loss)
            limit = self._limit(loss)
            if loss > limit:
                if not self._above:
                    self._began = sample.step
                self._above.append(loss)
                if len(self._above) >= self.stays:
                    yield replace(self._alert(self._began, max(self._above), limit), found_in=sample.step)
                if len(self._above) < self.adapt_after:
                    continue
            self._past += self._above or [loss]
            del self._past[:-_WINDOW]
            self._above = []

    def _look_for_rise(self, step: int, loss: float) -> Iterable[Alert]:
        """Alert if the loss rises all the time, far above where it began: something follows the gradient uphill."""
        if self._num_first < _TURNED:
            self._num_first, self._first = self._num_first + 1, max(self._first, loss)
            return
        self._block.append(loss)
        if len(self._block) < _BLOCK:
            return
        median, least = float(np.median(self._block)), min(self._block)
        self._num_rises = self._num_rises + 1 if median > self._last_block else 0
        self._block, self._last_block = [], median
        if self._num_rises >= _RISES and least > _FAR_ABOVE * self._first > 0:
            fact = (
                f"Step {step}: the loss has risen to {number(median)}, from at most {number(self._first)} in the first "
                f"{_TURNED} samples; each of the last {self._num_rises} groups of {_BLOCK} samples is above the one "
                "before."
            )
            cause = (
                "not clear: either the wrong sign of the loss (or maximize=True in the optimizer), or a learning rate "
                "that is too high; a run with a tenth of the learning rate tells them apart"
            )
            remedy = "check the sign of the loss and the optimizer's settings; lower the learning rate"
            yield finding(self.title, fact, "", cause, remedy, step, "WARN")

    def _limit(self, loss: float) -> float:
        """Return the limit for this loss; infinity if the loss is too small for the deviation to matter."""
        newest = self._past[-_NEWEST:]
        if len(self._past) < self.patience or loss <= (largest := max(newest)):
            return math.inf
        apart = largest - min(newest)
        if loss <= largest + apart:
            return math.inf
        return largest + max(self.deviations * _scatter(np.array(newest))[1], apart)

    def _look_below_0(self, step: int, loss: float) -> Iterable[Alert]:
        """Alert if a loss that was always above 0 falls through 0 faster than it has approached 0."""
        if not self._below and (loss >= 0 or len(self._past) < _NEWEST or min(self._past) <= 0):
            return
        median, deviation = _scatter(np.array(self._past[-_TURNED:])) if not self._below else self._before_0
        self._before_0, self._below = (median, deviation), [*self._below, loss]
        if len(self._below) > _TURNED or loss >= 0:
            self._below = []
        elif max(self._below[-2:]) < min(-0.5 * median, median - _FAR * deviation) and len(self._below) > 1:
            fact = (
                f"Step {step}: within {len(self._below)} samples the loss has fallen to {number(loss)}; the "
                f"{len(self._past)} samples before were all above 0, the newest about {number(median)}."
            )
            yield finding(self.negative, fact, "", *UNBOUNDED, step, "WARN")

    def _alert(self, step: int, loss: float, limit: float) -> Finding:
        fact = (
            f"Step {step}: the loss has risen to {number(loss)} and stays there; the {len(self._past)} losses before "
            f"were between {number(min(self._past))} and {number(max(self._past))} (threshold {number(limit)})."
        )
        cause = (
            "not clear: either a learning rate that is too high, or the data has changed; whether the learning rate "
            "rose before this step tells them apart"
        )
        remedy = "look at what changed in the data at this step; lower the learning rate, and clip the gradients"
        half = len(self._above) // 2
        is_falling = half > 0 and sum(self._above[-half:]) < sum(self._above[:half])
        return finding(self.title, fact, "", cause, remedy, step, "INFO" if is_falling else "WARN")


def _scatter(past: FloatArray) -> tuple[float, float]:
    """Return the median and the robust standard deviation."""
    median = float(np.median(past))
    return median, max(1.4826 * float(np.median(np.abs(past - median))), _PRECISION * abs(median))
