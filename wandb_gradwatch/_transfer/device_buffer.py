"""What a window holds on one device: the open sample's rows and the window's histogram, preallocated."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from .._measure.columns import NUM_BINS, NUM_COLUMNS
from .._measure.elements import upload, wide_dtype
from .transfers import PinnedPool, RowsTransfer

# P watched parameters, C columns, B histogram bins


class DeviceBuffer:
    """The open sample's rows and the window's histogram on one device.

    The last row of `rows` holds the sample's globals, so that a sample travels in one copy.
    """

    def __init__(self, device: torch.device, num_names: int, pinned_pool: PinnedPool) -> None:
        self.device = device
        self.rows = torch.full((num_names + 1, NUM_COLUMNS), torch.nan, dtype=wide_dtype(device), device=device)
        self.histogram = torch.zeros((num_names, NUM_BINS), dtype=torch.int64, device=device)
        self.has_histogram = False
        self.sample_histogram: Tensor | None = None  # the open sample's; the window's once it is committed
        # Other looks at the open sample, where its gradients changed, in rows of the same shape: as they were before
        # `rows`, and as the optimizer received them after. What did not change is missing.
        self.earlier: Tensor | None = None
        self.received: Tensor | None = None
        self._slots: dict[tuple[int, ...], Tensor] = {}
        self._pinned_pool = pinned_pool
        self._stream: Any = torch.cuda.current_stream(device) if device.type == "cuda" else None  # that wrote last
        pinned_pool.prepare(self.rows)

    def follow(self) -> DeviceBuffer:
        """The same, for the stream that is current: what another one is still to write comes before."""
        if self._stream is None:
            return self
        stream = torch.cuda.current_stream(self.device)
        if stream != self._stream:
            stream.wait_stream(self._stream)
            tensors = (self.rows, self.earlier, self.received, self.histogram, self.sample_histogram)
            for tensor in (*tensors, *self._slots.values()):
                if tensor is not None:
                    tensor.record_stream(stream)
            self._stream = stream
        return self

    def grow(self, num_names: int) -> None:
        """Make room for names that appeared: their rows are missing so far."""
        missing, self._slots = (0, 0, 0, num_names - len(self.histogram)), {}
        self.histogram = pad(self.histogram, missing)
        if self.sample_histogram is not None:
            self.sample_histogram = pad(self.sample_histogram, missing)
        self.rows = _grown(self.rows, missing)
        self.earlier, self.received = (
            None if rows is None else _grown(rows, missing) for rows in (self.earlier, self.received)
        )

    def put(self, slots: Sequence[int], rows: Tensor) -> Tensor | slice:
        """Rows of the open sample: [N, C], over what was there. Returns the slots as an index."""
        index = self.index(tuple(slots))
        if self.device.type == "cpu" and isinstance(index, slice):
            self.rows.numpy()[index] = rows.numpy()  # in a sixth of the time
        else:
            self.rows[index] = rows
        return index

    def put_earlier(self, index: Tensor | slice) -> None:
        """What `rows` has of these gradients is how they were earlier; they have changed since."""
        if self.earlier is None:
            self.earlier = torch.full_like(self.rows, torch.nan)
        self.earlier[index] = self.rows[index]

    def put_received(self, index: Tensor | slice, rows: Tensor) -> None:
        """Rows of what the optimizer received: [N, C]."""
        if self.received is None:
            self.received = torch.full_like(self.rows, torch.nan)
        self.received[index] = rows

    def forget_sample(self) -> None:
        """Nothing is known of the open sample any more."""
        self.rows.fill_(torch.nan)
        self.sample_histogram = self.earlier = self.received = None

    def open_histogram(self) -> Tensor:
        """The open sample's histogram: [P, B]."""
        if self.sample_histogram is None:
            self.sample_histogram = torch.zeros_like(self.histogram)
            self._pinned_pool.prepare(self.histogram)
        return self.sample_histogram

    def send_rows(self) -> RowsTransfer:
        """The open sample's rows and globals on their way, and room for the next sample's."""
        send = self._pinned_pool.send
        earlier, received = (None if rows is None else send(rows) for rows in (self.earlier, self.received))
        transfer = RowsTransfer(send(self.rows), earlier, received)
        self.earlier = self.received = None
        if self.device.type == "cpu":
            self.rows = torch.full_like(self.rows, torch.nan)
        else:
            self.rows.fill_(torch.nan)
        return transfer

    def drop_histogram(self) -> None:
        """An empty histogram for the next window."""
        if self.has_histogram:
            if self.device.type == "cpu":  # the old one may be on its way
                self.histogram = torch.zeros_like(self.histogram)
            else:
                self.histogram.zero_()
            self.has_histogram = False

    def add_sample_histogram(self) -> None:
        """The open sample is done: its histogram becomes the window's."""
        if self.sample_histogram is not None:
            self.histogram += self.sample_histogram
            self.sample_histogram = None
            self.has_histogram = True

    def index(self, slots: tuple[int, ...]) -> Tensor | slice:
        """Slots as an index that needs no upload: a slice, or a tensor that is kept where they are not consecutive."""
        if slots[-1] - slots[0] + 1 == len(slots):
            return slice(slots[0], slots[-1] + 1)
        if slots not in self._slots:
            if len(self._slots) > 64:
                self._slots.clear()
            self._slots[slots] = upload(np.array(slots, dtype=np.int64), self.device)
        return self._slots[slots]


def _grown(rows: Tensor, missing: tuple[int, ...]) -> Tensor:
    """With rows of names that are missing so far before the last, which holds the globals."""
    return torch.cat([pad(rows[:-1], missing, value=torch.nan), rows[-1:]])
