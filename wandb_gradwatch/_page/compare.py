"""Compare runs: find where they differ by more than their own scatter, and build the page that shows them together."""

import itertools
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from numpy.lib.stride_tricks import sliding_window_view

from .._judgement.incident import LEVELS
from .._judgement.verdict import Verdict
from .._measure.columns import FloatArray, IntArray
from ..snapshot import keys
from .history import LAYER_NAMES, RunHistory, flat
from .packing import Blob, picture_width, pool, pool_extremes, pool_steps, thinned_samples
from .payload import MAX_POINTS, by_role, describe_run, describe_verdict, own_role, pack_measured
from .redaction import HIDDEN, redacted

# P layers that both runs have, G windows in the steps of both runs

MAX_RUNS: Final = 100
MAX_CELLS: Final = 2_000_000  # of the layers x steps matrices of all runs
MAX_SAMPLES: Final = 100_000  # of all runs
MIN_POINTS: Final = 300  # of one line of a run, however many runs there are
MAX_OWN: Final = 4  # losses and learning rates of a run
MAX_SETTINGS: Final = 6  # columns of the table
MAX_PAIRS: Final = 200  # about a second

# Two runs part at a layer if its largest norms differ by more than this multiple of the runs' own scatter, and at least
# by this factor: either in SUSTAINED windows in a row, or by far more in a single window.
SUSTAINED: Final = 3
_SCATTERS: Final = 5.0
_FACTOR: Final = 2.0
_SCATTERS_AT_ONCE: Final = 10.0
_FACTOR_AT_ONCE: Final = 10.0
_SAME: Final = 1e-6  # relative; the order of additions may differ from run to run
_SCATTER_OF_MEDIAN: Final = 1.4826 / np.sqrt(2)  # median |difference of neighbours| -> standard deviation, if normal


@dataclass(frozen=True)
class Parting:
    """The first window in which two runs differ by more than their own scatter."""

    step: int  # the last step of the window
    name: str  # the layer that differs most in this window
    norms: tuple[float, float]  # the layer's in both runs, as in Comparison.norms
    num_layers: int  # the number of layers that part anywhere in the run


@dataclass(frozen=True, eq=False)
class Comparison:
    """How a second run differs from the first."""

    names: list[str]  # [P] the layers of both runs, spelled as in the model, in the first run's order
    only: tuple[list[str], ...]  # for each run, the layers that only this run has
    starts: IntArray  # [G] the first step that was measured in every common window
    steps: IntArray  # [G] the last step of every common window; windows are those of the coarser run
    # For each run, [P, G]: the largest norm in the window; NaN if no gradient arrived, infinite if one was not finite
    norms: tuple[FloatArray, FloatArray]
    equal_until: int | None  # the last step up to which all norms agree to six digits, if any
    parting: Parting | None  # None if the runs never differ by more than their own scatter
    verdicts: tuple[Verdict, Verdict]

    @property
    def alike(self) -> bool:
        """Whether the runs have the same layers and status, and never differ beyond their scatter."""
        return self.parting is None and not self.reservations

    @property
    def reservations(self) -> list[str]:
        """What else differs."""
        statuses = {verdict.status for verdict in self.verdicts}
        layers = ["not all layers are in both"] if any(self.only) else []
        return layers + (["the verdicts differ"] if len(statuses) > 1 else [])


