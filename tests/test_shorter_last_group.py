"""If the last group of micro-batches is shorter, its update has a norm before clipping like any other."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from frameworks import batches, loss_of, small_model
from gradients import Chosen, samples, watch
from torch import nn

from wandb_gradwatch import MemorySink

CLIP = 1e-3  # far below every norm
DATA = batches(5)  # two micro-batches an update: 2 + 2 + 1

pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers.*"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*"),
]


@pytest.mark.parametrize("sample_every", [1, 3])
@pytest.mark.parametrize("sizes", [(4, 4, 1, 4), (1, 3, 2, 1), (2, 2, 2, 1)])
def test_in_a_plain_loop(sizes, sample_every):
    model = Chosen(a=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    watcher, sink = watch(model, sample_every=sample_every)
    for size in sizes * 3:
        for _ in range(size):
            model.loss(a=[3, 4]).backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
    snapshot = samples(watcher, sink)
    sampled = (sizes * 3)[sample_every - 1 :: sample_every]
    assert snapshot.total_grad_norm.tolist() == [5 * size for size in sampled]
    assert snapshot.total_grad_norm_clipped == pytest.approx([CLIP] * len(sampled), rel=1e-5)


def in_accelerate(sink: MemorySink, _: Path) -> list[float]:
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(gradient_accumulation_steps=2, cpu=True)
    model = small_model()
    optimizer, loader = torch.optim.SGD(model.parameters(), lr=0.1), torch.utils.data.DataLoader(DATA, batch_size=None)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    watcher, _ = watch(model, sinks=[sink])
    norms = []
    for x in loader:
        with accelerator.accumulate(model):
            accelerator.backward(loss_of(model, x))
            if accelerator.sync_gradients:
                norms.append(float(accelerator.clip_grad_norm_(model.parameters(), CLIP)))
            optimizer.step()
            optimizer.zero_grad()
    watcher.remove()
    return norms


def in_lightning(sink: MemorySink, _: Path) -> list[float]:
    pl = pytest.importorskip("lightning.pytorch")
    from lightning_programs import trainer_of

    from wandb_gradwatch.integrations.lightning import GradWatchCallback

    norms = []

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = small_model()

        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            return loss_of(self.net, batch)

        def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
            norms.append(math.sqrt(sum(float(p.grad.double().square().sum()) for p in self.net.parameters())))

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    trainer = trainer_of(GradWatchCallback(sinks=[sink]), accumulate_grad_batches=2, gradient_clip_val=CLIP)
    trainer.fit(Module(), torch.utils.data.DataLoader(DATA, batch_size=None))
    return norms


def in_transformers(sink: MemorySink, path: Path) -> list[float]:
    transformers = pytest.importorskip("transformers")

    class Regression(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = small_model()

        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": loss_of(self.net, x)}

    arguments = transformers.TrainingArguments(
        output_dir=str(path), gradient_accumulation_steps=2, per_device_train_batch_size=4, max_grad_norm=CLIP,
        num_train_epochs=1, logging_steps=1, report_to=[], use_cpu=True, save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    model = Regression()
    trainer = transformers.Trainer(model, arguments, train_dataset=[{"x": x} for x in DATA.flatten(0, 1)])
    watcher, _ = watch(model, sinks=[sink])
    trainer.train()
    watcher.remove()
    return [row["grad_norm"] for row in trainer.state.log_history if "grad_norm" in row]


@pytest.mark.parametrize("train", [in_accelerate, in_lightning, in_transformers], ids=lambda train: train.__name__)
def test_in_a_framework_the_norm_is_the_one_that_it_clips(train, tmp_path):
    sink = MemorySink()
    norms = train(sink, tmp_path)
    snapshot = sink.merged()
    assert len(norms) == 3
    assert snapshot.total_grad_norm == pytest.approx(norms, rel=1e-5)
    assert snapshot.total_grad_norm_clipped == pytest.approx([CLIP] * 3, rel=1e-2)  # frameworks add 1e-6 to the norm
