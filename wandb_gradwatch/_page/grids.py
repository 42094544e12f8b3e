"""Names x steps, a matrix for each metric: the layers, and what watch(metrics=...) measured."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from .._measure.columns import FloatArray
from ..snapshot import keys
from .history import RunHistory
from .packing import Blob, pack_histograms
from .pooling import picture_width, pool, pool_steps

# P names, W columns of a picture

MAX_CELLS: Final = 1_000_000  # of one layers x steps matrix
MAX_FAMILY_CELLS: Final = 4_000_000  # of all matrices of what watch(metrics=...) measured together
MAX_FAMILY_HISTOGRAM_BYTES: Final = 2_000_000  # of one family
# The metric that a picture shows first stands first: the largest of each window, as the last step's value hides a spike
# before it. What is not listed follows by name.
_METRIC_ORDER: Final = (
    *(keys.LAYER_GRAD_NORM_MAX, keys.LAYER_GRAD_NORM, keys.LAYER_GRAD_PARAM_RATIO, keys.LAYER_PARAM_NORM),
    *("ratio", "norm", keys.STALE, "update_rms", "noise_scale", keys.SECONDS, "local_norm", "load_ratio"),
    *("entropy_ratio", "entropy", "relative_difference", "difference"),
    *("rms", "mean", "std", "min", "max", "abs_max", "dead_ratio", "zero_ratio", "num_nonfinite"),
)

_Series = Mapping[str, Mapping[str, FloatArray]]  # name to metric to its values


def pack_grids(history: RunHistory, blob: Blob) -> list[dict[str, Any]]:
    """The layers first, then each family of what watch(metrics=...) measured, with its histograms."""
    values = history.values
    layers = {
        name: {metric: values[f"{metric}/{name}"] for metric in keys.LAYER_FAMILIES if f"{metric}/{name}" in values}
        for name in history.names
    }
    families = {family: _present(history.family(family)) for family in keys.METRIC_FAMILIES}
    num_series = sum(len(of_name) for found in families.values() for of_name in found.values())
    num_rows = len(history.steps)
    width = picture_width(num_rows, num_series, MAX_FAMILY_CELLS)
    return [
        _grid("layer", history, layers, picture_width(num_rows, len(layers), MAX_CELLS), blob),
        *(
            _grid(family, history, found, width, blob) | _histograms(history, family, blob)
            for family, found in families.items()
            if found or family in history.family_histograms
        ),
    ]


def empty_grid() -> dict[str, Any]:
    """Of no layer."""
    return {"key": "layer", "names": [], "columns": [[], []], "pooled": 1, "metrics": []}


def _grid(key: str, history: RunHistory, found: _Series, width: int, blob: Blob) -> dict[str, Any]:
    metrics = sorted({metric for of_name in found.values() for metric in of_name}, key=_metric_order)
    return {
        "key": key,
        "names": history.spelled(found),
        "columns": [steps.tolist() for steps in pool_steps(history.steps, width)],
        "pooled": width,
        "metrics": [one for metric in metrics if (one := _metric(metric, found, len(history.steps), width, blob))],
    }


def _metric_order(metric: str) -> tuple[int, str]:
    return (_METRIC_ORDER.index(metric) if metric in _METRIC_ORDER else len(_METRIC_ORDER)), metric


def _metric(metric: str, found: _Series, num_rows: int, width: int, blob: Blob) -> dict[str, Any] | None:
    """One metric of all names, [P, W]: by logarithms where nothing is negative, else evenly. None: it is missing."""
    missing = np.full(num_rows, np.nan)
    values = pool(np.stack([of_name.get(metric, missing) for of_name in found.values()], axis=1), width, metric).T
    if np.isnan(values).all():
        return None
    signed = bool((values < 0).any())
    return {"key": metric, "signed": signed, **blob.add_matrix(values, signed=signed)}


def _histograms(history: RunHistory, family: str, blob: Blob) -> dict[str, Any]:
    histograms = history.family_histograms.get(family, {})
    names = history.in_order(histograms)
    packed = pack_histograms(histograms, names, MAX_FAMILY_HISTOGRAM_BYTES, blob)
    return {"histogramNames": history.spelled(names), "histograms": packed}


def _present(found: _Series) -> _Series:
    """Without names of which nothing is known."""
    return {name: of_name for name, of_name in found.items() if not np.isnan(list(of_name.values())).all()}
