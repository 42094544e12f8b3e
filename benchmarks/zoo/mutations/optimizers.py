"""Mutations of the loop's fields, of the schedule and of the optimizers."""

from __future__ import annotations

from typing import Any

import torch

from ..loop import Loop
from ..specification import formula
from ..transforms import transform
from ._common import NEVER, Spec


def fields(loop: Loop, layer: str, **values: Any) -> None:
    """Set fields of the training; a schedule is a formula, a scaler its options."""
    for name, value in values.items():
        if name == "schedule" and value is not None:
            value = formula(value)
        if name == "scaler" and value is not None:
            value = torch.amp.GradScaler("cpu", **value)
        setattr(loop, name, value)


def rate(loop: Loop, layer: str, by: float | str, at: int = 1, until: int = NEVER) -> None:
    """Multiply the learning rate by a factor, or by a formula of the step."""
    before, factor = loop.schedule or (lambda step: 1.0), formula(by)
    loop.schedule = lambda step: before(step) * (factor(step) if at <= step < until else 1.0)


def rate_compounded(loop: Loop, layer: str, by: float) -> None:
    """Each step multiplies the rate that the step before left, not the first rate."""
    loop.schedule = None

    def multiply(loop: Loop, step: int) -> None:
        for group in (group for optimizer in loop.optimizers for group in optimizer.param_groups):
            group["lr"] *= by

    loop.before.append(multiply)


def rate_of_layer(loop: Loop, layer: str, by: float, **options: float) -> None:
    """A layer becomes a parameter group of its own."""
    optimizer, own = loop.optimizers[0], set(loop.model.get_submodule(layer).parameters())
    group = optimizer.param_groups[0]
    group["params"] = [parameter for parameter in group["params"] if parameter not in own]
    optimizer.add_param_group({"params": list(own), "lr": by * group["lr"], **options})


def rate_of_group(loop: Loop, layer: str, by: float, optimizer: int = 0, group: int = 0) -> None:
    loop.optimizers[optimizer].param_groups[group]["lr"] *= by


def groups(loop: Loop, layer: str, **values: Any) -> None:
    """Set options of all parameter groups."""
    for group in (group for optimizer in loop.optimizers for group in optimizer.param_groups):
        group |= values


def optimizer(
    loop: Loop, layer: str, kind: str, index: int | None = None, added: bool = False, of: str = "", **options: Any
) -> None:
    """Replace all optimizers, or one, or add one: of the trained parameters of a module."""
    parameters = [parameter for parameter in loop.model.get_submodule(of).parameters() if parameter.requires_grad]
    made = getattr(torch.optim, kind)(parameters, **options)
    if added:
        loop.optimizers.append(made)
    elif index is None:
        loop.optimizers = [made]
    else:
        loop.optimizers[index] = made


def given(loop: Loop, layer: str, only: str = "", without: str = "") -> None:
    """The optimizer is given some of the parameters: those whose name has a part, or has it not."""
    chosen = []
    for name, parameter in loop.model.named_parameters():
        is_left_out = without and without in f".{name}."
        if parameter.requires_grad and only in f".{name}." and not is_left_out:
            chosen.append(parameter)
    loop.optimizers[0].param_groups[0]["params"] = chosen


def state(loop: Loop, layer: str, name: str, by: Spec, num: int | None = None) -> None:
    """Transform one of the optimizer's averages, of all or of the first parameters."""
    for one in list(loop.optimizers[0].state.values())[:num]:
        one[name] = transform(by)(one[name])


def squares_forgotten(loop: Loop, layer: str, since: int) -> None:
    """From a step on the average of squares begins anew with each step."""
    loop.before.append(lambda loop, step: state(loop, layer, "exp_avg_sq", "zeros") if step >= since else None)


def squares_in_half(loop: Loop, layer: str) -> None:
    """Adam's squares are stored in float16, in which most of them are 0."""
    loop.optimizers[0].kept = torch.float16
