"""The open sample, from the first backward after the last sample to the step that completes it."""

import math
from collections.abc import Callable, Sequence

from torch.optim import Optimizer

from .._runtime.autograd import Entry
from .._runtime.sharding import world_size
from .._transfer.transfers import Sample
from ..snapshot import keys
from .clipping import Clipping
from .clock import Closed
from .fresh_gradients import FreshGradients
from .gradient_versions import were_reset
from .loss import Number
from .measurer import Measurer
from .optimizer_registry import learning_rate_of
from .parts import CaptureParts
from .probes import Probe, WatchedTensor
from .received_gradients import ReceivedGradients


class OpenSample:
    """Opens and commits the sample, and owns what measures its gradients in between.

    Attributes:
        fresh: the gradients as the backward left them.
        clipping: what torch's functions clip.
        received: the gradients as the optimizer receives them.
    """

    def __init__(self, parts: CaptureParts, measurer: Measurer) -> None:
        self._parts, self._measurer = parts, measurer
        self.fresh = FreshGradients(parts, measurer)
        self.clipping = Clipping(parts, measurer, self.fresh)
        self.received = ReceivedGradients(parts, measurer, self.fresh, self.clipping)
        self._learning_rate = math.nan  # the largest among the optimizers that step in this sample

    def begin(self) -> None:
        """Open a new sample."""
        self._parts.schedule.open()
        self.fresh.begin()
        self._forget_gradients()
        self._learning_rate = math.nan
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
        self.fresh.forget()
        self.clipping.forget()
        self.received.forget()

    def measure_backward(self, entries: Sequence[Entry], *, of_schedule: bool) -> None:
        """Measure the gradients that a backward, or a pipeline schedule, has left."""
        self.clipping.backward_ended()
        if of_schedule:  # a zero-bubble schedule makes gradients that no hook notes
            self.fresh.measure_unmarked(entries)
        else:
            self.fresh.measure_present(entries)

    def updated_by_hand(self, entries: Sequence[Entry]) -> None:
        """Complete the sample of an update without an optimizer, for which these entries still have the gradients."""
        if self._parts.rows_are_read:
            self.tell_of_update(Probe.after_update, None)
            self.received.updated_by_hand(entries)

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

    def close(self, closed: Closed, *, is_inferred: bool = False) -> None:
        """Commit the closed sample to the window. `is_inferred`: only a reset of the gradients shows its update."""
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
        if is_inferred:
            found[keys.INFERRED] = 1.0
        seen = (self.received.compared, self.clipping.compared, self.clipping.by_torch, self._measurer.eps)
        sample = Sample(
            *(closed.step, closed.skipped, updated, *seen),
            every=closed.step - parts.schedule.last_sample,
            learning_rate=self._learning_rate,
            of_parameters=parts.group_facts.take(parts.optimizers.names()),
        )
        parts.window.commit(sample, found)

    def is_reset(self) -> bool:
        """Whether most of the gradients that were looked at have been reset since."""
        parts = self._parts
        return bool(parts.seen.states) and were_reset(parts.seen.writes(parts.registry.scan()).values())

    def leave_out(self) -> None:
        """Commit a left-out sample: the gradients were reset before an optimizer used them. The loop may skip steps.

        Whether they were finite is known when their rows arrive. Finite ones were another use of a backward (SAM).
        """
        parts = self._parts
        if not parts.is_measured:
            return
        if parts.schedule.is_sampled:
            sample = Sample(parts.clock.open_step, skipped=True, updated=(), left_out=True)
            parts.window.commit(sample, parts.loss.take() | parts.forward_facts.take())
        else:
            parts.window.discard()
        self._forget_gradients()
        self.fresh.were_reset = True
