"""Shared by the tests of the integrations: a small model, and its gradients computed independently in float64."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn


def small_model(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def batches(count: int, *, size: int = 4, seed: int = 1) -> Tensor:
    """Return the training data, in the order in which it is used: [count, size, 4]."""
    return torch.randn(count, size, 4, generator=torch.Generator().manual_seed(seed))


class Recomputed:
    """Compute the expected gradients of a model on a float64 copy, with torch.autograd.grad.

    Args:
        model: the model in training; `look` copies its current parameters.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.gradients: list[list[Tensor]] = []  # [looks][parameters]

    def look(self, micro_batches: Iterable[Tensor]) -> None:
        """Compute the gradient of the mean loss of the micro-batches at the current parameters, and keep it."""
        copy = small_model().double()
        copy.load_state_dict({name: whole(value) for name, value in self._model.state_dict().items()})
        losses = [loss_of(copy, x.double()) for x in micro_batches]
        self.gradients.append(list(torch.autograd.grad(torch.stack(losses).mean(), list(copy.parameters()))))

    @property
    def norms(self) -> list[float]:
        """The L2 norms over all parameters, one per look."""
        return [math.sqrt(sum(float(g.square().sum()) for g in gradients)) for gradients in self.gradients]

    @property
    def means(self) -> list[float]:
        return [float(_flat(gradients).mean()) for gradients in self.gradients]

    @property
    def stds(self) -> list[float]:
        """The population standard deviations over all parameters, one per look."""
        return [float(_flat(gradients).std(correction=0)) for gradients in self.gradients]

    def layer_norms(self, index: int) -> list[float]:
        """Return the gradient norms of one parameter, one per look."""
        return [float(gradients[index].norm()) for gradients in self.gradients]


def whole(tensor: Tensor) -> Tensor:
    """Return the whole of a tensor; for a sharded tensor this is a collective."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return (model(x) - x.sum(dim=1, keepdim=True)).square().mean()


def _flat(gradients: list[Tensor]) -> Tensor:
    return torch.cat([g.flatten() for g in gradients])
