"""What the tests of the integrations share: a small model whose gradients are known in float64 by another way."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn


def small_model(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def batches(count: int, *, size: int = 4, seed: int = 1) -> Tensor:
    """[count, size, 4]: the training data, in the order in which it is used."""
    return torch.randn(count, size, 4, generator=torch.Generator().manual_seed(seed))


class Recomputed:
    """A float64 copy of a model, and its gradients by torch.autograd.grad: the second opinion.

    Args:
        model: what is trained; its parameters are read anew at every look.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.gradients: list[list[Tensor]] = []  # of every look, by parameter

    def look(self, micro_batches: Iterable[Tensor]) -> None:
        """Note the gradient of the mean of the micro-batches' losses, at the parameters as they are now."""
        copy = small_model().double()
        copy.load_state_dict({name: whole(value) for name, value in self._model.state_dict().items()})
        losses = [loss_of(copy, x.double()) for x in micro_batches]
        self.gradients.append(list(torch.autograd.grad(torch.stack(losses).mean(), list(copy.parameters()))))

    @property
    def norms(self) -> list[float]:
        """The L2 norm over all parameters, of every look."""
        return [math.sqrt(sum(float(g.square().sum()) for g in gradients)) for gradients in self.gradients]

    @property
    def means(self) -> list[float]:
        return [float(_flat(gradients).mean()) for gradients in self.gradients]

    @property
    def stds(self) -> list[float]:
        """Population standard deviations."""
        return [float(_flat(gradients).std(correction=0)) for gradients in self.gradients]

    def layer_norms(self, index: int) -> list[float]:
        """The norm of one parameter, of every look."""
        return [float(gradients[index].norm()) for gradients in self.gradients]


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor that may be sharded: then a collective."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return (model(x) - x.sum(dim=1, keepdim=True)).square().mean()


def _flat(gradients: list[Tensor]) -> Tensor:
    return torch.cat([g.flatten() for g in gradients])
