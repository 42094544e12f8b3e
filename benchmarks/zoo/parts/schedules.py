"""Learning rates as a factor of the step."""

from __future__ import annotations

import math
from collections.abc import Callable


def cosine(steps: int, warmup: int = 20) -> Callable[[int], float]:
    """Linear from 0, then half a cosine to 0."""
    return lambda step: min(step / warmup, 0.5 + 0.5 * math.cos(math.pi * min(step / steps, 1.0)))


def steps_down(*at: int, by: float = 0.1) -> Callable[[int], float]:
    """A learning rate that falls at some steps."""
    return lambda step: by ** sum(step > one for one in at)


def one_cycle_of(steps: int, first: float = 0.04) -> Callable[[int], float]:
    """Up within 30 % of the steps, then down to nothing."""
    up = 0.3 * steps
    return lambda step: (
        first + (1 - first) * 0.5 * (1 - math.cos(math.pi * step / up))
        if step < up
        else 0.5 + 0.5 * math.cos(math.pi * min(1.0, (step - up) / (steps - up)))
    )


def restarted(*lengths: int) -> Callable[[int], float]:
    """Half a cosine per cycle, from the full rate each time."""

    def factor(step: int) -> float:
        for length in lengths:
            if step <= length:
                return 0.5 + 0.5 * math.cos(math.pi * (step - 1) / length)
            step -= length
        return 0.0

    return factor
