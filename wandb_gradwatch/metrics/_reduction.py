"""How one metric's values in a sample become one number, over a tensor's elements and over micro-batches alike."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import Tensor

from .._measure.elements import wide_dtype

# K labels (one without named dimensions), E elements of each

Aggregate = str | Callable[[Tensor], Tensor]


def widened(tensor: Tensor) -> Tensor:
    """Half precision and less as float32, everything else as it is."""
    return tensor.float() if tensor.is_floating_point() and tensor.element_size() < 4 else tensor


# How values [K, E] become a state [K], and two states one; a mean is a sum until it is read.
_REDUCTIONS: Final[dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor, Tensor], Tensor]]]] = {
    "mean": (lambda values_KE: values_KE.sum(1), torch.add),
    "sum": (lambda values_KE: values_KE.sum(1), torch.add),
    "min": (lambda values_KE: values_KE.amin(1), torch.minimum),
    "max": (lambda values_KE: values_KE.amax(1), torch.maximum),
}
AGGREGATES: Final = tuple(_REDUCTIONS)


@dataclass(frozen=True, eq=False)
class Tally:
    """The values of one metric of one tensor, in one sample.

    A mean is that of all elements, so that micro-batches of different sizes weigh as much as they hold.

    Args:
        labels: K of them.
        aggregate: what the values become.
        states: one [K]; where `aggregate` is the user's function, all values instead: [K, E] each.
        count: E.
    """

    labels: list[str]
    aggregate: Aggregate
    states: tuple[Tensor, ...]
    count: int

    @classmethod
    def of(cls, values_KE: Tensor, aggregate: Aggregate, labels: list[str]) -> Tally:
        """The values of one forward, or of one tensor; at least one for each label."""
        values_KE = values_KE.detach().to(wide_dtype(values_KE.device))
        state = values_KE.clone() if callable(aggregate) else _REDUCTIONS[aggregate][0](values_KE)
        return cls(labels, aggregate, (state,), values_KE.shape[1])

    def merge(self, later: Tally) -> Tally:
        """This tally and another one of the same metric as one."""
        states = self.states + later.states
        if not callable(self.aggregate):
            states = (_REDUCTIONS[self.aggregate][1](*states),)
        return replace(self, states=states, count=self.count + later.count)

    def results(self) -> list[Tensor]:
        """K scalars."""
        if callable(self.aggregate):
            return [self.aggregate(values) for values in torch.cat(self.states, dim=1)]
        (state,) = self.states
        return list(state / self.count if self.aggregate == "mean" else state)
