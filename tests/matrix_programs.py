"""One small training for each way to train, on one process, under DDP and under FSDP2; run by test_matrix.py."""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import torch
from gradients import watch
from rank_programs import LEARNING_RATE, batch_of, build, loss_of, report, shard
from torch import nn
from torch.utils.checkpoint import checkpoint

KINDS = ["plain", "accumulate 3", "amp", "amp fused", "clip", "closure", "checkpoint", "compile"]
SPREADS = ["single", "ddp", "fsdp2"]
MICROS = {"accumulate 3": 3}
CLIP = {"clip": 0.1, "amp": 0.1}  # "amp" clips under a loss scale
RATE = {"amp fused": 0.0}  # fused SGD does not support DTensor; at rate 0 the expected values need no Adam


class Checkpointed(nn.Sequential):
    """A Sequential that recomputes each layer's activations in the backward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self:
            x = checkpoint(layer, x, use_reentrant=False)
        return x


def case(rank: int, world: int, *, spread: str, kind: str, steps: int) -> dict[str, Any]:
    """Train, watched, and return this rank's report."""
    layers = build()
    model: nn.Module = Checkpointed(*layers) if kind == "checkpoint" else layers
    if spread == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
    elif spread == "fsdp2":
        shard(model, [world])
    if kind == "compile":
        torch._dynamo.reset()
        model = torch.compile(model, backend="aot_eager")  # type: ignore[assignment]
    watcher, sink = watch(model)
    train(model, rank, kind, steps)
    return report(watcher, sink)


def train(model: nn.Module, rank: int, kind: str, steps: int) -> None:
    micros, clip = MICROS.get(kind, 1), CLIP.get(kind)
    rate = RATE.get(kind, LEARNING_RATE)
    make = functools.partial(torch.optim.Adam, fused=True) if kind == "amp fused" else torch.optim.SGD
    optimizer = make(model.parameters(), lr=rate)
    scaler = torch.amp.GradScaler("cpu", init_scale=4096.0, enabled=kind.startswith("amp"))

    def backwards(step: int) -> torch.Tensor:
        optimizer.zero_grad()
        for micro in range(micros):
            quiet = isinstance(model, nn.parallel.DistributedDataParallel) and micro < micros - 1
            with model.no_sync() if quiet else contextlib.nullcontext():
                loss = loss_of(model, batch_of(rank, step, micro))
                scaler.scale(loss).backward()
        return loss

    for step in range(steps):
        if kind == "closure":
            optimizer.step(functools.partial(backwards, step))
            continue
        backwards(step)
        if clip is not None:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        scaler.step(optimizer)
        scaler.update()
