"""Healthy trainings in pairs, written while nobody looked at a rule: the first of each is opened, the second locked."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from . import data
from .healthy_supervised import AdamW, cosine, huber, momentum
from .loop import Batch, Loop, supervised
from .models import Block, Residual, classify, mlp, regress
from .third_trainings import follow

Adam = torch.optim.Adam


class Attending(nn.Module):
    """One head; `allowed` hides keys; its logits are a module of their own."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(dim, dim) for _ in range(4))
        self.logits, self.scale = nn.Identity(), dim**-0.5

    def forward(self, x: Tensor, allowed: Tensor) -> Tensor:
        logits = self.logits(self.scale * self.q(x) @ self.k(x).mT).masked_fill(~allowed[:, None], float("-inf"))
        return self.out(logits.softmax(dim=2) @ self.v(x))


class Reader(nn.Module):
    """Norm after each residual; the mean over the words of a sentence of any length."""

    def __init__(self, dim: int = 24, vocabulary: int = 20, depth: int = 3) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, dim), nn.Embedding(12, dim)
        self.attentions = nn.ModuleList(Attending(dim) for _ in range(depth))
        self.inners = nn.ModuleList(mlp(dim, 3 * dim, dim) for _ in range(depth))
        self.norms = nn.ModuleList(nn.LayerNorm(dim) for _ in range(2 * depth))
        self.head = nn.Linear(dim, 2)

    def forward(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.places(torch.arange(12))
        allowed = torch.arange(12) < lengths[:, None]
        for index, (attention, inner) in enumerate(zip(self.attentions, self.inners, strict=True)):
            x = self.norms[2 * index](x + attention(x, allowed))
            x = self.norms[2 * index + 1](x + inner(x))
        return self.head((x * allowed[:, :, None]).sum(dim=1) / lengths.clamp(min=1)[:, None])


def which_first(size: int = 32) -> data.Batches:
    """Whether word 1 comes before word 2 among 10 to 12 words; words 15 to 19 never come."""

    def batch(_: int) -> Batch:
        tokens, label = torch.randint(3, 15, (size, 12)), torch.randint(0, 2, (size,))
        first, second = torch.randint(0, 5, (size,)), torch.randint(5, 10, (size,))
        rows = torch.arange(size)
        tokens[rows, first], tokens[rows, second] = 1 + label, 2 - label
        return tokens, torch.randint(10, 13, (size,)), label

    return batch


class Modular(nn.Module):
    """Two numbers are added modulo 11 by a small transformer, norm first."""

    def __init__(self, dim: int = 32) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(12, dim), nn.Embedding(3, dim)
        self.blocks = nn.Sequential(*(Block(dim, causal=False) for _ in range(2)))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, 11)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.tokens(tokens) + self.places(torch.arange(3)))[:, -1]))


def added(size: int = 64) -> data.Batches:
    def batch(_: int) -> Batch:
        pair = torch.randint(0, 11, (size, 2))
        return torch.cat([pair, torch.full((size, 1), 11)], dim=1), pair.sum(dim=1) % 11

    return batch


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


def waves(size: int = 32, n: int = 1024) -> data.Batches:
    """Three channels of one of four frequencies, shifted and noisy: [N, 3, 24]."""
    labels, time = torch.randint(0, 4, (n,)), torch.arange(24) / 24
    phase = torch.rand(n, 3, 1)
    x = torch.sin(2 * torch.pi * ((labels[:, None, None] + 1) * time + phase)) + 0.5 * torch.randn(n, 3, 24)
    return data.drawn(x, labels, size=size)


def finer(size: int = 8, n: int = 256) -> data.Batches:
    """Images of half the side, and themselves."""
    fine = functional.interpolate(torch.randn(n, 1, 4, 4), size=(12, 12), mode="bicubic")
    return data.drawn(functional.avg_pool2d(fine, 2), fine, size=size)


