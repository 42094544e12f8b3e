"""Statistics in plain torch, for devices without a backend of their own (MPS, XPU), and for CUDA without Triton.

One operation is one pass over a page of many tensors, without a host sync.

A line is LINE elements of one tensor; a page is PAGE_LINES lines, which one operation reads. A tensor's last line is
filled up with NaN, which is later subtracted from the count of NaN. Lines fold into tensors by gathers in a fixed
order, so that results are reproducible bit for bit. Index tables are uploaded once per list of sizes.

Accumulates in float64. MPS has no float64: there rows are float32, counts above 2**24 are rounded, and a sum of squares
that float32 cannot represent is NaN (unknown).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from typing import Final

import numpy as np
import torch
from torch import Tensor

from .columns import AS_LEFT, NUM_BINS, NUM_COLUMNS, RECEIVED_COLUMNS, SCALE_POWER, ZERO_BIN, Column
from .elements import Measurement, Scale, Tensors, add_implicit_zeros, current_stream, elements_of, upload, wide_dtype
from .float_bits import FLOAT32, FLOAT64, FloatBits, bin_of_code

# N tensors, C columns, B histogram bins, R lines

LINE: Final = 1024
PAGE_LINES: Final = 8192  # 8 million elements: a few temporary copies of a page are small compared to a model
_FOLD: Final = 64  # lines that one step of the fold merges into one

# The columns of a line, by the way in which they merge.
_FOLDS: Final = (
    ((*AS_LEFT, Column.NUM_ZERO, Column.NUM_DEAD, Column.GRAD_SUM), torch.sum, 0.0),
    ((Column.GRAD_MIN, Column.GRAD_ABS_MIN_NONZERO), torch.amin, torch.inf),
    ((Column.GRAD_MAX,), torch.amax, -torch.inf),
)
_LINES: Final = tuple(chain.from_iterable(columns for columns, _, _ in _FOLDS))


@dataclass(frozen=True)
class _Tiling:
    """The lines of tensors of given sizes."""

    num_lines: tuple[int, ...]  # [N] per tensor
    owner: Tensor  # [R] the index of the tensor that each line belongs to, on the device
    num_filling: Tensor  # [N] the number of NaN that fill up each tensor's last line, on the device
    steps: tuple[Tensor, ...]  # index tables of the fold, on the device; index R is a line of the identity


def measure(
    gradients: Tensors, parameters: Tensors | None, *, dead_threshold: float, inverse_scale: Scale, histogram: bool
) -> Measurement:
    """Measure each gradient: rows [N, C] in float64; with `histogram` also the histogram [N, B] in int64.

    Cost: 21 launches per page of 8 million elements, 9 for parameters, 12 for the histogram; the host does not wait
    unless a gradient is sparse.
    """
    elements, num_implicit_zeros = zip(*map(elements_of, gradients), strict=True)
    device = gradients[0].device
    scale = None if inverse_scale is None else inverse_scale.to(wide_dtype(device))
    rows_NC = _of_all(elements, lambda same, tiling: _rows(same, tiling, dead_threshold, scale))
    if parameters is not None:
        sum_sq_N, num_nan_N, num_inf_N = _sums_of_squares(parameters).unbind(1)
        rows_NC[:, Column.PARAM_SUM_SQ], rows_NC[:, Column.PARAM_NUM_NONFINITE] = sum_sq_N, num_nan_N + num_inf_N
    rows_NC[:, Column.NUM_ELEMENTS] = upload(np.array([e.numel() for e in elements], dtype=np.int64), device)
    histogram_NB = _of_all(elements, lambda same, tiling: _histogram(same, tiling, scale)) if histogram else None
    add_implicit_zeros(rows_NC, histogram_NB, num_implicit_zeros)
    return Measurement(rows_NC, histogram_NB)


def measure_received(gradients: Tensors, *, inverse_scale: Scale) -> Tensor:
    """Sum the squares of each gradient's finite elements, and count NaN and Inf: [N, 3]. A few launches per page."""
    sums_N3 = _sums_of_squares(gradients)
    if inverse_scale is not None:
        sums_N3[:, 0] *= inverse_scale.to(sums_N3.dtype).square()
    return sums_N3


