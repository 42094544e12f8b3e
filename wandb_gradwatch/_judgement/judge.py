"""Judge: from samples to findings. It sees every sample once, in order."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from .._measure.columns import BoolArray, FloatArray
from ..snapshot import Snapshot
from ..snapshot._overview import Overview
from .facts import Facts, where
from .finding import Finding, finding_of
from .observer import Observer
from .structure import ModelInfo
from .symptoms import SOON, SYMPTOMS, Symptom

# P watched parameters, or modules

_SLOW_EVERY: Final = 20  # steps between the samples in which slow trends are looked for
_FAR: Final = 5  # multiple of a row's samples, in steps, that three samples must span to be enough


@dataclass
class _Streak:
    """How long a symptom has been there: samples in a row, and the steps at which and before which that began."""

    names: tuple[str, ...] = ()
    num: FloatArray | None = None  # [P]
    since: FloatArray | None = None  # [P]
    before: FloatArray | None = None  # [P]

    def see(self, names: tuple[str, ...], is_there_P: BoolArray, step: int, before: int) -> None:
        arrays = self.num, self.since, self.before  # perhaps of a saved state that does not fit
        if self.names != names or any(one is None or one.shape != is_there_P.shape for one in arrays):
            self.names = names
            self.num, self.since, self.before = (np.zeros(len(is_there_P)) for _ in range(3))
        assert self.num is not None
        assert self.since is not None
        assert self.before is not None
        begins_P = is_there_P & (self.num == 0)
        self.since[begins_P], self.before[begins_P] = step, before
        self.num = np.where(is_there_P, self.num + 1, 0.0)

    def lasts_P(self, symptom: Symptom, step: int) -> BoolArray:
        """Where it has lasted for long enough: [P]."""
        assert self.num is not None
        assert self.since is not None
        steps_P = step - self.since
        lasts_P: BoolArray = self.num >= symptom.samples
        lasts_P |= (self.num >= SOON) & (steps_P >= _FAR * symptom.samples)
        return lasts_P & (self.num > 0) & (steps_P >= symptom.share * step)


class _Scale:
    """The judgement at one distance of samples."""

    def __init__(self, info: ModelInfo, symptoms: tuple[Symptom, ...], every: int) -> None:
        self.observer, self._every = Observer(info, every), every
        self._rows = [(symptom, _Streak()) for symptom in symptoms]
        self._last_step = 0

    def findings(self, snapshot: Snapshot, sample: Overview) -> Iterator[Finding]:
        is_trial = bool(snapshot.inferred[sample.place])
        facts = self.observer.see(snapshot, sample)
        if facts is None:
            return
        before, self._last_step = self._last_step, facts.step
        for symptom, streak in self._rows:
            if is_trial and not symptom.always:
                continue
            is_there = symptom.when(facts)
            if not (is_there.any() if isinstance(is_there, np.ndarray) else is_there):  # the usual case
                streak.num = None
            elif (found := self._look(symptom, streak, facts, is_there, before or facts.step - 1)) is not None:
                yield found

    def _look(
        self, symptom: Symptom, streak: _Streak, facts: Facts, is_there: bool | BoolArray, before: int
    ) -> Finding | None:
        """Return the finding of a symptom that is there, if it has lasted for long enough."""
        if isinstance(is_there, np.ndarray):
            names = facts.structure.modules.names if symptom.of == "modules" else facts.structure.names
            there_P = is_there
        else:
            names, there_P = (), np.ones(1, dtype=bool)
        streak.see(names, there_P, facts.step, before)
        lasts_P = streak.lasts_P(symptom, facts.step)
        if not lasts_P.any():
            return None
        assert streak.since is not None
        assert streak.before is not None
        first = int(np.argmin(np.where(lasts_P, streak.since, np.inf)))
        since, earlier = int(streak.since[first]), int(streak.before[first])
        unmeasured = earlier + 1 if earlier + 1 < since and self._every == 1 else None
        places = where(lasts_P) if isinstance(is_there, np.ndarray) else []
        return finding_of(symptom, facts, places, since=since, unmeasured_from=unmeasured, every=self._every)

    def state_dict(self) -> dict[str, Any]:
        streaks = [
            None if one.num is None else [list(one.names), one.num, one.since, one.before] for _, one in self._rows
        ]
        return {"observer": self.observer.state_dict(), "streaks": streaks, "last_step": self._last_step}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.observer.load_state_dict(state["observer"])
        self._last_step = int(state["last_step"])
        if len(state["streaks"]) != len(self._rows):  # of another version: its rows are others
            return
        for (_, streak), saved in zip(self._rows, state["streaks"], strict=True):
            names, *numbers = saved or ((), None, None, None)
            streak.names = tuple(map(str, names))
            streak.num, streak.since, streak.before = (
                None if one is None else np.array(one, dtype=np.float64) for one in numbers
            )


class Judge:
    """Looks for symptoms in every sample, and from every twentieth step to the next for those that are slow.

    Args:
        info: what the capture knows of the model.
    """

    def __init__(self, info: ModelInfo) -> None:
        slow = tuple(symptom for symptom in SYMPTOMS if symptom.slow)
        self._scales = (_Scale(info, SYMPTOMS, 1), _Scale(info, slow, _SLOW_EVERY))

    def findings(self, snapshot: Snapshot, sample: Overview) -> list[Finding]:
        """Return what is found in the next sample."""
        with np.errstate(all="ignore"):
            return [found for scale in self._scales for found in scale.findings(snapshot, sample)]

    def state_dict(self) -> dict[str, Any]:
        return {"scales": [scale.state_dict() for scale in self._scales]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for scale, own in zip(self._scales, state["scales"], strict=True):
            scale.load_state_dict(own)
