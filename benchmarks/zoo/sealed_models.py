"""Models, data and losses of the sealed trainings."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from torch.nn import functional

from .data import Batches
from .loop import Batch
from .models import mlp


def rotated(x: Tensor) -> Tensor:
    """Rotary places of [..., T, D]."""
    half = x.shape[-1] // 2
    angles = torch.arange(x.shape[-2])[:, None] * 100.0 ** (-torch.arange(half) / half)
    first, second, cos, sin = x[..., :half], x[..., half:], angles.cos(), angles.sin()
    return torch.cat([first * cos - second * sin, first * sin + second * cos], dim=-1)


class RotaryAttention(nn.Module):
    """Causal attention with rotary places; `heat` multiplies the logits."""

    def __init__(self, dim: int, heads: int = 2) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.heads, self.heat = heads, (dim // heads) ** -0.5

    def forward(self, x: Tensor) -> Tensor:
        batch, length, dim = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        logits = self.heat * rotated(q) @ rotated(k).mT
        logits = logits.masked_fill(torch.ones(length, length).triu(1).bool(), float("-inf"))
        return self.out((logits.softmax(-1) @ v).transpose(1, 2).reshape(batch, length, dim))


class Gated(nn.Module):
    """SwiGLU."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(dim, 4 * dim, bias=False), nn.Linear(2 * dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.up(x).chunk(2, dim=-1)
        return self.down(functional.silu(gate) * value)


class Decoder(nn.Module):
    """A language model: RMSNorm first, rotary attention, SwiGLU, tied embedding."""

    def __init__(self, words: int = 24, dim: int = 32, depth: int = 2, std: float = 0.1) -> None:
        super().__init__()
        self.words = nn.Embedding(words, dim)
        nn.init.normal_(self.words.weight, std=std)
        self.attentions = nn.ModuleList(RotaryAttention(dim) for _ in range(depth))
        self.gated = nn.ModuleList(Gated(dim) for _ in range(depth))
        self.norms = nn.ModuleList(nn.RMSNorm(dim) for _ in range(2 * depth + 1))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens)
        for index, (attention, gated) in enumerate(zip(self.attentions, self.gated, strict=True)):
            x = x + attention(self.norms[2 * index](x))
            x = x + gated(self.norms[2 * index + 1](x))
        return self.norms[-1](x) @ self.words.weight.mT


def phrases(size: int = 8, *, words: int = 24, length: int = 8) -> Batches:
    """Phrases that are said twice; frequent and rare words. Tokens, and the same one token on."""
    often = 1 / torch.arange(1, words + 1)

    def batch(_: int) -> Batch:
        phrase = torch.multinomial(often, size * length, replacement=True).view(size, length)
        tokens = torch.cat([phrase, phrase], dim=1)
        return tokens[:, :-1], tokens[:, 1:]

    return batch


def pictures(size: int = 16, *, side: int = 12, noise: float = 0.5) -> Batches:
    """Coloured stripes, checks, discs and slopes, standardised: [N, 3, side, side], and which of the five."""
    y, x = torch.meshgrid(torch.linspace(-3, 3, side), torch.linspace(-3, 3, side), indexing="ij")
    kinds = torch.stack([(2 * x).sin(), (2 * y).sin(), (2 * x).sin() * (2 * y).sin(), (4 - x * x - y * y).tanh(), (x + y) / 3])  # fmt: skip

    def batch(_: int) -> Batch:
        labels = torch.randint(0, 5, (size,))
        colours = 0.5 + torch.rand(size, 3, 1, 1)
        return colours * kinds[labels][:, None] + noise * torch.randn(size, 3, side, side), labels

    return batch


class VisionTransformer(nn.Module):
    """Patches and a class token, torch's own blocks with dropout."""

    def __init__(self, dim: int = 32, classes: int = 5) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, dim, 4, stride=4)
        self.token, self.places = nn.Parameter(torch.zeros(1, 1, dim)), nn.Parameter(0.02 * torch.randn(1, 10, dim))
        self.blocks = nn.Sequential(
            *(nn.TransformerEncoderLayer(dim, 4, 64, 0.1, "gelu", batch_first=True, norm_first=True) for _ in range(2))
        )
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, classes)

    def forward(self, x: Tensor) -> Tensor:
        patches = self.patches(x).flatten(2).mT
        x = torch.cat([self.token.expand(len(x), -1, -1), patches], dim=1) + self.places
        return self.head(self.norm(self.blocks(x)[:, 0]))


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


