"""What probes share: they are bound to the watched models, and do nothing at moments that they have no use for.

ModuleProbe         any probe
ParameterProbe      of parameters, their gradients and updates
OwnGradientProbe    of the gradients that a rank computes itself, before those of the others are averaged into them
ForwardProbe        of what flows through modules

Sums of squares over the parts of a sharded parameter add up to those of the whole, so distances merge over ranks, as
rows do. Any other function of a part is not the function of the whole: it is left out, and that is said.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final, TypeVar

from torch import Tensor, nn

from .._capture.parameter_registry import NameFilter
from .._capture.probes import Found, Probe, WatchedTensor
from .._measure.elements import onto
from .._runtime.sharding import has_fsdp1, local_part, world_size
from ..rules import Rule
from ._forward_hooks import ROOT, ForwardHook, ModuleIndex, chosen_by, logger, matcher
from ._rows import Dims, Store, dense, square_of, widened

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
        if what not in self._said:
            self._said |= {what}
            logger.warning(f"wandb_gradwatch: %r {what}", self, *args)

    def bind(self, models: ModuleIndex) -> None:
        """Called once, by watch(): check what can be checked, and raise what has to be raised. Hook nothing yet."""

    def check_match(self, what: str, names: Iterable[str]) -> None:
        chosen_by(self._matches, names, owner=f"{type(self).__name__}()", match=self._match, what=what)


@dataclass(frozen=True)
class Layout:
    """How a sharded parameter lies on its ranks."""

    cuts: tuple[tuple[int, int, int], ...]  # dimension, into how many chunks, the place of this rank's among them
    num_ranks: int

    @property
    def num_replicas(self) -> int:
        """How many ranks hold the same part."""
        return self.num_ranks // math.prod(size for _, size, _ in self.cuts)


class ProbeShards:
    """Tells whole parameters from sharded ones, and says once of everything that is left out."""

    def __init__(self, models: ModuleIndex) -> None:
        self._models = models
        self.layouts: dict[str, Layout | None] = {}  # of sharded parameters; None where it is not known how
        self._said: set[str] = set()

    def look(self) -> None:
        """Look again, whenever parameters are there to be measured: models are sharded after watch() too."""
        all_flat = self.uses_fsdp1
        self.layouts = {
            name: _layout(parameter)
            for name, parameter in self._models.parameters().items()
            if all_flat or local_part(parameter) is not parameter
        }

    @property
    def uses_fsdp1(self) -> bool:
        """Whether parameters are pieces of flat ones, of whose layout nobody else knows."""
        return has_fsdp1([model for _, model in self._models.alive()])

    def is_whole(self, name: str, *, needed_by: str | None = None) -> bool:
        """Whether a function of this parameter, as it is here, is one of the whole; if not, `needed_by` is told."""
        if name in self.layouts and needed_by is not None and needed_by not in self._said:
            self._said.add(needed_by)
            text = (
                "wandb_gradwatch: %d parameters are sharded, %r among them, and of those this rank holds a part only: "
                "%s are left out for them. Updates() and the norms of gradients are those of the whole."
            )
            logger.warning(text, len(self.layouts), name, needed_by)
        return name not in self.layouts

    def part(self, name: str, whole: Tensor, *, needed_by: str) -> Tensor | None:
        """The part of a tensor like the parameter that this rank holds; None, which is said, where it is unknown."""
        layout = self.layouts.get(name)
        if layout is None:
            return whole if self.is_whole(name, needed_by=needed_by) else None
        for dim, size, index in layout.cuts:
            chunks = whole.chunk(size, dim=dim)
            # More ranks than rows: this one may hold nothing.
            whole = chunks[index] if index < len(chunks) else whole.narrow(dim, 0, 0)
        return whole


def _layout(parameter: Any) -> Layout | None:
    """That of a DTensor, with the cuts in the order of its mesh, as `distribute_tensor` makes them.

    None where it is another way: flat (FSDP1), interleaved (two kinds of parallelism on one dimension), or none here.
    """
    if local_part(parameter) is parameter or (coordinate := parameter.device_mesh.get_coordinate()) is None:
        return None
    mesh, placements = parameter.device_mesh, parameter.placements
    if any(not placement.is_replicate() and type(placement).__name__ != "Shard" for placement in placements):
        return None
    parts = zip(placements, mesh.shape, coordinate, strict=True)
    cuts = ((placement.dim, size, index) for placement, size, index in parts if not placement.is_replicate())
    return Layout(tuple(cuts), mesh.size())


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


@dataclass(frozen=True)
class ReadByProbe:
    """The meaning of sums that say nothing by themselves: `derive` of their probe reads them."""

    num_sums: int
    of_every_rank: bool = True
    num_parts: int = 0  # of a step, which the sums compare

    def __call__(self, sums: Sequence[float]) -> Mapping[str, float]:
        return {}


class OwnGradientProbe(ParameterProbe):
    """A probe that compares what the ranks have computed themselves; its numbers travel with the merge over ranks.

    A hook on a parameter runs before DistributedDataParallel reduces its bucket. What it sees has what earlier
    backwards of the step have left in it, already averaged unless they ran under no_sync(): that is subtracted, for
    which steps of several backwards are copied. The first such step is left out, as nothing was copied there yet.
    """

    def __init__(self, match: NameFilter | None = None) -> None:
        super().__init__(match)
        self._copies = False  # whether a step of several backwards was seen
        self._forget()

    def _forget(self) -> None:
        self._num_averaged = 0  # backwards of the step that were averaged inside
        self._begun = False  # a gradient has arrived since the last backward's end
        self._squares_of_own: dict[str, Tensor] = {}
        self._own: dict[str, Tensor] = {}  # of the backwards so far
        self._left: dict[str, Tensor] = {}  # by the last backward
        self._inverse_scales: dict[str, Tensor | None] = {}  # of the gradients that the sample is of

    @property
    def needs_ranks(self) -> bool:
        return world_size() > 1

    def start(self, next_step_is_due: bool, histogram_is_due: bool) -> None:
        super().start(next_step_is_due, histogram_is_due)
        self._copies = self._copies or self._num_averaged > 1
        self._forget()
        if next_step_is_due:
            self._shards.look()

    def gradient_arrived(self, name: str, gradient: Tensor) -> None:
        if not (self._is_due and self._matches(name) and self._shards.is_whole(name)):
            return
        self._begun = True
        own = widened(dense(gradient))
        if self._copies:
            if name in self._left:
                own = own - self._left[name]
            own = self._own[name] = self._own[name] + own if name in self._own else own.clone()
        self._squares_of_own[name] = square_of(own)

    def gradients_ready(self, tensors: Sequence[WatchedTensor]) -> None:
        if not self._is_due:
            return
        self._inverse_scales |= {tensor.name: tensor.inverse_scale for tensor in tensors}
        if not self._begun:
            return
        self._begun, self._num_averaged = False, self._num_averaged + 1
        if self._copies:
            left = {tensor.name: tensor.gradient for tensor in tensors if tensor.name in self._own}
            self._left = {name: widened(one).clone() for name, one in left.items() if one is not None}

    def own_squares(self) -> dict[str, Tensor]:
        """By parameter: the squared norm of the rank's own gradient, without the loss scale; empty if not known."""
        if self._num_averaged > 1 and not self._copies:
            return {}
        return {name: self.without_scale(name, square) for name, square in self._squares_of_own.items()}

    def without_scale(self, name: str, squares: Tensor) -> Tensor:
        """The squares of a parameter's gradients without the loss scale that they still have."""
        inverse = self._inverse_scales.get(name)
        return squares if inverse is None else squares * onto(inverse, squares.device).square()


