"""Arrays that many read and nobody writes: rules and sinks are given the same snapshot, one after the other."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, wraps
from typing import Any, TypeVar

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


def derived(compute: Callable[[Any], Value]) -> cached_property[Value]:
    """A property that is computed once; an array is frozen."""

    @wraps(compute)
    def compute_frozen(owner: Any) -> Value:
        value = compute(owner)
        return frozen(value) if isinstance(value, np.ndarray) else value

    return cached_property(compute_frozen)
