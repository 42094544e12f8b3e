"""Architectures that the zoo's other files do not have, and what they are trained on: one half is opened, one locked."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from .data import Batches, drawn
from .loop import Batch
from .models import Residual, mlp


def _turned(x: Tensor) -> Tensor:
    """Rotary positions: each pair of features is turned by an angle that grows with the place."""
    first, second = x.chunk(2, dim=-1)
    speeds = 10.0 ** -torch.linspace(0, 2, first.shape[-1])
    angles = torch.arange(x.shape[-2])[:, None] * speeds
    return torch.cat(
        [first * angles.cos() - second * angles.sin(), first * angles.sin() + second * angles.cos()], dim=-1
    )


class Heads(nn.Module):
    """Attention whose logits pass through a module of their own."""

    def __init__(self, dim: int, *, causal: bool, rotary: bool = False) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(dim, dim, bias=not rotary) for _ in range(4))
        self.logits, self.causal, self.rotary = nn.Identity(), causal, rotary

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part(x).unflatten(2, (4, -1)).transpose(1, 2) for part in (self.q, self.k, self.v))
        if self.rotary:
            q, k = _turned(q), _turned(k)
        logits = q @ k.mT / q.shape[-1] ** 0.5
        if self.causal:
            logits = logits.masked_fill(torch.ones(logits.shape[-2:]).triu(1).bool(), float("-inf"))
        return self.out((self.logits(logits).softmax(dim=-1) @ v).transpose(1, 2).flatten(2))


class SwiGLU(nn.Module):
    """A product of two branches, one through SiLU."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.gate, self.up, self.down = (nn.Linear(dim, 2 * dim, bias=False), nn.Linear(dim, 2 * dim, bias=False),
                                         nn.Linear(2 * dim, dim, bias=False))  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return self.down(functional.silu(self.gate(x)) * self.up(x))


class Gated(nn.Module):
    """Every expert computes everything; of the noisy gates, the `top` largest count."""

    def __init__(self, dim: int, *, top: int, experts: int = 6) -> None:
        super().__init__()
        self.gate = nn.Linear(dim, experts)
        self.experts = nn.ModuleList(mlp(dim, dim, dim, act=nn.GELU) for _ in range(experts))
        self.top, self.balance = top, torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        logits = self.gate(x)
        noisy = logits + 0.1 * torch.randn_like(logits)
        kept = noisy >= noisy.topk(self.top, dim=-1).values[..., -1:]
        share = (
            noisy.masked_fill(~kept, float("-inf")).softmax(dim=-1) if self.top > 1 else kept * noisy.softmax(dim=-1)
        )
        mean = logits.softmax(dim=-1).flatten(0, -2).mean(dim=0)
        self.balance = logits.shape[-1] * (kept.float().flatten(0, -2).mean(dim=0) * mean).sum() / self.top
        return (torch.stack([expert(x) for expert in self.experts], dim=-1) * share[..., None, :]).sum(dim=-1)


class Layer(nn.Module):
    """Attention and what follows it, each after a norm."""

    def __init__(self, dim: int, inner: nn.Module, *, norm: type[nn.Module] = nn.LayerNorm, **heads: bool) -> None:
        super().__init__()
        self.norm1, self.norm2, self.attention, self.inner = norm(dim), norm(dim), Heads(dim, **heads), inner

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.inner(self.norm2(x))


class Language(nn.Module):
    """Tokens to logits of the next token: with learned places and tied weights, or as the rotary ones do it."""

    def __init__(self, layers: list[nn.Module], dim: int = 32, *, tied: bool, words: int = 24) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(words, dim), nn.Embedding(32, dim) if tied else None
        self.layers, self.norm = nn.Sequential(*layers), nn.LayerNorm(dim) if tied else nn.RMSNorm(dim)
        self.head = nn.Linear(dim, words, bias=False)
        if tied:
            nn.init.normal_(self.tokens.weight, std=0.3)
            self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        if self.places is not None:
            x = x + self.places(torch.arange(tokens.shape[1]))
        return self.head(self.norm(self.layers(x)))


def colours(size: int, *, classes: int = 5, side: int = 12, noise: float = 0.6) -> Batches:
    """Coloured textures with noise: [N, 3, side, side]."""
    labels, templates = torch.randint(0, classes, (600,)), torch.randn(classes, 3, 3, 3)
    smooth = functional.interpolate(templates, size=(side, side), mode="bicubic")
    return drawn(smooth[labels] + noise * torch.randn(600, 3, side, side), labels, size=size)


class ClassToken(nn.Module):
    """A transformer over 4 x 4 patches; one more token is asked for the class."""

    def __init__(self, dim: int = 32) -> None:
        super().__init__()
        self.patches, self.head = nn.Linear(48, dim), nn.Linear(dim, 5)
        self.token, self.places = nn.Parameter(torch.zeros(1, 1, dim)), nn.Parameter(0.02 * torch.randn(10, dim))
        self.layers = nn.Sequential(*(Layer(dim, mlp(dim, 2 * dim, dim, act=nn.GELU), causal=False) for _ in range(3)))
        self.norm = nn.LayerNorm(dim)

    def forward(self, x: Tensor) -> Tensor:
        patches = self.patches(functional.unfold(x, 4, stride=4).mT)
        x = torch.cat([self.token.expand(len(x), -1, -1), patches], dim=1) + self.places
        return self.head(self.norm(self.layers(x)[:, 0]))


