"""Samples and flushes on their way to the host: sent without waiting, unpacked when they have arrived.

    PinnedPool.send(tensor)         a tensor is on its way: a copy that the device makes, and an event after it
    SampleTransfer, FlushTransfer   transfers that arrive together
    arrived()                       asks the events and never waits for them, unless told to
    unpack()                        the sample, or the flush; the memory that it arrived in is free for the next

On CPU everything arrives at once. Devices other than CUDA have no events that are alike: there the copy waits.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from .._measure.change import MULTIPLIED, change_between
from .._measure.columns import (
    AS_LEFT,
    CLIP_TOLERANCE,
    NUM_COLUMNS,
    RECEIVED_COLUMNS,
    Column,
    FloatArray,
    IntArray,
)
from .._measure.elements import wide_dtype
from .._measure.events import Event
from .._measure.probe_values import HISTOGRAM_SIZE, ArrivedSums, MetricHistogram, ProbeHistogram, ProbeSums
from ..snapshot import keys

# P watched parameters, C columns, B histogram bins

# What is found in a sample, by key. A number that a device has is a 0-dim tensor; to the key of sums the names of what
# they say are added.
OnDevice = Tensor | ProbeHistogram | ProbeSums
Found = float | OnDevice

# Per-sample values that live on a device: written there, read when the sample arrives.
LOSS_SCALE, FOUND_INF = 0, 1

_MAX_KINDS: Final = 16  # of tensors of a device: what probes find may have another length at every sample


class Sample(NamedTuple):
    """What the host knows of a sample when it closes."""

    step: int  # its number
    skipped: bool  # whether loss scaling skipped an update; an optimizer that skips by itself says so on the device
    updated: tuple[tuple[int, ...], ...]  # for each optimizer that stepped, the slots that it owns
    # Slots whose gradient looked unmodified at the step and was compared by value all the same
    compared: tuple[int, ...] = ()
    compared_early: tuple[int, ...] = ()  # the same, just before torch clipped it
    by_torch: bool = False  # whether one of torch's clipping functions was called
    eps: float = 0.0  # relative precision of the gradients' dtype, of the coarsest where there are several
    every: int = 1  # how many steps after the sample before
    left_out: bool = False  # no sample of an update: a backward whose gradients were reset before any step
    # The largest of the optimizers that made the update; NaN where the host does not know it
    learning_rate: float = math.nan


@dataclass(frozen=True)
class Names:
    """What is known of the watched parameters at a moment: names [P] and which are trainable [P]."""

    names: tuple[str, ...]
    trainable: tuple[bool, ...]


@dataclass(frozen=True)
class ArrivedSample:
    """A sample on the host: rows [P, C], and what the probes found, by key.

    `metrics` has what the sums mean, too: on a rank that holds shards, for these alone.

    `changed_without_a_trace`: a gradient that looked unmodified was not what had been measured: it was written through
    `.data`.
    """

    sample: Sample
    rows: FloatArray
    loss_scale: float
    skipped: bool
    metrics: Mapping[str, float] = field(default_factory=dict)
    histograms: Mapping[str, MetricHistogram] = field(default_factory=dict)
    sums: Mapping[str, ArrivedSums] = field(default_factory=dict)
    changed_without_a_trace: bool = False


@dataclass(frozen=True)
class ArrivedFlush:
    """The end of a window on the host: histogram [P, B], None where none was taken."""

    histogram: IntArray | None
    histogram_steps: tuple[int, ...]


_Pinned = tuple[Tensor, Event]  # memory that one transfer arrives in, and what says when it has
_Kind = tuple[torch.device, torch.Size, torch.dtype]


class PinnedPool:
    """Where transfers arrive: pinned memory, two for each kind of tensor from the beginning, used again and again.

    While the device copies into one the host reads the other. A device that is further behind gets more, and then
    those are there: allocating pinned memory takes long, and may stop the device, so it is not done at every sample.
    """

    def __init__(self) -> None:
        self._free: dict[_Kind, list[_Pinned]] = {}

    def prepare(self, like: Tensor) -> None:
        """Make room for tensors of this one's device, shape and dtype, before the first is sent."""
        if like.device.type == "cuda":
            self._buffers_like(like)

    def send(self, tensor: Tensor) -> Transfer:
        """The tensor as it is now, on its way. On CPU it is handed over: it must not be written again."""
        if tensor.device.type == "cpu":
            return Transfer(tensor)
        if tensor.device.type != "cuda":
            return Transfer(tensor.cpu())
        free = self._buffers_like(tensor)
        memory, event = free.pop() if free else _pinned(tensor)
        memory.copy_(tensor, non_blocking=True)
        event.record(torch.cuda.current_stream(tensor.device))
        return Transfer(memory, event, free)

    def _buffers_like(self, like: Tensor) -> list[_Pinned]:
        """The free buffers for tensors of this one's kind."""
        kind = (like.device, like.shape, like.dtype)
        free = self._free.pop(kind, None)
        if free is None:
            free = [_pinned(like), _pinned(like)]
            of_device = [other for other in self._free if other[0] == like.device]
            if len(of_device) >= _MAX_KINDS:
                del self._free[of_device[0]]  # torch keeps what is still to be written to until it has been
        self._free[kind] = free  # the last of them is what was used last
        return free


