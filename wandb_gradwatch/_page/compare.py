"""Compare runs: find where they differ by more than their own scatter, and build the page that shows them together."""

import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from numpy.lib.stride_tricks import sliding_window_view

from .._judgement.verdict import Verdict
from .._measure.columns import FloatArray, IntArray
from ..snapshot import keys
from .history import LAYER_NAMES, OwnSeries, RunHistory, Samples, flat, intervals
from .packing import Blob, picture_width, pool, pool_extremes, pool_steps, thinned_samples
from .payload import MAX_POINTS, by_role, describe_run, describe_verdict, own_role, pack_measured
from .redaction import redacted

# P layers that both runs have, G windows in the steps of both runs

MAX_RUNS: Final = 8  # more lines could not be distinguished
MAX_CELLS: Final = 500_000  # of one layers x steps matrix; each run has one
_OWN_STRIPS: Final = 4  # scalars of the user that are drawn

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

    Example:
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
    """Build the content of the page of several runs: (JSON-able content, bytes); raises like compare."""
    if len(histories) > MAX_RUNS:
        raise ValueError(f"{len(histories)} runs are too many for one page; give at most {MAX_RUNS}")
    blob = Blob()
    lettered = dict(zip(string.ascii_uppercase, histories, strict=False))
    pairs = [
        _pair(compare(histories[0], other), (histories[0], other), letter, blob)
        for letter, other in list(lettered.items())[1:]
    ]
    content = {
        "run": {"id": "+".join(one.run_id for one in histories), "name": " and ".join(lettered)},
        "notes": [f"{letter}: {note}" for letter, history in lettered.items() for note in history.notes],
        "incidents": [],  # those of several runs would cover each other
        "steps": sorted({step for one in histories for step in one.samples.steps[[0, -1]].tolist() if len(one.steps)}),
        "axes": [],  # other axes, such as time, differ between runs
        "own": {"axes": [], "items": []},
        "grids": [{"key": "layer", "names": [], "columns": [[], []], "pooled": 1, "metrics": []}],
        "runs": [
            {
                "letter": letter,
                **describe_run(history),
                "verdict": describe_verdict(history.verdict),
                "incidents": [one.headline for one in sorted(history.incidents, key=lambda one: one.first_step)[:1]],
                "numLayers": len(history.names),
                "lastStep": int(history.steps[-1]) if len(history.steps) else None,
            }
            for letter, history in lettered.items()
        ],
        "settings": [
            [key, *("not set" if value is None else str(value) for value in values)]
            for key, values in differing_settings(*(one.config for one in histories)).items()
        ],
        "strips": _strips(histories, blob),
        "pairs": pairs,
    }
    return content, blob


def _measured(histories: Sequence[RunHistory]) -> tuple[Samples, tuple[IntArray, IntArray]]:
    """The steps that at least one of the runs measured, without values; and the intervals of such steps."""
    steps = np.unique(np.concatenate([one.samples.steps for one in histories]))
    parts = zip(*(one.measured for one in histories), strict=True)
    first, last = (np.concatenate(ends) for ends in parts)
    return Samples(steps, np.full(len(steps), np.nan), np.zeros(len(steps), dtype=np.int64)), intervals(first, last)


def _pair(found: Comparison, histories: Sequence[RunHistory], letter: str, blob: Blob) -> dict[str, Any]:
    width = picture_width(len(found.steps), len(found.names), MAX_CELLS)
    last = pool_steps(found.steps, width)[1]
    norms = [pool(norm.T, width, keys.LAYER_GRAD_NORM_MAX).T for norm in found.norms]
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        ratio = np.where(np.isinf(norms[0]) | np.isinf(norms[1]), np.inf, norms[1] / norms[0])
    ratio[(norms[0] == 0) & np.isfinite(norms[1])] = np.nan
    matrices = {"ratio": ratio, "A": norms[0], letter: norms[1]}
    return {
        "key": "pair",
        "first": "A",
        "second": letter,
        "sentence": sentence(found, letter),
        "alike": found.alike,
        "step": None if found.parting is None else found.parting.step,
        "name": None if found.parting is None else found.names.index(found.parting.name),
        "names": found.names,
        "only": found.only,
        "columns": [found.starts[::width].tolist(), last.tolist(), [True] * len(last)],
        "pooled": width,
        "measured": pack_measured(*_measured(histories), blob, most=MAX_CELLS // 10),
        "metrics": [{"key": key, "ofWindow": True, **blob.add_matrix(matrix)} for key, matrix in matrices.items()],
    }


def _strips(histories: Sequence[RunHistory], blob: Blob) -> list[dict[str, Any]]:
    """Return the scalars that all runs share, with one line per run: the norm, then the user's scalars by role."""

    def strip(label: str, role: str, series: Sequence[OwnSeries]) -> dict[str, Any]:
        pooled = [pool_extremes(one.steps, one.values, MAX_POINTS) for one in series]
        lines = [{"xs": steps.tolist(), "offset": blob.add_floats(values)} for steps, values in pooled]
        return {"label": label, "role": role, "lines": lines}

    samples = [thinned_samples(one.samples, MAX_POINTS) for one in histories]
    norms = [OwnSeries(one.steps.astype(float), one.norms) for one in samples]
    shared = sorted(set.intersection(*(set(history.own) for history in histories)), key=by_role)[:_OWN_STRIPS]
    of_model = strip("gradient norm", "norm", norms)
    return [of_model, *(strip(key, own_role(key), [history.own[key] for history in histories]) for key in shared)]
