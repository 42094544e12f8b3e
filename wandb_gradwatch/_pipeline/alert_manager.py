"""Runs the judgement and the user's rules on new samples; what they find becomes incidents, and these become alerts."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any, Final

import numpy as np

from .._interruptions import raise_interruption
from .._judgement.causes import CAUSES
from .._judgement.finding import Detail, Finding
from .._judgement.incident import Incident, kind_of
from .._judgement.incidents import IncidentBook
from .._judgement.judge import Judge
from .._judgement.patterns import Explanation
from .._judgement.structure import ModelInfo
from ..rules import Alert, Judgement, Rule
from ..rules._base import RuleFunction, as_rule
from ..snapshot import Snapshot
from ..snapshot._overview import Overview
from ..snapshot._shapes import select_samples

_LOGGER: Final = logging.getLogger("wandb_gradwatch")
FIRST_BAD_OPERATION: Final = (
    "first_bad_operation"  # the note of a step that was run again, with the operation that was found
)
# Kinds after whose alert a step is run again.
REPLAYED: Final = frozenset({"nan_gradient", "inf_gradient", "nonfinite_loss", "loss_scale_collapse"})


class AlertManager:
    """Finds incidents in new samples, and says which of them are to be told.

    An incident is told when it begins, and again when its level rises or its cause becomes clear. It ends after 10
    samples in a row without a finding, and further ones of the same kind after twice as many each.

    A rule that raises is removed and logged once with its traceback by the logger "wandb_gradwatch"; the others go on.

    Args:
        rules: the judgement, rules, or functions from a snapshot with one sample to a text, an Alert or None.
        info: what the capture knows of the model.

    Raises:
        TypeError: something in `rules` is neither a rule nor a function.
    """

    def __init__(self, rules: Iterable[Rule | RuleFunction | Judgement], info: ModelInfo | None = None) -> None:
        given = list(rules)
        judged = [one for one in given if isinstance(one, Judgement)]
        self._without = frozenset(kind for one in judged for kind in one.without)
        self._judge = Judge(info or ModelInfo()) if judged else None
        self._rules = _by_key(as_rule(one) for one in given if not isinstance(one, Judgement))
        self._book = IncidentBook()
        self.notes: Mapping[int, Mapping[str, object]] = {}  # by step: the flight recorder's

    @property
    def incidents(self) -> tuple[Incident, ...]:
        """All incidents as they are known now, in the order in which they were found."""
        return self._book.incidents

    def process(self, snapshot: Snapshot) -> list[Alert]:
        """Judge at least one new sample; return the alerts to send now, in the order of their samples."""
        by_step = self._by_rules(snapshot)
        sent: list[Alert] = []
        for sample in snapshot.overview:
            told = self._told(snapshot, sample, by_step.get(sample.step, []))
            sent += [self._alert(incident, finding) for incident, finding in told]
        return sent

    def report(self, title: str, fact: str, step: int, level: Any, cause: str = "", rival: str = "") -> Alert | None:
        """Take a finding of the capture; return its alert, or None if it belongs to an incident that was told."""
        explanation = Explanation(CAUSES[cause], "", CAUSES[rival] if rival else None) if cause else None
        detail = Detail(fact, step, explanation=explanation)
        found = Finding(kind_of(title), title, level, step, lambda: detail)
        incident = self._book.add(found)
        return None if incident is None else self._alert(incident, found)

    def _told(self, snapshot: Snapshot, sample: Overview, by_rules: list[Finding]) -> list[tuple[Incident, Finding]]:
        """What is to be told after a sample. The book describes what the judgement has found, as far as it is news."""
        if self._judge is not None:
            try:
                judged = [one for one in self._judge.findings(snapshot, sample) if one.kind not in self._without]
                return self._book.sample(sample.step, [*judged, *by_rules])
            except Exception as error:  # an error in the judgement must not end the logging
                raise_interruption(error)
                _LOGGER.exception("the judgement raised and is dropped; logging and your own rules go on")
                self._judge = None
        return self._book.sample(sample.step, by_rules)

    def _by_rules(self, snapshot: Snapshot) -> dict[int, list[Finding]]:
        """What the user's and the metrics' rules find, by the step of the sample."""
        found: dict[int, list[Finding]] = {}
        steps: list[int] = snapshot.steps.tolist()
        updates = snapshot  # the samples of updates that were seen
        if self._rules and snapshot.inferred.any():
            updates = select_samples(snapshot, np.flatnonzero(~snapshot.inferred))
        for key, kept in tuple(self._rules.items()):
            seen = updates if getattr(kept, "judges_updates", False) else snapshot
            try:
                alerts = list(kept.check(seen)) if len(seen) else []
            except Exception as error:  # an error in a rule must not reach the training loop
                raise_interruption(error)
                _LOGGER.exception("the rule %r raised and is dropped; the others go on", kept)
                del self._rules[key]
                continue
            for alert in alerts:  # a rule may name any step; an unknown one is assigned to the newest sample
                step = alert.step if alert.step in steps else steps[-1]
                found.setdefault(step, []).append(_of_rule(alert, step))
        return found

    def _alert(self, incident: Incident, finding: Finding) -> Alert:
        if (
            finding.told is None and finding.detail.evidence is None and finding.detail.explanation is None
        ):  # a user's own words
            return Alert(finding.title, finding.detail.fact, finding.step, finding.level, incident)
        operation = self.notes.get(incident.found_step, {}).get(FIRST_BAD_OPERATION)
        if operation is not None and incident.kind in REPLAYED:
            evidence = f"found by running the step again: {operation}"
            fact = f"{str(operation).splitlines()[0].rstrip('.')}; {incident.fact}"
            incident = replace(incident, fact=fact, evidence=evidence, rival="", rival_text="")
            self._book.replace(incident)
        return Alert(incident.title, incident.message, incident.found_step, incident.level, incident)

    def state_dict(self) -> dict[str, Any]:
        """The state as plain values and arrays; rules are keyed by class and title, so that their order may change."""
        return {
            "rules": {key: dict(kept.state_dict()) for key, kept in self._rules.items()},
            "judge": None if self._judge is None else self._judge.state_dict(),
            "book": self._book.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a saved state. A rule that is new, or whose state does not fit, starts without saved state."""
        for key, kept in self._rules.items():
            if key in state["rules"]:
                _load(kept, state["rules"][key])
        if self._judge is not None and state["judge"] is not None:
            _load(self._judge, state["judge"])
        _load(self._book, state["book"])


def _load(kept: Any, state: Any) -> None:
    unchanged = None
    with suppress(Exception):
        unchanged = kept.state_dict()
    try:
        kept.load_state_dict(state)
    except Exception:  # it may have changed since its state was saved; that must not stop a training
        _LOGGER.exception("%r could not load its state and starts without saved state", kept)
        if unchanged is not None:
            kept.load_state_dict(unchanged)  # the first of several values may have been loaded


def _of_rule(alert: Alert, step: int) -> Finding:
    """The finding of a rule's alert about this step's sample. An alert that brings its incident is told as such."""
    kind = alert.incident.kind if alert.incident is not None else kind_of(alert.title)
    detail = Detail(alert.text, step)
    return Finding(kind, alert.title, alert.level, step, lambda: detail, told=alert.incident)


def _by_key(rules: Iterable[Rule]) -> dict[str, Rule]:
    """The rules by keys that do not depend on their order: class and title, and a number if both repeat."""
    by_key: dict[str, Rule] = {}
    for kept in rules:
        key = f"{type(kept).__name__}: {getattr(kept, 'title', '')}"
        by_key[key if key not in by_key else f"{key} #{sum(k.startswith(key) for k in by_key) + 1}"] = kept
    return by_key
