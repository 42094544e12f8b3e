"""An unhealthy step is not applied: `watch(..., guard="skip")`, a function, or a SkipGuard with its own limits."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from ..rules import ExplodingGradient
from ..snapshot import Snapshot

# P watched parameters

StepJudge = Callable[[Snapshot], bool]


class TooManySkippedStepsError(RuntimeError):
    """The guard has skipped so many steps in a row that going on is pointless."""


@dataclass
class SkipGuard:
    """Decides, before an optimizer steps, whether its gradients are used.

    Every step is judged, those between two samples too, by its gradients as the backward left them: unscaled, before
    clipping. Where several optimizers step after one backward, the first that is withheld withholds those after it. A
    skipped step leaves the optimizer's parameters, also those that are not watched, and its state bit for bit as they
    were.

    Torch's fused optimizers (`fused=True`: Adam, AdamW, SGD, Adagrad) are told on the device, and the host never waits;
    it hears of it 8 steps later, and so learns, counts and raises later. Their first step, which creates their state,
    every step of another optimizer, and a function of your own cost one read from the device a step. On ranks that
    hold shards all decide alike, by one small all-reduce a step: call `watch()` on all of them.

    A step between two samples costs what a sample costs without its histogram and its parameters' norms, and a dozen
    operations on numbers; nothing of it is logged but how many steps were withheld (`gradwatch/num_guarded_steps`).

    Of an optimizer that steps inside the backward, only what is not finite is withheld: there is no norm of the whole.
    A step that a CUDA graph replays is not seen, and not guarded.

    Args:
        is_bad: judges a snapshot of one sample, of the gradients that are about to be used; None: non-finite, or a
            norm more than 20 times the usual one. An alert that was not needed costs a glance; a good batch that was
            dropped is lost, so the guard waits for more than the alerts do.
        max_in_a_row: so many skipped steps in a row are too many.
        then: "raise" a TooManySkippedStepsError from optimizer.step(), or "continue" and apply the step.

    Raises:
        ValueError: a limit that makes no sense.
    """

    is_bad: StepJudge | None = None
    max_in_a_row: int = 20
    then: Literal["raise", "continue"] = "raise"
    num_skipped: int = field(default=0, init=False)
    num_in_a_row: int = field(default=0, init=False)  # unhealthy steps, up to now
    _usual: ExplodingGradient = field(
        default_factory=lambda: ExplodingGradient(min_factor=20.0, growth=None), init=False, repr=False
    )

    def __post_init__(self) -> None:
        if self.max_in_a_row < 1:
            raise ValueError(f"max_in_a_row={self.max_in_a_row!r} must be at least 1")
        if self.then not in ("raise", "continue"):
            raise ValueError(f'then={self.then!r} must be "raise" or "continue"')

    @property
    def lets_through(self) -> bool:
        """Whether so many steps in a row were unhealthy that the next is applied whatever it is."""
        return self.then == "continue" and self.num_in_a_row >= self.max_in_a_row

    def withholds(self, step: int, *, bad: bool) -> bool:
        """Whether a step is withheld, now that it is known to be unhealthy or not.

        Raises:
            TooManySkippedStepsError: there were too many in a row.
        """
        if bad and self.then == "raise" and self.num_in_a_row >= self.max_in_a_row:
            raise self._too_many(step, self.num_in_a_row + 1)
        return bad and not self.lets_through

    def limit(self, names: tuple[str, ...], present_P: npt.NDArray[np.bool_]) -> float:
        """The largest norm of the gradients of these parameters together that is still applied."""
        return self._usual.limit(names, present_P)

    def learn(self, names: tuple[str, ...], present_P: npt.NDArray[np.bool_], norm: float, *, bad: bool) -> None:
        """Remember the finite norm of a step that was judged."""
        if 0 < norm < math.inf:
            self._usual.learn(names, present_P, norm, alarmed=bad)

    def count(self, step: int, *, bad: bool, skipped: bool, was_asked: bool) -> None:
        """A step is over, and all that is decided about it is known.

        Args:
            step: its number.
            bad: its gradients were unhealthy.
            skipped: they were not used.
            was_asked: `withholds` was asked first; else the device has decided, and this is the first to hear of it.

        Raises:
            TooManySkippedStepsError: there were too many in a row, and nobody has said so yet.
        """
        self.num_in_a_row = self.num_in_a_row + 1 if bad else 0
        self.num_skipped += skipped
        if skipped and not was_asked and self.then == "raise" and self.num_in_a_row > self.max_in_a_row:
            raise self._too_many(step, self.num_in_a_row)

    def _too_many(self, step: int, num_in_a_row: int) -> TooManySkippedStepsError:
        return TooManySkippedStepsError(
            f"guard: {num_in_a_row} unhealthy steps in a row, up to step {step} "
            f"(max_in_a_row={self.max_in_a_row}); the model no longer learns. Load an earlier checkpoint, "
            'lower the learning rate, or use SkipGuard(then="continue").'
        )

    def state_dict(self) -> dict[str, Any]:
        """Counts and what was learnt of the usual norms, in plain numbers."""
        return {"num_skipped": self.num_skipped, "num_in_a_row": self.num_in_a_row, "usual": self._usual.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state_dict()`."""
        self.num_skipped, self.num_in_a_row = int(state["num_skipped"]), int(state["num_in_a_row"])
        self._usual.load_state_dict(state["usual"])


class GuardedSlots:
    """The guard as the capture asks it: by the places of the parameters, not by their names.

    Args:
        guard: what decides.
        names: asks for the names as they are now: [P].
        peek: a snapshot of the open sample with nothing but these slots; waits for the device.
    """

    def __init__(
        self, guard: SkipGuard, names: Callable[[], tuple[str, ...]], peek: Callable[[Sequence[int]], Snapshot]
    ) -> None:
        self._guard = guard
        self._names = names
        self._peek = peek
        self.needs_rows = guard.is_bad is not None
        self.withholds, self.count = guard.withholds, guard.count

    @property
    def lets_through(self) -> bool:
        """See SkipGuard."""
        return self._guard.lets_through

    def is_bad(self, slots: Sequence[int]) -> bool:
        """Ask the user's function."""
        assert self._guard.is_bad is not None
        return bool(self._guard.is_bad(self._peek(slots)))

    def limit(self, slots: Sequence[int]) -> float:
        """See SkipGuard."""
        names, present_P = self._of(slots)
        return self._guard.limit(names, present_P)

    def learn(self, slots: Sequence[int], norm: float, *, bad: bool) -> None:
        """See SkipGuard."""
        names, present_P = self._of(slots)
        self._guard.learn(names, present_P, norm, bad=bad)

    def _of(self, slots: Sequence[int]) -> tuple[tuple[str, ...], npt.NDArray[np.bool_]]:
        names = self._names()
        present_P = np.zeros(len(names), dtype=bool)
        present_P[list(slots)] = True
        return names, present_P


GuardArgument = Literal["skip"] | StepJudge | SkipGuard | None


def resolve_guard(guard: GuardArgument) -> SkipGuard | None:
    """What the user gave as `guard=` as a SkipGuard.

    Raises:
        ValueError: it is none of None, "skip", a function and a SkipGuard.
    """
    if guard is None or isinstance(guard, SkipGuard):
        return guard
    if guard == "skip":
        return SkipGuard()
    if callable(guard) and not isinstance(guard, type):  # the class itself would call every step bad
        return SkipGuard(is_bad=guard)
    raise ValueError(f'guard={guard!r} must be "skip", a function from a snapshot to True (skip), or a SkipGuard')
