"""What a guard learns from the steps that it has judged: at once where the host has decided, else 8 steps later.

Always 8, and not "when they have arrived": a limit that depends on the machine's timing would decide differently in
every run, and on every rank.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from torch import Tensor

from .._runtime.error_boundary import CallbackError
from .._runtime.notices import Notices
from .._transfer.transfers import PinnedPool, Transfer
from .guard import SkipGuard

Present = tuple[tuple[str, ...], npt.NDArray[np.bool_]]

# The host is seldom so many steps ahead of its device; where it is, it waits, and the device has work for 7 steps.
_LEARNT_AFTER: Final = 8

_UNHEARD: Final = (
    "the monitor of another rank has failed, so that no rank can tell whether the gradients of the whole model are "
    "healthy: from here on every step is applied, on all ranks alike"
)


@contextmanager
def raised_to_the_user() -> Iterator[None]:
    """What the guard raises is meant for the training loop."""
    try:
        yield
    except Exception as error:
        raise CallbackError from error


@dataclass(frozen=True)
class Opinion:
    """What is known of one optimizer's gradients in a step."""

    slots: tuple[int, ...]  # of which parameters
    learns: bool  # whether their norm is one of those that the guard learns what is usual from
    # [5] non-finite elements, sum of squares, and as 0 or 1: unhealthy, withheld, skipped by a loss scaler; on the
    # device until they are fetched
    values: list[float] | Tensor | Transfer

    def sent(self, pinned_pool: PinnedPool) -> Opinion:
        """The same, on its way to the host."""
        return replace(self, values=pinned_pool.send(self.values)) if isinstance(self.values, Tensor) else self

    def fetch(self) -> Opinion:
        """The same, on the host. Waits if it is not there yet."""
        if not isinstance(self.values, Transfer):
            return self
        self.values.arrived(wait=True)
        return replace(self, values=self.values.take().tolist())


@dataclass(frozen=True)
class Step:
    """A closed step, of which the guard has not learnt yet."""

    number: int  # its number
    opinions: tuple[Opinion, ...]  # one for each optimizer that stepped
    was_read: bool  # the host has decided: there is nothing to wait for, and nothing to tell it


class PendingVerdicts:
    """Closed steps that the guard has not learnt from yet.

    Args:
        present: the names of all parameters [P], and which of them these slots are [P].
    """

    def __init__(self, guard: SkipGuard, present: Callable[[Sequence[int]], Present], notices: Notices) -> None:
        self._guard = guard
        self._present = present
        self._notices = notices
        self._unlearnt: deque[Step] = deque()

    def add(self, step: Step) -> None:
        """A step has closed."""
        self._unlearnt.append(step)
        if len(self._unlearnt) == 1 and step.was_read:
            self._learn(keep=0)

    def learn_due(self) -> None:
        """Learn what must be known before the next step is judged. Seldom waits for the device."""
        self._learn(keep=_LEARNT_AFTER - 1)

    def learn_all(self) -> None:
        """No step comes any more: learn the rest, which stops no training. Waits for the device."""
        self._learn(keep=0, raises=False)

    def _learn(self, *, keep: int, raises: bool = True) -> None:
        while len(self._unlearnt) > keep:
            step = self._unlearnt.popleft()
            bad = skipped = counts = False
            for opinion in (opinion.fetch() for opinion in step.opinions):
                assert isinstance(opinion.values, list)
                num_nonfinite, sum_sq, is_bad, is_withheld, overflowed = opinion.values
                if overflowed:  # the loss scaler's business
                    continue
                if opinion.learns and math.isnan(num_nonfinite):
                    self._notices.say("guard", f"{_UNHEARD} (step {step.number})")
                bad, skipped, counts = bad or bool(is_bad or is_withheld), skipped or bool(is_withheld), True
                if opinion.learns and not num_nonfinite:
                    self._guard.learn(*self._present(opinion.slots), math.sqrt(sum_sq), bad=bool(is_bad))
            if counts:
                with raised_to_the_user():
                    self._guard.count(step.number, bad=bad, skipped=skipped, was_asked=step.was_read or not raises)

    def state(self) -> list[dict[str, Any]]:
        """What has not been learnt, in plain numbers. Waits for the device."""
        steps = []
        for step in self._unlearnt:
            opinions = [opinion.fetch() for opinion in step.opinions]
            steps.append(
                {
                    "step": step.number,
                    "was_read": step.was_read,
                    "opinions": [{"slots": list(o.slots), "learns": o.learns, "values": o.values} for o in opinions],
                }
            )
        return steps

    def load_state(self, steps: Iterable[Mapping[str, Any]], place: Mapping[int, int]) -> None:
        """Go on from `state()`; `place` is that of `StepSkipping.load_state_dict`."""
        self._unlearnt = deque(
            Step(
                int(step["step"]),
                tuple(
                    Opinion(
                        tuple(sorted(place[slot] for slot in opinion["slots"] if slot in place)),
                        bool(opinion["learns"]),
                        [float(value) for value in opinion["values"]],
                    )
                    for opinion in step["opinions"]
                ),
                bool(step["was_read"]),
            )
            for step in steps
        )
