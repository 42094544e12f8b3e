"""A weak-key dictionary by identity, because an optimizer that defines __eq__ has no hash."""

import weakref
from collections.abc import Iterator
from typing import Generic, TypeVar

Key = TypeVar("Key")
Value = TypeVar("Value")


class WeakKeyDictionary(Generic[Key, Value]):
    """Maps objects to values. An entry is removed when its object is freed."""

    def __init__(self) -> None:
        self._entries: dict[int, tuple[weakref.ref[Key], Value]] = {}

    def __setitem__(self, key: Key, value: Value) -> None:
        number, entries = id(key), self._entries
        self._entries[number] = (weakref.ref(key, lambda _: entries.pop(number, None)), value)

    def __iter__(self) -> Iterator[Key]:
        """Iterate over the objects that are still alive."""
        return iter([key for reference, _ in list(self._entries.values()) if (key := reference()) is not None])

    def get(self, key: Key | None) -> Value | None:
        entry = self._entries.get(id(key))
        return None if entry is None else entry[1]
