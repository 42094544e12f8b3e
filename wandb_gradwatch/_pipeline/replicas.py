"""Replicas that must agree: what every rank's optimizer received, and its parameters, compared in the background.

Each rank publishes a few numbers of its newest samples in the store: sums of columns of their rows, so that this costs
no pass over a tensor. Rank 0 reads those of all ranks and compares equal steps. What it finds becomes facts of its next
samples, which the judgement explains. Nobody waits: what a rank has not published yet is compared later.

    <rank>      samples of this rank; replaced at each of its first samples and at every flush

Ranks that nothing holds together may be thousands of steps apart. Therefore the samples are the first ones, the newest
ones, and the last ones of every n-th window, where n doubles as the training goes on: some are of both ranks.

docs/distributed.md says what is told of replicas, and what tells those apart that differ on purpose.
"""

import gc
import math
import sys
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, cast

import numpy as np
import torch.distributed as dist
from torch import nn
from torch.distributed.distributed_c10d import Store
from torch.optim import Optimizer

from .._capture.parameter_registry import ParameterRegistry
from .._measure.columns import NONFINITE_COLUMNS, BoolArray, Column, FloatArray
from .._runtime.rank_session import RankSession
from .._runtime.steps import parameters_of
from .._transfer.transfers import ArrivedSample
from ..snapshot import keys

# R ranks, P watched parameters, G groups of neighbouring parameters, N newest samples of a rank

_FIRST: Final = 8  # samples after each of which a rank publishes
_EACH: Final = 4  # first samples of a publication, and newest ones
_MOST_WINDOWS: Final = 8  # in a publication
_MAX_GROUPS: Final = 32
_MAX_SUMS: Final = 10_000  # groups of all ranks together: what rank 0 reads hardly grows with the number of ranks
# Largest relative difference of sums over the same bits, which two ranks may have added in another order.
_SAME: Final = 1e-5
_COLUMNS: Final = (Column.GRAD_SUM_SQ, Column.RECEIVED_SUM_SQ, Column.PARAM_SUM_SQ)
_HEADER: Final = ("step", "learning_rate", "logs")  # logs: 1 if the rank writes to a W&B run
# Classes whose objects average the parameters of ranks now and then, by module.
_AVERAGERS: Final = {
    "torch.distributed.algorithms.model_averaging.averagers": "ModelAverager",
    "torchft.local_sgd": "LocalSGD",
}


@dataclass(frozen=True)
class Apart:
    """Where ranks differ in one step: by group [G], and the ranks that differ from most others."""

    groups: BoolArray
    ranks: tuple[int, ...]  # () if all agree, or if no value is that of most ranks

    @property
    def share(self) -> float:
        """Share of the groups in which ranks differ."""
        return float(self.groups.mean()) if self.groups.size else 0.0


def apart(values_RG: FloatArray) -> Apart:
    """Compare sums that are equal on replicas. A sum that any rank does not know (NaN) is not compared."""
    reference_G = np.median(values_RG, axis=0)  # the value of most ranks, if there is one
    apart_RG = _differ(values_RG, reference_G)
    ranks = np.flatnonzero(apart_RG.any(axis=1))
    groups: BoolArray = np.logical_or.reduce(apart_RG, axis=0)
    return Apart(groups, tuple(ranks.tolist()) if 2 * len(ranks) < len(values_RG) else ())


def _differ(first: FloatArray, second: FloatArray) -> BoolArray:
    differ: BoolArray = np.abs(first - second) > _SAME * np.maximum(np.abs(first), np.abs(second))
    return differ


