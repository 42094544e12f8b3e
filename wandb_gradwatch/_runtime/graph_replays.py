"""Steps inside CUDA graphs: a step that is captured is not made, and a replay makes it without any Python."""

import weakref
from collections import Counter
from collections.abc import Iterable
from typing import Any, Final

import torch
from torch.optim import Optimizer

from .._boundary import Call, EntryPoints, entry_point
from .listeners import Listener, Listeners


class GraphReplays(Listeners):
    """Tells listeners how many of their steps a replay has made. Only replays by torch.cuda.CUDAGraph are seen."""

    def __init__(self) -> None:
        super().__init__()
        self.is_capturing = False
        self._captured: list[tuple[Listener, int]] = []  # in the graph under way: the listener and the optimizer's id
        # graph -> listener -> number of steps
        self._steps: weakref.WeakKeyDictionary[Any, weakref.WeakKeyDictionary[Listener, int]]
        self._steps = weakref.WeakKeyDictionary()

    def _wrappers(self) -> Iterable[tuple[Any, str, EntryPoints]]:
        graph = torch.cuda.CUDAGraph
        yield graph, "capture_begin", {"after": self._begun}
        yield graph, "capture_end", {"at_exit": self._ended}
        yield graph, "replay", {"after": self._replayed}

    def _uninstall(self) -> None:
        super()._uninstall()
        self.is_capturing = False  # the end of a capture that is under way is not seen any more

    @entry_point()
    def _begun(self, _: Call) -> None:
        self.is_capturing, self._captured = True, []

    def step_captured(self, optimizer: Optimizer) -> None:
        """A step of this optimizer is captured."""
        self._captured += [(listener, id(optimizer)) for listener in self._listeners if listener.updates(optimizer)]

    @entry_point()
    def _ended(self, call: Call) -> None:
        # Optimizers that step one after the other make one step of the training.
        steps: weakref.WeakKeyDictionary[Listener, int] = weakref.WeakKeyDictionary()
        for (listener, _), number in Counter(self._captured).items():
            steps[listener] = max(steps.get(listener, 0), number)
        self.is_capturing, self._captured = False, []
        self._steps[call.args[0]] = steps

    @entry_point()
    def _replayed(self, call: Call) -> None:
        for listener, number in list(self._steps.get(call.args[0], {}).items()):
            if listener in self._listeners:
                listener.steps_replayed(number)


GRAPH_REPLAYS: Final = GraphReplays()
