"""Who makes the updates: optimizers of torch, or the user's own code, whose updates show only in the gradients."""

import gc
from collections.abc import Collection
from enum import Enum
from typing import Final

from torch.optim import Optimizer

from .._runtime.notices import Notices
from .._runtime.steps import parameters_of
from .parameter_registry import ParameterRegistry

# Backwards whose gradients were taken away, without a step of the optimizer that holds the parameters. With fewer the
# micro-batches of a step may be under way, whose gradients are collected elsewhere and put back for it.
_TAKEN_AWAY: Final = 16


class MadeBy(Enum):
    """What makes an update, as far as it is known."""

    UNKNOWN = "nothing so far"
    STEPS = "the step of an optimizer, or the user, who calls mark_step()"
    CODE = "the user's own code, before it resets the gradients: no optimizer holds a watched parameter"
    HOOKS = "hooks of others, which take the gradients away inside the backward"


class Updates:
    """Decides who makes the updates. With `by_steps` that is known from the beginning."""

    def __init__(self, registry: ParameterRegistry, notices: Notices, *, by_steps: bool) -> None:
        self._registry, self._notices = registry, notices
        self.made_by = MadeBy.STEPS if by_steps else MadeBy.UNKNOWN
        self.in_hooks = False  # hooks of others take the gradients away, which must be measured before
        self._num_taken_away = 0

    @property
    def by_steps(self) -> bool:
        """Whether an optimizer steps, or the user calls mark_step()."""
        return self.made_by is MadeBy.STEPS

    def step_seen(self) -> None:
        """An optimizer that holds watched parameters steps, or the user calls mark_step()."""
        self.made_by = MadeBy.STEPS

    def are_made_by_code(self) -> bool:
        """Whether the user's code makes the updates. If that is not known yet, an optimizer is looked for."""
        if self.made_by is MadeBy.UNKNOWN:
            if not self._are_held():
                self.made_by = MadeBy.CODE
                self._notices.say_once_per_process(
                    "no optimizer",
                    "no optimizer step was seen that updates a watched parameter, and no torch.optim.Optimizer holds "
                    "one, so every backward after which the gradients were reset counts as a step. Such a step may be "
                    "a trial point of a line search: explosions, spikes, dead and vanishing gradients are not judged. "
                    "If an optimizer updates copies of the parameters, pass optimizer=, otherwise call "
                    "watcher.mark_step() after each update.",
                )
            elif not self._num_taken_away:  # otherwise hooks may turn out to make them
                self.made_by = MadeBy.STEPS
        return self.made_by is MadeBy.CODE

    def were_made_inside(self, reached: Collection[int], step: int) -> bool:
        """Whether hooks of others have made the update inside the backward that has just returned.

        If so, at most one of the gradients that the backward has `reached` is left.
        """
        if self.made_by in (MadeBy.STEPS, MadeBy.CODE):
            return False
        are_left = [parameter.grad is not None for slot, parameter in self._registry.scan() if slot in reached]
        if not sum(are_left) <= 1 < len(are_left):
            return False
        if self.made_by is MadeBy.UNKNOWN:
            self._num_taken_away += 1
            if self._num_taken_away < _TAKEN_AWAY and self._are_held():
                return False
            self.made_by, self.in_hooks = MadeBy.HOOKS, True
            self._say_in_hooks(
                step,
                " Every such backward counts as a step: if not every one is an update, call watcher.mark_step() after "
                "each update.",
            )
        return True

    def made_before_step(self, step: int) -> None:
        """An optimizer steps whose gradients hooks of others have taken away, in the only backward before."""
        self.in_hooks = True
        self._say_in_hooks(step, "")

    def _say_in_hooks(self, step: int, advice: str) -> None:
        self._notices.say(
            "updates inside the backward",
            "hooks on the parameters take the gradients away during the backward, as an optimizer that is fused into "
            f"the backward does: from step {step + 1} on each gradient is measured before these hooks run. Changes "
            f"that the hooks make to a gradient are not seen, and guard= cannot skip a step.{advice}",
        )

    def _are_held(self) -> bool:
        """Whether an optimizer of this process holds a watched parameter."""
        return not held_by_optimizers().isdisjoint(self._registry.slot_of_id)


def held_by_optimizers() -> set[int]:
    """Return the ids of the parameters of all optimizers in this process, including those that have not stepped."""
    optimizers = [one for one in gc.get_objects() if issubclass(type(one), Optimizer)]
    return {id(parameter) for one in optimizers if hasattr(one, "param_groups") for parameter in parameters_of(one)}
