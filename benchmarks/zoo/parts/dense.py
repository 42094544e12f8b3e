"""Models of dense layers, with the data and the losses that are their own."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..loop import Batch
from ..transforms import Transform
from . import data


def mlp(
    *sizes: int, act: Callable[[], nn.Module] = nn.ReLU, norm: Callable[[int], nn.Module] | None = None
) -> nn.Module:
    """Linear layers with an activation between them."""
    layers: list[nn.Module] = []
    for inputs, outputs in itertools.pairwise(sizes[:-1]):
        layers += [nn.Linear(inputs, outputs), *([norm(outputs)] if norm else []), act()]
    return nn.Sequential(*layers, nn.Linear(*sizes[-2:]))


class OwnBackward(torch.autograd.Function):
    """A function of a tensor, and what it makes of the gradient, whatever its derivative is."""

    @staticmethod
    def forward(context: Any, x: Tensor, function: Transform, of_gradient: Transform) -> Tensor:
        context.of_gradient = of_gradient
        return function(x)

    @staticmethod
    def backward(context: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return context.of_gradient(grad), None, None


class Residual(nn.Module):
    """x + f(x)."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


class Skipped(Residual):
    """x + f(x), or, three times in ten, x alone."""

    def forward(self, x: Tensor) -> Tensor:
        return x if torch.rand(()) < 0.3 else super().forward(x)


def residual_mlp(dim: int) -> nn.Module:
    return Residual(mlp(dim, dim, dim))


def skipped_mlp(dim: int) -> nn.Module:
    return Skipped(mlp(dim, dim, dim))


def tower(inputs: int, width: int, outputs: int, *, depth: int, block: Callable[[int], nn.Module]) -> nn.Module:
    """Equal blocks between two linear layers."""
    return nn.Sequential(nn.Linear(inputs, width), *(block(width) for _ in range(depth)), nn.Linear(width, outputs))


def named(**modules: nn.Module) -> nn.Module:
    return nn.ModuleDict(modules)


def relu_and_dropout() -> nn.Module:
    return nn.Sequential(nn.ReLU(), nn.Dropout(0.3))


def deep(depth: int, *, gain: float, act: type[nn.Module], ends: bool = False) -> nn.Module:
    """Equal layers whose matrices have a typical singular value; `ends`: the first and the last one as well."""
    layers: list[nn.Module] = [nn.Linear(12, 24), act()]
    for _ in range(depth):
        layers += [nn.Linear(24, 24), act()]
        if not ends:
            nn.init.normal_(layers[-2].weight, std=gain / 24**0.5)
    model = nn.Sequential(*layers, nn.Linear(24, 4))
    for module in model if ends else ():
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=gain / module.in_features**0.5)
    return model


class Amplified(nn.Module):
    """x + factor * f(x)."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.inner, self.factor = mlp(24, 24, 24), factor

    def forward(self, x: Tensor) -> Tensor:
        return x + self.factor * self.inner(x)


def amplified(depth: int, factor: float) -> nn.Module:
    return tower(12, 24, 4, depth=depth, block=lambda dim: Amplified(factor))


class LoRA(nn.Module):
    """A frozen linear layer and a trained update of low rank, which begins at 0."""

    def __init__(self, base: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(rank, base.in_features) / base.in_features**0.5)
        self.b = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.a.mT @ self.b.mT


class Sine(nn.Module):
    """SIREN's activation."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(3.0 * x)


class Branches(nn.Module):
    """Several heads on one trunk, or, without a trunk, an ensemble."""

    def __init__(self, trunk: nn.Module, *heads: nn.Module) -> None:
        super().__init__()
        self.trunk, self.heads = trunk, nn.ModuleList(heads)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.trunk(x)
        return torch.cat([head(hidden) for head in self.heads], dim=1)


class NeuralODE(nn.Module):
    """A neural ODE by Euler's steps: one layer used eight times."""

    def __init__(self, dim: int = 12, classes: int = 4) -> None:
        super().__init__()
        self.field, self.head = mlp(dim, 24, dim, act=nn.Tanh), nn.Linear(dim, classes)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(8):
            x = x + 0.125 * self.field(x)
        return self.head(x)


def rare_head(model: nn.Module, share: float) -> nn.Module:
    """The head's bias begins at the rare class's log odds."""
    with torch.no_grad():
        model[-1].bias.fill_(math.log(share / (1 - share)))
    return model


def student_t(freedom: float, scale: float) -> Callable[[int], Tensor]:
    return lambda n: scale * torch.distributions.StudentT(freedom).sample((n,))


class Hyper(nn.Module):
    """One network writes the weights of another."""

    def __init__(self) -> None:
        super().__init__()
        self.writer = mlp(4, 32, 16 * 4 + 16 + 16)

    def forward(self, x: Tensor, task: Tensor) -> Tensor:
        inner, bias, outer = self.writer(task).split([64, 16, 16], dim=1)
        hidden = torch.relu(torch.einsum("nij,nj->ni", inner.view(-1, 16, 4), x) + bias)
        return (hidden * outer).sum(dim=1) / 4