AnyStore = TypeVar("AnyStore", bound=Store[Any, Any])


class ForwardProbe(ModuleProbe):
    """A probe that looks into forwards: opens and shuts its tap, and says once where it sees nothing.

    What a forward adds is pending until a backward has ended or an optimizer steps: the sample before may still be open
    when the next forward runs. A forward of a whole model that does not come to its end, because something in it
    raised, adds nothing. Evaluations belong to the next sample, and are seen between samples too.
    """

    unseen = (
        "has seen no forward of the modules that it matches in %d updates. Inside a compiled model nothing can be "
        "seen: match the whole model's output, or compile less of it."
    )

    def __init__(self, match: ModuleFilter | None = None, *, in_evaluation: bool = False) -> None:
        self._match = match
        self._matches = (lambda _: False) if isinstance(match, type) else matcher(match, repr(self))
        self._in_evaluation = in_evaluation
        when: Any = "evaluation" if in_evaluation else "training"
        self._tap = ForwardHook(self, ModuleIndex(), on_logged=self.logged, when=when)  # sees nothing before tap_into
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
        """Observe the forwards of these models from the next sample on, and find the modules that the match chooses."""
        self._tap.models = models
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

    def start(self, next_step_is_due: bool, histogram_is_due: bool) -> None:
        self._due, self._depth = next_step_is_due, 0
        if not (next_step_is_due or self._in_evaluation):
            self._tap.shut()
            for store in self._stores:
                store.forget_pending()  # it belongs to no sample
            return
        self._look()  # a module may be new
        roots = {prefix.removesuffix(".") or ROOT for prefix, _ in self._tap.models.alive()}
        self._tap.hook(self.sees, self.forward_done)
        self._tap.hook(lambda name, _: name in roots, self.forward_begins, at="beginning")
        self._tap.hook(lambda name, _: name in roots, self._forward_ends, at="any end")
        self._tap.open()

    def gradients_ready(self, tensors: Sequence[WatchedTensor]) -> None:
        for store in self._stores:
            store.settle()

    def before_update(self, tensors: Sequence[WatchedTensor]) -> None:
        for store in self._stores:
            store.settle()
        self._tap.shut()  # an optimizer that evaluates its closure again runs forwards of no interest
        if not self._due or self._in_evaluation or not self._tap.models.alive():
            return
        self._unseen_updates = 0 if self._seen_any else self._unseen_updates + 1
        self._seen_any = False
        if self._unseen_updates == _PATIENCE_IN_UPDATES:
            self.say_once(self.unseen, _PATIENCE_IN_UPDATES)

    def after_update(self, tensors: Sequence[WatchedTensor]) -> None:
        if self._due or self._in_evaluation:
            self._tap.open()

    def close(self) -> None:
        self._tap.remove()
