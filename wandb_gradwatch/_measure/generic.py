"""Statistics in plain torch on any device: passes over pages of lines (tiling.py), no host sync.

Accumulates in float64. MPS has none: there the rows are float32, counts above 2**24 are rounded, and a sum of squares
that float32 cannot hold is NaN, which says "could not be seen".
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from .columns import AS_LEFT, NUM_BINS, NUM_COLUMNS, RECEIVED_COLUMNS, SCALE_POWER, ZERO_BIN, Column
from .elements import Measurement, Scale, Tensors, add_implicit_zeros, elements_of, upload, wide_dtype
from .float_bits import FLOAT32, FLOAT64, bin_of_code
from .tiling import TilingPlan, current_stream, fold, pages, plan_for

# N tensors, C columns, B histogram bins, R lines


def measure(
    gradients: Tensors, parameters: Tensors | None, *, dead_threshold: float, inverse_scale: Scale, histogram: bool
) -> Measurement:
    """Measure each gradient: rows [N, C] in float64 and, if asked for, the histogram [N, B] in int64.

    Cost: 19 launches per page of 8 million elements, 8 for parameters, 12 for the histogram; the host waits for nothing
    unless a gradient is sparse.
    """
    pairs = [elements_of(gradient) for gradient in gradients]
    elements = [pair[0] for pair in pairs]
    device = gradients[0].device
    rows, histograms, order = [], [], []
    for indices in _by_dtype(elements):
        same = [elements[i] for i in indices]
        plan = plan_for(tuple(e.numel() for e in same), device)
        rows.append(_rows(same, plan, dead_threshold, inverse_scale))
        if histogram:
            histograms.append(_histogram(same, plan, inverse_scale))
        order += indices
    rows_NC = _reordered(rows, order)
    if parameters is not None:
        sums_N3 = _sums_of_squares([elements_of(p)[0] for p in parameters])
        rows_NC[:, Column.PARAM_SUM_SQ], rows_NC[:, Column.PARAM_NUM_NONFINITE] = sums_N3[:, 0], sums_N3[:, 1:].sum(1)
    rows_NC[:, Column.NUM_ELEMENTS] = _uploaded(tuple(e.numel() for e in elements), device)
    histogram_NB = _reordered(histograms, order) if histogram else None
    add_implicit_zeros(rows_NC, histogram_NB, [pair[1] for pair in pairs])
    return Measurement(rows_NC, histogram_NB)


def measure_received(gradients: Tensors, *, inverse_scale: Scale) -> Tensor:
    """Sum the squares of each gradient's finite elements, and count NaN and Inf: [N, 3]. A few launches per page."""
    sums_N3 = _sums_of_squares([elements_of(gradient)[0] for gradient in gradients])
    if inverse_scale is not None:
        sums_N3[:, 0] *= inverse_scale.to(sums_N3.dtype).square()
    return sums_N3


def _by_dtype(elements: Sequence[Tensor]) -> list[list[int]]:
    by_dtype: dict[torch.dtype, list[int]] = {}
    for index, tensor in enumerate(elements):
        by_dtype.setdefault(tensor.dtype, []).append(index)
    return list(by_dtype.values())


def _reordered(parts: list[Tensor], order: list[int]) -> Tensor:
    """Concatenate parts whose rows belong at the places in `order`."""
    if len(parts) == 1:
        return parts[0]
    place = sorted(range(len(order)), key=order.__getitem__)
    return torch.cat(parts)[_uploaded(tuple(place), parts[0].device)]


def _uploaded(values: tuple[int, ...], device: torch.device) -> Tensor:
    return upload(np.array(values, dtype=np.int64), device)


def _rows(elements: list[Tensor], plan: TilingPlan, dead_threshold: float, inverse_scale: Tensor | None) -> Tensor:
    wide = wide_dtype(elements[0].device)
    scale = None if inverse_scale is None else inverse_scale.to(wide)
    lines_9R = torch.empty((9, sum(plan.num_lines)), dtype=wide, device=elements[0].device)
    for page, here in pages(elements, plan):
        _measure_lines(page, dead_threshold, scale, lines_9R[:, here])
    if dead_threshold == 0:
        lines_9R[3] = lines_9R[2]
    lines_9R[5].square_()
    sums = fold(lines_9R[:6].T, plan, lambda t: t.sum(1), 0.0)
    minima = fold(lines_9R[6:8].T, plan, lambda t: t.amin(1), torch.inf)
    maxima = fold(lines_9R[8:].T, plan, lambda t: t.amax(1), -torch.inf)
    rows_NC = sums.new_full((len(elements), NUM_COLUMNS), torch.nan)
    rows_NC[:, Column.NUM_NAN : Column.GRAD_SUM_SQ + 1] = sums
    rows_NC[:, Column.NUM_NAN] -= plan.num_filling
    rows_NC[:, Column.GRAD_MIN], rows_NC[:, Column.GRAD_ABS_MIN_NONZERO] = minima.unbind(1)
    rows_NC[:, Column.GRAD_MAX] = maxima[:, 0]
    if wide is not torch.float64:
        _hide_unrepresentable(rows_NC)
    if scale is not None:
        for column, power in SCALE_POWER.items():
            rows_NC[:, column] *= scale**power
    for received, left in zip(range(NUM_COLUMNS)[RECEIVED_COLUMNS], AS_LEFT, strict=True):  # a list would be uploaded
        rows_NC[:, received] = rows_NC[:, left]
    return rows_NC