def take_witnesses(gradients: Tensors, parameters: Tensors, num_witnesses: int) -> Tensor:
    """Copy elements at a fixed stride of each tensor, followed by zeros if it has fewer: [2, N, any] in float64.

    Args:
        gradients, parameters: N each, contiguous, with dtypes in NATIVE_DTYPES.
        num_witnesses: how many elements of each; at most MAX_WITNESSES.

    Cost: a view of each tensor, and a copy of all.
    """
    device, pieces = gradients[0].device, []
    for tensor in chain(gradients, parameters):
        if (size := tensor.numel()) >= num_witnesses:
            pieces.append(tensor.as_strided((num_witnesses,), (size // num_witnesses,)))
        else:
            pieces += (tensor.view(-1), tensor.new_zeros(num_witnesses - size))
    return torch.cat(pieces).to(wide_dtype(device)).view(2, len(gradients), num_witnesses)


def _of_all(elements: Sequence[Tensor], measure_alike: Callable[[list[Tensor], _Tiling], Tensor]) -> Tensor:
    """Apply a function to the tensors of each dtype, and return the results in the tensors' order: [N, any]."""
    by_dtype: dict[torch.dtype, list[int]] = {}
    device = elements[0].device
    for index, tensor in enumerate(elements):
        by_dtype.setdefault(tensor.dtype, []).append(index)
    parts = []
    for indices in by_dtype.values():
        alike = [elements[i] for i in indices]
        tiling = _tiling_of(tuple(e.numel() for e in alike), device, current_stream(device))
        parts.append(measure_alike(alike, tiling))
    if len(parts) == 1:
        return parts[0]
    order = list(chain.from_iterable(by_dtype.values()))
    return torch.cat(parts)[upload(np.argsort(order), device)]


def _rows(elements: list[Tensor], tiling: _Tiling, dead_threshold: float, scale: Tensor | None) -> Tensor:
    """Return the rows [N, C], without the numbers of elements and the parameter columns."""
    lines = _lines(elements, tiling, _LINES, dead_threshold, scale)
    if dead_threshold == 0:
        lines[_LINES.index(Column.NUM_DEAD)] = lines[_LINES.index(Column.NUM_ZERO)]
    rows_NC = lines.new_full((len(elements), NUM_COLUMNS), torch.nan)
    for columns, fold, identity in _FOLDS:
        begin = _LINES.index(columns[0])
        folded = _fold(lines[begin : begin + len(columns)], tiling, fold, identity)
        for place, column in enumerate(columns):
            rows_NC[:, column] = folded[:, place]
    rows_NC[:, Column.NUM_NAN] -= tiling.num_filling
    if rows_NC.dtype is not torch.float64:
        total_sq = rows_NC[:, Column.GRAD_SUM_SQ]
        vanished = (total_sq == 0) & rows_NC[:, Column.GRAD_ABS_MIN_NONZERO].isfinite()
        total_sq.masked_fill_(vanished | total_sq.isinf(), torch.nan)
    for received, left in zip(range(NUM_COLUMNS)[RECEIVED_COLUMNS], AS_LEFT, strict=True):  # a list would be uploaded
        rows_NC[:, received] = rows_NC[:, left]
    if scale is not None:
        for column, power in SCALE_POWER.items():
            rows_NC[:, column] *= scale**power
    return rows_NC


def _sums_of_squares(tensors: Tensors) -> Tensor:
    """Return the received columns of tensors: [N, 3]."""
    return _of_all([elements_of(tensor)[0] for tensor in tensors], _received)


def _received(elements: list[Tensor], tiling: _Tiling) -> Tensor:
    sums = _fold(_lines(elements, tiling, AS_LEFT), tiling, torch.sum, 0.0)
    sums[:, AS_LEFT.index(Column.NUM_NAN)] -= tiling.num_filling
    return sums


def _lines(
    elements: list[Tensor],
    tiling: _Tiling,
    columns: tuple[Column, ...],
    dead_threshold: float = 0.0,
    scale: Tensor | None = None,
) -> Tensor:
    """Return columns of every line, AS_LEFT or all of _LINES: [any, R]. Filling counts as NaN."""
    device = elements[0].device
    lines = torch.empty((len(columns), sum(tiling.num_lines)), dtype=wide_dtype(device), device=device)
    for page, here in _pages(elements, tiling):
        _measure_lines(page, dead_threshold, scale, dict(zip(columns, lines[:, here], strict=True)))
    lines[columns.index(Column.GRAD_SUM_SQ)].square_()
    return lines


def _measure_lines(page: Tensor, dead_threshold: float, scale: Tensor | None, of: Mapping[Column, Tensor]) -> None:
    """Write the columns of a page's lines, with the root of GRAD_SUM_SQ in its place: 8 launches, or 20."""
    wide, magnitude = of[Column.GRAD_SUM_SQ].dtype, page.abs()
    finite = page.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
    torch.linalg.vector_norm(finite, dim=1, dtype=wide, out=of[Column.GRAD_SUM_SQ])
    torch.sum(torch.ne(page, page), 1, dtype=wide, out=of[Column.NUM_NAN])
    torch.sum(torch.eq(magnitude, torch.inf), 1, dtype=wide, out=of[Column.NUM_INF])
    if Column.GRAD_SUM not in of:
        return
    is_zero = torch.eq(page, 0)
    torch.sum(is_zero, 1, dtype=wide, out=of[Column.NUM_ZERO])
    if dead_threshold != 0:
        true = magnitude.to(wide) if scale is None else magnitude.to(wide) * scale
        torch.sum(torch.le(true, dead_threshold), 1, dtype=wide, out=of[Column.NUM_DEAD])
    torch.sum(finite, 1, dtype=wide, out=of[Column.GRAD_SUM])
    of[Column.GRAD_MIN].copy_(page.nan_to_num(nan=torch.inf, posinf=torch.inf, neginf=torch.inf).amin(1))
    nonzero = magnitude.nan_to_num(nan=torch.inf, posinf=torch.inf).masked_fill_(is_zero, torch.inf)
    of[Column.GRAD_ABS_MIN_NONZERO].copy_(nonzero.amin(1))
    of[Column.GRAD_MAX].copy_(page.nan_to_num(nan=-torch.inf, posinf=-torch.inf, neginf=-torch.inf).amax(1))


def _histogram(elements: list[Tensor], tiling: _Tiling, scale: Tensor | None) -> Tensor:
    device = elements[0].device
    counts = torch.zeros(len(elements) * (NUM_BINS + 1), dtype=torch.int64, device=device)
    for page, here in _pages(elements, tiling):
        owner = tiling.owner[here, None]
        # Integer additions give the same result in any order.
        index = (owner * (NUM_BINS + 1) + _bins(page, scale)).flatten()
        counts.scatter_add_(0, index, torch.ones_like(index))
    return counts.view(len(elements), NUM_BINS + 1)[:, :NUM_BINS].contiguous()


def _bins(page: Tensor, scale: Tensor | None) -> Tensor:
    """Return the bin of every element; NUM_BINS for NaN and Inf."""
    values = page if page.dtype is torch.float64 else page.to(torch.float32)
    if scale is not None:
        values = values.to(scale.dtype) * scale
    layout = FLOAT64 if values.dtype is torch.float64 else FLOAT32
    bits = values.view(torch.int64 if layout is FLOAT64 else torch.int32)
    codes = (bits >> layout.code_shift) & (layout.num_codes - 1)
    table = _bin_table(layout, page.device, current_stream(page.device))
    return torch.where(values == 0, ZERO_BIN, table[codes.long()])


@lru_cache(maxsize=64)
def _bin_table(layout: FloatBits, device: torch.device, stream: int) -> Tensor:
    return upload(bin_of_code(layout, 0).copy(), device)


@lru_cache(maxsize=16)
def _tiling_of(sizes: tuple[int, ...], device: torch.device, stream: int) -> _Tiling:
    """Lay out tensors of these sizes, for use on the device's current stream."""
    num_lines = tuple(-(-size // LINE) for size in sizes)
    filling = [lines * LINE - size for lines, size in zip(num_lines, sizes, strict=True)]
    steps = []
    counts = np.array(num_lines)
    while (counts != 1).any():
        groups = np.maximum(-(-counts // _FOLD), 1)  # a tensor without elements gets one line of the identity
        first_line = np.repeat(np.cumsum(counts) - counts, groups)
        first_group = np.repeat(np.cumsum(groups) - groups, groups)
        within = (np.arange(groups.sum()) - first_group)[:, None] * _FOLD + np.arange(_FOLD)
        index = np.where(within < np.repeat(counts, groups)[:, None], first_line[:, None] + within, counts.sum())
        steps.append(upload(index, device))
        counts = groups
    owner = upload(np.repeat(np.arange(len(sizes)), num_lines), device)
    return _Tiling(num_lines, owner, upload(np.array(filling), device), tuple(steps))


def _pages(elements: Sequence[Tensor], tiling: _Tiling) -> Iterator[tuple[Tensor, slice]]:
    """Yield the pages of flat tensors of one dtype, in order: [up to PAGE_LINES, LINE], with their lines."""
    nan = torch.full((LINE,), torch.nan, dtype=elements[0].dtype, device=elements[0].device)
    pieces: list[Tensor] = []
    begin, room = 0, PAGE_LINES
    for tensor, num_lines in zip(elements, tiling.num_lines, strict=True):
        line = 0
        while line < num_lines:
            taken = min(room, num_lines - line)
            piece = tensor[line * LINE : (line + taken) * LINE]
            pieces.append(piece)
            if piece.numel() < taken * LINE:
                pieces.append(nan[: taken * LINE - piece.numel()])
            line += taken
            room -= taken
            if room == 0:
                yield _page(pieces), slice(begin, begin + PAGE_LINES)
                pieces, begin, room = [], begin + PAGE_LINES, PAGE_LINES
    if pieces:
        yield _page(pieces), slice(begin, None)


def _page(pieces: list[Tensor]) -> Tensor:
    return (pieces[0] if len(pieces) == 1 else torch.cat(pieces)).view(-1, LINE)


def _fold(lines: Tensor, tiling: _Tiling, merge: Callable[[Tensor, int], Tensor], identity: float) -> Tensor:
    """Merge the lines of each tensor by `merge`, which `identity` does not change: [any, R] becomes [N, any]."""
    lines = lines.T
    for index in tiling.steps:
        lines = merge(torch.cat([lines, lines.new_full((1, lines.shape[1]), identity)])[index], 1)
    return lines
