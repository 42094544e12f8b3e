"""DeepSpeed and Megatron-core keep gradients in buffers of their own: watching a model that they train is refused."""

from __future__ import annotations

import logging
import re
import sys
import types
from typing import Any

import pytest
import torch
from gradients import watch
from torch import nn

from wandb_gradwatch.sinks import MemorySink


class DeepSpeedEngine(nn.Module):
    """What identifies DeepSpeed's: the class's name, and the hook that it puts on the model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.module = model

        def count_forward(*_: Any) -> None: ...

        count_forward.__module__ = "deepspeed.runtime.engine"
        model.register_forward_pre_hook(count_forward)


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


ENGINES = [
    (DeepSpeedEngine, r"DeepSpeed trains cannot be watched.*log engine\.get_global_grad_norm\(\)"),
    (MegatronDDP, r"parameter\.main_grad cannot be watched.*log the grad_norm that optimizer\.step\(\) returns"),
]


@pytest.fixture(autouse=True)
def deepspeed_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deepspeed", types.ModuleType("deepspeed"))


@pytest.mark.parametrize("given", ["engine", "model", "several"])
@pytest.mark.parametrize(("engine_of", "refusal"), ENGINES)
def test_a_model_that_they_train_is_refused_with_what_to_do(engine_of: Any, refusal: str, given: str) -> None:
    model = nn.Linear(2, 1)
    engine = engine_of(model)
    with pytest.raises(ValueError, match=refusal):
        watch({"engine": engine, "model": model, "several": [nn.Linear(2, 1), engine]}[given])


@pytest.mark.parametrize("options", [{}, {"sample_every": None, "log_every": 50}], ids=["every step", "default"])
@pytest.mark.parametrize("steps", [True, False], ids=["its steps are seen", "it updates copies"])
@pytest.mark.parametrize(("engine_of", "refusal"), ENGINES)
def test_an_engine_that_is_made_after_watch_ends_the_watching_in_the_first_backward(
    engine_of: Any, refusal: str, steps: bool, options: dict[str, Any], caplog: pytest.LogCaptureFixture
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
    assert re.search("has stopped watching; training goes on: .*" + refusal, record.getMessage())
    watcher.remove()
    assert len(caplog.records) == 1
    assert not sink.snapshots


def test_the_lightning_callback_refuses_it_too() -> None:
    pytest.importorskip("lightning")
    from lightning.pytorch import LightningModule, Trainer
    from torch.utils.data import DataLoader

    from wandb_gradwatch.integrations.lightning import GradWatchCallback

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 1)
            DeepSpeedEngine(self)

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
    with pytest.raises(ValueError, match="DeepSpeed trains cannot be watched"):
        trainer.fit(Module(), DataLoader(torch.ones(2, 2)))