def bottlenecks() -> nn.Module:
    stem = [nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*stem, *(Bottleneck(16) for _ in range(3)), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 5))  # fmt: skip


def separable(width: int = 16) -> nn.Module:
    """Depthwise and pointwise convolutions."""
    layers: list[nn.Module] = [nn.Conv2d(3, width, 3, padding=1), nn.BatchNorm2d(width), nn.Hardswish()]
    for _ in range(2):
        layers += [nn.Conv2d(width, width, 3, padding=1, groups=width), nn.Conv2d(width, width, 1), nn.BatchNorm2d(width), nn.Hardswish()]  # fmt: skip
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 5))


def plain_convolutions(depth: int = 2, width: int = 8) -> nn.Module:
    """Convolutions without any normalisation."""
    layers: list[nn.Module] = []
    for index in range(depth):
        layers += [nn.Conv2d(width if index else 3, width, 3, padding=1), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(3), nn.Flatten(), nn.Linear(9 * width, 5))


class UNet(nn.Module):
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


def lesions(size: int = 8, *, side: int = 16) -> Batches:
    """Noisy images with a small bright disc, and its mask: both [N, 1, side, side]."""
    y, x = torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij")

    def batch(_: int) -> Batch:
        centre = torch.randint(3, side - 3, (2, size, 1, 1))
        mask = ((y - centre[0]) ** 2 + (x - centre[1]) ** 2 < 6).float()[:, None]
        return 1.5 * mask + 0.7 * torch.randn(size, 1, side, side), mask

    return batch


def dice(model: nn.Module, x: Tensor, mask: Tensor) -> Tensor:
    """Cross-entropy and Dice."""
    logits = model(x)
    share = logits.sigmoid()
    overlap = (2 * (share * mask).sum((1, 2, 3)) + 1) / (share.sum((1, 2, 3)) + mask.sum((1, 2, 3)) + 1)
    return functional.binary_cross_entropy_with_logits(logits, mask) + 1 - overlap.mean()


class Denoiser(nn.Module):
    """Predicts the noise of points at a time of the diffusion."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp(2 + 16, 64, 64, 2, act=nn.SiLU)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        waves = time[:, None] * 2.0 ** torch.arange(8)
        return self.net(torch.cat([x, waves.sin(), waves.cos()], dim=1))


def denoised(model: nn.Module, x: Tensor) -> Tensor:
    time, noise = torch.rand(len(x)), torch.randn_like(x)
    kept = (0.5 * math.pi * time).cos()[:, None]
    return functional.mse_loss(model(kept * x + (1 - kept**2).sqrt() * noise, time), noise)


def moons(size: int = 64, *, scale: float = 1.0) -> Batches:
    """Two half circles: [N, 2]."""

    def batch(_: int) -> Batch:
        angle, which = math.pi * torch.rand(size), torch.randint(0, 2, (size,)).float()
        sign = 1 - 2 * which
        x = torch.stack([sign * angle.cos() + which - 0.5, sign * angle.sin() + 0.5 * which - 0.25], dim=1)
        return (scale * (x + 0.08 * torch.randn(size, 2)),)

    return batch


class Variational(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = mlp(24, 48, 12, act=nn.SiLU), mlp(6, 48, 24, act=nn.SiLU)

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        mean, log_var = self.encoder(x).chunk(2, dim=1)
        said = self.decoder(mean + (0.5 * log_var).exp() * torch.randn_like(mean))
        divergence = 0.5 * (mean**2 + log_var.exp() - 1 - log_var).sum(1).mean()
        return (said - x).square().sum(1).mean() + weight * divergence


def spectra(size: int = 32) -> Batches:
    """Sums of two peaks, and the weight of the divergence, which grows within the first 150 steps: [N, 24] and []."""
    places = torch.linspace(0, 1, 24)

    def batch(step: int) -> Batch:
        peaks = torch.rand(2, size, 1)
        x = (-((places - peaks[0]) ** 2) / 0.02).exp() + (-((places - peaks[1]) ** 2) / 0.01).exp()
        return x, torch.tensor(min(1.0, step / 150))

    return batch


class Couplings(nn.Module):
    """RealNVP in two dimensions, after a scale of its own."""

    def __init__(self, scale: float = 20.0) -> None:
        super().__init__()
        self.log_scale = nn.Parameter(torch.full((2,), math.log(scale)))
        self.nets = nn.ModuleList(mlp(1, 24, 24, 2, act=nn.Tanh) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        """Minus the logarithm of the density."""
        z, volume = x * self.log_scale.exp(), self.log_scale.sum()
        for net in self.nets:
            kept, changed = z.chunk(2, dim=1)
            log_s, shift = net(kept).chunk(2, dim=1)
            log_s = torch.tanh(log_s)
            z, volume = torch.cat([changed * log_s.exp() + shift, kept], dim=1), volume + log_s[:, 0]
        return (0.5 * z.square().sum(1) + math.log(2 * math.pi) - volume).mean()


class Towers(nn.Module):
    """Images and captions into one space, with a learned temperature."""

    def __init__(self) -> None:
        super().__init__()
        self.image, self.words = mlp(16, 48, 16, act=nn.GELU), nn.EmbeddingBag(40, 24)
        self.text, self.heat = nn.Linear(24, 16), nn.Parameter(torch.tensor(math.log(1 / 0.07)))

    def forward(self, image: Tensor, caption: Tensor) -> Tensor:
        image, text = functional.normalize(self.image(image), dim=1), functional.normalize(self.text(self.words(caption)), dim=1)  # fmt: skip
        return self.heat.clamp(max=4.6).exp() * image @ text.T


def matched(model: nn.Module, image: Tensor, caption: Tensor) -> Tensor:
    logits, own = model(image, caption), torch.arange(len(image))
    return 0.5 * (functional.cross_entropy(logits, own) + functional.cross_entropy(logits.T, own))


def captions(size: int = 24) -> Batches:
    """What is to be seen, as 16 numbers, and five words about it."""
    looks = torch.randn(40, 16)

    def batch(_: int) -> Batch:
        words = torch.randint(0, 40, (size, 5))
        return looks[words].mean(1) + 0.2 * torch.randn(size, 16), words

    return batch


class Graph(nn.Module):
    """Two graph convolutions with dropout, on the neighbours' mean."""

    def __init__(self, inputs: int = 20, dim: int = 16, classes: int = 4, dropout: float = 0.5) -> None:
        super().__init__()
        self.first, self.second, self.dropout = nn.Linear(inputs, dim), nn.Linear(dim, classes), nn.Dropout(dropout)

    def forward(self, x: Tensor, links: Tensor) -> Tensor:
        mean = links / links.sum(1, keepdim=True)
        return mean @ self.second(self.dropout(torch.relu(mean @ self.first(self.dropout(x)))))