def compare(first: RunHistory, second: RunHistory) -> Comparison:
    """Compare two runs of any lengths, cadences and layers, in the windows and layers that both have.

    Raises:
        ValueError: the runs have no layer, or no step, in common.
    """
    common = set(first.names) & set(second.names)
    names = [name for name in first.names if name in common]
    if not names:
        raise ValueError("the runs have no layer of the same name: there is nothing to compare")
    steps = _common_windows(first.steps, second.steps)
    if not len(steps):
        raise ValueError("the runs have no steps in common: there is nothing to compare")
    norms = (_windows_of(first, names, steps), _windows_of(second, names, steps))
    equal = np.isclose(*norms, rtol=_SAME, atol=0.0, equal_nan=True)
    num_equal = int(np.argmin(np.append(equal.all(axis=0), False)))
    spelled = first.spelled(names)
    return Comparison(
        names=spelled,
        only=tuple(run.spelled(name for name in run.names if name not in common) for run in (first, second)),
        starts=_starts(steps, (first, second)),
        steps=steps,
        norms=norms,
        equal_until=int(steps[num_equal - 1]) if num_equal else None,
        parting=_parting(spelled, steps, norms),
        verdicts=(first.verdict, second.verdict),
    )


def _starts(steps: IntArray, runs: Sequence[RunHistory]) -> IntArray:
    measured = np.unique(np.concatenate([run.samples.steps for run in runs]))
    after_previous = np.append(-np.inf, steps[:-1] + 1.0)
    return np.asarray(measured[np.searchsorted(measured, after_previous)])


def sentence(found: Comparison, second: str = "B") -> str:
    """Return a sentence that says whether and where the runs part; the first is A in it."""
    last = f"{found.steps[-1]:,}"
    if found.parting is not None:
        how = _how(list(zip(found.parting.norms, ("A", second), strict=True)))
        return f"A and {second} part at step {found.parting.step:,}: the gradient of {found.parting.name} {how}"
    if found.equal_until == found.steps[-1]:
        return f"A and {second} are equal to six digits up to step {last}"
    but = f"; but {' and '.join(found.reservations)}" if found.reservations else ""
    return f"No layer of A and {second} differs beyond its own scatter up to step {last}{but}"


def _how(norms: list[tuple[float, str]]) -> str:
    for norm, run in norms:
        for is_so, words in ((np.isinf, "has NaN or Inf"), (np.isnan, "is missing"), (np.logical_not, "is 0")):
            if is_so(norm):
                return f"{words} in {run} alone"
    smaller, larger = sorted(norms)
    return f"is {larger[0] / smaller[0]:,.3g} times as large in {larger[1]}"


def _common_windows(first: IntArray, second: IntArray) -> IntArray:
    """Return the last steps of the coarser run's windows, within the steps for which both runs have rows: [G]."""
    if not len(first) or not len(second):
        return first[:0]
    low, high = max(first[0], second[0]), min(first[-1], second[-1])
    return min((steps[(steps >= low) & (steps <= high)] for steps in (first, second)), key=len)


def _windows_of(history: RunHistory, names: list[str], steps: IntArray) -> FloatArray:
    """Return each layer's largest norm per window: [P, G]; NaN without a gradient, Inf if one is not finite."""
    if not names or not len(steps):  # a run that has not logged a row
        return np.empty((len(names), len(steps)))
    keys_of = (keys.LAYER_GRAD_NORM_MAX, keys.LAYER_GRAD_NORM)
    norms = np.stack([history.first_of(*(f"{key}/{name}" for key in keys_of)) for name in names])
    counts = np.stack([history.first_of(f"{keys.LAYER_NUM_NONFINITE}/{name}") for name in names])
    norms[(counts > 0) & history.nonfinite_rows] = np.inf
    # Rows after the last window are left out; rows before the first one are merged into it.
    window_of = np.searchsorted(steps, history.steps[history.steps <= steps[-1]])
    known, starts = np.unique(window_of, return_index=True)
    windows = np.full((len(names), len(steps)), np.nan)
    windows[:, known] = np.fmax.reduceat(norms[:, : len(window_of)], starts, axis=1)
    return windows


