"""What is due at the open step: a sample, a histogram, a comparison by value; and what was learnt about the loop."""

from __future__ import annotations

from typing import Any, Final

from .cadence import Budget, Cadence
from .clock import SampleClock

# Old code clips through `p.grad.data`, which leaves no trace in the version counter. The first samples and every
# flushed one are compared by value; one difference there, and every sample is.
_COMPARED_SAMPLES: Final = 3


class Schedule:
    """Answers for the open step of a clock.

    Args:
        clock: knows the open step.
        cadence: which steps are sampled and flushed.
        budget: stretches the cadence where the monitor costs too much; None: it stays as it is.
    """

    def __init__(self, clock: SampleClock, cadence: Cadence, budget: Budget | None) -> None:
        self._clock = clock
        self._cadence = cadence
        self._budget = budget
        self._trust_versions = True
        self._num_samples = 0  # with an update: what a loss scaler skips is not clipped
        self._samples_in_window = 0

    # ---- the open step

    @property
    def is_sampled(self) -> bool:
        """Whether the open step is a sample."""
        return self._cadence.sample_due(self._clock.open_step)

    @property
    def has_histogram(self) -> bool:
        """Whether its sample has a histogram."""
        first_of_window = self._samples_in_window == 0
        return self.is_sampled and self._cadence.histogram_due(self._clock.open_step, first_of_window=first_of_window)

    @property
    def is_compared(self) -> bool:
        """Whether its gradients are compared by value with what was measured, though they look unmodified."""
        return (
            not self._trust_versions
            or self._num_samples < _COMPARED_SAMPLES
            or self._cadence.is_last_before_flush(self._clock.open_step)
        )

    # ---- closed steps

    def was_sampled(self, step: int) -> bool:
        """Whether an earlier step was a sample."""
        return self._cadence.sample_due(step)

    def window_is_full(self, step: int) -> bool:
        """Whether the window is flushed when this step is done."""
        return bool(self._samples_in_window) and self._cadence.flush_due(step)

    def add_sample(self, *, skipped: bool) -> None:
        """A sample was committed."""
        self._samples_in_window += 1
        self._num_samples += not skipped

    def begin_window(self) -> None:
        """The window was flushed, or forgotten."""
        self._samples_in_window = 0

    @property
    def trusts_versions(self) -> bool:
        """Whether every gradient that was modified has shown it so far."""
        return self._trust_versions

    def distrust_versions(self) -> None:
        """A gradient was modified without a trace: compare every sample by value from now on."""
        self._trust_versions = False

    @property
    def has_budget(self) -> bool:
        """Whether anything can stretch the cadence."""
        return self._budget is not None

    def stretch(self, step: int, now: float, seconds_spent: float) -> int:
        """Let the budget choose the cadence to go on with, after a sample: its sample_every.

        Args:
            step: the sample's.
            now: seconds, from any zero.
            seconds_spent: by the monitor since the beginning.
        """
        if self._budget is not None:
            self._cadence = self._budget.after_sample(self._cadence, step, now, seconds_spent)
        return self._cadence.sample_every

    def state_dict(self) -> dict[str, Any]:
        """What was learnt, in plain numbers."""
        return {
            "trust_versions": self._trust_versions,
            "num_samples": self._num_samples,
            "samples_in_window": self._samples_in_window,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state_dict()`."""
        self._trust_versions = bool(state["trust_versions"])
        self._num_samples = int(state["num_samples"])
        self._samples_in_window = int(state["samples_in_window"])
