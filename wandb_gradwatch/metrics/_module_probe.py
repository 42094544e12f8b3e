"""Base classes of the probes, which do nothing at the moments that a probe does not override.

Sums of squares over the shards of a parameter add up to those of the whole parameter, so norms and distances merge over
ranks, as rows do. Other functions of a shard do not merge: they are skipped, and a message says so once.
"""

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final

from torch import Tensor, nn

from .._capture.parameter_registry import NameFilter
from .._capture.probes import Found, Probe, WatchedTensor
from .._measure.elements import onto
from .._runtime.sharding import local_part, world_size
from ..rules import Rule
from ..snapshot import keys
from ._forward_hooks import ROOT, ForwardHooks, Match, ModuleFilter, ModuleIndex, logger
from ._rows import Dims, Store, square_of, widened, without_scale

# Warn after this many measured updates in which a probe has seen nothing; fewer could belong to another model, such as
# the critic of a GAN, which is often updated five times for each update of the generator.
_PATIENCE: Final = 10


class ModuleProbe(Probe):
    """A probe of the watched models."""

    logs: frozenset[tuple[str, str]] = frozenset()  # families and metrics: ("update", "norm") for `update/<name>/norm`
    brings: tuple[type[Rule], ...] = ()  # rules that are added to the default rules together with this probe
    # Whether metrics= may hold several probes of this class, whose match= choose different names.
    may_be_several: ClassVar[bool] = True
    unseen: ClassVar[str] = ""  # the warning after some updates in which the probe has seen nothing; "": none
    _num_unseen = 0  # consecutive updates in which it has seen nothing
    _match = Match(None, "")
    _said: frozenset[str] = frozenset()
    _models = ModuleIndex()  # that it measures; none before watch() and after close()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._match!r})"

    def say_once(self, what: str, *args: object) -> None:
        if what not in self._said:
            self._said |= {what}
            logger.warning(f"wandb_gradwatch: %r {what}", self, *args)

    def count_unseen(self, *, has_seen: bool) -> None:
        """Record whether the probe has seen anything in an update; warn once if it goes on seeing nothing."""
        self._num_unseen = 0 if has_seen else self._num_unseen + 1
        if self.unseen and self._num_unseen == _PATIENCE:
            self.say_once(self.unseen, _PATIENCE)

    def gets_whole(self, tensor: WatchedTensor, *, needed_by: str) -> bool:
        """Return whether the whole parameter is on this rank; if not, warn once that `needed_by` is left out."""
        if not tensor.is_whole:
            self.say_once(
                f"has found that parameters are sharded, %r among them, and this rank holds only a part of each: "
                f"{needed_by} are left out for them. Updates() and the norms of gradients are those of the whole "
                "parameters.",
                tensor.name,
            )
        return tensor.is_whole

    def move_to(self, models: ModuleIndex) -> None:
        """Call `bind`, and warn if the probe still measures another model, whose values would be lost or mixed."""
        here = {id(model) for _, model in models.alive()}
        if any(id(model) not in here for _, model in self._models.alive()):
            self.say_once("measures another watched model; make a new %s for each model.", type(self).__name__)
        self._models = models
        self.bind(models)

    def close(self) -> None:
        self._models = ModuleIndex()

    def bind(self, models: ModuleIndex) -> None:
        """Called once by watch(), before any hook exists: check the arguments against the models, and raise errors."""


@dataclass(frozen=True)
class Layout:
    """How a sharded parameter is distributed over its ranks."""

    cuts: tuple[tuple[int, int, int], ...]  # dimension, number of chunks, index of this rank's chunk
    num_ranks: int

    @classmethod
    def of(cls, tensor: WatchedTensor) -> "Layout | None":
        """Return the layout of a DTensor, with its cuts in the order of the mesh, as `distribute_tensor` makes them.

        None for any other: whole, flat (FSDP1), interleaved (two kinds of parallelism on one dimension), or not on this
        rank.
        """
        parameter: Any = tensor.held
        if local_part(parameter) is parameter:
            return None
        mesh, placements = parameter.device_mesh, parameter.placements
        coordinate = mesh.get_coordinate()
        if coordinate is None or not all(one.is_replicate() or type(one).__name__ == "Shard" for one in placements):
            return None
        parts = zip(placements, mesh.shape, coordinate, strict=True)
        cuts = ((placement.dim, size, index) for placement, size, index in parts if not placement.is_replicate())
        return cls(tuple(cuts), mesh.size())

    @property
    def num_replicas(self) -> int:
        """The number of ranks that hold the same shard."""
        return self.num_ranks // math.prod(size for _, size, _ in self.cuts)

    def part(self, whole: Tensor) -> Tensor:
        """Return this rank's shard of a tensor shaped like the parameter."""
        for dim, size, index in self.cuts:
            chunks = whole.chunk(size, dim=dim)
            # With more ranks than rows this rank may hold nothing.
            whole = chunks[index] if index < len(chunks) else whole.narrow(dim, 0, 0)
        return whole


