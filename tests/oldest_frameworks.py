"""Train with each named framework, watched, and once more from its checkpoint. Needs no pytest.

    python tests/oldest_frameworks.py lightning ignite transformers accelerate
    python tests/oldest_frameworks.py pytorch_lightning    # as if `lightning` were not installed

Run it in an environment with the oldest versions that pyproject.toml allows. A framework that is named but cannot be
imported is a failure. The batch is {3, 4} and the loss its inner product with the weights: every gradient has norm 5.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from wandb_gradwatch import MemorySink, watch

STEPS, SAVED_AFTER, CLIPPED_TO = 6, 3, 2.5
EPOCH = [torch.tensor([[3.0, 4.0]])] * STEPS


def model() -> torch.nn.Linear:
    return torch.nn.Linear(2, 1, bias=False)


def check(memory: MemorySink, *, steps: Sequence[int], clipped: bool = True) -> None:
    merged = memory.merged()
    assert merged is not None, "nothing was sampled"
    assert merged.steps.tolist() == list(steps), merged.steps
    assert merged.total_grad_norm.round(5).tolist() == [5.0] * len(steps), merged.total_grad_norm
    if clipped:
        assert merged.total_grad_norm_clipped.round(3).tolist() == [CLIPPED_TO] * len(steps), merged


def with_lightning(package: str) -> None:
    pl: Any = import_module(package)
    from wandb_gradwatch.integrations.lightning import GradWatchCallback

    class Module(pl.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.net = model()

        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            return self.net(batch).sum()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.01)

    def fit(epochs: int, checkpoint: Path | None) -> tuple[Any, MemorySink]:
        memory = MemorySink()
        trainer = pl.Trainer(
            max_epochs=epochs, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False, gradient_clip_val=CLIPPED_TO,
            callbacks=[GradWatchCallback(sample_every=1, sinks=[memory], log_every_n_steps=1)],
        )  # fmt: skip
        trainer.fit(Module(), torch.utils.data.DataLoader(EPOCH, batch_size=None), ckpt_path=checkpoint)
        assert abs(float(trainer.callback_metrics["train/grad_norm"]) - 5) < 1e-5
        assert abs(float(trainer.callback_metrics["train_epoch/grad_norm"]) - 5) < 1e-5
        return trainer, memory

    with tempfile.TemporaryDirectory() as folder:
        trainer, memory = fit(1, None)
        check(memory, steps=range(1, STEPS + 1))
        trainer.save_checkpoint(f"{folder}/last.ckpt")
        _, memory = fit(2, Path(f"{folder}/last.ckpt"))
        check(memory, steps=range(STEPS + 1, 2 * STEPS + 1))


def with_ignite() -> None:
    from ignite.engine import Engine

    from wandb_gradwatch.integrations.ignite import GradWatch

    def run(saved: dict[str, Any] | None, *, bad: int) -> tuple[dict[str, Any], MemorySink]:
        net, memory = model(), MemorySink()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
        before = net.weight.detach().clone()

        def step(engine: Engine, x: torch.Tensor) -> None:
            (net(x).sum() * (1e6 if engine.state.iteration == bad else 1)).backward()
            torch.nn.utils.clip_grad_norm_(net.parameters(), CLIPPED_TO)
            optimizer.step()
            optimizer.zero_grad()

        engine = Engine(step)
        grad_watch = GradWatch(net, sinks=[memory], max_norm=1e3, skip=True).attach(engine)
        if saved is not None:
            grad_watch.load_state_dict(saved)
        engine.run(EPOCH)
        moved = float((before - net.weight.detach()).norm())
        assert abs(moved - 0.01 * CLIPPED_TO * (STEPS - bool(bad))) < 1e-5, f"the bad batch was applied: {moved}"
        return grad_watch.state_dict(), memory

    state, memory = run(None, bad=0)
    check(memory, steps=range(1, STEPS + 1))
    _, memory = run(state, bad=4)
    merged = memory.merged()
    assert merged is not None
    assert merged.total_grad_norm.round(3).tolist() == [5, 5, 5, 5e6, 5, 5], merged.total_grad_norm
    assert merged.steps.tolist() == list(range(STEPS + 1, 2 * STEPS + 1)), merged.steps


def with_transformers() -> None:
    from transformers import Trainer, TrainingArguments

    from wandb_gradwatch.integrations.transformers import GradWatchCallback

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = model()

        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": self.net(x).mean()}

    def train(folder: str, checkpoint: str | None) -> MemorySink:
        memory = MemorySink()
        arguments = TrainingArguments(
            folder, max_steps=STEPS, per_device_train_batch_size=1, max_grad_norm=CLIPPED_TO, logging_steps=1,
            save_strategy="steps", save_steps=SAVED_AFTER, report_to=[], disable_tqdm=True, use_cpu=True,
            dataloader_pin_memory=False,
        )  # fmt: skip
        data = [{"x": x[0]} for x in EPOCH]
        callback = GradWatchCallback(sample_every=1, sinks=[memory])
        trainer = Trainer(model=Net(), args=arguments, train_dataset=data, callbacks=[callback])
        trainer.train(resume_from_checkpoint=checkpoint)
        logged = [each["step"] for each in trainer.state.log_history if "gradwatch/grad_norm" in each]
        assert logged == list(range(1, STEPS + 1)), logged
        return memory

    with tempfile.TemporaryDirectory() as folder:
        check(train(folder, None), steps=range(1, STEPS + 1))
        checkpoint = f"{folder}/checkpoint-{SAVED_AFTER}"
        assert Path(checkpoint, "gradwatch.pt").exists()
        check(train(folder, checkpoint), steps=range(SAVED_AFTER + 1, STEPS + 1))


def with_accelerate() -> None:
    from accelerate import Accelerator

    accelerator, net, memory = Accelerator(cpu=True, gradient_accumulation_steps=2), model(), MemorySink()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    net, optimizer, loader = accelerator.prepare(net, optimizer, torch.utils.data.DataLoader(EPOCH, batch_size=None))
    watcher = watch(net, sinks=[memory])
    for x in loader:
        with accelerator.accumulate(net):
            accelerator.backward(net(x).sum())
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(net.parameters(), CLIPPED_TO)
            optimizer.step()
            optimizer.zero_grad()
    watcher.remove()
    check(memory, steps=range(1, STEPS // 2 + 1))


TRAININGS: dict[str, Callable[[], None]] = {
    "lightning": lambda: with_lightning("lightning.pytorch"),
    "pytorch_lightning": lambda: with_lightning("pytorch_lightning"),
    "ignite": with_ignite,
    "transformers": with_transformers,
    "accelerate": with_accelerate,
}


def main(names: list[str]) -> None:
    if names == ["pytorch_lightning"]:
        # Make the import of `lightning` fail, even if it has been imported before.
        sys.modules.update(
            dict.fromkeys(["lightning", *(name for name in sys.modules if name.startswith("lightning."))])
        )
    for name in names or list(TRAININGS):
        TRAININGS[name]()
        print(f"watches with {name} {import_module(name).__version__}, torch {torch.__version__}")


if __name__ == "__main__":
    main(sys.argv[1:])
