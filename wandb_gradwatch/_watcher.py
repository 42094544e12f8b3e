"""A watched model: owns the corridor from its gradients to the sinks, from watch() to remove()."""

from __future__ import annotations

import atexit
import itertools
import logging
import math
import sys
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import torch
from torch import Tensor

from ._analysis.formatting import CAUSE_PREFIX, FOUND_PREFIX
from ._capture.loss import checked_loss
from ._capture.parameter_registry import ParameterRegistry
from ._capture.parts import CaptureConfig
from ._capture.sampler import Sampler
from ._diagnosis import FIRST_BAD_OPERATION, Diagnosis
from ._nonfinite.replay import StepReplay
from ._pipeline.alert_manager import AlertManager
from ._pipeline.dispatcher import Dispatcher
from ._pipeline.pipeline import Pipeline
from ._pipeline.rule_runner import RuleRunner
from ._pipeline.saved_state import load_state, save_state
from ._runtime.error_boundary import ErrorBoundary, alone, graph_is_made
from ._runtime.notices import CannotWatchError
from ._runtime.sharding import DEEPSPEED_REFUSED, has_deepspeed, rank_store, world_size
from ._runtime.wrappers import unwrapped
from ._summary import Summary, summarise
from ._transfer.sample_buffer import SampleBuffer
from .rules import Alert, LossScaleCollapse, Rule
from .rules._nonfinite import NONFINITE_TITLES
from .sinks import Sink
from .snapshot import Snapshot

logger: Final = logging.getLogger("wandb_gradwatch")

# Ranks that call watch() equally often agree on the number, and with it on whose windows belong together.
_NUMBERS: Final = itertools.count()
_REPLAYED: Final = {*NONFINITE_TITLES, LossScaleCollapse.title}  # after these alerts a step is run once more


@dataclass(frozen=True)
class Config:
    """What watch() was asked for, checked and resolved."""

    capture: CaptureConfig  # which steps are measured, and what is measured in them
    sinks: tuple[Sink, ...]  # where snapshots and alerts go
    rules: tuple[Rule, ...]  # what raises alerts
    on_alert: tuple[Callable[[Alert], object], ...]  # the user's functions, called with every alert that is sent
    to_terminal: bool  # say errors on standard error, and at the end how many alerts there were
    # "trace": run a step once more after a NaN or Inf, to name the operation that makes them
    on_nonfinite: Literal["trace"] | None = None


