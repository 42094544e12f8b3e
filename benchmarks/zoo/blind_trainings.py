"""Healthy trainings of kinds that no other file here has, written while nobody looked at a rule. All of them are locked."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional

from . import data
from .another_models import Layer, colours
from .healthy_supervised import AdamW, cosine, momentum
from .loop import Batch, Loop, supervised
from .models import classify, mlp, regress


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


class Keywords(nn.Module):
    """A waveform in frames, a recurrence over them, a word."""

    def __init__(self) -> None:
        super().__init__()
        self.frames, self.memory = nn.Conv1d(1, 16, 8, stride=4), nn.GRU(16, 24, batch_first=True)
        self.head = nn.Linear(24, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.memory(torch.relu(self.frames(x)).mT)[0][:, -1])


def sounds(size: int = 24) -> data.Batches:
    """Tones of four pitches with noise: [N, 1, 64]."""

    def batch(_: int) -> Batch:
        labels, phase = torch.randint(0, 4, (size,)), 2 * torch.pi * torch.rand(size, 1)
        tone = torch.sin(torch.arange(64) * (0.2 + 0.25 * labels[:, None]) + phase)
        return (tone + 0.5 * torch.randn(size, 64))[:, None], labels

    return batch


class Inducing(nn.Module):
    """A set transformer: eight points are told of the whole set, and pooled."""

    def __init__(self, dim: int = 24) -> None:
        super().__init__()
        self.embed, self.points = nn.Linear(2, dim), nn.Parameter(torch.randn(8, dim))
        self.layers = nn.Sequential(*(Layer(dim, mlp(dim, 2 * dim, dim), causal=False) for _ in range(2)))
        self.norm, self.head = nn.LayerNorm(dim), mlp(dim, dim, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([self.points.expand(len(x), -1, -1), self.embed(x)], dim=1)
        return self.head(self.norm(self.layers(x)[:, :8]).mean(dim=1))


def clouds(size: int = 32) -> data.Batches:
    """Sets of points, and how far they lie apart on average."""

    def batch(_: int) -> Batch:
        x = torch.randn(size, 12, 2) * (0.3 + 1.5 * torch.rand(size, 1, 1))
        return x, torch.cdist(x, x).mean(dim=(1, 2))[:, None]

    return batch


class Forecast(nn.Module):
    """A series in patches; each series is normalised by itself, and its forecast brought back."""

    def __init__(self, dim: int = 24) -> None:
        super().__init__()
        self.embed, self.places = nn.Linear(8, dim), nn.Parameter(0.1 * torch.randn(6, dim))
        self.layers = nn.Sequential(*(Layer(dim, mlp(dim, 2 * dim, dim, act=nn.GELU), causal=False) for _ in range(2)))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(6 * dim, 8)

    def forward(self, x: Tensor) -> Tensor:
        mean, size = x.mean(dim=1, keepdim=True), x.std(dim=1, keepdim=True) + 1e-3
        patches = self.embed(((x - mean) / size).unflatten(1, (6, 8))) + self.places
        return self.head(self.norm(self.layers(patches)).flatten(1)) * size + mean


def series(size: int = 32) -> data.Batches:
    """Two waves and a trend: 48 values, and the 8 that follow."""

    def batch(_: int) -> Batch:
        phase, slope = 2 * torch.pi * torch.rand(2, size, 1), 0.02 * torch.randn(size, 1)
        time = torch.arange(56)
        x = torch.sin(time / 4 + phase[0]) + 0.5 * torch.sin(time / 2 + phase[1]) + slope * time
        x = x + 0.1 * torch.randn(size, 56)
        return x[:, :48], x[:, 48:]

    return batch


def episodes() -> data.Batches:
    """Five classes that were drawn anew: five samples of each to learn from, and five to ask for."""

    def batch(_: int) -> Batch:
        return (2 * torch.randn(5, 1, 12) + torch.randn(5, 10, 12),)

    return batch


def prototypes(model: nn.Module, x: Tensor) -> Tensor:
    known, asked = model(x).split(5, dim=1)
    distance = (asked.flatten(0, 1)[:, None] - known.mean(dim=1)).square().sum(dim=2)
    return functional.cross_entropy(-distance, torch.arange(5).repeat_interleave(5))


class Process(nn.Module):
    """A conditional neural process: what is known of a function says how likely its other values are."""

    def __init__(self, dim: int = 32) -> None:
        super().__init__()
        self.encoder, self.decoder = mlp(2, dim, dim, dim), mlp(dim + 1, dim, dim, 2)

    def forward(self, known: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        said = self.encoder(known).mean(dim=1, keepdim=True).expand(-1, x.shape[1], -1)
        mean, spread = self.decoder(torch.cat([said, x], dim=2)).chunk(2, dim=2)
        return mean, 0.1 + 0.9 * functional.softplus(spread)


def functions(size: int = 16) -> data.Batches:
    def batch(_: int) -> Batch:
        x = 4 * torch.rand(size, 16, 1) - 2
        y = (0.5 + torch.rand(size, 1, 1)) * torch.sin(2 * x + 6 * torch.rand(size, 1, 1))
        return torch.cat([x, y], dim=2)[:, :8], x[:, 8:], y[:, 8:]

    return batch


def surprise(model: nn.Module, known: Tensor, x: Tensor, y: Tensor) -> Tensor:
    return -torch.distributions.Normal(*model(known, x)).log_prob(y).mean()


class Factors(nn.Module):
    """Ratings by the product of two vectors, and how a user and an item are rated in general."""

    def __init__(self) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(120, 8), nn.Embedding(80, 8)
        self.user_bias, self.item_bias = nn.Embedding(120, 1), nn.Embedding(80, 1)
        for table in (self.users, self.items):
            nn.init.normal_(table.weight, std=0.3)

    def forward(self, users: Tensor, items: Tensor) -> Tensor:
        rated = (self.users(users) * self.items(items)).sum(dim=1, keepdim=True)
        return rated + self.user_bias(users) + self.item_bias(items)


def ratings(model: nn.Module, users: Tensor, items: Tensor, y: Tensor) -> Tensor:
    return functional.mse_loss(model(users, items), y)


def rated(size: int = 256) -> data.Batches:
    users, items = torch.randint(0, 120, (4000,)), torch.randint(0, 80, (4000,))
    taste = (torch.randn(120, 3)[users] * torch.randn(80, 3)[items]).sum(dim=1, keepdim=True)
    return data.drawn(users, items, taste + 0.3 * torch.randn(4000, 1), size=size)


def tagged(size: int = 64) -> data.Batches:
    """Which of ten tags a sample has; each tag is rare."""
    x, w = torch.randn(3000, 12), torch.randn(12, 10)
    return data.drawn(x, (x @ w > 5.0).float(), size=size)


def any_of(model: nn.Module, x: Tensor, tags: Tensor) -> Tensor:
    return functional.binary_cross_entropy_with_logits(model(x), tags, pos_weight=torch.full((10,), 5.0))


def demonstrations(size: int = 64) -> data.Batches:
    """What an expert did in a state, with its unsteady hand."""
    gains = torch.randn(6, 2)

    def batch(_: int) -> Batch:
        state = torch.randn(size, 6)
        return state, torch.tanh(state @ gains) + 0.1 * (1 + state[:, :1].abs()) * torch.randn(size, 2)

    return batch


def imitated(model: nn.Module, state: Tensor, action: Tensor) -> Tensor:
    mean, spread = model(state).chunk(2, dim=1)
    return ((action - mean).square() * torch.exp(-2 * spread) / 2 + spread).sum(dim=1).mean()


def straightened(model: nn.Module, x: Tensor) -> Tensor:
    """Flow matching: the velocity along a straight way from noise to data."""
    noise, time = torch.randn_like(x), torch.rand(len(x), 1)
    return functional.mse_loss(model(torch.cat([time * x + (1 - time) * noise, time], dim=1)), x - noise)


class _Sign(torch.autograd.Function):
    @staticmethod
    def forward(context: object, weight: Tensor) -> Tensor:
        return weight.sign()

    @staticmethod
    def backward(context: object, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad


class Binary(nn.Linear):
    """Weights of one size; their signs are learned as if they were numbers."""

    through = True

    def forward(self, x: Tensor) -> Tensor:
        signs = _Sign.apply(self.weight) if self.through else self.weight.sign()
        return functional.linear(x, signs / self.in_features**0.5, self.bias)


class SignDescent(torch.optim.Optimizer):
    """Each weight by the same amount, as the sign of its averaged gradient says."""

    def __init__(self, params: Iterator[nn.Parameter], lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    mean = self.state[parameter].setdefault("mean", torch.zeros_like(parameter))
                    mean.lerp_(parameter.grad, 0.1)
                    parameter.sub_(mean.sign(), alpha=group["lr"])


def remembered() -> Loop:
    """A second task; weights that mattered to the first one are held by its Fisher information."""
    model, old, new = mlp(12, 48, 48, 4), data.blobs(), data.blobs()
    first = supervised(model, old, classify, lr=3e-3)
    for step in range(1, 81):
        first.advance(step)
    start = [parameter.detach().clone() for parameter in model.parameters()]
    squares = [torch.zeros_like(parameter) for parameter in start]
    for step in range(20):
        model.zero_grad()
        classify(model, *old(step)).backward()
        for square, parameter in zip(squares, model.parameters(), strict=True):
            square += parameter.grad.square() / 20
    model.zero_grad()

    def loss(model: nn.Module, x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        moved = zip(squares, start, model.parameters(), strict=True)
        held = sum((square * (now - before).square()).sum() for square, before, now in moved)
        return classify(model, x, y) + weight * held

    return supervised(model, lambda step: (*new(step), torch.tensor(30.0)), loss, lr=3e-3, steps=150)


def layerwise() -> Loop:
    """Fine-tuning: each layer learns half as fast as the one above it."""
    model = nn.ModuleDict({"features": mlp(12, 48, 48, 48), "head": nn.Linear(48, 6)})
    classes = lambda model, x, y: functional.cross_entropy(model["head"](torch.relu(model["features"](x))), y)  # noqa: E731
    first = supervised(model, data.blobs(classes=6), classes, lr=3e-3)
    for step in range(1, 81):
        first.advance(step)
    model.zero_grad()
    model["head"] = nn.Linear(48, 6)
    layers = [*(layer for layer in model["features"] if isinstance(layer, nn.Linear)), model["head"]]
    rates = [{"params": list(layer.parameters()), "lr": 4e-3 * 0.5 ** (3 - i)} for i, layer in enumerate(layers)]
    return Loop(model, data.blobs(classes=6), classes, [AdamW(rates)], schedule=cosine(140, 15), steps=140)


BLIND: dict[str, Callable[[], Loop]] = {
    "channels squeezed and excited": lambda: supervised(excited(), colours(24, noise=2.0), classify, optimizer=momentum, lr=0.05, steps=120),
    "keywords in sound": lambda: supervised(Keywords(), sounds(), classify, lr=5e-3, clip=1.0, steps=150),
    "sets through inducing points": lambda: supervised(Inducing(), clouds(), regress, optimizer=AdamW, lr=2e-3, schedule=cosine(120), steps=120),
    "forecast of a series": lambda: supervised(Forecast(), series(), regress, optimizer=AdamW, lr=2e-3, schedule=cosine(140), clip=1.0, steps=140),
    "prototypes of few samples": lambda: supervised(mlp(12, 48, 48, 16), episodes(), prototypes, lr=2e-3, steps=150),
    "neural process": lambda: supervised(Process(), functions(), surprise, lr=3e-3),
    "ratings, two factors and biases": lambda: supervised(Factors(), rated(), ratings, optimizer=momentum, lr=0.5, steps=200),
    "ten rare tags": lambda: supervised(mlp(12, 48, 48, 10), tagged(), any_of, optimizer=torch.optim.RMSprop, lr=2e-3),
    "an expert's hand imitated": lambda: supervised(mlp(6, 48, 48, 4, act=nn.Tanh), demonstrations(), imitated, lr=3e-3, clip=5.0, steps=150),
    "flow matching": lambda: supervised(mlp(3, 64, 64, 64, 2, act=nn.SiLU), data.points(128), straightened, lr=3e-3),
    "weights of one bit": lambda: supervised(nn.Sequential(Binary(12, 64), nn.BatchNorm1d(64), nn.Hardtanh(), Binary(64, 64), nn.BatchNorm1d(64), nn.Hardtanh(), nn.Linear(64, 4)), data.blobs(64), classify, lr=5e-3, steps=150),
    "signs of the average": lambda: supervised(mlp(8, 48, 48, 1, act=nn.GELU), data.curve(), regress, optimizer=SignDescent, lr=1e-3, schedule=lambda step: 1 - step / 210),
    "a second task, the first one held": remembered,
    "each layer half as fast": layerwise,
}  # fmt: skip
