"""Listeners to what a training does with gradients, and the wrappers of torch's functions that call them."""

import threading
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from .._boundary import Boundary, Call, EntryPoints, Replacement


class StepCounter:
    """Counts steps in place of a listener, with as few calls as possible. This one counts none."""

    def begins(self, optimizer: Optimizer) -> bool:
        """Called before a step: whether the step is only counted, or is a part of a step that is only counted."""
        return False

    def ends(self, optimizer: Optimizer) -> bool:
        """Called after a step, counted or not: whether counting ends."""
        return False


class Listener:
    """A subscriber to backwards, steps of optimizers or pipelines, scalers and clipping: methods that do nothing."""

    _boundary: Boundary  # gets the exceptions of its methods, which are entry points, and of the code that calls them

    @property
    def counter(self) -> StepCounter | None:
        """Counts in place of the listener, which is not called for backwards and clipping, nor for steps it counts."""
        return None

    def fail(self, error: Exception) -> None:
        """Stop, because the code that calls the listeners has raised."""
        self._boundary.fail(error)

    def follows(self, optimizer: Optimizer) -> bool:
        """Whether this optimizer updates watched parameters. Called before every step, so it must be cheap."""
        return False

    def end_counting(self, *, before_step: bool = False) -> None:
        """Stop counting: `counter.ends` returned True, or an optimizer is about to step that is not counted."""

    def updates(self, optimizer: Optimizer) -> bool:
        """Whether this optimizer updates watched parameters, without learning anything from it."""
        return False

    def steps_replayed(self, number: int) -> None:
        """A CUDA graph has made so many steps of followed optimizers, without any other call of this listener."""

    def is_part_of(self, inner: Optimizer, outer: Optimizer) -> bool:
        """Whether `outer` owns all parameters of `inner`, so that steps of `inner` inside its steps are ignored."""
        return False

    def before_step(self, optimizer: Optimizer, *, inside_backward: bool) -> None:
        """Called when the gradients are those that the optimizer will use."""

    def guard_step(self, optimizer: Optimizer, *, inside_backward: bool) -> None:
        """Called after every listener's `before_step`: the gradients may be withheld from the optimizer now."""

    def before_inner_step(self, optimizer: Optimizer, *, is_torchs: bool) -> None:
        """Called inside a step, before a step that it delegates to: `super().step()`, or that of another optimizer.

        `is_torchs`: the inner step is one of torch's own, which uses the gradients as they are now.
        """

    def before_closure(self, optimizer: Optimizer) -> None:
        """Called before a step with a closure, whose present gradients are meaningless."""

    def after_step(self, optimizer: Optimizer, *, inside_backward: bool) -> None:
        """Called after a step. If the step raised, the call may come as late as in the next backward."""

    def mute(self, muted: bool) -> None:
        """Ignore backwards (True) between the first return of a closure and the end of its step, or stop to (False)."""

    def before_unscale(self, optimizer: Optimizer) -> None:
        """A scaler is about to unscale the gradients: last moment at which they are scaled and unclipped."""

    def after_unscale(self, optimizer: Optimizer) -> None:
        """A scaler has unscaled the gradients in place."""

    def step_skipped(self, optimizer: Optimizer) -> None:
        """A scaler's `step` was called, but the optimizer was not stepped."""

    def before_clipping(self, parameters: Sequence[Tensor]) -> None:
        """The gradients of these are about to be clipped, in place."""

    def after_clipping(self, parameters: Sequence[Tensor]) -> None:
        """The gradients of these are clipped, if they exceeded the limit."""

    def backward_begins(self) -> None:
        """A backward begins in this thread, of any model. Called at every backward, so it must be cheap."""

    def backward_ended(self, call: Call) -> None:
        """A backward has returned: the gradients that it has reached are final."""

    def schedule_begins(self, schedule: Any) -> None:
        """A pipeline schedule is about to run the forwards and backwards of all micro-batches."""

    def schedule_ended(self, schedule: Any) -> None:
        """A pipeline schedule has run them and scaled the gradients, or it has raised."""


class Listeners:
    """Subscribers to calls of torch functions, which are replaced by wrappers while there is a subscriber.

    Any thread may subscribe, unsubscribe or cause an event: events iterate over an immutable tuple of listeners.
    """

    _needless_while_counting: Collection[str] = ()  # names of attributes

    def __init__(self) -> None:
        self._boundary = Boundary(self._failed)
        self._listeners: tuple[Listener, ...] = ()
        self._counters: tuple[tuple[Listener, StepCounter | None], ...] = ()  # of each listener, if it counts
        # Re-entrant: a garbage collection in here may free a watched model, which unsubscribes a listener.
        self._lock = threading.RLock()
        self._replaced: dict[tuple[Any, str], Replacement] = {}  # by owner and name

    def subscribe(self, listener: Listener) -> None:
        with self._lock:
            self._listeners = (*self._listeners, listener)
            self._install()
            self.counting_changes()

    def unsubscribe(self, listener: Listener) -> None:
        """Remove a listener. Idempotent."""
        with self._lock:
            self._listeners = tuple(other for other in self._listeners if other is not listener)
            if not self._listeners:
                self._uninstall()
            self.counting_changes()

    def counting_changes(self) -> None:
        """Turn off what no listener needs if all of them count, or on. Call it when one begins or ends to count."""
        with self._lock:
            self._counters = tuple([(listener, listener.counter) for listener in self._listeners])
            are_counting = all([counter is not None for _, counter in self._counters])
            for (_, name), one in self._replaced.items():
                one.is_off = are_counting and name in self._needless_while_counting

    def _failed(self, error: Exception) -> None:
        for listener in self._listeners:
            listener.fail(error)

    def _wrappers(self) -> Iterable[tuple[Any, str, EntryPoints]]:
        """Modules or classes, attribute names, and the entry points `before` and `after` calls of the attribute."""
        return ()

    def _install(self) -> None:
        """Wrap what is not wrapped, or not any more: others may have replaced a wrapper since the last subscription."""
        for owner, name, entry_points in self._wrappers():
            if name not in owner.__dict__:
                continue  # an inherited method is wrapped at its own class
            known = self._replaced.get((owner, name))
            if known is None or not known.is_outermost:
                if known is not None:
                    known.undo()
                one = self._replaced[owner, name] = self._replacement(owner, name, entry_points)
                one.install()

    def _replacement(self, owner: Any, name: str, entry_points: EntryPoints) -> Replacement:
        return Replacement(owner, name, **entry_points)

    def _uninstall(self) -> None:
        while self._replaced:  # a garbage collection in here may unsubscribe a listener, and empty it
            place, one = next(iter(self._replaced.items()))
            one.undo()
            self._replaced.pop(place, None)
