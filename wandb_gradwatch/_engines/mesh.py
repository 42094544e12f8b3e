"""Meshes of the process groups that an engine has made, and the placement of a part of a flattened parameter."""

import functools
from typing import Any

import torch
import torch.distributed as dist

from .._runtime.sharding import FRAGMENT, world_size


def mesh_of(*groups: Any, device: torch.device) -> Any:
    """Return the mesh of one or two process groups that cross in this rank; None if it has one rank.

    All groups of a kind are taken to be alike: with two, a rank of the first and one of the second are the row and the
    column of one rank. No process group is made, and no rank communicates.
    """
    if world_size() == 1:
        return None
    ranks = [dist.get_process_group_ranks(group) for group in groups]
    if all(len(some) == 1 for some in ranks):
        return None
    from torch.distributed.device_mesh import DeviceMesh

    if len(groups) == 1:
        return DeviceMesh.from_group(groups[0], device.type)
    rows, columns = ranks
    grid = [[row + column - dist.get_rank() for column in columns] for row in rows]
    return DeviceMesh.from_group(list(groups), device.type, mesh=grid, mesh_dim_names=("rows", "columns"))


@functools.cache
def fragment() -> Any:
    """Return the placement of consecutive elements of a flattened parameter: of any number, or of none, on a rank.

    It is a shard of its own class, because torch's shards have the sizes that follow from the number of ranks.
    """
    from torch.distributed.tensor import Shard

    return type(FRAGMENT, (Shard,), {})(0)


def shard(dimension: int) -> Any:
    """Return the placement of equal parts along a dimension."""
    from torch.distributed.tensor import Shard

    return Shard(dimension)


def replicate() -> Any:
    """Return the placement of a whole parameter on every rank."""
    from torch.distributed.tensor import Replicate

    return Replicate()
