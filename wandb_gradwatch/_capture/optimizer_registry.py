"""OptimizerRegistry: which optimizer updates which parameters, learned from the optimizers that step."""

import functools
import itertools
import math
import weakref
from collections import defaultdict
from collections.abc import Iterable, Sequence
from numbers import Real
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from .._runtime.autograd import Entry
from .._runtime.steps import OptimizerTable, parameters_of
from .._transfer.transfers import Names
from .clock import SampleClock
from .parameter_registry import ParameterRegistry

_NOTHING_WATCHED = -1


class OptimizerRegistry:
    """Gives each optimizer a key and records in the clock which slots it owns. Keeps no optimizer alive.

    `appointed` owns every parameter that no other optimizer owns, because it holds master weights; None: there is none.
    """

    def __init__(self, registry: ParameterRegistry, clock: SampleClock, appointed: Optimizer | None) -> None:
        self._registry, self._clock = registry, clock
        self._appointed = (lambda: None) if appointed is None else weakref.ref(appointed)
        self.left_out: set[int] = set()  # slots that a backward reached, but no optimizer updated
        self.updated_otherwise: set[int] = set()  # slots without an optimizer whose parameters were written to
        self._known: OptimizerTable[tuple[int, int]] = OptimizerTable()
        self._by_key: dict[int, weakref.ref[Optimizer]] = {}
        self._keys = itertools.count(1)
        self._version = registry.version  # when every optimizer was last looked at
        self._named: tuple[object, ...] = ()  # the cache key of `_names`
        self._names = Names((), ())

    def known_to_follow(self, optimizer: Optimizer) -> bool | None:
        """Whether it owns any watched parameter; None if it is new or has changed. Called at every step."""
        known = self._known.get(optimizer)
        try:
            if known is None or known[1] != self._fingerprint(optimizer):
                return None
        except Exception:  # `learn`, which is contained, raises it again
            return None
        return known[0] != _NOTHING_WATCHED

    @property
    def num_known(self) -> int:
        """The number of living optimizers that own a watched parameter."""
        return len(self._by_key)

    def key(self, optimizer: Optimizer) -> int:
        """Return the key of this optimizer; -1 if it owns no watched parameter."""
        if (known := self._known.get(optimizer)) is not None:
            return known[0]
        self.learn(optimizer)
        return self.key(optimizer)

    def slots(self, optimizer: Optimizer) -> frozenset[int]:
        return self._clock.owned.get(self.key(optimizer), frozenset())

    def of_slot(self, slot: int) -> Optimizer | None:
        """Return the optimizer that owns this slot; None if it is not known."""
        return self.of_key(self._clock.owner.get(slot, _NOTHING_WATCHED))

    def of_key(self, key: int) -> Optimizer | None:
        """Return the optimizer with this key; None if it was deleted."""
        reference = self._by_key.get(key)
        return None if reference is None else reference()

    def names(self) -> Names:
        """Return the current names, and which of the parameters are expected to have a gradient.

        Frozen parameters are not, nor are those that no optimizer holds and no backward has reached, as in a target
        network, nor those whose optimizer has not stepped yet. While no optimizer is known, all parameters with
        requires_grad are.
        """
        owner, registry, expected = self._clock.owner, self._registry, self._clock.expected
        num_apart = len(self.left_out), len(self.updated_otherwise)
        now = (registry.changes, len(registry.names), self._clock.num_changes, *num_apart, expected)
        if now != self._named:  # called at every sample; rules recognise the same tuple while nothing changes
            left_out = self.left_out - self.updated_otherwise - expected
            trainable = [
                slot in registry.trainable and (not owner or slot in owner or slot in left_out)
                for slot in range(len(registry.names))
            ]
            self._named, self._names = now, Names(tuple(registry.names), tuple(trainable))
        return self._names

    def updated_by(self, keys: Iterable[int]) -> tuple[tuple[int, ...], ...]:
        """Return the slots of each of these optimizers, ascending."""
        return tuple([tuple(sorted(self._clock.owned.get(key, ()))) for key in sorted(keys)])

    def parts(self) -> dict[str, list[int]]:
        """Return the slots of each model by name; for a single model, those of each optimizer if they step in turn.

        The name of an optimizer is the module that contains all its parameters, otherwise its number.
        """
        if (of_models := self._registry.parts()) or not self._clock.takes_turns:
            return of_models
        found: dict[str, list[int]] = {}
        for number, key in enumerate(sorted(set(self._clock.owner.values()))):
            slots = sorted(slot for slot, owner in self._clock.owner.items() if owner == key)
            modules = [self._registry.names[slot].split(".")[:-1] for slot in slots]
            shared = itertools.takewhile(lambda parts: len(set(parts)) == 1, zip(*modules, strict=False))
            name = ".".join(parts[0] for parts in shared)
            found[name if name and name not in found else f"optimizer{number}"] = slots
        return found

    def entries(self, optimizer: Optimizer) -> list[Entry]:
        """Return the watched parameters that this optimizer is about to update."""
        if self._appointed() is optimizer:
            slots = self.slots(optimizer)
            return [entry for entry in self._registry.scan() if entry[0] in slots]
        slot_of_id = self._registry.slot_of_id
        return [(slot, p) for p in parameters_of(optimizer) if (slot := slot_of_id.get(id(p))) is not None]

    def masters(self, optimizer: Optimizer) -> list[Entry] | None:
        """Return the master weights of this optimizer by the slot of the parameter; None if it updates the parameters.

        Copies are matched with parameters of the same shape and device, in order; parameters without a match are left
        out. None, too, if no master weight has a gradient: then the optimizer is taken to use the parameters' own.
        """
        if self._appointed() is not optimizer:
            return None
        own = parameters_of(optimizer)
        copies = [one for one in own if id(one) not in self._registry.slot_of_id]
        if not copies or all(one.grad is None for one in own):
            return None
        entries, held = self.entries(optimizer), {id(one) for one in own}
        found = [entry for entry in entries if id(entry[1]) in held]
        # shape and device -> the slots of the copied parameters, and their master weights
        of_kind: defaultdict[tuple[Any, Any], tuple[list[int], list[Tensor]]] = defaultdict(lambda: ([], []))
        for slot, parameter in entries:
            if id(parameter) not in held and parameter.requires_grad:
                of_kind[parameter.shape, parameter.device][0].append(slot)
        for one in copies:
            of_kind[one.shape, one.device][1].append(one)
        for slots, masters in of_kind.values():
            if len(slots) == len(masters):
                found += zip(slots, masters, strict=True)
        return found

    def has_masters(self, parameters: Sequence[Tensor]) -> bool:
        """Whether the appointed optimizer holds any of these tensors."""
        appointed = self._appointed()
        return appointed is not None and not set(map(id, parameters)).isdisjoint(_ids(appointed))

    def _fingerprint(self, optimizer: Optimizer) -> int:
        """A number that changes when the optimizer gets other parameters, or the model's parameters are replaced."""
        return hash((self._registry.version, *_ids(optimizer)))

    def learn(self, optimizer: Optimizer) -> bool:
        """Record which slots it owns, and for all optimizers if slots have changed. Returns whether it owns any.

        Touches no gradient and no hook: the optimizer may belong to another model and step in another thread, while a
        backward of this model writes to them.
        """
        if any(key not in self._registry.slot_of_id for key in _ids(optimizer)):
            self._registry.scan()
        if self._version != self._registry.version:
            self._version = self._registry.version
            for other in [reference() for reference in self._by_key.values()]:
                if other is not None and other is not optimizer:
                    self._look_at(other)
        return self._look_at(optimizer)

    def _look_at(self, optimizer: Optimizer) -> bool:
        known = self._known.get(optimizer)
        key = known[0] if known is not None else _NOTHING_WATCHED
        slot_of_id = self._registry.slot_of_id
        slots = {slot_of_id[one] for one in _ids(optimizer) if one in slot_of_id}
        if self._appointed() is optimizer:
            of_others = {slot for slot, owner in self._clock.owner.items() if owner != key}
            slots |= set(range(len(self._registry.names))) - of_others
        if slots:
            if key == _NOTHING_WATCHED:
                key = next(self._keys)
                self._by_key[key] = weakref.ref(optimizer, functools.partial(self._gone, key))
            self._clock.own(key, frozenset(slots))
        elif key != _NOTHING_WATCHED:  # the model's parameters were replaced
            self._gone(key, optimizer)
            key = _NOTHING_WATCHED
        self._known[optimizer] = (key, self._fingerprint(optimizer))
        return bool(slots)

    def _gone(self, key: int, _: object) -> None:
        self._by_key.pop(key, None)
        self._clock.disown(key)


def learning_rate_of(optimizer: Optimizer) -> float:
    """Return the largest learning rate of the groups by size; NaN if all are on a device, as reading one would wait."""
    rates: list[Any] = [group.get("lr") for group in optimizer.param_groups]
    here = [r for r in rates if type(r) is float or (r.is_cpu if isinstance(r, Tensor) else isinstance(r, Real))]
    return max(map(float, here), key=abs, default=math.nan)


def _ids(optimizer: Optimizer) -> list[int]:
    return list(map(id, parameters_of(optimizer)))
