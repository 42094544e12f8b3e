"""What scales gradients: the loss scale, found without a host sync and without a setting, and torch's clipping.

While a model is watched, three public methods of the gradient scalers are wrapped: `scale` shows which scaler is in
use, `unscale_` and `step` show the optimizer that it belongs to, and a `step` that returns without an optimizer step
was skipped. The scale is read as the device tensor that the scaler keeps. The functions that clip are wrapped too:
gradients that were rescaled, averaged or completed after the backward are measured again before they are clipped.
Clipping by other code is recognised by the gradients that it leaves: see `_measure/change.py`.
"""

import math
import sys
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from numbers import Real
from typing import Any, Final

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.nn import utils
from torch.nn.utils import clip_grad
from torch.optim import Optimizer

from .._boundary import Call, EntryPoints, RaisedToTheUser, entry_point
from .._measure.elements import onto
from .._runtime.listeners import Listener, Listeners
from .._runtime.notices import CannotWatchError
from .._runtime.steps import OptimizerTable, parameters_of
from .clock import SampleClock
from .optimizer_registry import OptimizerRegistry

GivenScale = float | Tensor | Callable[[int], float | Tensor]  # the user's `loss_scale`; the function gets the step
LOSS: Final = -1  # in place of a slot: the loss itself

# clip_grad_norm_ looks up its second half, a function of its own, in clip_grad, even if clip_grad_norm_ itself was
# imported by name before. Functions in both modules are wrapped in both.
_CLIPPING: Final = ("_clip_grads_with_norm_", "clip_grads_with_norm_", "clip_grad_value_")


@dataclass(slots=True)
class ScaledSteps:
    """How one optimizer steps. Several watchers may report the same step."""

    scaler: weakref.ref[GradScaler] | None = None  # None: its last step was made without a scaler
    is_scalers: bool = False  # `scaler` has unscaled the gradients of the step to come, or makes the step
    has_stepped: bool = False  # since the scaler's `step` began

    def begin(self) -> None:
        """Record that the optimizer is about to step, so that its scaler, if it has one, has not skipped the step."""
        self.has_stepped = True
        if not self.is_scalers:
            self.scaler = None


class GradScalers(Listeners):
    """Tracks which scaler is in use and which optimizers it steps; calls listeners around unscaling and clipping."""

    _needless_while_counting = _CLIPPING

    def __init__(self) -> None:
        super().__init__()
        self._known: OptimizerTable[ScaledSteps] = OptimizerTable()
        self.last_used: weakref.ref[GradScaler] | None = None  # None: no scaler has been used so far

    def use(self, scaler: GradScaler) -> None:
        """Set the scaler that is in use until another one is used."""
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

    def steps_of(self, optimizer: Optimizer) -> ScaledSteps:
        """Return the record of this optimizer, the same object as long as the optimizer exists."""
        known = self._known.get(optimizer)
        if known is None:
            known = self._known[optimizer] = ScaledSteps()
        return known

    def _wrappers(self) -> Iterable[tuple[Any, str, EntryPoints]]:
        classes: list[type] = [GradScaler]
        # It overrides `scale` and `unscale_`. A program that has imported FSDP may import it after watch().
        if "torch.distributed.fsdp" in sys.modules:
            from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

            classes.append(ShardedGradScaler)
        for cls in classes:
            yield cls, "scale", {"before": self._scale_begins}
            yield cls, "unscale_", {"before": self._unscale_begins, "after": self._unscale_ends}
            yield cls, "step", {"before": self._step_begins, "after": self._step_ends}
        for module in (clip_grad, utils):
            for name in _CLIPPING:
                yield module, name, {"before": self._clip_begins, "after": self._clip_ends}

    def _uninstall(self) -> None:
        super()._uninstall()
        self.last_used, self._known = None, OptimizerTable()  # what steps which optimizer is not seen from now on

    @entry_point()
    def _scale_begins(self, call: Call) -> None:
        if (scaler := call.args[0]).is_enabled():
            self.use(scaler)

    @entry_point()
    def _unscale_begins(self, call: Call) -> None:
        if (optimizer := self._learn(call)) is not None:
            call.found = optimizer, self._following(optimizer)
            for listener in call.found[1]:
                listener.before_unscale(optimizer)

    @entry_point()
    def _unscale_ends(self, call: Call) -> None:
        if call.found is not None:
            optimizer, listeners = call.found
            for listener in listeners:
                listener.after_unscale(optimizer)

    @entry_point()
    def _step_begins(self, call: Call) -> None:
        if (optimizer := self._learn(call)) is not None:
            call.found = optimizer, self.steps_of(optimizer)
            call.found[1].has_stepped = False

    @entry_point()
    def _step_ends(self, call: Call) -> None:
        if call.found is not None:
            optimizer, known = call.found
            known.is_scalers = False
            for listener in () if known.has_stepped else self._following(optimizer):
                listener.step_skipped(optimizer)

    def _following(self, optimizer: Optimizer) -> list[Listener]:
        return [listener for listener in self._listeners if listener.follows(optimizer)]

    def _learn(self, call: Call) -> Optimizer | None:
        """Record which optimizer an enabled scaler unscales or steps, and return it."""
        scaler, optimizer = call.args[0], _optimizer_in(call)
        if optimizer is None or not scaler.is_enabled():
            return None
        self.use(scaler)
        known = self.steps_of(optimizer)
        known.scaler, known.is_scalers = weakref.ref(scaler), True
        return optimizer

    @entry_point()
    def _clip_begins(self, call: Call) -> None:
        given = call.args[0] if call.args else call.kwargs.get("parameters")
        if torch.compiler.is_compiling() or given is None:
            return
        with RaisedToTheUser():  # a generator can be read only once, and its exceptions are the user's
            call.found = parameters = [given] if isinstance(given, Tensor) else list(given)
        if call.args:
            call.args = (parameters, *call.args[1:])
        else:
            call.kwargs["parameters"] = parameters
        for listener in self._listeners:
            if listener.counter is None:
                listener.before_clipping(parameters)

    @entry_point()
    def _clip_ends(self, call: Call) -> None:
        for listener in self._listeners if call.found is not None else ():
            if listener.counter is None:
                listener.after_clipping(call.found)


