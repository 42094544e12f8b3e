"""Measures the gradients of the open sample as the backward left them, and those that the user has assigned."""

from collections.abc import Iterable, Sequence

from torch import Tensor
from torch.optim import Optimizer

from .._runtime.autograd import Entry
from .gradient_versions import REPLACED, Inspection, is_new, look_at
from .measurer import Measurer
from .parts import CaptureParts
from .probes import Probe


class FreshGradients:
    """Measures gradients that nothing has changed yet, and marks the parameters that have one."""

    def __init__(self, parts: CaptureParts, measurer: Measurer) -> None:
        self._parts, self._measurer = parts, measurer
        self.were_reset = False  # whether gradients of earlier backwards were reset without a step
        self.forget()

    def begin(self) -> None:
        """Begin a new sample."""
        self.were_reset = False
        self.forget()

    def forget(self) -> None:
        """Forget the gradients looked at so far."""
        self._presumed: set[int] = set()  # slots marked only because a gradient is present, by no hook
        self._taken_away: set[int] = set()  # slots that a backward has reached, and left without a gradient

    def measure_present(self, entries: Iterable[Entry]) -> None:
        """Measure every gradient that is present, marked or not: hooks of swapped tensors may not have noted it."""
        entries, marked = list(entries), self._parts.clock.marked
        present = [entry for entry in entries if entry[1].grad is not None]
        if len(present) < len(entries):
            self._taken_away = {slot for slot, parameter in entries if parameter.grad is None and slot in marked}
        self._measurer.measure(present)
        self.drop_zeros_among(present)

    def were_taken_away(self, entries: Iterable[Entry]) -> bool:
        """Whether hooks have taken away the gradients of a backward inside it, of all but one parameter at least.

        The last one may be used after the backward. None is left now.
        """
        entries = list(entries)
        reached = self._parts.clock.marked.intersection(slot for slot, _ in entries)
        num_taken = len(self._taken_away & reached)
        return num_taken >= max(len(reached) - 1, 1) and all(parameter.grad is None for _, parameter in entries)

    def measure_arrived(self, slot: int, parameter: Tensor) -> None:
        """Measure a parameter's gradient inside the backward, before other hooks use it; tell the probes."""
        parts, gradient = self._parts, parameter.grad
        if gradient is None:
            return
        if parts.updates.in_hooks:
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

    def drop_zeros_among(self, entries: Sequence[Entry]) -> None:
        """Drop the rows of unmarked gradients that are 0: zero_grad(set_to_none=False) has left them."""
        if unmarked := sorted(slot for slot, _ in self._parts.unmarked(entries)):
            self._parts.window.drop_zero_rows(unmarked)

    def mark_present(self, entries: Iterable[Entry]) -> None:
        """Mark every parameter that has a gradient, although no backward was seen to make it."""
        present = {slot for slot, parameter in entries if parameter.grad is not None}
        self._presumed |= present - self._parts.clock.marked
        self._parts.clock.marked |= present

    def take_replaced(self, found: Inspection) -> list[Entry]:
        """Move replaced gradients out of `found.changed` if earlier backwards were reset, as by PCGrad.

        Such methods combine the gradients of several backwards; the gradient of the last backward is only one part.
        """
        if not self.were_reset:
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

    def measure_assigned(
        self, unclear: Sequence[Entry], optimizer: Optimizer | None
    ) -> tuple[list[Entry], list[Entry]]:
        """Measure, as they are now, new gradients that were assigned without a backward, which would call hooks.

        `optimizer` is about to use them. None: a scaler is about to divide them first, or there is no optimizer.

        Returns:
            The measured ones, and the rest of `unclear`.
        """
        assigned, rest = self._without_backward(unclear)
        if assigned:
            parts, slots = self._parts, [slot for slot, _ in assigned]
            all_entries = parts.follow()
            self.mark_present(assigned if parts.clock.backwards else all_entries)  # for all optimizers to come
            self._measurer.measure(assigned, received_by=optimizer)
            parts.window.drop_zero_rows(sorted(slots))  # zeros that zero_grad() has left are no gradients
            parts.notices.say(
                "gradient without a backward",
                f"the gradients of {parts.registry.some_names(slots)} were assigned to .grad without a backward, first "
                f"in step {parts.clock.open_step}: grad_norm is the norm of the gradients that the update uses",
            )
        return assigned, rest

    def _without_backward(self, unclear: Sequence[Entry]) -> tuple[list[Entry], list[Entry]]:
        """Split gradients into new ones that were assigned without a backward, and the rest."""
        parts = self._parts
        sorted_out: tuple[list[Entry], list[Entry]] = ([], [])
        left = (
            parts.clock.marked - self._presumed - self._taken_away | parts.seen.states.keys() | parts.clock.waited_for
        )
        for slot, parameter in unclear:
            gradient = parameter.grad
            assert gradient is not None
            is_assigned = is_new(gradient) and slot not in left and parts.would_tell(parameter)
            sorted_out[not is_assigned].append((slot, parameter))
        return sorted_out

    def measure_unclear(self, unclear: Sequence[Entry], optimizer: Optimizer) -> None:
        """Measure gradients that no hook has noted: they may have been clipped already."""
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
