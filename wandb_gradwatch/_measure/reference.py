"""The specification: every column and the histogram in plain torch and float64, one tensor at a time.

It favours clarity over speed. The other backends must equal it: counts and histograms exactly, the rest up to rounding.
"""

import torch
from torch import Tensor

from .columns import AS_LEFT, NUM_BINS, NUM_COLUMNS, RECEIVED_COLUMNS, ZERO_BIN, Column, magnitude_edges
from .elements import Measurement, Scale, Tensors, elements_of, wide_dtype

# N tensors, C columns, B histogram bins, E elements of one tensor


def measure(
    gradients: Tensors, parameters: Tensors | None, *, dead_threshold: float, inverse_scale: Scale, histogram: bool
) -> Measurement:
    """Measure each gradient: rows [N, C] in float64; with `histogram` also the histogram [N, B] in int64."""
    device = gradients[0].device
    rows_NC = torch.full((len(gradients), NUM_COLUMNS), torch.nan, dtype=wide_dtype(device), device=device)
    histogram_NB = torch.zeros((len(gradients), NUM_BINS), dtype=torch.int64, device=device) if histogram else None
    for index, gradient in enumerate(gradients):
        values, num_zero = _true_values(gradient, inverse_scale)
        _gradient_columns(values, num_zero, dead_threshold, rows_NC[index])
        if parameters is not None:
            _parameter_columns(parameters[index], rows_NC[index])
        if histogram_NB is not None:
            histogram_NB[index] = _histogram(values, num_zero)
    return Measurement(rows_NC, histogram_NB)


def measure_received(gradients: Tensors, *, inverse_scale: Scale) -> Tensor:
    """Sum the squares of each gradient's finite elements, and count NaN and Inf: [N, 3]."""
    values = [_true_values(gradient, inverse_scale)[0] for gradient in gradients]
    sums = [(v[torch.isfinite(v)].square().sum(), v.isnan().sum(), v.isinf().sum()) for v in values]
    return torch.stack([torch.stack([value.to(wide_dtype(value.device)) for value in three]) for three in sums])


def _true_values(gradient: Tensor, inverse_scale: Tensor | None) -> tuple[Tensor, int]:
    elements, num_zero = elements_of(gradient)
    values = elements.to(wide_dtype(elements.device))
    return (values if inverse_scale is None else values * inverse_scale.to(values.dtype)), num_zero


def _gradient_columns(values: Tensor, num_implicit_zeros: int, dead_threshold: float, row_C: Tensor) -> None:
    finite = values[torch.isfinite(values)]
    with_zero = torch.cat([finite, finite.new_zeros(min(num_implicit_zeros, 1))])
    nonzero = finite.abs()[finite != 0]
    row_C[Column.NUM_ELEMENTS] = values.numel() + num_implicit_zeros
    row_C[Column.NUM_NAN] = torch.isnan(values).sum()
    row_C[Column.NUM_INF] = torch.isinf(values).sum()
    row_C[Column.NUM_ZERO] = (finite == 0).sum() + num_implicit_zeros
    row_C[Column.NUM_DEAD] = (finite.abs() <= dead_threshold).sum() + num_implicit_zeros
    row_C[Column.GRAD_SUM] = finite.sum()
    row_C[Column.GRAD_SUM_SQ] = finite.square().sum()
    row_C[RECEIVED_COLUMNS] = row_C[list(AS_LEFT)]
    row_C[Column.GRAD_MIN] = with_zero.min() if with_zero.numel() else torch.inf
    row_C[Column.GRAD_MAX] = with_zero.max() if with_zero.numel() else -torch.inf
    row_C[Column.GRAD_ABS_MIN_NONZERO] = nonzero.min() if nonzero.numel() else torch.inf


def _parameter_columns(parameter: Tensor, row_C: Tensor) -> None:
    values = elements_of(parameter)[0]
    finite = values[torch.isfinite(values)].to(row_C.dtype)
    row_C[Column.PARAM_SUM_SQ] = finite.square().sum()
    row_C[Column.PARAM_NUM_NONFINITE] = values.numel() - finite.numel()


def _histogram(values: Tensor, num_implicit_zeros: int) -> Tensor:
    finite = values[torch.isfinite(values)]
    edges = torch.tensor(magnitude_edges()[1:-1], dtype=values.dtype, device=values.device)
    magnitude_bin = torch.bucketize(finite.abs(), edges, right=True)
    signed_bin = torch.where(finite > 0, ZERO_BIN + 1 + magnitude_bin, ZERO_BIN - 1 - magnitude_bin)
    counts_B = torch.bincount(torch.where(finite == 0, ZERO_BIN, signed_bin), minlength=NUM_BINS)
    counts_B[ZERO_BIN] += num_implicit_zeros
    return counts_B
