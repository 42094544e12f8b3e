"""A watched training with metrics, for the tests of modules/."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import wandb_gradwatch
from wandb_gradwatch import MemorySink, Watcher
from wandb_gradwatch.metrics import rules_of


def watch(model: Any, metrics: Sequence[Any], **options: Any) -> tuple[Watcher, MemorySink]:
    """watch() into memory with these metrics, every step sampled and flushed."""
    sink = MemorySink()
    options = {"sinks": [sink], "rules": rules_of(metrics), "sample_every": 1, "log_every": 1} | options
    return wandb_gradwatch.watch(model, metrics=metrics, **options), sink


def values(watcher: Watcher, sink: MemorySink) -> dict[str, Any]:
    """Every metric by key over the samples, without the package's own: [S]; the watcher is removed."""
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
    """One optimizer step per batch."""
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in batches:
        optimizer.zero_grad()
        loss(model(batch)).backward()
        optimizer.step()
