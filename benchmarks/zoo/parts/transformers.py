"""Models with attention, with the data and the losses that are their own."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..loop import Batch
from . import data
from .dense import mlp


class Attention(nn.Module):
    """Causal or full attention; `scale` multiplies the logits."""

    def __init__(self, dim: int, heads: int = 2, *, causal: bool = True) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.heads, self.causal, self.scale = heads, causal, 1.0

    def forward(self, x: Tensor) -> Tensor:
        batch, length, dim = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, dim // self.heads).permute(2, 0, 3, 1, 4)
        logits = self.scale * q @ k.mT / (dim // self.heads) ** 0.5
        if self.causal:
            logits = logits.masked_fill(torch.ones(length, length).triu(1).bool(), float("-inf"))
        return self.out((logits.softmax(dim=-1) @ v).transpose(1, 2).reshape(batch, length, dim))


class Block(nn.Module):
    """A transformer block, norm first or last."""

    def __init__(self, dim: int, *, causal: bool = True, norm_first: bool = True, mlp: nn.Module | None = None) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attention = Attention(dim, causal=causal)
        self.mlp = mlp or nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))
        self.norm_first = norm_first

    def forward(self, x: Tensor) -> Tensor:
        if self.norm_first:
            x = x + self.attention(self.norm1(x))
            return x + self.mlp(self.norm2(x))
        x = self.norm1(x + self.attention(x))
        return self.norm2(x + self.mlp(x))


class Transformer(nn.Module):
    """Tokens to logits of the next token."""

    def __init__(
        self,
        vocabulary: int = 24,
        *,
        dim: int = 24,
        depth: int = 2,
        length: int = 16,
        tied: bool = False,
        **block: object,
    ) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, dim), nn.Embedding(length, dim)
        nn.init.normal_(self.tokens.weight, std=0.1)
        nn.init.normal_(self.places.weight, std=0.1)
        self.blocks = nn.ModuleList(Block(dim, **block) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, vocabulary, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class PatchTransformer(nn.Module):
    """Images as 4 x 4 patches."""

    def __init__(self, *, dim: int = 24, classes: int = 4, depth: int = 2) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, dim, 4, stride=4)
        self.blocks = nn.Sequential(*(Block(dim, causal=False) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.patches(x).flatten(2).mT)).mean(dim=1))


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


def turned(x: Tensor) -> Tensor:
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
            q, k = turned(q), turned(k)
        logits = q @ k.mT / q.shape[-1] ** 0.5
        if self.causal:
            logits = logits.masked_fill(torch.ones(logits.shape[-2:]).triu(1).bool(), float("-inf"))
        return self.out((self.logits(logits).softmax(dim=-1) @ v).transpose(1, 2).flatten(2))


class SwiGLU(nn.Module):
    """A product of two branches, one through SiLU."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.gate = nn.Linear(dim, 2 * dim, bias=False)
        self.up = nn.Linear(dim, 2 * dim, bias=False)
        self.down = nn.Linear(2 * dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(functional.silu(self.gate(x)) * self.up(x))


class Layer(nn.Module):
    """Attention and what follows it, each after a norm."""

    def __init__(self, dim: int, inner: nn.Module, *, norm: type[nn.Module] = nn.LayerNorm, **heads: bool) -> None:
        super().__init__()
        self.norm1, self.norm2, self.attention, self.inner = norm(dim), norm(dim), Heads(dim, **heads), inner

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.inner(self.norm2(x))


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


@data.anew
def which_first(size: int = 32) -> Batch:
    """Whether word 1 comes before word 2 among 10 to 12 words; words 15 to 19 never come."""
    tokens, label = torch.randint(3, 15, (size, 12)), torch.randint(0, 2, (size,))
    first, second = torch.randint(0, 5, (size,)), torch.randint(5, 10, (size,))
    rows = torch.arange(size)
    tokens[rows, first], tokens[rows, second] = 1 + label, 2 - label
    return tokens, torch.randint(10, 13, (size,)), label


class Modular(nn.Module):
    """Two numbers are added modulo 11 by a small transformer, norm first."""

    def __init__(self, dim: int = 32) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(12, dim), nn.Embedding(3, dim)
        self.blocks = nn.Sequential(*(Block(dim, causal=False) for _ in range(2)))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, 11)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.tokens(tokens) + self.places(torch.arange(3)))[:, -1]))


@data.anew
def added(size: int = 64) -> Batch:
    pair = torch.randint(0, 11, (size, 2))
    return torch.cat([pair, torch.full((size, 1), 11)], dim=1), pair.sum(dim=1) % 11


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


@data.given(lambda: torch.randn(3, 2) / 2)
def plans(turn: Tensor, size: int = 16) -> Batch:
    """Six steps; the action is the state, turned, times the return that is still to come."""
    states, returns = torch.randn(size, 6, 3), torch.rand(size, 6, 1)
    return returns, states, returns * (states @ turn) + 0.1 * torch.randn(size, 6, 2)


def planned(model: nn.Module, returns: Tensor, states: Tensor, actions: Tensor) -> Tensor:
    return (model(returns, states, actions) - actions).square().mean()


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
