"""The sampler: turns hooks, optimizer steps and loss scaling into rows of the window.

    a gradient is accumulated         BackwardHooks -> _arrived            only where the gradient is needed that early
    a backward has ended              BackwardHooks -> _backward_ended     measure every gradient that is present
    an optimizer is about to step     StepHooks     -> before_step         measure new and modified gradients
    all watchers have measured        StepHooks     -> guard_step          with a guard: apply or skip the step
    the step delegates to another     StepHooks     -> before_inner_step   measure what the step has changed so far
    an optimizer has stepped          StepHooks     -> after_step          close the sample if it is complete
    a scaler unscales or skips        GradScalers   -> before_unscale, step_skipped
    a pipeline runs its micro-batches PipelineSchedules -> schedule_begins, schedule_ended: they are one backward

The SampleClock decides when a sample is complete; the sampler then commits it to the window. The file is long because
every event of a training enters here, and their order is easier to see in one place.
"""

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor
from torch.optim import Optimizer

from .._boundary import entry_point
from .._guard.step_skipping import StepSkipping, take_over_votes
from .._runtime.autograd import backward_root, current_graph_task, num_nodes_made
from .._runtime.error_boundary import ErrorBoundary, contained
from .._runtime.notices import CannotWatchError
from .._runtime.pipelining import SCHEDULES, divisor_of, stages_of
from .._runtime.rank_session import RankSession
from .._runtime.sharding import refused_engine, world_size
from .._runtime.steps import STEP_HOOKS, Listener, is_torchs
from .._transfer.sample_buffer import SampleBuffer
from .clock import Closed, SampleClock
from .hooks import BackwardHooks
from .measurer import Measurer
from .open_sample import OpenSample
from .parameter_registry import ParameterRegistry
from .parts import CaptureConfig, CaptureParts
from .probes import Probe
from .rest import BackwardRest, Rest, StepRest
from .scaling import SCALERS
from .schedule import RankPlans

_PROGRAM_BEGAN: Final = time.perf_counter()  # this package is imported near the start of a program
_CADENCE: Final = "cadence"  # the prefix of the ranks' plans in the store


