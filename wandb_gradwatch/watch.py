"""watch(model): build the corridor from gradients to W&B, and own its life."""

from __future__ import annotations

import atexit
import itertools
import logging
import math
import sys
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, TypeVar

import numpy as np
from numpy.typing import NDArray
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from .cadence import Cadence
from .capture.containment import Containment, UserCallbackError
from .capture.gauge import MeasureOptions
from .capture.probes import Probe
from .capture.roster import Models, NameFilter, Roster
from .capture.sampler import Sampler, SamplerEvents
from .capture.sharding import rank
from .desk import AlertDesk
from .reduction import LocalWindow, Reducer
from .rules import Alert, Rule, default_rules
from .sinks import Sink
from .snapshot import GroupBy, Snapshot, group_function
from .statistics.columns import Column, FloatArray
from .statistics.measure import resolve_backend
from .window import ArrivedFlush, ArrivedSample, Window

logger: Final = logging.getLogger("wandb_gradwatch")

# What can be left out to save time. The gradient's own statistics are always there.
STATISTICS: Final = ("parameter", "histogram")
DEFAULT: Final = STATISTICS

_CLIP_TOLERANCE: Final = 1e-5

Number = TypeVar("Number", np.float64, np.int64)


class StepNumber(int):
    """The number of a step, and the way to say that the next one has been made."""

    _advance: Callable[[], None]

    def __new__(cls, number: int, advance: Callable[[], None]) -> StepNumber:
        self = super().__new__(cls, number)
        self._advance = advance
        return self

    def __call__(self) -> None:
        self._advance()

    def __reduce__(self) -> tuple[type[int], tuple[int]]:
        return int, (int(self),)  # in a checkpoint it is a number like any other