def _pinned(like: Tensor) -> _Pinned:
    return torch.empty(like.shape, dtype=like.dtype, device="cpu", pin_memory=True), Event()


class Transfer:
    """One tensor on its way to the host."""

    def __init__(self, host: Tensor, event: Event | None = None, free: list[_Pinned] | None = None) -> None:
        self._host, self._event, self._free = host, event, free

    def arrived(self, *, wait: bool) -> bool:
        """Whether it is here."""
        if self._event is None:
            return True
        if wait:  # the host waits for a device: in flush(), remove() and state_dict(), and for a guard, 8 steps late
            self._event.synchronize()
        return self._event.query()

    def take(self) -> FloatArray | IntArray:
        """What has arrived; the memory that it arrived in is free for another."""
        if self._event is not None and self._free is not None:
            self._free.append((self._host, self._event))
            self._host, self._event = self._host.clone(), None  # not pinned
        return self._host.numpy()


class RowsTransfer(NamedTuple):
    """A sample's rows and globals of one device, and other looks at them where gradients changed: see DeviceBuffer."""

    rows: Transfer
    earlier: Transfer | None = None
    received: Transfer | None = None


class ProbeTransfer:
    """What the probes found on one device, on its way to the host in one copy: a number, or a few, for each key."""

    def __init__(self, found: Mapping[str, OnDevice], pinned_pool: PinnedPool) -> None:
        # What is kept for the meaning holds no tensor: that would keep the device's memory until the arrival.
        self._meanings = {
            key: (v.meaning, v.parameter) if isinstance(v, ProbeSums) else None for key, v in found.items()
        }
        values = [values_of(value) for value in found.values()]
        parts = [one.detach().to(wide_dtype(one.device)) for one in values]
        self._sizes = [len(part) for part in parts]
        self.transfer = pinned_pool.send(torch.cat(parts))

    def unpack(
        self, metrics: dict[str, float], histograms: dict[str, MetricHistogram], sums: dict[str, ArrivedSums]
    ) -> None:
        """Put everything where it belongs."""
        values = np.asarray(self.transfer.take(), dtype=np.float64)
        begin = 0
        for (key, meaning), size in zip(self._meanings.items(), self._sizes, strict=True):
            part, begin = values[begin : begin + size], begin + size
            if meaning is not None:
                sums[key] = ArrivedSums(tuple(part.tolist()), *meaning)
                metrics |= sums[key].metrics(key)
            elif size == HISTOGRAM_SIZE:
                histograms[key] = MetricHistogram.of(part)
            else:
                metrics[key] = float(part[0])


def values_of(found: OnDevice) -> Tensor:
    """The values that travel: [K]. A plain number is one; anything else would be taken for the next key's."""
    return found.reshape(1) if isinstance(found, Tensor) else found.values


class FlushTransfer(NamedTuple):
    """The histogram of a window, by device, and the steps that it counts."""

    histograms: list[Transfer]
    steps: tuple[int, ...]

    def arrived(self, *, wait: bool) -> bool:
        """Whether everything is here."""
        return all([transfer.arrived(wait=wait) for transfer in self.histograms])

    def unpack(self) -> ArrivedFlush:
        counts = [np.asarray(transfer.take(), dtype=np.int64) for transfer in self.histograms]
        return ArrivedFlush(np.sum(counts, axis=0) if counts else None, self.steps)


