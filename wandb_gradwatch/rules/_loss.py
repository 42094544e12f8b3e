"""The loss: a level far above all that the run has seen lately."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import ClassVar, Final

import numpy as np

from .._analysis.formatting import number
from .._analysis.memory import Remembers
from ..snapshot import Snapshot, keys
from ._base import Alert, check_limits, finding, values_of

# S samples

_WINDOW: Final = 64  # losses that say what is usual
_LARGE: Final = 5.0  # times the usual norm of the gradient
_PRECISION: Final = 1e-3  # of the median: losses that are all alike are no scatter to compare with


@dataclass(kw_only=True)
class LossSpike(Remembers):
    """The loss is far above what it was lately, and stays there for some samples: "Loss spike".

    Far: above the largest of the last 64 samples by `deviations` of their robust standard deviation (1.4826 median
    distances from the median), and by as much as all of these span. While it falls again, the training copes with what
    has changed, and that is INFO. A loss has no scale of its own and may be negative,
    so it is compared with nothing but itself; a single batch may be hard, and is no spike. One that is not finite is
    another alert's, and where the gradient's norm is above 5 times the usual one too, it is the gradient that is told,
    with which of both moved first.

    Args:
        deviations: how far above the largest of these.
        patience: samples that have been seen before anything is judged.
        stays: so many samples in a row are a spike.
        adapt_after: so many samples in a row that are too large are the usual level.
    """

    deviations: float = 10.0
    patience: int = 32
    stays: int = 8
    adapt_after: int = 20
    _past: list[float] = field(default_factory=list, init=False, repr=False)
    _above: list[float] = field(default_factory=list, init=False, repr=False)  # in a row, up to now
    _began: int = field(default=0, init=False, repr=False)  # the step of the first of these
    _norms: list[float] = field(default_factory=list, init=False, repr=False)

    title: ClassVar[str] = "Loss spike"

    def __post_init__(self) -> None:
        check_limits(self, deviations=(0.0, math.inf), patience=(2.0, _WINDOW))
        check_limits(self, stays=(1.0, math.inf), adapt_after=(1.0, math.inf))

    def check(self, snapshot: Snapshot) -> Iterable[Alert]:
        for sample, loss in zip(snapshot.overview, values_of(snapshot, keys.LOSS), strict=True):
            if sample.skipped or not math.isfinite(loss):
                continue
            # The limit is above the largest of the past: most losses need none.
            limit = self._limit() if loss > max(self._past, default=math.inf) else math.inf
            if loss > limit:
                if not self._above:
                    self._began = sample.step
                self._above.append(loss)
                is_large = sample.norm > _LARGE * float(np.median(self._norms or [math.inf]))
                if len(self._above) >= self.stays and not is_large:
                    yield self._alert(self._began, max(self._above), limit)
                if len(self._above) < self.adapt_after:
                    continue
            self._norms = [*self._norms, sample.norm][-_WINDOW:]
            self._past = [*self._past, *(self._above or [loss])][-_WINDOW:]
            self._above = []

    def _limit(self) -> float:
        if len(self._past) < self.patience:
            return math.inf
        past = np.array(self._past)
        median = float(np.median(past))
        deviation = max(1.4826 * float(np.median(np.abs(past - median))), _PRECISION * abs(median))
        return float(past.max()) + max(self.deviations * deviation, float(np.ptp(past)))

    def _alert(self, step: int, loss: float, limit: float) -> Alert:
        fact = (
            f"Step {step}: the loss has risen to {number(loss)} and stays there; the {len(self._past)} before were "
            f"between {number(min(self._past))} and {number(max(self._past))} (threshold {number(limit)})."
        )
        cause = (
            "not clear: either a learning rate that is too high, or the data has changed; whether the learning rate "
            "rose before this step tells them apart"
        )
        remedy = "look at what changed in the data at this step; lower the learning rate, and clip the gradients"
        half = len(self._above) // 2
        is_falling = half > 0 and sum(self._above[-half:]) < sum(self._above[:half])
        return finding(self.title, fact, "", cause, remedy, step, "INFO" if is_falling else "WARN")
