"""What an optimizer's groups say about each parameter: learning rate, weight decay, epsilon and momentum."""

import math
from collections.abc import Mapping
from numbers import Real
from typing import Any, Final

import numpy as np
from torch import Tensor
from torch.optim import Optimizer

from .._measure.columns import FloatArray
from .._runtime.steps import OptimizerTable
from .._transfer.transfers import Names
from .parameter_registry import ParameterRegistry

# P watched parameters, G facts of groups: the first of `keys.PARAMETER_FACTS`, which "trainable" follows

_NUM_FACTS: Final = 4
_Slots = list[list[int]]  # of each group


class GroupFacts:
    """The facts of the open sample, from the groups of the optimizers that step in it.

    They are numbers on the host, and the same array as long as no group changes.
    """

    def __init__(self, registry: ParameterRegistry) -> None:
        self._registry = registry
        # By optimizer: what its slots depend on, the slots, the groups' numbers, and the facts made of them [P, G]
        self._known: OptimizerTable[tuple[object, _Slots, list[tuple[float, ...]], FloatArray]] = OptimizerTable()
        self._sample: FloatArray | None = None
        self._last: tuple[FloatArray | None, tuple[bool, ...], FloatArray] | None = None  # what `take` was made of

    def see(self, optimizer: Optimizer) -> None:
        """Add the facts of an optimizer that is about to step."""
        own_PG = self._facts_of(optimizer)
        if self._sample is not None:
            own_PG = np.where(np.isnan(own_PG), self._sample, own_PG)
        self._sample = own_PG

    def forget(self) -> None:
        """Forget the facts of the open sample."""
        self._sample = None

    def take(self, names: Names) -> FloatArray:
        """Return the facts of the closed sample and whether each parameter is trainable: [P, G + 1]; not to change."""
        sample, self._sample = self._sample, None
        if self._last is None or self._last[0] is not sample or self._last[1] is not names.trainable:
            facts: FloatArray = np.full((len(names.names), _NUM_FACTS + 1), np.nan)
            facts[:, -1] = names.trainable
            if sample is not None:
                facts[: len(sample), :-1] = sample
            self._last = sample, names.trainable, facts
        return self._last[2]

    def _facts_of(self, optimizer: Optimizer) -> FloatArray:
        groups, registry = optimizer.param_groups, self._registry
        ids = [[*map(id, group["params"])] for group in groups]
        numbers, depends_on = list(map(_numbers_of, groups)), (registry.version, len(registry.names), ids)
        known = self._known.get(optimizer)
        is_known = known is not None and known[0] == depends_on
        # A missing number is always the same object, so that it compares equal.
        if known is not None and is_known and known[2] == numbers:
            return known[3]
        slot_of_id = registry.slot_of_id
        slots = (
            known[1]
            if known is not None and is_known
            else [[slot_of_id[one] for one in of_group if one in slot_of_id] for of_group in ids]
        )
        facts_PG: FloatArray = np.full((len(registry.names), _NUM_FACTS), np.nan)
        for of_group, values in zip(slots, numbers, strict=True):
            facts_PG[of_group] = values
        self._known[optimizer] = depends_on, slots, numbers, facts_PG
        return facts_PG


def _numbers_of(group: Mapping[str, Any]) -> tuple[float, ...]:
    """Return the facts of a group: [G]; NaN where it has none, or one that only a device knows."""
    momentum = group.get("momentum")
    if momentum is None and isinstance(betas := group.get("betas"), tuple | list) and betas:
        momentum = betas[0]
    values = (group.get("lr"), group.get("weight_decay"), group.get("eps"), momentum)
    return tuple([value if type(value) is float else _number(value) for value in values])


def _number(value: Any) -> float:
    """Return a number as a float; NaN for anything else, and for a tensor on a device, to read which would wait."""
    if value is None:  # the check of `Real`, an abstract class, takes ten times as long
        return math.nan
    if type(value) is int:
        return float(value)
    is_known = value.is_cpu and value.numel() == 1 if isinstance(value, Tensor) else isinstance(value, Real)
    return float(value) if is_known else math.nan
