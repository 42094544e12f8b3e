"""Trainings that differ in how they train: precision, order of the data, what happens around a step."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import prune

from ..loop import Batch, Loop, supervised
from . import data
from .convolutional import conv
from .dense import Branches, Scale, mlp
from .losses import classify, regress
from .optimizers import follow, momentum
from .schedules import cosine


def with_closure(loop: Loop, step: int) -> Tensor:
    """A step of an optimizer that asks for the loss several times."""
    optimizer = loop.optimizers[0]

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = loop.loss(loop.model, *loop.batch(step))
        loss.backward()
        return loss

    return torch.as_tensor(optimizer.step(closure))


def sharpness_aware(*, tells_perturbed: bool = True) -> Callable[[Loop, int], Tensor]:
    """SAM: the gradient at a perturbed point makes the step; the loss that is told is that there, or that before."""

    def update(loop: Loop, step: int) -> Tensor:
        batch, weights = loop.batch(step), list(loop.model.parameters())
        loss = loop.loss(loop.model, *batch)
        grads = torch.autograd.grad(loss, weights)
        norm = torch.stack([grad.norm() for grad in grads]).norm() + 1e-12
        with torch.no_grad():
            for weight, grad in zip(weights, grads, strict=True):
                weight.add_(0.05 * grad / norm)
        loop.zero_grad()
        perturbed = loop.loss(loop.model, *batch)
        perturbed.backward()
        with torch.no_grad():
            for weight, grad in zip(weights, grads, strict=True):
                weight.sub_(0.05 * grad / norm)
        loop.optimizers[0].step()
        return perturbed if tells_perturbed else loss

    return update


def sparse() -> Loop:
    """Gradients of an embedding that name the rows they touch."""
    model = nn.Sequential(nn.Embedding(200, 16, sparse=True), nn.Flatten(), nn.Linear(64, 200))
    batch = data.sentences(16, vocabulary=24, length=4)
    dense, rows = (
        torch.optim.Adam(model[2].parameters(), lr=3e-3),
        torch.optim.SparseAdam(model[0].parameters(), lr=1e-2),
    )
    return Loop(
        model,
        lambda step: tuple(part[:, : 4 if k == 0 else None] for k, part in enumerate(batch(step))),
        last_token,
        [dense, rows],
    )


def last_token(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(model(tokens), targets[:, -1])


def scaled_by_hand(loop: Loop, step: int) -> Tensor:
    """A loss scale of 1024 that the loop multiplies and divides by itself."""
    loop.zero_grad()
    loss = loop.loss(loop.model, *loop.batch(step))
    (1024 * loss).backward()
    for parameter in loop.model.parameters():
        parameter.grad.div_(1024)
    loop.apply(step)
    return loss


def all_in(dtype: str) -> Loop:
    """Parameters and data in one type."""
    batch, kind = data.curve(), getattr(torch, dtype)
    model = mlp(8, 32, 32, 1).to(kind)
    return supervised(model, lambda step: tuple(t.to(kind) for t in batch(step)), regress, lr=2e-3, clip=1.0)


def after(first: data.Batches, second: data.Batches, at: int) -> data.Batches:
    """Other data from a step on, on purpose."""
    return lambda step: first(step) if step < at else second(step)


def longer(step: int) -> Batch:
    """Sequences that grow."""
    return data.sums(length=4 + 4 * (step // 60))(step)


def noisier() -> data.Batches:
    """Images with more noise every 50 steps."""
    batch = data.images(noise=0.2)

    def changed(step: int) -> Batch:
        x, y = batch(step)
        return x + 0.4 * (step // 50) * torch.randn_like(x), y

    return changed


def larger(batch: data.Batches) -> data.Batches:
    """An eighth of the batch, and twice as much every 60 steps."""
    return lambda step: tuple(part[: len(part) >> max(3 - step // 60, 0)] for part in batch(step))


def second_loss() -> Loop:
    """An auxiliary loss is added from step 120 on."""
    now = [0]

    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        out = model(x)
        extra = 0.5 * functional.cross_entropy(out.roll(1, dims=1), y) if now[0] > 120 else 0.0
        return functional.cross_entropy(out, y) + extra

    return supervised(
        mlp(12, 32, 32, 4), data.blobs(), loss, lr=2e-3, before=[lambda loop, step: now.__setitem__(0, step)]
    )


@data.anew
def phases() -> Batch:
    """Four tasks: sines of a phase."""
    return 4 * torch.rand(4, 20, 1) - 2, 3 * torch.rand(4)


def meta_learned(model: nn.Module, x: Tensor, phase: Tensor) -> Tensor:
    """MAML: a step inside each task, differentiated through."""
    total = torch.zeros(())
    for task in range(len(x)):
        seen, asked = x[task].chunk(2)
        names = [name for name, _ in model.named_parameters()]
        error = functional.mse_loss(model(seen), torch.sin(seen + phase[task]))
        steps = torch.autograd.grad(error, list(model.parameters()), create_graph=True)
        moved = {name: p - 0.05 * step for name, p, step in zip(names, model.parameters(), steps, strict=True)}
        answer = torch.func.functional_call(model, moved, (asked,))
        total = total + functional.mse_loss(answer, torch.sin(asked + phase[task]))
    return total / len(x)


def mean_teacher() -> Loop:
    """Few labels; an average of the past models is agreed with, ever more so."""
    model = mlp(12, 32, 32, 4)
    teacher, now = copy.deepcopy(model).requires_grad_(False), [0]

    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        noisy, clean = model(x + 0.3 * torch.randn_like(x)), teacher(x + 0.3 * torch.randn_like(x))
        agreed = functional.mse_loss(noisy.softmax(dim=1), clean.softmax(dim=1))
        return functional.cross_entropy(noisy[:8], y[:8]) + 5.0 * min(now[0] / 80, 1.0) * agreed

    def after(loop: Loop, step: int) -> None:
        now[0] = step
        follow(teacher, model, 0.05)

    adam = torch.optim.AdamW
    return supervised(model, data.blobs(), loss, optimizer=adam, lr=3e-3, schedule=cosine(200), after=[after])


def averaged_for_evaluation() -> Loop:
    """Every 40 steps the average of the weights is put in for an evaluation, and taken out again."""
    model = conv()
    mean, batch = copy.deepcopy(model), data.images(noise=1.5)

    def evaluate(loop: Loop, step: int) -> None:
        follow(mean, model, 0.05)
        if step % 40 == 0:
            own = copy.deepcopy(model.state_dict())
            model.load_state_dict(mean.state_dict())
            with torch.no_grad():
                model(batch(step)[0])
            model.load_state_dict(own)

    return supervised(model, batch, classify, optimizer=momentum, lr=0.02, after=[evaluate])


def pruned_at_120(loop: Loop, step: int) -> None:
    """Half of the weights, the smallest, are taken out, and it trains on."""
    if step == 120:
        for index in (0, 2):
            prune.l1_unstructured(loop.model[index], "weight", 0.5)


class Rounded(nn.Linear):
    """Weights of 15 levels; the gradient passes straight through the rounding."""

    def forward(self, x: Tensor) -> Tensor:
        unit = self.weight.detach().abs().amax() / 7
        levels = (self.weight / unit).round() * unit
        return functional.linear(x, self.weight + (levels - self.weight).detach(), self.bias)


@torch.no_grad()
def noise_in_weights(loop: Loop, step: int) -> None:
    """Langevin's dynamics."""
    for parameter in loop.model.parameters():
        parameter.add_(2e-3 * torch.randn_like(parameter))


