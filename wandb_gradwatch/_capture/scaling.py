"""Detects the loss scale without a host sync and without a setting.

While a model is watched, three public methods of the gradient scalers are wrapped: `scale` shows which scaler is in
use, `unscale_` and `step` show the optimizer that it belongs to, and a `step` that returns without an optimizer step
was skipped. The scale is read as the device tensor that the scaler keeps.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any, Final

from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from .._runtime.steps import Listener, Listeners, parameters_of
from .._runtime.weak_ids import WeakKeyDictionary


@dataclass(slots=True)
class OptimizerSteps:
    """The scaler of an optimizer that has stepped, or that a scaler is about to step."""

    scaler: weakref.ref[GradScaler] | None = None  # None: the optimizer has stepped without a scaler
    is_taught: bool = False  # `scaler` has unscaled it or is about to step it, and it has not stepped yet
    has_stepped: bool = False  # since the scaler's `step` began

    def note(self) -> None:
        """Record that the optimizer steps, so that its scaler, if it has one, has not skipped the step."""
        if self.is_taught:
            self.is_taught, self.has_stepped = False, True
        else:
            self.scaler = None


class LossScales(Listeners):
    """Tracks which scaler is in use and which optimizers each scaler steps."""

    def __init__(self) -> None:
        super().__init__()
        self._known: WeakKeyDictionary[Optimizer, OptimizerSteps] = WeakKeyDictionary()
        self.last_used: weakref.ref[GradScaler] | None = None  # None: no scaler has been used so far

    def use(self, scaler: GradScaler) -> None:
        """Set the scaler that is in use until another one scales a loss."""
        self.last_used = weakref.ref(scaler)

    def scaler_of(self, optimizer: Optimizer | None) -> GradScaler | None:
        """Return the scaler that steps this optimizer; before its first step, or for None, the scaler last used."""
        known = self._known.get(optimizer)
        if known is not None and known.scaler is None:
            return None
        scaler = None if known is None or known.scaler is None else known.scaler()
        if scaler is None and self.last_used is not None:  # not known yet, or deleted
            return self.last_used()
        return scaler

    def scaler_for(self, parameters: Collection[int]) -> GradScaler | None:
        """Return the scaler of the optimizer that holds one of these ids of parameters; if none does, the last used."""
        if self.last_used is None:
            return None
        held = ((one, id(p)) for one in self._known for p in parameters_of(one))
        return self.scaler_of(next((one for one, number in held if number in parameters), None))

    def steps_of(self, optimizer: Optimizer) -> OptimizerSteps:
        """Return the record of this optimizer, the same object as long as the optimizer exists."""
        known = self._known.get(optimizer)
        if known is None:
            known = self._known[optimizer] = OptimizerSteps()
        return known

    def _wrappers(self) -> Iterable[tuple[Any, str, Callable[..., Any]]]:
        classes: list[type] = [GradScaler]
        # It overrides `scale` and `unscale_`. Only a program that has imported it can use it.
        if (sharded := sys.modules.get("torch.distributed.fsdp.sharded_grad_scaler")) is not None:
            classes.append(sharded.ShardedGradScaler)
        methods = {"scale": self._scale, "unscale_": self._unscale, "step": self._step}
        return [(cls, name, wrapper) for cls in classes for name, wrapper in methods.items()]

    def _uninstall(self) -> None:
        super()._uninstall()
        self.last_used = None

    def _scale(self, original: Callable[..., Any], scaler: GradScaler, *args: Any, **kwargs: Any) -> Any:
        if scaler.is_enabled():
            self.use(scaler)
        return original(scaler, *args, **kwargs)

    def _unscale(self, original: Callable[..., Any], scaler: GradScaler, optimizer: Optimizer) -> Any:
        if not scaler.is_enabled():
            return original(scaler, optimizer)
        self._learn(scaler, optimizer)
        listeners = self._following(optimizer)
        for listener in listeners:
            listener.before_unscale(optimizer)
        result = original(scaler, optimizer)
        for listener in listeners:
            listener.after_unscale(optimizer)
        return result

    def _step(
        self, original: Callable[..., Any], scaler: GradScaler, optimizer: Optimizer, *args: Any, **kwargs: Any
    ) -> Any:
        if not scaler.is_enabled():
            return original(scaler, optimizer, *args, **kwargs)
        known = self._learn(scaler, optimizer)
        known.has_stepped = False
        result = original(scaler, optimizer, *args, **kwargs)
        known.is_taught = False
        if not known.has_stepped:
            for listener in self._following(optimizer):
                listener.step_skipped(optimizer)
        return result

    def _following(self, optimizer: Optimizer) -> list[Listener]:
        return [listener for listener in self._listeners if listener.follows(optimizer)]

    def _learn(self, scaler: GradScaler, optimizer: Optimizer) -> OptimizerSteps:
        known = self.steps_of(optimizer)
        known.scaler, known.is_taught = weakref.ref(scaler), True
        return known


def scale_tensor(scaler: GradScaler) -> Tensor | None:
    """Return the scaler's loss scale as a tensor on its device; None before its first use.

    The public `get_scale()` reads the same tensor, but waits for the device.
    """
    scale: Tensor | None = getattr(scaler, "_scale", None)
    return scale


SCALES: Final = LossScales()
