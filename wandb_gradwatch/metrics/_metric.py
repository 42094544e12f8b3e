"""Metric: any function of any tensor, as the user states it, and how its values in a sample become one number."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

import torch
from torch import Tensor

from .._capture.parameter_registry import NameFilter
from .._measure.elements import wide_dtype
from ..snapshot import keys
from ._rows import widened

# K labels (one without named dimensions), E elements of each

Aggregate = str | Callable[[Tensor], Tensor]

# How values [K, E] become a state [K], and two states one; a mean is a sum until it is read.
_REDUCTIONS: Final[dict[str, tuple[Callable[[Tensor, int], Tensor], Callable[[Tensor, Tensor], Tensor]]]] = {
    "mean": (torch.sum, torch.add),
    "sum": (torch.sum, torch.add),
    "min": (torch.amin, torch.minimum),
    "max": (torch.amax, torch.maximum),
}
AGGREGATES: Final = tuple(_REDUCTIONS)
SUBJECTS: Final = (keys.PARAMETER, keys.GRADIENT, keys.ACTIVATION, keys.UPDATE)


@dataclass(frozen=True)
class Metric:
    """A number of the user's own, logged as `<on>/<name of the tensor>/<name>` at sampled steps.

    Args:
        name: what it is called; no slash and no dot.
        fn: gets one tensor and returns a tensor: a scalar, or any shape, which `aggregate` reduces. It must stay on the
            device: no `.item()`. What it gets must not be kept or modified; half precision arrives as float32.
            parameter: the parameter, before the update. gradient: the true gradient, accumulated, without the loss
            scale, before clipping. update: the parameter's change. All of the parameter's own shape.
            activation: the output of a module, each tensor in it, and each tensor that a module hands over (of
            attentions every head's query, key and value); once per forward, so per micro-batch.
        on: "parameter", "gradient", "activation" or "update".
        match: whose: a regular expression (searched in the name), several, or a function of the name; None: all.
        aggregate: what many values become, those of one result and those of the micro-batches alike: "mean" (over all
            elements), "sum", "min", "max", or a function of all of them, in one dimension, to a scalar tensor.
        every: measured at every n-th sampled step.
        dims: dimensions of fn's result that are kept apart, with their names: {0: "head"} logs
            `<on>/<name of the tensor>/head_0/<name>` and so on.

    Memory: of each tensor one number per label until the sample is complete; where `aggregate` is a function, all that
        fn has returned.

    Raises:
        TypeError: fn or aggregate is not a function.
        ValueError: a name, `on`, `aggregate`, `every` or `dims` that makes no sense.
    """

    name: str
    fn: Callable[[Tensor], Tensor]
    on: str = field(default="parameter", kw_only=True)
    match: NameFilter | None = field(default=None, kw_only=True)
    aggregate: Aggregate = field(default="mean", kw_only=True)
    every: int = field(default=1, kw_only=True)
    dims: Mapping[int, str] | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name or set(self.name) & {"/", "."}:
            raise ValueError(f"Metric({self.name!r}, ...): the name must be a word without slashes and dots")
        if not callable(self.fn):
            raise TypeError(f"{self}: fn={self.fn!r} must be a function of a tensor")
        if self.on not in SUBJECTS:
            raise ValueError(f"{self}: on={self.on!r} must be one of {SUBJECTS}")
        if not callable(self.aggregate) and self.aggregate not in AGGREGATES:
            raise ValueError(f"{self}: aggregate={self.aggregate!r} must be one of {AGGREGATES} or a function")
        if isinstance(self.every, bool) or not isinstance(self.every, int) or self.every < 1:
            raise ValueError(f"{self}: every={self.every!r} must be a whole number of sampled steps, at least 1")
        if self.dims is not None and not _names_dimensions(self.dims):
            raise ValueError(f'{self}: dims={self.dims!r} must name dimensions, as in {{0: "head"}}')

    def __str__(self) -> str:
        return f"Metric({self.name!r}, on={self.on!r})"

    def value_of(self, tensor: Tensor) -> Tensor:
        """Apply fn, outside of any autocast of the user's, and leave the random numbers of training as they were.

        Raises:
            TypeError: it does not return a real tensor.
        """
        tensor = widened(tensor)
        devices = [tensor.device] if tensor.is_cuda else []
        with torch.autocast(tensor.device.type, enabled=False), torch.random.fork_rng(devices):
            return self._checked(self.fn(tensor))

    def _checked(self, value: Any) -> Tensor:
        if isinstance(value, Tensor) and not value.is_complex():
            return value
        if isinstance(value, bool | int | float):
            raise TypeError(
                f"{self} returned the Python number {value!r}; return a tensor, without .item() or float(), so that "
                "training does not wait for the device"
            )
        found = "a complex tensor" if isinstance(value, Tensor) else f"{type(value).__name__}"
        raise TypeError(f"{self} must return a real tensor, but returned {found}")


def _names_dimensions(dims: object) -> bool:
    return isinstance(dims, Mapping) and all(isinstance(d, int) and isinstance(name, str) for d, name in dims.items())


@dataclass(frozen=True, eq=False)
class Tally:
    """The values of one metric of one tensor, in one sample.

    A mean is that of all elements, so that micro-batches of different sizes weigh as much as they hold.
    """

    labels: list[str]  # K
    aggregate: Aggregate
    states: tuple[Tensor, ...]  # one [K]; where `aggregate` is the user's function, all values instead: [K, E] each
    count: int  # E

    @classmethod
    def of(cls, values_KE: Tensor, aggregate: Aggregate, labels: list[str]) -> Tally:
        """The values of one forward, or of one tensor; at least one for each label."""
        values_KE = values_KE.detach().to(wide_dtype(values_KE.device))
        state = values_KE.clone() if callable(aggregate) else _REDUCTIONS[aggregate][0](values_KE, 1)
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
