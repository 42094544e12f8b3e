"""Marks and the end of backward: the only place where hooks on parameters are registered and removed.

A hook marks its parameter and does no arithmetic: at that moment the gradient is not final (it is before DDP's
all-reduce, before later uses of a tied weight, before other micro-batches). What is final is known in a callback that
is queued from inside an end-of-backward callback: the first one runs before DDP's and FSDP's own, the nested one after
them.

The marks are tensor hooks, which run before the gradient is accumulated. A post-accumulate-grad hook would do as well,
but torch keeps an empty holder on each parameter that has ever had one, and visits it in every backward: near a
microsecond, for every parameter and step, also when nothing is measured. Tensor hooks can be taken away without a
trace. Post-accumulate-grad hooks are there only where somebody wants to know of each gradient inside the backward, and
on sharded parameters: no backward reaches those of FSDP2, which calls such hooks itself when a gradient is in its
place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.utils.hooks import RemovableHandle, unserializable_hook

from .._runtime.autograd import Entry, current_graph_task
from .._runtime.error_boundary import dynamo_disabled
from .._runtime.notices import Notices
from .._runtime.sharding import Shards, fsdp1_flat_parameters, local_part
from .._transfer.sample_buffer import SampleBuffer
from .clock import SampleClock
from .gradient_versions import mark_as_older_than_its_hook
from .parameter_registry import ParameterRegistry

NO_SLOT: Final = -1  # of FSDP1's flat parameters: they tell when a backward ends, and nothing else

# Tasks whose backward raised never run their callback and would stay here for good.
_MAX_ARMED: Final = 64


@dataclass(frozen=True, slots=True)
class _Hooks:
    """The hooks on a parameter."""

    slot: list[int]  # [1] what they mark; also a frozen parameter, which cannot be hooked anew, can get another
    handles: list[RemovableHandle]  # the mark's, and that of what tells of a gradient inside the backward
    table: dict[int, Any]  # of tensor hooks: the parameter's `_backward_hooks`

    def are_on(self, parameter: Tensor) -> bool:
        """Whether the mark is this parameter's: ids are used again after a parameter is gone."""
        return self.handles[0].id in (parameter._backward_hooks or ())

    def come_off(self, parameter: Tensor) -> bool:
        """Take the table away where it is the mark's own: putting it back costs a tenth of registering it anew."""
        if parameter._backward_hooks is not self.table or len(self.table) > 1 or len(self.handles) > 1:
            return False
        parameter._backward_hooks = None
        return True


