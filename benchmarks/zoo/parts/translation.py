"""Encoders and decoders: sequences that are said again in another way."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..loop import Batch, Loop
from . import data


class Echo(nn.Module):
    """An encoder's last state begins a decoder, which is given the right words so far: the source's, if no others."""

    def __init__(self, tokens: int = 13, inputs: int = 16, dim: int = 32, outputs: int = 12) -> None:
        super().__init__()
        self.tokens, self.start = nn.Embedding(tokens, inputs), tokens - 1
        self.encoder, self.decoder = nn.GRU(inputs, dim, batch_first=True), nn.GRU(inputs, dim, batch_first=True)
        self.head = nn.Linear(dim, outputs)

    def forward(self, source: Tensor, target: Tensor | None = None) -> Tensor:
        state = self.encoder(self.tokens(source))[1]
        begun = functional.pad(source if target is None else target, (1, 0), value=self.start)[:, :-1]
        return self.head(self.decoder(self.tokens(begun), state)[0])


@data.anew
def mirrored_words() -> Batch:
    source = torch.randint(0, 12, (24, 5))
    return source, source.flip(1)


class Speaker(nn.Module):
    """An encoder's state begins a decoder, which is given the right words so far."""

    def __init__(self, kind: type[nn.Module], words: int = 10, dim: int = 32) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(words + 1, 16), nn.Linear(dim, words)
        self.encoder, self.decoder, self.words = kind(16, dim, batch_first=True), kind(16, dim, batch_first=True), words

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        begun = functional.pad(target, (1, 0), value=self.words)[:, :-1]
        return self.head(self.decoder(self.tokens(begun), self.encoder(self.tokens(source))[1])[0])


@data.anew
def spoken(aim: str, size: int) -> Batch:
    """Words, and the same words sorted or mirrored."""
    source = torch.randint(0, 10, (size, 6))
    return source, source.sort(dim=1).values if aim == "sorted" else 9 - source.flip(1)


class Sampled(nn.Module):
    """Encoder and decoder with attention; ever more of what the decoder reads is what it said itself."""

    def __init__(self, words: int = 10, dim: int = 32) -> None:
        super().__init__()
        self.tokens, self.logits = nn.Embedding(words + 1, dim), nn.Identity()
        self.encoder, self.decoder = nn.GRU(dim, dim, batch_first=True), nn.GRUCell(2 * dim, dim)
        self.head, self.own, self.words = nn.Linear(2 * dim, words), 0.0, words

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        keys, state = self.encoder(self.tokens(source))
        state, word, said = state[0], torch.full((len(source),), self.words), []
        for place in range(target.shape[1]):
            share = self.logits((keys @ state[:, :, None])[:, :, 0]).softmax(dim=1)
            context = (share[:, :, None] * keys).sum(dim=1)
            state = self.decoder(torch.cat([self.tokens(word), context], dim=1), state)
            said.append(self.head(torch.cat([state, context], dim=1)))
            word = torch.where(torch.rand(len(source)) < self.own, said[-1].argmax(dim=1), target[:, place])
        return torch.stack(said, dim=1)


@data.anew
def reversed_words(size: int = 32) -> Batch:
    source = torch.randint(0, 10, (size, 6))
    return source, source.flip(1)


def hears_itself(loop: Loop, step: int) -> None:
    """Ever more of what the decoder reads is what it said itself."""
    loop.model.own = min(0.5, step / 200)


@data.anew
def words_to_repeat() -> Batch:
    words = torch.randint(0, 6, (32, 6))
    return words, words


def translated(model: nn.Module, source: Tensor, target: Tensor) -> Tensor:
    """Teacher forcing: each word of the target is told the one before it."""
    before = functional.pad(target[:, :-1], (1, 0))
    return functional.cross_entropy(model(source, before).flatten(0, 1), target.flatten())


class LookingBack(nn.Module):
    """A recurrence reads, another one writes, and looks back by dot products of `heat`."""

    def __init__(self, words: int = 16, dim: int = 24) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(words, dim), nn.Embedding(words, dim)
        self.reader, self.writer = nn.GRU(dim, dim, batch_first=True), nn.GRU(dim, dim, batch_first=True)
        self.read, self.mixed, self.head = nn.Identity(), nn.Linear(2 * dim, dim), nn.Linear(dim, words)
        self.heat = dim**-0.5

    def forward(self, source: Tensor, before: Tensor) -> Tensor:
        states = self.read(self.reader(self.source(source))[0])
        written = self.writer(self.target(before), states[:, -1][None].contiguous())[0]
        logits = (self.heat * written @ states.mT).masked_fill(source[:, None] < 0, float("-inf"))
        return self.head(torch.tanh(self.mixed(torch.cat([written, logits.softmax(-1) @ states], -1))))


def backwards(size: int = 24, *, words: int = 16, length: int = 8) -> data.Batches:
    """Words, and their translation backwards."""
    dictionary = torch.randperm(words)

    def batch(_: int) -> Batch:
        source = torch.randint(0, words, (size, length))
        return source, dictionary[source.flip(1)]

    return batch


class BackwardTranslator(nn.Module):
    """A recurrence reads, another writes and looks back; `heard` is what it reads."""

    def __init__(self, words: int = 14, dim: int = 24) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(words, dim), nn.Embedding(words, dim)
        self.reader, self.writer = nn.GRU(dim, dim, batch_first=True), nn.GRU(dim, dim, batch_first=True)
        self.heard, self.head = nn.Linear(dim, dim), nn.Linear(2 * dim, words)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        states = self.heard(self.reader(self.source(source))[0])
        written = self.writer(self.target(functional.pad(target[:, :-1], (1, 0))))[0]
        logits = (written @ states.mT / 24**0.5).masked_fill(source[:, None] == 0, float("-inf"))
        return self.head(torch.cat([written, logits.softmax(-1) @ states], dim=-1))


def padded_reversals(size: int = 24, *, words: int = 14, length: int = 6) -> data.Batches:
    """Sentences of 3 to 6 words, 0 after them, and the same words backwards in another language."""
    dictionary = 1 + torch.randperm(words - 1)

    def batch(_: int) -> Batch:
        source = torch.randint(1, words, (size, length))
        source = source * (torch.arange(length) < torch.randint(3, length + 1, (size, 1)))
        return source, torch.where(source > 0, dictionary[(source - 1).clamp(min=0)], 0).flip(1)

    return batch
