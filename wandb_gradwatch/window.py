"""The samples since the last flush: preallocated on each device, committed at a step, drained without waiting.

    write(slots, measurement)   rows of the open sample; the last write wins
    commit(sample)              the open sample is done: its rows start their way to the host
    flush()                     the window is done: its histogram follows, and the next window begins
    poll()                      what has arrived, in order

On CPU everything arrives at once. On other devices each shipment is an asynchronous copy into pinned memory and an
event; poll() asks the event and never waits for it, unless told to.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import torch
from torch import Tensor

from .statistics.columns import CLIP_TOLERANCE, NUM_BINS, NUM_COLUMNS, Column, FloatArray, IntArray
from .statistics.elements import onto, wide_dtype
from .statistics.found import HISTOGRAM_SIZE, Distance, FoundDistance, FoundHistogram, MetricHistogram
from .statistics.measure import Measurement

# S samples in the window, P watched parameters, N of them written at once, C columns, B histogram bins

# Columns that stay meaningful when only the gradient after clipping was seen.
_SEEN_AFTER_CLIPPING: Final = [
    Column.NUM_ELEMENTS,
    Column.NUM_NAN,
    Column.NUM_INF,
    Column.RECEIVED_SUM_SQ,
    Column.PARAM_SUM_SQ,
    Column.PARAM_NUM_NONFINITE,
]
_HIDDEN_BY_CLIPPING: Final = [column for column in Column if column not in _SEEN_AFTER_CLIPPING]

# What a probe finds, by key. A plain number is a 0-dim tensor; to the key of a distance its names are appended.
Found = Tensor | FoundHistogram | FoundDistance

# Per-sample values that live on a device: written there, read when the sample arrives.
_LOSS_SCALE, _FOUND_INF, _NUM_GLOBALS = 0, 1, 2


@dataclass(frozen=True)
class Sample:
    """What the host knows of a sample when it closes.

    Args:
        step: its number.
        skipped: whether loss scaling skipped an update; an optimizer that skips by itself says so on the device.
        updated: for each optimizer that stepped, the slots that it owns.
        compared: slots whose gradient looked unmodified since the backward and was compared by value all the same.
    """

    step: int
    skipped: bool
    updated: tuple[tuple[int, ...], ...]
    compared: tuple[int, ...] = ()


@dataclass(frozen=True)
class ArrivedSample:
    """A sample on the host: rows [P, C], and what the probes found, by key.

    `metrics` has what the distances mean, too: on a rank that holds shards, for these alone.
    """

    sample: Sample
    rows: FloatArray
    loss_scale: float
    skipped: bool
    metrics: Mapping[str, float] = field(default_factory=dict)
    histograms: Mapping[str, MetricHistogram] = field(default_factory=dict)
    distances: Mapping[str, Distance] = field(default_factory=dict)

    @property
    def was_clipped_without_a_trace(self) -> bool:
        """Whether a gradient that looked unmodified was shorter than measured: it was written through `.data`."""
        if not self.sample.compared:
            return False
        compared = self.rows[list(self.sample.compared)]
        before, received = compared[:, Column.GRAD_SUM_SQ], compared[:, Column.RECEIVED_SUM_SQ]
        return bool(np.any(np.sqrt(received) < np.sqrt(before) * (1 - CLIP_TOLERANCE)))


@dataclass(frozen=True)
class ArrivedFlush:
    """The end of a window on the host: histogram [P, B], None where none was taken."""

    histogram: IntArray | None
    histogram_steps: tuple[int, ...]


class Transfer:
    """One tensor on its way to the host. On CPU it is there already: handed over, and not to be written again."""

    def __init__(self, tensor: Tensor) -> None:
        if tensor.device.type == "cpu":
            self._host, self._event = tensor, None
        elif tensor.device.type == "cuda":
            self._host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
            self._host.copy_(tensor, non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record(torch.cuda.current_stream(tensor.device))
        else:  # no pinned memory and no events that all such devices share: the copy waits
            self._host, self._event = tensor.cpu(), None

    def arrived(self, *, wait: bool) -> bool:
        if self._event is None:
            return True
        if wait:  # the host waits for a device: in flush(), remove() and state_dict(), and for a guard, 8 steps late
            self._event.synchronize()
        return bool(self._event.query())  # type: ignore[no-untyped-call]

    @property
    def array(self) -> FloatArray | IntArray:
        return self._host.numpy()


class _FoundTransfer:
    """What the probes found on one device, on its way to the host in one copy: a number, or a few, for each key."""

    def __init__(self, found: Mapping[str, Found]) -> None:
        # What is kept for the meaning holds no tensor: that would keep the device's memory until the arrival.
        self._meanings = {
            key: (v.names, v.parameter) if isinstance(v, FoundDistance) else None for key, v in found.items()
        }
        self._sizes = [_HOST_SIZE.get(type(value), 1) for value in found.values()]
        self.transfer = Transfer(torch.cat([_flat(value) for value in found.values()]))

    def unpack(
        self, metrics: dict[str, float], histograms: dict[str, MetricHistogram], distances: dict[str, Distance]
    ) -> None:
        """Put everything where it belongs."""
        values = np.asarray(self.transfer.array, dtype=np.float64)
        begin = 0
        for (key, meaning), size in zip(self._meanings.items(), self._sizes, strict=True):
            part, begin = values[begin : begin + size], begin + size
            if meaning is not None:
                distances[key] = Distance((float(part[0]), float(part[1])), *meaning)
                metrics |= distances[key].metrics(key)
            elif size == HISTOGRAM_SIZE:
                histograms[key] = MetricHistogram.of(part)
            else:
                metrics[key] = float(part[0])


_HOST_SIZE: Final = {FoundHistogram: HISTOGRAM_SIZE, FoundDistance: 2}


def _flat(value: Found) -> Tensor:
    if isinstance(value, FoundHistogram):
        value = value.packed
    elif isinstance(value, FoundDistance):
        value = value.sums
    else:
        value = value.reshape(1)  # anything but one number would be taken for the next keys' values
    return value.detach().to(wide_dtype(value.device))


def _device_of(value: Found) -> torch.device:
    if isinstance(value, FoundHistogram):
        return value.packed.device
    return value.sums.device if isinstance(value, FoundDistance) else value.device


@dataclass(frozen=True)
class _Shipment:
    """Transfers that arrive together: of a sample (rows and globals by device), or of a flush (histograms)."""

    sample: Sample | None
    transfers: tuple[Transfer, ...]
    num_names: int
    histogram_steps: tuple[int, ...] = ()
    found: tuple[_FoundTransfer, ...] = ()  # by device

    def arrived(self, *, wait: bool) -> bool:
        """Whether everything is here."""
        return all([transfer.arrived(wait=wait) for transfer in self.transfers]) and all(
            [found.transfer.arrived(wait=wait) for found in self.found]
        )

    def unpack(self) -> ArrivedSample | ArrivedFlush:
        if self.sample is None:
            histogram: IntArray | None = None
            for transfer in self.transfers:
                counts = np.asarray(transfer.array, dtype=np.int64)
                histogram = counts if histogram is None else histogram + counts
            return ArrivedFlush(histogram, self.histogram_steps)
        packed = [np.asarray(transfer.array, dtype=np.float64) for transfer in self.transfers]
        rows = packed[0][:-1] if len(packed) == 1 else self._joined([one[:-1] for one in packed])
        loss_scale, found_inf = np.nan, 0.0
        for one in packed:
            scale, inf = one[-1, : _FOUND_INF + 1].tolist()
            loss_scale = loss_scale if scale != scale else scale
            found_inf = inf if inf > found_inf else found_inf
        metrics: dict[str, float] = {}
        histograms: dict[str, MetricHistogram] = {}
        distances: dict[str, Distance] = {}
        for found in self.found:
            found.unpack(metrics, histograms, distances)
        skipped = self.sample.skipped or bool(found_inf)
        return ArrivedSample(self.sample, rows, loss_scale, skipped, metrics, histograms, distances)

    def _joined(self, rows_of_devices: Sequence[FloatArray]) -> FloatArray:
        """Rows of several devices, each missing in all but one of them: [P, C]."""
        rows: FloatArray = np.full((self.num_names, NUM_COLUMNS), np.nan)
        for device_rows in rows_of_devices:
            here = ~np.isnan(device_rows[:, Column.NUM_ELEMENTS])
            rows[here] = device_rows[here]
        return rows


class _DeviceWindow:
    """The open sample's rows and the window's histogram on one device.

    The last row of `rows` holds the sample's globals, so that a sample travels in one copy.
    """

    def __init__(self, device: torch.device, num_names: int) -> None:
        self.device = device
        self.rows = torch.full((num_names + 1, NUM_COLUMNS), torch.nan, dtype=wide_dtype(device), device=device)
        self.histogram = torch.zeros((num_names, NUM_BINS), dtype=torch.int64, device=device)
        self.has_histogram = False
        self.sample_histogram: Tensor | None = None  # the open sample's; the window's once it is committed
        self._slots: dict[tuple[int, ...], Tensor] = {}

    def grow(self, num_names: int) -> None:
        """Make room for names that appeared: their rows are missing so far."""
        old = len(self.histogram)
        rows = torch.full((num_names + 1, NUM_COLUMNS), torch.nan, dtype=self.rows.dtype, device=self.device)
        rows[:old], rows[-1] = self.rows[:old], self.rows[-1]
        histogram = torch.zeros((num_names, NUM_BINS), dtype=torch.int64, device=self.device)
        histogram[:old] = self.histogram
        self.rows, self.histogram, self._slots = rows, histogram, {}
        if self.sample_histogram is not None:
            grown = torch.zeros_like(histogram)
            grown[:old] = self.sample_histogram
            self.sample_histogram = grown

    def open_histogram(self) -> Tensor:
        """The open sample's histogram: [P, B]."""
        if self.sample_histogram is None:
            self.sample_histogram = torch.zeros_like(self.histogram)
        return self.sample_histogram

    def send_rows(self) -> Transfer:
        """The open sample's rows and globals on their way, and room for the next sample's."""
        transfer = Transfer(self.rows)
        if self.device.type == "cpu":
            self.rows = torch.full_like(self.rows, torch.nan)
        else:
            self.rows.fill_(torch.nan)
        return transfer

    def send_histogram(self) -> Transfer:
        """The window's histogram on its way. It is emptied by `drop_histogram`."""
        return Transfer(self.histogram)

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
        """Slots as an index that needs no upload: a slice where they are consecutive, else a tensor that is kept."""
        if slots[-1] - slots[0] + 1 == len(slots):
            return slice(slots[0], slots[-1] + 1)
        if slots not in self._slots:
            if len(self._slots) > 64:
                self._slots.clear()
            host = torch.tensor(slots, device="cpu")
            if self.device.type == "cuda":
                host = host.pin_memory()
            self._slots[slots] = host.to(self.device, non_blocking=True)
        return self._slots[slots]


