"""Mixed precision in the style of nanoGPT: autocast, GradScaler, accumulation, unscale_ and clipping.

    python examples/amp.py

The logged norms are those of the true gradients, without the loss scale. A step that the scaler skips because of an
overflow is counted in gradwatch/num_skipped_steps and raises no alert.
"""

import os

import torch
import wandb
from torch import nn

import wandb_gradwatch

os.environ.setdefault("WANDB_MODE", "offline")

MICRO_BATCHES = 2
GRAD_CLIP = 1.0


def main() -> None:
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.LayerNorm(256), nn.Linear(256, 64)).to(device)
    teacher = nn.Linear(64, 64).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    scaler = torch.amp.GradScaler(device, growth_interval=20)
    autocast = torch.autocast(device, dtype=torch.float16 if device == "cuda" else torch.bfloat16)

    with wandb.init(project="gradwatch-examples", name="amp"):
        watcher = wandb_gradwatch.watch(model, sample_every=1, log_every=10)

        for _ in range(int(os.environ.get("STEPS", "100"))):
            for _ in range(MICRO_BATCHES):
                x = torch.randn(32, 64, device=device)
                with autocast:
                    loss = nn.functional.mse_loss(model(x), teacher(x).detach()) / MICRO_BATCHES
                scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), GRAD_CLIP)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=True)
            wandb.log({"loss": loss.item() * MICRO_BATCHES})

        watcher.flush()
        newest = watcher.latest
        assert newest is not None
        print(f"step {newest.steps[-1]}: gradient norm {newest.total_grad_norm[-1]:.3f}", end=", ")
        print(f"loss scale {newest.loss_scale[-1]:.0f}")


if __name__ == "__main__":
    main()
