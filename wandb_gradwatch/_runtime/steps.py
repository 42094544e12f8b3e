"""Optimizer steps as events: one pair of global hooks that handles nested steps, closures and steps that raise.

The hooks are registered only while a model is watched. They receive the steps of all optimizers; a listener is called
for the optimizers that it follows, once per outermost step, and again before each step that it delegates to.
"""

import inspect
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from types import FrameType, FunctionType
from typing import Any, Final, Generic, TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import (
    _global_optimizer_post_hooks,
    _global_optimizer_pre_hooks,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.hooks import RemovableHandle

from .._boundary import Boundary, Call, Replacement, around, entry_point
from .autograd import current_graph_task
from .error_boundary import dynamo_disabled
from .graph_replays import GRAPH_REPLAYS
from .listeners import Listener, Listeners

Value = TypeVar("Value")


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    """The parameters that an optimizer holds, in the order of its groups."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


class OptimizerTable(Generic[Value]):
    """Maps optimizers to values, by identity: an optimizer that defines __eq__ has no hash. Keeps none alive."""

    def __init__(self) -> None:
        self._entries: dict[int, tuple[weakref.ref[Optimizer], Value]] = {}

    def __setitem__(self, optimizer: Optimizer, value: Value) -> None:
        number, entries = id(optimizer), self._entries
        entries[number] = (weakref.ref(optimizer, lambda _: entries.pop(number, None)), value)

    def __iter__(self) -> Iterator[Optimizer]:
        return iter([one for reference, _ in list(self._entries.values()) if (one := reference()) is not None])

    def get(self, optimizer: Optimizer | None) -> Value | None:
        entry = self._entries.get(id(optimizer))
        return None if entry is None else entry[1]


def is_torchs(step: Callable[..., Any]) -> bool:
    """Whether this is the `step` of one of torch's optimizers. They use the gradients that they get."""
    return step.__module__.startswith("torch.optim.")


def _inherited_steps(cls: type[Optimizer]) -> Iterator[tuple[type, FunctionType]]:
    """Yield the base classes with a `step` of their own, to which the class's `step` may delegate."""
    seen = {inspect.unwrap(cls.step)}  # torch copies an inherited step to the class, with its hooks
    for base in cls.__mro__[1:]:
        function = base.__dict__.get("step")
        if base is not Optimizer and isinstance(function, FunctionType) and inspect.unwrap(function) not in seen:
            seen.add(inspect.unwrap(function))
            yield base, function


@dataclass(eq=False)
class _Step:
    """A running step, or one that raised, until the thread's next step or backward.

    If it has a closure, the gradients of the closure's first evaluation are measured as those of the step. Line
    searches evaluate the closure up to 20 more times, and Lightning runs the whole training step in the closure.
    """

    optimizer: Optimizer
    frame: FrameType  # of its call; not the frame's id, which may be reused as soon as the frame is freed
    inside_backward: bool
    listeners: list[Listener]
    outer: list[tuple["_Step", Listener]]  # listeners for which this step is a part of another one
    _boundary: Boundary
    has_begun: bool = False
    is_muted: bool = False
    last_hook: RemovableHandle | None = None

    def begin(self) -> None:
        """Tell the listeners; no-op if that is done: the hook that calls this also runs in `super().step()`."""
        if self.has_begun:
            return
        self.has_begun = True
        for listener in self.listeners:
            listener.before_step(self.optimizer, inside_backward=self.inside_backward)
        for listener in self.listeners:
            listener.guard_step(self.optimizer, inside_backward=self.inside_backward)
        self.delegate(type(self.optimizer).step, self.outer)

    def delegate(self, function: Callable[..., Any], told: Iterable[tuple["_Step", Listener]]) -> None:
        """Tell listeners that the steps which they follow delegate to this function, unless these are yet to begin."""
        for step, listener in told:
            if step.has_begun:  # otherwise a closure has yet to compute the gradients
                listener.before_inner_step(self.optimizer, is_torchs=is_torchs(function))

    @dynamo_disabled
    @entry_point()
    def last_hook_runs(self, *_: Any) -> None:
        self.begin()

    @dynamo_disabled
    @entry_point()
    def closure_returns(self, _: Call) -> None:
        if not self.is_muted:
            self.begin()
            self.is_muted = True
            for listener in self.listeners:
                listener.mute(True)


class _Stack(threading.local):
    def __init__(self) -> None:
        self.steps: list[_Step] = []


class StepHooks(Listeners):
    """The only hooks of this process on optimizer steps. They call the listeners that follow the optimizer."""

    def __init__(self) -> None:
        super().__init__()
        self._handles: list[RemovableHandle] = []
        self._stack = _Stack()
        self._under_way: set[weakref.ref[_Step]] = set()  # the running steps of all threads
        # The classes whose `step` is wrapped, because subclasses call it as super().step(): torch calls the hooks there
        # only if an optimizer of the class itself was made.
        self._inherited: dict[type, Replacement] = {}

    def _install(self) -> None:
        if not self._handles:
            self._handles = [
                register_optimizer_step_pre_hook(self._before),
                register_optimizer_step_post_hook(self._after),
            ]

    def _uninstall(self) -> None:
        while self._inherited:
            base, one = next(iter(self._inherited.items()))
            one.undo()
            self._inherited.pop(base, None)
        # Running steps must be ended. Also, torch iterates over its global hooks while any thread steps, and raises if
        # the hooks change meanwhile. If other hooks exist, ours therefore stay, doing nothing, until a later call.
        are_alone = len(_global_optimizer_pre_hooks) == len(_global_optimizer_post_hooks) == 1
        if are_alone and not self._under_way:
            for handle in self._handles:
                handle.remove()
            self._handles = []

    @dynamo_disabled
    @entry_point()
    def _before(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if GRAPH_REPLAYS.is_capturing:  # the step is not made now
            GRAPH_REPLAYS.step_captured(optimizer)
            return None
        listeners: list[Listener] = []
        for listener, counter in self._counters:
            if counter is not None:
                try:  # not an entry point: a call more per step costs more than all that it does
                    if counter.begins(optimizer):
                        continue
                except Exception as error:
                    listener._boundary.caught(error)
            if listener.follows(optimizer):
                listener.end_counting(before_step=True)
                listeners.append(listener)
        if not listeners:
            return None
        frame = sys._getframe(2)  # of the caller of the entry point
        self.drop_raised(frame)
        within: list[tuple[_Step, Listener]] = []
        for outer in self._stack.steps:
            parts = [one for one in listeners if one in outer.listeners and one.is_part_of(optimizer, outer.optimizer)]
            listeners = [listener for listener in listeners if listener not in parts]
            if outer.optimizer is not optimizer:  # its super().step() is wrapped
                within += [(outer, listener) for listener in parts]
        self._wrap_inherited_steps(type(optimizer))
        step = _Step(optimizer, frame, current_graph_task() != -1, listeners, within, self._boundary)
        self._stack.steps.append(step)
        self._under_way.add(weakref.ref(step, self._under_way.discard))
        closure = args[1] if len(args) > 1 else kwargs.get("closure")  # args[0] is the optimizer
        if not callable(closure):
            # torch runs the global hooks first. The optimizer's own hooks and later global hooks may also change the
            # gradients before the step (clip, reduce): a hook that is registered now runs after all of them.
            if (listeners or within) and self._others_follow(optimizer):
                step.last_hook = optimizer.register_step_pre_hook(step.last_hook_runs)
            else:
                step.begin()
            return None
        for listener in listeners:
            listener.before_closure(optimizer)
        wrapped = around(closure, after=step.closure_returns)
        return ((args[0], wrapped, *args[2:]), kwargs) if len(args) > 1 else (args, {**kwargs, "closure": wrapped})

    @dynamo_disabled
    @entry_point()
    def _after(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if GRAPH_REPLAYS.is_capturing:
            return
        for listener, counter in self._counters:
            try:
                if counter is not None and counter.ends(optimizer):
                    listener.end_counting()
            except Exception as error:
                listener._boundary.caught(error)
        if not self._under_way:
            return
        steps = self._stack.steps
        if not any([step.optimizer is optimizer for step in steps]):
            return  # no listener follows it, or watching began during the step
        while steps:
            step = steps.pop()
            self._end(step)
            if step.optimizer is optimizer:
                break

    def _wrap_inherited_steps(self, cls: type[Optimizer]) -> None:
        for base, function in _inherited_steps(cls):
            if base not in self._inherited:
                one = self._inherited[base] = Replacement(base, "step", before=partial(self._delegates, function))
                one.install()

    @entry_point()
    def _delegates(self, function: FunctionType, call: Call) -> None:
        """An optimizer calls an inherited `step`."""
        if not torch.compiler.is_compiling():
            self._tell_delegation(call.args[0], function)

    @dynamo_disabled
    def _tell_delegation(self, optimizer: Optimizer, function: FunctionType) -> None:
        """Tell the listeners of this optimizer's running steps that it calls an inherited `step`."""
        for step in [one for one in self._stack.steps if one.optimizer is optimizer]:
            step.delegate(function, [*((step, listener) for listener in step.listeners), *step.outer])

    def _others_follow(self, optimizer: Optimizer) -> bool:
        """Whether hooks of others run between this one and the step."""
        newest = list(_global_optimizer_pre_hooks.values())[-1:]  # a copy, because another thread may change them
        return bool(optimizer._optimizer_step_pre_hooks) or newest != [self._before]

    def drop_raised(self, frame: FrameType | None = None) -> None:
        """End steps that raised, so that they do not mute later backwards: their frames have left the call stack.

        `frame`: the frame of the step that begins; None: no step begins.
        """
        steps = self._stack.steps
        if not steps:
            return
        callers, caller = set(), sys._getframe(1) if frame is None else frame.f_back
        while caller is not None:
            callers.add(caller)
            caller = caller.f_back
        while steps and steps[-1].frame not in callers:
            self._end(steps.pop())

    def _end(self, step: _Step) -> None:
        self._under_way.discard(weakref.ref(step))
        if step.last_hook is not None:
            step.last_hook.remove()
        for listener in step.listeners if step.is_muted else ():
            listener.mute(False)
        for listener in reversed(step.listeners):  # each restores what it found before the step
            listener.after_step(step.optimizer, inside_backward=step.inside_backward)


STEP_HOOKS: Final = StepHooks()
