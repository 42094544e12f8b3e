"""Which parameters are whole on this rank, and which part of them it holds where they are not.

Sums of squares over the parts add up to those of the whole, so distances merge over ranks, as rows do. Any other
function of a part is not the function of the whole: it is left out, and that is said.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

from torch import Tensor

from ._module_index import ModuleIndex
from ._module_probe import logger


class ProbeShards:
    """Tells whole parameters from sharded ones, and says once of everything that is left out."""

    def __init__(self) -> None:
        self._models = ModuleIndex([])
        self._cuts_of: dict[str, list[_Cut] | None] = {}  # of sharded parameters; None where it is not known how
        self._said: set[str] = set()

    def bind(self, models: ModuleIndex) -> None:
        """These are the models."""
        self._models = models

    def look(self) -> None:
        """Look again, whenever parameters are there to be measured: models are sharded after watch() too."""
        all_flat = self.uses_fsdp1
        self._cuts_of = {
            name: _cuts(cast("Any", parameter)) if is_dtensor(parameter) else None
            for name, parameter in self._models.parameters()
            if all_flat or is_dtensor(parameter)
        }

    @property
    def uses_fsdp1(self) -> bool:
        """Whether parameters are pieces of flat ones, of whose layout nobody else knows."""
        return any(type(module).__name__ == "FullyShardedDataParallel" for _, module in self._models.modules())

    def is_whole(self, name: str, *, needed_by: str) -> bool:
        """Whether a function of this parameter, as it is here, is one of the whole; where not, that is said."""
        if name in self._cuts_of:
            self._say(name, needed_by)
        return self.holds_whole(name)

    def holds_whole(self, name: str) -> bool:
        """The same, and nothing is said."""
        return name not in self._cuts_of

    def part(self, name: str, whole: Tensor, *, needed_by: str) -> Tensor | None:
        """The part of a tensor like the parameter that this rank holds; None, which is said, where it is unknown."""
        if name not in self._cuts_of:
            return whole
        cuts = self._cuts_of[name]
        if cuts is None:
            self._say(name, needed_by)
            return None
        for cut in cuts:
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
                len(self._cuts_of),
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


def _cuts(parameter: Any) -> list[_Cut] | None:
    """How a DTensor is cut, in the order of its mesh, as `distribute_tensor` does it.

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
    return cuts
