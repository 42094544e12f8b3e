"""A training as a value: what a healthy one is made of, and what a fault changes before it runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

Batch = tuple[Tensor, ...]
Hook = Callable[["Loop", int], None]  # called with the number of the step, from 1


@dataclass
class Loop:
    """A training that has not run yet. A fault changes its fields; `advance` makes one step.

    Args:
        model: what is trained.
        batch: the tensors of a step.
        loss: of the model and a batch.
        optimizers: those that `advance` steps, one after the other.
        steps: how many there are.
        schedule: the factor on every optimizer's first learning rate, by step.
        clip: the largest total norm, None for no clipping.
        accumulate: batches per step.
        scaler: a gradient scaler; autocast: the type to compute in.
        update: makes the step instead of loss, backward and optimizers, and returns its loss.
        before, received, after: called before the step, between backward and clipping, and after the step.
        watched: what `watch` is given instead of the model; options: its further arguments.
    """

    model: nn.Module
    batch: Callable[[int], Batch]
    loss: Callable[..., Tensor]
    optimizers: list[Optimizer]
    steps: int = 200
    schedule: Callable[[int], float] | None = None
    clip: float | None = None
    accumulate: int = 1
    scaler: torch.amp.GradScaler | None = None
    autocast: torch.dtype | None = None
    update: Callable[[Loop, int], Tensor] | None = None
    before: list[Hook] = field(default_factory=list)
    received: list[Hook] = field(default_factory=list)
    after: list[Hook] = field(default_factory=list)
    watched: Any = None
    options: dict[str, Any] = field(default_factory=dict)
    zeroes: bool = True  # zero_grad() is called
    applies: bool = True  # step() is called

    def advance(self, step: int) -> float:
        """Make step number `step`, from 1, and return its loss."""
        for hook in self.before:
            hook(self, step)
        if self.schedule is not None:
            factor = self.schedule(step)
            for group in (group for optimizer in self.optimizers for group in optimizer.param_groups):
                group["lr"] = factor * group.setdefault("first_lr", group["lr"])
        loss = self._plain_update(step) if self.update is None else self.update(self, step)
        for hook in self.after:
            hook(self, step)
        return float(loss.detach())

    def _plain_update(self, step: int) -> Tensor:
        if self.zeroes:
            self.zero_grad()
        total = torch.zeros(())
        for _ in range(self.accumulate):
            with torch.autocast("cpu", dtype=self.autocast or torch.bfloat16, enabled=self.autocast is not None):
                loss = self.loss(self.model, *self.batch(step)) / self.accumulate
            (loss if self.scaler is None else self.scaler.scale(loss)).backward()
            total = total + loss.detach()
        self.apply(step)
        return total

    def zero_grad(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def apply(self, step: int) -> None:
        """From the gradients to the update: unscaling, clipping, the optimizers."""
        if self.scaler is not None and self.clip is not None:
            for optimizer in self.optimizers:
                self.scaler.unscale_(optimizer)
        for hook in self.received:
            hook(self, step)
        if self.clip is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        if not self.applies:
            return
        for optimizer in self.optimizers:
            optimizer.step() if self.scaler is None else self.scaler.step(optimizer)
        if self.scaler is not None:
            self.scaler.update()


def descend(optimizer: Optimizer, loss: Tensor, clip: float | None = None) -> Tensor:
    """One step of one optimizer down one loss: for updates that make several."""
    optimizer.zero_grad()
    loss.backward()
    if clip is not None:
        nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], clip)
    optimizer.step()
    return loss.detach()


def supervised(
    model: nn.Module,
    batch: Callable[[int], Batch],
    loss: Callable[..., Tensor],
    *,
    optimizer: Callable[..., Optimizer] = torch.optim.Adam,
    lr: float = 1e-3,
    **options: Any,
) -> Loop:
    """The most common training: one model, one optimizer over what is trainable in it."""
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return Loop(model, batch, loss, [optimizer(trainable, lr=lr)], **options)
