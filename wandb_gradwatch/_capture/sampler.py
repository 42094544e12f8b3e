"""From hooks, optimizer steps and loss scalers to rows in the window: what is measured when.

    a parameter is marked             BackwardHooks -> _mark
    a backward has ended              BackwardHooks -> _backward_ended     measure every gradient that is there
    an optimizer is about to step     StepHooks     -> before_step         measure what was missed; what was clipped
    an optimizer has stepped          StepHooks     -> after_step          perhaps the sample is complete
    a scaler unscales, or skips       LossScales     -> before_unscale, step_skipped

The SampleClock says when a sample is complete; it is then committed to the window.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Final

from torch import Tensor
from torch.optim import Optimizer

from .._guard.rank_consensus import ConsensusTable, FailedRankVoter, RankConsensus
from .._guard.step_skipping import StepSkipping
from .._runtime.autograd import Entry, backward_root, current_graph_task
from .._runtime.error_boundary import ErrorBoundary, contained
from .._runtime.sharding import Shards, world_size
from .._transfer.sample_buffer import SampleBuffer
from .._transfer.transfers import Sample
from ..snapshot import keys
from .by_hand import UpdatesByHand
from .clipping import CLIP_FUNCTIONS
from .clock import Closed, SampleClock
from .config import CaptureConfig
from .events import SamplerEvents
from .gradient_versions import was_seen
from .hook_sync import NO_SLOT, HookSync
from .hooks import BackwardHooks
from .loss import SampleLoss
from .measurer import Measurer
from .open_sample import OpenSample, Surroundings
from .optimizer_registry import OptimizerRegistry
from .parameter_registry import ParameterRegistry
from .probes import Probes
from .rank_plans import rank_plans
from .rest import Regularity, Rest, seconds_of_a_step
from .scaling import SCALES
from .schedule import Schedule
from .steps import STEP_HOOKS
from .timing import DeviceTimer
from .wiring import Wiring, holds_other_tensors

# This many backwards that only accumulate, without a step, are worth a word.
_PATIENCE_IN_BACKWARDS: Final = 1000

_LEAST_REST: Final = 3  # steps, for which turning hooks off and on is worth it


class Sampler:
    """Owns the hooks and the open sample.

    Args:
        registry: the watched parameters.
        window: where rows go.
        config: which steps are measured, and what is measured in them.
        events: how the watcher hears of it.
        boundary: where all of it runs.
    """

    def __init__(
        self,
        registry: ParameterRegistry,
        window: SampleBuffer,
        config: CaptureConfig,
        events: SamplerEvents,
        boundary: ErrorBoundary,
    ) -> None:
        self._registry = registry
        self._window = window
        self._events = events
        self.boundary = boundary
        self.clock = SampleClock(step=config.start_step)
        self._schedule = Schedule(self.clock, config.cadence, config.budget)
        self._timer = DeviceTimer()
        self._hooks = BackwardHooks(on_mark=self._mark, on_begin=self._backward_begins, on_end=self._backward_ended)
        self.shards = Shards()
        self._hook_sync = HookSync(registry, self._hooks, self.shards, found=window.resize, new=self._say_new)
        self._optimizer_registry = OptimizerRegistry(registry, self.clock, self._scan, config.optimizer)
        self.step_skipping = None
        if events.judge is not None:
            self.step_skipping = StepSkipping(events.judge, window, events.notice, events.replay)
        self._consensuses = ConsensusTable()
        self._failed_rank_voter: FailedRankVoter | None = None  # of a monitor that has failed
        self._wiring = Wiring(registry, self._optimizer_registry)
        self._probes = Probes(config.probes)
        self._loss = SampleLoss()
        around = Surroundings(
            registry,
            window,
            self.clock,
            self._schedule,
            self._optimizer_registry,
            events,
            self._scan,
            self._hook_sync.would_tell,
        )
        reads_rows = self.step_skipping is not None and self.step_skipping.needs_rows
        measurer = Measurer(window, self._optimizer_registry, config.measured, self._timer)
        self._sample = OpenSample(around, measurer, self._probes, guard_reads_rows=reads_rows)
        self._muted = 0
        self._reached: set[int] = set()  # slots marked in the backward under way
        self._inside_backward = False
        self._joining: int | None = None
        self._by_hand = UpdatesByHand(registry, self._sample.seen, excluded=config.optimizer is not None)
        self._regularity = Regularity()
        self._rest: Rest | None = None  # between samples
        self._wakes_at = 0  # step
        self._seconds_of_resting_step: float | None = None
        self._seconds_resting = 0.0
        self._seconds_between = 0.0  # spent on guarding steps between samples: no cadence makes them fewer
        self._seconds_at_commit = 0.0

        if config.scaler is not None:
            SCALES.use(config.scaler)

    def start(self, name: str) -> None:
        """Hook everything; what can raise for a bad argument has done so before.

        Args:
            name: tells this watcher's traffic between ranks from that of others; the same on every rank.
        """
        self._schedule.start(time.perf_counter(), self.seconds_spent)
        if world_size() > 1 and self._schedule.is_open_ended:
            self._schedule.follow_rank_0(rank_plans(name))
        self._hook_sync.start()
        self._sample.begin()
        SCALES.subscribe(self)
        CLIP_FUNCTIONS.subscribe(self)
        STEP_HOOKS.subscribe(self)

    def stop(self) -> None:
        """Remove every hook and wrapper. Idempotent."""
        self.boundary.stopped = True
        self._rest = None
        STEP_HOOKS.unsubscribe(self)
        SCALES.unsubscribe(self)
        CLIP_FUNCTIONS.unsubscribe(self)
        self._hooks.remove()
        if self.step_skipping is not None:
            self.step_skipping.release()
        self._probes.close()

    def keep_voting(self) -> bool:
        """After a failure, do what other ranks wait for: where a guard decides for all of them, each one must be heard.

        Returns:
            Whether there may be anything to vote about: then `stop()` ends it.
        """
        if self.step_skipping is None or world_size() == 1:
            return False
        self._failed_rank_voter = FailedRankVoter(self._registry.slot_of_id)
        STEP_HOOKS.subscribe(self)
        return True

    # ---- marks and backwards

    def _mark(self, slot: int, parameter: Tensor) -> None:
        if not self._muted and slot != NO_SLOT:
            self.clock.marked.add(slot)
            self._reached.add(slot)
            if self._by_hand.inside_backward and self._is_measured and parameter.grad is not None:
                self._measure_inside(slot, parameter)

    @contained
    def _measure_inside(self, slot: int, parameter: Tensor) -> None:
        self._sample.measure_present([(slot, parameter)])

    @contained
    def _backward_begins(self) -> None:
        STEP_HOOKS.drop_raised()  # a step that raised must not leave us muted
        if not self._muted:
            if not self._by_hand.possible or self._by_hand.backward_begins():
                self._reached.clear()
            self._wiring.backward_begins()
            self._commit(self.clock.backward_begins())
            if self.clock.backwards and not self._inside_backward:
                self._leave_out_what_was_reset()
            self._inside_backward = True  # others may begin in the middle of it: of re-entrant checkpoints

    @contained
    def _backward_ended(self) -> None:
        self._inside_backward = False
        if self._muted:
            return
        self._wiring.backward_ended()
        is_first_in_hooks = not self._by_hand.inside_backward
        is_update = self._by_hand.possible and self._ended_in_hooks()
        is_first_in_hooks &= self._by_hand.inside_backward  # most of it is gone, and what is left is not the whole
        if self._by_hand.possible and not is_update:
            if self._by_hand.were_reset(self._reached) and self.clock.backwards:
                self._close_update_by_hand()
                self._sample.was_reset = self._by_hand.withholds  # if there turns out to be an optimizer
                self.clock.marked |= self._reached
            self._by_hand.remember_parameters()
        self._loss.settle()
        if self._schedule.is_sampled and (root := backward_root()) is not None:
            self._loss.see(root, self._sample.loss_scale(root.device))
        if self._is_measured and not is_first_in_hooks:
            self._sample.measure_present(self._scan())  # each may be the last: the last group may be a shorter one
        elif self._by_hand.possible:
            self._sample.note(self._registry.scan())
        self._commit(self.clock.backward_ended())
        if is_update:
            self._close_update_by_hand()
        if self.clock.backwards == _PATIENCE_IN_BACKWARDS:
            self._events.alert(
                "No gradient",
                f"{_PATIENCE_IN_BACKWARDS} backwards have gone by without an optimizer step that updates a watched "
                "parameter.\nProbable cause: not clear: either step() is missing, or the optimizer holds other tensors "
                "than the model. Remedy: call step() after backward(), and make the optimizer from the parameters of "
                "the model that is trained.",
                self.clock.open_step,
            )
        self.deliver()

    def _ended_in_hooks(self) -> bool:
        """Whether the backward that has ended is an update: hooks of others have used its gradients."""
        is_known = self._by_hand.inside_backward
        if not self._by_hand.were_taken(self._reached) or self.shards.uses_fsdp1:
            return False
        if not is_known:
            self._by_hand.inside_backward = True
            self._hooks.go_first()
            self._events.notice(
                "updates inside the backward",
                "hooks on the parameters take the gradients away while the backward goes on, as optimizers that are "
                f"fused into it do: from step {self.clock.open_step + 1} on each gradient is measured as its hooks "
                "find it, and every such backward counts as a step; what is done to a gradient in these hooks is not "
                "seen, and guard= cannot leave a step out. If not every such backward is an update, call "
                "watcher.mark_step() after each update.",
            )
        return True

    def mute(self, muted: bool) -> None:
        """See StepListener."""
        self._muted += 1 if muted else -1

    @property
    def _is_measured(self) -> bool:
        """Whether the open step's gradients are looked at: a guard judges every one."""
        return self.step_skipping is not None or self._schedule.is_sampled

    def _scan(self) -> list[Entry]:
        return self._hook_sync.scan(self.clock.marked)

    def _say_new(self, slots: Sequence[int]) -> None:
        names = self._registry.some_names(slots)
        self._events.notice(
            "new parameters", f"now following parameters that were added, replaced or unfrozen after watch(): {names}"
        )

    # ---- between samples

    def _rest_until_needed(self, optimizer: Optimizer) -> None:
        """Look at nothing until the next sample, if it is clear how steps make samples."""
        regularity = self._regularity
        if self.step_skipping is not None or self._by_hand.possible or self._muted or not regularity.is_settled:
            return
        in_turn = regularity.is_each_alone and len(regularity.keys) > 1
        if (self.clock.stepped and not in_turn) or self._window.has_sent:
            return
        if self._schedule.wakes_at() - self.clock.open_step < _LEAST_REST + self.clock.stepped:
            return
        if self.clock.stepped:
            self._commit(self.clock.close())  # as the next backward would have
        self._wakes_at = self._schedule.wakes_at()
        found = [self._optimizer_registry.of_key(key) for key in regularity.keys]
        optimizers = [one for one in found if one is not None]
        if len(optimizers) < len(found) or optimizer not in optimizers:
            return
        if self._seconds_of_resting_step is None:
            self._seconds_of_resting_step = seconds_of_a_step(optimizer)
        self.clock.discard()
        self._hooks.turn(on=False)
        self._rest = Rest(optimizers, optimizer, each_alone=regularity.is_each_alone)

    @contained
    def _wake(self) -> None:
        if self._rest is not None:
            self._rest = None
            self._hooks.turn(on=True)
            self._sample.begin()

    def passes(self, optimizer: Optimizer) -> bool:
        """See StepListener."""
        if self._rest is None:
            return False
        if self._rest.begins(optimizer):
            SCALES.note_step(optimizer)
            return True
        if self._optimizer_registry.known_to_follow(optimizer) is False:
            return True
        is_new = self._rest.has_new_gradients
        self._wake()
        if is_new:
            self._mark_present()
        return False

    @contained
    def _mark_present(self) -> None:
        """A backward has come that no hook has told of."""
        self._sample.mark_present(self._scan())

    def passed(self, optimizer: Optimizer) -> None:
        """See StepListener."""
        if self._rest is not None and self._rest.ends(optimizer):
            self._count_resting_step()

    def _count_resting_step(self) -> None:
        self.clock.step += 1
        self._seconds_resting += self._seconds_of_resting_step or 0.0
        if self.clock.step + 1 >= self._wakes_at:
            self._wake()

    # ---- optimizer steps

    def follows(self, optimizer: Optimizer) -> bool:
        """See StepListener."""
        if self._failed_rank_voter is not None:
            return bool(self._failed_rank_voter.slots(optimizer))
        try:
            answer = self._optimizer_registry.known_to_follow(optimizer)
        except Exception:  # comes again below, where it is contained and reported
            answer = None
        if answer is not None:
            return answer
        follows = False

        def ask() -> None:
            nonlocal follows
            follows = self._optimizer_registry.learn(optimizer)
            if not follows and self._by_hand.possible and self.clock.marked and holds_other_tensors(optimizer):
                self._events.alert(
                    "Optimizer without the model",
                    f"{type(optimizer).__name__} stepped, but nothing that it holds is a parameter of the watched "
                    "model, and none of it has a gradient.\nProbable cause: the optimizer owns other tensors than the "
                    "model, which was rebuilt or copied after the optimizer was made. Remedy: make the optimizer from "
                    "the parameters of the model that is trained, after the model is complete.",
                    self.clock.open_step,
                )

        self.boundary.run(ask)
        return follows

    def is_part_of(self, inner: Optimizer, outer: Optimizer) -> bool:
        """See StepListener."""
        slots = self._optimizer_registry.slots if self._failed_rank_voter is None else self._failed_rank_voter.slots
        return slots(inner) <= slots(outer)

    @contained
    def before_closure(self, optimizer: Optimizer) -> None:
        """See StepListener."""
        self._optimizer_found()
        self._commit(self.clock.step_begins(self._optimizer_registry.key(optimizer)))

    def before_step(self, optimizer: Optimizer, *, inside_backward: bool) -> None:
        """See StepListener."""
        if self.step_skipping is not None:
            self.step_skipping.has_voted = False
        self._before_step(optimizer, inside_backward)
        # From the step on in which the monitor fails, unless it has been heard in that one.
        if self._failed_rank_voter is not None and self.step_skipping is not None and not self.step_skipping.has_voted:
            self._failed_rank_voter.vote(optimizer)

    @contained
    def _before_step(self, optimizer: Optimizer, inside_backward: bool) -> None:
        self._optimizer_found()
        SCALES.note_step(optimizer)
        key = self._optimizer_registry.key(optimizer)
        if inside_backward:
            self._hooks.arm(current_graph_task())
        self._commit(self.clock.step_begins(key))
        if not inside_backward:
            self.deliver()
            if self._joins_silently(optimizer, key):
                self._joining = key
                if self.step_skipping is not None and (consensus := self._agreement_about(optimizer)) is not None:
                    self.step_skipping.abstain(consensus)
                return
        if self.clock.is_first and not self.clock.backwards and not inside_backward:
            self._begin_after_backward()
        self._loss.settle()
        if self._is_measured:
            self._sample.inspect(optimizer, inside_backward=inside_backward)
        self._sample.before_update(optimizer)
        self._wiring.about_to_step(key)
        if self.step_skipping is not None:  # last: what follows it up is the step, and then release()
            entries, consensus = self._optimizer_registry.entries(optimizer), self._agreement_about(optimizer)
            self.step_skipping.decide(
                optimizer, self.clock.open_step, entries, consensus, inside_backward=inside_backward
            )

    def _agreement_about(self, optimizer: Optimizer) -> RankConsensus | None:
        """How the ranks come to one decision about this optimizer's step; None where each decides for itself."""
        entries = self._optimizer_registry.entries(optimizer)
        function = self.step_skipping is not None and self.step_skipping.needs_rows
        return self._consensuses.of(entries, self.shards, self._registry.version, function=function)

    def _begin_after_backward(self) -> None:
        """The first step comes without a backward before it: watch() was called between the two."""
        entries = self._scan()
        self._sample.mark_present(entries)
        if not self._is_measured:  # else it will be: noted, they would be taken for what a backward has left
            self._sample.note(entries)

    @contained
    def after_step(self, optimizer: Optimizer, *, inside_backward: bool) -> None:
        """See StepListener."""
        if self.step_skipping is not None:
            self.step_skipping.release(optimizer)
        key = self._optimizer_registry.key(optimizer)
        if self._joining == key:
            self._joining = None
            self.clock.join(key)
            return
        self._sample.after_update(optimizer)
        self._wiring.stepped(optimizer, key)
        self._step_done(key, skipped=False, inside_backward=inside_backward)
        if not inside_backward and current_graph_task() == -1:
            self._rest_until_needed(optimizer)

    @contained
    def step_skipped(self, optimizer: Optimizer) -> None:
        """See ScaleListener."""
        if self._rest is not None:
            if self._rest.counts(optimizer):
                self._count_resting_step()
        elif self.follows(optimizer):
            self._optimizer_found()
            key = self._optimizer_registry.key(optimizer)
            self._commit(self.clock.step_begins(key))
            if self._joins_silently(optimizer, key):
                self.clock.join(key)
            else:
                self._step_done(key, skipped=True, inside_backward=False)

    def _joins_silently(self, optimizer: Optimizer, key: int) -> bool:
        """A late step belongs to the last sample, unless it brings gradients of its own.

        Gradients that nothing marked are leftovers of an optimizer that is known, or of one that steps for the first
        time after a sample that did not wait for it; else they may be new, from a backward whose hooks were blind.
        """
        if not self.clock.is_late(key):
            return False
        if self.clock.has_stepped(key):
            return True
        unseen = [
            slot
            for slot, p in self._optimizer_registry.entries(optimizer)
            if p.grad is not None and not was_seen(p.grad)
        ]
        return not unseen or (not self._schedule.was_sampled(self.clock.step) and self.clock.were_marked(unseen))

    def _step_done(self, key: int, *, skipped: bool, inside_backward: bool) -> None:
        self._commit(self.clock.step_ended(key, skipped=skipped, inside_backward=inside_backward))
        if current_graph_task() == -1:  # never deliver from within a tensor hook
            self.deliver()

    def look_closely(self) -> None:
        """Something unusual was sampled: sample the steps that follow, as far as the budget allows."""
        self._schedule.look_closely()

    def distrust_versions(self) -> None:
        """A gradient was modified without a trace: compare every sample by value from now on."""
        self._schedule.distrust_versions()

    # ---- loss scale

    @contained
    def before_unscale(self, optimizer: Optimizer) -> None:
        """See ScaleListener."""
        if self._is_measured and self.follows(optimizer):
            self._sample.before_unscale(optimizer)

    @contained
    def after_unscale(self, optimizer: Optimizer) -> None:
        """See ScaleListener."""
        if self._is_measured and self.follows(optimizer):
            self._sample.after_unscale(optimizer)

    # ---- torch's clipping

    def before_clipping(self, parameters: Sequence[Tensor]) -> None:
        """See ClipListener."""
        if self._is_measured and not self._muted and current_graph_task() == -1:
            self._before_clipping(parameters)

    @contained
    def _before_clipping(self, parameters: Sequence[Tensor]) -> None:
        if entries := self._watched_among(parameters):
            self._sample.before_clipping(entries)
        elif self._optimizer_registry.has_masters(parameters):
            self._sample.by_torch = True

    def after_clipping(self, parameters: Sequence[Tensor]) -> None:
        """See ClipListener."""
        if self._by_hand.possible and self._is_measured and not self._muted and current_graph_task() == -1:
            self._after_clipping(parameters)

    @contained
    def _after_clipping(self, parameters: Sequence[Tensor]) -> None:
        self._sample.after_clipping(self._watched_among(parameters))

    def _watched_among(self, parameters: Sequence[Tensor]) -> list[Entry]:
        slot_of_id = self._registry.slot_of_id
        return [(slot, one) for one in parameters if (slot := slot_of_id.get(id(one))) is not None]

    # ---- the loss

    @contained
    def take_loss(self, value: Tensor, *, is_share: bool) -> None:
        """The user, or a framework, hands over the loss of the update that is being made."""
        if self._schedule.is_sampled:
            self._loss.add(value, is_share=is_share)

    # ---- updates without an optimizer

    def _optimizer_found(self) -> None:
        """An optimizer is the clock: what looked like updates by hand before it was not."""
        if self._by_hand.possible and (taken_back := self._by_hand.exclude()):
            self.clock.take_back(taken_back)
            self._window.forget_sent()
            self._schedule.begin_window()
            self._schedule.take_back(taken_back)

    def _close_update_by_hand(self, entries: Sequence[Entry] = ()) -> None:
        """Args: entries: whose gradients are still there as the update has used them."""
        self._sample.updated_by_hand(entries)
        is_proof = self._by_hand.count()
        self._commit(self.clock.update())
        if is_proof and not self._by_hand.inside_backward:
            self._say_by_hand()

    def _say_by_hand(self) -> None:
        self._events.notice(
            "no optimizer",
            "no optimizer step was seen that updates a watched parameter, so every backward after which the gradients "
            "were reset counts as a step; pass optimizer= if there is one, or call watcher.mark_step() after each "
            "update",
        )

    def state_dict(self) -> dict[str, Any]:
        """What was learnt, in plain numbers."""
        return {"step": self.clock.step} | self._schedule.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state_dict()`."""
        self._wake()
        self.clock.step = int(state["step"])
        self._schedule.load_state_dict(state)

    def mark_step(self) -> None:
        """The user says that an update has been made."""
        self._wake()
        self._optimizer_found()
        self._sample.updated_by_hand(self._registry.scan())
        self._commit(self.clock.update())

    # ---- the end of a sample

    def end_sample(self, *, final: bool = False) -> None:
        """Close the open sample, if it has had a step, or an update by hand.

        Args:
            final: nothing comes any more: without any optimizer the last backward was for an update by hand.
        """
        if closed := self.clock.close():
            self._commit(closed)
        elif self._by_hand.possible and self.clock.backwards and (final or self._by_hand.has_updated()):
            self._close_update_by_hand(self._registry.scan())
            if self._by_hand.settle():
                self._say_by_hand()
        elif self.clock.backwards:
            self._leave_out_what_was_reset()
        elif final and self._by_hand.withholds:
            self._by_hand.settle()

    def _leave_out_what_was_reset(self) -> None:
        """Gradients are reset that no optimizer has used: perhaps the user's loop leaves the step out.

        Whether they were finite is known when their rows arrive. If they were, it was another use of a backward (SAM).
        """
        if not self._is_measured or self._by_hand.possible or not self._sample.were_reset():
            return
        if self._schedule.is_sampled:
            self._window.commit(
                Sample(self.clock.open_step, skipped=True, updated=(), left_out=True), self._loss.take()
            )
        else:
            self._window.discard()
        self._sample.forget_gradients()
        self._sample.was_reset = True

    def _commit(self, closed: Closed | None) -> None:
        if closed is None:
            return
        self._regularity.add(closed.stepped, inside_backward=closed.inside_backward)
        if self.step_skipping is not None:
            self.step_skipping.end_step(closed.step)
        if self._schedule.was_sampled(closed.step):
            self._window_commit(closed)
        elif self.step_skipping is not None:
            self._window.discard()
            self._seconds_between += self.boundary.seconds_spent - self._seconds_at_commit
        self._seconds_at_commit = self.boundary.seconds_spent
        if self._schedule.window_is_full(closed.step):
            self.flush_window()
            self._schedule.end_window(must_agree=self.shards.any)
        self._loss.forget()
        self._sample.begin()

    def _window_commit(self, closed: Closed) -> None:
        updated = tuple(tuple(sorted(self.clock.owned.get(key, ()))) for key in sorted(closed.stepped))
        self._sample.keep_only(updated)
        if closed.stepped:
            self._wiring.sample_closed(closed.marked, self.clock.owner)
        found = self._probes.take() | self._wiring.take() | self._loss.take()
        if self.step_skipping is not None:
            found[keys.NUM_GUARDED_STEPS] = self.step_skipping.take_count()
            found[keys.GUARDED] = self.step_skipping.last_withheld
        sample, every = self._sample, self._schedule.steps_since_sample(closed.step)
        of_host = Sample(closed.step, closed.skipped, updated, sample.compared, sample.by_torch, sample.eps, every)
        self._window.commit(of_host, found)
        spent = self.seconds_spent - self._seconds_between
        self._schedule.add_sample(closed.step, skipped=closed.skipped, now=time.perf_counter(), seconds_spent=spent)

    def parts(self) -> dict[str, list[int]]:
        """See OptimizerRegistry."""
        return self._optimizer_registry.parts()

    def trainable(self) -> tuple[bool, ...]:
        """See OptimizerRegistry."""
        return self._optimizer_registry.trainable()

    @property
    def seconds_spent(self) -> float:
        """All the time that watching has taken so far: of the host or of a device, whichever took longer.

        They work side by side: what the host does while the device is busy is not the training's loss, and the other
        way round.
        """
        host = self.boundary.seconds_spent + self._probes.seconds_spent + self._seconds_resting
        return max(host, self._timer.seconds())

    def flush_window(self) -> None:
        """End the window after the last committed sample."""
        self._window.flush()
        self._schedule.begin_window()

    def deliver(self) -> None:
        """Hand over what has arrived, unless it may turn out not to be samples."""
        if not self._by_hand.withholds:
            self._events.deliver()