def _parting(names: list[str], steps: IntArray, norms: tuple[FloatArray, FloatArray]) -> Parting | None:
    with np.errstate(divide="ignore", invalid="ignore"):
        logs = [np.log(norm) for norm in norms]
        log_ratio = logs[1] - logs[0]  # infinite where one norm is 0, NaN where both are
    broken = np.isinf(norms[0]) != np.isinf(norms[1])
    scatter_P1 = np.hypot(_scatter(logs[0]), _scatter(logs[1]))
    size = np.abs(log_ratio)
    parts = broken | (size > np.maximum(_SCATTERS_AT_ONCE * scatter_P1, np.log(_FACTOR_AT_ONCE)))
    far = size > np.maximum(_SCATTERS * scatter_P1, np.log(_FACTOR))
    parts |= _lasting(far & (log_ratio > 0)) | _lasting(far & (log_ratio < 0))
    parts |= _lasting(np.isnan(norms[0]) != np.isnan(norms[1]))
    if not parts.any():
        return None
    window = int(np.argmax(parts.any(axis=0)))
    size[np.isnan(size)] = np.inf  # NaN, Inf or a missing gradient in only one of the runs
    worst = int(np.argmax(np.where(parts[:, window], size[:, window], -1.0)))
    pair = (float(norms[0][worst, window]), float(norms[1][worst, window]))
    return Parting(int(steps[window]), names[worst], pair, int(parts.any(axis=1).sum()))


def _scatter(log: FloatArray) -> FloatArray:
    """Return the typical jump of a layer's log norm between neighbouring windows: [P, 1]."""
    jumps = np.abs(np.diff(np.where(np.isfinite(log), log, np.nan), axis=1, prepend=np.nan))
    jumps[np.isnan(jumps).all(axis=1)] = 0.0  # too few windows for a difference
    return np.asarray(_SCATTER_OF_MEDIAN * np.nanmedian(jumps, axis=1, keepdims=True))