@dataclass(frozen=True)
class Compared:
    """What the compared steps have shown so far.

    Args:
        step: the newest compared step.
        gradients, parameters: of what the optimizers received, and of the parameters before that.
        left_equal, changed: shares of the groups with different gradients in which the backward left equal ones, and
            in which they were changed after the backward.
        averaged: share of the groups with different parameters in which the gradients are equal, and not 0.
        begun, begun_averaged: `parameters.share` and `averaged` in the first sample; NaN if that was not compared.
        num_compared, num_different: compared steps, and those with different gradients.
        different_since: the first of the latter.
        parameters_since: the first of the compared steps in a row with different parameters.
    """

    num_ranks: int
    step: int
    gradients: Apart
    parameters: Apart
    left_equal: float
    changed: float
    averaged: float
    begun: float
    begun_averaged: float
    num_compared: int
    num_different: int
    different_since: int
    parameters_since: int
    have_own_rates: bool
    have_own_runs: bool


def compare(headers_RH: FloatArray, sums_RCG: FloatArray, before: Compared | None, *, is_first: bool) -> Compared:
    """Compare one step of all ranks, which follows on what is known `before`; `is_first`: it is the first sample."""
    step = int(headers_RH[0, 0])
    left_RG, received_RG, parameters_RG = sums_RCG.swapaxes(0, 1)
    gradients, parameters = apart(received_RG), apart(parameters_RG)
    equal_G = ~gradients.groups & (received_RG > 0).all(axis=0)
    changed_G: BoolArray = np.logical_or.reduce(_differ(left_RG, received_RG), axis=0)
    averaged = _share(equal_G, parameters.groups)
    have_own_rates = bool(apart(headers_RH[:, [_HEADER.index("learning_rate")]]).groups.any())
    num_compared = num_different = 0
    different_since, parameters_since, begun, begun_averaged = step, step, math.nan, math.nan
    if before is not None:
        have_own_rates |= before.have_own_rates
        begun, begun_averaged = before.begun, before.begun_averaged
        num_compared, num_different = before.num_compared, before.num_different
        different_since = before.different_since if num_different else step
        parameters_since = before.parameters_since if before.parameters.groups.any() else step
    return Compared(
        len(headers_RH),
        step,
        gradients,
        parameters,
        left_equal=_share(~apart(left_RG).groups, gradients.groups),
        changed=_share(changed_G, gradients.groups),
        averaged=averaged,
        begun=parameters.share if is_first else begun,
        begun_averaged=averaged if is_first else begun_averaged,
        num_compared=num_compared + 1,
        num_different=num_different + bool(gradients.groups.any()),
        different_since=different_since,
        parameters_since=parameters_since,
        have_own_rates=have_own_rates,
        have_own_runs=bool((headers_RH[:, _HEADER.index("logs")] > 0).all()),
    )


def _share(found_G: BoolArray, of_G: BoolArray) -> float:
    return float(found_G[of_G].mean()) if of_G.any() else math.nan


