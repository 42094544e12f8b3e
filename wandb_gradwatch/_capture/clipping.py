"""The moment before torch's own functions clip: what the gradients hold then is what clipping is about.

While something is watched, these functions are wrapped, where they are looked up: gradients that were rescaled,
averaged or completed after the backward are measured again before they are clipped, and the change that follows is
known to be a clipping. Clipping by other code is told by what it leaves: see `_measure/change.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, Protocol

import torch
from torch import Tensor
from torch.nn import utils
from torch.nn.utils import clip_grad

from .._runtime.steps import WrappedFunctions


class ClipListener(Protocol):
    """What a watcher wants to know of torch's clipping functions."""

    def before_clipping(self, parameters: Sequence[Tensor]) -> None:
        """The gradients of these are about to be clipped, in place."""

    def after_clipping(self, parameters: Sequence[Tensor]) -> None:
        """They have been, if they had to be."""


# Before torch 2.6 there is no function of its own for the second half of clip_grad_norm_. What is in both modules is
# wrapped in both; `clip_grad_norm_` calls the one of clip_grad, also where it was imported by name before.
_BY_NORM: Final = ("_clip_grads_with_norm_", "clip_grads_with_norm_")
_FUNCTIONS: Final = (*_BY_NORM, "clip_grad_value_") if hasattr(clip_grad, _BY_NORM[0]) else (
    "clip_grad_norm_",
    "clip_grad_value_",
)  # fmt: skip


class ClipFunctions(WrappedFunctions[ClipListener]):
    """The wrapped functions, and who listens."""

    def _wrappers(self) -> Iterable[tuple[Any, str, Callable[..., Any]]]:
        return [(module, name, self._clip) for module in (clip_grad, utils) for name in _FUNCTIONS]

    def _clip(self, original: Callable[..., Any], parameters: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return original(parameters, *args, **kwargs)
        parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        for listener in self._listeners:
            listener.before_clipping(parameters)
        result = original(parameters, *args, **kwargs)
        for listener in self._listeners:
            listener.after_clipping(parameters)
        return result


CLIP_FUNCTIONS: Final = ClipFunctions()
