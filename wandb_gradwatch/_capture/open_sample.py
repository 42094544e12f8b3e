"""Measures the open sample: each gradient as the backward left it, and as the optimizer received it."""

import math
from collections.abc import Callable, Iterable, Sequence

from torch import Tensor
from torch.optim import Optimizer

from .._engines.shadow import EngineStep
from .._runtime.autograd import Entry, current_graph_task
from .._runtime.error_boundary import contained
from .._runtime.sharding import world_size
from .._transfer.transfers import Sample
from ..snapshot import keys
from .clock import Closed
from .gradient_versions import REPLACED, GradientVersions, Inspection, is_new, look_at, were_reset
from .loss import Number
from .measurer import Measurer
from .optimizer_registry import learning_rate_of
from .parts import CaptureParts
from .probes import Probe, WatchedTensor
from .scaling import SCALERS


class OpenSample:
    """Measures the gradients of the open sample at the right moments, and commits the sample when it is closed."""

    def __init__(self, parts: CaptureParts, measurer: Measurer) -> None:
        self._parts = parts
        self._measurer = measurer
        self._boundary = parts.boundary
        self._being_unscaled = Inspection()
        self._forget_gradients()
        self.was_reset = False  # whether gradients of earlier backwards were reset without a step
        self.is_inferred = False  # whether its update is only inferred from a reset of the gradients
        self._learning_rate = math.nan  # the largest among the optimizers that step in this sample

    def begin(self) -> None:
        """Open a new sample."""
        self._parts.schedule.open()
        self._forget_gradients()
        self.was_reset, self.is_inferred, self._learning_rate = False, False, math.nan
        self._parts.forward_facts.begin(is_sampled=self._parts.schedule.is_sampled)
        self._parts.group_facts.forget()
        if self._parts.probes.active:
            self._parts.probes.tell(Probe.start, self._parts.schedule.is_sampled, self._parts.schedule.has_histogram)

    def _forget_gradients(self) -> None:
        """Forget the gradients measured so far; what probes measured in the forward stays in the sample."""
        self._measurer.eps = 0.0
        self._parts.seen.clear()
        self._parts.loss_scale.assumed.clear()
        self._parts.loss_scale.forget()
        self._presumed: set[int] = set()  # slots marked only because a gradient is present, by no hook
        # Slots whose gradients looked unmodified but were compared by value: at the step, and before torch's clipping.
        self._compared: tuple[int, ...] = ()
        self._compared_early: tuple[int, ...] = ()
        self._unscaled: set[int] = set()  # slots whose gradients a scaler has divided
        self._used = GradientVersions()  # the gradients that the running step will use, if it may change them itself
        self._clipped: set[int] = set()  # slots whose gradients torch's functions clip or have clipped
        self._received: set[int] = set()  # slots whose gradients after clipping are known, for an update by hand
        self.by_torch = False  # whether one of torch's functions has clipped

    def measure_present(self, entries: Iterable[Entry]) -> None:
        """Measure every gradient that is present, marked or not: hooks of swapped tensors may not have marked it."""
        present = [entry for entry in entries if entry[1].grad is not None]
        self._clipped, self._received, self.by_torch = set(), set(), False  # those were of an earlier backward
        self._measurer.measure(present)
        self._drop_zeros_among(present)

    @contained
    def gradient_arrived(self, slot: int, parameter: Tensor) -> None:
        """Measure a parameter's gradient inside the backward, before other hooks use it."""
        parts, gradient = self._parts, parameter.grad
        if gradient is None:
            return
        if parts.by_hand.inside_backward:
            self.measure_present([(slot, parameter)])
        if parts.probes.look_inside and parts.schedule.is_sampled and parts.shards.is_whole(parameter):
            parts.probes.tell(Probe.gradient_arrived, parts.registry.names[slot], gradient.detach())

    def measure_unmarked(self, entries: Sequence[Entry]) -> None:
        """Measure the gradients of backwards that no hook has seen.

        Parameters that had no gradient in the last sample count as reached if their gradient is not 0.
        """
        clock = self._parts.clock
        clock.marked |= {slot for slot, p in entries if p.grad is not None and slot in clock.marked_before}
        self.measure_present(entries)
        self.mark_present(entries)

    def _drop_zeros_among(self, entries: Sequence[Entry]) -> None:
        """Drop the rows of unmarked gradients that are 0: zero_grad(set_to_none=False) has left them."""
        if unmarked := sorted(slot for slot, _ in self._parts.unmarked(entries)):
            self._parts.window.drop_zero_rows(unmarked)

    @contained
    def before_clipping(self, parameters: Sequence[Tensor]) -> None:
        """Measure gradients that were modified since the backward: their values now are those before clipping."""
        parts, entries = self._parts, self._clipped_among(parameters)
        self.by_torch |= bool(entries) or (self._is_clipped_here and parts.optimizers.has_masters(parameters))
        if not entries:
            return
        found = parts.seen.inspect(entries, inside_backward=False)
        if found.late:
            self._measurer.measure(found.late)
        compared = parts.schedule.compared(found.unchanged)  # a write through `.data` shows only in the values
        found.changed += compared
        self._compared_early += tuple(slot for slot, _ in compared if slot not in self._clipped)
        found.changed, unclear = ([e for e in of if e[0] not in self._clipped] for of in (found.changed, found.unclear))
        self._clipped.update(slot for slot, parameter in entries if parameter.grad is not None)
        if not parts.rows_are_read or not (found.changed or unclear):
            return
        if unclear and not parts.clock.backwards:  # the gradients were assigned by hand
            self.mark_present(parts.follow())
        again = self._take_replaced(found) + unclear
        if found.changed:
            parts.window.put_earlier(sorted(slot for slot, _ in found.changed))
            again += found.changed
        any_scaler = SCALERS.scaler_of(None) is not None
        true = [entry for entry in again if not any_scaler or entry[0] in self._unscaled]
        still_scaled = [entry for entry in again if any_scaler and entry[0] not in self._unscaled]
        for some, scaled in ((true, False), (still_scaled, True)):
            if some:
                self._measurer.measure(some, scaled=scaled)
                self._measurer.note_precision(p.grad for _, p in some if p.grad is not None)
        self._drop_zeros_among(unclear)

    @contained
    def after_clipping(self, parameters: Sequence[Tensor]) -> None:
        """Measure clipped gradients where nothing will show them later: by hand, or inside a step that may use them."""
        entries = [entry for entry in self._clipped_among(parameters) if entry[1].grad is not None]
        if not (self._parts.by_hand.possible and self._parts.rows_are_read):
            entries = [entry for entry in entries if entry[0] in self._used.states]
        if entries:
            self._measurer.measure_received(entries, None, whole=self._parts.rows_are_read)
            self._received.update(slot for slot, _ in entries)
            self._used.note([entry for entry in entries if entry[0] in self._used.states])

    @property
    def _is_clipped_here(self) -> bool:
        return self._parts.is_measured and not self._parts.clock.muted and current_graph_task() == -1

    def _clipped_among(self, parameters: Sequence[Tensor]) -> list[Entry]:
        """The watched parameters among those being clipped; none while clipping is not measured."""
        slot_of_id = self._parts.registry.slot_of_id if self._is_clipped_here else {}
        return [(slot, one) for one in parameters if (slot := slot_of_id.get(id(one))) is not None]

    def updated_by_hand(self, entries: Sequence[Entry]) -> None:
        """Measure the received gradients of an update without an optimizer, which these entries still have.

        For other measured parameters the received gradients are missing, because they were not seen.
        """
        if not self._parts.rows_are_read:
            return
        self.tell_of_update(Probe.after_update, None)
        unseen = [(slot, p) for slot, p in entries if p.grad is not None and slot not in self._parts.seen.states]
        if put_there := self._without_backward(unseen)[0]:
            self._measure_put_there(put_there, None)
        measured = set(self._parts.seen.states)
        found = self._parts.seen.inspect((e for e in entries if e[0] in measured), inside_backward=False)
        if found.changed:
            self._measurer.measure_received(found.changed, None, whole=True)
        known = self._received.union(slot for slot, _ in found.changed + found.unchanged)
        if unknown := sorted(measured - known):
            self._parts.window.hide_received(unknown)

    def inspect(self, optimizer: Optimizer, *, inside_backward: bool) -> None:
        """Compare the gradients that the optimizer is about to use with the measured ones; measure new ones."""
        parts = self._parts
        found = self._parts.seen.inspect(parts.optimizers.entries(optimizer), inside_backward=inside_backward)
        if inside_backward:
            parts.clock.marked.update(slot for slot, _ in found.late)
        self._measurer.correct_scale(optimizer)
        masters = parts.optimizers.masters(optimizer)
        if found.gone and masters is None:
            self._drop(found)
        if found.late:
            self._measurer.measure(found.late)
        if found.unclear:
            put_there, unclear = self._without_backward(found.unclear)
            if put_there:
                self._measure_put_there(put_there, optimizer)
            if unclear:
                self._measure_unclear(unclear, optimizer)
        if replaced := self._take_replaced(found):
            self._measurer.measure(replaced, received_by=optimizer)
        self._measure_received(found, optimizer, masters)
        found_inf = getattr(optimizer, "found_inf", None)  # set by a scaler if the optimizer itself skips the step
        if found_inf is not None:
            parts.window.set_found_inf(found_inf)

    def inspect_inner(self, optimizer: Optimizer) -> None:
        """Measure again what a step has changed before it delegates to this optimizer.

        A step may reduce gradients over ranks and clip them. Reduced gradients are measured like new ones, but what
        torch's functions have clipped is only received. Whether other changes with several ranks are clipping is known
        when the rows arrive; in a single process, changes inside the step are like those between backward and step.
        """
        found = self._parts.seen.inspect(self._parts.optimizers.entries(optimizer), inside_backward=False)
        reduced = [entry for entry in found.changed if entry[0] not in self._clipped] if world_size() > 1 else []
        if reduced and self._parts.rows_are_read:
            self._parts.window.put_earlier(sorted(slot for slot, _ in reduced))
            self._measurer.measure(reduced, received_by=optimizer)
            self._measurer.note_precision(p.grad for _, p in reduced if p.grad is not None)
            found.changed = [entry for entry in found.changed if entry[0] in self._clipped]
        self._measure_received(found, optimizer, self._parts.optimizers.masters(optimizer))

    def _measure_received(self, found: Inspection, optimizer: Optimizer, masters: list[Entry] | None) -> None:
        parts, modified = self._parts, found.changed
        if masters is not None:
            slots = parts.optimizers.slots(optimizer).intersection(self._parts.seen.states)
            modified = [(slot, master) for slot, master in masters if slot in slots and master.grad is not None]
            if hidden := sorted(slots.difference(slot for slot, _ in modified)):
                parts.window.hide_received(hidden)
        elif compared := parts.schedule.compared(found.unchanged):
            self._compared += tuple(slot for slot, _ in compared)
            whole = self._parts.rows_are_read and not parts.schedule.trusts_versions
            self._measurer.measure_received(compared, optimizer, whole=whole)
        if modified:
            self._measurer.measure_received(modified, optimizer, whole=self._parts.rows_are_read)

    def follow_update(self, optimizer: Optimizer, *, changes_gradients: bool) -> None:
        """Note the gradients with which a step begins, if it may change them unseen before it uses them."""
        if not (changes_gradients or self._used.states):  # the usual case: torch's optimizers
            return
        entries = self._parts.optimizers.entries(optimizer)
        self._used.forget([slot for slot, _ in entries])
        if changes_gradients:
            self._used.note(entries)

    def forget_update(self) -> None:
        """A closure is evaluated again inside the step: later changes of the gradients tell nothing about the first."""
        self._used.clear()

    def after_update(self, optimizer: Optimizer) -> None:
        """Mark as unknown what the step has received, where it has changed gradients unseen."""
        if not self._used.states:
            return
        parts, entries = self._parts, self._parts.optimizers.entries(optimizer)
        writes, here = self._used.writes(entries), {slot for slot, p in entries if p.grad is not None}
        self._used.clear()
        if changed := sorted(slot for slot, number in writes.items() if number and slot in here):
            parts.window.hide_received(changed)
            parts.notices.say(
                "changed inside the step",
                f"{type(optimizer).__name__}.step() changes gradients ({parts.registry.some_names(changed)}) before or "
                f"after it uses them, first in step {parts.clock.open_step}: what the update has used cannot be seen, "
                "so grad_norm_clipped and clip_ratio are missing. They are known if the class clips with torch's "
                "functions, or changes the gradients before it calls the step of one of torch's optimizers.",
            )

    def _take_replaced(self, found: Inspection) -> list[Entry]:
        """Move replaced gradients out of `found.changed` if earlier backwards were reset, as by PCGrad.

        Such methods combine the gradients of several backwards; the gradient of the last backward is only one part.
        """
        if not self.was_reset:
            return []
        parts = self._parts
        writes = parts.seen.writes(found.changed)
        replaced = [entry for entry in found.changed if writes[entry[0]] == REPLACED]
        found.changed = [entry for entry in found.changed if writes[entry[0]] != REPLACED]
        if replaced:
            names = parts.registry.some_names(sorted(slot for slot, _ in replaced))
            parts.notices.say(
                "gradient made of others",
                f"the gradients of {names} were replaced after several backwards, each reset before the next, first in "
                f"step {parts.clock.open_step}: grad_norm is the norm of the gradients that replaced them",
            )
        return replaced

    def _drop(self, found: Inspection) -> None:
        """Record that these gradients are None by now. Rows with NaN or Inf stay: a loop may drop bad gradients.

        If none is left at all, other rows stay until they arrive, as those of gradients that were set to 0.
        """
        self._parts.window.receive_nothing(found.gone)
        if found.late or found.changed or found.unclear or found.unchanged:
            self._parts.window.drop_finite_rows(found.gone)

    def _without_backward(self, unclear: Sequence[Entry]) -> tuple[list[Entry], list[Entry]]:
        """Split gradients into new ones that were assigned without a backward, which calls hooks, and the rest."""
        parts = self._parts
        sorted_out: tuple[list[Entry], list[Entry]] = ([], [])
        for slot, parameter in unclear:
            gradient = parameter.grad
            assert gradient is not None
            told_of = slot in parts.clock.marked - self._presumed or slot in self._parts.seen.states
            is_old = told_of or slot in parts.clock.waited_for
            put_there = is_new(gradient) and not is_old and parts.would_tell(parameter)
            sorted_out[not put_there].append((slot, parameter))
        return sorted_out

    def _measure_put_there(self, entries: Sequence[Entry], optimizer: Optimizer | None) -> None:
        """Measure gradients that the user has assigned, as they are now.

        `optimizer` is about to use them. None: a scaler is about to divide them first, or there is no optimizer.
        """
        parts = self._parts
        slots = [slot for slot, _ in entries]
        all_entries = parts.follow()
        self.mark_present(entries if parts.clock.backwards else all_entries)  # for all optimizers to come
        self._measurer.measure(entries, received_by=optimizer)
        parts.window.drop_zero_rows(sorted(slots))  # zeros that zero_grad() has left are no gradients
        parts.notices.say(
            "gradient without a backward",
            f"the gradients of {parts.registry.some_names(slots)} were assigned to .grad without a backward, first in "
            f"step {parts.clock.open_step}: grad_norm is the norm of the gradients that the update uses",
        )

    def _measure_unclear(self, unclear: Sequence[Entry], optimizer: Optimizer) -> None:
        """Measure gradients that no hook has marked: they may have been clipped already."""
        parts = self._parts
        entries = parts.follow()  # hook what was unfrozen
        if not parts.clock.backwards:  # assigned by hand, for every optimizer that is going to step
            self.mark_present(entries)
        self._measurer.measure_after_clipping(unclear, optimizer)
        look_at(parameter.grad for _, parameter in unclear if parameter.grad is not None)
        names = parts.registry.some_names(slot for slot, _ in unclear)
        parts.notices.say(
            "unclipped gradient not seen",
            f"the gradients of {names} could not be seen before clipping in step {parts.clock.open_step}: grad_norm is "
            "missing for that step, grad_norm_clipped is not",
        )

    def mark_present(self, entries: Iterable[Entry]) -> None:
        """Mark every parameter that has a gradient, although no backward was seen to make it."""
        present = {slot for slot, parameter in entries if parameter.grad is not None}
        self._presumed |= present - self._parts.clock.marked
        self._parts.clock.marked |= present

    def before_update(self, optimizer: Optimizer) -> None:
        """Record what its groups say and tell the probes: the optimizer is about to update its parameters."""
        if not self._parts.rows_are_read:
            return
        if self._parts.schedule.is_sampled:
            self._parts.group_facts.see(optimizer)
        rate = learning_rate_of(optimizer)
        if not abs(rate) <= abs(self._learning_rate) and not math.isnan(rate):
            self._learning_rate = rate
        self.tell_of_update(Probe.before_update, optimizer)

    def receive_from(self, step: EngineStep) -> None:
        """Record what an engine has made of the gradients in the step that has just ended."""
        slots = sorted(self._parts.optimizers.slots(step).intersection(self._parts.seen.states))
        if not slots or (step.outcome is not None and step.outcome.is_skipped):
            return
        factor = None if step.outcome is None else step.outcome.factor
        if factor is None:  # the engine does not tell, or its step has raised
            self._parts.window.hide_received(slots)
        elif isinstance(factor, Tensor) or factor != 1:
            self._parts.window.multiply_received(slots, factor)

    def so_far(self) -> dict[str, Number]:
        """Return what is known of the sample besides its rows, by key: the learning rate, and in one process the loss.

        Each rank has a loss of its own: a guard that read it could skip a step on one rank and apply it on another.
        """
        known: dict[str, Number] = {} if world_size() > 1 else {**self._parts.loss.so_far()}
        return known if math.isnan(self._learning_rate) else known | {keys.LEARNING_RATE: self._learning_rate}

    def tell_of_update(
        self, moment: Callable[[Probe, Sequence[WatchedTensor]], None], optimizer: Optimizer | None
    ) -> None:
        """Tell the probes of an update by this optimizer, or by hand if it is None."""
        parts = self._parts
        if parts.probes.active and parts.schedule.is_sampled:
            entries = parts.registry.scan() if optimizer is None else parts.optimizers.entries(optimizer)
            scaled = getattr(optimizer, "grad_scale", None) is not None  # by a fused optimizer itself
            parts.probes.tell(moment, self._measurer.watched(entries, scaled=scaled, updated_by=optimizer))

    def before_unscale(self, optimizer: Optimizer) -> None:
        """Measure what was not measured before a scaler divides this optimizer's gradients in place."""
        found = self._parts.seen.inspect(self._parts.optimizers.entries(optimizer), inside_backward=False)
        if found.late:
            self._measurer.measure(found.late)
        if found.unclear and (put_there := self._without_backward(found.unclear)[0]):
            self._measure_put_there(put_there, None)
            found.late += put_there
        if replaced := self._take_replaced(found):
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
        self._unscaled.update(slot for slot, _ in there)

    def close(self, closed: Closed) -> None:
        """Commit the closed sample to the window."""
        parts = self._parts
        updated = parts.optimizers.updated_by(closed.stepped)
        if updated:  # gradients of parameters that no optimizer updated are missing
            not_stepped = sorted(set(parts.seen.states).difference(*updated))
            if not_stepped:
                parts.window.clear(not_stepped)
                parts.optimizers.left_out.update(closed.marked.intersection(not_stepped))
            parts.wiring.sample_closed(closed.marked)
        loss = parts.loss.take()
        found = parts.probes.take(loss.get(keys.LOSS)) | parts.wiring.take() | loss | parts.forward_facts.take()
        if parts.guard is not None:
            found |= parts.guard.take()
        if self.is_inferred:
            found[keys.INFERRED] = 1.0
        seen = (self._compared, self._compared_early, self.by_torch, self._measurer.eps)
        sample = Sample(
            *(closed.step, closed.skipped, updated, *seen),
            every=closed.step - parts.schedule.last_sample,
            learning_rate=self._learning_rate,
            of_parameters=parts.group_facts.take(parts.optimizers.names()),
        )
        parts.window.commit(sample, found)

    def leave_out_what_was_reset(self, *, has_accumulated: bool = False, is_last: bool = False) -> None:
        """Commit a left-out sample if gradients were reset before an optimizer used them: the loop may skip steps.

        Whether they were finite is known when their rows arrive. Finite ones were another use of a backward (SAM).
        `is_last`: no step will follow, whether the gradients were reset or not.
        """
        parts = self._parts
        if not parts.is_measured or parts.by_hand.possible:
            return
        writes = parts.seen.writes(parts.registry.scan() if parts.seen.states else ())
        if not (is_last or were_reset(writes.values(), has_accumulated=has_accumulated)):
            return
        if parts.schedule.is_sampled:
            sample = Sample(parts.clock.open_step, skipped=True, updated=(), left_out=True)
            parts.window.commit(sample, parts.loss.take() | parts.forward_facts.take())
        else:
            parts.window.discard()
        self._forget_gradients()
        self.was_reset = True
