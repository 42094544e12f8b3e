"""Trainings and faults of kinds that the rest of the zoo does not have: written, and scored once, before any rule was
looked at again. Their families are kept out of all tuning.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from . import changes as do
from . import data
from .faults import Fault
from .healthy_supervised import AdamW, Table, cosine, momentum
from .loop import Batch, Loop, supervised
from .models import mlp, regress


class Citations(nn.Module):
    """Nodes of a random graph, classified from their own and their neighbours' words; few nodes are labelled."""

    def __init__(self, nodes: int = 80, dim: int = 16) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(20, dim), nn.Linear(2 * dim, 4)
        self.register_buffer("sources", torch.randint(0, nodes, (4 * nodes,)))
        self.register_buffer("targets", torch.randint(0, nodes, (4 * nodes,)))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.inner(x))
        received = torch.zeros_like(h).index_add(0, self.targets, h[self.sources]) / 4
        return self.outer(torch.cat([h, received], dim=1))


def citations() -> Loop:
    model, labels = Citations(), torch.randint(0, 4, (80,))
    words = torch.bernoulli(0.05 + 0.4 * (torch.arange(20) % 4 == labels[:, None]).float())
    known = torch.randperm(80)[:20]

    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return functional.cross_entropy(model(functional.dropout(x, 0.2))[known], y[known])

    return supervised(model, lambda _: (words, labels), loss, lr=1e-2)


class Recommender(nn.Module):
    """A user, an item, and whether they like each other."""

    def __init__(self, users: int = 300, items: int = 200, dim: int = 12) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(users, dim, sparse=True), nn.Embedding(items, dim, sparse=True)
        for table in (self.users, self.items):
            nn.init.normal_(table.weight, std=0.1)

    def forward(self, users: Tensor, items: Tensor) -> Tensor:
        return (self.users(users) * self.items(items)).sum(dim=1)


def recommended() -> Loop:
    """Bayesian personalised ranking; a few items are in every second pair."""
    tastes, kinds = torch.randn(300, 3), torch.randn(200, 3)

    def batch(_: int) -> Batch:
        users = torch.randint(0, 300, (64,))
        offered = (200 * torch.rand(64, 2) ** 3).long()
        better = ((tastes[users][:, None] * kinds[offered]).sum(dim=2)).argmax(dim=1)
        rows = torch.arange(64)
        return users, offered[rows, better], offered[rows, 1 - better]

    def loss(model: nn.Module, users: Tensor, liked: Tensor, other: Tensor) -> Tensor:
        return functional.softplus(model(users, other) - model(users, liked)).mean()

    return supervised(Recommender(), batch, loss, optimizer=torch.optim.Adagrad, lr=0.1)


