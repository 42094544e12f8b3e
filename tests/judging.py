"""Watched trainings for the tests of the judgement: a small classifier, changes that break it, and what is found."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from grad_samples import Training
from torch import Tensor, nn
from torch.nn import functional

import wandb_gradwatch
from wandb_gradwatch import MemorySink
from wandb_gradwatch._judgement.incident import Incident
from wandb_gradwatch._judgement.verdict import Verdict
from wandb_gradwatch.rules import Alert
from wandb_gradwatch.snapshot import Snapshot

NUM_FEATURES, NUM_CLASSES, BATCH = 12, 4, 32


@dataclass
class Loop:
    """A training loop; the defaults train a classifier of three layers on Gaussian blobs.

    Args:
        loss: a function from the model, the inputs and the targets to a scalar.
        batch: a function from the step, counted from 1, to inputs and targets.
        before: called with the step before each step, to plant a fault.
        after_backward: called with the step between backward() and step(); after: after step().
        zeroes, steps: whether the loop calls zero_grad() and step().
        losses: filled by `run`, one number per step.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    loss: Callable[[nn.Module, Tensor, Tensor], Tensor]
    batch: Callable[[int], tuple[Tensor, Tensor]]
    before: list[Callable[[int], object]] = field(default_factory=list)
    after_backward: list[Callable[[int], object]] = field(default_factory=list)
    after: list[Callable[[int], object]] = field(default_factory=list)
    scaler: torch.amp.GradScaler | None = None
    zeroes: bool = True
    steps: bool = True
    losses: list[float] = field(default_factory=list)

    def run(self, num_steps: int, *, start: int = 1) -> None:
        for step in range(start, start + num_steps):
            for call in self.before:
                call(step)
            if self.zeroes:
                self.optimizer.zero_grad()
            loss = self.loss(self.model, *self.batch(step))
            self.losses.append(loss.item())
            (loss if self.scaler is None else self.scaler.scale(loss)).backward()
            for call in self.after_backward:
                call(step)
            if self.scaler is not None:
                self.scaler.step(self.optimizer)
                self.scaler.update()
            elif self.steps:
                self.optimizer.step()
            for call in self.after:
                call(step)


@dataclass
class Found:
    """What the judgement found in a training, and the samples that it saw."""

    alerts: list[Alert]
    incidents: tuple[Incident, ...]
    verdict: Verdict
    samples: Snapshot

    @property
    def told(self) -> list[str]:
        """The kinds of the alerts above INFO, in order."""
        return [alert.incident.kind for alert in self.alerts if alert.incident and alert.level != "INFO"]


def judged(training: Any, num_steps: int, *, every: int = 1, **options: Any) -> Found:
    """Watch a training for so many steps, measuring every n-th, and return what was found.

    `training` has a `model` and `run(num_steps)`.
    """
    alerts: list[Alert] = []
    memory = MemorySink()
    options = {"sinks": [memory], "sample_every": every, "log_every": 10**6, "histogram_every": 0} | options
    with wandb_gradwatch.watch(training.model, on_alert=alerts.append, **options) as watcher:
        training.run(num_steps)
        verdict = watcher.verdict()
    samples = memory.merged()
    assert samples is not None
    return Found(alerts, verdict.incidents, verdict, samples)


def blobs(seed: int = 0) -> Callable[[int], tuple[Tensor, Tensor]]:
    """Batches of points around one centre per class, in 12 dimensions."""
    generator = torch.Generator().manual_seed(seed)
    centres = torch.randn(NUM_CLASSES, NUM_FEATURES, generator=generator)

    def batch(step: int) -> tuple[Tensor, Tensor]:
        labels = torch.randint(0, NUM_CLASSES, (BATCH,), generator=generator)
        return centres[labels] + 0.7 * torch.randn(BATCH, NUM_FEATURES, generator=generator), labels

    return batch


def cross_entropy(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return functional.cross_entropy(model(x), y)


def mlp(*between: nn.Module, width: int = 32, activation: Callable[[], nn.Module] = nn.ReLU) -> nn.Sequential:
    """Return layers "0", "2" and "4" with activations between them; other modules may follow the second activation."""
    return nn.Sequential(
        nn.Linear(NUM_FEATURES, width), activation(), nn.Linear(width, width), activation(),
        nn.Linear(width, NUM_CLASSES), *between,
    )  # fmt: skip


def classifier(
    model: nn.Module | None = None, *, seed: int = 0, lr: float = 0.05, optimizer: Any = torch.optim.SGD, **more: Any
) -> Loop:
    torch.manual_seed(seed)
    model = mlp() if model is None else model
    return Loop(model, optimizer(model.parameters(), lr=lr, **more), cross_entropy, blobs(seed))


def with_inputs(loop: Loop, change: Callable[[Tensor, int], Tensor]) -> Loop:
    """Change the inputs of every batch."""
    plain = loop.batch

    def batch(step: int) -> tuple[Tensor, Tensor]:
        x, y = plain(step)
        return change(x, step), y

    loop.batch = batch
    return loop


def with_loss(loop: Loop, change: Callable[[Tensor, int], Tensor]) -> Loop:
    """Change the loss; the step is that of the newest batch."""
    plain, now = loop.loss, [0]
    loop.before.append(lambda step: now.__setitem__(0, step))
    loop.loss = lambda model, x, y: change(plain(model, x, y), now[0])
    return loop


def with_output(loop: Loop, layer: str, change: Callable[[Tensor, int], Tensor]) -> Loop:
    """Change what a layer returns."""
    now = [0]
    loop.before.append(lambda step: now.__setitem__(0, step))
    loop.model.get_submodule(layer).register_forward_hook(lambda module, args, output: change(output, now[0]))
    return loop


def with_rate(loop: Loop, rate_of: Callable[[int], float]) -> Loop:
    def set_rate(step: int) -> None:
        for group in loop.optimizer.param_groups:
            group["lr"] = rate_of(step)

    loop.before.append(set_rate)
    return loop


def scale_parameters(parameters: Iterable[nn.Parameter], factor: float) -> None:
    with torch.no_grad():
        for parameter in parameters:
            parameter.mul_(factor)


class Scaled(torch.autograd.Function):
    """The identity, whose backward multiplies the gradient by a factor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.factor, None


class Watchable:
    """A training of trainings.py as a loop that can be watched."""

    def __init__(self, training: Training) -> None:
        self.training, self.model = training, training.model
        self.losses: list[float] = []

    def run(self, num_steps: int) -> None:
        training = self.training
        for step in range(1, num_steps + 1):
            training.optimizer.zero_grad()
            loss = training.loss(training.model, step)
            self.losses.append(loss.item())
            loss.backward()
            training.change_gradients(training.model, step)
            training.optimizer.step()
