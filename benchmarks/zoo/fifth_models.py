"""Models, data and losses of the fifth trainings: those of kinds that no other file of the zoo has."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations

from . import data
from .loop import Batch
from .models import Attention, Block, mlp


class GatedBlock(nn.Module):
    """Root mean square norms, causal attention, and a gated feed-forward; `branch` multiplies what is added."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(dim), nn.RMSNorm(dim)
        self.attention = Attention(dim)
        self.gate, self.up, self.down = (nn.Linear(*size, bias=False) for size in [(dim, 48), (dim, 48), (48, dim)])
        self.branch = 1.0

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.branch * self.attention(self.norm1(x))
        inner = self.norm2(x)
        return x + self.branch * self.down(functional.silu(self.gate(inner)) * self.up(inner))


class Gated(nn.Module):
    """A small language model."""

    def __init__(self, dim: int = 24, vocabulary: int = 24) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, dim), nn.Embedding(16, dim)
        for embedding in (self.tokens, self.places):
            nn.init.normal_(embedding.weight, std=0.1)
        self.blocks = nn.Sequential(*(GatedBlock(dim) for _ in range(3)))
        self.norm, self.head = nn.RMSNorm(dim), nn.Linear(dim, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.tokens(tokens) + self.places(torch.arange(tokens.shape[1])))))


class Planner(nn.Module):
    """Returns, states and actions become tokens in a row; the next action is read at each state."""

    def __init__(self, dim: int = 24) -> None:
        super().__init__()
        self.returns, self.states, self.actions = nn.Linear(1, dim), nn.Linear(3, dim), nn.Linear(2, dim)
        self.places, self.start = nn.Embedding(6, dim), nn.LayerNorm(dim)
        self.blocks = nn.Sequential(*(Block(dim) for _ in range(2)))
        self.head = nn.Linear(dim, 2)

    def forward(self, returns: Tensor, states: Tensor, actions: Tensor) -> Tensor:
        place = self.places(torch.arange(6))
        each = [self.returns(returns) + place, self.states(states) + place, self.actions(actions) + place]
        row = self.start(torch.stack(each, dim=2).flatten(1, 2))
        return self.head(self.blocks(row)[:, 1::3])


def plans(size: int = 16) -> data.Batches:
    """Six steps; the action is the state, turned, times the return that is still to come."""
    turn = torch.randn(3, 2) / 2

    def batch(_: int) -> Batch:
        states, returns = torch.randn(size, 6, 3), torch.rand(size, 6, 1)
        return returns, states, returns * (states @ turn) + 0.1 * torch.randn(size, 6, 2)

    return batch


def imitated(model: nn.Module, returns: Tensor, states: Tensor, actions: Tensor) -> Tensor:
    return (model(returns, states, actions) - actions).square().mean()


class Chain(nn.Module):
    """Scores of each word's label, and of each label after another: minus the log likelihood of a chain."""

    def __init__(self, dim: int = 24, labels: int = 5) -> None:
        super().__init__()
        self.tokens, self.window, self.scores = nn.Embedding(20, dim), nn.Conv1d(dim, dim, 3, padding=1), nn.Linear(dim, labels)  # fmt: skip
        self.steps = nn.Parameter(torch.zeros(labels, labels))

    def emissions(self, words: Tensor) -> Tensor:
        return self.scores(torch.relu(self.window(self.tokens(words).mT)).mT)

    def forward(self, words: Tensor, labels: Tensor) -> Tensor:
        scores = self.emissions(words)
        right = scores.gather(2, labels[:, :, None]).sum(dim=(1, 2)) + self.steps[labels[:, :-1], labels[:, 1:]].sum(1)
        ways = scores[:, 0]
        for place in range(1, scores.shape[1]):
            ways = (ways[:, :, None] + self.steps).logsumexp(dim=1) + scores[:, place]
        return (ways.logsumexp(dim=1) - right).mean()


def chained(size: int = 16) -> data.Batches:
    """Words 0 to 19 of five kinds; a label stays or goes on by one."""

    def batch(_: int) -> Batch:
        labels = ((torch.rand(size, 10) < 0.4).long().cumsum(dim=1) + torch.randint(0, 5, (size, 1))) % 5
        words = torch.where(torch.rand(size, 10) < 0.7, 4 * labels, 0) + torch.randint(0, 4, (size, 10))
        return words, labels

    return batch


class Foreseer(nn.Module):
    """Says which of the batch's signals goes on like this one: three steps ahead."""

    def __init__(self, dim: int = 24) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Conv1d(1, dim, 4, stride=2), nn.ReLU(), nn.Conv1d(dim, dim, 3, stride=2))
        self.memory, self.ahead = (
            nn.GRU(dim, dim, batch_first=True),
            nn.ModuleList(nn.Linear(dim, dim) for _ in range(3)),
        )
        self.heat = 1.0

    def forward(self, x: Tensor) -> Tensor:
        seen = self.encoder(x).mT
        state = self.memory(seen[:, :-3])[0][:, -1]
        aim = torch.arange(len(x))
        said = [layer(state) @ seen[:, index - 3].T / self.heat for index, layer in enumerate(self.ahead)]
        return sum(functional.cross_entropy(logits, aim) for logits in said) / 3


