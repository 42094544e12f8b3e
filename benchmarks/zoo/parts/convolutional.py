"""Convolutional models, with the data and the losses that are their own."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..loop import Batch
from . import data
from .dense import Residual, mlp


def conv(
    width: int = 8, *, classes: int = 4, depth: int = 2, norm: Callable[[int], nn.Module] | None = None
) -> nn.Module:
    """Convolutions and a head."""
    layers: list[nn.Module] = []
    for index in range(depth):
        layers += [nn.Conv2d(width if index else 1, width, 3, padding=1), *([norm(width)] if norm else []), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(4 * width, classes))


def two_groups(width: int) -> nn.Module:
    return nn.GroupNorm(2, width)


def resnet(width: int = 8, *, classes: int = 4, blocks: int = 2) -> nn.Module:
    """Residual blocks with batch norm."""

    def block() -> nn.Module:
        return Residual(
            nn.Sequential(nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
                          nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width))
        )  # fmt: skip

    stem = nn.Conv2d(1, width, 3, padding=1)
    return nn.Sequential(
        stem, *(block() for _ in range(blocks)), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, classes)
    )


def plain_convolutions(
    depth: int = 2, width: int = 8, *, inputs: int = 3, classes: int = 5, pooled: int = 3
) -> nn.Module:
    """Convolutions without any normalisation."""
    layers: list[nn.Module] = []
    for index in range(depth):
        layers += [nn.Conv2d(width if index else inputs, width, 3, padding=1), nn.ReLU()]
    head = nn.Linear(pooled * pooled * width, classes)
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(pooled), nn.Flatten(), head)


def colours(size: int, *, classes: int = 5, side: int = 12, noise: float = 0.6) -> data.Batches:
    """Coloured textures with noise: [N, 3, side, side]."""
    labels, templates = torch.randint(0, classes, (600,)), torch.randn(classes, 3, 3, 3)
    smooth = functional.interpolate(templates, size=(side, side), mode="bicubic")
    return data.drawn(smooth[labels] + noise * torch.randn(600, 3, side, side), labels, size=size)


def normed(*sizes: int, kernel: int, **options: int) -> list[nn.Module]:
    return [nn.Conv2d(*sizes, kernel, padding=kernel // 2, bias=False, **options), nn.BatchNorm2d(sizes[1])]


def bottlenecks(width: int = 16) -> nn.Module:
    """Narrow, convolve, widen, add."""

    def block() -> nn.Module:
        narrow, middle = normed(width, 8, kernel=1), normed(8, 8, kernel=3)
        return Residual(nn.Sequential(*narrow, nn.ReLU(), *middle, nn.ReLU(), *normed(8, width, kernel=1)))

    blocks = [block() for _ in range(3)]
    stem = [*normed(3, width, kernel=3, stride=2), nn.ReLU()]
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 5))


class Dense(nn.Module):
    """Each layer reads all before it."""

    def __init__(self, grow: int = 6) -> None:
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, 12, 3, stride=2, padding=1), nn.Linear(12 + 4 * grow, 5)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.BatchNorm2d(num), nn.ReLU(), nn.Conv2d(num, grow, 3, padding=1))
            for num in range(12, 12 + 4 * grow, grow)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for layer in self.layers:
            x = torch.cat([x, layer(x)], dim=1)
        return self.head(torch.relu(x).mean(dim=(2, 3)))


class Scaled(nn.Module):
    """ConvNeXt's block: depthwise, norm, two pointwise layers, and a small learned scale."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(
            nn.Conv2d(dim, dim, 5, padding=2, groups=dim),
            nn.GroupNorm(1, dim),
            nn.Conv2d(dim, 2 * dim, 1),
            nn.GELU(),
            nn.Conv2d(2 * dim, dim, 1),
        )
        self.scale = nn.Parameter(torch.full((dim, 1, 1), 0.1))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * self.inner(x)


class Depthwise(nn.Module):
    """Patches, three of these blocks, a head."""

    def __init__(self, dim: int = 16) -> None:
        super().__init__()
        self.stem, self.blocks = nn.Conv2d(3, dim, 2, stride=2), nn.Sequential(*(Scaled(dim) for _ in range(3)))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.stem(x)).mean(dim=(2, 3))))


