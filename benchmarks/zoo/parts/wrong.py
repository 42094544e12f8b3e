"""Losses and other functions as people write them by hand, wrongly: faults put them in the place of the right ones."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..loop import Loop, descend
from .contrastive import apart, contrast
from .equations import six_distances, slopes
from .pixels import dice, found
from .tables import clicked, lambdas


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


def shares_in_half(model: nn.Module, x: Tensor, centres: Tensor, sizes: Tensor) -> Tensor:
    """Each pixel's share of what is empty, by exp and sum in half precision."""
    empty = (-10 * model(x)[0]).half().exp()
    share = empty / empty.sum(dim=(1, 2), keepdim=True)
    return found(model, x, centres, sizes) + 0.01 * (share * centres).sum(dim=(1, 2)).mean()


def hazards_by_hand(model: nn.Module, x: Tensor, time: Tensor, event: Tensor) -> Tensor:
    order = time.argsort(descending=True)
    score, event = model(x)[order, 0], event[order]
    return -((score - score.exp().cumsum(dim=0).log()) * event).sum() / event.sum().clamp(min=1)


def deviance(model: nn.Module, x: Tensor, amount: Tensor) -> Tensor:
    share = amount / model(x)[:, 0].exp()
    return (share - share.log()).mean()


def lambdas_by_gain(model: nn.Module, x: Tensor, grade: Tensor) -> Tensor:
    """As the healthy one, and on top each query's mean score by its ideal gain, which may be 0."""
    ideal = (2**grade - 1).sum(dim=1)
    score = (model(x)[:, :, 0] * (2**grade - 1)).sum(dim=1) / ideal
    return lambdas(model, x, grade) - 0.01 * torch.tanh(score).mean()


def spot_brightness(model: nn.Module, x: Tensor, mask: Tensor) -> Tensor:
    """What the spot's pixels are on average, weighted by the mask."""
    return dice(model, x, mask) - 0.01 * torch.tanh((model(x) * mask).sum() / mask.sum())


def far_from_itself(model: nn.Module, head: Tensor, relation: Tensor, tail: Tensor, wrong: Tensor) -> Tensor:
    """Wrong tails are to be far from the right ones; some of them are the right ones."""
    apart = (model.entities(tail) - model.entities(wrong)).square().sum(dim=1).sqrt()
    return model(head, relation, tail, wrong) - 0.01 * apart.mean()


def round_coordinates(model: nn.Module, x: Tensor, edge: Tensor) -> Tensor:
    """The equation around a centre: u'' + u' / x."""
    _, slope, curved = slopes(model, x)
    return (curved + slope / x + torch.sin(3 * x)).square().mean() + 10 * model(edge).square().mean()


def distances_to_itself(atoms: Tensor) -> Tensor:
    first, second = torch.combinations(torch.arange(4)).T
    return (atoms[:, :, None] - atoms[:, None]).square().sum(dim=3).sqrt()[:, first, second]


def twelfth_power(atoms: Tensor) -> Tensor:
    """In nanometres, and in half precision."""
    return ((six_distances(atoms) / 10).half() ** -12).float()


