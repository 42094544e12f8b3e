"""Whether a training makes progress: whether its loss has fallen."""

from __future__ import annotations

import math
import statistics
from collections import deque
from typing import Final

from .memory import Remembers

_UPDATES: Final = 10  # number of updates over which the loss is compared
_LOSSES: Final = 3  # number of losses at either end, whose medians are compared


class Progress(Remembers):
    """The newest losses of a training."""

    def __init__(self) -> None:
        self._losses: deque[float] = deque(maxlen=_UPDATES + _LOSSES)

    def see(self, loss: float) -> None:
        """Add the loss of a sample; NaN if it is not known."""
        self._losses.append(loss)

    def has_fallen(self) -> bool:
        """Whether the last losses are below those of ten updates before, or the first ones, and not below 0.

        A loss below 0 may be one without a lower bound, which falls while the parameters explode. False if losses are
        not known.
        """
        losses = list(self._losses)
        earlier, last = losses[:_LOSSES], losses[-_LOSSES:]
        if any(map(math.isnan, earlier + last)):
            return False
        return bool(losses) and 0.0 <= statistics.median(last) < statistics.median(earlier)