class Watcher:
    """A watched model: everything that `watch()` returned owns, from the hooks to the sinks.

    A context manager: leaving the block removes it. Not to be made by hand; see `watch()`.
    """

    def __init__(
        self,
        roster: Roster,
        sampler_arguments: dict[str, Any],
        *,
        cadence: Cadence,
        options: MeasureOptions,
        sinks: Sequence[Sink],
        desk: AlertDesk,
        on_alert: Sequence[Callable[[Alert], object]],
    ) -> None:
        self._roster = roster
        self._sinks = list(sinks)
        self._desk = desk
        self._on_alert = tuple(on_alert)
        self._window = Window(keep_newest_histogram=cadence.keeps_newest_histogram)
        self._arrived: list[ArrivedSample] = []  # of the window that is not flushed yet
        self._reducer: Reducer | None = None
        self._number = next(_NUMBERS)
        self._latest: Snapshot | None = None
        self._unreturned: Snapshot | None = None
        self._said: set[str] = set()
        self._removed = False
        self._reduces = True  # False at exit and in an exception: other ranks may not be there any more
        self._delivering = False
        self._flushed_at = time.perf_counter()
        self._containment = Containment(self._failed)
        self._sampler = Sampler(
            roster,
            self._window,
            cadence,
            options,
            SamplerEvents(self._deliver, self._notice, self._no_gradient),
            self._containment,
            **sampler_arguments,
        )
        # The model must not be kept alive by us, nor our hooks outlive it.
        self._models = [weakref.ref(model, self._model_gone) for model in roster.models()]
        for sink in self._sinks:
            before_run_ends = getattr(sink, "before_run_ends", None)
            if before_run_ends is not None:
                before_run_ends(self._run_ends)
        atexit.register(self._script_ends)

    def __enter__(self) -> Watcher:
        return self

    def __exit__(self, exception_type: object, *_: object) -> None:
        self._remove(reduce=exception_type is None)

    def __repr__(self) -> str:
        state = "removed" if self._removed else f"step {self.step}"
        return f"Watcher({len(self._roster.names)} parameters, {state})"

    # ---- what the user asks

    @property
    def step(self) -> StepNumber:
        """The number of the last finished step; called, `watcher.step()`, it says that an update was just made.

        Only loops without any optimizer need to call it.
        """
        return StepNumber(self._sampler.clock.step, self._mark_step)

    @property
    def parameter_names(self) -> tuple[str, ...]:
        """Names of everything watched so far, wrappers' prefixes stripped."""
        return tuple(self._roster.names)

    @property
    def latest(self) -> Snapshot | None:
        """The newest flushed snapshot; before the first flush, what has been sampled so far; None for nothing."""
        self._collect()
        return self._latest if self._latest is not None else self._snapshot_of(self._arrived, None)

    @property
    def healthy(self) -> bool:
        """False if a rule found an error in the newest evaluated sample."""
        self._collect()
        return bool(self._desk.healthy)

    def flush(self) -> Snapshot | None:
        """End the window now: send it to the sinks and wait until it has arrived.

        Returns:
            The newest window that no earlier call has returned; None if nothing was sampled since.
        """
        if not self._removed:
            self._sampler.end_sample()
            self._deliver(wait=True)
            if self._arrived:
                self._sampler.flush_window()
                self._deliver(wait=True)
        snapshot, self._unreturned = self._unreturned, None
        return snapshot

    def _mark_step(self) -> None:
        self._sampler.step()
        self._deliver()

    def remove(self) -> None:
        """Flush, remove every hook and close the sinks. Idempotent.

        With a sharded model the last window is merged over the ranks: call it on all of them.
        """
        self._remove(reduce=True)

    def _remove(self, *, reduce: bool) -> None:
        if self._removed:
            return
        self._reduces &= reduce
        self._unreturned = self.flush()
        self._stop()
        for sink in list(self._sinks):
            self._guarded(sink, sink.close)

    # ---- ends

    def _stop(self) -> None:
        self._removed = True
        if self._reducer is not None:
            self._reducer.close()
        self._sampler.stop()
        atexit.unregister(self._script_ends)
        if self in _WATCHERS:
            _WATCHERS.remove(self)

    def _script_ends(self) -> None:
        """A plain end, sys.exit(), an exception, Ctrl-C: nothing is lost but what needs other ranks."""
        self._remove(reduce=False)

    def _run_ends(self) -> None:
        """The run is being finished while the model is still watched: it gets what it is owed."""
        self.flush()

    def _model_gone(self, _: object) -> None:
        if not self._removed and not self._roster.alive:
            self._remove(reduce=False)

    def _failed(self, error: Exception) -> None:
        """An exception inside the monitor: say it once, stop, keep what there is. Training goes on."""
        if self._removed:
            return
        self._stop()
        logger.error(
            "wandb_gradwatch has failed and stopped watching; training goes on. Please report this traceback.",
            exc_info=error,
        )
        if self._arrived:
            self._take_flush(ArrivedFlush(None, ()))
        for sink in list(self._sinks):
            self._guarded(sink, sink.close)

    # ---- from the window to rules and sinks

    def _collect(self) -> None:
        if not self._removed:
            self._deliver()

    def _deliver(self, *, wait: bool = False) -> None:
        if self._delivering:  # a callback of the user's that asks for `latest` or flushes
            return
        self._delivering = True
        try:
            for arrived in self._window.poll(wait=wait):
                if isinstance(arrived, ArrivedSample):
                    self._take_sample(arrived)
                else:
                    self._take_flush(arrived)
            if self._reducer is not None:
                for merged in self._reducer.poll(wait=wait):
                    for sample in merged.samples:
                        self._judge(sample)
                    self._write(merged.samples, merged.flush)
        finally:
            self._delivering = False

    def _take_sample(self, arrived: ArrivedSample) -> None:
        self._drop_zeroed(arrived)
        compared = arrived.rows[list(arrived.sample.compared)]
        before, received = compared[:, Column.GRAD_SUM_SQ], compared[:, Column.RECEIVED_SUM_SQ]
        if np.any(np.sqrt(received) < np.sqrt(before) * (1 - _CLIP_TOLERANCE)):
            self._sampler.distrust_versions()
        self._arrived.append(arrived)
        if not self._is_sharded:  # a shard's rows say nothing before they are merged
            self._judge(arrived)

    @property
    def _is_sharded(self) -> bool:
        return self._sampler.shards.any

    def _judge(self, arrived: ArrivedSample) -> None:
        snapshot = self._snapshot_of([arrived], None)
        assert snapshot is not None
        for alert in self._desk.process(snapshot):
            self._send(alert)

    def _drop_zeroed(self, arrived: ArrivedSample) -> None:
        """An optimizer whose every gradient was zeroed before its step received nothing: missing, not 0."""
        for slots in map(list, arrived.sample.updated):
            rows = arrived.rows[slots]
            received, measured = rows[:, Column.RECEIVED_SUM_SQ], rows[:, Column.GRAD_SUM_SQ]
            present = ~np.isnan(rows[:, Column.NUM_ELEMENTS])
            if not present.any() or arrived.skipped or np.any(received[present] != 0):
                continue
            nonfinite = rows[present][:, [Column.NUM_NAN, Column.NUM_INF]].sum()
            if nonfinite == 0 and np.any(measured[present] != 0):
                arrived.rows[slots] = np.nan
                self._no_gradient(
                    f"in step {arrived.sample.step} every gradient was already zero when the optimizer stepped, though "
                    "the backward had computed them. Call zero_grad() after step(), or before backward().",
                    arrived.sample.step,
                )

    def _take_flush(self, flush: ArrivedFlush) -> None:
        samples, self._arrived = tuple(self._arrived), []
        if not samples:
            return
        if self._is_sharded:
            if self._reduces:
                self._reduce(samples, flush)
        else:
            self._write(samples, flush)

    def _reduce(self, samples: tuple[ArrivedSample, ...], flush: ArrivedFlush) -> None:
        """Merge the window with those of the other ranks, in the background."""
        if self._reducer is None:
            self._reducer = Reducer(f"{self._number}")
        names = tuple(self._roster.names)
        padded = tuple(replace(sample, rows=_padded(sample.rows, len(names))) for sample in samples)
        if flush.histogram is not None:
            flush = replace(flush, histogram=_padded(flush.histogram, len(names), fill=0))
        self._reducer.submit(LocalWindow(padded, flush, names, self._sampler.shards.counted(len(names))))

    def _write(self, samples: Sequence[ArrivedSample], flush: ArrivedFlush) -> None:
        snapshot = self._snapshot_of(samples, flush)
        if snapshot is None:
            return
        self._latest = self._unreturned = snapshot
        for sink in list(self._sinks):
            self._guarded(sink, sink.write, snapshot)

    def _snapshot_of(self, samples: Sequence[ArrivedSample], flush: ArrivedFlush | None) -> Snapshot | None:
        if not samples:
            return None
        num_names = len(self._roster.names)
        rows = np.stack([_padded(arrived.rows, num_names) for arrived in samples])
        histogram = None
        if flush is not None and flush.histogram is not None:
            histogram = _padded(flush.histogram, num_names, fill=0)
        return Snapshot(
            steps=np.array([arrived.sample.step for arrived in samples], dtype=np.int64),
            names=tuple(self._roster.names),
            rows=rows,
            histogram=histogram,
            histogram_steps=flush.histogram_steps if flush is not None else (),
            loss_scale=np.array([arrived.loss_scale for arrived in samples]),
            skipped=np.array([arrived.skipped for arrived in samples]),
            trainable=np.array(self._roster.trainable),
            metrics=_stacked([arrived.metrics for arrived in samples]),
            overhead_ratio=self._overhead_ratio() if flush is not None else math.nan,
        )

    def _overhead_ratio(self) -> float:
        now = time.perf_counter()
        ratio = self._containment.seconds_spent / max(now - self._flushed_at, 1e-9)
        self._flushed_at, self._containment.seconds_spent = now, 0.0
        return min(ratio, 1.0)

    # ---- what is said

    def _send(self, alert: Alert) -> None:
        for sink in list(self._sinks):
            self._guarded(sink, sink.alert, alert)
        for callback in self._on_alert:
            try:
                callback(alert)
            except Exception as error:
                raise UserCallbackError(error) from error

    def _no_gradient(self, text: str, step: int) -> None:
        if "No gradient" not in self._said:
            self._said.add("No gradient")
            self._send(Alert("No gradient", f"No gradient: {text}", step, "WARN"))

    def _notice(self, kind: str, text: str) -> None:
        if kind not in self._said:
            self._said.add(kind)
            logger.warning("wandb_gradwatch: %s", text)

    def _guarded(self, sink: Sink, method: Callable[..., None], *arguments: object) -> None:
        try:
            method(*arguments)
        except Exception as error:
            if sink in self._sinks:
                self._sinks.remove(sink)
                logger.error(
                    "wandb_gradwatch: %s failed and is dropped; training and the other sinks go on.",
                    type(sink).__name__,
                    exc_info=error,
                )


