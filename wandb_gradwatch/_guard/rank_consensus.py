"""Sums over the ranks that hold shards of one model, with each element counted once, so that all decide alike."""

import math
from typing import Any, Final

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from .._measure.elements import upload, wide_dtype
from .._runtime.notices import CannotWatchError
from .._runtime.sharding import is_sharded, local_part

# N parameters of an optimizer

# In the place of a number of elements, which it exceeds: the sum shows that a guard is gone.
_LEAVES: Final = -(2.0**60)


PARTS_REFUSED: Final = (
    "guard= does not work where ranks train different parameters (pipeline stages, experts), because a rank would skip "
    "a step that the others make; use guard=None"
)


def refuse_guard(*, uses_fsdp1: bool, function: bool, has_stages: bool = False) -> None:
    """Raise a CannotWatchError, a ValueError, for a guard that ranks of one model cannot follow alike."""
    if has_stages:
        raise CannotWatchError(PARTS_REFUSED)
    if uses_fsdp1:
        raise CannotWatchError(
            "guard= does not work with FullyShardedDataParallel (FSDP1), whose ranks could not decide alike; "
            "use fully_shard (FSDP2), or guard=None"
        )
    if function:
        raise CannotWatchError(
            "guard= was given a function, which sees only the shards of its own rank and could decide otherwise on "
            'another; with a sharded model use guard="skip"'
        )


class RankConsensus:
    """Computes sums over the ranks that share one optimizer's parameters, given by slot.

    Raises:
        CannotWatchError: none of the parameters' device meshes contains all ranks of the others.
    """

    def __init__(self, parameters: dict[int, Tensor]) -> None:
        sharded: list[Any] = list(filter(is_sharded, parameters.values()))
        meshes = {id(parameter.device_mesh): parameter.device_mesh for parameter in sharded}
        self._mesh = max(meshes.values(), key=lambda mesh: int(mesh.size()))
        members = set(self._mesh.mesh.flatten().tolist())
        if any(not members.issuperset(mesh.mesh.flatten().tolist()) for mesh in meshes.values()):
            raise CannotWatchError(
                f"guard= needs one device mesh that has all ranks of the others, but the parameters of one optimizer "
                f"are on {', '.join(map(str, meshes.values()))}; use guard=None, or an optimizer for each mesh"
            )
        self._shares_N = np.array([_num_shards(parameters[slot]) for slot in sorted(parameters)]) / self._mesh.size()
        self._weights: dict[torch.device, Tensor] = {}
        self._device = local_part(next(iter(parameters.values()))).device

    def weights(self, device: torch.device) -> Tensor:
        """Return this rank's weight of each row, by slot, with which the sum counts each element once: [N]."""
        if device not in self._weights:
            self._weights[device] = upload(self._shares_N, device)
        return self._weights[device]

    def abstain(self) -> None:
        """Take part in a sum with NaN. The sum is then NaN on every rank, which exceeds no limit."""
        self.sum_over_ranks(torch.full((2,), math.nan, dtype=wide_dtype(self._device), device=self._device))

    def leave(self) -> bool:
        """Take part in a sum for a guard that was removed. Returns whether all ranks do; waits for the device."""
        values = torch.full((2,), math.nan, dtype=wide_dtype(self._device), device=self._device)
        values[0] = _LEAVES
        return float(self.sum_over_ranks(values)[0]) == _LEAVES * int(self._mesh.size())

    def sum_over_ranks(self, values: Tensor) -> Tensor:
        """Sum the values over the ranks, in place; on a GPU the host does not wait."""
        for dimension in range(self._mesh.ndim):
            dist.all_reduce(values, group=self._mesh.get_group(dimension))
        return values


def _num_shards(parameter: Any) -> int:
    if not is_sharded(parameter):
        return 1
    sizes = zip(parameter.device_mesh.shape, parameter.placements, strict=True)
    return math.prod(size for size, placement in sizes if placement.is_shard())