def tones(size: int = 16) -> data.Batches:
    def batch(_: int) -> Batch:
        time = torch.arange(32) / 32
        rate, phase = 1 + 7 * torch.rand(size, 1, 1), torch.rand(size, 1, 1)
        return (torch.sin(2 * torch.pi * (rate * time + phase)) + 0.1 * torch.randn(size, 1, 32),)

    return batch


class Process(nn.Module):
    """A Gaussian process on what a network makes of x: minus the log likelihood of y, per point."""

    def __init__(self) -> None:
        super().__init__()
        self.features = mlp(3, 24, 24, 2, act=nn.Tanh)
        self.log_length, self.log_noise = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.tensor(-1.0))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        place = self.features(x) / self.log_length.exp()
        kernel = torch.exp(-(place[:, None] - place).square().sum(dim=2) / 2) + self.log_noise.exp() * torch.eye(len(x))
        root = torch.linalg.cholesky(kernel)
        return (
            torch.linalg.solve_triangular(root, y, upper=False).square().sum() / 2 + root.diagonal().log().sum()
        ) / len(x)


def surface(size: int = 40) -> data.Batches:
    ways = torch.randn(3, 2)

    def batch(_: int) -> Batch:
        x = torch.randn(size, 3)
        return x, torch.sin(x @ ways).sum(dim=1, keepdim=True) + 0.1 * torch.randn(size, 1)

    return batch


def transport(model: nn.Module, noise: Tensor, real: Tensor, blur: float = 0.1) -> Tensor:
    """How far points must be carried, by ten rounds of Sinkhorn in logarithms."""
    cost = (model(noise)[:, None] - real).square().sum(dim=2)
    one, other = torch.zeros(len(noise)), torch.zeros(len(real))
    for _ in range(10):
        one = -blur * ((other - cost) / blur).logsumexp(dim=1)
        other = -blur * ((one[:, None] - cost) / blur).logsumexp(dim=0)
    return one.mean() + other.mean()


def noise_and_points(size: int = 48) -> data.Batches:
    real = data.points(size)
    return lambda step: (torch.randn(size, 4), *real(step))


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


def moving(size: int = 12) -> data.Batches:
    """A spot of four pixels that goes on by one in each frame: [N, 6, 8, 8]."""

    def batch(_: int) -> Batch:
        start, way = torch.randint(0, 8, (size, 2)), torch.randint(-1, 2, (size, 2))
        frames, rows = torch.zeros(size, 6, 8, 8), torch.arange(size)
        for time in range(6):
            for down in (0, 1):
                for right in (0, 1):
                    frames[rows, time, (start[:, 0] + time * way[:, 0] + down) % 8, (start[:, 1] + time * way[:, 1] + right) % 8] = 1.0  # fmt: skip
        return (frames,)

    return batch


def next_frame(model: nn.Module, frames: Tensor) -> Tensor:
    return functional.binary_cross_entropy_with_logits(model(frames[:, :-1]), frames[:, 1:])


class Highway(nn.Module):
    """x goes on as it is where the gate is shut."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.inner, self.gate = nn.Linear(dim, dim), nn.Linear(dim, dim)
        nn.init.constant_(self.gate.bias, -1.0)

    def forward(self, x: Tensor) -> Tensor:
        gate = torch.sigmoid(self.gate(x))
        return gate * torch.relu(self.inner(x)) + (1 - gate) * x


class Factors(nn.Module):
    """A machine of factors: each field's bias, and the products of each pair's vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.vectors, self.biases, self.offset = nn.Embedding(60, 8), nn.Embedding(60, 1), nn.Parameter(torch.zeros(()))
        nn.init.normal_(self.vectors.weight, std=0.1)
        nn.init.zeros_(self.biases.weight)

    def forward(self, fields: Tensor) -> Tensor:
        vectors = self.vectors(fields)
        pairs = (vectors.sum(dim=1).square() - vectors.square().sum(dim=1)).sum(dim=1) / 2
        return self.offset + self.biases(fields).sum(dim=(1, 2)) + pairs


def clicks(size: int = 64) -> data.Batches:
    """Four fields of 15 values each."""
    taste, base = torch.randn(60, 3) / 1.5, torch.randn(60) / 2

    def batch(_: int) -> Batch:
        fields = torch.randint(0, 15, (size, 4)) + 15 * torch.arange(4)
        vectors = taste[fields]
        logit = base[fields].sum(dim=1) + (vectors.sum(dim=1).square() - vectors.square().sum(dim=1)).sum(dim=1) / 2
        return fields, (torch.rand(size) < torch.sigmoid(2 * logit)).float()

    return batch


