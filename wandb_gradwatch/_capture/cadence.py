"""When to sample, when to take a histogram, when to flush: all counted in optimizer steps."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Integral
from typing import Final

SampleEvery = int | Callable[[int], int] | None


@dataclass(frozen=True)
class Cadence:
    """What the user asked for.

    Args:
        sample_every: measure every n-th step; a function gives n for a step, 0 for none; None: a budget decides.
        log_every: flush at every n-th step.
        histogram_every: take a histogram every n-th step, rounded up to a sample; None: for every flush; 0: never.

    Raises:
        ValueError: a cadence that is not a positive whole number.
    """

    sample_every: SampleEvery = 1
    log_every: int = 50
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
        value = self.sample_every(step)
        value = int(value) if isinstance(value, bool) else value
        return _whole(value, 0, f"sample_every({step}) = {value!r}", "0 or more")

    def next_flush(self, step: int) -> int:
        """The first step from this one on at which a window may be flushed."""
        return -(-step // self.log_every) * self.log_every

    def histogram_due(self, step: int, *, last: int, following: int, first_of_window: bool) -> bool:
        """Whether a measured step also gets a histogram.

        By default that is the last sample before each flush, and the first of the window, so that a window that is
        flushed early has one too (`keeps_newest_histogram`: the later one replaces it).

        Args:
            step: a measured one.
            last: the step measured before it.
            following: the step that is probably measured next.
            first_of_window: whether no other sample is in the window.
        """
        if self.histogram_every == 0:
            return False
        if self.histogram_every is None:
            return first_of_window or following > self.next_flush(step)
        return step // self.histogram_every != last // self.histogram_every

    @property
    def keeps_newest_histogram(self) -> bool:
        """Whether a new histogram replaces the window's, rather than being added to it."""
        return self.histogram_every is None


def _whole(value: object, least: int, asked: str, what: str) -> int:
    if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
        raise ValueError(f"{asked} must be {what}")
    return int(value)  # numpy's whole numbers are welcome


def on_ladder(steps: float) -> int:
    """The largest of 1, 2, 5, 10, 20, 50, ... that is not above this number of steps."""
    decade = int(10 ** math.floor(math.log10(max(steps, 1.0))))
    return next(factor * decade for factor in (5, 2, 1) if factor * decade <= max(steps, 1.0))


@dataclass(frozen=True)
class Plan:
    """What a budget allows from a sample on.

    Args:
        every: steps to the next sample.
        samples_per_row: a window is not flushed before it has this many: a row costs as much as they do.
    """

    every: int = 1
    samples_per_row: int = 1

    def next_sample(self, step: int) -> int:
        """The step to be sampled after this one: a multiple of a round number, never too early."""
        grid = on_ladder(self.every)
        return -(-(step + self.every) // grid) * grid


class Budget:
    """A bucket of credit: a second of training earns `max_overhead` seconds of monitoring. Pure: time is an argument.

    A sample is planned for when its cost is covered. The first steps are sampled on credit, and the debt is paid back
    with at least half of what is earned. A tenth of what is earned is put aside for bursts of consecutive samples,
    until that is enough for one.

    Args:
        max_overhead: the monitor's seconds per second of training, 0.01 for one percent.

    Raises:
        ValueError: the limit is not between 0 and 1.
    """

    FIRST: Final = 10  # steps, all sampled
    BURST: Final = 32  # consecutive samples
    _DEBT_STEPS: Final = 50  # the first samples may take as long as this many steps
    _DEBT_SECONDS: Final = 0.25  # or this long, which nobody notices
    _SAVED: Final = 0.1  # of what is earned
    _WEIGHT: Final = 0.2  # of the newest sample in the averages

    def __init__(self, max_overhead: float) -> None:
        if isinstance(max_overhead, bool) or not isinstance(max_overhead, int | float) or not 0 < max_overhead < 1:
            raise ValueError(f"max_overhead={max_overhead!r} must be a share between 0 and 1, for instance 0.01")
        self._limit = max_overhead
        self._began: tuple[int, float, float] | None = None  # step, time, seconds spent
        self._last = (0, 0.0, 0.0)
        self._forfeited = 0.0  # credit that no burst could use up
        self._num_samples = 0
        self._burst_left = 0
        self._step_seconds: deque[float] = deque(maxlen=5)  # without us; its median ignores an evaluation in between
        self._cost: float | None = None  # seconds of a sample, its share of the rows included
        self._cost_without_row: float | None = None
        self._cost_of_row = 0.0

    def start(self, step: int, now: float, spent: float) -> None:
        """The training begins after this step."""
        self._began = self._last = (step, now, spent)

    def look_closely(self) -> None:
        """Something is unusual: spend what was put aside on consecutive samples."""
        self._burst_left = self.BURST

    def after_sample(self, step: int, now: float, spent: float, *, wrote_row: bool) -> Plan:
        """What to do after a sample.

        Args:
            step: the sample's.
            now: seconds, from any zero.
            spent: seconds, by the monitor since the beginning, on the host or on the device.
            wrote_row: whether a row was written between the last sample and this one.
        """
        assert self._began is not None
        last, self._last = self._last, (step, now, spent)
        self._num_samples += 1
        latest = max(spent - last[2], 0.0)
        per_step = max(now - last[1] - latest, 1e-9) / max(step - last[0], 1)
        self._step_seconds.append(per_step)
        self._learn_cost(latest, wrote_row=wrote_row)
        assert self._cost is not None
        cost, earned_per_step = max(self._cost, latest), self._limit * statistics.median(self._step_seconds)
        spent -= self._began[2]
        earned = self._limit * max(now - self._began[1] - spent, 0.0)
        credit = earned - spent - self._forfeited
        saved = min(self.BURST * cost, self._SAVED * earned)
        if credit > 2 * self.BURST * cost:
            self._forfeited += credit - 2 * self.BURST * cost
            credit = 2 * self.BURST * cost
        every = self._steps_until_covered(cost, credit, saved, earned_per_step)
        allowed = max(self._DEBT_STEPS * earned_per_step / self._limit, self._DEBT_SECONDS)
        if self._num_samples < self.FIRST and spent + cost <= allowed:
            every = 1
        if self._burst_left and credit >= cost:
            self._burst_left, every = self._burst_left - 1, 1
        else:
            self._burst_left = 0
        return Plan(every, self._samples_per_row())

    def _steps_until_covered(self, cost: float, credit: float, saved: float, earned_per_step: float) -> int:
        if credit < 0:
            needed = cost + max(min(-credit, cost), -credit / 4)
        elif credit < saved:
            needed = cost / (1 - self._SAVED)
        else:
            needed = cost - (credit - saved)
        return max(math.ceil(needed / earned_per_step - 1e-6), 1)

    def _learn_cost(self, latest: float, *, wrote_row: bool) -> None:
        self._cost = self._average(self._cost, latest)
        if not wrote_row:
            self._cost_without_row = self._average(self._cost_without_row, latest)
        elif self._cost_without_row is not None:
            self._cost_of_row = self._average(self._cost_of_row, max(latest - self._cost_without_row, 0.0))

    def _samples_per_row(self) -> int:
        if not self._cost_without_row:
            return 1 if self._num_samples < self.FIRST else 2  # to see what a sample costs without a row
        return min(max(round(self._cost_of_row / self._cost_without_row), 1), self.BURST)

    def _average(self, old: float | None, new: float) -> float:
        return new if old is None else old + self._WEIGHT * (new - old)
