"""Sparse, non-contiguous and partly zero gradients in Lightning and Ignite, against numbers derived by hand."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers.*"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*"),
]

Numbers = dict[str, float]


def in_lightning(model: nn.Module, x: torch.Tensor, **options: Any) -> Numbers:
    """The numbers of one step on the sum of the model's outputs."""
    pl = pytest.importorskip("lightning.pytorch")
    from lightning_programs import Notes, trainer_of

    from wandb_gradwatch.integrations.lightning import GradWatchCallback

    class Module(pl.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.net = model

        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            return self.net(batch).sum()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    notes = Notes()
    data = torch.utils.data.DataLoader([x], batch_size=None)
    trainer_of(GradWatchCallback(sample_every=1, per_layer=True, **options), notes=notes).fit(Module(), data)
    return {key.removeprefix("train/"): value for key, value in notes.calls[0][1].items()}


def in_ignite(model: nn.Module, x: torch.Tensor, **options: Any) -> Numbers:
    pytest.importorskip("ignite")
    from ignite.engine import Engine

    from wandb_gradwatch.integrations.ignite import GradWatch

    holder = nn.ModuleDict({"net": model})  # for the same names
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(engine: Engine, _: Any) -> None:
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    engine = Engine(step)
    GradWatch(holder, per_layer=True, **options).attach(engine)
    return dict(engine.run([0]).metrics)


FRAMEWORKS = pytest.mark.parametrize("one_step", [in_lightning, in_ignite], ids=lambda one_step: one_step.__name__)


@FRAMEWORKS
def test_a_sparse_gradient_counts_each_row_once(one_step: Callable[..., Numbers]) -> None:
    """Row 1 twice, row 3 once: {2, 2} and {1, 1} in a table of 5 x 2, and zeros else."""
    numbers = one_step(nn.Embedding(5, 2, sparse=True), torch.tensor([1, 3, 1]))
    assert numbers["grad_norm"] == pytest.approx(math.sqrt(2 * 2**2 + 2 * 1**2))
    assert numbers["grad_norm/net/weight"] == numbers["grad_norm"]
    assert numbers["grad_mean"] == pytest.approx(6 / 10)
    assert numbers["grad_sparsity"] == pytest.approx(6 / 10)


@FRAMEWORKS
def test_a_channels_last_gradient_is_one_like_any_other(one_step: Callable[..., Numbers]) -> None:
    """A 1x1 convolution over ones: every weight and the bias get the number of pixels, 2 x 3 x 3 = 18."""
    model = nn.Conv2d(4, 1, 1).to(memory_format=torch.channels_last)
    numbers = one_step(model, torch.ones(2, 4, 3, 3).to(memory_format=torch.channels_last))
    assert numbers["grad_norm/net/weight"] == pytest.approx(18 * math.sqrt(4))
    assert numbers["grad_norm"] == pytest.approx(18 * math.sqrt(5))
    assert numbers["grad_std"] == pytest.approx(0)


@FRAMEWORKS
def test_sparsity_is_the_share_of_dead_elements(one_step: Callable[..., Numbers]) -> None:
    """The gradient is the input, {0, 0.001, 3, 4}."""
    model, x = nn.Linear(4, 1, bias=False), torch.tensor([[0.0, 0.001, 3.0, 4.0]])
    assert one_step(model, x)["grad_sparsity"] == 0.25
    assert one_step(model, x, dead_threshold=0.01)["grad_sparsity"] == 0.5
