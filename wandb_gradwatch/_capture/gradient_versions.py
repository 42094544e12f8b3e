"""Which gradients have been seen in the open sample, and in which state: is this the same tensor, unmodified since?

A gradient that is the same tensor with the same version counter as at the end of the last backward has not been
clipped, unscaled or replaced since (but for writes through `.data`, which leave no trace).
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterable, KeysView, Sequence
from dataclasses import dataclass, field
from typing import Final

from torch import Tensor

from .._runtime.autograd import Entry

# An attribute of the tensor: unlike an id it is not given to another when the tensor is gone, and unlike a reference it
# keeps nothing alive. A number, so that a gradient that is saved loads with weights_only=True: a token and, in the
# lower bits, the version at which the tensor was last looked at.
_TOKENS: Final = itertools.count(1)
_SEEN: Final = "_gradwatch_seen"
_VERSION_BITS: Final = 32
_NEVER: Final = (1 << _VERSION_BITS) - 1  # in the place of a version: not looked at yet
_OLDER_THAN_ITS_HOOK: Final = _NEVER - 1
_NOTHING: Final = -1  # the state of no gradient

REPLACED: Final = sys.maxsize


def version_of(tensor: Tensor) -> int:
    """How often it was written to; 0 of one made in inference mode, which counts nothing."""
    try:
        return tensor._version
    except RuntimeError:
        return 0


def _states_of(gradients: Sequence[Tensor | None]) -> list[int]:
    """Their states, in which what was never looked at has no token."""
    try:
        return [_NOTHING if g is None else g.__dict__.get(_SEEN, 0) & ~_NEVER | g._version for g in gradients]
    except RuntimeError:  # see version_of()
        return [_NOTHING if g is None else g.__dict__.get(_SEEN, 0) & ~_NEVER | version_of(g) for g in gradients]


def was_seen(gradient: Tensor) -> bool:
    """Whether this tensor has been looked at, in this sample or an earlier one."""
    return getattr(gradient, _SEEN, _NEVER) & _NEVER < _OLDER_THAN_ITS_HOOK


def mark_as_older_than_its_hook(gradient: Tensor) -> None:
    """This one was there before a backward could tell of it: it is not new, whatever is written to it."""
    setattr(gradient, _SEEN, _token_of(gradient) | _OLDER_THAN_ITS_HOOK)


def is_new(gradient: Tensor) -> bool:
    """Whether what this tensor holds has never been looked at: it is a new one, or was written to since."""
    return getattr(gradient, _SEEN, _NEVER) & _NEVER not in (_OLDER_THAN_ITS_HOOK, version_of(gradient))


def state_of(gradient: Tensor) -> int:
    """What tells this gradient, as it is now, from every other and from itself once it is written to."""
    token = _token_of(gradient)
    gradient.__dict__.setdefault(_SEEN, token | _NEVER)
    return token | version_of(gradient)


def look_at(gradients: Iterable[Tensor]) -> list[int]:
    """Their states; what they hold now is not new any more."""
    gradients = list(gradients)
    states = _states_of(gradients)
    for place, gradient in enumerate(gradients):
        if states[place] <= _NEVER:
            states[place] |= next(_TOKENS) << _VERSION_BITS
        gradient.__dict__[_SEEN] = states[place]
    return states


def _token_of(gradient: Tensor) -> int:
    """The gradient's token, a new one if it has none, in its place above a version's bits."""
    seen: int | None = getattr(gradient, _SEEN, None)
    return next(_TOKENS) << _VERSION_BITS if seen is None else seen & ~_NEVER


def were_reset(writes: Sequence[int], *, has_accumulated: bool) -> bool:
    """Whether gradients, or most of them, were reset after a backward, by how often each was written to since.

    What accumulates has written to the first gradient only, or, where they are views of one bucket, once to each.
    """
    return writes.count(0) < len(writes) / 2 and (not has_accumulated or any(number > 1 for number in writes))


@dataclass(slots=True)
class Inspection:
    """Gradients that an optimizer is about to use, by what is known of them."""

    late: list[Entry] = field(default_factory=list)  # as the backward left it, and not measured
    changed: list[Entry] = field(default_factory=list)  # measured, and modified since
    unclear: list[Entry] = field(default_factory=list)  # not measured, and perhaps modified
    unchanged: list[Entry] = field(default_factory=list)
    gone: list[int] = field(default_factory=list)  # seen, and taken away


class GradientVersions:
    """The open sample's gradients, by slot."""

    def __init__(self) -> None:
        self._seen: dict[int, int] = {}  # their states when they were last looked at
        self._unmeasured: set[int] = set()  # those that were looked at and not measured

    @property
    def slots(self) -> KeysView[int]:
        """Whose gradients have been seen."""
        return self._seen.keys()

    def clear(self) -> None:
        """Forget all: a new sample is open."""
        self._seen, self._unmeasured = {}, set()

    def remember(self, slots: Sequence[int], gradients: Sequence[Tensor]) -> None:
        """These gradients have been measured as they are now: [N] each."""
        self._seen.update(zip(slots, look_at(gradients), strict=True))
        self._unmeasured.difference_update(slots)

    def note(self, entries: Iterable[Entry]) -> None:
        """The gradients of these parameters are there, and are not measured."""
        present = {slot: gradient for slot, parameter in entries if (gradient := parameter.grad) is not None}
        self._seen.update(zip(present, look_at(present.values()), strict=True))
        self._unmeasured.update(present)

    def writes_since(self, slot: int, gradient: Tensor | None) -> int | None:
        """How often it was written to since; None if it was not seen, and more than any number if it was replaced."""
        seen = self._seen.get(slot)
        if seen is None:
            return None
        if gradient is None or (seen ^ getattr(gradient, _SEEN, 0)) > _NEVER:
            return REPLACED
        return version_of(gradient) - (seen & _NEVER)

    def inspect(self, entries: Iterable[Entry], *, inside_backward: bool) -> Inspection:
        """Sort parameters by the state of their gradients; inside a backward nothing was seen before it."""
        entries = list(entries)
        states = _states_of([parameter.grad for _, parameter in entries])
        if not (inside_backward or self._unmeasured) and [self._seen.get(slot) for slot, _ in entries] == states:
            return Inspection(unchanged=entries)  # as nearly always
        found = Inspection()
        for entry, state in zip(entries, states, strict=True):
            slot = entry[0]
            if state == _NOTHING:
                if slot in self._seen:
                    found.gone.append(slot)
            elif inside_backward:
                found.late.append(entry)
            elif slot not in self._seen:
                found.unclear.append(entry)
            elif state == self._seen[slot]:
                (found.late if slot in self._unmeasured else found.unchanged).append(entry)
            else:
                (found.unclear if slot in self._unmeasured else found.changed).append(entry)
        return found
