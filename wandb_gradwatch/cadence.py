"""When to sample, when to take a histogram, when to flush: all counted in optimizer steps."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Cadence:
    """Three questions about a step number.

    Args:
        sample_every: measure every n-th step.
        log_every: flush at every n-th step.
        histogram_every: take a histogram every n-th step, rounded up to a sample; None: for every flush; 0: never.

    Raises:
        ValueError: a cadence that is not a positive whole number.
    """

    sample_every: int = 1
    log_every: int = 50
    histogram_every: int | None = None

    def __post_init__(self) -> None:
        for argument, least in (("sample_every", 1), ("log_every", 1), ("histogram_every", 0)):
            value = getattr(self, argument)
            if argument == "histogram_every" and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"{argument}={value!r} must be a whole number of optimizer steps, at least {least}")

    def sample_due(self, step: int) -> bool:
        """Whether this step is measured."""
        return step % self.sample_every == 0

    def flush_due(self, step: int) -> bool:
        """Whether the window is flushed when this step is done, measured or not."""
        return step % self.log_every == 0

    def histogram_due(self, step: int, *, first_of_window: bool) -> bool:
        """Whether a measured step also gets a histogram.

        By default that is the last sample before each flush, and the first of the window, so that a window that is
        flushed early has one too (`keeps_newest_histogram`: the later one replaces it).
        """
        if self.histogram_every == 0:
            return False
        if self.histogram_every is None:
            next_flush = -(-step // self.log_every) * self.log_every
            return first_of_window or step + self.sample_every > next_flush
        return step // self.histogram_every != (step - self.sample_every) // self.histogram_every

    @property
    def keeps_newest_histogram(self) -> bool:
        """Whether a new histogram replaces the window's, rather than being added to it."""
        return self.histogram_every is None
