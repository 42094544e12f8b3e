"""Values of one sample, or of what may become part of one, by key."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import TypeVar

from torch import Tensor

from .._measure.elements import onto

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


class Store(dict[Key, Value]):
    """A dictionary whose values merge. No value is ever changed in place, so that copies may share them.

    Args:
        merge: makes one value of two of the same key.
    """

    def __init__(self, merge: Callable[[Value, Value], Value]) -> None:
        super().__init__()
        self._merge = merge
        self._marked: dict[Key, Value] = {}

    def add(self, key: Key, value: Value) -> None:
        """Merge a value with what the key has."""
        self[key] = self._merge(self[key], value) if key in self else value

    def take(self) -> dict[Key, Value]:
        """Return everything, and forget it."""
        taken = dict(self)
        self.clear()
        return taken

    def absorb(self, later: Store[Key, Value]) -> None:
        """Merge everything of another store into this one, and empty the other."""
        for key, value in later.take().items():
            self.add(key, value)

    def clear(self) -> None:
        super().clear()
        self._marked = {}

    def mark(self) -> None:
        """Remember what there is."""
        self._marked = dict(self)

    def go_back(self) -> None:
        """Hold again what there was at `mark`."""
        marked = self._marked
        self.clear()
        self.update(marked)


def add_on_device(one: Tensor, other: Tensor) -> Tensor:
    """The sum of two tensors, on the first one's device."""
    return one + onto(other, one.device)
