"""The samples since the last flush: on each device, committed at a step, received without waiting.

    write(slots, measurement)   write rows of the open sample; the last write counts
    commit(sample)              the open sample is complete: start the transfer of its rows to the host
    flush()                     the window is complete: send its histogram, and begin the next window
    poll()                      return the samples and flushes that have arrived, in order

device_buffer.py contains the memory on a device, transfers.py the transfers to the host.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from .._measure.columns import GRADIENT_COLUMNS, NUM_COLUMNS, RECEIVED_COLUMNS, Column
from .._measure.elements import Measurement, onto, wide_dtype
from .device_buffer import EARLIER, MEASURED, RECEIVED, DeviceBuffer
from .transfers import (
    FOUND_INF,
    LOSS_SCALE,
    ArrivedFlush,
    ArrivedSample,
    FlushTransfer,
    Found,
    OnDevice,
    PinnedPool,
    ProbeTransfer,
    Sample,
    SampleTransfer,
    values_of,
)

# S samples in the window, P watched parameters, N of them written at once, C columns, B histogram bins

# Columns that clipping changes. It does not change the numbers of elements, NaN and Inf.
_HIDDEN_BY_CLIPPING: Final = slice(Column.NUM_ZERO, GRADIENT_COLUMNS.stop)


class SampleBuffer:
    """Rows of the open sample and the histogram since the last flush, on every device that has gradients."""

    def __init__(self, *, keep_newest_histogram: bool) -> None:
        self.keep_newest_histogram = keep_newest_histogram  # True: replace the window's histogram, do not add to it
        self._devices: dict[torch.device, DeviceBuffer] = {}
        self._pinned_pool = PinnedPool()
        self._num_names = 0
        self._histogram_steps: list[int] = []
        self.sent: deque[SampleTransfer | FlushTransfer] = deque()  # sent, but not polled

    def resize(self, num_names: int) -> None:
        """Make room for new names."""
        if num_names > self._num_names:
            self._num_names = num_names
            for buffer in self._everywhere():
                buffer.grow(num_names)

    def write(self, slots: Sequence[int], measurement: Measurement) -> None:
        """Write rows of ascending slots [N] into the open sample, replacing earlier ones."""
        buffer = self._on(measurement.rows.device)
        index = buffer.put(slots, measurement.rows)
        if measurement.histogram is not None:
            buffer.open_histogram()[index] = measurement.histogram

    def write_witnesses(self, slots: Sequence[int], gradients: Sequence[Tensor], parameters: Sequence[Tensor]) -> None:
        """Take the witnesses of ascending slots [N], all on one device, into the open sample."""
        self._on(gradients[0].device).witnesses.write(slots, gradients, parameters)

    def write_after_clipping(self, slots: Sequence[int], measurement: Measurement) -> None:
        """Write rows of gradients that may have been clipped before; columns that clipping changes are NaN."""
        measurement.rows[:, _HIDDEN_BY_CLIPPING] = torch.nan
        self.write(slots, measurement)

    def put_earlier(self, slots: Sequence[int]) -> None:
        """Keep these rows as the earlier ones: the gradients have changed since, and new rows will be written."""
        for buffer, index in self._at(slots):
            buffer.put_beside(EARLIER, index, buffer.rows[MEASURED, index])

    def write_received(self, slots: Sequence[int], received: Tensor) -> None:
        """Correct the columns of the gradients that the optimizer received, where they differ from the measured ones.

        Args:
            slots: [N] ascending.
            received: the columns of the received gradients [N, 3]; or rows [N, C], which also show the kind of change.
        """
        buffer = self._on(received.device)
        index = buffer.index(tuple(slots))
        if received.shape[1] == NUM_COLUMNS:
            buffer.put_beside(RECEIVED, index, received)
            received = received[:, RECEIVED_COLUMNS]
        buffer.rows[MEASURED, index, RECEIVED_COLUMNS] = received

    def multiply_received(self, slots: Sequence[int], factor: float | Tensor) -> None:
        """Record that an engine has multiplied the gradients of these parameters before it used them."""
        for buffer, index in self._at(slots):
            here = onto(factor.reshape(()), buffer.device) if isinstance(factor, Tensor) else factor
            buffer.rows[MEASURED, index, Column.RECEIVED_SUM_SQ] *= here**2

    def hide_received(self, slots: Sequence[int]) -> None:
        """Mark the received gradients of these parameters as unknown."""
        for buffer, index in self._at(slots):
            buffer.rows[MEASURED, index, RECEIVED_COLUMNS] = torch.nan

    def rescale(self, slots: Sequence[int], factor_C: Tensor) -> None:
        """Multiply rows of the open sample by a factor per column [C]. The sample's histogram is dropped."""
        for buffer, index in self._at(slots):
            buffer.rows[:RECEIVED, index] *= onto(factor_C, buffer.device)
            buffer.sample_histogram = None

    def drop_zero_rows(self, slots: Sequence[int]) -> None:
        """Mark all-zero rows as missing: no backward wrote these gradients, so zero_grad() left the zeros."""
        for buffer, index in self._at(slots):
            rows = buffer.rows[MEASURED, index]
            buffer.drop(index, rows[:, Column.NUM_ZERO] == rows[:, Column.NUM_ELEMENTS])

    def drop_finite_rows(self, slots: Sequence[int]) -> None:
        """Mark rows without NaN and Inf as missing."""
        for buffer, index in self._at(slots):
            rows = buffer.rows[MEASURED, index]
            buffer.drop(index, rows[:, Column.NUM_NAN] + rows[:, Column.NUM_INF] == 0)

    def receive_nothing(self, slots: Sequence[int]) -> None:
        """Record that the optimizer received gradients of 0 in place of those that were measured.

        Finite ones are in no histogram: their rows will be dropped when they arrive.
        """
        for buffer, index in self._at(slots):
            rows = buffer.rows[MEASURED, index]
            is_bad = (rows[:, Column.NUM_NAN] + rows[:, Column.NUM_INF] > 0).any()
            buffer.rows[MEASURED, index, RECEIVED_COLUMNS] = (
                rows[:, Column.NUM_ELEMENTS, None] * 0
            )  # missing stays missing
            if buffer.sample_histogram is not None:
                buffer.sample_histogram[index] *= is_bad

    def clear(self, slots: Sequence[int]) -> None:
        """Mark these parameters as without a gradient in the open sample."""
        for buffer, index in self._at(slots):
            buffer.rows[:, index] = torch.nan
            buffer.witnesses.drop(slots)
            if buffer.sample_histogram is not None:
                buffer.sample_histogram[index] = 0

    def set_loss_scale(self, scale: Tensor) -> None:
        """Record the open sample's loss scale: a scalar tensor on its device."""
        self._on(scale.device).rows[MEASURED, -1, LOSS_SCALE] = scale.to(wide_dtype(scale.device))

    def set_found_inf(self, found_inf: Tensor) -> None:
        """Record that an optimizer skips its update where this scalar tensor is not 0."""
        self._on(found_inf.device).rows[MEASURED, -1, FOUND_INF] = found_inf.to(wide_dtype(found_inf.device)).reshape(
            ()
        )

    def open_rows(self, slots: Sequence[int]) -> list[Tensor]:
        """The open sample's rows of these ascending slots on each device: [N, C], NaN on all devices but one."""
        return [buffer.rows[MEASURED, index] for buffer, index in self._at(slots)]

    def discard(self) -> None:
        """Discard the open sample, and open the next."""
        for buffer in self._everywhere():
            buffer.forget_sample()

    def peek(self, found: Mapping[str, Found]) -> ArrivedSample:
        """The open sample with these values by key. Waits for the device: the guard must decide before the step."""
        rows = [self._pinned_pool.send(buffer.rows[:EARLIER]) for buffer in self._everywhere()]
        packed, known = self._packed(found)
        peeked = SampleTransfer(Sample(0, False, ()), self._num_names, rows, found=packed, known=known)
        peeked.arrived(wait=True)
        return peeked.unpack()

    def commit(self, sample: Sample, found: Mapping[str, Found] | None = None) -> None:
        """Send the open sample and the probes' values by key to the host, and open the next sample."""
        buffers = self._everywhere()
        if sample.left_out:
            for buffer in buffers:
                buffer.sample_histogram = None
        if any([buffer.sample_histogram is not None for buffer in buffers]):
            if self.keep_newest_histogram:
                self._drop_histogram()
            self._histogram_steps.append(sample.step)
            for buffer in buffers:
                buffer.add_sample_histogram()
        send = self._pinned_pool.send
        rows = [send(buffer.rows) for buffer in buffers]
        compared = [] if sample.left_out else [buffer.witnesses.compare() for buffer in buffers]
        witnesses = [(send(one.sums), one.num) for one in compared if one is not None]
        for buffer in buffers:
            buffer.forget_sample()
        packed, known = self._packed(found or {})
        transfer = SampleTransfer(sample, self._num_names, rows, witnesses, packed, known)
        self.sent.append(transfer)

    def _packed(self, found: Mapping[str, Found]) -> tuple[list[ProbeTransfer], dict[str, float]]:
        """Send the values that are on devices, and return their transfers and the values on the host."""
        known: dict[str, float] = {}
        by_device: dict[torch.device, dict[str, OnDevice]] = {}
        for key, value in found.items():
            if isinstance(value, float):
                known[key] = value
            else:
                by_device.setdefault(values_of(value).device, {})[key] = value
        return [ProbeTransfer(values, self._pinned_pool) for values in by_device.values()], known

    def open_histogram(self) -> dict[str, Any]:
        """The open window's histogram counts [P, B], None if there are none, and its steps. Waits for the device."""
        parts = [buffer.histogram.cpu() for buffer in self._everywhere() if buffer.histogram is not None]
        return {"counts": torch.stack(parts).sum(dim=0) if parts else None, "steps": list(self._histogram_steps)}

    def restore_histogram(self, histogram: Tensor | None, steps: Sequence[int]) -> None:
        """Replace the open window's histogram by a saved one [P, B], or by none."""
        self._drop_histogram()
        if histogram is not None:
            self._on(torch.device("cpu")).histogram = histogram
            self._histogram_steps = list(steps)

    def flush(self) -> None:
        """Send the histogram after the window's samples and begin the next window."""
        histograms = [buffer.histogram for buffer in self._everywhere() if buffer.histogram is not None]
        self.sent.append(FlushTransfer(list(map(self._pinned_pool.send, histograms)), tuple(self._histogram_steps)))
        self._drop_histogram()

    def poll(self, *, wait: bool = False) -> list[ArrivedSample | ArrivedFlush]:
        """Return what has arrived since the last poll, in order; `wait` waits for everything that was sent."""
        arrived = []
        while self.sent and self.sent[0].arrived(wait=wait):
            arrived.append(self.sent.popleft().unpack())
        return arrived

    def _drop_histogram(self) -> None:
        self._histogram_steps = []
        for buffer in self._everywhere():
            buffer.histogram = None

    def _on(self, device: torch.device) -> DeviceBuffer:
        buffer = self._devices.get(device)
        if buffer is None:
            buffer = self._devices[device] = DeviceBuffer(device, self._num_names, self._pinned_pool)
        return buffer.follow()

    def _everywhere(self) -> list[DeviceBuffer]:
        return [buffer.follow() for buffer in self._devices.values()]

    def _at(self, slots: Sequence[int]) -> list[tuple[DeviceBuffer, Tensor | slice]]:
        """Every buffer, and these ascending slots as an index there."""
        return [(buffer, buffer.index(tuple(slots))) for buffer in self._everywhere()]
