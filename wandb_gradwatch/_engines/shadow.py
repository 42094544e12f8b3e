"""A module in place of a model that an engine trains: this rank's part of each parameter, and of its gradient."""

import weakref
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Final, Protocol, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .._boundary import Call, RaisedToTheUser, Replacement, entry_point
from .._runtime.error_boundary import ErrorBoundary
from .._runtime.sharding import local_part
from .engine import Engine, Function, Held, Outcome, Settings

_SHADOW: Final = "gradwatch_shadow"  # in the `__dict__` of a shadow's module: the shadow


class Observer(Protocol):
    """The capture, which is told of the backwards and steps of the engine. All methods are entry points."""

    @property
    def wants_gradients(self) -> bool:
        """Whether the step to come is measured."""

    def gradients_complete(self) -> None:
        """The gradients of an update are complete; its step follows."""

    def take_loss(self, value: Tensor, *, is_share: bool) -> None:
        """A backward was called on this loss, or on this share of the loss of the update."""


class EngineStep(Optimizer):
    """The step of an engine as that of an optimizer, which owns the shadow's parameters."""

    def __init__(self, groups: Iterable[dict[str, Any]]) -> None:
        super().__init__(groups, {})
        self.outcome: Outcome | None = None  # of the last step; None: it was not made, or raised
        self.make: Callable[[], Outcome | None] = lambda: None  # makes the engine's step

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        """Make the engine's step."""
        self.outcome = None
        self.outcome = self.make()


class Shadow:
    """A model as this rank's engine holds it: modules and parameters with the names of the model's own.

    The parameters are views of the engine's memory, as are their gradients, which they have during measured steps. The
    engine keeps the shadow alive, through the functions that `attach` replaces: the capture keeps nothing alive.
    """

    _boundary: ErrorBoundary  # of the watcher, from `attach` on

    def __init__(self, engine: Engine, model: nn.Module) -> None:
        self.engine = engine
        self._held = engine.held()
        self.module = _like(model)
        self.module.__dict__[_SHADOW] = self
        self._parameters = [self._registered(one, model) for one in self._held]
        of_held = dict(zip(map(id, self._held), self._parameters, strict=True))
        self._optimizer = EngineStep(
            {**_settings(given), "params": [of_held[id(one)] for one in some]}
            for given, some in engine.groups(self._held)
        )
        shadow = weakref.ref(self)

        def loss_scale_at(step: int) -> float | Tensor:
            return 1.0 if (one := shadow()) is None else one.engine.loss_scale()

        self.loss_scale_at = loss_scale_at  # a function that keeps nothing alive
        self._replaced: list[Replacement] = []  # functions of the engine
        self._observer: Observer | None = None

    def _registered(self, one: Held, model: nn.Module) -> nn.Parameter:
        """Register the parameter of this rank's part in the module of the same name."""
        *path, key = one.name.split(".")
        module, original = self.module, model
        for name in path:
            original = original.get_submodule(name)
            if name not in module._modules:
                module.add_module(name, _like(original))
            module = module.get_submodule(name)
        parameter = nn.Parameter(_whole(one, self.engine.values(one).detach()))
        module.register_parameter(key, parameter)
        return parameter

    def attach(self, observer: Observer, boundary: ErrorBoundary) -> None:
        """Tell the observer of the engine's backwards and steps from now on. Exceptions of ours go to the boundary."""
        self._observer, self._boundary = observer, boundary
        self._replace(self.engine.step, self._step_begins)
        if self.engine.backward is not None:
            self._replace(self.engine.backward, self._backward_begins)

    def detach(self) -> None:
        """Give the engine its own functions back. Idempotent."""
        self._observer = None
        for one in self._replaced:
            one.undo()
        self._replaced = []

    def _replace(self, function: Function, before: Callable[[Any, Call], None]) -> None:
        called = getattr(function.owner, function.name)
        one = Replacement(function.owner, function.name, before=partial(before, called))
        self._replaced.append(one)
        one.install()

    @entry_point()
    def _backward_begins(self, _: Any, call: Call) -> None:
        loss, is_share = self.engine.loss_of(call.args, call.kwargs)
        if self._observer is not None and isinstance(loss, Tensor) and loss.numel() == 1 and not loss.is_complex():
            self._observer.take_loss(loss, is_share=is_share)

    @entry_point()
    def _step_begins(self, function: Callable[..., Any], call: Call) -> None:
        observer = self._observer
        if observer is None:
            return
        is_measured = observer.wants_gradients
        if is_measured:
            self._boundary.run(self._show_gradients)
            observer.gradients_complete()
        scale = self.engine.loss_scale() if is_measured else None
        self._optimizer.make = partial(self._make, function, call, scale)
        try:
            self._optimizer.step()
        finally:
            self._optimizer.make = lambda: None
            if is_measured:
                for parameter in self._parameters:
                    parameter.grad = None

    def _make(self, function: Callable[..., Any], call: Call, loss_scale: float | Tensor | None) -> Outcome | None:
        """Make the engine's step, whose exceptions are the user's. Returns its outcome, if it is measured."""
        call.is_made = True
        with RaisedToTheUser():
            call.result = function(*call.args, **call.kwargs)
        if loss_scale is None:
            return None
        return self._boundary.run(self.engine.outcome, call.result, loss_scale)

    def _show_gradients(self) -> None:
        """Let the parameters show the engine's memory as it is now: it may have moved."""
        for one, parameter in zip(self._held, self._parameters, strict=True):
            values, gradient = self.engine.values(one), self.engine.gradient(one)
            if gradient is not None:
                gradient = gradient.detach().to(values.dtype)
            if one.mesh is None:
                parameter.data = values.view(one.shape)
                parameter.grad = None if gradient is None else gradient.view(one.shape)
            else:
                dtensor: Any = parameter
                dtensor._local_tensor = values
                # from_local() takes 30 us, its class 5 us
                dtensor.grad = None if gradient is None else type(dtensor)(gradient, dtensor._spec, requires_grad=False)
        gradients = [parameter.grad for parameter in self._parameters if parameter.grad is not None]
        self.engine.see(list(map(local_part, gradients)))
        for group, (given, _) in zip(self._optimizer.param_groups, self.engine.groups(self._held), strict=True):
            group.update(_settings(given))


def shadow_of(module: nn.Module) -> Shadow | None:
    """Return the shadow to which this module belongs; None for a model."""
    return cast("Shadow | None", module.__dict__.get(_SHADOW))


def _like(module: nn.Module) -> nn.Module:
    """Return a module without contents whose class has the same name, which tells what kind of layer it is."""
    return cast("nn.Module", type(type(module).__name__, (nn.Module,), {})())


def _settings(given: Settings) -> dict[str, Any]:
    return {key: value for key, value in given.items() if key != "params"}


def _whole(one: Held, part: Tensor) -> Tensor:
    """Return this rank's part as the tensor that it is a part of."""
    if one.mesh is None:
        return part.view(one.shape)
    from torch.distributed.tensor import DTensor

    like = torch.empty(one.shape, device="meta")
    return DTensor.from_local(part, one.mesh, one.placements, run_check=False, shape=like.shape, stride=like.stride())
