"""MonitorMixin: a module that hands over tensors from inside its forward."""

from __future__ import annotations

from typing import Final

from torch import nn

from . import _attention, _forward_hooks

_FUNCTIONS: Final = frozenset({"log_tensor", "log_attention"})


class MonitorMixin:
    """For modules that hand over tensors from inside their forward.

    The functions `log_tensor` and `log_attention` do the same for any module. All of it does nothing unless the model
    is watched with a probe that wants it, and the step is sampled.

    Example:
        class SelfAttention(MonitorMixin, nn.Module):
            def forward(self, x):
                q, k, v = self.heads(self.qkv(x))               # [batch, head, position, feature] each
                self.log_attention(q, k, v, is_causal=True)
                self.log_tensor("gate", self.gate(x))
                ...
    """

    log_tensor = _forward_hooks.log_tensor
    log_attention = _attention.log_attention


def hands_over(module: nn.Module) -> bool:
    """Whether a module's own code hands over tensors, by the mixin or the functions: their names are not known yet."""
    if isinstance(module, MonitorMixin):
        return True
    methods = (method for cls in type(module).__mro__ if cls is not nn.Module for method in vars(cls).values())
    names = (set(code.co_names) for method in methods if (code := getattr(method, "__code__", None)) is not None)
    return any(_FUNCTIONS & used for used in names)
