"""Convolutional models, with the data and the losses that are their own."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations

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


class SkipNet(nn.Module):
    """Down, up, and a shortcut between the two."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.first, self.down = nn.Conv2d(1, width, 3, padding=1), nn.Conv2d(width, 2 * width, 3, padding=1)
        self.up, self.joined = (
            nn.ConvTranspose2d(2 * width, width, 2, stride=2),
            nn.Conv2d(2 * width, width, 3, padding=1),
        )
        self.out = nn.Conv2d(width, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        fine = torch.relu(self.first(x))
        coarse = torch.relu(self.down(functional.max_pool2d(fine, 2)))
        return self.out(torch.relu(self.joined(torch.cat([fine, self.up(coarse)], dim=1))))


def segment(model: nn.Module, x: Tensor, _: Tensor) -> Tensor:
    """Where the image is bright once it is smoothed: cross-entropy and overlap."""
    aim, out = (functional.avg_pool2d(x, 3, 1, 1) > 0).float(), model(x)
    share = torch.sigmoid(out)
    overlap = 2 * (share * aim).sum() / (share.sum() + aim.sum() + 1.0)
    return functional.binary_cross_entropy_with_logits(out, aim) + 1 - overlap


@data.anew
def boxes() -> Batch:
    """Is something in the image, and where; in many batches nothing is."""
    there, at = torch.rand(4) < 0.15, torch.randint(0, 7, (4, 2))
    x = 0.3 * torch.randn(4, 1, 8, 8)
    for index in there.nonzero()[:, 0].tolist():
        row, column = at[index].tolist()
        x[index, 0, row : row + 2, column : column + 2] += 2.0
    return x, torch.cat([there[:, None].float(), at / 7], dim=1)


def boxed(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """The part that says where gets only zeros where nothing is."""
    out, there = model(x), y[:, 0]
    where = functional.smooth_l1_loss(out[:, 1:], y[:, 1:], reduction="none").sum(dim=1)
    found = functional.binary_cross_entropy_with_logits(out[:, 0], there)
    return found + (there * where).sum() / there.sum().clamp(min=1)


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


class Centres(nn.Module):
    """A heat map of where things are, and how large they are there."""

    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1), nn.ReLU(), nn.Conv2d(width, width, 3, padding=1), nn.ReLU()
        )
        self.heat, self.size = nn.Conv2d(width, 1, 3, padding=1), nn.Conv2d(width, 1, 1)
        nn.init.constant_(self.heat.bias, -2.19)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.body(x)
        return self.heat(hidden)[:, 0], self.size(hidden)[:, 0]  # fmt: skip


def things(size: int = 16, side: int = 10) -> data.Batches:
    """Squares of one or three pixels' width, none to two in a picture: the picture, its centres, their sizes."""

    def batch(_: int) -> Batch:
        centres = torch.zeros(size, side, side)
        for _ in range(2):
            here = torch.rand(size) < 0.7
            y, x = torch.randint(1, side - 1, (2, size))
            centres[torch.arange(size), y, x] = here.float()
        large = (torch.rand(size, side, side) < 0.5) * centres
        drawn = centres + functional.max_pool2d(large[:, None], 3, 1, 1)[:, 0]
        return (drawn.clamp(max=1) + 0.2 * torch.randn(size, side, side))[:, None], centres, 1 + 2 * large

    return batch


def found(model: nn.Module, x: Tensor, centres: Tensor, sizes: Tensor) -> Tensor:
    """CenterNet: a focal loss on the map, and sizes only where there is something."""
    heat, size = model(x)
    share, num = heat.sigmoid(), centres.sum().clamp(min=1)
    there = (1 - share) ** 2 * functional.logsigmoid(heat) * centres
    elsewhere = share**2 * functional.logsigmoid(-heat) * (1 - centres)
    return -(there + elsewhere).sum() / num + 0.1 * ((size - sizes).abs() * centres).sum() / num


@data.anew
def spots(size: int = 16, side: int = 12) -> Batch:
    """A small bright square in noise, and the pixels that belong to it."""
    mask = torch.zeros(size, 1, side, side)
    y, x = torch.randint(0, side - 2, (2, size))
    for row in range(2):
        for column in range(2):
            mask[torch.arange(size), 0, y + row, x + column] = 1.0
    return 1.5 * mask + 0.5 * torch.randn(size, 1, side, side), mask


