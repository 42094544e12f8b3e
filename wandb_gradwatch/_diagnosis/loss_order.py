"""Which moved first, the gradient or the loss: of a sample both are of one forward, so their order is no accident."""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from .._analysis.formatting import number
from .._measure.columns import FloatArray
from ..snapshot import Snapshot, keys

# S samples

_LEAST: Final = 12  # samples with both, of which the older half says what is usual
_DEVIATIONS: Final = 6.0
_PRECISION: Final = 1e-2  # of the median: less is no movement


def which_moved_first(history: Snapshot) -> str:
    """A sentence about a history that ends with an alert's sample; "" where there is too little to compare."""
    loss_S = history.metrics.get(keys.LOSS)
    if loss_S is None or not len(history):
        return ""
    norm_S = np.where(np.nansum(history.num_nonfinite, axis=1) > 0, np.nan, history.total_grad_norm)
    seen_S = np.isfinite(loss_S) & np.isfinite(norm_S)
    if np.count_nonzero(seen_S) < _LEAST:
        return ""
    gradient, loss = _onset(norm_S, seen_S), _onset(loss_S, seen_S)
    if gradient is None:
        return "" if loss is None else f"The loss moved first, at step {_at(history, loss, loss_S)}."
    if loss is None:
        return f"The gradient moved at step {_at(history, gradient, norm_S)}; the loss has not moved yet."
    if gradient == loss:
        return f"The gradient and the loss moved together, at step {int(history.steps[loss])}."
    first, then = ("gradient", "loss") if gradient < loss else ("loss", "gradient")
    begin, end = sorted((int(history.steps[gradient]), int(history.steps[loss])))
    return f"The {first} moved first, at step {begin}, the {then} at step {end}."


def _onset(values_S: FloatArray, seen_S: npt.NDArray[np.bool_]) -> int | None:
    """The first sample of the last run of samples that are far above the usual; None where the newest two are not."""
    usual = values_S[seen_S][: np.count_nonzero(seen_S) // 2]
    median = float(np.median(usual))
    deviation = max(1.4826 * float(np.median(np.abs(usual - median))), _PRECISION * abs(median))
    moved_S = np.isnan(values_S) | (values_S > max(median + _DEVIATIONS * deviation, float(usual.max())))
    if not moved_S[-2:].any():
        return None
    end = int(np.flatnonzero(moved_S)[-1])
    calm = np.flatnonzero(~moved_S[:end])
    return int(calm[-1]) + 1 if calm.size else 0


def _at(history: Snapshot, sample: int, values_S: FloatArray) -> str:
    return f"{int(history.steps[sample])} ({number(float(values_S[sample]))})"
