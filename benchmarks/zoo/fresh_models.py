"""Architectures that `fresh_trainings` trains, and what they are trained on."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from . import data
from .loop import Batch
from .models import Residual, mlp


class Scan(nn.Module):
    """A state that each token lets fade and adds to; `growth` multiplies what is kept of it."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.gate, self.value, self.side, self.out = (nn.Linear(dim, dim) for _ in range(4))
        self.growth = 1.0

    def forward(self, x: Tensor) -> Tensor:
        kept, value = torch.sigmoid(self.gate(x)), self.value(x)
        state, states = torch.zeros_like(value[:, 0]), []
        for t in range(x.shape[1]):
            state = self.growth * kept[:, t] * state + (1 - kept[:, t]) * value[:, t]
            states.append(state)
        return self.out(torch.stack(states, dim=1) * functional.silu(self.side(x)))


class Scanned(nn.Module):
    """A language model without attention."""

    def __init__(self, dim: int = 24) -> None:
        super().__init__()
        self.tokens, self.norm, self.head = nn.Embedding(24, dim), nn.LayerNorm(dim), nn.Linear(dim, 24)
        self.blocks = nn.Sequential(*(Residual(nn.Sequential(nn.LayerNorm(dim), Scan(dim))) for _ in range(2)))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.tokens(tokens))))


