"""Incident: findings that belong together, as data. Alerts, page, report, verdict and summary are views of it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Final, Literal

Level = Literal["INFO", "WARN", "ERROR"]
LEVELS: Final[tuple[Level, ...]] = ("INFO", "WARN", "ERROR")
SCHEMA_VERSION: Final = 1  # of `to_dict()` of incidents and verdicts

MAX_FIRST_LINE: Final = 120  # characters of a message's first line: step, cause, what to do
MAX_MESSAGE: Final = 400  # characters of a message
_MAX_IN_MESSAGE: Final = 3  # layers that a message names


@dataclass(frozen=True)
class Layer:
    """A layer of an incident.

    Args:
        name: the parameter's or module's name.
        value: what was seen of it; NaN where a layer is only named.
        usual: what is usual for it; NaN if that is unknown.
    """

    name: str
    value: float = math.nan
    usual: float = math.nan


@dataclass(frozen=True)
class Incident:
    """Findings that follow each other and that one cause explains.

    Texts have no closing full stop. Identifiers are stable: programs may compare them.

    Args:
        kind: identifier of what was seen first, such as "exploding_gradient".
        title: the same in words, at most 63 characters; one per kind.
        level: the highest level so far.
        first_step: the step at which it began, or the first measured one at which it was there.
        found_step: the step of the sample in which it was found.
        last_step: the step of the newest sample that belongs to it.
        fact: what was seen, with numbers, in one sentence.
        recovered_step: the first step of the samples that ended it; None while it lasts.
        unmeasured_from: the first of the steps right before `first_step` that were not measured, in which it may have
            begun; None if the step before was measured.
        cause: identifier of the probable cause; "" if the facts allow none.
        cause_text: the cause in a few words.
        rival, rival_text: another cause that the facts allow as well; "" if there is none.
        evidence: the numbers that speak for the cause.
        advice: what to do, in a few words.
        remedy: what to do, in full.
        layers: the layers concerned, worst first.
        values: the numbers of the sample in which it was found, by name.
        kinds: identifiers of all findings of the incident, in order.
        rank: the rank that is concerned; None for all.
    """

    kind: str
    title: str
    level: Level
    first_step: int
    found_step: int
    last_step: int
    fact: str
    recovered_step: int | None = None
    unmeasured_from: int | None = None
    cause: str = ""
    cause_text: str = ""
    rival: str = ""
    rival_text: str = ""
    evidence: str = ""
    advice: str = ""
    remedy: str = ""
    layers: tuple[Layer, ...] = ()
    values: Mapping[str, float] = field(default_factory=dict)
    kinds: tuple[str, ...] = ()
    rank: int | None = None

    @property
    def is_over(self) -> bool:
        return self.recovered_step is not None

    @property
    def headline(self) -> str:
        """Step, cause and what to do, in at most 120 characters."""
        what = self.cause_text or self.title
        if self.rival_text:
            what = f"{what}, or {self.rival_text}"
        start = f"Step {self.first_step}: "
        line = f"{start}{what}. {_sentence(self.advice)}".rstrip()
        return line if len(line) <= MAX_FIRST_LINE else _cut(f"{start}{_sentence(what)}", MAX_FIRST_LINE)

    @property
    def message(self) -> str:
        """The text that is sent, in at most 400 characters: the headline, then what was seen as far as it fits."""
        lines = [self.headline]
        rest = [_sentence(self.fact)]
        if self.unmeasured_from is not None and self.unmeasured_from < self.first_step:
            rest.append(f"Steps {self.unmeasured_from} to {self.first_step - 1} were not measured.")
        if self.layers:
            rest.append(f"Layers: {self._named_layers()}.")
        if self.evidence:
            rest.append(f"For this cause: {_sentence(self.evidence)}")
        room = MAX_MESSAGE - len(lines[0])
        for text in rest:
            if text and len(text) + 1 <= room:
                lines.append(text)
                room -= len(text) + 1
            elif len(lines) == 1 and text:
                lines.append(_cut(text, room - 1))
                break
        return "\n".join(lines)

    @property
    def text(self) -> str:
        """Everything that is known, for the page: the headline, what was seen, the layers, the evidence, the remedy."""
        lines = [self.headline, _sentence(self.fact)]
        if self.layers:
            lines.append(f"Layers: {', '.join(layer.name for layer in self.layers)}.")
        if self.evidence:
            lines.append(f"For this cause: {_sentence(self.evidence)}")
        if self.remedy:
            lines.append(f"Remedy: {_sentence(self.remedy)}")
        return "\n".join(lines)

    def _named_layers(self) -> str:
        named = ", ".join(layer.name for layer in self.layers[:_MAX_IN_MESSAGE])
        more = len(self.layers) - _MAX_IN_MESSAGE
        return f"{named} and {more} more" if more > 0 else named

    def to_dict(self) -> dict[str, Any]:
        """Return plain values that JSON can hold: numbers that are missing or infinite are None."""
        known = vars(self) | {"layers": [vars(layer) for layer in self.layers], "message": self.message}
        plain: dict[str, Any] = _plain(known)
        return plain | {"schema_version": SCHEMA_VERSION}

    @classmethod
    def from_dict(cls, told: Mapping[str, Any]) -> Incident:
        """Return the incident that `to_dict` described, which may come from a stranger's file.

        Raises:
            ValueError: it is none, or of a newer schema.
        """
        if not isinstance(told, Mapping) or told.get("schema_version") != SCHEMA_VERSION:
            raise ValueError(f"no incident of schema {SCHEMA_VERSION}: {told!r:.100}")
        try:
            return cls(**{one.name: _read(one.name, told[one.name]) for one in fields(cls) if one.name in told})
        except (TypeError, KeyError, AttributeError, OverflowError) as error:
            raise ValueError(f"no incident: {error!r:.200}") from error


_STEPS: Final = frozenset({"first_step", "found_step", "last_step"})
_PERHAPS: Final = frozenset({"recovered_step", "unmeasured_from", "rank"})
_MAX_STEP: Final = 2**53  # larger ones have no exact float64


def _read(name: str, value: Any) -> Any:
    if name == "level":
        if value not in LEVELS:
            raise ValueError(f"level={value!r:.50}")
        return value
    if name in _STEPS or (name in _PERHAPS and value is not None):
        if isinstance(value, bool) or not isinstance(value, int) or abs(value) > _MAX_STEP:
            raise ValueError(f"{name}={value!r:.50} must be a whole number of at most 2**53")
        return value
    if name in _PERHAPS:
        return None
    if name == "layers":
        return tuple(Layer(_text(one["name"]), _number(one.get("value")), _number(one.get("usual"))) for one in value)
    if name == "values":
        return {_text(key): _number(number) for key, number in dict(value).items()}
    return tuple(map(_text, value)) if name == "kinds" else _text(value)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{value!r:.50} must be a text")
    return value


def _number(value: Any) -> float:
    if value is None:
        return math.nan
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{value!r:.50} must be a number")
    return float(value)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _sentence(text: str) -> str:
    """Begin with a capital, unless the first word is a name such as "head.weight", and end with a full stop."""
    begin = text[:1].upper() if text.partition(" ")[0].isalpha() else text[:1]
    return f"{begin}{text[1:].rstrip('.')}." if text else ""


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 1].rstrip()}…"
