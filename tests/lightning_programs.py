"""Shared by the tests of the Lightning integration: a module, its trainer, and a logger that keeps every call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from frameworks import Recomputed, batches, loss_of, small_model
from torch.utils.data import DataLoader

pl = pytest.importorskip("lightning.pytorch")
other = pytest.importorskip("pytorch_lightning")  # before the callback, which supports the imported packages only

from lightning.pytorch.loggers.logger import Logger  # noqa: E402

from wandb_gradwatch.integrations.lightning import GradWatchCallback  # noqa: E402

# float32 gradients against float64 ones: a few units in the last place of sums over 49 elements.
FLOAT32 = 1e-5


class Notes(Logger):
    """A logger that keeps every call."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[int, dict[str, float]]] = []

    name = version = "notes"

    def log_hyperparams(self, *_: Any, **__: Any) -> None:
        pass

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        assert step is not None
        self.calls.append((step, dict(metrics)))

    def series(self, key: str) -> list[tuple[int, float]]:
        return [(step, metrics[key]) for step, metrics in self.calls if key in metrics]


class Regression(pl.LightningModule):
    """Train the small model, and compute the gradient of each optimizer step in float64."""

    def __init__(self, *, accumulate: int = 1, lr: float = 0.05) -> None:
        super().__init__()
        self.net = small_model()
        self.lr = lr
        self._accumulate = accumulate
        self._seen: list[torch.Tensor] = []
        self.expected = Recomputed(self.net)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        self._seen.append(batch)
        if len(self._seen) == self._accumulate:
            self.expected.look(self._seen)
            self._seen = []
        loss = loss_of(self.net, batch)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


def loader(count: int, *, workers: int = 0) -> DataLoader[torch.Tensor]:
    return DataLoader(batches(count), batch_size=None, num_workers=workers)


def trainer_of(callback: Any, *, notes: Any = None, **more: Any) -> Any:
    options = {
        "max_epochs": 1,
        "accelerator": "cpu",
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
        "logger": notes if notes is not None else False,
        "log_every_n_steps": 1,
    }
    callbacks = callback if isinstance(callback, list) else [callback]
    return pl.Trainer(callbacks=callbacks, **options | more)


def fitted(module: Any, data: Any, *callbacks: Any, **more: Any) -> tuple[Any, Notes]:
    """Fit a module on a number of batches, or on given data; return the trainer and its logger.

    The default callback is a GradWatchCallback that measures every step.
    """
    notes = Notes()
    trainer = trainer_of(list(callbacks) or [GradWatchCallback(sample_every=1)], **{"notes": notes} | more)
    trainer.fit(module, loader(data) if isinstance(data, int) else data)
    return trainer, notes


def approx(values: Any) -> Any:
    return pytest.approx(values, rel=FLOAT32, abs=1e-7)


def numbered(values: Any) -> list[tuple[int, Any]]:
    """Return a series of these values, one at each step from 0 on."""
    return list(enumerate(map(approx, values)))
