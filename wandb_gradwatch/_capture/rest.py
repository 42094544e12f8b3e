"""Between samples nothing is looked at: the hooks on parameters are off, and optimizer steps are only counted.

That needs to be known how steps make samples: one optimizer at least had a part in each of the last ones, or each was
made by one alone (as of a GAN). Whatever does not fit ends the rest: another optimizer that updates something watched,
for instance.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Collection, Iterable, Mapping
from typing import Final

from torch.optim import Optimizer

from .._runtime.error_boundary import contained
from .gradient_versions import state_of
from .open_sample import OpenSample
from .parts import CaptureParts
from .scaling import SCALES

_REGULAR: Final = 4  # samples in a row that say how steps make them
_LEAST: Final = 3  # steps, for which turning hooks off and on is worth it
_STRAY: Final = 100  # steps that look nested in another one, after which they no longer do: the outer one has raised


class Resting:
    """Rests from one sample to shortly before the next, where the last ones say how steps make samples."""

    def __init__(self, parts: CaptureParts, sample: OpenSample) -> None:
        self._parts, self._sample, self.boundary = parts, sample, parts.boundary
        self._last: list[frozenset[int]] = []  # the keys of the optimizers that made the last samples
        self.rest: Rest | None = None  # while nothing is looked at
        self._wakes_at = 0  # step
        self._seconds_of_step: float | None = None

    def sample_closed(self, stepped: frozenset[int], *, inside_backward: bool) -> None:
        """These optimizers have made a sample."""
        self._last = [] if inside_backward else [*self._last[1 - _REGULAR :], stepped]

    def is_worth_it(self) -> bool:
        """Whether it is clear how steps make samples, and the next sample is some steps away."""
        parts, last = self._parts, self._last
        if parts.guard is not None or parts.by_hand.possible or parts.clock.muted or parts.window.sent:
            return False
        is_open = bool(parts.clock.stepped)
        if len(last) < _REGULAR or parts.schedule.wakes_at() - parts.clock.open_step < _LEAST + is_open:
            return False
        if frozenset.intersection(*last):
            return not is_open
        return all(len(stepped) == 1 for stepped in last)  # in turn: every step was a sample of its own

    def begin(self, optimizer: Optimizer) -> None:
        """Look at nothing from now on; this optimizer has just stepped."""
        parts = self._parts
        self._wakes_at = parts.schedule.wakes_at()
        keys = frozenset[int]().union(*self._last)
        optimizers = {key: one for key in keys if (one := parts.optimizers.of_key(key)) is not None}
        if len(optimizers) < len(keys) or parts.optimizers.key(optimizer) not in keys:
            return
        if self._seconds_of_step is None:
            self._seconds_of_step = _seconds_of_a_step(optimizer)
        parts.clock.discard()
        parts.hook_sync.take_off(is_alone=not parts.thread.has_company)
        known = [one for key in parts.clock.owned if (one := parts.optimizers.of_key(key)) is not None]
        self.rest = Rest(optimizers, optimizer, leaders=frozenset.intersection(*self._last), known=known)

    def passes(self, optimizer: Optimizer) -> bool:
        """An optimizer is about to step: whether it is one of this rest."""
        if self.rest is None or not self._parts.thread.is_this or not self.rest.begins(optimizer):
            return False
        SCALES.note_step(optimizer)
        return True

    def ends_sample(self, optimizer: Optimizer, *, skipped: bool = False) -> bool:
        """It has stepped, or was skipped: whether a sample is complete with it, the last of this rest."""
        if self.rest is None or not (self.rest.counts(optimizer) if skipped else self.rest.ends(optimizer)):
            return False
        self._parts.clock.counted(self.rest.made_last)
        self._parts.boundary.seconds_spent += self._seconds_of_step or 0.0
        return self._parts.clock.step + 1 >= self._wakes_at

    @contained
    def end(self, *, before_step_of: Optimizer | None = None) -> None:
        """Look at everything again, if this is a rest.

        Before a step a backward may have come after the last one that was counted, and no hook has told of it.
        """
        rest, self.rest = self.rest, None
        if rest is not None:
            if before_step_of is not None:
                self._parts.thread.step_begins()
            entries = self._parts.hook_sync.scan()
            self._sample.begin()
            if before_step_of is not None and rest.has_new_gradients(before_step_of):
                self._sample.mark_present(entries)


class Rest:
    """Counts samples by the steps of optimizers.

    Args:
        optimizers: that make them, by key.
        last: the one of them that has just stepped.
        leaders: those that have a part in every sample, which is complete with them; without any every step is one.
        known: optimizers that may step as well, and end the rest.
    """

    def __init__(
        self,
        optimizers: Mapping[int, Optimizer],
        last: Optimizer,
        *,
        leaders: Collection[int],
        known: Iterable[Optimizer] = (),
    ) -> None:
        self._keys = {id(one): key for key, one in optimizers.items()}
        self._witnesses = {
            id(one): (weakref.ref(one), *_place_of_a_gradient(one)) for one in (*optimizers.values(), *known)
        }
        self._leaders = frozenset(leaders)
        self.made_last = self._leaders  # the keys of those that have made the last sample; others may still join it
        self._stepped: frozenset[int] = frozenset()
        self._under_way: int | None = None
        self._num_stray = 0
        self._last, self._states = id(last), self._states_now()

    def has_new_gradients(self, optimizer: Optimizer) -> bool:
        """Whether a backward, or a reset, has come after the last step that was counted, for that optimizer or this.

        This one's may have been unscaled or clipped since, which is one write as a rule; a reset and a backward are two
        where they have not made another tensor.
        """
        now = self._states_now()
        own, last = (self._states.get(number, 0) for number in (id(optimizer), self._last))
        return now.get(self._last, 0) != last or not 0 <= now.get(id(optimizer), 0) - own <= 1

    def _states_now(self) -> dict[int, int]:
        """A gradient's of every optimizer, by its id; 0 where there is none."""
        return {number: _state_of(*witness) for number, witness in self._witnesses.items()}

    def begins(self, optimizer: Optimizer) -> bool:
        """An optimizer is about to step: whether that may pass, counted or as a part of the step under way."""
        number = id(optimizer)
        if number in self._keys:
            self._under_way, self._num_stray = number, 0
            return True
        self._num_stray += 1
        return self._under_way is not None and self._num_stray < _STRAY

    def ends(self, optimizer: Optimizer) -> bool:
        """It has stepped: whether a sample is complete with it."""
        if id(optimizer) != self._under_way:
            return False
        self._under_way = None
        return self.counts(optimizer)

    def counts(self, optimizer: Optimizer) -> bool:
        """The same of one that was skipped."""
        key = self._keys.get(id(optimizer))
        if key is None:
            return False
        self._last, self._states = id(optimizer), self._states_now()
        is_next = key in self._stepped  # the others do not step this time
        stepped = frozenset([key]) if is_next else self._stepped | {key}
        is_complete = self._leaders <= stepped
        self.made_last = self._leaders or stepped
        self._stepped = frozenset() if is_complete else stepped
        return is_next or is_complete


def _state_of(reference: weakref.ref[Optimizer], group: int, place: int) -> int:
    """That of the gradient at this place; 0 where there is none, or no such place any more."""
    optimizer = reference()
    try:
        gradient = None if optimizer is None else optimizer.param_groups[group]["params"][place].grad
    except IndexError:
        return 0
    return 0 if gradient is None else state_of(gradient)


def _place_of_a_gradient(optimizer: Optimizer) -> tuple[int, int]:
    """Group and place of the first parameter that has one: a reference to it would keep its model."""
    for group, of_group in enumerate(optimizer.param_groups):
        for place, parameter in enumerate(of_group["params"]):
            if parameter.grad is not None:
                return group, place
    return 0, 0


def _seconds_of_a_step(optimizer: Optimizer) -> float:
    """What counting one step takes: the fastest of some."""
    rest, fastest = Rest({0: optimizer}, optimizer, leaders=()), float("inf")
    for _ in range(20):
        began = time.perf_counter()
        rest.begins(optimizer)
        rest.ends(optimizer)
        fastest = min(fastest, time.perf_counter() - began)
    return fastest