class Labeller(nn.Module):
    """A label for each token of sentences that are packed."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.memory, self.head = nn.Embedding(30, 12, padding_idx=0), nn.LSTM(12, 16, batch_first=True, bidirectional=True), nn.Linear(32, 3)  # fmt: skip

    def forward(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(self.tokens(tokens), lengths, batch_first=True, enforce_sorted=False)
        return self.head(nn.utils.rnn.pad_packed_sequence(self.memory(packed)[0], batch_first=True)[0])


def labelled() -> Loop:
    def batch(_: int) -> Batch:
        lengths = torch.randint(2, 11, (12,))
        lengths[0] = 10
        tokens = torch.randint(1, 30, (12, 10)) * (torch.arange(10) < lengths[:, None])
        labels = (tokens % 3 + functional.pad(tokens, (1, 0))[:, :-1]) % 3
        return tokens, lengths, labels.masked_fill(tokens == 0, -100)

    def loss(model: nn.Module, tokens: Tensor, lengths: Tensor, labels: Tensor) -> Tensor:
        return functional.cross_entropy(model(tokens, lengths).flatten(0, 1), labels.flatten())

    return supervised(Labeller(), batch, loss, lr=1e-2, clip=5.0)


def cauchy(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return torch.log1p((model(x) - y) ** 2).mean()


def outliers(n: int) -> Tensor:
    """One target in twenty is wrong by a hundred."""
    return 0.1 * torch.randn(n) + 100.0 * (torch.rand(n) < 0.05) * torch.randn(n).sign()


def meta_learned() -> Loop:
    """MAML: a step inside each task, differentiated through."""
    model = mlp(1, 32, 32, 1, act=nn.Tanh)

    def loss(model: nn.Module, x: Tensor, phase: Tensor) -> Tensor:
        total = torch.zeros(())
        for task in range(len(x)):
            seen, asked = x[task].chunk(2)
            names = [name for name, _ in model.named_parameters()]
            error = functional.mse_loss(model(seen), torch.sin(seen + phase[task]))
            steps = torch.autograd.grad(error, list(model.parameters()), create_graph=True)
            moved = {name: p - 0.05 * step for name, p, step in zip(names, model.parameters(), steps, strict=True)}
            answer = torch.func.functional_call(model, moved, (asked,))
            total = total + functional.mse_loss(answer, torch.sin(asked + phase[task]))
        return total / len(x)

    return supervised(model, lambda _: (4 * torch.rand(4, 20, 1) - 2, 3 * torch.rand(4)), loss, lr=2e-3, steps=120)


def siamese(model: nn.Module, a: Tensor, b: Tensor, labels: Tensor) -> Tensor:
    """Pairs of the same thing are drawn together, others pushed apart up to a margin."""
    left, right = model(a), model(torch.where(torch.arange(len(b))[:, None] % 2 == 0, b, b.roll(1, 0)))
    distance = (left - right).square().sum(dim=1).add(1e-6).sqrt()
    same = torch.arange(len(b)) % 2 == 0
    return torch.where(same, distance**2, torch.relu(1.0 - distance) ** 2).mean()


class Translator(nn.Module):
    """An encoder's last state begins a decoder, which is given the right words so far."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(13, 16)
        self.encoder, self.decoder = nn.GRU(16, 32, batch_first=True), nn.GRU(16, 32, batch_first=True)
        self.head = nn.Linear(32, 12)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        state = self.encoder(self.tokens(source))[1]
        begun = functional.pad(target, (1, 0), value=12)[:, :-1]
        return self.head(self.decoder(self.tokens(begun), state)[0])


def translated() -> Loop:
    def batch(_: int) -> Batch:
        source = torch.randint(0, 12, (24, 5))
        return source, source.flip(1)

    def loss(model: nn.Module, source: Tensor, target: Tensor) -> Tensor:
        return functional.cross_entropy(model(source, target).flatten(0, 1), target.flatten())

    return supervised(Translator(), batch, loss, lr=5e-3, clip=1.0)


