"""What a page's pictures can be drawn over beside optimizer steps: time, W&B's step, and counts of the user's own."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import datetime
from typing import Any, Final

import numpy as np

from .._measure.columns import FloatArray
from .history import RunHistory, natural_order

TIME: Final = "time"
MAX_KNOTS: Final = 2_000  # between which the page draws straight lines
MAX_OWN_AXES: Final = 8
_COUNTS: Final = frozenset({"step", "epoch", "iteration", "iter", "token", "sample", "example", "batch", "batches"})


def other_axes(history: RunHistory) -> list[dict[str, Any]]:
    """Each axis that the run tells of: its label, whether it is time in seconds, and its values at optimizer steps."""
    return [
        {"label": label, "isTime": label == TIME, "steps": found[0].tolist(), "values": found[1].tolist()}
        for label, steps, values in _candidates(history)
        if (found := knots(steps, values)) is not None
    ]


def _candidates(history: RunHistory) -> Iterator[tuple[str, FloatArray, FloatArray]]:
    if len(history.times) == len(history.steps) > 0:
        yield TIME, history.steps.astype(np.float64), history.times - _start(history)
    placed = history.wandb_steps
    if placed is not None and len(np.unique(placed.values - placed.steps)) > 1:  # else W&B counts the same steps
        yield "W&B step", placed.steps, placed.values
    counts = [key for key, series in history.own.items() if _is_count(key, series.values)]
    for key in sorted(counts, key=natural_order)[:MAX_OWN_AXES]:
        yield key, history.own[key].steps, history.own[key].values


def _start(history: RunHistory) -> float:
    """Seconds since 1970 at which the run began; those of its first row where the file does not tell."""
    first = float(np.nanmin(history.times)) if np.isfinite(history.times).any() else 0.0
    if not history.started_at:
        return first
    return min(first, datetime.fromisoformat(history.started_at.replace("Z", "+00:00")).timestamp())


def _is_count(key: str, values: FloatArray) -> bool:
    last_words = re.split(r"[^a-z]+", key.lower().rpartition("/")[2])
    is_named = any(word.removesuffix("s") in _COUNTS or word in _COUNTS for word in last_words)
    return is_named and bool(np.isfinite(values).all() and (np.diff(values) >= 0).all())


def knots(steps: FloatArray, values: FloatArray) -> tuple[FloatArray, FloatArray] | None:
    """Where an axis stands at which steps, both rising: the first step of every value; None for less than two.

    Example:
        Epochs are spread evenly over their steps.

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
