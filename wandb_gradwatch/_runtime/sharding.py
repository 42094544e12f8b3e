"""Tensors that are pieces of larger ones: the local piece, and whether this rank is one that counts it."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any, Final, cast

import numpy as np
import numpy.typing as npt
import torch.distributed as dist
from torch import Tensor, nn

_FSDP1: Final = "torch.distributed.fsdp.fully_sharded_data_parallel"


def local_part(tensor: Tensor) -> Tensor:
    """The tensor's data on this rank: a DTensor's local shard (0.7 us; operations on DTensors hide collectives)."""
    if type(tensor).__name__ == "DTensor":
        return cast("Tensor", cast("Any", tensor)._local_tensor)
    return tensor


def local_gradient(parameter: Tensor) -> Tensor:
    """The local part of a parameter's gradient, laid out like the parameter.

    A gradient that is still a partial sum over ranks is reduced first: the optimizer would do the same. That is a
    collective, which every rank reaches in the same order, as all of them own the parameter.
    """
    gradient = parameter.grad
    assert gradient is not None
    if type(gradient).__name__ == "DTensor":
        dtensor = cast("Any", gradient)
        if any(placement.is_partial() for placement in dtensor.placements):
            dtensor = dtensor.redistribute(placements=cast("Any", parameter).placements)
        return cast("Tensor", dtensor._local_tensor)
    return gradient


def world_size() -> int:
    """Ranks in the default process group; 1 without one."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """This process's rank in the default process group; 0 without one."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


class Shards:
    """Which parameters are sharded over ranks, and which rows this rank counts in the whole.

    A shard counts where it is; what several ranks hold alike is counted by the first of them.
    """

    def __init__(self) -> None:
        self.any = False  # the same on every rank
        self.uses_fsdp1 = False
        self._counted: dict[int, bool] = {}

    def update(self, entries: Iterable[tuple[int, Tensor]], models: Sequence[nn.Module]) -> None:
        """Look at the parameters again: some were replaced or are new."""
        if world_size() == 1:
            return
        flat = _fsdp1_parameters(models)
        self.uses_fsdp1 = bool(flat)
        for slot, parameter in entries:
            if type(parameter).__name__ == "DTensor":
                self.any = True
                self._counted[slot] = _counts(parameter)
            elif id(parameter) in flat:
                self.any = True
                self._counted[slot] = flat[id(parameter)]
            else:
                self._counted[slot] = rank() == 0

    def counted(self, num_names: int) -> npt.NDArray[np.bool_]:
        """Whether this rank's row of each name counts: [P]."""
        return np.array([self._counted.get(slot, rank() == 0) for slot in range(num_names)], dtype=bool)


def _counts(parameter: Tensor) -> bool:
    """Whether this rank's part of a DTensor is one to count: the first of each set of replicas."""
    dtensor = cast("Any", parameter)
    mesh = dtensor.device_mesh
    coordinate = mesh.get_coordinate()
    if coordinate is None or not bool((mesh.mesh == 0).any()):
        return False  # not in the mesh; or this mesh is a replica of the one that rank 0 is in
    return all(
        not placement.is_replicate() or position == 0
        for placement, position in zip(dtensor.placements, coordinate, strict=True)
    )


def _fsdp1_parameters(models: Sequence[nn.Module]) -> dict[int, bool]:
    """The parameters that FSDP1 shards, by id, and whether this rank's shard counts."""
    fsdp1 = sys.modules.get(_FSDP1)
    if fsdp1 is None:
        return {}
    found: dict[int, bool] = {}
    for model in models:
        for module in model.modules():
            if isinstance(module, fsdp1.FullyShardedDataParallel):
                counts = _unit_counts(module)
                found.update((id(parameter), counts) for parameter in module.parameters() if id(parameter) not in found)
    return found


def has_fsdp1(models: Sequence[nn.Module]) -> bool:
    """Whether FSDP1 shards any of these."""
    return bool(_fsdp1_parameters(models))


def _unit_counts(unit: Any) -> bool:
    strategy = unit.sharding_strategy.name
    if strategy == "NO_SHARD":
        return rank() == 0
    if strategy.startswith(("HYBRID", "_HYBRID")):  # the same shards in every node: the first node's count
        return dist.get_rank(unit._inter_node_pg) == 0
    return True


def fsdp1_flat_parameters(models: Sequence[nn.Module]) -> list[Tensor]:
    """The leaves that FSDP1's backward really accumulates into; the named parameters are views of them."""
    fsdp1 = sys.modules[_FSDP1]
    return [
        module._handle.flat_param
        for model in models
        for module in model.modules()
        if isinstance(module, fsdp1.FullyShardedDataParallel) and module._handle is not None
    ]