class BackwardHooks:
    """Marks parameters, and calls back when a backward begins and when it has truly ended.

    A slot is marked in the clock, and among those that the backward has reached, before its gradient is accumulated.

    Args:
        on_arrival: called with a slot and its parameter after that, where `tell_arrivals` was called or it is sharded.
        on_begin: called before the first mark of each backward, inside a hook, with whether a gradient may have been
            accumulated already.
        on_end: called when the outermost backward has ended, all gradients final.
    """

    def __init__(
        self,
        clock: SampleClock,
        *,
        on_arrival: Callable[[int, Tensor], None],
        on_begin: Callable[[bool], None],
        on_end: Callable[[], None],
    ) -> None:
        self.clock = clock
        self.reached: set[int] = set()  # slots marked in the backward under way
        self._on_arrival = on_arrival
        self._on_begin = on_begin
        self._on_end = on_end
        # By graph task, not "is a list empty": a backward that raised never runs its callback, and the latch would
        # stay shut for good.
        self._armed: set[int] = set()
        self._of_grad = -1  # the graph task of an autograd.grad(), which accumulates nothing
        self._hooks: dict[int, _Hooks] = {}  # by id(parameter)
        self._taken_off: frozenset[int] = frozenset()  # id(parameter)
        self._kept: dict[int, _Hooks] = {}  # of these what can be put back
        self._tells_arrivals = self._removed = False

    def follow(self, entries: Iterable[Entry]) -> list[int]:
        """Hook every parameter that can have a gradient and is not hooked yet; returns their slots.

        Hooks of parameters that are not among the entries any more are removed; one whose parameter has another slot
        now, because its module was renamed, marks that.
        """
        new: list[int] = []
        current: dict[int, _Hooks] = {}
        for slot, parameter in entries:
            number = id(parameter)
            hooks = self._hooks.get(number)
            if hooks is not None and hooks.are_on(parameter):
                hooks.slot[0] = slot
                if current_graph_task() == -1:  # a hook that runs must not be replaced
                    # Set anew: a tensor that was swapped (torch.utils.swap_tensors) keeps the dictionary, not the hook.
                    parameter._backward_hooks = parameter._backward_hooks
                    parameter._post_accumulate_grad_hooks = parameter._post_accumulate_grad_hooks
                current[number] = hooks
            elif parameter.is_leaf:
                hooks = self._kept.get(number)
                if hooks is not None and parameter._backward_hooks is None:  # also while frozen
                    parameter._backward_hooks, hooks.slot[0] = hooks.table, slot
                elif parameter.requires_grad:
                    hooks = self._register(slot, parameter)
                else:
                    continue
                current[number] = hooks
                if number not in self._taken_off:
                    new.append(slot)
        for key in self._hooks.keys() - current.keys():
            _remove(self._hooks[key])
        self._hooks, self._taken_off, self._kept = current, frozenset(), {}
        return new

    def is_hooked(self, parameter: Tensor) -> bool:
        """Whether a backward that reached this parameter would have marked it."""
        hooks = self._hooks.get(id(parameter))
        return hooks is not None and hooks.are_on(parameter)

    def tell_arrivals(self, entries: Iterable[Entry]) -> None:
        """Call back inside the backward from now on, before the hooks of others that find the gradient accumulated."""
        self._tells_arrivals = True
        for _, parameter in entries:
            if self.is_hooked(parameter):
                self._register_arrival(parameter, self._hooks[id(parameter)])

    def take_off(self, entries: Iterable[Entry]) -> None:
        """Remove every hook until `follow` is called, which does not take those parameters for new.

        Args:
            entries: parameters that are to be as they were before. Not inside a backward, nor while another thread may
                run one: the engine may be going through what is taken from them.
        """
        entries, hooked = list(entries), self._hooks
        self._taken_off, self._hooks = frozenset(hooked), {}
        self._kept = {
            id(one): hooked[id(one)] for _, one in entries if id(one) in hooked and hooked[id(one)].come_off(one)
        }
        for key in hooked.keys() - self._kept.keys():
            _remove(hooked[key])
        for _, parameter in entries:
            if parameter._backward_hooks is not None and not parameter._backward_hooks:
                parameter._backward_hooks = None  # what the engine visits goes with it

    def remove(self) -> None:
        """Remove every hook for good; safe at any time, also inside a backward. Idempotent."""
        self._removed = True
        self.take_off(())

    def _register(self, slot: int, parameter: Tensor) -> _Hooks:
        of_slot, clock, reached = [slot], self.clock, self.reached

        @unserializable_hook  # type: ignore[untyped-decorator]  # otherwise torch warns where it is sent to a process
        @dynamo_disabled
        def mark_gradient(_: Tensor) -> None:
            task = current_graph_task()
            if task not in self._armed:
                if self._removed or task == self._of_grad:
                    return
                if not _accumulates():
                    self._of_grad = task
                    return
                self.arm(task, has_accumulated=False)
            if not clock.muted and of_slot[0] != NO_SLOT:  # no call: there are as many of these as parameters
                clock.marked.add(of_slot[0])
                reached.add(of_slot[0])

        # A lazy module's parameter refuses every function until its first forward; the hook itself stays through that.
        with torch._C.DisableTorchFunctionSubclass() if is_lazy(parameter) else nullcontext():
            handle = parameter.register_hook(mark_gradient)  # type: ignore[no-untyped-call]
            hooks = _Hooks(of_slot, [handle], parameter._backward_hooks or {})
            if self._tells_arrivals or local_part(parameter) is not parameter:
                self._register_arrival(parameter, hooks)
        return hooks

    def _register_arrival(self, parameter: Tensor, hooks: _Hooks) -> None:
        @dynamo_disabled
        def tell(arrived: Tensor) -> None:
            slot = hooks.slot[0]
            if self._removed:
                return
            self.arm(current_graph_task())
            if not self.clock.muted and slot != NO_SLOT:
                self.clock.marked.add(slot)
                self.reached.add(slot)
                self._on_arrival(slot, arrived)

        handle = parameter.register_post_accumulate_grad_hook(tell)  # type: ignore[no-untyped-call]
        hooks.handles.append(handle)
        all_hooks = handle.hooks_dict_ref()
        for key in [key for key in all_hooks if key != handle.id]:  # after it: they may take the gradient away
            all_hooks[key] = all_hooks.pop(key)

    def arm(self, task: int, *, has_accumulated: bool = True) -> None:
        """Have on_end called when this graph task's backward has ended."""
        if task in self._armed:
            return
        if len(self._armed) >= _MAX_ARMED:
            self._armed.clear()
        self._armed.add(task)
        self._on_begin(has_accumulated)
        _queue(partial(self._first_callback, task))

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


