"""Verdict: what the incidents and the measured steps together say of a run."""

from __future__ import annotations

import html
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from .._analysis.formatting import visible_text
from .incident import LEVELS, SCHEMA_VERSION, Incident

Status = Literal["ok", "warn", "error", "unknown"]
# Readable on a light and on a dark page.
_COLOUR: Final[dict[Status, str]] = {"ok": "#3a8a3e", "warn": "#b86f00", "error": "#d7264f", "unknown": "#808080"}
EXIT_STATUS: Final[dict[Status, int]] = {"ok": 0, "warn": 1, "error": 2, "unknown": 3}


@dataclass(frozen=True)
class Verdict:
    """What is known of a run.

    Args:
        status: "error" or "warn" by the worst incident; "ok" if none is above INFO; "unknown" if nothing was measured.
        sentence: the verdict in one line.
        num_steps: steps since watch().
        num_measured: steps of these that were measured.
        incidents: in the order in which they were found.
    """

    status: Status
    sentence: str
    num_steps: int
    num_measured: int
    incidents: tuple[Incident, ...] = ()

    @property
    def exit_status(self) -> int:
        """0: no alert above INFO; 1: a WARN; 2: an ERROR; 3: nothing was measured."""
        return EXIT_STATUS[self.status]

    def __str__(self) -> str:
        return self.sentence

    def _repr_html_(self) -> str:
        """The sentence and the headline of each incident, the worst first, for a notebook."""
        by_level = sorted(self.incidents, key=lambda one: -LEVELS.index(one.level))
        items = "".join(f"<li>{one.level}: {_escaped(one.headline)}</li>" for one in by_level[:MAX_INCIDENTS])
        told = f"<ul>{items}</ul>" if items else ""
        return f'<p style="color: {_COLOUR[self.status]}"><b>{_escaped(self.sentence)}.</b></p>{told}'

    def to_dict(self, *, max_bytes: int | None = None) -> dict[str, Any]:
        """Return plain values that JSON can hold.

        With `max_bytes`, the incidents take at most so many bytes of JSON: as `incidents_within` says.
        """
        told = [incident.to_dict() for incident in self.incidents]
        return {
            "schema_version": SCHEMA_VERSION,
            "status": self.status,
            "sentence": self.sentence,
            "num_steps": self.num_steps,
            "num_measured": self.num_measured,
            "num_incidents": len(told),
            "incidents": told if max_bytes is None else incidents_within(self.incidents, max_bytes),
        }


def verdict_of(incidents: Sequence[Incident], *, num_steps: int, num_measured: int) -> Verdict:
    """Return the verdict on a run of so many steps, with these incidents in the order in which they were found."""
    measured = measured_of(num_measured, num_steps)
    if not num_measured and not incidents:
        return Verdict("unknown", f"nothing was measured in {_steps(num_steps)}", num_steps, 0)
    told = [one for one in incidents if one.level != "INFO"]
    if not told:
        remarks = f", {len(incidents)} remark{'s' if len(incidents) > 1 else ''}" if incidents else ""
        return Verdict("ok", f"no alert{remarks} in {measured}", num_steps, num_measured, tuple(incidents))
    worst = max(told, key=lambda one: LEVELS.index(one.level))  # the first of the worst
    sentence = f"{_said(worst)}; {_end(worst)}"
    if len(told) > 1:
        sentence += f"; {len(told) - 1} more incident{'s' if len(told) > 2 else ''}"
    status: Status = "error" if worst.level == "ERROR" else "warn"
    return Verdict(status, f"{sentence}; {measured}", num_steps, num_measured, tuple(incidents))


def measured_of(num_measured: int, num_steps: int) -> str:
    """Say how many steps were measured, of how many: "212 of 400 steps measured"."""
    return f"{num_measured:,} of {_steps(num_steps)} measured"


def _escaped(text: str) -> str:
    """Text of a model or a file: it can neither be markup nor hide."""
    return html.escape(visible_text(text))


def _steps(num: int) -> str:
    return f"{num:,} step{'' if num == 1 else 's'}"


def _said(incident: Incident) -> str:
    before = ""
    if incident.unmeasured_from is not None and incident.unmeasured_from < incident.first_step:
        before = f" (steps {incident.unmeasured_from} to {incident.first_step - 1} were not measured)"
    cause = incident.cause_text or _lower(incident.title)
    cause = f"{cause}, or {incident.rival_text}" if incident.rival_text else cause
    verb = "broke" if incident.level == "ERROR" else "unusual"
    return f"{verb} at step {incident.first_step}{before}: {cause}"


def _lower(title: str) -> str:
    """The title within a sentence; "NaN" is no ordinary word."""
    return title[:1].lower() + title[1:] if title.partition(" ")[0].istitle() else title


def _end(incident: Incident) -> str:
    if incident.recovered_step is None:
        return f"seen until step {incident.last_step}"
    return f"usual again at the measured step {incident.recovered_step}"


MAX_INCIDENTS: Final = 20
_MAX_TEXT: Final = 300  # characters of a text, where not everything has room
_MAX_SHORT_TEXT: Final = 63  # characters, as many as a title may have
_MAX_LAYERS: Final = 20
_NEEDED: Final = ("kind", "title", "level", "first_step", "found_step", "last_step", "fact", "schema_version")


def incidents_within(incidents: Sequence[Incident], max_bytes: int) -> list[dict[str, Any]]:
    """Describe incidents as `Incident.to_dict` does, in at most so many bytes of JSON.

    Of more than 20, the worst are kept, and of these the newest, in the order in which they were found. Empty fields
    are left out, and at most 20 layers are named. If there is no room, numbers and all but three layers are left out,
    then all but the kind, the steps and the cause, then incidents.

    Returns:
        What `Incident.from_dict` reads.
    """
    by_importance = sorted(range(len(incidents)), key=lambda place: (-LEVELS.index(incidents[place].level), -place))
    told = {place: incidents[place].to_dict() for place in by_importance[:MAX_INCIDENTS]}
    shortest = {}
    for shorten in _SHORTER:
        shortest = {place: shorten(one) for place, one in told.items()}
        if len(json.dumps([*shortest.values()])) <= max_bytes:
            break
    while shortest and len(json.dumps([*shortest.values()])) > max_bytes:
        del shortest[[*shortest][-1]]  # the least important
    return [shortest[place] for place in sorted(shortest)]


def _without_empty(told: dict[str, Any]) -> dict[str, Any]:
    kept = {key: value for key, value in told.items() if key in _NEEDED or value not in (None, "", [], {})}
    return kept | ({"layers": kept["layers"][:_MAX_LAYERS]} if "layers" in kept else {})


def _without_details(told: dict[str, Any]) -> dict[str, Any]:
    kept = _without_empty(told)
    return {key: _shortened(key, value) for key, value in kept.items() if key not in ("values", "kinds", "evidence")}


def _with_names_alone(told: dict[str, Any]) -> dict[str, Any]:
    names = (*_NEEDED, "recovered_step", "cause", "cause_text")
    kept = {key: value for key, value in _without_empty(told).items() if key in names}
    return kept | {key: value[:_MAX_SHORT_TEXT] for key, value in kept.items() if isinstance(value, str)}


def _shortened(key: str, value: Any) -> Any:
    if key == "layers":
        return [{"name": one["name"][:_MAX_TEXT]} for one in value[:3]]
    return value[:_MAX_TEXT] if isinstance(value, str) else value


_Shorten = Callable[[dict[str, Any]], dict[str, Any]]
_SHORTER: Final[tuple[_Shorten, ...]] = (_without_empty, _without_details, _with_names_alone)
