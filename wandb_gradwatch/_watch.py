"""watch(model): check the arguments and build the pipeline from the gradients to W&B."""

import functools
import gc
import inspect
import itertools
import logging
import math
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from types import SimpleNamespace
from typing import Any, Final, Literal, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from ._arguments import check, is_number, is_whole
from ._capture.cadence import Budget, Cadence, SampleEvery
from ._capture.parameter_registry import Models, NameFilter, ParameterRegistry, name_predicate, with_prefixes
from ._capture.parts import CaptureConfig
from ._capture.scaling import GivenScale
from ._config import Config
from ._engines.find import with_shadows
from ._engines.shadow import Shadow, shadow_of
from ._guard.guard import GuardArgument, resolve_guard
from ._guard.rank_consensus import refuse_guard
from ._measure.measure import check_backend, compile_for_cpu, resolve_backend
from ._runtime.pipelining import has_stages
from ._runtime.sharding import has_fsdp1, has_shards, rank, world_size
from ._watcher import WATCHERS, Watcher
from .metrics._metric import MetricLike, check_metrics, probes_of, rules_of
from .metrics._parameters import ParameterHistograms
from .rules import Alert, Judgement, Rule, default_rules
from .rules._base import as_rule
from .sinks import Sink, WandbSink
from .sinks._wandb_run import check_details
from .snapshot._shapes import GroupBy, group_function

logger: Final = logging.getLogger("wandb_gradwatch")

# Watchers that watch() does not replace, although they watch the same model: other callbacks of one trainer made them.
COMPANIONS: Final[ContextVar[tuple[Watcher, ...]]] = ContextVar("gradwatch_companions", default=())

# By run: the numbers of further models, which are not used again as long as any model is watched in the run.
_NUMBERS: Final[dict[str | None, Iterator[int]]] = {}

_SINKS: Final = "sinks, derived from wandb_gradwatch.Sink"
_WARMING_UP: Final = "gradwatch-warm-up"

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


