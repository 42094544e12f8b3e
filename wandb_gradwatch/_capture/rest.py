"""Between samples nothing is looked at: the hooks on parameters are off, and optimizer steps are only counted.

That needs to be known how steps make samples: one optimizer at least had a part in each of the last ones, or each was
made by one alone (as of a GAN). Whatever does not fit ends the rest: another optimizer that updates something watched,
for instance.
"""

from __future__ import annotations

import statistics
import time
import weakref
from collections import deque
from collections.abc import Collection, Mapping
from threading import get_ident
from typing import Final

from torch import Tensor
from torch.optim import Optimizer

from .._runtime.error_boundary import contained
from .clock import SampleClock
from .gradient_versions import REPLACED, version_of
from .open_sample import OpenSample
from .parts import CaptureParts
from .scaling import SCALES

_REGULAR: Final = 4  # samples in a row that say how steps make them
_LEAST: Final = 3  # steps, for which turning hooks off and on is worth it
_COUNTED: Final = "_gradwatch_counted"  # attribute of a gradient: its version when a step was counted last
_TIMED: Final = 50  # samples
_STRAY: Final = 100  # steps that look nested in another one, after which they no longer do: the outer one has raised


class Resting:
    """Rests from one sample to shortly before the next, where the last ones say how steps make samples."""

    def __init__(self, parts: CaptureParts, sample: OpenSample) -> None:
        self._parts, self._sample, self.boundary = parts, sample, parts.boundary
        self._last: list[frozenset[int]] = []  # the keys of the optimizers that made the last samples
        self._timed = deque[float](maxlen=_TIMED)  # seconds of samples that were counted

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

    def begin(self, optimizer: Optimizer) -> Rest | None:
        """Look at nothing from now on; this optimizer has just stepped."""
        parts = self._parts
        keys = frozenset[int]().union(*self._last)
        optimizers = {key: one for key in keys if (one := parts.optimizers.of_key(key)) is not None}
        if len(optimizers) < len(keys) or parts.optimizers.key(optimizer) not in keys:
            return None
        parts.clock.discard()
        parts.hook_sync.take_off(is_alone=not parts.thread.has_company)
        return (Rest if len(self._timed) == _TIMED else _TimedRest)(
            parts.clock,
            {key: one for key in parts.clock.owned if (one := parts.optimizers.of_key(key)) is not None},
            optimizer,
            makers=keys,
            leaders=frozenset.intersection(*self._last),
            wakes_at=parts.schedule.wakes_at(),
            timed=self._timed,
        )

    @contained
    def end(self, rest: Rest, before_step_of: Optimizer | None) -> None:
        """Look at everything again.

        Before a step a backward may have come after the last one that was counted, and no hook has told of it.
        """
        if before_step_of is not None:
            self._parts.thread.step_begins()
        self.boundary.seconds_spent += rest.seconds_spent
        self._parts.schedule.seconds_on_counting += rest.seconds_spent
        if rest.num_samples:
            self._parts.clock.counted(rest.made_last)
        entries = self._parts.hook_sync.scan()
        self._sample.begin()
        if before_step_of is not None and rest.has_new_gradients(before_step_of):
            self._sample.mark_present(entries)


