"""What watch(metrics=...) takes, as probes and rules, and the probe behind Metric: it applies the user's functions."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .._capture.parameter_registry import Models as WatchedModels
from .._capture.parameter_registry import with_prefixes
from .._capture.probes import Probe, WatchedTensor
from ..rules import Rule
from ._forward_hooks import AttentionCall, Dims, ForwardHook, hands_over
from ._metric import Metric, Tally
from ._module_index import ModuleIndex, ProbeShards, chosen_by, matcher
from ._module_probe import (
    Befores,
    ForwardProbe,
    ModuleProbe,
    dense,
    is_measurable,
    labelled,
    logger,
    slices,
    tensor_name,
    tensors_in,
    without_scale,
)
from ._reference import Reference
from ._rows import Store

MetricLike = Metric | ModuleProbe

_Key = tuple[str, str, str]  # what it is of, the name, the metric


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
    _check(metrics)
    bound = ModuleIndex(with_prefixes(models), watched=watched)
    custom = [metric for metric in metrics if isinstance(metric, Metric)]
    probes = [probe for probe in metrics if isinstance(probe, ModuleProbe)]
    if custom:
        probes.append(FunctionMetrics(custom))
    _check_keys(probes)
    for probe in probes:
        probe.bind(bound)
    return list(probes)


def _check_keys(probes: Sequence[ModuleProbe]) -> None:
    claimed: dict[tuple[str, str], ModuleProbe] = {}
    for probe in probes:
        for family, metric in sorted(probe.claims()):
            other = claimed.setdefault((family, metric), probe)
            # Several of one kind are for different names, as their match= says; a reference is of the whole model.
            if other is not probe and (type(other) is not type(probe) or isinstance(probe, Reference)):
                raise ValueError(
                    f"metrics: {other!r} and {probe!r} would both log under {family}/<name>/{metric}; give one of them "
                    "another name, or leave it out"
                )


def rules_of(metrics: Sequence[MetricLike]) -> list[Rule]:
    """The rules that belong beside the default ones where these metrics are measured."""
    _check(metrics)
    return [rule for probe in metrics if isinstance(probe, ModuleProbe) for rule in probe.rules()]


def _check(metrics: Sequence[MetricLike]) -> None:
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


class FunctionMetrics(ForwardProbe):
    """All the metrics of a watcher: they share the hooks and, for updates, the copies.

    Memory: with metrics on updates a copy of the matching parameters, while an optimizer steps in a sampled step.

    Raises:
        ValueError: two metrics would log under the same keys.
    """

    def __init__(self, metrics: Iterable[Metric]) -> None:
        self._metrics = list(metrics)
        super().__init__()
        self._matchers = {id(metric): matcher(metric.match, str(metric)) for metric in self._metrics}
        seen: set[tuple[str, str]] = set()
        for metric in self._metrics:
            if (metric.on, metric.name) in seen:
                raise ValueError(f"metrics holds two called {metric}; give them different names")
            seen.add((metric.on, metric.name))
        self._now: list[Metric] = []  # those that this sample measures
        self._num_due = 0
        self._tallies = self.collect(Store[_Key, Tally](Tally.merge))
        self._befores = Befores()

    def __repr__(self) -> str:
        return f"FunctionMetrics({', '.join(metric.name for metric in self._metrics)})"

    def claims(self) -> set[tuple[str, str]]:
        return {(metric.on, metric.name) for metric in self._metrics}

    def bind(self, models: ModuleIndex) -> None:
        """Try each metric once, on the smallest tensor that it matches, where there are tensors to try."""
        self._shards = ProbeShards(models)
        self._shards.look()
        parameters = {n: p for n, p in models.watched_parameters().items() if p.is_floating_point() or p.is_complex()}
        modules = dict(models.modules())
        for metric in self._metrics:
            matches = self._matchers[id(metric)]
            if metric.on != "activation":
                chosen = chosen_by(matches, parameters, owner=str(metric), match=metric.match, what="parameter")
                self._try_out(metric, {name: parameters[name] for name in chosen})
            # What a module hands over is known only when it does.
            elif not any(map(matches, modules)) and not any(map(hands_over, modules.values())):
                chosen_by(matches, modules, owner=str(metric), match=metric.match, what="module")
        if any(metric.on == "activation" for metric in self._metrics):
            self.tap_into(models, self._logged)

    def _try_out(self, metric: Metric, chosen: Mapping[str, Tensor]) -> None:
        there = {name: tensor for name, tensor in chosen.items() if self._shards.is_whole(name)}
        there = {name: tensor for name, tensor in there.items() if tensor.numel() and not tensor.is_meta}
        if not there:
            return
        name = min(there, key=lambda name: there[name].numel())
        example = there[name].detach()
        with torch.no_grad():
            try:
                labelled(metric.value_of(example), metric.dims)
            except Exception as error:
                kind = TypeError if isinstance(error, TypeError) else ValueError
                raise kind(f"{metric} does not work on {name!r} of shape {[*example.shape]}: {error}") from error

    def start(self, next_step_is_due: bool, histogram_is_due: bool) -> None:
        self._num_due += next_step_is_due
        self._now = [m for m in self._metrics if next_step_is_due and self._num_due % m.every == 0]
        self._befores.forget()
        super().start(next_step_is_due and any(metric.on == "activation" for metric in self._now), histogram_is_due)

    def install(self, tap: ForwardHook) -> None:
        chosen = [self._matchers[id(metric)] for metric in self._metrics if metric.on == "activation"]
        tap.hook(lambda name, _: any(matches(name) for matches in chosen), self.forward_done)

    def forward_done(self, name: str, module: Any, args: Any, kwargs: Any, output: Any) -> None:
        self._seen_any = True
        for path, tensor in tensors_in(output):
            self._apply("activation", tensor_name(name, path), tensor, pending=True, also_called=name)

    def _logged(self, module: str, name: str, thing: Any, dims: Dims) -> None:
        if isinstance(thing, AttentionCall):
            for part, tensor in (("query", thing.query), ("key", thing.key), ("value", thing.value)):
                self._logged(module, part, tensor, {-3: "head"})
        elif is_measurable(thing):
            self._seen_any = True
            for label, part_of in slices(thing.detach(), dims):
                full_name = tensor_name(module, name, label)
                self._apply("activation", full_name, part_of, pending=True, also_called=f"{module}.{name}")

    def gradients_ready(self, tensors: Sequence[WatchedTensor]) -> None:
        super().gradients_ready(tensors)
        self._shards.look()
        for watched in tensors:
            self._parameter(watched)
            self._gradient(watched)

    def before_update(self, tensors: Sequence[WatchedTensor]) -> None:
        super().before_update(tensors)
        self._shards.look()
        for watched in tensors:
            self._parameter(watched)
        self._befores.keep(tensor for tensor in tensors if self._measures("update", tensor.name))

    def after_update(self, tensors: Sequence[WatchedTensor]) -> None:
        super().after_update(tensors)
        for name, change, _ in self._befores.changes(tensors):
            self._apply("update", name, change)

    def take(self) -> Mapping[str, Tensor]:
        taken = {}
        by_name = {(metric.on, metric.name): metric for metric in self._metrics}
        for (on, name, metric_name), tally in self._tallies.take().items():
            if (on, metric_name) not in by_name:
                continue
            try:
                for label, value in zip(tally.labels, tally.results(), strict=False):
                    taken["/".join(part for part in (on, name, label, metric_name) if part)] = _scalar(value)
            except Exception as error:
                self._drop(by_name.pop((on, metric_name)), f"values of {on} {name!r}", error)
        return taken

    def _measures(self, on: str, name: str) -> bool:
        """Whether a metric of this sample matches this parameter, and the parameter is whole."""
        if not any(metric.on == on and self._matchers[id(metric)](name) for metric in self._now):
            return False
        return self._shards.is_whole(name, needed_by="metrics of parameters, gradients and updates")

    def _parameter(self, watched: WatchedTensor) -> None:
        if self._measures("parameter", watched.name):
            self._apply("parameter", watched.name, watched.parameter, once=True)

    def _gradient(self, watched: WatchedTensor) -> None:
        gradient = watched.gradient
        if gradient is None or not self._measures("gradient", watched.name):
            return
        for metric in self._now:  # the last backward of a sample has the sum of all
            self._tallies.sample.pop(("gradient", watched.name, metric.name), None)
        self._apply("gradient", watched.name, without_scale(dense(gradient), watched.inverse_scale))

    def _apply(
        self, on: str, name: str, tensor: Tensor, *, pending: bool = False, also_called: str = "", once: bool = False
    ) -> None:
        for metric in tuple(self._now):
            matches = self._matchers[id(metric)]
            if metric.on != on or not (matches(name) or (also_called and matches(also_called))):
                continue
            key = (on, name, metric.name)
            if once and key in self._tallies.sample:
                continue
            try:
                labels, values = labelled(metric.value_of(tensor), metric.dims)
                if values.numel():
                    values_KE = values if values.ndim == 2 else values.reshape(len(labels), -1)
                    tally = Tally.of(values_KE, metric.aggregate, labels)
                    self._tallies.add(key, tally, pending=pending)
            except Exception as error:
                self._drop(metric, f"{on} {name!r} of shape {[*tensor.shape]}", error)

    def _drop(self, metric: Metric, where: str, error: Exception) -> None:
        self._metrics = [kept for kept in self._metrics if kept is not metric]
        self._now = [kept for kept in self._now if kept is not metric]
        for values in (self._tallies.sample, self._tallies.pending):
            for key in [key for key in values if (key[0], key[2]) == (metric.on, metric.name)]:
                del values[key]
        logger.error(
            "wandb_gradwatch: %s failed on the %s and is dropped; the others go on.", metric, where, exc_info=error
        )


def _scalar(value: Tensor) -> Tensor:
    if not isinstance(value, Tensor) or value.numel() != 1:
        found = f"shape {[*value.shape]}" if isinstance(value, Tensor) else repr(value)
        raise TypeError(f"aggregate must return a scalar tensor, but returned {found}")
    return value
