"""Models whose gradients a test chooses: the loss is the inner product of parameters and chosen gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import wandb_gradwatch
from wandb_gradwatch import MemorySink, Watcher
from wandb_gradwatch._judgement.symptoms import SYMPTOMS
from wandb_gradwatch.rules import Judgement
from wandb_gradwatch.snapshot import Snapshot

Values = Sequence[float] | Tensor


class Chosen(nn.Module):
    """Parameters of ones. The backward of `loss(a=[...])` gives parameter `a` exactly that gradient."""

    def __init__(self, dtype: torch.dtype = torch.float32, **sizes: int) -> None:
        super().__init__()
        for name, size in sizes.items():
            setattr(self, name, nn.Parameter(torch.ones(size, dtype=dtype)))

    def loss(self, **gradients: Values) -> Tensor:
        terms = []
        for name, values in gradients.items():
            parameter = getattr(self, name)
            terms.append((parameter * torch.as_tensor(values, dtype=parameter.dtype)).sum())
        return torch.stack(terms).sum()


def watch(model: Any, *args: Any, **options: Any) -> tuple[Watcher, MemorySink]:
    """Call watch() with a MemorySink: by default every step is sampled and flushed, and there are no rules."""
    sink = MemorySink()
    options = {"sinks": [sink], "rules": [], "sample_every": 1, "log_every": 1} | options
    return wandb_gradwatch.watch(model, *args, **options), sink


def only(*kinds: str) -> Judgement:
    """Return the judgement that looks for these kinds of incidents alone."""
    return Judgement(without=sorted({symptom.kind for symptom in SYMPTOMS} - set(kinds)))


def step(model: Chosen, optimizer: torch.optim.Optimizer, **gradients: Values) -> None:
    """Train one step: zero_grad(), backward(), step()."""
    optimizer.zero_grad()
    model.loss(**gradients).backward()
    optimizer.step()


def samples(watcher: Watcher, sink: MemorySink) -> Snapshot:
    """Remove the watcher and return all samples as one snapshot."""
    watcher.remove()
    merged = sink.merged()
    assert merged is not None, "nothing was sampled"
    return merged


def of(snapshot: Snapshot, name: str, statistic: str) -> Any:
    """Return one statistic of one parameter over the samples: [S]."""
    return getattr(snapshot, statistic)[:, snapshot.names.index(name)]


def train(make: Callable[[], nn.Module], data: Sequence[Tensor], *, watched: bool, **options: Any) -> Mapping[str, Any]:
    """Train with Adam, watched or not, and return the final parameters."""
    torch.manual_seed(0)
    model = make()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    watcher = watch(model, **options)[0] if watched else None
    for batch in data:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
    if watcher is not None:
        watcher.remove()
    return model.state_dict()
