"""Which parameters are whole on this rank, and which part of them it holds where they are not.

Sums of squares over the parts add up to those of the whole, so distances merge over ranks, as rows do. Any other
function of a part is not the function of the whole: it is left out, and that is said.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from typing import Any, Final, cast

from torch import Tensor

from ._module_index import ModuleIndex

logger: Final = logging.getLogger("wandb_gradwatch")


class ProbeShards:
    """Tells whole parameters from sharded ones, and says once of everything that is left out."""

    def __init__(self) -> None:
        self._models = ModuleIndex([])
        self._layouts: dict[str, Layout | None] = {}  # of sharded parameters; None where it is not known how
        self._said: set[str] = set()

    def bind(self, models: ModuleIndex) -> None:
        """These are the models."""
        self._models = models

    def look(self) -> None:
        """Look again, whenever parameters are there to be measured: models are sharded after watch() too."""
        all_flat = self.uses_fsdp1
        self._layouts = {
            name: _layout(cast("Any", parameter)) if is_dtensor(parameter) else None
            for name, parameter in self._models.parameters()
            if all_flat or is_dtensor(parameter)
        }

    @property
    def uses_fsdp1(self) -> bool:
        """Whether parameters are pieces of flat ones, of whose layout nobody else knows."""
        return any(type(module).__name__ == "FullyShardedDataParallel" for _, module in self._models.modules())

    def is_whole(self, name: str, *, needed_by: str) -> bool:
        """Whether a function of this parameter, as it is here, is one of the whole; where not, that is said."""
        if name in self._layouts:
            self._say(name, needed_by)
        return self.holds_whole(name)

    def holds_whole(self, name: str) -> bool:
        """The same, and nothing is said."""
        return name not in self._layouts

    def layout(self, name: str) -> Layout | None:
        """How a sharded parameter lies on its ranks; None for a whole one, and where that is not known."""
        return self._layouts.get(name)

    def part(self, name: str, whole: Tensor, *, needed_by: str) -> Tensor | None:
        """The part of a tensor like the parameter that this rank holds; None, which is said, where it is unknown."""
        if self.holds_whole(name):
            return whole
        layout = self.layout(name)
        if layout is None:
            self._say(name, needed_by)
            return None
        for cut in layout.cuts:
            chunks = whole.chunk(cut.size, dim=cut.dim)
            # More ranks than rows: this one may hold nothing.
            whole = chunks[cut.index] if cut.index < len(chunks) else whole.narrow(cut.dim, 0, 0)
        return whole

    def _say(self, name: str, left_out: str) -> None:
        if left_out not in self._said:
            self._said.add(left_out)
            logger.warning(
                "wandb_gradwatch: %d parameters are sharded, %r among them, and of those this rank holds a part only: "
                "%s are left out for them. Updates() and the norms of gradients are those of the whole.",
                len(self._layouts),
                name,
                left_out,
            )


def is_dtensor(tensor: Tensor) -> bool:
    """Whether this is one rank's view of a tensor that several hold together."""
    return type(tensor).__name__ == "DTensor"


@dataclass(frozen=True)
class _Cut:
    """A dimension of a tensor in `size` chunks, of which this rank has the one at `index`."""

    dim: int
    size: int
    index: int


@dataclass(frozen=True)
class Layout:
    """How a sharded parameter lies on its ranks: the cuts that make this rank's part, and how many ranks there are."""

    cuts: tuple[_Cut, ...]
    num_ranks: int

    @property
    def num_replicas(self) -> int:
        """How many ranks hold the same part."""
        return self.num_ranks // math.prod(cut.size for cut in self.cuts)


def _layout(parameter: Any) -> Layout | None:
    """That of a DTensor, with the cuts in the order of its mesh, as `distribute_tensor` makes them.

    None where it is another way: interleaved (two kinds of parallelism on one dimension), or this rank has no part.
    """
    coordinate = parameter.device_mesh.get_coordinate()
    if coordinate is None:
        return None
    cuts = []
    for size, index, placement in zip(parameter.device_mesh.shape, coordinate, parameter.placements, strict=True):
        if not placement.is_replicate():
            if type(placement).__name__ != "Shard":
                return None
            cuts.append(_Cut(placement.dim, size, index))
    return Layout(tuple(cuts), parameter.device_mesh.size())