class SampleTransfer(NamedTuple):
    """A sample: its rows, and what the probes found, each by device."""

    sample: Sample
    num_names: int
    rows: list[RowsTransfer]
    found: Sequence[ProbeTransfer] = ()
    known: Mapping[str, float] = {}  # what was found on the host

    def arrived(self, *, wait: bool) -> bool:
        """Whether everything is here."""
        transfers = [transfer for one in self.rows for transfer in one if transfer is not None]
        transfers += [found.transfer for found in self.found]
        return all([one.arrived(wait=wait) for one in transfers])

    def unpack(self) -> ArrivedSample:
        packed = [np.asarray(one.rows.take(), dtype=np.float64) for one in self.rows]
        rows = packed[0][:-1] if len(packed) == 1 else self._joined([one[:-1] for one in packed])
        earlier, received = self._joined_look(1), self._joined_look(2)
        loss_scale, found_inf = np.nan, 0.0
        for one in packed:
            scale, inf = one[-1, : FOUND_INF + 1].tolist()
            loss_scale = loss_scale if scale != scale else scale
            found_inf = inf if inf > found_inf else found_inf
        metrics = {keys.SAMPLE_EVERY: float(self.sample.every), **self.known}
        if not math.isnan(self.sample.learning_rate):
            metrics[keys.LEARNING_RATE] = self.sample.learning_rate
        histograms: dict[str, MetricHistogram] = {}
        sums: dict[str, ArrivedSums] = {}
        for found in self.found:
            found.unpack(metrics, histograms, sums)
        if (loss := metrics.get(keys.LOSS)) is not None:  # missing where it is not finite
            is_finite = math.isfinite(loss)
            metrics |= {keys.LOSS: loss if is_finite else math.nan, keys.NUM_NONFINITE_LOSS: float(not is_finite)}
        skipped = self.sample.skipped or bool(found_inf)
        untraced = _changed_without_a_trace(rows, earlier, self.sample)
        if earlier is not None or received is not None:
            metrics |= _what_happened(rows, earlier, received, self.sample, loss_scale)
        return ArrivedSample(self.sample, rows, loss_scale, skipped, metrics, histograms, sums, untraced)

    def _joined_look(self, place: int) -> FloatArray | None:
        """Another look at the rows: [P, C]; None where there was none."""
        looks = [transfer for one in self.rows if (transfer := one[place]) is not None]
        return self._joined([np.asarray(one.take(), dtype=np.float64)[:-1] for one in looks]) if looks else None

    def _joined(self, rows_of_devices: Sequence[FloatArray]) -> FloatArray:
        """Rows of several devices, each missing in all but one of them: [P, C]."""
        rows: FloatArray = np.full((self.num_names, NUM_COLUMNS), np.nan)
        for device_rows in rows_of_devices:
            here = ~np.isnan(device_rows[:, Column.NUM_ELEMENTS])
            rows[here] = device_rows[here]
        return rows


def _changed_without_a_trace(rows_PC: FloatArray, earlier_PC: FloatArray | None, sample: Sample) -> bool:
    """Whether any gradient that looked unmodified was another one when it was looked at again."""
    if not sample.compared and not sample.compared_early:  # as nearly always
        return False
    at_step, early = list(sample.compared), list(sample.compared_early)
    looks = [(rows_PC[at_step, Column.GRAD_SUM_SQ], rows_PC[at_step, Column.RECEIVED_SUM_SQ])]
    if earlier_PC is not None:
        looks.append((earlier_PC[early, Column.GRAD_SUM_SQ], rows_PC[early, Column.GRAD_SUM_SQ]))
    low, high = (1 - CLIP_TOLERANCE) ** 2, (1 + CLIP_TOLERANCE) ** 2
    return any(bool(np.any((after < low * before) | (after > high * before))) for before, after in looks)


def _what_happened(
    rows_PC: FloatArray,
    earlier_PC: FloatArray | None,
    received_PC: FloatArray | None,
    sample: Sample,
    loss_scale: float,
) -> dict[str, float]:
    """Whether a sample was clipped, and whether it was changed otherwise, by key; corrects its rows in place.

    `earlier` is missing where nothing changed gradients before clipping, `received` where nothing has since.
    """
    shrunk = other = multiplied = False
    if earlier_PC is not None:
        was_there = ~np.isnan(earlier_PC[:, Column.NUM_ELEMENTS]) & ~np.isnan(rows_PC[:, Column.NUM_ELEMENTS])
        before = change_between(np.where(was_there[:, None], earlier_PC, rows_PC), rows_PC, sample.eps)
        shrunk, other = before.shrunk and not before.is_common, before.other and not before.is_common
        # NaN and Inf that came after the backward are not the backward's.
        num_now, num_earlier = (looks[:, Column.NUM_NAN] + looks[:, Column.NUM_INF] for looks in (rows_PC, earlier_PC))
        bad = was_there & (num_now > 0) & (num_earlier == 0)
        columns = np.arange(NUM_COLUMNS) < RECEIVED_COLUMNS.start
        rows_PC[np.ix_(bad, columns)] = earlier_PC[np.ix_(bad, columns)]
    if received_PC is not None:
        was_seen = ~np.isnan(received_PC[:, Column.NUM_ELEMENTS]) & ~np.isnan(rows_PC[:, Column.NUM_ELEMENTS])
        received_PC = np.where(was_seen[:, None], received_PC, rows_PC)
        change = change_between(rows_PC, received_PC, sample.eps)
        if loss_scale != 1 and abs(change.factor / loss_scale - 1) < CLIP_TOLERANCE:
            # Not divided by its loss scale yet: by whatever makes the update, then, in there.
            rows_PC[was_seen, RECEIVED_COLUMNS] = rows_PC[was_seen][:, AS_LEFT]
        elif change.is_common and change.factor < 1:
            shrunk, multiplied = shrunk or sample.by_torch, not sample.by_torch
        else:
            shrunk, other = shrunk or change.shrunk, other or change.other
    if not shrunk and multiplied:
        clipped = MULTIPLIED
    elif not shrunk and other and sample.by_torch:
        clipped = np.nan  # whether it was clipped before that is not known
    else:
        clipped = float(shrunk and not (other and not sample.by_torch))
    return {keys.CLIPPED: clipped, keys.CHANGED: float(other)}
