"""Accelerate with two more lines: watch() after prepare(), and remove() before end_training().

python examples/accelerate_loop.py
"""

import os

import torch
from accelerate import Accelerator
from torch import nn

import wandb_gradwatch

os.environ.setdefault("WANDB_MODE", "offline")


def main() -> None:
    torch.manual_seed(0)
    steps = int(os.environ.get("STEPS", "200"))
    accelerator = Accelerator(cpu=True, log_with="wandb", gradient_accumulation_steps=2)
    accelerator.init_trackers("gradwatch-examples", init_kwargs={"wandb": {"name": "accelerate"}})

    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data = torch.utils.data.DataLoader(torch.randn(2 * steps, 16, 8), batch_size=None)
    model, optimizer, data = accelerator.prepare(model, optimizer, data)
    watcher = wandb_gradwatch.watch(model, log_every=10, sample_every=1)  # the first line

    for x in data:
        with accelerator.accumulate(model):
            loss = nn.functional.mse_loss(model(x), x.sin().sum(dim=1, keepdim=True))
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            if accelerator.sync_gradients:
                accelerator.log({"loss": loss.item()})

    watcher.remove()  # the second line, before end_training() finishes the W&B run
    accelerator.end_training()
    print(f"final loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
