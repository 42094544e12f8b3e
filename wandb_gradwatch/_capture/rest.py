"""Rests between samples: the hooks on parameters are off, and updates are only counted."""

import time
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import partial
from threading import get_ident
from typing import Any, Final

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle, unserializable_hook

from .._boundary import entry_point
from .._runtime.autograd import current_graph_task, num_nodes_made
from .._runtime.error_boundary import contained, dynamo_disabled
from .._runtime.sharding import world_size
from .._runtime.steps import STEP_HOOKS, OptimizerTable, QuickCount, StepCounter
from .clock import Closed
from .gradient_versions import version_of
from .hooks import accumulates
from .open_sample import OpenSample
from .parts import CaptureParts
from .scaling import SCALERS, ScaledSteps

_REGULAR: Final = 4  # number of consecutive samples that show the pattern of steps
_LEAST: Final = 3  # least number of steps for which turning the hooks off and on pays
# Seconds to count a step, quickly and otherwise, from `python -m benchmarks.counting`. They are not measured in the
# training, because reading the clock costs as much.
_QUICK: Final = 3e-6
_NOT_QUICK: Final = 8e-6
_STRAY: Final = 100  # nested steps of unknown optimizers after which the outer step is taken to have raised
_WITNESSES: Final = 2  # number of parameters that notice a backward: one of them may be frozen meanwhile


class Rest(StepCounter, ABC):
    """Decides when to rest, counts samples meanwhile, and ends before the next sample."""

    def __init__(self, parts: CaptureParts, sample: OpenSample) -> None:
        self._parts, self._clock, self._sample, self._boundary = parts, parts.clock, sample, parts.boundary
        self._last_step = -1  # the last step that the rest counts
        self._seconds = 0.0  # that were measured

    @property
    def seconds_spent(self) -> float:
        """Seconds spent on counting."""
        return self._seconds

    def _is_possible(self) -> bool:
        """Whether nothing but the pattern of steps keeps the hooks on: the next sample is some steps away."""
        parts = self._parts  # `is_sampled` is that of the open step, or of the next one if no step is open
        if parts.schedule.is_sampled or parts.guard is not None or parts.clock.muted or parts.window.sent:
            return False
        return parts.schedule.wakes_at() - parts.clock.open_step >= _LEAST + bool(parts.clock.stepped)

    def _turn_hooks_off(self) -> None:
        parts = self._parts
        parts.clock.discard()
        parts.take_off_hooks(is_alone=not parts.thread.has_company)
        parts.wiring.forget_gradients()
        self._seconds, self._last_step = 0.0, parts.schedule.wakes_at() - 1

    @contained
    def end(self, *, before_step: bool) -> None:
        """Turn the hooks on again. `before_step`: because an optimizer is about to make a step that is not counted."""
        if before_step:
            self._parts.thread.step_begins()
        self._boundary.seconds_spent += self.seconds_spent
        self._parts.schedule.seconds_on_others += self.seconds_spent
        self._turn_hooks_on(before_step=before_step)

    @abstractmethod
    def _turn_hooks_on(self, *, before_step: bool) -> None:
        """Follow the parameters and open the next sample, whose gradients may already be there."""

    @property
    def is_over(self) -> bool:
        """Whether the next step is sampled."""
        return self._clock.step >= self._last_step

    def skips(self, optimizer: Optimizer) -> bool:
        """A scaler has skipped the step of an optimizer. Returns whether the rest is over."""
        return False


