"""Withholds gradients from an optimizer, decided on the host or on the device, and restores them after the step.

before_step   decide()      the open sample's rows of this optimizer -> [non-finite elements, sum of squares]
                            (for shards: one all-reduce of these two numbers, so that all ranks decide alike)
              fused         the decision stays on the device and is passed to the step as `optimizer.found_inf`
              others        the host reads the decision; an optimizer without gradients changes nothing
after_step    release()     gradients and found_inf are restored
sample over   end_step()    the step's decisions are complete
later         decide()      the guard learns from them
"""

import logging
import math
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .._boundary import Boundary, RaisedToTheUser, entry_point
from .._measure.columns import NONFINITE_COLUMNS, NUM_COLUMNS, Column
from .._measure.elements import onto, wide_dtype
from .._nonfinite.replay import StepReplay
from .._runtime.autograd import Entry, current_graph_task
from .._runtime.notices import CannotWatchError, Notices
from .._runtime.sharding import Shards, is_sharded, world_size
from .._runtime.steps import STEP_HOOKS, Listener, parameters_of
from .._transfer.sample_buffer import SampleBuffer
from .._transfer.transfers import Found, Names, PinnedPool, Transfer
from ..snapshot import Snapshot, keys
from .guard import SkipGuard, TooManySkippedStepsError, honours_found_inf
from .rank_consensus import PARTS_REFUSED, RankConsensus, refuse_guard

logger: Final = logging.getLogger("wandb_gradwatch")

# N parameters of an optimizer

# The host is seldom this many steps ahead of its device. If it is, it waits while the device has work for 7 steps.
_LEARNT_AFTER: Final = 8

_UNHEARD: Final = (
    "the monitor of another rank has failed or was removed, so that no rank can tell whether the gradients of the "
    "whole model are healthy: from here on every step is applied, on all ranks alike"
)


@dataclass
class _Opinion:
    """The statistics and the decision for one optimizer's gradients in a step."""

    slots: tuple[int, ...]  # of the parameters
    learns: bool  # whether the guard learns the usual norm from this one
    # [5]: number of non-finite elements, sum of squares, and as 0 or 1: unhealthy, withheld, skipped by a loss scaler.
    values: list[float] | Transfer  # a transfer until they are fetched

    def fetch(self) -> list[float]:
        """Return the values; waits for the transfer."""
        if isinstance(self.values, Transfer):
            self.values.arrived(wait=True)
            self.values = list(map(float, self.values.take()))
        return self.values


@dataclass(frozen=True)
class _Step:
    """A finished step that the guard has not learned from yet."""

    number: int
    opinions: list[_Opinion]  # one for each optimizer that stepped
    was_read: bool  # the host has decided, so its values are there and the guard's limit was checked


