"""Check whether a learning rate transfers over widths: the refined coordinate check of an MLP, with its plot.

python examples/coordinate_check.py

In the standard parameterisation all widths have the same learning rate, and the change that the hidden layer's updates
cause grows with the width. With learning rates scaled by 1 / width, as in muP, that change keeps its size.
"""

import torch
from torch import nn

from wandb_gradwatch.metrics import CoordinateCheck, coordinate_check

WIDTHS = [64, 128, 256, 512, 1024]
BASE_WIDTH, LR, STEPS = 64, 1e-3, 4


def make_model(width: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(32, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 8, bias=False)
    )


def standard(model: nn.Module, width: int) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=LR)


def mup(model: nn.Module, width: int) -> torch.optim.Optimizer:
    """Adam changes each weight by about the learning rate: divide it by the width where `width` changes add up."""
    first, hidden, last = (model[index] for index in (0, 2, 4))
    return torch.optim.Adam(
        [
            {"params": first.parameters(), "lr": LR},
            {"params": [hidden.weight, last.weight], "lr": LR * BASE_WIDTH / width},
            {"params": [hidden.bias], "lr": LR},
        ]
    )


def check(make_optimizer: object) -> CoordinateCheck:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(64, 32, generator=generator)
    labels = torch.randint(0, 8, (64,), generator=generator)
    return coordinate_check(
        make_model,
        make_optimizer,
        widths=WIDTHS,
        batches=[(inputs, labels)] * STEPS,
        loss=lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1]),
    )


def main() -> None:
    for name, make_optimizer in (("standard", standard), ("mup", mup)):
        result = check(make_optimizer)
        result.plot(f"coordinate_check_{name}.svg")
        powers = ", ".join(f"{k}: {p:+.2f}" for k, p in zip(result.layers, result.growth(), strict=True))
        print(f"{name}: the change that each layer learns grows as width to the power of {powers}")


if __name__ == "__main__":
    main()
