"""Tensors that are pieces of larger ones: the local piece, and whether this rank is the one that counts it."""

from __future__ import annotations

import sys
from typing import Any, cast

from torch import Tensor


def local_part(tensor: Tensor) -> Tensor:
    """The tensor's data on this rank: a DTensor's local shard (0.7 us; operations on DTensors hide collectives)."""
    if type(tensor).__name__ == "DTensor":
        return cast("Any", tensor)._local_tensor  # type: ignore[no-any-return]
    return tensor


def is_sharded(tensor: Tensor) -> bool:
    """Whether other ranks hold other parts of this tensor, so that its rows must be merged over ranks."""
    dtensor = sys.modules.get("torch.distributed.tensor")
    return dtensor is not None and isinstance(tensor, dtensor.DTensor)
