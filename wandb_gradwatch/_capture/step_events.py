"""Steps of optimizers: measures what each receives, and closes the sample that is complete with it."""

from collections.abc import Callable
from functools import partial

from torch.optim import Optimizer

from .._boundary import entry_point
from .._engines.shadow import EngineStep
from .._guard.step_skipping import StepSkipping
from .._runtime.autograd import current_graph_task, num_nodes_made
from .._runtime.error_boundary import ErrorBoundary, contained
from .._runtime.listeners import Listener, StepCounter
from .._runtime.sharding import world_size
from .._runtime.steps import is_torchs, parameters_of
from .backward_events import BackwardEvents
from .commits import Commits
from .open_sample import OpenSample
from .parts import CaptureParts
from .probes import Probe
from .rest import Rest
from .scaling import SCALERS


class StepEvents(Listener):
    """Follows the optimizers that update watched parameters."""

    def __init__(
        self,
        parts: CaptureParts,
        sample: OpenSample,
        commits: Commits,
        rest: Rest,
        backwards: BackwardEvents,
        deliver: Callable[[], None],
    ) -> None:
        self._parts, self._sample, self._commits, self._rest, self._deliver = parts, sample, commits, rest, deliver
        self._backwards, self._clock = backwards, parts.clock
        self._boundary: ErrorBoundary = parts.boundary
        self._joining: int | None = None  # the key of an optimizer that steps late, as a part of the last sample
        self._has_outer = False  # whether an outer optimizer has stepped

    @property
    def counter(self) -> StepCounter | None:
        """The rest, while steps are only counted."""
        return self._rest.counter

    @entry_point()
    def end_counting(self, *, before_step: bool = False) -> None:
        self._rest.end(before_step=before_step)

    @entry_point()
    def mute(self, muted: bool) -> None:
        self._parts.hooks.muted += 1 if muted else -1

    @entry_point(lambda: False)
    def follows(self, optimizer: Optimizer) -> bool:
        answer = self._parts.optimizers.known_to_follow(optimizer)
        if answer is None:
            answer = bool(self._boundary.run(self._learn, optimizer))
        if not (answer or self._clock.num_closed) and self._parts.wiring.stepped_elsewhere():
            self._boundary.run(self._deliver)
        return answer

    def _learn(self, optimizer: Optimizer) -> bool:
        parts, optimizers = self._parts, self._parts.optimizers
        num_known = optimizers.num_known
        follows = optimizers.learn(optimizer)
        has_lost_all = num_known and not optimizers.num_known
        if follows:
            parts.thread.moves_here()
        if follows or has_lost_all:
            self._rest.end(before_step=True)
            parts.follow()
        if has_lost_all or (not (follows or parts.updates.by_steps) and self._clock.marked):
            parts.wiring.stepped_without_the_model(optimizer)
        return follows

    @entry_point(lambda: False)
    def updates(self, optimizer: Optimizer) -> bool:
        return not self._parts.registry.slot_of_id.keys().isdisjoint(map(id, parameters_of(optimizer)))

    @contained
    def steps_replayed(self, number: int) -> None:
        parts, clock, commits = self._parts, self._clock, self._commits
        parts.notices.say(
            "captured step",
            "a CUDA graph replays the optimizer's step, without any Python: such steps are counted, but they are not "
            "measured, and guard= cannot skip them. To have them measured, capture the forward and the backward only, "
            "and call optimizer.step() after each replay.",
        )
        parts.updates.step_seen()
        self._rest.end()
        commits.commit(clock.close())
        if clock.backwards:  # only the optimizer's step is in the graph: its gradients were measured
            commits.commit(clock.update())
            number -= 1
        parts.hooks.take_reached()  # what the captured backward has reached
        for _ in range(number):
            clock.step += 1
            if parts.schedule.window_is_full(clock.step):
                commits.flush_window(is_full=True)
        self._sample.begin()
        self._deliver()

    @entry_point(lambda: False)
    def is_part_of(self, inner: Optimizer, outer: Optimizer) -> bool:
        return self._parts.optimizers.slots(inner) <= self._parts.optimizers.slots(outer)

    @contained
    def before_closure(self, optimizer: Optimizer) -> None:
        self._backwards.gradients_are_used()
        self._parts.updates.step_seen()
        self._commits.commit(self._clock.step_begins(self._parts.optimizers.key(optimizer)))

    @contained
    def before_step(self, optimizer: Optimizer, *, inside_backward: bool) -> None:
        parts, clock = self._parts, self._clock
        parts.updates.step_seen()
        self._backwards.gradients_are_used()
        SCALERS.steps_of(optimizer).begin()
        key = parts.optimizers.key(optimizer)
        self._commits.commit(clock.step_begins(key))
        if not inside_backward:
            parts.thread.moves_here()
        if parts.replay is not None:
            parts.replay.before_step(clock.open_step, optimizer)
        if not inside_backward:
            self._deliver()
            if clock.is_late(key) and (self._is_outer(key) or parts.joins_silently(optimizer, key)):
                self._joining = key
                return
        if not clock.num_closed and not clock.backwards and not inside_backward:
            entries = parts.follow()  # watch() was called between the backward and the step
            self._sample.fresh.mark_present(entries)
            if not parts.is_measured:  # a measured step must not take them for what a backward has left
                parts.seen.note(entries)
        parts.settle()
        if parts.is_measured and clock.backwards == 1 and not inside_backward:
            entries = parts.optimizers.entries(optimizer)
            if not parts.updates.in_hooks and self._sample.fresh.were_taken_away(entries):
                parts.updates.made_before_step(clock.open_step)
                parts.window.clear(sorted(parts.seen.states))  # at most one gradient of many
                parts.hooks.tell_arrivals(parts.registry.scan())
        if parts.is_measured and not isinstance(optimizer, EngineStep):
            received = self._sample.received
            received.inspect(optimizer, inside_backward=inside_backward)
            received.step_begins(optimizer, changes_gradients=not is_torchs(type(optimizer).step))
        self._sample.before_update(optimizer)
        parts.wiring.about_to_step(key)

    @contained
    def before_inner_step(self, optimizer: Optimizer, *, is_torchs: bool) -> None:
        if self._parts.is_measured and self._joining is None:
            self._sample.received.inspect_inner(optimizer)
            self._sample.received.step_begins(optimizer, changes_gradients=not is_torchs)

    def _is_outer(self, key: int) -> bool:
        """Whether an optimizer steps without a backward after others have updated all its parameters, as in local SGD.

        Its gradients are differences of parameters: in one series with true gradients they would look like a fault.
        """
        is_outer = self._clock.were_just_updated(key)
        if is_outer and not self._has_outer:
            self._has_outer = True
            of_rank = " The other gradients are those of this rank: metrics=[Ranks()] compares the ranks."
            self._parts.notices.say(
                "outer step",
                "an optimizer steps without a backward, on parameters that another one has just updated, as the outer "
                "optimizer of local SGD does: its steps are not counted, and its gradients are not in the series."
                f"{of_rank if world_size() > 1 else ''}",
            )
        return is_outer

    @entry_point()
    def guard_step(self, optimizer: Optimizer, *, inside_backward: bool) -> None:
        if (guard := self._parts.guard) is not None:
            guard.vote(optimizer, partial(self._decide, guard, optimizer, inside_backward))

    @contained
    def _decide(self, guard: StepSkipping, optimizer: Optimizer, inside_backward: bool) -> None:
        entries, version = self._parts.optimizers.entries(optimizer), self._parts.registry.version
        if self._joining == self._parts.optimizers.key(optimizer):
            guard.abstain(entries, version)
        else:
            step, found = self._clock.open_step, self._sample.so_far() if guard.needs_rows else {}
            guard.decide(optimizer, step, entries, version, inside_backward=inside_backward, found=found)

    @entry_point()
    def after_step(self, optimizer: Optimizer, *, inside_backward: bool) -> None:
        if self._parts.guard is not None:
            self._parts.guard.release(optimizer)
        self._after_step(optimizer, inside_backward)

    @contained
    def _after_step(self, optimizer: Optimizer, inside_backward: bool) -> None:
        parts = self._parts
        if SCALERS.last_used is not None:
            SCALERS.steps_of(optimizer).is_scalers = False
        key = parts.optimizers.key(optimizer)
        if self._joining == key:
            self._joining = None
            self._clock.join(key)
            return
        outcome = None
        if isinstance(optimizer, EngineStep):
            outcome = optimizer.outcome
            if parts.is_measured:
                self._sample.received.engine_stepped(optimizer)
        elif parts.is_measured:
            self._sample.received.step_ended(optimizer)
        if parts.probes.active:
            self._sample.tell_of_update(Probe.after_update, optimizer)
        parts.wiring.stepped(optimizer, key)
        parts.last_node = num_nodes_made()
        is_skipped = outcome is not None and outcome.is_skipped
        self._step_done(key, skipped=is_skipped, inside_backward=inside_backward)
        if not inside_backward and current_graph_task() == -1 and self._rest.is_worth_it():
            self._commits.commit(self._clock.close())  # as the next backward would
            self._rest.begin(optimizer)

    @contained
    def step_skipped(self, optimizer: Optimizer) -> None:
        parts = self._parts
        if self._rest.is_on:
            if self._rest.skips(optimizer):
                self._rest.end()
            return
        parts.updates.step_seen()
        if parts.replay is not None:
            parts.replay.step_skipped(self._clock.open_step)
        key = parts.optimizers.key(optimizer)
        self._commits.commit(self._clock.step_begins(key))
        parts.settle()
        if self._clock.is_late(key) and parts.joins_silently(optimizer, key):
            self._clock.join(key)
        else:
            self._step_done(key, skipped=True, inside_backward=False)

    def _step_done(self, key: int, *, skipped: bool, inside_backward: bool) -> None:
        self._commits.commit(self._clock.step_ended(key, skipped=skipped, inside_backward=inside_backward))
        if current_graph_task() == -1:  # never deliver from within a tensor hook
            self._deliver()
