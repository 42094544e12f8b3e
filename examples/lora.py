"""Fine-tuning with LoRA: watch only the adapters, including one that is added in the middle of training.

    python examples/lora.py

LoRA's B starts at zero. At the first step the gradient of A is therefore exactly zero, and B has no ratio of gradient
norm to parameter norm: the ratio is missing in W&B, and no alert is raised.
"""

import os

import torch
import wandb
from torch import Tensor, nn

import wandb_gradwatch

os.environ.setdefault("WANDB_MODE", "offline")


class LoRA(nn.Module):
    """A frozen linear layer plus a low-rank update: base(x) + B A x."""

    def __init__(self, base: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.lora_A = nn.Parameter(torch.randn(rank, base.in_features) / base.in_features**0.5)
        self.lora_B = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.lora_A.T @ self.lora_B.T


def main() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 4)).requires_grad_(False)
    target = torch.nn.Linear(16, 4)
    model[0] = LoRA(model[0])

    with wandb.init(project="gradwatch-examples", name="lora"):
        watcher = wandb_gradwatch.watch(model, include="lora_", sample_every=1, log_every=10)
        print("watched:", ", ".join(watcher.parameter_names))

        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
        steps = int(os.environ.get("STEPS", "100"))
        for step in range(steps):
            if step == steps // 2:  # a second adapter, in the middle of training
                model[2] = LoRA(model[2])
                optimizer.add_param_group({"params": [model[2].lora_A, model[2].lora_B]})
            x = torch.randn(64, 16)
            loss = nn.functional.mse_loss(model(x), target(x).detach())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            wandb.log({"loss": loss.item()})
        print("watched at the end:", ", ".join(watcher.parameter_names))


if __name__ == "__main__":
    main()
