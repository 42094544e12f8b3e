"""Sums over the ranks that hold shards of one model, with each element counted once, so that all decide alike."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from .._measure.elements import upload, wide_dtype
from .._runtime.autograd import Entry
from .._runtime.sharding import Shards, has_fsdp1, local_part, world_size
from .._runtime.steps import Listener
from .guard import raised_to_the_user

# N parameters of an optimizer

FSDP1_REFUSED: Final = (
    "guard= does not work with FullyShardedDataParallel (FSDP1), whose ranks could not decide alike; "
    "use fully_shard (FSDP2), or guard=None"
)
FUNCTION_REFUSED: Final = (
    "guard= was given a function, which sees only the shards of its own rank and could decide otherwise on another; "
    'with a sharded model use guard="skip"'
)


def refuse_guard(models: Sequence[nn.Module], *, function: bool) -> None:
    """Raise at watch() the ValueError that `ConsensusTable.of` would otherwise raise at the first step."""
    if world_size() == 1:
        return
    if has_fsdp1(models):
        raise ValueError(FSDP1_REFUSED)
    if function and any(_is_sharded(parameter) for model in models for parameter in model.parameters()):
        raise ValueError(FUNCTION_REFUSED)


class RankConsensus:
    """Computes sums over the ranks that share one optimizer's parameters, given by slot.

    Raises:
        ValueError: none of the parameters' device meshes contains all ranks of the others.
    """

    def __init__(self, parameters: dict[int, Tensor]) -> None:
        sharded: list[Any] = list(filter(_is_sharded, parameters.values()))
        meshes = {id(parameter.device_mesh): parameter.device_mesh for parameter in sharded}
        self._mesh = max(meshes.values(), key=lambda mesh: int(mesh.size()))
        members = set(self._mesh.mesh.flatten().tolist())
        if any(not members.issuperset(mesh.mesh.flatten().tolist()) for mesh in meshes.values()):
            raise ValueError(
                f"guard= needs one device mesh that has all ranks of the others, but the parameters of one optimizer "
                f"are on {', '.join(map(str, meshes.values()))}; use guard=None, or an optimizer for each mesh"
            )
        self._share = {slot: _num_shards(p) / int(self._mesh.size()) for slot, p in parameters.items()}
        self._weights: dict[tuple[object, ...], Tensor] = {}
        self._device = local_part(next(iter(parameters.values()))).device

    def weights(self, slots: tuple[int, ...], like: Tensor) -> Tensor:
        """Return the weight of this rank's row per slot, so that the sum over ranks counts each element once: [N]."""
        key = (like.device, *slots)
        if key not in self._weights:
            self._weights[key] = upload(np.array([self._share[slot] for slot in slots]), like.device)
        return self._weights[key]

    def abstain(self) -> None:
        """Take part in a sum with NaN. The sum is then NaN on every rank, which exceeds no limit."""
        self.sum_over_ranks(torch.full((2,), math.nan, dtype=wide_dtype(self._device), device=self._device))

    def sum_over_ranks(self, values: Tensor) -> Tensor:
        """Sum the values over the ranks, in place; on a GPU the host does not wait."""
        for dimension in range(self._mesh.ndim):
            dist.all_reduce(values, group=self._mesh.get_group(dimension))
        return values


class FailedRankVoter(Listener):
    """Votes in place of a monitor that has failed, because the other ranks wait for this rank's vote at every step.

    It abstains, which ends the guard on all ranks at once: this rank cannot tell whether its gradients are healthy, and
    models would diverge if ranks decided differently.
    """

    def __init__(self, slot_of_id: Mapping[int, int]) -> None:
        self._slot_of_id = dict(slot_of_id)

    def follows(self, optimizer: Optimizer) -> bool:
        return bool(self._entries(optimizer))

    def is_part_of(self, inner: Optimizer, outer: Optimizer) -> bool:
        return self._entries(inner).keys() <= self._entries(outer).keys()

    def before_step(self, optimizer: Optimizer, *, inside_backward: bool) -> None:
        entries = self._entries(optimizer)
        if any(map(_is_sharded, entries.values())):
            RankConsensus(entries).abstain()

    def _entries(self, optimizer: Optimizer) -> dict[int, Tensor]:
        parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
        return {slot: p for p in parameters if (slot := self._slot_of_id.get(id(p))) is not None}


class ConsensusTable:
    """The RankConsensus of each optimizer; rebuilt when parameters are replaced."""

    def __init__(self, shards: Shards, *, function: bool) -> None:
        self._shards, self._function = shards, function
        self._version = -1
        self._by_slots: dict[tuple[int, ...], RankConsensus] = {}

    def of(self, entries: Sequence[Entry], version: int) -> RankConsensus | None:
        """Return the consensus for an optimizer's watched parameters; None if every rank holds them whole.

        Raises:
            CallbackError: the ranks could decide differently.
        """
        if not self._shards.any:
            return None
        with raised_to_the_user():
            if self._shards.uses_fsdp1:
                raise ValueError(FSDP1_REFUSED)
            if self._function:
                raise ValueError(FUNCTION_REFUSED)
            if version != self._version:
                self._version, self._by_slots = version, {}
            slots = tuple(slot for slot, _ in entries)
            if slots not in self._by_slots and any(_is_sharded(parameter) for _, parameter in entries):
                self._by_slots[slots] = RankConsensus(dict(entries))
            return self._by_slots.get(slots)


def _is_sharded(parameter: Tensor) -> bool:
    return type(parameter).__name__ == "DTensor"


def _num_shards(parameter: Any) -> int:
    """Return the number of different shards of a parameter."""
    if not _is_sharded(parameter):
        return 1
    sizes = zip(parameter.device_mesh.shape, parameter.placements, strict=True)
    return math.prod(size for size, placement in sizes if placement.is_shard())
