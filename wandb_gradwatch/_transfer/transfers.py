"""Transfers of samples and flushes to the host: sent without waiting, unpacked after they have arrived.

    PinnedPool.send(tensor)         start an asynchronous copy of a tensor to the host, followed by an event
    SampleTransfer, FlushTransfer   transfers that are unpacked together
    arrived()                       query the events; waits for them only with wait=True
    unpack()                        return the sample or the flush, and free its pinned memory for the next one

On CPU, tensors are available at once. Other devices than CUDA have no suitable events, so there the copy waits.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from .._measure.change import MULTIPLIED, change_between
from .._measure.columns import (
    AS_LEFT,
    CLIP_TOLERANCE,
    GRADIENT_COLUMNS,
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
from .witnesses import facts_of

# P watched parameters, C columns, B histogram bins, F facts per parameter
# L measurements of the gradients in one sample: 1, or 3 (device_buffer.py)

# A probe's value in a sample: a number on the host, a 0-dim tensor on a device, a histogram, or sums. The names of the
# metrics that follow from sums are appended to the key of the sums.
OnDevice = Tensor | ProbeHistogram | ProbeSums
Found = float | OnDevice

# Columns of the values of the whole sample, which are written on a device and read when the sample arrives.
LOSS_SCALE, FOUND_INF = 0, 1

_MAX_KINDS: Final = 16  # cached kinds of tensors per device: the length of probes' values may change at every sample


class Sample(NamedTuple):
    """What the host knows about a sample when the sample is complete."""

    step: int
    skipped: bool  # whether loss scaling skipped an update; fused optimizers that skip set FOUND_INF on the device
    updated: tuple[tuple[int, ...], ...]  # for each optimizer that stepped, the slots that it owns
    # Slots whose gradient seemed unmodified at the step, but was compared by value
    compared: tuple[int, ...] = ()
    compared_early: tuple[int, ...] = ()  # the same, before torch clipped the gradient
    by_torch: bool = False  # whether one of torch's clipping functions was called
    eps: float = 0.0  # relative precision of the gradients' dtype; of the coarsest if there are several
    every: int = 1  # number of steps since the previous sample
    left_out: bool = False  # True: there was no update, because the gradients were reset before any step
    # The largest learning rate of the optimizers that made the update; NaN if the host does not know it
    learning_rate: float = math.nan
    # The first of `keys.PARAMETER_FACTS`, those that the host knows: [P, any]; None: none are known
    of_parameters: FloatArray | None = None


@dataclass(frozen=True)
class Names:
    """The watched parameters at one moment: names [P], and whether they are trainable [P]."""

    names: tuple[str, ...]
    trainable: tuple[bool, ...]


@dataclass(frozen=True)
class ArrivedSample:
    """A sample on the host: rows [P, C], the probes' values by key, and the facts per parameter [P, F].

    `metrics` also contains the metrics that follow from the sums; on a rank with shards, those of its shards only.

    `changed_without_a_trace`: a gradient differed from the measured one although its version had not changed, because
    it was written through `.data`.
    """

    sample: Sample
    rows: FloatArray
    loss_scale: float
    skipped: bool
    metrics: Mapping[str, float] = field(default_factory=dict)
    histograms: Mapping[str, MetricHistogram] = field(default_factory=dict)
    sums: Mapping[str, ArrivedSums] = field(default_factory=dict)
    changed_without_a_trace: bool = False
    facts: FloatArray | None = None  # `keys.PARAMETER_FACTS`; None: missing

    @cached_property
    def total_C(self) -> list[float]:
        """The sums of the rows over the parameters, as they arrived, without those that are missing: [C]."""
        total_C: list[float] = np.einsum("pc->c", self.rows).tolist()  # a sum that never warns of overflow
        if math.isnan(total_C[Column.GRAD_SUM_SQ]):
            total_C = np.einsum("pc->c", np.where(np.isnan(self.rows), 0.0, self.rows)).tolist()
        return total_C


@dataclass(frozen=True)
class ArrivedFlush:
    """The end of a window on the host, with its histogram [P, B]; None if no histogram was taken."""

    histogram: IntArray | None
    histogram_steps: tuple[int, ...]


_Pinned = tuple[Tensor, Event]  # the memory of one transfer, and the event that marks its end
_Kind = tuple[torch.device, torch.Size, torch.dtype]


class PinnedPool:
    """Reusable pinned memory for transfers: at first two buffers for each kind of tensor.

    While the device copies into one buffer, the host reads the other. If the device falls behind, further buffers are
    allocated and kept, because allocating pinned memory is slow and may block the device.
    """

    def __init__(self) -> None:
        self._free: dict[_Kind, list[_Pinned]] = {}

    def prepare(self, like: Tensor) -> None:
        """Allocate buffers for tensors with the device, shape and dtype of `like`, before the first is sent."""
        if like.device.type == "cuda":
            self._buffers_like(like)

    def send(self, tensor: Tensor) -> Transfer:
        """Start the transfer of a tensor's present values. On CPU it is not copied: do not write to it again."""
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
        """The free buffers for tensors with the device, shape and dtype of `like`."""
        kind = (like.device, like.shape, like.dtype)
        free = self._free.pop(kind, None)
        if free is None:
            free = [_pinned(like), _pinned(like)]
            of_device = [other for other in self._free if other[0] == like.device]
            if len(of_device) >= _MAX_KINDS:
                del self._free[of_device[0]]  # torch's allocator keeps buffers with a pending copy until it is done
        self._free[kind] = free  # at the end: the most recently used kind
        return free


