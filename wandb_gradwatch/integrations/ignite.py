"""Ignite: log gradient statistics to engine.state.metrics and W&B, and optionally skip the updates of bad batches.

GradWatch(model).attach(trainer)
"""

import math
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from .._arguments import check, check_flags, check_function, is_number
from .._boundary import RaisedToTheUser
from .._capture.parameter_registry import Models, with_prefixes
from .._capture.probes import WatchedTensor
from .._engines.find import engine_of
from .._guard.guard import NormLimits, SkipGuard, judge_of_norms
from .._measure.measure import measure_received
from .._runtime.sharding import has_shards
from ..metrics import ModuleProbe
from ..snapshot import Snapshot
from ._session import Session, Watching, active_run, named, require

_Present = tuple[tuple[str, ...], tuple[bool, ...]]  # names, and which of them have a gradient

_ignite: Any = require("ignite.engine", extra="ignite")
_Engine, _Events = _ignite.Engine, _ignite.Events


class GradWatch(Watching):
    """Watch the gradients of the model that an engine trains; `skip=True` also skips the updates of gradient spikes.

    After every backward and before the update, `engine.state.metrics["grad_norm"]` is the norm of the gradient
    (accumulated, reduced over ranks, unscaled, unclipped), and `engine.state.unhealthy_spike` is True if this norm is a
    spike. By default the training is not changed. With `skip=True`, the guard of `watch()` withholds the update of a
    spike: parameters and the optimizer's state stay as they are, and the train step needs no change. Alternatively, the
    train step can read the flag:

        loss.backward()
        if engine.state.unhealthy_spike:
            optimizer.zero_grad()
            return
        optimizer.step()

    The metrics `grad_mean`, `grad_std` and `grad_sparsity` follow after the step. The active W&B run, such as that of
    Ignite's WandBLogger, receives the rows, histograms and alerts of `wandb_gradwatch.watch`. While the engine runs,
    `grad_watch.watcher` is the Watcher.

    The loss in the rows, `gradwatch/loss`, is the tensor on which the train step calls `backward()`.

    A step with a closure (LBFGS) computes its own gradients: the flag is right, but the update is not skipped.

    Only the given limits define a spike. Without limits, a spike is a norm above 5 times the usual norm and more than
    3.5 standard deviations above it. A norm that is NaN or infinite is always a spike.

    Args:
        model: a module, or a list or dict of modules.
        max_norm: every norm above this value is a spike.
        stds: a spike is a log norm more than this many standard deviations above the mean, from the sixth update on.
        factor: a spike is a norm above this multiple of the usual norm; with `stds`, it must exceed both limits.
        window: number of most recent healthy updates that define the usual norm.
        rule: a function from the norm to True (a spike) or False; it replaces all limits.
        skip: skip the updates of gradient spikes.
        on_spike: called with the engine at each spike, before the update; its exceptions propagate to `engine.run`.
        per_layer: also put the norm of every layer into the metrics.
        prefix: prefix of the names of the metrics.
        run: the W&B run; None uses the active run.
        watch_options: further arguments of `wandb_gradwatch.watch`: scaler, log_every, rules, include, ...

    Raises:
        ValueError: an argument is out of range, `rule` is combined with limits, or the model is under an engine
            (DeepSpeed, Megatron-core).
        TypeError: an argument has the wrong type, or is not one of `wandb_gradwatch.watch`.

    Cost: one additional pass over the gradients and one read from the device for each backward before an update;
    `skip` adds one read per update.
    """

    def __init__(
        self,
        model: Models,
        *,
        max_norm: float | None = None,
        stds: float | None = None,
        factor: float | None = None,
        window: int = NormLimits.window,
        rule: Callable[[float], bool] | None = None,
        skip: bool = False,
        on_spike: Callable[[Any], object] | None = None,
        per_layer: bool = False,
        prefix: str = "",
        run: Any = None,
        **watch_options: Any,
    ) -> None:
        reserved = ("run", "start_step", "sample_every", *(("guard",) if skip else ()))
        # Shown at once, so that handlers of ITERATION_COMPLETED, such as loggers, find the sample in the metrics.
        self._session = Session(
            type(self).__name__, watch_options, reserved=reserved, run=run, on_sample=_while_alive(self._show)
        )
        models = [module for _, module in with_prefixes(model, asked_by="GradWatch()")]
        if (engine := next(filter(None, map(engine_of, models)), None)) is not None:
            raise ValueError(
                f"GradWatch() cannot see the norms of {engine}, which trains the model; call watch() instead"
            )
        is_limit = max_norm is None or (is_number(max_norm) and max_norm > 0)
        check(is_limit, "max_norm", max_norm, "a positive number or None")
        check_function("GradWatch()", "rule", rule, "a function from a norm to True (a spike) or False")
        check_function("GradWatch()", "on_spike", on_spike, "a function of the engine")
        check_flags("GradWatch()", skip=skip, per_layer=per_layer)
        check(isinstance(prefix, str), "GradWatch(): prefix", prefix, "a string", TypeError)
        if rule is not None and (max_norm, stds, factor) != (None, None, None):
            raise ValueError("GradWatch() got both rule= and limits of the norm; pass either rule= or the limits")
        self._usual = judge_of_norms(threshold=max_norm, factor=factor, stds=stds, window=window, default_factor=5.0)
        self._rule = rule
        self._model = model
        self._skip = skip
        self._on_spike = on_spike
        self._per_layer = per_layer
        self._prefix = prefix
        self._run = run
        self._engine: Any = None
        self._judged: dict[_Present, tuple[float, bool]] = {}  # this iteration's norms; True: the norm is a spike
        self._is_updated = False
        # No limit on skipped steps in a row: a long series of spikes ends when their level becomes the usual one.
        self._guard = SkipGuard(is_bad=_while_alive(self._is_bad), max_in_a_row=sys.maxsize)

    def attach(self, engine: Any) -> "GradWatch":
        """Watch the model while this engine runs.

        Raises:
            ValueError: `skip=True` with a sharded model, of which no rank knows the whole norm before the update.
            TypeError: engine is not an Engine of Ignite.
        """
        check(
            isinstance(engine, _Engine),
            "attach(): engine",
            engine,
            "the ignite.engine.Engine of the training",
            TypeError,
        )
        if self._skip and has_shards([module for _, module in with_prefixes(self._model)]):
            raise ValueError(
                "GradWatch(skip=True) cannot judge a sharded model before its update, because each rank has only a "
                "part of the gradient; pass skip=False"
            )
        self._engine = engine
        engine.state.unhealthy_spike = False
        engine.add_event_handler(_Events.STARTED, self._start)
        engine.add_event_handler(_Events.ITERATION_STARTED, self._begin_iteration)
        engine.add_event_handler(_Events.ITERATION_COMPLETED, self._learn)
        # No handler for exceptions, because Ignite suppresses an exception that has a handler. The next run, or the end
        # of the script, removes the watcher of a run that raised.
        engine.add_event_handler(_Events.COMPLETED, lambda _: self._session.end())
        return self

    def state_dict(self) -> dict[str, Any]:
        """The watcher's state and the usual norms, as plain values and tensors for Ignite's Checkpoint.

        With a sharded model, call it on all ranks.
        """
        self._learn()
        return {"watched": self._session.state_dict(), "usual": self._usual.state_dict()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the state that `state_dict` returned."""
        self._session.load_state_dict(state_dict["watched"])
        self._usual.load_state_dict(state_dict["usual"])

    def _start(self, _: Any) -> None:
        self._session.end()
        self._begin()

    def _begin(self) -> None:
        options = self._session.options
        self._session.begin(
            self._model,
            goes_on=True,
            sample_every=1,  # because the metrics must be those of every iteration
            run=active_run() if self._run is None else self._run,
            metrics=[*(options.get("metrics") or ()), _NormProbe(self)],
            guard=self._guard if self._skip else options.get("guard"),
        )

    def _begin_iteration(self, engine: Any) -> None:
        if self.watcher is None:  # a completely frozen model may be unfrozen later
            self._begin()
        engine.state.unhealthy_spike = False
        self._judged, self._is_updated = {}, False

    def _learn(self, _: Any = None) -> None:
        """Add the iteration's norms to the usual ones, once, if the update was made or was a spike."""
        for (names, mask), (norm, spike) in self._judged.items():
            if (self._is_updated or spike) and 0 < norm < math.inf:
                self._usual.learn(names, np.array(mask), norm, alarmed=spike)
        self._judged = {}

    def _judge(self, tensors: Sequence[WatchedTensor]) -> None:
        """Compute the norm of the final gradients, NaN with a non-finite element, and decide whether it is a spike."""
        mask = tuple(tensor.gradient is not None for tensor in tensors)
        if not any(mask):
            return
        names, state = tuple(tensor.name for tensor in tensors), self._engine.state
        norm = _norm(tensors)
        state.metrics[f"{self._prefix}grad_norm"] = norm
        with RaisedToTheUser():  # from the user's rule or callback
            exceeds = self._rule or (lambda norm: norm > self._usual.limit(names, np.array(mask)))
            spike = not norm < math.inf or bool(exceeds(norm))
            is_first = spike and not state.unhealthy_spike
            self._judged[names, mask] = (norm, spike)
            state.unhealthy_spike = state.unhealthy_spike or spike
            if is_first and self._on_spike is not None:
                self._on_spike(self._engine)

    def _is_bad(self, snapshot: Snapshot) -> bool:
        """Whether the guard must withhold this update; the guard calls it before every update."""
        return bool(self._engine.state.unhealthy_spike or snapshot.arose_after_backward.any())

    def _show(self, sample: Snapshot) -> None:
        numbers = self._session.numbers(sample, per_layer=self._per_layer)
        # The metrics have had the norm since the backward, NaN if not finite; the sample's is that of finite elements.
        numbers.pop("grad_norm", None)
        self._engine.state.metrics.update(named(self._prefix, numbers))


class _NormProbe(ModuleProbe):
    """Passes final gradients to its owner, and records when an optimizer is about to use them."""

    def __init__(self, owner: GradWatch) -> None:
        self._owner = weakref.ref(owner)

    def gradients_ready(self, tensors: Sequence[WatchedTensor]) -> None:
        if (owner := self._owner()) is not None:
            owner._judge(tensors)

    def before_update(self, tensors: Sequence[WatchedTensor]) -> None:
        if (owner := self._owner()) is not None:
            owner._is_updated = True


def _while_alive(method: Callable[..., Any]) -> Callable[..., Any]:
    """Call the method while its owner is alive, and return None afterwards: a watcher must not keep a model alive."""
    weak = weakref.WeakMethod(method)
    return lambda *args: (alive := weak()) and alive(*args)


def _norm(tensors: Sequence[WatchedTensor]) -> float:
    """The L2 norm; NaN if an element is not finite. The host waits for the device here, because it must decide."""
    scaled = [(tensor.gradient, tensor.inverse_scale) for tensor in tensors if tensor.gradient is not None]
    total = 0.0
    for device in dict.fromkeys(gradient.device for gradient, _ in scaled):
        gradients, scales = zip(*[one for one in scaled if one[0].device == device], strict=True)
        # Replicas must get the same result: no compiled loops, which one rank may use earlier than another.
        backend = "cpu" if device.type == "cpu" else "auto"
        sums_N3 = measure_received(gradients, inverse_scale=scales[-1], backend=backend)
        sum_sq, *num_nonfinite = sums_N3.sum(dim=0).tolist()
        total += math.nan if any(num_nonfinite) else sum_sq
    return math.sqrt(total)
