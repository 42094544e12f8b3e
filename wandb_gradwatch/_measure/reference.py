"""The specification: the columns as the schema defines them, one tensor at a time, in float64, on the host. For tests.

It favours clarity over speed. The other backends must equal it: counts and histograms exactly, the rest up to rounding.
"""

from itertools import repeat

import numpy as np
import torch
from torch import Tensor

from .columns import NUM_BINS, PARAMETER_COLUMNS, RECEIVED_COLUMNS, Elements, FloatArray, IntArray, bins_of, define
from .elements import Measurement, Scale, Tensors, add_implicit_zeros, elements_of, wide_dtype

# N tensors, C columns, B histogram bins, E elements of one tensor


@np.errstate(over="ignore", invalid="ignore")
def measure(
    gradients: Tensors, parameters: Tensors | None, *, dead_threshold: float, inverse_scale: Scale, histogram: bool
) -> Measurement:
    """Measure each gradient: rows [N, C] in float64; with `histogram` also the histogram [N, B] in int64."""
    device = gradients[0].device
    elements, num_implicit_zeros = zip(*map(elements_of, gradients), strict=True)
    values = [_true_values(each, inverse_scale) for each in elements]
    rows_NC = np.stack([define(_elements(each, dead_threshold), "gradient", "received") for each in values])
    for row_C, parameter in zip(rows_NC, parameters or repeat(None)):  # noqa: B905  # as many, or none
        if parameter is not None:
            of_parameter = define(_elements(_true_values(elements_of(parameter)[0], None)), "parameter")
            row_C[PARAMETER_COLUMNS] = of_parameter[PARAMETER_COLUMNS]
    rows = torch.from_numpy(rows_NC).to(device, wide_dtype(device))
    counts = torch.from_numpy(np.stack(list(map(_histogram, values)))).to(device) if histogram else None
    add_implicit_zeros(rows, counts, num_implicit_zeros)
    return Measurement(rows, counts)


def measure_received(gradients: Tensors, *, inverse_scale: Scale) -> Tensor:
    """Sum the squares of each gradient's finite elements, and count NaN and Inf: [N, 3]."""
    rows = measure(gradients, None, dead_threshold=0.0, inverse_scale=inverse_scale, histogram=False).rows
    return rows[:, RECEIVED_COLUMNS]


def _true_values(elements: Tensor, inverse_scale: Scale) -> FloatArray:
    """Return elements, multiplied by the scale: [E]."""
    values: FloatArray = elements.cpu().double().numpy()
    return values * (1.0 if inverse_scale is None else float(inverse_scale))


def _elements(values_E: FloatArray, dead_threshold: float = 0.0) -> Elements:
    return Elements(values_E, values_E[np.isfinite(values_E)], dead_threshold)


def _histogram(values_E: FloatArray) -> IntArray:
    """Count the finite elements in the fixed bins: [B]."""
    return np.bincount(bins_of(values_E[np.isfinite(values_E)]), minlength=NUM_BINS)
