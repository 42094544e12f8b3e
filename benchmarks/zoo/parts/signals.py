"""Models of series and sounds, with their data."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations

from ..loop import Batch
from . import data
from .dense import mlp
from .transformers import Attention, Layer


class Tagger(nn.Module):
    """Convolutions over time, then one attention layer."""

    def __init__(self, inputs: int, classes: int, dim: int = 24) -> None:
        super().__init__()
        self.conv = nn.Conv1d(inputs, dim, 3, padding=1)
        self.attention = Attention(dim, causal=False)
        self.head = nn.Linear(dim, classes)

    def forward(self, x: Tensor) -> Tensor:
        h = functional.gelu(self.conv(x.mT).mT)
        return self.head((h + self.attention(h)).mean(dim=1))


class Keywords(nn.Module):
    """A waveform in frames, a recurrence over them, a word."""

    def __init__(self) -> None:
        super().__init__()
        self.frames, self.memory = nn.Conv1d(1, 16, 8, stride=4), nn.GRU(16, 24, batch_first=True)
        self.head = nn.Linear(24, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.memory(torch.relu(self.frames(x)).mT)[0][:, -1])


@data.anew
def pitches(size: int = 24) -> Batch:
    """Tones of four pitches with noise: [N, 1, 64]."""
    labels, phase = torch.randint(0, 4, (size,)), 2 * torch.pi * torch.rand(size, 1)
    tone = torch.sin(torch.arange(64) * (0.2 + 0.25 * labels[:, None]) + phase)
    return (tone + 0.5 * torch.randn(size, 64))[:, None], labels


class Foreseer(nn.Module):
    """Says which of the batch's signals goes on like this one: three steps ahead."""

    def __init__(self, dim: int = 24) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Conv1d(1, dim, 4, stride=2), nn.ReLU(), nn.Conv1d(dim, dim, 3, stride=2))
        self.memory = nn.GRU(dim, dim, batch_first=True)
        self.ahead = nn.ModuleList(nn.Linear(dim, dim) for _ in range(3))
        self.heat = 1.0

    def forward(self, x: Tensor) -> Tensor:
        seen = self.encoder(x).mT
        state = self.memory(seen[:, :-3])[0][:, -1]
        aim = torch.arange(len(x))
        said = [layer(state) @ seen[:, index - 3].T / self.heat for index, layer in enumerate(self.ahead)]
        return sum(functional.cross_entropy(logits, aim) for logits in said) / 3


@data.anew
def tones(size: int = 16) -> Batch:
    time = torch.arange(32) / 32
    rate, phase = 1 + 7 * torch.rand(size, 1, 1), torch.rand(size, 1, 1)
    return (torch.sin(2 * torch.pi * (rate * time + phase)) + 0.1 * torch.randn(size, 1, 32),)


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


def frequencies(size: int = 32, n: int = 1024) -> data.Batches:
    """Three channels of one of four frequencies, shifted and noisy: [N, 3, 24]."""
    labels, time = torch.randint(0, 4, (n,)), torch.arange(24) / 24
    phase = torch.rand(n, 3, 1)
    x = torch.sin(2 * torch.pi * ((labels[:, None, None] + 1) * time + phase)) + 0.5 * torch.randn(n, 3, 24)
    return data.drawn(x, labels, size=size)


def weight_normed() -> nn.Module:
    layers = [
        nn.Conv1d(2, 16, 3),
        nn.Conv1d(16, 16, 3, dilation=2),
        nn.Conv1d(16, 16, 3, dilation=4),
        nn.Conv1d(16, 1, 1),
    ]
    normed = [parametrizations.weight_norm(layer) for layer in layers]
    return nn.Sequential(normed[0], nn.ReLU(), normed[1], nn.ReLU(), normed[2], nn.ReLU(), normed[3])


@data.anew
def two_series(size: int = 32) -> Batch:
    """What two noisy waves add up to, one step later: [N, 2, 30] and [N, 1, 16]."""
    time = torch.arange(31) / 10
    rate, phase = 1 + torch.rand(size, 2, 1), torch.rand(size, 2, 1)
    x = torch.sin(2 * torch.pi * (rate * time + phase)) + 0.05 * torch.randn(size, 2, 31)
    return x[:, :, :-1], x[:, :, 15:].sum(dim=1, keepdim=True)


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


@data.anew
def sounds(size: int = 8, *, length: int = 32, levels: int = 16) -> Batch:
    """Tones in 16 levels, and the same one sample on."""
    pitch, phase = 0.2 + 0.6 * torch.rand(size, 1), 6.3 * torch.rand(size, 1)
    wave = (pitch * torch.arange(length + 1) + phase).sin() + 0.1 * torch.randn(size, length + 1)
    tokens = ((wave + 1.3) / 2.6 * levels).long().clamp(0, levels - 1)
    return tokens[:, :-1], tokens[:, 1:]


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


@data.anew
def series(size: int = 32) -> Batch:
    """Two waves and a trend: 48 values, and the 8 that follow."""
    phase, slope = 2 * torch.pi * torch.rand(2, size, 1), 0.02 * torch.randn(size, 1)
    time = torch.arange(56)
    x = torch.sin(time / 4 + phase[0]) + 0.5 * torch.sin(time / 2 + phase[1]) + slope * time
    x = x + 0.1 * torch.randn(size, 56)
    return x[:, :48], x[:, 48:]
