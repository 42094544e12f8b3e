"""Sharded tensors: the local part of a tensor, and whether this rank counts it in the whole."""

import sys
from collections.abc import Iterable, Sequence
from typing import Any, Final, cast

import numpy as np
import numpy.typing as npt
import torch.distributed as dist
from torch import Tensor, nn

FRAGMENT: Final = "Fragment"  # the class of the placements of what an engine has averaged and divided


def is_sharded(tensor: Tensor) -> bool:
    """Whether this is a DTensor."""
    return type(tensor).__name__ == "DTensor"


def local_part(tensor: Tensor) -> Tensor:
    """The tensor's data on this rank: a DTensor's local shard (0.7 us; operations on DTensors hide collectives)."""
    if type(tensor).__name__ == "DTensor":
        return cast("Tensor", cast("Any", tensor)._local_tensor)
    return tensor


def is_partial(tensor: Tensor | None) -> bool:
    """Whether this is a DTensor whose values are the sums of what the ranks hold."""
    return type(tensor).__name__ == "DTensor" and any(one.is_partial() for one in cast("Any", tensor).placements)


def local_gradient(parameter: Tensor) -> Tensor:
    """The local part of a parameter's gradient, with the placements of the parameter.

    Autograd may leave a gradient with other placements: the whole gradient of a sharded embedding on every rank, or
    partial sums for the weight of a layer norm under sequence parallelism. Then it is redistributed, as the optimizer
    will do it, so that every element is counted by the rank that counts the same element of the parameter. From a
    replica to a shard that is a slice; otherwise it is a collective, which all ranks reach in the same order, because
    all of them own the parameter.
    """
    gradient = parameter.grad
    assert gradient is not None
    if type(gradient).__name__ == "DTensor":
        dtensor, placements = cast("Any", gradient), cast("Any", parameter).placements
        if dtensor.placements != placements:
            dtensor = dtensor.redistribute(placements=placements)
        return cast("Tensor", dtensor._local_tensor)
    return gradient


def world_size() -> int:
    """Number of ranks in the default process group; 1 without a process group."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """This process's rank in the default process group; 0 without a process group."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


class Shards:
    """The parameters that are sharded over ranks, and the rows that this rank counts: of replicas, the first rank's."""

    def __init__(self) -> None:
        self.any = False  # whether any parameter is sharded; the same on every rank
        self.uses_fsdp1 = False
        # Whether the backward leaves averages over ranks: the rank that holds NaN need not be the one that has made it.
        self.are_averaged = False
        self._rank = rank()  # known here: the user may destroy the default group before the last window ends
        # By the slot of a sharded parameter: the ranks that hold its shards, and whether this rank's shard is counted,
        # if these ranks include the parameter's first rank. Shards of other ranks are replicas.
        self._shares: dict[int, tuple[frozenset[int], bool]] = {}
        self._first: dict[int, int] = {}  # by slot, the first rank that has the parameter; rank 0 if there is no entry

    def update(self, entries: Iterable[tuple[int, Tensor]], models: Sequence[nn.Module]) -> None:
        """Update the sharding of these parameters, which are new or were replaced."""
        if world_size() == 1:
            return
        flat = _fsdp1_parameters(models)
        self.uses_fsdp1 = bool(flat)
        self.are_averaged |= self.uses_fsdp1 or _uses_fsdp2(models)
        for slot, parameter in entries:
            self._shares.pop(slot, None)
            if is_sharded(parameter):
                self._shares[slot] = _share_of(parameter)
                self.are_averaged |= any(type(one).__name__ == FRAGMENT for one in cast("Any", parameter).placements)
            elif id(parameter) in flat:
                self._shares[slot] = frozenset(range(world_size())), flat[id(parameter)]
        self.any |= bool(self._shares)

    def is_whole(self, parameter: Tensor) -> bool:
        """Whether this rank holds all of a parameter."""
        return not self.uses_fsdp1 and local_part(parameter) is parameter

    def split(self, ranks_P: Sequence[frozenset[int]]) -> bool:
        """Record that ranks have different parameters: for each of this rank's parameters, the ranks that have it.

        Returns whether the rows can be merged: not if a rank holds a shard of a parameter but does not watch it.
        """
        self._first = {slot: min(ranks) for slot, ranks in enumerate(ranks_P)}
        self.any = True
        return all(self._shares[slot][0] <= ranks for slot, ranks in enumerate(ranks_P) if slot in self._shares)

    def counted(self, num_names: int) -> npt.NDArray[np.bool_]:
        """Whether this rank counts the row of each name: [P]."""
        counted_P = np.empty(num_names, dtype=bool)
        for slot in range(num_names):
            first, share = self._first.get(slot, 0), self._shares.get(slot)
            counted_P[slot] = self._rank == first if share is None else share[1] and first in share[0]
        return counted_P


def _share_of(dtensor: Any) -> tuple[frozenset[int], bool]:
    """The ranks of a DTensor, and whether this rank counts its part: the first of each set of replicas does."""
    mesh = dtensor.device_mesh
    coordinate = mesh.get_coordinate()
    counts = coordinate is not None and all(
        not placement.is_replicate() or position == 0
        for placement, position in zip(dtensor.placements, coordinate, strict=True)
    )
    return frozenset(mesh.mesh.flatten().tolist()), counts


def _fsdp1_units(models: Sequence[nn.Module]) -> list[Any]:
    fsdp1 = sys.modules.get("torch.distributed.fsdp.fully_sharded_data_parallel")
    if fsdp1 is None:
        return []
    cls = fsdp1.FullyShardedDataParallel
    return [module for model in models for module in model.modules() if isinstance(module, cls)]


def _uses_fsdp2(models: Sequence[nn.Module]) -> bool:
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and any(isinstance(one, fsdp.FSDPModule) for model in models for one in model.modules())


def _fsdp1_parameters(models: Sequence[nn.Module]) -> dict[int, bool]:
    """The parameters that FSDP1 shards, by id, and whether this rank counts its shard."""
    found: dict[int, bool] = {}
    for unit in _fsdp1_units(models):
        counts, strategy = True, unit.sharding_strategy.name
        if strategy == "NO_SHARD":
            counts = rank() == 0
        elif strategy.startswith(("HYBRID", "_HYBRID")):  # all nodes hold the same shards: the first node counts
            counts = dist.get_rank(unit._inter_node_pg) == 0
        found = {id(parameter): counts for parameter in unit.parameters()} | found
    return found


def has_fsdp1(models: Sequence[nn.Module]) -> bool:
    return bool(_fsdp1_units(models))


def has_shards(models: Sequence[nn.Module]) -> bool:
    """Whether any parameter is sharded: as a DTensor (FSDP2, tensor parallel) or in a flat parameter (FSDP1)."""
    return has_fsdp1(models) or any(is_sharded(parameter) for model in models for parameter in model.parameters())


def fsdp1_flat_parameters(models: Sequence[nn.Module]) -> list[Tensor]:
    """The flat parameters into which FSDP1's backward accumulates; the named parameters are views of them."""
    return [unit._handle.flat_param for unit in _fsdp1_units(models) if unit._handle is not None]
