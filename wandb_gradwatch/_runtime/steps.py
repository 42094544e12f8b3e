"""The optimizer step as the clock: one pair of global hooks, nesting, closures, steps that raise.

The hooks exist only while something is watched. Every step event of every optimizer passes here; a listener is told of
those that it follows, once per outermost step.
"""

from __future__ import annotations

import functools
import sys
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import FrameType
from typing import Any, Final, Generic, Protocol, TypeVar

from torch.optim import Optimizer
from torch.optim.optimizer import (
    _global_optimizer_post_hooks,
    _global_optimizer_pre_hooks,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.hooks import RemovableHandle

from .autograd import current_graph_task
from .error_boundary import ADDED_FRAMES, dynamo_disabled

Listener = TypeVar("Listener")


class Listeners(ABC, Generic[Listener]):
    """Who is told of what torch does: what tells of it is put into torch for the first, and taken out after the last.

    Any thread may come, go, or be told: a tuple is gone through as it was.
    """

    def __init__(self) -> None:
        self._listeners: tuple[Listener, ...] = ()
        # Re-entrant: the collector may find a watched model in here, and with it a listener that goes.
        self._lock = threading.RLock()

    def subscribe(self, listener: Listener) -> None:
        with self._lock:
            self._listeners = (*self._listeners, listener)
            self._install()

    def unsubscribe(self, listener: Listener) -> None:
        """Tell it no more. Idempotent."""
        with self._lock:
            self._listeners = tuple(other for other in self._listeners if other is not listener)
            if not self._listeners:
                self._uninstall()

    @abstractmethod
    def _install(self) -> None:
        """Put into torch what tells of it, unless it is there."""

    @abstractmethod
    def _uninstall(self) -> None:
        """Take it out again, if it is there."""


class WrappedFunctions(Listeners[Listener]):
    """Functions of torch that are wrapped, where they are looked up, while anybody listens."""

    def __init__(self) -> None:
        super().__init__()
        self._originals: list[tuple[Any, str, Any]] = []

    @abstractmethod
    def _wrappers(self) -> Iterable[tuple[Any, str, Callable[..., Any]]]:
        """Modules or classes, names in them, and what is called instead, with the original as its first argument."""

    def _install(self) -> None:
        for owner, name, wrapper in () if self._originals else self._wrappers():
            if (original := owner.__dict__.get(name)) is not None:  # a method that is inherited is wrapped at its class
                self._originals.append((owner, name, original))
                setattr(owner, name, _wrapped(original, wrapper))

    def _uninstall(self) -> None:
        for owner, name, original in reversed(self._originals):
            setattr(owner, name, original)
        self._originals = []


def _wrapped(original: Callable[..., Any], wrapper: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        return wrapper(original, *args, **kwargs)

    return call


class StepCounter(Protocol):
    """Counts steps in the place of a listener, with as few calls as that takes."""

    def begins(self, optimizer: Optimizer) -> bool:
        """Whether this step, about to begin, is only counted, or a part of one that is."""

    def ends(self, optimizer: Optimizer) -> bool:
        """An optimizer has stepped, counted or not: whether the counting is over."""


class StepListener:
    """What a watcher wants to know of optimizer steps."""

    counter: StepCounter | None = None  # the listener is told of no step that this one counts

    def follows(self, optimizer: Optimizer) -> bool:
        """Whether this optimizer, about to step, updates something watched. Called at every step: must be cheap."""
        return False

    def end_counting(self, *, before_step_of: Optimizer | None = None) -> None:
        """The counter says so, or an optimizer is about to step that it does not count."""

    def counting_failed(self, error: Exception) -> None:
        """The counter has raised this."""

    def is_part_of(self, inner: Optimizer, outer: Optimizer) -> bool:
        """Whether all that `inner` updates belongs to `outer`: then its steps inside `outer`'s are not its own."""
        return False

    def before_step(self, optimizer: Optimizer, *, inside_backward: bool) -> None:
        """The gradients are what the optimizer is going to use."""

    def before_closure(self, optimizer: Optimizer) -> None:
        """A step with a closure begins: what the gradients hold now means nothing."""

    def after_step(self, optimizer: Optimizer, *, inside_backward: bool) -> None:
        """The step is done; or it has raised, which may be noticed only when the next backward is under way."""

    def mute(self, muted: bool) -> None:
        """Backwards between a closure's first return and the end of its step are not seen."""


@dataclass(eq=False)
class _Step:
    """A step under way, and where in the call stack it runs.

    The frame itself is kept, not its id, which another frame takes over as soon as it is gone. A step that raised
    keeps it until the thread's next step or backward.
    """

    optimizer: Optimizer
    frame: FrameType
    inside_backward: bool
    listeners: list[StepListener]
    is_muted: bool = False
    last_hook: RemovableHandle | None = None

    def begin(self) -> None:
        for listener in self.listeners:
            listener.before_step(self.optimizer, inside_backward=self.inside_backward)


class _Stack(threading.local):
    def __init__(self) -> None:
        self.steps: list[_Step] = []


class StepHooks(Listeners[StepListener]):
    """The process's one subscription to optimizer steps: listeners are told of the steps that they follow."""

    def __init__(self) -> None:
        super().__init__()
        self._handles: list[RemovableHandle] = []
        self._stack = _Stack()
        self._under_way: set[weakref.ref[_Step]] = set()  # of all threads

    def _install(self) -> None:
        if not self._handles:
            self._handles = [
                register_optimizer_step_pre_hook(self._before),
                register_optimizer_step_post_hook(self._after),
            ]

    def _uninstall(self) -> None:
        # Steps that have begun are to be ended. And while any thread steps, watched or not, torch goes through its
        # hooks, and raises where they change and one is still to come. Then ours stay, doing nothing, until the last
        # listener leaves another time.
        are_alone = len(_global_optimizer_pre_hooks) == len(_global_optimizer_post_hooks) == 1
        if are_alone and not self._under_way:
            for handle in self._handles:
                handle.remove()
            self._handles = []

    @dynamo_disabled
    def _before(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        listeners: list[StepListener] = []
        for listener in self._listeners:
            try:
                if (counter := listener.counter) is not None and counter.begins(optimizer):
                    continue
            except Exception as error:
                listener.counting_failed(error)
            if listener.follows(optimizer):
                listener.end_counting(before_step_of=optimizer)
                listeners.append(listener)
        if not listeners:
            return None
        frame = sys._getframe(1 + ADDED_FRAMES)
        self.drop_raised(frame)
        for outer in self._stack.steps:
            listeners = [
                listener
                for listener in listeners
                if listener not in outer.listeners or not listener.is_part_of(optimizer, outer.optimizer)
            ]
        step = _Step(optimizer, frame, current_graph_task() != -1, listeners)
        self._stack.steps.append(step)
        self._under_way.add(weakref.ref(step, self._under_way.discard))
        closure = args[1] if len(args) > 1 else kwargs.get("closure")  # args[0] is the optimizer
        if not callable(closure):
            # Torch runs the global hooks first. What an optimizer's own ones, or later global ones, do to the gradients
            # (clip, reduce) comes before the step too: one that is registered now runs after them all.
            if listeners and self._others_follow(optimizer):
                step.last_hook = optimizer.register_step_pre_hook(lambda *_: step.begin())
            else:
                step.begin()
            return None
        for listener in listeners:
            listener.before_closure(optimizer)
        wrapped = _measured_at_first_return(closure, step)
        return ((args[0], wrapped, *args[2:]), kwargs) if len(args) > 1 else (args, {**kwargs, "closure": wrapped})

    @dynamo_disabled
    def _after(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for listener in self._listeners:
            try:
                if (counter := listener.counter) is not None and counter.ends(optimizer):
                    listener.end_counting()
            except Exception as error:
                listener.counting_failed(error)
        if not self._under_way:
            return
        steps = self._stack.steps
        if not any(step.optimizer is optimizer for step in steps):
            return  # not followed, or watched only since it began
        while steps:
            step = steps.pop()
            self._end(step)
            if step.optimizer is optimizer:
                break

    def _others_follow(self, optimizer: Optimizer) -> bool:
        """Whether hooks of others run between this one and the step."""
        newest = list(_global_optimizer_pre_hooks.values())[-1:]  # at once: another thread may change them
        return bool(optimizer._optimizer_step_pre_hooks) or newest != [self._before]

    def drop_raised(self, frame: FrameType | None = None) -> None:
        """End the steps that raised, which must not mute the backwards to come: their frames are no callers any more.

        `frame`: of the step that begins; None: none does.
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
        for listener in step.listeners:
            listener.after_step(step.optimizer, inside_backward=step.inside_backward)


def _measured_at_first_return(closure: Callable[[], Any], step: _Step) -> Callable[[], Any]:
    """The closure, with the gradients of its first evaluation measured as the step's.

    Line searches evaluate up to 20 times more, and Lightning runs the whole training step in here.
    """

    def evaluate(*args: Any, **kwargs: Any) -> Any:
        result = closure(*args, **kwargs)
        if not step.is_muted:
            step.begin()
            step.is_muted = True
            for listener in step.listeners:
                listener.mute(True)
        return result

    return evaluate


STEP_HOOKS: Final = StepHooks()
