"""What probes share: they are bound to the watched models, and do nothing at moments that they have no use for.

ModuleProbe         any probe
ParameterProbe      of parameters, their gradients and updates
ForwardProbe        of what flows through modules
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Final, TypeGuard, TypeVar

import torch
from torch import Tensor, nn

from .._capture.parameter_registry import NameFilter
from .._capture.probes import Found, Probe, WatchedTensor
from .._measure.elements import onto
from .._runtime.sharding import local_part
from ..rules import Rule
from ._forward_hooks import Dims, ForwardHook
from ._module_index import ROOT, ModuleIndex, ProbeShards, chosen_by, matcher
from ._rows import Store, widened

logger: Final = logging.getLogger("wandb_gradwatch")

# This many measured updates without a forward that is seen are worth a word; one may be another model's.
_PATIENCE_IN_UPDATES: Final = 3

ModuleFilter = NameFilter | type[nn.Module]


class ModuleProbe(Probe):
    """A probe of watched models. At the moments that it does not override it does nothing."""

    logs: frozenset[tuple[str, str]] = frozenset()  # families and metrics: ("update", "norm") for `update/<name>/norm`
    brings: tuple[type[Rule], ...] = ()  # the rules that a watcher with the default rules gets with this probe
    # Whether there may be several of its kind, which are for different names, as their match= says.
    may_be_several: ClassVar[bool] = True
    _match: object = None  # what the user gave to choose modules or parameters
    _matches: Callable[[str], bool]
    _said: frozenset[str] = frozenset()

    def __repr__(self) -> str:
        match = self._match.__name__ if isinstance(self._match, type) else repr(self._match)
        return f"{type(self).__name__}({'' if self._match is None else match})"

    def say_once(self, what: str, *args: object) -> None:
        """Log what this probe does, once in its life."""
        if what not in self._said:
            self._said |= {what}
            logger.warning(f"wandb_gradwatch: %r {what}", self, *args)

    def bind(self, models: ModuleIndex) -> None:
        """Called once, by watch(): check what can be checked, and raise what has to be raised. Hook nothing yet."""

    def check_match(self, what: str, names: Iterable[str]) -> None:
        """Raise a ValueError where the match chooses none of these names."""
        chosen_by(self._matches, names, owner=f"{type(self).__name__}()", match=self._match, what=what)


class Befores(dict[str, Tensor]):
    """Copies of parameters from before an update until after it, by name."""

    def keep(self, tensors: Iterable[WatchedTensor]) -> None:
        self.update({tensor.name: tensor.parameter.clone() for tensor in tensors})

    def changes(self, tensors: Iterable[WatchedTensor]) -> Iterator[tuple[str, Tensor, Tensor]]:
        """Name, change (half precision in float32) and former value of each that was kept; each copy is dropped."""
        for tensor in tensors:
            before = self.pop(tensor.name, None)
            if before is not None and before.shape == tensor.parameter.shape:
                yield tensor.name, widened(tensor.parameter) - widened(before), before


class ParameterProbe(ModuleProbe):
    """A probe of parameters: knows which of them it is for, which are whole here, and whether the sample is due."""

    _shards: ProbeShards

    def __init__(self, match: NameFilter | None = None) -> None:
        self._match = match
        self._matches = matcher(match, repr(self))
        self._is_due = False
        self._found: dict[str, Found] = {}  # in the open sample
        self._befores = Befores()

    def bind(self, models: ModuleIndex) -> None:
        self._shards = ProbeShards(models)
        self.check_match("parameter", models.watched_parameters())

    def start(self, next_step_is_due: bool, histogram_is_due: bool) -> None:
        self._is_due, self._found = next_step_is_due, {}
        self._befores.clear()  # of updates that never ended

    def take(self) -> Mapping[str, Found]:
        found, self._found = self._found, {}
        return found

    def close(self) -> None:
        self._befores.clear()


@dataclasses.dataclass(frozen=True)
class ReadByProbe:
    """The meaning of sums that say nothing by themselves: `derive` of their probe reads them."""

    num_sums: int
    of_every_rank: bool = True
    num_parts: int = 0  # of a step, which the sums compare

    def __call__(self, sums: Sequence[float]) -> Mapping[str, float]:
        return {}


AnyStore = TypeVar("AnyStore", bound=Store[Any, Any])


class ForwardProbe(ModuleProbe):
    """A probe that looks into forwards: opens and shuts its tap, and says once where it sees nothing.

    What a forward adds is pending until a backward has ended or an optimizer steps: the sample before may still be open
    when the next forward runs. A forward of a whole model that does not come to its end, because something in it
    raised, adds nothing. Evaluations belong to the next sample, and are seen between samples too.
    """

    def __init__(self, match: ModuleFilter | None = None, *, in_evaluation: bool = False) -> None:
        self._match = match
        self._matches = (lambda _: False) if isinstance(match, type) else matcher(match, repr(self))
        self._in_evaluation = in_evaluation
        when: Any = "evaluation" if in_evaluation else "training"
        self._tap = ForwardHook(self, ModuleIndex(), on_logged=self.logged, when=when)  # sees nothing before tap_into
        self._roots: frozenset[str] = frozenset()
        self._depth = 0  # of forwards of whole models that have begun: one may call itself
        self._handled: BaseException | None = None  # what was being handled when the outermost began
        self._stores: list[Store[Any, Any]] = []
        self._due = False
        self._seen_any = False  # since the last update
        self._unseen_updates = 0  # in a row

    @property
    def seconds_spent(self) -> float:
        return self._tap.boundary.seconds_spent

    def bind(self, models: ModuleIndex) -> None:
        self.tap_into(models)
        self.check_match("module", dict(models.modules()))

    def tap_into(self, models: ModuleIndex) -> None:
        """See the forwards of these models from the next sample on, and find the modules that the match chooses."""
        self._tap.models = models
        self._roots = frozenset(prefix.removesuffix(".") or ROOT for prefix, _ in models.alive())
        self._look()

    def _look(self) -> None:
        """Find the modules of a class that there are now."""
        if isinstance(of_class := self._match, type):
            names = frozenset(name for name, module in self._tap.models.modules() if isinstance(module, of_class))
            self._matches = names.__contains__

    def sees(self, name: str, module: nn.Module) -> bool:
        """Whether `forward_done` is to be told of this module. Asked when a sample that is due begins."""
        return self._matches(name)

    def forward_done(self, name: str, module: nn.Module, args: Any, kwargs: Mapping[str, Any], output: Any) -> None:
        """The forward of a module that it sees has ended."""

    def logged(self, module: str, name: str, thing: Any, dims: Dims) -> None:
        """A module hands over something."""

    def collect(self, store: AnyStore) -> AnyStore:
        """The store, which forwards add to as pending, and `take` takes the sample from."""
        self._stores.append(store)
        return store

    def forward_begins(self, name: str, module: nn.Module, args: Any, kwargs: Mapping[str, Any], _: Any) -> None:
        """The forward of a whole model begins."""
        self._depth += 1
        if self._depth == 1:
            self._handled = sys.exc_info()[1]
            for store in self._stores:
                store.mark()

    def _forward_ends(self, *_: Any) -> None:
        self._depth = max(self._depth - 1, 0)
        # In a hook that is always called, an exception that was not there at the beginning is the forward's own.
        if self._depth == 0 and sys.exc_info()[1] is not self._handled:
            for store in self._stores:
                store.go_back()

    def forget_pending(self) -> None:
        """What is pending belongs to no sample."""
        for store in self._stores:
            store.forget_pending()

    def start(self, next_step_is_due: bool, histogram_is_due: bool) -> None:
        self._due, self._depth = next_step_is_due, 0
        if not (next_step_is_due or self._in_evaluation):
            self._tap.shut()
            self.forget_pending()
            return
        self._look()  # a module may be new
        self._tap.hook(self.sees, self.forward_done)
        self._tap.hook(lambda name, _: name in self._roots, self.forward_begins, at="beginning")
        self._tap.hook(lambda name, _: name in self._roots, self._forward_ends, at="any end")
        self._tap.open()

    def gradients_ready(self, tensors: Sequence[WatchedTensor]) -> None:
        for store in self._stores:
            store.settle()

    def before_update(self, tensors: Sequence[WatchedTensor]) -> None:
        for store in self._stores:
            store.settle()
        self._tap.shut()  # an optimizer that evaluates its closure again runs forwards of no interest
        if not self._due or not self._roots or self._in_evaluation:
            return
        self._unseen_updates = 0 if self._seen_any else self._unseen_updates + 1
        self._seen_any = False
        if self._unseen_updates == _PATIENCE_IN_UPDATES:
            self.say_once(
                "has seen no forward of the modules that it matches in %d updates. Inside a compiled model nothing can "
                "be seen: match the whole model's output, or compile less of it.",
                _PATIENCE_IN_UPDATES,
            )

    def after_update(self, tensors: Sequence[WatchedTensor]) -> None:
        if self._due or self._in_evaluation:
            self._tap.open()

    def close(self) -> None:
        self._tap.remove()


def dense(gradient: Tensor) -> Tensor:
    return gradient if gradient.layout is torch.strided else gradient.to_dense()


def without_scale(gradient: Tensor, inverse_scale: Tensor | None) -> Tensor:
    """A gradient without the loss scale; half precision that has one as float32."""
    return gradient if inverse_scale is None else widened(gradient) * onto(inverse_scale, gradient.device)


def tensors_in(output: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """Every real or complex floating tensor in an output, with where it lies.

    A lone tensor lies at "", those of tuples, lists, dicts and dataclasses at "output_0", "output_hidden_1", by index
    and key. Of a tensor that several ranks hold together (a DTensor) it is this rank's part.
    """
    for where, tensor in leaves_in(output, path):
        yield where, local_part(tensor.values() if tensor.is_nested else tensor).detach()


def leaves_in(output: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """The same tensors themselves, as they are in the graph."""
    if isinstance(output, Tensor):
        if is_measurable(output):
            yield path, output
        return
    if isinstance(output, Mapping):
        items: Any = output.items()
    elif isinstance(output, tuple | list):
        items = zip(getattr(output, "_fields", range(len(output))), output, strict=True)
    elif dataclasses.is_dataclass(output) and not isinstance(output, type):
        items = [(field.name, getattr(output, field.name)) for field in dataclasses.fields(output)]
    else:
        return
    for key, value in items:
        yield from leaves_in(value, f"{path or 'output'}_{key}")


def is_measurable(thing: object) -> TypeGuard[Tensor]:
    """Whether this is a tensor with real or complex floating elements to look at.

    One under vmap or grad stands for many tensors and has none; what is empty has no statistics.
    """
    if not isinstance(thing, Tensor) or not (thing.is_floating_point() or thing.is_complex()):
        return False
    return thing.numel() > 0 and not torch._C._functorch.is_functorch_wrapped_tensor(thing)


def slices(tensor: Tensor, dims: Dims) -> list[tuple[str, Tensor]]:
    """A tensor's slices along its named dimensions, each with its label; without any, the tensor itself under ""."""
    return list(zip(*labelled(tensor, dims), strict=True)) if dims else [("", tensor)]


def labelled(tensor: Tensor, dims: Dims) -> tuple[list[str], Tensor]:
    """The K labels of these slices, and the slices as one tensor: [K, ...]."""
    if not dims:
        return [""], tensor.reshape(1, -1)
    wrong = [dim for dim in dims if not -tensor.ndim <= dim < tensor.ndim]
    if wrong:
        raise ValueError(f"dims={dict(dims)!r} names dimension {wrong[0]}, but the tensor has shape {[*tensor.shape]}")
    front = tensor.movedim([dim % tensor.ndim for dim in dims], list(range(len(dims))))
    sizes = zip(dims.values(), front.shape, strict=False)
    parts = ([f"{name}_{index}" for index in range(size)] for name, size in sizes)
    return list(map("/".join, itertools.product(*parts))), front.flatten(0, len(dims) - 1)


def tensor_name(module: str, path: str, label: str = "") -> str:
    """The name of a tensor: the module's, where it lies in the output, and which slice of it."""
    name = f"{module}.{path}" if path else module
    return f"{name}/{label}" if label else name