class Sampler(Listener):
    """Owns the hooks, and opens and closes samples. Calls `deliver` where arrived samples may be passed on."""

    def __init__(
        self,
        registry: ParameterRegistry,
        window: SampleBuffer,
        config: CaptureConfig,
        boundary: ErrorBoundary,
        deliver: Callable[[], None],
    ) -> None:
        self._boundary: ErrorBoundary = boundary
        self._deliver = deliver
        self._hooks = BackwardHooks(
            SampleClock(step=config.start_step),
            boundary=boundary,
            on_arrival=self._arrived,
            on_begin=self._backward_begins,
            on_end=self._backward_ended,
        )
        self.parts = parts = CaptureParts(registry, window, config, boundary, self._hooks)
        self._clock, self._schedule = parts.clock, parts.schedule
        self._guard, self._by_hand = parts.guard, parts.by_hand
        self._measurer = Measurer(parts, config)
        self._sample = OpenSample(parts, self._measurer)
        self._step_rest = StepRest(parts, self._sample)
        self._backward_rest = BackwardRest(parts, self._sample)
        self.counter: Rest | None = None  # counts steps while the hooks are off
        self._inside_backward = False
        self._inside_schedule = False  # whether a pipeline schedule runs, whose backwards are parts of one
        self._joining: int | None = None
        self._has_outer = False  # whether an outer optimizer has stepped
        self._seconds_at_commit = 0.0
        self._settled = (0.0, 0.0, 0.0)  # at the last sample: seconds spent, seconds of the host, and of the device
        if config.scaler is not None:
            SCALERS.use(config.scaler)

    def start(self, session: RankSession | None) -> None:
        """Register every hook. Invalid arguments have raised before. `session`: None without other ranks."""
        now = time.perf_counter()
        self._schedule.start(now, self.seconds_spent, before=max(now - _PROGRAM_BEGAN, 0.0))
        if session is not None and self._schedule.is_open_ended:
            self._schedule.ranks = RankPlans(
                partial(session.store, _CADENCE), leads=session.rank == 0, ask=partial(session.ask, _CADENCE)
            )
        if self.parts.probes.look_inside:
            self._hooks.tell_arrivals(())
        entries = self.parts.follow()
        if self._guard is not None:
            take_over_votes(parameter for _, parameter in entries)
        self.parts.forward_facts.start(self.parts.registry.roots())
        self._sample.begin()
        SCALERS.subscribe(self)
        SCHEDULES.subscribe(self)
        STEP_HOOKS.subscribe(self)

    def stop(self) -> None:
        """Remove every hook and wrapper. Idempotent."""
        self._backward_rest.remove_witnesses()
        if current_graph_task() == -1 and not (self.parts.thread.is_another or self.parts.thread.has_company):
            self._boundary.run(self.parts.take_off_hooks, is_alone=True)  # it walks the model, which may fail
        self._boundary.stopped = True
        self.counter = None
        STEP_HOOKS.unsubscribe(self)
        SCALERS.unsubscribe(self)
        SCHEDULES.unsubscribe(self)
        self._hooks.remove()
        if self._guard is not None:
            if not self.parts.thread.is_another:  # otherwise after_step() gives withheld gradients back
                self._guard.release()
            STEP_HOOKS.unsubscribe(self._guard)  # if the monitor has failed, it votes
        self.parts.probes.close()
        self.parts.forward_facts.remove()

    def _arrived(self, slot: int, parameter: Tensor) -> None:
        if self.parts.is_measured and (self._by_hand.inside_backward or self.parts.probes.look_inside):
            self._sample.gradient_arrived(slot, parameter)

    @contained
    def schedule_begins(self, schedule: Any) -> None:
        in_stages = {id(parameter) for stage in stages_of(schedule) for parameter in stage.parameters()}
        if self.counter is None and not in_stages.isdisjoint(self.parts.registry.slot_of_id):
            if self._guard is not None and world_size() > 1:
                self._guard.refuse_parts()
            self._gradients_begin(has_accumulated=False)
            self._inside_schedule = True

    @contained
    def schedule_ended(self, schedule: Any) -> None:
        if self._inside_schedule:
            self._hooks.end_outside()  # FSDP reduces after the last micro-batch, outside of a backward
            self._inside_schedule = False
            self.parts.loss.rescale(torch.tensor(1 / divisor_of(schedule), dtype=torch.float64))
            self._gradients_complete(of_schedule=True)

    @contained
    def _backward_begins(self, has_accumulated: bool) -> None:
        if not self._inside_schedule:
            self._gradients_begin(has_accumulated=has_accumulated)

    def _gradients_begin(self, *, has_accumulated: bool) -> None:
        is_first = not (self._clock.num_closed or self._clock.backwards or self._inside_backward)
        if is_first and (why := refused_engine(self.parts.registry.models())) is not None:
            raise CannotWatchError(why)  # the engine was set up since watch()
        STEP_HOOKS.drop_raised()  # a step that raised must not keep the clock muted
        self.parts.thread.backward_begins()
        if self._clock.muted:
            self._sample.forget_update()
        else:
            is_outermost = not self._inside_backward  # re-entrant checkpoints begin further backwards inside it
            self._inside_backward = True
            if is_outermost:
                self._hooks.reached.clear()
                if self._by_hand.possible:
                    self._by_hand.backward_begins(has_accumulated)
            self.parts.wiring.backward_begins(has_accumulated)
            if (closed := self._clock.backward_begins()) is not None:
                self._commit(closed)
            if self._clock.backwards and is_outermost:
                self._sample.leave_out_what_was_reset(has_accumulated=has_accumulated)

    @contained
    def _backward_ended(self) -> None:
        if not self._inside_schedule:
            self._gradients_complete()
        elif not self._clock.muted:
            self._see_loss()

    def _see_loss(self) -> None:
        """Add the loss that the current backward was called on."""
        loss, scale = self.parts.loss, self.parts.loss_scale
        self.parts.settle()
        scale.forget()
        if self.parts.rows_are_read and (root := backward_root()) is not None:
            self.parts.forward_facts.see_loss(root)
            loss.see(root, scale.of_backward(root.device, self._hooks.reached), of_all=scale.is_given)

    def _gradients_complete(self, *, of_schedule: bool = False) -> None:
        """A backward has ended, or all backwards of a pipeline schedule, whose losses are already added."""
        self._inside_backward = False
        if self._clock.muted:
            return
        if self.counter is not None:  # it has armed this call, or the user stops it
            self.end_counting()
            return
        by_hand, parts, reached = self._by_hand, self.parts, self._hooks.reached
        is_update = is_first_in_hooks = False
        if by_hand.possible:
            was_in_hooks = by_hand.inside_backward
            is_update = not parts.shards.uses_fsdp1 and by_hand.ended_in_hooks(reached, self._clock.open_step)
            is_first_in_hooks = by_hand.inside_backward and not was_in_hooks
            if is_first_in_hooks:
                self._hooks.tell_arrivals(self.parts.registry.scan())
            if not is_update:
                if by_hand.were_reset(reached) and self._clock.backwards:
                    self._close_update_by_hand()
                    self._sample.was_reset = by_hand.withholds  # it counts if an optimizer steps after all
                    self._clock.marked |= reached
                by_hand.remember_parameters()
        if not of_schedule:
            self._see_loss()
        if self.parts.is_measured and of_schedule:  # a zero-bubble schedule makes gradients that no hook marks
            self._sample.measure_unmarked(parts.follow())
        elif self.parts.is_measured and not is_first_in_hooks:  # there most gradients are gone already
            # Every backward may be the last before the step: the last group of micro-batches may be shorter.
            self._sample.measure_present(self.parts.follow())
        elif by_hand.possible:
            self.parts.seen.note(self.parts.registry.scan())
        if (closed := self._clock.backward_ended()) is not None:
            self._commit(closed)
        if is_update:
            self._close_update_by_hand()
        self.parts.wiring.backward_ended()
        self._deliver()
        if self._backward_rest.begins_after():
            self.counter = self._backward_rest

    @entry_point()
    def mute(self, muted: bool) -> None:
        self._clock.muted += 1 if muted else -1

    @entry_point()
    def end_counting(self, *, before_step: bool = False) -> None:
        rest, self.counter = self.counter, None
        if rest is not None:
            rest.end(before_step=before_step)

    @entry_point(lambda: False)
    def follows(self, optimizer: Optimizer) -> bool:
        answer = self.parts.optimizers.known_to_follow(optimizer)
        if answer is None:
            answer = bool(self._boundary.run(self._learn, optimizer))
        if not (answer or self._clock.num_closed) and self.parts.wiring.stepped_elsewhere():
            self._boundary.run(self._deliver)
        return answer

    def _learn(self, optimizer: Optimizer) -> bool:
        num_known = self.parts.optimizers.num_known
        follows = self.parts.optimizers.learn(optimizer)
        has_lost_all = num_known and not self.parts.optimizers.num_known
        if follows:
            self.parts.thread.step_begins()
        if follows or has_lost_all:
            self.end_counting(before_step=True)
            self.parts.follow()
        if has_lost_all or (not follows and self._by_hand.possible and self._clock.marked):
            self.parts.wiring.stepped_without_the_model(optimizer)
        return follows

    @entry_point(lambda: False)
    def is_part_of(self, inner: Optimizer, outer: Optimizer) -> bool:
        return self.parts.optimizers.slots(inner) <= self.parts.optimizers.slots(outer)

    @contained
    def before_closure(self, optimizer: Optimizer) -> None:
        self._hooks.end_outside()
        self.parts.optimizer_found()
        self._commit(self._clock.step_begins(self.parts.optimizers.key(optimizer)))

    @contained
    def before_step(self, optimizer: Optimizer, *, inside_backward: bool) -> None:
        self._hooks.end_outside()
        if self._by_hand.possible:
            self.parts.optimizer_found()
        SCALERS.steps_of(optimizer).begin()
        key = self.parts.optimizers.key(optimizer)
        if inside_backward:
            self._hooks.arm(current_graph_task())
        if (closed := self._clock.step_begins(key)) is not None:
            self._commit(closed)
        if not inside_backward:
            self.parts.thread.step_begins()
        if self.parts.replay is not None:
            self.parts.replay.before_step(self._clock.open_step, optimizer)
        if not inside_backward:
            self._deliver()
            if self._clock.is_late(key) and (self._is_outer(key) or self.parts.joins_silently(optimizer, key)):
                self._joining = key
                return
        if not self._clock.num_closed and not self._clock.backwards and not inside_backward:
            entries = self.parts.follow()  # watch() was called between the backward and the step
            self._sample.mark_present(entries)
            if not self.parts.is_measured:  # a measured step must not take them for what a backward has left
                self.parts.seen.note(entries)
        self.parts.settle()
        if self.parts.is_measured:
            self._sample.inspect(optimizer, inside_backward=inside_backward)
            self._sample.follow_update(optimizer, changes_gradients=not is_torchs(type(optimizer).step))
        self._sample.before_update(optimizer)
        self.parts.wiring.about_to_step(key)

    @contained
    def before_inner_step(self, optimizer: Optimizer, *, is_torchs: bool) -> None:
        if self.parts.is_measured and self._joining is None:
            self._sample.inspect_inner(optimizer)
            self._sample.follow_update(optimizer, changes_gradients=not is_torchs)

    def _is_outer(self, key: int) -> bool:
        """Whether an optimizer steps without a backward after others have updated all its parameters, as in local SGD.

        Its gradients are differences of parameters: in one series with true gradients they would look like a fault.
        """
        is_outer = self._clock.were_just_updated(key)
        if is_outer and not self._has_outer:
            self._has_outer = True
            of_rank = " The other gradients are those of this rank: metrics=[Ranks()] compares the ranks."
            self.parts.notices.say(
                "outer step",
                "an optimizer steps without a backward, on parameters that another one has just updated, as the outer "
                "optimizer of local SGD does: its steps are not counted, and its gradients are not in the series."
                f"{of_rank if world_size() > 1 else ''}",
            )
        return is_outer

    @entry_point()
    def guard_step(self, optimizer: Optimizer, *, inside_backward: bool) -> None:
        if self._guard is not None:
            self._guard.vote(optimizer, partial(self._decide, self._guard, optimizer, inside_backward))

    @contained
    def _decide(self, guard: StepSkipping, optimizer: Optimizer, inside_backward: bool) -> None:
        entries, version = self.parts.optimizers.entries(optimizer), self.parts.registry.version
        if self._joining == self.parts.optimizers.key(optimizer):
            guard.abstain(entries, version)
        else:
            step, found = self._clock.open_step, self._sample.so_far() if guard.needs_rows else {}
            guard.decide(optimizer, step, entries, version, inside_backward=inside_backward, found=found)

    @entry_point()
    def after_step(self, optimizer: Optimizer, *, inside_backward: bool) -> None:
        if self._guard is not None:
            self._guard.release(optimizer)
        self._after_step(optimizer, inside_backward)

    @contained
    def _after_step(self, optimizer: Optimizer, inside_backward: bool) -> None:
        if SCALERS.last_used is not None:
            SCALERS.steps_of(optimizer).is_scalers = False
        key = self.parts.optimizers.key(optimizer)
        if self._joining == key:
            self._joining = None
            self._clock.join(key)
            return
        if self.parts.is_measured:
            self._sample.after_update(optimizer)
        if self.parts.probes.active:
            self._sample.tell_of_update(Probe.after_update, optimizer)
        self.parts.wiring.stepped(optimizer, key)
        self.parts.last_node = num_nodes_made()
        self._step_done(key, skipped=False, inside_backward=inside_backward)
        if not inside_backward and current_graph_task() == -1 and self._step_rest.is_worth_it():
            self._commit(self._clock.close())  # as the next backward would
            self.counter = self._step_rest if self._step_rest.begin(optimizer) else None

    @contained
    def step_skipped(self, optimizer: Optimizer) -> None:
        if self.counter is not None:
            if self.counter.skips(optimizer):
                self.end_counting()
        else:
            self.parts.optimizer_found()
            if self.parts.replay is not None:
                self.parts.replay.step_skipped(self._clock.open_step)
            key = self.parts.optimizers.key(optimizer)
            self._commit(self._clock.step_begins(key))
            self.parts.settle()
            if self._clock.is_late(key) and self.parts.joins_silently(optimizer, key):
                self._clock.join(key)
            else:
                self._step_done(key, skipped=True, inside_backward=False)

    def _step_done(self, key: int, *, skipped: bool, inside_backward: bool) -> None:
        self._commit(self._clock.step_ended(key, skipped=skipped, inside_backward=inside_backward))
        if current_graph_task() == -1:  # never deliver from within a tensor hook
            self._deliver()

    @contained
    def before_unscale(self, optimizer: Optimizer) -> None:
        self._hooks.end_outside()
        if self.parts.is_measured:
            self._sample.before_unscale(optimizer)

    @contained
    def after_unscale(self, optimizer: Optimizer) -> None:
        if self.parts.is_measured:
            self._sample.after_unscale(optimizer)

    @entry_point()
    def before_clipping(self, parameters: Sequence[Tensor]) -> None:
        self._hooks.end_outside()
        self._sample.before_clipping(parameters)

    @entry_point()
    def after_clipping(self, parameters: Sequence[Tensor]) -> None:
        self._sample.after_clipping(parameters)

    @contained
    def take_loss(self, value: Tensor, *, is_share: bool) -> None:
        """Take the loss of the update under way, from the user or from a framework's integration."""
        if self.parts.rows_are_read:
            self.parts.loss.add(value, is_share=is_share)

    def mark_step(self) -> None:
        """Close the open sample: the user has made an update."""
        rest = self._backward_rest
        if self.counter is rest and rest.marks():
            if rest.is_over:
                self.end_counting()
            return
        self.end_counting()
        self.parts.optimizer_found()
        self.parts.settle()
        self._sample.updated_by_hand(self.parts.registry.scan())
        self._commit(self._clock.update())
        if current_graph_task() == -1 and rest.begins_after(mark=True):
            self.counter = rest

    def _close_update_by_hand(self) -> None:
        """Close the sample of an inferred update. It may have used other tensors than `.grad`, as Keras' clipping."""
        self._sample.is_inferred = not self._by_hand.inside_backward
        self._sample.updated_by_hand(())
        self._by_hand.count()
        self._commit(self._clock.update())

    def end_sample(self, *, final: bool = False) -> None:
        """Close the open sample if it has had a step or an update by hand.

        With `final` and without an optimizer, the last backward counts as an update by hand. With an optimizer, the
        loop has left the last step out, perhaps because it has found NaN.
        """
        self._hooks.end_outside()
        if self.counter is self._backward_rest and not self.parts.thread.is_another:
            self.end_counting()
        if (final or not self.parts.thread.is_another) and (closed := self._clock.close()):
            self._commit(closed)
        elif self.parts.thread.is_another:
            return  # reading a gradient is not safe while the other thread may write to it or reset it
        elif self._by_hand.possible and self._clock.backwards and (final or self._by_hand.has_updated()):
            self._close_update_by_hand()
            self._by_hand.settle()
        elif self._clock.backwards:
            self._sample.leave_out_what_was_reset(is_last=final)
        elif final and self._by_hand.withholds:
            self._by_hand.proven = True

    def run_ends(self) -> None:
        """Send messages that wait for more steps: the run or the watching ends."""
        self.parts.wiring.run_ends()

    def look_at_parameters(self) -> None:
        """Alert if parameters hold NaN or Inf after steps that were not measured. Waits for the device."""
        parts = self.parts
        if not (parts.shards.any or parts.thread.is_another):  # the other thread may be freeing their memory
            parts.wiring.look_at_parameters(last_sample=self._schedule.last_sample)

    def _commit(self, closed: Closed | None) -> None:
        if closed is None:
            return
        self._step_rest.sample_closed(closed)
        self._backward_rest.sample_closed(closed)
        if self._guard is not None:
            self._guard.end_step(closed.step)
        if self._schedule.is_sampled:
            self._sample.close(closed)
            self._settled = self._account()
            now, spent = time.perf_counter(), self._settled[0]
            self._schedule.add_sample(
                closed.step, skipped=closed.skipped, now=now, seconds_spent=spent, must_agree=self.parts.merges_ranks
            )
        else:
            self.parts.loss.take()
            if self._guard is not None:
                self.parts.window.discard()
                self._schedule.seconds_left_out += self._boundary.seconds_spent - self._seconds_at_commit  # on guarding
        self._seconds_at_commit = self._boundary.seconds_spent
        if self._schedule.window_is_full(closed.step):
            self.flush_window(is_full=True)
        self._sample.begin()

    @property
    def seconds_spent(self) -> float:
        """The seconds that monitoring has taken: for each sample the larger of the host's and of the device's.

        They work in parallel, and a training may be limited by the one now and by the other later.
        """
        return self._account()[0]

    def _account(self) -> tuple[float, float, float]:
        """Return the seconds spent, and those of the host and of the device alone."""
        in_hooks = self.parts.probes.seconds_spent + self.parts.forward_facts.seconds_spent
        host, device = self._boundary.seconds_spent + in_hooks, self._measurer.timer.seconds()
        if self.counter is not None:
            host += self.counter.seconds_spent
        spent, last_host, last_device = self._settled
        return spent + max(host - last_host, device - last_device), host, device

    def flush_window(self, *, is_full: bool = False) -> None:
        """End the window after the last committed sample; `is_full` unless the user asks for it."""
        self.parts.window.flush()
        self._schedule.begin_window(is_full=is_full)
