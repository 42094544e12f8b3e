"""Decides what is due at the open step (a sample, a histogram, a comparison by value) and when the window is full."""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final

from torch.distributed.distributed_c10d import Store

from .._runtime.autograd import Entry
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
_KEPT: Final = 4  # number of plans kept in the store
_MAX_SAMPLES_PER_ROW: Final = 1 << 16  # above Budget.BURST: a plan is stored as one number


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
        # Steps that the clock's number includes although this process has not counted them: equal on ranks whose
        # numbers mean the same steps.
        self.num_uncounted = clock.step
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

        A part is enough: code that clips through `.data` modifies all of them.
        """
        if not self._compared_one_in or not unmodified:
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

    def add_sample(
        self, step: int, *, skipped: bool, now: float, seconds_spent: float, must_agree: bool = False
    ) -> None:
        """Record that a sample of this step was committed, and plan the next one.

        `skipped`: a loss scaler has skipped the update. `now` and `seconds_spent` are those of `Budget.after_sample`,
        `must_agree` is that of `RankPlans.exchange`.
        """
        self._samples_in_window += 1
        self._num_samples += not skipped
        if self._compared_one_in:
            self._last_compared, self._num_compared = step, self._num_compared + 1
        if self.is_open_ended:
            charged = seconds_spent - self.seconds_left_out
            on_rows, on_counting = self.seconds_on_rows, self.seconds_on_counting
            self._own_plan = self._budget.after_sample(step, now, charged, on_rows=on_rows, on_counting=on_counting)
            self._plan = self._own_plan if self.ranks is None else self._plan_of_ranks(step, must_agree=must_agree)
            # What a spot check has found is sampled twice, even in debt: the second sample shows whether it stays.
            self._next_sample = step + 1 if step == self._last_found else self._plan.next_sample(step)
        self.last_sample, self.seconds_on_rows, self.seconds_on_counting = step, 0.0, 0.0

    def _plan_of_ranks(self, step: int, *, must_agree: bool) -> Plan:
        assert self.ranks is not None
        # Once in `log_every` steps, whether or not a window ends: the user may flush on one rank alone.
        if step // self._cadence.log_every > self.last_sample // self._cadence.log_every:
            self._plan = self.ranks.exchange(step, self._own_plan, must_agree=must_agree) or self._plan
        if self._plan is _UNPLANNED and self._num_samples >= Budget.FIRST:  # at once if a run is resumed
            return Plan(every=Budget.FIRST)  # until the first plan of rank 0 takes effect
        return self._plan

    def begin_window(self, *, is_full: bool = True) -> None:
        """Begin a new window: the last one was flushed or dropped, `is_full` unless the user has flushed it.

        Ranks with one cadence end their next window at the same step, even if the user has flushed on one rank only.
        """
        if is_full or self.ranks is None:
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
        self.num_uncounted += int(state["step"]) - self._clock.step
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
    """One cadence for all ranks: that of rank 0, which `leads`. No rank waits.

    The ranks exchange plans at the same samples. A plan that rank 0 publishes at one of them takes effect at the next
    one, on all ranks: a rank whose gradients depend on rank 0 comes there after rank 0 has made all steps in between.
    The keys in the store are the steps at which the plans were published.

    Args:
        store: returns the keys that the ranks share; None if not every rank is known to watch.
    """

    def __init__(self, store: Callable[[], Store | None], *, leads: bool) -> None:
        self._store, self._leads = store, leads
        self._last: str | None = None  # the step of the last exchange
        self._published: deque[str] = deque()

    def exchange(self, step: int, own: Plan, *, must_agree: bool) -> Plan | None:
        """Publish this rank's own plan if it leads. Returns the plan that takes effect now; None: the current one.

        If rank 0 has published no plan, because it no longer watches, no other rank finds one either: all keep their
        current plan if they `must_agree` (those with shards must sample the same steps); otherwise `own` takes effect.
        """
        store, key = self._store(), str(step)
        last, self._last = self._last, key
        if store is None:
            return own
        if self._leads:
            store.set(key, f"{own.every * _MAX_SAMPLES_PER_ROW + own.samples_per_row}")
            self._published.append(key)
            if len(self._published) > _KEPT:
                store.delete_key(self._published.popleft())
        if last is None:
            return None
        # `get` would wait for a key that is deleted meanwhile; adding 0 reads the number without waiting.
        number = store.add(last, 0) if store.check([last]) else 0
        if not number:
            return None if must_agree else own
        return Plan(*divmod(number, _MAX_SAMPLES_PER_ROW))