def in_tasks(_: int) -> Batch:
    x, task = torch.randn(32, 4), torch.randn(32, 4)
    return x, task, torch.tanh((x * task).sum(dim=1))


class Equilibrium(nn.Module):
    """A layer is applied until nothing changes; only the last time is differentiated."""

    def __init__(self, dim: int = 24) -> None:
        super().__init__()
        self.inner, self.inputs, self.head = nn.Linear(dim, dim), nn.Linear(12, dim), nn.Linear(dim, 4)

    def forward(self, x: Tensor) -> Tensor:
        given = self.inputs(x)
        with torch.no_grad():
            state = torch.zeros_like(given)
            for _ in range(15):
                state = torch.tanh(self.inner(state) + given)
        return self.head(torch.tanh(self.inner(state) + given))


class Spiking(nn.Module):
    """Neurons that leak and fire over eight steps; a smooth slope stands for the jump."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(12, 48), nn.Linear(48, 4)

    def forward(self, x: Tensor) -> Tensor:
        current, charge, total = self.inner(x), torch.zeros(len(x), 48), torch.zeros(len(x), 4)
        for _ in range(8):
            charge = 0.8 * charge + current
            fired = self.fire(charge - 1.0)
            charge, total = charge - fired, total + self.outer(fired)
        return total / 8

    @staticmethod
    def fire(x: Tensor) -> Tensor:
        return OwnBackward.apply(x, lambda x: (x > 0).float(), lambda grad: grad / (1 + 5 * x.abs()) ** 2)


class Process(nn.Module):
    """A conditional neural process: what is known of a function says how likely its other values are."""

    def __init__(self, dim: int = 32) -> None:
        super().__init__()
        self.encoder, self.decoder = mlp(2, dim, dim, dim), mlp(dim + 1, dim, dim, 2)

    def forward(self, known: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        said = self.encoder(known).mean(dim=1, keepdim=True).expand(-1, x.shape[1], -1)
        mean, spread = self.decoder(torch.cat([said, x], dim=2)).chunk(2, dim=2)
        return mean, 0.1 + 0.9 * functional.softplus(spread)


@data.anew
def functions(size: int = 16) -> Batch:
    x = 4 * torch.rand(size, 16, 1) - 2
    y = (0.5 + torch.rand(size, 1, 1)) * torch.sin(2 * x + 6 * torch.rand(size, 1, 1))
    return torch.cat([x, y], dim=2)[:, :8], x[:, 8:], y[:, 8:]


def surprise(model: nn.Module, known: Tensor, x: Tensor, y: Tensor) -> Tensor:
    return -torch.distributions.Normal(*model(known, x)).log_prob(y).mean()


@data.given(lambda: torch.randn(6, 2))
def demonstrations(gains: Tensor, size: int = 64) -> Batch:
    """What an expert did in a state, with its unsteady hand."""
    state = torch.randn(size, 6)
    return state, torch.tanh(state @ gains) + 0.1 * (1 + state[:, :1].abs()) * torch.randn(size, 2)


def imitated_hand(model: nn.Module, state: Tensor, action: Tensor) -> Tensor:
    mean, spread = model(state).chunk(2, dim=1)
    return ((action - mean).square() * torch.exp(-2 * spread) / 2 + spread).sum(dim=1).mean()


class Binary(nn.Linear):
    """Weights of one size; their signs are learned as if they were numbers."""

    through = True

    def forward(self, x: Tensor) -> Tensor:
        signs = OwnBackward.apply(self.weight, torch.sign, lambda grad: grad) if self.through else self.weight.sign()
        return functional.linear(x, signs / self.in_features**0.5, self.bias)


class ReZero(nn.Module):
    """x + gate * f(x), where the gate, which has a name of its own, begins at 0: the first step moves nothing else."""

    def __init__(self, dim: int, gate: str = "weight") -> None:
        super().__init__()
        self.inner, self.gate_name = mlp(dim, dim, dim), gate
        self.register_parameter(gate, nn.Parameter(torch.zeros(())))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.get_parameter(self.gate_name) * self.inner(x)


def gated_rezero(dim: int) -> nn.Module:
    return ReZero(dim, "gate")


class Scale(nn.Module):
    """One factor per class."""

    def __init__(self, num: int) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(num))

    def forward(self, x: Tensor) -> Tensor:
        return self.factor * x


def sparse_codes(model: nn.Module, x: Tensor) -> Tensor:
    """What is seen is said again by few of many features."""
    code = model["coder"](x)
    return (model["speaker"](code) - x).square().mean() + 1e-3 * code.abs().sum(dim=1).mean()


@data.given(lambda: functional.normalize(torch.randn(24, 12), dim=1))
def mixed_signals(ways: Tensor, size: int = 64) -> Batch:
    return ((torch.rand(size, 24) * (torch.rand(size, 24) < 0.1)) @ ways * 2,)


class Masked(nn.Linear):
    """Output i sees inputs of a lower degree alone."""

    def __init__(self, before: Tensor, after: Tensor, strict: bool = False) -> None:
        super().__init__(len(before), len(after))
        self.register_buffer("mask", ((after[:, None] > before) if strict else (after[:, None] >= before)).float())

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.mask * self.weight, self.bias)


def one_by_one() -> nn.Module:
    seen, hidden = torch.arange(10), torch.arange(40) % 9
    return nn.Sequential(
        Masked(seen, hidden), nn.ReLU(), Masked(hidden, hidden), nn.ReLU(), Masked(hidden, seen, strict=True)
    )


@data.anew
def bits_in_pairs(size: int = 64) -> Batch:
    half = (torch.rand(size, 5) < torch.linspace(0.2, 0.8, 5)).float()
    return (torch.cat([half, (half + (torch.rand(size, 5) < 0.1)) % 2], dim=1),)


def own_bits(model: nn.Module, x: Tensor) -> Tensor:
    return functional.binary_cross_entropy_with_logits(model(x).float(), x)


def selu_net() -> nn.Module:
    model = mlp(12, 32, 32, 32, 32, 4, act=nn.SELU)
    for module in model:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=module.in_features**-0.5)
            nn.init.zeros_(module.bias)
    return model


class Highway(nn.Module):
    """x goes on as it is where the gate is shut."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.inner, self.gate = nn.Linear(dim, dim), nn.Linear(dim, dim)
        nn.init.constant_(self.gate.bias, -1.0)

    def forward(self, x: Tensor) -> Tensor:
        gate = torch.sigmoid(self.gate(x))
        return gate * torch.relu(self.inner(x)) + (1 - gate) * x


