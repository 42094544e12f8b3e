"""Snapshots from given gradients: {name: values} per sample, so that a test can derive its expected numbers by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from wandb_gradwatch._measure.columns import (
    AS_LEFT,
    IDENTITY_C,
    NUM_BINS,
    NUM_COLUMNS,
    RECEIVED_COLUMNS,
    Column,
    bins_of,
)
from wandb_gradwatch.snapshot import Snapshot

MISSING_C = np.full(NUM_COLUMNS, np.nan)
Gradients = Mapping[str, Sequence[float] | None]  # None: no gradient arrived


def row(gradient: Sequence[float] | None, *, param_norm: float = 1.0, clip: float = 1.0) -> Any:
    """Return the row of one gradient, computed in numpy from the definitions in columns.py: [C]."""
    if gradient is None:
        return MISSING_C.copy()
    values = np.asarray(gradient, dtype=np.float64)
    finite = values[np.isfinite(values)]
    columns = IDENTITY_C.copy()
    columns[Column.NUM_ELEMENTS] = len(values)
    columns[Column.NUM_NAN] = np.isnan(values).sum()
    columns[Column.NUM_INF] = np.isinf(values).sum()
    columns[[Column.NUM_ZERO, Column.NUM_DEAD]] = (values == 0).sum()
    columns[Column.GRAD_SUM] = finite.sum()
    columns[Column.GRAD_SUM_SQ] = (finite**2).sum()
    columns[Column.GRAD_MIN] = finite.min(initial=np.inf)
    columns[Column.GRAD_MAX] = finite.max(initial=-np.inf)
    columns[Column.GRAD_ABS_MIN_NONZERO] = np.abs(finite[finite != 0]).min(initial=np.inf)
    columns[RECEIVED_COLUMNS] = columns[list(AS_LEFT)]
    columns[Column.RECEIVED_SUM_SQ] *= clip**2
    columns[Column.PARAM_SUM_SQ] = param_norm**2
    return columns


def window(*samples: Gradients, first_step: int = 1, histogram: bool = False, **more: Any) -> Snapshot:
    """Return a snapshot with one sample per argument; the histogram counts the gradients of all samples."""
    names = tuple(dict.fromkeys(name for sample in samples for name in sample))
    steps = np.arange(first_step, first_step + len(samples))
    rows = np.array([[row(sample.get(name)) for name in names] for sample in samples])
    counts = None
    if histogram:
        counts = np.zeros((len(names), NUM_BINS), dtype=np.int64)
        for sample in samples:
            for index, name in enumerate(names):
                values = np.asarray(sample.get(name) or [], dtype=np.float64)
                np.add.at(counts[index], bins_of(values[np.isfinite(values)]), 1)
    return Snapshot(
        steps=steps,
        names=names,
        rows=rows.reshape(len(samples), len(names), len(IDENTITY_C)),
        histogram=counts,
        histogram_steps=tuple(steps.tolist()) if histogram else (),
        **more,
    )
