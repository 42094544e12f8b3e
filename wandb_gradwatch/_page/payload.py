"""Builds the content of a run's page: small data as JSON, names x steps matrices as packed bytes.

`verdict` has the status and the sentence. `incidents` are in the order in which they were found: the `headline` and the
full `text` of each, and `told`, which is Incident.to_dict().
"""

import math
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Final

import numpy as np

from .._judgement.incident import Incident
from .._judgement.verdict import Verdict
from .._measure.columns import FloatArray, IntArray
from ..snapshot import keys
from .columns import OF_WINDOW, columns_of, recorded_values, spread, window_starts
from .history import OwnSeries, RecordedTable, RunHistory, Samples, natural_order
from .packing import Blob, pack_histograms, picture_width, pool, pool_extremes, pool_steps, pool_width, thinned_samples

# P names, W columns of a picture; limits keep the page small

MAX_POINTS: Final = 4_000  # of one line
MAX_SAMPLES: Final = 100_000
MAX_CELLS: Final = 1_000_000  # of one layers x steps matrix
MAX_HISTOGRAM_BYTES: Final = 4_000_000
MAX_FAMILY_CELLS: Final = 4_000_000  # of all matrices of watch(metrics=...) together
MAX_FAMILY_HISTOGRAM_BYTES: Final = 2_000_000  # of one family
MAX_TABLE_ROWS: Final = 20_000
MAX_OWN_KEYS: Final = 300
MAX_OWN_POINTS: Final = 1_000_000  # of all the user's keys together
TIME: Final = "time"
MAX_KNOTS: Final = 2_000  # of an axis; the page interpolates between them
MAX_OWN_AXES: Final = 8
_COUNTS: Final = frozenset({"step", "epoch", "iteration", "iter", "token", "sample", "example", "batch", "batches"})
# The order in which a picture offers metrics. The window's largest norm comes first, because the norm of the window's
# last step may hide an earlier spike. Other metrics follow by name.
_METRIC_ORDER: Final = (
    *(keys.LAYER_GRAD_NORM_MAX, keys.LAYER_GRAD_NORM, keys.LAYER_GRAD_PARAM_RATIO, keys.LAYER_PARAM_NORM),
    *("ratio", "norm", keys.STALE, "update_rms", "noise_scale", keys.SECONDS, "local_norm", "load_ratio"),
    *("entropy_ratio", "entropy", "relative_difference", "difference"),
    *("rms", "mean", "std", "min", "max", "abs_max", "dead_ratio", "zero_ratio", "num_nonfinite"),
)
_Series = Mapping[str, Mapping[str, FloatArray]]  # by name, then by metric: values


def build_payload(history: RunHistory) -> tuple[dict[str, Any], Blob]:
    """Build the content of the page: (JSON-able content, bytes)."""
    blob = Blob()
    points = pool_width(len(history.steps), MAX_POINTS)
    totals = (key for key in history.values if key.startswith((keys.TOTAL, keys.TOTAL_MAX)))
    of_model = [*keys.MODEL_KEYS, keys.CHANGED_RATIO, keys.SAMPLE_EVERY, *totals]
    content = {
        "run": describe_run(history),
        "notes": list(history.notes),
        "verdict": describe_verdict(history.verdict),
        "incidents": [_incident(one) for one in history.incidents],
        "steps": pool_steps(history.steps, points)[1].tolist(),
        "starts": window_starts(history, points).tolist(),
        "measured": pack_measured(history.samples, history.measured, blob),
        "isOneModel": not any(key.endswith("/num_samples") and key != keys.NUM_SAMPLES for key in history.values),
        "pooledPoints": points,
        "axes": other_axes(history),
        "globals": {
            key: _jsonable(pool(history.values[key], points, key))
            for key in of_model
            if not np.isnan(history.first_of(key)).all()
        },
        "totals": sorted(key.removeprefix(keys.TOTAL) for key in history.values if key.startswith(keys.TOTAL)),
        "inModelOrder": history.in_model_order,
        "grids": _grids(history, blob),
        "histograms": pack_histograms(history.histograms, history.names, MAX_HISTOGRAM_BYTES, blob),
        "own": _own(history, blob),
        "flightRecorder": None if history.flight_recorder is None else _table(history.flight_recorder),
    }
    return content, blob


def describe_verdict(verdict: Verdict) -> dict[str, str]:
    """Return what the page says of the whole run."""
    return {"status": verdict.status, "sentence": verdict.sentence}


def _incident(incident: Incident) -> dict[str, Any]:
    """Return an incident as its two texts, and as what Incident.to_dict says of it."""
    return {"headline": incident.headline, "text": incident.text, "told": incident.to_dict()}