class Coordinates(nn.Module):
    """A picture as a function of its coordinates, through waves of many lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("waves", 6.0 * torch.randn(2, 24))
        self.net = mlp(48, 48, 48, 3)

    def forward(self, x: Tensor) -> Tensor:
        angles = x @ self.waves
        return torch.sigmoid(self.net(torch.cat([angles.sin(), angles.cos()], dim=1)))


def pictured() -> Loop:
    def batch(_: int) -> Batch:
        x = torch.rand(64, 2)
        return x, 0.5 + 0.5 * torch.sin(9 * x @ torch.tensor([[1.0, 0.3, -0.8], [0.5, -1.0, 0.6]]))

    return supervised(Coordinates(), batch, regress, lr=5e-3)


def mean_teacher() -> Loop:
    """Few labels; an average of the past models is agreed with, ever more so."""
    model = mlp(12, 32, 32, 4)
    teacher, now = copy.deepcopy(model).requires_grad_(False), [0]

    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        noisy, clean = model(x + 0.3 * torch.randn_like(x)), teacher(x + 0.3 * torch.randn_like(x))
        agreed = functional.mse_loss(noisy.softmax(dim=1), clean.softmax(dim=1))
        return functional.cross_entropy(noisy[:8], y[:8]) + 5.0 * min(now[0] / 80, 1.0) * agreed

    @torch.no_grad()
    def follow(loop: Loop, step: int) -> None:
        now[0] = step
        for mine, theirs in zip(teacher.parameters(), model.parameters(), strict=True):
            mine.lerp_(theirs, 0.05)

    return supervised(model, data.blobs(), loss, optimizer=AdamW, lr=3e-3, schedule=cosine(200), after=[follow])


def smooth_inputs(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """A classifier whose slope at its inputs is penalised: a backward through a backward."""
    x = x.clone().requires_grad_()
    loss = functional.cross_entropy(model(x), y)
    slope = torch.autograd.grad(loss, x, create_graph=True)[0]
    return loss + 5.0 * slope.square().sum(dim=1).mean()


def physics(model: nn.Module, x: Tensor) -> Tensor:
    """u'' = -u with u(0) = 0 and u'(0) = 1, by the equation alone."""
    x = x.requires_grad_()
    u = model(x)
    first = torch.autograd.grad(u.sum(), x, create_graph=True)[0]
    second = torch.autograd.grad(first.sum(), x, create_graph=True)[0]
    start = torch.zeros(1, 1, requires_grad=True)
    at_start = model(start)
    slope = torch.autograd.grad(at_start.sum(), start, create_graph=True)[0]
    return (second + u).square().mean() + at_start.square().sum() + (slope - 1).square().sum()


UNSEEN: Table = {
    "unseen trainings": {
        "citations": citations,
        "recommender, Adagrad": recommended,
        "labels of packed sentences": labelled,
        "outliers, Cauchy loss": lambda: supervised(mlp(8, 32, 32, 1), data.curve(noise=outliers), cauchy, lr=3e-3),
        "outliers, squared error, clipped": lambda: supervised(mlp(8, 32, 32, 1), data.curve(noise=outliers), regress, optimizer=momentum, lr=1e-3, clip=10.0),
        "MAML": meta_learned,
        "siamese, margin": lambda: supervised(mlp(12, 32, 8), data.pairs(), siamese, lr=2e-3),
        "translator, given the right words": translated,
        "coordinates of a picture": pictured,
        "mean teacher": mean_teacher,
        "slope of the inputs penalised": lambda: supervised(mlp(12, 48, 48, 4, act=nn.Softplus), data.blobs(), smooth_inputs, lr=3e-3),
        "differential equation": lambda: supervised(mlp(1, 24, 24, 1, act=nn.Tanh), lambda _: (4 * torch.rand(32, 1),), physics, lr=5e-3),
    }
}  # fmt: skip


