"""A minimal training script with the one line that watches its gradients.

python examples/train.py
"""

import math
import os

import torch
import wandb

import wandb_gradwatch

os.environ.setdefault("WANDB_MODE", "offline")  # no account needed; `wandb sync` uploads the run later


def main() -> None:
    torch.manual_seed(0)
    x = torch.linspace(-math.pi, math.pi, 512).unsqueeze(1)
    y = torch.sin(x)
    model = torch.nn.Sequential(torch.nn.Linear(1, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

    with wandb.init(project="gradwatch-examples", name="train"):
        wandb_gradwatch.watch(model)  # the one line

        for _ in range(int(os.environ.get("STEPS", "300"))):
            loss = torch.nn.functional.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            wandb.log({"loss": loss.item()})
    print(f"final loss {loss.item():.5f}")


if __name__ == "__main__":
    main()
