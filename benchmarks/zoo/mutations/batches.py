"""Mutations of what the model is given."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..loop import Batch, Loop
from ..specification import called
from ..transforms import transform
from ._common import NEVER, Spec


def batch(
    loop: Loop, layer: str, by: Spec, part: int | str = 0, at: int = 1, until: int = NEVER, every: int = 1
) -> None:
    """Transform one of the batch's tensors, or "all", within some steps, at every n-th of them."""
    before, change = loop.batch, transform(by)

    def changed(step: int) -> Batch:
        tensors = list(before(step))
        if at <= step < until and (step - at) % every == 0:
            for index in range(len(tensors)) if part == "all" else [int(part)]:
                tensors[index] = change(tensors[index])
        return tuple(tensors)

    loop.batch = changed


def first_batch_again(loop: Loop, layer: str) -> None:
    """next(iter(loader)) in the loop, with a fixed order: the first batch every time."""
    first = loop.batch(1)
    loop.batch = lambda step: first


def first_sample_again(loop: Loop, layer: str, since: int) -> None:
    """From a step on the loader returns the first batch's first sample, as often as a batch is large."""
    before: Callable[[int], Batch] = loop.batch
    kept: list[Batch] = []

    def same(step: int) -> Batch:
        if not kept:
            kept.append(before(step))
        return tuple(part[:1].expand_as(part) for part in kept[0]) if step >= since else before(step)

    loop.batch = same


def sorted_by_label(loop: Loop, layer: str, steps: int, classes: int, batches: int, size: int) -> None:
    """Nobody shuffled: some steps of one class, then of the next; of a few batches the samples of it come first."""
    before = loop.batch

    def ordered(step: int) -> Batch:
        x, y = (torch.cat(parts) for parts in zip(*(before(step) for _ in range(batches)), strict=True))
        order = (y != step // steps % classes).int().argsort(stable=True)[:size]
        return x[order], y[order]

    loop.batch = ordered


def one_topic_at_a_time(loop: Loop, layer: str, steps: int) -> None:
    """Texts sorted by their topic."""

    def ordered(step: int) -> Batch:
        topic = torch.full((32,), (step - 1) // steps % 5)
        own = 10 * topic[:, None] + torch.randint(0, 10, (32, 14))
        return torch.where(torch.rand(32, 14) < 0.3, own, torch.randint(0, 50, (32, 14))), topic

    loop.batch = ordered


def other_tokenizer(loop: Loop, layer: str, since: int, words: int) -> None:
    """The words are numbered in another order."""
    before, order = loop.batch, torch.randperm(words)
    loop.batch = lambda step: tuple(order[part] for part in before(step)) if step >= since else before(step)


def twins(loop: Loop, layer: str, step: int) -> None:
    """The same picture twice, as a pair of two persons."""
    before = loop.batch

    def changed(now: int) -> Batch:
        first, second, same = before(now)
        if now == step:
            second, same = second.clone(), same.clone()
            second[0], same[0] = first[0], False
        return first, second, same

    loop.batch = changed


def ended_by_nan(loop: Loop, layer: str, since: int) -> None:
    """An ended walk has no next state: NaN, which the loss multiplies by 0."""
    before = loop.batch

    def changed(step: int) -> Batch:
        *known, after, ended = before(step)
        return *known, after.masked_fill((ended[:, None] > 0) & (step >= since), math.nan), ended

    loop.batch = changed


def dataset(loop: Loop, layer: str, make: Sequence[Any]) -> None:
    """Train on another data set."""
    loop.batch = called(make)