def _padded(values: NDArray[Number], num_names: int, *, fill: float = math.nan) -> NDArray[Number]:
    """Room for names that appeared after these values were measured: [..., P, any]."""
    missing = num_names - len(values)
    return np.pad(values, ((0, missing), (0, 0)), constant_values=fill) if missing else values


def _stacked(metrics: Sequence[Mapping[str, float]]) -> dict[str, FloatArray]:
    """Values by key over samples, NaN where a sample has none: each [S]."""
    keys = dict.fromkeys(key for values in metrics for key in values)
    return {key: np.array([values.get(key, math.nan) for values in metrics]) for key in keys}


# Ranks that call watch() equally often agree on the number, and with it on whose windows belong together.
_NUMBERS: Final = itertools.count()

_WATCHERS: Final[list[Watcher]] = []


def watch(
    model: Models,
    optimizer: Optimizer | None = None,
    *,
    run: Any = None,
    include: NameFilter | None = None,
    exclude: NameFilter | None = None,
    sample_every: int = 1,
    log_every: int = 50,
    histogram_every: int | None = None,
    group_by: GroupBy = "parameter",
    statistics: Sequence[str] = DEFAULT,
    dead_threshold: float = 0.0,
    rules: Sequence[Rule] | None = None,
    sinks: Sequence[Sink] | None = None,
    on_alert: Callable[[Alert], object] | Sequence[Callable[[Alert], object]] | None = None,
    scaler: GradScaler | None = None,
    backend: str = "auto",
    start_step: int = 0,
    probes: Sequence[Probe] = (),
) -> Watcher:
    """Watch the gradients of a model: rows, histograms and alerts in the W&B run. Train as before.

    Needs no other call: optimizer steps, gradient accumulation, clipping and loss scaling are noticed by themselves.
    Training is not changed, and an error inside the monitor never reaches it; wrong arguments raise at once.

    Args:
        model: a module, or a list or dict of modules.
        optimizer: only needed for an optimizer that updates copies of the parameters (master weights).
        run: the W&B run; None takes `wandb.run`.
        include: watch only parameters whose name matches: a regular expression (searched), several, or a function.
        exclude: do not watch those whose name matches.
        sample_every: measure every n-th optimizer step.
        log_every: write a row every n-th optimizer step.
        histogram_every: take histograms every n-th step; None: for every row; 0: never.
        group_by: one series per "parameter" or "module", or a function from a parameter's name to its group's.
            More than 256 parameters are grouped by module, which is said once.
        statistics: what is measured beside the gradient itself: "parameter" (its norm, for the ratio), "histogram".
        dead_threshold: |g| <= this counts as dead, in units of the true gradient.
        rules: what raises alerts; None: the default rules; []: none.
        sinks: where snapshots and alerts go instead of the W&B run; a `run` given beside them is written too.
        on_alert: called with every alert that is sent; what it raises reaches the training loop.
        scaler: the gradient scaler, if it has to be known before it is first used.
        backend: "auto", or one of the backends by name.
        start_step: the number of the last step already made, for a run that goes on.
        probes: further measurements at sampled steps; see `wandb_gradwatch.modules`.

    Returns:
        The watcher: `remove()`, `flush()`, `latest`, `step`, `healthy`.

    Raises:
        TypeError: model is not a module or a collection of modules.
        ValueError: nothing trainable to watch; a cadence, name filter, statistic, backend or threshold that makes no
            sense.
        RuntimeError: there is no run and there are no sinks; the backend cannot run on the model's device.

    Cost: off-cadence 0.4 us per parameter and backward. A sampled step reads every gradient about as often as four
    norms do, in one batched pass, and never waits for the device.
    """
    cadence = Cadence(sample_every, log_every, histogram_every)
    roster = Roster(model, include=include, exclude=exclude)
    group_function(group_by)
    options = _measure_options(roster, statistics, dead_threshold, backend)
    if "histogram" not in statistics:
        cadence = Cadence(sample_every, log_every, 0)
    if not isinstance(start_step, int) or start_step < 0:
        raise ValueError(f"start_step={start_step!r} must be the number of a step, at least 0")
    callbacks = [on_alert] if callable(on_alert) else list(on_alert or ())
    desk = AlertDesk(default_rules() if rules is None else list(rules))
    chosen = _sinks(run, sinks, group_by)
    _replace_watchers_of(roster)
    watcher = Watcher(
        roster,
        {"optimizer": optimizer, "scaler": scaler, "start_step": start_step, "probes": probes},
        cadence=cadence,
        options=options,
        sinks=chosen,
        desk=desk,
        on_alert=callbacks,
    )
    _WATCHERS.append(watcher)
    return watcher


