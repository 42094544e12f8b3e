"""What is measured of the open sample: each gradient as the backward left it, and as the optimizer received it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim import Optimizer

from .._runtime.autograd import Entry
from .._transfer.sample_buffer import SampleBuffer
from .clock import SampleClock
from .events import SamplerEvents
from .gradient_versions import REPLACED, GradientVersions, Inspection, is_new, look_at, were_reset
from .measurer import Measurer
from .optimizer_registry import OptimizerRegistry
from .parameter_registry import ParameterRegistry
from .probes import Probes, WatchedTensor
from .scaling import SCALES
from .schedule import Schedule


@dataclass(frozen=True)
class Surroundings:
    """What the open sample is part of.

    Args:
        registry: the watched parameters.
        window: where rows go.
        clock: knows the open step and what was marked in it.
        schedule: knows what is due.
        optimizer_registry: knows which parameters an optimizer updates.
        events: how the watcher hears of what is odd.
        scan: walks the model and follows what is new in it.
        would_tell: whether a backward that had reached a parameter would have been seen.
    """

    registry: ParameterRegistry
    window: SampleBuffer
    clock: SampleClock
    schedule: Schedule
    optimizer_registry: OptimizerRegistry
    events: SamplerEvents
    scan: Callable[[], list[Entry]]
    would_tell: Callable[[Tensor], bool]


class OpenSample:
    """The open sample.

    Args:
        around: what it is part of.
        measurer: measures gradients.
        probes: measure everything else.
        guard_reads_rows: whether a guard looks at the rows of every step, sampled or not.
    """

    def __init__(self, around: Surroundings, measurer: Measurer, probes: Probes, *, guard_reads_rows: bool) -> None:
        self._around = around
        self._measurer = measurer
        self._probes = probes
        self._guard_reads_rows = guard_reads_rows
        self._being_unscaled = Inspection()
        self._presumed: set[int] = set()  # slots that were marked because there is a gradient
        self.compared: tuple[int, ...] = ()  # slots whose gradients looked unmodified and were compared all the same
        self._unscaled: set[int] = set()  # slots whose gradients a scaler has divided
        self._clipped: set[int] = set()  # slots whose gradients torch's functions have clipped, or are clipping
        self._received: set[int] = set()  # slots of which is known what an update by hand may use
        self.by_torch = False  # one of torch's functions has clipped
        self.was_reset = False  # backwards came before, whose gradients were reset

    @property
    def eps(self) -> float:
        """Relative precision of the gradients that were measured again."""
        return self._measurer.eps

    @property
    def seen(self) -> GradientVersions:
        """The gradients that were seen in it."""
        return self._measurer.seen

    def loss_scale(self, device: torch.device) -> Tensor | None:
        """What the loss was multiplied with before the backward; None for nothing that is known of."""
        return self._measurer.loss_scale(device)

    def begin(self) -> None:
        """A new sample is open."""
        self.forget_gradients()
        self.was_reset = False
        if self._probes:
            schedule = self._around.schedule
            self._probes.start(schedule.is_sampled, schedule.has_histogram)

    def forget_gradients(self) -> None:
        """What the backwards so far have left is nothing of it; what probes have found in the forward is."""
        self._measurer.begin_sample(self._around.clock.open_step)
        self.compared, self._presumed = (), set()
        self._unscaled, self._clipped, self._received, self.by_torch = set(), set(), set(), False

    def were_reset(self) -> bool:
        """Whether the gradients that the last backward left, or most of them, have been reset."""
        entries = self._around.registry.scan() if self.seen.slots else ()
        writes = [self.seen.writes_since(slot, parameter.grad) for slot, parameter in entries]
        return were_reset([number for number in writes if number is not None])

    # ---- after a backward

    def note(self, entries: Iterable[Entry]) -> None:
        """Remember the gradients' state without looking into them."""
        self._measurer.note(entries)

    def measure_present(self, entries: Iterable[Entry]) -> None:
        """Measure every gradient that is there, marked or not: some hooks are blind (swapped tensors)."""
        present = [entry for entry in entries if entry[1].grad is not None]
        self._clipped, self._received, self.by_torch = set(), set(), False  # what an earlier backward left was
        self._measure(present)
        marked = self._around.clock.marked
        unmarked = sorted(slot for slot, _ in present if slot not in marked)
        if unmarked:
            self._around.window.drop_zero_rows(unmarked)

    def _measure(self, present: Sequence[Entry], *, scaled: bool = True, received_by: Optimizer | None = None) -> None:
        schedule = self._around.schedule
        self._measurer.measure(
            present,
            histogram=schedule.has_histogram,
            parameters=self._rows_are_read,
            scaled=scaled,
            received_by=received_by,
        )
        if self._probes and schedule.is_sampled:
            if received_by is not None:
                scaled = getattr(received_by, "grad_scale", None) is not None
            tensors = self._measurer.watched(present, self._around.registry.names, scaled=scaled)
            self._probes.gradients_ready(tensors)

    @property
    def _rows_are_read(self) -> bool:
        """Whether the open step's rows are for more than a guard that judges by the norm."""
        return self._guard_reads_rows or self._around.schedule.is_sampled

    # ---- around torch's clipping

    def before_clipping(self, entries: Sequence[Entry]) -> None:
        """Torch is about to clip these: as they are now is before clipping, whatever was done since the backward."""
        self.by_torch = True
        found = self.seen.inspect(entries, inside_backward=False)
        if found.late:
            self._measure(found.late)
        changed, unclear = ([e for e in of if e[0] not in self._clipped] for of in (found.changed, found.unclear))
        self._clipped.update(slot for slot, parameter in entries if parameter.grad is not None)
        if not self._rows_are_read or not (changed or unclear):
            return
        around = self._around
        if unclear and not around.clock.backwards:  # assigned by hand
            self.mark_present(around.scan())
        replaced = self._replaced(changed)
        if earlier := sorted(slot for slot, _ in changed if slot not in replaced):
            around.window.put_earlier(earlier)
        again = changed + unclear
        any_scaler = SCALES.scaler_of(None) is not None
        true = [entry for entry in again if not any_scaler or entry[0] in self._unscaled]
        still_scaled = [entry for entry in again if any_scaler and entry[0] not in self._unscaled]
        for some, scaled in ((true, False), (still_scaled, True)):
            if some:
                self._measure(some, scaled=scaled)
                self._measurer.note_precision(p.grad for _, p in some if p.grad is not None)
        unmarked = sorted(slot for slot, _ in unclear if slot not in around.clock.marked)
        if unmarked:
            around.window.drop_zero_rows(unmarked)

    def after_clipping(self, entries: Sequence[Entry]) -> None:
        """Torch has clipped these, and there may be no optimizer whose step would show what became of them."""
        clipped = [entry for entry in entries if entry[1].grad is not None]
        if clipped and self._rows_are_read:
            self._measurer.measure_received(clipped, None, whole=True)
            self._received.update(slot for slot, _ in clipped)

    # ---- an update by hand

    def updated_by_hand(self, entries: Sequence[Entry]) -> None:
        """There was an update without an optimizer.

        Args:
            entries: whose gradients are still those of the update; of others it is not known what became of them.
        """
        if not self._rows_are_read:
            return
        self._after_update(self._around.registry.scan())
        measured = set(self.seen.slots)
        found = self.seen.inspect((e for e in entries if e[0] in measured), inside_backward=False)
        if found.changed:
            self._measurer.measure_received(found.changed, None, whole=True)
        known = self._received.union(slot for slot, _ in found.changed + found.unchanged)
        if unknown := sorted(measured - known):
            self._around.window.hide_received(unknown)

    # ---- before a step

    def inspect(self, optimizer: Optimizer, *, inside_backward: bool) -> None:
        """Compare what the optimizer is about to use with what was measured, and measure what is not known yet."""
        around = self._around
        found = self.seen.inspect(around.optimizer_registry.entries(optimizer), inside_backward=inside_backward)
        if inside_backward:
            around.clock.marked.update(slot for slot, _ in found.late)
        self._measurer.correct_scale(optimizer)
        masters = around.optimizer_registry.masters(optimizer)
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
        replaced = self._replaced(found.changed)
        if replaced:
            self._measure([entry for entry in found.changed if entry[0] in replaced], received_by=optimizer)
        modified = [entry for entry in found.changed if entry[0] not in replaced]
        if masters is not None:
            slots = around.optimizer_registry.slots(optimizer).intersection(self.seen.slots)
            modified = [(slot, master) for slot, master in masters if slot in slots and master.grad is not None]
            if hidden := sorted(slots.difference(slot for slot, _ in modified)):
                around.window.hide_received(hidden)
        elif found.unchanged and around.schedule.is_compared:
            self.compared += tuple(slot for slot, _ in found.unchanged)
            whole = self._rows_are_read and not around.schedule.trusts_versions
            self._measurer.measure_received(found.unchanged, optimizer, whole=whole)
        if modified:
            self._measurer.measure_received(modified, optimizer, whole=self._rows_are_read)
        found_inf = getattr(optimizer, "found_inf", None)  # set by a scaler where the optimizer itself skips
        if found_inf is not None:
            around.window.set_found_inf(found_inf)

    def _replaced(self, changed: Iterable[Entry]) -> set[int]:
        """The slots of gradients that are what was made of several backwards, each reset before the next (PCGrad).

        What the last of them has left is one of their parts, and no more the gradient than those before it.
        """
        if not self.was_reset:
            return set()
        slots = {slot for slot, p in changed if p.grad is not None and self.seen.writes_since(slot, p.grad) == REPLACED}
        if slots:
            around = self._around
            around.events.notice(
                "gradient made of others",
                f"the gradients of {around.registry.some_names(sorted(slots))} were replaced after several backwards, "
                f"each reset before the next, first in step {around.clock.open_step}: their grad_norm is that of what "
                "is in .grad then",
            )
        return slots

    def _drop(self, found: Inspection) -> None:
        """Gradients that were seen are None."""
        self._around.window.clear(found.gone)
        if found.nothing_is_left:
            step = self._around.clock.open_step
            self._around.events.alert(
                "No gradient",
                "every gradient was already None when the optimizer stepped, though the backward had computed them.\n"
                "Probable cause: gradients zeroed between backward() and step(). Remedy: call zero_grad() after "
                "step(), or before backward().",
                step,
            )

    def _without_backward(self, unclear: Sequence[Entry]) -> tuple[list[Entry], list[Entry]]:
        """Gradients that no backward has made, which would have told of it, and the rest of these."""
        around = self._around
        sorted_out: tuple[list[Entry], list[Entry]] = ([], [])
        for slot, parameter in unclear:
            gradient = parameter.grad
            assert gradient is not None
            told_of = slot in around.clock.marked - self._presumed or slot in self.seen.slots
            is_old = told_of or around.clock.has_waited(slot)
            put_there = is_new(gradient) and not is_old and around.would_tell(parameter)
            sorted_out[not put_there].append((slot, parameter))
        return sorted_out

    def _measure_put_there(self, entries: Sequence[Entry], optimizer: Optimizer | None) -> None:
        """Gradients that the user has made are measured as they are: what the user did to them before is part of them.

        Args:
            entries: whose.
            optimizer: the one that is about to use them; None: a scaler is about to divide them first.
        """
        around = self._around
        slots = [slot for slot, _ in entries]
        all_entries = around.scan()
        self.mark_present(entries if around.clock.backwards else all_entries)  # for all optimizers
        self._measure(entries, received_by=optimizer)
        around.window.drop_zero_rows(sorted(slots))  # what zero_grad() has left is no gradient
        around.events.notice(
            "gradient without a backward",
            f"the gradients of {around.registry.some_names(slots)} were put into .grad without a backward that reached "
            f"them, first in step {around.clock.open_step}: their grad_norm is that of what the optimizer receives",
        )

    def _measure_unclear(self, unclear: Sequence[Entry], optimizer: Optimizer) -> None:
        """Gradients that nothing has told of may have been clipped."""
        around = self._around
        entries = around.scan()  # hook what was unfrozen
        if not around.clock.backwards:  # assigned by hand, and for every optimizer that is going to step
            self.mark_present(entries)
        self._measurer.measure_after_clipping(unclear, optimizer)
        for _, parameter in unclear:
            assert parameter.grad is not None
            look_at(parameter.grad)
        names = around.registry.some_names(slot for slot, _ in unclear)
        around.events.notice(
            "unclipped gradient not seen",
            f"the gradients of {names} could not be seen before clipping in step {around.clock.open_step}: their "
            "grad_norm is missing there, grad_norm_clipped is there",
        )

    def mark_present(self, entries: Iterable[Entry]) -> None:
        """Take every gradient that is there for one of the open sample's, though no backward was seen to make it."""
        present = {slot for slot, parameter in entries if parameter.grad is not None}
        self._presumed |= present - self._around.clock.marked
        self._around.clock.marked |= present

    def before_update(self, optimizer: Optimizer) -> None:
        """The optimizer is about to update its parameters."""
        if self._probes and self._around.schedule.is_sampled:
            self._probes.before_update(self._updated(self._around.optimizer_registry.entries(optimizer), optimizer))

    def after_update(self, optimizer: Optimizer) -> None:
        """It has updated them."""
        self._after_update(self._around.optimizer_registry.entries(optimizer), optimizer)

    def _after_update(self, entries: Iterable[Entry], optimizer: Optimizer | None = None) -> None:
        if self._probes and self._around.schedule.is_sampled:
            self._probes.after_update(self._updated(entries, optimizer))

    def _updated(self, entries: Iterable[Entry], optimizer: Optimizer | None) -> list[WatchedTensor]:
        scaled = getattr(optimizer, "grad_scale", None) is not None  # by a fused optimizer itself
        return self._measurer.watched(entries, self._around.registry.names, scaled=scaled, updated_by=optimizer)

    # ---- loss scale

    def before_unscale(self, optimizer: Optimizer) -> None:
        """A scaler is about to divide this optimizer's gradients."""
        found = self.seen.inspect(self._around.optimizer_registry.entries(optimizer), inside_backward=False)
        if found.late:
            self._measure(found.late)
        if found.unclear and (put_there := self._without_backward(found.unclear)[0]):
            self._measure_put_there(put_there, None)
            found.late += put_there
        if replaced := self._replaced(found.changed):
            again = [entry for entry in found.changed if entry[0] in replaced]
            self._measure(again)
            found.late += again
            found.changed = [entry for entry in found.changed if entry[0] not in replaced]
        self._being_unscaled = found

    def after_unscale(self, optimizer: Optimizer) -> None:
        """It has: they are as they were before, in other units."""
        found, self._being_unscaled = self._being_unscaled, Inspection()
        if found.changed:  # before that: the step, which may be skipped, is no occasion to see it
            self._measurer.measure_received(found.changed, optimizer, whole=self._rows_are_read)
        measured = found.late + found.unchanged + found.changed
        there = [(slot, parameter.grad) for slot, parameter in measured if parameter.grad is not None]
        self.seen.remember([slot for slot, _ in there], [gradient for _, gradient in there], measured=True)
        self._unscaled.update(slot for slot, _ in there)

    # ---- the end

    def keep_only(self, updated: Sequence[Sequence[int]]) -> None:
        """Gradients of parameters that no optimizer updated are missing in the sample."""
        if updated:
            not_stepped = sorted(set(self.seen.slots).difference(*updated))
            if not_stepped:
                self._around.window.clear(not_stepped)
                self._around.optimizer_registry.left_out.update(not_stepped)
