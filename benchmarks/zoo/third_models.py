"""Models, data and losses of the third trainings: those of kinds that no other file of the zoo has."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from . import data
from .another_models import Layer
from .loop import Batch
from .models import mlp


class Carried(nn.Module):
    """A language model whose state goes on from batch to batch, cut from the graph in between."""

    def __init__(self, words: int = 24, dim: int = 32) -> None:
        super().__init__()
        self.tokens, self.memory = nn.Embedding(words, dim), nn.LSTM(dim, dim, 2, batch_first=True)
        self.head = nn.Linear(dim, words)
        nn.init.uniform_(self.tokens.weight, -0.1, 0.1)
        self.state: tuple[Tensor, Tensor] | None = None

    def forward(self, tokens: Tensor) -> Tensor:
        hidden, state = self.memory(self.tokens(tokens), self.state)
        self.state = (state[0].detach(), state[1].detach())
        return self.head(hidden)


class Sampled(nn.Module):
    """Encoder and decoder with attention; ever more of what the decoder reads is what it said itself."""

    def __init__(self, words: int = 10, dim: int = 32) -> None:
        super().__init__()
        self.tokens, self.logits = nn.Embedding(words + 1, dim), nn.Identity()
        self.encoder, self.decoder = nn.GRU(dim, dim, batch_first=True), nn.GRUCell(2 * dim, dim)
        self.head, self.own, self.words = nn.Linear(2 * dim, words), 0.0, words

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        keys, state = self.encoder(self.tokens(source))
        state, word, said = state[0], torch.full((len(source),), self.words), []
        for place in range(target.shape[1]):
            share = self.logits((keys @ state[:, :, None])[:, :, 0]).softmax(dim=1)
            context = (share[:, :, None] * keys).sum(dim=1)
            state = self.decoder(torch.cat([self.tokens(word), context], dim=1), state)
            said.append(self.head(torch.cat([state, context], dim=1)))
            word = torch.where(torch.rand(len(source)) < self.own, said[-1].argmax(dim=1), target[:, place])
        return torch.stack(said, dim=1)


def reversed_words(size: int = 32) -> data.Batches:
    def batch(_: int) -> Batch:
        source = torch.randint(0, 10, (size, 6))
        return source, source.flip(1)

    return batch


class Neighbours(nn.Module):
    """Words are near those that they stand beside, and far from words drawn at random."""

    def __init__(self, words: int = 60, dim: int = 12) -> None:
        super().__init__()
        self.inner, self.outer = nn.Embedding(words, dim), nn.Embedding(words, dim)
        nn.init.uniform_(self.inner.weight, -0.5, 0.5)
        nn.init.zeros_(self.outer.weight)

    def forward(self, word: Tensor, near: Tensor, far: Tensor) -> Tensor:
        centre = self.inner(word)
        close = (centre * self.outer(near)).sum(dim=1)
        apart = (self.outer(far) @ centre[:, :, None])[:, :, 0]
        return -(functional.logsigmoid(close) + functional.logsigmoid(-apart).sum(dim=1)).mean()


def company(size: int = 64) -> data.Batches:
    """Words of six subjects: [N], [N] and [N, 5]."""

    def batch(_: int) -> Batch:
        word = torch.randint(0, 60, (size,))
        near = word // 10 * 10 + torch.randint(0, 10, (size,))
        return word, near, torch.randint(0, 60, (size, 5))

    return batch


class Facts(nn.Module):
    """TransE: a relation is the way from its head to its tail, which a wrong tail is to miss by a margin."""

    def __init__(self, entities: int = 60, relations: int = 4, dim: int = 16) -> None:
        super().__init__()
        self.entities, self.relations = nn.Embedding(entities, dim), nn.Embedding(relations, dim)

    def forward(self, head: Tensor, relation: Tensor, tail: Tensor, wrong: Tensor) -> Tensor:
        way = self.entities(head) + self.relations(relation)
        return functional.relu(0.5 + self.missed(way, tail) - self.missed(way, wrong)).mean()

    def missed(self, way: Tensor, tail: Tensor) -> Tensor:
        return (way - self.entities(tail)).norm(dim=1)


def facts(size: int = 64) -> data.Batches:
    places = functional.normalize(torch.randn(60, 3), dim=1)
    ways = 0.7 * torch.randn(4, 1, 3)
    tails = torch.cdist(places[None] + ways, places.expand(4, -1, -1)).argmin(dim=2)

    def batch(_: int) -> Batch:
        head, relation = torch.randint(0, 60, (size,)), torch.randint(0, 4, (size,))
        return head, relation, tails[relation, head], torch.randint(0, 60, (size,))

    return batch


def ladders(size: int = 32) -> data.Batches:
    """Texts that climb by one, two or three words at a time."""

    def batch(_: int) -> Batch:
        first, by = torch.randint(0, 24, (size, 1)), torch.randint(1, 4, (size, 1))
        return ((first + by * torch.arange(16)) % 24,)

    return batch


class Unmasked(nn.Module):
    """Says what stands behind the masks of a text, however many they are."""

    def __init__(self, words: int = 24, dim: int = 32) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(words + 1, dim), nn.Parameter(0.1 * torch.randn(16, dim))
        self.layers = nn.Sequential(*(Layer(dim, mlp(dim, 2 * dim, dim, act=nn.GELU), causal=False) for _ in range(2)))
        self.norm, self.head, self.words = nn.LayerNorm(dim), nn.Linear(dim, words), words

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.norm(self.layers(self.tokens(tokens) + self.places)))


def unmasked(model: nn.Module, tokens: Tensor) -> Tensor:
    """Masked diffusion: a level of noise per text; few masks weigh as much as many."""
    level = 0.05 + 0.5 * torch.rand(len(tokens), 1)
    masked = torch.rand(tokens.shape) < level
    own = functional.cross_entropy(model(torch.where(masked, 24, tokens)).mT, tokens, reduction="none")
    return (masked * own / level).mean()


class Centres(nn.Module):
    """A heat map of where things are, and how large they are there."""

    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1), nn.ReLU(), nn.Conv2d(width, width, 3, padding=1), nn.ReLU()
        )
        self.heat, self.size = nn.Conv2d(width, 1, 3, padding=1), nn.Conv2d(width, 1, 1)
        nn.init.constant_(self.heat.bias, -2.19)  # type: ignore[arg-type]

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


def spots(size: int = 16, side: int = 12) -> data.Batches:
    """A small bright square in noise, and the pixels that belong to it."""

    def batch(_: int) -> Batch:
        mask = torch.zeros(size, 1, side, side)
        y, x = torch.randint(0, side - 2, (2, size))
        for row in range(2):
            for column in range(2):
                mask[torch.arange(size), 0, y + row, x + column] = 1.0
        return 1.5 * mask + 0.5 * torch.randn(size, 1, side, side), mask

    return batch


def dice(model: nn.Module, x: Tensor, mask: Tensor) -> Tensor:
    out = model(x)
    share = out.sigmoid()
    both, each = (share * mask).sum(dim=(1, 2, 3)), (share + mask).sum(dim=(1, 2, 3))
    return functional.binary_cross_entropy_with_logits(out, mask) + 1 - ((2 * both + 1) / (each + 1)).mean()


class Rezero(nn.Module):
    """x + gate * f(x), the gate 0 at first: the first step moves nothing else."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.inner, self.gate = mlp(dim, dim, dim), nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gate * self.inner(x)


