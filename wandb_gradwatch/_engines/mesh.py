"""Meshes of the process groups that an engine has made, and the placement of a part of a flattened parameter."""

import functools
from typing import Any

import torch
import torch.distributed as dist


def mesh_of(group: Any, device: torch.device) -> Any:
    """Return the mesh of a process group; None if the group has one rank. No rank communicates."""
    if dist.get_world_size(group) == 1:
        return None
    from torch.distributed.device_mesh import DeviceMesh

    return DeviceMesh.from_group(group, device.type)


@functools.cache
def fragment() -> Any:
    """Return the placement of consecutive elements of a flattened parameter: of any number, or of none, on a rank.

    It is a shard of its own class, because torch's shards have the sizes that follow from the number of ranks.
    """
    from torch.distributed.tensor import Shard

    return type("Fragment", (Shard,), {})(0)