class StepSkipping(Listener):
    """Applies a guard's decisions to the optimizers.

    If the monitor fails or is removed, the other ranks still wait for this rank's vote. It then listens to steps itself
    and abstains, which ends the guard on all ranks at once: models would diverge if ranks decided differently. If all
    ranks have removed theirs, the next vote is the last one.
    """

    def __init__(
        self,
        guard: SkipGuard,
        window: SampleBuffer,
        shards: Shards,
        known: Callable[[], Names],  # returns the current names, and which are trainable
        notices: Notices,
    ) -> None:
        self._guard, self._window, self._shards, self._known, self._notices = guard, window, shards, known, notices
        self._boundary = Boundary(self._failed)  # of the votes after a failure of the monitor, which has its own
        self.replay: StepReplay | None = None  # runs a bad step again
        self.compare_ranks: Callable[[], object] = lambda: None  # raises if ranks train different parameters
        self.needs_rows = guard.is_bad is not None  # otherwise only norms and non-finite counts are needed
        self._consensuses: dict[tuple[int, ...], RankConsensus] = {}  # of each optimizer, by its slots
        self._version = -1  # of the parameters, when the consensuses were made
        self._unlearnt: deque[_Step] = deque()
        self._has_voted = False  # on the step that an optimizer is about to make
        # After the monitor has failed or was removed: the parameters to vote on
        self._slot_of_id: dict[int, int] = {}
        self._models: list[weakref.ref[nn.Module]] = []
        self._is_removed = False
        self._pinned_pool = PinnedPool()
        # By the id of an optimizer that steps: restores what it was deprived of, or given.
        self._deprived: defaultdict[int, ExitStack] = defaultdict(ExitStack)
        self._opinions: list[_Opinion] = []  # of the open step
        self._withheld: Tensor | bool = False  # whether the open step is withheld from an optimizer
        self._last_withheld: Tensor | bool = False  # the same of the last closed step
        self._num_withheld: Tensor | float = 0.0  # number of withheld steps since the last sample

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
        self.learn()
        self.compare_ranks()
        consensus = self._consensus(entries, version)
        # With shards use all slots, so that all ranks mean the same parameters: an empty shard may have no gradient.
        slots = tuple(sorted(slot for slot, parameter in entries if consensus or parameter.grad is not None))
        if not slots:
            return
        if self._guard.is_bad is not None:
            snapshot = self._peek(slots, step, found)
            with RaisedToTheUser():
                bad = bool(self._guard.is_bad(snapshot))
            self._decide_here(optimizer, step, slots, [math.nan, math.nan, float(bad)], learns=False)
            return
        limit = math.inf if inside_backward else self._guard.norms.limit(*self._present(slots))
        # A fused optimizer copies `found_inf` to other devices itself, but would not wait before the host reads it.
        home = min((parameter.device for _, parameter in entries), key=lambda device: device.type != "cpu")
        sums = self._sums(slots, home, consensus)
        bad_there = (sums[0] > 0) | (sums[1] > limit * limit)
        if honours_found_inf(optimizer):
            self._decide_there(optimizer, slots, sums, bad_there, learns=not inside_backward)
        else:  # the only place where a guard makes the host wait
            values = torch.cat((sums, bad_there.to(sums.dtype)[None])).tolist()
            self._decide_here(optimizer, step, slots, values, learns=not inside_backward)

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
        if self._slot_of_id and not self._has_voted:
            self.before_step(optimizer, inside_backward=False)

    def keep_voting(
        self, slot_of_id: Mapping[int, int], models: Iterable[nn.Module], *, is_removed: bool = False
    ) -> bool:
        """Vote after a failure or the removal of the monitor. Returns whether there may be anything to vote on."""
        if world_size() == 1:
            return False
        self._slot_of_id, self._models = dict(slot_of_id), [weakref.ref(model) for model in models]
        self._is_removed = is_removed
        STEP_HOOKS.subscribe(self)
        _VOTERS.add(self)
        return True

    def stop_voting(self, ids: Iterable[int]) -> None:
        """Vote no longer on these parameters: another guard does, or all ranks have removed theirs."""
        for known in self._slot_of_id.keys() & set(ids):
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
            self.stop_voting(list(self._slot_of_id))
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
            self.stop_voting(map(id, parameters.values()))

    def _held_by(self, optimizer: Optimizer) -> dict[int, Tensor]:
        slots = ((self._slot_of_id.get(id(parameter)), parameter) for parameter in parameters_of(optimizer))
        return {slot: parameter for slot, parameter in slots if slot is not None}

    def release(self, optimizer: Optimizer | None = None) -> None:
        """Restore the gradients and `found_inf` of this optimizer, or of all."""
        for key in list(self._deprived) if optimizer is None else [id(optimizer)]:
            self._deprived.pop(key, ExitStack()).close()

    def end_step(self, number: int) -> None:
        """Close the open step under this number."""
        self._last_withheld = self._withheld
        if self.replay is not None:
            self.replay.forget()
        if not self._opinions:
            return
        was_read = all(isinstance(opinion.values, list) for opinion in self._opinions)
        self._num_withheld = _sum(self._num_withheld, self._withheld)
        self._unlearnt.append(_Step(number, self._opinions, was_read))
        self._opinions, self._withheld = [], False
        if len(self._unlearnt) == 1 and was_read:
            self.learn(keep=0)

    def learn(self, *, keep: int = _LEARNT_AFTER - 1, raises: bool = True) -> None:
        """Learn from all but the last `keep` steps, before the next step is checked. Seldom waits for the device.

        At the end of training (`raises=False`) too many unhealthy steps do not raise, as there is nothing to stop.
        """
        while len(self._unlearnt) > keep:
            step = self._unlearnt.popleft()
            bad = skipped = counts = False
            found = ""  # what is wrong with the gradients
            for opinion in step.opinions:
                num_nonfinite, sum_sq, is_bad, is_withheld, overflowed = opinion.fetch()
                if overflowed:  # skipped by the loss scaler
                    continue
                if opinion.learns and not num_nonfinite >= 0:
                    self._notices.say("guard", f"{_UNHEARD} (step {step.number})")
                bad, skipped, counts = bad or bool(is_bad or is_withheld), skipped or bool(is_withheld), True
                if is_withheld and is_bad and not found:
                    nonfinite = f"have NaN or infinite elements ({num_nonfinite:.0f})"
                    found = nonfinite if num_nonfinite else f"have a norm of {math.sqrt(sum_sq):.3g}"
                    found = "its function calls unhealthy" if math.isnan(num_nonfinite) else found
                if opinion.learns and not num_nonfinite and 0 < sum_sq < math.inf:
                    self._guard.norms.learn(*self._present(opinion.slots), math.sqrt(sum_sq), alarmed=bool(is_bad))
            if found:  # said here, because the rules receive only sampled steps
                self._notices.say("skipped", f"the guard skipped step {step.number}, whose gradients {found}")
            if counts:
                with RaisedToTheUser(TooManySkippedStepsError):
                    self._guard.count(step.number, bad=bad, skipped=skipped, was_asked=step.was_read or not raises)

    def take(self) -> dict[str, Tensor | float]:
        """Return scalars on any device: the steps withheld since the last call, and whether the last step was."""
        count, withheld = self._num_withheld, self._last_withheld
        self._num_withheld = 0.0
        return {
            keys.NUM_GUARDED_STEPS: count,
            keys.GUARDED: withheld if isinstance(withheld, Tensor) else float(withheld),
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the guard's state, and the steps not learned from yet, in plain numbers. Waits for the device."""
        for opinion in (one for step in self._unlearnt for one in step.opinions):
            opinion.fetch()
        unlearnt = [asdict(step) for step in self._unlearnt]
        return {"guard": self._guard.state_dict(), "unlearnt": unlearnt, "num_withheld": float(self._num_withheld)}

    def load_state_dict(self, state: Mapping[str, Any], place: Mapping[int, int]) -> None:
        """Continue from `state_dict()`; `place` maps old slots to current ones, without parameters that are gone."""
        num_withheld, unlearnt = float(state["num_withheld"]), []
        for step in state["unlearnt"]:
            opinions = []
            for one in step["opinions"]:
                slots = tuple(sorted(place[slot] for slot in one["slots"] if slot in place))
                num_nonfinite, sum_sq, bad, withheld, skipped = map(float, one["values"])
                values = [num_nonfinite, sum_sq, bad, withheld, skipped]
                opinions.append(_Opinion(slots, bool(one["learns"]), values))
            unlearnt.append(_Step(int(step["number"]), opinions, bool(step["was_read"])))
        self._guard.load_state_dict(state["guard"])
        self._num_withheld = num_withheld
        self._unlearnt.clear()
        self._unlearnt.extend(unlearnt)

    def _sums(self, slots: tuple[int, ...], home: torch.device, consensus: RankConsensus | None) -> Tensor:
        """Return the number of non-finite elements (from the backward or at the optimizer) and the sum of squares: [2].

        For shards both are summed over ranks. Rows on the CPU are ignored if `home` is not the CPU, so that the host
        does not wait.
        """
        parts = []
        for rows_NC in self._window.open_rows(slots):
            if rows_NC.device.type == "cpu" and home.type != "cpu":
                continue
            weighted_NC = rows_NC if consensus is None else rows_NC * consensus.weights(rows_NC.device)[:, None]
            sums_C = weighted_NC.nansum(dim=0)  # missing rows are NaN
            num_nonfinite = sum((sums_C[column] for column in NONFINITE_COLUMNS), torch.zeros_like(sums_C[0]))
            parts.append(onto(torch.stack((num_nonfinite, sums_C[Column.GRAD_SUM_SQ])), home))
        total = sum(parts, torch.zeros(2, dtype=wide_dtype(home), device=home))
        if consensus is None:
            return total
        self._has_voted = True  # before it can raise: a second vote would count for the next step
        return consensus.sum_over_ranks(total)

    def _decide_here(
        self, optimizer: Optimizer, step: int, slots: tuple[int, ...], values: list[float], *, learns: bool
    ) -> None:
        """Decide on the host, from the first three values of an opinion."""
        withheld = True  # also if `withholds` raises, because the step is not made then
        try:
            with RaisedToTheUser(TooManySkippedStepsError):
                withheld = self._guard.withholds(step, bad=bool(values[2]) or bool(self._withheld))
        finally:
            self._opinions.append(_Opinion(slots, learns, [*values, float(withheld), 0.0]))
        if withheld:
            self._withheld = True
            if self.replay is not None and values[0] > 0:  # something is not finite
                self.replay.look(step)
            self._deprived[id(optimizer)].enter_context(_without_gradients(optimizer))

    def _decide_there(
        self, optimizer: Optimizer, slots: tuple[int, ...], sums: Tensor, bad: Tensor, *, learns: bool
    ) -> None:
        scalers: Tensor | None = getattr(optimizer, "found_inf", None)
        withheld = torch.zeros_like(bad)
        overflowed = withheld if scalers is None else onto(scalers.reshape(()), bad.device) > 0
        if not self._guard.lets_through:
            before = onto(self._withheld, bad.device) if isinstance(self._withheld, Tensor) else self._withheld
            skipped = bad | before
            withheld = skipped & ~overflowed
            # The kernels compare found_inf with exactly 1, and subtract it from the step counters.
            found_inf = (skipped | overflowed).to(torch.float32)
            self._deprived[id(optimizer)].enter_context(_with_found_inf(optimizer, found_inf))
            self._withheld = withheld | before
        flags = torch.stack((bad, withheld, overflowed)).to(sums.dtype)
        self._opinions.append(_Opinion(slots, learns, self._pinned_pool.send(torch.cat((sums, flags)))))


_VOTERS: Final[set[StepSkipping]] = set()  # guards that vote although their monitor has failed or was removed


def take_over_votes(parameters: Iterable[Tensor]) -> None:
    """Stop the votes of earlier guards on these parameters, because a new one votes."""
    ids = {id(parameter) for parameter in parameters}
    for voter in tuple(_VOTERS):
        voter.stop_voting(ids)


def _sum(count: Tensor | float, one_more: Tensor | bool) -> Tensor | float:
    """Add numbers that may be on different devices, without making the host wait."""
    if isinstance(count, Tensor) and isinstance(one_more, Tensor):
        device = count.device if one_more.device.type == "cpu" else one_more.device
        return onto(count, device) + onto(one_more, device)
    return count + one_more


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


@contextmanager
def _with_found_inf(optimizer: Any, found_inf: Tensor) -> Iterator[None]:
    """Put the device's decision in the place of the loss scaler's `found_inf` meanwhile."""
    before: Tensor | None = getattr(optimizer, "found_inf", None)
    optimizer.found_inf = found_inf
    yield
    if getattr(optimizer, "found_inf", None) is found_inf:
        if before is None:
            del optimizer.found_inf
        else:
            optimizer.found_inf = before
