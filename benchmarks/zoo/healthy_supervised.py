"""Healthy trainings with one model, one loss and one optimizer: family -> name -> how to build it."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from . import data
from .loop import Loop, supervised
from .models import (
    Attention,
    Experts,
    PatchTransformer,
    Recurrent,
    Residual,
    Transformer,
    classify,
    conv,
    mlp,
    next_token,
    regress,
    resnet,
)

Table = dict[str, dict[str, Callable[[], Loop]]]
SGD, AdamW = torch.optim.SGD, torch.optim.AdamW


def cosine(steps: int, warmup: int = 20) -> Callable[[int], float]:
    """Linear from 0, then half a cosine to 0."""
    return lambda step: min(step / warmup, 0.5 + 0.5 * math.cos(math.pi * min(step / steps, 1.0)))


def momentum(parameters: object, lr: float) -> SGD:
    return SGD(parameters, lr=lr, momentum=0.9, nesterov=True)


def binary(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return functional.binary_cross_entropy_with_logits(model(x)[:, 0], y.float())


def hinge(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return functional.multi_margin_loss(model(x), y)


def focal(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    each = functional.cross_entropy(model(x), y, reduction="none")
    return ((1 - torch.exp(-each)) ** 2 * each).mean()


def huber(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return functional.smooth_l1_loss(model(x), y)


def gaussian(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Mean and log variance are predicted."""
    mean, log_var = model(x).split(1, dim=1)
    return (0.5 * log_var + 0.5 * (y - mean) ** 2 * torch.exp(-log_var)).mean()