def _lasting(found: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
    """Return where runs of at least SUSTAINED windows with True begin: [P, G]."""
    padded = np.pad(found, ((0, 0), (0, SUSTAINED - 1)))
    return np.asarray(sliding_window_view(padded, SUSTAINED, axis=1).all(axis=-1))


def differing_settings(*configs: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Return the settings that differ between configurations; nested ones by dotted names; None if not set.

    The list of watched layers, which wandb_gradwatch writes, is ignored. What looks like a secret is hidden.

    Examples:
        >>> differing_settings({"optimizer": {"lr": 0.1}, "seed": 1}, {"optimizer": {"lr": 0.3}, "seed": 1})
        {'optimizer.lr': [0.1, 0.3]}
    """
    found = [dict(flat(config)) for config in configs]
    values = {key: [one.get(key) for one in found] for key in sorted(set().union(*found))}
    return {
        key: [redacted(key, value) for value in of_runs]
        for key, of_runs in values.items()
        if key != LAYER_NAMES and any(value != of_runs[0] for value in of_runs)
    }


def build_comparison(histories: Sequence[RunHistory]) -> tuple[dict[str, Any], Blob]:
    """Build the content of the page of several runs: (JSON-able content, bytes).

    Raises:
        ValueError: there are more than MAX_RUNS.
    """
    if len(histories) > MAX_RUNS:
        raise ValueError(f"{len(histories)} runs are too many for one page; give at most {MAX_RUNS}")
    blob = Blob()
    measured = [one.samples.steps for one in histories if len(one.samples.steps)]
    settings = differing_settings(*(one.config for one in histories))
    settings = {key: values for key, values in settings.items() if HIDDEN not in values}  # they would all look alike
    shown = sorted(settings, key=lambda key: -len({str(value) for value in settings[key]}))[:MAX_SETTINGS]
    content: dict[str, Any] = {
        "run": {"id": f"{len(histories)}-runs", "name": f"{len(histories)} runs", "file": ""},
        "notes": [f"{history.name or history.run_id}: {note}" for history in histories for note in history.notes],
        "incidents": [],  # those of several runs would cover each other
        "steps": sorted({float(end) for steps in measured for end in steps[[0, -1]]}),
        "wandbSteps": None,
        "own": {"axes": [], "items": []},
        "grids": [{"key": "layer", "names": [], "columns": [[], []], "pooled": 1, "metrics": []}],
        "settings": shown,
        "settingsLeft": len(settings) - len(shown),
        "runs": [
            _described(one, [_short(settings[key][place]) for key in shown], len(histories), blob)
            for place, one in enumerate(histories)
        ],
        "order": sorted(range(len(histories)), key=lambda place: _badness(histories[place].verdict)),
        "sentences": _sentences(histories),
        "pairs": True,
    }
    return content, blob


def _told(verdict: Verdict) -> str:
    """The verdict in a few words: the cause of the worst incident."""
    told = [one for one in verdict.incidents if one.level != "INFO"]
    if not told:
        return "no alert" if verdict.status == "ok" else "nothing was measured"
    worst = max(told, key=lambda one: LEVELS.index(one.level))
    more = f", and {len(told) - 1} more" if len(told) > 1 else ""
    return f"{worst.level}: {worst.cause_text or worst.title}{more}"


def _badness(verdict: Verdict) -> tuple[int, int]:
    """A sort key: the worst verdict first, of equal ones that with the earliest incident."""
    first = min((one.first_step for one in verdict.incidents if one.level != "INFO"), default=0)
    return ("error", "warn", "unknown", "ok").index(verdict.status), first


def _short(value: Any) -> str:
    """A setting in a table: numbers in at most four digits."""
    if value is None:
        return "not set"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _described(history: RunHistory, settings: list[str], num_runs: int, blob: Blob) -> dict[str, Any]:
    """Return a run's row of the table, and what the page needs to compare it with any other."""
    told = [one for one in history.incidents if one.level != "INFO"] or history.incidents
    first = min(told, key=lambda one: one.first_step, default=None)
    points = max(MIN_POINTS, MAX_POINTS // num_runs)
    samples = thinned_samples(history.samples, points)
    width = picture_width(len(history.steps), max(len(history.names), 1), MAX_CELLS // num_runs)
    norms = pool(_windows_of(history, history.names, history.steps).T, width, keys.LAYER_GRAD_NORM_MAX).T
    own = sorted((key for key in history.own if own_role(key)), key=by_role)[:MAX_OWN]
    return {
        **describe_run(history),
        "settings": settings,
        "verdict": describe_verdict(history.verdict),
        "told": _told(history.verdict),
        "share": f"{history.num_measured:,} of {history.num_steps:,}",
        "incident": first and {"step": first.first_step, "layer": first.layers[0].name if first.layers else ""},
        "norm": _line(samples.steps.astype(float), np.where(samples.num_bad > 0, np.nan, samples.norms), blob),
        "bad": samples.steps[samples.num_bad > 0].tolist(),
        "own": [
            {"key": key, "role": own_role(key)}
            | _line(*pool_extremes(history.own[key].steps, history.own[key].values, points), blob)
            for key in own
        ],
        "names": history.spelled(history.names),
        "lasts": pool_steps(history.steps, width)[1].tolist(),
        "norms": blob.add_matrix(norms),
        "measured": pack_measured(history.samples, history.measured, blob, most=MAX_SAMPLES // num_runs),
    }


def _line(steps: FloatArray, values: FloatArray, blob: Blob) -> dict[str, int]:
    return {"count": len(steps), "steps": blob.add_steps(steps), "values": blob.add_floats(values)}


def _sentences(histories: Sequence[RunHistory]) -> dict[str, dict[str, Any]]:
    """Return what `compare` says of pairs of runs, by their places; above MAX_PAIRS of those with the first alone."""
    pairs = list(itertools.combinations(range(len(histories)), 2))
    if len(pairs) > MAX_PAIRS:
        pairs = [(first, second) for first, second in pairs if first == 0]
    found = {}
    for first, second in pairs:
        with suppress(ValueError):  # nothing in common: the page says it
            told = compare(histories[first], histories[second])
            name = None if told.parting is None else told.parting.name
            found[f"{first}-{second}"] = {"sentence": sentence(told), "alike": told.alike, "name": name}
    return found