def epochs(size: int = 32) -> data.Batches:
    """Ten batches of an epoch are full, the eleventh is one sample."""
    x, y = data.blobs(321)(0)
    order = [torch.randperm(321)]

    def batch(step: int) -> Batch:
        at = (step - 1) % 11
        if at == 0:
            order[0] = torch.randperm(321)
        chosen = order[0][size * at : size * (at + 1)]
        return x[chosen], y[chosen]

    return batch


def in_turn() -> Loop:
    """A class at odd steps, a number ten times as large at even ones; each has its own head."""
    classes, numbers, model = (
        data.blobs(dim=12),
        data.curve(dim=12),
        Branches(mlp(12, 32, 32), nn.Linear(32, 4), nn.Linear(32, 1)),
    )

    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        hidden = model.trunk(x)
        if y.dim() == 1:
            return functional.cross_entropy(model.heads[0](hidden), y)
        return functional.mse_loss(model.heads[1](hidden), 10 * y)

    return supervised(model, lambda step: (classes if step % 2 else numbers)(step), loss, lr=3e-3, steps=300)


def wrong_labels() -> data.Batches:
    """Two labels in five are wrong."""
    x, y = data.blobs(1024)(0)
    return data.drawn(x, torch.where(torch.rand(1024) < 0.4, torch.randint(0, 4, (1024,)), y))


def unit_rows() -> Loop:
    """Rows of weights are put back to length 1 after each step."""
    model = nn.Sequential(mlp(12, 48, 48, 4), Scale(4))
    loop = supervised(model, data.blobs(), classify, optimizer=momentum, lr=0.05, steps=150)

    @torch.no_grad()
    def normalise(loop: Loop, step: int) -> None:
        for module in loop.model.modules():
            if isinstance(module, nn.Linear):
                module.weight.copy_(functional.normalize(module.weight, dim=1))

    normalise(loop, 0)
    loop.after.append(normalise)
    return loop


def decayed_logistic(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return functional.binary_cross_entropy_with_logits(model(x)[:, 0], y) + 1e-3 * model.weight.square().sum()


def hard_at_times(size: int = 32) -> data.Batches:
    """Every 70th batch is of hard samples, far from the others."""
    w = torch.randn(10, 2)

    def batch(step: int) -> Batch:
        x = (5.0 if step % 70 == 0 else 1.0) * torch.randn(size, 10)
        return x, (x @ w[:, :1]).abs() - (x @ w[:, 1:]) + 0.1 * torch.randn(size, 1)

    return batch


def clip_by_value(loop: Loop, step: int) -> None:
    nn.utils.clip_grad_value_(loop.model.parameters(), 0.5)