def quantiles(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    error, levels = y - model(x), torch.tensor([0.1, 0.5, 0.9])
    return torch.maximum(levels * error, (levels - 1) * error).mean()


def each(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """All heads predict the same."""
    return (model(x) - y).square().mean()


def summed(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return 1e4 * functional.mse_loss(model(x), y, reduction="sum")


def poisson(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return functional.poisson_nll_loss(model(x), torch.poisson(torch.exp(y.clamp(max=3.0))))


def every_token(model: nn.Module, x: Tensor, _: Tensor) -> Tensor:
    """A running sum is predicted at each position."""
    return functional.mse_loss(model(x), x.cumsum(dim=1) / x.shape[1] ** 0.5)


def masked(model: nn.Module, tokens: Tensor, _: Tensor) -> Tensor:
    """15 % of the tokens are hidden and predicted."""
    hidden = torch.rand(tokens.shape) < 0.15
    hidden[0, 0] = True
    return functional.cross_entropy(model(tokens.masked_fill(hidden, 0))[hidden], tokens[hidden])


def padded(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    """Sentences of different lengths; the rest does not count."""
    lengths = torch.randint(2, tokens.shape[1] + 1, (len(tokens), 1))
    ignored = targets.masked_fill(torch.arange(tokens.shape[1]) >= lengths, -100)
    return functional.cross_entropy(model(tokens).flatten(0, 1), ignored.flatten())


def balanced(model: nn.Module, *batch: Tensor) -> Tensor:
    """The loss and what keeps the experts evenly loaded."""
    experts = [module for module in model.modules() if isinstance(module, Experts)]
    return next_token(model, *batch) + 0.01 * sum(expert.balance for expert in experts)


def mixed_up(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    share, other = torch.rand(()), torch.randperm(len(x))
    output = model(share * x + (1 - share) * x[other])
    return share * functional.cross_entropy(output, y) + (1 - share) * functional.cross_entropy(output, y[other])


def smoothed(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return functional.cross_entropy(model(x), y, label_smoothing=0.1)


def connectionist(model: nn.Module, x: Tensor, _: Tensor) -> Tensor:
    """CTC: which tokens were sounded, not when. Class 0 is the blank."""
    labels = x.argmax(dim=2)[:, ::3] + 1
    log_p = functional.log_softmax(model(x), dim=2).transpose(0, 1)
    lengths = torch.full((len(x),), x.shape[1]), torch.full((len(x),), labels.shape[1])
    return functional.ctc_loss(log_p, labels, *lengths, zero_infinity=True)


class Sine(nn.Module):
    """SIREN's activation."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(3.0 * x)


class Branches(nn.Module):
    """Several heads on one trunk, or, without a trunk, an ensemble."""

    def __init__(self, trunk: nn.Module, heads: list[nn.Module]) -> None:
        super().__init__()
        self.trunk, self.heads = trunk, nn.ModuleList(heads)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.trunk(x)
        return torch.cat([head(hidden) for head in self.heads], dim=1)


class Graph(nn.Module):
    """Two rounds of messages on a ring, then the mean."""

    def __init__(self, dim: int = 16) -> None:
        super().__init__()
        self.embed, self.rounds, self.head = nn.Linear(1, dim), nn.ModuleList(nn.Linear(2 * dim, dim) for _ in range(2)), nn.Linear(dim, 1)  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.embed(x))
        for message in self.rounds:
            h = torch.relu(message(torch.cat([h, h.roll(1, dims=1) + h.roll(-1, dims=1)], dim=2)))
        return self.head(h.mean(dim=1))


class Flow(nn.Module):
    """A neural ODE by Euler's steps: one layer used eight times."""

    def __init__(self, dim: int = 12, classes: int = 4) -> None:
        super().__init__()
        self.field, self.head = mlp(dim, 24, dim, act=nn.Tanh), nn.Linear(dim, classes)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(8):
            x = x + 0.125 * self.field(x)
        return self.head(x)


class Tagger(nn.Module):
    """Convolutions over time, then one attention layer."""

    def __init__(self, inputs: int, classes: int, dim: int = 24) -> None:
        super().__init__()
        self.conv, self.attention, self.head = nn.Conv1d(inputs, dim, 3, padding=1), Attention(dim, causal=False), nn.Linear(dim, classes)  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        h = functional.gelu(self.conv(x.mT).mT)
        return self.head((h + self.attention(h)).mean(dim=1))


def _started_rare(model: nn.Module, share: float) -> nn.Module:
    """The head's bias begins at the rare class's log odds."""
    with torch.no_grad():
        model[-1].bias.fill_(math.log(share / (1 - share)))  # type: ignore[index,union-attr,operator]
    return model


def tokens_lstm(**options: object) -> Loop:
    """A character model of an embedding, an LSTM and a head."""
    model = nn.Sequential(nn.Embedding(24, 16), Recurrent(nn.LSTM, 16, 24, every=True))
    return supervised(model, data.sentences(), next_token, **{"lr": 5e-3, "clip": 1.0} | options)


def _t(freedom: float, scale: float) -> Callable[[int], Tensor]:
    return lambda n: scale * torch.distributions.StudentT(freedom).sample((n,))


def transformer(**options: object) -> Loop:
    """The usual recipe."""
    return supervised(Transformer(), data.sentences(), next_token, optimizer=AdamW, lr=3e-3, schedule=cosine(200), clip=1.0, **options)  # fmt: skip


SUPERVISED: Table = {
    "classifiers": {
        "MLP, SGD with momentum": lambda: supervised(mlp(12, 32, 32, 4), data.blobs(), classify, optimizer=momentum, lr=0.05),
        "MLP, Adam, fits to zero loss": lambda: supervised(mlp(12, 64, 64, 4), data.blobs(noise=0.3, n=128), classify, lr=1e-2, steps=300),
        "logistic regression, separable": lambda: supervised(nn.Linear(12, 4), data.blobs(noise=0.2), classify, optimizer=SGD, lr=0.5),
        "MLP, batch size 1": lambda: supervised(mlp(12, 24, 24, 4), data.blobs(1), classify, optimizer=SGD, lr=0.01, steps=400),
        "deep MLP, layer norm": lambda: supervised(mlp(12, *[24] * 8, 4, norm=nn.LayerNorm), data.blobs(), classify, lr=2e-3),
        "MLP, tanh, label smoothing": lambda: supervised(mlp(12, 32, 32, 4, act=nn.Tanh), data.blobs(), smoothed, lr=3e-3),
        "MLP, mixup": lambda: supervised(mlp(12, 48, 48, 4), data.blobs(), mixed_up, lr=3e-3),
        "MLP, dropout, decay": lambda: supervised(mlp(12, 48, 48, 4, act=lambda: nn.Sequential(nn.ReLU(), nn.Dropout(0.3))), data.blobs(), classify, optimizer=AdamW, lr=3e-3),
        "residual MLP without normalisation": lambda: supervised(nn.Sequential(nn.Linear(12, 24), *(Residual(mlp(24, 24, 24)) for _ in range(6)), nn.Linear(24, 4)), data.blobs(), classify, lr=1e-3),
    },
    "tails": {
        "a class of 3 %": lambda: supervised(mlp(10, 32, 1), data.rare_class(), binary, lr=3e-3),
        "a class of 0.5 %, batch 16": lambda: supervised(_started_rare(mlp(10, 32, 1), 0.005), data.rare_class(16, share=0.005), binary, lr=3e-3, steps=400),
        "a class of 3 %, focal loss": lambda: supervised(mlp(10, 32, 2), data.rare_class(), focal, lr=3e-3),
        "Student-t noise, 3 degrees, squared error": lambda: supervised(mlp(8, 32, 32, 1), data.curve(noise=_t(3, 0.5)), regress, lr=1e-3, steps=300),
        "Student-t noise, 2 degrees, squared error": lambda: supervised(mlp(8, 32, 1), data.curve(noise=_t(2, 0.5)), regress, optimizer=SGD, lr=3e-3, steps=300),
        "Student-t noise, 1.5 degrees, Huber": lambda: supervised(mlp(8, 32, 32, 1), data.curve(noise=_t(1.5, 0.3)), huber, lr=3e-3),
        "Student-t noise, 1.5 degrees, clipped": lambda: supervised(mlp(8, 32, 32, 1), data.curve(noise=_t(1.5, 0.3)), regress, lr=1e-3, clip=1.0),
        "counts": lambda: supervised(mlp(8, 32, 1), data.curve(), poisson, lr=3e-3),
        "hinge loss, most samples satisfied": lambda: supervised(mlp(12, 32, 32, 4), data.blobs(8, noise=0.6), hinge, lr=5e-3, steps=300),
        "hinge loss, batch 2": lambda: supervised(mlp(12, 16, 4), data.blobs(2, noise=0.4), hinge, optimizer=SGD, lr=0.05, steps=300),
    },
    "regressions": {
        "MLP, squared error": lambda: supervised(mlp(8, 32, 32, 1), data.curve(), regress, lr=3e-3),
        "loss summed, norms of a million": lambda: supervised(mlp(8, 32, 32, 1), data.curve(), summed, lr=3e-3),
        "linear, fits exactly": lambda: _exact(),
        "sine activations": lambda: supervised(mlp(8, 48, 48, 1, act=Sine), data.curve(), regress, lr=1e-3),
        "mean and variance": lambda: supervised(mlp(8, 32, 2), data.curve(), gaussian, lr=2e-3, clip=5.0),
        "quantiles": lambda: supervised(mlp(8, 32, 3), data.curve(), quantiles, lr=3e-3),
        "ensemble of five": lambda: supervised(Branches(nn.Identity(), [mlp(8, 16, 1) for _ in range(5)]), data.curve(), each, lr=3e-3),
    },
    "recurrence": {
        "LSTM leaves a plateau": lambda: supervised(Recurrent(nn.LSTM, 4, 4), data.recall(length=8), classify, lr=2e-2, steps=400),
        "GRU, sums": lambda: supervised(Recurrent(nn.GRU, 1, 1), data.sums(), regress, lr=5e-3),
        "LSTM of two layers, sums": lambda: supervised(Recurrent(nn.LSTM, 1, 1, num_layers=2), data.sums(), regress, lr=1e-2, clip=1.0, steps=300),
        "tanh RNN, clipped": lambda: supervised(Recurrent(nn.RNN, 1, 1), data.sums(), regress, lr=3e-3, clip=1.0),
        "GRU, both directions": lambda: supervised(Recurrent(nn.GRU, 4, 4, bidirectional=True), data.recall(length=5), classify, lr=1e-2),
        "LSTM, characters": tokens_lstm,
        "GRU, an output each step": lambda: supervised(Recurrent(nn.GRU, 1, 1, every=True), data.sums(), every_token, lr=5e-3),
    },
    "language": {
        "transformer, warm-up and cosine": transformer,
        "transformer, tied embedding": lambda: supervised(Transformer(tied=True), data.sentences(), next_token, optimizer=AdamW, lr=3e-3, schedule=cosine(200), clip=1.0),
        "transformer, norm last": lambda: supervised(Transformer(norm_first=False), data.sentences(), next_token, lr=2e-3, schedule=cosine(200, 40)),
        "transformer, rare tokens": lambda: supervised(Transformer(64), data.sentences(4, vocabulary=64, zipf=2.0), next_token, lr=2e-3),
        "transformer, four batches per step": lambda: supervised(Transformer(), data.sentences(2), next_token, lr=2e-3, accumulate=4, steps=120),
        "transformer, masked tokens": lambda: supervised(Transformer(causal=False), data.sentences(), masked, lr=3e-3),
        "transformer, sentences of any length": lambda: supervised(Transformer(), data.sentences(4), padded, lr=3e-3),
        "embedding bag of rare words, SGD": lambda: supervised(Transformer(64, depth=1), data.sentences(2, vocabulary=64, zipf=1.5), next_token, optimizer=SGD, lr=0.3, clip=1.0),
    },
    "vision": {
        "convolutions": lambda: supervised(conv(), data.images(noise=2.0), classify, lr=3e-3),
        "convolutions, batch norm": lambda: supervised(conv(norm=nn.BatchNorm2d), data.images(), classify, optimizer=momentum, lr=0.05),
        "residual network": lambda: supervised(resnet(), data.images(), classify, optimizer=momentum, lr=0.02),
        "batch norm, batches of 4": lambda: supervised(resnet(), data.images(4), classify, optimizer=SGD, lr=0.02),
        "patches": lambda: supervised(PatchTransformer(), data.images(), classify, optimizer=AdamW, lr=2e-3, schedule=cosine(200)),
        "group norm": lambda: supervised(conv(norm=lambda width: nn.GroupNorm(2, width), depth=3), data.images(), classify, lr=3e-3),
    },
    "structured": {
        "CTC": lambda: supervised(Recurrent(nn.GRU, 4, 5, every=True, bidirectional=True), data.recall(), connectionist, lr=5e-3),
        "experts, one per token": lambda: supervised(Transformer(mlp=Experts(24)), data.sentences(), balanced, lr=3e-3),
        "experts, two per token": lambda: supervised(Transformer(depth=1, mlp=Experts(24, experts=8, top=2)), data.sentences(4), balanced, lr=3e-3),
        "several tasks": lambda: supervised(Branches(mlp(8, 32, 16), [nn.Linear(16, 1), mlp(16, 16, 1), nn.Linear(16, 1)]), data.curve(), several, lr=3e-3),
        "graph": lambda: supervised(Graph(), data.sums(), regress, lr=5e-3),
        "neural ODE": lambda: supervised(Flow(), data.blobs(), classify, lr=5e-3),
        "convolution and attention over time": lambda: supervised(Tagger(4, 4), data.recall(), classify, lr=3e-3),
    },
}  # fmt: skip


def _exact() -> Loop:
    """A linear map of a linear function: the gradient falls to rounding."""
    x, w = torch.randn(256, 8), torch.randn(8, 1)
    return supervised(nn.Linear(8, 1), data.drawn(x, x @ w), regress, optimizer=SGD, lr=0.1, steps=400)


def several(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Tasks of different sizes, added with weights."""
    first, second, third = model(x).split(1, dim=1)
    signs = functional.binary_cross_entropy_with_logits(third, (y > 0).float())
    return functional.mse_loss(first, y) + 0.1 * functional.mse_loss(second, 10 * y) + 0.5 * signs