def _pinned(like: Tensor) -> _Pinned:
    return torch.empty(like.shape, dtype=like.dtype, device="cpu", pin_memory=True), Event()


class Transfer:
    """The transfer of one tensor to the host."""

    def __init__(self, host: Tensor, event: Event | None = None, free: list[_Pinned] | None = None) -> None:
        self._host, self._event, self._free = host, event, free

    def arrived(self, *, wait: bool) -> bool:
        """Whether the tensor has arrived."""
        if self._event is None:
            return True
        if wait:  # the host waits for a device: in flush(), remove() and state_dict(), and in a guard after 8 steps
            self._event.synchronize()
        return self._event.query()

    def take(self) -> FloatArray | IntArray:
        """Return the values, and free the pinned memory for another transfer."""
        if self._event is not None and self._free is not None:
            self._free.append((self._host, self._event))
            self._host, self._event = self._host.clone(), None  # a clone in unpinned memory
        return self._host.numpy()


class ProbeTransfer:
    """The transfer of all probes' values on one device, in one copy: one or several numbers for each key."""

    def __init__(self, found: Mapping[str, OnDevice], pinned_pool: PinnedPool) -> None:
        # Keep no tensor here, because it would occupy device memory until the values have arrived.
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
        """Add the values to the dictionaries of their kind."""
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
    """The values to transfer: [K]. A tensor is one number; more elements would shift the values of later keys."""
    return found.reshape(1) if isinstance(found, Tensor) else found.values


class FlushTransfer(NamedTuple):
    """The transfer of a window's histogram from each device, and the steps that the histogram counts."""

    histograms: list[Transfer]
    steps: tuple[int, ...]

    def arrived(self, *, wait: bool) -> bool:
        """Whether everything is here."""
        return all([transfer.arrived(wait=wait) for transfer in self.histograms])

    def unpack(self) -> ArrivedFlush:
        counts = [np.asarray(transfer.take(), dtype=np.int64) for transfer in self.histograms]
        return ArrivedFlush(np.sum(counts, axis=0) if counts else None, self.steps)


class SampleTransfer(NamedTuple):
    """The transfer of a sample from each device: its rows, as in DeviceBuffer, and the probes' values."""

    sample: Sample
    num_names: int
    rows: Sequence[Transfer]  # [L, P + 1, C] each
    witnesses: Sequence[tuple[Transfer, FloatArray]] = ()  # as in Compared
    found: Sequence[ProbeTransfer] = ()
    known: Mapping[str, float] = {}  # the probes' values on the host

    def arrived(self, *, wait: bool) -> bool:
        """Whether everything is here."""
        others = [found.transfer for found in self.found] + [transfer for transfer, _ in self.witnesses]
        return all([one.arrived(wait=wait) for one in (*self.rows, *others)])

    def unpack(self) -> ArrivedSample:
        packed = [np.asarray(one.take(), dtype=np.float64) for one in self.rows]
        rows_LPC = self._joined(packed)
        loss_scale, found_inf = np.nan, 0.0
        for one in packed:
            scale, inf = one[0, -1, : FOUND_INF + 1].tolist()
            loss_scale = loss_scale if scale != scale else scale
            found_inf = inf if inf > found_inf else found_inf
        metrics = {keys.SAMPLE_EVERY: float(self.sample.every), **self.known}
        if not math.isnan(self.sample.learning_rate):
            metrics[keys.LEARNING_RATE] = self.sample.learning_rate
        histograms: dict[str, MetricHistogram] = {}
        sums: dict[str, ArrivedSums] = {}
        for found in self.found:
            found.unpack(metrics, histograms, sums)
        if (loss := metrics.get(keys.LOSS)) is not None:  # a non-finite loss is missing, and is counted
            is_finite = math.isfinite(loss)
            metrics |= {keys.LOSS: loss if is_finite else math.nan, keys.NUM_NONFINITE_LOSS: float(not is_finite)}
        skipped = self.sample.skipped or bool(found_inf)
        untraced = _changed_without_a_trace(rows_LPC, self.sample)
        if len(rows_LPC) > 1:
            metrics |= _what_happened(rows_LPC, self.sample, loss_scale)
        rows, facts = rows_LPC[0], self._facts(rows_LPC.shape[1])
        return ArrivedSample(self.sample, rows, loss_scale, skipped, metrics, histograms, sums, untraced, facts)

    def _facts(self, num_names: int) -> FloatArray | None:
        """The facts of the host followed by those of the witnesses of all devices: [P, F]; None if there are none."""
        known, num_facts = self.sample.of_parameters, len(keys.PARAMETER_FACTS)
        if known is None and not self.witnesses:
            return None
        facts: FloatArray = np.full((num_names, num_facts), np.nan)
        if known is not None:
            facts[: len(known), : known.shape[1]] = known
        for transfer, num_P in self.witnesses:
            of_device = facts_of(np.asarray(transfer.take(), dtype=np.float64), num_P)
            here = facts[: len(num_P), num_facts - of_device.shape[1] :]
            np.fmax(here, of_device, out=here)  # a parameter is on one device: on all others its facts are NaN
        return facts

    def _joined(self, packed: Sequence[FloatArray]) -> FloatArray:
        """Join the rows of several devices, each of which is missing on all devices but one: [L, P, C]."""
        if len(packed) == 1:
            return packed[0][:, :-1]
        joined: FloatArray = np.full((max(map(len, packed), default=1), self.num_names, NUM_COLUMNS), np.nan)
        for rows_LPC in packed:
            here = ~np.isnan(rows_LPC[0, :-1, Column.NUM_ELEMENTS])
            joined[: len(rows_LPC), here] = rows_LPC[:, :-1][:, here]
        return joined


