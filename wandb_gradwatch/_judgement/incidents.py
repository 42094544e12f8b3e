"""Findings become incidents: one message when an incident begins, one more when it gets worse or its cause clear."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from .causes import CAUSES
from .finding import QUIET, Finding
from .incident import LEVELS, Incident
from .patterns import Explanation

_CLEARS_WITHIN: Final = 20  # findings
_SOON: Final = 60  # steps within which a finding may be a consequence of what was wrong at the beginning
_MAX_DOUBLINGS: Final = 16
_MAX_KEPT: Final = 200  # incidents; of more, those that are over are forgotten, oldest first


@dataclass
class _Open:
    place: int  # in the list of all incidents
    num_quiet: int = 0  # samples in a row without a finding
    first_quiet: int = 0  # the step of the first of these
    most_quiet: int | None = QUIET  # samples that end it; None: it never ends
    num_findings: int = 0  # by which its cause may have become clear


class IncidentBook:
    """All incidents of a run. One is told when it begins, and again when its level rises or its cause clears."""

    def __init__(self) -> None:
        self._incidents: list[Incident] = []
        self._open: list[_Open] = []
        self._num_ended: dict[str, int] = {}  # by kind

    @property
    def incidents(self) -> tuple[Incident, ...]:
        """In the order in which they were found."""
        return tuple(self._incidents)

    def sample(self, step: int, findings: Iterable[Finding]) -> list[tuple[Incident, Finding]]:
        """Take all findings of a sample; return the incidents that are to be told now, each with its finding."""
        told: dict[int, Finding] = {}
        met: set[int] = set()
        for finding in sorted(findings, key=lambda one: -LEVELS.index(one.level)):  # the worst first
            place, is_news = self._take(finding)
            met.add(place)
            if is_news:
                told[place] = finding
        for one in list(self._open):
            if one.place not in met:
                self._note_quiet(one, step)
        found = [(self._incidents[place], finding) for place, finding in told.items()]
        self._forget()
        return found

    def add(self, finding: Finding) -> Incident | None:
        """Take a finding that belongs to no sample; return its incident if that is to be told now."""
        place, is_news = self._take(finding)
        return self._incidents[place] if is_news else None

    def replace(self, incident: Incident) -> None:
        """Replace the newest incident that was found with this kind in this step."""
        for place in reversed(range(len(self._incidents))):
            known = self._incidents[place]
            if (known.kind, known.found_step) == (incident.kind, incident.found_step):
                self._incidents[place] = incident
                return

    def _take(self, finding: Finding) -> tuple[int, bool]:
        same = [one for one in self._open if finding.kind in self._incidents[one.place].kinds]
        if found := same or [one for one in self._open if self._is_caused(finding, one)]:  # the newest
            one = found[-1]
            one.num_quiet, one.num_findings = 0, one.num_findings + 1
            may_clear = one.num_findings <= _CLEARS_WITHIN
            self._incidents[one.place], is_news = _joined(self._incidents[one.place], finding, may_clear=may_clear)
            return one.place, is_news
        self._incidents.append(_new(finding))
        self._open.append(_Open(len(self._incidents) - 1, most_quiet=finding.quiet))
        return len(self._incidents) - 1, True

    def _is_caused(self, finding: Finding, one: _Open) -> bool:
        known = self._incidents[one.place]
        is_recent = one.most_quiet is not None or finding.step - known.last_step <= _SOON
        return is_recent and _explains(known, finding)

    def _note_quiet(self, one: _Open, step: int) -> None:
        known = self._incidents[one.place]
        if step <= known.last_step:  # the capture has reported this step before its sample arrived
            return
        one.first_quiet = step if one.num_quiet == 0 else one.first_quiet
        one.num_quiet += 1
        ended = self._num_ended.get(known.kind, 0)
        if one.most_quiet is not None and one.num_quiet >= one.most_quiet * 2 ** min(ended, _MAX_DOUBLINGS):
            self._incidents[one.place] = replace(known, recovered_step=one.first_quiet)
            self._num_ended[known.kind] = ended + 1
            self._open.remove(one)

    def _forget(self) -> None:
        """Forget the oldest incidents that are over, beyond the number that is kept."""
        if len(self._incidents) <= _MAX_KEPT:
            return
        place = next((at for at, one in enumerate(self._incidents) if one.is_over), None)
        if place is not None:
            del self._incidents[place]
            for one in self._open:
                one.place -= one.place > place

    def state_dict(self) -> dict[str, Any]:
        return {
            "incidents": [incident.to_dict() for incident in self._incidents],
            "open": [[one.place, one.num_quiet, one.first_quiet, one.most_quiet] for one in self._open],
            "num_ended": dict(self._num_ended),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a saved state.

        Raises:
            ValueError: it is none.
        """
        incidents = [Incident.from_dict(told) for told in state["incidents"]]
        opened = [
            _Open(int(place), int(num), int(first), None if most is None else int(most))
            for place, num, first, most in state["open"]
        ]
        if any(not 0 <= one.place < len(incidents) for one in opened):
            raise ValueError("an open incident is not among the incidents")
        ended = {str(kind): int(num) for kind, num in state["num_ended"].items()}
        self._incidents, self._open, self._num_ended = incidents, opened, ended


