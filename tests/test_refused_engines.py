"""Engines that are set up after watch(), and gradients in `main_grad` that no optimizer of Megatron-core uses."""

from __future__ import annotations

import logging
import re
from typing import Any

import fake_deepspeed
import pytest
import torch
from fake_deepspeed import DeepSpeedEngine
from gradients import watch
from torch import nn

from wandb_gradwatch.sinks import MemorySink


class MegatronDDP(nn.Module):
    """What identifies Megatron-core's: gradients are accumulated in `main_grad`, and `grad` is None afterwards."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.module = model

        def accumulate(parameter: Any) -> None:
            parameter.main_grad += parameter.grad
            parameter.grad = None

        for parameter in model.parameters():
            parameter.main_grad = torch.zeros_like(parameter)
            parameter.register_post_accumulate_grad_hook(accumulate)


ENGINES = [(DeepSpeedEngine, "DeepSpeed"), (MegatronDDP, "Megatron-core")]


@pytest.fixture(autouse=True)
def deepspeed_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_deepspeed.install(monkeypatch)


@pytest.mark.parametrize("given", ["engine", "model", "several"])
def test_main_grad_without_an_optimizer_of_megatron_core_is_refused_with_what_to_do(given: str) -> None:
    model = nn.Linear(2, 1)
    engine = MegatronDDP(model)
    why = r"parameter\.main_grad, .* cannot be watched: call watch\(\) after get_megatron_optimizer\(\)"
    with pytest.raises(ValueError, match=why):
        watch({"engine": engine, "model": model, "several": [nn.Linear(2, 1), engine]}[given])


@pytest.mark.parametrize("options", [{}, {"sample_every": None, "log_every": 50}], ids=["every step", "default"])
@pytest.mark.parametrize("steps", [True, False], ids=["its steps are seen", "it updates copies"])
@pytest.mark.parametrize(("engine_of", "name"), ENGINES)
def test_an_engine_that_is_made_after_watch_ends_the_watching_in_the_first_backward(
    engine_of: Any, name: str, steps: bool, options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    model = nn.Linear(2, 1)
    watcher, sink = watch(model, **options)
    engine, optimizer = engine_of(model), torch.optim.SGD(model.parameters(), lr=0.1)
    with caplog.at_level(logging.WARNING, logger="wandb_gradwatch"):
        for _ in range(3):
            engine.module(torch.ones(1, 2)).sum().backward()
            [record] = caplog.records  # at once, and only once
            if steps:
                optimizer.step()
    said = f"has stopped watching; training goes on: {name} was set up after watch\\(\\): call watch\\(\\) again"
    assert re.search(said, record.getMessage())
    watcher.remove()
    assert len(caplog.records) == 1
    assert not sink.snapshots


def test_the_lightning_callback_refuses_what_watch_refuses() -> None:
    pytest.importorskip("lightning")
    from lightning.pytorch import LightningModule, Trainer
    from torch.utils.data import DataLoader

    from wandb_gradwatch.integrations.lightning import GradWatchCallback

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 1)
            MegatronDDP(self)

        def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
            return self.layer(batch).sum()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    trainer = Trainer(
        max_steps=1,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[GradWatchCallback(sinks=[MemorySink()])],
    )
    with pytest.raises(ValueError, match=r"main_grad, .* cannot be watched"):
        trainer.fit(Module(), DataLoader(torch.ones(2, 2)))
