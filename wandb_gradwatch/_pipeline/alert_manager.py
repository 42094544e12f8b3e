"""Who decides what is sent: one alert per episode, not one per sample. Rules say each time what is wrong."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from .._interruptions import raise_interruption
from ..rules import Alert, Rule
from ..rules._base import Finding, Level, is_ordinary
from ..rules._functions import RuleFunction, as_rule
from ..snapshot import Snapshot

_LOGGER: Final = logging.getLogger("wandb_gradwatch")
_HOUR: Final = 3600.0
_LEVELS: Final[tuple[Level, ...]] = ("INFO", "WARN", "ERROR")
_MAX_DOUBLINGS: Final = 16  # of the healthy samples that end an episode: half a million, and still a number


@dataclass
class _Episode:
    """One title's story: an episode begins when its alert is sent and ends after enough healthy samples."""

    is_open: bool = False
    num_healthy: int = 0  # samples in a row without a finding
    num_sent: int = 0
    first_step: int = 0
    level: Level = "INFO"  # of its newest alert
    sent_at: deque[float] = field(default_factory=deque)  # within the last hour

    def state_dict(self, now: float) -> dict[str, Any]:
        ages = [now - sent for sent in self.sent_at]  # the next process has another clock
        return vars(self) | {"sent_at": ages}


class AlertManager:
    """Run the rules on new samples and choose the alerts that a person should get.

    A title is sent when its episode begins, and again only after healthy samples in a row have ended that episode:
    `rearm_samples` of them after the first alert, twice as many after each further one, so that what comes again and
    again is not told again and again; within an episode only what is worse than it was. Each title has a limit of its
    own for an hour: no other one crowds out a NaN.

    A rule that raises is dropped and reported once, with its traceback, by the logger "wandb_gradwatch"; the others go
    on. Recovery is noted there too.

    Args:
        rules: rules, or functions from a snapshot of one sample to words, an Alert or None.
        rearm_samples: healthy samples in a row that end a title's first episode.
        max_per_hour: alerts of one title in any hour; the last of them says that more may be withheld.
        clock: seconds, from any zero, never going back.

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
        self.rules = [as_rule(candidate) for candidate in rules]
        self.last_findings: list[Alert] = []  # all that the rules said about the newest sample, sent or not
        self._keys = _keys_of(self.rules)
        self._everyday = [kept for kept in self.rules if not getattr(kept, "is_for_rare_samples", False)]
        self._rearm_samples, self._max_per_hour = rearm_samples, max_per_hour
        self._clock = clock
        self._episodes: dict[str, _Episode] = {}

    @property
    def healthy(self) -> bool:
        """True unless a rule found an ERROR in the newest sample; True before the first."""
        return all(finding.level != "ERROR" for finding in self.last_findings)

    def process(self, snapshot: Snapshot) -> list[Alert]:
        """Run the rules on samples that they have not seen yet.

        Returns:
            The alerts to be sent now, in the order of their samples.
        """
        if not len(snapshot):
            return []
        findings = self._find(snapshot)
        if not findings and not self._episodes:  # as nearly always: no sample needs a look of its own
            self.last_findings = []
            return []
        steps: list[int] = snapshot.steps.tolist()
        by_step: dict[int, list[Alert]] = {step: [] for step in steps}
        for finding in findings:  # a function may name a step of its own choice: it is told with the newest sample
            step = (isinstance(finding, Finding) and finding.found_in) or finding.step
            by_step.get(step, by_step[steps[-1]]).append(finding)
        sent: list[Alert] = []
        for step in steps:
            self.last_findings = by_step[step]
            sent += self._decide(step)
        return sent

    def _find(self, snapshot: Snapshot) -> list[Alert]:
        findings: list[Alert] = []
        for candidate in tuple(self._everyday if is_ordinary(snapshot) else self.rules):
            try:
                findings += list(candidate.check(snapshot))
            except Exception as error:  # our failure, or the user's rule's, must not become the training's
                raise_interruption(error)
                _LOGGER.exception("the rule %r raised and is dropped; the others go on", candidate)
                self._drop(candidate)
        return findings

    def _drop(self, candidate: Rule) -> None:
        place = next(index for index, kept in enumerate(self.rules) if kept is candidate)
        del self.rules[place], self._keys[place]
        self._everyday = [kept for kept in self._everyday if kept is not candidate]

    def _decide(self, step: int) -> list[Alert]:
        """The alerts to be sent for the sample whose findings are `last_findings`."""
        by_title: dict[str, Alert] = {}
        for finding in self.last_findings:  # two rules of one title make one alert, the worse one
            known = by_title.get(finding.title)
            if known is None or _LEVELS.index(finding.level) > _LEVELS.index(known.level):
                by_title[finding.title] = finding
        for title, episode in self._episodes.items():
            if title not in by_title:
                self._note_healthy(title, episode, step)
        return [alert for finding in by_title.values() if (alert := self.open(finding)) is not None]

    def _note_healthy(self, title: str, episode: _Episode, step: int) -> None:
        episode.num_healthy += 1
        needed = self._rearm_samples * 2 ** min(episode.num_sent - 1, _MAX_DOUBLINGS)
        if episode.is_open and episode.num_healthy >= needed:
            episode.is_open = False
            _LOGGER.info(
                "recovered: no %r for %d samples, up to step %d (it began at step %d)",
                title,
                episode.num_healthy,
                step,
                episode.first_step,
            )

    def open(self, finding: Alert) -> Alert | None:
        """Begin an episode with this finding and return its alert, unless one is open or a limit withholds it."""
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
            f"This is number {self._max_per_hour} of this title within an hour: further ones are withheld until the "
            "hour is over."
        )
        return replace(finding, text=f"{finding.text}\n{withheld}")

    def state_dict(self) -> dict[str, Any]:
        """All that is remembered, in plain Python values; rules are keyed by their kind, not by their place."""
        now = self._clock()
        return {
            "rules": {key: dict(kept.state_dict()) for key, kept in zip(self._keys, self.rules, strict=True)},
            "episodes": {title: episode.state_dict(now) for title, episode in self._episodes.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where another one stopped; a rule that is new, or whose state does not fit, starts without memory."""
        for key, kept in zip(self._keys, self.rules, strict=True):
            if key in state["rules"]:
                try:
                    kept.load_state_dict(state["rules"][key])
                except Exception:  # a rule changed since it was saved: the training goes on without its memory
                    _LOGGER.exception("the rule %r could not load its state and starts without memory", kept)
        now = self._clock()
        self._episodes = {
            title: _Episode(**episode | {"sent_at": deque(now - float(age) for age in episode["sent_at"])})
            for title, episode in state["episodes"].items()
        }


def _keys_of(rules: Sequence[Rule]) -> list[str]:
    """A key for each rule that survives a changed order: its kind and title, and a number only where both repeat."""
    keys: list[str] = []
    for kept in rules:
        key = f"{type(kept).__name__}: {getattr(kept, 'title', '')}"
        keys.append(key if key not in keys else f"{key} #{sum(k.startswith(key) for k in keys) + 1}")
    return keys
