"""What the rest of the package asks of torch's autograd engine, and the type of a watched parameter's entry."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Final

import torch
from torch import Tensor

from .notices import CannotWatchError

Entry = tuple[int, Tensor]  # a slot (the parameter's row) and its parameter

current_graph_task: Final[Callable[[], int]] = torch._C._current_graph_task_id  # -1 outside a backward
num_nodes_made: Final[Callable[[], int]] = torch._C._autograd._get_sequence_nr  # by this thread's forwards so far

_BACKWARD: Final = torch.autograd.backward.__code__


def backward_root() -> Tensor | None:
    """The one element that the backward under way was called on: the loss, or the share of it that is differentiated.

    None where that is not known: called on several tensors or a tensor of several elements, with a gradient of its own,
    by `torch.autograd.grad`, or by one of several threads at once. The engine does not tell what it was started with,
    but the call is still on the stack: of this thread, or, where a device's thread runs the backward, of the one that
    waits for it.
    """
    calls = list(_backwards(sys._getframe()))
    if not calls:
        of_threads = [found for frame in sys._current_frames().values() if (found := list(_backwards(frame)))]
        calls = of_threads[0] if len(of_threads) == 1 else []
    if not calls:
        return None
    names = calls[-1].f_locals  # the outermost: re-entrant checkpoints call others inside of it
    tensors, of_tensors = names.get("tensors"), names.get("grad_tensors")
    root = tensors[0] if isinstance(tensors, tuple | list) and len(tensors) == 1 else tensors
    if isinstance(of_tensors, tuple | list):
        of_tensors = None if all(one is None for one in of_tensors) else of_tensors
    if not isinstance(root, Tensor) or root.numel() != 1 or root.is_complex() or of_tensors is not None:
        return None
    return root


def _backwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        if frame.f_code is _BACKWARD:
            yield frame
        frame = frame.f_back


class _Replay(threading.local):
    is_running = False


replay: Final = _Replay()  # a forward and backward that we run to look at: no part of the training


class TrainingThread:
    """The thread that has made the last step, or called the last backward; until then, the one that watches."""

    def __init__(self) -> None:
        self._identity = threading.get_ident()
        self._trained: set[int] = set()

    def step_begins(self) -> None:
        """An optimizer is about to step, in this thread."""
        self._identity = threading.get_ident()
        self._trained.add(self._identity)
        self.check_turns()

    def check_turns(self) -> None:
        """Make sure that of several threads that have trained no other one is in a backward now.

        Raises:
            CannotWatchError: one is. Torch writes to `.grad` while another thread must not even look at it.
        """
        own = threading.get_ident()
        if self.has_company and own in self._trained:
            frames = sys._current_frames()
            del frames[own]  # this very call's, a cycle that would keep alive whatever its callers hold
            if any(any(_backwards(frames.get(one))) for one in self._trained):
                raise CannotWatchError(
                    "several threads train what one watcher watches, and one stepped while another was in a backward, "
                    "when no gradient can be read; models with threads of their own need a watch() each"
                )

    def backward_begins(self) -> None:
        """A backward is under way, in this thread or in a device's."""
        if any(_backwards(sys._getframe())):
            self.step_begins()

    @property
    def has_company(self) -> bool:
        """Whether several threads have trained, of which one may be in a backward now."""
        return len(self._trained) > 1

    @property
    def is_this(self) -> bool:
        """Whether it is the one that asks."""
        return self._identity == threading.get_ident()

    @property
    def is_another(self) -> bool:
        """Whether it is alive, and not the one that asks."""
        return not self.is_this and self._identity in sys._current_frames()
