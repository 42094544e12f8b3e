"""Summarises a run in one sentence, from its alerts, their causes and the rows after them."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np

from .._analysis.formatting import CAUSE_PREFIX, FOUND_PREFIX
from ..snapshot import keys
from .history import RecordedAlert, RunHistory

_SEVERITY: Final = {"ERROR": 0, "WARN": 1}  # other levels rank last
# Alerts with these titles belong to one accident if they are at most this many steps apart.
_NONFINITE: Final = frozenset({"NaN gradient", "Inf gradient"})
_EXPLOSIVE: Final = _NONFINITE | {"Exploding gradient", "Parameters grow too fast"}
_SAME_ACCIDENT: Final = 20
_STILL_HIGH: Final = 10.0  # multiple of the median norm before the accident
_AFTER_EVIDENCE: Final = r"\)(?=, or |\. Remedy|\.?$)"


@dataclass(frozen=True)
class Verdict:
    mood: Literal["good", "careful", "bad"]  # "careful" if something is unusual; "bad" if the training broke
    text: str  # a sentence about the run


def judge(history: RunHistory) -> Verdict:
    """Describe in one sentence how the training went."""
    series = [one for one in history.own.values() if len(one.steps)]
    last = round(max([*history.steps[-1:].tolist(), *(one.steps[-1] for one in series)], default=0))
    told = sorted((alert for alert in history.alerts if alert.step is not None), key=lambda alert: alert.step or 0)
    end = f"; the process ended with exit code {history.exit_code}" if history.exit_code else ""
    first = _first_of_the_accident(told)
    own_bad = [step for one in series for step in one.steps[~np.isfinite(one.values)].tolist()]
    bad = _first_nonfinite(history, told, own_bad)
    if first is None and bad is None:
        return _without_accident(history, told, end)
    parts, starts = [], [] if bad is None else [bad]
    if first is not None:
        parts.append(f"Broke at step {first.step}{unmeasured_before(history, first.step or 0)}: {cause_of(first)}")
        starts.append(first.step or 0)
    if bad is not None and (first is None or not first.title.startswith(("NaN", "Inf"))):
        before = "" if bad in own_bad else unmeasured_before(history, bad)
        parts.append(f"NaN or Inf from {'' if parts else 'step '}{bad}{before}")
    if bad is not None or (first is not None and first.title in _EXPLOSIVE):
        parts.append(_recovery(history, min(starts), own_bad, last))
    return Verdict("bad", "; ".join(parts) + end)


def unmeasured_before(history: RunHistory, step: int) -> str:
    """Say which steps right before a step were not measured: what is found there may have begun in them; or "".

    Example:
        " or in steps 71 to 135, which were not measured"
    """
    before = history.measured[1][history.measured[1] < step]
    first = int(before[-1]) + 1 if len(before) else step
    if first == step:
        return ""
    if first == step - 1:
        return f" or {first}, which was not measured"
    return f" or in steps {first} to {step - 1}, which were not measured"


def fold(alerts: Iterable[RecordedAlert]) -> list[list[RecordedAlert]]:
    """Group alerts by title, oldest first; order the groups by severity, then by their first step."""
    folded: dict[str, list[RecordedAlert]] = {}
    for alert in alerts:
        folded.setdefault(alert.title, []).append(alert)

    def order(group: list[RecordedAlert]) -> tuple[int, float]:
        return min(map(severity, group)), min(np.inf if alert.step is None else alert.step for alert in group)

    return sorted(folded.values(), key=order)


def severity(alert: RecordedAlert) -> int:
    """Return 0 for an error, 1 for a warning, 2 for any other level."""
    return _SEVERITY.get(alert.level, 2)


def cause_of(alert: RecordedAlert) -> str:
    """Return the probable cause in an alert's text, without evidence and remedy; the title if there is none.

    Example:
        >>> text = "Step 3: NaN.\\nProbable cause: one bad batch (the loss of step 3 is 9). Remedy: skip it."
        >>> cause_of(RecordedAlert("NaN gradient", text, "ERROR", 3))
        'one bad batch'
    """
    cause = alert.text.partition(CAUSE_PREFIX)[2].partition(". Remedy")[0]
    if cause.startswith(FOUND_PREFIX):
        cause = cause.removeprefix(FOUND_PREFIX).partition("\n")[0]
    cause = re.sub(r"; [^;]* tells? them apart$", "", cause, flags=re.DOTALL)
    *pieces, last = re.split(_AFTER_EVIDENCE, cause)
    cause = "".join(piece.partition(" (")[0] for piece in pieces) + last
    cause = cause.removeprefix("not clear: either ").strip().rstrip(".")
    starts_as_a_word = alert.title.partition(" ")[0].istitle()  # False for "NaN"
    title = alert.title[:1].lower() + alert.title[1:] if starts_as_a_word else alert.title
    return " ".join(cause.split()) or title


def _first_of_the_accident(told: list[RecordedAlert]) -> RecordedAlert | None:
    """Return the first error, or an explosive alert a few steps before it that led to it; None without an error."""
    errors = [place for place, alert in enumerate(told) if severity(alert) == 0]
    if not errors:
        return None
    first = told[errors[0]]
    for earlier in reversed(told[: errors[0]]):
        near = (first.step or 0) - (earlier.step or 0) <= _SAME_ACCIDENT
        if near and earlier.title in _EXPLOSIVE and severity(earlier) < 2 and first.title in _EXPLOSIVE:
            first = earlier
    return first


def _first_nonfinite(history: RunHistory, told: list[RecordedAlert], own_bad: list[float]) -> int | None:
    """Return the first step with NaN or Inf in the gradients or in a scalar of the user, as far as the file shows."""
    exact = own_bad + [alert.step or 0 for alert in told if alert.title in _NONFINITE]
    return min(map(round, exact or history.samples.steps[_nonfinite_samples(history)].tolist()), default=None)


def nonfinite_rows(history: RunHistory) -> np.ndarray:
    """Return a mask of rows with NaN or Inf in gradients: [R].

    A loss scaler overflows and skips steps by design, so rows with skipped steps do not count.
    """
    counts = (history.first_of(key) for key in (keys.NUM_NAN, keys.NUM_INF, keys.NUM_SKIPPED_STEPS))
    nan, inf, skipped = map(np.nan_to_num, counts)
    return np.asarray((nan + inf > 0) & (skipped == 0))


def _nonfinite_samples(history: RunHistory) -> np.ndarray:
    """Return a mask of samples with NaN or Inf, in the rows of nonfinite_rows: [N]."""
    row = np.searchsorted(history.steps, history.samples.steps)
    return np.asarray((history.samples.num_bad > 0) & np.append(nonfinite_rows(history), True)[row])


def _recovery(history: RunHistory, start: int, own_bad: list[float], last: int) -> str:
    """Say at which measured step after the accident the norms are finite and usual again, up to the end of the run."""
    steps, norms, _ = history.samples
    before = norms[(steps < start) & np.isfinite(norms)]
    high = norms > (_STILL_HIGH * np.median(before) if len(before) else np.inf)
    bad_steps = steps[_nonfinite_samples(history) | high | np.isinf(norms)].tolist()
    last_bad = max([start, *bad_steps, *own_bad])
    after = steps[steps > last_bad]
    if not len(after):
        return f"not usual again by step {last}"
    is_next = after[0] == steps[steps > start][0]
    return f"usual again at {'the next measured step, ' if is_next else 'step '}{after[0]}"


def _without_accident(history: RunHistory, told: list[RecordedAlert], end: str) -> Verdict:
    if warnings := [alert for alert in told if severity(alert) == 1]:
        others = len({alert.title for alert in warnings}) - 1
        more = f", and {others} more kind{'s' if others > 1 else ''} of warning" if others else ""
        step = warnings[0].step or 0
        where = f"{step}{unmeasured_before(history, step)}"
        return Verdict("careful", f"Unusual from step {where}: {cause_of(warnings[0])}{more}{end}")
    measured = measured_of(history)
    if end:
        return Verdict(
            "bad", f"Ended early: no alert in {measured}{end}" if len(history.steps) else "Ended early" + end
        )
    if not len(history.steps):
        return Verdict("careful", "No rows of gradients")
    so_far = "" if history.finished else " so far"
    remark = f" but a remark at step {told[0].step} ({cause_of(told[0])})" if told else ""
    return Verdict("good", f"No alert{remark}{so_far} in {measured}")


def measured_of(history: RunHistory) -> str:
    """Say how many steps were measured, of how many: "212 of 400 steps measured"."""
    return f"{history.num_measured:,} of {history.num_steps:,} step{'' if history.num_steps == 1 else 's'} measured"
