"""Runs the monitor's code one call at a time, timed and without autograd; hooks without compilation."""

import functools
import gc
import os
import threading
import time
from collections.abc import Callable
from typing import Any, Concatenate, Final, ParamSpec, TypeVar

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode

from .._boundary import Boundary, entry_point

# torch.no_grad() calls this function through four Python frames.
_set_grad_enabled: Final[Callable[[bool], None]] = torch._C._set_grad_enabled

Function = TypeVar("Function", bound=Callable[..., Any])
Arguments = ParamSpec("Arguments")
Answer = TypeVar("Answer")


class ErrorBoundary(Boundary):
    """Runs the monitor's code, timed, one call at a time and without autograd, until one raises: `failed` is called."""

    def __init__(self, failed: Callable[[Exception], None]) -> None:
        super().__init__(failed)
        self._process = os.getpid()
        self.seconds_spent = 0.0  # by which the host has delayed the training
        # Set if a device is used that works in parallel with the host: called when the monitor's code begins. It
        # returns a function that tells whether the device has been busy with earlier work since then.
        self.lag: Callable[[], Callable[[], bool]] | None = None
        self._is_busy: Callable[[], bool] = lambda: False  # the newest of these functions
        self.lock = threading.RLock()  # held while the monitor's code runs, and during the user's calls of its methods
        self._depth = 0  # depth of nested calls, of which only the outermost is timed

    @property
    def in_forked_child(self) -> bool:
        """Whether this process is a forked child: it has inherited the hooks, but does not own the run."""
        return os.getpid() != self._process

    def run(
        self, function: Callable[Arguments, Answer], /, *args: Arguments.args, **kwargs: Arguments.kwargs
    ) -> Answer | None:
        """Call the function and return its result; None if it raises or the monitor has stopped. In an entry point."""
        if self.stopped or os.getpid() != self._process or _graph_is_captured():
            return None
        began = time.perf_counter()
        # A sample makes thousands of short-lived tuples, which trigger garbage collections of the whole program: half
        # of our cost with a thousand tensors.
        pauses_collector = not self._depth and gc.isenabled()
        with_autograd = torch.is_grad_enabled()
        inside_another = is_hidden = False
        # Ctrl-C comes right after a call: every call that changes something is inside the try that takes it back.
        try:
            if pauses_collector:
                gc.disable()
            with self.lock:
                inside_another = self._depth > 0
                self._depth += 1
                try:
                    _set_grad_enabled(False)
                    if self.lag is not None and not inside_another:
                        self._is_busy = self.lag()
                    answer = function(*args, **kwargs)
                    is_hidden = not inside_another and self.is_hidden()
                    return answer
                except Exception as error:
                    self.caught(error)
                    return None
                finally:
                    self._depth -= 1
                    _set_grad_enabled(with_autograd)
                    if not (self._depth or is_hidden):
                        self.seconds_spent += time.perf_counter() - began
        finally:
            if pauses_collector:
                gc.enable()

    def is_hidden(self) -> bool:
        """Whether the outermost call has cost no time so far, because the device is behind the host."""
        return self.lag is not None and self._is_busy()


def _graph_is_captured() -> bool:
    """Whether a CUDA graph is being captured: kernels launched now would be part of every replay."""
    return bool(torch.cuda.is_initialized()) and torch.cuda.is_current_stream_capturing()  # type: ignore[no-untyped-call]


def graph_is_made() -> bool:
    """Whether a CUDA graph is being captured, or a compiler traces with fake tensors."""
    return _graph_is_captured() or _get_current_dispatch_mode() is not None


def dynamo_disabled(function: Function) -> Function:
    """Mark a hook so that Dynamo neither traces it, in a compiled step, nor compiles the functions that it calls.

    This does what `torch.compiler.disable` does, without the import of the compiler (seconds) and without an additional
    frame (0.5 us per hook). The attribute applies to calls that Dynamo traces; the strategy applies to frames that
    Python runs while a compiled function is active.
    """
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    eval_frame: Any = torch._C._dynamo.eval_frame
    skip = eval_frame._FrameAction.SKIP
    eval_frame.set_code_exec_strategy(function.__code__, eval_frame._FrameExecStrategy(skip, skip))
    return function


def contained(method: Callable[Concatenate[Any, Arguments], None]) -> Callable[Concatenate[Any, Arguments], None]:
    """Make a method an entry point that runs in its object's `_boundary`. Dynamo does not trace the method."""

    @dynamo_disabled
    @entry_point()
    @functools.wraps(method)
    def run(self: Any, /, *args: Arguments.args, **kwargs: Arguments.kwargs) -> None:
        self._boundary.run(method, self, *args, **kwargs)

    return run


def alone(
    otherwise: Callable[[], Any] = lambda: None,
) -> Callable[[Callable[Concatenate[Any, Arguments], Answer]], Callable[Concatenate[Any, Arguments], Answer]]:
    """Make a method an entry point that runs under its object's lock, `_own_turn()`.

    Any thread may call the method: the monitor's code in the training thread waits meanwhile.
    """

    def decorate(
        method: Callable[Concatenate[Any, Arguments], Answer],
    ) -> Callable[Concatenate[Any, Arguments], Answer]:
        @entry_point(otherwise)
        @functools.wraps(method)
        def locked(self: Any, /, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Answer:
            with self._own_turn():
                return method(self, *args, **kwargs)

        return locked

    return decorate
