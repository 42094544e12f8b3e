"""Backwards of the watched models: closes the sample before each, and measures its gradients when it has returned."""

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor

from .._boundary import Call, entry_point
from .._engines.find import engine_since_watch
from .._runtime.autograd import current_graph_task
from .._runtime.backwards import root_of
from .._runtime.error_boundary import contained
from .._runtime.listeners import Listener, StepCounter
from .._runtime.notices import CannotWatchError
from .._runtime.pipelining import divisor_of, stages_of
from .._runtime.sharding import world_size
from .._runtime.steps import STEP_HOOKS
from .commits import Commits
from .gradient_versions import were_reset
from .hooks import NO_SLOT
from .open_sample import OpenSample
from .parts import CaptureParts
from .rest import Rest


class BackwardEvents(Listener):
    """Follows the backwards of one watcher's models. `deliver` passes on what has arrived.

    That a backward reaches a watched model is known only from its hooks, and that gradients were reset before it only
    from a look before it begins. So what precedes a backward is settled with the first gradient that is looked at:
    inside it, if an optimizer steps there, otherwise when it has returned.
    """

    def __init__(
        self, parts: CaptureParts, sample: OpenSample, commits: Commits, rest: Rest, deliver: Callable[[], None]
    ) -> None:
        self._parts, self._sample, self._commits, self._rest, self._deliver = parts, sample, commits, rest, deliver
        self._clock, self._boundary = parts.clock, parts.boundary
        self._is_running = self._is_settled = False  # running: or it has raised
        # How often each gradient of the open sample had been written to when the backward began; None: not seen
        self._writes: dict[int, int] | None = None
        self._inside_schedule = False  # whether a pipeline schedule runs, whose backwards are parts of one

    @property
    def counter(self) -> StepCounter | None:
        """The rest, while nothing else is to be done."""
        return self._rest.counter

    @entry_point()
    def backward_begins(self) -> None:
        if self._parts.hooks.muted:
            self._sample.received.closure_runs_again()
        elif self._parts.thread.is_here and not self._inside_schedule:
            self._begin()

    def _begin(self) -> None:
        if not self._is_running:
            self.gradients_are_used()
        self._parts.hooks.take_reached()
        self._is_running, self._is_settled, self._writes = True, False, {}
        if self._clock.backwards or self._parts.wiring.is_carrying:
            self._look_before()

    @contained
    def _look_before(self) -> None:
        self._parts.wiring.backward_begins()
        if self._clock.backwards and self._parts.seen.states:
            self._writes = self._parts.seen.writes(self._parts.registry.scan())

    @entry_point()
    def backward_ended(self, call: Call) -> None:
        thread = self._parts.thread
        if self._inside_schedule:
            self._see_loss(root_of(call), self._parts.hooks.reached)
        elif thread.is_here or not thread.runs_backward():
            self._is_running = False
            if not thread.is_here:  # it was not seen to begin
                self._is_settled, self._writes = False, None
            if self._parts.hooks.reached:
                self._complete(root_of(call))

    @contained
    def schedule_begins(self, schedule: Any) -> None:
        in_stages = {id(parameter) for stage in stages_of(schedule) for parameter in stage.parameters()}
        if self.counter is None and not in_stages.isdisjoint(self._parts.registry.slot_of_id):
            if self._parts.guard is not None and world_size() > 1:
                self._parts.guard.refuse_parts()
            self._begin()
            self._inside_schedule = True

    @contained
    def schedule_ended(self, schedule: Any) -> None:
        if self._inside_schedule:
            self._inside_schedule = self._is_running = False
            self._parts.loss.rescale(torch.tensor(1 / divisor_of(schedule), dtype=torch.float64))
            self._complete(None, of_schedule=True)

    @contained
    def engine_has_averaged(self) -> None:
        """An engine has the gradients of an update, in memory of its own: its backwards call no hook."""
        self._begin()
        self._is_running = False
        # The update uses every gradient that is there, also one of zeros that no backward has reached.
        self._parts.hooks.reached.update(slot for slot, p in self._parts.registry.scan() if p.grad is not None)
        self._complete(None)

    @contained
    def arrived(self, slot: int, parameter: Tensor) -> None:
        """A gradient is in place, before other hooks may take it away."""
        parts = self._parts
        if parts.updates.in_hooks or parts.probes.look_inside:
            self._settle(frozenset())
            parts.clock.marked.add(slot)
            if parts.is_measured:
                self._sample.fresh.measure_arrived(slot, parameter)

    def gradients_are_used(self) -> None:
        """Gradients are clipped, unscaled, used or read: look at those that no backward has handed over yet."""
        if not self._parts.hooks.reached or self._inside_schedule:
            return
        if current_graph_task() != -1:  # an optimizer that is fused into the backward
            self._settle(frozenset())
        elif not self._parts.thread.is_another:
            if not (self._is_running or self._parts.shards.any):  # it has not raised, nor does FSDP reduce by itself
                self._parts.notices.say(
                    "backward not seen",
                    "a backward of the watched model was not called as torch.autograd.backward or loss.backward(), but "
                    "perhaps by a name that was imported before watch(): its gradients are measured when they are "
                    "clipped or used, and its loss is not. Call torch.autograd.backward, or import it after watch().",
                )
            self._is_running, self._is_settled, self._writes = False, False, None
            self._complete(None)

    def _settle(self, reached: frozenset[int]) -> None:
        """Close what precedes the backward, once. `reached`: the slots that it has reached, if it has returned."""
        if self._is_settled:
            return
        self._is_settled, clock, parts = True, self._clock, self._parts
        is_first = not (clock.num_closed or clock.backwards)
        if is_first and (why := engine_since_watch(parts.registry.models())) is not None:
            raise CannotWatchError(why)  # the engine was set up since watch()
        STEP_HOOKS.drop_raised()  # a step that raised must not keep the hooks muted
        parts.thread.moves_here()
        self._commits.commit(clock.backward_begins())
        writes = self._writes if clock.backwards else None
        if not writes:
            return
        if not parts.updates.by_steps:
            writes = {slot: number for slot, number in writes.items() if slot in reached}
        if not were_reset(writes.values()):
            return
        if parts.wiring.has_stale_optimizer:  # its steps are meant to be the updates
            parts.updates.step_seen()
        if parts.updates.by_steps or not parts.updates.are_made_by_code():
            self._sample.leave_out()
            parts.wiring.were_reset()
        else:
            self._commits.updated_unseen()

    @contained
    def _see_loss(self, root: Tensor | None, reached: Collection[int]) -> None:
        """Add the loss that a backward was called on, which has reached these slots."""
        parts, loss, scale = self._parts, self._parts.loss, self._parts.loss_scale
        parts.settle()
        scale.forget()
        if parts.rows_are_read and root is not None:
            parts.forward_facts.see_loss(root)
            loss.see(root, scale.of_backward(root.device, reached), of_all=scale.is_given)

    @contained
    def _complete(self, root: Tensor | None, *, of_schedule: bool = False) -> None:
        """Measure the gradients of a backward that has returned, or of all backwards of a pipeline schedule.

        `root`: the tensor that the backward was called on; None if it is unknown, or its loss is already added.
        """
        parts, updates = self._parts, self._parts.updates
        reached = parts.hooks.take_reached()
        self._settle(reached)
        self._clock.marked |= reached - {NO_SLOT}
        was_in_hooks = updates.in_hooks
        is_update = not parts.shards.uses_fsdp1 and updates.were_made_inside(reached, self._clock.open_step)
        is_first_in_hooks = updates.in_hooks and not was_in_hooks
        if is_first_in_hooks:
            parts.hooks.tell_arrivals(parts.registry.scan())
        if not of_schedule:
            self._see_loss(root, reached)
        if parts.is_measured and not is_first_in_hooks:  # there most gradients are gone already
            # Every backward may be the last before the step: the last group of micro-batches may be shorter.
            self._sample.measure_backward(parts.follow(), of_schedule=of_schedule)
        elif not (updates.by_steps and self._clock.num_closed):
            parts.seen.note(parts.registry.scan())
        self._commits.commit(self._clock.backward_ended())
        if is_update:
            self._commits.updated_unseen()
        parts.wiring.backward_ended(has_begun=self._writes is not None)
        self._deliver()