def _measure_lines(page: Tensor, dead_threshold: float, scale: Tensor | None, lines_9R: Tensor) -> None:
    """Write the columns NUM_NAN to GRAD_SUM, the norm, and the extremes of a page's lines: 18 launches."""
    wide, magnitude = lines_9R.dtype, page.abs()
    flags = torch.empty((3 + (dead_threshold != 0), *page.shape), dtype=torch.bool, device=page.device)
    torch.ne(page, page, out=flags[0])
    torch.eq(magnitude, torch.inf, out=flags[1])
    torch.eq(page, 0, out=flags[2])
    if dead_threshold != 0:
        true = magnitude.to(wide) if scale is None else magnitude.to(wide) * scale
        torch.le(true, dead_threshold, out=flags[3])
    torch.sum(flags, 2, dtype=wide, out=lines_9R[: len(flags)])
    finite = page.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
    torch.sum(finite, 1, dtype=wide, out=lines_9R[4])
    torch.linalg.vector_norm(finite, dim=1, dtype=wide, out=lines_9R[5])
    lines_9R[6] = page.nan_to_num(nan=torch.inf, posinf=torch.inf, neginf=torch.inf).amin(1)
    nonzero = magnitude.nan_to_num(nan=torch.inf, posinf=torch.inf).masked_fill_(flags[2], torch.inf)
    lines_9R[7] = nonzero.amin(1)
    lines_9R[8] = page.nan_to_num(nan=-torch.inf, posinf=-torch.inf, neginf=-torch.inf).amax(1)


def _hide_unrepresentable(rows_NC: Tensor) -> None:
    total_sq = rows_NC[:, Column.GRAD_SUM_SQ]
    vanished = (total_sq == 0) & rows_NC[:, Column.GRAD_ABS_MIN_NONZERO].isfinite()
    total_sq.masked_fill_(vanished | total_sq.isinf(), torch.nan)


def _sums_of_squares(elements: list[Tensor]) -> Tensor:
    """Sum of squares of the finite elements, number of NaN and number of Inf: [N, 3]."""
    parts, order = [], []
    for indices in _by_dtype(elements):
        same = [elements[i] for i in indices]
        plan = plan_for(tuple(e.numel() for e in same), same[0].device)
        wide = wide_dtype(same[0].device)
        lines_3R = torch.empty((3, sum(plan.num_lines)), dtype=wide, device=same[0].device)
        for page, here in pages(same, plan):
            _square_lines(page, lines_3R[:, here])
        lines_3R[0].square_()
        sums = fold(lines_3R.T, plan, lambda t: t.sum(1), 0.0)
        sums[:, 1] -= plan.num_filling
        parts.append(sums)
        order += indices
    return _reordered(parts, order)


def _square_lines(page: Tensor, lines_3R: Tensor) -> None:
    """Write the norm of a page's lines, and their numbers of NaN and Inf: 7 launches."""
    finite = page.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
    torch.linalg.vector_norm(finite, dim=1, dtype=lines_3R.dtype, out=lines_3R[0])
    flags = torch.empty((2, *page.shape), dtype=torch.bool, device=page.device)
    torch.ne(page, page, out=flags[0])
    torch.eq(page.abs(), torch.inf, out=flags[1])
    torch.sum(flags, 2, dtype=lines_3R.dtype, out=lines_3R[1:])


def _histogram(elements: list[Tensor], plan: TilingPlan, inverse_scale: Tensor | None) -> Tensor:
    device = elements[0].device
    counts = torch.zeros(len(elements) * (NUM_BINS + 1), dtype=torch.int64, device=device)
    for page, here in pages(elements, plan):
        owner = plan.owner[here, None]
        # Integer additions: the order in which a device does them does not matter.
        index = (owner * (NUM_BINS + 1) + _bins(page, inverse_scale)).flatten()
        counts.scatter_add_(0, index, torch.ones_like(index))
    return counts.view(len(elements), NUM_BINS + 1)[:, :NUM_BINS].contiguous()


def _bins(page: Tensor, inverse_scale: Tensor | None) -> Tensor:
    """The bin of every element, NUM_BINS for NaN and Inf."""
    wide = wide_dtype(page.device)
    values = page if page.dtype is torch.float64 else page.to(torch.float32)
    if inverse_scale is not None:
        values = values.to(wide) * inverse_scale.to(wide)
    layout = FLOAT64 if values.dtype is torch.float64 else FLOAT32
    bits = values.view(torch.int64 if layout is FLOAT64 else torch.int32)
    codes = (bits >> layout.code_shift) & (layout.num_codes - 1)
    return torch.where(
        values == 0, ZERO_BIN, _bin_table(layout is FLOAT64, page.device, current_stream(page.device))[codes.long()]
    )


@lru_cache(maxsize=64)
def _bin_table(double: bool, device: torch.device, stream: int) -> Tensor:
    return upload(bin_of_code(FLOAT64 if double else FLOAT32, 0).copy(), device)
