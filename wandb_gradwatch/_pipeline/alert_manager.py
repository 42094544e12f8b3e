"""Decide which findings are sent as alerts: one alert per episode. Rules report a fault at every sample."""

import logging
import re
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np

from .._interruptions import raise_interruption
from .._judgement.incident import Incident
from ..rules import Alert, Rule
from ..rules._base import Finding, Level, RuleFunction, as_rule, is_ordinary
from ..snapshot import Snapshot
from ..snapshot._shapes import select_samples

_LOGGER: Final = logging.getLogger("wandb_gradwatch")
_HOUR: Final = 3600.0
_LEVELS: Final[tuple[Level, ...]] = ("INFO", "WARN", "ERROR")
_MAX_DOUBLINGS: Final = 16  # limits the healthy samples that end an episode to about half a million


@dataclass
class _Episode:
    """The episodes of one title: an episode begins when its alert is sent, and ends after enough healthy samples."""

    is_open: bool = False
    num_healthy: int = 0  # consecutive samples without a finding
    num_sent: int = 0
    first_step: int = 0
    level: Level = "INFO"  # level of the newest alert
    sent_at: deque[float] = field(default_factory=deque)  # times of the alerts within the last hour

    def state_dict(self, now: float) -> dict[str, Any]:
        ages = [now - sent for sent in self.sent_at]  # ages, because the next process has another clock
        return vars(self) | {"sent_at": ages}


