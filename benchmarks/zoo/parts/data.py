"""Small synthetic data sets that can be learned. Everything is drawn from torch's global generator."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec

import torch
from torch import Tensor
from torch.nn import functional

from ..loop import Batch

Batches = Callable[[int], Batch]


_P = ParamSpec("_P")


def anew(make: Callable[_P, Batch]) -> Callable[_P, Batches]:
    """A data set each of whose batches the function draws anew."""

    @functools.wraps(make)
    def with_options(*arguments: _P.args, **options: _P.kwargs) -> Batches:
        return lambda step: make(*arguments, **options)

    return with_options


def given(draw: Callable[[], Any]) -> Callable[[Callable[..., Batch]], Callable[..., Batches]]:
    """As `anew`, of a function whose first arguments are what `draw` returns: it is called once per data set."""

    def decorated(make: Callable[..., Batch]) -> Callable[..., Batches]:
        @functools.wraps(make)
        def with_options(*arguments: Any, **options: Any) -> Batches:
            found = draw()
            known = found if isinstance(found, tuple) else (found,)
            return lambda step: make(*known, *arguments, **options)

        return with_options

    return decorated


@anew
def drawn(*tensors: Tensor, size: int = 32) -> Batch:
    """Batches drawn at random from a data set."""
    chosen = torch.randint(0, len(tensors[0]), (size,))
    return tuple(tensor[chosen] for tensor in tensors)


def blobs(size: int = 32, *, classes: int = 4, dim: int = 12, noise: float = 1.0, n: int = 1024) -> Batches:
    """Classes around centres."""
    centres, labels = 1.5 * torch.randn(classes, dim), torch.randint(0, classes, (n,))
    return drawn(centres[labels] + noise * torch.randn(n, dim), labels, size=size)


def rare_class(size: int = 32, *, share: float = 0.03, dim: int = 10) -> Batches:
    """Two classes, one of them rare."""
    labels = (torch.rand(4096) < share).long()
    return drawn(torch.randn(4096, dim) + 1.2 * labels[:, None], labels, size=size)


def curve(size: int = 32, *, dim: int = 8, noise: Callable[[int], Tensor] | None = None, n: int = 2048) -> Batches:
    """A smooth function of a few numbers, with noise: [N, 1]."""
    x, w = torch.randn(n, dim), torch.randn(dim, 2) / dim**0.5
    y = torch.sin(2 * x @ w[:, :1]) + (x @ w[:, 1:]) ** 2 / 2
    return drawn(x, y + (0.1 * torch.randn(n, 1) if noise is None else noise(n)[:, None]), size=size)


def images(size: int = 16, *, classes: int = 4, side: int = 8, noise: float = 0.7, n: int = 512) -> Batches:
    """Noisy copies of smooth templates: [N, 1, side, side]."""
    templates = functional.interpolate(2 * torch.randn(classes, 1, 4, 4), size=(side, side), mode="bilinear")
    labels = torch.randint(0, classes, (n,))
    return drawn(templates[labels] + noise * torch.randn(n, 1, side, side), labels, size=size)


def sentences(size: int = 8, *, vocabulary: int = 24, length: int = 16, zipf: float = 0.0, n: int = 4000) -> Batches:
    """Text of a Markov chain, and the same one token on; with `zipf` some tokens are rare."""
    likely = torch.softmax(2.0 * torch.randn(vocabulary, vocabulary), dim=1)
    likely = likely * torch.arange(1, vocabulary + 1).float() ** -zipf
    noise = torch.log(likely) - torch.log(-torch.log(torch.rand(n, vocabulary, vocabulary).clamp(1e-9, 1 - 1e-9)))
    step, text = noise.argmax(dim=2).tolist(), [0]
    for row in step:
        text.append(row[text[-1]])
    tokens = torch.tensor(text)

    def batch(_: int) -> Batch:
        starts = torch.randint(0, len(tokens) - length - 1, (size,))
        windows = tokens[starts[:, None] + torch.arange(length + 1)]
        return windows[:, :-1], windows[:, 1:]

    return batch


@anew
def sums(size: int = 16, *, length: int = 16) -> Batch:
    """Sequences of numbers and their sum: [N, T, 1] and [N, 1]."""
    x = torch.randn(size, length, 1)
    return x, x.sum(dim=1) / length**0.5


@anew
def recall(size: int = 16, *, length: int = 12, classes: int = 4) -> Batch:
    """The first token is asked for at the end: [N, T, classes] and [N]."""
    tokens = torch.randint(0, classes, (size, length))
    return functional.one_hot(tokens, classes).float(), tokens[:, 0]


def points(size: int = 32, *, modes: int = 6, dim: int = 2) -> Batches:
    """Points around the corners of a polygon: what generative models draw."""
    angles = 2 * torch.pi * torch.arange(modes) / modes
    centres = torch.stack([angles.cos(), angles.sin()], dim=1) @ torch.randn(2, dim)

    def batch(_: int) -> Batch:
        return (centres[torch.randint(0, modes, (size,))] + 0.1 * torch.randn(size, dim),)

    return batch


def pairs(size: int = 16, *, dim: int = 12, classes: int = 6) -> Batches:
    """Two noisy views of the same thing, and its class."""
    centres = 2 * torch.randn(classes, dim)

    def batch(_: int) -> Batch:
        labels = torch.randint(0, classes, (size,))
        thing = centres[labels] + torch.randn(size, dim)
        return thing + 0.3 * torch.randn(size, dim), thing + 0.3 * torch.randn(size, dim), labels

    return batch


def places(size: int, length: float) -> Batches:
    """Numbers from 0 to a length."""
    return lambda step: (length * torch.rand(size, 1),)


def whole(make: Callable[[], Batch]) -> Callable[[], Batches]:
    """A data set that is drawn once, all of which is every batch."""
    return given(make)(lambda *batch: batch)


def exact_line() -> Batches:
    """A linear function: a linear map fits it to rounding."""
    x, w = torch.randn(256, 8), torch.randn(8, 1)
    return drawn(x, x @ w)


@whole
def squashed_line() -> Batch:
    x = torch.randn(128, 6)
    return x, torch.tanh(x @ torch.randn(6, 1))


@whole
def signs() -> Batch:
    x = torch.randn(64, 8)
    return x, torch.sign(x[:, :1]) * 0.5


@whole
def sines_of_sums() -> Batch:
    x = torch.randn(256, 8)
    return x, torch.sin(x @ torch.randn(8, 1) / 2)


@whole
def products() -> Batch:
    x = torch.randn(100, 6)
    return x, (x[:, :1] * x[:, 1:2]).tanh() + 0.5 * x[:, 2:3]


@whole
def two_noisy_classes() -> Batch:
    x = torch.randn(200, 10)
    return x, ((x @ torch.randn(10)) + torch.randn(200) > 0).float()


@whole
def sums_modulo_23() -> Batch:
    """A third of all sums."""
    a, b = torch.meshgrid(torch.arange(23), torch.arange(23), indexing="ij")
    known = torch.randperm(23 * 23)[:180]
    return torch.stack([a.flatten(), b.flatten()], dim=1)[known], ((a + b) % 23).flatten()[known]


def labelled_noise() -> Batches:
    """64 samples that say nothing of their labels."""
    return drawn(torch.randn(64, 10), torch.randint(0, 3, (64,)))


def hard_now_and_then() -> Batches:
    """Now and then a hard batch; its loss is ten times the usual one, and the next one is as before."""
    batch, hard = curve(), curve(noise=lambda n: 3.0 * torch.randn(n))
    return lambda step: hard(step) if step % 23 == 0 else batch(step)
