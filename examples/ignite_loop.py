"""Ignite: skip the update of a bad batch, without any change to the train step.

python examples/ignite_loop.py
"""

import os

import torch
import wandb
from ignite.engine import Engine, Events
from torch import Tensor, nn

from wandb_gradwatch.integrations.ignite import GradWatch

os.environ.setdefault("WANDB_MODE", "offline")


def main() -> None:
    torch.manual_seed(0)
    steps = int(os.environ.get("STEPS", "200"))
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def train_step(engine: Engine, x: Tensor) -> float:
        loss = nn.functional.mse_loss(model(x), x.sin().sum(dim=1, keepdim=True))
        if engine.state.iteration == steps // 2:
            loss = loss * 1e4  # a bad batch
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    trainer = Engine(train_step)

    def print_spike(engine: Engine) -> None:
        print(f"iteration {engine.state.iteration}: norm {engine.state.metrics['grad_norm']:.0f}, update skipped")

    with wandb.init(project="gradwatch-examples", name="ignite"):
        GradWatch(model, skip=True, on_spike=print_spike, log_every=10).attach(trainer)  # the one line

        @trainer.on(Events.ITERATION_COMPLETED(every=10))
        def log(engine: Engine) -> None:
            wandb.log({"loss": engine.state.output, "grad_norm": engine.state.metrics["grad_norm"]})

        trainer.run(torch.randn(steps, 16, 8))
    print(f"final loss {trainer.state.output:.4f}")


if __name__ == "__main__":
    main()
