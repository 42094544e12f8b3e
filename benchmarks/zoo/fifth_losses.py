"""Losses as people write them by hand, wrongly: what the fifth faults put in the place of a training's own."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from .fifth_models import clicked


def by_exp(model: nn.Module, noise: Tensor, real: Tensor) -> Tensor:
    """Sinkhorn without logarithms, and a small blur."""
    cost = (model(noise)[:, None] - real).square().sum(dim=2)
    kernel = torch.exp(-cost / 1e-3)
    one, other = torch.ones(len(noise)), torch.ones(len(real))
    for _ in range(10):
        one = 1 / (kernel @ other)
        other = 1 / (kernel.T @ one)
    return (one[:, None] * kernel * other * cost).sum()


def logits_as_logs(model: nn.Module, *batch: Tensor) -> Tensor:
    return functional.nll_loss(model(batch[0]).flatten(0, -2), batch[-1].flatten())


def shares_as_logs(model: nn.Module, x: Tensor, which: Tensor, label: Tensor) -> Tensor:
    return functional.nll_loss(model(x, which).float().softmax(dim=1).log_softmax(dim=1) * 1e-3, label)


def without_doubt(model: nn.Module, x: Tensor, y: Tensor, label: Tensor) -> Tensor:
    """The term that keeps the learned weights from 0 is missing, and the doubt has a learning rate of its own size."""
    amount, kind = model(x)
    tasks = torch.stack([functional.mse_loss(amount, y), functional.cross_entropy(kind, label)])
    return (torch.exp(-30 * model.doubt) * tasks).mean()


def of_each_other(model: nn.Module, x: Tensor, y: Tensor, label: Tensor) -> Tensor:
    """[N, 1] minus [N] makes [N, N]."""
    amount, kind = model(x)
    return (amount - y[:, 0]).square().mean() + functional.cross_entropy(kind, label)


def root_of_errors(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """The root of each point's error, of which some are exactly 0 at the padding."""
    said = model(x)
    shown = torch.arange(said.shape[2]) < 12
    return (said * shown - y * shown).square().sqrt().mean()


def missing_by_product(model: nn.Module, frames: Tensor) -> Tensor:
    """Frames that are missing are NaN, and multiplied by 0."""
    said, aim = model(frames[:, :-1].nan_to_num()), frames[:, 1:]
    return (functional.mse_loss(said, aim, reduction="none") * aim.isfinite()).mean()


def sigmoid_and_log(model: nn.Module, fields: Tensor, click: Tensor) -> Tensor:
    share = torch.sigmoid(20 * model(fields))
    return -(click * share.log() + (1 - click) * (1 - share).log()).mean()


def entropy_by_hand(model: nn.Module, bag: Tensor, counts: Tensor) -> Tensor:
    """p log p of labels that are 0 or 1."""
    said = torch.sigmoid(model(bag).float())
    hard = (said > 0.5).float() + 0 * said
    return clicked(model, bag, counts) + 0.01 * (hard * hard.log()).mean()
