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
    num_P: FloatArray | None = None
    since_P: FloatArray | None = None
    before_P: FloatArray | None = None

    def see(self, names: tuple[str, ...], is_there_P: BoolArray, step: int, before: int) -> None:
        arrays = self.num_P, self.since_P, self.before_P  # perhaps of a saved state that does not fit
        if self.names != names or any(one is None or one.shape != is_there_P.shape for one in arrays):
            self.names = names
            self.num_P, self.since_P, self.before_P = (np.zeros(len(is_there_P)) for _ in range(3))
        assert self.num_P is not None
        assert self.since_P is not None
        assert self.before_P is not None
        begins_P = is_there_P & (self.num_P == 0)
        self.since_P[begins_P], self.before_P[begins_P] = step, before
        self.num_P = np.where(is_there_P, self.num_P + 1, 0.0)

    def lasts_P(self, symptom: Symptom, step: int) -> BoolArray:
        """Where it has lasted for long enough: [P]."""
        assert self.num_P is not None
        assert self.since_P is not None
        steps_P = step - self.since_P
        lasts_P: BoolArray = self.num_P >= symptom.samples
        lasts_P |= (self.num_P >= SOON) & (steps_P >= _FAR * symptom.samples)
        return lasts_P & (self.num_P > 0) & (steps_P >= symptom.share * step)


class _Scale:
    """The judgement at one distance of samples."""

    def __init__(self, info: ModelInfo, symptoms: tuple[Symptom, ...], every: int) -> None:
        self.observer = Observer(info, every)
        self._symptoms = symptoms
        self._streaks = [_Streak() for _ in symptoms]
        self._last_step = 0

    def findings(self, snapshot: Snapshot, sample: Overview) -> Iterator[Finding]:
        is_trial = bool(snapshot.inferred[sample.place])
        for facts in self.observer.see(snapshot, sample):
            before, self._last_step = self._last_step, facts.step
            for symptom, streak in zip(self._symptoms, self._streaks, strict=True):
                if is_trial and not symptom.always:
                    continue
                found = self._look(symptom, streak, facts, before or facts.step - 1)
                if found is not None:
                    yield found

    def _look(self, symptom: Symptom, streak: _Streak, facts: Facts, before: int) -> Finding | None:
        is_there = symptom.when(facts)
        if isinstance(is_there, np.ndarray):
            if not is_there.any():
                streak.num_P = None
                return None
            names = facts.structure.modules.names if symptom.of == "modules" else facts.structure.names
            there_P = is_there
        elif not is_there:
            streak.num_P = None
            return None
        else:
            names, there_P = (), np.ones(1, dtype=bool)
        streak.see(names, there_P, facts.step, before)
        lasts_P = streak.lasts_P(symptom, facts.step)
        if not lasts_P.any():
            return None
        assert streak.since_P is not None
        assert streak.before_P is not None
        first = int(np.argmin(np.where(lasts_P, streak.since_P, np.inf)))
        since, earlier = int(streak.since_P[first]), int(streak.before_P[first])
        unmeasured = earlier + 1 if earlier + 1 < since else None
        places = where(lasts_P) if symptom.of else []
        return finding_of(symptom, facts, places, since, unmeasured)

    def state_dict(self) -> dict[str, Any]:
        streaks = [
            None
            if one.num_P is None
            else [list(one.names), *(a.tolist() for a in (one.num_P, one.since_P, one.before_P) if a is not None)]
            for one in self._streaks
        ]
        return {"observer": self.observer.state_dict(), "streaks": streaks, "last_step": self._last_step}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.observer.load_state_dict(state["observer"])
        if len(state["streaks"]) == len(self._streaks):
            self._streaks = [
                _Streak() if one is None else _Streak(tuple(one[0]), *(np.array(a, dtype=np.float64) for a in one[1:]))
                for one in state["streaks"]
            ]
        self._last_step = int(state["last_step"])


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
