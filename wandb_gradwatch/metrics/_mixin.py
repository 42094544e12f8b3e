"""MonitorMixin: a module that hands over tensors from inside its forward."""

from __future__ import annotations

from typing import Final

from torch import Tensor, nn

from ._attention import log_attention
from ._forward_hooks import Dims, log_tensor

_FUNCTIONS: Final = frozenset({log_tensor.__name__, log_attention.__name__})


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

    def log_tensor(self, name: str, tensor: Tensor, *, dims: Dims = None) -> None:
        """Hand over a tensor, as the function `log_tensor` does."""
        log_tensor(_module(self), name, tensor, dims=dims)

    def log_attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor | None = None,
        *,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
        scale: float | None = None,
    ) -> None:
        """Hand over the tensors of an attention, as the function `log_attention` does."""
        log_attention(_module(self), query, key, value, attn_mask=attn_mask, is_causal=is_causal, scale=scale)


def hands_over(module: nn.Module) -> bool:
    """Whether a module's own code hands over tensors, by the mixin or the functions: their names are not known yet."""
    if isinstance(module, MonitorMixin):
        return True
    methods = (method for cls in type(module).__mro__ if cls is not nn.Module for method in vars(cls).values())
    names = (set(code.co_names) for method in methods if (code := getattr(method, "__code__", None)) is not None)
    return any(_FUNCTIONS & used for used in names)


def _module(candidate: object) -> nn.Module:
    if not isinstance(candidate, nn.Module):
        raise TypeError(f"MonitorMixin is for torch.nn.Module, but {type(candidate).__name__} is not one")
    return candidate