def log_of_sigmoid(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    share = torch.sigmoid(60 * model(x))
    return -(y * share.log() + (1 - y) * (1 - share).log()).mean()


def no_sigmoid(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    said = model(x)
    return -(y * said.log() + (1 - y) * (1 - said).log()).mean()


def softmax_in_half(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    share = (8 * model(x).half()).exp()
    return -(share / share.sum(dim=1, keepdim=True)).float().clamp(min=1e-6).log()[torch.arange(len(y)), y].mean()


def apart_by_root(model: nn.Module, a: Tensor, b: Tensor, label: Tensor) -> Tensor:
    place = functional.normalize(model(a), dim=1)
    far = (place[:, None] - place).square().sum(dim=2).sqrt()
    return contrast(model, a, b, label) - 0.01 * far.mean()


def of_length_one(model: nn.Module, x: Tensor) -> Tensor:
    x = x / x.square().sum(dim=1, keepdim=True).sqrt()
    return (model["speaker"](model["coder"](x)) - x).square().mean()


def mean_of_tens(model: nn.Module, tokens: Tensor, aim: Tensor) -> Tensor:
    each = functional.cross_entropy(model(tokens), aim, reduction="none")
    return each.mean() + 0.1 * (each * (aim == 10)).sum() / (aim == 10).sum()


def anchor_is_same(model: nn.Module, anchor: Tensor, same: Tensor, labels: Tensor) -> Tensor:
    """Some pairs are a sample and itself: a distance of exactly 0."""
    return apart(model, anchor, torch.where(labels[:, None] == 0, anchor, same), labels)


def minus_uncertainty(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    mean, spread = model(x).chunk(2, dim=1)
    variance = functional.softplus(spread) + 1e-4
    return (variance.log() / 2 - (y - mean).square() / (2 * variance)).mean()


def no_floor(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """The variance is a ReLU's output without anything added: 0 for some samples."""
    mean, spread = model(x).chunk(2, dim=1)
    variance = functional.relu(spread)
    return (variance.log() / 2 + (y - mean).square() / (2 * variance)).mean()


def cross_entropy_by_hand(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Cross-entropy without the logits: 0 * log 0 where the model is certain."""
    p = model(x)[:, 0].sigmoid()
    return -(20 * y * p.log() + (1 - y) * (1 - p).log()).mean()


def bare_distance(model: nn.Module, first: Tensor, second: Tensor, same: Tensor) -> Tensor:
    distance = (model(first) - model(second)).square().sum(1).sqrt()
    return torch.where(same, distance**2, functional.relu(1 - distance) ** 2).mean()


def apart_without_margin(model: nn.Module, first: Tensor, second: Tensor, same: Tensor) -> Tensor:
    """Others are pushed apart without a margin."""
    distance = (model(first) - model(second)).square().sum(1)
    return torch.where(same, distance, -distance).mean()


def softmax_twice(model: nn.Module, x: Tensor, labels: Tensor) -> Tensor:
    """cross_entropy of what softmax returned."""
    return functional.cross_entropy(model(x).softmax(1), labels)


def unshifted(model: nn.Module, tokens: Tensor, _: Tensor) -> Tensor:
    return functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())


def nll_of_log_softmax(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """A cross-entropy with a logarithm of its own."""
    return functional.nll_loss(torch.log(model(x).softmax(dim=1)), y)


def log_of_steep_sigmoid(margin: Tensor) -> Tensor:
    return -torch.log(torch.sigmoid(margin / 0.001)).mean()


def sigmoid_in_half(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Probabilities by hand in float16: log(p + 1e-8)."""
    share = (40 * model(x)).half().sigmoid()
    return -(y * torch.log(share + 1e-8) + (1 - y) * torch.log(1 - share + 1e-8)).mean()


def exp_and_log(x: Tensor) -> Tensor:
    """A softplus that overflows."""
    return torch.log(1 + x.exp())


def root_of_relu(spread: Tensor) -> Tensor:
    """A deviation whose slope is 0/0 where the variance is 0."""
    return (torch.relu(spread) * spread).sqrt()


def logarithmic_game(loop: Loop, step: int, slope: float) -> Tensor:
    """The game of logarithms, by hand, of a sigmoid that is steep."""
    (real,) = loop.batch(step)
    fake = loop.model["draws"](torch.randn(len(real), 4))
    judge = lambda x: torch.sigmoid(slope * loop.model["judges"](x))  # noqa: E731
    told = -(torch.log(judge(real)) + torch.log(1 - judge(fake.detach()))).mean()
    descend(loop.optimizers[0], told)
    descend(loop.optimizers[1], -torch.log(judge(fake)).mean())
    return told.detach()
