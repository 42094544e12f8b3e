"""Whether a training makes progress: whether its loss has fallen."""

import math
import statistics
from collections import deque
from typing import Final

from .memory import Remembers

_UPDATES: Final = 10  # number of updates over which the loss is compared
_LOSSES: Final = 3  # number of losses at either end, whose medians are compared
_CLEARLY: Final = 1.05  # a loss that is hardly falling yet scatters by less


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