class Rest:
    """Counts samples by the steps of optimizers.

    Between two steps of a training all of this leaves the processor's caches: every call, and every object that is
    touched, costs more than what is done there.

    Args:
        clock: whose step it moves on.
        optimizers: those that own something watched, by key.
        last: the one of them that has just stepped.
        makers: the keys of those whose steps are counted; another one's ends the rest.
        leaders: those that have a part in every sample, which is complete with them; without any every step is one.
        wakes_at: the step before which the rest is over.
        timed: seconds that counting one takes, of the first ones.
    """

    def __init__(
        self,
        clock: SampleClock,
        optimizers: Mapping[int, Optimizer],
        last: Optimizer,
        *,
        makers: Collection[int],
        leaders: Collection[int],
        wakes_at: int,
        timed: deque[float],
    ) -> None:
        self._clock, self._first_step, self._last_step = clock, clock.step, wakes_at - 1
        self._timed, self._thread = timed, get_ident()
        self._known = [_Known(key, one, is_counted=key in makers) for key, one in optimizers.items()]
        self._last = next(known for known in self._known if known.optimizer() is last)
        self._leaders = frozenset(leaders)
        self.made_last = self._leaders  # the keys of those that have made the last sample; others may still join it
        self._stepped: frozenset[int] = frozenset()
        self._under_way: _Known | None = None
        self._num_stray = 0

    @property
    def num_samples(self) -> int:
        """Those that have gone by."""
        return self._clock.step - self._first_step

    @property
    def seconds_spent(self) -> float:
        """On counting them."""
        return self.num_samples * (statistics.median(self._timed) if self._timed else 0.0)

    def begins(self, optimizer: Optimizer) -> bool:
        """An optimizer is about to step: whether that may pass, counted or as a part of the step under way."""
        if len(self._known) > 1 and get_ident() != self._thread:
            return False  # the others may be in a backward
        for known in self._known:
            if known.optimizer() is optimizer and known.steps is not None:
                self._under_way, self._num_stray = known, 0
                if known.steps.scaler is not None:
                    known.steps.note()
                return True
        self._num_stray += 1
        return self._under_way is not None and self._num_stray < _STRAY and get_ident() == self._thread

    def ends(self, optimizer: Optimizer) -> bool:
        """It has stepped: whether the rest is over with it."""
        known = self._under_way
        if known is None or known.optimizer() is not optimizer:
            return False
        self._last, self._under_way = known, None
        for other in self._known:
            other.mark()
        if len(self._known) > 1 and not self._completes(known.key):
            return False
        self._clock.step += 1
        return self._clock.step >= self._last_step

    def skips(self, optimizer: Optimizer) -> bool:
        """It was to step, and was skipped: the same."""
        self._under_way = next((one for one in self._known if one.optimizer() is optimizer and one.steps), None)
        return self.ends(optimizer)

    def _completes(self, key: int) -> bool:
        """Whether a sample is complete with this one's step."""
        is_next = key in self._stepped  # the others do not step this time
        stepped = frozenset([key]) if is_next else self._stepped | {key}
        is_complete = self._leaders <= stepped
        self.made_last = self._leaders or stepped
        self._stepped = frozenset() if is_complete else stepped
        return is_next or is_complete

    def has_new_gradients(self, optimizer: Optimizer) -> bool:
        """Whether a backward, or a reset, has come after the last step that was counted, for that optimizer or this.

        This one's may have been unscaled or clipped since, which is one write as a rule; a reset and a backward are two
        where they have not made another tensor.
        """
        own = [known.num_writes() for known in self._known if known.optimizer() is optimizer]
        return self._last.num_writes() != 0 or any(number not in (0, 1) for number in own)


class _TimedRest(Rest):
    """Times the first samples where they are made: in a loop of their own they would find everything in the caches."""

    _seconds = 0.0  # of the steps that make the next one

    def begins(self, optimizer: Optimizer) -> bool:
        began = time.perf_counter()
        passes = super().begins(optimizer)
        self._seconds += time.perf_counter() - began
        return passes

    def ends(self, optimizer: Optimizer) -> bool:
        began, num_before = time.perf_counter(), self.num_samples
        is_over = super().ends(optimizer)
        self._seconds += time.perf_counter() - began
        if self.num_samples > num_before:
            self._timed.append(self._seconds)
            self._seconds = 0.0
            if len(self._timed) == _TIMED:
                self.__class__ = Rest  # type: ignore[assignment]  # mypy takes the class for fixed
        return is_over


class _Known:
    """An optimizer that may step in a rest, and the first gradient that it has when that begins."""

    __slots__ = ("_group", "_had_gradient", "_place", "key", "optimizer", "steps")

    def __init__(self, key: int, optimizer: Optimizer, *, is_counted: bool) -> None:
        self.key, self.optimizer = key, weakref.ref(optimizer)
        self.steps = SCALES.steps_of(optimizer) if is_counted else None
        self._group, self._place = _place_of_a_gradient(optimizer)
        self._had_gradient = False
        self.mark()

    def mark(self) -> None:
        """Remember the gradient as it is now."""
        gradient = self._gradient()
        self._had_gradient = gradient is not None
        if gradient is not None:
            try:
                setattr(gradient, _COUNTED, gradient._version)
            except RuntimeError:  # see version_of()
                setattr(gradient, _COUNTED, 0)

    def num_writes(self) -> int:
        """To the gradient, since."""
        gradient = self._gradient()
        if gradient is None:
            return REPLACED if self._had_gradient else 0
        counted: int | None = getattr(gradient, _COUNTED, None)
        return REPLACED if counted is None else version_of(gradient) - counted

    def _gradient(self) -> Tensor | None:
        optimizer = self.optimizer()
        try:
            return None if optimizer is None else optimizer.param_groups[self._group]["params"][self._place].grad
        except IndexError:  # there is no such place any more
            return None


def _place_of_a_gradient(optimizer: Optimizer) -> tuple[int, int]:
    """Group and place of the first parameter that has one: a reference to it would keep its model."""
    for group, of_group in enumerate(optimizer.param_groups):
        for place, parameter in enumerate(of_group["params"]):
            if parameter.grad is not None:
                return group, place
    return 0, 0
