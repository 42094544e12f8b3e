"""The parameter shapes of a few models."""

from __future__ import annotations

import itertools
import math

Shape = tuple[int, ...]


def mlp() -> list[Shape]:
    """A tiny multilayer perceptron: 18 tensors, 0.03 million elements."""
    widths = [32] + [64] * 7 + [32, 10]
    return [shape for i, o in itertools.pairwise(widths) for shape in ((o, i), (o,))]


def resnet50() -> list[Shape]:
    """ResNet-50: 161 tensors, 25.6 million elements."""
    shapes: list[Shape] = []

    def convolution(outputs: int, inputs: int, kernel: int) -> None:
        shapes.extend([(outputs, inputs, kernel, kernel), (outputs,), (outputs,)])  # and its batch norm

    convolution(64, 3, 7)
    inputs = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            convolution(width, inputs, 1)
            convolution(width, width, 3)
            convolution(4 * width, width, 1)
            if block == 0:
                convolution(4 * width, inputs, 1)
            inputs = 4 * width
    return [*shapes, (1000, 2048), (1000,)]


def gpt2(layers: int = 12, width: int = 768, vocabulary: int = 50257, context: int = 1024) -> list[Shape]:
    """A GPT-2 with tied embeddings; the small one has 148 tensors and 124 million elements."""
    block: list[Shape] = [
        *[(width,), (width,), (3 * width, width), (3 * width,), (width, width), (width,)],
        *[(width,), (width,), (4 * width, width), (4 * width,), (width, 4 * width), (width,)],
    ]
    return [(vocabulary, width), (context, width), *block * layers, (width,), (width,)]


def gpt_1b() -> list[Shape]:
    """A GPT of 1.2 billion elements: 22 layers of width 2048."""
    return gpt2(layers=22, width=2048, context=2048)


def num_elements(shapes: list[Shape]) -> int:
    return sum(math.prod(shape) for shape in shapes)


MODELS = {"MLP": mlp, "ResNet-50": resnet50, "GPT-2 small": gpt2, "GPT 1.2B": gpt_1b}
