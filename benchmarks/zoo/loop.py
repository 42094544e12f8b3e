"""A training as a value, whose fields a fault changes before it runs."""

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
        model: the model to train.
        batch: a function from a step to the tensors of its batch.
        loss: a function from the model and a batch to a loss.
        optimizers: the optimizers that `advance` steps, one after the other.
        steps: the number of steps.
        schedule: a function from a step to the factor of every optimizer's initial learning rate.
        clip: the largest total norm; None: no clipping.
        accumulate: the number of batches per step.
        scaler: a gradient scaler; autocast: the dtype to compute in.
        update: a function that replaces loss, backward and optimizers, and returns the loss.
        before, received, after: called before the step, between backward and clipping, and after the step.
        watched: the argument of `watch` instead of the model; options: further arguments of `watch`.
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
    zeroes: bool = True  # whether zero_grad() is called
    applies: bool = True  # whether step() is called

    def advance(self, step: int) -> float:
        """Make step number `step`, from 1, and return its loss."""
        for hook in self.before:
            hook(self, step)
        if self.schedule is not None:
            factor = self.schedule(step)
            for group in (group for optimizer in self.optimizers for group in optimizer.param_groups):
                group["lr"] = factor * group.setdefault("first_lr", group["lr"])
        loss = self.plain_update(step) if self.update is None else self.update(self, step)
        for hook in self.after:
            hook(self, step)
        return float(loss.detach())

    def plain_update(self, step: int) -> Tensor:
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
        """Unscale and clip the gradients, and step the optimizers."""
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
    """Train one step with one optimizer and one loss, for updates of several steps."""
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
    """Return the most common training: one model, with one optimizer of its trainable parameters."""
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return Loop(model, batch, loss, [optimizer(trainable, lr=lr)], **options)
