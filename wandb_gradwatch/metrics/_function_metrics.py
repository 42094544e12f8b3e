"""The probe behind Metric: applies the user's functions, and drops the one that fails without the others."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .._capture.probes import WatchedTensor
from .._measure.elements import onto
from ._attention import AttentionCall
from ._forward_hooks import Dims, ForwardHook
from ._metric import Metric
from ._mixin import hands_over
from ._module_index import ModuleIndex, matcher, nothing_matches
from ._module_probe import ForwardProbe, is_measurable, logger, pieces, slices, tensor_name, tensors_in
from ._reduction import Tally
from ._shards import ProbeShards
from ._store import Store
from ._updates import Befores

_Key = tuple[str, str, str]  # what it is of, the name, the metric


class FunctionMetrics(ForwardProbe):
    """All the metrics of a watcher: they share the hooks and, for updates, the copies.

    Memory: with metrics on updates a copy of the matching parameters, while an optimizer steps in a sampled step.

    Raises:
        ValueError: two metrics would log under the same keys.
    """

    def __init__(self, metrics: Iterable[Metric]) -> None:
        self._metrics = list(metrics)
        super().__init__()
        self._chosen_by: dict[int, Callable[[str], bool]] = {
            id(metric): matcher(metric.match, str(metric)) for metric in self._metrics
        }
        seen: set[tuple[str, str]] = set()
        for metric in self._metrics:
            if (metric.on, metric.name) in seen:
                raise ValueError(f"metrics holds two called {metric}; give them different names")
            seen.add((metric.on, metric.name))
        self._now: list[Metric] = []  # those that this sample measures
        self._num_due = 0
        self._pending, self._sample = self.stores(lambda: Store[_Key, Tally](Tally.merge))
        self._befores = Befores()
        self._shards = ProbeShards()

    def __repr__(self) -> str:
        return f"FunctionMetrics({', '.join(metric.name for metric in self._metrics)})"

    def claims(self) -> set[tuple[str, str]]:
        return {(metric.on, metric.name) for metric in self._metrics}

    # ---- at watch()

    def bind(self, models: ModuleIndex) -> None:
        """Try each metric once, on the smallest tensor that it matches, where there are tensors to try.

        Raises:
            ValueError: a metric matches nothing.
            TypeError, or what fn raises: fn does not work on a parameter that it matches.
        """
        self._shards.bind(models)
        self._shards.look()
        parameters = {n: p for n, p in models.watched_parameters().items() if p.is_floating_point() or p.is_complex()}
        modules = dict(models.modules())
        for metric in self._metrics:
            if metric.on == "activation":
                self._check_modules(metric, modules)
            else:
                self._check_parameters(metric, parameters)
        if any(metric.on == "activation" for metric in self._metrics):
            self.tap_into(models, self._logged)

    def _check_parameters(self, metric: Metric, parameters: Mapping[str, Tensor]) -> None:
        chosen = [name for name in parameters if self._chosen_by[id(metric)](name)]
        if not chosen:
            raise nothing_matches(str(metric), metric.match, "parameter", list(parameters))
        there = {name: parameters[name] for name in chosen if self._shards.holds_whole(name)}
        there = {name: tensor for name, tensor in there.items() if tensor.numel() and not tensor.is_meta}
        if not there:
            return
        name = min(there, key=lambda name: there[name].numel())
        example = there[name].detach()
        with torch.no_grad():
            try:
                pieces(metric.value_of(example), metric.dims)
            except Exception as error:
                kind = TypeError if isinstance(error, TypeError) else ValueError
                raise kind(f"{metric} does not work on {name!r} of shape {[*example.shape]}: {error}") from error

    def _check_modules(self, metric: Metric, modules: Mapping[str, Any]) -> None:
        # A tensor that a module hands over is known only when it does.
        if not any(map(self._chosen_by[id(metric)], modules)) and not any(map(hands_over, modules.values())):
            raise nothing_matches(str(metric), metric.match, "module", list(modules))

    # ---- during a sample

    def start(self, next_step_is_due: bool, histogram_is_due: bool) -> None:
        self._num_due += next_step_is_due
        self._now = [m for m in self._metrics if next_step_is_due and self._num_due % m.every == 0]
        self._befores.forget()
        super().start(next_step_is_due and any(metric.on == "activation" for metric in self._now), histogram_is_due)

    def install(self, tap: ForwardHook) -> None:
        chosen = [self._chosen_by[id(metric)] for metric in self._metrics if metric.on == "activation"]
        tap.hook(lambda name, _: any(matches(name) for matches in chosen), self._forward_done)

    def _forward_done(self, name: str, module: Any, args: Any, kwargs: Any, output: Any) -> None:
        self._seen_any = True
        for path, tensor in tensors_in(output):
            self._apply("activation", tensor_name(name, path), tensor, self._pending, also_called=name)

    def _logged(self, module: str, name: str, thing: Any, dims: Dims) -> None:
        if isinstance(thing, AttentionCall):
            for part, tensor in (("query", thing.query), ("key", thing.key), ("value", thing.value)):
                self._logged(module, part, tensor, {-3: "head"})
        elif is_measurable(thing):
            self._seen_any = True
            for label, part_of in slices(thing.detach(), dims):
                full_name = tensor_name(module, name, label)
                self._apply("activation", full_name, part_of, self._pending, also_called=f"{module}.{name}")

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
            self._apply("update", name, change, self._sample)

    def take(self) -> Mapping[str, Tensor]:
        taken = {}
        by_name = {(metric.on, metric.name): metric for metric in self._metrics}
        for (on, name, metric_name), tally in self._sample.take().items():
            if (on, metric_name) not in by_name:
                continue
            try:
                for label, value in zip(tally.labels, tally.results(), strict=False):
                    taken["/".join(part for part in (on, name, label, metric_name) if part)] = _scalar(value)
            except Exception as error:
                self._drop(by_name.pop((on, metric_name)), f"values of {on} {name!r}", error)
        return taken

    # ---- one tensor

    def _measures(self, on: str, name: str) -> bool:
        """Whether a metric of this sample matches this parameter, and the parameter is whole."""
        if not any(metric.on == on and self._chosen_by[id(metric)](name) for metric in self._now):
            return False
        return self._shards.is_whole(name, needed_by="metrics of parameters, gradients and updates")

    def _parameter(self, watched: WatchedTensor) -> None:
        if self._measures("parameter", watched.name):
            self._apply("parameter", watched.name, watched.parameter, self._sample, once=True)

    def _gradient(self, watched: WatchedTensor) -> None:
        gradient = watched.gradient
        if gradient is None or not self._measures("gradient", watched.name):
            return
        if gradient.layout is not torch.strided:
            gradient = gradient.to_dense()
        if watched.inverse_scale is not None:
            wide = gradient.float() if gradient.element_size() < 4 else gradient
            gradient = wide * onto(watched.inverse_scale, wide.device)
        for metric in self._now:  # the last backward of a sample has the sum of all
            self._sample.pop(("gradient", watched.name, metric.name), None)
        self._apply("gradient", watched.name, gradient, self._sample)

    def _apply(
        self,
        on: str,
        name: str,
        tensor: Tensor,
        into: Store[_Key, Tally],
        *,
        also_called: str = "",
        once: bool = False,
    ) -> None:
        for metric in tuple(self._now):
            matches = self._chosen_by[id(metric)]
            if metric.on != on or not (matches(name) or (also_called and matches(also_called))):
                continue
            key = (on, name, metric.name)
            if once and key in into:
                continue
            try:
                values_KE, labels = pieces(metric.value_of(tensor), metric.dims)
                if values_KE.shape[1]:
                    into.add(key, Tally.of(values_KE, metric.aggregate, labels))
            except Exception as error:
                self._drop(metric, f"{on} {name!r} of shape {[*tensor.shape]}", error)

    def _drop(self, metric: Metric, where: str, error: Exception) -> None:
        self._metrics = [kept for kept in self._metrics if kept is not metric]
        self._now = [kept for kept in self._now if kept is not metric]
        for store in (self._sample, self._pending):
            for key in [key for key in store if (key[0], key[2]) == (metric.on, metric.name)]:
                del store[key]
        logger.error(
            "wandb_gradwatch: %s failed on the %s and is dropped; the others go on.", metric, where, exc_info=error
        )


def _scalar(value: Tensor) -> Tensor:
    if not isinstance(value, Tensor) or value.numel() != 1:
        found = f"shape {[*value.shape]}" if isinstance(value, Tensor) else repr(value)
        raise TypeError(f"aggregate must return a scalar tensor, but returned {found}")
    return value
