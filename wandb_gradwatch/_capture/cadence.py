"""When to take a sample, when to take a histogram, and when to flush, all counted in optimizer steps."""

import math
import statistics
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Final

from .._runtime.notices import CannotWatchError

_LOG_EVERY: Final = 50  # steps
_ROWS_PER_HISTOGRAM: Final = 10

SampleEvery = int | Callable[[int], int] | None


@dataclass(frozen=True)
class Cadence:
    """The cadences that the user asked for."""

    # Measure every n-th step. A function maps a step to n, 0 for none. None: the budget decides.
    sample_every: SampleEvery = 1
    # Flush at every n-th step, which is measured if the budget decides about the other steps. None: at multiples of 50,
    # as far as the budget allows.
    log_every: int | None = None
    # Take a histogram at the first sample at or after every n-th step. None: for the first row and every tenth one. 0:
    # never.
    histogram_every: int | None = None

    def __post_init__(self) -> None:
        for argument, least in (("sample_every", 1), ("log_every", 1), ("histogram_every", 0)):
            value = getattr(self, argument)
            if value is None or (callable(value) and argument == "sample_every"):
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
        every = self.log_every or _LOG_EVERY
        return -(-step // every) * every

    def histogram_due(self, step: int, *, last: int, last_histogram: int | None, is_first: bool, is_last: bool) -> bool:
        """Whether a measured step also gets a histogram.

        By default the last sample of a window gets one, as far as it is known to be the last, and the first sample, for
        windows that are flushed early. The later histogram replaces the first one.

        Args:
            last: the previous measured step.
            last_histogram: the first possible flush after the last sample with a histogram; None without one.
            is_first: whether the step is the first sample of its window.
            is_last: whether it is known to be the last one.
        """
        if self.histogram_every == 0:
            return False
        if self.histogram_every is None:
            flush, every = self.next_flush(step), _ROWS_PER_HISTOGRAM * self.next_flush(1)
            is_due = last_histogram in (None, flush) or flush - last_histogram >= every
            return is_due and (is_first or is_last)
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
    row_every: int = 0  # least number of steps from the last row to the next one

    def next_sample(self, step: int) -> int:
        """Return the next step to sample: `every` steps later, rounded up to a multiple of a round number."""
        grid = on_ladder(self.every / 4)
        return -(-(step + self.every) // grid) * grid


class Budget:
    """Decides how often the training is measured. Pure: time is an argument.

    After t seconds of training, monitoring may have taken

        allowed(t) = max_overhead * t + min(1 s, (t + before) / 10)

    Here t does not contain monitoring itself, and `before` is the time from the start of the program to watch(). The
    first samples show what a sample costs. From then on the next one is taken at the step at which it is allowed, with
    enough kept back for the next row and for a burst of consecutive samples. After a burst, or a single slow write,
    half of what is earned pays for samples until that is restored. Rows may take two fifths of what is allowed.
    """

    START_SECONDS: Final = 1.0  # that monitoring may take in addition to its share, once per run
    START_SHARE: Final = 0.1  # largest share of the time so far that these seconds may be
    BURST: Final = 32  # number of consecutive samples after an unusual one
    _KEPT_SHARE: Final = 0.25  # largest share of what is allowed that is kept back
    _ROW_SHARE: Final = 0.4  # largest share of what is allowed that rows may take
    _OTHERWISE_SHARE: Final = 0.5  # share of what is earned that pays for samples until that is restored
    _NUM_EXPECTED: Final = 3  # number of the newest costs, whose median is expected again: a single slow one is not

    def __init__(self, max_overhead: float) -> None:
        if isinstance(max_overhead, bool) or not isinstance(max_overhead, int | float) or not 0 < max_overhead < 1:
            raise ValueError(f"max_overhead={max_overhead!r} must be above 0 and below 1, for instance 0.01")
        self._share = max_overhead
        self._before = 0.0  # seconds from the start of the program to watch()
        self._began = self._last = (0, 0.0, 0.0)  # step, time, seconds spent
        self._burst_left = 0
        self._covers_sample = False  # whether one more sample is allowed, without regard to what is kept back
        self._spent_on_rows = 0.0
        self._step_seconds: deque[float] = deque(maxlen=5)  # without monitoring; the median ignores an evaluation
        self._sample_costs: deque[float] = deque(maxlen=self._NUM_EXPECTED)  # seconds
        self._row_costs: deque[float] = deque(maxlen=self._NUM_EXPECTED)  # seconds

    def start(self, step: int, now: float, spent: float, *, before: float = 0.0) -> None:
        """Start the account: the training begins after this step.

        Args:
            now: time in seconds, from an arbitrary zero.
            spent: seconds that the monitor has taken so far.
            before: seconds from the start of the program to this call.
        """
        self._began = self._last = (step, now, spent)
        self._before = before

    def allowed(self, trained: float) -> float:
        """Return the seconds that monitoring may have taken after so many seconds of training."""
        return self._share * trained + min(self.START_SECONDS, self.START_SHARE * (trained + self._before))

    def look_closely(self) -> bool:
        """Start a burst of consecutive samples. Returns whether the first one is allowed."""
        self._burst_left = self._burst_left or self.BURST
        return self._covers_sample

    def after_sample(
        self, step: int, now: float, spent: float, *, on_rows: float, on_others: float, last_row: int
    ) -> Plan:
        """Account for a sample of this step, and return the plan for the next one.

        Args:
            now: time in seconds, from an arbitrary zero.
            spent: seconds that the monitor has taken since the beginning, on the host or on the device.
            on_rows: seconds of `spent` since the last sample that went into writing a row; 0 if none was written.
            on_others: seconds of `spent` since the last sample that are no cost of a sample either: counting the steps
                in between, and alerts. Otherwise few steps would be measured just when a fault occurs.
            last_row: the step of the last row.
        """
        last, self._last = self._last, (step, now, spent)
        taken = max(spent - last[2], 0.0)
        self._step_seconds.append(max(now - last[1] - taken, 1e-9) / max(step - last[0], 1))
        self._sample_costs.append(max(taken - on_rows - on_others, 0.0))
        self._spent_on_rows += on_rows
        if on_rows:
            self._row_costs.append(on_rows)
        spent -= self._began[2]
        trained = max(now - self._began[1] - spent, 0.0)
        allowed, of_sample, of_row = self.allowed(trained), _usual(self._sample_costs), _usual(self._row_costs)
        kept = self._kept(allowed)
        every = self._steps_until(min(spent + of_sample + kept, allowed + of_sample / self._OTHERWISE_SHARE), trained)
        on_rows_then = self._spent_on_rows + of_row
        row_in = self._steps_until(min(on_rows_then / self._ROW_SHARE, allowed + 2 * of_row / self._ROW_SHARE), trained)
        self._covers_sample = spent + of_sample <= allowed
        if len(self._sample_costs) == 1:
            every = 1  # one-time costs fall on the first sample: the second one shows the usual cost
        elif self._burst_left and self._covers_sample:
            self._burst_left, every = self._burst_left - 1, 1
        else:
            self._burst_left = 0
        return Plan(max(every, 1), step - last_row + row_in)

    def pace(self, num_steps: int) -> int:
        """Return the steps between samples that are allowed if all samples of the next steps keep the same distance.

        Args:
            num_steps: the number of steps for which the distance cannot be changed.
        """
        step_seconds, (_, now, spent) = statistics.median(self._step_seconds), self._last
        spent -= self._began[2]
        trained = max(now - self._began[1] - spent, 0.0)
        allowed, of_sample = self.allowed(trained + num_steps * step_seconds), _usual(self._sample_costs)
        earned_anyway = self._share * num_steps * step_seconds * self._OTHERWISE_SHARE
        earned = max(allowed - self._kept(allowed) - spent, earned_anyway)
        return max(math.ceil(num_steps * of_sample / earned), 1)

    def _kept(self, allowed: float) -> float:
        """Return the seconds kept back for the next row and for a burst."""
        return min(self.BURST * _usual(self._sample_costs) + _usual(self._row_costs), self._KEPT_SHARE * allowed)

    def _steps_until(self, seconds: float, trained: float) -> int:
        """Return after how many more steps monitoring may have taken so many seconds."""
        at_start = (seconds - self.START_SHARE * self._before) / (self._share + self.START_SHARE)
        at = max(at_start, (seconds - self.START_SECONDS) / self._share)  # inverts allowed()
        return max(math.ceil((at - trained) / statistics.median(self._step_seconds) - 1e-6), 0)


def _usual(costs: Sequence[float]) -> float:
    return statistics.median_low(costs or [0.0])
