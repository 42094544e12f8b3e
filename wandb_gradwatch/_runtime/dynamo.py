"""Keep the compiler out of hooks and callbacks: where a whole training step is compiled, Dynamo would trace them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Final, TypeVar, cast

import torch

Function = TypeVar("Function", bound=Callable[..., Any])

_SKIPS_ALL_BELOW: Final = hasattr(torch._C._dynamo.eval_frame, "set_code_exec_strategy")  # torch >= 2.7
ADDED_FRAMES: Final = 0 if _SKIPS_ALL_BELOW else 1  # between an untraced function and its caller


def dynamo_disabled(function: Function) -> Function:
    """Mark a function so that Dynamo neither traces it nor compiles the frames of what it calls.

    What `torch.compiler.disable` does, without importing the compiler (seconds) and without a frame of its own
    (0.5 us a hook): the attribute is for calls that Dynamo sees, the strategy for frames that Python runs while a
    compiled function is active.
    """
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    eval_frame: Any = torch._C._dynamo.eval_frame
    if _SKIPS_ALL_BELOW:
        skip = eval_frame._FrameAction.SKIP
        eval_frame.set_code_exec_strategy(function.__code__, eval_frame._FrameExecStrategy(skip, skip))
        return function

    # torch < 2.7 can skip one frame, not those below it. There the compiler is switched off around the call.
    @functools.wraps(function)
    def alone(*args: Any, **kwargs: Any) -> Any:
        before = eval_frame.set_eval_frame(None)
        try:
            return function(*args, **kwargs)
        finally:
            eval_frame.set_eval_frame(before)

    eval_frame.skip_code(cast("Any", alone).__code__)
    alone._torchdynamo_disable = True  # type: ignore[attr-defined]
    return cast("Function", alone)
