"""Models of texts, with their data and losses."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from ..loop import Batch, Loop, supervised
from . import data
from .dense import mlp
from .losses import classify
from .optimizers import Orthogonal
from .schedules import cosine
from .transformers import Attention, Layer, SwiGLU, Transformer


def masked_tokens(model: nn.Module, tokens: Tensor, _: Tensor) -> Tensor:
    """15 % of the tokens are hidden and predicted."""
    hidden = torch.rand(tokens.shape) < 0.15
    hidden[0, 0] = True
    return functional.cross_entropy(model(tokens.masked_fill(hidden, 0))[hidden], tokens[hidden])


def padded(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    """Sentences of different lengths; the rest does not count."""
    lengths = torch.randint(2, tokens.shape[1] + 1, (len(tokens), 1))
    ignored = targets.masked_fill(torch.arange(tokens.shape[1]) >= lengths, -100)
    return functional.cross_entropy(model(tokens).flatten(0, 1), ignored.flatten())


def preference() -> Loop:
    """DPO: the difference to a frozen copy, on pairs of sentences."""
    model = Transformer(depth=1)
    reference = copy.deepcopy(model).requires_grad_(False)

    def log_p(model: nn.Module, tokens: Tensor) -> Tensor:
        return -functional.cross_entropy(model(tokens[:, :-1]).mT, tokens[:, 1:], reduction="none").sum(dim=1)

    def loss(model: nn.Module, better: Tensor, _: Tensor) -> Tensor:
        worse = torch.randint_like(better, 24)
        margin = log_p(model, better) - log_p(reference, better) - log_p(model, worse) + log_p(reference, worse)
        return -functional.logsigmoid(0.1 * margin).mean()

    return supervised(model, data.sentences(), loss, lr=1e-3, steps=150)


def two_optimizers() -> Loop:
    """Muon for the matrices of the blocks, AdamW for the rest, one after the other."""
    model = Transformer()
    matrices = [p for name, p in model.named_parameters() if "blocks" in name and p.dim() == 2]
    others = [p for name, p in model.named_parameters() if not ("blocks" in name and p.dim() == 2)]
    return Loop(
        model, data.sentences(), classify, [Orthogonal(matrices), torch.optim.AdamW(others, lr=3e-3)], steps=120
    )


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


class Recomputed(Transformer):
    """Activations of the blocks are computed again in the backward."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(self.norm(x))


class Language(nn.Module):
    """Tokens to logits of the next token: with learned places and tied weights, or as the rotary ones do it."""

    def __init__(self, layers: list[nn.Module], dim: int = 32, *, tied: bool, words: int = 24) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(words, dim), nn.Embedding(32, dim) if tied else None
        self.layers, self.norm = nn.Sequential(*layers), nn.LayerNorm(dim) if tied else nn.RMSNorm(dim)
        self.head = nn.Linear(dim, words, bias=False)
        if tied:
            nn.init.normal_(self.tokens.weight, std=0.3)
            self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        if self.places is not None:
            x = x + self.places(torch.arange(tokens.shape[1]))
        return self.head(self.norm(self.layers(x)))


def rotary(depth: int = 3, dim: int = 32) -> Language:
    layers = [Layer(dim, SwiGLU(dim), norm=nn.RMSNorm, causal=True, rotary=True) for _ in range(depth)]
    return Language(layers, dim, tied=False)


def tied(dim: int = 32) -> Language:
    def inner() -> nn.Module:
        return nn.Sequential(mlp(dim, 4 * dim, dim, act=nn.GELU), nn.Dropout(0.1))

    return Language([Layer(dim, inner(), causal=True) for _ in range(2)], dim, tied=True)


@data.anew
def ladders(size: int = 32) -> Batch:
    """Texts that climb by one, two or three words at a time."""
    first, by = torch.randint(0, 24, (size, 1)), torch.randint(1, 4, (size, 1))
    return ((first + by * torch.arange(16)) % 24,)


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


