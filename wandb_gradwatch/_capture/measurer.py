"""Measures gradients into the open sample, corrected for the loss scale that they have at that moment."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from numbers import Real
from operator import itemgetter
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.nn import Parameter
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from .._measure.columns import NUM_COLUMNS, SCALE_POWER, Column
from .._measure.elements import onto
from .._measure.events import Event
from .._measure.measure import measure, measure_received
from .._runtime.autograd import Entry
from .._runtime.error_boundary import CallbackError
from .._runtime.notices import CannotWatchError
from .._runtime.sharding import local_gradient, local_part
from .parts import CaptureParts, MeasureOptions
from .probes import Probe, WatchedTensor
from .scaling import SCALES, scale_tensor

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
        return self._on(device) if device.type == "cuda" else nullcontext()

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

    def __init__(self, parts: CaptureParts, options: MeasureOptions, timer: DeviceTimer) -> None:
        self._parts, self._options, self._timer = parts, options, timer
        self._window, self._optimizer_registry, self._seen = parts.window, parts.optimizers, parts.seen
        self.eps = 0.0  # the coarsest machine epsilon among gradients measured twice in the open sample
        self._assumed_scaler: dict[int, GradScaler | None] = {}  # by slot, if a scaler is in use
        self._answer: tuple[int, float | Tensor | None] = (-1, None)  # last step and result of a loss_scale function

    def begin_sample(self) -> None:
        """Forget the gradients of the previous sample."""
        self.eps = 0.0
        self._seen.clear()
        self._assumed_scaler.clear()

    def measure(self, present: Sequence[Entry], *, scaled: bool = True, received_by: Optimizer | None = None) -> None:
        """Measure gradients that are not clipped yet, and, if whole rows are read, their parameters; tell the probes.

        Args:
            scaled: the gradients are as the backward left them, multiplied by the loss scale if there is one.
            received_by: the gradients are as this optimizer is about to use them; `scaled` is ignored.
        """
        still_scaled = scaled if received_by is None else getattr(received_by, "grad_scale", None) is not None
        scaled = scaled and received_by is None
        any_scaler = scaled and SCALES.scaler_of(None) is not None
        has_parameters = self._parts.rows_are_read
        histogram = self._options.histograms and self._parts.schedule.has_histogram
        for scaler, device, slots, held, gradients, theirs in self._groups(present, by_scaler=any_scaler):
            inverse_scale = None if received_by is None else _pending_inverse_scale(received_by, device)
            if scaled and (scale := self._scale_of(scaler, device)) is not None:
                self._window.set_loss_scale(scale)
                inverse_scale = onto(scale.double().reciprocal(), device)
            with self._timer.on(device):
                measurement = measure(
                    gradients,
                    theirs if has_parameters else None,
                    dead_threshold=self._options.dead_threshold,
                    inverse_scale=inverse_scale,
                    histogram=histogram,
                    backend=self._options.backend,
                )
            self._window.write(slots, measurement)
            self._seen.remember(slots, held)
            if any_scaler:
                self._assumed_scaler.update(dict.fromkeys(slots, scaler))
        if self._parts.probes and self._parts.schedule.is_sampled:
            self._parts.probes.tell(Probe.gradients_ready, self.watched(present, scaled=still_scaled))

    def _scale_of(self, scaler: GradScaler | None, device: torch.device) -> Tensor | None:
        return self.scale_by_hand(device) if scaler is None else scale_tensor(scaler)

    def scale_by_hand(self, device: torch.device) -> Tensor | None:
        """Return the user's `loss_scale` for the open step, 0-dim on the device; None without one."""
        scale = self._options.loss_scale
        if scale is None:  # the usual case
            return None
        if callable(scale) and not isinstance(scale, Tensor):
            step = self._parts.clock.open_step
            if self._answer[0] != step:
                try:
                    self._answer = step, scale(step)
                except Exception as error:  # of the user's function
                    raise CallbackError from error
            scale = self._answer[1]
        if scale is None:
            return None
        if isinstance(scale, Tensor):
            return onto(scale.detach().reshape(()), device)
        if not isinstance(scale, Real) or not 0 < scale < math.inf:
            raise CannotWatchError(f"loss_scale({self._answer[0]}) = {scale!r} must be a number above 0, and finite")
        return torch.full((), scale, device=device)

    def measure_after_clipping(self, present: Sequence[Entry], optimizer: Optimizer) -> None:
        """Measure gradients that may have been clipped since the backward; what clipping changes is missing."""
        for group in self._groups(present):
            measurement = measure(
                group.gradients,
                group.parameters,
                dead_threshold=self._options.dead_threshold,
                inverse_scale=_pending_inverse_scale(optimizer, group.device),
                backend=self._options.backend,
            )
            self._window.write_after_clipping(group.slots, measurement)

    def measure_received(self, present: Sequence[Entry], optimizer: Optimizer | None, *, whole: bool) -> None:
        """Measure gradients as the optimizer receives them: they may have changed since they were measured.

        Args:
            whole: measure whole rows, which tell how the gradients changed; otherwise only norms and non-finite counts.
        """
        backend = self._options.backend
        for _, device, slots, _, gradients, _ in self._groups(present):
            inverse_scale = None if optimizer is None else _pending_inverse_scale(optimizer, device)
            with self._timer.on(device):
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
            scale = self.loss_scale(parameter.device, self._optimizer_registry.of_slot(slot)) if scaled else None
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

    def loss_scale(self, device: torch.device, optimizer: Optimizer | None = None) -> Tensor | None:
        """Return the factor of the loss in this optimizer's backward; None if no loss scale is known."""
        return self._scale_of(SCALES.scaler_of(optimizer), device)

    def scale_of_backward(self, device: torch.device, slots: Iterable[int]) -> tuple[Tensor | None, bool]:
        """Return the factor of the loss in a backward that reached these slots, and whether the scaler is assumed."""
        if self._options.loss_scale is None and SCALES.last_used is None:
            return None, False
        owners = map(self._optimizer_registry.of_slot, slots)
        owner = next((optimizer for optimizer in owners if optimizer is not None), None)
        return self.loss_scale(device, owner), owner is None and SCALES.scaler_of(None) is not None

    def correct_scale(self, optimizer: Optimizer) -> None:
        """Correct rows whose loss scale was assumed before it was known which scaler steps this optimizer."""
        if not self._assumed_scaler:
            return
        actual = SCALES.scaler_of(optimizer)
        wrong: dict[int, tuple[GradScaler | None, list[int]]] = {}
        for slot in sorted(self._optimizer_registry.slots(optimizer)):
            if slot not in self._assumed_scaler:
                continue
            assumed = self._assumed_scaler.pop(slot)
            if assumed is not actual:
                wrong.setdefault(id(assumed), (assumed, []))[1].append(slot)
        for assumed, slots in wrong.values():
            scales = [None if scaler is None else scale_tensor(scaler) for scaler in (assumed, actual)]
            device = next((scale.device for scale in scales if scale is not None), None)
            if device is None:
                continue
            one = torch.ones((), dtype=torch.float64, device=device)
            before, after = (self.scale_by_hand(device) if scale is None else scale for scale in scales)
            self._window.set_loss_scale(one * torch.nan if after is None else after)
            factor = (one if before is None else before.double()) / (one if after is None else after.double())
            factor_C = torch.ones(NUM_COLUMNS, dtype=torch.float64, device=factor.device)
            for column, power in SCALE_POWER.items():
                factor_C[column] = factor**power
            factor_C[Column.RECEIVED_SUM_SQ] = factor**2  # still a copy of GRAD_SUM_SQ
            self._window.rescale(slots, factor_C)

    def _groups(self, present: Sequence[Entry], *, by_scaler: bool = False) -> list[_Group]:
        """Group the entries that have a gradient by device and, with `by_scaler`, by the scaler of their optimizer."""
        present = sorted(present, key=itemgetter(0))
        held = [gradient for _, parameter in present if (gradient := parameter.grad) is not None]
        devices = [gradient.device for gradient in held]
        if held and not by_scaler and devices.count(devices[0]) == len(devices):  # the usual case
            return [_group(None, present, held)]
        groups: dict[tuple[int, torch.device], tuple[GradScaler | None, list[Entry], list[Tensor]]] = {}
        for entry, gradient in zip(present, held, strict=True):
            scaler = SCALES.scaler_of(self._optimizer_registry.of_slot(entry[0])) if by_scaler else None
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


def slots_that_are_broken(entries: Iterable[Entry]) -> list[int]:
    """Return the slots of the parameters that hold NaN or Inf. Waits for the device."""
    of_device: dict[torch.device, list[Entry]] = {}
    for slot, parameter in entries:
        if not (is_lazy(parameter) or parameter.is_meta):  # they hold no values yet
            of_device.setdefault(parameter.device, []).append((slot, parameter))
    broken: list[int] = []
    for here in of_device.values():
        counts = measure_received([parameter for _, parameter in here])[:, 1:].sum(dim=1).tolist()
        broken += [slot for (slot, _), count in zip(here, counts, strict=True) if count]
    return sorted(broken)


def _pending_inverse_scale(optimizer: Optimizer, device: torch.device) -> Tensor | None:
    """Return the factor by which a fused optimizer will unscale the gradients itself; None for other optimizers."""
    grad_scale: Tensor | None = getattr(optimizer, "grad_scale", None)
    return None if grad_scale is None else onto(grad_scale.double().reciprocal().reshape(()), device)