class SubjectProbe(ModuleProbe):
    """Measures parameters before the update, their gradients without the loss scale, and their updates, as asked for.

    A parameter is measured once per sample, after the backward already, because a loop may have no optimizer. A
    gradient is measured after each backward; after the last one it is the accumulated gradient.

    Memory: a copy of the parameters whose update is asked for, while an optimizer steps in a sampled step.
    """

    def wants(self, subject: str, tensor: WatchedTensor) -> bool:
        """Return whether to measure this parameter, its gradient or its update."""
        return False

    def measure(self, subject: str, tensor: WatchedTensor, values: Tensor, before: Tensor | None = None) -> None:
        """Measure a parameter, a gradient, or an update (in float32 for half precision) with the parameter before."""

    def start(self, next_step_is_due: bool, histogram_is_due: bool) -> None:
        super().start(next_step_is_due, histogram_is_due)
        self._befores: dict[str, Tensor] = {}  # copies of parameters by name, from before an update until after it
        self._done: set[str] = set()  # the names of the parameters that were measured in the open sample

    def gradients_ready(self, tensors: Sequence[WatchedTensor]) -> None:
        super().gradients_ready(tensors)
        self._measure_parameters(tensors)
        for tensor in tensors:
            if tensor.gradient is not None and self.wants(keys.GRADIENT, tensor):
                self.measure(keys.GRADIENT, tensor, without_scale(tensor.gradient, tensor.inverse_scale))

    def before_update(self, tensors: Sequence[WatchedTensor]) -> None:
        super().before_update(tensors)
        self._measure_parameters(tensors)
        wanted = [tensor for tensor in tensors if self.wants(keys.UPDATE, tensor)]
        self._befores |= {tensor.name: tensor.parameter.clone() for tensor in wanted}

    def after_update(self, tensors: Sequence[WatchedTensor]) -> None:
        super().after_update(tensors)
        for tensor in tensors:
            if (before := self._befores.pop(tensor.name, None)) is not None:
                self.measure(keys.UPDATE, tensor, widened(tensor.parameter) - widened(before), before)

    def _measure_parameters(self, tensors: Sequence[WatchedTensor]) -> None:
        for tensor in tensors:
            if tensor.name not in self._done and self.wants(keys.PARAMETER, tensor):
                self._done.add(tensor.name)
                self.measure(keys.PARAMETER, tensor, tensor.parameter)


class ParameterProbe(ModuleProbe):
    """A probe of the parameters that match."""

    def __init__(self, match: NameFilter | None = None) -> None:
        self._match = Match(match, f"{type(self).__name__}()")
        self._found: dict[str, Found] = {}  # in the open sample

    def bind(self, models: ModuleIndex) -> None:
        self._match.require("parameter", models.watched_parameters())

    def take(self) -> Mapping[str, Found]:
        found, self._found = self._found, {}
        self.count_unseen(has_seen=bool(found))
        return found


@dataclass(frozen=True)
class ReadByProbe:
    """A meaning without numbers of its own: the probe's `derive` reads the sums."""

    num_sums: int
    of_every_rank: bool = True
    side_by_side: bool = False
    num_parts: int = 0  # the number of parts of a step that the sums compare

    def __call__(self, sums: Sequence[float]) -> Mapping[str, float]:
        return {}


class OwnGradientProbe(ParameterProbe):
    """A probe that compares the gradients of the ranks; its numbers travel with the merge over ranks.

    A hook on a parameter runs before DistributedDataParallel reduces its bucket. The gradient in it still contains the
    earlier backwards of the step, already averaged unless they ran under no_sync(). They are subtracted, for which the
    gradients are copied in steps of several backwards; the first such step, which has no copies, is left out.
    """

    _copies = False  # whether a step of several backwards was seen
    _num_averaged = 0  # backwards of this step whose gradients passed through the hooks

    @property
    def needs_ranks(self) -> bool:
        return world_size() > 1

    def start(self, next_step_is_due: bool, histogram_is_due: bool) -> None:
        self._copies, self._num_averaged = self._copies or self._num_averaged > 1, 0
        self._begun = False  # a gradient has arrived since the end of the last backward
        self._squares_of_own: dict[str, Tensor] = {}
        self._own: dict[str, Tensor] = {}  # the rank's own gradients, summed over the backwards so far
        self._left: dict[str, Tensor] = {}  # the gradients as the last backward left them
        self._inverse_scales: dict[str, Tensor | None] = {}  # of the gradients in the sample

    def gradient_arrived(self, name: str, gradient: Tensor) -> None:
        if not self._match.chooses(name):
            return
        self._begun = True
        own = widened(without_scale(gradient, None))
        if self._copies:
            if name in self._left:
                own = own - self._left[name]
            own = self._own[name] = self._own[name] + own if name in self._own else own.clone()
        self._squares_of_own[name] = square_of(own)
        self.own_known(name, own)

    def own_known(self, name: str, own: Tensor) -> None:
        """This rank's own gradient is known, summed over the backwards so far. Valid only during the call."""

    def gradients_ready(self, tensors: Sequence[WatchedTensor]) -> None:
        self._inverse_scales |= {tensor.name: tensor.inverse_scale for tensor in tensors}
        if not self._begun:
            return
        self._begun, self._num_averaged = False, self._num_averaged + 1
        if self._copies:
            left = {tensor.name: tensor.gradient for tensor in tensors if tensor.name in self._own}
            self._left = {name: widened(one).clone() for name, one in left.items() if one is not None}

    def own_squares(self) -> dict[str, Tensor]:
        """Return, by parameter, the squared norm of this rank's own gradient without the loss scale; {} if unknown."""
        if self._num_averaged > 1 and not self._copies:
            return {}
        return {name: self.without_scale(name, square) for name, square in self._squares_of_own.items()}

    def without_scale(self, name: str, sums: Tensor, *, power: int = 2) -> Tensor:
        """Remove the loss scale from sums of powers of a parameter's gradients, if the gradients still have it."""
        inverse = self._inverse_scales.get(name)
        return sums if inverse is None else sums * onto(inverse, sums.device) ** power