class Replicas:
    """The check of one watcher: `add` each of its samples, `end_window` at a flush, and read `facts`.

    Args:
        logs: whether this rank writes to a W&B run.
    """

    def __init__(self, session: RankSession, registry: ParameterRegistry, *, logs: bool) -> None:
        self._session, self._logs = session, logs
        self._names = tuple(registry.names)
        self._starts = _starts(len(self._names), session.world)
        # Samples of this rank, as they are published: [H + 3 G] each
        self._first: list[FloatArray] = []
        self._newest: deque[FloatArray] = deque(maxlen=_EACH)
        self._of_windows: dict[int, FloatArray] = {}  # by number
        self._num_windows = 0
        self._every = 1  # windows
        self._num_samples = 0
        self._compared: Compared | None = None  # written by the thread of the store
        if session.rank == 0:
            self._meant = _Meant.of(registry)
            self._collectives = Collectives()

    def add(self, sample: ArrivedSample) -> None:
        """Take a sample of this rank, before it is merged. Cost: a few sums over its rows."""
        if self._session.rank == 0:
            self._collectives.see(sample.sample.step)
        rows_PC = sample.rows[: len(self._names)]
        is_bad = np.nansum(rows_PC[:, NONFINITE_COLUMNS]) > 0
        if sample.skipped or sample.sample.left_out or is_bad or len(rows_PC) < len(self._names):
            return
        is_absent_P = np.isnan(rows_PC[:, Column.NUM_ELEMENTS])
        sums_PC = np.where(is_absent_P[:, None], 0.0, rows_PC[:, _COLUMNS])
        sums_CG = np.add.reduceat(sums_PC, self._starts, axis=0).T
        header = (sample.sample.step, sample.sample.learning_rate, self._logs)
        self._newest.append(np.concatenate([np.array(header, dtype=np.float64), sums_CG.ravel()]))
        self._num_samples += 1
        if len(self._first) < _EACH:
            self._first.append(self._newest[-1])
        if self._num_samples <= _FIRST:
            self._publish()

    def end_window(self) -> None:
        """Publish, because the window is flushed. Returns at once."""
        if not self._newest:
            return
        self._num_windows += 1
        if self._num_windows % self._every == 0:
            self._of_windows[self._num_windows] = self._newest[-1]
        if len(self._of_windows) > _MOST_WINDOWS:
            self._every *= 2
            self._of_windows = {number: one for number, one in self._of_windows.items() if number % self._every == 0}
        self._publish()

    def _publish(self) -> None:
        text = np.stack([*self._first, *self._of_windows.values(), *self._newest]).tobytes()

        def exchange(store: Store) -> bool:
            cast("Any", store).set(str(self._session.rank), text)  # accepts bytes
            return self._session.rank > 0 or self._compare(store)

        self._session.ask("replicas", exchange)

    def _compare(self, store: Store) -> bool:
        """Compare the steps that all ranks have published; False if the newest of this rank is not among them."""
        published = [str(rank) for rank in range(self._session.world)]
        if not store.check(published):
            return False
        width = len(_HEADER) + len(_COLUMNS) * len(self._starts)
        of_ranks = [np.frombuffer(text).reshape(-1, width) for text in store.multi_get(published)]
        by_step = [{int(row[0]): row for row in rows} for rows in of_ranks]
        last = 0 if self._compared is None else self._compared.step
        for step in sorted(set(by_step[0]).intersection(*by_step[1:])):
            if step > last:
                rows_R = np.stack([samples[step] for samples in by_step])
                sums_RCG = rows_R[:, len(_HEADER) :].reshape(len(rows_R), len(_COLUMNS), -1)
                sums_RCG[:, :, self._is_ignored_G] = math.nan
                is_first = step == int(self._first[0][0])
                self._compared = compare(rows_R[:, : len(_HEADER)], sums_RCG, self._compared, is_first=is_first)
        return self._compared is not None and self._compared.step == max(by_step[0])

    @property
    def _is_ignored_G(self) -> BoolArray:
        """The groups with a parameter that DistributedDataParallel leaves out, although it trains others: [G]."""
        ignored_P = np.zeros(len(self._names), dtype=bool)
        ignored_P[list(self._meant.ignored)] = True
        return np.logical_or.reduceat(ignored_P, self._starts)

    def facts(self) -> Mapping[str, float]:
        """What the newest comparison says, by key; {} on other ranks than 0, and if replicas agree."""
        found = self._compared
        if found is None or not (found.gradients.groups.any() or found.parameters.groups.any()):
            return {}
        meant = self._meant
        are_independent = meant.has_outer_optimizer or found.have_own_runs or found.have_own_rates
        on_purpose = meant.averages_parameters or (are_independent and not meant.by_ddp)
        values = {
            "replicas": found.num_ranks,
            "replicas_step": found.step,
            "replicas_by_ddp": meant.by_ddp,
            "replicas_on_purpose": on_purpose,
            "replicas_uneven": self._collectives.are_uneven,
            "replicas_own_rates": found.have_own_rates,
            "replicas_gradients": found.gradients.share,
            "replicas_gradients_num": len(found.gradients.ranks),
            "replicas_gradients_rank": min(found.gradients.ranks, default=math.nan),
            "replicas_num_compared": found.num_compared,
            "replicas_num_different": found.num_different,
            "replicas_different_since": found.different_since,
            "replicas_left_equal": found.left_equal,
            "replicas_changed": found.changed,
            "replicas_parameters": found.parameters.share,
            "replicas_parameters_num": len(found.parameters.ranks),
            "replicas_parameters_rank": min(found.parameters.ranks, default=math.nan),
            "replicas_parameters_since": found.parameters_since,
            "replicas_averaged": found.averaged,
            "replicas_begun": found.begun,
            "replicas_begun_averaged": found.begun_averaged,
        }
        groups = found.gradients.groups if found.gradients.groups.any() else found.parameters.groups
        of_parameters = {keys.REPLICA_APART + name: 1.0 for name in self._named(groups)} if groups.mean() < 0.5 else {}
        return {keys.FACT + name: float(value) for name, value in values.items()} | of_parameters

    def _named(self, groups_G: BoolArray) -> list[str]:
        """The names of the parameters in these groups."""
        group_P = np.searchsorted(self._starts, np.arange(len(self._names)), side="right") - 1
        return [self._names[place] for place in np.flatnonzero(groups_G[group_P]).tolist()]