def small_gpt() -> Loop:
    """Decay on matrices alone, four batches per step, warm-up and cosine, all clipped to 1."""
    model = Transformer(depth=3)
    groups = [
        {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=4e-3, betas=(0.9, 0.95))
    return Loop(
        model, data.sentences(4), classify, [optimizer], schedule=cosine(120, 15), clip=1.0, accumulate=4, steps=120
    )


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


class GatedLanguage(nn.Module):
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


class HiddenWords(nn.Module):
    """Encoder blocks of torch's own, norm first; the words' vectors say the words too."""

    def __init__(self, words: int = 20, dim: int = 24) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, dim), nn.Parameter(0.02 * torch.randn(12, dim))
        nn.init.normal_(self.words.weight, std=0.2)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(dim, 3, 48, 0.0, batch_first=True, norm_first=True) for _ in range(2)
        )
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, words)

    def forward(self, words: Tensor) -> Tensor:
        x = self.words(words) + self.places
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


@data.anew
def ramps(size: int = 24, share: float = 0.2) -> Batch:
    """Ramps of words, some of which are replaced by word 0; the aim is -100 where nothing was replaced."""
    words = 1 + (torch.randint(0, 19, (size, 1)) + torch.arange(12) * torch.randint(1, 4, (size, 1))) % 19
    hidden = torch.rand(size, 12) < share
    return words.masked_fill(hidden, 0), words.masked_fill(~hidden, -100)


def rotated(x: Tensor) -> Tensor:
    """Rotary places of [..., T, D]."""
    half = x.shape[-1] // 2
    angles = torch.arange(x.shape[-2])[:, None] * 100.0 ** (-torch.arange(half) / half)
    first, second, cos, sin = x[..., :half], x[..., half:], angles.cos(), angles.sin()
    return torch.cat([first * cos - second * sin, first * sin + second * cos], dim=-1)


class RotaryAttention(nn.Module):
    """Causal attention with rotary places; `heat` multiplies the logits."""

    def __init__(self, dim: int, heads: int = 2) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.heads, self.heat = heads, (dim // heads) ** -0.5

    def forward(self, x: Tensor) -> Tensor:
        batch, length, dim = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        logits = self.heat * rotated(q) @ rotated(k).mT
        logits = logits.masked_fill(torch.ones(length, length).triu(1).bool(), float("-inf"))
        return self.out((logits.softmax(-1) @ v).transpose(1, 2).reshape(batch, length, dim))


class HalfGated(nn.Module):
    """SwiGLU."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(dim, 4 * dim, bias=False), nn.Linear(2 * dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.up(x).chunk(2, dim=-1)
        return self.down(functional.silu(gate) * value)


class Decoder(nn.Module):
    """A language model: RMSNorm first, rotary attention, SwiGLU, tied embedding."""

    def __init__(self, words: int = 24, dim: int = 32, depth: int = 2, std: float = 0.1) -> None:
        super().__init__()
        self.words = nn.Embedding(words, dim)
        nn.init.normal_(self.words.weight, std=std)
        self.attentions = nn.ModuleList(RotaryAttention(dim) for _ in range(depth))
        self.gated = nn.ModuleList(HalfGated(dim) for _ in range(depth))
        self.norms = nn.ModuleList(nn.RMSNorm(dim) for _ in range(2 * depth + 1))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens)
        for index, (attention, gated) in enumerate(zip(self.attentions, self.gated, strict=True)):
            x = x + attention(self.norms[2 * index](x))
            x = x + gated(self.norms[2 * index + 1](x))
        return self.norms[-1](x) @ self.words.weight.mT


def phrases(size: int = 8, *, words: int = 24, length: int = 8) -> data.Batches:
    """Phrases that are said twice; frequent and rare words. Tokens, and the same one token on."""
    often = 1 / torch.arange(1, words + 1)

    def batch(_: int) -> Batch:
        phrase = torch.multinomial(often, size * length, replacement=True).view(size, length)
        tokens = torch.cat([phrase, phrase], dim=1)
        return tokens[:, :-1], tokens[:, 1:]

    return batch
