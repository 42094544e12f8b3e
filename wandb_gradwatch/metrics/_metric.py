"""Metric: a user-defined function of tensors; FunctionMetrics: the probe that applies all of them."""

import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, Final

import torch
from torch import Tensor

from .._arguments import check, is_whole
from .._capture.parameter_registry import Models, NameFilter, with_prefixes
from .._capture.probes import Probe, WatchedTensor
from .._interruptions import raise_interruption
from .._measure.elements import wide_dtype
from .._runtime.sharding import is_sharded
from .._runtime.wrappers import is_measurable
from ..rules import Rule
from ..snapshot import keys
from ._forward_hooks import AttentionCall, Match, ModuleIndex, logger
from ._module_probe import ForwardProbe, ModuleProbe, SubjectProbe
from ._rows import Dims, Store, labelled, slices, tensor_name, tensors_in, widened
from ._rules import POOLED
from ._transformer_layers import Router

# K labels (one without named dimensions), E elements of each

Aggregate = str | Callable[[Tensor], Tensor]

# How values [K, E] reduce to a state [K], and how two states merge. A mean is kept as a sum until it is read.
_REDUCTIONS: Final[dict[str, tuple[Callable[[Tensor, int], Tensor], Callable[[Tensor, Tensor], Tensor]]]] = {
    "mean": (torch.sum, torch.add),
    "sum": (torch.sum, torch.add),
    "min": (torch.amin, torch.minimum),
    "max": (torch.amax, torch.maximum),
}
SUBJECTS: Final = (keys.PARAMETER, keys.GRADIENT, keys.ACTIVATION, keys.UPDATE)


@dataclass(frozen=True, eq=False)
class Metric:
    """A user-defined number per tensor, logged as `<on>/<name of the tensor>/<name>` at sampled steps.

    Args:
        name: the metric's name, without slashes and dots.
        fn: a function from one tensor, chosen by `on`, to a tensor: a scalar, or any shape, which `aggregate` reduces.
            The result must stay on the device (no `.item()`). The argument must not be kept or modified; half
            precision is converted to float32.
        on: "parameter": fn gets each parameter before the update. "gradient": its accumulated gradient, without the
            loss scale, before clipping. "update": its change. "activation": once per forward, and so per micro-batch,
            each tensor in a module's output and each tensor passed to `log_tensor` or `log_attention`.
        match: choose tensors by name: a regular expression (searched), several, or a function of the name. None: all.
        aggregate: reduces the values of one result, and those of all micro-batches, to one number: "mean" (over all
            elements), "sum", "min", "max", or a function from a tensor [E] of all values to a scalar tensor.
        every: measure at every n-th sampled step.
        dims: dimensions of the result to log separately, with their names: {0: "head"} logs
            `<on>/<name of the tensor>/head_0/<name>` and so on.

    Memory: one number per tensor and label until the sample is complete; if `aggregate` is a function, everything that
        fn returned.

    Raises:
        TypeError: fn is not a function.
        ValueError: name, `on`, `aggregate`, `every` or `dims` is invalid.
    """

    name: str
    fn: Callable[[Tensor], Tensor]
    _: KW_ONLY
    on: str = "parameter"
    match: NameFilter | None = None
    aggregate: Aggregate = "mean"
    every: int = 1
    dims: Mapping[int, str] | None = None
    may_be_several: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name or set(self.name) & {"/", ".", "*"}:
            raise ValueError(f"Metric({self.name!r}, ...): the name must be a word without slashes, dots and stars")
        check(callable(self.fn), f"{self}: fn", self.fn, "a function of a tensor", TypeError)
        check(self.on in SUBJECTS, f"{self}: on", self.on, f"one of {SUBJECTS}")
        reductions = (*_REDUCTIONS,)
        is_known = callable(self.aggregate) or self.aggregate in reductions
        check(is_known, f"{self}: aggregate", self.aggregate, f"one of {reductions} or a function")
        is_cadence = is_whole(self.every) and self.every >= 1
        check(is_cadence, f"{self}: every", self.every, "a whole number of sampled steps, at least 1")
        named = self.dims.items() if isinstance(self.dims, Mapping) else [(None, "")]
        is_named = self.dims is None or all(is_whole(d) and isinstance(name, str) for d, name in named)
        check(is_named, f"{self}: dims", self.dims, 'dimensions with their names, as in {0: "head"}')
        _ = self.names  # raises if `match` is invalid

    def __str__(self) -> str:
        return f"Metric({self.name!r}, on={self.on!r})"

    @property
    def logs(self) -> frozenset[tuple[str, str]]:
        return frozenset({(self.on, self.name)})

    @cached_property
    def names(self) -> Match:
        return Match(self.match, str(self))

    def value_of(self, tensor: Tensor) -> Tensor:
        """Apply fn without the user's autocast, and without changing the training's random number generators.

        Raises:
            TypeError: fn does not return a real tensor.
        """
        tensor = widened(tensor)
        devices = [tensor.device] if tensor.is_cuda else []
        with torch.autocast(tensor.device.type, enabled=False), torch.random.fork_rng(devices):
            value: Any = self.fn(tensor)
        if isinstance(value, Tensor) and not value.is_complex():
            return value
        if isinstance(value, bool | int | float):
            raise TypeError(
                f"{self} returned the Python number {value!r}; return a tensor, without .item() or float(), so that "
                "training does not wait for the device"
            )
        found = "a complex tensor" if isinstance(value, Tensor) else type(value).__name__
        raise TypeError(f"{self} must return a real tensor, but returned {found}")


