"""Closes samples: hands what was measured to the window, and tells the schedule what it has cost."""

import time

from .clock import Closed
from .measurer import DeviceTimer
from .open_sample import OpenSample
from .parts import CaptureParts
from .rest import Rest


class Commits:
    """Commits the samples that the clock closes, and ends the window where one is due."""

    def __init__(self, parts: CaptureParts, sample: OpenSample, rest: Rest, timer: DeviceTimer) -> None:
        self._parts, self._sample, self._rest, self._timer = parts, sample, rest, timer
        self._seconds_at_commit = 0.0
        self._settled = (0.0, 0.0, 0.0)  # at the last sample: seconds spent, seconds of the host, and of the device

    def commit(self, closed: Closed | None, *, is_inferred: bool = False) -> None:
        """Commit a closed sample and open the next one; None: no sample was closed. `is_inferred`: see OpenSample."""
        if closed is None:
            return
        parts, schedule, boundary = self._parts, self._parts.schedule, self._parts.boundary
        self._rest.sample_closed(closed)
        if parts.guard is not None:
            parts.guard.end_step(closed.step)
        if schedule.is_sampled:
            self._sample.close(closed, is_inferred=is_inferred)
            self._settled = self._account()
            now, spent = time.perf_counter(), self._settled[0]
            schedule.add_sample(
                closed.step, skipped=closed.skipped, now=now, seconds_spent=spent, must_agree=parts.merges_ranks
            )
        else:
            parts.loss.take()
            if parts.guard is not None:
                parts.window.discard()
                schedule.seconds_left_out += boundary.seconds_spent - self._seconds_at_commit  # on guarding
        self._seconds_at_commit = boundary.seconds_spent
        if schedule.window_is_full(closed.step):
            self.flush_window(is_full=True)
        self._sample.begin()

    def updated_unseen(self) -> None:
        """Close the sample of an update that follows from the gradients alone, as no optimizer steps.

        It may have used other tensors than `.grad`, as Keras' clipping does.
        """
        self._sample.updated_by_hand(())
        self.commit(self._parts.clock.update(), is_inferred=not self._parts.updates.in_hooks)

    def flush_window(self, *, is_full: bool = False) -> None:
        """End the window after the last committed sample; `is_full` unless the user asks for it."""
        self._parts.window.flush()
        self._parts.schedule.begin_window(is_full=is_full)

    @property
    def seconds_spent(self) -> float:
        """The seconds that monitoring has taken: for each sample the larger of the host's and of the device's.

        They work in parallel, and a training may be limited by the one now and by the other later.
        """
        return self._account()[0]

    def _account(self) -> tuple[float, float, float]:
        """Return the seconds spent, and those of the host and of the device alone."""
        in_hooks = self._parts.probes.seconds_spent + self._parts.forward_facts.seconds_spent
        host, device = self._parts.boundary.seconds_spent + in_hooks, self._timer.seconds()
        if self._rest.is_on:
            host += self._rest.seconds_spent
        spent, last_host, last_device = self._settled
        return spent + max(host - last_host, device - last_device), host, device