class _Tenfold(nn.Module):
    """x + 10 f(x)."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp(24, 24, 24)

    def forward(self, x: Tensor) -> Tensor:
        return x + 10 * self.inner(x)


def _first_feature(factor: float) -> Callable[[Tensor], Tensor]:
    return lambda x: torch.cat([factor * x[:, :1], x[:, 1:]], dim=1)


def _softmax_twice(loop: Loop, layer: str) -> None:
    loop.model.register_forward_hook(lambda module, args, out: out.softmax(dim=1))


PLAIN, REG, TASKS = "MLP, SGD with momentum", "MLP, squared error", "several tasks"
CONV, RESNET, LSTM = "convolutions", "residual network", "labels of packed sentences"
WAVES, WORDS, NODES, AMP = (
    "coordinates of a picture",
    "translator, given the right words",
    "citations",
    "float16, scaler",
)


def _no(*bases: str) -> dict[str, str]:
    return dict.fromkeys(bases, "")


UNSEEN_FAULTS: list[Fault] = [
    Fault("unseen faults", "loss summed instead of averaged", _no(PLAIN), do.loss(lambda value: 32 * value), 1, "data scale", ("reduction", "learning rate")),
    Fault("unseen faults", "loss times 10,000", _no(PLAIN, RESNET), do.loss(lambda value: 1e4 * value), 1, "data scale", ("reduction",)),
    Fault("unseen faults", "loss times 32 from step 100", _no(PLAIN, WAVES), do.loss(lambda value: 32 * value, 100), 100, "data scale", ("reduction", "data change")),
    Fault("unseen faults", "one feature 10,000x", _no(PLAIN, REG), do.inputs(_first_feature(1e4)), 1, "data scale"),
    Fault("unseen faults", "targets with a mean of 10,000", _no(REG), do.inputs(lambda y: y + 1e4, which=1), 1, "data scale"),
    Fault("unseen faults", "a batch of bytes at step 100", _no(CONV, RESNET), do.inputs(lambda x: 255 * x, 100, 101), 100, "bad batch"),
    Fault("unseen faults", "logarithm of a layer's output from step 70", {REG: "2", WORDS: "head"}, do.output(lambda out: out + 1e-3 * torch.log(out), 70), 70, "invalid operation", ("loss or inputs",)),
    Fault("unseen faults", "targets divided by a deviation of 0 at step 110", _no(REG), do.inputs(lambda y: (y - y) / (y - y).std(), 110, 111, which=1), 110, "bad batch", ("loss or inputs", "invalid operation")),
    Fault("unseen faults", "16 blocks, x + 10 f(x)", _no(PLAIN), do.rebuilt(lambda: nn.Sequential(nn.Linear(12, 24), *(_Tenfold() for _ in range(16)), nn.Linear(24, 4))), 1, "depth", ("initialisation",)),
    Fault("unseen faults", "learning rate 1.1x per batch, not per epoch", _no(CONV, WORDS), do.learning_rate(lambda step: 1.1 ** (step - 40), 40), 60, "learning rate", ("schedule",)),
    Fault("unseen faults", "learning rate halved per batch, not per epoch", _no(NODES, RESNET), do.learning_rate(lambda step: 0.5**step), 25, "zero learning rate", ("schedule", "no step")),
    Fault("unseen faults", "learning rate 300x", _no(WAVES, NODES, LSTM), do.learning_rate(300), 1, "learning rate"),
    Fault("unseen faults", "learning rate 200x from step 90", _no("siamese, margin", "MAML", "mean teacher"), do.learning_rate(200, 90), 90, "learning rate"),
    Fault("unseen faults", "momentum of 0.9995", _no(PLAIN, RESNET), do.groups(momentum=0.9995), 1, "learning rate", ("optimizer",)),
    Fault("unseen faults", "decay of 1, in Adam's gradients", _no(REG, WAVES), do.groups(weight_decay=1.0), 1, "decay"),
    Fault("unseen faults", "eps of 0.1", _no(REG), do.groups(eps=0.1), 1, "optimizer", decidable=False),
    Fault("unseen faults", "dropout of 99 %", {PLAIN: "2"}, do.output(lambda out: nn.functional.dropout(out, 0.99)), 1, "dead units", decidable=False),
    Fault("unseen faults", "softmax twice", _no(PLAIN), _softmax_twice, 1, "saturation", decidable=False),
    Fault("unseen faults", "a layer's gradient times 1e-30", {TASKS: "trunk.0", PLAIN: "0"}, do.backward(lambda grad: 1e-30 * grad), 1, "unused", ("saturation", "reduction", "depth", "backward")),
    Fault("unseen faults", "float16 without a scaler, loss / 3000", _no(AMP), do.chain(do.fields(scaler=None), do.loss(lambda value: value / 3e3)), 1, "underflow", ("reduction",)),
    Fault("unseen faults", "encoder's output detached", {WORDS: "tokens"}, do.output(torch.Tensor.detach), 1, "unused"),
    Fault("unseen faults", "recurrence 12x", {WORDS: "encoder", LSTM: "memory"}, do.scaled(12.0), 1, "initialisation", ("recurrence", "saturation")),
]  # fmt: skip
