"""Withholds gradients from an optimizer, and restores them after the step.

before the step  decide()    the open sample's rows of this optimizer -> [non-finite elements, sum of squares], which
                             the host reads (for shards after one all-reduce, so that all ranks decide alike); an
                             optimizer without gradients changes nothing
after the step   release()   gradients are restored
sample over      end_step()  the guard learns from the decisions
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .._boundary import RaisedToTheUser
from .._measure.columns import NONFINITE_COLUMNS, NUM_COLUMNS, Column
from .._measure.elements import onto, wide_dtype
from .._nonfinite.replay import StepReplay
from .._runtime.autograd import Entry, current_graph_task
from .._runtime.notices import CannotWatchError, Notices
from .._runtime.sharding import Shards, is_sharded, world_size
from .._runtime.steps import parameters_of
from .._transfer.sample_buffer import SampleBuffer
from .._transfer.transfers import Found, Names
from ..snapshot import Snapshot, keys
from .guard import SkipGuard, TooManySkippedStepsError
from .rank_consensus import PARTS_REFUSED, RankConsensus, refuse_guard
from .voting import Voter

# N parameters of an optimizer

_NOT_HEARD: Final = (
    "the monitor of another rank has failed or was removed, so that no rank can tell whether the gradients of the "
    "whole model are healthy: from here on every step is applied, on all ranks alike"
)


@dataclass(frozen=True)
class _Decision:
    """What was found in the gradients of one optimizer in a step, and what was decided."""

    slots: tuple[int, ...]  # of the parameters
    num_nonfinite: float  # of elements; NaN if it is not known
    sum_sq: float
    learns: bool  # whether the guard learns the usual norm from this one
    bad: bool
    withheld: bool


class StepSkipping:
    """Applies a guard's decisions to the optimizers."""

    def __init__(
        self,
        guard: SkipGuard,
        window: SampleBuffer,
        shards: Shards,
        known: Callable[[], Names],  # returns the current names, and which are trainable
        notices: Notices,
    ) -> None:
        self._guard, self._window, self._shards, self._known, self._notices = guard, window, shards, known, notices
        self.replay: StepReplay | None = None  # runs a bad step again
        self.compare_ranks: Callable[[], object] = lambda: None  # raises if ranks train different parameters
        self.needs_rows = guard.is_bad is not None  # otherwise only norms and non-finite counts are needed
        self._consensuses: dict[tuple[int, ...], RankConsensus] = {}  # of each optimizer, by its slots
        self._version = -1  # of the parameters, when the consensuses were made
        self._has_voted = False  # on the step that an optimizer is about to make
        self._voter: Voter | None = None  # after the monitor has failed or was removed
        # By the id of an optimizer that steps: restores what it was deprived of.
        self._deprived: defaultdict[int, ExitStack] = defaultdict(ExitStack)
        self._decisions: list[_Decision] = []  # of the open step
        self._was_withheld = False  # whether the last closed step was withheld from an optimizer
        self._num_withheld = 0.0  # number of withheld steps since the last sample

    def decide(
        self,
        optimizer: Optimizer,
        step: int,
        entries: Sequence[Entry],
        version: int,
        *,
        inside_backward: bool,
        found: Mapping[str, Found],
    ) -> None:
        """Decide whether this optimizer's next step uses its gradients; the open sample has the rows of its entries.

        Inside the backward gradients arrive one by one, so only non-finite ones count: the total norm is unknown.

        Args:
            found: what else is known of the open sample, by key, for a guard's function.
        """
        self.compare_ranks()
        consensus = self._consensus(entries, version)
        # With shards use all slots, so that all ranks mean the same parameters: an empty shard may have no gradient.
        slots = tuple(sorted(slot for slot, parameter in entries if consensus or parameter.grad is not None))
        if not slots:
            return
        num_nonfinite = sum_sq = math.nan
        learns = False
        if self._guard.is_bad is not None:
            snapshot = self._peek(slots, step, found)
            with RaisedToTheUser():
                bad = bool(self._guard.is_bad(snapshot))
        else:
            num_nonfinite, sum_sq, overflowed = self._sums(optimizer, slots, consensus)
            if overflowed:  # the optimizer itself skips the step, as a loss scaler has told it
                return
            learns = not inside_backward
            limit = math.inf if inside_backward else self._guard.norms.limit(*self._present(slots))
            bad = num_nonfinite > 0 or sum_sq > limit * limit
            if learns and not num_nonfinite >= 0:  # NaN, or far below 0: see RankConsensus
                self._notices.say("guard", f"{_NOT_HEARD} (step {step})")
        withheld = True  # also if `withholds` raises, because the step is not made then
        try:
            with RaisedToTheUser(TooManySkippedStepsError):
                withheld = self._guard.withholds(step, bad=bad or self._withheld)
        finally:
            self._decisions.append(_Decision(slots, num_nonfinite, sum_sq, learns, bad, withheld))
        if withheld:
            if self.replay is not None and num_nonfinite > 0:
                self.replay.look(step)
            self._deprived[id(optimizer)].enter_context(_without_gradients(optimizer))

    @property
    def _withheld(self) -> bool:
        """Whether the open step is withheld from an optimizer so far."""
        return any(decision.withheld for decision in self._decisions)

    def refuse_parts(self) -> None:
        """Refuse to decide: ranks train different parameters.

        Raises:
            CannotWatchError: always.
        """
        raise CannotWatchError(PARTS_REFUSED)

    def _consensus(self, entries: Sequence[Entry], version: int) -> RankConsensus | None:
        """Return the consensus for an optimizer's watched parameters; None if every rank holds them whole."""
        if not self._shards.any:
            return None
        with RaisedToTheUser(CannotWatchError):
            refuse_guard(uses_fsdp1=self._shards.uses_fsdp1, function=self.needs_rows)
            if version != self._version:
                self._version, self._consensuses = version, {}
            slots = tuple(slot for slot, _ in entries)
            if slots not in self._consensuses and any(is_sharded(parameter) for _, parameter in entries):
                self._consensuses[slots] = RankConsensus(dict(entries))
            return self._consensuses.get(slots)

    def _sums(
        self, optimizer: Optimizer, slots: tuple[int, ...], consensus: RankConsensus | None
    ) -> tuple[float, float, bool]:
        """Return the number of non-finite elements (from the backward or at the optimizer) and the sum of squares.

        For shards both are summed over ranks. And whether a loss scaler has told the optimizer to skip the step itself.
        This is the only place where a guard makes the host wait.
        """
        parts = []
        for rows_NC in self._window.open_rows(slots):
            weighted_NC = rows_NC if consensus is None else rows_NC * consensus.weights(rows_NC.device)[:, None]
            sums_C = weighted_NC.nansum(dim=0)  # missing rows are NaN
            num_nonfinite = torch.stack([sums_C[column] for column in NONFINITE_COLUMNS]).sum()  # no index is uploaded
            parts.append(torch.stack((num_nonfinite, sums_C[Column.GRAD_SUM_SQ])))
        home = max((part.device for part in parts), key=lambda device: device.type != "cpu")
        total = torch.stack([onto(part, home) for part in parts]).sum(dim=0)
        if consensus is not None:
            self._has_voted = True  # before it can raise: a second vote would count for the next step
            total = consensus.sum_over_ranks(total)
        scalers: Tensor | None = getattr(optimizer, "found_inf", None)
        found_inf = total.new_zeros(1) if scalers is None else onto(scalers.reshape(1), home).to(wide_dtype(home))
        num, sum_sq, overflowed = torch.cat((total, found_inf)).tolist()
        return num, sum_sq, overflowed > 0

    def _present(self, slots: Sequence[int]) -> tuple[tuple[str, ...], npt.NDArray[np.bool_]]:
        """Return the names of all parameters [P], and which are in these slots [P]."""
        names = self._known().names
        present_P = np.zeros(len(names), dtype=bool)
        present_P[list(slots)] = True
        return names, present_P

    def _peek(self, slots: Sequence[int], step: int, found: Mapping[str, Found]) -> Snapshot:
        """Return the open sample with only these slots. Waits for the device."""
        known, here, open_sample = self._known(), list(slots), self._window.peek(found)
        rows_PC = np.full((len(known.names), NUM_COLUMNS), np.nan)
        rows_PC[here] = open_sample.rows[here]
        return Snapshot(
            np.array([step]),
            known.names,
            rows_PC[None],
            loss_scale=np.array([open_sample.loss_scale]),
            skipped=np.array([open_sample.skipped]),
            trainable=np.array(known.trainable, dtype=bool),
            metrics={key: np.array([value]) for key, value in open_sample.metrics.items()},
        )

    def abstain(self, entries: Sequence[Entry], version: int) -> None:
        """Abstain from a step that is not checked on this rank, so that ranks that check it do not wait."""
        if (consensus := self._consensus(entries, version)) is not None:
            self._has_voted = True
            consensus.abstain()

    def vote(self, optimizer: Optimizer, decide: Callable[[], None]) -> None:
        """Decide about a step, or abstain if the monitor fails before its vote, because the other ranks wait for it."""
        self._has_voted = False
        decide()
        if self._voter is not None and not self._has_voted:
            self._voter.before_step(optimizer, inside_backward=False)

    def keep_voting(
        self, slot_of_id: Mapping[int, int], models: Iterable[nn.Module], *, is_removed: bool = False
    ) -> bool:
        """Vote after a failure or the removal of the monitor. Returns whether there may be anything to vote on."""
        self.stop_voting()
        if world_size() == 1:
            return False
        self._voter = Voter(slot_of_id, models, is_removed=is_removed)
        return True

    def stop_voting(self) -> None:
        """Vote no longer. Idempotent."""
        if self._voter is not None:
            self._voter.stop()
            self._voter = None

    def release(self, optimizer: Optimizer | None = None) -> None:
        """Restore the gradients of this optimizer, or of all."""
        for key in list(self._deprived) if optimizer is None else [id(optimizer)]:
            self._deprived.pop(key, ExitStack()).close()

    def end_step(self, number: int) -> None:
        """Close the open step under this number, and learn from it."""
        decisions, self._was_withheld = self._decisions, self._withheld
        self._decisions = []
        if self.replay is not None:
            self.replay.forget()
        if not decisions:
            return
        self._num_withheld += self._was_withheld
        first = next((one for one in decisions if one.withheld and one.bad), None)
        if first is not None:  # said here, because the rules receive only sampled steps
            self._notices.say("skipped", f"the guard skipped step {number}, whose gradients {_description_of(first)}")
        for one in decisions:
            if one.learns and not one.num_nonfinite and 0 < one.sum_sq < math.inf:
                self._guard.norms.learn(*self._present(one.slots), math.sqrt(one.sum_sq), alarmed=one.bad)
        self._guard.count(bad=any(one.bad or one.withheld for one in decisions), skipped=self._was_withheld)

    def take(self) -> dict[str, Tensor | float]:
        """Return the number of steps withheld since the last call, and whether the last step was, by key."""
        count, self._num_withheld = self._num_withheld, 0.0
        return {keys.NUM_GUARDED_STEPS: count, keys.GUARDED: float(self._was_withheld)}

    def state_dict(self) -> dict[str, Any]:
        """Return the guard's state in plain numbers."""
        return {"guard": self._guard.state_dict(), "num_withheld": self._num_withheld}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict()`."""
        num_withheld = float(state["num_withheld"])
        self._guard.load_state_dict(state["guard"])
        self._num_withheld = num_withheld


def _description_of(decision: _Decision) -> str:
    """Return what is wrong with the gradients, in words."""
    if math.isnan(decision.num_nonfinite):
        return "its function calls unhealthy"
    if decision.num_nonfinite:
        return f"have NaN or infinite elements ({decision.num_nonfinite:.0f})"
    return f"have a norm of {math.sqrt(decision.sum_sq):.3g}"


@contextmanager
def _without_gradients(optimizer: Optimizer) -> Iterator[None]:
    """Set all gradients that this optimizer could use, watched or not, to None meanwhile."""
    taken = [(p, p.grad) for p in parameters_of(optimizer) if p.grad is not None]
    for parameter, _ in taken:
        parameter.grad = None
    yield
    if current_graph_task() == -1:  # otherwise the step raised, and the next backward makes new ones
        for parameter, gradient in taken:
            if parameter.grad is None:
                parameter.grad = gradient
