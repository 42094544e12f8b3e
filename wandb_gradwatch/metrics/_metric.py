"""Metric: any function of any tensor, as the user states it; the probe that applies them all, and what is asked for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from functools import cached_property
from typing import Any, Final

import torch
from torch import Tensor

from .._capture.parameter_registry import Models as WatchedModels
from .._capture.parameter_registry import NameFilter, with_prefixes
from .._capture.probes import Probe, WatchedTensor
from .._interruptions import raise_interruption
from .._measure.elements import wide_dtype
from ..rules import Rule
from ..snapshot import keys
from ._forward_hooks import AttentionCall, ModuleIndex, chosen_by, hands_over, logger, matcher
from ._module_probe import Befores, ForwardProbe, ModuleProbe, ProbeShards
from ._rows import (
    Dims,
    Store,
    dense,
    is_measurable,
    labelled,
    slices,
    tensor_name,
    tensors_in,
    widened,
    without_scale,
)

# K labels (one without named dimensions), E elements of each

Aggregate = str | Callable[[Tensor], Tensor]

# How values [K, E] become a state [K], and two states one; a mean is a sum until it is read.
_REDUCTIONS: Final[dict[str, tuple[Callable[[Tensor, int], Tensor], Callable[[Tensor, Tensor], Tensor]]]] = {
    "mean": (torch.sum, torch.add),
    "sum": (torch.sum, torch.add),
    "min": (torch.amin, torch.minimum),
    "max": (torch.amax, torch.maximum),
}
SUBJECTS: Final = (keys.PARAMETER, keys.GRADIENT, keys.ACTIVATION, keys.UPDATE)


@dataclass(frozen=True, eq=False)
class Metric:
    """A number of the user's own, logged as `<on>/<name of the tensor>/<name>` at sampled steps.

    Args:
        name: what it is called; no slash and no dot.
        fn: gets one tensor and returns a tensor: a scalar, or any shape, which `aggregate` reduces. It must stay on the
            device: no `.item()`. What it gets must not be kept or modified; half precision arrives as float32.
            parameter: the parameter, before the update. gradient: the true gradient, accumulated, without the loss
            scale, before clipping. update: the parameter's change. All of the parameter's own shape.
            activation: the output of a module, each tensor in it, and each tensor that a module hands over (of
            attentions every head's query, key and value); once per forward, so per micro-batch.
        on: "parameter", "gradient", "activation" or "update".
        match: whose: a regular expression (searched in the name), several, or a function of the name; None: all.
        aggregate: what many values become, those of one result and those of the micro-batches alike: "mean" (over all
            elements), "sum", "min", "max", or a function of all of them, in one dimension, to a scalar tensor.
        every: measured at every n-th sampled step.
        dims: dimensions of fn's result that are kept apart, with their names: {0: "head"} logs
            `<on>/<name of the tensor>/head_0/<name>` and so on.

    Memory: of each tensor one number per label until the sample is complete; where `aggregate` is a function, all that
        fn has returned.

    Raises:
        TypeError: fn or aggregate is not a function.
        ValueError: a name, `on`, `aggregate`, `every` or `dims` that makes no sense.
    """

    name: str
    fn: Callable[[Tensor], Tensor]
    _: KW_ONLY
    on: str = "parameter"
    match: NameFilter | None = None
    aggregate: Aggregate = "mean"
    every: int = 1
    dims: Mapping[int, str] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name or set(self.name) & {"/", "."}:
            raise ValueError(f"Metric({self.name!r}, ...): the name must be a word without slashes and dots")
        if not callable(self.fn):
            raise TypeError(f"{self}: fn={self.fn!r} must be a function of a tensor")
        if self.on not in SUBJECTS:
            raise ValueError(f"{self}: on={self.on!r} must be one of {SUBJECTS}")
        if not callable(self.aggregate) and self.aggregate not in _REDUCTIONS:
            raise ValueError(f"{self}: aggregate={self.aggregate!r} must be one of {(*_REDUCTIONS,)} or a function")
        if isinstance(self.every, bool) or not isinstance(self.every, int) or self.every < 1:
            raise ValueError(f"{self}: every={self.every!r} must be a whole number of sampled steps, at least 1")
        named = self.dims.items() if isinstance(self.dims, Mapping) else [(self.dims, "")]
        if self.dims is not None and not all(isinstance(d, int) and isinstance(name, str) for d, name in named):
            raise ValueError(f'{self}: dims={self.dims!r} must name dimensions, as in {{0: "head"}}')

    def __str__(self) -> str:
        return f"Metric({self.name!r}, on={self.on!r})"

    @cached_property
    def matches(self) -> Callable[[str], bool]:
        return matcher(self.match, str(self))

    def value_of(self, tensor: Tensor) -> Tensor:
        """Apply fn, outside of any autocast of the user's, and leave the random numbers of training as they were.

        Raises:
            TypeError: it does not return a real tensor.
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
    """The values of one metric of one tensor, in one sample.

    A mean is that of all elements, so that micro-batches of different sizes weigh as much as they hold.
    """

    labels: list[str]  # K
    aggregate: Aggregate
    states: tuple[Tensor, ...]  # one [K]; where `aggregate` is the user's function, all values instead: [K, E] each
    count: int  # E

    @classmethod
    def of(cls, values_KE: Tensor, aggregate: Aggregate, labels: list[str]) -> Tally:
        """The values of one forward, or of one tensor; at least one for each label."""
        values_KE = values_KE.detach().to(wide_dtype(values_KE.device))
        state = values_KE.clone() if callable(aggregate) else _REDUCTIONS[aggregate][0](values_KE, 1)
        return cls(labels, aggregate, (state,), values_KE.shape[1])

    def merge(self, later: Tally) -> Tally:
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


def probes_of(
    metrics: Sequence[MetricLike], models: WatchedModels, watched: Collection[str] | None = None
) -> list[Probe]:
    """The probes that measure these metrics, bound to the models.

    Args:
        metrics: each a Metric, or a probe such as Activations(), Updates(), Attention() or Reference(model).
        models: what watch() was given.
        watched: the names of the parameters that include and exclude leave; None: all.

    Raises:
        TypeError: something else in metrics.
        ValueError: one that matches nothing in the models, or does not work on what it matches; two that would log
            under the same keys.
    """
    probes = _probes_in(metrics)
    bound = ModuleIndex(with_prefixes(models), watched=watched)
    if custom := [metric for metric in metrics if isinstance(metric, Metric)]:
        probes.append(FunctionMetrics(custom))
    claimed: dict[tuple[str, str], ModuleProbe] = {}
    for probe in probes:
        for family, name in sorted(probe.logs):
            other = claimed.setdefault((family, name), probe)
            if other is not probe and (type(other) is not type(probe) or not probe.may_be_several):
                raise ValueError(
                    f"metrics: {other!r} and {probe!r} would both log under {family}/<name>/{name}; give one of them "
                    "another name, or leave it out"
                )
    for probe in probes:
        probe.bind(bound)
    return list(probes)


def rules_of(metrics: Sequence[MetricLike]) -> list[Rule]:
    """The rules that belong beside the default ones where these metrics are measured."""
    return [rule() for probe in _probes_in(metrics) for rule in probe.brings]


def _probes_in(metrics: Sequence[MetricLike]) -> list[ModuleProbe]:
    """Those that are not functions."""
    if isinstance(metrics, Metric | ModuleProbe):
        raise TypeError(f"metrics={metrics!r} must be a sequence; write metrics=[...] around it")
    for metric in metrics:
        if isinstance(metric, type) and issubclass(metric, ModuleProbe):
            raise TypeError(f"metrics holds the class {metric.__name__}; write {metric.__name__}()")
        if not isinstance(metric, Metric | ModuleProbe):
            raise TypeError(
                f"metrics holds {metric!r}, which is no metric; use Metric(name, fn) for a function, or one of "
                "wandb_gradwatch.metrics, such as Activations() or Updates()"
            )
    return [probe for probe in metrics if isinstance(probe, ModuleProbe)]


class FunctionMetrics(ForwardProbe):
    """All the metrics of a watcher: they share the hooks and, for updates, the copies.

    Memory: with metrics on updates a copy of the matching parameters, while an optimizer steps in a sampled step.

    Raises:
        ValueError: two metrics would log under the same keys.
    """

    def __init__(self, metrics: Sequence[Metric]) -> None:
        self._metrics = list(metrics)
        super().__init__()
        names = Counter(map(str, metrics))  # with what they are of
        if twice := next((name for name, times in names.items() if times > 1), None):
            raise ValueError(f"metrics holds two called {twice}; give them different names")
        self.logs = frozenset((metric.on, metric.name) for metric in metrics)
        self._now: list[Metric] = []  # those that this sample measures
        self._num_due = 0
        self._tallies = self.collect(Store[tuple[Metric, str], Tally](Tally.merge))
        self._befores = Befores()

    def __repr__(self) -> str:
        return f"FunctionMetrics({', '.join(metric.name for metric in self._metrics)})"

    def bind(self, models: ModuleIndex) -> None:
        """Try each metric once, on the smallest tensor that it matches, where there are tensors to try."""
        self._shards = ProbeShards(models)
        self._shards.look()
        parameters = {n: p for n, p in models.watched_parameters().items() if p.is_floating_point() or p.is_complex()}
        modules = dict(models.modules())
        for metric in self._metrics:
            if metric.on != keys.ACTIVATION:
                chosen = chosen_by(metric.matches, parameters, owner=str(metric), match=metric.match, what="parameter")
                self._try_out(metric, {name: parameters[name] for name in chosen})
            # What a module hands over is known only when it does.
            elif not any(map(hands_over, modules.values())):
                chosen_by(metric.matches, modules, owner=str(metric), match=metric.match, what="module")
        if any(metric.on == keys.ACTIVATION for metric in self._metrics):
            self.tap_into(models)

    def _try_out(self, metric: Metric, chosen: Mapping[str, Tensor]) -> None:
        there = [(name, t) for name, t in chosen.items() if t.numel() and not t.is_meta and self._shards.is_whole(name)]
        if not there:
            return
        name, example = min(there, key=lambda one: one[1].numel())
        with torch.no_grad():
            try:
                labelled(metric.value_of(example.detach()), metric.dims)
            except Exception as error:
                kind = TypeError if isinstance(error, TypeError) else ValueError
                raise kind(f"{metric} does not work on {name!r} of shape {[*example.shape]}: {error}") from error

    def start(self, next_step_is_due: bool, histogram_is_due: bool) -> None:
        self._num_due += next_step_is_due
        self._now = [m for m in self._metrics if next_step_is_due and self._num_due % m.every == 0]
        self._befores.clear()
        super().start(any(metric.on == keys.ACTIVATION for metric in self._now), histogram_is_due)

    def sees(self, name: str, module: Any) -> bool:
        return any(metric.on == keys.ACTIVATION and metric.matches(name) for metric in self._metrics)

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

    def gradients_ready(self, tensors: Sequence[WatchedTensor]) -> None:
        super().gradients_ready(tensors)
        self._apply_to_parameters(tensors)
        for watched in tensors:
            if watched.gradient is not None and self._measures(keys.GRADIENT, watched.name):
                gradient = without_scale(dense(watched.gradient), watched.inverse_scale)
                self._apply(keys.GRADIENT, watched.name, gradient)

    def before_update(self, tensors: Sequence[WatchedTensor]) -> None:
        super().before_update(tensors)
        self._apply_to_parameters(tensors)
        self._befores.keep(tensor for tensor in tensors if self._measures(keys.UPDATE, tensor.name))

    def after_update(self, tensors: Sequence[WatchedTensor]) -> None:
        super().after_update(tensors)
        for name, change, _ in self._befores.changes(tensors):
            self._apply(keys.UPDATE, name, change)

    def take(self) -> Mapping[str, Tensor]:
        taken = {}
        for (metric, name), tally in self._tallies.take().items():
            try:
                for label, value in zip(tally.labels, tally.results(), strict=False) if metric in self._metrics else ():
                    taken["/".join(filter(None, (metric.on, name, label, metric.name)))] = _scalar(value)
            except Exception as error:
                self._drop(metric, f"values of {metric.on} {name!r}", error)
        return taken

    def _measures(self, on: str, name: str) -> bool:
        """Whether a metric of this sample matches this parameter, and the parameter is whole."""
        if not any(metric.on == on and metric.matches(name) for metric in self._now):
            return False
        return self._shards.is_whole(name, needed_by="metrics of parameters, gradients and updates")

    def _apply_to_parameters(self, tensors: Sequence[WatchedTensor]) -> None:
        self._shards.look()
        for watched in tensors:
            if self._measures(keys.PARAMETER, watched.name):
                self._apply(keys.PARAMETER, watched.name, watched.parameter)

    def _apply(self, on: str, name: str, tensor: Tensor, *, also_called: str = "") -> None:
        for metric in tuple(self._now):
            if metric.on != on or not (metric.matches(name) or (also_called and metric.matches(also_called))):
                continue
            if on == keys.PARAMETER and (metric, name) in self._tallies.sample:  # once in a sample
                continue
            if on == keys.GRADIENT:  # the last backward of a sample has the sum of all
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
        for values in (self._tallies.sample, self._tallies.pending):
            for key in [key for key in values if key[0] is metric]:
                del values[key]
        text = "wandb_gradwatch: %s failed on the %s and is dropped; the others go on."
        logger.error(text, metric, where, exc_info=error)


def _scalar(value: Tensor) -> Tensor:
    if not isinstance(value, Tensor) or value.numel() != 1:
        found = f"shape {[*value.shape]}" if isinstance(value, Tensor) else repr(value)
        raise TypeError(f"aggregate must return a scalar tensor, but returned {found}")
    return value
