"""Worlds, equations and tables of the third trainings, with their losses."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from . import data
from .loop import Batch
from .models import mlp


class World(nn.Module):
    """Remembers what it has seen of a pendulum, and says what comes next and what it is worth."""

    def __init__(self, dim: int = 24) -> None:
        super().__init__()
        self.encoder, self.memory = mlp(3, dim, dim), nn.GRU(dim, dim, batch_first=True)
        self.next, self.worth = mlp(dim, dim, 3), mlp(dim, dim, 1)

    def forward(self, seen: Tensor) -> tuple[Tensor, Tensor]:
        states = self.memory(self.encoder(seen))[0]
        return self.next(states), self.worth(states)


def pendulums(size: int = 24, length: int = 12) -> data.Batches:
    def batch(_: int) -> Batch:
        angle, speed, rows = 3 * torch.rand(size) - 1.5, torch.randn(size), []
        for _ in range(length + 1):
            rows.append(torch.stack([angle.sin(), angle.cos(), speed], dim=1))
            speed = speed - 0.3 * angle.sin()
            angle = angle + 0.3 * speed
        seen = torch.stack(rows, dim=1)
        return seen, -(1 - seen[:, 1:, 1:2]) - 0.1 * seen[:, 1:, 2:].square()

    return batch


def foretold(model: nn.Module, seen: Tensor, worth: Tensor) -> Tensor:
    after, value = model(seen[:, :-1])
    return functional.mse_loss(after, seen[:, 1:]) + functional.mse_loss(value, worth)


def equation(model: nn.Module, x: Tensor, edge: Tensor, weight: float = 10.0, through: bool = True) -> Tensor:
    """u'' = -sin(3x) between 0 and 2, 0 at both ends: the residual of the equation, and of its ends."""
    x = x.requires_grad_(True)
    slope = torch.autograd.grad(model(x).sum(), x, create_graph=True)[0]
    curved = torch.autograd.grad(slope.sum(), x, create_graph=through)[0]
    return (curved + torch.sin(3 * x)).square().mean() + weight * model(edge).square().mean()


class Molecule(nn.Module):
    """An energy from the distances between four atoms; the forces are its slope."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp(6, 48, 48, 1, act=nn.SiLU)
        self.far = apart

    def forward(self, atoms: Tensor) -> Tensor:
        return self.net(torch.exp(-self.far(atoms)).sort(dim=1).values)[:, 0]


def apart(atoms: Tensor) -> Tensor:
    """The six distances of four atoms."""
    first, second = torch.combinations(torch.arange(4)).T
    return (atoms[:, first] - atoms[:, second]).norm(dim=2)


def potential(far: Tensor) -> Tensor:
    return (far**-4 - 2 * far**-2).sum(dim=1)


def molecules(size: int = 32) -> data.Batches:
    corners = 1.2 * torch.tensor([[0.0, 0, 0], [1, 0, 0], [0, 1, 0], [0, 0, 1]])

    def batch(_: int) -> Batch:
        return (corners + 0.1 * torch.randn(size, 4, 3),)

    return batch


def pulled(model: nn.Module, atoms: Tensor) -> Tensor:
    """Energies and forces."""
    atoms = atoms.requires_grad_(True)
    right = potential(apart(atoms))
    force = torch.autograd.grad(right.sum(), atoms)[0]
    energy = model(atoms)
    own = torch.autograd.grad(energy.sum(), atoms, create_graph=True)[0]
    return functional.mse_loss(energy, right.detach()) + functional.mse_loss(own, force)


def patients(size: int = 64) -> data.Batches:
    """What is known of them, when it ended, and whether it was an event."""
    risk = torch.randn(8)

    def batch(_: int) -> Batch:
        x = torch.randn(size, 8)
        ended = -torch.log(torch.rand(size)) * torch.exp(-x @ risk / 2)
        limit = 3 * torch.rand(size)
        return x, torch.minimum(ended, limit), (ended < limit).float()

    return batch


def cox(model: nn.Module, x: Tensor, time: Tensor, event: Tensor) -> Tensor:
    """The partial likelihood: the risk of those who had an event among all who were still there."""
    score = model(x)[:, 0][time.argsort(descending=True)]
    event = event[time.argsort(descending=True)]
    return -((score - score.logcumsumexp(dim=0)) * event).sum() / event.sum().clamp(min=1)


def queries(size: int = 16) -> data.Batches:
    """Ten documents each, with grades from 0 to 3."""
    taste = torch.randn(8) / 8**0.5

    def batch(_: int) -> Batch:
        x = torch.randn(size, 10, 8)
        return x, (x @ taste + 0.3 * torch.randn(size, 10)).clamp(0, 3).round()

    return batch


def lambdas(model: nn.Module, x: Tensor, grade: Tensor) -> Tensor:
    """Pairs in the wrong order, by what their exchange would gain."""
    score = model(x)[:, :, 0]
    rank = 1 + (score[:, :, None] < score[:, None]).sum(dim=2)
    gain, discount = 2**grade - 1, 1 / torch.log2(1 + rank.float())
    ideal = (gain.sort(dim=1, descending=True).values / torch.log2(torch.arange(2.0, 12.0))).sum(dim=1)
    delta = ((gain[:, :, None] - gain[:, None]) * (discount[:, :, None] - discount[:, None])).abs()
    apart = functional.softplus(score[:, None] - score[:, :, None]) * (grade[:, :, None] > grade[:, None])
    return (delta * apart).sum(dim=(1, 2)).div(ideal.clamp(min=1)).mean()


def claims(size: int = 64) -> data.Batches:
    """Amounts that scatter as much as they are large."""
    x = torch.randn(3000, 8)
    mean = torch.exp(x @ torch.randn(8) / 4)
    return data.drawn(x, torch.distributions.Gamma(2.0, 2.0 / mean).sample(), size=size)


def gamma(model: nn.Module, x: Tensor, amount: Tensor) -> Tensor:
    score = model(x)[:, 0]
    return (amount * torch.exp(-score) + score).mean()


def grades(size: int = 64) -> data.Batches:
    """Grades from 0 to 4."""
    x = torch.randn(3000, 8)
    score = x @ torch.randn(8) / 2 + 0.3 * torch.randn(3000)
    return data.drawn(x, torch.bucketize(score, torch.tensor([-1.5, -0.5, 0.5, 1.5])), size=size)


class Ordinal(nn.Module):
    """One score, and four ascending limits that it may pass."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.first, self.gaps = (
            mlp(8, 32, 32, 1),
            nn.Parameter(torch.tensor(-1.0)),
            nn.Parameter(torch.zeros(3)),
        )

    def forward(self, x: Tensor) -> Tensor:
        limits = torch.cat([self.first[None], self.first + functional.softplus(self.gaps).cumsum(dim=0)])
        return self.net(x) - limits


def passed(model: nn.Module, x: Tensor, grade: Tensor) -> Tensor:
    return functional.binary_cross_entropy_with_logits(model(x), (grade[:, None] > torch.arange(4)).float())
