"""What watch(metrics=...) takes, as probes and rules."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from .._capture.parameter_registry import Models as WatchedModels
from .._capture.parameter_registry import with_prefixes
from .._capture.probes import Probe
from ..rules import Rule
from ._function_metrics import FunctionMetrics
from ._metric import Metric
from ._module_index import ModuleIndex
from ._module_probe import ModuleProbe
from ._reference import Reference

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