class Autoencoder(nn.Module):
    """Images through twelve numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(3, 8, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Conv2d(8, 12, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(108, 12),
        )
        self.decoder = nn.Sequential(
            nn.Linear(12, 108),
            nn.ReLU(),
            nn.Unflatten(1, (12, 3, 3)),
            nn.ConvTranspose2d(12, 8, 2, stride=2),
            nn.ReLU(),
            nn.ConvTranspose2d(8, 3, 2, stride=2),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(self.encoder(x))


class Squeezed(nn.Module):
    """A convolution with batch norm, whose channels are weighted by what they hold on average."""

    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(inputs, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.excite = mlp(width, 4, width)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.mish(self.norm(self.conv(x)))
        return x * torch.sigmoid(self.excite(x.mean(dim=(2, 3))))[:, :, None, None]


def excited() -> nn.Module:
    return nn.Sequential(
        Squeezed(3, 12), nn.MaxPool2d(2), Squeezed(12, 16), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 5)
    )


class Conditioned(nn.Module):
    """Convolutions whose channels are scaled and moved by a condition."""

    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.stem, self.inner = nn.Conv2d(1, width, 3, padding=1), nn.Conv2d(width, width, 3, padding=1)
        self.norm1, self.norm2 = (nn.InstanceNorm2d(width, affine=True) for _ in range(2))
        self.condition, self.head = nn.Linear(3, 2 * width), nn.Linear(4 * width, 4)

    def forward(self, x: Tensor, which: Tensor) -> Tensor:
        x = torch.relu(self.norm1(self.stem(x)))
        scale, move = self.condition(which).chunk(2, dim=1)
        x = torch.relu((1 + scale[:, :, None, None]) * self.norm2(self.inner(x)) + move[:, :, None, None])
        return self.head(functional.adaptive_avg_pool2d(x, 2).flatten(1))


def conditions(size: int = 24) -> data.Batches:
    """The label of an image, counted on by the condition: 0, 1 or 2."""
    images = data.images(size, noise=0.4)

    def batch(step: int) -> Batch:
        x, label = images(step)
        which = torch.randint(0, 3, (size,))
        return x, functional.one_hot(which, 3).float(), (label + which) % 4

    return batch


def small_resnet() -> nn.Module:
    def block() -> nn.Module:
        return Residual(nn.Sequential(nn.Conv2d(12, 12, 3, padding=1), nn.BatchNorm2d(12), nn.ReLU()))

    stem = [nn.Conv2d(1, 12, 3, padding=1), nn.BatchNorm2d(12), nn.ReLU()]
    head = [block(), nn.MaxPool2d(2), block(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(48, 6)]
    return nn.Sequential(*stem, *head)


def pictures(size: int = 16, *, side: int = 12, noise: float = 0.5) -> data.Batches:
    """Coloured stripes, checks, discs and slopes, standardised: [N, 3, side, side], and which of the five."""
    y, x = torch.meshgrid(torch.linspace(-3, 3, side), torch.linspace(-3, 3, side), indexing="ij")
    kinds = torch.stack(
        [(2 * x).sin(), (2 * y).sin(), (2 * x).sin() * (2 * y).sin(), (4 - x * x - y * y).tanh(), (x + y) / 3]
    )

    def batch(_: int) -> Batch:
        labels = torch.randint(0, 5, (size,))
        colours = 0.5 + torch.rand(size, 3, 1, 1)
        return colours * kinds[labels][:, None] + noise * torch.randn(size, 3, side, side), labels

    return batch


class Bottleneck(nn.Module):
    """A residual block whose last batch norm begins at 0."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(
            nn.Conv2d(width, width // 2, 1, bias=False), nn.BatchNorm2d(width // 2), nn.ReLU(),
            nn.Conv2d(width // 2, width // 2, 3, padding=1, bias=False), nn.BatchNorm2d(width // 2), nn.ReLU(),
            nn.Conv2d(width // 2, width, 1, bias=False), nn.BatchNorm2d(width),
        )  # fmt: skip
        nn.init.zeros_(self.inner[-1].weight)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x + self.inner(x))


def zero_bottlenecks() -> nn.Module:
    stem = [nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(
        *stem, *(Bottleneck(16) for _ in range(3)), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 5)
    )


def separable(width: int = 16) -> nn.Module:
    """Depthwise and pointwise convolutions."""
    layers: list[nn.Module] = [nn.Conv2d(3, width, 3, padding=1), nn.BatchNorm2d(width), nn.Hardswish()]
    for _ in range(2):
        layers += [
            nn.Conv2d(width, width, 3, padding=1, groups=width),
            nn.Conv2d(width, width, 1),
            nn.BatchNorm2d(width),
            nn.Hardswish(),
        ]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 5))