def clicked(model: nn.Module, fields: Tensor, click: Tensor) -> Tensor:
    return functional.binary_cross_entropy_with_logits(model(fields).float(), click)


class Pooled(nn.Module):
    """A bag is the mean of its pieces, by weights that are learned."""

    def __init__(self, dim: int = 32) -> None:
        super().__init__()
        self.body, self.score, self.head = mlp(6, dim, dim), nn.Linear(dim, 1), nn.Linear(dim, 1)
        self.axis = 1

    def forward(self, bags: Tensor) -> Tensor:
        piece = torch.tanh(self.body(bags))
        return self.head((self.score(piece).softmax(dim=self.axis) * piece).sum(dim=1))[:, 0]


def bags(size: int = 32) -> data.Batches:
    """Eight pieces each; a bag counts if one of them bears the sign."""
    sign = 2.5 * functional.normalize(torch.randn(6), dim=0)

    def batch(_: int) -> Batch:
        pieces, counts = torch.randn(size, 8, 6), torch.rand(size) < 0.5
        pieces[torch.arange(size), torch.randint(0, 8, (size,))] += sign * counts[:, None]
        return pieces, counts.float()

    return batch


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


def condition_loss(model: nn.Module, x: Tensor, which: Tensor, label: Tensor) -> Tensor:
    return functional.cross_entropy(model(x, which).float(), label)


def weight_normed() -> nn.Module:
    layers = [
        nn.Conv1d(2, 16, 3),
        nn.Conv1d(16, 16, 3, dilation=2),
        nn.Conv1d(16, 16, 3, dilation=4),
        nn.Conv1d(16, 1, 1),
    ]
    normed = [parametrizations.weight_norm(layer) for layer in layers]
    return nn.Sequential(normed[0], nn.ReLU(), normed[1], nn.ReLU(), normed[2], nn.ReLU(), normed[3])


def two_series(size: int = 32) -> data.Batches:
    """What two noisy waves add up to, one step later: [N, 2, 30] and [N, 1, 16]."""

    def batch(_: int) -> Batch:
        time = torch.arange(31) / 10
        rate, phase = 1 + torch.rand(size, 2, 1), torch.rand(size, 2, 1)
        x = torch.sin(2 * torch.pi * (rate * time + phase)) + 0.05 * torch.randn(size, 2, 31)
        return x[:, :, :-1], x[:, :, 15:].sum(dim=1, keepdim=True)

    return batch


class TwoTasks(nn.Module):
    """Two heads on one trunk; each task's weight is learned as the logarithm of its variance."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = mlp(8, 32, 32, 32, norm=nn.BatchNorm1d)
        self.amount, self.kind = nn.Linear(32, 1), nn.Linear(32, 3)
        self.doubt = nn.Parameter(torch.zeros(2))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.relu(self.trunk(x))
        return self.amount(h), self.kind(h)


def amounts_and_kinds(size: int = 48, n: int = 2048) -> data.Batches:
    x = torch.randn(n, 8)
    return data.drawn(x, 5 * torch.sin(x @ torch.randn(8, 1) / 2) + torch.randn(n, 1), (x @ torch.randn(8, 3)).argmax(dim=1), size=size)  # fmt: skip


def doubted(model: nn.Module, x: Tensor, y: Tensor, label: Tensor) -> Tensor:
    amount, kind = model(x)
    tasks = torch.stack([functional.mse_loss(amount, y), functional.cross_entropy(kind, label)])
    return (torch.exp(-model.doubt) * tasks + model.doubt).mean()


class Policy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.mean, self.value = mlp(5, 32, 32, act=nn.Tanh), nn.Linear(32, 2), nn.Linear(32, 1)
        self.log_std = nn.Parameter(torch.full((2,), -0.5))


def acting(model: nn.Module, state: Tensor, aim: Tensor, heat: float = 0.003) -> Tensor:
    """One action per state, its reward against a baseline, and a little entropy."""
    h = torch.tanh(model.body(state))
    chosen = torch.distributions.Normal(model.mean(h), model.log_std.exp())
    action = chosen.sample()
    reward = -(action - aim).square().sum(dim=1)
    value = model.value(h)[:, 0]
    gain = reward - value.detach()
    return (
        -(gain * chosen.log_prob(action).sum(dim=1)).mean()
        + (value - reward).square().mean() / 2
        - heat * chosen.entropy().mean()
    )


def aims(size: int = 96) -> data.Batches:
    way = torch.randn(5, 2) / 2

    def batch(_: int) -> Batch:
        state = torch.randn(size, 5)
        return state, torch.tanh(state @ way)

    return batch