class Scale(nn.Module):
    """One factor per class."""

    def __init__(self, num: int) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(num))

    def forward(self, x: Tensor) -> Tensor:
        return self.factor * x


class Controlled(nn.Module):
    """A frozen network, and a copy that reads a hint and speaks through layers that are 0 at first."""

    def __init__(self, frozen: nn.Sequential) -> None:
        super().__init__()
        self.frozen = frozen.requires_grad_(False)
        self.copy = copy.deepcopy(frozen).requires_grad_(True)
        self.hint = nn.Linear(4, 12)
        self.zeros = nn.ModuleList(nn.Linear(48, 48) for _ in range(2))
        for layer in (self.hint, *self.zeros):
            nn.init.zeros_(layer.weight)
            nn.init.zeros_(layer.bias)

    def forward(self, x: Tensor, hint: Tensor) -> Tensor:
        own, helped = x, x + self.hint(hint)
        for index, zero in enumerate(self.zeros):
            own = self.frozen[2 * index + 1](self.frozen[2 * index](own))
            helped = self.copy[2 * index + 1](self.copy[2 * index](helped))
            own = own + zero(helped)
        return self.frozen[4](own)


class Bits(nn.Module):
    """A restricted Boltzmann machine: `energy` of what is seen, `drawn` after some steps of Gibbs' sampling."""

    def __init__(self, seen: int = 24, hidden: int = 16) -> None:
        super().__init__()
        self.weight = nn.Parameter(0.1 * torch.randn(hidden, seen))
        self.seen, self.hidden = nn.Parameter(torch.zeros(seen)), nn.Parameter(torch.zeros(hidden))

    def softplus(self, x: Tensor) -> Tensor:
        return functional.softplus(x)

    def energy(self, x: Tensor) -> Tensor:
        return -x @ self.seen - self.softplus(x @ self.weight.mT + self.hidden).sum(dim=1)

    @torch.no_grad()
    def drawn(self, x: Tensor) -> Tensor:
        for _ in range(2):
            hidden = torch.bernoulli(torch.sigmoid(x @ self.weight.mT + self.hidden).nan_to_num())
            x = torch.bernoulli(torch.sigmoid(hidden @ self.weight + self.seen).nan_to_num())
        return x

    def forward(self, x: Tensor) -> Tensor:
        return (self.energy(x) - self.energy(self.drawn(x))).mean()


def patterns(size: int = 64) -> data.Batches:
    """Four patterns of 24 bits, a twentieth of them flipped."""
    known = torch.rand(4, 24) < 0.4
    return lambda _: ((known[torch.randint(0, 4, (size,))] ^ (torch.rand(size, 24) < 0.05)).float(),)


def walked(model: nn.Module, x: Tensor) -> Tensor:
    """An energy that is low at the data; its samples walk downhill from noise."""
    at = torch.randn_like(x).requires_grad_(True)
    for _ in range(8):
        slope = torch.autograd.grad(model(at).sum(), at)[0]
        at = (at - 0.1 * slope.clamp(-5, 5) + 0.1 * torch.randn_like(at)).detach().requires_grad_(True)
    low, high = model(x), model(at.detach())
    return low.mean() - high.mean() + 0.1 * (low.square() + high.square()).mean()


def preconditioned(model: nn.Module, x: Tensor, weight: Callable[[Tensor], Tensor] | None = None) -> Tensor:
    """Noise from very little to far more than the data; what the network must say has size 1 at each level."""
    sigma = torch.exp(1.2 * torch.randn(len(x), 1) - 0.5)
    total = (sigma**2 + 1).sqrt()
    noisy = x + sigma * torch.randn_like(x)
    said = model(torch.cat([noisy / total, sigma.log() / 4], dim=1))
    out = noisy / total**2 + sigma / total * said
    factor = total**2 / sigma**2 if weight is None else weight(sigma)
    return (factor * (out - x).square()).mean()
