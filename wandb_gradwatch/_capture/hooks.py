"""Marks and the end of backward: the only place where hooks on parameters are registered and removed.

A post-accumulate-grad hook marks its parameter and does no arithmetic: at that moment the gradient is not final (it is
before DDP's all-reduce, before later uses of a tied weight, before other micro-batches). What is final is known in a
callback that is queued from inside an end-of-backward callback: the first one runs before DDP's and FSDP's own, the
nested one after them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.utils.hooks import RemovableHandle

from .._runtime.autograd import current_graph_task
from .._runtime.dynamo import dynamo_disabled

# Tasks whose backward raised never run their callback and would stay here for good.
_MAX_ARMED: Final = 64


@dataclass(frozen=True, slots=True)
class _Hook:
    """A hook on a parameter.

    Args:
        place: [1] the slot that it marks; also a frozen parameter, which cannot be hooked anew, can get another.
        function: what it calls.
    """

    handle: RemovableHandle
    place: list[int]
    function: Callable[[Tensor], None]

    def turn(self, *, on: bool) -> None:
        """Take it out of its parameter's hooks, or put it back: a tenth of what it takes to register a new one."""
        hooks = self.handle.hooks_dict_ref()
        if hooks is not None and on:
            hooks[self.handle.id] = self.function
        elif hooks is not None:
            hooks.pop(self.handle.id, None)


class BackwardHooks:
    """Marks parameters, and calls back when a backward begins and when it has truly ended.

    Args:
        on_mark: called with a slot and its parameter, inside that one's hook.
        on_begin: called at the first mark of each backward, inside a hook.
        on_end: called when the outermost backward has ended, all gradients final.
    """

    def __init__(
        self, *, on_mark: Callable[[int, Tensor], None], on_begin: Callable[[], None], on_end: Callable[[], None]
    ) -> None:
        self._on_mark = on_mark
        self._on_begin = on_begin
        self._on_end = on_end
        # By graph task, not "is a list empty": a backward that raised never runs its callback, and the latch would
        # stay shut for good.
        self._armed: set[int] = set()
        self._hooks: dict[int, _Hook] = {}  # by id(parameter)
        self._removed = False

    def follow(self, entries: Iterable[tuple[int, Tensor]]) -> list[int]:
        """Hook every parameter that can have a gradient and is not hooked yet; returns their slots.

        Hooks of parameters that are not among the entries any more are removed; one whose parameter has another slot
        now, because its module was renamed, marks that.
        """
        new: list[int] = []
        current: dict[int, _Hook] = {}
        for slot, parameter in entries:
            hook = self._hooks.get(id(parameter))
            if hook is not None and _is_attached(hook.handle, parameter):
                hook.place[0] = slot
                if current_graph_task() == -1:  # a hook that runs must not be replaced
                    # Set anew: a tensor that was swapped (torch.utils.swap_tensors) keeps the dictionary, not the hook.
                    parameter._post_accumulate_grad_hooks = parameter._post_accumulate_grad_hooks
                current[id(parameter)] = hook
            elif parameter.requires_grad and parameter.is_leaf:
                place = [slot]
                function = self._marking(place)
                current[id(parameter)] = _Hook(_register(parameter, function), place, function)
                new.append(slot)
        if len(current) < len(self._hooks) or new:
            for key in self._hooks.keys() - current.keys():
                self._hooks[key].handle.remove()
            self._hooks = current
        return new

    def is_hooked(self, parameter: Tensor) -> bool:
        """Whether a backward that reached this parameter would have marked it."""
        hook = self._hooks.get(id(parameter))
        return hook is not None and _is_attached(hook.handle, parameter)

    def turn(self, *, on: bool) -> None:
        """Have the hooks called or not. Not inside a backward: the engine may be going through them."""
        for hook in self._hooks.values():
            hook.turn(on=on)

    def go_first(self) -> None:
        """Have every hook called before those of others on its parameter. Not inside a backward."""
        for hook in self._hooks.values():
            hooks = hook.handle.hooks_dict_ref()
            if hooks is not None:
                others = {key: function for key, function in hooks.items() if key != hook.handle.id}
                for key in others:
                    del hooks[key]
                hooks.update(others)

    def remove(self) -> None:
        """Remove every hook; safe at any time, also inside a backward. Idempotent."""
        self._removed = True
        for hook in self._hooks.values():
            hook.handle.remove()
        self._hooks = {}

    def arm(self, task: int) -> None:
        """Have on_end called when this graph task's backward has ended."""
        if task in self._armed:
            return
        if len(self._armed) >= _MAX_ARMED:
            self._armed.clear()
        self._armed.add(task)
        self._on_begin()
        _queue(partial(self._first_callback, task))

    def _marking(self, place: list[int]) -> Callable[[Tensor], None]:
        armed, arm, mark = self._armed, self.arm, self._on_mark

        @dynamo_disabled
        def mark_gradient(parameter: Tensor) -> None:
            task = current_graph_task()
            if task not in armed:
                if self._removed:
                    return
                arm(task)
            mark(place[0], parameter)

        return mark_gradient

    @dynamo_disabled
    def _first_callback(self, task: int) -> None:
        _queue(partial(self._last_callback, task))

    @dynamo_disabled
    def _last_callback(self, task: int) -> None:
        self._armed.discard(task)
        if self._removed:
            return
        node = torch._C._current_autograd_node()
        if node is None:
            self._on_end()
        else:  # the inner backward of a re-entrant checkpoint: the outer one is still under way
            self._carry_outward(node)

    def _carry_outward(self, checkpoint: Any) -> None:
        """Arm the outer backward too, in case none of its own parameters does."""
        for following, _ in checkpoint.next_functions:
            if following is not None:
                _arm_once_at(following, self.arm)
                return


def _arm_once_at(node: Any, arm: Callable[[int], None]) -> None:
    handles: list[RemovableHandle] = []

    def prehook(_: Any) -> None:
        if handles:
            handles.pop().remove()
            arm(current_graph_task())

    handles.append(node.register_prehook(prehook))


def _is_attached(handle: RemovableHandle, parameter: Tensor) -> bool:
    """Whether the handle's hook is this parameter's: ids are used again after a parameter is gone."""
    hooks = parameter._post_accumulate_grad_hooks
    return hooks is not None and handle.id in hooks


def _queue(callback: Callable[[], None]) -> None:
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def _register(parameter: Tensor, hook: Callable[[Tensor], None]) -> RemovableHandle:
    # A lazy module's parameter refuses every function until its first forward; the hook itself stays through that.
    with torch._C.DisableTorchFunctionSubclass() if is_lazy(parameter) else nullcontext():
        handle: RemovableHandle = parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
    return handle
