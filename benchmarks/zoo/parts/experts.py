"""Mixtures of experts, with the data and the losses that are their own."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..loop import Batch
from . import data
from .dense import mlp
from .language import Language
from .losses import classify, regress
from .transformers import Layer


class Experts(nn.Module):
    """A mixture: each token goes to the `top` experts that the router prefers. `load` is the share that each got."""

    def __init__(self, dim: int, *, experts: int = 4, top: int = 1) -> None:
        super().__init__()
        self.router = nn.Linear(dim, experts, bias=False)
        self.experts = nn.ModuleList(mlp(dim, 2 * dim, dim) for _ in range(experts))
        self.top, self.balance = top, torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        share = self.router(x).softmax(dim=-1)
        weight, chosen = share.topk(self.top, dim=-1)
        received = functional.one_hot(chosen, share.shape[-1]).sum(dim=-2).float()
        self.balance = len(self.experts) * (received.flatten(0, -2).mean(0) * share.flatten(0, -2).mean(0)).sum()
        out = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            mask = chosen == index
            if mask.any():
                rows = mask.any(dim=-1)
                out[rows] = out[rows] + expert(x[rows]) * (weight * mask).sum(dim=-1)[rows][:, None]
        return out


def balanced_tokens(model: nn.Module, *batch: Tensor) -> Tensor:
    """The loss and what keeps the experts evenly loaded."""
    experts = [module for module in model.modules() if isinstance(module, Experts)]
    return classify(model, *batch) + 0.01 * sum(expert.balance for expert in experts)


class Gated(nn.Module):
    """Every expert computes everything; of the noisy gates, the `top` largest count."""

    def __init__(self, dim: int, *, top: int, experts: int = 6) -> None:
        super().__init__()
        self.gate = nn.Linear(dim, experts)
        self.experts = nn.ModuleList(mlp(dim, dim, dim, act=nn.GELU) for _ in range(experts))
        self.top, self.balance = top, torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        logits = self.gate(x)
        noisy = logits + 0.1 * torch.randn_like(logits)
        kept = noisy >= noisy.topk(self.top, dim=-1).values[..., -1:]
        share = (
            noisy.masked_fill(~kept, float("-inf")).softmax(dim=-1) if self.top > 1 else kept * noisy.softmax(dim=-1)
        )
        mean = logits.softmax(dim=-1).flatten(0, -2).mean(dim=0)
        self.balance = logits.shape[-1] * (kept.float().flatten(0, -2).mean(dim=0) * mean).sum() / self.top
        return (torch.stack([expert(x) for expert in self.experts], dim=-1) * share[..., None, :]).sum(dim=-1)


def regions(size: int = 128) -> data.Batches:
    """Another linear function in each of six regions."""
    centres, slopes, x = torch.randn(6, 8), torch.randn(6, 8), torch.randn(3000, 8)
    region = torch.cdist(x, centres).argmin(dim=1)
    return data.drawn(x, (x * slopes[region]).sum(dim=1, keepdim=True) / 3, size=size)


def balanced_gates(loss: Callable[..., Tensor], weight: float = 0.02) -> Callable[..., Tensor]:
    """With what keeps the experts evenly loaded."""

    def both(model: nn.Module, *batch: Tensor) -> Tensor:
        own = loss(model, *batch)
        return own + weight * sum(module.balance for module in model.modules() if isinstance(module, Gated))

    return both


def switched(dim: int = 32) -> nn.Module:
    """A language model with one expert per word."""
    return Language([Layer(dim, Gated(dim, top=1), causal=True) for _ in range(2)], dim, tied=True)


class Mixture(nn.Module):
    """A residual mixture between two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.experts, self.head = nn.Linear(8, 16), Experts(16, experts=4, top=2), nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.gelu(self.inner(x))
        return self.head(x + self.experts(x))


def balanced_regression(model: Mixture, x: Tensor, y: Tensor, weight: float = 0.02) -> Tensor:
    return regress(model, x, y) + weight * model.experts.balance


class Switch(nn.Module):
    """Each row goes to one of eight experts, as far as it has room; what is dropped passes unchanged."""

    def __init__(self, dim: int = 16, experts: int = 8) -> None:
        super().__init__()
        self.embed, self.router, self.head = nn.Linear(6, dim), nn.Linear(dim, experts), nn.Linear(dim, 1)
        self.experts = nn.ModuleList(mlp(dim, 32, dim) for _ in range(experts))
        self.balance, self.weight, self.used = torch.zeros(()), 0.02, experts

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.embed(x))
        share = self.router(h)[:, : self.used].softmax(1)
        weight, chosen = share.max(1)
        received = functional.one_hot(chosen, self.used).float()
        self.balance = self.used * (received.mean(0) * share.mean(0)).sum()
        place, out = (received.cumsum(0) * received).sum(1), torch.zeros_like(h)
        for index, expert in enumerate(self.experts):
            rows = (chosen == index) & (place <= len(x) / 4)
            if rows.any():
                out[rows] = weight[rows, None] * expert(h[rows])
        return self.head(h + out)


def balanced(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return functional.mse_loss(model(x), y) + model.weight * model.balance


@data.given(lambda: torch.randn(8, 6))
def corners(slopes: Tensor, size: int = 64) -> Batch:
    """A different linear function in each of eight corners: [N, 6] and [N, 1]."""
    x = torch.randn(size, 6)
    corner = ((x[:, :3] > 0).long() * torch.tensor([1, 2, 4])).sum(1)
    return x, (x * slopes[corner]).sum(1, keepdim=True) / 2
