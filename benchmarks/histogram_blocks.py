"""How far the quantiles of a sample of a gradient's blocks are from those of all its elements.

    python -m benchmarks.histogram_blocks [--layers 3] [--steps 4]

Every 16th block of each gradient of a GPT-2 is counted, with all 16 beginnings; gradients of fewer blocks are counted
whole. Prints, by the size of a block, for how many layers and beginnings all quantiles of the magnitude are at most one
bin away. A histogram of blocks is not the default: the kernels' own chunks of 65,536 elements are too long for it
(an embedding's rows and a projection's queries and values differ), and on a GPU a whole one takes little longer.
"""

from __future__ import annotations

import argparse

import numpy as np
import torch
from torch.nn import functional

from benchmarks.models import GPT2, VOCABULARY
from wandb_gradwatch._measure.columns import ZERO_BIN
from wandb_gradwatch._measure.measure import measure

EVERY = 16
BLOCKS = (65_536, 4096, 512)
QUANTILES = (0.01, 0.1, 0.5, 0.9, 0.99)


def gradients_of_gpt2(layers: int, steps: int) -> dict[str, torch.Tensor]:
    """Train on tokens of a natural frequency; return the gradients of the last step, flat, by name."""
    torch.manual_seed(0)
    model = GPT2(layers=layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    frequency = 1 / torch.arange(1.0, VOCABULARY + 1) ** 1.1  # Zipf's law
    for _ in range(steps):
        optimizer.step()  # without gradients in the first round
        optimizer.zero_grad()
        tokens = torch.multinomial(frequency, 129, replacement=True).unsqueeze(0)
        functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).backward()
    return {name: p.grad.flatten() for name, p in model.named_parameters() if p.grad is not None}


def quantile_bins(gradients: list[torch.Tensor]) -> np.ndarray:
    """Return the bin of the magnitude in which each quantile is: [N, Q]; 0 is the bin of zeros."""
    counts = measure(gradients, None, histogram=True, backend="cpu").histogram
    assert counts is not None
    counts_NB = counts.numpy()
    of_both_signs = counts_NB[:, ZERO_BIN + 1 :] + counts_NB[:, ZERO_BIN - 1 :: -1]
    up_to = np.concatenate([counts_NB[:, [ZERO_BIN]], of_both_signs], axis=1).cumsum(axis=1)
    return np.stack([(up_to < quantile * up_to[:, -1:]).sum(axis=1) for quantile in QUANTILES], axis=1)


def distances(gradient: torch.Tensor, block: int) -> list[int]:
    """Return the largest distance of a quantile, in bins, for each beginning; [0] for a gradient of few blocks."""
    blocks = gradient.split(block)
    if len(blocks) < EVERY:
        return [0]
    bins = quantile_bins([gradient, *(torch.cat(blocks[first::EVERY]) for first in range(EVERY))])
    return [int(one) for one in abs(bins[1:] - bins[0]).max(axis=1)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--steps", type=int, default=4)
    options = parser.parse_args()
    gradients = gradients_of_gpt2(options.layers, options.steps)
    print("| elements of a block | layers and beginnings within one bin | layers that are worst: bins |\n|--:|--:|---|")
    for block in BLOCKS:
        found = {name: distances(gradient, block) for name, gradient in gradients.items()}
        share = np.mean([np.mean([one <= 1 for one in of_layer]) for of_layer in found.values()])
        worst = sorted(found, key=lambda name: -max(found[name]))[:2]
        print(f"| {block:,} | {share:.1%} | {', '.join(f'{name}: {max(found[name])}' for name in worst)} |", flush=True)


if __name__ == "__main__":
    main()