class Watcher:
    """What `watch()` returns. A context manager: leaving the block removes it.

    Owns the parts of the corridor, from the sampler to the dispatcher, and whether they have been removed. What is
    measured, judged, written or said is remembered by the part that does it.
    """

    def __init__(self, registry: ParameterRegistry, config: Config, models: Sequence[torch.nn.Module]) -> None:
        name = str(next(_NUMBERS))
        self._registry = registry
        self._alert_manager = AlertManager(config.rules)
        self._removed, self._is_new = False, True  # new: nothing has been delivered
        self._boundary = ErrorBoundary(self._failed)
        window = SampleBuffer(keep_newest_histogram=config.capture.cadence.histogram_every is None)
        self._dispatcher = Dispatcher(config.sinks, config.on_alert, to_terminal=config.to_terminal)
        kinds = {name: type(module).__name__ for model in registry.models() for name, module in model.named_modules()}
        self._rule_runner = RuleRunner(self._alert_manager, self._dispatcher, modules=kinds)
        self._sampler = Sampler(registry, window, config.capture, self._boundary, self._collect)
        self._parts = parts = self._sampler.parts
        self._found: list[Alert] = []  # of replays, to be sent at the next occasion
        guarded = config.capture.guard is not None and config.capture.guard.replay
        if guarded or config.on_nonfinite == "trace":
            parts.replay = StepReplay(
                models,
                self._operation_found,
                parts.notices.say,
                always=guarded,
                open_step=lambda: self.step + 1,
                boundary=self._boundary,
                store=rank_store(f"{name}/replay") if world_size() > 1 else None,
            )
            if parts.guard is not None and guarded:
                parts.guard.replay = parts.replay
        self._pipeline = Pipeline(parts, self._rule_runner, self._dispatcher, lambda: self._sampler.seconds_spent, name)
        self._sampler.start(name)
        # The model must not be kept alive by us, nor our hooks outlive it.
        self._models = [weakref.ref(model, self._model_gone) for model in registry.models()]
        self._dispatcher.before_runs_end(self.flush)
        atexit.register(self._script_ends)
        WATCHERS.append(self)

    def __enter__(self) -> Watcher:
        return self

    @alone
    def __exit__(self, exception_type: object, *_: object) -> None:
        self._remove(merge=exception_type is None)

    def __repr__(self) -> str:
        state = "removed" if self._removed else f"step {self.step}"
        return f"Watcher({len(self._registry.names)} parameters, {state})"

    # ---- what the user asks

    @property
    def step(self) -> int:
        """The number of the last finished step."""
        return self._parts.clock.step

    @alone
    def mark_step(self) -> None:
        """Say that an update has just been made. Only loops without any optimizer need to."""
        self._sampler.mark_step()
        self._deliver()

    @alone
    def loss(self, value: float | Tensor, *, is_share: bool = False) -> None:
        """Log the loss of the update that is being made, as `gradwatch/loss`; one that is not finite raises an alert.

        Without this call the loss is what `backward()` was called on, loss scale divided out, where that is one number;
        of several backwards in a step their sum, as of their gradients. Call it before the optimizer's step. The value
        is not read here: it stays on its device, and arrives with the sample. Several values of one step are averaged.
        Between samples it costs next to nothing.

        Args:
            value: a tensor of one element, or a number.
            is_share: the value has already been divided by the number of micro-batches: those of a step are added.

        Raises:
            TypeError: value is neither a tensor nor a number.
            ValueError: it has not exactly one real element.
        """
        one = checked_loss(value)
        if not self._removed:
            self._sampler.take_loss(one, is_share=is_share)

    @property
    def parameter_names(self) -> tuple[str, ...]:
        """Names of everything watched so far, frozen parameters included, wrappers' prefixes stripped."""
        return tuple(self._registry.names)

    @property
    @alone
    def latest(self) -> Snapshot | None:
        """The newest flushed snapshot; before the first flush, what has been sampled so far; None for nothing."""
        self._collect()
        return self._pipeline.newest

    @property
    @alone
    def healthy(self) -> bool:
        """False if a rule found an error in the newest sample that has arrived."""
        self._collect()
        return self._alert_manager.healthy

    @property
    def metric_seconds(self) -> dict[str, float]:
        """What each of metrics= has taken on the host so far, in seconds, by what it is called.

        On a GPU that is what it takes to launch its work; `gradwatch/overhead_ratio` has the device's time too.
        """
        return self._parts.probes.seconds_of_each

    def watches(self, model: object) -> bool:
        """Whether this is one of the watched models, wrapped or not."""
        inner = unwrapped(model) if isinstance(model, torch.nn.Module) else model
        return any(watched is inner for watched in self._registry.models())

    def namespaces_in(self, run: object) -> set[str]:
        """What the whole model's numbers are logged below in this W&B run, by each sink that writes to it."""
        return self._dispatcher.namespaces_in(run)

    @alone
    def diagnose(self) -> list[Diagnosis]:
        """Probable causes of what the last samples show, most probable first; none for a healthy training."""
        self._collect()
        return self._rule_runner.diagnose()

    @alone
    def summary(self) -> Summary:
        """The worst layers of the last samples, the total norm, the alerts: print it, or let a notebook show it."""
        self._collect()
        recorder, newest = self._dispatcher.recorder, self._pipeline.newest
        overhead_ratio = math.nan if newest is None else newest.overhead_ratio
        return summarise(recorder.history(), alerts=recorder.alerts, overhead_ratio=overhead_ratio)

    def note(self, **context: object) -> None:
        """Keep a few words or numbers with the open step, for the flight recorder: `watcher.note(batch=17)`."""
        self._dispatcher.recorder.note(self._parts.clock.open_step, **context)

    @alone
    def record(self, path: str | Path | None = None) -> list[Path]:
        """Write the flight recorder: to a path, or beside the run, where its table is logged too.

        Returns:
            The files written; `wandb_gradwatch.load_recording` reads one.
        """
        self._collect()
        return self._dispatcher.record(path, table=path is None)

    @alone
    def wait(self) -> None:
        """Wait until every sample of the updates made so far has arrived and the rules have seen it.

        The window stays open: no row is written. Of a sharded model what arrives is this rank's part.
        """
        if not self._removed:
            self._sampler.end_sample()
            self._deliver(wait=True)

    @alone
    def flush(self) -> Snapshot | None:
        """End the window now: send it to the sinks and wait until it has arrived.

        Returns:
            The newest window that no earlier call has returned; None if nothing was sampled since.
        """
        self._flush_window(final=False)
        return self._pipeline.pop_unreturned()

    def _flush_window(self, *, final: bool) -> None:
        if not self._removed:
            self._sampler.end_sample(final=final)
            self._boundary.run(self._sampler.look_at_parameters)
            try:
                self._deliver(wait=True)
            finally:  # a callback of the user's may raise
                if self._pipeline.window:
                    self._sampler.flush_window()
                    self._deliver(wait=True)

    @alone
    def remove(self) -> None:
        """Flush, remove every hook and close the sinks. Idempotent.

        With a sharded model the last window is merged over the ranks: call it on all of them.
        """
        self._remove(merge=True)

    # ---- state

    @alone
    def state_dict(self) -> dict[str, Any]:
        """Everything that a resumed training goes on with: numbers, lists and tensors only.

        The step, what was learnt about the loop, the rules' and the guard's memory, and the window that is not flushed.
        """
        self.wait()
        return save_state(self._parts, self._pipeline, self._alert_manager, self._dispatcher)

    @alone
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state_dict()`; parameters are matched by name, and those that are gone are dropped.

        Raises:
            ValueError: it is something else, a whole checkpoint perhaps; nothing is changed.
        """
        self._sampler.end_counting()
        self._collect()
        load_state(state, self._parts, self._pipeline, self._alert_manager, self._dispatcher)

    def _own_turn(self) -> AbstractContextManager[object]:
        """The lock of what runs `alone`. None where ranks are merged: it may wait for some that wait for this one."""
        if self._boundary.in_forked_child or self._parts.merges_ranks:  # in a child nobody would release the lock
            return nullcontext()
        return self._boundary.lock

    # ---- ends

    def _remove(self, *, merge: bool) -> None:
        if self._removed or self._boundary.in_forked_child:
            self._stop()  # a monitor that has failed may still vote; the run of a forked child is not its own
            return
        if not merge:
            self._pipeline.stop_merging()
        try:
            self._flush_window(final=True)
            if self._parts.guard is not None:
                self._parts.guard.learn(keep=0, raises=False)
                self._say()
        finally:  # a callback of the user's may raise
            self._stop()
            self._dispatcher.close()

    def _stop(self) -> None:
        self._removed = True
        self._sampler.stop()
        if self._parts.replay is not None:
            self._parts.replay.close()
        self._pipeline.close()
        atexit.unregister(self._script_ends)
        if self in WATCHERS:
            WATCHERS.remove(self)

    def _script_ends(self) -> None:
        """A plain end, sys.exit(), an exception, Ctrl-C: nothing is lost but what needs other ranks."""
        crashed = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
        if crashed is not None and not self._removed and not self._boundary.in_forked_child:
            self.record()
        self._remove(merge=False)

    def _model_gone(self, _: object) -> None:
        # Not where the collector finds it while a graph is captured or traced, whose part the flush would become, or
        # while another thread runs the monitor, for which nobody must wait here: the end of the script removes it then.
        if not self._registry.models() and not graph_is_made() and self._boundary.lock.acquire(blocking=False):
            try:
                self._remove(merge=False)
            finally:
                self._boundary.lock.release()

    def _failed(self, error: Exception) -> None:
        """An exception inside the monitor: say it once, stop, keep what there is. Training goes on."""
        if self._removed:
            return
        self._stop()
        if self._parts.guard is not None and self._parts.guard.keep_voting(self._registry.slot_of_id):
            WATCHERS.append(self)  # so that unwatch() and another watch() end that, too
        unguarded = "" if self._parts.guard is None else ", unguarded"
        if isinstance(error, CannotWatchError):
            logger.error("wandb_gradwatch has stopped watching; training goes on%s: %s.", unguarded, error)
        else:
            logger.error(
                "wandb_gradwatch has failed and stopped watching; training goes on%s. Please report this traceback.",
                unguarded,
                exc_info=error,
            )
        try:
            self._say()  # what was to be said before it failed; a callback of the user's may raise
            if isinstance(error, CannotWatchError):  # the monitor itself is sound
                self._pipeline.deliver(wait=True)
        finally:
            self._pipeline.rescue()
            self._dispatcher.close()

    # ---- from the window to the delivery

    def _collect(self) -> None:
        """Hand over what has arrived, unless it may turn out not to be samples."""
        if not self._removed:
            if self._parts.by_hand.withholds:
                self._say()
            else:
                self._deliver()

    def _say(self) -> None:
        while self._parts.notices:
            notice = self._parts.notices.popleft()
            if notice.step is None:
                self._dispatcher.notice(notice.kind, notice.text)
            else:
                self._rule_runner.alert_once(notice.kind, notice.text, notice.step, notice.level)

    def _operation_found(self, step: int, found: str, is_late: bool) -> None:
        self._dispatcher.recorder.note(step, **{FIRST_BAD_OPERATION: found})
        if is_late:  # else it is the cause in the alert of its step, which is still to come
            text = f"Step {step} was run once more, after an alert.\n{CAUSE_PREFIX}{FOUND_PREFIX}{found}"
            self._found.append(Alert("First bad operation", text, step, "ERROR"))

    def _deliver(self, *, wait: bool = False) -> None:
        self._say()
        is_new, self._is_new = self._is_new, False
        if is_new and has_deepspeed(self._registry.models()):  # since watch(), which refuses it otherwise
            self._stop()
            self._dispatcher.close()
            logger.error("wandb_gradwatch has stopped watching; training goes on: %s.", DEEPSPEED_REFUSED)
            return
        while self._found:
            self._dispatcher.send(self._found.pop(0))
        if self._pipeline.has_any and not self._boundary.in_forked_child:
            schedule, on_rows = self._parts.schedule, self._dispatcher.pop_seconds()
            self._boundary.seconds_spent += on_rows
            schedule.seconds_on_rows += on_rows
            try:
                self._pipeline.deliver(wait=wait)
            finally:  # a callback of the user's may raise
                schedule.seconds_left_out += self._rule_runner.pop_seconds_on_alerts()
                news, titles = self._pipeline.pop_news(), self._dispatcher.pop_titles()
                schedule.seconds_on_rows += news.seconds_on_rows
                if self._parts.replay is not None and titles & _REPLAYED:
                    self._parts.replay.arm()
                if news.is_untraced:
                    schedule.distrust_versions()
                if news.is_unusual or titles:
                    schedule.look_closely()


WATCHERS: Final[list[Watcher]] = []
