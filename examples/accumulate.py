"""Gradient accumulation and clipping: log the norm of each optimizer step before and after clipping.

    python examples/accumulate.py

The watcher needs no setting for accumulation: it measures the accumulated gradient, not that of each micro-batch.
"""

import os

import torch
import wandb

import wandb_gradwatch

os.environ.setdefault("WANDB_MODE", "offline")

MICRO_BATCHES = 4
MAX_NORM = 0.2


def main() -> None:
    torch.manual_seed(0)
    teacher = torch.nn.Linear(32, 10)
    model = torch.nn.Sequential(torch.nn.Linear(32, 128), torch.nn.GELU(), torch.nn.Linear(128, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    with wandb.init(project="gradwatch-examples", name="accumulate"):
        watcher = wandb_gradwatch.watch(model, sample_every=1, log_every=10, group_by="module")

        for _ in range(int(os.environ.get("STEPS", "200"))):
            optimizer.zero_grad()
            for _ in range(MICRO_BATCHES):
                x = torch.randn(64, 32)
                loss = torch.nn.functional.cross_entropy(model(x), teacher(x).argmax(dim=1))
                (loss / MICRO_BATCHES).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
            optimizer.step()
            wandb.log({"loss": loss.item()})

        watcher.flush()
        newest = watcher.latest
        assert newest is not None
        print(f"step {newest.steps[-1]}: norm {newest.total_grad_norm[-1]:.3f} before clipping", end=", ")
        print(f"{newest.total_grad_norm_clipped[-1]:.3f} after; {newest.clip_ratio:.0%} of the last steps clipped")


if __name__ == "__main__":
    main()
