"""Functions of one tensor, by the names that the sets use: of a batch, an output, a gradient, a loss, or weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional

Transform = Callable[[Tensor], Tensor]


def transform(spec: str | Sequence[Any]) -> Transform:
    """Return the function of a specification: "zeros", ["times", 255], or [[...], [...]], one after the other."""
    if isinstance(spec, str):
        return _TRANSFORMS[spec]
    if isinstance(spec[0], str):
        function, arguments = _TRANSFORMS[spec[0]], spec[1:]
        return lambda x: function(x, *arguments)
    parts = [transform(part) for part in spec]

    def chained(x: Tensor) -> Tensor:
        for part in parts:
            x = part(x)
        return x

    return chained


def added(x: Tensor, factor: float, by: str | Sequence[Any]) -> Tensor:
    """x + factor * another transform of x."""
    return x + factor * transform(by)(x)


def filled_at(x: Tensor, dim: int, index: int, value: float | str) -> Tensor:
    return x.index_fill(dim, torch.tensor([index]), float(value))


def column_times(x: Tensor, column: int, factor: float) -> Tensor:
    """One feature in other units."""
    x = x.clone()
    x[..., column] = factor * x[..., column]
    return x


def corner(x: Tensor, rows: int, columns: int, value: float | str) -> Tensor:
    """Set the first columns of the first rows."""
    x = x.clone()
    x[:rows, :columns] = float(value)
    return x


def rows_filled(x: Tensor, first: int, end: int, value: float) -> Tensor:
    x = x.clone()
    x[first:end] = value
    return x


def first_element(x: Tensor, value: float | str) -> Tensor:
    x = x.clone()
    x.view(-1)[0] = float(value)
    return x


def first_column_plus(x: Tensor, value: float) -> Tensor:
    return x + value * (torch.arange(x.shape[-1]) == 0)


def first_row_plus(x: Tensor, value: float | str) -> Tensor:
    return x + filled_at(torch.zeros(len(x), *[1] * (x.dim() - 1)), 0, 0, value)


def first_sample_times(x: Tensor, factor: float) -> Tensor:
    return torch.cat([factor * x[:1], x[1:]])


def missing(x: Tensor, share: float, value: float) -> Tensor:
    """A share of all numbers is missing, for which this value stands."""
    return x.masked_fill(torch.rand_like(x) < share, value)


def normal(x: Tensor, deviation: float) -> Tensor:
    return torch.empty_like(x).normal_(std=deviation)


def uniform(x: Tensor, low: float, high: float) -> Tensor:
    return torch.empty_like(x).uniform_(low, high)


def number(value: Tensor) -> Tensor:
    """A loss that forgot what it was made of."""
    return value.detach().requires_grad_()


def standardised_rows(x: Tensor) -> Tensor:
    return (x - x.mean(dim=1, keepdim=True)) / x.std(dim=1, keepdim=True)


def by_deviation_of_constants(x: Tensor) -> Tensor:
    """Add a constant batch that is standardised: 0/0."""
    constant = x * 0 + 1
    return x + (constant - constant.mean(0)) / constant.std(0)


def by_deviation_of_one(x: Tensor) -> Tensor:
    """Divide by the deviation of a single sample."""
    return x / (1 + 0 * x[:1].std(dim=0))


def plus_norm_of_zeros(x: Tensor) -> Tensor:
    """Add the norm of a vector of zeros, which is 0: its derivative is 0/0."""
    return x + (x - x.detach()).square().sum().sqrt()


def plus_root_of_zero(x: Tensor) -> Tensor:
    return (x - x.detach()).sqrt() + x


def plus_own_angle(x: Tensor) -> Tensor:
    """Add the angle between a vector and itself, whose derivative is that of an arc cosine at 1."""
    return x + torch.acos(torch.ones_like(x[:, :1]) + 0 * x[:, :1])


def plus_mean_over_nothing(x: Tensor) -> Tensor:
    """Add a weighted mean whose weights are all 0."""
    weights = torch.zeros(4)
    return x + (x.mean() * weights).sum() / weights.sum()


def plus_softmax_of_nothing(x: Tensor) -> Tensor:
    return x + torch.full_like(x, -math.inf).softmax(-1)


def plus_own_distances(x: Tensor) -> Tensor:
    """Distances in the batch by hand, each sample's to itself included."""
    flat = x.flatten(1)
    return x + 1e-6 * (flat[:, None] - flat[None]).square().sum(dim=2).sqrt().mean()


def plus_distances_in_episodes(x: Tensor) -> Tensor:
    return x + 1e-3 * (x[:, :, None] - x[:, None]).square().sum(dim=3).sqrt().mean()


def plus_change_at_rest(x: Tensor) -> Tensor:
    """Add the root of the mean square of a change that is 0: by hand, its slope is 0/0."""
    rest = x[:, :1].expand_as(x)
    return x + 1e-3 * (rest[:, 1:] - rest[:, :-1]).square().mean(dim=1, keepdim=True).sqrt()


def plus_equal_eigenvectors(x: Tensor) -> Tensor:
    """Add the eigenvectors of a matrix whose eigenvalues are all the same."""
    same = torch.eye(4) + 0 * x.mean()
    return x + torch.linalg.eigh(same).eigenvectors.sum() * 0.01


def two_atoms_in_one_place(atoms: Tensor) -> Tensor:
    atoms = atoms.clone()
    atoms[0, 1] = atoms[0, 0] + 1e-3
    return atoms


_TRANSFORMS: Final[dict[str, Callable[..., Tensor]]] = {
    "abs": torch.abs,
    "clamped": torch.clamp,
    "data": lambda x: x.data,
    "detached": Tensor.detach,
    "dropout": functional.dropout,
    "exp": torch.exp,
    "expanded": lambda x: x[:1].expand_as(x),
    "filled": lambda x, value: torch.full_like(x, float(value)),
    "first": lambda x, num: x[:num],
    "float": Tensor.float,
    "log": torch.log,
    "negated": torch.neg,
    "next_class": lambda y, by, classes: (y + by) % classes,
    "noise": torch.randn_like,
    "over": lambda x, divisor: x / divisor,
    "over_zero": lambda x: x / (0 * x),
    "plus": lambda x, value: x + value,
    "positive": lambda x: x * (x > 0),
    "power": lambda x, exponent: x**exponent,
    "random_class": torch.randint_like,
    "relu": torch.relu,
    "root": torch.sqrt,
    "root_where_positive": lambda x: torch.where(x > 0, x.sqrt(), 0.0),
    "round": torch.round,
    "shuffled": lambda y: y[torch.randperm(len(y))],
    "sign": torch.sign,
    "softmax": lambda x: x.softmax(dim=1),
    "standardised": lambda x: (x - x.mean()) / x.std(),
    "threshold": lambda x: (x > 0).float(),
    "times": lambda x, factor: x * float(factor),
    "transposed": lambda x: x.T.clone(),
    "zeros": torch.zeros_like,
    **{
        one.__name__: one
        for one in (
            added, by_deviation_of_constants, by_deviation_of_one, column_times, corner, filled_at, first_column_plus,
            first_element, first_row_plus, first_sample_times, missing, normal, number, plus_change_at_rest,
            plus_distances_in_episodes, plus_equal_eigenvectors, plus_mean_over_nothing, plus_norm_of_zeros,
            plus_own_angle, plus_own_distances, plus_root_of_zero, plus_softmax_of_nothing, rows_filled,
            standardised_rows, two_atoms_in_one_place, uniform,
        )
    },
}  # fmt: skip
