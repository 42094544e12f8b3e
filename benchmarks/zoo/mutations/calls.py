"""Mutations of the order in which zero_grad(), backward() and step() are called, and of gradients in between."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..loop import Hook, Loop
from ..transforms import transform
from ._common import NEVER, Spec


def zero_grad_at(loop: Loop, layer: str, every: int = 1, until: int = NEVER) -> None:
    """zero_grad() is called once in some steps, or up to a step only."""

    def before(loop: Loop, step: int) -> None:
        loop.zeroes = (every == 1 or step % every == 1) and step <= until

    loop.before.append(before)


def zeroed(loop: Loop, layer: str, set_to_none: bool = True) -> None:
    """zero_grad() is called between backward() and step()."""
    loop.received.append(lambda loop, step: [o.zero_grad(set_to_none=set_to_none) for o in loop.optimizers] and None)


def step_first(loop: Loop, layer: str) -> None:
    """Call zero_grad(), step(), backward() in this order: the optimizer never has a gradient."""

    def update(loop: Loop, step: int) -> Tensor:
        loop.zero_grad()
        loop.apply(step)
        loss = loop.loss(loop.model, *loop.batch(step))
        loss.backward()
        return loss

    loop.update = update


def no_backward(loop: Loop, layer: str, since: int) -> None:
    """From a step on neither zero_grad() nor backward() is reached: the last gradient is applied again and again."""

    def update(loop: Loop, step: int) -> Tensor:
        if step < since:
            return loop.plain_update(step)
        with torch.no_grad():
            loss = loop.loss(loop.model, *loop.batch(step))
        loop.apply(step)
        return loss

    loop.update = update


def gradients_late(loop: Loop, layer: str, steps: int) -> None:
    waiting: list[list[Tensor | None]] = []

    def hook(loop: Loop, step: int) -> None:
        waiting.append([parameter.grad for parameter in loop.model.parameters()])
        if len(waiting) > steps:
            for parameter, grad in zip(loop.model.parameters(), waiting.pop(0), strict=True):
                parameter.grad = grad
        else:
            loop.zero_grad()

    loop.received.append(hook)


def never_unscaled(loop: Loop, layer: str) -> None:
    """The scaler scales the loss, and then the optimizer itself makes the step."""
    scaler = torch.amp.GradScaler("cpu")

    def update(loop: Loop, step: int) -> Tensor:
        loop.zero_grad()
        loss = loop.loss(loop.model, *loop.batch(step))
        scaler.scale(loss).backward()
        loop.optimizers[0].step()
        return loss

    loop.update = update


def never_scaled(loop: Loop, layer: str) -> None:
    """The loss is not scaled, the scaler divides the gradients all the same."""

    def update(loop: Loop, step: int) -> Tensor:
        scaler = loop.scaler
        assert scaler is not None
        loop.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = loop.loss(loop.model, *loop.batch(step))
        scaler.scale(torch.zeros(()))
        loss.backward()
        scaler.step(loop.optimizers[0])
        scaler.update()
        return loss

    loop.update = update


def gradients(loop: Loop, layer: str, by: Spec, at: int = 1) -> None:
    """Transform every gradient between backward() and step()."""
    change = transform(by)

    def hook(loop: Loop, step: int) -> None:
        for parameter in loop.model.parameters():
            if step >= at and parameter.grad is not None:
                parameter.grad = change(parameter.grad)

    loop.received.append(hook)


def clipped(loop: Loop, layer: str, norm: float, when: str = "received") -> None:
    """Clip by the norm where it is wrong: before unscale_(), or after the step."""
    hooks: list[Hook] = getattr(loop, when)
    hooks.append(lambda loop, step: nn.utils.clip_grad_norm_(loop.model.parameters(), norm) and None)


def clipped_by_values(loop: Loop, layer: str, limit: float) -> None:
    loop.received.append(lambda loop, step: nn.utils.clip_grad_value_(loop.model.parameters(), limit))


def norm_always(loop: Loop, layer: str, norm: float) -> None:
    """Clipping by hand, without min(1, .): small gradients are made larger."""

    def hook(loop: Loop, step: int) -> None:
        grads = [p.grad for p in loop.model.parameters() if p.grad is not None]
        total = torch.stack([grad.norm() for grad in grads]).norm()
        for grad in grads:
            grad.mul_(norm / total)

    loop.received.append(hook)
