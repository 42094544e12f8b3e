"""What watch(metrics=...) measured, as the page carries it."""

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

MAX_FAMILY_CELLS: Final = 4_000_000  # of all names x steps matrices together
MAX_FAMILY_HISTOGRAM_BYTES: Final = 2_000_000  # of one family
# The metric that a family's picture shows first stands first; what is not listed follows by name.
_METRIC_ORDER: Final = (
    *(
        "norm",
        "ratio",
        keys.STALE,
        "update_rms",
        "noise_scale",
        keys.SECONDS,
        "local_norm",
        "load_ratio",
        "entropy_ratio",
        "entropy",
        "relative_difference",
        "difference",
    ),
    *("rms", "mean", "std", "min", "max", "abs_max", "dead_ratio", "zero_ratio", "num_nonfinite"),
)


def pack_families(history: RunHistory, blob: Blob) -> list[dict[str, Any]]:
    """What watch(metrics=...) measured: for each family the names and a names x steps matrix of every metric."""
    families = {family: _present(history.family(family)) for family in keys.METRIC_FAMILIES}
    num_series = sum(len(of_name) for found in families.values() for of_name in found.values())
    width = picture_width(len(history.steps), num_series, MAX_FAMILY_CELLS)
    columns = [steps.tolist() for steps in pool_steps(history.steps, width)]
    return [
        {"key": family, "columns": columns, "pooled": width, **_family(history, family, found, width, blob)}
        for family, found in families.items()
        if found or family in history.family_histograms
    ]


def _family(
    history: RunHistory, family: str, found: Mapping[str, Mapping[str, FloatArray]], width: int, blob: Blob
) -> dict[str, Any]:
    metrics = sorted({metric for of_name in found.values() for metric in of_name}, key=_metric_order)
    histograms = history.family_histograms.get(family, {})
    pictured = history.in_order(histograms)
    return {
        "names": history.spelled(found),
        "metrics": [_family_metric(metric, found, width, blob) for metric in metrics],
        "histogramNames": history.spelled(pictured),
        "histograms": pack_histograms(histograms, pictured, MAX_FAMILY_HISTOGRAM_BYTES, blob),
    }


def _metric_order(metric: str) -> tuple[int, str]:
    return (_METRIC_ORDER.index(metric) if metric in _METRIC_ORDER else len(_METRIC_ORDER)), metric


def _present(found: Mapping[str, Mapping[str, FloatArray]]) -> dict[str, dict[str, FloatArray]]:
    """Without metrics that are missing everywhere, and names that have no other."""
    kept = {
        name: {metric: values for metric, values in of_name.items() if not np.isnan(values).all()}
        for name, of_name in found.items()
    }
    return {name: of_name for name, of_name in kept.items() if of_name}


def _family_metric(
    metric: str, found: Mapping[str, Mapping[str, FloatArray]], width: int, blob: Blob
) -> dict[str, Any]:
    """One metric of all names, names first: [P, W]; by logarithms where nothing is negative, else evenly."""
    missing = np.full(len(next(iter(next(iter(found.values())).values()))), np.nan)
    values = pool(np.stack([of_name.get(metric, missing) for of_name in found.values()], axis=1), width, metric).T
    signed = bool((values < 0).any())
    return {"key": metric, "signed": signed, **blob.add_matrix(values, signed=signed)}