@dataclass(frozen=True, eq=False)
class Tally:
    """The values of one metric for one tensor in one sample.

    A mean is taken over all elements: each micro-batch is weighted by its number of elements.
    """

    labels: list[str]  # K
    aggregate: Aggregate
    states: tuple[Tensor, ...]  # one [K]; if `aggregate` is a user's function, all values instead: [K, E] each
    count: int  # E

    @classmethod
    def of(cls, values_KE: Tensor, aggregate: Aggregate, labels: list[str]) -> "Tally":
        """Reduce the values of one forward, or of one tensor; E is at least 1."""
        values_KE = values_KE.detach().to(wide_dtype(values_KE.device))
        state = values_KE.clone() if callable(aggregate) else _REDUCTIONS[aggregate][0](values_KE, 1)
        return cls(labels, aggregate, (state,), values_KE.shape[1])

    def merge(self, later: "Tally") -> "Tally":
        states = self.states + later.states
        if not callable(self.aggregate):
            states = (_REDUCTIONS[self.aggregate][1](*states),)
        return replace(self, states=states, count=self.count + later.count)

    def results(self) -> list[Tensor]:  # K scalars
        if callable(self.aggregate):
            return [self.aggregate(values) for values in torch.cat(self.states, dim=1)]
        (state,) = self.states
        return list(state / self.count if self.aggregate == "mean" else state)


MetricLike = Metric | ModuleProbe


def probes_of(metrics: Sequence[MetricLike], models: Models, watched: Collection[str] | None = None) -> list[Probe]:
    """Return the probes that measure these metrics, bound to the models; `watched` names the parameters, None: all.

    Raises:
        TypeError: an element of metrics is neither a Metric nor a probe.
        ValueError: a metric matches nothing, or fails on a tensor that it matches; two would log under the same keys.
    """
    check_metrics(metrics)
    probes = _probes_in(metrics)
    bound = ModuleIndex(with_prefixes(models), watched=watched)
    if custom := [metric for metric in metrics if isinstance(metric, Metric)]:
        probes.append(FunctionMetrics(custom))
    for number, router in enumerate((probe for probe in probes if isinstance(probe, Router)), start=1):
        router.pooled = POOLED if number == 1 else f"{POOLED}_{number}"
    for probe in probes:
        probe.move_to(bound)
    return list(probes)


def check_metrics(metrics: Sequence[MetricLike]) -> None:
    """Raise a TypeError for anything that is not a metric, and a ValueError for two that log under the same keys."""
    _probes_in(metrics)
    for one, other in itertools.combinations(metrics, 2):
        if (both := one.logs & other.logs) and not (type(one) is type(other) and one.may_be_several):
            family, name = min(both)
            raise ValueError(
                f"metrics: {one} and {other} would both log under {family}/<name>/{name}; give one of them another "
                "name, or leave it out"
            )


def rules_of(metrics: Sequence[MetricLike]) -> list[Rule]:
    """Return the rules that these metrics add to the default rules."""
    return [rule() for probe in _probes_in(metrics) for rule in probe.brings]


def _probes_in(metrics: Sequence[MetricLike]) -> list[ModuleProbe]:
    """Return the metrics that are probes, and raise a TypeError for anything that is not a metric."""
    if isinstance(metrics, Metric | ModuleProbe):
        raise TypeError(f"metrics={metrics!r} must be a sequence; write metrics=[...] around it")
    for metric in metrics:
        if isinstance(metric, type) and issubclass(metric, ModuleProbe):
            raise TypeError(f"metrics holds the class {metric.__name__}; write {metric.__name__}()")
        if not isinstance(metric, Metric | ModuleProbe):
            raise TypeError(
                f"metrics holds {metric!r}, which is not a metric; use Metric(name, fn) for a function, or one of "
                "wandb_gradwatch.metrics, such as Activations() or Updates()"
            )
    return [probe for probe in metrics if isinstance(probe, ModuleProbe)]


