"""The catalogue of mutations: what a fault does to a training before it runs. Sets name them, with their parameters.

Each is a function of the training and of the layer of the fault, which a parameter `layer` replaces. `by` is the
specification of a transform; `at` and `until` are the first step and the one after the last.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, Final

from ..loop import Loop
from . import batches, calls, losses, models, optimizers, weights

Mutation = tuple[str, dict[str, Any]]


def mutate(loop: Loop, layer: str, mutations: Sequence[Mutation]) -> None:
    """Apply mutations to a training, one after the other."""
    for kind, options in mutations:
        MUTATIONS[kind](loop, **{"layer": layer} | options)


def at(loop: Loop, layer: str, step: int, do: Sequence[Mutation]) -> None:
    """Apply mutations before a step instead of before the training."""
    loop.before.append(lambda loop, now: mutate(loop, layer, do) if now == step else None)


MUTATIONS: Final[dict[str, Callable[..., None]]] = {"at": at} | {
    name: one
    for module in (optimizers, calls, batches, losses, weights, models)
    for name, one in vars(module).items()
    if inspect.isfunction(one) and one.__module__ == module.__name__ and not name.startswith("_")
}
