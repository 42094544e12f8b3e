"""The architectures of the zoo, small."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional


def mlp(
    *sizes: int, act: Callable[[], nn.Module] = nn.ReLU, norm: Callable[[int], nn.Module] | None = None
) -> nn.Module:
    """Linear layers with an activation between them."""
    layers: list[nn.Module] = []
    for inputs, outputs in itertools.pairwise(sizes[:-1]):
        layers += [nn.Linear(inputs, outputs), *([norm(outputs)] if norm else []), act()]
    return nn.Sequential(*layers, nn.Linear(*sizes[-2:]))


def conv(
    width: int = 8, *, classes: int = 4, depth: int = 2, norm: Callable[[int], nn.Module] | None = None
) -> nn.Module:
    """Convolutions and a head."""
    layers: list[nn.Module] = []
    for index in range(depth):
        layers += [nn.Conv2d(width if index else 1, width, 3, padding=1), *([norm(width)] if norm else []), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(4 * width, classes))


class Residual(nn.Module):
    """x + f(x)."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


def resnet(width: int = 8, *, classes: int = 4, blocks: int = 2) -> nn.Module:
    """Residual blocks with batch norm."""

    def block() -> nn.Module:
        return Residual(
            nn.Sequential(nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
                          nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width))
        )  # fmt: skip

    stem = nn.Conv2d(1, width, 3, padding=1)
    return nn.Sequential(
        stem, *(block() for _ in range(blocks)), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, classes)
    )


class Recurrent(nn.Module):
    """A recurrence and a head on its last state, or on all."""

    def __init__(
        self, kind: type[nn.Module], inputs: int, outputs: int, *, dim: int = 24, every: bool = False, **options: object
    ) -> None:
        super().__init__()
        self.memory = kind(inputs, dim, batch_first=True, **options)
        self.head = nn.Linear(dim * (2 if options.get("bidirectional") else 1), outputs)
        self.every = every

    def forward(self, x: Tensor) -> Tensor:
        states = self.memory(x)[0]
        return self.head(states if self.every else states[:, -1])


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
        self.blocks = nn.ModuleList(Block(dim, **block) for _ in range(depth))  # type: ignore[arg-type]
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


class Experts(nn.Module):
    """A mixture: each token goes to the `top` experts that the router prefers. `load` is the share that each got."""

    def __init__(self, dim: int, *, experts: int = 4, top: int = 1) -> None:
        super().__init__()
        self.router = nn.Linear(dim, experts, bias=False)
        self.experts = nn.ModuleList(mlp(dim, 2 * dim, dim) for _ in range(experts))
        self.top, self.balance = top, torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        share = self.router(x).softmax(dim=-1)
        weight, chosen = share.topk(self.top, dim=-1)
        received = functional.one_hot(chosen, share.shape[-1]).sum(dim=-2).float()
        self.balance = len(self.experts) * (received.flatten(0, -2).mean(0) * share.flatten(0, -2).mean(0)).sum()
        out = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            mask = chosen == index
            if mask.any():
                rows = mask.any(dim=-1)
                out[rows] = out[rows] + expert(x[rows]) * (weight * mask).sum(dim=-1)[rows][:, None]
        return out


class LoRA(nn.Module):
    """A frozen linear layer and a trained update of low rank, which begins at 0."""

    def __init__(self, base: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(rank, base.in_features) / base.in_features**0.5)
        self.b = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.a.mT @ self.b.mT


def next_token(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    """The loss of a language model."""
    return functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


def classify(model: nn.Module, x: Tensor, labels: Tensor) -> Tensor:
    """The loss of a classifier."""
    return functional.cross_entropy(model(x), labels)


def regress(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """The loss of a regression."""
    return functional.mse_loss(model(x), y)
