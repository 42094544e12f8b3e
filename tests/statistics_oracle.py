"""Expected rows and histograms in plain Python, without torch, numpy reductions or code of the backends."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterable

import numpy as np
import torch

from wandb_gradwatch._measure.columns import NUM_BINS, NUM_COLUMNS, Column, FloatArray, IntArray, bins_of

# The backends that run on every machine, and the compiled one if numba is installed.
FAST_BACKENDS = ["cpu", "torch", *(["compiled"] if importlib.util.find_spec("numba") else [])]
BACKENDS = ["reference", *FAST_BACKENDS]

EXACT_COLUMNS = (
    Column.NUM_ELEMENTS,
    Column.NUM_NAN,
    Column.NUM_INF,
    Column.NUM_ZERO,
    Column.NUM_DEAD,
    Column.RECEIVED_NUM_NAN,
    Column.RECEIVED_NUM_INF,
)
EXTREME_COLUMNS = (Column.GRAD_MIN, Column.GRAD_MAX, Column.GRAD_ABS_MIN_NONZERO)


def expected_row(values: Iterable[float], dead_threshold: float = 0.0) -> FloatArray:
    """Return the row of a gradient with these values; the parameter's columns are NaN."""
    values = list(values)
    finite = [v for v in values if math.isfinite(v)]
    row = np.full(NUM_COLUMNS, np.nan)
    row[Column.NUM_ELEMENTS] = len(values)
    row[Column.NUM_NAN] = row[Column.RECEIVED_NUM_NAN] = sum(math.isnan(v) for v in values)
    row[Column.NUM_INF] = row[Column.RECEIVED_NUM_INF] = sum(math.isinf(v) for v in values)
    row[Column.NUM_ZERO] = sum(v == 0 for v in finite)
    row[Column.NUM_DEAD] = sum(abs(v) <= dead_threshold for v in finite)
    row[Column.GRAD_SUM] = math.fsum(finite)
    row[Column.GRAD_SUM_SQ] = row[Column.RECEIVED_SUM_SQ] = math.fsum(v * v for v in finite)
    row[Column.GRAD_MIN] = min(finite, default=math.inf)
    row[Column.GRAD_MAX] = max(finite, default=-math.inf)
    row[Column.GRAD_ABS_MIN_NONZERO] = min((abs(v) for v in finite if v != 0), default=math.inf)
    return row


def expected_histogram(values: Iterable[float]) -> IntArray:
    """Return the histogram of these values: [B]."""
    finite = np.array([v for v in values if math.isfinite(v)])
    return np.bincount(bins_of(finite), minlength=NUM_BINS) if finite.size else np.zeros(NUM_BINS, dtype=np.int64)


def floats_of(tensor: torch.Tensor) -> list[float]:
    """Return the elements as Python floats; for complex elements, their magnitudes."""
    values = tensor.to_dense().flatten().tolist()
    return [math.hypot(v.real, v.imag) if isinstance(v, complex) else v for v in values]


def assert_row(row: FloatArray, expected: FloatArray, tolerance: float) -> None:
    """Compare counts exactly, extremes to float64 rounding, and sums relative to the sum of absolute terms."""
    for column in EXACT_COLUMNS:
        assert row[column] == expected[column], f"{column.name}: {row[column]} != {expected[column]}"
    for column in EXTREME_COLUMNS:
        np.testing.assert_allclose(row[column], expected[column], rtol=1e-15, atol=0, err_msg=column.name)
    for column in (Column.GRAD_SUM_SQ, Column.RECEIVED_SUM_SQ, Column.PARAM_SUM_SQ, Column.PARAM_NUM_NONFINITE):
        np.testing.assert_allclose(row[column], expected[column], rtol=tolerance, atol=0, err_msg=column.name)
    # Terms of both signs may cancel; the sum of their absolute values is at most sqrt(n * sum of squares).
    added = math.sqrt(expected[Column.NUM_ELEMENTS] * expected[Column.GRAD_SUM_SQ])
    assert abs(row[Column.GRAD_SUM] - expected[Column.GRAD_SUM]) <= tolerance * added, "GRAD_SUM"
