"""When to take a sample, when to take a histogram, and when to flush, all counted in optimizer steps."""

import math
import statistics
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Integral
from typing import Final

from .._runtime.notices import CannotWatchError

SampleEvery = int | Callable[[int], int] | None


@dataclass(frozen=True)
class Cadence:
    """The cadences that the user asked for."""

    # Measure every n-th step. A function maps a step to n, 0 for none. None: the budget decides.
    sample_every: SampleEvery = 1
    log_every: int = 50  # flush every n-th step
    # Take a histogram at the first sample at or after every n-th step. None: for every flush. 0: never.
    histogram_every: int | None = None

    def __post_init__(self) -> None:
        for argument, least in (("sample_every", 1), ("log_every", 1), ("histogram_every", 0)):
            value = getattr(self, argument)
            if (value is None and argument != "log_every") or (callable(value) and argument == "sample_every"):
                continue
            what = f"a whole number of optimizer steps, at least {least}"
            object.__setattr__(self, argument, _whole(value, least, f"{argument}={value!r}", what))

    def every(self, step: int) -> int | None:
        """Return n for this step, which is measured if n divides it. 0: not measured. None: the budget decides."""
        if not callable(self.sample_every):
            return self.sample_every
        try:
            value = self.sample_every(step)
        except Exception as error:
            raise CannotWatchError(f"sample_every({step}) raised {error!r}") from error
        value = int(value) if isinstance(value, bool) else value
        return _whole(value, 0, f"sample_every({step}) = {value!r}", "a whole number, at least 0")

    def next_flush(self, step: int) -> int:
        """Return the first step at which a window may be flushed, this step included."""
        return -(-step // self.log_every) * self.log_every

    def histogram_due(self, step: int, *, last: int, is_first: bool, is_last: bool) -> bool:
        """Whether a measured step also gets a histogram; `last` is the previous measured step.

        By default the last sample of a window gets one, as far as it is known to be the last, and the first sample, for
        windows that are flushed early. The later histogram replaces the first one.
        """
        if self.histogram_every == 0:
            return False
        if self.histogram_every is None:
            return is_first or is_last
        return step // self.histogram_every != last // self.histogram_every


def _whole(value: object, least: int, asked: str, what: str) -> int:
    if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
        raise CannotWatchError(f"{asked} must be {what}")
    return int(value)  # also accepts numpy's integers


def on_ladder(steps: float) -> int:
    """Return the largest of 1, 2, 5, 10, 20, 50, ... that is at most this number of steps."""
    decade = int(10 ** math.floor(math.log10(max(steps, 1.0))))
    return next(factor * decade for factor in (5, 2, 1) if factor * decade <= max(steps, 1.0))


@dataclass(frozen=True)
class Plan:
    """The cadence that a budget allows after a sample."""

    every: int = 1  # steps to the next sample
    samples_per_row: int = 1  # needed in a window before it is flushed: they cost twice as much as a row

    def next_sample(self, step: int) -> int:
        """Return the next step to sample: `every` steps later, rounded up to a multiple of a round number."""
        grid = on_ladder(self.every / 4)
        following = -(-(step + self.every) // grid) * grid
        return min(following, step + LONGEST) if self.every <= LONGEST else following


LONGEST: Final = 1000  # most steps between samples if half as many steps earn the cost of one


class Budget:
    """A token bucket: each second of training earns `max_overhead` seconds of monitoring. Pure: time is an argument.

    A sample is taken when its cost is earned. In debt it is taken when twice its cost is earned, and the other half
    pays off debt: no debt, such as that of the first steps or of a write to a slow disk, delays a sample any longer.
    A tenth of the credit is saved for bursts of consecutive samples, until the savings cover one burst.

    The expected cost of a sample is the median of the last three: a single slow sample is paid for, but not expected
    again. As it may be the first of many, the next sample waits until that cost is earned, but at most 1,000 steps.
    """

    FIRST: Final = 10  # number of samples at the start, one at every step
    BURST: Final = 32  # number of consecutive samples in a burst
    _DEBT_STEPS: Final = 50  # from the third on, only while monitoring has cost less than this many steps
    _SAVED: Final = 0.1  # share of the credit that is saved for bursts
    _ON_CREDIT: Final = 8  # number of consecutive samples in a burst while the first steps may make debt
    _FOR_CHECKS: Final = 0.2  # share of the credit for spot checks
    _FOR_SAMPLES: Final = 0.5  # the least share of the credit for samples, however much counting steps costs

    def __init__(self, max_overhead: float) -> None:
        if isinstance(max_overhead, bool) or not isinstance(max_overhead, int | float) or not 0 < max_overhead < 1:
            raise ValueError(f"max_overhead={max_overhead!r} must be above 0 and below 1, for instance 0.01")
        self._limit = max_overhead
        self._began = self._last = (0, 0.0, 0.0)  # step, time, seconds spent
        self._forfeited = 0.0  # credit beyond the cost of two bursts, which is dropped
        self._num_samples = 0
        self._burst_left = 0
        self._has_credit = False  # whether the credit covers one more sample
        self._is_apart = True  # whether there are other steps between the last two samples
        self._num_on_credit = 0  # number of samples in bursts that it did not cover
        self.is_covered = False  # whether the credit, or the debt that the first steps may make, covers one more sample
        self._step_seconds: deque[float] = deque(maxlen=5)  # without monitoring; the median ignores an evaluation
        self._costs: deque[float] = deque(maxlen=3)  # seconds per sample, without rows
        self._costs_of_rows: deque[float] = deque(maxlen=3)

    def start(self, step: int, now: float, spent: float) -> None:
        """Start the account: the training begins after this step. Arguments are as in `after_sample`."""
        self._began = self._last = (step, now, spent)

    def look_closely(self) -> bool:
        """Start a burst of consecutive samples. Returns whether the next step may be sampled.

        The savings pay for a burst. While the first steps may make debt, a short burst is possible without savings, but
        not right after another.
        """
        if not self._burst_left:
            self._burst_left = self.BURST if self._has_credit else self._ON_CREDIT if self._is_apart else 0
        return self.is_covered and self._burst_left > 0

    def checks_every(self, seconds: float) -> int:
        """Return the steps between spot checks that cost so many seconds each: they get a fifth of the credit."""
        earned_per_step = self._limit * statistics.median(self._step_seconds)
        return max(math.ceil(seconds / (self._FOR_CHECKS * earned_per_step)), 1)

    def after_sample(self, step: int, now: float, spent: float, *, on_rows: float, on_counting: float) -> Plan:
        """Account for a sample of this step, and return the plan for the next one.

        Args:
            now: time in seconds, from an arbitrary zero.
            spent: seconds that the monitor has taken since the beginning, on the host or on the device.
            on_rows: seconds of `spent` since the last sample that went into writing a row; 0 if none was written.
            on_counting: seconds of `spent` since the last sample that went into counting the steps in between.
        """
        last, self._last = self._last, (step, now, spent)
        self._num_samples += 1
        latest = max(spent - last[2], 0.0)
        num_steps = max(step - last[0], 1)
        self._is_apart = num_steps > 1
        self._step_seconds.append(max(now - last[1] - latest, 1e-9) / num_steps)
        latest = max(latest - on_rows - on_counting, 0.0)
        self._costs.append(latest)
        if on_rows:
            self._costs_of_rows.append(on_rows)
        cost, of_row = statistics.median_low(self._costs), statistics.median_low(self._costs_of_rows or [0.0])
        samples_per_row = min(max(round(2 * of_row / max(cost, 1e-9)), 1), self.BURST)
        of_row /= samples_per_row
        cost, latest = cost + of_row, latest + of_row
        step_seconds = statistics.median(self._step_seconds)
        earned_per_step = self._limit * step_seconds
        earned_per_step = max(earned_per_step - on_counting / num_steps, self._FOR_SAMPLES * earned_per_step)
        spent -= self._began[2]
        earned = self._limit * max(now - self._began[1] - spent, 0.0)
        credit = earned - spent - self._forfeited
        saved = min(self.BURST * cost, self._SAVED * earned)
        excess = max(credit - 2 * self.BURST * cost, 0.0)
        self._forfeited, credit = self._forfeited + excess, credit - excess
        every = self._steps_until_earned(cost, credit, saved, earned_per_step)
        if latest > cost:
            every = max(every, min(self._steps_until_earned(latest, credit, saved, earned_per_step), LONGEST))
        is_affordable = spent + cost <= self._DEBT_STEPS * step_seconds
        # One-time costs fall on the first sample: the second one shows the usual cost.
        if self._num_samples < 2 or (self._num_samples < self.FIRST and is_affordable):
            every = 1
        self._has_credit = credit >= cost
        self.is_covered = self._has_credit or (is_affordable and self._num_on_credit < self.BURST)
        if self._burst_left and self.is_covered:
            self._burst_left, every = self._burst_left - 1, 1
            self._num_on_credit += not self._has_credit
        else:
            self._burst_left = 0
        return Plan(every, samples_per_row)

    def _steps_until_earned(self, cost: float, credit: float, saved: float, earned_per_step: float) -> int:
        if credit < 0:
            needed = cost + min(-credit, cost)
        elif credit < saved:
            needed = cost / (1 - self._SAVED)
        else:
            needed = cost - (credit - saved)
        return max(math.ceil(needed / earned_per_step - 1e-6), 1)
