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
# keeps nothing alive. A number, so that a gradient that is saved loads with weights_only=True.
_TOKEN: Final = "_gradwatch_token"
_TOKENS: Final = itertools.count(1)
_LAST_VERSION: Final = "_gradwatch_version"  # when it was last looked at
_OLDER_THAN_ITS_HOOK: Final = -1

REPLACED: Final = sys.maxsize


def was_seen(gradient: Tensor) -> bool:
    """Whether this tensor has been looked at, in this sample or an earlier one."""
    return hasattr(gradient, _TOKEN)


def mark_as_older_than_its_hook(gradient: Tensor) -> None:
    """This one was there before a backward could tell of it: it is not new, whatever is written to it."""
    setattr(gradient, _LAST_VERSION, _OLDER_THAN_ITS_HOOK)


def is_new(gradient: Tensor) -> bool:
    """Whether what this tensor holds has never been looked at: it is a new one, or was written to since."""
    last = getattr(gradient, _LAST_VERSION, None)
    return last is None or (last != _OLDER_THAN_ITS_HOOK and last != gradient._version)


def look_at(gradient: Tensor) -> None:
    """What it holds now is not new any more."""
    setattr(gradient, _LAST_VERSION, gradient._version)


def state_of(gradient: Tensor) -> tuple[int, int]:
    """What tells this gradient, as it is now, from every other and from itself once it is written to."""
    token = getattr(gradient, _TOKEN, None)
    if token is None:
        token = next(_TOKENS)
        setattr(gradient, _TOKEN, token)
    return token, gradient._version


def were_reset(writes: Sequence[int]) -> bool:
    """Whether gradients, or most of them, were reset between two backwards, by how often each was written to.

    What accumulates has written to the first gradient only, or, where they are views of one bucket, once to each.
    """
    num_untouched = writes.count(0)
    return len(writes) - num_untouched > num_untouched and any(number > 1 for number in writes)


@dataclass(slots=True)
class Inspection:
    """Gradients that an optimizer is about to use, by what is known of them."""

    late: list[Entry] = field(default_factory=list)  # as the backward left it, and not measured
    changed: list[Entry] = field(default_factory=list)  # measured, and modified since
    unclear: list[Entry] = field(default_factory=list)  # not measured, and perhaps modified
    unchanged: list[Entry] = field(default_factory=list)
    gone: list[int] = field(default_factory=list)  # seen, and taken away

    @property
    def nothing_is_left(self) -> bool:
        """Whether there were gradients, and none of them is there any more."""
        return bool(self.gone) and not (self.late or self.changed or self.unclear or self.unchanged)


class GradientVersions:
    """The open sample's gradients by slot, in parallel dictionaries: an object each would cost more than looking."""

    def __init__(self) -> None:
        self._token: dict[int, int] = {}
        self._version: dict[int, int] = {}
        self._measured: set[int] = set()

    @property
    def slots(self) -> KeysView[int]:
        """Whose gradients have been seen."""
        return self._token.keys()

    def clear(self) -> None:
        """Forget all: a new sample is open."""
        self._token, self._version, self._measured = {}, {}, set()

    def remember(self, slots: Sequence[int], gradients: Sequence[Tensor], *, measured: bool) -> None:
        """These gradients, as they are now: [N] each."""
        fresh = next(_TOKENS)
        for slot, gradient in zip(slots, gradients, strict=True):
            token = getattr(gradient, _TOKEN, None)
            if token is None:
                token = fresh  # one for all of them: a slot's gradient is compared with the same slot's only
                setattr(gradient, _TOKEN, token)
            self._token[slot] = token
            self._version[slot] = gradient._version
            look_at(gradient)
        if measured:
            self._measured.update(slots)
        else:
            self._measured.difference_update(slots)

    def note(self, entries: Iterable[Entry]) -> None:
        """The gradients of these parameters are there, and are not measured."""
        present = [(slot, gradient) for slot, parameter in entries if (gradient := parameter.grad) is not None]
        self.remember([slot for slot, _ in present], [gradient for _, gradient in present], measured=False)

    def writes_since(self, slot: int, gradient: Tensor | None) -> int | None:
        """How often it was written to since; None if it was not seen, and more than any number if it was replaced."""
        version = self._version.get(slot)
        if version is None:
            return None
        if gradient is None or getattr(gradient, _TOKEN, None) != self._token[slot]:
            return REPLACED
        return gradient._version - version

    def inspect(self, entries: Iterable[Entry], *, inside_backward: bool) -> Inspection:
        """Sort parameters by the state of their gradients; inside a backward nothing was seen before it."""
        found = Inspection()
        tokens, versions, measured = self._token, self._version, self._measured
        for entry in entries:
            slot, parameter = entry
            gradient = parameter.grad
            if gradient is None:
                if slot in tokens:
                    found.gone.append(slot)
            elif inside_backward:
                found.late.append(entry)
            elif slot not in tokens:
                found.unclear.append(entry)
            elif versions[slot] == gradient._version and getattr(gradient, _TOKEN, None) == tokens[slot]:
                (found.unchanged if slot in measured else found.late).append(entry)
            else:
                (found.changed if slot in measured else found.unclear).append(entry)
        return found
