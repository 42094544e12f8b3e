"""The programs that ranks run in test_framework_ranks.py: one training in each framework, with one bad batch."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from frameworks import Recomputed, batches, loss_of, small_model

import wandb_gradwatch
from wandb_gradwatch.sinks import MemorySink

STEPS, ACCUMULATE, CLIP = 12, 2, 1.0
BAD = 9  # the step, from 0, whose first micro-batch is 1000 times too large, on rank 1 only


def data(rank: int, world: int) -> torch.Tensor:
    """Return this rank's micro-batches in order: [steps * accumulate, 4, 4]."""
    made = batches(STEPS * ACCUMULATE * world)  # samplers distribute them over the ranks in turn
    made[BAD * ACCUMULATE * world + 1] *= 1000.0
    return made[rank::world]


@contextlib.contextmanager
def launched(rank: int, world: int) -> Iterator[None]:
    """Set the environment variables that torchrun sets for a rank."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}  # unused: the process group exists already
    yield


def report(model: torch.nn.Module, expected: Recomputed, memory: MemorySink) -> dict[str, Any]:
    merged = memory.merged()
    return {
        "gradients": [[gradient.numpy() for gradient in look] for look in expected.gradients],
        "steps": None if merged is None else merged.steps.tolist(),
        "norms": None if merged is None else merged.total_grad_norm.tolist(),
        "received": None if merged is None else merged.total_grad_norm_clipped.tolist(),
        "skipped": None if merged is None else merged.metrics["gradwatch/num_guarded_steps"].tolist(),
        "weights": [parameter.detach().numpy() for parameter in model.parameters()],
    }


def hugging_face(rank: int, world: int, *, folder: str, resume: int | None = None) -> dict[str, Any]:
    """Train with the Trainer, with accumulation, the Trainer's clipping, and a checkpoint at every fifth step."""
    with launched(rank, world):
        from test_transformers import Net, trainer_of

        from wandb_gradwatch.integrations.transformers import GradWatchCallback

        memory, alerts = MemorySink(), []
        model = Net()
        # Results are compared bit for bit, and ranks may finish compiling the loops of "auto" at different steps.
        options = {"sinks": [memory], "backend": "cpu", "on_alert": lambda alert: alerts.append(alert.title)}
        trainer = trainer_of(
            Path(folder),
            [GradWatchCallback(sample_every=1, guard="skip", **options)],
            model=model,
            count=STEPS * ACCUMULATE * world,
            gradient_accumulation_steps=ACCUMULATE,
            max_grad_norm=CLIP,
            learning_rate=0.01,
            ddp_backend="gloo",
            save_strategy="steps",
            save_steps=5,
        )
        assert trainer.args.world_size == world
        whole = torch.stack([data(each, world) for each in range(world)], dim=1)
        trainer.train_dataset.rows = whole.flatten(0, 2)
        trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-{resume}" if resume else None)
        key = "gradwatch/grad_norm"
        logged = [(entry["step"], entry[key]) for entry in trainer.state.log_history if key in entry]
        return report(model.net, model.expected, memory) | {"logged": logged, "alerts": alerts}


def accelerate(rank: int, world: int) -> dict[str, Any]:
    """Train with Accelerate, with accumulation and clipping, watched by watch() and remove()."""
    with launched(rank, world):
        from accelerate import Accelerator

        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATE)
        assert accelerator.num_processes == world
        memory = MemorySink()
        plain = small_model()
        expected = Recomputed(plain)
        optimizer = torch.optim.SGD(plain.parameters(), lr=0.01)
        whole = torch.stack([data(each, world) for each in range(world)], dim=1).flatten(0, 1)
        loader = torch.utils.data.DataLoader(whole.flatten(0, 1), batch_size=4)
        model, optimizer, loader = accelerator.prepare(plain, optimizer, loader)
        watcher = wandb_gradwatch.watch(model, sinks=[memory], sample_every=1, log_every=4, guard="skip")
        seen: list[torch.Tensor] = []
        for x in loader:
            seen.append(x)
            if len(seen) == ACCUMULATE:
                expected.look(seen)
                seen = []
            with accelerator.accumulate(model):
                accelerator.backward(loss_of(model, x))
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), CLIP)
                optimizer.step()
                optimizer.zero_grad()
        watcher.remove()
        accelerator.end_training()
        return report(plain, expected, memory)
