"""What is measured of the open sample: each gradient as the backward left it, and as the optimizer received it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

from torch import Tensor
from torch.optim import Optimizer

from .._runtime.autograd import Entry, current_graph_task
from .._runtime.error_boundary import contained
from .._transfer.transfers import Sample
from ..snapshot import keys
from .clipping import ClipListener
from .clock import Closed
from .gradient_versions import REPLACED, Inspection, is_new, look_at, were_reset
from .measurer import Measurer
from .optimizer_registry import learning_rate_of
from .parts import CaptureParts
from .probes import Probe, WatchedTensor
from .scaling import SCALES


class OpenSample(ClipListener):
    """The open sample."""

    def __init__(self, parts: CaptureParts, measurer: Measurer) -> None:
        self._parts = parts
        self._measurer = measurer
        self.boundary = parts.boundary
        self._being_unscaled = Inspection()
        self._presumed: set[int] = set()  # slots that were marked because there is a gradient
        # Slots whose gradients looked unmodified at the step, and before torch clipped, and were compared all the same.
        self._compared: tuple[int, ...] = ()
        self._compared_early: tuple[int, ...] = ()
        self._unscaled: set[int] = set()  # slots whose gradients a scaler has divided
        self._clipped: set[int] = set()  # slots whose gradients torch's functions have clipped, or are clipping
        self._received: set[int] = set()  # slots of which is known what an update by hand may use
        self.by_torch = False  # one of torch's functions has clipped
        self.was_reset = False  # backwards came before, whose gradients were reset
        self._learning_rate = math.nan  # the largest of the optimizers that have updated so far

    def begin(self) -> None:
        """A new sample is open."""
        self._parts.schedule.open()
        self._forget_gradients()
        self.was_reset, self._learning_rate = False, math.nan
        if self._parts.probes:
            self._parts.probes.tell(Probe.start, self._parts.schedule.is_sampled, self._parts.schedule.has_histogram)

    def _forget_gradients(self) -> None:
        """What the backwards so far have left is nothing of it; what probes have found in the forward is."""
        self._measurer.begin_sample(self._parts.clock.open_step)
        self._compared, self._compared_early, self._presumed = (), (), set()
        self._unscaled, self._clipped, self._received, self.by_torch = set(), set(), set(), False

    # ---- after a backward

    def measure_present(self, entries: Iterable[Entry]) -> None:
        """Measure every gradient that is there, marked or not: some hooks are blind (swapped tensors)."""
        present = [entry for entry in entries if entry[1].grad is not None]
        self._clipped, self._received, self.by_torch = set(), set(), False  # what an earlier backward left was
        self._measure(present)
        self._drop_zeros_among(present)

    def _drop_zeros_among(self, entries: Iterable[Entry]) -> None:
        """What nothing has marked and is 0 is a leftover of zero_grad()."""
        marked = self._parts.clock.marked
        if unmarked := sorted([slot for slot, _ in entries if slot not in marked]):
            self._parts.window.drop_zero_rows(unmarked)

    @contained
    def measure_inside(self, slot: int, parameter: Tensor) -> None:
        """Measure this gradient as its parameter's hooks find it."""
        self.measure_present([(slot, parameter)])

    def _measure(self, present: Sequence[Entry], *, scaled: bool = True, received_by: Optimizer | None = None) -> None:
        schedule = self._parts.schedule
        self._measurer.measure(
            present,
            histogram=schedule.has_histogram,
            parameters=self._parts.rows_are_read,
            scaled=scaled,
            received_by=received_by,
        )
        if self._parts.probes and schedule.is_sampled:
            if received_by is not None:
                scaled = getattr(received_by, "grad_scale", None) is not None
            tensors = self._measurer.watched(present, self._parts.registry.names, scaled)
            self._parts.probes.tell(Probe.gradients_ready, tensors)

    # ---- around torch's clipping

    @contained
    def before_clipping(self, parameters: Sequence[Tensor]) -> None:
        """Gradients as they are now are those before clipping, whatever was done since the backward."""
        parts, entries = self._parts, self._clipped_among(parameters)
        self.by_torch |= bool(entries) or (self._is_clipped_here and parts.optimizers.has_masters(parameters))
        if not entries:
            return
        found = parts.seen.inspect(entries, inside_backward=False)
        if found.late:
            self._measure(found.late)
        compared = parts.schedule.compared(found.unchanged)  # what was written through `.data` shows only in the values
        found.changed += compared
        self._compared_early += tuple(slot for slot, _ in compared if slot not in self._clipped)
        found.changed, unclear = ([e for e in of if e[0] not in self._clipped] for of in (found.changed, found.unclear))
        self._clipped.update(slot for slot, parameter in entries if parameter.grad is not None)
        if not parts.rows_are_read or not (found.changed or unclear):
            return
        if unclear and not parts.clock.backwards:  # assigned by hand
            self.mark_present(parts.hook_sync.scan())
        again = self._take_replaced(found) + unclear
        if found.changed:
            parts.window.put_earlier(sorted(slot for slot, _ in found.changed))
            again += found.changed
        any_scaler = SCALES.scaler_of(None) is not None
        true = [entry for entry in again if not any_scaler or entry[0] in self._unscaled]
        still_scaled = [entry for entry in again if any_scaler and entry[0] not in self._unscaled]
        for some, scaled in ((true, False), (still_scaled, True)):
            if some:
                self._measure(some, scaled=scaled)
                self._measurer.note_precision(p.grad for _, p in some if p.grad is not None)
        self._drop_zeros_among(unclear)

    @contained
    def after_clipping(self, parameters: Sequence[Tensor]) -> None:
        """Measure what clipping has left: there may be no optimizer whose step would show it."""
        if self._parts.by_hand.possible and self._parts.rows_are_read:
            entries = [entry for entry in self._clipped_among(parameters) if entry[1].grad is not None]
            self._measurer.measure_received(entries, None, whole=True)
            self._received.update(slot for slot, _ in entries)

    @property
    def _is_clipped_here(self) -> bool:
        return self._parts.is_measured and not self._parts.clock.muted and current_graph_task() == -1

    def _clipped_among(self, parameters: Sequence[Tensor]) -> list[Entry]:
        """What is watched of these parameters, whose gradients are being clipped; none where that is not looked at."""
        slot_of_id = self._parts.registry.slot_of_id if self._is_clipped_here else {}
        return [(slot, one) for one in parameters if (slot := slot_of_id.get(id(one))) is not None]

    # ---- an update by hand

    def updated_by_hand(self, entries: Sequence[Entry]) -> None:
        """There was an update without an optimizer, whose gradients these entries still have.

        Of others it is not known what became of them.
        """
        if not self._parts.rows_are_read:
            return
        self._tell(Probe.after_update, None)
        unseen = [(slot, p) for slot, p in entries if p.grad is not None and slot not in self._parts.seen.slots]
        if put_there := self._without_backward(unseen)[0]:
            self._measure_put_there(put_there, None)
        measured = set(self._parts.seen.slots)
        found = self._parts.seen.inspect((e for e in entries if e[0] in measured), inside_backward=False)
        if found.changed:
            self._measurer.measure_received(found.changed, None, whole=True)
        known = self._received.union(slot for slot, _ in found.changed + found.unchanged)
        if unknown := sorted(measured - known):
            self._parts.window.hide_received(unknown)

    # ---- before a step

    def inspect(self, optimizer: Optimizer, *, inside_backward: bool) -> None:
        """Compare what the optimizer is about to use with what was measured, and measure what is not known yet."""
        parts = self._parts
        found = self._parts.seen.inspect(parts.optimizers.entries(optimizer), inside_backward=inside_backward)
        if inside_backward:
            parts.clock.marked.update(slot for slot, _ in found.late)
        self._measurer.correct_scale(optimizer)
        masters = parts.optimizers.masters(optimizer)
        if found.gone and masters is None:
            self._drop(found)
        if found.late:
            self._measure(found.late)
        if found.unclear:
            put_there, unclear = self._without_backward(found.unclear)
            if put_there:
                self._measure_put_there(put_there, optimizer)
            if unclear:
                self._measure_unclear(unclear, optimizer)
        if replaced := self._take_replaced(found):
            self._measure(replaced, received_by=optimizer)
        modified = found.changed
        if masters is not None:
            slots = parts.optimizers.slots(optimizer).intersection(self._parts.seen.slots)
            modified = [(slot, master) for slot, master in masters if slot in slots and master.grad is not None]
            if hidden := sorted(slots.difference(slot for slot, _ in modified)):
                parts.window.hide_received(hidden)
        elif compared := parts.schedule.compared(found.unchanged):
            self._compared += tuple(slot for slot, _ in compared)
            whole = self._parts.rows_are_read and not parts.schedule.trusts_versions
            self._measurer.measure_received(compared, optimizer, whole=whole)
        if modified:
            self._measurer.measure_received(modified, optimizer, whole=self._parts.rows_are_read)
        found_inf = getattr(optimizer, "found_inf", None)  # set by a scaler where the optimizer itself skips
        if found_inf is not None:
            parts.window.set_found_inf(found_inf)

    def _take_replaced(self, found: Inspection) -> list[Entry]:
        """What has changed since, out of several backwards, each reset before the next: as PCGrad's gradients.

        What the last of them has left is one of their parts, and no more the gradient than those before it.
        """
        if not self.was_reset:
            return []
        parts = self._parts
        replaced = [(slot, p) for slot, p in found.changed if parts.seen.writes_since(slot, p.grad) == REPLACED]
        slots = {slot for slot, _ in replaced}
        found.changed = [entry for entry in found.changed if entry[0] not in slots]
        if replaced:
            names = parts.registry.some_names(sorted(slots))
            parts.notices.say(
                "gradient made of others",
                f"the gradients of {names} were replaced after several backwards, each reset before the next, first in "
                f"step {parts.clock.open_step}: their grad_norm is that of what is in .grad then",
            )
        return replaced

    def _drop(self, found: Inspection) -> None:
        """Gradients that were seen are None."""
        self._parts.window.clear(found.gone)
        if not (found.late or found.changed or found.unclear or found.unchanged):  # nothing is left
            step = self._parts.clock.open_step
            self._parts.notices.alert(
                "No gradient",
                "every gradient was already None when the optimizer stepped, though the backward had computed them.\n"
                "Probable cause: gradients zeroed between backward() and step(). Remedy: call zero_grad() after "
                "step(), or before backward().",
                step,
            )

    def _without_backward(self, unclear: Sequence[Entry]) -> tuple[list[Entry], list[Entry]]:
        """Gradients that no backward has made, which would have told of it, and the rest of these."""
        parts = self._parts
        sorted_out: tuple[list[Entry], list[Entry]] = ([], [])
        for slot, parameter in unclear:
            gradient = parameter.grad
            assert gradient is not None
            told_of = slot in parts.clock.marked - self._presumed or slot in self._parts.seen.slots
            is_old = told_of or slot in parts.clock.waited_for
            put_there = is_new(gradient) and not is_old and parts.hook_sync.would_tell(parameter)
            sorted_out[not put_there].append((slot, parameter))
        return sorted_out

    def _measure_put_there(self, entries: Sequence[Entry], optimizer: Optimizer | None) -> None:
        """Gradients that the user has made are measured as they are: what the user did to them before is part of them.

        The optimizer is about to use them; None: a scaler is about to divide them first.
        """
        parts = self._parts
        slots = [slot for slot, _ in entries]
        all_entries = parts.hook_sync.scan()
        self.mark_present(entries if parts.clock.backwards else all_entries)  # for all optimizers
        self._measure(entries, received_by=optimizer)
        parts.window.drop_zero_rows(sorted(slots))  # what zero_grad() has left is no gradient
        parts.notices.say(
            "gradient without a backward",
            f"the gradients of {parts.registry.some_names(slots)} were put into .grad without a backward that reached "
            f"them, first in step {parts.clock.open_step}: their grad_norm is that of what the update is made with",
        )

    def _measure_unclear(self, unclear: Sequence[Entry], optimizer: Optimizer) -> None:
        """Gradients that nothing has told of may have been clipped."""
        parts = self._parts
        entries = parts.hook_sync.scan()  # hook what was unfrozen
        if not parts.clock.backwards:  # assigned by hand, and for every optimizer that is going to step
            self.mark_present(entries)
        self._measurer.measure_after_clipping(unclear, optimizer)
        look_at(parameter.grad for _, parameter in unclear if parameter.grad is not None)
        names = parts.registry.some_names(slot for slot, _ in unclear)
        parts.notices.say(
            "unclipped gradient not seen",
            f"the gradients of {names} could not be seen before clipping in step {parts.clock.open_step}: their "
            "grad_norm is missing there, grad_norm_clipped is there",
        )

    def mark_present(self, entries: Iterable[Entry]) -> None:
        """Take every gradient that is there for one of the open sample's, though no backward was seen to make it."""
        present = {slot for slot, parameter in entries if parameter.grad is not None}
        self._presumed |= present - self._parts.clock.marked
        self._parts.clock.marked |= present

    def before_update(self, optimizer: Optimizer) -> None:
        """The optimizer is about to update its parameters."""
        if not self._parts.schedule.is_sampled:
            return
        rate = learning_rate_of(optimizer)
        if not abs(rate) <= abs(self._learning_rate) and not math.isnan(rate):
            self._learning_rate = rate
        self._tell(Probe.before_update, optimizer)

    def after_update(self, optimizer: Optimizer) -> None:
        """It has updated them."""
        self._tell(Probe.after_update, optimizer)

    def _tell(self, moment: Callable[[Probe, Sequence[WatchedTensor]], None], optimizer: Optimizer | None) -> None:
        """Tell the probes of an update by this optimizer; None: by hand."""
        parts = self._parts
        if parts.probes and parts.schedule.is_sampled:
            entries = parts.registry.scan() if optimizer is None else parts.optimizers.entries(optimizer)
            scaled = getattr(optimizer, "grad_scale", None) is not None  # by a fused optimizer itself
            parts.probes.tell(moment, self._measurer.watched(entries, parts.registry.names, scaled, optimizer))

    # ---- loss scale

    def before_unscale(self, optimizer: Optimizer) -> None:
        """A scaler is about to divide this optimizer's gradients."""
        found = self._parts.seen.inspect(self._parts.optimizers.entries(optimizer), inside_backward=False)
        if found.late:
            self._measure(found.late)
        if found.unclear and (put_there := self._without_backward(found.unclear)[0]):
            self._measure_put_there(put_there, None)
            found.late += put_there
        if replaced := self._take_replaced(found):
            self._measure(replaced)
            found.late += replaced
        self._being_unscaled = found

    def after_unscale(self, optimizer: Optimizer) -> None:
        """It has: they are as they were before, in other units."""
        found, self._being_unscaled = self._being_unscaled, Inspection()
        if found.changed:  # before that: the step, which may be skipped, is no occasion to see it
            self._measurer.measure_received(found.changed, optimizer, whole=self._parts.rows_are_read)
        measured = found.late + found.unchanged + found.changed
        there = [(slot, parameter.grad) for slot, parameter in measured if parameter.grad is not None]
        self._parts.seen.remember([slot for slot, _ in there], [gradient for _, gradient in there])
        self._unscaled.update(slot for slot, _ in there)

    # ---- the end

    def close(self, closed: Closed) -> None:
        """It is complete, and measured: send it on its way."""
        parts = self._parts
        updated = parts.optimizers.updated_by(closed.stepped)
        if updated:  # gradients of parameters that no optimizer updated are missing
            not_stepped = sorted(set(parts.seen.slots).difference(*updated))
            if not_stepped:
                parts.window.clear(not_stepped)
                parts.optimizers.left_out.update(not_stepped)
            parts.wiring.sample_closed(closed.marked, parts.clock.owner)
        loss = parts.loss.take()
        found = parts.probes.take(loss.get(keys.LOSS)) | parts.wiring.take() | loss
        if parts.guard is not None:
            found |= parts.guard.take()
        seen = (self._compared, self._compared_early, self.by_torch, self._measurer.eps)
        every, rate = closed.step - parts.schedule.last_sample, self._learning_rate
        parts.window.commit(Sample(closed.step, closed.skipped, updated, *seen, every, learning_rate=rate), found)

    def leave_out_what_was_reset(self, *, has_accumulated: bool = False) -> None:
        """Gradients are reset that no optimizer has used: perhaps the user's loop leaves the step out.

        Whether they were finite is known when their rows arrive. If they were, it was another use of a backward (SAM).
        """
        parts = self._parts
        if not parts.is_measured or parts.by_hand.possible or not self._were_reset(has_accumulated):
            return
        if parts.schedule.is_sampled:
            sample = Sample(parts.clock.open_step, skipped=True, updated=(), left_out=True)
            parts.window.commit(sample, parts.loss.take())
        else:
            parts.window.discard()
        self._forget_gradients()
        self.was_reset = True

    def _were_reset(self, has_accumulated: bool) -> bool:
        """Whether the gradients that the last backward left, or most of them, have been reset."""
        seen = self._parts.seen
        entries = self._parts.registry.scan() if seen.slots else ()
        writes = [seen.writes_since(slot, parameter.grad) for slot, parameter in entries]
        return were_reset([number for number in writes if number is not None], has_accumulated=has_accumulated)
