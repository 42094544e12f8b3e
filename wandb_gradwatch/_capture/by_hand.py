"""Loops without any optimizer: gradients that were reset between two backwards tell of an update between them.

Or hooks of others, on parameters, use gradients while the backward goes on, and take them away: then it is the update.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from .._runtime.notices import Notices
from .gradient_versions import GradientVersions, version_of, were_reset
from .parameter_registry import ParameterRegistry

# This many resets of the gradients without any optimizer mean that the user updates by hand. The samples until then are
# provisional: an optimizer that steps after all takes them back.
_RESETS_THAT_PROVE: Final = 3


class UpdatesByHand:
    """Whether there is an optimizer, and what stands in for its steps where there is none.

    This is excluded where an optimizer is known already.
    """

    def __init__(
        self, registry: ParameterRegistry, seen: GradientVersions, notices: Notices, *, excluded: bool
    ) -> None:
        self._registry = registry
        self._seen = seen
        self._notices = notices
        self.possible = not excluded  # no optimizer has stepped so far
        self.proven = False
        self.inside_backward = False  # hooks of others make the updates
        self._num_provisional = 0
        self._versions = 0  # of the parameters, when the last backward ended
        self._writes: dict[int, int] | None = None  # by slot, from the last backward's end to this one's begin
        self._has_accumulated = False  # this one, by then

    @property
    def withholds(self) -> bool:
        """Whether there are samples that may have to be taken back."""
        return bool(self._num_provisional) and not self.proven

    def exclude(self) -> int:
        """An optimizer steps, or the user says when: what looked like updates before was not.

        Returns:
            How many provisional samples are to be taken back.
        """
        taken_back = self._num_provisional if self.withholds else 0
        self._num_provisional, self.possible, self.proven = 0, False, False
        return taken_back

    def backward_begins(self, has_accumulated: bool) -> bool:
        """The moment to see what was reset before a backward: none of its gradients is there yet, or the first one.

        Later the backward has written to all of them, and DistributedDataParallel once more with their averages.

        Returns:
            Whether it is one of its own: the inner backwards of re-entrant checkpoints begin too, in the middle of it.
        """
        is_outermost = self._writes is None
        if is_outermost:
            self._has_accumulated = has_accumulated
            self._writes = {
                slot: writes
                for slot, parameter in self._registry.scan()
                if (gradient := parameter.grad) is None or not gradient.requires_grad  # create_graph=True replaces it
                if (writes := self._seen.writes_since(slot, gradient)) is not None
            }
        return is_outermost

    def were_reset(self, reached: Collection[int]) -> bool:
        """Whether the gradients that this backward has reached were reset before it, or most of them."""
        writes = [writes for slot, writes in (self._writes or {}).items() if slot in reached]
        self._writes = None
        return were_reset(writes, has_accumulated=self._has_accumulated)

    def ended_in_hooks(self, reached: Collection[int], step: int) -> bool:
        """Whether the backward of this step that has ended is an update: hooks of others have used its gradients.

        Those that it has reached are gone then, but perhaps for the last of them.
        """
        gradients = [parameter.grad for slot, parameter in self._registry.scan() if slot in reached]
        num_left = sum(gradient is not None for gradient in gradients)
        if not num_left <= 1 < len(gradients):
            return False
        if not self.inside_backward:
            self.inside_backward = True
            self._notices.say(
                "updates inside the backward",
                "hooks on the parameters take the gradients away while the backward goes on, as optimizers that are "
                f"fused into it do: from step {step + 1} on each gradient is measured as its hooks "
                "find it, and every such backward counts as a step; what is done to a gradient in these hooks is not "
                "seen, and guard= cannot leave a step out. If not every such backward is an update, call "
                "watcher.mark_step() after each update.",
            )
        return True

    def count(self) -> None:
        """An update is inferred; perhaps it is the one that proves that there is no optimizer."""
        if not self.proven:
            self._num_provisional += 1
            self.proven = self._num_provisional >= _RESETS_THAT_PROVE
            if self.proven and not self.inside_backward:
                self._say()

    def settle(self) -> None:
        """Nothing better will be known: what was inferred counts."""
        if self.possible and not self.proven:
            self.proven = True
            self._say()

    def _say(self) -> None:
        self._notices.say(
            "no optimizer",
            "no optimizer step was seen that updates a watched parameter, so every backward after which the gradients "
            "were reset counts as a step; pass optimizer= if there is one, or call watcher.mark_step() after each "
            "update",
        )

    def remember_parameters(self) -> None:
        """A backward has ended."""
        self._versions = self._parameter_versions()

    def has_updated(self) -> bool:
        """Whether parameters were written to since the last backward, or updates were inferred before."""
        return self.proven or bool(self._num_provisional) or self._versions != self._parameter_versions()

    def _parameter_versions(self) -> int:
        """Changes when a parameter is written to, but for writes through `.data`."""
        return sum(version_of(parameter) for _, parameter in self._registry.scan())
