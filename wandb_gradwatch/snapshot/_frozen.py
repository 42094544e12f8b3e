"""Arrays that many read and nobody writes: rules and sinks are given the same snapshot, one after the other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar, overload

import numpy as np

Value = TypeVar("Value")
Array = TypeVar("Array", bound=np.ndarray)


def frozen(values: Array) -> Array:
    """The same values, which cannot be written through this array."""
    if not values.flags.writeable:
        return values
    view = values.view()
    view.flags.writeable = False
    return view


class derived(Generic[Value]):  # noqa: N801  # a decorator, as cached_property is
    """A property that is computed once; an array is frozen.

    Like functools.cached_property, but for its lock (before Python 3.12) and without a wrapper that freezes: what is
    derived of each sample is a large part of what judging it takes.
    """

    def __init__(self, compute: Callable[[Any], Value]) -> None:
        self._compute, self._name, self.__doc__ = compute, compute.__name__, compute.__doc__

    @overload
    def __get__(self, owner: None, kind: type) -> derived[Value]: ...

    @overload
    def __get__(self, owner: object, kind: type) -> Value: ...

    def __get__(self, owner: object | None, kind: type) -> Value | derived[Value]:
        if owner is None:
            return self
        value = self._compute(owner)
        # Beside this descriptor, which sets nothing: the next look does not come here any more.
        vars(owner)[self._name] = value = frozen(value) if isinstance(value, np.ndarray) else value
        return value