def describe_run(history: RunHistory) -> dict[str, Any]:
    """Return the facts about the run for the head of the page."""
    return {
        "id": history.run_id,
        "name": history.name or history.run_id,
        "project": history.project,
        "startedAt": history.started_at,
        "finished": history.finished,
        "file": history.path.name,
        "numRows": history.num_rows,
        "newestAt": float(history.times[-1]) if len(history.times) and math.isfinite(history.times[-1]) else None,
        "numFlushes": len(history.steps),
        "seconds": _seconds(history),
        "span": history.samples.steps[[0, -1]].tolist() if len(history.steps) else None,
    }


def pack_measured(
    samples: Samples, whole: tuple[IntArray, IntArray], blob: Blob, *, most: int = MAX_SAMPLES
) -> dict[str, Any]:
    """Pack samples, the most conspicuous if there are too many, and the intervals in which every step was measured."""
    steps, norms, num_bad = thinned_samples(samples, most)
    offsets = {"steps": blob.add_steps(steps), "norms": blob.add_floats(norms), "bad": blob.add_floats(num_bad)}
    firsts, lasts = (blob.add_steps(ends) for ends in whole)
    return {"count": len(steps), **offsets, "numIntervals": len(whole[0]), "firsts": firsts, "lasts": lasts}


def _grids(history: RunHistory, blob: Blob) -> list[dict[str, Any]]:
    """Return the layers' grid first, then one grid per family of watch(metrics=...), with its histograms."""
    values, num_rows = history.values, len(history.steps)
    layers = {
        name: {metric: values[f"{metric}/{name}"] for metric in keys.LAYER_SCALARS if f"{metric}/{name}" in values}
        for name in history.names
    }
    grids = [_layers_grid(history, layers, picture_width(num_rows, len(layers), MAX_CELLS), blob)]
    families = {  # without names that have no values
        family: {name: of for name, of in history.family(family).items() if not np.isnan(list(of.values())).all()}
        for family in keys.METRIC_FAMILIES
    }
    num_series = sum(len(of_name) for found in families.values() for of_name in found.values())
    width = picture_width(num_rows, num_series, MAX_FAMILY_CELLS)
    for family, found in families.items():
        histograms = history.family_histograms.get(family, {})
        if found or histograms:
            names, grid = history.in_order(histograms), _grid(family, history, found, width, blob)
            packed = pack_histograms(histograms, names, MAX_FAMILY_HISTOGRAM_BYTES, blob)
            grids.append(grid | {"histogramNames": history.spelled(names), "histograms": packed})
    return grids


def _seconds(history: RunHistory) -> float | None:
    """The time from the run's start to its last row; None if unknown."""
    start = _start(history)
    known = history.times[np.isfinite(history.times)]
    return float(known.max() - start) if len(known) and start is not None else None


def _start(history: RunHistory) -> float | None:
    if not history.started_at:
        return None
    return datetime.fromisoformat(history.started_at.replace("Z", "+00:00")).timestamp()


def _layers_grid(history: RunHistory, found: _Series, width: int, blob: Blob) -> dict[str, Any]:
    steps = history.recorded_steps
    table = RecordedTable([], []) if history.flight_recorder is None else history.flight_recorder
    return _grid("layer", history, found, width, blob, (steps, recorded_values(table, steps)))


def _grid(
    key: str,
    history: RunHistory,
    found: _Series,
    width: int,
    blob: Blob,
    recorded: tuple[Sequence[int], _Series] = ((), {}),
) -> dict[str, Any]:
    """Return one matrix [P, C] per metric: in logarithmic steps if no value is negative, otherwise in linear steps."""
    missing, metrics = np.full(len(history.steps), np.nan), []
    columns = columns_of(history, width, recorded[0])
    for metric in sorted({metric for of_name in found.values() for metric in of_name}, key=_metric_order):
        rows = [
            spread(metric, of_name.get(metric, missing), columns, width, recorded[1].get(name, {}).get(metric))
            for name, of_name in found.items()
        ]
        values = np.stack(rows)
        signed = bool((values < 0).any())
        if not np.isnan(values).all():
            is_bounded = key == "layer" and metric in OF_WINDOW  # by what is known of each sample
            about = {"signed": signed, "ofWindow": is_bounded or width > 1, "isBounded": is_bounded}
            metrics.append({"key": metric, **about, **blob.add_matrix(values, signed=signed)})
    return {
        "key": key,
        "names": history.spelled(found),
        "columns": [columns.first.tolist(), columns.last.tolist(), columns.is_whole.tolist()],
        "pooled": width,
        "metrics": metrics,
    }


def _metric_order(metric: str) -> tuple[int, str]:
    return (_METRIC_ORDER.index(metric) if metric in _METRIC_ORDER else len(_METRIC_ORDER)), metric


