"""Watcher: owns the pipeline of a watched model, from its gradients to the sinks, from watch() to remove()."""

from __future__ import annotations

import atexit
import logging
import math
import sys
import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from ._boundary import RaisedToTheUser, entry_point
from ._capture.loss import checked_loss
from ._capture.parameter_registry import ParameterRegistry
from ._capture.sampler import Sampler
from ._config import Config
from ._engines.find import engine_since_watch
from ._judgement.structure import ModelInfo
from ._judgement.verdict import Verdict, verdict_of
from ._nonfinite.replay import StepReplay
from ._pipeline.alert_manager import FIRST_BAD_OPERATION, REPLAYED, AlertManager
from ._pipeline.dispatcher import Dispatcher
from ._pipeline.pipeline import GUARD_SECONDS, Pipeline
from ._pipeline.rank_parts import description
from ._pipeline.rule_runner import RuleRunner
from ._pipeline.saved_state import load_state, save_state
from ._runtime.error_boundary import ErrorBoundary, alone, graph_is_made
from ._runtime.notices import CannotWatchError, Notice
from ._runtime.rank_session import RankSession
from ._runtime.sharding import rank, world_size
from ._runtime.wrappers import unwrapped
from ._summary import Summary, summarise
from ._transfer.sample_buffer import SampleBuffer
from .snapshot import Snapshot

logger: Final = logging.getLogger("wandb_gradwatch")