class AlertManager:
    """Run the rules on new samples and select the alerts to send.

    An alert is sent when an episode of its title begins, and during an episode only if the level rises. An episode
    ends after consecutive healthy samples: `rearm_samples` after the first alert of the title, twice as many after
    each further alert, so that a recurring fault does not send the same alert again and again. The limit per hour is
    per title, so other alerts never suppress a NaN alert.

    A rule that raises is removed and logged once with its traceback by the logger "wandb_gradwatch"; the other rules
    continue. The same logger reports recovery.

    Args:
        rules: rules, or functions from a snapshot with one sample to a text, an Alert or None.
        rearm_samples: number of consecutive healthy samples that end the first episode of a title.
        max_per_hour: largest number of alerts of one title in any hour; the last one says that more may be withheld.
        clock: returns seconds from an arbitrary zero, and never decreases.

    Raises:
        TypeError: something in `rules` is neither a rule nor a function.
    """

    def __init__(
        self,
        rules: Iterable[Rule | RuleFunction],
        *,
        rearm_samples: int = 10,
        max_per_hour: int = 5,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._rules = _by_key(map(as_rule, rules))
        self.last_findings: list[Alert] = []  # all findings of the newest sample, sent or not
        self._everyday = [kept for kept in self._rules.values() if not getattr(kept, "is_for_rare_samples", False)]
        self._rearm_samples, self._max_per_hour = rearm_samples, max_per_hour
        self._clock = clock
        self._episodes: dict[str, _Episode] = {}
        self._incidents: list[Incident] = []

    @property
    def incidents(self) -> tuple[Incident, ...]:
        """All incidents as they are known now, in the order in which they were found."""
        return tuple(self._incidents)

    def add(self, incident: Incident) -> None:
        """Add an incident whose alert is sent, or replace the open one of the same kind."""
        if not self._replace(incident.kind, lambda _: incident):
            self._incidents.append(incident)

    def _replace(self, kind: str, change: Callable[[Incident], Incident]) -> bool:
        for place in reversed(range(len(self._incidents))):
            if (known := self._incidents[place]).kind == kind and not known.is_over:
                self._incidents[place] = change(known)
                return True
        return False

    @property
    def healthy(self) -> bool:
        """True unless a rule found an ERROR in the newest sample; True before the first sample."""
        return all(finding.level != "ERROR" for finding in self.last_findings)

    def process(self, snapshot: Snapshot) -> list[Alert]:
        """Run the rules on at least one new sample.

        Returns:
            The alerts to send now, in the order of their samples.
        """
        findings = self._find(snapshot)
        if not findings and not self._episodes:  # the usual case: nothing to decide for any sample
            self.last_findings = []
            return []
        steps: list[int] = snapshot.steps.tolist()
        by_step: dict[int, list[Alert]] = {step: [] for step in steps}
        for finding in findings:  # a rule function may name any step; an unknown step is assigned to the newest sample
            step = (isinstance(finding, Finding) and finding.found_in) or finding.step
            by_step.get(step, by_step[steps[-1]]).append(finding)
        sent: list[Alert] = []
        for step in steps:
            self.last_findings = by_step[step]
            sent += self._decide(step)
        return sent

    def _find(self, snapshot: Snapshot) -> list[Alert]:
        findings: list[Alert] = []
        updates = snapshot  # the samples of updates that were seen
        if snapshot.inferred.any():
            updates = select_samples(snapshot, np.flatnonzero(~snapshot.inferred))
        for candidate in tuple(self._everyday if is_ordinary(snapshot) else self._rules.values()):
            seen = updates if getattr(candidate, "judges_updates", False) else snapshot
            try:
                findings += list(candidate.check(seen)) if len(seen) else []
            except Exception as error:  # an error in a rule must not reach the training loop
                raise_interruption(error)
                _LOGGER.exception("the rule %r raised and is dropped; the others go on", candidate)
                self._rules = {key: kept for key, kept in self._rules.items() if kept is not candidate}
                self._everyday = [kept for kept in self._everyday if kept is not candidate]
        return findings

    def _decide(self, step: int) -> list[Alert]:
        """Return the alerts to send for the sample with the findings `last_findings`."""
        by_title: dict[str, Alert] = {}
        for finding in self.last_findings:  # of several findings with one title, the one with the highest level counts
            known = by_title.get(finding.title)
            if known is None or _LEVELS.index(finding.level) > _LEVELS.index(known.level):
                by_title[finding.title] = finding
        for title, episode in self._episodes.items():
            if title not in by_title:
                self._note_healthy(title, episode, step)
            else:
                self._replace(kind_of(title), lambda known: replace(known, last_step=step))
        return [alert for finding in by_title.values() if (alert := self.open(finding)) is not None]

    def _note_healthy(self, title: str, episode: _Episode, step: int) -> None:
        episode.num_healthy += 1
        needed = self._rearm_samples * 2 ** min(episode.num_sent - 1, _MAX_DOUBLINGS)
        if episode.is_open and episode.num_healthy >= needed:
            episode.is_open = False
            self._replace(kind_of(title), lambda known: replace(known, recovered_step=step))
            _LOGGER.info(
                "recovered: no %r for %d samples, up to step %d (it began at step %d)",
                title,
                episode.num_healthy,
                step,
                episode.first_step,
            )

    def open(self, finding: Alert) -> Alert | None:
        """Begin an episode and return its alert; None if an episode is open at this level, or at the hourly limit."""
        episode = self._episodes.setdefault(finding.title, _Episode())
        episode.num_healthy = 0
        now = self._clock()
        while episode.sent_at and now - episode.sent_at[0] >= _HOUR:
            episode.sent_at.popleft()
        is_told = episode.is_open and _LEVELS.index(finding.level) <= _LEVELS.index(episode.level)
        if is_told or len(episode.sent_at) >= self._max_per_hour:
            return None
        episode.sent_at.append(now)
        episode.first_step = episode.first_step if episode.is_open else finding.step
        episode.is_open, episode.level, episode.num_sent = True, finding.level, episode.num_sent + 1
        if len(episode.sent_at) < self._max_per_hour:
            return finding
        withheld = (
            f"This is alert number {self._max_per_hour} with this title within an hour: further ones are withheld "
            "until the hour is over."
        )
        if isinstance(finding, Finding):  # its text is made anew when the cause is known
            return finding.but(more=(*finding.more, withheld))
        return replace(finding, text=f"{finding.text}\n{withheld}")

    def state_dict(self) -> dict[str, Any]:
        """The state as plain Python values; rules are keyed by class and title, so that their order may change."""
        now = self._clock()
        return {
            "rules": {key: dict(kept.state_dict()) for key, kept in self._rules.items()},
            "episodes": {title: episode.state_dict(now) for title, episode in self._episodes.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a saved state. A rule that is new, or whose state does not fit, starts without saved state."""
        for key, kept in self._rules.items():
            if key in state["rules"]:
                unchanged = None
                with suppress(Exception):
                    unchanged = kept.state_dict()
                try:
                    kept.load_state_dict(state["rules"][key])
                except Exception:  # the rule may have changed since its state was saved; that must not stop a training
                    _LOGGER.exception("the rule %r could not load its state and starts without saved state", kept)
                    if unchanged is not None:
                        kept.load_state_dict(unchanged)  # the first of several values may have been loaded
        now = self._clock()
        self._episodes = {
            title: _Episode(
                **{name: episode[name] for name in vars(_Episode())}
                | {"sent_at": deque(now - float(age) for age in episode["sent_at"])}
            )
            for title, episode in state["episodes"].items()
        }


def kind_of(title: str) -> str:
    """The identifier of a title: "NaN gradient" is "nan_gradient"."""
    return re.sub(r"\W+", "_", title.lower()).strip("_")


def _by_key(rules: Iterable[Rule]) -> dict[str, Rule]:
    """The rules by keys that do not depend on their order: class and title, and a number if both repeat."""
    by_key: dict[str, Rule] = {}
    for kept in rules:
        key = f"{type(kept).__name__}: {getattr(kept, 'title', '')}"
        by_key[key if key not in by_key else f"{key} #{sum(k.startswith(key) for k in by_key) + 1}"] = kept
    return by_key
