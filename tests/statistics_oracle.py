"""Expected rows and histograms in plain Python, without torch, numpy reductions or code of the backends."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterable

import numpy as np
import torch

from wandb_gradwatch._measure.columns import NUM_BINS, Column, FloatArray, IntArray, bins_of

# The backends that run on every machine, and the compiled one if numba is installed.
FAST_BACKENDS = ["cpu", "torch", *(["compiled"] if importlib.util.find_spec("numba") else [])]
BACKENDS = ["reference", *FAST_BACKENDS]


def expected_row(values: Iterable[float], dead_threshold: float = 0.0) -> FloatArray:
    """Return the row of a gradient with these values; the parameter's columns are NaN.

    The expectations do not come from the schema, but there must be one for each of its columns.
    """
    values = list(values)
    finite = [v for v in values if math.isfinite(v)]
    num_nan, num_inf = sum(map(math.isnan, values)), sum(map(math.isinf, values))
    sum_sq = math.fsum(v * v for v in finite)
    expected = {
        "NUM_ELEMENTS": len(values),
        "NUM_NAN": num_nan,
        "NUM_INF": num_inf,
        "NUM_ZERO": sum(v == 0 for v in finite),
        "NUM_DEAD": sum(abs(v) <= dead_threshold for v in finite),
        "GRAD_SUM": math.fsum(finite),
        "GRAD_SUM_SQ": sum_sq,
        "GRAD_MIN": min(finite, default=math.inf),
        "GRAD_MAX": max(finite, default=-math.inf),
        "GRAD_ABS_MIN_NONZERO": min((abs(v) for v in finite if v != 0), default=math.inf),
        "RECEIVED_SUM_SQ": sum_sq,
        "RECEIVED_NUM_NAN": num_nan,
        "RECEIVED_NUM_INF": num_inf,
        "PARAM_SUM_SQ": math.nan,
        "PARAM_NUM_NONFINITE": math.nan,
    }
    return np.array([expected[column.name] for column in Column], dtype=np.float64)


def expected_histogram(values: Iterable[float]) -> IntArray:
    """Return the histogram of these values: [B]."""
    finite = np.array([v for v in values if math.isfinite(v)])
    return np.bincount(bins_of(finite), minlength=NUM_BINS) if finite.size else np.zeros(NUM_BINS, dtype=np.int64)


def floats_of(tensor: torch.Tensor) -> list[float]:
    """Return the elements as Python floats; for complex elements, their magnitudes."""
    values = tensor.to_dense().flatten().tolist()
    return [math.hypot(v.real, v.imag) if isinstance(v, complex) else v for v in values]


def assert_row(row: FloatArray, expected: FloatArray, tolerance: float) -> None:
    """Compare every column: counts exactly, extremes to float64 rounding, sums relative to the sum of magnitudes."""
    # Terms of both signs may cancel; the sum of their absolute values is at most sqrt(n * sum of squares).
    added = math.sqrt(expected[Column.NUM_ELEMENTS] * expected[Column.GRAD_SUM_SQ])
    for column in Column:
        rtol = 0.0 if "NUM" in column.name else 1e-15 if column.merge != "sum" else tolerance
        atol = tolerance * added if column.name == "GRAD_SUM" else 0.0
        np.testing.assert_allclose(row[column], expected[column], rtol=rtol, atol=atol, err_msg=column.name)
