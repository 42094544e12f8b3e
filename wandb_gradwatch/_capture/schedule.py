"""What is due at the open step: a sample, a histogram, a comparison by value; and what was learnt about the loop."""

from __future__ import annotations

from typing import Any, Final

from .cadence import Budget, Cadence, Plan
from .clock import SampleClock
from .rank_plans import RankPlans

# Old code clips through `p.grad.data`, which leaves no trace in the version counter. The first samples and every
# flushed one are compared by value; one difference there, and every sample is.
_COMPARED_SAMPLES: Final = 3
_LOOK_AHEAD: Final = 50  # steps that a function is asked about in advance
_UNPLANNED: Final = Plan()


class Schedule:
    """Answers for the open step of a clock.

    Args:
        clock: knows the open step.
        cadence: which steps are sampled and flushed.
        budget: says which steps are sampled where the cadence leaves that open.
    """

    def __init__(self, clock: SampleClock, cadence: Cadence, budget: Budget) -> None:
        self._clock = clock
        self._cadence = cadence
        self._budget = budget
        self._plan = self._own_plan = _UNPLANNED
        self._ranks: RankPlans | None = None
        self._next_sample = clock.open_step  # where the budget decides
        self._last_sample = clock.step
        self._asked = (-1, False)  # the last step that the cadence was asked about, and its answer
        self._seconds_on_rows = 0.0  # since the last sample
        self._seconds_left_out = 0.0
        self._trust_versions = True
        self._num_samples = 0  # with an update: what a loss scaler skips is not clipped
        self._samples_in_window = 0

    def start(self, now: float, seconds_spent: float) -> None:
        """The training begins: seconds from any zero, and those that the monitor has taken so far."""
        self._budget.start(self._clock.step, now, seconds_spent)

    # ---- the open step

    @property
    def is_sampled(self) -> bool:
        """Whether the open step is a sample."""
        return self.was_sampled(self._clock.step + 1)

    @property
    def is_open_ended(self) -> bool:
        """Whether a budget decides which steps are sampled."""
        return self._cadence.sample_every is None

    @property
    def has_histogram(self) -> bool:
        """Whether its sample has a histogram."""
        step = self._clock.open_step
        return self.is_sampled and self._cadence.histogram_due(
            step, last=self._last_sample, following=self._following(step), first_of_window=not self._samples_in_window
        )

    def _following(self, step: int) -> int:
        """The step that is probably sampled after this one."""
        return self._plan.next_sample(step) if self.is_open_ended else step + (self._cadence.every(step) or 1)

    @property
    def is_compared(self) -> bool:
        """Whether its gradients are compared by value with what was measured, though they look unmodified."""
        step = self._clock.open_step
        return (
            not self._trust_versions
            or self._num_samples < _COMPARED_SAMPLES
            or self._following(step) > self._cadence.next_flush(step)
        )

    # ---- closed steps

    def was_sampled(self, step: int) -> bool:
        """Whether a step is a sample: the open one, or the one that has closed last."""
        if self._cadence.sample_every is None:
            return step >= self._next_sample or step == self._last_sample
        if step != self._asked[0]:
            every = self._cadence.every(step)
            self._asked = (step, step % every == 0 if every else False)
        return self._asked[1]

    def window_is_full(self, step: int) -> bool:
        """Whether the window is flushed when this step is done, measured or not."""
        needed = self._plan.samples_per_row if self.is_open_ended else 1
        return self._samples_in_window >= needed and self._cadence.next_flush(step) == step

    def wakes_at(self) -> int:
        """The next step that is sampled, or done when a window is full: none of the steps before matters."""
        first = self._clock.open_step
        if self.is_open_ended:
            sample = self._next_sample
        elif callable(self._cadence.sample_every):
            sample = next(
                (step for step in range(first, first + _LOOK_AHEAD) if self.was_sampled(step)), first + _LOOK_AHEAD
            )
        else:
            every = self._cadence.sample_every or 1
            sample = -(-first // every) * every
        flush = self._cadence.next_flush(first)
        return min(sample, flush) if self.window_is_full(flush) else sample

    def add_sample(self, step: int, *, skipped: bool, now: float, seconds_spent: float) -> None:
        """A sample was committed.

        Args:
            step: the sample's.
            skipped: whether a loss scaler skipped its update.
            now: seconds, from any zero.
            seconds_spent: by the monitor since the beginning.
        """
        self._samples_in_window += 1
        self._num_samples += not skipped
        if self.is_open_ended:
            charged = seconds_spent - self._seconds_left_out
            self._own_plan = self._budget.after_sample(step, now, charged, on_rows=self._seconds_on_rows)
            if self._ranks is None:
                self._plan = self._own_plan
            elif self._plan is _UNPLANNED and self._num_samples >= Budget.FIRST:  # at once where a run goes on
                self._plan = Plan(every=Budget.FIRST)  # until rank 0 has said how many it can afford
            self._next_sample = self._plan.next_sample(step)
        self._last_sample, self._seconds_on_rows = step, 0.0

    def leave_out(self, seconds: float) -> None:
        """These were spent on what no cadence makes less: steps that are guarded, alerts. The budget is not charged."""
        self._seconds_left_out += seconds

    def add_rows(self, seconds: float) -> None:
        """These were spent on writing rows: no cost of a sample, but of as many as a row has."""
        self._seconds_on_rows += seconds

    def follow_rank_0(self, ranks: RankPlans) -> None:
        """Take every plan from there."""
        self._ranks = ranks

    def end_window(self, *, must_agree: bool) -> None:
        """The window is flushed at the same step on all ranks: the plan of rank 0 takes effect."""
        if self._ranks is not None and self.is_open_ended:
            self._plan = self._ranks.exchange(self._own_plan, must_agree=must_agree) or self._plan
            self._next_sample = self._plan.next_sample(self._last_sample)

    def steps_since_sample(self, step: int) -> int:
        """How many steps after the sample before this one is."""
        return step - self._last_sample

    def begin_window(self) -> None:
        """The window was flushed, or forgotten."""
        self._samples_in_window = 0

    def take_back(self, num_steps: int) -> None:
        """The last steps turned out to be none: they will be counted again."""
        self._next_sample -= num_steps
        self._last_sample -= num_steps
        self._asked = (-1, False)

    def look_closely(self) -> None:
        """Something is unusual: sample the next steps one by one, as far as the budget has put aside for that."""
        is_covered = self._budget.look_closely()
        if is_covered and self.is_open_ended and self._ranks is None and not self.is_sampled:
            self._next_sample = min(self._next_sample, self._clock.open_step + 1)

    @property
    def trusts_versions(self) -> bool:
        """Whether every gradient that was modified has shown it so far."""
        return self._trust_versions

    def distrust_versions(self) -> None:
        """A gradient was modified without a trace: compare every sample by value from now on."""
        self._trust_versions = False

    def state_dict(self) -> dict[str, Any]:
        """The step and what was learnt, in plain numbers."""
        return {
            "step": self._clock.step,
            "trust_versions": self._trust_versions,
            "num_samples": self._num_samples,
            "samples_in_window": self._samples_in_window,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state_dict()`."""
        self._clock.step = int(state["step"])
        self._trust_versions = bool(state["trust_versions"])
        self._num_samples = int(state["num_samples"])
        self._samples_in_window = int(state["samples_in_window"])
        self._last_sample, self._next_sample = self._clock.step, self._clock.open_step
        self._budget.look_closely()  # what a rollback or a restart has done shows in its first steps
