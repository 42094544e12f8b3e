"""An unhealthy step is not applied: `watch(..., guard="skip")`, a function, or a SkipGuard with its own limits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from .rules import ExplodingGradient, InfGradient, NaNGradient, Rule
from .snapshot import Snapshot

Judge = Callable[[Snapshot], bool]


class TooManySkippedStepsError(RuntimeError):
    """The guard has skipped so many steps in a row that going on is pointless."""


@dataclass
class SkipGuard:
    """Decides, before an optimizer steps, whether its gradients are used.

    A skipped step leaves parameters and optimizer state bit for bit as they were: the optimizer finds no gradients.
    Needs one read from the device at each sampled step. With `sample_every` > 1 the steps between are not guarded.

    Args:
        is_bad: judges a snapshot of one sample, of the gradients that are about to be used; None: non-finite, or a
            norm more than 20 times the usual one. An alert that was not needed costs a glance; a good batch that was
            dropped is lost, so the guard waits for more than the alerts do.
        max_in_a_row: so many skipped steps in a row are too many.
        then: "raise" a TooManySkippedStepsError from optimizer.step(), or "continue" and apply the step.

    Raises:
        ValueError: a limit that makes no sense.
    """

    is_bad: Judge | None = None
    max_in_a_row: int = 20
    then: Literal["raise", "continue"] = "raise"
    num_skipped: int = field(default=0, init=False)
    num_in_a_row: int = field(default=0, init=False)
    _rules: tuple[Rule, ...] = field(
        default_factory=lambda: (NaNGradient(), InfGradient(), ExplodingGradient(min_factor=20.0, growth=None)),
        init=False,
    )

    def __post_init__(self) -> None:
        if self.max_in_a_row < 1:
            raise ValueError(f"max_in_a_row={self.max_in_a_row!r} must be at least 1")
        if self.then not in ("raise", "continue"):
            raise ValueError(f'then={self.then!r} must be "raise" or "continue"')

    def skips(self, snapshot: Snapshot) -> bool:
        """Whether this step is skipped.

        Raises:
            TooManySkippedStepsError: there were too many in a row.
        """
        if not self._finds_bad(snapshot):
            self.num_in_a_row = 0
            return False
        self.num_in_a_row += 1
        if self.num_in_a_row > self.max_in_a_row:
            if self.then == "raise":
                raise TooManySkippedStepsError(
                    f"guard: step {int(snapshot.steps[-1])} is the {self.num_in_a_row}th unhealthy step in a row "
                    f"(max_in_a_row={self.max_in_a_row}); the model no longer learns. Load an earlier checkpoint, "
                    'lower the learning rate, or use SkipGuard(then="continue").'
                )
            return False
        self.num_skipped += 1
        return True

    def _finds_bad(self, snapshot: Snapshot) -> bool:
        if self.is_bad is not None:
            return bool(self.is_bad(snapshot))
        return any(list(rule.check(snapshot)) for rule in self._rules)

    def state_dict(self) -> dict[str, Any]:
        """Counts and what the rules have learnt, in plain numbers."""
        rules = [rule.state_dict() for rule in self._rules]
        return {"num_skipped": self.num_skipped, "num_in_a_row": self.num_in_a_row, "rules": rules}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state_dict()`."""
        self.num_skipped, self.num_in_a_row = int(state["num_skipped"]), int(state["num_in_a_row"])
        for rule, rule_state in zip(self._rules, state["rules"], strict=True):
            rule.load_state_dict(rule_state)


GuardArgument = Literal["skip"] | Judge | SkipGuard | None


def resolve_guard(guard: GuardArgument) -> SkipGuard | None:
    """What the user gave as `guard=` as a SkipGuard.

    Raises:
        ValueError: it is none of None, "skip", a function and a SkipGuard.
    """
    if guard is None or isinstance(guard, SkipGuard):
        return guard
    if guard == "skip":
        return SkipGuard()
    if callable(guard):
        return SkipGuard(is_bad=guard)
    raise ValueError(f'guard={guard!r} must be "skip", a function from a snapshot to True (skip), or a SkipGuard')
