"""Measures gradients into the open sample, corrected for the loss scale that they have at that moment."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from operator import itemgetter
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.nn import Parameter
from torch.optim import Optimizer

from .._measure.columns import NUM_COLUMNS, SCALE_POWER
from .._measure.elements import onto
from .._measure.events import Event
from .._measure.measure import measure, measure_received
from .._runtime.autograd import Entry
from .._runtime.sharding import local_gradient, local_part
from .parts import CaptureConfig, CaptureParts
from .probes import Probe, WatchedTensor
from .scaling import LOSS, SCALERS, pending_inverse_scale

_UNTIMED: Final = nullcontext()
_MAX_UNREAD: Final = 256  # pairs of events; a device with more is not timed until it has caught up


class DeviceTimer:
    """Sums the time between pairs of CUDA events on the devices' current streams, for `max_overhead`.

    The events are queried; the host never waits for them. The time includes pauses of the stream, for instance while
    another stream uses the device. Only CUDA devices are timed: on the CPU the host's time is all there is.
    """

    def __init__(
        self,
        make_event: Callable[[], Any] = lambda: Event(timed=True),
        stream_of: Callable[[torch.device], Any] = torch.cuda.current_stream,
    ) -> None:
        self._make_event, self._stream_of = make_event, stream_of
        self._seconds: dict[torch.device, float] = {}
        self._unread: dict[torch.device, deque[tuple[Any, Any]]] = {}
        self._free: dict[torch.device, list[tuple[Any, Any]]] = {}  # an event belongs to its first device

    def on(self, device: torch.device) -> AbstractContextManager[None]:
        """Time the work that is queued on the device's current stream inside this context; no-op without CUDA."""
        return self._on(device) if device.type == "cuda" else _UNTIMED

    @contextmanager
    def _on(self, device: torch.device) -> Iterator[None]:
        unread = self._unread.setdefault(device, deque())
        if len(unread) >= _MAX_UNREAD:
            yield
            return
        free = self._free.setdefault(device, [])
        start, end = free.pop() if free else (self._make_event(), self._make_event())
        stream = self._stream_of(device)
        start.record(stream)
        yield
        end.record(stream)
        unread.append((start, end))

    def seconds(self) -> float:
        """Return the seconds so far of the busiest device: devices work in parallel."""
        for device, unread in self._unread.items():
            while unread and unread[0][1].query():
                start, end = unread.popleft()
                self._seconds[device] = self._seconds.get(device, 0.0) + start.elapsed_time(end) / 1e3
                self._free[device].append((start, end))
        return max(self._seconds.values(), default=0.0)


def device_lag(
    make_event: Callable[[], Any] = Event, current_stream: Callable[[], Any] = torch.cuda.current_stream
) -> Callable[[], Callable[[], bool]]:
    """Return `ErrorBoundary.lag` for the current CUDA device.

    An event is recorded when the monitor's code begins. If the device has not reached it when the code ends, the device
    has not waited for the host in between, and the host's time has not delayed the training.
    """
    events: dict[torch.device, Any] = {}  # an event belongs to its first device

    def begin() -> Callable[[], bool]:
        stream = current_stream()
        event = events.get(stream.device) or events.setdefault(stream.device, make_event())
        event.record(stream)
        return lambda: not event.query()

    return begin


class _Group(NamedTuple):
    """Gradients of one scaler on one device, in ascending slots: [N] each."""

    scaler: GradScaler | None
    device: torch.device
    slots: list[int]
    held: list[Tensor]  # `.grad` of each parameter
    gradients: list[Tensor]  # the gradients, the local part of each if it is sharded
    parameters: list[Tensor]  # the parameters, likewise


