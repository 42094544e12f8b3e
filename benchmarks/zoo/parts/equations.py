"""Models of functions, fields, equations and molecules, with their data and losses."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..loop import Batch
from . import data
from .dense import mlp


class Coordinates(nn.Module):
    """A picture as a function of its coordinates, through waves of many lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("waves", 6.0 * torch.randn(2, 24))
        self.net = mlp(48, 48, 48, 3)

    def forward(self, x: Tensor) -> Tensor:
        angles = x @ self.waves
        return torch.sigmoid(self.net(torch.cat([angles.sin(), angles.cos()], dim=1)))


@data.anew
def places_and_colours() -> Batch:
    x = torch.rand(64, 2)
    return x, 0.5 + 0.5 * torch.sin(9 * x @ torch.tensor([[1.0, 0.3, -0.8], [0.5, -1.0, 0.6]]))


def slopes(model: nn.Module, x: Tensor, *, through: bool = True) -> tuple[Tensor, Tensor, Tensor]:
    """The model's value, and its first and second derivative; `through`: that this one can be differentiated, too."""
    x = x.requires_grad_()
    value = model(x)
    first = torch.autograd.grad(value.sum(), x, create_graph=True)[0]
    return value, first, torch.autograd.grad(first.sum(), x, create_graph=through)[0]


def _start(model: nn.Module) -> tuple[Tensor, Tensor]:
    """Value and slope at 0."""
    start = torch.zeros(1, 1, requires_grad=True)
    value = model(start)
    return value, torch.autograd.grad(value.sum(), start, create_graph=True)[0]


def oscillator(model: nn.Module, x: Tensor) -> Tensor:
    """u'' = -u with u(0) = 0 and u'(0) = 1, by the equation alone."""
    u, _, second = slopes(model, x)
    at_start, slope = _start(model)
    return (second + u).square().mean() + at_start.square().sum() + (slope - 1).square().sum()