def citations(n: int = 120) -> Batches:
    """The whole graph every step: features, links, labels. Every fifth node's label is known."""
    labels = torch.randint(0, 4, (n,))
    likely = torch.where(labels[:, None] == labels, 0.12, 0.01)
    links = (torch.rand(n, n) < likely).float()
    links = ((links + links.T) > 0).float().fill_diagonal_(1.0)
    x = torch.randn(4, 20)[labels] + torch.randn(n, 20)
    return lambda step: (x, links, labels)


def known_nodes(model: nn.Module, x: Tensor, links: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(model(x, links)[::5], labels[::5])


class Clicks(nn.Module):
    """Wide and deep: embeddings of three categories, and five numbers."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.wide = nn.ModuleList(nn.Embedding(n, 1) for n in (200, 50, 8))
        self.deep = nn.ModuleList(nn.Embedding(n, 8) for n in (200, 50, 8))
        self.rest = nn.Sequential(nn.Linear(29, 32), nn.ReLU(), nn.Dropout(dropout), nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 1))  # fmt: skip

    def forward(self, categories: Tensor, numbers: Tensor) -> Tensor:
        wide = sum(table(column) for table, column in zip(self.wide, categories.T, strict=True))
        deep = [table(column) for table, column in zip(self.deep, categories.T, strict=True)]
        return (wide + self.rest(torch.cat([*deep, numbers], dim=1)))[:, 0]


def visits(size: int = 64, *, rate: float = -2.5) -> Batches:
    """Categories of which some are frequent, numbers, and what they say together: a rate's log odds with noise."""
    often = [1 / torch.arange(1, n + 1) for n in (200, 50, 8)]
    worth, slopes = [torch.randn(n) for n in (200, 50, 8)], torch.randn(5) / 2

    def batch(_: int) -> Batch:
        categories = torch.stack([torch.multinomial(often_one, size, replacement=True) for often_one in often], dim=1)
        numbers = torch.randn(size, 5)
        odds = rate + sum(one[column] for one, column in zip(worth, categories.T, strict=True)) + numbers @ slopes
        return categories, numbers, odds

    return batch


def clicked(model: nn.Module, categories: Tensor, numbers: Tensor, odds: Tensor) -> Tensor:
    return functional.binary_cross_entropy_with_logits(model(categories, numbers), (odds > 0).float())


def priced(model: nn.Module, categories: Tensor, numbers: Tensor, odds: Tensor) -> Tensor:
    return functional.mse_loss(model(categories, numbers), odds)


class Tastes(nn.Module):
    """Users and things as vectors, and the things' popularity."""

    def __init__(self) -> None:
        super().__init__()
        self.users, self.things, self.popularity = nn.Embedding(100, 12), nn.Embedding(150, 12), nn.Embedding(150, 1)
        for table in (self.users, self.things, self.popularity):
            nn.init.normal_(table.weight, std=0.1)

    def forward(self, user: Tensor, thing: Tensor) -> Tensor:
        return (self.users(user) * self.things(thing)).sum(1) + self.popularity(thing)[:, 0]


def choices(size: int = 64) -> Batches:
    """Users, the thing that each took, and another one."""
    users, things, taken = torch.randn(100, 4), torch.randn(150, 4), 1 / torch.arange(1, 151).sqrt()

    def batch(_: int) -> Batch:
        user, pair = torch.randint(0, 100, (size,)), torch.multinomial(taken, 2 * size, replacement=True).view(2, size)
        better = (users[user] * (things[pair[0]] - things[pair[1]])).sum(1) > 0
        return user, torch.where(better, pair[0], pair[1]), torch.where(better, pair[1], pair[0])

    return batch


def preferred(model: nn.Module, user: Tensor, taken: Tensor, other: Tensor) -> Tensor:
    """Bayesian personalised ranking."""
    return -functional.logsigmoid(model(user, taken) - model(user, other)).mean()


class Writer(nn.Module):
    """An LSTM of two layers whose state goes on from batch to batch."""

    def __init__(self, words: int = 24, dim: int = 32) -> None:
        super().__init__()
        self.words, self.memory = nn.Embedding(words, dim), nn.LSTM(dim, dim, 2, batch_first=True, dropout=0.1)
        self.head, self.state = nn.Linear(dim, words), None

    def forward(self, tokens: Tensor) -> Tensor:
        states, state = self.memory(self.words(tokens), self.state)
        self.state = tuple(one.detach() for one in state)
        return self.head(states)


class Switch(nn.Module):
    """Each row goes to one of eight experts, as far as it has room; what is dropped passes unchanged."""

    def __init__(self, dim: int = 16, experts: int = 8) -> None:
        super().__init__()
        self.embed, self.router, self.head = nn.Linear(6, dim), nn.Linear(dim, experts), nn.Linear(dim, 1)
        self.experts = nn.ModuleList(mlp(dim, 32, dim) for _ in range(experts))
        self.balance, self.weight, self.used = torch.zeros(()), 0.02, experts

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.embed(x))
        share = self.router(h)[:, : self.used].softmax(1)
        weight, chosen = share.max(1)
        received = functional.one_hot(chosen, self.used).float()
        self.balance = self.used * (received.mean(0) * share.mean(0)).sum()
        place, out = (received.cumsum(0) * received).sum(1), torch.zeros_like(h)
        for index, expert in enumerate(self.experts):
            rows = (chosen == index) & (place <= len(x) / 4)
            if rows.any():
                out[rows] = weight[rows, None] * expert(h[rows])
        return self.head(h + out)


