"""Optimizers that torch does not have, and usual settings of those that it has."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from ..loop import Loop


def momentum(parameters: object, lr: float) -> torch.optim.SGD:
    return torch.optim.SGD(parameters, lr=lr, momentum=0.9, nesterov=True)


class ByParameter(torch.optim.Optimizer):
    """Parameters are updated one by one, by `update`."""

    def __init__(self, parameters: object, lr: float = 0.02, **options: float) -> None:
        super().__init__(parameters, {"lr": lr, **options})

    @torch.no_grad()
    def step(self, closure: object = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.update(parameter, self.state[parameter], group["lr"])


class Orthogonal(ByParameter):
    """Muon: the momentum of a matrix, made orthogonal by Newton's and Schulz's iteration."""

    def update(self, parameter: Tensor, state: dict[str, Tensor], lr: float) -> None:
        average = state.setdefault("average", torch.zeros_like(parameter))
        x = average.mul_(0.9).add_(parameter.grad) / (average.norm() + 1e-7)
        for _ in range(5):
            x = 1.5 * x - 0.5 * x @ x.mT @ x
        parameter.sub_(lr * x)


class Signs(ByParameter):
    """Lion: the sign of an average."""

    def update(self, parameter: Tensor, state: dict[str, Tensor], lr: float) -> None:
        average = state.setdefault("average", torch.zeros_like(parameter))
        parameter.sub_(lr * torch.sign(0.9 * average + 0.1 * parameter.grad))
        average.lerp_(parameter.grad, 0.01)


class TrustRatio(ByParameter):
    """LAMB: Adam's update, made as long as the parameter."""

    def update(self, parameter: Tensor, state: dict[str, Tensor], lr: float) -> None:
        first = state.setdefault("first", torch.zeros_like(parameter)).lerp_(parameter.grad, 0.1)
        second = state.setdefault("second", torch.zeros_like(parameter)).lerp_(parameter.grad**2, 0.01)
        update = first / (second.sqrt() + 1e-6) + 0.01 * parameter
        sizes = parameter.norm(), update.norm()
        trust = (sizes[0] / sizes[1]).clamp(max=10.0) if min(sizes) > 0 else torch.ones(())
        parameter.sub_(lr * trust * update)


class SignDescent(ByParameter):
    """Each weight by the same amount, as the sign of its averaged gradient says."""

    def update(self, parameter: Tensor, state: dict[str, Tensor], lr: float) -> None:
        mean = state.setdefault("mean", torch.zeros_like(parameter)).lerp_(parameter.grad, 0.1)
        parameter.sub_(mean.sign(), alpha=lr)


@torch.no_grad()
def follow(copied: nn.Module, model: nn.Module, share: float) -> None:
    """A copy moves by this share towards the model."""
    for mine, theirs in zip(copied.parameters(), model.parameters(), strict=True):
        mine.lerp_(theirs, share)


class ScheduleFree(ByParameter):
    """Gradients at a point between the fast iterate and the average of all of them; Adam's squares."""

    kept = torch.float32  # the type in which the squares are stored

    def update(self, parameter: Tensor, state: dict[str, Any], lr: float) -> None:
        if not state:
            state |= {"step": 0, "fast": parameter.clone(), "mean": parameter.clone()}
            state["squares"] = torch.zeros_like(parameter)
        state["step"] += 1
        state["squares"] = state["squares"].lerp(parameter.grad.square(), 0.01).to(self.kept).float()
        size = (state["squares"] / (1 - 0.99 ** state["step"])).sqrt() + 1e-8
        state["fast"].sub_(parameter.grad / size, alpha=lr * min(1.0, state["step"] / 20))
        state["mean"].lerp_(state["fast"], 1 / state["step"])
        parameter.copy_(torch.lerp(state["fast"], state["mean"], 0.9))


class Prodigy(torch.optim.Optimizer):
    """Adam, times an estimate of how far the solution is: it begins far too small, and grows."""

    def __init__(self, params: Iterable[nn.Parameter], lr: float, first: float = 1e-5) -> None:
        super().__init__(params, {"lr": lr, "d": first, "r": 0.0})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            d, total, keep = group["d"], 0.0, math.sqrt(0.99)
            group["r"] *= keep
            for parameter in (one for one in group["params"] if one.grad is not None):
                state = self.state[parameter]
                if not state:
                    state |= {"first": parameter.clone(), **{name: torch.zeros_like(parameter) for name in "msv"}}
                grad = parameter.grad
                group["r"] += (1 - keep) * d**2 * float((grad * (state["first"] - parameter)).sum())
                state["s"].mul_(keep).add_(grad, alpha=(1 - keep) * d**2)
                state["m"].mul_(0.9).add_(grad, alpha=0.1 * d)
                state["v"].mul_(0.99).add_(grad.square(), alpha=0.01 * d**2)
                total += float(state["s"].abs().sum())
                parameter.sub_(state["m"] / (state["v"].sqrt() + d * 1e-8), alpha=group["lr"] * d)
            group["d"] = max(d, group["r"] / total) if total else d


class Lion(ByParameter):
    """The sign of an average of the gradients, with decoupled decay."""

    def __init__(self, parameters: object, lr: float) -> None:
        super().__init__(parameters, lr, weight_decay=0.1)

    def update(self, parameter: Tensor, state: dict[str, Tensor], lr: float) -> None:
        average = state.setdefault("exp_avg", torch.zeros_like(parameter))
        parameter.mul_(1 - lr * self.defaults["weight_decay"])
        parameter.add_((0.9 * average + 0.1 * parameter.grad).sign(), alpha=-lr)
        average.lerp_(parameter.grad, 0.01)


def follower(loop: Loop, module: nn.Module, share: float) -> nn.Module:
    """Return a copy of a module that follows it as a moving average, by this share in each step."""
    average = copy.deepcopy(module).requires_grad_(False)
    loop.after.append(lambda loop, step: follow(average, module, share))
    return average
