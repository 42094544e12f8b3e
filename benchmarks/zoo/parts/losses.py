"""Losses of any model."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional


def classify(model: nn.Module, *batch: Tensor) -> Tensor:
    """The cross-entropy of the class of each sample, or of each of its places."""
    *inputs, labels = batch
    return functional.cross_entropy(model(*inputs).flatten(0, -2), labels.flatten())


def regress(model: nn.Module, *batch: Tensor) -> Tensor:
    *inputs, y = batch
    return functional.mse_loss(model(*inputs), y)


def binary(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return functional.binary_cross_entropy_with_logits(model(x)[:, 0], y.float())


def logistic(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Each number is a yes or a no."""
    return functional.binary_cross_entropy_with_logits(model(x), y)


def weighted_logistic(weight: float) -> Callable[..., Tensor]:
    """A yes weighs more than a no."""
    factor = torch.tensor(weight)
    return lambda model, x, y: functional.binary_cross_entropy_with_logits(model(x), y, pos_weight=factor)


def hinge(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return functional.multi_margin_loss(model(x), y)


def focal(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    each = functional.cross_entropy(model(x), y, reduction="none")
    return ((1 - torch.exp(-each)) ** 2 * each).mean()


def huber(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return functional.smooth_l1_loss(model(x), y)


def gaussian(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Mean and log variance are predicted."""
    mean, log_var = model(x).split(1, dim=1)
    return (0.5 * log_var + 0.5 * (y - mean) ** 2 * torch.exp(-log_var)).mean()


def quantiles(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    error, levels = y - model(x), torch.tensor([0.1, 0.5, 0.9])
    return torch.maximum(levels * error, (levels - 1) * error).mean()


def each(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """All heads predict the same."""
    return (model(x) - y).square().mean()


def summed(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return 1e4 * functional.mse_loss(model(x), y, reduction="sum")


def poisson(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return functional.poisson_nll_loss(model(x), torch.poisson(torch.exp(y.clamp(max=3.0))))


def mixed_up(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    share, other = torch.rand(()), torch.randperm(len(x))
    output = model(share * x + (1 - share) * x[other])
    return share * functional.cross_entropy(output, y) + (1 - share) * functional.cross_entropy(output, y[other])


def smoothed(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return functional.cross_entropy(model(x), y, label_smoothing=0.1)


def several(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Tasks of different sizes, added with weights."""
    first, second, third = model(x).split(1, dim=1)
    signs = functional.binary_cross_entropy_with_logits(third, (y > 0).float())
    return functional.mse_loss(first, y) + 0.1 * functional.mse_loss(second, 10 * y) + 0.5 * signs


def own_loss(model: nn.Module, *batch: Tensor) -> Tensor:
    """Models whose forward is the loss."""
    return model(*batch)


def own_loss_without_labels(model: nn.Module, x: Tensor, _: Tensor) -> Tensor:
    return model(x)


def teacher_forced(model: nn.Module, source: Tensor, target: Tensor) -> Tensor:
    """The model is given the right words so far."""
    return functional.cross_entropy(model(source, target).flatten(0, 1), target.flatten())


def classify_in_float32(model: nn.Module, *batch: Tensor) -> Tensor:
    *inputs, labels = batch
    return functional.cross_entropy(model(*inputs).float(), labels)


def absolute(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return functional.l1_loss(model(x), y)


def cauchy(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return torch.log1p((model(x) - y) ** 2).mean()


def outliers(n: int) -> Tensor:
    """One target in twenty is wrong by a hundred."""
    return 0.1 * torch.randn(n) + 100.0 * (torch.rand(n) < 0.05) * torch.randn(n).sign()


def smooth_inputs(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """A classifier whose slope at its inputs is penalised: a backward through a backward."""
    x = x.clone().requires_grad_()
    loss = functional.cross_entropy(model(x), y)
    slope = torch.autograd.grad(loss, x, create_graph=True)[0]
    return loss + 5.0 * slope.square().sum(dim=1).mean()


def mixture(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Three normal densities, their shares, means and widths."""
    share, mean, width = model(x).chunk(3, dim=1)
    width = width.clamp(min=-4.0)
    log_p = share.log_softmax(dim=1) - 0.5 * ((y - mean) * torch.exp(-width)) ** 2 - width
    return -log_p.logsumexp(dim=1).mean()


def copied(model: nn.Module, x: Tensor, _: Tensor) -> Tensor:
    return functional.mse_loss(model(x), x)


def doubtful(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """The likelihood of a normal distribution whose mean and variance the model says."""
    mean, spread = model(x).chunk(2, dim=1)
    return functional.gaussian_nll_loss(mean, y, functional.softplus(spread) + 1e-4)
