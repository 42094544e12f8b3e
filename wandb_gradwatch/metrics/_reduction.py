"""How one metric's values in a sample become one number, over a tensor's elements and over micro-batches alike."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from typing import Final, Generic, TypeVar

import torch
from torch import Tensor

from .._measure.elements import onto, wide_dtype

# K labels (one without named dimensions), E elements of each

Aggregate = str | Callable[[Tensor], Tensor]
AGGREGATES: Final = ("mean", "sum", "min", "max")

Key = TypeVar("Key", bound=Hashable)


def widened(tensor: Tensor) -> Tensor:
    """Half precision and less as float32, everything else as it is."""
    return tensor.float() if tensor.is_floating_point() and tensor.element_size() < 4 else tensor


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

    def copy(self) -> Tally:
        """Another one of the same values; tensors are shared, as they are never changed in place."""
        other = Tally(self._aggregate, self.labels)
        other._state, other._count, other._kept = self._state, self._count, list(self._kept)
        return other

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


class Tallies(Generic[Key]):
    """Tallies by key: those of a sample, or of what may become part of one."""

    def __init__(self) -> None:
        self._tallies: dict[Key, Tally] = {}
        self._marked: dict[Key, Tally] = {}

    def __contains__(self, key: Key) -> bool:
        return key in self._tallies

    def __iter__(self) -> Iterator[tuple[Key, Tally]]:
        return iter(tuple(self._tallies.items()))

    def of(self, key: Key, aggregate: Aggregate, labels: list[str]) -> Tally:
        """The key's tally, a new one where it has none."""
        if key not in self._tallies:
            self._tallies[key] = Tally(aggregate, labels)
        return self._tallies[key]

    def discard(self, key: Key) -> None:
        """Forget one, if it is there."""
        self._tallies.pop(key, None)

    def drop(self, wrong: Callable[[Key], bool]) -> None:
        """Forget those of some keys."""
        self._tallies = {key: tally for key, tally in self._tallies.items() if not wrong(key)}

    def absorb(self, later: Tallies[Key]) -> None:
        """Take over everything of another."""
        for key, tally in later:
            if key in self._tallies:
                self._tallies[key].merge(tally)
            else:
                self._tallies[key] = tally
        later.clear()

    def mark(self) -> None:
        """Remember what there is."""
        self._marked = {key: tally.copy() for key, tally in self._tallies.items()}

    def go_back(self) -> None:
        """Be again what was marked."""
        self._tallies = self._marked

    def clear(self) -> None:
        """Forget everything."""
        self._tallies, self._marked = {}, {}


class Sums:
    """Tensors that are added, by key: those of a sample, or of what may become part of one."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._marked: dict[str, Tensor] = {}

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return iter(tuple(self._sums.items()))

    def add(self, key: str, values: Tensor) -> None:
        """Add to what the key has."""
        known = self._sums.get(key)
        self._sums[key] = values if known is None else known + onto(values, known.device)

    def absorb(self, later: Sums) -> None:
        """Take over everything of another."""
        for key, values in later:
            self.add(key, values)
        later.clear()

    def mark(self) -> None:
        """Remember what there is; sums are never changed in place."""
        self._marked = dict(self._sums)

    def go_back(self) -> None:
        """Be again what was marked."""
        self._sums = self._marked

    def clear(self) -> None:
        """Forget everything."""
        self._sums, self._marked = {}, {}
