"""Where the chunks of a list of tensors lie: laid out and uploaded once for each list of sizes and dtypes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import numpy as np
import torch
from torch import Tensor

from .address_table import AddressTable
from .tiling import upload

# N tensors, M chunks

ALIGNMENT: Final = 16  # bytes: a vector load


@dataclass(frozen=True)
class Group:
    """Chunks that one launch reads: of one dtype, all aligned or not."""

    dtype: torch.dtype
    aligned: bool
    first: int
    count: int


@dataclass(frozen=True)
class Plan:
    """Where the chunks of tensors of given sizes lie; its tensors are on the device."""

    groups: tuple[Group, ...]
    num_chunks: int
    chunk_tensor: Tensor  # [M] int32
    chunk_start: Tensor  # [M] int64
    sizes: Tensor  # [N] int64
    first_chunk: Tensor  # [N] int32
    num_chunks_of: Tensor  # [N] int32
    table: AddressTable  # [2 + N]

    @property
    def chunks(self) -> tuple[Tensor, ...]:
        """What every chunk kernel is told about where to read."""
        return (self.table.device_table, self.chunk_tensor, self.chunk_start, self.sizes)


# What a plan depends on: size, dtype and alignment of each tensor.
Key = tuple[tuple[int, torch.dtype, bool], ...]


def _plan_of(key: Key, role: str, device: torch.device, stream: int, chunk: int) -> Plan:
    """Lay out chunks; apart per role and stream, so that no table is rewritten while another launch may read it."""
    sizes = np.array([size for size, _, _ in key], dtype=np.int64)
    num_chunks_of = -(-sizes // chunk)
    first_chunk = np.zeros(len(key), dtype=np.int64)
    groups: list[Group] = []
    order: list[int] = []
    place = 0
    for dtype, aligned in dict.fromkeys((dtype, aligned) for _, dtype, aligned in key):
        members = [i for i, (_, d, a) in enumerate(key) if (d, a) == (dtype, aligned)]
        first = place
        for index in members:
            first_chunk[index] = place
            place += int(num_chunks_of[index])
        order += members
        if place > first:
            groups.append(Group(dtype, aligned, first, place - first))
    chunk_tensor = np.repeat(np.array(order, dtype=np.int64), num_chunks_of[order])
    chunk_start = (np.arange(place) - first_chunk[chunk_tensor]) * chunk
    return Plan(
        groups=tuple(groups),
        num_chunks=place,
        chunk_tensor=upload(chunk_tensor, device).to(torch.int32),
        chunk_start=upload(chunk_start, device),
        sizes=upload(sizes, device),
        first_chunk=upload(first_chunk, device).to(torch.int32),
        num_chunks_of=upload(num_chunks_of, device).to(torch.int32),
        table=AddressTable(2 + len(key), device),
    )


# Kept. Of whole models few, which are large where a model is; of one tensor or two, as optimizers inside the backward
# and differences have them, one for each shape in a model.
_plan_for = lru_cache(maxsize=32)(_plan_of)
_plan_for_few = lru_cache(maxsize=512)(_plan_of)


def plan_for(elements: Sequence[Tensor], addresses: Sequence[int], role: str, chunk: int) -> Plan:
    """The plan of flat tensors that lie at these addresses, all on one device, for its current stream.

    Args:
        role: what they are measured as: each has tables of its own.
        chunk: elements of a program.
    """
    device = elements[0].device
    key = tuple((e.numel(), e.dtype, a % ALIGNMENT == 0) for e, a in zip(elements, addresses, strict=True))
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    return (_plan_for_few if len(key) <= 2 else _plan_for)(key, role, device, stream, chunk)
