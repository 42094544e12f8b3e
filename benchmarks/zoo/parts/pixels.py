"""Models that say something of every pixel: masks, places, finer and next pictures."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..loop import Batch
from . import data
from .dense import Residual


class SkipNet(nn.Module):
    """Down, up, and a shortcut between the two."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.first, self.down = nn.Conv2d(1, width, 3, padding=1), nn.Conv2d(width, 2 * width, 3, padding=1)
        self.up = nn.ConvTranspose2d(2 * width, width, 2, stride=2)
        self.joined = nn.Conv2d(2 * width, width, 3, padding=1)
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
