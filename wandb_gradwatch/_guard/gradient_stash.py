"""What an optimizer goes without, or is handed, while it steps, and which of them heed it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

from .._runtime.autograd import current_graph_task


@dataclass
class GradientStash:
    """What an optimizer goes without, or was handed, while it steps."""

    optimizer: Optimizer
    gradients: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    found_inf: Tensor | None = None
    scalers_found_inf: Tensor | None = None  # what it replaces

    def give_back(self) -> None:
        if self.found_inf is not None and getattr(self.optimizer, "found_inf", None) is self.found_inf:
            if self.scalers_found_inf is None:
                del self.optimizer.found_inf  # type: ignore[attr-defined]
            else:
                self.optimizer.found_inf = self.scalers_found_inf  # type: ignore[attr-defined]
        if current_graph_task() != -1:
            return  # the step has raised and the next backward runs: these are not its gradients
        for parameter, gradient in self.gradients:
            if parameter.grad is None:
                parameter.grad = gradient


def without_gradients(optimizer: Optimizer) -> GradientStash:
    """Take away every gradient that this optimizer could use, of parameters that are not watched too."""
    stash = GradientStash(optimizer)
    for group in optimizer.param_groups:
        stash.gradients += [(p, p.grad) for p in group["params"] if p.grad is not None]
    for parameter, _ in stash.gradients:
        parameter.grad = None
    return stash


def honours_found_inf(optimizer: Optimizer) -> bool:
    """Whether this step leaves parameters and state bit for bit as they are where `optimizer.found_inf` is 1.

    Only torch's own code is trusted with that: a class that adds something around its step would do it all the same.
    """
    if not getattr(optimizer, "_step_supports_amp_scaling", False):
        return False
    if type(optimizer).step not in (Adam.step, AdamW.step, SGD.step, Adagrad.step):
        return False
    return all(group.get("fused") and _has_state(optimizer, group) for group in optimizer.param_groups)


def _has_state(optimizer: Optimizer, group: dict[str, Any]) -> bool:
    """Whether a group's state exists: the step that creates it does so even where it is skipped, and a fused SGD takes
    its momentum from there as it finds it, which is not initialised then."""
    if group.get("momentum") == 0:  # SGD without momentum has none
        return True
    for parameter in group["params"]:
        if parameter.grad is None:
            continue
        state = optimizer.state.get(parameter)
        if not state or state.get("momentum_buffer", state) is None:
            return False
    return True