def _own(history: RunHistory, blob: Blob) -> dict[str, Any]:
    """Return the user's scalars, those about the training's progress first; keys with equal steps share them."""
    changes = {key: len(np.unique(series.values)) > 1 for key, series in history.own.items()}
    ranked = sorted(history.own, key=lambda key: by_role(key) if changes[key] else (3, natural_order(key)))
    chosen = ranked[:MAX_OWN_KEYS]
    axes: dict[bytes, list[float]] = {}
    items = []
    for key in chosen:
        series = history.own[key]
        steps, values = pool_extremes(series.steps, series.values, max(MAX_POINTS, MAX_OWN_POINTS // len(chosen)))
        axes.setdefault(steps.tobytes(), steps.tolist())
        place = list(axes).index(steps.tobytes())
        items.append({"key": key, "role": own_role(key), "axis": place, "offset": blob.add_floats(values)})
    return {"axes": list(axes.values()), "items": items, "left": len(history.own) - len(chosen)}


def _table(table: RecordedTable) -> dict[str, Any]:
    rows = [[_cell(value) for value in row] for row in table.rows[:MAX_TABLE_ROWS]]  # newest first
    return {"columns": list(table.columns), "rows": rows, "total": len(table.rows)}


def by_role(key: str) -> tuple[int, list[tuple[int, int, str]]]:
    """A sort key for the user's scalars: losses, learning rates, then others."""
    return {"loss": 0, "rate": 1, "": 2}[own_role(key)], natural_order(key)


def own_role(key: str) -> str:
    """Guess the role of a user's scalar from its name: "loss", "rate" (a learning rate) or "".

    Example:
        >>> own_role("train/loss"), own_role("lr-AdamW"), own_role("accuracy")
        ('loss', 'rate', '')
    """
    words = re.split(r"[^a-z]+", key.lower())
    if "loss" in words or words[-1] in ("nll", "perplexity"):
        return "loss"
    return "rate" if "lr" in words or ("learning" in words and "rate" in words) else ""


def _cell(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else str(value)
    return value if value is None or isinstance(value, int) else str(value)


def _jsonable(values: FloatArray) -> list[float | None]:
    """Round numbers to the digits that a picture can show; None for values that cannot be drawn."""
    return [float(f"{value:.7g}") if math.isfinite(value) else None for value in values.tolist()]


def other_axes(history: RunHistory) -> list[dict[str, Any]]:
    """Return each available axis: its label, whether it is time in seconds, and its values at optimizer steps."""
    candidates = []
    if np.isfinite(history.times).any():
        start = float(np.nanmin(history.times))  # or earlier, if the run's start is known
        start = min(start, _start(history) or start)
        candidates.append((TIME, OwnSeries(history.steps.astype(float), history.times - start)))
    placed = history.wandb_steps
    if placed is not None and len(np.unique(placed.values - placed.steps)) > 1:  # otherwise W&B counts the same steps
        candidates.append(("W&B step", placed))
    counts = (key for key, series in history.own.items() if _is_count(key, series.values))
    candidates += [(key, history.own[key]) for key in sorted(counts, key=natural_order)[:MAX_OWN_AXES]]
    return [
        {"label": label, "isTime": label == TIME, "steps": found[0].tolist(), "values": found[1].tolist()}
        for label, series in candidates
        if (found := knots(series.steps, series.values)) is not None
    ]


def _is_count(key: str, values: FloatArray) -> bool:
    last_words = re.split(r"[^a-z]+", key.lower().rpartition("/")[2])
    is_named = any(word.removesuffix("s") in _COUNTS or word in _COUNTS for word in last_words)
    return is_named and bool(np.isfinite(values).all() and (np.diff(values) >= 0).all())


def knots(steps: FloatArray, values: FloatArray) -> tuple[FloatArray, FloatArray] | None:
    """Return the first step of every value of an axis, and the values, both ascending; None for fewer than two.

    Example:
        Epochs are interpolated between the steps at which they begin.

        >>> [part.tolist() for part in knots(np.array([10.0, 20, 30, 40]), np.array([0.0, 0, 1, 1]))]
        [[10.0, 30.0], [0.0, 1.0]]
    """
    order = np.argsort(steps, kind="stable")
    order = order[np.isfinite(values[order])]
    values, first = np.unique(np.maximum.accumulate(values[order]), return_index=True)
    steps, once = np.unique(steps[order][first], return_index=True)
    if len(steps) < 2:
        return None
    kept = np.unique(np.linspace(0, len(steps) - 1, min(len(steps), MAX_KNOTS)).round().astype(int))
    return steps[kept], values[once][kept]