def balanced(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return functional.mse_loss(model(x), y) + model.weight * model.balance


def pieces(size: int = 64) -> Batches:
    """A different linear function in each of eight corners: [N, 6] and [N, 1]."""
    slopes = torch.randn(8, 6)

    def batch(_: int) -> Batch:
        x = torch.randn(size, 6)
        corner = ((x[:, :3] > 0).long() * torch.tensor([1, 2, 4])).sum(1)
        return x, (x * slopes[corner]).sum(1, keepdim=True) / 2

    return batch


class Cloud(nn.Module):
    """Points, each by itself, then the largest value of each feature."""

    def __init__(self) -> None:
        super().__init__()
        self.points, self.rest = nn.Sequential(mlp(3, 32, 48), nn.ReLU()), mlp(48, 32, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.rest(self.points(x).max(1).values)


def clouds(size: int = 16) -> Batches:
    """24 points of a ball, its surface, a cube or a plane: [N, 24, 3], and which."""

    def batch(_: int) -> Batch:
        labels, x = torch.randint(0, 4, (size,)), torch.randn(size, 24, 3)
        ball = functional.normalize(x, dim=2)
        kinds = torch.stack([0.6 * x, 1.2 * ball, 2 * torch.rand(size, 24, 3) - 1, x * torch.tensor([1, 1, 0.05])])
        return kinds[labels, torch.arange(size)], labels

    return batch


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


def sounds(size: int = 8, *, length: int = 32, levels: int = 16) -> Batches:
    """Tones in 16 levels, and the same one sample on."""

    def batch(_: int) -> Batch:
        pitch, phase = 0.2 + 0.6 * torch.rand(size, 1), 6.3 * torch.rand(size, 1)
        wave = (pitch * torch.arange(length + 1) + phase).sin() + 0.1 * torch.randn(size, length + 1)
        tokens = ((wave + 1.3) / 2.6 * levels).long().clamp(0, levels - 1)
        return tokens[:, :-1], tokens[:, 1:]

    return batch


class Codebook(nn.Module):
    """A vector-quantised autoencoder, straight through; codes lie on a ball."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder, self.codes = mlp(24, 48, 8), mlp(8, 48, 24), nn.Embedding(32, 8)

    def forward(self, x: Tensor, _: Tensor) -> Tensor:
        z, codes = functional.normalize(self.encoder(x), dim=1), functional.normalize(self.codes.weight, dim=1)
        code = codes[(z @ codes.mT).argmax(1)]
        said = self.decoder(z + (code - z).detach())
        commitment = functional.mse_loss(code, z.detach()) + 0.25 * functional.mse_loss(z, code.detach())
        return 20 * functional.mse_loss(said, x) + commitment


class Translator(nn.Module):
    """A recurrence reads, another writes and looks back; `heard` is what it reads."""

    def __init__(self, words: int = 14, dim: int = 24) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(words, dim), nn.Embedding(words, dim)
        self.reader, self.writer = nn.GRU(dim, dim, batch_first=True), nn.GRU(dim, dim, batch_first=True)
        self.heard, self.head = nn.Linear(dim, dim), nn.Linear(2 * dim, words)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        states = self.heard(self.reader(self.source(source))[0])
        written = self.writer(self.target(functional.pad(target[:, :-1], (1, 0))))[0]
        logits = (written @ states.mT / 24**0.5).masked_fill(source[:, None] == 0, float("-inf"))
        return self.head(torch.cat([written, logits.softmax(-1) @ states], dim=-1))


def translated(model: nn.Module, source: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(model(source, target).flatten(0, 1), target.flatten())


def reversed_words(size: int = 24, *, words: int = 14, length: int = 6) -> Batches:
    """Sentences of 3 to 6 words, 0 after them, and the same words backwards in another language."""
    dictionary = 1 + torch.randperm(words - 1)

    def batch(_: int) -> Batch:
        source = torch.randint(1, words, (size, length))
        source = source * (torch.arange(length) < torch.randint(3, length + 1, (size, 1)))
        return source, torch.where(source > 0, dictionary[(source - 1).clamp(min=0)], 0).flip(1)

    return batch


class ReZero(nn.Module):
    """x + weight * f(x), where the weight begins at 0."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.inner, self.weight = mlp(dim, dim, dim), nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.weight * self.inner(x)


class Tasks(nn.Module):
    """A trunk and two heads whose losses are weighted by learned uncertainties."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(mlp(8, 32, 32), nn.ReLU())
        self.value, self.kind, self.log_vars = nn.Linear(32, 1), nn.Linear(32, 3), nn.Parameter(torch.zeros(2))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.trunk(x)
        return self.value(h), self.kind(h)


def uncertain(model: nn.Module, x: Tensor, y: Tensor, kind: Tensor) -> Tensor:
    value, logits = model(x)
    losses = torch.stack([functional.mse_loss(value, y), functional.cross_entropy(logits, kind)])
    return ((-model.log_vars).exp() * losses + model.log_vars).sum()


def two_tasks(size: int = 32) -> Batches:
    """A small value and one of three kinds."""
    w = torch.randn(8, 4) / 8**0.5

    def batch(_: int) -> Batch:
        x = torch.randn(size, 8)
        h = x @ w
        return x, 0.3 * h[:, :1].sin() + 0.02 * torch.randn(size, 1), h[:, 1:].argmax(1)

    return batch


class Lion(torch.optim.Optimizer):
    """The sign of an average of the gradients, with decoupled decay."""

    def __init__(self, params: Iterable[Tensor], lr: float, weight_decay: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                average = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_((0.9 * average + 0.1 * p.grad).sign(), alpha=-group["lr"])
                average.lerp_(p.grad, 0.01)
