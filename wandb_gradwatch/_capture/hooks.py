"""Notes which parameters a backward reaches. All hooks on parameters are made here.

A hook notes its parameter and does no arithmetic, because the gradient is not final yet: DDP's all-reduce, later uses
of a tied weight and further micro-batches can follow. What it notes is used when the backward has returned.

The notes are made by tensor hooks, which run before the gradient is accumulated. A post-accumulate-grad hook could note
too, but torch keeps an empty holder on each parameter that has ever had one and visits it in every backward: about a
microsecond per parameter and step, even when nothing is measured. Tensor hooks can be removed without a trace.
Post-accumulate-grad hooks are registered only where gradients are needed inside the backward, and on sharded
parameters: no backward reaches the parameters of FSDP2, which calls these hooks itself once a gradient is in place.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.utils.hooks import RemovableHandle, unserializable_hook

from .._boundary import Boundary, entry_point
from .._runtime.autograd import Entry, current_graph_task
from .._runtime.error_boundary import dynamo_disabled
from .._runtime.sharding import local_part

NO_SLOT: Final = -1  # of FSDP1's flat parameters: their hooks only show that a backward has reached the model


@dataclass(frozen=True, slots=True)
class _Hooks:
    """The hooks on a parameter."""

    slot: list[int]  # [1] the slot to note; mutable, as a frozen parameter can get another slot but no new hook
    handles: list[RemovableHandle]  # of the noting hook, and of the post-accumulate-grad hook if there is one
    table: dict[int, Any]  # the parameter's `_backward_hooks`: its tensor hooks

    def are_on(self, parameter: Tensor) -> bool:
        """Whether the noting hook is on this parameter; an id alone can belong to a later parameter."""
        return self.handles[0].id in (parameter._backward_hooks or ())

    def come_off(self, parameter: Tensor) -> bool:
        """Detach the table if only the noting hook is in it: putting it back costs a tenth of a new registration."""
        if parameter._backward_hooks is not self.table or len(self.table) > 1 or len(self.handles) > 1:
            return False
        parameter._backward_hooks = None
        return True


class GradientHooks:
    """Notes the slots of parameters that receive a gradient in `reached`.

    Args:
        boundary: gets the exceptions of the hooks.
        on_arrival: called with a slot and its parameter once the gradient is accumulated: for sharded parameters, and
            for every parameter after `tell_arrivals`. A framework may call the hook outside of a backward.
    """

    def __init__(self, boundary: Boundary, on_arrival: Callable[[int, Tensor], None]) -> None:
        self._boundary, self._on_arrival = boundary, on_arrival
        self.reached: set[int] = set()  # slots, until they are taken
        self.muted = 0  # number of steps under way that evaluate their closure again; nothing is noted meanwhile
        self._task, self._accumulates = -1, False  # the newest graph task, and whether it accumulates gradients
        self._hooks: dict[int, _Hooks] = {}  # by id(parameter)
        self._taken_off: frozenset[int] = frozenset()  # ids of parameters whose hooks are removed for the moment
        self._kept: dict[int, _Hooks] = {}  # the hooks among them that can be put back, by id(parameter)
        self._tells_arrivals = self._removed = False

    def follow(self, entries: Iterable[Entry]) -> list[int]:
        """Hook every parameter that can have a gradient and has no hook yet. Returns the slots of new parameters.

        Hooks of parameters that are no longer in `entries` are removed. If a parameter's slot has changed, because its
        module was renamed, its hook notes the new slot.
        """
        new: list[int] = []
        current: dict[int, _Hooks] = {}
        for slot, parameter in entries:
            number = id(parameter)
            hooks = self._hooks.get(number)
            if hooks is not None and hooks.are_on(parameter):
                hooks.slot[0] = slot
                if current_graph_task() == -1:  # a hook must not be replaced while it runs
                    # Assign again: after torch.utils.swap_tensors a tensor has the dictionary, but not the hook.
                    parameter._backward_hooks = parameter._backward_hooks
                    parameter._post_accumulate_grad_hooks = parameter._post_accumulate_grad_hooks
                current[number] = hooks
            elif parameter.is_leaf:
                hooks = self._kept.get(number)
                # Works for a frozen parameter too. Other hooks that were removed leave an empty dictionary, which
                # torch does not look at any more if the tensor was swapped.
                if hooks is not None and not parameter._backward_hooks:
                    parameter._backward_hooks, hooks.slot[0] = hooks.table, slot
                elif parameter.requires_grad:
                    hooks = self._hooks[number] = self._register(slot, parameter)  # stored at once: Ctrl-C may follow
                else:
                    continue
                current[number] = hooks
                if number not in self._taken_off:
                    new.append(slot)
        for key in self._hooks.keys() - current.keys():
            _remove(self._hooks[key])
        self._hooks, self._taken_off, self._kept = current, frozenset(), {}
        return new

    def take_reached(self) -> frozenset[int]:
        """Return the slots reached since the last call."""
        reached, self.reached = frozenset(self.reached), set()
        return reached

    def is_hooked(self, parameter: Tensor) -> bool:
        """Whether a backward that reaches this parameter notes it."""
        hooks = self._hooks.get(id(parameter))
        return hooks is not None and hooks.are_on(parameter)

    def tell_arrivals(self, entries: Iterable[Entry]) -> None:
        """Call `on_arrival` inside the backward from now on, before other post-accumulate-grad hooks run."""
        self._tells_arrivals = True
        for _, parameter in entries:
            if self.is_hooked(parameter):
                self._register_arrival(parameter, self._hooks[id(parameter)])

    def take_off(self, entries: Iterable[Entry]) -> None:
        """Remove every hook until `follow` is called, which does not count the same parameters as new.

        Args:
            entries: parameters to leave as they were before watch(). Must be empty inside a backward, or while another
                thread may run one, because the engine may be iterating over the hooks' dictionary.
        """
        entries, hooked = list(entries), self._hooks
        self._taken_off = frozenset(hooked)
        self._kept = {
            id(one): hooked[id(one)] for _, one in entries if id(one) in hooked and hooked[id(one)].come_off(one)
        }
        for key in hooked.keys() - self._kept.keys():
            _remove(hooked[key])
        for _, parameter in entries:
            if parameter._backward_hooks is not None and not parameter._backward_hooks:
                parameter._backward_hooks = None  # otherwise the engine still visits the empty dictionary
        self._hooks = {}  # last: if Ctrl-C comes before, the next call removes the rest

    def remove(self) -> None:
        """Remove every hook permanently. Safe at any time, even inside a backward. Idempotent."""
        self._removed = True
        self.take_off(())

    def _register(self, slot: int, parameter: Tensor) -> _Hooks:
        of_slot = [slot]
        # A lazy module's parameter refuses every torch function until its first forward, which keeps the hook.
        with torch._C.DisableTorchFunctionSubclass() if is_lazy(parameter) else nullcontext():
            tells_arrival = self._tells_arrivals or local_part(parameter) is not parameter
            # The decorator avoids a warning of torch if the parameter is pickled.
            note_gradient = unserializable_hook(partial(self._note_gradient, of_slot))  # type: ignore[no-untyped-call]
            handle = parameter.register_hook(note_gradient)  # type: ignore[no-untyped-call]
            hooks = _Hooks(of_slot, [handle], parameter._backward_hooks or {})
            if tells_arrival:
                self._register_arrival(parameter, hooks)
        return hooks

    @dynamo_disabled
    @entry_point()
    def _note_gradient(self, of_slot: Sequence[int], _: Tensor) -> None:
        task = current_graph_task()
        if task != self._task:
            self._task, self._accumulates = task, accumulates()
        if self._accumulates and not (self.muted or self._removed):
            self.reached.add(of_slot[0])

    def _register_arrival(self, parameter: Tensor, hooks: _Hooks) -> None:
        handle = parameter.register_post_accumulate_grad_hook(partial(self._gradient_arrived, hooks.slot))  # type: ignore[no-untyped-call]
        hooks.handles.append(handle)
        all_hooks = handle.hooks_dict_ref()
        for key in [key for key in all_hooks if key != handle.id]:  # must run after it: they may take the gradient away
            all_hooks[key] = all_hooks.pop(key)

    @dynamo_disabled
    @entry_point()
    def _gradient_arrived(self, of_slot: Sequence[int], parameter: Tensor) -> None:
        if not (self.muted or self._removed):
            self.reached.add(of_slot[0])
            if of_slot[0] != NO_SLOT:
                self._on_arrival(of_slot[0], parameter)


def _remove(hooks: _Hooks) -> None:
    for handle in hooks.handles:
        handle.remove()


def accumulates() -> bool:
    """Whether the current node accumulates into .grad: torch.autograd.grad() calls tensor hooks without doing so."""
    try:
        return bool(torch._C._will_engine_execute_node(torch._C._current_autograd_node()))
    except RuntimeError:  # raised for leaf nodes, only inside autograd.grad()
        return False
