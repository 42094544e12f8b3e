"""Measures gradients into the open sample, and remembers which of them it has seen, and in which state.

A gradient that is the same tensor with the same version counter as at the end of the last backward has not been
clipped, unscaled or replaced since; what has is measured again, as what the optimizer received.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from ..statistics.columns import NUM_COLUMNS, SCALE_POWER, Column
from ..statistics.measure import measure, sum_sq
from ..window import Window
from .owners import Entry, Owners
from .probes import WatchedTensor
from .scaling import SCALES, scale_tensor
from .sharding import local_gradient, local_part

_TOKEN: Final = "_gradwatch_token"  # a number, so that a gradient that is saved loads with weights_only=True
_TOKENS: Final = itertools.count(1)


@dataclass(frozen=True)
class MeasureOptions:
    """What is measured of each gradient.

    Args:
        parameters: also the parameter's norm.
        dead_threshold: |g| <= this is dead.
        backend: as given to watch().
    """

    parameters: bool
    dead_threshold: float
    backend: str


@dataclass(slots=True)
class Seen:
    """A gradient as the last backward left it, and whether it was measured."""

    token: int  # also an attribute of the tensor: unlike an id it is not given to another when the tensor is gone
    version: int
    measured: bool

    @classmethod
    def of(cls, gradient: Tensor, *, measured: bool) -> Seen:
        """This gradient as it is now."""
        token = getattr(gradient, _TOKEN, None)
        if token is None:
            token = next(_TOKENS)
            setattr(gradient, _TOKEN, token)
        return cls(token, gradient._version, measured)

    def is_of(self, gradient: Tensor) -> bool:
        """Whether this is the same tensor."""
        return getattr(gradient, _TOKEN, None) is self.token

    def is_unmodified(self, gradient: Tensor) -> bool:
        """Whether it is the same and unmodified (but for writes through `.data`, which leave no trace)."""
        return self.version == gradient._version and self.is_of(gradient)


class Gauge:
    """The open sample's gradients: what was seen of them, and their rows in the window."""

    def __init__(self, window: Window, owners: Owners, options: MeasureOptions) -> None:
        self._window = window
        self._owners = owners
        self._options = options
        self.seen: dict[int, Seen] = {}  # by slot
        self._assumed_scaler: dict[int, GradScaler | None] = {}  # by slot, where a scaler is in use

    def begin_sample(self) -> None:
        """Forget what was seen: a new sample is open."""
        self.seen.clear()
        self._assumed_scaler.clear()

    def note(self, entries: Iterable[Entry]) -> None:
        """Remember the gradients' state without looking into them."""
        for slot, parameter in entries:
            if parameter.grad is not None:
                self.seen[slot] = Seen.of(parameter.grad, measured=False)

    def measure(self, present: Iterable[Entry], *, histogram: bool) -> None:
        """Measure gradients that are as the backward left them: scaled and unclipped."""
        any_scaler = SCALES.scaler_of(None) is not None
        for scaler, device, entries in self._grouped(present, scaled=True):
            inverse_scale = None
            if scaler is not None and (scale := scale_tensor(scaler)) is not None:
                self._window.set_loss_scale(scale)
                inverse_scale = scale.double().reciprocal().to(device, non_blocking=True)
            slots, gradients, parameters = _columns(entries)
            measurement = measure(
                gradients,
                parameters if self._options.parameters else None,
                dead_threshold=self._options.dead_threshold,
                inverse_scale=inverse_scale,
                histogram=histogram,
                backend=self._options.backend,
            )
            self._window.write(slots, measurement)
            for slot, parameter in entries:
                assert parameter.grad is not None
                self.seen[slot] = Seen.of(parameter.grad, measured=True)
                if any_scaler:
                    self._assumed_scaler[slot] = scaler

    def measure_after_clipping(self, present: Iterable[Entry], optimizer: Optimizer) -> None:
        """Measure gradients that may have been clipped since the backward; what clipping hides stays missing."""
        for _, device, entries in self._grouped(present, scaled=False):
            slots, gradients, parameters = _columns(entries)
            measurement = measure(
                gradients,
                parameters if self._options.parameters else None,
                inverse_scale=_pending_inverse_scale(optimizer, device),
                backend=self._options.backend,
            )
            self._window.write_after_clipping(slots, measurement)

    def measure_received(self, present: Iterable[Entry], optimizer: Optimizer) -> None:
        """One cheap pass over gradients that may have changed between the backward and the step."""
        for _, device, entries in self._grouped(present, scaled=False):
            slots, gradients, _ = _columns(entries)
            inverse_scale = _pending_inverse_scale(optimizer, device)
            received = sum_sq(gradients, inverse_scale=inverse_scale, backend=self._options.backend)
            self._window.write_received(slots, received)

    def watched(self, entries: Iterable[Entry], names: Sequence[str], *, scaled: bool) -> list[WatchedTensor]:
        """The entries as probes see them."""
        tensors = []
        for slot, parameter in entries:
            gradient = parameter.grad
            scaler = SCALES.scaler_of(self._owners.of_slot(slot)) if scaled else None
            scale = scale_tensor(scaler) if scaler is not None else None
            tensors.append(
                WatchedTensor(
                    names[slot],
                    local_part(parameter).detach(),
                    None if gradient is None else local_gradient(parameter).detach(),
                    None if scale is None else scale.reciprocal(),
                )
            )
        return tensors

    def correct_scale(self, optimizer: Optimizer) -> None:
        """Undo a loss scale that was assumed before it was known who steps this optimizer."""
        if not self._assumed_scaler:
            return
        actual = SCALES.scaler_of(optimizer)
        wrong: dict[int, tuple[GradScaler | None, list[int]]] = {}
        for slot in sorted(self._owners.slots(optimizer)):
            if slot not in self._assumed_scaler:
                continue
            assumed = self._assumed_scaler.pop(slot)
            if assumed is not actual:
                wrong.setdefault(id(assumed), (assumed, []))[1].append(slot)
        for assumed, slots in wrong.values():
            before = None if assumed is None else scale_tensor(assumed)
            after = None if actual is None else scale_tensor(actual)
            if after is not None:
                self._window.set_loss_scale(after)
            scale = before if before is not None else after
            if scale is None:
                continue
            factor = scale.double() if before is not None else torch.ones_like(scale, dtype=torch.float64)
            if after is not None:
                factor = factor / after.double()
            factor_C = torch.ones(NUM_COLUMNS, dtype=torch.float64, device=factor.device)
            for column, power in SCALE_POWER.items():
                factor_C[column] = factor**power
            factor_C[Column.RECEIVED_SUM_SQ] = factor**2  # so far a copy of what was measured
            self._window.rescale(slots, factor_C)

    def _grouped(
        self, present: Iterable[Entry], *, scaled: bool
    ) -> Iterator[tuple[GradScaler | None, torch.device, list[Entry]]]:
        """Entries by scaler and device, each group in ascending slots."""
        groups: dict[tuple[int, torch.device], tuple[GradScaler | None, list[Entry]]] = {}
        any_scaler = scaled and SCALES.scaler_of(None) is not None
        for slot, parameter in present:
            assert parameter.grad is not None
            scaler = SCALES.scaler_of(self._owners.of_slot(slot)) if any_scaler else None
            key = (id(scaler), parameter.grad.device)
            if key not in groups:
                groups[key] = (scaler, [])
            groups[key][1].append((slot, parameter))
        for (_, device), (scaler, entries) in groups.items():
            yield scaler, device, sorted(entries, key=_slot)


def _slot(entry: Entry) -> int:
    return entry[0]


def _columns(entries: list[Entry]) -> tuple[list[int], list[Tensor], list[Tensor]]:
    """Slots, local gradients and local parameters of entries that all have a gradient."""
    slots = [slot for slot, _ in entries]
    gradients = [local_gradient(parameter) for _, parameter in entries]
    return slots, gradients, [local_part(parameter).detach() for _, parameter in entries]


def _pending_inverse_scale(optimizer: Optimizer, device: torch.device) -> Tensor | None:
    """What an optimizer that unscales by itself is still going to multiply with; None for every other."""
    grad_scale: Tensor | None = getattr(optimizer, "grad_scale", None)
    return None if grad_scale is None else grad_scale.double().reciprocal().reshape(()).to(device, non_blocking=True)
