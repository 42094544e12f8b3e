"""Rests between samples: the hooks on parameters are off, and optimizer steps are only counted.

A rest needs a regular pattern of steps: some optimizer had a part in every one of the last samples, or each sample was
made by a single optimizer (as in a GAN). Anything else ends the rest, such as a step of another optimizer that updates
watched parameters.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from threading import get_ident
from typing import Final

from torch.optim import Optimizer

from .._runtime.autograd import num_nodes_made
from .._runtime.error_boundary import contained
from .._runtime.weak_ids import WeakKeyDictionary
from .clock import SampleClock
from .open_sample import OpenSample
from .parts import CaptureParts
from .scaling import SCALES, OptimizerSteps
from .spot_check import SpotCheck, spot_check_of

_REGULAR: Final = 4  # number of consecutive samples that show the pattern of steps
_LEAST: Final = 3  # least number of steps for which turning the hooks off and on pays
_STRAY: Final = 100  # nested steps of unknown optimizers after which the outer step is taken to have raised


class Resting:
    """Decides when to rest, and begins and ends each rest: from one sample to shortly before the next."""

    def __init__(self, parts: CaptureParts, sample: OpenSample) -> None:
        self._parts, self._sample, self.boundary = parts, sample, parts.boundary
        self._last: list[frozenset[int]] = []  # the keys of the optimizers that made the last samples
        self._spot_check: SpotCheck | None = None
        self._chosen_for = -1  # the version of the registry for which `_spot_check` was chosen

    def sample_closed(self, stepped: frozenset[int], *, inside_backward: bool) -> None:
        """Record which optimizers have made a sample."""
        self._last = [] if inside_backward else [*self._last[1 - _REGULAR :], stepped]

    def is_worth_it(self) -> bool:
        """Whether the pattern of steps is regular and the next sample is some steps away."""
        parts, last = self._parts, self._last
        if parts.guard is not None or parts.by_hand.possible or parts.clock.muted or parts.window.sent:
            return False
        is_open = bool(parts.clock.stepped)
        if len(last) < _REGULAR or parts.schedule.wakes_at() - parts.clock.open_step < _LEAST + is_open:
            return False
        if frozenset.intersection(*last):
            return not is_open
        return all(len(stepped) == 1 for stepped in last)  # every step was a sample of its own

    def begin(self, optimizer: Optimizer) -> Rest | None:
        """Turn the hooks off after a step of this optimizer. Returns None if its steps do not fit the pattern."""
        parts = self._parts
        keys = frozenset[int]().union(*self._last)
        makers = [(key, one) for key in keys if (one := parts.optimizers.of_key(key)) is not None]
        if len(makers) < len(keys) or parts.optimizers.key(optimizer) not in keys:
            return None
        spot_check = self._spot_check_of(optimizer) if len(keys) == 1 else None
        parts.clock.discard()
        parts.take_off_hooks(is_alone=not parts.thread.has_company)
        parts.wiring.forget_gradients()
        return Rest(
            parts.clock,
            makers,
            leaders=frozenset.intersection(*self._last),
            is_only_one=parts.optimizers.num_known == 1,
            wakes_at=parts.schedule.wakes_at(),
            spot_check=spot_check,
        )

    def _spot_check_of(self, optimizer: Optimizer) -> SpotCheck | None:
        """Return the check between samples; None if the user chose the samples, or if gradients change unseen."""
        parts, version = self._parts, self._parts.registry.version
        if not parts.schedule.may_add_samples or self._sample.gradients_change or SCALES.last_used is not None:
            return None
        if parts.thread.has_company:  # another thread's backward may write to the gradient
            return None
        if self._chosen_for != version:
            self._chosen_for = version
            self._spot_check = spot_check_of(optimizer, parts.optimizers.entries(optimizer))
        if self._spot_check is not None:
            parts.schedule.plan(self._spot_check)
            self._spot_check.at_clipping = self._sample.is_clipped_by_torch
        return self._spot_check

    @contained
    def end(self, rest: Rest, before_step_of: Optimizer | None) -> None:
        """Turn the hooks on again.

        If an optimizer is about to step, a backward may have run since the last counted step without any hook.
        """
        if before_step_of is not None:
            self._parts.thread.step_begins()
        self.boundary.seconds_spent += rest.seconds_spent
        self._parts.schedule.seconds_on_counting += rest.seconds_spent
        if rest.has_counted:
            self._parts.clock.counted(rest.made_last)
        entries = self._parts.follow()
        if rest.has_found:
            self._parts.schedule.sample_now()
        self._sample.begin()
        if rest.has_found:
            self._sample.measure_found(entries)
        elif before_step_of is not None and rest.may_have_new_gradients:
            self._sample.mark_present(entries)


class Rest:
    """Counts samples by the steps of optimizers.

    Few calls and few objects matter more here than little arithmetic: between two steps of a training all of this
    leaves the processor's caches.

    Args:
        clock: the clock whose step is advanced.
        makers: the optimizers whose steps are counted, with their keys; a step of another one ends the rest.
        leaders: keys of the optimizers that step in every sample and complete it. Empty: every step is a sample.
        is_only_one: no other optimizer owns a watched parameter.
        wakes_at: the rest ends before this step.
        spot_check: ends the rest before a step or a clipping whose gradient it finds unusual.
    """

    def __init__(
        self,
        clock: SampleClock,
        makers: Iterable[tuple[int, Optimizer]],
        *,
        leaders: frozenset[int],
        is_only_one: bool,
        wakes_at: int,
        spot_check: SpotCheck | None = None,
    ) -> None:
        self._clock, self._first_step, self._last_step = clock, clock.step, wakes_at - 1
        self._leaders, self._is_only_one, self._thread = leaders, is_only_one, get_ident()
        self.seconds_spent = 0.0
        self._makers: WeakKeyDictionary[Optimizer, tuple[int, OptimizerSteps]] = WeakKeyDictionary()
        for key, one in makers:
            self._makers[one] = key, SCALES.steps_of(one)
        self._last_node = num_nodes_made()
        self.made_last = leaders  # keys of the optimizers of the last sample; others may still join it
        self._stepped: frozenset[int] = frozenset()
        self._under_way: tuple[int, OptimizerSteps] | None = None
        self._num_stray = 0
        self._spot_check = spot_check
        self.has_found = False  # whether the spot check has found an unusual gradient

    @property
    def has_counted(self) -> bool:
        """Whether any sample was counted."""
        return self._clock.step > self._first_step

    def begins(self, optimizer: Optimizer) -> bool:
        """An optimizer is about to step. Returns whether the rest goes on: the step is counted, or part of one."""
        if not self._is_only_one and get_ident() != self._thread:
            return False  # a backward for the other optimizers may be running
        began = time.perf_counter()
        if (maker := self._makers.get(optimizer)) is None:
            self._num_stray += 1
            return self._under_way is not None and self._num_stray < _STRAY and get_ident() == self._thread
        if self._finds(optimizer, at_clipping=False):
            return False
        self._under_way, self._num_stray = maker, 0
        if maker[1].scaler is not None:
            maker[1].note()
        self.seconds_spent += time.perf_counter() - began
        return True

    def finds_at_clipping(self) -> bool:
        """One of torch's functions is about to clip gradients. Returns whether the rest is over."""
        began = time.perf_counter()
        finds = any([self._finds(one, at_clipping=True) for one in self._makers])
        self.seconds_spent += time.perf_counter() - began
        return finds

    def _finds(self, optimizer: Optimizer, *, at_clipping: bool) -> bool:
        check = self._spot_check
        if check is not None and at_clipping == check.at_clipping and check.is_due(self._clock.open_step):
            self.has_found = check.finds(optimizer)
        return self.has_found

    def ends(self, optimizer: Optimizer) -> bool:
        """An optimizer has stepped. Returns whether the rest is over."""
        maker = self._under_way
        if maker is None or self._makers.get(optimizer) is not maker:
            return False
        began = time.perf_counter()
        self._under_way, self._last_node = None, num_nodes_made()
        if self._is_only_one or self._completes(maker[0]):
            self._clock.step += 1
        self.seconds_spent += time.perf_counter() - began
        return self._clock.step >= self._last_step

    def skips(self, optimizer: Optimizer) -> bool:
        """A scaler has skipped the step of an optimizer. Returns whether the rest is over."""
        self._under_way = self._makers.get(optimizer)
        return self.ends(optimizer)

    def _completes(self, key: int) -> bool:
        """Whether a sample is complete with the step of this optimizer."""
        is_next = key in self._stepped  # a second step: the leaders that are missing do not step this time
        stepped = frozenset([key]) if is_next else self._stepped | {key}
        is_complete = self._leaders <= stepped
        self.made_last = self._leaders or stepped
        self._stepped = frozenset() if is_complete else stepped
        return is_next or is_complete

    @property
    def may_have_new_gradients(self) -> bool:
        """Whether a forward, and so perhaps a backward, has run since the last counted step."""
        return self._last_node != num_nodes_made()
