"""Score the alerts of trainings against the known faults, per training and in total. Pure: runs no training."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Final, Literal

from wandb_gradwatch import Alert

from .cases import LOCKED, Case
from .causes import named
from .detectors import DETECTORS, Steps
from .record import Recording

Judged = Literal["", "right", "either", "none right", "open"]
_NUM_COMPARED: Final = 10  # losses at the end of a training that are compared with as many before its fault
_ASCENTS: Final = ("wrong_sign", "unbounded_loss")  # the loss falls for ever: it does not say that all is lost
_MIN_GAIN: Final = 0.05  # of the loss before the fault: a training that gains less has learned nothing since


@dataclass(frozen=True)
class Score:
    """The score of one training. An alarm is an alert of level WARN or ERROR.

    Args:
        false: alarms before anything was bad, or in a healthy training; errors: how many of them are ERRORs.
        lengths: characters of each alarm's message.
        seen: an alarm came at or after the first bad step; title: of the first one; delay: after how many steps.
        cause: what this alarm's incident names: "right"; "either", if it is right and another cause is named as well;
            "none right", if no cause that it names is right; "open", if it names none.
        layer: whether the incident names the right layer; None where the fault sits in none, or nothing was seen.
        doomed: steps since the fault began, if it is worth an ERROR, otherwise 0; saved: those of them that come after
            the first ERROR; 0 if an ERROR came before the fault.
    """

    case: str
    family: str
    seed: int
    healthy: bool
    decidable: bool
    false: tuple[str, ...]
    errors: int
    lengths: tuple[int, ...]
    seen: bool = False
    title: str = ""
    delay: int | None = None
    cause: Judged = ""
    layer: bool | None = None
    doomed: int = 0
    saved: int = 0


def score(case: Case, recording: Recording) -> Score:
    """Return the score of one training."""
    alarms = [told for told in recording.told if told.alert.level != "INFO"]
    first_bad = math.inf if recording.first_bad is None else recording.first_bad
    early, after = [one for one in alarms if one.at < first_bad], [one for one in alarms if one.at >= first_bad]
    scored = Score(
        case.name,
        case.family,
        recording.seed,
        healthy=case.fault is None,
        decidable=case.fault is None or case.fault.decidable,
        false=tuple(f"{one.alert.title} at step {one.alert.step}" for one in early),
        errors=sum(one.alert.level == "ERROR" for one in early),
        lengths=tuple(len(message_of(one.alert)) for one in alarms),
    )
    if case.fault is None or recording.first_bad is None:
        return scored
    if is_worth_an_error(recording) or case.fault.causes[0] in _ASCENTS:
        last = recording.losses[-1][0]
        stops = [one.at for one in after if one.alert.level == "ERROR"]
        saved = last - stops[0] if stops and not scored.errors else 0
        scored = replace(scored, doomed=last - recording.first_bad, saved=saved)
    if not after:
        return scored
    first = after[0]
    return replace(
        scored,
        seen=True,
        title=first.alert.title,
        delay=first.at - recording.first_bad,
        cause=judge_cause(named(first.alert), case.fault.causes),
        layer=names_layer(first.alert, case.layer) if case.layer else None,
    )


def is_worth_an_error(recording: Recording) -> bool:
    """Return whether the training was lost to its fault: it failed, its loss ends non-finite, or learned nothing since.

    The median of the last ten losses is compared with that of the ten before the fault; where there are none, with
    that of the first ten, or with the first loss, if that is lower.
    """
    losses = [loss for _, loss in recording.losses]
    if recording.first_bad is None or not losses:
        return False
    if recording.error is not None or not math.isfinite(losses[-1]):
        return True
    before = [loss for step, loss in recording.losses if step < recording.first_bad]
    early = len(before) < _NUM_COMPARED
    usual = min(losses[0], median(losses[:_NUM_COMPARED])) if early else median(before[-_NUM_COMPARED:])
    return median(losses[-_NUM_COMPARED:]) > usual - _MIN_GAIN * abs(usual)


def judge_cause(causes: Sequence[str], right: Collection[str]) -> Judged:
    """Rate the causes that an incident names: one, one and its rival, or none."""
    if not causes:
        return "open"
    if not any(cause in right for cause in causes):
        return "none right"
    return "right" if len(causes) == 1 else "either"


def message_of(alert: Alert) -> str:
    """Return what is sent: the incident's message, or the text of an alert without one."""
    return alert.text if alert.incident is None else alert.incident.message


def names_layer(alert: Alert, layer: str) -> bool:
    """Return whether the incident names this layer, or a parameter or module of it."""
    layers = () if alert.incident is None else alert.incident.layers
    return any(f"{one.name}.".startswith(f"{layer}.") for one in layers)


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


def add_up(scores: Iterable[Score]) -> dict[str, float]:
    """Return the figures of the table; shares are of all healthy, or all visible faulty runs, unless said otherwise."""
    scores = list(scores)
    healthy = [one for one in scores if one.healthy]
    faulty = [one for one in scores if not one.healthy and one.decidable]
    seen, placed = [one for one in faulty if one.seen], [one for one in faulty if one.layer is not None]
    lengths = [length for one in scores for length in one.lengths]
    return {
        "healthy runs": len(healthy),
        "healthy runs with a WARN or ERROR": _share(sum(bool(one.false) for one in healthy), len(healthy)),
        "healthy runs with an ERROR, which stops them": _share(sum(one.errors > 0 for one in healthy), len(healthy)),
        "false alarms per healthy run": _share(sum(len(one.false) for one in healthy), len(healthy)),
        "faulty runs": len(faulty),
        "faulty runs with an alarm before the fault": _share(sum(bool(one.false) for one in faulty), len(faulty)),
        "seen": _share(len(seen), len(faulty)),
        "delay, median": median(one.delay for one in seen if one.delay is not None) if seen else math.nan,
        "right layer, of those seen": _share(sum(bool(one.layer) for one in placed), len(placed)),
        "cause right": _share(sum(one.cause in ("right", "either") for one in faulty), len(faulty)),
        "of which with a rival": _share(sum(one.cause == "either" for one in faulty), len(faulty)),
        "no cause right": _share(sum(one.cause == "none right" for one in faulty), len(faulty)),
        "messages per faulty run": _share(sum(len(one.lengths) for one in faulty), len(faulty)),
        "characters per message, median": median(lengths) if lengths else math.nan,
        "characters per message, largest": max(lengths, default=math.nan),
        "faulty runs worth an ERROR": sum(one.doomed > 0 for one in faulty),
        "their steps saved by stopping at the first ERROR": _share(
            sum(one.saved for one in faulty), sum(one.doomed for one in faulty)
        ),
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
        if one.healthy or not one.decidable:
            continue
        if not one.seen:
            lines.append(f"not seen       {where}")
            continue
        if one.cause in ("none right", "open"):
            lines.append(f"{one.cause:14s} {where}: {one.title}")
        if one.layer is False:
            lines.append(f"layer          {where}: {one.title}")
        if one.delay is not None and one.delay > 2:
            lines.append(f"late by {one.delay:<6d} {where}: {one.title}")
    return lines