def unwatch(model: nn.Module | None = None) -> None:
    """Remove the watcher of a model, or every watcher. Nothing is left behind on the model."""
    for watcher in list(_WATCHERS):
        if model is None or any(watched is model for watched in watcher._roster.models()):
            watcher.remove()


def _measure_options(roster: Roster, statistics: Sequence[str], dead_threshold: float, backend: str) -> MeasureOptions:
    unknown = [name for name in ([statistics] if isinstance(statistics, str) else statistics) if name not in STATISTICS]
    if unknown or isinstance(statistics, str):
        raise ValueError(f"statistics={statistics!r} must be a sequence of names out of {STATISTICS}")
    if not isinstance(dead_threshold, int | float) or not 0 <= dead_threshold < math.inf:
        raise ValueError(f"dead_threshold={dead_threshold!r} must be a number, at least 0")
    for slot, parameter in roster.scan():
        resolve_backend(backend, parameter.device, roster.names[slot])
    return MeasureOptions("parameter" in statistics, float(dead_threshold), backend)


def _sinks(run: Any, sinks: Sequence[Sink] | None, group_by: GroupBy) -> list[Sink]:
    chosen: list[Sink] = list(sinks or ())
    if rank() != 0:
        return []  # other ranks measure and take part in the reduction; they log nothing
    if run is None and sinks is None:
        run = getattr(sys.modules.get("wandb"), "run", None)
        if run is None:
            raise RuntimeError(
                "watch() found no W&B run: call wandb.init() first, pass run=, or pass sinks= to go without W&B"
            )
    if run is not None:
        from .sinks.wandb_run import WandbSink

        chosen.append(WandbSink(run, group_by=None if group_by == "parameter" else group_by))
    return chosen


def _replace_watchers_of(roster: Roster) -> None:
    models: Iterable[nn.Module] = roster.models()
    for watcher in list(_WATCHERS):
        if any(watched is model for watched in watcher._roster.models() for model in models):
            logger.warning("wandb_gradwatch: the model was already watched; the new watch() replaces the earlier one.")
            watcher.remove()
