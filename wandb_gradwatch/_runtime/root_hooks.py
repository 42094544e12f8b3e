"""Forward hooks on whole models that torch.compile never sees: no graph break, no guard and no recompilation."""

import sys
from collections.abc import Callable
from types import FunctionType
from typing import Any, Final

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from .._boundary import Boundary, entry_point
from .wrappers import HookOwner, TransientHook


class _RootHook(TransientHook):
    """A transient hook that runs uncompiled where only the model's `forward` is compiled."""

    # A copy of the method without another frame: the compiler's strategy belongs to the code, which others share.
    __call__ = FunctionType(TransientHook.__call__.__code__.replace(), TransientHook.__call__.__globals__)

    @property
    def __name__(self) -> str:
        # torch.jit.script asks every hook for its name, and compiles the hook.
        raise AttributeError(
            "torch.jit.script cannot compile a model while wandb_gradwatch watches it: call unwatch(model) before"
        )


_EVAL_FRAME: Final[Any] = torch._C._dynamo.eval_frame
_SKIP: Final = _EVAL_FRAME._FrameAction.SKIP
_EVAL_FRAME.set_code_exec_strategy(_RootHook.__call__.__code__, _EVAL_FRAME._FrameExecStrategy(_SKIP, _SKIP))


class RootHooks:
    """Forward hooks with keyword arguments, which are taken off while the compiler traces.

    Otherwise a compiled function that calls a hooked model would be compiled again when the hook is removed, as it is
    if the model has hooks of others too. Traced without the hook, the function calls the model without it.

    Args:
        owner: whether the hooks do anything, and who gets their exceptions.
        boundary: gets the exceptions of what the compiler calls.
    """

    def __init__(self, owner: HookOwner, boundary: Boundary) -> None:
        self._owner, self._boundary = owner, boundary
        self._handles: list[RemovableHandle] = []
        # Tables of a module, the hook's number in them, and its value
        self._taken_off: list[tuple[dict[int, Any], int, Any]] = []
        self._compiler: Any = None  # torch's handler of callbacks, when it is known

    def register(self, module: nn.Module, function: Callable[..., None]) -> None:
        """Call a function with the module, its arguments and its output after every forward.

        Does nothing if code is compiled to depend on every hook, which is a setting of the compiler.
        """
        dynamo = sys.modules.get("torch._dynamo")
        if dynamo is not None and not dynamo.config.skip_nnmodule_hook_guards:
            return
        self._handles.append(module.register_forward_hook(_RootHook(self._owner, function), with_kwargs=True))

    def follow_compiler(self) -> None:
        """Learn when the compiler traces, if the program has imported it: that takes seconds."""
        if self._compiler is None and self._handles and (dynamo := sys.modules.get("torch._dynamo")) is not None:
            self._compiler = getattr(dynamo, "callback_handler", None)
            if self._compiler is not None:
                self._compiler.register_start_callback(self._tracing_begins)
                self._compiler.register_end_callback(self._tracing_ended)

    def remove(self) -> None:
        """Remove every hook. Idempotent."""
        for handle in self._handles:
            handle.remove()
        self._handles, self._taken_off = [], []
        if self._compiler is not None:
            for callbacks, own in (
                (self._compiler.start_callbacks, self._tracing_begins),
                (self._compiler.end_callbacks, self._tracing_ended),
            ):
                if own in callbacks:  # torch._dynamo.reset() removes all callbacks
                    callbacks.remove(own)

    @entry_point()
    def _tracing_begins(self, *_: object) -> None:
        for handle in self._handles:
            hooks = handle.hooks_dict_ref()
            if hooks is None or len(hooks) > 1:  # code that is compiled with other hooks depends on all of them
                continue
            for reference in (handle.hooks_dict_ref, *handle.extra_dict_ref):
                if (table := reference()) is not None and handle.id in table:
                    self._taken_off.append((table, handle.id, table.pop(handle.id)))

    @entry_point()
    def _tracing_ended(self, *_: object) -> None:
        taken_off, self._taken_off = self._taken_off, []
        for table, number, value in taken_off:
            table[number] = value
