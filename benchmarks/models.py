"""The models of the benchmarks: a tiny MLP, ResNet-50 and GPT-2 small in plain torch, and a long list of tensors.

A model has real and light steps. A real step trains on random data. A light step has the same parameters, hooks and
optimizer, but its backward only returns prepared gradients: the cost of a monitor would be lost in the noise of a step
that takes seconds, and monitors do the same work in both. On a GPU large models make real steps, in bfloat16.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.shapes import mlp

# B batch, T tokens, D width, H heads

VOCABULARY = 50257


class TinyMLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for outputs, inputs in (shape for shape in mlp() if len(shape) == 2):
            layers += [nn.Linear(inputs, outputs), nn.ReLU()]
        self.layers = nn.Sequential(*layers[:-1])

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layers(inputs)


class Bottleneck(nn.Module):
    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * width
        self.main = nn.Sequential(
            *_convolution(inputs, width, 1, 1),
            nn.ReLU(inplace=True),
            *_convolution(width, width, 3, stride),
            nn.ReLU(inplace=True),
            *_convolution(width, outputs, 1, 1),
        )
        needs_projection = stride != 1 or inputs != outputs
        self.skip = nn.Sequential(*_convolution(inputs, outputs, 1, stride)) if needs_projection else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return functional.relu(self.main(x) + self.skip(x))


class ResNet50(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        blocks: list[nn.Module] = [*_convolution(3, 64, 7, 2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)]
        inputs = 64
        for stage, (width, count) in enumerate(((64, 3), (128, 4), (256, 6), (512, 3))):
            for block in range(count):
                blocks.append(Bottleneck(inputs, width, 2 if stage and block == 0 else 1))
                inputs = 4 * width
        self.body = nn.Sequential(*blocks)
        self.head = nn.Linear(inputs, 1000)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.body(images).mean(dim=(2, 3)))


def _convolution(inputs: int, outputs: int, kernel: int, stride: int) -> list[nn.Module]:
    return [nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, bias=False), nn.BatchNorm2d(outputs)]


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attend, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.widen, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x_BTD: Tensor) -> Tensor:
        query, key, value = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.attend(self.norm1(x_BTD)).chunk(3, -1)
        )
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x_BTD = x_BTD + self.project(attended.transpose(1, 2).flatten(2))
        return x_BTD + self.narrow(functional.gelu(self.widen(self.norm2(x_BTD)), approximate="tanh"))


class GPT2(nn.Module):
    def __init__(
        self, *, layers: int = 12, width: int = 768, heads: int = 12, context: int = 1024, vocabulary: int = VOCABULARY
    ) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens) + self.position.weight[: tokens.shape[1]]
        return functional.linear(self.norm(self.blocks(x)), self.token.weight)  # the head is tied to the embedding


class TensorList(nn.Module):
    """A list of parameters without a forward."""

    def __init__(self, shapes: list[tuple[int, ...]], dtype: torch.dtype) -> None:
        super().__init__()
        self.tensors = nn.ParameterList(torch.randn(shape, dtype=dtype) * 0.02 for shape in shapes)

    def forward(self) -> Tensor:
        raise RuntimeError("a list of tensors makes light steps only")


class _HandOut(torch.autograd.Function):
    """A loss with given gradients, which the engine copies because they are kept here."""

    @staticmethod
    def forward(ctx: Any, gradients: list[Tensor], *parameters: Tensor) -> Tensor:
        ctx.gradients = gradients
        return parameters[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        return (None, *ctx.gradients)


class Trainee(nn.Module):
    """A network and its loss in one module, so that monitors with forward hooks work with real and light steps."""

    def __init__(self, net: nn.Module, batch: Callable[[], tuple[Tensor, Tensor]] | None) -> None:
        super().__init__()
        self.net = net
        self._batch = batch
        self._gradients: list[Tensor] = []

    def forward(self, *, light: bool) -> Tensor:
        if light:
            parameters = list(self.net.parameters())
            if not self._gradients:
                self._gradients = [torch.randn_like(p) * 1e-3 for p in parameters]
            return _HandOut.apply(self._gradients, *parameters)
        assert self._batch is not None, "a list of tensors makes light steps only"
        inputs, targets = self._batch()
        return functional.cross_entropy(self.net(inputs).flatten(0, -2), targets.flatten())


@dataclass(frozen=True)
class Task:
    """A model to train, and how it is measured.

    Args:
        name: the name in the tables.
        make: a function that builds the module on a device.
        batch: a description of a real step's batch, by device type; empty if there is no real step.
        light: whether monitors are measured on light steps.
        steps: the maximum number of steps of a monitor's cycle, at least 3.
        pairs: the default number of pairs of an unwatched and a watched block.
        block: the number of steps of a block. A short step alone would be dominated by effects of the code before it.
        settled_pairs: the number of pairs until the cadence of a monitor that chooses it is stable; at least twice as
            many pairs follow.
    """

    name: str
    make: Callable[[torch.device], Trainee]
    batch: dict[str, str]
    light: bool
    steps: int
    pairs: int
    block: int = 1
    settled_pairs: int = 50


def _random_images(size: int, device: torch.device) -> Callable[[], tuple[Tensor, Tensor]]:
    images = torch.randn(size, 3, 224, 224, device=device)
    return lambda: (images, torch.zeros(size, dtype=torch.long, device=device))


def _random_tokens(
    size: int, length: int, device: torch.device, *, vocabulary: int = VOCABULARY
) -> Callable[[], tuple[Tensor, Tensor]]:
    tokens = torch.randint(0, vocabulary, (size, length + 1), device=device)
    return lambda: (tokens[:, :-1], tokens[:, 1:])


def _mlp(device: torch.device) -> Trainee:
    rows, labels = torch.randn(64, 32, device=device), torch.randint(0, 10, (64,), device=device)
    return Trainee(TinyMLP().to(device), lambda: (rows, labels))


def _resnet(device: torch.device) -> Trainee:
    return Trainee(ResNet50().to(device), _random_images(8 if device.type == "cpu" else 64, device))


def _gpt2(device: torch.device) -> Trainee:
    size, length = (2, 256) if device.type == "cpu" else (8, 1024)
    with device:
        net = GPT2()
    return Trainee(net, _random_tokens(size, length, device))


def _billion(device: torch.device) -> Trainee:
    with device:
        net = GPT2(layers=22, width=2048, heads=16, context=2048).to(torch.bfloat16)
    return Trainee(net, _random_tokens(4, 1024, device))


def _small_gpt(dtype: torch.dtype) -> Callable[[torch.device], Trainee]:
    def make(device: torch.device) -> Trainee:
        with device:
            net = GPT2(layers=1, width=8, heads=2, context=8, vocabulary=16).to(dtype)
        return Trainee(net, _random_tokens(1, 8, device, vocabulary=16))

    return make


TASKS = {
    "mlp": Task(
        "tiny MLP",
        _mlp,
        {"cpu": "64 rows", "cuda": "64 rows"},
        light=False,
        steps=1000,
        pairs=400,
        block=20,
        settled_pairs=400,
    ),
    "resnet50": Task(
        "ResNet-50", _resnet, {"cpu": "8 images of 224", "cuda": "64 images of 224"}, light=True, steps=8, pairs=48
    ),
    "gpt2": Task(
        "GPT-2 small", _gpt2, {"cpu": "2 x 256 tokens", "cuda": "8 x 1024 tokens"}, light=True, steps=4, pairs=16
    ),
    "1b": Task(
        "GPT 1.2B, bfloat16", _billion, {"cuda": "4 x 1024 tokens"}, light=True, steps=3, pairs=6, settled_pairs=25
    ),
}

# The same tasks in sizes that only check that everything runs.
TINY_TASKS = {
    "mlp": replace(TASKS["mlp"], steps=4, block=1, settled_pairs=0),
    "gpt2": replace(TASKS["gpt2"], make=_small_gpt(torch.float32), settled_pairs=0),
    "1b": replace(TASKS["1b"], make=_small_gpt(torch.bfloat16), settled_pairs=0),
}
