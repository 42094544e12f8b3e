"""Alerts and the rules that raise them: snapshot in, alerts out. Pure; nothing here needs torch or a W&B run."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final, Literal, Protocol, runtime_checkable

from ..snapshot import Snapshot

Level = Literal["INFO", "WARN", "ERROR"]

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


@runtime_checkable
class Rule(Protocol):
    """Looks at new samples and names what is wrong with them, each under its own step.

    A rule is given every sample once, in order, one or several at a time, and says each time what is wrong; that
    one episode makes one alert is the business of whoever sends them.
    """

    def check(self, snapshot: Snapshot) -> Iterable[Alert]: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...