def _remove(hooks: _Hooks) -> None:
    for handle in hooks.handles:
        handle.remove()


def _accumulates() -> bool:
    """Whether the node whose hook runs adds to .grad: torch.autograd.grad() calls tensor hooks too."""
    try:
        return bool(torch._C._will_engine_execute_node(torch._C._current_autograd_node()))
    except RuntimeError:  # torch says of leaves that it cannot tell, in autograd.grad() and there only
        return False


def _queue(callback: Callable[[], None]) -> None:
    torch.autograd.Variable._execution_engine.queue_callback(callback)


class HookSync:
    """Walks the model, and keeps the hooks where the parameters are: new, replaced, unfrozen, swapped, sharded ones."""

    def __init__(
        self,
        registry: ParameterRegistry,
        clock: SampleClock,
        hooks: BackwardHooks,
        shards: Shards,
        window: SampleBuffer,
        notices: Notices,
    ) -> None:
        self._registry = registry
        self._clock = clock
        self._hooks = hooks
        self._shards = shards
        self._window = window
        self._notices = notices
        self._version = self._changes = -1  # the registry's, when it was followed

    def take_off(self, *, is_alone: bool) -> None:
        """Leave no hook on any parameter, until the next scan. Not inside a backward.

        Where no other thread may run one (`is_alone`), what torch visits on each parameter goes as well.
        """
        self._hooks.take_off(self._leaves(self._registry.scan()) if is_alone else ())
        self._changes = -1

    def would_tell(self, parameter: Tensor) -> bool:
        """Whether a backward that had reached this parameter would have been seen."""
        return not self._shards.uses_fsdp1 and self._hooks.is_hooked(parameter)

    def scan(self) -> list[Entry]:
        """Walk the model, and follow what is new in it."""
        entries = self._registry.scan()
        # A gradient that no hook has told of: the hook is gone with a tensor that was swapped.
        if (
            self._registry.changes != self._changes
            or self._shards.uses_fsdp1
            or any([p.grad is not None for slot, p in entries if slot not in self._clock.marked])
        ):
            is_first = self._version == -1
            if (new := self._follow(entries)) and not is_first:
                self._notices.say(
                    "new parameters",
                    "now following parameters that were added, replaced or unfrozen after watch(): "
                    + self._registry.some_names(new),
                )
        return entries

    def _follow(self, entries: Sequence[Entry]) -> list[int]:
        """Hook what is new, and return its slots."""
        self._changes = self._registry.changes
        self._window.resize(len(self._registry.names))
        if self._registry.version != self._version:
            self._version = self._registry.version
            self._shards.update(entries, self._registry.models())
        new = [slot for slot in self._hooks.follow(self._leaves(entries)) if slot != NO_SLOT]
        for slot, parameter in entries if new else ():
            if slot in new and parameter.grad is not None:
                mark_as_older_than_its_hook(parameter.grad)
        return new

    def _leaves(self, entries: Sequence[Entry]) -> Sequence[Entry]:
        """What a backward reaches: with FSDP1 not the model's parameters."""
        if not self._shards.uses_fsdp1:
            return entries
        return [*entries, *((NO_SLOT, leaf) for leaf in fsdp1_flat_parameters(self._registry.models()))]
