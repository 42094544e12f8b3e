"""Decides what is due at the open step (a sample, a histogram, a comparison by value) and when the window is full."""

import math
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

from torch.distributed.distributed_c10d import Store

from .cadence import Budget, Cadence, Plan
from .clock import SampleClock
from .comparisons import Comparisons

_LOOK_AHEAD: Final = 50  # steps for which a sample_every function is evaluated in advance
_UNPLANNED: Final = Plan()
_FIRST: Final = 10  # number of samples at successive steps, and steps between samples, until rank 0 has made a plan
_KEPT: Final = 4  # number of plans kept in the store
_MOST_STEPS: Final = 1 << 31  # a plan is stored as one number


class Schedule:
    def __init__(self, clock: SampleClock, cadence: Cadence, budget: Budget) -> None:
        self._clock, self._cadence, self._budget = clock, cadence, budget
        self.is_open_ended = cadence.sample_every is None  # the budget decides which steps are sampled
        self.is_sampled = False  # whether the open step is sampled
        self.has_histogram = False  # whether the sample of the open step has a histogram
        self.comparisons = Comparisons(clock.step)
        self.last_sample = clock.step
        # Steps that the clock's number includes although this process has not counted them: equal on ranks whose
        # numbers mean the same steps.
        self.num_uncounted = clock.step
        self._plan = _UNPLANNED
        self.ranks: RankPlans | None = None  # shares the plan of rank 0; None: every rank uses its own
        self._next_sample = clock.open_step  # used if the budget decides
        # Since the last sample, not part of its cost: writing rows; and alerts, and counting the steps in between.
        self.seconds_on_rows = self.seconds_on_others = 0.0
        # Costs that the user has asked for, of guarded steps and of rows: the budget is not charged for them.
        self.seconds_left_out = 0.0
        self._first_step, self.num_measured = clock.step, 0  # the step before the first, and the measured steps since
        self._samples_in_window = 0
        self._last_row = clock.step  # at which the last window was flushed
        self._last_histogram: int | None = None  # the flush of the last window with a histogram

    def start(self, now: float, seconds_spent: float, *, before: float = 0.0) -> None:
        """Start at time `now`; see `Budget.start`."""
        self._budget.start(self._clock.step, now, seconds_spent, before=before)
        self.open()

    def open(self) -> None:
        """Decide what is due at the open step: it is new, or the schedule has changed."""
        step, cadence = self._clock.open_step, self._cadence
        if self.is_open_ended:
            self.is_sampled = step >= self._next_sample or step == self._exact_row(step)
            following: float = min(self._plan.next_sample(step), self._exact_row(step + 1))
        else:
            every = cadence.every(step)
            self.is_sampled, following = bool(every and step % every == 0), step + (every or 1)
        is_last = following > (flush := cadence.next_flush(step)) and self._row_is_due(flush)
        self.comparisons.open(step, is_last=is_last)
        self.has_histogram = self.is_sampled and cadence.histogram_due(
            step,
            last=self.last_sample,
            last_histogram=self._last_histogram,
            is_first=not self._samples_in_window,
            is_last=is_last,
        )

    def _exact_row(self, step: int) -> float:
        """The first step, this one included, that is measured for the sake of its row: the user has asked for it."""
        return self._cadence.next_flush(step) if self.is_open_ended and self._cadence.log_every else math.inf

    def _row_is_due(self, flush: int) -> bool:
        """Whether a window that has samples is flushed at this step, at which windows may be flushed."""
        is_exact = self._cadence.log_every is not None or not self.is_open_ended
        return is_exact or flush - self._last_row >= self._plan.row_every

    def window_is_full(self, step: int) -> bool:
        """Whether the window is flushed after this step, measured or not."""
        return self._samples_in_window > 0 and self._cadence.next_flush(step) == step and self._row_is_due(step)

    def wakes_at(self) -> int:
        """Return the next step that is sampled or ends a window: nothing is due at the steps before it."""
        first, every = self._clock.open_step, self._cadence.sample_every
        if every is None:
            sample = int(min(self._next_sample, self._exact_row(first)))
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
        self.num_measured += 1
        self.comparisons.add_sample(step, skipped=skipped)
        if self.is_open_ended:
            on_rows, on_others = self.seconds_on_rows, self.seconds_on_others
            if self._cadence.log_every is not None:
                self.seconds_left_out, on_rows = self.seconds_left_out + on_rows, 0.0
            left_out = self.seconds_left_out
            own = self._budget.after_sample(
                step,
                now - left_out,
                seconds_spent - left_out,
                on_rows=on_rows,
                on_others=on_others,
                last_row=self._last_row,
            )
            self._plan = own if self.ranks is None else self._plan_of_ranks(step, own, must_agree=must_agree)
            self._next_sample = self._plan.next_sample(step)
        if self.has_histogram:
            self._last_histogram = self._cadence.next_flush(step)
        self.last_sample, self.seconds_on_rows, self.seconds_on_others = step, 0.0, 0.0

    @property
    def num_steps(self) -> int:
        """The number of steps since the start, or since a state was loaded."""
        return self._clock.step - self._first_step

    def _plan_of_ranks(self, step: int, own: Plan, *, must_agree: bool) -> Plan:
        assert self.ranks is not None
        # Once between two possible rows, whether or not a window ends: the user may flush on one rank alone.
        if self._cadence.next_flush(step) > self._cadence.next_flush(self.last_sample):
            # A plan takes effect at the next exchange, and holds until the one after it.
            num_steps = 2 * max(self._cadence.next_flush(1), own.every)
            own = replace(own, every=self._budget.pace(num_steps))
            self._plan = self.ranks.exchange(step, own, must_agree=must_agree) or self._plan
        if self._plan is _UNPLANNED and self.comparisons.num_updates >= _FIRST:  # at once if a run is resumed
            return Plan(every=_FIRST)  # until the first plan of rank 0 takes effect
        return self._plan

    def begin_window(self, *, is_full: bool = True) -> None:
        """Begin a new window: the last one was flushed or dropped, `is_full` unless the user has flushed it.

        Ranks with one cadence end their next window at the same step, even if the user has flushed on one rank only.
        """
        if is_full or self.ranks is None:
            self._samples_in_window, self._last_row = 0, self._clock.step
        self.open()

    def look_closely(self) -> None:
        """Sample the next steps one by one, as far as the budget allows, because something is unusual."""
        is_allowed = self._budget.look_closely()
        if is_allowed and self.is_open_ended and self.ranks is None and not self.is_sampled:
            self._next_sample = min(self._next_sample, self._clock.open_step + 1)

    def state_dict(self) -> dict[str, Any]:
        """The step and the facts learned about the loop, as plain numbers."""
        return {
            "step": self._clock.step,
            "trust_versions": self.comparisons.trusts_versions,
            "num_samples": self.comparisons.num_updates,
            "samples_in_window": self._samples_in_window,
            "last_histogram": self._last_histogram,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.num_uncounted += int(state["step"]) - self._clock.step
        self._clock.step = int(state["step"])
        self.comparisons.resume(
            self._clock.step, int(state["num_samples"]), trusts_versions=bool(state["trust_versions"])
        )
        self._samples_in_window = int(state["samples_in_window"])
        last_histogram = state["last_histogram"]
        self._last_histogram = None if last_histogram is None else int(last_histogram)
        self.last_sample = self._clock.step
        self._next_sample, self._last_row = self._clock.open_step, self._clock.step
        self._first_step, self.num_measured = self._clock.step, 0
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
            store.set(key, f"{own.every * _MOST_STEPS + min(own.row_every, _MOST_STEPS - 1)}")
            self._published.append(key)
            if len(self._published) > _KEPT:
                store.delete_key(self._published.popleft())
        if last is None:
            return None
        # `get` would wait for a key that is deleted meanwhile; adding 0 reads the number without waiting.
        number = store.add(last, 0) if store.check([last]) else 0
        if not number:
            return None if must_agree else own
        return Plan(*divmod(number, _MOST_STEPS))