class Watcher:
    """Monitors a model until it is removed; returned by `watch()`. As a context manager it removes itself at the end.

    It owns the stages of the pipeline, from the sampler to the dispatcher, and records whether they have been removed.
    All other state belongs to the stages.
    """

    def __init__(self, registry: ParameterRegistry, config: Config, models: Sequence[torch.nn.Module]) -> None:
        self._registry = registry
        self._alert_manager = AlertManager(config.rules, _info_of(registry))
        self._removed = self._is_stopped = False  # stopped: the removal is complete
        self._is_new = True  # nothing has been delivered yet
        self._has_failed = False  # whether a failure of the monitor was reported
        self._boundary = ErrorBoundary(self._failed)
        window = SampleBuffer(keep_newest_histogram=config.capture.cadence.histogram_every is None)
        self._dispatcher = Dispatcher(config.sinks, config.on_alert, to_terminal=rank() == 0)
        self._sampler = Sampler(registry, window, config.capture, self._boundary, self._collect_some)
        self._parts = parts = self._sampler.parts
        self._rule_runner = RuleRunner(
            self._alert_manager,
            self._dispatcher,
            count_steps=lambda: (parts.schedule.num_measured, parts.schedule.num_steps),
        )
        self._found: list[Notice] = []  # alerts of replays, sent at the next delivery
        self._session = RankSession(description(registry)) if world_size() > 1 else None
        guarded = config.capture.guard is not None and config.capture.guard.replay
        if guarded or config.on_nonfinite == "trace":
            parts.replay = StepReplay(
                models,
                self._operation_found,
                parts.notices.say,
                always=guarded,
                boundary=self._boundary,
                store=partial(self._session.store, "replay") if self._session is not None else lambda: None,
            )
            if parts.guard is not None and guarded:
                parts.guard.replay = parts.replay
        self._pipeline = Pipeline(
            parts, self._rule_runner, self._dispatcher, lambda: self._sampler.seconds_spent, self._session
        )
        if parts.guard is not None:
            parts.guard.compare_ranks = partial(self._pipeline.compare_ranks, seconds=GUARD_SECONDS, gives_up=True)
        self._models: list[weakref.ref[torch.nn.Module]] = []
        try:
            self._sampler.start(self._session)
            # The watcher must not keep the model alive, and its hooks must not outlive the model.
            self._models = [weakref.ref(model, self._model_gone) for model in registry.models()]
            self._dispatcher.before_runs_end(self._run_ends)
            atexit.register(self._script_ends)
            WATCHERS.append(self)
        except BaseException:  # Ctrl-C, most likely: nobody will have a watcher to remove
            self._stop()
            raise

    def __enter__(self) -> Watcher:
        return self

    @alone()
    def __exit__(self, exception_type: object, *_: object) -> None:
        self._remove(merge=exception_type is None)

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        """A copy or a pickle of a model that has its watcher as an attribute contains None instead."""
        return type(None), ()

    @entry_point(lambda: "Watcher")
    def __repr__(self) -> str:
        state = "removed" if self._removed else f"step {self.step}"
        return f"Watcher({len(self._registry.names)} parameters, {state})"

    @property
    @entry_point(lambda: 0)
    def step(self) -> int:
        """The number of the last finished step."""
        return self._parts.clock.last_step

    @alone()
    def mark_step(self) -> None:
        """Count an update. Only training loops without an optimizer need to call this, after each update."""
        self._sampler.mark_step()
        self._deliver()

    @alone()
    def loss(self, value: float | Tensor, *, is_share: bool = False) -> None:
        """Log the loss of the current update as `gradwatch/loss`; a loss that is not finite raises an alert.

        Call it before the optimizer's step. Without this call the loss is the tensor that `backward()` was called on,
        if it has one element, divided by the loss scale and summed over the backwards of a step. The value is not read
        here: it stays on its device and arrives with the sample. Several values of one step are averaged. Between
        samples the call costs next to nothing.

        Args:
            value: a tensor of one element, or a number.
            is_share: True if the value is already divided by the number of micro-batches; such values are summed.

        Raises:
            TypeError: value is neither a tensor nor a number.
            ValueError: value has not exactly one real element.
        """
        one = checked_loss(value)
        if not self._removed:
            self._sampler.take_loss(one, is_share=is_share)

    @property
    @entry_point(tuple)
    def parameter_names(self) -> tuple[str, ...]:
        """The names of all watched parameters, including frozen ones, without the prefixes of wrappers."""
        return tuple(self._registry.names)

    @property
    @alone()
    def latest(self) -> Snapshot | None:
        """The newest flushed snapshot; before the first flush, the samples so far; None if there are none."""
        self._collect()
        return self._pipeline.newest

    @property
    @entry_point(dict)
    def metric_seconds(self) -> dict[str, float]:
        """The host time in seconds of each of `metrics=` so far, by its repr; all `Metric`s share one entry.

        On a GPU this is the time to launch the work; `gradwatch/overhead_ratio` includes the device's time too.
        """
        return self._parts.probes.seconds_of_each

    @entry_point(lambda: False)
    def watches(self, model: object) -> bool:
        """Return whether this is one of the watched models, with or without a wrapper."""
        inner = unwrapped(model) if isinstance(model, torch.nn.Module) else model
        given = map(unwrapped, self._registry.roots())  # of a model under an engine a shadow is watched
        return any(watched is inner for watched in (*self._registry.models(), *given))

    def namespaces_in(self, run: object) -> set[str]:
        """Return the key prefix of the model's totals in this W&B run, for each sink that writes to the run."""
        return self._dispatcher.namespaces_in(run)

    @alone(lambda: verdict_of((), num_steps=0, num_measured=0))
    def verdict(self) -> Verdict:
        """Return what the measured steps so far say of the training: a sentence, a status, and all incidents."""
        self._collect()
        return self._rule_runner.verdict

    @alone(Summary.empty)
    def summary(self) -> Summary:
        """Return the worst layers, the total norm and the incidents so far, for print() or a notebook."""
        self._collect()
        recorder, newest = self._dispatcher.recorder, self._pipeline.newest
        overhead_ratio = math.nan if newest is None else newest.overhead_ratio
        verdict = self._rule_runner.verdict
        return summarise(recorder.history(), verdict=verdict, overhead_ratio=overhead_ratio)

    @entry_point()
    def note(self, /, **context: object) -> None:
        """Attach values to the open step in the flight recorder, such as `watcher.note(batch=17)`."""
        self._dispatcher.recorder.note(self._parts.clock.open_step, **context)

    @alone(list)
    def record(self, path: str | Path | None = None) -> list[Path]:
        """Write the flight recorder to a path. Without a path: beside the run, which also gets its table.

        Returns:
            The written files; `wandb_gradwatch.load_recording` reads them.
        """
        self._collect()
        self._rule_runner.tell_verdict()
        return self._dispatcher.record(path, table=path is None)

    @alone()
    def wait(self) -> None:
        """Wait until every sample so far has arrived and the rules have checked it.

        The window stays open: no row is written. For a sharded model only this rank's shards arrive.
        """
        if not self._removed:
            self._sampler.end_sample()
            self._deliver(wait=True)

    @alone()
    def flush(self) -> Snapshot | None:
        """End the window now: wait until its samples have arrived, and write them to the sinks.

        For a sharded model, call this on all ranks: the call waits half a second for ranks that do not, and the row is
        written when they end their window.

        Returns:
            The newest flushed window that no earlier call has returned; None if there is none.
        """
        self._flush_window(final=False)
        return self._pipeline.pop_unreturned()

    @alone()
    def _run_ends(self) -> None:
        if not self._removed:
            self._boundary.run(self._sampler.run_ends)
        self._flush_window(final=False)
        self._rule_runner.tell_verdict()

    def _flush_window(self, *, final: bool) -> None:
        if not self._removed:
            self._sampler.end_sample(final=final)
            if final:
                self._boundary.run(self._sampler.run_ends)
            self._boundary.run(self._sampler.look_at_parameters)
            try:
                self._deliver(wait=True)
            finally:  # on_alert may have raised
                if self._pipeline.window:
                    self._sampler.flush_window()
                self._deliver(wait=True, flushed=True, final=final)

    @alone()
    def remove(self) -> None:
        """Flush, remove every hook and close the sinks. Further calls do nothing.

        The last window of a sharded model is merged over the ranks: call this on all of them. The call waits at most
        1.5 s for ranks that do not, and without them the window is not written.
        """
        self._remove(merge=True)

    @alone(dict)
    def state_dict(self) -> dict[str, Any]:
        """Return the state that a resumed training needs, as numbers, lists and tensors.

        It holds the step, facts learned about the loop, the state of rules and guard, and the window not yet flushed.
        """
        self.wait()
        return save_state(self._parts, self._pipeline, self._alert_manager, self._dispatcher)

    @alone()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict()`. Parameters are matched by name; parameters that no longer exist are dropped.

        Raises:
            ValueError: state is not from `state_dict()`, for instance a whole checkpoint. Nothing is changed.
        """
        self._sampler.rest.end()
        self._collect()
        with RaisedToTheUser(ValueError):
            load_state(state, self._parts, self._pipeline, self._alert_manager, self._dispatcher)

    def _own_turn(self) -> AbstractContextManager[object]:
        """The lock for `alone` methods. No lock where ranks merge: a rank could wait for ranks that wait for it."""
        if self._boundary.in_forked_child or self._parts.merges_ranks:  # in a forked child nothing releases the lock
            return nullcontext()
        return self._boundary.lock

    def _remove(self, *, merge: bool) -> None:
        if self._removed or self._boundary.in_forked_child:
            may_vote = self in WATCHERS  # a guard whose monitor has failed; a forked child does not own the run
            if may_vote or not self._is_stopped:  # Ctrl-C may have ended the first removal
                self._stop()
            if may_vote:
                self._guard_leaves()
            return
        self._pipeline.merges = merge
        try:
            self._flush_window(final=True)
        except Exception as error:
            self._boundary.caught(error)  # what is meant for the training, as of on_alert, is raised below
        finally:
            if not self._removed:
                with ExitStack() as stack:
                    stack.callback(self._close)
                    stack.callback(self._guard_leaves)
                    stack.callback(self._stop)

    def _close(self) -> None:
        self._dispatcher.close(self._rule_runner.verdict)

    def _guard_leaves(self) -> None:
        """Let a guard of a sharded model vote until those of all ranks are removed: the others wait for its vote."""
        if self._parts.guard is not None and self._parts.shards.any and not self._boundary.in_forked_child:
            self._parts.guard.keep_voting(self._registry.slot_of_id, self._registry.models(), is_removed=True)

    def _stop(self) -> None:
        self._removed = True
        self._models = []  # otherwise _model_gone would run while the interpreter exits, when torch no longer exists
        if self in WATCHERS:
            WATCHERS.remove(self)
        with ExitStack() as stack:  # which calls each of these, newest first, even if another one raises
            stack.callback(atexit.unregister, self._script_ends)
            if not self._boundary.in_forked_child:  # the connections belong to the parent
                if self._session is not None:
                    stack.callback(self._session.end, at_once=not self._has_failed)
                stack.callback(self._pipeline.close)
            if self._parts.replay is not None:
                stack.callback(self._parts.replay.close)
            stack.callback(self._registry.let_go)
            stack.callback(self._sampler.stop)
        self._is_stopped = True

    @entry_point()
    def _script_ends(self) -> None:
        """Remove the watcher at exit: after a plain end, sys.exit(), an exception or Ctrl-C."""
        crashed = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
        if crashed is not None and not self._removed and not self._boundary.in_forked_child:
            self.record()
        self._remove(merge=crashed is None)

    @entry_point()
    def _model_gone(self, _: object) -> None:
        # Do nothing while a graph is captured or traced, because the flush would become part of the graph, nor while
        # another thread holds the lock, because a finalizer must not wait. The exit handler then removes the watcher.
        if not self._registry.models() and not graph_is_made() and self._boundary.lock.acquire(blocking=False):
            try:
                self._remove(merge=False)
            finally:
                self._boundary.lock.release()
        if not self._registry.models():  # even if nothing could be done
            self._registry.let_go()

    def _failed(self, error: Exception) -> None:
        """After an exception inside the monitor: log it once and stop, but keep what was measured. Training goes on."""
        if self._removed:
            if not self._has_failed:
                self._has_failed = True
                logger.error("wandb_gradwatch failed while it stopped watching; training goes on.", exc_info=error)
            return
        self._has_failed = True
        with ExitStack() as stack:  # which calls each of these, newest first, even if another one raises
            stack.callback(self._close)
            stack.callback(self._deliver_the_last, error)
            stack.callback(self._report, error)
            stack.callback(self._stop)

    def _report(self, error: Exception) -> None:
        if self._parts.guard is not None and self._parts.guard.keep_voting(
            self._registry.slot_of_id, self._registry.models()
        ):
            WATCHERS.append(self)  # so that unwatch() and another watch() can end the voting
        unguarded = "" if self._parts.guard is None else ", unguarded"
        if isinstance(error, CannotWatchError):
            logger.error("wandb_gradwatch has stopped watching; training goes on%s: %s.", unguarded, error)
        else:
            logger.error(
                "wandb_gradwatch has failed and stopped watching; training goes on%s. Please report this traceback.",
                unguarded,
                exc_info=error,
            )

    def _deliver_the_last(self, error: Exception) -> None:
        try:
            self._say()  # messages from before the failure; on_alert may raise
            if isinstance(error, CannotWatchError):  # the monitor itself works
                self._pipeline.deliver(wait=True)
        finally:
            try:
                self._pipeline.rescue()
            except Exception:  # the failure that ended the monitor may repeat here
                logger.exception("wandb_gradwatch could not write the last samples.")

    def _collect_some(self) -> None:
        """Deliver what has arrived, unless nothing is notable: then it may wait for the next samples."""
        if self._parts.notices or self._found or self._pipeline.receive():
            self._collect()

    def _collect(self) -> None:
        """Deliver what has arrived."""
        if not self._removed:
            self._deliver()

    def _say(self) -> None:
        while self._parts.notices:
            notice = self._parts.notices.popleft()
            if notice.step is None:
                self._dispatcher.notice(notice.kind, notice.text)
            else:
                self._rule_runner.alert_once(notice)

    def _operation_found(self, step: int, found: str, is_late: bool) -> None:
        self._dispatcher.recorder.note(step, **{FIRST_BAD_OPERATION: found})
        if is_late:  # otherwise the alert of that step, which is still to come, names it as the cause
            fact = f"step {step} was run once more, after an alert: {found}"
            self._found.append(Notice("First bad operation", fact, step, "ERROR", "invalid_operation"))

    def _deliver(self, *, wait: bool = False, flushed: bool = False, final: bool = False) -> None:
        self._say()
        is_new, self._is_new = self._is_new, False
        why = engine_since_watch(self._registry.models()) if is_new else None
        if why is not None:  # the engine was set up since watch(), and no backward was seen
            self._stop()
            self._close()
            logger.error("wandb_gradwatch has stopped watching; training goes on: %s.", why)
            return
        while self._found:
            self._rule_runner.alert_once(self._found.pop(0))
        if self._pipeline.has_work and not self._boundary.in_forked_child:
            schedule, on_rows = self._parts.schedule, self._dispatcher.pop_seconds()
            self._boundary.seconds_spent += on_rows
            schedule.seconds_on_rows += on_rows
            try:
                self._pipeline.deliver(wait=wait, flushed=flushed, final=final)
            finally:  # on_alert may have raised
                news = self._dispatcher.pop_news()
                if not self._boundary.is_hidden():
                    schedule.seconds_on_rows += news.seconds_on_rows
                    schedule.seconds_on_others += news.seconds_on_alerts
                if self._parts.replay is not None and news.kinds & REPLAYED:
                    if not self._parts.thread.is_another:
                        self._sampler.rest.end()  # the next step is run again
                    self._parts.replay.is_armed = True
                if news.is_untraced:
                    schedule.comparisons.distrust_versions()
                if news.is_unusual or news.kinds:
                    schedule.look_closely()


def _info_of(registry: ParameterRegistry) -> ModelInfo:
    """What the judgement needs to know of the model: class names of the modules, and the parameters' shapes."""
    classes = {name: type(module).__name__ for model in registry.models() for name, module in model.named_modules()}
    shapes = {registry.names[slot]: tuple(one.shape) for slot, one in registry.scan() if not is_lazy(one)}
    return ModelInfo(classes, shapes, rank(), world_size())


WATCHERS: Final[list[Watcher]] = []
