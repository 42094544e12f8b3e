"""Detectors of other packages, to compare with: each is a function from losses and norms to the bad steps.

They are reimplemented from their documentation, with their defaults. They get the loss and the norm before clipping.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Final

# T steps: (the step, the loss, the total gradient norm)
Steps = Sequence[tuple[int, float, float]]
Detector = Callable[["Steps"], Iterator[int]]


def loss_only(steps: Steps) -> Iterator[int]:
    """Not finite, or above the mean of the last 128 by 6 of their deviations: a person who looks at the loss curve."""
    yield from _deviates([(step, loss) for step, loss, _ in steps], 6.0, window=128, least=16)


def running_deviation(steps: Steps, *, stds: float = 3.0) -> Iterator[int]:
    """Ignite's GradMonitor: above the mean of all norms so far by k deviations. One NaN ends it."""
    mean, squares = 0.0, 0.0
    for count, (step, _, norm) in enumerate(steps):
        if count >= 10 and norm > mean + stds * math.sqrt(squares / count):
            yield step
        change = norm - mean
        mean += change / (count + 1)
        squares += change * (norm - mean)


def fixed(steps: Steps, *, threshold: float = 100.0) -> Iterator[int]:
    """Lightning's GradientStatsMonitor: a fixed threshold on the norm."""
    yield from (step for step, _, norm in steps if norm > threshold)


def zclip(steps: Steps, *, z: float = 2.5, alpha: float = 0.97, warmup: int = 25) -> Iterator[int]:
    """ZClip: exponential averages of mean and variance, after 25 steps; what is clipped enters them as clipped."""
    first: list[float] = []
    mean = variance = 0.0
    for step, _, norm in steps:
        if not math.isfinite(norm):
            continue
        if len(first) < warmup:
            first.append(norm)
            mean = sum(first) / len(first)
            variance = sum((value - mean) ** 2 for value in first) / len(first)
            continue
        deviation = math.sqrt(variance) + 1e-6
        score = (norm - mean) / deviation
        if score > z:
            yield step
            norm = mean + z * z / score * deviation
        mean = alpha * mean + (1 - alpha) * norm
        variance = alpha * variance + (1 - alpha) * (norm - mean) ** 2


def skip_step(steps: Steps) -> Iterator[int]:
    """OLMo-core's SkipStepOptimizer: loss or norm above the mean of the last 128 by 6 deviations, once 64 are known."""
    bad = {
        step
        for which in (1, 2)
        for step in _deviates([(row[0], row[which]) for row in steps], 6.0, window=128, least=64)
    }
    yield from sorted(bad)


def largest(steps: Steps, *, factor: float = 10.0, learnt: int = 100) -> Iterator[int]:
    """Megatron's rerun machine: not finite, or more than 10 times the largest of the first 100."""
    for which in (1, 2):
        known = 0.0
        for index, row in enumerate(steps):
            value = abs(row[which])
            if not math.isfinite(value) or (index >= learnt and value > factor * known):
                yield row[0]
            elif index < learnt:
                known = max(known, value)


def kill_loss_spike(steps: Steps, *, window: int = 100, multiplier: float = 2.0, patience: int = 4) -> Iterator[int]:
    """llm-foundry's KillLossSpike: the loss is twice the mean of its last 100, four steps in a row."""
    kept: deque[float] = deque(maxlen=window)
    outliers = 0
    for step, loss, _ in steps:
        kept.append(loss)
        mean = sum(kept) / len(kept)
        outliers = outliers + 1 if len(kept) == window and loss >= multiplier * mean else 0
        if outliers >= patience or (math.isnan(loss) and len(kept) == window):
            yield step


def _deviates(values: Sequence[tuple[int, float]], stds: float, *, window: int, least: int) -> Iterator[int]:
    """Not finite, or above the mean of the window by `stds` deviations."""
    kept: deque[float] = deque(maxlen=window)
    for step, value in values:
        if not math.isfinite(value):
            yield step
            continue
        if len(kept) >= least:
            mean = sum(kept) / len(kept)
            deviation = math.sqrt(sum((other - mean) ** 2 for other in kept) / (len(kept) - 1))
            if value > mean + stds * deviation:
                yield step
        kept.append(value)


DETECTORS: Final[dict[str, Detector]] = {
    "the loss alone, 6 deviations": loss_only,
    "Ignite, mean + 3 deviations": running_deviation,
    "Lightning, norm above 100": fixed,
    "ZClip, z > 2.5": zclip,
    "OLMo-core, 6 deviations of 128": skip_step,
    "Megatron, 10x the largest": largest,
    "llm-foundry, loss spike": kill_loss_spike,
}
