"""Detects which gradients were modified or replaced since they were last looked at in the open sample.

A gradient that is the same tensor with the same version counter as at the end of the last backward has not been
clipped, unscaled or replaced since. Writes through `.data` are the exception: they leave no trace.
"""

import itertools
import sys
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Final

from torch import Tensor

from .._runtime.autograd import Entry

# Stored as an attribute of the tensor: unlike an id it is never reused, and unlike a reference it keeps nothing alive.
# It is a number, so that a saved gradient loads with weights_only=True: a token and, in the lower bits, the version at
# which the tensor was last looked at.
_TOKENS: Final = itertools.count(1)
_SEEN: Final = "_gradwatch_seen"
_VERSION_BITS: Final = 32
_NEVER: Final = (1 << _VERSION_BITS) - 1  # instead of a version: not looked at yet
_OLDER_THAN_ITS_HOOK: Final = _NEVER - 1
_NOTHING: Final = -1  # the state where there is no gradient
_slot: Final = itemgetter(0)  # of an entry

REPLACED: Final = sys.maxsize


def version_of(tensor: Tensor) -> int:
    """Return how often a tensor was written to; 0 for inference tensors, which have no version counter."""
    try:
        return tensor._version
    except RuntimeError:
        return 0


def _states_of(gradients: Sequence[Tensor | None]) -> list[int]:
    """Return the gradients' states; the state of a gradient that was never looked at has no token."""
    try:
        return [_NOTHING if g is None else g.__dict__.get(_SEEN, 0) & ~_NEVER | g._version for g in gradients]
    except RuntimeError:  # an inference tensor is among them
        return [_NOTHING if g is None else g.__dict__.get(_SEEN, 0) & ~_NEVER | version_of(g) for g in gradients]


def was_seen(gradient: Tensor) -> bool:
    """Whether this tensor was looked at, in this sample or an earlier one."""
    return getattr(gradient, _SEEN, _NEVER) & _NEVER < _OLDER_THAN_ITS_HOOK


def mark_as_older_than_its_hook(gradient: Tensor) -> None:
    """Record that this gradient existed before its parameter was hooked: later writes do not make it new."""
    [state] = look_at([gradient])
    gradient.__dict__[_SEEN] = state & ~_NEVER | _OLDER_THAN_ITS_HOOK


def is_new(gradient: Tensor) -> bool:
    """Whether this tensor's values have never been looked at: it is a new tensor, or was written to since."""
    return getattr(gradient, _SEEN, _NEVER) & _NEVER not in (_OLDER_THAN_ITS_HOOK, version_of(gradient))


def look_at(gradients: Iterable[Tensor]) -> list[int]:
    """Return the gradients' states, and record that their current values have been looked at."""
    held = list(gradients)
    states = [state if state > _NEVER else next(_TOKENS) << _VERSION_BITS | state for state in _states_of(held)]
    for gradient, state in zip(held, states, strict=True):
        gradient.__dict__[_SEEN] = state
    return states


def were_reset(writes: Collection[int]) -> bool:
    """Whether most gradients were reset since they were looked at, judged by how often each was written to."""
    return list(writes).count(0) < len(writes) / 2


@dataclass(slots=True)
class Inspection:
    """Gradients that an optimizer is about to use, sorted by their state."""

    late: list[Entry] = field(default_factory=list)  # as the backward left them, but not measured
    changed: list[Entry] = field(default_factory=list)  # measured, and modified since
    unclear: list[Entry] = field(default_factory=list)  # not measured, and perhaps modified
    unchanged: list[Entry] = field(default_factory=list)
    gone: list[int] = field(default_factory=list)  # slots whose gradient was seen and is None now


class GradientVersions:
    """Remembers the state of the open sample's gradients, by slot."""

    def __init__(self) -> None:
        self.states: dict[int, int] = {}  # slot -> state of its gradient when it was last looked at in the open sample
        self._unmeasured: set[int] = set()  # slots that were looked at but not measured

    def clear(self) -> None:
        """Forget all gradients: a new sample is open."""
        self.states, self._unmeasured = {}, set()

    def forget(self, slots: Iterable[int]) -> None:
        """Forget the gradients of these slots."""
        for slot in slots:
            self.states.pop(slot, None)
            self._unmeasured.discard(slot)

    def remember(self, slots: Sequence[int], gradients: Sequence[Tensor]) -> None:
        """Record that these gradients, [N] each, have been measured as they are now."""
        self.states.update(zip(slots, look_at(gradients), strict=True))
        self._unmeasured.difference_update(slots)

    def note(self, entries: Iterable[Entry]) -> None:
        """Look at the gradients of these parameters without measuring them."""
        present = {slot: gradient for slot, parameter in entries if (gradient := parameter.grad) is not None}
        self.states.update(zip(present, look_at(present.values()), strict=True))
        self._unmeasured.update(present)

    def writes(self, entries: Iterable[Entry]) -> dict[int, int]:
        """Return how often each gradient was written to since it was looked at, by slot; REPLACED if it was replaced.

        Gradients that were not looked at in the open sample are left out.
        """
        found: dict[int, int] = {}
        for slot, parameter in entries:
            if (seen := self.states.get(slot)) is not None:
                gradient = parameter.grad
                if gradient is None or (seen ^ getattr(gradient, _SEEN, 0)) > _NEVER:
                    found[slot] = REPLACED
                else:
                    found[slot] = version_of(gradient) - (seen & _NEVER)
        return found

    def inspect(self, entries: Iterable[Entry], *, inside_backward: bool) -> Inspection:
        """Sort parameters by the state of their gradients. Inside a backward all gradients count as not measured."""
        entries = list(entries)
        states = _states_of([parameter.grad for _, parameter in entries])
        known = list(map(self.states.get, map(_slot, entries)))
        if states == known and not (inside_backward or self._unmeasured):
            return Inspection(unchanged=entries)  # the usual case
        found = Inspection()
        for entry, state in zip(entries, states, strict=True):
            slot = entry[0]
            if state == _NOTHING:
                if slot in self.states:
                    found.gone.append(slot)
            elif inside_backward:
                found.late.append(entry)
            elif slot not in self.states:
                found.unclear.append(entry)
            elif state == self.states[slot]:
                (found.late if slot in self._unmeasured else found.unchanged).append(entry)
            else:
                (found.unclear if slot in self._unmeasured else found.changed).append(entry)
        return found
