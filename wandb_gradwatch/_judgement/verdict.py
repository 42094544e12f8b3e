"""Verdict: what the incidents and the measured steps together say of a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from .incident import LEVELS, SCHEMA_VERSION, Incident

Status = Literal["ok", "warn", "error", "unknown"]
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

    def to_dict(self) -> dict[str, Any]:
        """Return plain values that JSON can hold."""
        return {
            "schema_version": SCHEMA_VERSION,
            "status": self.status,
            "sentence": self.sentence,
            "num_steps": self.num_steps,
            "num_measured": self.num_measured,
            "incidents": [incident.to_dict() for incident in self.incidents],
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


def _steps(num: int) -> str:
    return f"{num:,} step{'' if num == 1 else 's'}"


def _said(incident: Incident) -> str:
    before = ""
    if incident.unmeasured_from is not None and incident.unmeasured_from < incident.first_step:
        before = f" (steps {incident.unmeasured_from} to {incident.first_step - 1} were not measured)"
    cause = incident.cause_text or incident.title[:1].lower() + incident.title[1:]
    cause = f"{cause}, or {incident.rival_text}" if incident.rival_text else cause
    verb = "broke" if incident.level == "ERROR" else "unusual"
    return f"{verb} at step {incident.first_step}{before}: {cause}"


def _end(incident: Incident) -> str:
    if incident.recovered_step is None:
        return f"seen until step {incident.last_step}"
    return f"usual again at the measured step {incident.recovered_step}"