def _normed(*sizes: int, kernel: int, **options: int) -> list[nn.Module]:
    return [nn.Conv2d(*sizes, kernel, padding=kernel // 2, bias=False, **options), nn.BatchNorm2d(sizes[1])]


def bottlenecks(width: int = 16) -> nn.Module:
    """Narrow, convolve, widen, add."""
    blocks = [
        Residual(nn.Sequential(*_normed(width, 8, kernel=1), nn.ReLU(), *_normed(8, 8, kernel=3), nn.ReLU(), *_normed(8, width, kernel=1)))
        for _ in range(3)
    ]  # fmt: skip
    stem = [*_normed(3, width, kernel=3, stride=2), nn.ReLU()]
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 5))


class Dense(nn.Module):
    """Each layer reads all before it."""

    def __init__(self, grow: int = 6) -> None:
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, 12, 3, stride=2, padding=1), nn.Linear(12 + 4 * grow, 5)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.BatchNorm2d(12 + grow * i), nn.ReLU(), nn.Conv2d(12 + grow * i, grow, 3, padding=1)) for i in range(4)
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for layer in self.layers:
            x = torch.cat([x, layer(x)], dim=1)
        return self.head(torch.relu(x).mean(dim=(2, 3)))


class Scaled(nn.Module):
    """ConvNeXt's block: depthwise, norm, two pointwise layers, and a small learned scale."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Conv2d(dim, dim, 5, padding=2, groups=dim), nn.GroupNorm(1, dim), nn.Conv2d(dim, 2 * dim, 1), nn.GELU(), nn.Conv2d(2 * dim, dim, 1))  # fmt: skip
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
        self.encoder = nn.Sequential(nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.ReLU(), nn.Conv2d(8, 12, 3, stride=2, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(108, 12))  # fmt: skip
        self.decoder = nn.Sequential(nn.Linear(12, 108), nn.ReLU(), nn.Unflatten(1, (12, 3, 3)), nn.ConvTranspose2d(12, 8, 2, stride=2), nn.ReLU(), nn.ConvTranspose2d(8, 3, 2, stride=2))  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(self.encoder(x))


class Denoiser(nn.Module):
    """A U-Net that is told how much noise there is."""

    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.first, self.time, self.down = nn.Conv2d(3, width, 3, padding=1), mlp(1, 16, width, act=nn.SiLU), nn.Conv2d(width, 2 * width, 3, stride=2, padding=1)  # fmt: skip
        self.middle, self.up = Residual(nn.Sequential(nn.GroupNorm(4, 2 * width), nn.SiLU(), nn.Conv2d(2 * width, 2 * width, 3, padding=1))), nn.ConvTranspose2d(2 * width, width, 2, stride=2)  # fmt: skip
        self.out = nn.Conv2d(2 * width, 3, 3, padding=1)

    def forward(self, x: Tensor, level: Tensor) -> Tensor:
        fine = functional.silu(self.first(x) + self.time(level[:, None])[:, :, None, None])
        return self.out(
            torch.cat([fine, functional.silu(self.up(self.middle(functional.silu(self.down(fine)))))], dim=1)
        )


class Speaker(nn.Module):
    """An encoder's state begins a decoder, which is given the right words so far."""

    def __init__(self, kind: type[nn.Module], words: int = 10, dim: int = 32) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(words + 1, 16), nn.Linear(dim, words)
        self.encoder, self.decoder, self.words = kind(16, dim, batch_first=True), kind(16, dim, batch_first=True), words

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        begun = functional.pad(target, (1, 0), value=self.words)[:, :-1]
        return self.head(self.decoder(self.tokens(begun), self.encoder(self.tokens(source))[1])[0])


class Convolved(nn.Module):
    """Graph convolutions by a normalised adjacency matrix, then the mean of all nodes."""

    def __init__(self, dim: int = 24) -> None:
        super().__init__()
        self.inner, self.outer, self.head = nn.Linear(6, dim), nn.Linear(dim, dim), mlp(dim, 16, 3)

    def forward(self, edges: Tensor, x: Tensor) -> Tensor:
        edges = edges / edges.sum(dim=2, keepdim=True)
        return self.head(torch.relu(edges @ self.outer(torch.relu(edges @ self.inner(x)))).mean(dim=1))


class Attended(nn.Module):
    """Graph attention: neighbours are weighted by a score of the two ends."""

    def __init__(self, dim: int = 24) -> None:
        super().__init__()
        self.inner, self.outer, self.head = nn.Linear(6, dim), nn.Linear(dim, dim), mlp(dim, 16, 3)
        self.ends = nn.ModuleList(nn.Linear(dim, 2) for _ in range(2))

    def forward(self, edges: Tensor, x: Tensor) -> Tensor:
        for layer, ends in zip((self.inner, self.outer), self.ends, strict=True):
            x = layer(x)
            source, target = ends(x).split(1, dim=2)
            score = functional.leaky_relu(source.mT + target, 0.2).masked_fill(edges == 0, float("-inf"))
            x = functional.elu(score.softmax(dim=2) @ x)
        return self.head(x.mean(dim=1))


