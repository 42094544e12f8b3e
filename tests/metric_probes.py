"""Shared by the tests of the metrics: a watched training with metrics, and modules to train."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import wandb_gradwatch
from wandb_gradwatch import MemorySink, Watcher
from wandb_gradwatch.metrics import MonitorMixin, log_tensor
from wandb_gradwatch.metrics._metric import rules_of


def watch(model: Any, metrics: Sequence[Any], **options: Any) -> tuple[Watcher, MemorySink]:
    """Call watch() with these metrics and a MemorySink; by default every step is sampled and flushed."""
    sink = MemorySink()
    options = {"sinks": [sink], "rules": rules_of(metrics), "sample_every": 1, "log_every": 1} | options
    return wandb_gradwatch.watch(model, metrics=metrics, **options), sink


def values(watcher: Watcher, sink: MemorySink) -> dict[str, Any]:
    """Remove the watcher and return each metric over the samples by key: [S], without the keys below gradwatch/."""
    watcher.remove()
    merged = sink.merged()
    assert merged is not None, "nothing was sampled"
    return {key: np.asarray(value) for key, value in merged.metrics.items() if not key.startswith("gradwatch/")}


def mean_square(output: Any) -> Tensor:
    return output.square().mean()


def train(
    model: nn.Module,
    batches: Iterable[Tensor],
    *,
    optimizer: torch.optim.Optimizer | None = None,
    loss: Callable[[Any], Tensor] = mean_square,
) -> None:
    """Train, with one optimizer step per batch."""
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in batches:
        optimizer.zero_grad()
        loss(model(batch)).backward()
        optimizer.step()


def seen(
    model: nn.Module,
    metrics: Sequence[Any],
    batches: Iterable[Tensor],
    *,
    optimizer: torch.optim.Optimizer | None = None,
    loss: Callable[[Any], Tensor] = mean_square,
    **options: Any,
) -> dict[str, Any]:
    """Train, watched, and return the `values`."""
    watcher, sink = watch(model, metrics, **options)
    train(model, batches, optimizer=optimizer, loss=loss)
    return values(watcher, sink)


class Passes(nn.Module):
    """Multiply the input by a trainable gain of 1."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.gain = nn.Identity(), nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * self.gain


class SelfAttention(MonitorMixin, nn.Module):
    """Attention with two heads of four features, which logs its attention and a second tensor, "gate"."""

    def __init__(self, mask: Tensor | None = None) -> None:
        super().__init__()
        self.qkv, self.mask = nn.Linear(8, 24), mask

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (2, 4)).transpose(1, 2) for t in self.qkv(x).chunk(3, dim=-1))
        self.log_attention(q, k, v, is_causal=True, attn_mask=self.mask)
        self.log_tensor("gate", q * 2, dims={1: "head"})
        return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2)


def note_gate(module: nn.Module, value: Tensor) -> None:
    """Log a tensor for a module whose own file does not name `log_tensor`."""
    log_tensor(module, "gate", value)
