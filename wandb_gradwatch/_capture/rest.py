"""Between samples nothing is looked at: the hooks on parameters are off, and optimizer steps are only counted.

That needs to be known how steps make samples: the last ones were all made by the same optimizers, or each by one alone
(as of a GAN). Whatever does not fit ends the rest: another optimizer that updates something watched, for instance.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterable
from typing import Final

from torch.optim import Optimizer

_REGULAR: Final = 4  # samples in a row that were alike
_STRAY: Final = 100  # steps that look nested in another one, after which they no longer do: the outer one has raised


class Regularity:
    """Which optimizers made the last samples, by key."""

    def __init__(self) -> None:
        self._last: list[frozenset[int]] = []

    def add(self, stepped: frozenset[int], *, inside_backward: bool) -> None:
        """A sample has closed."""
        self._last = [] if inside_backward else [*self._last[1 - _REGULAR :], stepped]

    @property
    def is_settled(self) -> bool:
        """Whether enough samples were alike to count on it."""
        return (
            len(self._last) == _REGULAR and bool(self._last[-1]) and (self.is_each_alone or len(set(self._last)) == 1)
        )

    @property
    def is_each_alone(self) -> bool:
        """Whether every optimizer's step is a sample of its own."""
        return all(len(stepped) == 1 for stepped in self._last)

    @property
    def keys(self) -> frozenset[int]:
        """The optimizers that made them."""
        return frozenset().union(*self._last)


class Rest:
    """Counts samples by the steps of optimizers.

    Args:
        optimizers: that make them.
        last: the one of them that has just stepped.
        each_alone: every step is a sample; otherwise all of them together make one.
    """

    def __init__(self, optimizers: Iterable[Optimizer], last: Optimizer, *, each_alone: bool) -> None:
        self._witnesses = {id(one): _place_of_a_gradient(one) for one in optimizers}
        self._num_together = 1 if each_alone else len(self._witnesses)
        self._stepped: set[int] = set()
        self._under_way: int | None = None
        self._num_stray = 0
        self._last, self._state = weakref.ref(last), self._state_of(last)

    @property
    def has_new_gradients(self) -> bool:
        """Whether a backward, or a reset, has come after the last step that was counted."""
        last = self._last()
        return last is None or self._state_of(last) != self._state

    def _state_of(self, optimizer: Optimizer) -> tuple[int, int] | None:
        group, place = self._witnesses[id(optimizer)]
        gradient = optimizer.param_groups[group]["params"][place].grad
        return None if gradient is None else (id(gradient), gradient._version)

    def begins(self, optimizer: Optimizer) -> bool:
        """An optimizer is about to step: whether that may pass, counted or as a part of the step under way."""
        number = id(optimizer)
        if number in self._witnesses:
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
        number = id(optimizer)
        if number not in self._witnesses:
            return False
        self._last, self._state = weakref.ref(optimizer), self._state_of(optimizer)
        if self._num_together == 1:
            return True
        is_next = number in self._stepped  # the others do not step this time
        self._stepped = {number} if is_next else self._stepped | {number}
        if is_next or len(self._stepped) < self._num_together:
            return is_next
        self._stepped = set()
        return True


def _place_of_a_gradient(optimizer: Optimizer) -> tuple[int, int]:
    """Group and place of the first parameter that has one: a reference to it would keep its model."""
    for group, of_group in enumerate(optimizer.param_groups):
        for place, parameter in enumerate(of_group["params"]):
            if parameter.grad is not None:
                return group, place
    return 0, 0


def seconds_of_a_step(optimizer: Optimizer) -> float:
    """What counting one step takes: the fastest of some."""
    rest, fastest = Rest([optimizer], optimizer, each_alone=True), float("inf")
    for _ in range(20):
        began = time.perf_counter()
        rest.begins(optimizer)
        rest.ends(optimizer)
        fastest = min(fastest, time.perf_counter() - began)
    return fastest
