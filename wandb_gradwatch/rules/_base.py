"""Alerts and the rules that raise them: snapshot in, alerts out. Pure; nothing here needs torch or a W&B run."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any, ClassVar, Final, Literal, Protocol, runtime_checkable

from .._analysis.formatting import sentence
from .._analysis.memory import Remembers
from ..snapshot import Snapshot, keys

Level = Literal["INFO", "WARN", "ERROR"]

FIRST_STEPS: Final = 2  # in which weights and inputs are looked at as they begin
MAX_TITLE: Final = 63  # W&B documents a limit of 64 characters and does not check it


@dataclass(frozen=True)
class Alert:
    """One message to a person.

    Args:
        title: stable, one per kind and never one per layer: services throttle by it. At most 63 characters.
        text: the exact step, the worst layers, values and threshold, probable cause and remedy.
        step: the step of the sample that raised it.
        level: "INFO", "WARN" or "ERROR".
    """

    title: str
    text: str
    step: int
    level: Level = "WARN"

    def __post_init__(self) -> None:
        if not 0 < len(self.title) <= MAX_TITLE:
            raise ValueError(
                f"an alert's title has 1 to {MAX_TITLE} characters, but {self.title!r} has {len(self.title)}"
            )
        if self.level not in ("INFO", "WARN", "ERROR"):
            raise ValueError(f'level={self.level!r} must be "INFO", "WARN" or "ERROR"')

    def __str__(self) -> str:
        """What a person reads: `on_alert=print` prints it."""
        return f"{self.level} at step {self.step}: {self.title}\n{textwrap.indent(self.text, '    ')}"


@dataclass(frozen=True)
class Finding(Alert):
    """An alert of a shipped rule in its parts: a diagnosis may put another cause in, and adds to the fact.

    Args:
        fact, layers, cause, remedy: what the text is made of.
        kind: what of its title was found, where a title has several kinds; more: further lines of the text.
        seen: the step of the newest sample that belongs to it, where that is later than its own.
        found_in: the step of the sample that it was found in, where that is later than its own.
    """

    fact: str = ""
    layers: str = ""
    cause: str = ""
    remedy: str = ""
    kind: str = ""
    more: tuple[str, ...] = ()
    seen: int = 0
    found_in: int = 0

    def because(self, cause: str, remedy: str = "") -> Finding:
        """The same with another cause."""
        return self._with(cause=cause, remedy=remedy)

    def adding(self, line: str) -> Finding:
        """The same with one line more before the cause."""
        return self._with(more=(*self.more, line))

    def _with(self, **parts: Any) -> Finding:
        changed = replace(self, **parts)
        text = sentence(changed.fact, changed.layers, changed.cause, changed.remedy, changed.more)
        return replace(changed, text=text)


def finding(
    title: str, fact: str, layers: str, cause: str, remedy: str, step: int, level: Level = "WARN", kind: str = ""
) -> Finding:
    """A finding with its text."""
    return Finding(title, sentence(fact, layers, cause, remedy), step, level, fact, layers, cause, remedy, kind)


def is_ordinary(snapshot: Snapshot) -> bool:
    """Whether these samples are none of those that a rule whose class says `is_for_rare_samples` finds anything in.

    Rare are the first two steps, what is not finite, a wrong wiring that the capture has found, and a learning rate
    below 0. Rules that are not even called cost nothing.
    """
    if any([sample.has_nonfinite or sample.step <= FIRST_STEPS for sample in snapshot.overview]):
        return False
    if any([key.startswith(keys.WIRING) for key in snapshot.metrics]):
        return False
    bad, rates = values_of(snapshot, keys.NUM_NONFINITE_LOSS), values_of(snapshot, keys.LEARNING_RATE)
    return not any([num > 0 for num in bad]) and not any([rate < 0 for rate in rates])


def values_of(snapshot: Snapshot, key: str) -> list[float]:
    """A metric in each sample; NaN where it was not measured."""
    values_S = snapshot.metrics.get(key)
    return [math.nan] * len(snapshot) if values_S is None else values_S.tolist()


Bounds = Mapping[str, tuple[float, float]]
FROM_0: Final = (0.0, math.inf)
FROM_1: Final = (1.0, math.inf)
SHARE: Final = (0.0, 1.0)


class ShippedRule(Remembers):
    """What shipped rules share: limits that are checked at once, and a memory.

    A limit out of its bounds could only alarm always, never, or raise in the middle of a training.
    """

    bounds: ClassVar[Bounds] = {}  # the least and the largest of each limit
    may_be_none: ClassVar[frozenset[str]] = frozenset()  # the names of limits that None switches off
    is_for_rare_samples: ClassVar[bool] = False

    def __post_init__(self) -> None:
        for name, (least, largest) in self.bounds.items():
            value, may_be_none = getattr(self, name), name in self.may_be_none
            if value is None and may_be_none:
                continue
            if isinstance(value, bool) or not isinstance(value, Real) or not least <= float(value) <= largest:
                span = f"at least {least:g}" if largest == math.inf else f"between {least:g} and {largest:g}"
                none = ", or None" if may_be_none else ""
                raise ValueError(f"{type(self).__name__}({name}={value!r}): {name} must be a number, {span}{none}")


@runtime_checkable
class Rule(Protocol):
    """Looks at new samples and names what is wrong with them, each under its own step.

    A rule is given every sample once, in order, one or several at a time, and says each time what is wrong; that
    one episode makes one alert is the business of whoever sends them.
    """

    def check(self, snapshot: Snapshot) -> Iterable[Alert]: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...