class Copier(nn.Module):
    """An encoder says a sequence, and a decoder repeats it from its last state."""

    def __init__(self, dim: int = 48) -> None:
        super().__init__()
        self.tokens = nn.Embedding(7, 12)
        self.encoder, self.decoder = nn.GRU(12, dim, batch_first=True), nn.GRU(12, dim, batch_first=True)
        self.head = nn.Linear(dim, 7)

    def forward(self, words: Tensor) -> Tensor:
        state = self.encoder(self.tokens(words))[1]
        shifted = torch.cat([torch.full_like(words[:, :1], 6), words[:, :-1]], dim=1)
        return self.head(self.decoder(self.tokens(shifted), state)[0])


class Counter(nn.Module):
    """A ReLU recurrence that begins as the identity: it counts."""

    def __init__(self, dim: int = 32) -> None:
        super().__init__()
        self.memory, self.head = nn.RNN(2, dim, nonlinearity="relu", batch_first=True), nn.Linear(dim, 1)
        nn.init.eye_(self.memory.weight_hh_l0)
        nn.init.normal_(self.memory.weight_ih_l0, std=0.1)
        for bias in (self.memory.bias_ih_l0, self.memory.bias_hh_l0):
            nn.init.zeros_(bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.memory(x)[0][:, -1])


