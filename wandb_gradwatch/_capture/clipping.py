"""Calls listeners before and after torch's own functions clip gradients.

While a model is watched, these functions are wrapped: gradients that were rescaled, averaged or completed after the
backward are measured again before they are clipped, and the change that follows is known to be clipping. Clipping by
other code is recognised by the gradients that it leaves: see `_measure/change.py`.
"""

from collections.abc import Callable, Iterable
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import utils
from torch.nn.utils import clip_grad

from .._runtime.steps import Listeners

# Since torch 2.6 the second half of clip_grad_norm_ is a function of its own, which clip_grad_norm_ looks up in
# clip_grad even if it was imported by name before. Functions in both modules are wrapped in both.
_SECOND_HALF: Final = ("_clip_grads_with_norm_", "clip_grads_with_norm_")
_BY_NORM: Final = _SECOND_HALF if hasattr(clip_grad, _SECOND_HALF[0]) else ("clip_grad_norm_",)


class ClipFunctions(Listeners):
    def _wrappers(self) -> Iterable[tuple[Any, str, Callable[..., Any]]]:
        return [(module, name, self._clip) for module in (clip_grad, utils) for name in (*_BY_NORM, "clip_grad_value_")]

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
