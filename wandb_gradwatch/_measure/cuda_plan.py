"""Divides a list of tensors into chunks; the layout is uploaded once per list of sizes and dtypes.

Addresses are uploaded when they change, without waiting, and never overwritten while a kernel may read them.
"""

from collections import deque
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import numpy as np
import torch
from torch import Tensor

from .elements import ITEMSIZES, NATIVE_DTYPES, upload
from .events import Event

# N tensors (gradients, then parameters), M chunks

ALIGNMENT: Final = 16  # bytes of a vector load
LOADS: Final = 4  # of each lane, in flight at once

NUM_PARTIALS: Final = 9  # of a chunk, in the order of cuda.py's _store_partials; the number of NaN is the first

CAREFUL_ONLY: Final = 4  # added to a chunk's dtype: only measure_carefully reads the chunk

_FLOAT64: Final = NATIVE_DTYPES[torch.float64]


class AddressTable:
    """A vector of integers on a device; a write is queued behind the launches that read the old values."""

    def __init__(self, size: int, device: torch.device) -> None:
        self.device_table = torch.zeros(size, dtype=torch.int64, device=device)
        # Pinned memory, and events that are complete when the device has read it; the oldest upload is first.
        self._uploads: deque[tuple[Tensor, Event]] = deque()
        self.last: list[int] = []  # what it holds, if anything was written

    def write(self, values: list[int]) -> bool:
        """Make the table hold these values; return False if it holds them already."""
        if values == self.last:
            return False
        on_host = torch.tensor(values, dtype=torch.int64, device="cpu")
        if self.device_table.device.type == "cuda":
            self._upload(on_host)
        else:
            self.device_table.copy_(on_host)
        self.last = values  # only after the upload, which may raise
        return True

    def _upload(self, values: Tensor) -> None:
        if self._uploads and self._uploads[0][1].query():
            pinned, read = self._uploads.popleft()
        else:
            pinned, read = torch.empty(len(values), dtype=torch.int64, device="cpu", pin_memory=True), Event()
        pinned.copy_(values)
        self.device_table.copy_(pinned, non_blocking=True)
        read.record(torch.cuda.current_stream(self.device_table.device))
        self._uploads.append((pinned, read))


@dataclass(frozen=True)
class Group:
    """Chunks of one launch: all of gradients or all of parameters, of one dtype, all aligned or all not."""

    are_gradients: bool
    code: int
    aligned: bool
    first: int
    count: int


@dataclass(frozen=True)
class Plan:
    """The chunks of tensors of given sizes; its tensors are on the device."""

    groups: tuple[Group, ...]
    num_gradients: int
    num_tensors: int
    num_chunks: int
    aligned: tuple[bool, ...]  # [N]
    chunks: Tensor  # [4, M] int64: tensor, first byte, elements, dtype
    tensors: Tensor  # [4, N] int64: elements, first chunk, number of chunks, dtype
    one: Tensor  # 0-dim float64
    table: AddressTable  # [2 + N]
    partials: Tensor  # [NUM_PARTIALS, M] float64: written and read by the kernels of one sample after the other


def _plan_of(
    sizes_N: tuple[int, ...],
    dtypes_N: tuple[torch.dtype, ...],
    aligned_N: tuple[bool, ...],
    num_gradients: int,
    lanes: int,
    chunk: int,
    device: torch.device,
    stream: int,
) -> Plan:
    """Lay out the chunks of flat tensors, gradients first: those in whole rounds for measure_chunks, then the ends.

    There is a plan per stream, so that no table is rewritten or read while another stream still reads or writes it.
    """
    codes_N = [NATIVE_DTYPES[dtype] for dtype in dtypes_N]
    sizes, codes = np.array(sizes_N, dtype=np.int64), np.array(codes_N)
    itemsizes = ITEMSIZES[codes]
    step = lanes * LOADS * ALIGNMENT // itemsizes  # elements of a round
    careful = codes == _FLOAT64
    longest = np.where(careful, chunk // 4, chunk)  # measure_carefully takes longer per element
    whole = np.where(careful, sizes, sizes // step * step)
    num_whole = -(-whole // longest)
    num_chunks_of = num_whole + (whole < sizes)
    # One launch reads consecutive chunks.
    kinds = list(zip((np.arange(len(sizes)) < num_gradients).tolist(), codes_N, aligned_N, strict=True))
    place_of = {kind: place for place, kind in enumerate(dict.fromkeys(kinds))}
    places = np.array([place_of[kind] for kind in kinds])
    order = np.argsort(places, kind="stable")
    ends = np.cumsum(num_chunks_of[order])
    first_chunk = np.empty_like(sizes)
    first_chunk[order] = ends - num_chunks_of[order]
    tensor = np.repeat(order, num_chunks_of[order])
    number = np.arange(len(tensor)) - first_chunk[tensor]
    is_end = number == num_whole[tensor]
    start = np.where(is_end, whole[tensor], number * longest[tensor])
    length = np.where(is_end, sizes[tensor] - start, np.minimum(whole[tensor] - start, longest[tensor]))
    groups = []
    for kind, place in place_of.items():
        members = np.flatnonzero(places == place)
        if kind[1] != _FLOAT64 and num_whole[members].any():
            groups.append(Group(*kind, int(first_chunk[members[0]]), int(num_chunks_of[members].sum())))
    dtype = codes[tensor] + CAREFUL_ONLY * (careful[tensor] | is_end)
    return Plan(
        groups=tuple(groups),
        num_gradients=num_gradients,
        num_tensors=len(sizes),
        num_chunks=len(tensor),
        aligned=aligned_N,
        chunks=upload(np.stack([tensor, start * itemsizes[tensor], length, dtype]), device),
        tensors=upload(np.stack([sizes, first_chunk, num_chunks_of, codes]), device),
        one=torch.ones((), dtype=torch.float64, device=device),
        table=AddressTable(2 + len(sizes), device),
        partials=torch.empty((NUM_PARTIALS, len(tensor)), dtype=torch.float64, device=device),
    )


# Plans are cached: few for whole models, as they are large; more for one or two tensors, one for each shape in a model,
# because optimizers that step inside the backward, and differences, are measured in such lists.
plan_for = lru_cache(maxsize=32)(_plan_of)
plan_for_few = lru_cache(maxsize=512)(_plan_of)
