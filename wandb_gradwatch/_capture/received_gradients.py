"""Measures the gradients of the open sample as the optimizer receives them: what has changed since the backward."""

from collections.abc import Sequence

from torch import Tensor
from torch.optim import Optimizer

from .._engines.shadow import EngineStep
from .._runtime.autograd import Entry
from .._runtime.sharding import world_size
from .clipping import Clipping
from .fresh_gradients import FreshGradients
from .gradient_versions import Inspection
from .measurer import Measurer
from .parts import CaptureParts


class ReceivedGradients:
    """Compares the gradients that an update uses with the measured ones."""

    def __init__(self, parts: CaptureParts, measurer: Measurer, fresh: FreshGradients, clipping: Clipping) -> None:
        self._parts, self._measurer, self._fresh, self._clipping = parts, measurer, fresh, clipping
        self._being_unscaled = Inspection()
        self.forget()

    def forget(self) -> None:
        """Forget the gradients looked at so far."""
        self.compared: tuple[int, ...] = ()  # slots whose gradients looked unmodified but were compared by value

    def inspect(self, optimizer: Optimizer, *, inside_backward: bool) -> None:
        """Compare the gradients that the optimizer is about to use with the measured ones; measure new ones."""
        parts = self._parts
        found = parts.seen.inspect(parts.optimizers.entries(optimizer), inside_backward=inside_backward)
        if inside_backward:
            parts.clock.marked.update(slot for slot, _ in found.late)
        self._measurer.correct_scale(optimizer)
        masters = parts.optimizers.masters(optimizer)
        if found.gone and masters is None and not inside_backward:  # there an earlier step has used them
            self._drop(found)
        if found.late:
            self._measurer.measure(found.late)
        if found.unclear:
            _, unclear = self._fresh.measure_assigned(found.unclear, optimizer)
            if unclear:
                self._fresh.measure_unclear(unclear, optimizer)
        if replaced := self._fresh.take_replaced(found):
            self._measurer.measure(replaced, received_by=optimizer)
        self._measure(found, optimizer, masters)
        found_inf = getattr(optimizer, "found_inf", None)  # set by a scaler if the optimizer itself skips the step
        if found_inf is not None:
            parts.window.set_found_inf(found_inf)

    def inspect_inner(self, optimizer: Optimizer) -> None:
        """Measure again what a step has changed before it delegates to this optimizer.

        A step may reduce gradients over ranks and clip them. Reduced gradients are measured like new ones, but what
        torch's functions have clipped is only received. Whether other changes with several ranks are clipping is known
        when the rows arrive; in a single process, changes inside the step are like those between backward and step.
        """
        parts, clipped = self._parts, self._clipping.slots
        found = parts.seen.inspect(parts.optimizers.entries(optimizer), inside_backward=False)
        reduced = [entry for entry in found.changed if entry[0] not in clipped] if world_size() > 1 else []
        if reduced and parts.rows_are_read:
            parts.window.put_earlier(sorted(slot for slot, _ in reduced))
            self._measurer.measure(reduced, received_by=optimizer)
            self._measurer.note_precision(p.grad for _, p in reduced if p.grad is not None)
            found.changed = [entry for entry in found.changed if entry[0] in clipped]
        self._measure(found, optimizer, parts.optimizers.masters(optimizer))

    def _measure(self, found: Inspection, optimizer: Optimizer, masters: list[Entry] | None) -> None:
        parts, modified = self._parts, found.changed
        if masters is not None:
            slots = parts.optimizers.slots(optimizer).intersection(parts.seen.states)
            modified = [(slot, master) for slot, master in masters if slot in slots and master.grad is not None]
            if hidden := sorted(slots.difference(slot for slot, _ in modified)):
                parts.window.hide_received(hidden)
        elif compared := parts.schedule.comparisons.among(found.unchanged):
            self.compared += tuple(slot for slot, _ in compared)
            whole = parts.rows_are_read and not parts.schedule.comparisons.trusts_versions
            self._measurer.measure_received(compared, optimizer, whole=whole)
        if modified:
            self._measurer.measure_received(modified, optimizer, whole=parts.rows_are_read)

    def _drop(self, found: Inspection) -> None:
        """Record that these gradients are None by now. Rows with NaN or Inf stay: a loop may drop bad gradients.

        If none is left at all, other rows stay until they arrive, as those of gradients that were set to 0.
        """
        if self._parts.updates.in_hooks:  # hooks of others have used them
            self._parts.window.hide_received(sorted(found.gone))
            return
        self._parts.window.receive_nothing(found.gone)
        if found.late or found.changed or found.unclear or found.unchanged:
            self._parts.window.drop_finite_rows(found.gone)

    def step_begins(self, optimizer: Optimizer, *, changes_gradients: bool) -> None:
        """Note the gradients with which a step begins, if it may change them unseen before it uses them."""
        used = self._clipping.used
        if not (changes_gradients or used.states):  # the usual case: torch's optimizers
            return
        entries = self._parts.optimizers.entries(optimizer)
        used.forget([slot for slot, _ in entries])
        if changes_gradients:
            used.note(entries)

    def closure_runs_again(self) -> None:
        """A closure is evaluated again inside the step: later changes of the gradients tell nothing about the first."""
        self._clipping.used.clear()

    def engine_stepped(self, step: EngineStep) -> None:
        """Record what an engine has made of the gradients in the step that has just ended."""
        slots = sorted(self._parts.optimizers.slots(step).intersection(self._parts.seen.states))
        if not slots or (step.outcome is not None and step.outcome.is_skipped):
            return
        factor = None if step.outcome is None else step.outcome.factor
        if factor is None:  # the engine does not tell, or its step has raised
            self._parts.window.hide_received(slots)
        elif isinstance(factor, Tensor) or factor != 1:
            self._parts.window.multiply_received(slots, factor)

    def step_ended(self, optimizer: Optimizer) -> None:
        """Mark as unknown what the step has received, where it has changed gradients unseen."""
        used = self._clipping.used
        if not used.states:
            return
        parts, entries = self._parts, self._parts.optimizers.entries(optimizer)
        writes, here = used.writes(entries), {slot for slot, p in entries if p.grad is not None}
        used.clear()
        if changed := sorted(slot for slot, number in writes.items() if number and slot in here):
            parts.window.hide_received(changed)
            parts.notices.say(
                "changed inside the step",
                f"{type(optimizer).__name__}.step() changes gradients ({parts.registry.some_names(changed)}) before or "
                f"after it uses them, first in step {parts.clock.open_step}: what the update has used cannot be seen, "
                "so grad_norm_clipped and clip_ratio are missing. They are known if the class clips with torch's "
                "functions, or changes the gradients before it calls the step of one of torch's optimizers.",
            )

    def before_unscale(self, optimizer: Optimizer) -> None:
        """Measure what was not measured before a scaler divides this optimizer's gradients in place."""
        parts = self._parts
        found = parts.seen.inspect(parts.optimizers.entries(optimizer), inside_backward=False)
        if found.late:
            self._measurer.measure(found.late)
        if found.unclear:
            found.late += self._fresh.measure_assigned(found.unclear, None)[0]
        if replaced := self._fresh.take_replaced(found):
            self._measurer.measure(replaced)
            found.late += replaced
        self._being_unscaled = found

    def after_unscale(self, optimizer: Optimizer) -> None:
        """Remember the versions of the divided gradients: only their unit has changed."""
        found, self._being_unscaled = self._being_unscaled, Inspection()
        if found.changed:  # modified before unscaling; the step may be skipped, so measure them now
            self._measurer.measure_received(found.changed, optimizer, whole=self._parts.rows_are_read)
        measured = found.late + found.unchanged + found.changed
        there = [(slot, parameter.grad) for slot, parameter in measured if parameter.grad is not None]
        self._parts.seen.remember([slot for slot, _ in there], [gradient for _, gradient in there])
        self._clipping.unscaled.update(slot for slot, _ in there)

    def updated_by_hand(self, entries: Sequence[Entry]) -> None:
        """Measure the received gradients of an update without an optimizer, which these entries still have.

        For other measured parameters the received gradients are missing, because they were not seen.
        """
        parts = self._parts
        unseen = [(slot, p) for slot, p in entries if p.grad is not None and slot not in parts.seen.states]
        self._fresh.measure_assigned(unseen, None)
        measured = set(parts.seen.states)
        found = parts.seen.inspect((e for e in entries if e[0] in measured), inside_backward=False)
        if found.changed:
            self._measurer.measure_received(found.changed, None, whole=True)
        known = self._clipping.received.union(slot for slot, _ in found.changed + found.unchanged)
        if unknown := sorted(measured - known):
            parts.window.hide_received(unknown)
