"""What is due at the open step: a sample, a histogram, a comparison by value; and what was learnt about the loop."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Final

from torch.distributed.distributed_c10d import Store

from .._runtime.autograd import Entry
from .cadence import Budget, Cadence, Plan
from .clock import SampleClock

# Old code clips through `p.grad.data`, which leaves no trace in the version counter. The first samples and every
# flushed one are compared by value; one difference there, and every sample is. Where flushes follow each other closely
# each compares a part, another one every time: all of it would be a second pass over the gradients for every row.
_COMPARED_SAMPLES: Final = 3
_COMPARED_EVERY: Final = 5  # steps, at the most often
_COMPARED_WITHIN: Final = 50  # steps: every gradient once
_LOOK_AHEAD: Final = 50  # steps that a function is asked about in advance
_UNPLANNED: Final = Plan()
_WAIT: Final = timedelta(seconds=60)  # for a rank 0 that is a whole window behind, where ranks must not differ
_KEPT: Final = 4  # plans in the store


class Schedule:
    """Settles what is due at a step when that opens, so that nobody has to ask again while it is open."""

    def __init__(self, clock: SampleClock, cadence: Cadence, budget: Budget) -> None:
        self._clock = clock
        self._cadence = cadence
        self._budget = budget
        self.is_open_ended = cadence.sample_every is None  # the budget decides which steps are sampled
        self.is_sampled = False  # the open step
        self.has_histogram = False  # its sample
        # Of the open step's gradients that look unmodified one in so many is compared by value; 0: none.
        self._compared_one_in = 0
        self._last_compared, self._num_compared = clock.step, 0  # the newest sample of which any was; and how many
        self.trusts_versions = True  # every gradient that was modified has shown it so far
        self.last_sample = clock.step
        self._plan = self._own_plan = _UNPLANNED
        self.ranks: RankPlans | None = None  # where every plan is taken from
        self._next_sample = clock.open_step  # where the budget decides
        # Since the last sample: no cost of one, but of as many as a row has; and of the steps in between.
        self.seconds_on_rows = self.seconds_on_counting = 0.0
        # Spent on what no cadence makes less, steps that are guarded and alerts: the budget is not charged.
        self.seconds_left_out = 0.0
        self._num_samples = 0  # with an update: what a loss scaler skips is not clipped
        self._samples_in_window = 0

    def start(self, now: float, seconds_spent: float) -> None:
        """The training begins: seconds from any zero, and those that the monitor has taken so far."""
        self._budget.start(self._clock.step, now, seconds_spent)
        self.open()

    # ---- the open step

    def open(self) -> None:
        """Another step is open, or something else is known of it."""
        step, cadence = self._clock.open_step, self._cadence
        if self.is_open_ended:
            self.is_sampled, following = step >= self._next_sample, self._plan.next_sample(step)
        else:
            every = cadence.every(step)
            self.is_sampled, following = bool(every and step % every == 0), step + (every or 1)
        # Where a window has a few samples that are further apart than flushes, the next one is not the last of it.
        is_last = following > cadence.next_flush(step) and self._samples_in_window + 1 >= self._samples_needed
        is_compared_whole = not self.trusts_versions or self._num_samples < _COMPARED_SAMPLES
        steps = step - self._last_compared
        of_flushed = max(_COMPARED_WITHIN // steps, 1) if is_last and steps >= _COMPARED_EVERY else 0
        self._compared_one_in = 1 if is_compared_whole else of_flushed
        self.has_histogram = self.is_sampled and cadence.histogram_due(
            step, last=self.last_sample, is_first=not self._samples_in_window, is_last=is_last
        )

    def compared(self, unmodified: Sequence[Entry]) -> Sequence[Entry]:
        """Which gradients of the open step are compared by value with what was measured, of those that look unmodified.

        Any one of them shows what is done to all.
        """
        if not self._compared_one_in or not unmodified:
            return ()
        one_in = min(self._compared_one_in, len(unmodified))
        turn = self._num_compared % one_in
        # Neighbours, whose rows are found on a device without an upload.
        return unmodified[len(unmodified) * turn // one_in : len(unmodified) * (turn + 1) // one_in]

    @property
    def _samples_needed(self) -> int:
        """Before a window is full."""
        return self._plan.samples_per_row if self.is_open_ended else 1

    def window_is_full(self, step: int) -> bool:
        """Whether the window is flushed when this step is done, measured or not."""
        return self._samples_in_window >= self._samples_needed and self._cadence.next_flush(step) == step

    def wakes_at(self) -> int:
        """The next step that is sampled, or done when a window is full: none of the steps before matters."""
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

    # ---- what has happened

    def add_sample(self, step: int, *, skipped: bool, now: float, seconds_spent: float) -> None:
        """A sample of this step was committed; `skipped`: a loss scaler has left its update out.

        Args:
            now: seconds, from any zero.
            seconds_spent: by the monitor since the beginning.
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
            elif self._plan is _UNPLANNED and self._num_samples >= Budget.FIRST:  # at once where a run goes on
                self._plan = Plan(every=Budget.FIRST)  # until rank 0 has said how many it can afford
            self._next_sample = self._plan.next_sample(step)
        self.last_sample, self.seconds_on_rows, self.seconds_on_counting = step, 0.0, 0.0

    def end_window(self, *, must_agree: bool) -> None:
        """The window is flushed at the same step on all ranks: the plan of rank 0 takes effect."""
        if self.ranks is not None and self.is_open_ended:
            self._plan = self.ranks.exchange(self._own_plan, must_agree=must_agree) or self._plan
            self._next_sample = self._plan.next_sample(self.last_sample)

    def begin_window(self) -> None:
        """The window was flushed, or forgotten."""
        self._samples_in_window = 0
        self.open()

    def take_back(self, num_steps: int) -> None:
        """The last steps turned out to be none: they will be counted again."""
        self._next_sample -= num_steps
        self.last_sample -= num_steps
        self.begin_window()

    def look_closely(self) -> None:
        """Something is unusual: sample the next steps one by one, as far as the budget has put aside for that."""
        is_covered = self._budget.look_closely()
        if is_covered and self.is_open_ended and self.ranks is None and not self.is_sampled:
            self._next_sample = min(self._next_sample, self._clock.open_step + 1)

    def distrust_versions(self) -> None:
        """A gradient was modified without a trace: compare every sample by value from now on."""
        self.trusts_versions, self._compared_one_in = False, 1

    def state_dict(self) -> dict[str, Any]:
        """The step and what was learnt, in plain numbers."""
        return {
            "step": self._clock.step,
            "trust_versions": self.trusts_versions,
            "num_samples": self._num_samples,
            "samples_in_window": self._samples_in_window,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state_dict()`."""
        self._clock.step = int(state["step"])
        self.trusts_versions = bool(state["trust_versions"])
        self._num_samples = int(state["num_samples"])
        self._samples_in_window = int(state["samples_in_window"])
        self.last_sample = self._last_compared = self._clock.step
        self._next_sample = self._clock.open_step
        self._budget.look_closely()  # what a rollback or a restart has done shows in its first steps
        self.open()


class RankPlans:
    """One cadence for all ranks: rank 0 publishes what its budget allows, and all follow it from the next flush on.

    A flush happens at the same step everywhere. What rank 0 says at one flush takes effect at the following one: by
    then it has been in the store for a whole window, and reading it waits for nobody.

    Args:
        store: where ranks meet; nothing else has these keys, which are the numbers of the flushes.
        leads: whether this is rank 0.
    """

    def __init__(self, store: Store, *, leads: bool) -> None:
        self._store = store
        self._leads = leads
        self._num_flushes = 0
        self._published: Plan | None = None

    def exchange(self, own: Plan, *, must_agree: bool) -> Plan | None:
        """Publish this rank's plan, if it leads; return the one that takes effect now, None for the one in force.

        Args:
            own: what this rank's budget allows.
            must_agree: ranks that hold shards must sample the same steps; others go on alone if rank 0 says nothing.

        Raises:
            RuntimeError: ranks must agree, and rank 0 is not heard of.
        """
        number, self._num_flushes = self._num_flushes, self._num_flushes + 1
        if self._leads:
            self._store.set(str(number), f"{own.every} {own.samples_per_row}")
            if number >= _KEPT:
                self._store.delete_key(str(number - _KEPT))
            before, self._published = self._published, own
            return before
        key = str(number - 1)
        if number == 0:
            return None
        if must_agree:
            self._store.wait([key], _WAIT)
        elif not self._store.check([key]):
            return own
        every, samples_per_row = map(int, self._store.get(key).split())
        return Plan(every, samples_per_row)
