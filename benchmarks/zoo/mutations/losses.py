"""Mutations of layers' outputs, of the loss, and of what goes back through them."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from ..loop import Loop
from ..parts import wrong
from ..parts.adversarial import hinge_game
from ..parts.dense import OwnBackward
from ..specification import resolved
from ..transforms import Transform, transform
from ._common import NEVER, Spec, clock


def output(loop: Loop, layer: str, by: Spec, at: int = 1, until: int = NEVER, of: str | None = None) -> None:
    """Transform the output of the layer, or of all modules of a name, within some steps."""
    _transform_outputs(loop, layer, transform(by), at, until, of)


def backward(loop: Loop, layer: str, by: Spec, at: int = 1, until: int = NEVER) -> None:
    """Transform the gradient of the layer's output within some steps."""
    change = transform(by)
    _transform_outputs(loop, layer, lambda out: OwnBackward.apply(out, torch.clone, change), at, until, None)


def _transform_outputs(loop: Loop, layer: str, change: Transform, at: int, until: int, of: str | None) -> None:
    now = clock(loop)

    def hook(module: nn.Module, args: object, out: Tensor) -> Tensor | None:
        return change(out) if at <= now[0] < until else None

    names = [layer] if of is None else [name for name, _ in loop.model.named_modules() if name.endswith(of)]
    for name in names:
        loop.model.get_submodule(name).register_forward_hook(hook)


def loss(loop: Loop, layer: str, by: Spec, at: int = 1, until: int = NEVER) -> None:
    """Transform the loss within some steps."""
    now, before, change = clock(loop), loop.loss, transform(by)

    def changed(model: nn.Module, *batch: Tensor) -> Tensor:
        value = before(model, *batch)
        return change(value) if at <= now[0] < until else value

    loop.loss = changed


def loss_replaced(loop: Loop, layer: str, function: Spec, **options: float) -> None:
    """Another loss, wrong as people write it."""
    own: Callable[..., Tensor] = resolved(function)
    loop.loss = lambda *arguments: own(*arguments, **options)


def penalty(loop: Loop, layer: str, weight: float) -> None:
    """Add the squares of all parameters to the loss."""
    before = loop.loss
    loop.loss = lambda model, *batch: (
        before(model, *batch) + weight * sum(parameter.square().sum() for parameter in model.parameters())
    )


def balance(loop: Loop, layer: str, weight: float) -> None:
    """Add what should balance the experts to the loss once more."""
    before = loop.loss
    loop.loss = lambda model, *batch: (
        before(model, *batch) + weight * sum(m.balance for m in model.modules() if hasattr(m, "balance"))
    )


def critic_not_reset(loop: Loop, layer: str) -> None:
    """The critic's gradients of the generator's step are never reset."""
    loop.update = lambda loop, step: hinge_game(loop, step, resets=False)


def steep_logarithms(loop: Loop, layer: str, slope: float) -> None:
    loop.update = lambda loop, step: wrong.logarithmic_game(loop, step, slope)


def source_masked(loop: Loop, layer: str, since: int) -> None:
    """From a step on a source of the batch has no word that may be looked at."""
    now, before, fill = clock(loop), loop.loss, Tensor.masked_fill

    def masked(model: nn.Module, source: Tensor, target: Tensor) -> Tensor:
        if now[0] < since:
            return before(model, source, target)
        hidden = torch.zeros(len(source), 1, source.shape[1]).index_fill(0, torch.tensor([2]), 1.0).bool()
        Tensor.masked_fill = lambda logits, mask, value: fill(logits, hidden, value)
        try:
            return before(model, source, target)
        finally:
            Tensor.masked_fill = fill

    loop.loss = masked


def action_forbidden(loop: Loop, layer: str, since: int) -> None:
    """From a step on the first action is forbidden in half of the states: its probability is 0."""
    now, forbidden = clock(loop), torch.zeros(32, 3, dtype=torch.bool)
    forbidden[:16, 0] = True
    loop.loss = lambda logits: logits.masked_fill(forbidden & (now[0] >= since), -math.inf).log_softmax(dim=1)