def _optimizer_in(call: Call) -> Optimizer | None:
    """Return the argument `optimizer` of a scaler's method."""
    return call.args[1] if len(call.args) > 1 else call.kwargs.get("optimizer")


SCALERS: Final = GradScalers()


def scale_tensor(scaler: GradScaler | None) -> Tensor | None:
    """Return the scaler's loss scale as a tensor on its device; None without a scaler, and before its first use.

    The public `get_scale()` reads the same tensor, but waits for the device.
    """
    scale: Tensor | None = getattr(scaler, "_scale", None)
    return scale


class LossScale:
    """The factor of the loss in the backwards of one watcher's models: the scale of a scaler, or the given one.

    Before an optimizer's first step it is not known which scaler steps it: the scaler last used is assumed until
    `corrections`. Scales are 0-dim tensors on any device, None if there is none.
    """

    def __init__(self, given: GivenScale | None, optimizers: OptimizerRegistry, clock: SampleClock) -> None:
        self._given, self._optimizers, self._clock = given, optimizers, clock
        self._answer: float | Tensor | None = None  # of a given function, at the end of the newest backward
        # The scalers by which the rows of these slots, or the LOSS, of the open sample were divided.
        self.assumed: dict[int, GradScaler | None] = {}

    def of(self, scaler: GradScaler | None, device: torch.device) -> Tensor | None:
        """Return the scale of this scaler; for None the user's `loss_scale` for the open step, on the device."""
        if scaler is not None:
            return scale_tensor(scaler)
        scale = self._given
        if scale is None:  # the usual case
            return None
        if callable(scale) and not isinstance(scale, Tensor):
            if self._answer is None:
                step = self._clock.open_step
                with RaisedToTheUser():
                    self._answer = scale(step)
            scale = self._answer
        if isinstance(scale, Tensor):
            return onto(scale.detach().reshape(()), device)
        if not isinstance(scale, Real) or not 0 < scale < math.inf:
            step = self._clock.open_step
            raise CannotWatchError(f"loss_scale({step}) = {scale!r} must be a number above 0, and finite")
        return torch.full((), scale, device=device)

    def forget(self) -> None:
        """Call the given function again: a backward has ended, or a new sample is open."""
        self._answer = None

    @property
    def is_given(self) -> bool:
        """Whether the user passed `loss_scale`."""
        return self._given is not None

    def scaler_of_slot(self, slot: int) -> GradScaler | None:
        """Return the scaler of this parameter's optimizer; while it is not known, the scaler last used."""
        return SCALERS.scaler_of(self._optimizers.of_slot(slot))

    def of_backward(self, device: torch.device, slots: Iterable[int]) -> Tensor | None:
        """Return the factor of the loss in a backward that reached these slots."""
        if self._given is None and SCALERS.last_used is None:
            return None
        owners = map(self._optimizers.of_slot, slots)
        owner = next((optimizer for optimizer in owners if optimizer is not None), None)
        scaler = SCALERS.scaler_of(owner)
        # An optimizer whose last step had no scaler may be about to make its first step with one.
        if SCALERS.last_used is not None and (owner is None or scaler is None):
            self.assumed[LOSS] = scaler
        return self.of(scaler, device)

    def corrections(self, optimizer: Optimizer) -> Iterator[tuple[list[int], Tensor, Tensor | None]]:
        """Yield what was divided by the scale of another scaler than the one that now steps this optimizer.

        Returns:
            Slots, ascending; the factor that corrects them, in float64; and their true scale. Yielded only once.
        """
        if not self.assumed:
            return
        actual = SCALERS.scaler_of(optimizer)
        known = sorted(self.assumed.keys() & {LOSS, *self._optimizers.slots(optimizer)})
        taken = [(slot, self.assumed.pop(slot)) for slot in known]
        for assumed in {id(one): one for _, one in taken if one is not actual}.values():
            scales = [scale for one in (assumed, actual) if (scale := scale_tensor(one)) is not None]
            if scales:
                one = torch.ones((), dtype=torch.float64, device=scales[0].device)
                before, after = self.of(assumed, one.device), self.of(actual, one.device)
                factor = (one if before is None else before.double()) / (one if after is None else after.double())
                yield [slot for slot, scaler in taken if scaler is assumed], factor, after


def pending_inverse_scale(optimizer: Optimizer | None, device: torch.device) -> Tensor | None:
    """Return the factor by which a fused optimizer will unscale the gradients itself; None for other optimizers."""
    grad_scale: Tensor | None = getattr(optimizer, "grad_scale", None)
    return None if grad_scale is None else onto(grad_scale.double().reciprocal().reshape(()), device)