class Window:
    """Rows of the open sample and the histogram since the last flush, on every device that has gradients.

    Args:
        keep_newest_histogram: a new histogram replaces the window's instead of being added to it.
    """

    def __init__(self, *, keep_newest_histogram: bool) -> None:
        self._keep_newest = keep_newest_histogram
        self._devices: dict[torch.device, _DeviceWindow] = {}
        self._num_names = 0
        self._histogram_steps: list[int] = []
        self._shipments: deque[_Shipment] = deque()

    def resize(self, num_names: int) -> None:
        """Make room for new names."""
        if num_names > self._num_names:
            self._num_names = num_names
            for window in self._devices.values():
                window.grow(num_names)

    # ---- the open sample

    def write(self, slots: Sequence[int], measurement: Measurement) -> None:
        """Put rows into the open sample, over what was there.

        Args:
            slots: [N] ascending.
            measurement: rows [N, C] and, when due, histogram [N, B], on the gradients' device.
        """
        window = self._on(measurement.rows.device)
        index = window.index(tuple(slots))
        window.rows[index] = measurement.rows
        if measurement.histogram is not None:
            window.open_histogram()[index] = measurement.histogram

    def write_after_clipping(self, slots: Sequence[int], measurement: Measurement) -> None:
        """Put in rows of gradients that may have been clipped before they were seen: what clipping hides is missing."""
        rows = measurement.rows
        for column in _HIDDEN_BY_CLIPPING:  # one by one: a list as an index is uploaded, and the upload waits
            rows[:, column] = torch.nan
        window = self._on(rows.device)
        window.rows[window.index(tuple(slots))] = rows

    def write_received(self, slots: Sequence[int], sum_sq: Tensor) -> None:
        """Correct what the optimizer received, where it is not what was measured: sums of squares [N]."""
        window = self._on(sum_sq.device)
        window.rows[window.index(tuple(slots)), Column.RECEIVED_SUM_SQ] = sum_sq

    def rescale(self, slots: Sequence[int], factor_C: Tensor) -> None:
        """Multiply rows of the open sample by a factor per column: [C]. The histogram cannot follow and is dropped."""
        for window in self._devices.values():
            window.rows[window.index(tuple(slots))] *= onto(factor_C, window.device)
            window.sample_histogram = None

    def drop_zero_rows(self, slots: Sequence[int]) -> None:
        """Rows of gradients that nothing marked and that are all zero are leftovers of zero_grad(): missing."""
        for window in self._devices.values():
            index = window.index(tuple(slots))
            rows = window.rows[index]
            leftover = rows[:, Column.NUM_ZERO] == rows[:, Column.NUM_ELEMENTS]
            window.rows[index] = torch.where(leftover[:, None], torch.nan, rows)
            if window.sample_histogram is not None:
                window.sample_histogram[index] *= ~leftover[:, None]

    def clear(self, slots: Sequence[int]) -> None:
        """These parameters have no gradient in the open sample after all."""
        for window in self._devices.values():
            index = window.index(tuple(slots))
            window.rows[index] = torch.nan
            if window.sample_histogram is not None:
                window.sample_histogram[index] = 0

    def set_loss_scale(self, scale: Tensor) -> None:
        """Record the open sample's loss scale: a scalar tensor on its device."""
        self._on(scale.device).rows[-1, _LOSS_SCALE] = scale.to(wide_dtype(scale.device))

    def set_found_inf(self, found_inf: Tensor) -> None:
        """Record that an optimizer skips its update where this scalar tensor is not 0."""
        self._on(found_inf.device).rows[-1, _FOUND_INF] = found_inf.to(wide_dtype(found_inf.device)).reshape(())

    def open_rows(self, slots: tuple[int, ...]) -> list[Tensor]:
        """The open sample's rows of these slots, ascending, by device: each [N, C], missing where it is not there."""
        return [window.rows[window.index(slots)] for window in self._devices.values()]

    def discard(self) -> None:
        """Forget the open sample, and open the next."""
        for window in self._devices.values():
            window.rows.fill_(torch.nan)
            window.sample_histogram = None

    # ---- towards the host

    @property
    def has_sent(self) -> bool:
        """Whether anything is on its way."""
        return bool(self._shipments)

    def peek(self) -> FloatArray:
        """The open sample's rows, now: [P, C]. Waits for the device: for the guard, which must know before the step."""
        transfers = tuple(Transfer(window.rows) for window in self._devices.values())
        for transfer in transfers:
            transfer.arrived(wait=True)
        arrived = _Shipment(Sample(0, False, ()), transfers, self._num_names).unpack()
        assert isinstance(arrived, ArrivedSample)
        return arrived.rows.copy()

    def commit(self, sample: Sample, found: Mapping[str, Found] | None = None) -> None:
        """Send the open sample on its way, with what the probes found, by key, and open the next."""
        transfers = []
        if any(window.sample_histogram is not None for window in self._devices.values()):
            if self._keep_newest:
                self._drop_histogram()
            self._histogram_steps.append(sample.step)
        for window in self._devices.values():
            window.add_sample_histogram()
            transfers.append(window.send_rows())
        by_device: dict[torch.device, dict[str, Found]] = {}
        for key, value in (found or {}).items():
            by_device.setdefault(_device_of(value), {})[key] = value
        packed = tuple(map(_FoundTransfer, by_device.values()))
        self._shipments.append(_Shipment(sample, tuple(transfers), self._num_names, found=packed))

    def open_histogram(self) -> tuple[IntArray | None, tuple[int, ...]]:
        """The histogram [P, B] of the window that is not flushed yet, and its steps. Waits for the device."""
        histogram = None
        for window in self._devices.values():
            if window.has_histogram:
                counts = window.histogram.cpu().numpy()
                histogram = counts.copy() if histogram is None else histogram + counts
        return histogram, tuple(self._histogram_steps)

    def restore_histogram(self, histogram: Tensor | None, steps: Sequence[int]) -> None:
        """Go on with a histogram [P, B] of an unfinished window, or with none, instead of the one that is there."""
        self._drop_histogram()
        if histogram is not None:
            window = self._on(torch.device("cpu"))
            window.histogram[: len(histogram)] = histogram
            window.has_histogram = True
            self._histogram_steps = list(steps)

    def forget_sent(self) -> None:
        """Forget what was sent and not polled: it turned out not to be samples."""
        self._shipments.clear()
        self._drop_histogram()

    def flush(self) -> None:
        """Send the histogram after the window's samples and begin the next window."""
        transfers = tuple(window.send_histogram() for window in self._devices.values() if window.has_histogram)
        self._shipments.append(_Shipment(None, transfers, self._num_names, tuple(self._histogram_steps)))
        self._drop_histogram()

    def poll(self, *, wait: bool = False) -> list[ArrivedSample | ArrivedFlush]:
        """What has arrived since the last poll, in order; with `wait`, all that was sent."""
        arrived = []
        while self._shipments and self._shipments[0].arrived(wait=wait):
            arrived.append(self._shipments.popleft().unpack())
        return arrived

    def _drop_histogram(self) -> None:
        self._histogram_steps = []
        for window in self._devices.values():
            window.drop_histogram()

    def _on(self, device: torch.device) -> _DeviceWindow:
        window = self._devices.get(device)
        if window is None:
            window = self._devices[device] = _DeviceWindow(device, self._num_names)
        return window