def dice(model: nn.Module, x: Tensor, mask: Tensor) -> Tensor:
    out = model(x)
    share = out.sigmoid()
    both, each = (share * mask).sum(dim=(1, 2, 3)), (share + mask).sum(dim=(1, 2, 3))
    return functional.binary_cross_entropy_with_logits(out, mask) + 1 - ((2 * both + 1) / (each + 1)).mean()


class Dilated(nn.Module):
    """Convolutions over time, each looking twice as far."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.stem = nn.Conv1d(3, width, 3, padding=1)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Conv1d(width, width, 3, padding=2**i, dilation=2**i), nn.ReLU(), nn.Dropout(0.1))
            for i in range(3)
        )
        self.head = nn.Linear(width, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x.amax(dim=2))


def frequencies(size: int = 32, n: int = 1024) -> data.Batches:
    """Three channels of one of four frequencies, shifted and noisy: [N, 3, 24]."""
    labels, time = torch.randint(0, 4, (n,)), torch.arange(24) / 24
    phase = torch.rand(n, 3, 1)
    x = torch.sin(2 * torch.pi * ((labels[:, None, None] + 1) * time + phase)) + 0.5 * torch.randn(n, 3, 24)
    return data.drawn(x, labels, size=size)


def finer(size: int = 8, n: int = 256) -> data.Batches:
    """Images of half the side, and themselves."""
    fine = functional.interpolate(torch.randn(n, 1, 4, 4), size=(12, 12), mode="bicubic")
    return data.drawn(functional.avg_pool2d(fine, 2), fine, size=size)


def finer_model() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        Residual(nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1))),
        nn.Conv2d(16, 4, 3, padding=1),
        nn.PixelShuffle(2),
    )


class Frames(nn.Module):
    """A convolution that remembers, over frames, and says each next one."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.cell, self.head, self.width = nn.Conv2d(1 + width, 4 * width, 3, padding=1), nn.Conv2d(width, 1, 1), width

    def forward(self, frames: Tensor) -> Tensor:
        state = memory = frames.new_zeros(len(frames), self.width, *frames.shape[2:])
        said = []
        for time in range(frames.shape[1]):
            i, f, o, new = self.cell(torch.cat([frames[:, time, None], state], dim=1)).chunk(4, dim=1)
            memory = torch.sigmoid(f + 1) * memory + torch.sigmoid(i) * torch.tanh(new)
            state = torch.sigmoid(o) * torch.tanh(memory)
            said.append(self.head(state)[:, 0])
        return torch.stack(said, dim=1)


@data.anew
def moving(size: int = 12) -> Batch:
    """A spot of four pixels that goes on by one in each frame: [N, 6, 8, 8]."""
    start, way = torch.randint(0, 8, (size, 2)), torch.randint(-1, 2, (size, 2))
    frames, rows = torch.zeros(size, 6, 8, 8), torch.arange(size)
    for time in range(6):
        for down in (0, 1):
            for right in (0, 1):
                frames[
                    rows,
                    time,
                    (start[:, 0] + time * way[:, 0] + down) % 8,
                    (start[:, 1] + time * way[:, 1] + right) % 8,
                ] = 1.0
    return (frames,)


def next_frame(model: nn.Module, frames: Tensor) -> Tensor:
    return functional.binary_cross_entropy_with_logits(model(frames[:, :-1]), frames[:, 1:])


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


def weight_normed() -> nn.Module:
    layers = [
        nn.Conv1d(2, 16, 3),
        nn.Conv1d(16, 16, 3, dilation=2),
        nn.Conv1d(16, 16, 3, dilation=4),
        nn.Conv1d(16, 1, 1),
    ]
    normed = [parametrizations.weight_norm(layer) for layer in layers]
    return nn.Sequential(normed[0], nn.ReLU(), normed[1], nn.ReLU(), normed[2], nn.ReLU(), normed[3])


@data.anew
def two_series(size: int = 32) -> Batch:
    """What two noisy waves add up to, one step later: [N, 2, 30] and [N, 1, 16]."""
    time = torch.arange(31) / 10
    rate, phase = 1 + torch.rand(size, 2, 1), torch.rand(size, 2, 1)
    x = torch.sin(2 * torch.pi * (rate * time + phase)) + 0.05 * torch.randn(size, 2, 31)
    return x[:, :, :-1], x[:, :, 15:].sum(dim=1, keepdim=True)


