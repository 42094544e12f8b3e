"""Shared by the tests of the Ignite integration: train steps, data with a bad batch, and a collector of metrics."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from frameworks import Recomputed, batches, loss_of, small_model
from torch import nn

pytest.importorskip("ignite")

from ignite.engine import Engine, Events, create_supervised_trainer

from wandb_gradwatch.integrations.ignite import GradWatch

__all__ = [
    "BAD", "NUM_BATCHES", "Engine", "Events", "approx", "collect", "create_supervised_trainer", "scaled_step",
    "trained", "usual_step", "weights", "with_a_bad_batch",
]  # fmt: skip

FLOAT32 = 1e-5  # float32 gradients against float64 ones
BAD = 12  # the batch that is 1000 times too large, counted from 0
NUM_BATCHES = 20

Step = Callable[[Engine, torch.Tensor], float]


def approx(values: Any) -> Any:
    return pytest.approx(values, rel=FLOAT32, abs=1e-7)


def with_a_bad_batch(factor: float = 1000.0) -> torch.Tensor:
    data = batches(NUM_BATCHES)
    data[BAD] *= factor
    return data


def usual_step(model: nn.Module, optimizer: torch.optim.Optimizer, expected: Recomputed | None = None) -> Step:
    """Return a common train step, which does not use the package and resets the gradients at its end."""

    def step(engine: Engine, x: torch.Tensor) -> float:
        if expected is not None:
            expected.look([x])
        loss = loss_of(model, x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


def scaled_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
    expected: Recomputed | None = None,
    *,
    unscale: bool,
) -> Step:
    """Return a train step with a loss scale; with `unscale` it also unscales and clips the gradients."""

    def step(engine: Engine, x: torch.Tensor) -> float:
        if expected is not None:
            expected.look([x])
        loss = loss_of(model, x)
        scaler.scale(loss).backward()
        if unscale:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        return loss.item()

    return step


def weights(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def collect(engine: Engine, key: str = "grad_norm") -> list[float]:
    """Collect a metric, or `unhealthy_spike`, after every iteration, in a handler added before those of GradWatch."""
    seen: list[float] = []

    @engine.on(Events.ITERATION_COMPLETED)
    def look(engine: Engine) -> None:
        seen.append(engine.state.unhealthy_spike if key == "unhealthy_spike" else engine.state.metrics[key])

    return seen


def trained(
    step_of: Callable[[nn.Module], Step], data: torch.Tensor, options: dict[str, Any] | None = None
) -> list[torch.Tensor]:
    """Train and return the weights; `options` are those of GradWatch, None: not watched."""
    model = small_model()
    engine = Engine(step_of(model))
    if options is not None:
        GradWatch(model, **options).attach(engine)
    engine.run(data)
    return weights(model)
