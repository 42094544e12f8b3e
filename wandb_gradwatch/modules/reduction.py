"""How one metric's values in a sample become one number, over a tensor's elements and over micro-batches alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor

from ..statistics.elements import wide_dtype

# K labels (one without named dimensions), E elements of each

Aggregate = str | Callable[[Tensor], Tensor]
AGGREGATES: Final = ("mean", "sum", "min", "max")


class Tally:
    """The values of one metric of one tensor, in one sample.

    A mean is that of all elements, so that micro-batches of different sizes weigh as much as they hold. Only for an
    aggregate of the user's are the values kept; else a state of K numbers is.
    """

    def __init__(self, aggregate: Aggregate, labels: list[str]) -> None:
        self.labels = labels
        self._aggregate = aggregate
        self._state: Tensor | None = None
        self._count = 0
        self._kept: list[Tensor] = []

    def add(self, values_KE: Tensor) -> None:
        """Values of one forward, or of one tensor."""
        values_KE = values_KE.detach().to(wide_dtype(values_KE.device))
        if callable(self._aggregate):
            self._kept.append(values_KE.clone())
            return
        if not values_KE.shape[1]:
            return
        if self._aggregate in ("mean", "sum"):
            summed_K, self._count = values_KE.sum(1), self._count + values_KE.shape[1]
            self._state = summed_K if self._state is None else self._state + summed_K
        elif self._aggregate == "min":
            least_K = values_KE.amin(1)
            self._state = least_K if self._state is None else torch.minimum(self._state, least_K)
        else:
            most_K = values_KE.amax(1)
            self._state = most_K if self._state is None else torch.maximum(self._state, most_K)

    def merge(self, later: Tally) -> None:
        """Add what another tally of the same metric holds."""
        self._kept += later._kept
        self._count += later._count
        if self._state is None or later._state is None:
            self._state = later._state if self._state is None else self._state
        elif self._aggregate in ("mean", "sum"):
            self._state = self._state + later._state
        elif self._aggregate == "min":
            self._state = torch.minimum(self._state, later._state)
        else:
            self._state = torch.maximum(self._state, later._state)

    def results(self) -> list[Tensor]:
        """K scalars; none where nothing was added."""
        if callable(self._aggregate):
            if not self._kept:
                return []
            return [self._aggregate(values) for values in torch.cat(self._kept, dim=1)]
        if self._state is None:
            return []
        return list(self._state / self._count if self._aggregate == "mean" else self._state)
