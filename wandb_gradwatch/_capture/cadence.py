"""When to sample, when to take a histogram, when to flush: all counted in optimizer steps."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from numbers import Integral
from typing import Final


@dataclass(frozen=True)
class Cadence:
    """Three questions about a step number.

    Args:
        sample_every: measure every n-th step.
        log_every: flush at every n-th step.
        histogram_every: take a histogram every n-th step, rounded up to a sample; None: for every flush; 0: never.

    Raises:
        ValueError: a cadence that is not a positive whole number.
    """

    sample_every: int = 1
    log_every: int = 50
    histogram_every: int | None = None

    def __post_init__(self) -> None:
        for argument, least in (("sample_every", 1), ("log_every", 1), ("histogram_every", 0)):
            value = getattr(self, argument)
            if argument == "histogram_every" and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
                raise ValueError(f"{argument}={value!r} must be a whole number of optimizer steps, at least {least}")
            object.__setattr__(self, argument, int(value))  # numpy's whole numbers are welcome

    def sample_due(self, step: int) -> bool:
        """Whether this step is measured."""
        return step % self.sample_every == 0

    def flush_due(self, step: int) -> bool:
        """Whether the window is flushed when this step is done, measured or not."""
        return step % self.log_every == 0

    def histogram_due(self, step: int, *, first_of_window: bool) -> bool:
        """Whether a measured step also gets a histogram.

        By default that is the last sample before each flush, and the first of the window, so that a window that is
        flushed early has one too (`keeps_newest_histogram`: the later one replaces it).
        """
        if self.histogram_every == 0:
            return False
        if self.histogram_every is None:
            return first_of_window or self.is_last_before_flush(step)
        return step // self.histogram_every != (step - self.sample_every) // self.histogram_every

    def is_last_before_flush(self, step: int) -> bool:
        """Whether no other step is measured between this one and the end of its window."""
        return step + self.sample_every > -(-step // self.log_every) * self.log_every

    @property
    def keeps_newest_histogram(self) -> bool:
        """Whether a new histogram replaces the window's, rather than being added to it."""
        return self.histogram_every is None


class Budget:
    """Stretches a cadence so that the monitor's share of the time stays under a limit. Pure: time is an argument.

    Histograms are thinned first, to one for every flush; then samples. Nothing is thinned that costs less than allowed,
    and nothing is measured oftener than the user asked for. What the host spends and what a device spends are added up,
    as if neither ran beside the other: the true cost is at most that.

    Args:
        cadence: what the user asked for.
        max_overhead: the monitor's seconds per second of training, 0.01 for one percent.

    Raises:
        ValueError: the limit is not between 0 and 1.
    """

    _SETTLING: Final = 3  # the first samples warm caches and compile kernels
    _WEIGHT: Final = 0.2  # of the newest sample in the averages

    def __init__(self, cadence: Cadence, max_overhead: float) -> None:
        if isinstance(max_overhead, bool) or not isinstance(max_overhead, int | float) or not 0 < max_overhead < 1:
            raise ValueError(f"max_overhead={max_overhead!r} must be a share between 0 and 1, for instance 0.01")
        self._asked = cadence
        self._limit = max_overhead
        self._cost: float | None = None  # seconds per sample
        self._step: float | None = None  # seconds per step, without us
        self._last: tuple[int, float, float] | None = None  # step, time, seconds spent
        self._num_samples = 0

    def after_sample(self, cadence: Cadence, step: int, now: float, seconds_spent: float) -> Cadence:
        """The cadence to go on with.

        Args:
            cadence: the one in use.
            step: the sample's step.
            now: seconds, from any zero.
            seconds_spent: by the monitor since the beginning, on the host and on the device.
        """
        last, self._last = self._last, (step, now, seconds_spent)
        self._num_samples += 1
        if last is None or self._num_samples <= self._SETTLING or step <= last[0]:
            return cadence
        cost = seconds_spent - last[2]
        self._cost = self._average(self._cost, cost)
        self._step = self._average(self._step, max(now - last[1] - cost, 1e-9) / (step - last[0]))
        every = max(self._asked.sample_every, math.ceil(self._cost / (self._limit * self._step) - 1e-6))
        thinned = every > self._asked.sample_every
        if thinned and self._asked.histogram_every and cadence.histogram_every is not None:
            self._cost = None  # see what the samples cost without histograms before they are thinned too
            return replace(cadence, histogram_every=None)
        # A cadence that follows every breath of the machine is hard to read in a chart: powers of two, with some play.
        doubled = self._asked.sample_every * 2 ** max(math.ceil(math.log2(every / self._asked.sample_every)), 0)
        if doubled > cadence.sample_every or doubled * 2 < cadence.sample_every:
            return replace(cadence, sample_every=doubled)
        return cadence

    def _average(self, old: float | None, new: float) -> float:
        return new if old is None else old + self._WEIGHT * (new - old)
