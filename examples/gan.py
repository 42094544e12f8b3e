"""Two models whose optimizers step in turn: each model has its own names and its own samples in W&B.

    python examples/gan.py

A small GAN learns a two-dimensional ring. The generator's backward also gives the discriminator gradients. The script
resets those gradients without using them, and the watcher does not log them.
"""

import math
import os

import torch
import wandb
from torch import Tensor, nn

import wandb_gradwatch

os.environ.setdefault("WANDB_MODE", "offline")

BATCH = 128
NOISE = 8


def ring(count: int) -> Tensor:
    angle = 2 * math.pi * torch.rand(count, 1)
    return torch.cat([angle.cos(), angle.sin()], dim=1) + 0.05 * torch.randn(count, 2)


def main() -> None:
    torch.manual_seed(0)
    generator = nn.Sequential(nn.Linear(NOISE, 64), nn.ReLU(), nn.Linear(64, 2))
    discriminator = nn.Sequential(nn.Linear(2, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1))
    optimizer_g = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.9))
    optimizer_d = torch.optim.Adam(discriminator.parameters(), lr=1e-3, betas=(0.5, 0.9))
    bce = nn.functional.binary_cross_entropy_with_logits
    real_label, fake_label = torch.ones(BATCH, 1), torch.zeros(BATCH, 1)

    with wandb.init(project="gradwatch-examples", name="gan"):
        # In W&B the names of parameters begin with "G" and "D".
        wandb_gradwatch.watch({"G": generator, "D": discriminator}, sample_every=1, log_every=20)

        for _ in range(int(os.environ.get("STEPS", "200"))):
            fake = generator(torch.randn(BATCH, NOISE))
            loss_d = bce(discriminator(ring(BATCH)), real_label) + bce(discriminator(fake.detach()), fake_label)
            optimizer_d.zero_grad()
            loss_d.backward()
            optimizer_d.step()

            loss_g = bce(discriminator(fake), real_label)
            optimizer_g.zero_grad()
            loss_g.backward()
            optimizer_g.step()
            wandb.log({"loss_d": loss_d.item(), "loss_g": loss_g.item()})
    print(f"discriminator loss {loss_d.item():.3f}, generator loss {loss_g.item():.3f}")


if __name__ == "__main__":
    main()