class Measurer:
    """Measures gradients of the open sample, writes their rows to the window and remembers their versions."""

    def __init__(self, parts: CaptureParts, config: CaptureConfig) -> None:
        self._parts, self._config, self.timer = parts, config, DeviceTimer()
        self._window, self._seen, self._loss_scale = parts.window, parts.seen, parts.loss_scale
        self.eps = 0.0  # the coarsest machine epsilon among gradients measured twice in the open sample

    def measure(self, present: Sequence[Entry], *, scaled: bool = True, received_by: Optimizer | None = None) -> None:
        """Measure gradients that are not clipped yet, and, if whole rows are read, their parameters; tell the probes.

        Args:
            scaled: the gradients are as the backward left them, multiplied by the loss scale if there is one.
            received_by: the gradients are as this optimizer is about to use them; `scaled` is ignored.
        """
        still_scaled = scaled if received_by is None else getattr(received_by, "grad_scale", None) is not None
        scaled = scaled and received_by is None
        any_scaler = scaled and SCALERS.scaler_of(None) is not None
        has_parameters = self._parts.rows_are_read
        histogram = self._config.histograms and self._parts.schedule.has_histogram
        for scaler, device, slots, held, gradients, theirs in self._groups(present, by_scaler=any_scaler):
            inverse_scale = pending_inverse_scale(received_by, device)
            if scaled and (scale := self._loss_scale.of(scaler, device)) is not None:
                self._window.set_loss_scale(scale)
                inverse_scale = onto(scale.double().reciprocal(), device)
            if device.type == "cuda" and self._parts.boundary.lag is None:
                self._parts.boundary.lag = device_lag()
            with self.timer.on(device):
                measurement = measure(
                    gradients,
                    theirs if has_parameters else None,
                    dead_threshold=self._config.dead_threshold,
                    inverse_scale=inverse_scale,
                    histogram=histogram,
                    backend=self._config.backend,
                )
                if self._parts.schedule.is_sampled and not self._parts.merges_ranks:
                    self._window.write_witnesses(slots, gradients, theirs)
            self._window.write(slots, measurement)
            self._seen.remember(slots, held)
            if any_scaler:
                self._loss_scale.assumed.update(dict.fromkeys(slots, scaler))
        if self._parts.probes.active and self._parts.schedule.is_sampled:
            self._parts.probes.tell(Probe.gradients_ready, self.watched(present, scaled=still_scaled))

    def measure_after_clipping(self, present: Sequence[Entry], optimizer: Optimizer) -> None:
        """Measure gradients that may have been clipped since the backward; what clipping changes is missing."""
        for group in self._groups(present):
            measurement = measure(
                group.gradients,
                group.parameters,
                dead_threshold=self._config.dead_threshold,
                inverse_scale=pending_inverse_scale(optimizer, group.device),
                backend=self._config.backend,
            )
            self._window.write_after_clipping(group.slots, measurement)

    def measure_received(self, present: Sequence[Entry], optimizer: Optimizer | None, *, whole: bool) -> None:
        """Measure gradients as the optimizer receives them: they may have changed since they were measured.

        Args:
            whole: measure whole rows, which tell how the gradients changed; otherwise only norms and non-finite counts.
        """
        backend = self._config.backend
        for _, device, slots, _, gradients, _ in self._groups(present):
            inverse_scale = pending_inverse_scale(optimizer, device)
            with self.timer.on(device):
                received = (
                    measure(gradients, None, inverse_scale=inverse_scale, backend=backend).rows
                    if whole
                    else measure_received(gradients, inverse_scale=inverse_scale, backend=backend)
                )
            self._window.write_received(slots, received)
            self.note_precision(gradients)

    def note_precision(self, gradients: Iterable[Tensor]) -> None:
        """Record the machine epsilon of gradients that are compared with their earlier values."""
        dtypes = {gradient.dtype for gradient in gradients}
        self.eps = max([self.eps, *(torch.finfo(dtype).eps for dtype in dtypes)])

    def watched(
        self, entries: Iterable[Entry], *, scaled: bool, updated_by: Optimizer | None = None
    ) -> list[WatchedTensor]:
        """Return the entries in the form that probes receive."""
        tensors = []
        for slot, parameter in entries:
            gradient = parameter.grad
            scaler = self._loss_scale.scaler_of_slot(slot) if scaled else None
            scale = self._loss_scale.of(scaler, parameter.device) if scaled else None
            tensors.append(
                WatchedTensor(
                    self._parts.registry.names[slot],
                    local_part(parameter).detach(),
                    None if gradient is None else local_gradient(parameter).detach(),
                    None if scale is None else scale.reciprocal(),
                    updated_by,
                    parameter,
                    self._parts.shards.is_whole(parameter),
                )
            )
        return tensors

    def correct_scale(self, optimizer: Optimizer) -> None:
        """Correct what was measured before it was known which scaler steps this optimizer."""
        for slots, factor, scale in self._loss_scale.corrections(optimizer):
            if slots[0] == LOSS:
                self._parts.loss.rescale(factor)
            if not (rows := [slot for slot in slots if slot != LOSS]):
                continue
            self._window.set_loss_scale(torch.nan / factor.new_ones(()) if scale is None else scale)
            factor_C = factor.new_ones(NUM_COLUMNS)
            for column, power in SCALE_POWER.items():
                factor_C[column] = factor**power
            self._window.rescale(rows, factor_C)

    def _groups(self, present: Sequence[Entry], *, by_scaler: bool = False) -> list[_Group]:
        """Group the entries that have a gradient by device and, with `by_scaler`, by the scaler of their optimizer."""
        present = sorted(present, key=itemgetter(0))
        held = [gradient for _, parameter in present if (gradient := parameter.grad) is not None]
        devices = [gradient.device for gradient in held]
        if held and not by_scaler and devices.count(devices[0]) == len(devices):  # the usual case
            return [_group(None, present, held)]
        groups: dict[tuple[int, torch.device], tuple[GradScaler | None, list[Entry], list[Tensor]]] = {}
        for entry, gradient in zip(present, held, strict=True):
            scaler = self._loss_scale.scaler_of_slot(entry[0]) if by_scaler else None
            _, entries, gradients = groups.setdefault((id(scaler), gradient.device), (scaler, [], []))
            entries.append(entry)
            gradients.append(gradient)
        return [_group(*each) for each in groups.values()]


def _group(scaler: GradScaler | None, entries: Sequence[Entry], held: list[Tensor]) -> _Group:
    slots, parameters, gradients = [slot for slot, _ in entries], [parameter for _, parameter in entries], held
    if not {Parameter}.issuperset(map(type, parameters)):
        gradients = list(map(local_gradient, parameters))
        parameters = list(map(local_part, parameters))
    return _Group(scaler, held[0].device, slots, held, gradients, parameters)