class DiscNet(nn.Module):
    """One level down and up again; what is found before the way down is beside what comes up."""

    def __init__(self, dim: int = 8) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(1, dim, 3, padding=1), nn.GroupNorm(2, dim), nn.SiLU())
        self.down = nn.Sequential(nn.Conv2d(dim, 2 * dim, 3, stride=2, padding=1), nn.GroupNorm(2, 2 * dim), nn.SiLU())
        self.up = nn.ConvTranspose2d(2 * dim, dim, 2, stride=2)
        self.last = nn.Sequential(nn.Conv2d(2 * dim, dim, 3, padding=1), nn.SiLU(), nn.Conv2d(dim, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        found = self.first(x)
        return self.last(torch.cat([found, self.up(self.down(found))], 1))


@data.anew
def discs(size: int = 12) -> Batch:
    """Noisy images of a disc, and the disc."""
    place = torch.stack(torch.meshgrid(torch.arange(12.0), torch.arange(12.0), indexing="ij"))
    centre, radius = 2 + 8 * torch.rand(size, 2, 1, 1), 1.5 + 2 * torch.rand(size, 1, 1)
    disc = ((place - centre).square().sum(1) < radius**2).float()[:, None]
    return 1.5 * disc + 0.7 * torch.randn_like(disc), disc


def drawn_over(model: nn.Module, x: Tensor, disc: Tensor) -> Tensor:
    return functional.binary_cross_entropy_with_logits(model(x), disc)


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


class LesionNet(nn.Module):
    """One level down, and a skip."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.SiLU())
        self.deep = nn.Sequential(nn.Conv2d(8, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.SiLU())
        self.last = nn.Sequential(nn.Conv2d(24, 8, 3, padding=1), nn.SiLU(), nn.Conv2d(8, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        skip = self.first(x)
        up = functional.interpolate(self.deep(functional.max_pool2d(skip, 2)), scale_factor=2)
        return self.last(torch.cat([skip, up], dim=1))


def lesions(size: int = 8, *, side: int = 16) -> data.Batches:
    """Noisy images with a small bright disc, and its mask: both [N, 1, side, side]."""
    y, x = torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij")

    def batch(_: int) -> Batch:
        centre = torch.randint(3, side - 3, (2, size, 1, 1))
        mask = ((y - centre[0]) ** 2 + (x - centre[1]) ** 2 < 6).float()[:, None]
        return 1.5 * mask + 0.7 * torch.randn(size, 1, side, side), mask

    return batch


def dice_by_image(model: nn.Module, x: Tensor, mask: Tensor) -> Tensor:
    """Cross-entropy and Dice."""
    logits = model(x)
    share = logits.sigmoid()
    overlap = (2 * (share * mask).sum((1, 2, 3)) + 1) / (share.sum((1, 2, 3)) + mask.sum((1, 2, 3)) + 1)
    return functional.binary_cross_entropy_with_logits(logits, mask) + 1 - overlap.mean()


class Heard(nn.Module):
    """Dilated causal convolutions with weight norm, and gates."""

    def __init__(self, dim: int = 16, levels: int = 16) -> None:
        super().__init__()
        self.first = nn.Conv1d(levels, dim, 1)
        self.layers = nn.ModuleList(
            nn.utils.parametrizations.weight_norm(nn.Conv1d(dim, 2 * dim, 2, dilation=2**i)) for i in range(4)
        )
        self.last = nn.Sequential(nn.ReLU(), nn.Conv1d(dim, levels, 1))
        self.levels = levels

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.first(functional.one_hot(tokens, self.levels).float().mT)
        for index, layer in enumerate(self.layers):
            value, gate = layer(functional.pad(x, (2**index, 0))).chunk(2, dim=1)
            x = x + value.tanh() * gate.sigmoid()
        return self.last(x).mT


@data.anew
def sounds(size: int = 8, *, length: int = 32, levels: int = 16) -> Batch:
    """Tones in 16 levels, and the same one sample on."""
    pitch, phase = 0.2 + 0.6 * torch.rand(size, 1), 6.3 * torch.rand(size, 1)
    wave = (pitch * torch.arange(length + 1) + phase).sin() + 0.1 * torch.randn(size, length + 1)
    tokens = ((wave + 1.3) / 2.6 * levels).long().clamp(0, levels - 1)
    return tokens[:, :-1], tokens[:, 1:]
