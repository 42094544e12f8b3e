"""The loss scale, learned without a host sync and without the user's help.

While something is watched, four public methods of the gradient scalers are wrapped: `scale` says which scaler is in
use, `unscale_` and `step` which optimizer it belongs to, and a `step` that returns without an optimizer step was
skipped. The scale itself stays the device tensor that the scaler keeps.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any, Final, Protocol

from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from .._runtime.steps import WrappedFunctions
from .._runtime.weak_ids import WeakKeyDictionary


class ScaleListener(Protocol):
    """What a watcher wants to know of gradient scalers: of the optimizers that it follows."""

    def follows(self, optimizer: Optimizer) -> bool:
        """Whether this optimizer updates something watched."""

    def before_unscale(self, optimizer: Optimizer) -> None:
        """The last moment at which the gradients are scaled and unclipped."""

    def after_unscale(self, optimizer: Optimizer) -> None:
        """The gradients have been unscaled in place."""

    def step_skipped(self, optimizer: Optimizer) -> None:
        """The scaler was told to step and did not."""


@dataclass(slots=True)
class OptimizerSteps:
    """What is known of an optimizer that has stepped, or that a scaler is about to step."""

    scaler: weakref.ref[GradScaler] | None = None  # None: it has stepped, and no scaler had to do with it
    is_taught: bool = False  # unscaled or stepped by the scaler, and not stepped yet
    has_stepped: bool = False  # since the scaler's step began

    def note(self) -> None:
        """It steps: its scaler, if it has one, did not skip it."""
        if self.is_taught:
            self.is_taught, self.has_stepped = False, True
        else:
            self.scaler = None


class LossScales(WrappedFunctions[ScaleListener]):
    """Which scaler is in use, and which optimizer it steps."""

    def __init__(self) -> None:
        super().__init__()
        self._known: WeakKeyDictionary[Optimizer, OptimizerSteps] = WeakKeyDictionary()
        self.last_used: weakref.ref[GradScaler] | None = None  # None: no scaler has been used so far

    def use(self, scaler: GradScaler) -> None:
        """Take this scaler to be the one in use until another scales a loss."""
        self.last_used = weakref.ref(scaler)

    def scaler_of(self, optimizer: Optimizer | None) -> GradScaler | None:
        """The scaler that steps this optimizer; for one that has not stepped yet (or None), the one last used."""
        known = self._known.get(optimizer)
        if known is not None and known.scaler is None:
            return None
        scaler = None if known is None or known.scaler is None else known.scaler()
        if scaler is None and self.last_used is not None:  # or that scaler is gone
            return self.last_used()
        return scaler

    def scaler_for(self, parameters: Collection[int]) -> GradScaler | None:
        """The scaler of the optimizer that has stepped one of these, by id; where none has, the one last used."""
        if self.last_used is None:
            return None
        held = ((one, id(p)) for one in self._known for group in one.param_groups for p in group["params"])
        return self.scaler_of(next((one for one, number in held if number in parameters), None))

    def steps_of(self, optimizer: Optimizer) -> OptimizerSteps:
        """The same object as long as there is this optimizer."""
        known = self._known.get(optimizer)
        if known is None:
            known = self._known[optimizer] = OptimizerSteps()
        return known

    # ---- the wrapped methods

    def _wrappers(self) -> Iterable[tuple[Any, str, Callable[..., Any]]]:
        classes: list[type] = [GradScaler]
        # Overrides `scale` and `unscale_`; only there to be wrapped if the program has imported it.
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

    def _unscale(
        self, original: Callable[..., Any], scaler: GradScaler, optimizer: Optimizer, *args: Any, **kwargs: Any
    ) -> Any:
        if not scaler.is_enabled():
            return original(scaler, optimizer, *args, **kwargs)
        self._learn(scaler, optimizer)
        listeners = self._following(optimizer)
        for listener in listeners:
            listener.before_unscale(optimizer)
        result = original(scaler, optimizer, *args, **kwargs)
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

    def _following(self, optimizer: Optimizer) -> list[ScaleListener]:
        return [listener for listener in self._listeners if listener.follows(optimizer)]

    def _learn(self, scaler: GradScaler, optimizer: Optimizer) -> OptimizerSteps:
        known = self.steps_of(optimizer)
        known.scaler, known.is_taught = weakref.ref(scaler), True
        return known


def scale_tensor(scaler: GradScaler) -> Tensor | None:
    """The scaler's loss scale, on its device; None before its first use.

    `get_scale()` is the public way and waits for the device; this reads the tensor that it would read.
    """
    scale: Tensor | None = getattr(scaler, "_scale", None)
    return scale


SCALES: Final = LossScales()