class StepRest(Rest):
    """Counts samples by the steps of optimizers.

    It needs a regular pattern of steps: some optimizer had a part in every one of the last samples, or each sample was
    made by a single optimizer (as in a GAN). Anything else ends the rest, such as a step of another optimizer that
    updates watched parameters.

    Few calls and few objects matter more here than little arithmetic: between two steps of a training all of this
    leaves the processor's caches. Therefore torch's hook itself counts the steps of a single optimizer.
    """

    def __init__(self, parts: CaptureParts, sample: OpenSample) -> None:
        super().__init__(parts, sample)
        self._last: list[frozenset[int]] = []  # the keys of the optimizers that made the last samples
        self._pausing: frozenset[int] = frozenset()  # those that had no part in some sample after another one
        self._quick: QuickCount | None = None
        self._first_step = 0

    @property
    def seconds_spent(self) -> float:
        return self._seconds + (self._clock.step - self._first_step) * (_NOT_QUICK if self._quick is None else _QUICK)

    def sample_closed(self, closed: Closed) -> None:
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
        if len(last) < _REGULAR or parts.by_hand.possible or not self._is_possible():
            return False
        if parts.replay is not None and parts.replay.is_armed:  # the next step is run again
            return False
        if frozenset.intersection(*last) - self._pausing:
            return not parts.clock.stepped
        return all(len(stepped) == 1 for stepped in last)  # every step was a sample of its own

    def begin(self, optimizer: Optimizer) -> bool:
        """Turn the hooks off after a step of this optimizer. Returns False if its steps do not fit the pattern."""
        parts = self._parts
        keys = frozenset[int]().union(*self._last)
        makers = {key: one for key in keys if (one := parts.optimizers.of_key(key)) is not None}
        if len(makers) < len(keys) or parts.optimizers.key(optimizer) not in keys:
            return False
        self._turn_hooks_off()
        self._first_step = self._clock.step
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
        self._num_stray, self._stray_step = 0, -1
        if self._is_only_one and len(makers) == 1 and SCALERS.last_used is None:
            self._quick = STEP_HOOKS.count_quickly(optimizer, self._clock, until=self._last_step - 1)
        return True

    def _turn_hooks_on(self, *, before_step: bool) -> None:
        STEP_HOOKS.end_quick_count()
        if self._quick is not None:
            self._parts.last_node, self._quick = max(self._parts.last_node, self._quick.last_node), None
        if self._clock.step > self._first_step:
            self._clock.previous = self._made_last  # a late optimizer may still join the last counted sample
        entries = self._parts.follow()
        self._sample.begin()
        if before_step and self._parts.last_node != num_nodes_made():
            # A forward has run since the last counted step, and perhaps a backward without any hook.
            self._sample.mark_present(entries)

    @entry_point(lambda: False)
    def begins(self, optimizer: Optimizer) -> bool:
        """An optimizer is about to step. Returns whether the rest goes on: the step is counted, or part of one."""
        if not self._is_only_one and get_ident() != self._thread:
            return False  # a backward for the other optimizers may be running
        if (maker := self._makers.get(optimizer)) is None:
            self._num_stray = self._num_stray + 1 if self._stray_step == self._clock.step else 1
            self._stray_step = self._clock.step
            is_inner = self._under_way is not None or (self._quick is not None and self._quick.is_under_way)
            return is_inner and self._num_stray < _STRAY and get_ident() == self._thread
        self._under_way = maker
        if maker[1].scaler is not None:
            maker[1].begin()
        return True

    @entry_point(lambda: False)
    def ends(self, optimizer: Optimizer) -> bool:
        maker = self._under_way
        if maker is None or self._makers.get(optimizer) is not maker:
            return False
        self._under_way, self._parts.last_node = None, num_nodes_made()
        maker[1].is_scalers = False
        self._clock.step += 1 if self._is_only_one else self._completes(maker[0])
        return self._clock.step >= self._last_step

    def skips(self, optimizer: Optimizer) -> bool:
        self._under_way = self._makers.get(optimizer)
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


@dataclass(slots=True)
class _Witness:
    """A parameter that notices a backward."""

    parameter: Tensor
    # Which gradient the next backward adds to, and its version then, unless it is reset or replaced before.
    expected: tuple[int, int] | None

    @classmethod
    def of(cls, parameter: Tensor) -> "_Witness":
        gradient = parameter.grad
        return cls(parameter, None if gradient is None else (id(gradient), version_of(gradient)))


