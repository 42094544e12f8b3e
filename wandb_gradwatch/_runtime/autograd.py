"""Queries to torch's autograd engine: the current backward, its root, and the thread that trains."""

import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Final

import torch
from torch import Tensor

from .notices import CannotWatchError

Entry = tuple[int, Tensor]  # a watched parameter: its slot (the index of its row) and the parameter

current_graph_task: Final[Callable[[], int]] = torch._C._current_graph_task_id  # returns -1 outside of a backward
num_nodes_made: Final[Callable[[], int]] = torch._C._autograd._get_sequence_nr  # nodes made so far by this thread

_BACKWARD: Final = torch.autograd.backward.__code__


def backward_root() -> Tensor | None:
    """The scalar on which the current backward was called: the loss, or the part of it that is differentiated.

    None if it is unknown: `backward()` was called on several tensors, on a tensor with several elements, or with a
    gradient argument; `torch.autograd.grad` was called; or several threads run a backward. The call is found on the
    stack of this thread or, if a device's thread runs the backward, of the thread that waits for it.
    """
    call = _backward_call(sys._getframe())
    if call is None:
        of_threads = [one for frame in sys._current_frames().values() if (one := _backward_call(frame)) is not None]
        if len(of_threads) != 1:
            return None
        call = of_threads[0]
    tensors, given = call.f_locals.get("tensors"), call.f_locals.get("grad_tensors")
    root = tensors[0] if isinstance(tensors, tuple | list) and len(tensors) == 1 else tensors
    has_gradient = any(one is not None for one in (given if isinstance(given, tuple | list) else [given]))
    if not isinstance(root, Tensor) or root.numel() != 1 or root.is_complex() or has_gradient:
        return None
    return root


def _backward_call(frame: FrameType | None) -> FrameType | None:
    """Return the frame of the innermost `backward()` on this stack: at the end of a backward it is the only one."""
    while frame is not None and frame.f_code is not _BACKWARD:
        frame = frame.f_back
    return frame


class _Replay(threading.local):
    is_running = False


replay: Final = _Replay()  # True while we run a forward and backward for a search, which is not part of the training


class TrainingThread:
    """The thread that made the last step or called the last backward; before these, the thread that called watch()."""

    def __init__(self) -> None:
        self._identity = threading.get_ident()
        self._trained: set[int] = set()
        self.has_company = False  # whether several threads have trained: another one may be in a backward now

    def step_begins(self) -> None:
        """Record that an optimizer is about to step in this thread."""
        self._identity = threading.get_ident()
        self._trained.add(self._identity)
        if len(self._trained) > 1:
            self.has_company = True
            self.check_turns()

    def check_turns(self) -> None:
        """Check that no other thread that has trained is in a backward now. Only needed if `has_company`.

        Raises:
            CannotWatchError: one is. While its backward writes `.grad`, other threads must not even read `.grad`.
        """
        own = threading.get_ident()
        if own in self._trained:
            frames = sys._current_frames()
            del frames[own]  # the frame of this call: a reference cycle, which would keep its callers' objects alive
            if any(_backward_call(frames.get(one)) is not None for one in self._trained):
                raise CannotWatchError(
                    "several threads train the models of one watcher, and one stepped while another ran a backward, "
                    "during which no gradient can be read; call watch() once for each model that has its own thread"
                )

    def backward_begins(self) -> None:
        """Record that a backward is running, in this thread or in a device's thread."""
        if threading.get_ident() in self._trained or _backward_call(sys._getframe()) is not None:
            self.step_begins()

    @property
    def is_another(self) -> bool:
        """Whether the training thread is alive and is not the calling thread."""
        return self._identity != threading.get_ident() and self._identity in sys._current_frames()
