"""Backwards as events: one wrapper around `torch.autograd.backward`, and the thread that trains."""

import sys
import threading
from collections.abc import Callable, Iterable
from types import FunctionType
from typing import Any, Final

import torch
from torch import Tensor
from torch.autograd.graph import _engine_run_backward

from .._boundary import Call, EntryPoints, Replacement, entry_point
from .autograd import current_graph_task, replay
from .error_boundary import dynamo_disabled
from .listeners import Listeners
from .notices import CannotWatchError


def root_of(call: Call) -> Tensor | None:
    """The scalar that a call of `backward` starts from: the loss, or the part of it that is differentiated.

    None if it starts from several tensors, from a tensor with several elements, or with a gradient argument.
    """
    tensors = call.args[0] if call.args else call.kwargs.get("tensors")
    given = call.args[1] if len(call.args) > 1 else call.kwargs.get("grad_tensors")
    root = tensors[0] if isinstance(tensors, tuple | list) and len(tensors) == 1 else tensors
    has_gradient = any(one is not None for one in (given if isinstance(given, tuple | list) else [given]))
    if not isinstance(root, Tensor) or root.numel() != 1 or root.is_complex() or has_gradient:
        return None
    return root


class Backwards(Listeners):
    """Calls listeners before and after every outermost backward of this process, in the thread that calls it.

    `loss.backward()` calls the wrapped function. A backward inside another one (of a re-entrant checkpoint) is a part
    of that one. Not seen are calls by a name that was imported before the first watch().
    """

    _needless_while_counting = ("backward",)

    def _wrappers(self) -> Iterable[tuple[Any, str, EntryPoints]]:
        yield torch.autograd, "backward", {"before": self._begins, "after": self._ended}

    def _replacement(self, owner: Any, name: str, entry_points: EntryPoints) -> Replacement:
        return Replacement(owner, name, finish=_skipped_by_the_compiler, **entry_points)

    @entry_point()
    def _begins(self, call: Call) -> None:
        if replay.is_running or current_graph_task() != -1:
            return
        call.found = True
        for listener in self._listeners:
            if listener.counter is None:
                listener.backward_begins()

    @entry_point()
    def _ended(self, call: Call) -> None:
        for listener in self._listeners if call.found else ():
            if listener.counter is None:
                listener.backward_ended(call)


def _skipped_by_the_compiler(wrapper: Any) -> Callable[..., Any]:
    """A copy with code of its own: the compiler skips it without skipping other wrappers."""
    copy = FunctionType(wrapper.__code__.replace(), wrapper.__globals__, closure=wrapper.__closure__)
    return dynamo_disabled(copy)


def _is_in_backward(thread: int) -> bool:
    """Whether the thread with this identity is in a backward: it may be writing to gradients."""
    frame = sys._current_frames().get(thread)
    while frame is not None and frame.f_code is not _engine_run_backward.__code__:
        frame = frame.f_back
    return frame is not None


BACKWARDS: Final = Backwards()


class TrainingThread:
    """The thread that made the last step or backward; before these, the thread that called watch()."""

    def __init__(self) -> None:
        self._identity = threading.get_ident()
        self._trained: set[int] = set()

    @property
    def has_company(self) -> bool:
        """Whether several threads have trained: another one may be in a backward now."""
        return len(self._trained) > 1

    def moves_here(self) -> None:
        """Record that the calling thread trains; inside a backward, a device's thread may work for the one that does.

        Raises:
            CannotWatchError: another one is in a backward. While it writes to `.grad`, no other thread may even read
                `.grad`.
        """
        own = threading.get_ident()
        if current_graph_task() != -1:
            return
        if own != self._identity and _is_in_backward(self._identity):
            raise CannotWatchError(
                "several threads train the models of one watcher, and one stepped while another ran a backward, during "
                "which no gradient can be read; call watch() once for each model that has its own thread"
            )
        self._identity = own
        self._trained.add(own)

    @property
    def is_here(self) -> bool:
        """Whether it is the calling thread."""
        return self._identity == threading.get_ident()

    def runs_backward(self) -> bool:
        """Whether it is in a backward."""
        return _is_in_backward(self._identity)

    @property
    def is_another(self) -> bool:
        """Whether it is alive and is not the calling thread."""
        return not self.is_here and self._identity in sys._current_frames()
