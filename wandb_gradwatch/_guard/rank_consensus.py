"""Sums over the ranks that hold shards of one model, with each element counted once, so that all decide alike."""

import math
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from .._measure.elements import upload, wide_dtype
from .._runtime.sharding import has_fsdp1, is_sharded, local_part, world_size

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
    """Raise at watch() the ValueError that `StepSkipping` would otherwise raise at the first step."""
    if world_size() == 1:
        return
    if has_fsdp1(models):
        raise ValueError(FSDP1_REFUSED)
    if function and any(is_sharded(parameter) for model in models for parameter in model.parameters()):
        raise ValueError(FUNCTION_REFUSED)


class RankConsensus:
    """Computes sums over the ranks that share one optimizer's parameters, given by slot.

    Raises:
        ValueError: none of the parameters' device meshes contains all ranks of the others.
    """

    def __init__(self, parameters: dict[int, Tensor]) -> None:
        sharded: list[Any] = list(filter(is_sharded, parameters.values()))
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


def _num_shards(parameter: Any) -> int:
    """Return the number of different shards of a parameter."""
    if not is_sharded(parameter):
        return 1
    sizes = zip(parameter.device_mesh.shape, parameter.placements, strict=True)
    return math.prod(size for size, placement in sizes if placement.is_shard())
