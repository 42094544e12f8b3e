"""Tiles many tensors into lines of equal length, so that one operation of plain torch is one pass over all tensors.

A line is LINE elements of one tensor; a page is PAGE_LINES lines, which one operation reads. A tensor's last line is
filled up with NaN, which is later subtracted from the count of NaN. Lines fold into tensors by gathers in a fixed
order, so that results are reproducible bit for bit. Index tables are uploaded once per list of sizes.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import numpy as np
import torch
from torch import Tensor

from .elements import upload

# N tensors, R lines

LINE: Final = 1024
PAGE_LINES: Final = 8192  # 8 million elements: a few temporary copies of a page are small compared to a model
_FOLD: Final = 64  # lines that one step of the fold merges into one


@dataclass(frozen=True)
class TilingPlan:
    """The lines of tensors of given sizes."""

    num_lines: tuple[int, ...]  # [N] per tensor
    owner: Tensor  # [R] the index of the tensor that each line belongs to, on the device
    num_filling: Tensor  # [N] the number of NaN that fill up each tensor's last line, on the device
    steps: tuple[Tensor, ...]  # index tables of the fold, on the device; index R is a line of the identity


def current_stream(device: torch.device) -> int:
    """Return a cache key for tables on a device: a stream must not read what another stream has not uploaded yet."""
    return int(torch.cuda.current_stream(device).cuda_stream) if device.type == "cuda" else 0


@lru_cache(maxsize=16)
def plan_for(sizes: tuple[int, ...], device: torch.device, stream: int) -> TilingPlan:
    """Lay out tensors of these sizes, for use on the device's current stream, given by `current_stream`."""
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
    return TilingPlan(num_lines, owner, upload(np.array(filling), device), tuple(steps))


def pages(elements: Sequence[Tensor], plan: TilingPlan) -> Iterator[tuple[Tensor, slice]]:
    """Yield the pages of flat tensors of one dtype, in order: [up to PAGE_LINES, LINE], with their lines."""
    nan = torch.full((LINE,), torch.nan, dtype=elements[0].dtype, device=elements[0].device)
    pieces: list[Tensor] = []
    begin, room = 0, PAGE_LINES
    for tensor, num_lines in zip(elements, plan.num_lines, strict=True):
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


def fold(lines: Tensor, plan: TilingPlan, merge: Callable[[Tensor], Tensor], identity: float) -> Tensor:
    """Merge the lines of each tensor: [R, columns] becomes [N, columns].

    Args:
        merge: merges [groups, lines, columns] over its dimension 1.
        identity: the value that does not change others in a merge.
    """
    for index in plan.steps:
        lines = merge(torch.cat([lines, lines.new_full((1, lines.shape[1]), identity)])[index])
    return lines
