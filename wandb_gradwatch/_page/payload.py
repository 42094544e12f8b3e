"""Builds the content of a run's page: small data as JSON, names x steps matrices as packed bytes.

`verdict` has the status and the sentence. `incidents` are in the order in which they were found: the `headline` and the
full `text` of each, and `told`, which is Incident.to_dict().
"""

import itertools
import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from .._judgement.incident import Incident
from .._judgement.verdict import Verdict
from .._measure.columns import FloatArray, IntArray
from ..snapshot import keys
from .columns import OF_WINDOW, columns_of, recorded_totals, recorded_values, spread, window_starts
from .history import LAYER_NAMES, RecordedTable, RunHistory, Samples, flat, natural_order
from .packing import Blob, pack_histograms, picture_width, pool, pool_extremes, pool_steps, pool_width, thinned_samples
from .redaction import redacted

# P names, W columns of a picture; limits keep the page small

MAX_POINTS: Final = 4_000  # of one line
MAX_SAMPLES: Final = 100_000
MAX_CELLS: Final = 1_000_000  # of one layers x steps matrix
MAX_HISTOGRAM_BYTES: Final = 4_000_000
MAX_FAMILY_CELLS: Final = 4_000_000  # of all matrices of watch(metrics=...) together
MAX_FAMILY_HISTOGRAM_BYTES: Final = 2_000_000  # of one family
MAX_OWN_KEYS: Final = 300
MAX_OWN_POINTS: Final = 1_000_000  # of all the user's keys together
MAX_KNOTS: Final = 2_000  # of an axis; the page interpolates between them
MAX_SETTINGS: Final = 1_000
MAX_SETTING: Final = 300  # characters
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
        "settings": settings_of(history),
        "notes": list(history.notes),
        "verdict": describe_verdict(history.verdict),
        "incidents": [_incident(one) for one in history.incidents],
        "steps": pool_steps(history.steps, points)[1].tolist(),
        "starts": window_starts(history, points).tolist(),
        "measured": pack_measured(history.samples, history.measured, blob),
        "received": _received(history, blob),
        "isOneModel": not any(key.endswith("/num_samples") and key != keys.NUM_SAMPLES for key in history.values),
        "pooledPoints": points,
        "wandbSteps": wandb_steps(history),
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
        "commit": history.commit,
        "name": history.name or history.run_id,
        "project": history.project,
        "startedAt": history.started_at,
        "finished": history.finished,
        "file": history.path.name,
        "numRows": history.num_rows,
        "newestAt": float(history.times[-1]) if len(history.times) and math.isfinite(history.times[-1]) else None,
        "numFlushes": len(history.steps),
        "span": history.samples.steps[[0, -1]].tolist() if len(history.steps) else None,
    }


def settings_of(history: RunHistory) -> list[tuple[str, Any]]:
    """Return the run's configuration by dotted names, at most MAX_SETTINGS, without what looks like a secret."""
    settings = ((key, value) for key, value in sorted(flat(history.config)) if key != LAYER_NAMES)
    return [(key, _setting(redacted(key, value))) for key, value in itertools.islice(settings, MAX_SETTINGS)]


def _setting(value: Any) -> Any:
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return text if len(text) <= MAX_SETTING else text[: MAX_SETTING - 1] + "…"


def _received(history: RunHistory, blob: Blob) -> dict[str, Any] | None:
    """Pack the norm that the optimizer received: of each row's last sample, and of each step of the flight recorder."""
    known = dict(zip(history.steps.tolist(), history.first_of(keys.GRAD_NORM_CLIPPED).tolist(), strict=True))
    known |= recorded_totals(history)
    known = {step: norm for step, norm in known.items() if not math.isnan(norm)}
    if not known:
        return None
    of_steps = np.array(sorted(known.items()), dtype=np.float64)
    steps, norms = pool_extremes(of_steps[:, 0], of_steps[:, 1], MAX_POINTS)
    return {"count": len(steps), "steps": blob.add_steps(steps), "values": blob.add_floats(norms)}


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


def by_role(key: str) -> tuple[int, list[tuple[int, int, str]]]:
    """A sort key for the user's scalars: losses, learning rates, then others."""
    return {"loss": 0, "rate": 1, "": 2}[own_role(key)], natural_order(key)


def own_role(key: str) -> str:
    """Guess the role of a user's scalar from its name: "loss", "rate" (a learning rate) or "".

    Examples:
        >>> own_role("train/loss"), own_role("lr-AdamW"), own_role("accuracy")
        ('loss', 'rate', '')
    """
    words = re.split(r"[^a-z]+", key.lower())
    if "loss" in words or words[-1] in ("nll", "perplexity"):
        return "loss"
    return "rate" if "lr" in words or ("learning" in words and "rate" in words) else ""


def _jsonable(values: FloatArray) -> list[float | None]:
    """Round numbers to the digits that a picture can show; None for values that cannot be drawn."""
    return [float(f"{value:.7g}") if math.isfinite(value) else None for value in values.tolist()]


def wandb_steps(history: RunHistory) -> dict[str, list[float]] | None:
    """Return W&B's own step at steps of the optimizer, as knots; None if both count the same."""
    placed = history.wandb_steps
    if placed is None or len(np.unique(placed.values - placed.steps)) < 2:
        return None
    found = knots(placed.steps, placed.values)
    return found and {"steps": found[0].tolist(), "values": found[1].tolist()}


def knots(steps: FloatArray, values: FloatArray) -> tuple[FloatArray, FloatArray] | None:
    """Return the first step of every value of an axis, and the values, both ascending; None for fewer than two.

    Examples:
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