def _with_checked_arguments(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """Call `check_options` first; the error for an unknown argument says what replaces those of `wandb.watch`."""
    signature = inspect.signature(function)

    @functools.wraps(function)
    def checked(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        try:
            given = signature.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(
                f"watch(): {error}. It takes one model, or a list or dict of models, and named arguments. Of the "
                "arguments of wandb.watch, log_freq= (in backwards) is log_every= here (in optimizer steps), and "
                "criterion, idx and log_graph do not exist: leave them out."
            ) from None
        check_options({name: value for name, value in given.arguments.items() if name != "model"})
        return function(*args, **kwargs)

    return checked


def check_options(given: Mapping[str, Any]) -> None:
    """Raise an error for arguments of `watch()`, by name, that are invalid whatever the model is."""
    defaults = {name: one.default for name, one in inspect.signature(watch).parameters.items() if name != "model"}
    of = SimpleNamespace(**{**defaults, **given})
    what = '"gradients", "parameters" or "all": which histograms are logged'
    check(of.log in ("gradients", "parameters", "all"), "log", of.log, what)
    check_details(of.details)
    for name in ("include", "exclude"):
        name_predicate(getattr(of, name), name)
    if of.group_by is not None:
        group_function(of.group_by)
    is_step = is_whole(of.start_step) and 0 <= of.start_step < 2**53
    check(is_step, "start_step", of.start_step, "a whole number of steps, at least 0")
    cadence = Cadence(of.sample_every, of.log_every, of.histogram_every)
    cadence.every(of.start_step + 1)  # calls a sample_every function once, so that an invalid result raises here
    Budget(of.max_overhead)
    is_threshold = is_number(of.dead_threshold) and 0 <= of.dead_threshold < math.inf
    check(is_threshold, "dead_threshold", of.dead_threshold, "a number, at least 0")
    what = "a torch.amp.GradScaler; for a scale of your own pass loss_scale="
    check(isinstance(of.scaler, GradScaler | None), "scaler", of.scaler, what, TypeError)
    _check_loss_scale(of.loss_scale)
    what = "one torch.optim.Optimizer, and only for master weights"
    check(isinstance(of.optimizer, Optimizer | None), "optimizer", of.optimizer, what, TypeError)
    check(of.on_nonfinite in (None, "trace"), "on_nonfinite", of.on_nonfinite, '"trace" or None')
    check_backend(of.backend)
    resolve_guard(of.guard)
    check_metrics(_sequence("metrics", of.metrics, "a list of metrics"))
    _rules_of_user(of.rules)
    for callback in _callbacks(of.on_alert):
        if not callable(callback):
            raise TypeError(f"on_alert={of.on_alert!r}: {callback!r} is not a function")
    for sink in (sinks := _sequence("sinks", of.sinks, f"a list of {_SINKS}")):
        if not isinstance(sink, Sink):
            raise TypeError(f"sinks={sinks!r} must be a list of {_SINKS}, but {sink!r} is not one")
    is_run = of.run is None or (hasattr(of.run, "disabled") and hasattr(of.run, "define_metric"))
    check(is_run, "run", of.run, "what wandb.init() returns", TypeError)


@_with_checked_arguments
def watch(
    model: Models,
    *,
    log: Literal["gradients", "parameters", "all"] = "gradients",
    run: Any = None,
    include: NameFilter | None = None,
    exclude: NameFilter | None = None,
    sample_every: SampleEvery = None,
    log_every: int | None = None,
    histogram_every: int | None = None,
    max_overhead: float = 0.01,
    group_by: GroupBy | None = None,
    details: Sequence[str] | Mapping[str, str] = (),
    metrics: Sequence[MetricLike] = (),
    rules: Sequence[Rule | Judgement] | None = None,
    sinks: Sequence[Sink] | None = None,
    on_alert: Callable[[Alert], object] | Sequence[Callable[[Alert], object]] | None = None,
    guard: GuardArgument = None,
    on_nonfinite: Literal["trace"] | None = None,
    dead_threshold: float = 0.0,
    optimizer: Optimizer | None = None,
    scaler: GradScaler | None = None,
    loss_scale: GivenScale | None = None,
    start_step: int = 0,
    backend: str = "auto",
) -> Watcher:
    """Log gradient statistics, histograms and alerts of a model to the W&B run while it trains.

    No other call is needed: optimizer steps, gradient accumulation, clipping and loss scaling are detected. Training is
    not changed. Invalid arguments raise at once; a later error inside the monitor never reaches the training loop.

    Args:
        model: a module, or a list or dict of modules.
        log: which histograms are logged, as in `wandb.watch`: "gradients", "parameters" (after an update), or "all".
        run: the W&B run. None: `wandb.run` on rank 0; other ranks log only if `run` or `sinks` is given.
        include: watch only parameters whose name matches: a regular expression (searched), several, or a function.
        exclude: do not watch parameters whose name matches; same types as `include`.
        sample_every: measure every n-th optimizer step, at any cost; a function maps a step number to n, 0 for none.
            None: as many steps as `max_overhead` allows, and up to 32 in a row after something unusual.
        log_every: log a row every n optimizer steps, with a sample for it, at any cost. None: every 50 steps, less
            often only where rows would take more than two fifths of what `max_overhead` allows.
        histogram_every: take histograms every n optimizer steps. None: with the first row and every tenth. 0: never.
        max_overhead: the share of the training time that monitoring may take, 0.01 is one percent. In addition it may
            take one second per run, at its start, and at most a tenth of the time so far.
        group_by: what one series shows: "parameter", "module", or a function from a parameter's name to a group's name.
            None: one parameter; with more than 256 parameters, neighbours are grouped, and a message says so once.
        details: additional per-layer numbers in the W&B row: "mean", "std", "min", "max", "abs_max", "abs_min_nonzero",
            "zero_ratio" and "received" (the norm that the optimizer received); "mean", "std" and "abs_max" are logged
            for the whole model, too. A dict logs each number only for layers whose name matches: {"std": r"^head",
            "received": "weight$"}. "precision" logs, for the whole model alone, quantiles of the elements' sizes and
            what smaller number formats would lose of the gradients.
        metrics: additional metrics at sampled steps, from `wandb_gradwatch.metrics`: `Metric(name, fn)`,
            `Activations()`, `Attention()`, ... Their own rules are added to the default rules.
        rules: what raises alerts: `default_rules()`, to which you may add rules of your own. None: the default. []:
            nothing.
        sinks: where snapshots and alerts are written instead of the W&B run; if `run` is given too, both are written.
        on_alert: a function, or several, called with every alert that is sent. Its exceptions reach the training loop.
        guard: do not apply some steps: "skip" those whose gradients are not finite or explode; those for which a
            function from a snapshot to bool returns True; a `SkipGuard` sets limits. Every step is then measured, and
            the host reads one result from the device per step, except for a fused optimizer without a function.
        on_nonfinite: "trace": after an alert of NaN or Inf, run the next step that starts with finite parameters once
            more and report the operation that makes them. A guard does so by default, for the bad step itself.
        dead_threshold: an element with |g| <= this counts as dead; in units of the unscaled gradient.
        optimizer: only needed if the optimizer updates copies of the parameters (master weights).
        scaler: the gradient scaler; only needed if it must be known before its first use.
        loss_scale: what your own code divides the gradients by between backward() and step(), such as the number of
            tokens: a number; a tensor, read when a backward ends; or a function of the step number, called then. The
            logged norms are those of the divided gradients.
        start_step: the number of optimizer steps already made, to continue a training.
        backend: "auto" or the name of a backend. On CPU "auto" uses "cpu" (torch and numpy), and "compiled" as soon as
            its loops are compiled in the background, which needs numba (the extra `fast`). "compiled" by name compiles
            before watch() returns; the first time that takes seconds.

    Raises:
        TypeError: model is not a module or a collection of modules, or another argument has the wrong type.
        ValueError: the model has no trainable parameter to watch; its engine keeps gradients where they cannot be
            measured; a cadence, name filter, backend or threshold is invalid; a metric matches nothing; a guard could
            decide differently on the ranks.
        RuntimeError: there is neither a run nor a sink; the backend cannot run on the model's device, or cannot be
            compiled.

    Cost: a sampled step reads every gradient and every parameter in one batched pass and never waits for the device;
    other steps are only counted, with the hooks off; two hooks stay if optimizers step inside the backward or if there
    is no optimizer, and all of them with a guard. Measured in docs/benchmarks.md and docs/growth.md.
    """
    # Everything that can be refused is refused before anything is changed, an earlier watcher included. What does not
    # depend on the model was checked by the decorator.
    models_given = [each for _, each in with_prefixes(model)]
    watched = with_shadows(model)  # held here, because the registry keeps no model alive
    registry = ParameterRegistry(watched, include=include, exclude=exclude, given=model)
    if group_by is not None and not isinstance(group := group_function(group_by)(registry.names[0]), str):
        found = f"{group!r} for {registry.names[0]!r}"
        raise TypeError(f"group_by={group_by!r} must return a name, but returned {found}")
    is_on_cpu = all(parameter.device.type == "cpu" for _, parameter in registry.scan())
    if guard is not None and world_size() > 1 and backend == "auto" and is_on_cpu:
        backend = "cpu"  # replicas must decide bit for bit alike: none may use the compiled loops before another
    chosen_metrics = list(metrics or ())
    probes = probes_of(chosen_metrics, model, registry.names)
    shadows = [shadow for one in registry.models() if (shadow := shadow_of(one)) is not None]
    if shadows:
        given = {"guard": guard, "on_nonfinite": on_nonfinite, "optimizer": optimizer, "scaler": scaler}
        needs_own = [probe for probe in probes if probe.needs_ranks]
        loss_scale = _loss_scale_of(shadows, given | {"loss_scale": loss_scale}, needs_own)
    if log != "gradients" and histogram_every != 0:
        probes.append(ParameterHistograms(backend))
    chosen_rules = [*default_rules(), *rules_of(chosen_metrics)] if rules is None else _rules_of_user(rules)
    skip_guard = resolve_guard(guard)
    if skip_guard is not None and world_size() > 1:
        models = registry.models()
        is_function = skip_guard.is_bad is not None and has_shards(models)
        refuse_guard(uses_fsdp1=has_fsdp1(models), function=is_function, has_stages=has_stages(models))
    chosen = list(sinks or ())
    used_run = _run_of(run, sinks)
    _prepare_backend(registry, dead_threshold, backend, histogram=histogram_every != 0)

    replaced: set[str] = set()  # namespaces
    for watcher in list(WATCHERS):
        if watcher not in COMPANIONS.get() and any(map(watcher.watches, models_given)):
            logger.warning("wandb_gradwatch: the model was already watched; the new watch() replaces the earlier one.")
            replaced |= watcher.namespaces_in(used_run)
            watcher.remove()
    if used_run is not None:
        namespace = _namespace(used_run, registry, replaced)
        chosen.append(WandbSink(used_run, group_by=group_by, namespace=namespace, details=details))
    elif sinks is None and world_size() > 1:
        chosen.append(_RunOfRank0(_namespace(None, registry, replaced)))
    return Watcher(
        registry,
        Config(
            capture=CaptureConfig(
                cadence=Cadence(sample_every, log_every, histogram_every),
                budget=Budget(max_overhead),
                dead_threshold=float(dead_threshold),
                backend=backend,
                histograms=log != "parameters",
                loss_scale=loss_scale,
                optimizer=optimizer,
                scaler=scaler,
                start_step=int(start_step),
                probes=tuple(probes),
                guard=skip_guard,
            ),
            sinks=tuple(chosen),
            rules=tuple(chosen_rules),
            on_alert=tuple(_callbacks(on_alert)),
            on_nonfinite=on_nonfinite,
        ),
        models_given,
    )


def unwatch(model: Models | None = None) -> None:
    """Remove the watcher of a model, or every watcher. No hook stays on the model.

    Args:
        model: the model or collection passed to watch(), or one model of it; None: all. Unwatched models are ignored.

    Raises:
        TypeError: model is not a module or a collection of modules.
    """
    models = None if model is None else [one for _, one in with_prefixes(model, asked_by="unwatch()")]
    for watcher in list(WATCHERS):
        if models is None or any(map(watcher.watches, models)):
            watcher.remove()


def _loss_scale_of(shadows: Sequence[Shadow], given: Mapping[str, Any], needs_own: Sequence[object]) -> Any:
    """Return the loss scale of the models under engines; None without one.

    Raises:
        ValueError: an argument is given that has no meaning or no way under an engine.
    """
    name = shadows[0].engine.name
    for argument, value in given.items():
        if value is not None:
            why = f"{name} itself " + {
                "guard": "decides which steps are applied",
                "on_nonfinite": "runs the backwards, so that none can be run again",
            }.get(argument, "has the optimizer and the loss scale")
            raise ValueError(f"watch(): {argument}={value!r} cannot be used, because {why}; leave it out")
    if needs_own:
        raise ValueError(f"metrics: {needs_own[0]!r} needs the gradients of each rank, of which {name} keeps no copy")
    scaling = [shadow for shadow in shadows if shadow.engine.scales]
    if len(scaling) > 1:
        raise ValueError(f"watch(): each {name} engine has a loss scale of its own; call watch() for each model")
    return scaling[0].loss_scale_at if scaling else None


def _sequence(argument: str, values: Any, what: str) -> list[Any]:
    """Return the values as a list; an empty one for None."""
    is_sequence = isinstance(values, Sequence | deque) and not isinstance(values, str)
    check(values is None or is_sequence, argument, values, what, TypeError)
    return list(values or ())


def _callbacks(on_alert: Any) -> list[Any]:
    return [on_alert] if callable(on_alert) else _sequence("on_alert", on_alert, "a function, or several")


def _rules_of_user(rules: Any) -> list[Rule | Judgement]:
    given = _sequence("rules", rules, "a list of rules, [] for none")
    return [one if isinstance(one, Judgement) else as_rule(one) for one in given]


def _check_loss_scale(loss_scale: object) -> None:
    if loss_scale is None:
        return
    if callable(loss_scale):
        try:
            inspect.signature(loss_scale).bind(1)
        except TypeError as error:
            raise TypeError(f"loss_scale={loss_scale!r} must accept the step, but: {error}") from None
        except ValueError:  # a built-in function without a signature
            pass
        return
    is_one = is_number(loss_scale) or (isinstance(loss_scale, Tensor) and loss_scale.numel() == 1)
    what = "a number, a tensor with one element, or a function of the step"
    check(is_one, "loss_scale", loss_scale, what, TypeError)
    if is_number(loss_scale):
        check(0 < loss_scale < math.inf, "loss_scale", loss_scale, "above 0, and finite")


def _prepare_backend(registry: ParameterRegistry, dead_threshold: float, backend: str, *, histogram: bool) -> None:
    """Resolve the backend of every device, and start to compile what it needs."""
    kernels: dict[torch.device, set[torch.dtype]] = {}
    for slot, parameter in registry.scan():
        if resolve_backend(backend, parameter.device, registry.names[slot]) == "cuda":
            kernels.setdefault(parameter.device, set()).add(parameter.dtype)
    if any(parameter.device.type == "cpu" for _, parameter in registry.scan()):
        compile_for_cpu(backend)
    if not kernels:
        return
    options: dict[str, Any] = {
        "dead_threshold": dead_threshold,
        "histogram": histogram,
        "in_buckets": world_size() > 1,  # gradients contiguous in memory, as DDP and FSDP can place them
        "goes_on": threading.main_thread().is_alive,
    }

    def compile_all() -> None:
        from ._measure.cuda_launch import warm_up

        try:
            for device, dtypes in kernels.items():
                warm_up(device, list(dtypes), **options)
        except Exception as error:  # measure() gets the same error, and falls back or raises as `backend` demands
            logger.debug("wandb_gradwatch: warming up the kernels failed: %r", error)

    # In the background: otherwise the first sampled step waits seconds for each kernel. Not a daemon thread: an
    # interpreter that exits while a compiler runs may crash. The exit waits for one kernel.
    threading.Thread(target=compile_all, name=_WARMING_UP, daemon=False).start()


def wait_for_kernels() -> None:
    """Wait until no kernel is being compiled in the background; for measurements of a step's cost."""
    for thread in threading.enumerate():
        if thread.name == _WARMING_UP:
            thread.join()


def _run_of(run: Any, sinks: Sequence[Sink] | None) -> Any:
    """Return the run to log to. If none is given: None if there are sinks or on ranks other than 0; else wandb.run."""
    if run is None and sinks is None and rank() == 0:
        run = getattr(sys.modules.get("wandb"), "run", None)
        if run is None:
            raise RuntimeError(
                "watch() found no W&B run: call wandb.init() first, pass run=, or pass sinks= to log without W&B"
            )
    if run is not None and any(isinstance(sink, WandbSink) and sink.run is run for sink in sinks or ()):
        raise ValueError(
            "sinks= already has a WandbSink for the run in run=, so each row would be logged twice: pass one of them"
        )
    return run


class _RunOfRank0(Sink):
    """Holds the namespace of rank 0 on a rank that logs nothing: the merge matches parameters of ranks by name."""

    def __init__(self, namespace: str) -> None:
        self._namespace = namespace

    def namespace_in(self, run: object) -> str | None:
        return self._namespace if run is None else None


def _namespace(run: Any, registry: ParameterRegistry, replaced: set[str]) -> str:
    """Return the key prefix of a further model in this run: "model1", ... Parameters get it too if names clash.

    The prefixes of consecutive trainings, such as the folds of a cross-validation, must not depend on when Python frees
    their models. Therefore models that nobody can reach are freed here, and a number is used again only for a model
    that is watched anew, or after all models of the run are gone.

    Args:
        run: the W&B run, or None on a rank that logs nothing.
        registry: the parameters of the model.
        replaced: the prefixes of watchers of the same model, which this one replaces.

    Cost: one garbage collection, if another model is watched in the run.
    """
    if any(watcher.namespaces_in(run) for watcher in WATCHERS):
        gc.collect()
    run_id = None if run is None else run.id
    others = [(watcher, namespace) for watcher in WATCHERS for namespace in watcher.namespaces_in(run)]
    if not others:
        _NUMBERS.pop(run_id, None)
        return ""
    names = {name for watcher, _ in others for name in watcher.parameter_names}
    bare = {name.removeprefix(f"{own}.") for watcher, own in others for name in watcher.parameter_names}
    taken = {name.partition(".")[0] for name in (*bare, *registry.names)}.union(own for _, own in others)
    unused = map("model{}".format, _NUMBERS.setdefault(run_id, itertools.count(1)))
    candidates = (each for each in itertools.chain(sorted(replaced), unused) if each not in taken)
    namespace = next(each for each in candidates if each or names.isdisjoint(registry.names))
    if namespace and not bare.isdisjoint(registry.names):
        registry.put_below(namespace)
    return namespace
