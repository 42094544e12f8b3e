"""Score the alerts of trainings against the known faults, per training and in total. Pure: runs no training."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from .cases import LOCKED, Case
from .causes import fits_remedy, read_causes
from .detectors import DETECTORS, Steps
from .record import Recording, Told


@dataclass(frozen=True)
class Score:
    """The score of one training.

    Args:
        false: alarms before anything was bad, or in a healthy training; errors: those of them that are ERRORs.
        steps: how many of the watcher's steps the training had before the fault.
        seen: an alarm came after the fault began; delay: after how many steps; lead: steps left before the loss is NaN.
        layer: whether the right layer is in the alarm's text; None where the fault sits in none.
        cause: "right", "either" (one of two, and it is one of them), "open" (says no cause, or three) or "wrong".
        remedy: whether the remedy is one against the cause.
    """

    case: str
    family: str
    seed: int
    decidable: bool
    false: tuple[str, ...]
    errors: int
    steps: int
    seen: bool = False
    title: str = ""
    delay: int | None = None
    lead: int | None = None
    layer: bool | None = None
    cause: str = ""
    remedy: bool = False


def score(case: Case, recording: Recording) -> Score:
    """Return the score of one training."""
    alarms = [told for told in recording.told if told.alert.level != "INFO"]
    last = recording.losses[-1][0] if recording.losses else 0
    first_bad = math.inf if recording.first_bad is None else recording.first_bad
    early = [told for told in alarms if told.at < first_bad]
    known = {
        "case": case.name,
        "family": case.family,
        "seed": recording.seed,
        "decidable": case.fault is None or case.fault.decidable,
        "false": tuple(f"{told.alert.title} at step {told.alert.step}" for told in early),
        "errors": sum(told.alert.level == "ERROR" for told in early),
        "steps": int(min(last, first_bad - 1)),
    }
    after = [told for told in alarms if told.at >= first_bad]
    if case.fault is None or not after:
        return Score(**known)
    first = after[0]
    said = read_causes(first.alert.text)
    right = (case.fault.cause, *case.fault.also)
    return Score(
        **known,
        seen=True,
        title=first.alert.title,
        delay=first.at - int(first_bad),
        lead=_lead(recording, first),
        layer=names_layer(first.alert.text, case.layer) if case.layer else None,
        cause=judge_cause(said.causes, right),
        remedy=any(fits_remedy(cause, said.remedy) for cause in right),
    )


def judge_cause(named: Sequence[str], right: Sequence[str]) -> str:
    """Rate the causes: one cause is a claim, two are an either-or, three or none leave the cause open.

    "A parameter was already bad" is an observation, and a claim only if nothing else made the parameter bad.
    """
    named = [cause for cause in named if cause != "bad parameter" or cause in right]
    if len(named) not in (1, 2):
        return "open"
    if any(cause in right for cause in named):
        return "right" if len(named) == 1 else "either"
    return "wrong"


def names_layer(text: str, layer: str) -> bool:
    """Return whether the text names a parameter or module of this layer."""
    end = r"(\.[a-z]| \d[\d.]* %)" if layer[-1].isdigit() else r"\b"  # "2.weight", "2 100 %", not "2.5 times"
    return bool(re.search(rf"(?<![\w.]){re.escape(layer)}{end}", text))


def _lead(recording: Recording, told: Told) -> int | None:
    broken = [step for step, loss in recording.losses if not math.isfinite(loss)]
    return broken[0] - told.at if broken else None


def seen_by_others(case: Case, recording: Recording) -> dict[str, tuple[int, int | None]]:
    """Return by detector: false alarms (one per series of consecutive steps), and the delay of the first right one."""
    first_bad = math.inf if recording.first_bad is None else recording.first_bad
    found = {}
    for name, detector in DETECTORS.items():
        bad = sorted(set(detector(steps_of(recording))))
        early = [step for step in bad if step < first_bad]
        late = [step for step in bad if step >= first_bad]
        num_false = sum(step - 1 not in early for step in early)
        found[name] = (num_false, int(late[0] - first_bad) if late else None)
    stopped = None if case.first_bad is None or recording.anomaly is None else recording.anomaly[0] - case.first_bad
    found["detect_anomaly"] = (int(case.first_bad is None and recording.anomaly is not None), stopped)
    return found


def steps_of(recording: Recording) -> Steps:
    """Return loss and norm of every step of the loop that has both; the norm is NaN without finite elements."""
    if recording.samples is None:
        return []
    norms = dict(zip(recording.samples.steps.tolist(), recording.samples.total_grad_norm.tolist(), strict=True))
    bad = dict(zip(recording.samples.steps.tolist(), (recording.samples.num_nonfinite > 0).any(axis=1), strict=True))
    return [(step, loss, math.nan if bad[step] else norms[step]) for step, loss in recording.losses if step in norms]


def add_up(scores: Iterable[Score]) -> dict[str, Any]:
    """Return the figures of the table."""
    scores = list(scores)
    healthy = [one for one in scores if not one.title and one.delay is None and "|" not in one.case]
    faulty = [one for one in scores if "|" in one.case and one.decidable]
    seen = [one for one in faulty if one.seen]
    placed = [one for one in seen if one.layer is not None]
    leads = [one.lead for one in seen if one.lead is not None]
    return {
        "healthy runs": len(healthy),
        "false alarms per healthy run": _share(sum(len(one.false) for one in healthy), len(healthy)),
        "false alarms per 1,000 healthy steps": 1000 * _share(sum(len(one.false) for one in scores), sum(one.steps for one in scores)),
        "healthy runs without an alarm": _share(sum(not one.false for one in healthy), len(healthy)),
        "healthy runs without an ERROR": _share(sum(not one.errors for one in healthy), len(healthy)),
        "faulty runs": len(faulty),
        "seen": _share(len(seen), len(faulty)),
        "delay, median": median(one.delay for one in seen) if seen else math.nan,
        "seen within 2 steps": _share(sum(one.delay <= 2 for one in seen), len(faulty)),
        "right layer, of those seen": _share(sum(bool(one.layer) for one in placed), len(placed)),
        "cause right": _share(sum(one.cause in ("right", "either") for one in seen), len(faulty)),
        "of which one of two": _share(sum(one.cause == "either" for one in seen), len(faulty)),
        "confidently wrong": _share(sum(one.cause == "wrong" for one in seen), len(faulty)),
        "remedy right": _share(sum(one.remedy for one in seen), len(faulty)),
        "told before the loss was NaN": _share(sum(lead > 0 for lead in leads), len(leads)),
        "lead before NaN, median": median(leads) if leads else math.nan,
    }  # fmt: skip


def _share(part: float, whole: float) -> float:
    return part / whole if whole else math.nan


def failures(scores: Iterable[Score]) -> list[str]:
    """Return one line per mistake, without those of locked families."""
    lines = []
    for one in scores:
        if one.family in LOCKED:
            continue
        where = f"{one.family}: {one.case} (seed {one.seed})"
        lines += [f"false alarm    {where}: {false}" for false in one.false]
        if "|" not in one.case or not one.decidable:
            continue
        if not one.seen:
            lines.append(f"not seen       {where}")
        else:
            if one.cause not in ("right", "either"):
                lines.append(f"cause {one.cause:8s} {where}: {one.title}")
            if one.layer is False:
                lines.append(f"layer          {where}: {one.title}")
            if one.delay is not None and one.delay > 2:
                lines.append(f"late by {one.delay:<6d} {where}: {one.title}")
    return lines
