"""Infers updates in training loops without an optimizer: gradients that were reset between two backwards mean one.

If other hooks use the gradients and remove them inside the backward, that backward is the update.
"""

from collections.abc import Collection

from .._runtime.notices import Notices
from .gradient_versions import GradientVersions, were_reset
from .parameter_registry import ParameterRegistry

# This many resets of the gradients without an optimizer step prove that the user updates by hand: few if parameters
# were written to in between, many if writes are not seen, as those through `.data`; the gradients of some tasks may be
# combined later. The samples until then are provisional: they are taken back if an optimizer steps after all.
_RESETS_THAT_PROVE, _UNSEEN_UPDATES_THAT_PROVE = 3, 16


class UpdatesByHand:
    """Infers updates from gradients while no optimizer is known.

    With `excluded` an optimizer is known from the beginning, and nothing is inferred.
    """

    def __init__(
        self, registry: ParameterRegistry, seen: GradientVersions, notices: Notices, *, excluded: bool
    ) -> None:
        self._registry, self._seen, self._notices = registry, seen, notices
        self.possible = not excluded  # no optimizer has stepped so far
        self.proven = False
        self.inside_backward = False  # other hooks make the updates, inside the backward
        self._num_provisional = 0
        self._has_written = False  # whether parameters were written to between two backwards
        self._versions: dict[int, int] = {}  # of the parameters when the last backward ended
        self._writes: dict[int, int] = {}  # slot -> writes between the last backward and the current one
        self._has_accumulated = False  # whether the current backward may have written by then

    @property
    def withholds(self) -> bool:
        """Whether there are provisional samples, which may have to be taken back."""
        return bool(self._num_provisional) and not self.proven

    def exclude(self) -> int:
        """Stop inferring updates. Returns the number of provisional samples to take back."""
        taken_back = self._num_provisional if self.withholds else 0
        self._num_provisional, self.possible, self.proven = 0, False, False
        return taken_back

    def backward_begins(self, has_accumulated: bool) -> None:
        """Count the writes to each gradient since the last backward, before this one has written to more than one.

        Later the backward has written to all of them, and DistributedDataParallel once more with the averages.
        """
        self._has_accumulated = has_accumulated
        self._writes = self._seen.writes(
            entry
            for entry in self._registry.scan()
            if entry[1].grad is None or not entry[1].grad.requires_grad  # create_graph=True replaces it
        )

    def were_reset(self, reached: Collection[int]) -> bool:
        """Whether most of the gradients that this backward has reached were reset before it."""
        writes = [writes for slot, writes in self._writes.items() if slot in reached]
        return were_reset(writes, has_accumulated=self._has_accumulated)

    def ended_in_hooks(self, reached: Collection[int], step: int) -> bool:
        """Whether other hooks have made the update inside the backward that has just ended.

        If so, at most one of the gradients that the backward has reached is left.
        """
        if self.proven and not self.inside_backward:  # known to reset its gradients between backwards
            return False
        are_left = [parameter.grad is not None for slot, parameter in self._registry.scan() if slot in reached]
        if not sum(are_left) <= 1 < len(are_left):
            return False
        if not self.inside_backward:
            self.inside_backward = True
            self._notices.say(
                "updates inside the backward",
                "hooks on the parameters take the gradients away during the backward, as an optimizer that is fused "
                f"into the backward does: from step {step + 1} on each gradient is measured before these hooks run, "
                "and every such backward counts as a step. Changes that the hooks make to a gradient are not seen, and "
                "guard= cannot skip a step. If not every such backward is an update, call watcher.mark_step() after "
                "each update.",
            )
        return True

    def count(self) -> None:
        """Count an inferred update."""
        if self.proven:
            return
        self._num_provisional += 1
        self._has_written |= self._versions not in ({}, self._registry.versions())
        if self._num_provisional >= (_RESETS_THAT_PROVE if self._has_written else _UNSEEN_UPDATES_THAT_PROVE):
            self.settle()

    def settle(self) -> None:
        """Accept the inferred updates as final."""
        if self.possible and not (self.proven or self.inside_backward):
            self._notices.say_once_per_process(
                "no optimizer",
                "no optimizer step was seen that updates a watched parameter, so every backward after which the "
                "gradients were reset counts as a step. Such a step may be a trial point of a line search: explosions, "
                "spikes, dead and vanishing gradients are not judged. If a torch.optim.Optimizer updates copies of the "
                "parameters, pass optimizer=, otherwise call watcher.mark_step() after each update.",
            )
        self.proven |= self.possible

    def remember_parameters(self) -> None:
        """Record the parameters' versions, as long as they matter, after a backward."""
        if not self.proven:
            self._versions = self._registry.versions()

    def has_updated(self) -> bool:
        """Whether parameters were written to since the last backward, or updates were inferred earlier."""
        return self.proven or bool(self._num_provisional) or self._versions != self._registry.versions()