def _starts(num_names: int, world: int) -> Any:
    """The first parameter of each group: [G]."""
    num_groups = max(1, min(num_names, _MAX_GROUPS, _MAX_SUMS // world))
    return np.unique(np.arange(num_groups) * num_names // num_groups)


@dataclass(frozen=True)
class _Meant:
    """What the objects of this process show of how the ranks are meant to train. Not to be called often: 0.05 s.

    Args:
        by_ddp: a DistributedDataParallel holds parameters that are watched.
        ignored: slots of parameters that it does not average.
        averages_parameters: something averages parameters now and then (local SGD), instead of gradients.
        has_outer_optimizer: several optimizers hold the same parameter, as in DiLoCo.
    """

    by_ddp: bool
    ignored: frozenset[int]
    averages_parameters: bool
    has_outer_optimizer: bool

    @classmethod
    def of(cls, registry: ParameterRegistry) -> "_Meant":
        slot_of_id = {id(parameter): slot for slot, parameter in registry.scan()}
        averagers = tuple(
            getattr(sys.modules[module], name, ()) for module, name in _AVERAGERS.items() if module in sys.modules
        )
        wanted = (nn.parallel.DistributedDataParallel, Optimizer, *averagers)
        found = [one for one in gc.get_objects() if issubclass(type(one), wanted)]
        engines = [one for one in found if isinstance(one, nn.parallel.DistributedDataParallel)]
        of_engines = [
            (slot_of_id[id(parameter)], name in engine.parameters_to_ignore)
            for engine in engines
            for name, parameter in engine.module.named_parameters()
            if id(parameter) in slot_of_id
        ]
        optimizers = [one for one in found if isinstance(one, Optimizer)]
        owners = Counter(slot_of_id[id(p)] for one in optimizers for p in parameters_of(one) if id(p) in slot_of_id)
        return cls(
            by_ddp=bool(of_engines),
            ignored=frozenset(slot for slot, is_ignored in of_engines if is_ignored),
            averages_parameters=len(found) > len(engines) + len(optimizers),
            has_outer_optimizer=any(num > 1 for num in owners.values()),
        )


class Collectives:
    """Whether some steps call more collectives than others, as they do if parameters are averaged now and then."""

    def __init__(self) -> None:
        self.are_uneven = False
        self._last: tuple[int, int] | None = None  # the step and the number of collectives of the last sample
        self._per_step: float | None = None

    def see(self, step: int) -> None:
        """Count the collectives up to a sample of this step."""
        groups: Any = dist.distributed_c10d._world.pg_map
        try:
            number = sum(group._get_sequence_number_for_group() for group in groups)
        except RuntimeError:  # a backend that does not count, as MPI: nothing rules out that parameters are averaged
            self.are_uneven = True
            return
        if self._last is not None and step > self._last[0]:
            per_step = (number - self._last[1]) / (step - self._last[0])
            self.are_uneven |= self._per_step is not None and per_step != self._per_step
            self._per_step = per_step
        self._last = step, number
