"""Addresses on their way to the device: uploaded when they change, never waited for, never overwritten in flight."""

from __future__ import annotations

from collections import deque

import torch
from torch import Tensor

from .events import Event


class Slot:
    """Pinned memory that one upload is written to, and an event that says when the device has read it."""

    def __init__(self, size: int) -> None:
        self._pinned = torch.empty(size, dtype=torch.int64, device="cpu", pin_memory=True)
        self._read = Event()

    def is_free(self) -> bool:
        """True once the upload has run."""
        return self._read.query()

    def upload(self, values: Tensor, table: Tensor) -> None:
        """Queue a copy of values into table, behind everything on the current stream."""
        self._pinned.copy_(values)
        table.copy_(self._pinned, non_blocking=True)
        self._read.record(torch.cuda.current_stream(table.device))


class AddressTable:
    """A vector of integers on a device, rewritten behind the launches that read what was there before.

    A slot whose upload has not run yet is left alone: the next write takes the oldest one if it is free, or a new one.

    Args:
        size: number of integers.
        device: where they go.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        self.device_table = torch.zeros(size, dtype=torch.int64, device=device)
        self.slots: deque[Slot] = deque()
        self._last: list[int] | None = None

    def write(self, values: list[int]) -> bool:
        """Make the table hold these values; False if it does already."""
        if values == self._last:
            return False
        on_host = torch.tensor(values, dtype=torch.int64, device="cpu")
        if self.device_table.device.type == "cuda":
            self._upload(on_host)
        else:
            self.device_table.copy_(on_host)
        self._last = values  # after the upload, which may fail
        return True

    def _upload(self, values: Tensor) -> None:
        slot = self.slots.popleft() if self.slots and self.slots[0].is_free() else Slot(values.numel())
        slot.upload(values, self.device_table)
        self.slots.append(slot)
