"""Keeps the hooks where the parameters are: new, replaced, unfrozen, swapped and sharded ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from torch import Tensor

from .._runtime.autograd import Entry
from .._runtime.notices import Notices
from .._runtime.sharding import Shards, fsdp1_flat_parameters
from .._transfer.sample_buffer import SampleBuffer
from .clock import SampleClock
from .gradient_versions import mark_as_older_than_its_hook
from .hooks import BackwardHooks
from .parameter_registry import ParameterRegistry

NO_SLOT: Final = -1  # of FSDP1's flat parameters: they tell when a backward ends, and nothing else


class HookSync:
    """Walks the model and hooks what is there.

    Args:
        registry: the watched parameters.
        clock: knows which parameters' hooks have told of a gradient.
        hooks: on them.
        shards: is told which of them are sharded.
        window: is told how many names there are.
        notices: what is to be said.
    """

    def __init__(
        self,
        registry: ParameterRegistry,
        clock: SampleClock,
        hooks: BackwardHooks,
        shards: Shards,
        window: SampleBuffer,
        notices: Notices,
    ) -> None:
        self._registry = registry
        self._clock = clock
        self._hooks = hooks
        self._shards = shards
        self._window = window
        self._notices = notices
        self._version = self._changes = -1  # the registry's, when it was followed

    def start(self) -> None:
        """Hook everything that can have a gradient."""
        self._follow(self._registry.scan())

    def take_off(self, *, is_alone: bool) -> None:
        """Leave no hook on any parameter, until the next scan. Not inside a backward.

        Args:
            is_alone: no other thread may run a backward, so that what torch visits on each parameter can go as well.
        """
        self._hooks.take_off(self._leaves(self._registry.scan()) if is_alone else ())
        self._changes = -1

    def would_tell(self, parameter: Tensor) -> bool:
        """Whether a backward that had reached this parameter would have been seen."""
        return not self._shards.uses_fsdp1 and self._hooks.is_hooked(parameter)

    def scan(self) -> list[Entry]:
        """Walk the model, and follow what is new in it."""
        entries = self._registry.scan()
        # A gradient that no hook has told of: the hook is gone with a tensor that was swapped.
        if (
            self._registry.changes != self._changes
            or self._shards.uses_fsdp1
            or any([p.grad is not None for slot, p in entries if slot not in self._clock.marked])
        ):
            new = self._follow(entries)
            if new:
                self._notices.say(
                    "new parameters",
                    "now following parameters that were added, replaced or unfrozen after watch(): "
                    + self._registry.some_names(new),
                )
        return entries

    def _follow(self, entries: Sequence[Entry]) -> list[int]:
        """Hook what is new, and return its slots."""
        self._changes = self._registry.changes
        self._window.resize(len(self._registry.names))
        if self._registry.version != self._version:
            self._version = self._registry.version
            self._shards.update(entries, self._registry.models())
        new = [slot for slot in self._hooks.follow(self._leaves(entries)) if slot != NO_SLOT]
        for slot, parameter in entries if new else ():
            if slot in new and parameter.grad is not None:
                mark_as_older_than_its_hook(parameter.grad)
        return new

    def _leaves(self, entries: Sequence[Entry]) -> Sequence[Entry]:
        """What a backward reaches: with FSDP1 not the model's parameters."""
        if not self._shards.uses_fsdp1:
            return entries
        return [*entries, *((NO_SLOT, leaf) for leaf in fsdp1_flat_parameters(self._registry.models()))]
