"""Finding: one symptom in one sample, with what may explain it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import numpy as np

from ..snapshot import keys
from ..snapshot._arrays import derived
from . import replicas
from .evidence import Evidence
from .facts import Facts, where
from .incident import Incident, Layer, Level
from .patterns import Explanation, explain
from .symptoms import Symptom

QUIET: Final = 10  # samples
_MAX_LAYERS: Final = 5
_NONFINITE: Final = frozenset({"nan_gradient", "inf_gradient"})
_OF_GRADIENTS: Final = frozenset({"exploding_gradient", "gradient_spike", "layer_jump", "vanishing_gradient"})


@dataclass(frozen=True)
class Detail:
    """What only a message needs to know of a finding.

    Args:
        fact: what was seen.
        since: the step at which it began.
        evidence: what is known at this moment; None for a rule of the user and for alerts of the capture.
        explanation: the cause that the facts allow; None if they allow none.
    """

    fact: str
    since: int
    layers: tuple[Layer, ...] = ()
    values: Mapping[str, float] = field(default_factory=dict)
    evidence: Evidence | None = None
    explanation: Explanation | None = None
    rank: int | None = None


@dataclass(frozen=True)
class Finding:
    """One symptom in one sample.

    Args:
        describe: works out the detail; called at most once, before the next sample. A finding of an incident that
            lasts and is clear needs none.
        unmeasured_from: the first of the steps right before it began that were not measured.
        told: the whole incident, of rules that make their own.
        quiet: samples in a row without a finding that end the first incident of the kind; None: it never ends.
    """

    kind: str
    title: str
    level: Level
    step: int
    describe: Callable[[], Detail]
    unmeasured_from: int | None = None
    told: Incident | None = None
    quiet: int | None = QUIET

    @derived
    def detail(self) -> Detail:
        return self.describe()


def finding_of(
    symptom: Symptom, facts: Facts, places: list[int], *, since: int, unmeasured_from: int | None, every: int
) -> Finding:
    """Return the finding of a symptom in a sample.

    Args:
        places: the parameters or modules concerned.
        since: the step at which it began; unmeasured_from: as in Finding.
        every: least number of steps between the samples that are compared.
    """
    is_trial = bool(facts.snapshot.inferred[facts.place])  # of a line search, perhaps: no optimizer step was seen
    is_unused = facts.sample.left_out or (is_trial and not facts.is_broken)  # no update was made of it
    level: Level = "WARN" if is_unused and symptom.kind in _NONFINITE else symptom.level
    quiet = None if symptom.of_begin else QUIET * every
    describe = partial(_detail, symptom, facts, places, since)
    return Finding(symptom.kind, symptom.title, level, facts.step, describe, unmeasured_from, quiet=quiet)


@np.errstate(all="ignore")  # it is called after the judgement of its sample, or not at all
def _detail(symptom: Symptom, facts: Facts, places: list[int], since: int) -> Detail:
    evidence = Evidence(facts, symptom.kind, places, symptom.of)
    fact, rank = symptom.says(facts), _rank(symptom, facts)
    if facts.sample.guarded:
        fact += "; the guard left this update out"
    if facts.sample.left_out:
        fact += "; the training loop left this step out"
    if symptom.kind in _NONFINITE and rank is not None:
        fact += f"; first on rank {rank}"
    if symptom.kind == "exploding_gradient" and evidence.onset is not None:
        since = min(since, evidence.onset_step)
    if symptom.kind == "gradient_spike":
        since = facts.past.last_step
    if symptom.kind == "ranks_disagree":  # found when the numbers of all ranks were there
        since = replicas.since(facts)
    layers, values = _layers(symptom, facts, places), _values(facts)
    return Detail(fact, since, layers, values, evidence, explain(evidence), rank)


def _rank(symptom: Symptom, facts: Facts) -> int | None:
    if symptom.kind == "ranks_disagree":
        return replicas.rank_of(facts)
    rank = facts.metric(keys.FIRST_NONFINITE_RANK)
    return None if math.isnan(rank) else int(rank)


def _layers(symptom: Symptom, facts: Facts, places: list[int]) -> tuple[Layer, ...]:
    structure = facts.structure
    if symptom.of == "modules":
        return tuple(Layer(structure.modules.names[at], float(facts.dead_L[at])) for at in places[::-1][:_MAX_LAYERS])
    if symptom.kind in _NONFINITE:
        bad = where(facts.bad_P & facts.present_P)[::-1]  # the backward reached the last one first
        return tuple(Layer(structure.names[at]) for at in bad[:_MAX_LAYERS])
    norm_P, usual_P = np.exp(facts.g_P), np.exp(facts.g_P - facts.rise_P)
    if symptom.of == "parameters":
        chosen = places
    elif symptom.kind in _OF_GRADIENTS:
        sign = 1.0 if symptom.kind == "vanishing_gradient" else -1.0
        order = np.argsort(np.where(np.isnan(facts.rise_P), np.inf, sign * facts.rise_P), kind="stable")
        chosen = [int(at) for at in order if np.isfinite(facts.rise_P[at])][:3]
    else:
        return ()
    return tuple(Layer(structure.names[at], float(norm_P[at]), float(usual_P[at])) for at in chosen[:_MAX_LAYERS])


def _values(facts: Facts) -> dict[str, float]:
    named = {
        "grad_norm": facts.norm,
        "usual_grad_norm": math.exp(min(facts.median_before, 690.0)) if facts.seen else math.nan,
        "grad_norm_received": facts.received,
        "param_norm": math.exp(min(facts.weights, 690.0)),
        "param_change_per_step": facts.moved,
        "loss": facts.loss,
        "learning_rate": facts.rate,
        "loss_scale": facts.scale,
        "input_rms": facts.fact("input_rms"),
        "output_rms": facts.fact("output_rms"),
    }
    return {name: float(value) for name, value in named.items() if math.isfinite(value)}