def _changed_without_a_trace(rows_LPC: FloatArray, sample: Sample) -> bool:
    """Whether the second measurement of a seemingly unmodified gradient differs from the first."""
    if not sample.compared and not sample.compared_early:  # the usual case
        return False
    at_step, early, rows_PC = list(sample.compared), list(sample.compared_early), rows_LPC[0]
    looks = [(rows_PC[at_step, Column.GRAD_SUM_SQ], rows_PC[at_step, Column.RECEIVED_SUM_SQ])]
    if len(rows_LPC) > 1:
        looks.append((rows_LPC[1, early, Column.GRAD_SUM_SQ], rows_PC[early, Column.GRAD_SUM_SQ]))
    low, high = (1 - CLIP_TOLERANCE) ** 2, (1 + CLIP_TOLERANCE) ** 2
    return any(bool(np.any((after < low * before) | (after > high * before))) for before, after in looks)


def _what_happened(rows_3PC: FloatArray, sample: Sample, loss_scale: float) -> dict[str, float]:
    """Whether a sample's gradients were clipped, and whether they were changed otherwise; corrects its rows in place.

    The second measurement is NaN where gradients did not change before clipping, or before the update if torch's
    functions did not clip them; the third is NaN where they did not change afterwards.
    """
    rows_PC, earlier_PC, received_PC = rows_3PC
    is_there_3P = ~np.isnan(rows_3PC[..., Column.NUM_ELEMENTS])
    was_there, was_seen = is_there_3P[1:] & is_there_3P[0]
    shrunk = other = multiplied = False
    if was_there.any():
        before = change_between(np.where(was_there[:, None], earlier_PC, rows_PC), rows_PC, sample.eps)
        shrunk, other = before.shrunk and not before.is_common, before.other and not before.is_common
        # If NaN and Inf arose after the backward, restore the rows that the backward left.
        num_now, num_earlier = (looks[:, Column.NUM_NAN] + looks[:, Column.NUM_INF] for looks in (rows_PC, earlier_PC))
        restored = was_there & (num_now > 0) & (num_earlier == 0)
        if not sample.by_torch and before.is_clipping and np.nansum(rows_PC[:, Column.NUM_ELEMENTS]) > 1:
            # The step itself has changed them, and no reduction over ranks of several elements does that.
            received_PC, was_seen, restored, shrunk = rows_PC.copy(), is_there_3P[0], was_there, False
        rows_PC[restored, GRADIENT_COLUMNS] = earlier_PC[restored, GRADIENT_COLUMNS]
    if was_seen.any():
        received_PC = np.where(was_seen[:, None], received_PC, rows_PC)
        change = change_between(rows_PC, received_PC, sample.eps)
        if loss_scale != 1 and abs(change.factor / loss_scale - 1) < CLIP_TOLERANCE:
            # The gradients still contain the loss scale, which the optimizer itself divides out in its step.
            rows_PC[was_seen, RECEIVED_COLUMNS] = rows_PC[was_seen][:, AS_LEFT]
        elif change.is_common and change.factor < 1:
            shrunk, multiplied = shrunk or sample.by_torch, not sample.by_torch
        else:
            shrunk, other = shrunk or change.shrunk, other or change.other
    if not shrunk and multiplied:
        clipped = MULTIPLIED
    elif not shrunk and other and sample.by_torch:
        clipped = np.nan  # another change hides whether torch clipped the gradient before
    else:
        clipped = float(shrunk and not (other and not sample.by_torch))
    return {keys.CLIPPED: clipped, keys.CHANGED: float(other)}
