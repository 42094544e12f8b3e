"""Who decides what is sent: one alert per episode, not one per sample. Rules say each time what is wrong."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from ..rules import Alert, Rule, as_rule
from ..rules._functions import RuleFunction
from ..snapshot import Snapshot

_LOGGER: Final = logging.getLogger("wandb_gradwatch")
_HOUR: Final = 3600.0


@dataclass
class _Episode:
    """One title's story: an episode begins when its alert is sent and ends after enough healthy samples."""

    is_open: bool = False
    num_healthy: int = 0  # samples in a row without a finding
    last_sent: int | None = None  # the number of the sample, counted by the desk
    first_step: int = 0

    def state_dict(self) -> dict[str, Any]:
        return dict(vars(self))


class AlertManager:
    """Run the rules on new samples and choose the alerts that a person should get.

    A title is sent when its episode begins; again only after `rearm_samples` healthy samples in a row ended that
    episode and `cooldown_samples` have passed since it was sent. An alert that a cool-down withheld is sent after
    it, if the sample then is still bad. At most `max_per_hour` are sent; the last of them says that more may be
    withheld.

    A rule that raises is dropped and reported once, with its traceback, by the logger "wandb_gradwatch"; the others go
    on. Recovery is noted there too.

    Args:
        rules: rules, or functions from a snapshot of one sample to words, an Alert or None.
        cooldown_samples: samples between two alerts of one title.
        rearm_samples: healthy samples in a row that end an episode.
        max_per_hour: alerts of all titles together in any hour.
        clock: seconds, from any zero, never going back.

    Raises:
        TypeError: something in `rules` is neither a rule nor a function.
        ValueError: a limit is out of range.
    """

    def __init__(
        self,
        rules: Iterable[Rule | RuleFunction],
        *,
        cooldown_samples: int = 10,
        rearm_samples: int = 5,
        max_per_hour: int = 20,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        for name, value, least in (
            ("cooldown_samples", cooldown_samples, 0),
            ("rearm_samples", rearm_samples, 1),
            ("max_per_hour", max_per_hour, 1),
        ):
            if value < least:
                raise ValueError(f"{name}={value!r} must be at least {least}")
        self.rules = [as_rule(candidate) for candidate in rules]
        self.last_findings: list[Alert] = []  # all that the rules said about the newest sample, sent or not
        self._keys = _keys_of(self.rules)
        self._limits = (cooldown_samples, rearm_samples, max_per_hour)
        self._clock = clock
        self._episodes: dict[str, _Episode] = {}
        self._sent_at: deque[float] = deque()
        self._num_samples = 0

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
            self._num_samples += len(snapshot)
            self.last_findings = []
            return []
        steps: list[int] = snapshot.steps.tolist()
        by_step: dict[int, list[Alert]] = {step: [] for step in steps}
        for finding in findings:  # a function may name a step of its own choice: it is told with the newest sample
            by_step.get(finding.step, by_step[steps[-1]]).append(finding)
        sent: list[Alert] = []
        for step in steps:
            self._num_samples += 1
            self.last_findings = by_step[step]
            sent += self._decide(step)
        return sent

    def _find(self, snapshot: Snapshot) -> list[Alert]:
        findings: list[Alert] = []
        for candidate in tuple(self.rules):
            try:
                findings += list(candidate.check(snapshot))
            except Exception:  # our failure, or the user's rule's, must not become the training's
                _LOGGER.exception("the rule %r raised and is dropped; the others go on", candidate)
                self._drop(candidate)
        return findings

    def _drop(self, candidate: Rule) -> None:
        place = next(index for index, kept in enumerate(self.rules) if kept is candidate)
        del self.rules[place], self._keys[place]

    def _decide(self, step: int) -> list[Alert]:
        """The alerts to be sent for the sample whose findings are `last_findings`."""
        by_title: dict[str, Alert] = {}
        for finding in self.last_findings:  # two rules of one title make one alert, the worse one
            known = by_title.get(finding.title)
            if known is None or (finding.level == "ERROR" and known.level != "ERROR"):
                by_title[finding.title] = finding
        for title, episode in self._episodes.items():
            if title not in by_title:
                self._note_healthy(title, episode, step)
        return [alert for finding in by_title.values() if (alert := self._open(finding)) is not None]

    def _note_healthy(self, title: str, episode: _Episode, step: int) -> None:
        episode.num_healthy += 1
        if episode.is_open and episode.num_healthy >= self._limits[1]:
            episode.is_open = False
            _LOGGER.info(
                "recovered: no %r for %d samples, up to step %d (it began at step %d)",
                title,
                episode.num_healthy,
                step,
                episode.first_step,
            )

    def _open(self, finding: Alert) -> Alert | None:
        """Begin an episode with this finding and return its alert, unless one is open or a limit withholds it."""
        cooldown, _, max_per_hour = self._limits
        episode = self._episodes.setdefault(finding.title, _Episode())
        episode.num_healthy = 0
        if episode.is_open:
            return None
        if episode.last_sent is not None and self._num_samples - episode.last_sent < cooldown:
            return None
        now = self._clock()
        while self._sent_at and now - self._sent_at[0] >= _HOUR:
            self._sent_at.popleft()
        if len(self._sent_at) >= max_per_hour:
            return None
        self._sent_at.append(now)
        episode.is_open, episode.last_sent, episode.first_step = True, self._num_samples, finding.step
        if len(self._sent_at) < max_per_hour:
            return finding
        withheld = (
            f"This is alert number {max_per_hour} within an hour: further ones are withheld until the hour is over."
        )
        return replace(finding, text=f"{finding.text}\n{withheld}")

    def state_dict(self) -> dict[str, Any]:
        """All that is remembered, in plain Python values; rules are keyed by their kind, not by their place."""
        now = self._clock()
        return {
            "rules": {key: dict(kept.state_dict()) for key, kept in zip(self._keys, self.rules, strict=True)},
            "episodes": {title: episode.state_dict() for title, episode in self._episodes.items()},
            "num_samples": self._num_samples,
            "sent_ages": [now - sent for sent in self._sent_at],  # the next process has another clock
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where a desk stopped; a rule that is new, or whose state does not fit, starts without memory."""
        for key, kept in zip(self._keys, self.rules, strict=True):
            if key in state["rules"]:
                try:
                    kept.load_state_dict(state["rules"][key])
                except Exception:  # a rule changed since it was saved: the training goes on without its memory
                    _LOGGER.exception("the rule %r could not load its state and starts without memory", kept)
        self._episodes = {title: _Episode(**episode) for title, episode in state["episodes"].items()}
        self._num_samples = int(state["num_samples"])
        now = self._clock()
        self._sent_at = deque(now - float(age) for age in state["sent_ages"])


def _keys_of(rules: Sequence[Rule]) -> list[str]:
    """A key for each rule that survives a changed order: its kind and title, and a number only where both repeat."""
    keys: list[str] = []
    for kept in rules:
        key = f"{type(kept).__name__}: {getattr(kept, 'title', '')}"
        keys.append(key if key not in keys else f"{key} #{sum(k.startswith(key) for k in keys) + 1}")
    return keys
