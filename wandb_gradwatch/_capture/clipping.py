"""Measures the gradients of the open sample around torch's functions that clip them."""

from collections.abc import Sequence

from torch import Tensor

from .._runtime.autograd import Entry, current_graph_task
from .fresh_gradients import FreshGradients
from .gradient_versions import GradientVersions
from .measurer import Measurer
from .parts import CaptureParts
from .scaling import SCALERS


class Clipping:
    """What torch's functions clip in the open sample."""

    def __init__(self, parts: CaptureParts, measurer: Measurer, fresh: FreshGradients) -> None:
        self._parts, self._measurer, self._fresh = parts, measurer, fresh
        self.forget()

    def forget(self) -> None:
        """Forget the gradients looked at so far."""
        self.slots: set[int] = set()  # whose gradients torch's functions clip or have clipped
        self.received: set[int] = set()  # slots whose gradients after clipping are known, for an update by hand
        self.by_torch = False  # whether one of torch's functions has clipped
        self.unscaled: set[int] = set()  # slots whose gradients a scaler has divided
        self.compared: tuple[int, ...] = ()  # slots whose gradients looked unmodified but were compared by value
        self.used = GradientVersions()  # the gradients that the running step will use, if it may change them itself

    def backward_ended(self) -> None:
        """Forget what was clipped: that was the gradient of an earlier backward."""
        self.slots, self.received, self.by_torch = set(), set(), False

    def before(self, parameters: Sequence[Tensor]) -> None:
        """Measure gradients that were modified since the backward: their values now are those before clipping."""
        parts, entries = self._parts, self._among(parameters)
        self.by_torch |= bool(entries) or (self._is_seen and parts.optimizers.has_masters(parameters))
        if not entries:
            return
        found = parts.seen.inspect(entries, inside_backward=False)
        if found.late:
            self._measurer.measure(found.late)
        compared = parts.schedule.comparisons.among(found.unchanged)  # a write through `.data` shows only in the values
        found.changed += compared
        self.compared += tuple(slot for slot, _ in compared if slot not in self.slots)
        found.changed, unclear = ([e for e in of if e[0] not in self.slots] for of in (found.changed, found.unclear))
        self.slots.update(slot for slot, parameter in entries if parameter.grad is not None)
        if not parts.rows_are_read or not (found.changed or unclear):
            return
        if unclear and not parts.clock.backwards:  # the gradients were assigned by hand
            self._fresh.mark_present(parts.follow())
        again = self._fresh.take_replaced(found) + unclear
        if found.changed:
            parts.window.put_earlier(sorted(slot for slot, _ in found.changed))
            again += found.changed
        self._measure_again(again)
        self._fresh.drop_zeros_among(unclear)

    def _measure_again(self, entries: Sequence[Entry]) -> None:
        any_scaler = SCALERS.scaler_of(None) is not None
        true = [entry for entry in entries if not any_scaler or entry[0] in self.unscaled]
        still_scaled = [entry for entry in entries if any_scaler and entry[0] not in self.unscaled]
        for some, scaled in ((true, False), (still_scaled, True)):
            if some:
                self._measurer.measure(some, scaled=scaled)
                self._measurer.note_precision(p.grad for _, p in some if p.grad is not None)

    def after(self, parameters: Sequence[Tensor]) -> None:
        """Measure clipped gradients where nothing will show them later: by hand, or inside a step that may use them."""
        entries = [entry for entry in self._among(parameters) if entry[1].grad is not None]
        if self._parts.updates.by_steps or not self._parts.rows_are_read:
            entries = [entry for entry in entries if entry[0] in self.used.states]
        if entries:
            self._measurer.measure_received(entries, None, whole=self._parts.rows_are_read)
            self.received.update(slot for slot, _ in entries)
            self.used.note([entry for entry in entries if entry[0] in self.used.states])

    @property
    def _is_seen(self) -> bool:
        return self._parts.is_measured and not self._parts.hooks.muted and current_graph_task() == -1

    def _among(self, parameters: Sequence[Tensor]) -> list[Entry]:
        """The watched parameters among those being clipped; none while clipping is not measured."""
        slot_of_id = self._parts.registry.slot_of_id if self._is_seen else {}
        return [(slot, one) for one in parameters if (slot := slot_of_id.get(id(one))) is not None]