class BackwardRest(Rest):
    """Counts updates that no optimizer step shows, by the backwards that reach two witnesses, or by mark_step().

    Such updates follow from the backwards alone (gradients that are reset between two backwards, or an optimizer fused
    into the backward), or the user calls mark_step(). A rest needs several samples of the same parameters and
    optimizers. If both witnesses, the only parameters with a hook, are replaced, swapped or frozen during a rest,
    nothing is counted until a flush(), step or mark_step() ends it.

    It ends with the last backward before the sampled step: that backward arms the hooks' callback for its end.
    """

    def __init__(self, parts: CaptureParts, sample: OpenSample) -> None:
        super().__init__(parts, sample)
        self._pattern: tuple[Any, ...] = ()  # what the last samples have in common
        self._num_alike = 0  # number of samples in a row with this pattern
        self._inside_backward = False  # whether every backward makes an update before it ends
        self._handles: list[RemovableHandle] = []
        self._reached: frozenset[int] = frozenset()  # slots that the newest backward has reached

    def sample_closed(self, closed: Closed) -> None:
        self._inside_backward = closed.inside_backward or self._parts.by_hand.inside_backward
        self._reached = frozenset(self._parts.hooks.reached)
        pattern = (self._reached, closed.stepped, self._inside_backward, self._parts.registry.version)
        self._num_alike = self._num_alike + 1 if pattern == self._pattern else 1
        self._pattern = pattern

    def begins_after(self, *, mark: bool = False) -> bool:
        """Begin after a backward, or a `mark` of the user, if that pays. Returns whether the hooks are off now."""
        # DistributedDataParallel writes to the gradients once more, which looks like a reset.
        if not (mark or self._inside_backward or (self._parts.by_hand.proven and world_size() == 1)):
            return False
        if self._num_alike < _REGULAR or self._parts.thread.has_company or not self._is_possible():
            return False
        entries = () if mark else self._parts.registry.scan()
        fit = [one for slot, one in entries if slot in self._reached and self._is_fit(one)]
        if not (mark or fit):
            return False
        self._counts_marks = mark
        self._turn_hooks_off()
        self._task = -1  # the graph task of the newest backward
        for one in sorted(fit, key=torch.numel)[:_WITNESSES]:
            # The decorator avoids a warning of torch if the parameter is pickled.
            hook = unserializable_hook(partial(self._witness_reached, _Witness.of(one)))  # type: ignore[no-untyped-call]
            self._handles.append(one.register_hook(hook))  # type: ignore[no-untyped-call]
        return True

    def _is_fit(self, parameter: Tensor) -> bool:
        """Whether a parameter can be a witness: a sparse gradient is replaced by every backward, reset or not."""
        is_replaced = parameter.grad is not None and parameter.grad.layout != torch.strided
        return parameter.requires_grad and not is_replaced and self._parts.would_tell(parameter)

    @dynamo_disabled
    @entry_point()
    def _witness_reached(self, witness: _Witness, _: Tensor) -> None:
        if not accumulates():
            return
        began = time.perf_counter()
        gradient = witness.parameter.grad
        if gradient is None:
            was_reset, witness.expected = True, None  # the version of its first gradient is not known in advance
        else:
            now, expected = (id(gradient), version_of(gradient)), witness.expected
            was_reset, witness.expected = expected is not None and now != expected, (now[0], now[1] + 1)
        self._backward_begins(was_reset=was_reset)
        self._seconds += time.perf_counter() - began

    def _backward_begins(self, *, was_reset: bool) -> None:
        clock, task = self._clock, current_graph_task()
        if task == self._task:  # the other witness has told of it
            return
        self._task = task
        clock.step += was_reset and not self._inside_backward
        if clock.open_step >= self._last_step:
            self._parts.hooks.arm(task)  # its callback at the end of this backward ends the rest
        clock.step += self._inside_backward

    def remove_witnesses(self) -> None:
        """Remove the hooks on the witnesses. Safe at any time. Idempotent."""
        while self._handles:
            self._handles.pop().remove()

    def _turn_hooks_on(self, *, before_step: bool) -> None:
        parts, clock = self._parts, self._clock
        self.remove_witnesses()
        entries = parts.follow()
        self._sample.begin()
        clock.discard()
        if not (self._inside_backward or self._counts_marks):  # the open step has had a backward
            self._sample.mark_present(entries)
            parts.seen.note(entries)
            clock.backwards = 1
        elif before_step:
            self._sample.mark_present(entries)
        if clock.open_step <= self._last_step:  # something irregular has ended it
            self._num_alike = 0

    def marks(self) -> bool:
        """The user calls mark_step(). Returns whether that is only counted."""
        if not self._counts_marks or self._clock.open_step > self._last_step:
            return False
        self._clock.step += 1
        return True

    @entry_point(lambda: False)
    def begins(self, optimizer: Optimizer) -> bool:
        """An optimizer is about to step. Returns whether the rest goes on: the step is part of a backward."""
        return self._inside_backward and current_graph_task() != -1
