"""For every alert title: a small faulty training that raises it, and the most similar healthy one, which does not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import wandb_gradwatch
from benchmarks.zoo import changes as do
from benchmarks.zoo import data
from benchmarks.zoo.changes import Change
from benchmarks.zoo.loop import Loop, supervised
from benchmarks.zoo.models import mlp
from benchmarks.zoo.table import alert_titles
from wandb_gradwatch import MemorySink

STEPS = 40


def classify(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(x), y)


nothing: Change = do.chain()
detached: Change = do.output(torch.Tensor.detach)


def bad(value: float) -> Change:
    """Set the gradient of one bias to this value after the backward of step 20."""

    def change(loop: Loop, layer: str) -> None:
        now = [0]
        loop.before.append(lambda loop, step: now.__setitem__(0, step))
        bias = loop.model.get_submodule(layer).get_parameter("bias")
        bias.register_hook(lambda grad: grad.index_fill(0, torch.tensor([3]), value) if now[0] == 20 else grad)

    return change


def grown_by(factor: float) -> Change:
    """Multiply all parameters after every step."""

    @torch.no_grad()
    def hook(loop: Loop, step: int) -> None:
        for parameter in loop.model.parameters():
            parameter *= factor

    return lambda loop, layer: loop.after.append(hook)


def after_building(change: Callable[[Loop], None]) -> Change:
    return lambda loop, layer: change(loop)


def scaler(start: float) -> Change:
    def change(loop: Loop) -> None:
        loop.scaler, loop.autocast = torch.amp.GradScaler("cpu", init_scale=start), torch.float16

    return after_building(change)


def replace_head(loop: Loop) -> None:
    loop.model[4] = nn.Linear(16, 4)


def replace_head_and_tell_the_optimizer(loop: Loop) -> None:
    replace_head(loop)
    loop.optimizers[0].add_param_group({"params": list(loop.model[4].parameters())})


def of_another_model(loop: Loop) -> None:
    loop.optimizers = [torch.optim.SGD(mlp(12, 32, 16, 4).parameters(), lr=0.1)]


def frozen_first_layer(loop: Loop) -> None:
    loop.model[0].requires_grad_(False)


# title -> (the fault that raises it, a similar change that must not), in layer "2" of an MLP of 3 layers
TITLES: dict[str, tuple[Change, Change]] = {
    "NaN gradient": (bad(float("nan")), bad(0.01)),
    "Inf gradient": (bad(float("inf")), bad(0.01)),
    "Non-finite loss": (do.loss(lambda loss: loss + loss.detach() * torch.inf, 20, 21), nothing),  # without a gradient
    "Loss spike": (do.loss(lambda loss: loss + 100, 33), do.loss(lambda loss: loss + 0.5, 38, 39)),
    "Loss below 0": (do.loss(torch.neg, 36), do.loss(lambda loss: loss - 0.5, 36)),
    "Exploding gradient": (do.inputs(lambda x: 300 * x, 30), do.inputs(lambda x: 1.5 * x, 30)),
    "Vanishing gradient": (do.loss(lambda loss: 1e-10 * loss), do.loss(lambda loss: 1e-3 * loss)),
    "Dead gradient": (do.scaled(1.0, bias=-50.0), do.scaled(1.0, bias=-0.2)),
    "No gradient": (detached, after_building(frozen_first_layer)),
    "Loss scale collapse": (do.chain(scaler(2.0**16), do.loss(lambda loss: 1e9 * loss)), scaler(2.0**16)),
    "Not in any optimizer": (after_building(replace_head), after_building(replace_head_and_tell_the_optimizer)),
    "Optimizer without the model": (after_building(of_another_model), nothing),
    "Optimizer settings": (do.groups(momentum=1.05), do.groups(momentum=0.99)),
    "Gradients not reset": (do.fields(zeroes=False), do.fields(accumulate=3)),
    "Parameters unchanged": (do.learning_rate(0.0), do.learning_rate(lambda step: max(step - 20, 0) / 100)),
    "Learning rate below 0": (
        do.learning_rate(lambda step: 1 - step / 20),
        do.learning_rate(lambda step: 1 - step / 40),
    ),
    "Initial weights": (do.scaled(30.0), do.scaled(1.5)),
    "Large inputs": (do.inputs(lambda x: 255 * x + 300), do.inputs(lambda x: 2 * x)),
    "Parameters grow too fast": (grown_by(1.2), grown_by(1.01)),
    "Parameters shrink": (grown_by(0.95), grown_by(0.99)),  # after 39 updates 0.14 and 0.68 of the norm are left
    "Clipping too tight": (do.fields(clip=1e-5), do.fields(clip=0.01)),
}


def alerts_of(change: Change, steps: int) -> list[str]:
    torch.manual_seed(0)
    loop = supervised(mlp(12, 32, 16, 4), data.blobs(), classify, optimizer=torch.optim.SGD, lr=0.05)
    change(loop, "2")
    memory = MemorySink()
    watcher = wandb_gradwatch.watch(loop.model, sinks=[memory], sample_every=1, histogram_every=0)
    loss_of = loop.loss

    def told(model: nn.Module, *batch: torch.Tensor) -> torch.Tensor:
        loss = loss_of(model, *batch)
        watcher.loss(loss)
        return loss

    loop.loss = told
    for step in range(1, steps + 1):
        loop.advance(step)
    watcher.remove()
    return [alert.title for alert in memory.alerts]


def test_every_title_is_here() -> None:
    assert set(TITLES) == set(alert_titles())


@pytest.mark.parametrize("title", TITLES)
def test_a_fault_raises_its_title_and_a_healthy_training_nearby_raises_nothing(title: str) -> None:
    fault, healthy = TITLES[title]
    assert title in alerts_of(fault, STEPS)
    assert alerts_of(healthy, STEPS) == []
