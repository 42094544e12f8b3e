"""The sampler: turns what a training does with gradients into samples in the window.

    a backward has returned           Backwards   -> BackwardEvents  measure every gradient that is present
    a pipeline runs its micro-batches PipelineSchedules -> BackwardEvents  they are one backward
    gradients are clipped, unscaled   GradScalers -> ScalingEvents   measure what has changed since the backward
    an engine is about to step        Shadow      -> BackwardEvents  measure what the engine has averaged
    an optimizer is about to step     StepHooks   -> StepEvents      measure what has changed, and what it receives
    all watchers have measured        StepHooks   -> StepEvents      with a guard: apply or skip the step
    the step delegates to another     StepHooks   -> StepEvents      measure what the step has changed so far
    an optimizer has stepped          StepHooks   -> StepEvents      close the sample if it is complete
    between samples                   StepHooks   -> Rest            count steps, with all hooks on parameters off
    a CUDA graph replays steps        GraphReplays -> StepEvents     count them

The SampleClock decides when a sample is complete; Commits then hands it to the window.
"""

import time
from collections.abc import Callable
from functools import partial
from typing import Final

from torch import Tensor

from .._engines.shadow import shadow_of
from .._guard.voting import take_over_votes
from .._runtime.autograd import current_graph_task
from .._runtime.backwards import BACKWARDS
from .._runtime.error_boundary import ErrorBoundary, contained
from .._runtime.graph_replays import GRAPH_REPLAYS
from .._runtime.pipelining import SCHEDULES
from .._runtime.rank_session import RankSession
from .._runtime.steps import STEP_HOOKS
from .._transfer.sample_buffer import SampleBuffer
from .backward_events import BackwardEvents
from .commits import Commits
from .hooks import GradientHooks
from .measurer import Measurer
from .open_sample import OpenSample
from .parameter_registry import ParameterRegistry
from .parts import CaptureConfig, CaptureParts
from .rest import Rest
from .scaling import SCALERS
from .scaling_events import ScalingEvents
from .schedule import RankPlans
from .step_events import StepEvents

_PROGRAM_BEGAN: Final = time.perf_counter()  # this package is imported near the start of a program
_CADENCE: Final = "cadence"  # the prefix of the ranks' plans in the store


