"""Decides what is due at the open step (a sample, a histogram, a comparison by value) and when the window is full."""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Final

from torch.distributed.distributed_c10d import Store

from .._runtime.autograd import Entry
from .._runtime.sharding import is_partial
from .cadence import LONGEST, Budget, Cadence, Plan
from .clock import SampleClock
from .spot_check import SpotCheck

# Old code clips through `p.grad.data`, which the version counter does not show. So the first samples and the last one
# of every window are compared by value; after one difference every sample is. If flushes follow each other closely,
# each compares another part of the gradients: all of them would be a second pass over the gradients for every row.
_COMPARED_SAMPLES: Final = 3  # number of samples at the start that are compared whole
_COMPARED_EVERY: Final = 5  # least number of steps between compared samples after that
_COMPARED_WITHIN: Final = 50  # steps within which every gradient is compared once
_LOOK_AHEAD: Final = 50  # steps for which a sample_every function is evaluated in advance
_UNPLANNED: Final = Plan()
_WAIT: Final = timedelta(seconds=60)  # time limit for a rank 0 that is a whole window behind
_KEPT: Final = 4  # number of plans kept in the store


class Schedule:
    def __init__(self, clock: SampleClock, cadence: Cadence, budget: Budget) -> None:
        self._clock, self._cadence, self._budget = clock, cadence, budget
        self.is_open_ended = cadence.sample_every is None  # the budget decides which steps are sampled
        self.is_sampled = False  # whether the open step is sampled
        self.has_histogram = False  # whether the sample of the open step has a histogram
        # One in this many gradients that look unmodified is compared by value at the open step; 0: none.
        self._compared_one_in = 0
        self._last_compared, self._num_compared = clock.step, 0  # step of the last compared sample, and their number
        self.trusts_versions = True  # no gradient has been modified so far without a new version
        self.last_sample = clock.step
        self._plan = self._own_plan = _UNPLANNED
        self.ranks: RankPlans | None = None  # shares the plan of rank 0; None: every rank uses its own
        self._last_found = -LONGEST  # the step that a spot check has found last
        self._next_sample = clock.open_step  # used if the budget decides
        # Since the last sample, not part of its cost: writing rows, and counting the steps in between.
        self.seconds_on_rows = self.seconds_on_counting = 0.0
        # Costs that do not depend on the cadence, of guarded steps and of alerts: the budget is not charged for them.
        self.seconds_left_out = 0.0
        self._num_samples = 0  # samples with an update: a loss scaler's skipped step shows no clipping
        self._samples_in_window = 0

    def start(self, now: float, seconds_spent: float) -> None:
        """Start at time `now`, in seconds from an arbitrary zero. The monitor has already taken `seconds_spent`."""
        self._budget.start(self._clock.step, now, seconds_spent)
        self.open()

    def open(self) -> None:
        """Decide what is due at the open step: it is new, or the schedule has changed."""
        step, cadence = self._clock.open_step, self._cadence
        if self.is_open_ended:
            self.is_sampled, following = step >= self._next_sample, self._plan.next_sample(step)
        else:
            every = cadence.every(step)
            self.is_sampled, following = bool(every and step % every == 0), step + (every or 1)
        # If samples are further apart than flushes, a window needs several: the last is the one that fills it.
        is_last = following > cadence.next_flush(step) and self._samples_in_window + 1 >= self._plan.samples_per_row
        is_compared_whole = not self.trusts_versions or self._num_samples < _COMPARED_SAMPLES
        steps = step - self._last_compared
        of_flushed = max(_COMPARED_WITHIN // steps, 1) if is_last and steps >= _COMPARED_EVERY else 0
        self._compared_one_in = 1 if is_compared_whole else of_flushed
        self.has_histogram = self.is_sampled and cadence.histogram_due(
            step, last=self.last_sample, is_first=not self._samples_in_window, is_last=is_last
        )

    def compared(self, unmodified: Sequence[Entry]) -> Sequence[Entry]:
        """Return which of the open step's gradients that look unmodified are compared by value with their rows.

        A part is enough: code that clips through `.data` modifies all of them. Partial sums over ranks are left out:
        their values need a collective, but each rank decides on its own how much it compares.
        """
        if not self._compared_one_in:
            return ()
        unmodified = [entry for entry in unmodified if not is_partial(entry[1].grad)]
        if not unmodified:
            return ()
        one_in = min(self._compared_one_in, len(unmodified))
        turn = self._num_compared % one_in
        # Neighbours, because their rows are a slice on the device, which needs no upload of indices.
        return unmodified[len(unmodified) * turn // one_in : len(unmodified) * (turn + 1) // one_in]

    def window_is_full(self, step: int) -> bool:
        """Whether the window is flushed after this step, measured or not."""
        return self._samples_in_window >= self._plan.samples_per_row and self._cadence.next_flush(step) == step

    def wakes_at(self) -> int:
        """Return the next step that is sampled or ends a window: nothing is due at the steps before it."""
        first, every = self._clock.open_step, self._cadence.sample_every
        if every is None:
            sample = self._next_sample
        elif callable(every):
            ahead = range(first, first + _LOOK_AHEAD)
            due = (step for step in ahead if (n := self._cadence.every(step)) and step % n == 0)
            sample = next(due, first + _LOOK_AHEAD)
        else:
            sample = -(-first // every) * every
        flush = self._cadence.next_flush(first)
        return min(sample, flush) if self.window_is_full(flush) else sample

    def add_sample(self, step: int, *, skipped: bool, now: float, seconds_spent: float) -> None:
        """Record that a sample of this step was committed, and plan the next one.

        `skipped`: a loss scaler has skipped the update. `now` and `seconds_spent` are those of `Budget.after_sample`.
        """
        self._samples_in_window += 1
        self._num_samples += not skipped
        if self._compared_one_in:
            self._last_compared, self._num_compared = step, self._num_compared + 1
        if self.is_open_ended:
            charged = seconds_spent - self.seconds_left_out
            on_rows, on_counting = self.seconds_on_rows, self.seconds_on_counting
            self._own_plan = self._budget.after_sample(step, now, charged, on_rows=on_rows, on_counting=on_counting)
            if self.ranks is None:
                self._plan = self._own_plan
            elif self._plan is _UNPLANNED and self._num_samples >= Budget.FIRST:  # at once if a run is resumed
                self._plan = Plan(every=Budget.FIRST)  # until the first plan of rank 0 takes effect
            # What a spot check has found is sampled twice, even in debt: the second sample shows whether it stays.
            self._next_sample = step + 1 if step == self._last_found else self._plan.next_sample(step)
        self.last_sample, self.seconds_on_rows, self.seconds_on_counting = step, 0.0, 0.0

    def end_window(self, *, must_agree: bool) -> None:
        """Let the plan of rank 0 take effect: the window has been flushed at the same step on all ranks."""
        if self.ranks is not None:
            self._plan = self.ranks.exchange(self._own_plan, must_agree=must_agree) or self._plan
            self._next_sample = self._plan.next_sample(self.last_sample)

    def begin_window(self) -> None:
        """Begin a new window: the last one was flushed or dropped."""
        self._samples_in_window = 0
        self.open()

    def take_back(self, num_steps: int) -> None:
        """Undo steps that turned out not to be updates."""
        self._next_sample -= num_steps
        self.last_sample -= num_steps
        self.begin_window()

    def look_closely(self) -> None:
        """Sample the next steps one by one, as far as the budget's savings allow, because something is unusual."""
        is_covered = self._budget.look_closely()
        if is_covered and self.is_open_ended and self.ranks is None and not self.is_sampled:
            self._next_sample = min(self._next_sample, self._clock.open_step + 1)

    @property
    def may_add_samples(self) -> bool:
        """Whether a spot check may add samples: the budget of this process decides alone which steps are sampled."""
        return self.is_open_ended and self.ranks is None and self.trusts_versions

    def plan(self, check: SpotCheck) -> None:
        """Decide how often a spot check is made until the next sample, and whether the budget covers what it finds."""
        is_rare = self._clock.step >= self._last_found + LONGEST  # one sample in so many steps, even in debt
        check.every, check.is_covered = self._budget.checks_every(check.seconds), self._budget.is_covered or is_rare

    def sample_now(self) -> None:
        """Sample the step that is opened next, and as many after it as the budget allows: a spot check has found it."""
        self._next_sample = self._last_found = self._clock.open_step
        self._budget.look_closely()

    def distrust_versions(self) -> None:
        """Compare every sample by value from now on: a gradient was modified without a new version."""
        self.trusts_versions, self._compared_one_in = False, 1

    def state_dict(self) -> dict[str, Any]:
        """The step and the facts learned about the loop, as plain numbers."""
        return {
            "step": self._clock.step,
            "trust_versions": self.trusts_versions,
            "num_samples": self._num_samples,
            "samples_in_window": self._samples_in_window,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._clock.step = int(state["step"])
        self.trusts_versions = bool(state["trust_versions"])
        self._num_samples = int(state["num_samples"])
        self._samples_in_window = int(state["samples_in_window"])
        self.last_sample = self._last_compared = self._clock.step
        self._last_found = self._clock.step - LONGEST
        self._next_sample = self._clock.open_step
        self._budget.look_closely()  # the first steps show what the rollback or restart changed
        self.open()


class RankPlans:
    """One cadence for all ranks, which flush at the same steps: that of rank 0, which `leads`.

    The plan that rank 0 publishes at one flush takes effect at the following one: by then it has been in the store for
    a whole window, so that reading it does not wait. The keys in the store are the numbers of the flushes.
    """

    def __init__(self, store: Store, *, leads: bool) -> None:
        self._store, self._leads = store, leads
        self._num_flushes = 0

    def exchange(self, own: Plan, *, must_agree: bool) -> Plan | None:
        """Publish this rank's own plan if it leads. Returns the plan that takes effect now; None: the current one.

        If the plan of rank 0 is missing, wait for it if ranks `must_agree` (those with shards must sample the same
        steps), and raise after a minute; otherwise `own` takes effect.
        """
        number, self._num_flushes = self._num_flushes, self._num_flushes + 1
        if self._leads:
            self._store.set(str(number), f"{own.every} {own.samples_per_row}")
            if number >= _KEPT:
                self._store.delete_key(str(number - _KEPT))
        if not number:
            return None
        key = str(number - 1)
        if must_agree:
            self._store.wait([key], _WAIT)
        elif not self._store.check([key]):
            return own
        every, samples_per_row = map(int, self._store.get(key).split())
        return Plan(every, samples_per_row)
