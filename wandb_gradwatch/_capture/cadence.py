"""When to sample, when to take a histogram, when to flush: all counted in optimizer steps."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass
from numbers import Integral
from typing import Final

from .._runtime.notices import CannotWatchError

SampleEvery = int | Callable[[int], int] | None


@dataclass(frozen=True)
class Cadence:
    """What the user asked for.

    Raises:
        ValueError: a cadence that is not a positive whole number.
    """

    # Measure every n-th step; a function gives n for a step, 0 for none; None: a budget decides
    sample_every: SampleEvery = 1
    log_every: int = 50  # flush at every n-th step
    # Take a histogram every n-th step, rounded up to a sample; None: for every flush; 0: never
    histogram_every: int | None = None

    def __post_init__(self) -> None:
        for argument, least in (("sample_every", 1), ("log_every", 1), ("histogram_every", 0)):
            value = getattr(self, argument)
            if (value is None and argument != "log_every") or (callable(value) and argument == "sample_every"):
                continue
            what = f"a whole number of optimizer steps, at least {least}"
            object.__setattr__(self, argument, _whole(value, least, f"{argument}={value!r}", what))

    def every(self, step: int) -> int | None:
        """The cadence that was asked for at this step: measured if it divides the step; 0: not measured; None: open."""
        if not callable(self.sample_every):
            return self.sample_every
        try:
            value = self.sample_every(step)
        except Exception as error:
            raise CannotWatchError(f"sample_every({step}) raised {error!r}") from error
        value = int(value) if isinstance(value, bool) else value
        return _whole(value, 0, f"sample_every({step}) = {value!r}", "a whole number, at least 0")

    def next_flush(self, step: int) -> int:
        """The first step from this one on at which a window may be flushed."""
        return -(-step // self.log_every) * self.log_every

    def histogram_due(self, step: int, *, last: int, is_first: bool, is_last: bool) -> bool:
        """Whether a measured step also gets a histogram; `last` is the step measured before this one.

        By default that is the last sample before each flush, as far as that is known, and the first of the window, so
        that a window that is flushed early has one too, which the later one replaces.
        """
        if self.histogram_every == 0:
            return False
        if self.histogram_every is None:
            return is_first or is_last
        return step // self.histogram_every != last // self.histogram_every


def _whole(value: object, least: int, asked: str, what: str) -> int:
    if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
        raise CannotWatchError(f"{asked} must be {what}")
    return int(value)  # numpy's whole numbers are welcome


def on_ladder(steps: float) -> int:
    """The largest of 1, 2, 5, 10, 20, 50, ... that is not above this number of steps."""
    decade = int(10 ** math.floor(math.log10(max(steps, 1.0))))
    return next(factor * decade for factor in (5, 2, 1) if factor * decade <= max(steps, 1.0))


@dataclass(frozen=True)
class Plan:
    """What a budget allows from a sample on."""

    every: int = 1  # steps to the next sample
    samples_per_row: int = 1  # a window is not flushed before it has this many: a row costs as much as they do

    def next_sample(self, step: int) -> int:
        """The step to be sampled after this one: a multiple of a round number, never too early."""
        grid = on_ladder(self.every / 4)
        following = -(-(step + self.every) // grid) * grid
        return min(following, step + LONGEST) if self.every <= LONGEST else following


LONGEST: Final = 1000  # steps between samples whose cost is earned in half of that, whatever came before


class Budget:
    """A bucket of credit: a second of training earns `max_overhead` seconds of monitoring. Pure: time is an argument.

    A sample is taken when what it costs is earned, and in debt when that is earned twice: half of it pays. So whatever
    a debt comes from, the first steps or a write to a slow disk, the next sample is never further away than that.
    A tenth of what is earned is put aside for bursts of consecutive samples, until that is enough for one.

    What a sample costs is the middle one of the last three: what takes long once is paid, and not expected again. A
    sample that took longer than expected may be the first of many: that is seen within 1,000 steps.

    Args:
        max_overhead: the monitor's seconds per second of training, 0.01 for one percent.

    Raises:
        ValueError: the limit is not between 0 and 1.
    """

    FIRST: Final = 10  # steps, all sampled
    BURST: Final = 32  # consecutive samples
    _DEBT_STEPS: Final = 50  # the first samples may take as long as this many steps, all but two
    _SAVED: Final = 0.1  # of what is earned
    _FOR_SAMPLES: Final = 0.5  # of it at least, however much of it counting steps takes

    def __init__(self, max_overhead: float) -> None:
        if isinstance(max_overhead, bool) or not isinstance(max_overhead, int | float) or not 0 < max_overhead < 1:
            raise ValueError(f"max_overhead={max_overhead!r} must be a share between 0 and 1, for instance 0.01")
        self._limit = max_overhead
        self._began: tuple[int, float, float] | None = None  # step, time, seconds spent
        self._last = (0, 0.0, 0.0)
        self._forfeited = 0.0  # credit that no burst could use up
        self._num_samples = 0
        self._burst_left = 0
        self._is_covered = False  # one more sample, after the last one
        self._step_seconds: deque[float] = deque(maxlen=5)  # without us; its median ignores an evaluation in between
        self._costs: deque[float] = deque(maxlen=3)  # seconds of samples, without rows
        self._costs_of_rows: deque[float] = deque(maxlen=3)

    def start(self, step: int, now: float, spent: float) -> None:
        """The training begins after this step."""
        self._began = self._last = (step, now, spent)

    def look_closely(self) -> bool:
        """Something is unusual: spend what was put aside on consecutive samples. Whether that covers the next one."""
        self._burst_left = self.BURST
        return self._is_covered

    def after_sample(self, step: int, now: float, spent: float, *, on_rows: float, on_counting: float) -> Plan:
        """What to do after a sample.

        Args:
            step: the sample's.
            now: seconds, from any zero.
            spent: seconds, by the monitor since the beginning, on the host or on the device.
            on_rows: seconds of these, since the last sample, that writing a row has taken; 0 where none was written.
            on_counting: the same, of the steps in between, in which nothing else was done.
        """
        assert self._began is not None
        last, self._last = self._last, (step, now, spent)
        self._num_samples += 1
        latest = max(spent - last[2], 0.0)
        num_steps = max(step - last[0], 1)
        self._step_seconds.append(max(now - last[1] - latest, 1e-9) / num_steps)
        latest = max(latest - on_rows - on_counting, 0.0)
        self._costs.append(latest)
        if on_rows:
            self._costs_of_rows.append(on_rows)
        cost, of_row = _middle(self._costs), _middle(self._costs_of_rows)
        samples_per_row = min(max(round(of_row / max(cost, 1e-9)), 1), self.BURST)
        of_row /= samples_per_row
        cost, latest = cost + of_row, latest + of_row
        step_seconds = statistics.median(self._step_seconds)
        earned_per_step = self._limit * step_seconds
        earned_per_step = max(earned_per_step - on_counting / num_steps, self._FOR_SAMPLES * earned_per_step)
        spent -= self._began[2]
        earned = self._limit * max(now - self._began[1] - spent, 0.0)
        credit = earned - spent - self._forfeited
        saved = min(self.BURST * cost, self._SAVED * earned)
        if credit > 2 * self.BURST * cost:
            self._forfeited += credit - 2 * self.BURST * cost
            credit = 2 * self.BURST * cost
        every = self._steps_until_earned(cost, credit, saved, earned_per_step)
        if latest > cost:
            every = max(every, min(self._steps_until_earned(latest, credit, saved, earned_per_step), LONGEST))
        is_affordable = spent + cost <= self._DEBT_STEPS * step_seconds
        # What takes long once does so at the first sample: the second shows what they cost.
        if self._num_samples < 2 or (self._num_samples < self.FIRST and is_affordable):
            every = 1
        self._is_covered = credit >= cost
        if self._burst_left and self._is_covered:
            self._burst_left, every = self._burst_left - 1, 1
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


def _middle(newest: Collection[float]) -> float:
    """The middle one, the lower one of two; 0 of none."""
    return sorted(newest)[(len(newest) - 1) // 2] if newest else 0.0
