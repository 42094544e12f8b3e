"""Rests between samples for updates that no optimizer step shows: the hooks are off, but for those on two witnesses.

Such updates follow from the backwards alone (gradients that are reset between two backwards, or an optimizer fused into
the backward), or the user calls mark_step(). A rest needs several samples of the same parameters and optimizers. If
both witnesses are replaced, swapped or frozen during a rest, nothing is counted until a flush(), step or mark_step()
ends it.
"""

import time
from typing import Any, Final

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle, unserializable_hook

from .._runtime.autograd import current_graph_task
from .._runtime.error_boundary import dynamo_disabled
from .._runtime.sharding import world_size
from .clock import Closed
from .gradient_versions import version_of
from .hooks import accumulates
from .open_sample import OpenSample
from .parts import CaptureParts
from .rest import REGULAR, Rest

_WITNESSES: Final = 2  # number of parameters that notice a backward: one of them may be frozen meanwhile


class BackwardRest(Rest):
    """Counts samples by the backwards that reach two witnesses, or by calls of mark_step().

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
        """Record what has made a sample."""
        self._inside_backward = closed.inside_backward or self._parts.by_hand.inside_backward
        self._reached = frozenset(self._parts.hooks.reached)
        pattern = (self._reached, closed.stepped, self._inside_backward, self._parts.registry.version)
        self._num_alike = self._num_alike + 1 if pattern == self._pattern else 1
        self._pattern = pattern

    def begins_after(self, *, mark: bool = False) -> bool:
        """Begin after a backward or a `mark` of the user if updates are regular and the next sample is some steps away.

        Returns:
            Whether it begins: the hooks are off then.
        """
        # DistributedDataParallel writes to the gradients once more, which looks like a reset.
        if not (mark or self._inside_backward or (self._parts.by_hand.proven and world_size() == 1)):
            return False
        if self._num_alike < REGULAR or self._parts.thread.has_company or not self._is_possible():
            return False
        entries = () if mark else self._parts.registry.scan()
        fit = [one for slot, one in entries if slot in self._reached and self._is_fit(one)]
        if not (mark or fit):
            return False
        self._counts_marks = mark
        self._turn_hooks_off()
        self._task = -1  # the graph task of the newest backward
        for one in sorted(fit, key=torch.numel)[:_WITNESSES]:
            self._handles.append(one.register_hook(self._witness_of(one)))  # type: ignore[no-untyped-call]
        return True

    def _is_fit(self, parameter: Tensor) -> bool:
        """Whether a parameter can be a witness: a sparse gradient is replaced by every backward, reset or not."""
        is_replaced = parameter.grad is not None and parameter.grad.layout != torch.strided
        return parameter.requires_grad and not is_replaced and self._parts.would_tell(parameter)

    def _witness_of(self, parameter: Tensor) -> Any:
        gradient = parameter.grad
        # Which gradient the next backward adds to, and its version then, unless it is reset or replaced before.
        expected = None if gradient is None else (id(gradient), version_of(gradient))

        @unserializable_hook  # type: ignore[untyped-decorator]  # avoids a warning of torch if it is pickled
        @dynamo_disabled
        def backward_begins(_: Tensor) -> None:
            nonlocal expected
            if not accumulates():
                return
            began = time.perf_counter()
            gradient = parameter.grad
            if gradient is None:
                was_reset, expected = True, None  # the version of its first gradient is not known in advance
            else:
                now = id(gradient), version_of(gradient)
                was_reset, expected = expected is not None and now != expected, (now[0], now[1] + 1)
            try:
                self._backward_begins(was_reset=was_reset)
            except Exception as error:
                self.boundary.fail(error)
            self._seconds += time.perf_counter() - began

        return backward_begins

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

    def begins(self, optimizer: Optimizer) -> bool:
        """An optimizer is about to step. Returns whether the rest goes on: the step is part of a backward."""
        return self._inside_backward and current_graph_task() != -1