class UNet(nn.Module):
    """Down, up, and a shortcut between the two."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.first, self.down = nn.Conv2d(1, width, 3, padding=1), nn.Conv2d(width, 2 * width, 3, padding=1)
        self.up, self.joined = nn.ConvTranspose2d(2 * width, width, 2, stride=2), nn.Conv2d(2 * width, width, 3, padding=1)  # fmt: skip
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


class Mixer(nn.Module):
    """Patches that are mixed over places, then over channels."""

    def __init__(self, dim: int = 24, classes: int = 4) -> None:
        super().__init__()
        self.patches, self.head = nn.Conv2d(1, dim, 4, stride=4), nn.Linear(dim, classes)
        self.norms = nn.ModuleList(nn.LayerNorm(dim) for _ in range(5))
        self.places = nn.ModuleList(mlp(16, 32, 16, act=nn.GELU) for _ in range(2))
        self.channels = nn.ModuleList(mlp(dim, 48, dim, act=nn.GELU) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).mT
        for index in range(2):
            x = x + self.places[index](self.norms[2 * index](x).mT).mT
            x = x + self.channels[index](self.norms[2 * index + 1](x))
        return self.head(self.norms[4](x).mean(dim=1))


class Points(nn.Module):
    """A cloud of points in any order; the largest of each feature is kept."""

    def __init__(self) -> None:
        super().__init__()
        self.each, self.all = mlp(3, 32, 32), mlp(32, 32, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.all(self.each(x).amax(dim=1))


def clouds() -> data.Batches:
    """Clouds of four shapes."""
    shapes = torch.tensor([[1.0, 1.0, 1.0], [2.0, 0.5, 0.5], [0.5, 2.0, 0.5], [0.5, 0.5, 2.0]])

    def batch(_: int) -> Batch:
        labels = torch.randint(0, 4, (32,))
        return torch.randn(32, 16, 3) * shapes[labels][:, None], labels

    return batch


class Pointer(nn.Module):
    """Which of the places in a sequence is asked for."""

    def __init__(self, dim: int = 24) -> None:
        super().__init__()
        self.memory = nn.LSTM(1, dim, batch_first=True, bidirectional=True)
        self.keys, self.query, self.score = nn.Linear(2 * dim, dim), nn.Linear(2 * dim, dim), nn.Linear(dim, 1, bias=False)  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        states = self.memory(x)[0]
        return self.score(torch.tanh(self.keys(states) + self.query(states[:, -1:])))[..., 0]


def largest(_: int) -> Batch:
    x = torch.randn(32, 8, 1)
    return x, x[..., 0].argmax(dim=1)


class Hyper(nn.Module):
    """One network writes the weights of another."""

    def __init__(self) -> None:
        super().__init__()
        self.writer = mlp(4, 32, 16 * 4 + 16 + 16)

    def forward(self, x: Tensor, task: Tensor) -> Tensor:
        inner, bias, outer = self.writer(task).split([64, 16, 16], dim=1)
        hidden = torch.relu(torch.einsum("nij,nj->ni", inner.view(-1, 16, 4), x) + bias)
        return (hidden * outer).sum(dim=1) / 4


def in_tasks(_: int) -> Batch:
    x, task = torch.randn(32, 4), torch.randn(32, 4)
    return x, task, torch.tanh((x * task).sum(dim=1))


def for_tasks(model: nn.Module, x: Tensor, task: Tensor, y: Tensor) -> Tensor:
    return functional.mse_loss(model(x, task), y)


class Remembering(nn.Module):
    """A transformer that also attends to the segment before; of that, nothing is differentiated."""

    def __init__(self, dim: int = 24) -> None:
        super().__init__()
        self.tokens, self.norm, self.head = nn.Embedding(24, dim), nn.LayerNorm(dim), nn.Linear(dim, 24)
        self.queries, self.keys, self.values, self.out = (nn.Linear(dim, dim) for _ in range(4))
        self.mlp = mlp(dim, 48, dim, act=nn.GELU)
        self.before: Tensor | None = None

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        seen = x if self.before is None else torch.cat([self.before, x], dim=1)
        self.before = x.detach()
        hidden = torch.ones(x.shape[1], seen.shape[1]).triu(1 + seen.shape[1] - x.shape[1]).bool()
        logits = self.queries(self.norm(x)) @ self.keys(self.norm(seen)).mT / x.shape[2] ** 0.5
        x = x + self.out(logits.masked_fill(hidden, float("-inf")).softmax(dim=-1) @ self.values(self.norm(seen)))
        return self.head(self.norm(x + self.mlp(self.norm(x))))


def streams(size: int = 8, length: int = 16) -> data.Batches:
    """Text that goes on from batch to batch."""
    x, y = data.sentences(size, length=length * 240)(0)
    return lambda step: (x[:, (at := length * ((step - 1) % 240)) : at + length], y[:, at : at + length])


class Carried(nn.Module):
    """An LSTM whose last state begins the next batch."""

    def __init__(self, dim: int = 24) -> None:
        super().__init__()
        self.tokens, self.memory, self.head = nn.Embedding(24, 16), nn.LSTM(16, dim, batch_first=True), nn.Linear(dim, 24)  # fmt: skip
        self.state: tuple[Tensor, ...] | None = None

    def forward(self, tokens: Tensor) -> Tensor:
        states, last = self.memory(self.tokens(tokens), self.state)
        self.state = tuple(part.detach() for part in last)
        return self.head(states)


class Operator(nn.Module):
    """A map of functions, in frequencies: complex weights."""

    def __init__(self, width: int = 8, modes: int = 8) -> None:
        super().__init__()
        self.lift, self.lower, self.modes = nn.Linear(1, width), nn.Linear(width, 1), modes
        self.waves = nn.ParameterList(torch.randn(modes, width, width, dtype=torch.cfloat) / width for _ in range(2))
        self.local = nn.ModuleList(nn.Linear(width, width) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.lift(x)
        for waves, local in zip(self.waves, self.local, strict=True):
            spectrum = torch.fft.rfft(x, dim=1)[:, : self.modes]
            mixed = torch.einsum("nkc,kcd->nkd", spectrum, waves)
            x = functional.gelu(torch.fft.irfft(mixed, n=x.shape[1], dim=1) + local(x))
        return self.lower(x)


def shifted(_: int) -> Batch:
    """Smooth functions, and the same ones moved and squared."""
    at = torch.linspace(0, 2 * torch.pi, 33)[:-1]
    x = sum(torch.randn(16, 1) * torch.sin(k * at + 6 * torch.rand(16, 1)) / k for k in range(1, 5))[..., None]
    return x, 0.5 * x.roll(4, dims=1) ** 2


class Equilibrium(nn.Module):
    """A layer is applied until nothing changes; only the last time is differentiated."""

    def __init__(self, dim: int = 24) -> None:
        super().__init__()
        self.inner, self.inputs, self.head = nn.Linear(dim, dim), nn.Linear(12, dim), nn.Linear(dim, 4)

    def forward(self, x: Tensor) -> Tensor:
        given = self.inputs(x)
        with torch.no_grad():
            state = torch.zeros_like(given)
            for _ in range(15):
                state = torch.tanh(self.inner(state) + given)
        return self.head(torch.tanh(self.inner(state) + given))


class _Spike(torch.autograd.Function):
    @staticmethod
    def forward(context: object, x: Tensor) -> Tensor:
        context.save_for_backward(x)  # type: ignore[attr-defined]
        return (x > 0).float()

    @staticmethod
    def backward(context: object, grad: Tensor) -> Tensor:  # type: ignore[override]
        (x,) = context.saved_tensors  # type: ignore[attr-defined]
        return grad / (1 + 5 * x.abs()) ** 2


class Spiking(nn.Module):
    """Neurons that leak and fire over eight steps; a smooth slope stands for the jump."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(12, 48), nn.Linear(48, 4)

    def forward(self, x: Tensor) -> Tensor:
        current, charge, total = self.inner(x), torch.zeros(len(x), 48), torch.zeros(len(x), 4)
        for _ in range(8):
            charge = 0.8 * charge + current
            fired = _Spike.apply(charge - 1.0)
            charge, total = charge - fired, total + self.outer(fired)
        return total / 8
