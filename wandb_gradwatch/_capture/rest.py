"""The rest between samples: the hooks on parameters are off, and the steps of optimizers are only counted."""

from threading import get_ident
from typing import Final

from torch.optim import Optimizer

from .._runtime.autograd import num_nodes_made
from .._runtime.backwards import BACKWARDS
from .._runtime.error_boundary import contained
from .._runtime.listeners import StepCounter
from .._runtime.steps import STEP_HOOKS, OptimizerTable
from .clock import Closed
from .open_sample import OpenSample
from .parts import CaptureParts
from .scaling import SCALERS, ScaledSteps

_REGULAR: Final = 4  # number of consecutive samples that show the pattern of steps
_LEAST: Final = 3  # least number of steps for which turning the hooks off and on pays
# Seconds to count a step, from `python -m benchmarks.counting`. They are not measured in the training, because reading
# the clock costs as much.
_COUNTING: Final = 11e-6
_STRAY: Final = 100  # nested steps of unknown optimizers after which the outer step is taken to have raised


class Rest(StepCounter):
    """Counts samples by the steps of optimizers, and ends before the next sample.

    It needs a regular pattern of steps: some optimizer had a part in every one of the last samples, or each sample was
    made by a single optimizer (as in a GAN). Anything else ends the rest, such as a step of another optimizer that
    updates watched parameters. In a training without an optimizer the hooks stay on.

    Few calls and few objects matter more here than little arithmetic: between two steps of a training all of this
    leaves the processor's caches.
    """

    def __init__(self, parts: CaptureParts, sample: OpenSample) -> None:
        self._parts, self._clock, self._sample, self._boundary = parts, parts.clock, sample, parts.boundary
        self._last: list[frozenset[int]] = []  # the keys of the optimizers that made the last samples
        self._pausing: frozenset[int] = frozenset()  # those that had no part in some sample after another one
        self._first_step = 0
        self._last_step = -1  # the last step that the rest counts
        self.is_on = False  # whether it counts

    @property
    def counter(self) -> "Rest | None":
        """This rest, while it counts."""
        return self if self.is_on else None

    @property
    def seconds_spent(self) -> float:
        """Seconds spent on counting since the rest began."""
        return (self._clock.step - self._first_step) * _COUNTING

    def sample_closed(self, closed: Closed) -> None:
        """Learn which optimizers have made a sample."""
        if self._last and (missing := self._last[-1] - closed.stepped):
            self._pause(missing)
        self._last = [] if closed.inside_backward else [*self._last[1 - _REGULAR :], closed.stepped]

    def _pause(self, keys: frozenset[int]) -> None:
        """Record that these optimizers have had no part in a sample, and forget those that were deleted."""
        of_key = self._parts.optimizers.of_key
        self._pausing = frozenset(key for key in self._pausing | keys if of_key(key) is not None)

    def is_worth_it(self) -> bool:
        """Whether the pattern of steps is regular and the next sample is some steps away."""
        parts, last = self._parts, self._last
        # `is_sampled` is that of the open step, or of the next one if no step is open
        if len(last) < _REGULAR or parts.schedule.is_sampled or parts.guard is not None or parts.window.sent:
            return False
        if parts.hooks.muted or parts.schedule.wakes_at() - parts.clock.open_step < _LEAST + bool(parts.clock.stepped):
            return False
        if parts.replay is not None and parts.replay.is_armed:  # the next step is run again
            return False
        if frozenset.intersection(*last) - self._pausing:
            return not parts.clock.stepped
        return all(len(stepped) == 1 for stepped in last)  # every step was a sample of its own

    def begin(self, optimizer: Optimizer) -> None:
        """Turn the hooks off after a step of this optimizer, if its steps fit the pattern."""
        parts = self._parts
        keys = frozenset[int]().union(*self._last)
        makers = {key: one for key in keys if (one := parts.optimizers.of_key(key)) is not None}
        if len(makers) < len(keys) or parts.optimizers.key(optimizer) not in keys:
            return
        parts.clock.discard()
        parts.take_off_hooks()
        parts.wiring.forget_gradients()
        self._first_step, self._last_step = self._clock.step, parts.schedule.wakes_at() - 1
        self._thread = get_ident()
        self._is_only_one = parts.optimizers.num_known == 1  # no other optimizer owns a watched parameter
        # The optimizers whose steps are counted, with their keys; a step of another one ends the rest.
        self._makers: OptimizerTable[tuple[int, ScaledSteps]] = OptimizerTable()
        for key, one in makers.items():
            self._makers[one] = key, SCALERS.steps_of(one)
        # The keys of those that step in every sample and complete it; without any, every step is a sample.
        self._leaders = frozenset.intersection(*self._last) - self._pausing
        self._made_last = self._leaders  # keys of the optimizers of the last sample; others may still join it
        self._stepped: frozenset[int] = frozenset()
        self._under_way: tuple[int, ScaledSteps] | None = None
        self._stepping = 0  # the id of the optimizer under way
        self._num_stray, self._stray_step = 0, -1
        self._switch(on=True)

    def end(self, *, before_step: bool = False) -> None:
        """Turn the hooks on again and open the next sample, whose gradients may already be there. Idempotent.

        `before_step`: because an optimizer is about to make a step that is not counted.
        """
        if self.is_on:
            self._switch(on=False)
            self._end(before_step=before_step)

    def _switch(self, *, on: bool) -> None:
        self.is_on = on
        for events in (STEP_HOOKS, BACKWARDS, SCALERS):
            events.counting_changes()

    @contained
    def _end(self, *, before_step: bool) -> None:
        parts = self._parts
        if before_step:
            parts.thread.moves_here()
        self._boundary.seconds_spent += self.seconds_spent
        parts.schedule.seconds_on_others += self.seconds_spent
        if self._clock.step > self._first_step:
            self._clock.previous = self._made_last  # a late optimizer may still join the last counted sample
        entries = parts.follow()
        self._sample.begin()
        if before_step and parts.last_node != num_nodes_made():
            # A forward has run since the last counted step, and perhaps a backward without any hook.
            self._sample.fresh.mark_present(entries)

    def begins(self, optimizer: Optimizer) -> bool:
        """An optimizer is about to step. Returns whether the rest goes on: the step is counted, or part of one."""
        if not self.is_on or (not self._is_only_one and get_ident() != self._thread):
            return False  # off meanwhile, or a backward for the other optimizers may be running
        if (maker := self._makers.get(optimizer)) is None:
            self._num_stray = self._num_stray + 1 if self._stray_step == self._clock.step else 1
            self._stray_step = self._clock.step
            return self._under_way is not None and self._num_stray < _STRAY and get_ident() == self._thread
        self._under_way, self._stepping = maker, id(optimizer)
        if maker[1].scaler is not None:
            maker[1].begin()
        return True

    def ends(self, optimizer: Optimizer) -> bool:
        maker = self._under_way
        if maker is None or id(optimizer) != self._stepping:
            return False
        self._under_way, self._parts.last_node = None, num_nodes_made()
        maker[1].is_scalers = False
        self._clock.step += 1 if self._is_only_one else self._completes(maker[0])
        return self._clock.step >= self._last_step

    def skips(self, optimizer: Optimizer) -> bool:
        """A scaler has skipped the step of an optimizer. Returns whether the rest is over."""
        self._under_way, self._stepping = self._makers.get(optimizer), id(optimizer)
        return self.ends(optimizer)

    def _completes(self, key: int) -> int:
        """Return how many samples are complete with the step of this optimizer."""
        is_next = key in self._stepped  # a second step: the leaders that are missing have not stepped in every sample
        if is_next:
            self._pause(self._leaders - self._stepped)
            self._leaders &= self._stepped
        stepped = frozenset([key]) if is_next else self._stepped | {key}
        is_complete = self._leaders <= stepped
        self._made_last = self._leaders or stepped
        self._stepped = frozenset() if is_complete else stepped
        return is_next + is_complete