class Operator(nn.Module):
    """A map of functions, in frequencies: complex weights."""

    def __init__(self, width: int = 8, modes: int = 8) -> None:
        super().__init__()
        self.lift, self.lower, self.modes = nn.Linear(1, width), nn.Linear(width, 1), modes
        self.waves = nn.ParameterList(torch.randn(modes, width, width, dtype=torch.cfloat) / width for _ in range(2))
        self.local = nn.ModuleList(nn.Linear(width, width) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.lift(x)
        for waves, local in zip(self.waves, self.local, strict=True):
            spectrum = torch.fft.rfft(x, dim=1)[:, : self.modes]
            mixed = torch.einsum("nkc,kcd->nkd", spectrum, waves)
            x = functional.gelu(torch.fft.irfft(mixed, n=x.shape[1], dim=1) + local(x))
        return self.lower(x)


def shifted(_: int) -> Batch:
    """Smooth functions, and the same ones moved and squared."""
    at = torch.linspace(0, 2 * torch.pi, 33)[:-1]
    x = sum(torch.randn(16, 1) * torch.sin(k * at + 6 * torch.rand(16, 1)) / k for k in range(1, 5))[..., None]
    return x, 0.5 * x.roll(4, dims=1) ** 2


class Field(nn.Module):
    """Density and colour at a point, through waves of growing frequency, gathered along rays."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp(24, 48, 48, 4)

    def forward(self, points: Tensor) -> Tensor:
        waves = (points[..., None] * 2.0 ** torch.arange(6)).flatten(-2)
        out = self.net(torch.cat([waves.sin(), waves.cos()], dim=-1))
        return gathered(functional.softplus(out[..., 0]), torch.sigmoid(out[..., 1:]))


def gathered(density: Tensor, colour: Tensor) -> Tensor:
    """What a ray sees: [rays, points] and [rays, points, 3] to [rays, 3]."""
    stopped = 1 - torch.exp(-density * 0.3)
    passed = torch.cumprod(torch.cat([torch.ones_like(stopped[:, :1]), 1 - stopped[:, :-1]], dim=1), dim=1)
    return ((stopped * passed)[..., None] * colour).sum(dim=1)


@data.anew
def rays(size: int = 64) -> Batch:
    """A disc of one colour before a wall of another."""
    start, slope = 2 * torch.rand(size, 1) - 1, 0.6 * torch.rand(size, 1) - 0.3
    depth = torch.linspace(0, 3, 12)
    points = torch.stack([start + slope * depth, depth.expand(size, -1)], dim=2)
    disc = ((points - torch.tensor([0.2, 1.0])).square().sum(dim=2) < 0.4).float()
    wall = (points[..., 1] > 2.4).float()
    colour = disc[..., None] * torch.tensor([0.9, 0.2, 0.1]) + wall[..., None] * torch.tensor([0.1, 0.3, 0.8])
    return points, gathered(8 * disc + 8 * wall, colour)


def equation(model: nn.Module, x: Tensor, edge: Tensor, weight: float = 10.0, through: bool = True) -> Tensor:
    """u'' = -sin(3x) between 0 and 2, 0 at both ends: the residual of the equation, and of its ends."""
    _, _, curved = slopes(model, x, through=through)
    return (curved + torch.sin(3 * x)).square().mean() + weight * model(edge).square().mean()


def inside_and_ends(size: int) -> data.Batches:
    return lambda step: (2 * torch.rand(size, 1), torch.tensor([[0.0], [2.0]]))


class Molecule(nn.Module):
    """An energy from the distances between four atoms; the forces are its slope."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp(6, 48, 48, 1, act=nn.SiLU)
        self.far = six_distances

    def forward(self, atoms: Tensor) -> Tensor:
        return self.net(torch.exp(-self.far(atoms)).sort(dim=1).values)[:, 0]


def six_distances(atoms: Tensor) -> Tensor:
    """The six distances of four atoms."""
    first, second = torch.combinations(torch.arange(4)).T
    return (atoms[:, first] - atoms[:, second]).norm(dim=2)


def potential(far: Tensor) -> Tensor:
    return (far**-4 - 2 * far**-2).sum(dim=1)


@data.given(lambda: 1.2 * torch.tensor([[0.0, 0, 0], [1, 0, 0], [0, 1, 0], [0, 0, 1]]))
def molecules(corners: Tensor, size: int = 32) -> Batch:
    return (corners + 0.1 * torch.randn(size, 4, 3),)


def pulled(model: nn.Module, atoms: Tensor) -> Tensor:
    """Energies and forces."""
    atoms = atoms.requires_grad_(True)
    right = potential(six_distances(atoms))
    force = torch.autograd.grad(right.sum(), atoms)[0]
    energy = model(atoms)
    own = torch.autograd.grad(energy.sum(), atoms, create_graph=True)[0]
    return functional.mse_loss(energy, right.detach()) + functional.mse_loss(own, force)


class DeepKernel(nn.Module):
    """A Gaussian process on what a network makes of x: minus the log likelihood of y, per point."""

    def __init__(self) -> None:
        super().__init__()
        self.features = mlp(3, 24, 24, 2, act=nn.Tanh)
        self.log_length, self.log_noise = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.tensor(-1.0))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        place = self.features(x) / self.log_length.exp()
        kernel = torch.exp(-(place[:, None] - place).square().sum(dim=2) / 2) + self.log_noise.exp() * torch.eye(len(x))
        root = torch.linalg.cholesky(kernel)
        return (
            torch.linalg.solve_triangular(root, y, upper=False).square().sum() / 2 + root.diagonal().log().sum()
        ) / len(x)


@data.given(lambda: torch.randn(3, 2))
def surface(ways: Tensor, size: int = 40) -> Batch:
    x = torch.randn(size, 3)
    return x, torch.sin(x @ ways).sum(dim=1, keepdim=True) + 0.1 * torch.randn(size, 1)


def pendulum(model: nn.Module, t: Tensor) -> Tensor:
    """The pendulum's equation, and its beginning."""
    u, first, second = slopes(model, t)
    at_start, speed = _start(model)
    return (second + 0.2 * first + 4 * u).square().mean() + 10 * ((at_start - 1).square() + speed.square()).mean()


@data.whole
def one_picture() -> Batch:
    """One picture, as a function of places: all pixels every step."""
    y, x = torch.meshgrid(torch.linspace(-1, 1, 16), torch.linspace(-1, 1, 16), indexing="ij")
    places = torch.stack([x, y], dim=2).view(-1, 2)
    waves = 3 * places @ torch.randn(2, 24)
    colours = torch.stack([(5 * x).sin() * y, (x * y * 6).cos(), (x**2 + y**2 < 0.5).float()], dim=2).view(-1, 3)
    return torch.cat([waves.sin(), waves.cos()], dim=1), colours
