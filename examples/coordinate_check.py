"""Check whether a learning rate transfers over widths: the refined coordinate check of an MLP, with its plot.

python examples/coordinate_check.py

In the standard parameterisation all widths have the same learning rate, and the change that the hidden layer's updates
cause grows with the width. With learning rates scaled by 1 / width, as in muP, that change keeps its size.
"""

from pathlib import Path

import numpy as np
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


def plot(found: CoordinateCheck, file: str) -> None:
    """Write an SVG file with both terms over the widths, one line per layer, on logarithmic axes."""
    drawn = ['<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 800 330" style="font: 12px sans-serif">']
    x_of_widths = 300 * np.log(found.widths / WIDTHS[0]) / np.log(WIDTHS[-1] / WIDTHS[0])
    for left, quantity in ((30, "weight_change"), (390, "input_change")):
        sizes = getattr(found, quantity)[:, -1]
        low = sizes[sizes > 0].min()
        high = max(sizes.max(), 10 * low)  # at least a decade, so that a small change looks small
        drawn.append(f'<text x="{left}" y="20">{quantity}: {low:.1e} to {high:.1e}</text>')
        ticks = zip(x_of_widths, WIDTHS, strict=True)
        drawn += [f'<text x="{left + x:.0f}" y="320" text-anchor="middle">{width}</text>' for x, width in ticks]
        for number, (layer, of_layer) in enumerate(zip(found.layers, sizes.T, strict=True)):
            colour = ("#0b6", "#c40", "#26c")[number]
            drawn.append(f'<text x="730" y="{60 + 20 * number}" fill="{colour}">layer {layer}</text>')
            if of_layer.all():  # the input of a layer that reads the data never changes
                heights = 300 - 260 * np.log(of_layer / low) / np.log(high / low)
                points = " ".join(f"{left + x:.1f},{y:.1f}" for x, y in zip(x_of_widths, heights, strict=True))
                drawn.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>')
    Path(file).write_text("\n".join([*drawn, "</svg>\n"]))


def main() -> None:
    for name, make_optimizer in (("standard", standard), ("mup", mup)):
        result = check(make_optimizer)
        plot(result, f"coordinate_check_{name}.svg")
        powers = ", ".join(f"{k}: {p:+.2f}" for k, p in zip(result.layers, result.growth(), strict=True))
        print(f"{name}: the change that each layer learns grows as width to the power of {powers}")


if __name__ == "__main__":
    main()
