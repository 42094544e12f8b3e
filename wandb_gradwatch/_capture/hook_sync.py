"""Keeps the hooks where the parameters are: new, replaced, unfrozen, swapped and sharded ones."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Final

from torch import Tensor

from .._runtime.autograd import Entry
from .._runtime.sharding import Shards, fsdp1_flat_parameters
from .gradient_versions import mark_as_older_than_its_hook
from .hooks import BackwardHooks
from .parameter_registry import ParameterRegistry

NO_SLOT: Final = -1  # of FSDP1's flat parameters: they tell when a backward ends, and nothing else


class HookSync:
    """Walks the model and hooks what is there.

    Args:
        registry: the watched parameters.
        hooks: on them.
        shards: is told which of them are sharded.
        found: told how many names there are, when there may be more of them.
        new: told of slots that are followed from now on.
    """

    def __init__(
        self,
        registry: ParameterRegistry,
        hooks: BackwardHooks,
        shards: Shards,
        *,
        found: Callable[[int], None],
        new: Callable[[Sequence[int]], None],
    ) -> None:
        self._registry = registry
        self._hooks = hooks
        self._shards = shards
        self._found = found
        self._new = new
        self._version = self._changes = -1  # the registry's, when it was followed

    def start(self) -> None:
        """Hook everything that can have a gradient."""
        self._follow(self._registry.scan())

    def would_tell(self, parameter: Tensor) -> bool:
        """Whether a backward that had reached this parameter would have been seen."""
        return not self._shards.uses_fsdp1 and self._hooks.is_hooked(parameter)

    def scan(self, marked: Collection[int]) -> list[Entry]:
        """Walk the model, and follow what is new in it.

        Args:
            marked: the slots whose hooks have told of a gradient.
        """
        entries = self._registry.scan()
        # A gradient that no hook has told of: the hook is gone with a tensor that was swapped.
        if (
            self._registry.changes != self._changes
            or self._shards.uses_fsdp1
            or any(slot not in marked and parameter.grad is not None for slot, parameter in entries)
        ):
            new = self._follow(entries)
            if new:
                self._new(new)
        return entries

    def _follow(self, entries: Sequence[Entry]) -> list[int]:
        """Hook what is new, and return its slots."""
        self._changes = self._registry.changes
        self._found(len(self._registry.names))
        if self._registry.version != self._version:
            self._version = self._registry.version
            self._shards.update(entries, self._registry.models())
        if self._shards.uses_fsdp1:  # the leaves of its backward are not the model's parameters
            entries = [*entries, *((NO_SLOT, leaf) for leaf in fsdp1_flat_parameters(self._registry.models()))]
        new = [slot for slot in self._hooks.follow(entries) if slot != NO_SLOT]
        for slot, parameter in entries if new else ():
            if slot in new and parameter.grad is not None:
                mark_as_older_than_its_hook(parameter.grad)
        return new
