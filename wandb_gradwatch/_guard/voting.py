"""Votes of a guard whose monitor has failed or was removed: the other ranks of a sharded model wait for each vote."""

import logging
import weakref
from collections.abc import Iterable, Mapping
from typing import Final

from torch import Tensor, nn
from torch.optim import Optimizer

from .._boundary import Boundary, entry_point
from .._runtime.listeners import Listener
from .._runtime.sharding import is_sharded
from .._runtime.steps import STEP_HOOKS, parameters_of
from .rank_consensus import RankConsensus

logger: Final = logging.getLogger("wandb_gradwatch")


class Voter(Listener):
    """Abstains at every step, which ends the guard on all ranks at once: models would diverge if ranks differed.

    If all ranks have removed their guards, the next vote is the last one.
    """

    def __init__(self, slot_of_id: Mapping[int, int], models: Iterable[nn.Module], *, is_removed: bool) -> None:
        self._slot_of_id = dict(slot_of_id)  # of the parameters to vote on
        self._models = [weakref.ref(model) for model in models]
        self._is_removed = is_removed
        self._boundary = Boundary(self._failed)
        STEP_HOOKS.subscribe(self)
        _VOTERS.add(self)

    def stop(self, ids: Iterable[int] | None = None) -> None:
        """Vote no longer on these parameters, or on all: another guard does, or all ranks have removed theirs."""
        for known in self._slot_of_id.keys() & set(self._slot_of_id if ids is None else ids):
            del self._slot_of_id[known]
        if not self._slot_of_id:
            STEP_HOOKS.unsubscribe(self)
            _VOTERS.discard(self)

    def _failed(self, error: Exception) -> None:
        STEP_HOOKS.unsubscribe(self)
        logger.error("wandb_gradwatch: this rank can no longer vote on steps; training goes on.", exc_info=error)

    @entry_point(lambda: False)
    def follows(self, optimizer: Optimizer) -> bool:
        if all(model() is None for model in self._models):  # the ids may be those of other parameters now
            self.stop()
        return bool(self._held_by(optimizer))

    @entry_point(lambda: False)
    def is_part_of(self, inner: Optimizer, outer: Optimizer) -> bool:
        return self._held_by(inner).keys() <= self._held_by(outer).keys()

    @entry_point()
    def before_step(self, optimizer: Optimizer, *, inside_backward: bool) -> None:
        parameters = self._held_by(optimizer)
        if not any(map(is_sharded, parameters.values())):
            return
        consensus = RankConsensus(parameters)
        if not self._is_removed:
            consensus.abstain()
        elif consensus.leave():
            self.stop(map(id, parameters.values()))

    def _held_by(self, optimizer: Optimizer) -> dict[int, Tensor]:
        slots = ((self._slot_of_id.get(id(parameter)), parameter) for parameter in parameters_of(optimizer))
        return {slot: parameter for slot, parameter in slots if slot is not None}


_VOTERS: Final[set[Voter]] = set()


def take_over_votes(parameters: Iterable[Tensor]) -> None:
    """Stop the votes of earlier guards on these parameters, because a new one votes."""
    ids = {id(parameter) for parameter in parameters}
    for voter in tuple(_VOTERS):
        voter.stop(ids)