class ForwardProbe(ModuleProbe):
    """A probe of forwards: it opens and closes its hooks, and warns once if it sees no matching forward.

    A forward's values are pending until a backward has ended or an optimizer steps, because the previous sample may
    still be open when the next forward runs. A forward of a whole model that raises adds nothing.
    """

    unseen = (
        "has seen no forward of the modules that it matches in %d updates. Modules inside a compiled model are not "
        "measured: match the whole model's output, or compile less of it."
    )

    def __init__(
        self, match: ModuleFilter | None = None, *stores: Store[Any, Any], in_evaluation: bool = False
    ) -> None:
        self._match = Match(match, f"{type(self).__name__}()")
        self._stores = stores  # forwards add pending values to them, and `take` reads the sample
        self._in_evaluation = in_evaluation
        when: Any = "evaluation" if in_evaluation else "training"
        self._hooks = ForwardHooks(self, ModuleIndex(), on_logged=self.logged, when=when)  # no models yet
        self._depth = 0  # nesting of forwards of whole models: a model may call itself
        self._handled: BaseException | None = None  # the exception being handled when the outermost forward began
        self._marked: dict[Store[Any, Any], dict[Any, Any]] = {}  # the pending values when the outermost forward began
        self._due = self._histogram_is_due = False
        self._seen_any = False  # since the last update

    @property
    def seconds_spent(self) -> float:
        return self._hooks.seconds_spent

    def bind(self, models: ModuleIndex) -> None:
        self.hook_into(models)
        self._match.require("module", dict(models.modules()))

    def hook_into(self, models: ModuleIndex) -> None:
        """Observe the forwards of these models from the next sample on."""
        self._hooks.models = models
        self._match.look_at(models)

    def sees(self, name: str, module: nn.Module) -> bool:
        """Return whether to call `forward_done` for this module; called when a sample that is due begins."""
        return self._match.chooses(name)

    def forward_done(self, name: str, module: nn.Module, args: Any, kwargs: Mapping[str, Any], output: Any) -> None:
        """Called after the forward of a module for which `sees` returned True."""

    def logged(self, module: str, name: str, thing: Any, dims: Dims) -> None:
        """Called when a module logs a tensor or an attention by itself."""

    def forward_begins(self, name: str, module: nn.Module, args: Any, kwargs: Mapping[str, Any], _: Any) -> None:
        self._depth += 1
        if self._depth == 1:
            self._handled = sys.exc_info()[1]
            self._marked = {store: dict(store.pending) for store in self._stores}

    def _forward_ends(self, *_: Any) -> None:
        self._depth = max(self._depth - 1, 0)
        # The hook is always called; an exception that was not being handled at the beginning comes from the forward.
        if self._depth == 0 and sys.exc_info()[1] is not self._handled:
            for store in self._stores:
                store.pending = self._marked.get(store, {})

    def start(self, next_step_is_due: bool, histogram_is_due: bool) -> None:
        self._due, self._histogram_is_due, self._depth, self._marked = next_step_is_due, histogram_is_due, 0, {}
        if not (next_step_is_due or self._in_evaluation):
            self._hooks.shut()
            for store in self._stores:
                store.pending = {}  # the values belong to no sample
            return
        self._match.look_at(self._hooks.models)  # there may be new modules
        roots = {prefix.removesuffix(".") or ROOT: model for prefix, model in self._hooks.models.alive()}
        self._hooks.hook(self.sees, self.forward_done)
        self._hooks.attach(roots, self.forward_begins, at="beginning")
        self._hooks.attach(roots, self._forward_ends, at="any end")
        self._hooks.open()

    def gradients_ready(self, tensors: Sequence[WatchedTensor]) -> None:
        self._marked = {}
        for store in self._stores:
            store.settle()

    def before_update(self, tensors: Sequence[WatchedTensor]) -> None:
        ForwardProbe.gradients_ready(self, tensors)
        self._hooks.shut()  # the forwards of an optimizer that evaluates its closure again are not measured
        if self._due and not self._in_evaluation and self._hooks.models.alive():
            self.count_unseen(has_seen=self._seen_any)
            self._seen_any = False

    def after_update(self, tensors: Sequence[WatchedTensor]) -> None:
        if self._due or self._in_evaluation:
            self._hooks.open()

    def close(self) -> None:
        super().close()
        self._hooks.remove()