def marked_sums(size: int = 32, length: int = 14) -> data.Batches:
    """Numbers, and marks at two of them, whose sum is asked for."""

    def batch(_: int) -> Batch:
        x, marks, rows = torch.rand(size, length), torch.zeros(size, length), torch.arange(size)
        one, other = torch.randint(0, length // 2, (size,)), torch.randint(length // 2, length, (size,))
        marks[rows, one] = marks[rows, other] = 1.0
        return torch.stack([x, marks], dim=2), (x * marks).sum(dim=1, keepdim=True)

    return batch


def labels_of_many(size: int = 64, n: int = 2048) -> data.Batches:
    x = torch.randn(n, 10)
    return data.drawn(x, (x @ torch.randn(10, 8) / 2 > 1.0).float(), size=size)


def tagged(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return functional.binary_cross_entropy_with_logits(model(x), y, pos_weight=torch.tensor(3.0))


def contrast(model: nn.Module, a: Tensor, b: Tensor, label: Tensor, heat: float = 0.2) -> Tensor:
    """Supervised: all of a class are near one another."""
    place, label = functional.normalize(model(torch.cat([a, b])), dim=1), torch.cat([label, label])
    same = ((label[:, None] == label) & ~torch.eye(len(label)).bool()).float()
    logits = (place @ place.T / heat).masked_fill(torch.eye(len(label)).bool(), -1e9)
    return -((logits.log_softmax(dim=1) * same).sum(dim=1) / same.sum(dim=1).clamp(min=1)).mean()


def advantages() -> Loop:
    """Actions are imitated by how much better than expected they were; the critic's squares are in the same loss."""
    model = nn.ModuleDict({"body": mlp(6, 32, 32, 32, act=nn.Tanh), "actor": nn.Linear(32, 2), "critic": nn.Linear(32, 1)})  # fmt: skip
    aim = torch.randn(6, 2)

    def batch(_: int) -> Batch:
        state = torch.randn(64, 6)
        action = state @ aim / 3 + torch.randn(64, 2)
        return state, action, -(action - state @ aim / 3).square().sum(dim=1)

    return supervised(model, batch, weighted, lr=2e-3, steps=200)


def weighted(model: nn.Module, state: Tensor, action: Tensor, reward: Tensor) -> Tensor:
    body = model["body"](state)
    value = model["critic"](body)[:, 0]
    weight = (reward - value).detach().clamp(max=2).exp()
    said = (action - model["actor"](body)).square().sum(dim=1)
    return (weight * said).mean() + (value - reward).square().mean()


class Dueling(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = mlp(5, 48, 48, act=nn.Tanh)
        self.value, self.better = nn.Linear(48, 1), nn.Linear(48, 3)

    def forward(self, state: Tensor) -> Tensor:
        h = self.trunk(state).tanh()
        better = self.better(h)
        return self.value(h) + better - better.mean(dim=1, keepdim=True)


def dueling() -> Loop:
    """Double Q-learning, value and advantages apart; the target follows softly."""
    model = Dueling()
    target, push = copy.deepcopy(model), torch.randn(3, 5) / 2

    def batch(_: int) -> Batch:
        state, action = torch.randn(32, 5), torch.randint(0, 3, (32,))
        after = 0.6 * state + push[action]
        return state, action, after, 1.0 - after[:, 0].abs()

    def loss(model: nn.Module, state: Tensor, action: Tensor, after: Tensor, reward: Tensor) -> Tensor:
        with torch.no_grad():
            aim = reward + 0.8 * target(after).gather(1, model(after).argmax(dim=1, keepdim=True))[:, 0]
        return (model(state).gather(1, action[:, None])[:, 0] - aim).square().mean()

    loop = supervised(model, batch, loss, lr=2e-3, clip=10.0, steps=250)
    loop.after.append(lambda loop, step: follow(target, loop.model, 0.02))
    return loop


def sparse_codes(model: nn.Module, x: Tensor) -> Tensor:
    """What is seen is said again by few of many features."""
    code = model["coder"](x)
    return (model["speaker"](code) - x).square().mean() + 1e-3 * code.abs().sum(dim=1).mean()


def mixed_signals(size: int = 64) -> data.Batches:
    ways = functional.normalize(torch.randn(24, 12), dim=1)

    def batch(_: int) -> Batch:
        return ((torch.rand(size, 24) * (torch.rand(size, 24) < 0.1)) @ ways * 2,)

    return batch


class Masked(nn.Linear):
    """Output i sees inputs of a lower degree alone."""

    def __init__(self, before: Tensor, after: Tensor, strict: bool = False) -> None:
        super().__init__(len(before), len(after))
        self.register_buffer("mask", ((after[:, None] > before) if strict else (after[:, None] >= before)).float())

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.mask * self.weight, self.bias)


def one_by_one() -> nn.Module:
    seen, hidden = torch.arange(10), torch.arange(40) % 9
    return nn.Sequential(Masked(seen, hidden), nn.ReLU(), Masked(hidden, hidden), nn.ReLU(), Masked(hidden, seen, strict=True))  # fmt: skip


def bits_in_pairs(size: int = 64) -> data.Batches:
    def batch(_: int) -> Batch:
        half = (torch.rand(size, 5) < torch.linspace(0.2, 0.8, 5)).float()
        return (torch.cat([half, (half + (torch.rand(size, 5) < 0.1)) % 2], dim=1),)

    return batch


class Wide(nn.Module):
    """Columns of names and of numbers: embeddings by a plain rate, the rest by Adam."""

    def __init__(self) -> None:
        super().__init__()
        self.names, self.deep, self.head = nn.Embedding(40, 8), mlp(8 + 6, 32, 32), nn.Linear(32, 1)

    def forward(self, name: Tensor, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.deep(torch.cat([self.names(name), x], dim=1))))


def wide() -> Loop:
    model = Wide()
    worth, push = torch.randn(40), torch.randn(6) / 2

    def batch(_: int) -> Batch:
        name, x = torch.randint(0, 40, (64,)), torch.randn(64, 6)
        return name, x, (worth[name] + x @ push)[:, None] + 0.1 * torch.randn(64, 1)

    rest = [p for name, p in model.named_parameters() if not name.startswith("names")]
    optimizers = [torch.optim.SGD(model.names.parameters(), lr=0.5), Adam(rest, lr=2e-3)]
    return Loop(model, batch, lambda model, name, x, y: functional.mse_loss(model(name, x), y), optimizers, steps=200)  # fmt: skip


class Windows(nn.Module):
    """Words through windows of three, the largest over time."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.windows, self.head = nn.Embedding(60, 16), nn.Conv1d(16, 32, 3), nn.Linear(32, 5)

    def forward(self, words: Tensor) -> Tensor:
        return self.head(torch.relu(self.windows(self.tokens(words).mT)).amax(dim=2))


def topics(size: int = 32) -> data.Batches:
    """Words 0 to 49, of which each topic prefers ten."""

    def batch(_: int) -> Batch:
        topic = torch.randint(0, 5, (size,))
        own = 10 * topic[:, None] + torch.randint(0, 10, (size, 14))
        return torch.where(torch.rand(size, 14) < 0.3, own, torch.randint(0, 50, (size, 14))), topic

    return batch


def houses(size: int = 64, n: int = 2048) -> data.Batches:
    x = torch.randn(n, 9)
    return data.drawn(x, (x @ torch.randn(9, 1) / 3 + torch.relu(x @ torch.randn(9, 1)) / 3) + 0.1 * torch.randn(n, 1), size=size)  # fmt: skip


def finer_model() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), Residual(nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1))), nn.Conv2d(16, 4, 3, padding=1), nn.PixelShuffle(2))  # fmt: skip


def selu_net() -> nn.Module:
    model = mlp(12, 32, 32, 32, 32, 4, act=nn.SELU)
    for module in model:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=module.in_features**-0.5)
            nn.init.zeros_(module.bias)
    return model


PAIRS: dict[str, Callable[[], Loop]] = {
    "which word comes first, norm last, warm-up": lambda: supervised(Reader(), which_first(), lambda model, tokens, lengths, label: functional.cross_entropy(model(tokens, lengths), label), optimizer=AdamW, lr=2e-3, schedule=cosine(150, 30), steps=150),
    "added modulo 11, norm first": lambda: supervised(Modular(), added(), classify, optimizer=AdamW, lr=3e-3, schedule=lambda step: min(1.0, step / 20), clip=1.0, steps=150),
    "houses, batch norm, Huber": lambda: supervised(mlp(9, 32, 32, 1, norm=nn.BatchNorm1d), houses(), huber, optimizer=momentum, lr=0.02, steps=200),
    "self-normalising, NAdam": lambda: supervised(selu_net(), data.blobs(noise=1.5), classify, optimizer=torch.optim.NAdam, lr=1e-3, steps=200),
    "waves, ever wider, float16": lambda: supervised(Dilated(), waves(), lambda model, x, y: functional.cross_entropy(model(x).float(), y), optimizer=momentum, lr=0.05, schedule=cosine(150, 5), scaler=torch.amp.GradScaler("cpu"), autocast=torch.float16, steps=150),
    "finer pictures, absolute differences": lambda: supervised(finer_model(), finer(), lambda model, x, y: functional.l1_loss(model(x), y), optimizer=momentum, lr=0.02, schedule=cosine(150, 10), steps=150),
    "a sequence said again": lambda: supervised(Copier(), lambda _: ((words := torch.randint(0, 6, (32, 6))), words), lambda model, words, aim: functional.cross_entropy(model(words).flatten(0, 1), aim.flatten()), lr=5e-3, clip=1.0, steps=200),
    "two marked numbers, a recurrence of the identity": lambda: supervised(Counter(), marked_sums(), regress, lr=2e-3, clip=1.0, steps=200),
    "tags, the rare ones weigh 3": lambda: supervised(mlp(10, 64, 64, 8), labels_of_many(), tagged, lr=2e-3, steps=200),
    "likenesses of a class": lambda: supervised(mlp(12, 48, 48, 8), data.pairs(32), contrast, optimizer=AdamW, lr=1e-3, steps=200),
    "imitated by advantage": advantages,
    "value and advantages apart": dueling,
    "few of many features": lambda: supervised(nn.ModuleDict({"coder": nn.Sequential(nn.Linear(12, 48), nn.ReLU()), "speaker": nn.Linear(48, 12)}), mixed_signals(), sparse_codes, lr=3e-3, steps=250),
    "bits one by one, float16": lambda: supervised(one_by_one(), bits_in_pairs(), lambda model, x: functional.binary_cross_entropy_with_logits(model(x).float(), x), lr=3e-3, scaler=torch.amp.GradScaler("cpu"), autocast=torch.float16, steps=200),
    "names and numbers, two optimizers": wide,
    "topics by windows, two batches": lambda: supervised(Windows(), topics(), classify, lr=3e-3, accumulate=2, steps=150),
}  # fmt: skip


def fourth(which: int) -> dict[str, Callable[[], Loop]]:
    """0: those that are opened, 1: the locked ones."""
    return dict(list(PAIRS.items())[which::2])