def _explains(incident: Incident, finding: Finding) -> bool:
    """Whether a cause of an incident that lasts may have led to a finding of another kind."""
    if finding.told is not None or not finding.detail.evidence:
        return False
    causes = [CAUSES[name] for name in (incident.cause, incident.rival) if name in CAUSES]
    return any(finding.kind in cause.leads_to for cause in causes)


def _joined(incident: Incident, finding: Finding, *, may_clear: bool) -> tuple[Incident, bool]:
    """Return the incident with the finding, and whether that is news."""
    kinds = incident.kinds if finding.kind in incident.kinds else (*incident.kinds, finding.kind)
    joined = replace(incident, last_step=finding.step, kinds=kinds)
    is_worse = LEVELS.index(finding.level) > LEVELS.index(incident.level)
    is_clear = bool(incident.cause) and not incident.rival
    may_clear = may_clear and not is_clear and finding.level != "INFO"
    if not is_worse and not (may_clear and _clears(incident, finding.detail.explanation)):
        return joined, False
    level = finding.level if is_worse else incident.level
    explanation, evidence = finding.detail.explanation, finding.detail.evidence
    if explanation is None:
        return replace(joined, level=level), True
    told = replace(
        joined, level=level, kind=finding.kind, title=finding.title, found_step=finding.step, fact=finding.detail.fact,
        layers=finding.detail.layers or incident.layers, values=finding.detail.values, rank=finding.detail.rank,
    )  # fmt: skip
    cause = CAUSES.get(incident.cause) if is_clear else None
    if cause is not None and finding.kind in cause.leads_to and not (evidence and cause.is_refuted(evidence)):
        return told, True
    return _explained(told, explanation), True


def _clears(incident: Incident, explanation: Explanation | None) -> bool:
    """Whether this explanation decides what was open: no cause, or two."""
    if explanation is None or explanation.rival is not None:
        return False
    if not incident.cause:
        return True
    return bool(incident.rival) and explanation.cause.name in (incident.cause, incident.rival)


def _new(finding: Finding) -> Incident:
    if finding.told is not None:
        return replace(finding.told, kinds=(finding.kind,))
    detail = finding.detail
    found = Incident(
        kind=finding.kind, title=finding.title, level=finding.level, first_step=detail.since, found_step=finding.step,
        last_step=finding.step, fact=detail.fact, unmeasured_from=finding.unmeasured_from, layers=detail.layers,
        values=detail.values, kinds=(finding.kind,), rank=detail.rank,
    )  # fmt: skip
    return found if detail.explanation is None else _explained(found, detail.explanation)


def _explained(incident: Incident, explanation: Explanation) -> Incident:
    cause, rival = explanation.cause, explanation.rival
    remedy = cause.remedy if rival is None else f"{cause.remedy}; if that changes nothing, {rival.remedy}"
    return replace(
        incident, cause=cause.name, cause_text=cause.text_of(incident.rank), rival="" if rival is None else rival.name,
        rival_text="" if rival is None else rival.text, evidence=explanation.shows, advice=cause.advice, remedy=remedy,
    )  # fmt: skip