def graphs(size: int) -> Batches:
    """Random graphs of ten nodes; the class says which kind of node the neighbours of the first kind mostly are."""

    def batch(_: int) -> Batch:
        edges = (torch.rand(size, 10, 10) < 0.25).float()
        edges = (edges + edges.mT + torch.eye(10)).clamp(max=1)
        kinds, labels = torch.randint(0, 3, (size, 10)), torch.randint(0, 3, (size,))
        kinds = torch.where(torch.rand(size, 10) < 0.3, labels[:, None], kinds)
        return edges, torch.cat([functional.one_hot(kinds, 3).float(), 0.5 * torch.randn(size, 10, 3)], dim=2), labels

    return batch


class Columns(nn.Module):
    """Columns of names and columns of numbers; two tasks."""

    def __init__(self) -> None:
        super().__init__()
        self.names = nn.ModuleList(nn.Embedding(words, 6) for words in (12, 40, 200))
        self.trunk = mlp(18 + 4, 48, 48, act=nn.ReLU)
        self.kind, self.amount = nn.Linear(48, 3), nn.Linear(48, 1)

    def forward(self, names: Tensor, numbers: Tensor) -> tuple[Tensor, Tensor]:
        known = torch.cat([table(names[:, index]) for index, table in enumerate(self.names)] + [numbers], dim=1)
        hidden = torch.relu(self.trunk(known))
        return self.kind(hidden), self.amount(hidden)


class Coupled(nn.Module):
    """RealNVP: half of the numbers say how the other half is moved and stretched."""

    def __init__(self, layers: int = 6) -> None:
        super().__init__()
        self.layers = nn.ModuleList(mlp(1, 24, 24, 2) for _ in range(layers))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        total = torch.zeros(len(x))
        for layer in self.layers:
            kept, moved = x.chunk(2, dim=1)
            stretch, shift = layer(kept).chunk(2, dim=1)
            stretch = 2 * torch.tanh(stretch / 2)
            x, total = torch.cat([moved * stretch.exp() + shift, kept], dim=1), total + stretch.sum(dim=1)
        return x, total


class Field(nn.Module):
    """Density and colour at a point, through waves of growing frequency, gathered along rays."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp(24, 48, 48, 4)

    def forward(self, points: Tensor) -> Tensor:
        waves = (points[..., None] * 2.0 ** torch.arange(6)).flatten(-2)
        out = self.net(torch.cat([waves.sin(), waves.cos()], dim=-1))
        return gathered(functional.softplus(out[..., 0]), torch.sigmoid(out[..., 1:]))


def gathered(density: Tensor, colour: Tensor) -> Tensor:
    """What a ray sees: [rays, points] and [rays, points, 3] to [rays, 3]."""
    stopped = 1 - torch.exp(-density * 0.3)
    passed = torch.cumprod(torch.cat([torch.ones_like(stopped[:, :1]), 1 - stopped[:, :-1]], dim=1), dim=1)
    return ((stopped * passed)[..., None] * colour).sum(dim=1)


def rays(size: int = 64) -> Batches:
    """A disc of one colour before a wall of another."""

    def batch(_: int) -> Batch:
        start, slope = 2 * torch.rand(size, 1) - 1, 0.6 * torch.rand(size, 1) - 0.3
        depth = torch.linspace(0, 3, 12)
        points = torch.stack([start + slope * depth, depth.expand(size, -1)], dim=2)
        disc = ((points - torch.tensor([0.2, 1.0])).square().sum(dim=2) < 0.4).float()
        wall = (points[..., 1] > 2.4).float()
        colour = disc[..., None] * torch.tensor([0.9, 0.2, 0.1]) + wall[..., None] * torch.tensor([0.1, 0.3, 0.8])
        return points, gathered(8 * disc + 8 * wall, colour)

    return batch


def rows(size: int = 128) -> Batches:
    """Three columns of names, four of numbers; a class and an amount."""
    names = torch.stack([(words * torch.rand(3000) ** 2).long() for words in (12, 40, 200)], dim=1)
    numbers, effects = torch.randn(3000, 4), torch.randn(3, 200)
    effect = torch.stack([effects[index][names[:, index]] for index in range(3)], dim=1)
    kind = (effect + numbers[:, :3]).argmax(dim=1)
    amount = effect.sum(dim=1, keepdim=True) * numbers[:, 3:].sigmoid() + 0.1 * torch.randn(3000, 1)
    return drawn(names, numbers, kind, amount, size=size)


def pieces(size: int = 128) -> Batches:
    """Another linear function in each of six regions."""
    centres, slopes, x = torch.randn(6, 8), torch.randn(6, 8), torch.randn(3000, 8)
    region = torch.cdist(x, centres).argmin(dim=1)
    return drawn(x, (x * slopes[region]).sum(dim=1, keepdim=True) / 3, size=size)