class TwoTasks(nn.Module):
    """Two heads on one trunk; each task's weight is learned as the logarithm of its variance."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = mlp(8, 32, 32, 32, norm=nn.BatchNorm1d)
        self.amount, self.kind = nn.Linear(32, 1), nn.Linear(32, 3)
        self.doubt = nn.Parameter(torch.zeros(2))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.relu(self.trunk(x))
        return self.amount(h), self.kind(h)


def amounts_and_kinds(size: int = 48, n: int = 2048) -> data.Batches:
    x = torch.randn(n, 8)
    return data.drawn(
        x,
        5 * torch.sin(x @ torch.randn(8, 1) / 2) + torch.randn(n, 1),
        (x @ torch.randn(8, 3)).argmax(dim=1),
        size=size,
    )


def doubted(model: nn.Module, x: Tensor, y: Tensor, label: Tensor) -> Tensor:
    amount, kind = model(x)
    tasks = torch.stack([functional.mse_loss(amount, y), functional.cross_entropy(kind, label)])
    return (torch.exp(-model.doubt) * tasks + model.doubt).mean()


@data.anew
def wide_and_narrow(size: int = 48) -> Batch:
    """A small curve whose noise depends on the place: a likelihood that soon is above 1."""
    x = torch.randn(size, 5)
    return x, 0.2 * torch.sin(2 * x[:, :1]) + 0.03 * (1 + x[:, 1:2].abs()) * torch.randn(size, 1)


class Tasks(nn.Module):
    """A trunk and two heads whose losses are weighted by learned uncertainties."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(mlp(8, 32, 32), nn.ReLU())
        self.value, self.kind, self.log_vars = nn.Linear(32, 1), nn.Linear(32, 3), nn.Parameter(torch.zeros(2))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.trunk(x)
        return self.value(h), self.kind(h)


def uncertain(model: nn.Module, x: Tensor, y: Tensor, kind: Tensor) -> Tensor:
    value, logits = model(x)
    losses = torch.stack([functional.mse_loss(value, y), functional.cross_entropy(logits, kind)])
    return ((-model.log_vars).exp() * losses + model.log_vars).sum()


@data.given(lambda: torch.randn(8, 4) / 8**0.5)
def two_tasks(w: Tensor, size: int = 32) -> Batch:
    """A small value and one of three kinds."""
    x = torch.randn(size, 8)
    h = x @ w
    return x, 0.3 * h[:, :1].sin() + 0.02 * torch.randn(size, 1), h[:, 1:].argmax(1)


@data.anew
def returns(size: int = 32) -> Batch:
    """Series of which one value in fifty is ten times as large; the next value is to be told."""
    x = torch.randn(size, 17).cumsum(1) / 4
    x = torch.where(torch.rand(size, 17) < 0.02, 10 * x, x)
    return x[:, :16], x[:, 16:]