class FunctionMetrics(SubjectProbe, ForwardProbe):
    """The probe of all function metrics of a watcher, which share the hooks and the copies for updates."""

    def __init__(self, metrics: Sequence[Metric]) -> None:
        self._metrics = list(metrics)
        self._tallies = Store[tuple[Metric, str], Tally](Tally.merge)
        super().__init__(None, self._tallies)
        self._now: list[Metric] = []  # metrics that the open sample measures
        self._num_due = 0

    def __repr__(self) -> str:
        return f"FunctionMetrics({', '.join(metric.name for metric in self._metrics)})"

    def bind(self, models: ModuleIndex) -> None:
        """Try each metric once on the smallest matching tensor, if there is one with elements that is not sharded."""
        parameters = models.watched_parameters()
        there = {n: p for n, p in parameters.items() if p.numel() and not p.is_meta and not is_sharded(p)}
        modules = dict(models.modules())
        for metric in self._metrics:
            if metric.on != keys.ACTIVATION:
                chosen = [name for name in metric.names.require("parameter", parameters) if name in there]
                if chosen and not models.uses_fsdp1:
                    name = min(chosen, key=lambda one: there[one].numel())
                    _try_out(metric, name, there[name])
            else:
                metric.names.require_module(modules)
        if any(metric.on == keys.ACTIVATION for metric in self._metrics):
            self.hook_into(models)

    def start(self, next_step_is_due: bool, histogram_is_due: bool) -> None:
        self._num_due += next_step_is_due
        self._now = [m for m in self._metrics if next_step_is_due and self._num_due % m.every == 0]
        super().start(any(metric.on == keys.ACTIVATION for metric in self._now), histogram_is_due)

    def sees(self, name: str, module: Any) -> bool:
        return any(metric.on == keys.ACTIVATION and metric.names.chooses(name) for metric in self._metrics)

    def forward_done(self, name: str, module: Any, args: Any, kwargs: Any, output: Any) -> None:
        self._seen_any = True
        for path, tensor in tensors_in(output):
            self._apply(keys.ACTIVATION, tensor_name(name, path), tensor, also_called=name)

    def logged(self, module: str, name: str, thing: Any, dims: Dims) -> None:
        if isinstance(thing, AttentionCall):
            for part, tensor in thing.parts().items():
                self.logged(module, part, tensor, {-3: "head"})
        elif is_measurable(thing):
            self._seen_any = True
            for label, part_of in slices(thing.detach(), dims):
                full_name = tensor_name(module, name, label)
                self._apply(keys.ACTIVATION, full_name, part_of, also_called=f"{module}.{name}")

    def wants(self, subject: str, tensor: WatchedTensor) -> bool:
        """Return whether a metric due in this sample matches this parameter, and the parameter is not sharded."""
        if not any(metric.on == subject and metric.names.chooses(tensor.name) for metric in self._now):
            return False
        return self.gets_whole(tensor, needed_by="metrics of parameters, gradients and updates")

    def measure(self, subject: str, tensor: WatchedTensor, values: Tensor, before: Tensor | None = None) -> None:
        self._apply(subject, tensor.name, values)

    def take(self) -> Mapping[str, Tensor]:
        taken = {}
        for (metric, name), tally in self._tallies.take().items():
            try:
                for label, value in zip(tally.labels, tally.results(), strict=False) if metric in self._metrics else ():
                    taken["/".join(filter(None, (metric.on, name, label, metric.name)))] = _scalar(value)
            except Exception as error:
                self._drop(metric, f"values of {metric.on} {name!r}", error)
        return taken

    def _apply(self, on: str, name: str, tensor: Tensor, *, also_called: str = "") -> None:
        for metric in tuple(self._now):
            if metric.on != on or not any(map(metric.names.chooses, filter(None, (name, also_called)))):
                continue
            if on == keys.GRADIENT:  # after a sample's last backward the gradient is the accumulated one
                self._tallies.sample.pop((metric, name), None)
            try:
                labels, values = labelled(metric.value_of(tensor), metric.dims)
                if values.numel():
                    tally = Tally.of(values.reshape(len(labels), -1), metric.aggregate, labels)
                    self._tallies.add((metric, name), tally, pending=on == keys.ACTIVATION)
            except Exception as error:
                raise_interruption(error)
                self._drop(metric, f"{on} {name!r} of shape {[*tensor.shape]}", error)

    def _drop(self, metric: Metric, where: str, error: Exception) -> None:
        self._metrics = [kept for kept in self._metrics if kept is not metric]
        self._now = [kept for kept in self._now if kept is not metric]
        text = "wandb_gradwatch: %s failed on the %s and is dropped; the others go on."
        logger.error(text, metric, where, exc_info=error)


def _try_out(metric: Metric, name: str, example: Tensor) -> None:
    try:
        with torch.no_grad():
            labelled(metric.value_of(example.detach()), metric.dims)
    except Exception as error:
        kind = TypeError if isinstance(error, TypeError) else ValueError
        raise kind(f"{metric} does not work on {name!r} of shape {[*example.shape]}: {error}") from error


def _scalar(value: Tensor) -> Tensor:
    if not isinstance(value, Tensor) or value.numel() != 1:
        found = f"shape {[*value.shape]}" if isinstance(value, Tensor) else repr(value)
        raise TypeError(f"aggregate must return a scalar tensor, but returned {found}")
    return value
