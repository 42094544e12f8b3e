"""The memory of a window on one device: the open sample's rows and the window's histogram."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from .._measure.columns import NUM_BINS, NUM_COLUMNS
from .._measure.elements import upload, wide_dtype
from .transfers import PinnedPool
from .witnesses import DeviceWitnesses, HostWitnesses, Witnesses

# P watched parameters, C columns, B histogram bins
# L measurements of the gradients in one sample

# The place of a measurement: as it counts, before another change of the gradients, and as the optimizer received them.
MEASURED, EARLIER, RECEIVED = range(3)

_MOST_SPARE: Final = 4096  # rows, half a megabyte


class DeviceBuffer:
    """The open sample's rows and the window's histogram on one device.

    `rows` [L, P + 1, C] is all that a sample sends to the host, in a single copy: one measurement, and three as soon as
    a gradient was seen to change. In the second and the third, gradients that did not change are missing. The last row
    of the first holds the values of the whole sample.
    """

    def __init__(self, device: torch.device, num_names: int, pinned_pool: PinnedPool) -> None:
        self.device = device
        self._spare: list[Tensor] = []  # missing rows for the next samples
        self.rows = self._missing_rows(num_names)
        self.histogram: Tensor | None = None  # of the window, int64 [P, B]; None: none was taken
        self.sample_histogram: Tensor | None = None  # of the open sample; added to the window's at the commit
        self._slots: dict[tuple[int, ...], Tensor] = {}
        self.witnesses: Witnesses = (
            HostWitnesses(num_names) if device.type == "cpu" else DeviceWitnesses(num_names, self.index)
        )
        self._pinned_pool = pinned_pool
        self._stream: Any = torch.cuda.current_stream(device) if device.type == "cuda" else None  # wrote last
        pinned_pool.prepare(self.rows)

    def follow(self) -> DeviceBuffer:
        """Return this buffer for use on the current stream, which first waits for the stream that wrote last."""
        if self._stream is None:
            return self
        stream = torch.cuda.current_stream(self.device)
        if stream != self._stream:
            stream.wait_stream(self._stream)
            tensors = (self.rows, self.histogram, self.sample_histogram)
            others = (*self._slots.values(), *self.witnesses.tensors(), *self._spare[:1])  # those share their memory
            for tensor in (*tensors, *others):
                if tensor is not None:
                    tensor.record_stream(stream)
            self._stream = stream
        return self

    def grow(self, num_names: int) -> None:
        """Make room for new names, whose rows are missing so far."""
        missing, self._slots, self._spare = (0, 0, 0, num_names + 1 - self.rows.shape[1]), {}, []
        self.witnesses.grow(num_names)
        self.histogram, self.sample_histogram = (
            None if counts is None else pad(counts, missing) for counts in (self.histogram, self.sample_histogram)
        )
        names, sample = self.rows[:, :-1], self.rows[:, -1:]
        self.rows = torch.cat([pad(names, missing, value=torch.nan), sample], dim=1)

    def put(self, slots: Sequence[int], rows: Tensor) -> Tensor | slice:
        """Write rows [N, C] of the open sample, replacing earlier ones. Returns the slots as an index."""
        index = self.index(tuple(slots))
        if self.device.type == "cpu" and isinstance(index, slice):
            self.rows.numpy()[MEASURED, index] = rows.numpy()  # takes a sixth of torch's time
        else:
            self.rows[MEASURED, index] = rows
        return index

    def put_beside(self, measurement: int, index: Tensor | slice, rows: Tensor) -> None:
        """Write rows [N, C] of another measurement, EARLIER or RECEIVED, of gradients that have changed."""
        if len(self.rows) == 1:
            self.rows = torch.cat([self.rows, self.rows.new_full((2, *self.rows.shape[1:]), torch.nan)])
        self.rows[measurement, index] = rows

    def drop(self, index: Tensor | slice, which: Tensor) -> None:
        """Mark some of these rows [N] as missing: those where `which` [N] is True."""
        self.rows[MEASURED, index] = torch.where(which[:, None], torch.nan, self.rows[MEASURED, index])
        if self.sample_histogram is not None:
            self.sample_histogram[index] *= ~which[:, None]

    def forget_sample(self) -> None:
        """Open the next sample, with missing rows in new memory: a transfer may still use the old."""
        self.rows = self._missing_rows(self.rows.shape[1] - 1)
        self.sample_histogram = None
        self.witnesses.forget_sample()

    def _missing_rows(self, num_names: int) -> Tensor:
        """Return rows [1, P + 1, C] in memory that was not used before, allocated for several samples at once."""
        if not self._spare:
            shape = (max(min(_MOST_SPARE // (num_names + 1), 16), 1), 1, num_names + 1, NUM_COLUMNS)
            self._spare += torch.full(shape, torch.nan, dtype=wide_dtype(self.device), device=self.device).unbind()
        return self._spare.pop()

    def open_histogram(self) -> Tensor:
        """The open sample's histogram: [P, B]."""
        if self.sample_histogram is None:
            num_names = self.rows.shape[1] - 1
            self.sample_histogram = torch.zeros((num_names, NUM_BINS), dtype=torch.int64, device=self.device)
            self._pinned_pool.prepare(self.sample_histogram)
        return self.sample_histogram

    def add_sample_histogram(self) -> None:
        """Add the open sample's histogram to the window's, when the sample is complete."""
        counts, self.sample_histogram = self.sample_histogram, None
        if counts is not None:
            self.histogram = counts if self.histogram is None else self.histogram + counts

    def index(self, slots: tuple[int, ...]) -> Tensor | slice:
        """Slots as an index without an upload: a slice if they are consecutive, otherwise a cached tensor."""
        if slots[-1] - slots[0] + 1 == len(slots):
            return slice(slots[0], slots[-1] + 1)
        if slots not in self._slots:
            if len(self._slots) > 64:
                self._slots.clear()
            self._slots[slots] = upload(np.array(slots, dtype=np.int64), self.device)
        return self._slots[slots]
