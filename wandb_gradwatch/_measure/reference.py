"""The specification: every column and the histogram in plain numpy and float64, one tensor at a time, on the host.

It favours clarity over speed. The other backends must equal it: counts and histograms exactly, the rest up to rounding.
"""

import numpy as np
import torch
from torch import Tensor

from .columns import AS_LEFT, IDENTITY_C, NUM_BINS, RECEIVED_COLUMNS, ZERO_BIN, Column, FloatArray, IntArray, bins_of
from .elements import Measurement, Scale, Tensors, elements_of, wide_dtype

# N tensors, C columns, B histogram bins, E elements of one tensor


@np.errstate(over="ignore", invalid="ignore")
def measure(
    gradients: Tensors, parameters: Tensors | None, *, dead_threshold: float, inverse_scale: Scale, histogram: bool
) -> Measurement:
    """Measure each gradient: rows [N, C] in float64; with `histogram` also the histogram [N, B] in int64."""
    device = gradients[0].device
    all_E = [_true_values(gradient, inverse_scale) for gradient in gradients]
    rows_NC = np.stack([_row(values_E, num_zero, dead_threshold) for values_E, num_zero in all_E])
    rows_NC[:, Column.PARAM_SUM_SQ :] = np.nan
    for row_C, parameter in zip(rows_NC, parameters or (), strict=parameters is not None):
        values_E, _ = _true_values(parameter, None)
        finite = values_E[np.isfinite(values_E)]
        row_C[Column.PARAM_SUM_SQ] = np.square(finite).sum()
        row_C[Column.PARAM_NUM_NONFINITE] = values_E.size - finite.size
    counts = torch.from_numpy(np.stack([_histogram(*one) for one in all_E])).to(device) if histogram else None
    return Measurement(torch.from_numpy(rows_NC).to(device, wide_dtype(device)), counts)


def measure_received(gradients: Tensors, *, inverse_scale: Scale) -> Tensor:
    """Sum the squares of each gradient's finite elements, and count NaN and Inf: [N, 3]."""
    rows = measure(gradients, None, dead_threshold=0.0, inverse_scale=inverse_scale, histogram=False).rows
    return rows[:, RECEIVED_COLUMNS]


def _true_values(tensor: Tensor, inverse_scale: Scale) -> tuple[FloatArray, int]:
    """Return a tensor's elements, multiplied by the scale, and the number of its implicit zeros."""
    elements, num_zero = elements_of(tensor)
    return elements.cpu().double().numpy() * (1.0 if inverse_scale is None else float(inverse_scale)), num_zero


def _row(values_E: FloatArray, num_implicit_zeros: int, dead_threshold: float) -> FloatArray:
    row_C = IDENTITY_C.copy()
    finite = values_E[np.isfinite(values_E)]
    with_zero = np.append(finite, np.zeros(min(num_implicit_zeros, 1)))
    row_C[Column.NUM_ELEMENTS] = values_E.size + num_implicit_zeros
    row_C[Column.NUM_NAN] = np.isnan(values_E).sum()
    row_C[Column.NUM_INF] = np.isinf(values_E).sum()
    row_C[Column.NUM_ZERO] = (finite == 0).sum() + num_implicit_zeros
    row_C[Column.NUM_DEAD] = (abs(finite) <= dead_threshold).sum() + num_implicit_zeros
    row_C[Column.GRAD_SUM] = finite.sum()
    row_C[Column.GRAD_SUM_SQ] = np.square(finite).sum()
    row_C[RECEIVED_COLUMNS] = row_C[list(AS_LEFT)]
    row_C[Column.GRAD_MIN] = with_zero.min(initial=np.inf)
    row_C[Column.GRAD_MAX] = with_zero.max(initial=-np.inf)
    row_C[Column.GRAD_ABS_MIN_NONZERO] = abs(finite[finite != 0]).min(initial=np.inf)
    return row_C


def _histogram(values_E: FloatArray, num_implicit_zeros: int) -> IntArray:
    counts_B = np.bincount(bins_of(values_E[np.isfinite(values_E)]), minlength=NUM_BINS)
    counts_B[ZERO_BIN] += num_implicit_zeros
    return counts_B