class Sampler:
    """Owns the hooks and the listeners. Calls `deliver` where arrived samples may be passed on."""

    def __init__(
        self,
        registry: ParameterRegistry,
        window: SampleBuffer,
        config: CaptureConfig,
        boundary: ErrorBoundary,
        deliver: Callable[[], None],
    ) -> None:
        self._boundary: ErrorBoundary = boundary
        self._hooks = GradientHooks(boundary, lambda slot, parameter: self._backwards.arrived(slot, parameter))
        self.parts = parts = CaptureParts(registry, window, config, boundary, self._hooks)
        measurer = Measurer(parts, config)
        self._sample = OpenSample(parts, measurer)
        self.rest = Rest(parts, self._sample)
        self._commits = commits = Commits(parts, self._sample, self.rest, measurer.timer)
        self._backwards = BackwardEvents(parts, self._sample, commits, self.rest, deliver)
        self._steps = StepEvents(parts, self._sample, commits, self.rest, self._backwards, deliver)
        self._subscriptions = (
            (SCALERS, ScalingEvents(parts, self._sample, self._backwards, self._steps)),
            (BACKWARDS, self._backwards),
            (SCHEDULES, self._backwards),
            (STEP_HOOKS, self._steps),
            (GRAPH_REPLAYS, self._steps),
        )
        if config.scaler is not None:
            SCALERS.use(config.scaler)

    def start(self, session: RankSession | None) -> None:
        """Register every hook. Invalid arguments have raised before. `session`: None without other ranks."""
        now, parts = time.perf_counter(), self.parts
        parts.schedule.start(now, self.seconds_spent, before=max(now - _PROGRAM_BEGAN, 0.0))
        if session is not None and parts.schedule.is_open_ended:
            store, ask = partial(session.store, _CADENCE), partial(session.ask, _CADENCE)
            parts.schedule.ranks = RankPlans(store, leads=session.rank == 0, ask=ask)
        if parts.probes.look_inside:
            self._hooks.tell_arrivals(())
        entries = parts.follow()
        if parts.guard is not None:
            take_over_votes(parameter for _, parameter in entries)
        parts.forward_facts.start(parts.registry.roots())
        self._sample.begin()
        for events, listener in self._subscriptions:
            events.subscribe(listener)
        for model in parts.registry.models():
            if (shadow := shadow_of(model)) is not None:
                shadow.attach(self, self._boundary)

    def stop(self) -> None:
        """Remove every hook and wrapper. Idempotent."""
        parts = self.parts
        for model in reversed(parts.registry.models()):  # several chunks of a model share one step
            if (shadow := shadow_of(model)) is not None:
                shadow.detach()
        if current_graph_task() == -1 and not parts.thread.is_another:
            self._boundary.run(parts.take_off_hooks)  # it walks the model, which may fail
        self._boundary.stopped = True
        self.rest.is_on = False
        for events, listener in reversed(self._subscriptions):
            events.unsubscribe(listener)
        self._hooks.remove()
        if parts.guard is not None:
            parts.guard.stop_voting()
            if not parts.thread.is_another:  # otherwise after_step() gives withheld gradients back
                parts.guard.release()
        parts.probes.close()
        parts.forward_facts.remove()

    @property
    def wants_gradients(self) -> bool:
        """Whether the step to come is measured: an engine shows its gradients at such steps only."""
        return not self.rest.is_on and self.parts.is_measured

    def gradients_complete(self) -> None:
        """Measure the gradients of an engine, which is about to step."""
        self._backwards.engine_has_averaged()

    @contained
    def take_loss(self, value: Tensor, *, is_share: bool) -> None:
        """Take the loss of the update under way, from the user or from a framework's integration."""
        if self.parts.rows_are_read:
            self.parts.loss.add(value, is_share=is_share)

    def mark_step(self) -> None:
        """Close the open sample: the user has made an update."""
        parts = self.parts
        self.rest.end()
        self._backwards.gradients_are_used()
        is_counted = not parts.updates.by_steps and parts.clock.num_closed and not parts.clock.backwards
        parts.updates.step_seen()
        if is_counted:  # the first mark: the last backward has counted as this update
            return
        parts.settle()
        self._sample.updated_by_hand(parts.registry.scan())
        self._commits.commit(parts.clock.update())

    def end_sample(self, *, final: bool = False) -> None:
        """Close the open sample if it has had a step or an update by the user's code.

        Without an optimizer, the last backward counts as an update. With one, and if this is `final`, the loop has left
        the last step out, perhaps because it has found NaN.
        """
        parts, clock = self.parts, self.parts.clock
        self._backwards.gradients_are_used()
        if (final or not parts.thread.is_another) and (closed := clock.close()):
            self._commits.commit(closed)
        elif parts.thread.is_another or not clock.backwards:
            return  # reading a gradient is not safe while the other thread may write to it or reset it
        elif not parts.updates.by_steps and parts.updates.are_made_by_code():
            self._commits.updated_unseen()
        elif final or self._sample.is_reset():
            self._sample.leave_out()

    def run_ends(self) -> None:
        """Send messages that wait for more steps: the run or the watching ends."""
        self.parts.wiring.run_ends()

    def look_at_parameters(self) -> None:
        """Alert if parameters hold NaN or Inf after steps that were not measured. Waits for the device."""
        parts = self.parts
        if not (parts.shards.any or parts.thread.is_another):  # the other thread may be freeing their memory
            parts.wiring.look_at_parameters(last_sample=parts.schedule.last_sample)

    @property
    def seconds_spent(self) -> float:
        """The seconds that monitoring has taken so far, on the host or on the device."""
        return self._commits.seconds_spent

    def flush_window(self) -> None:
        """End the window after the last committed sample, because the user asks for it."""
        self._commits.flush_window()
