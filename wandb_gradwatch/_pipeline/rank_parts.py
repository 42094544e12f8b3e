"""Detect ranks that hold different parameters (pipeline stages, experts), before the rules check the first sample.

At watch(), each rank writes the description of its parameters to the store of the process groups, under a hash, and
counts the ranks with the same hash. At the first sample, it reads the counts. When a rank makes its first step, every
other rank that watches has called watch(), because the gradient depends on all ranks. No rank waits.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch.distributed as dist

from .._capture.parameter_registry import ParameterRegistry
from .._runtime.sharding import has_fsdp1, rank_store
from .._transfer.transfers import Names
from .assembly import placed
from .rank_merge import RankWindow

# P watched parameters, R ranks


@dataclass(frozen=True)
class WholeModel:
    """The parameters of all ranks together."""

    # The names of all parameters, each once. If ranks have different parameters with one name, those of later ranks get
    # the prefix "rank<n>."
    known: Names
    places: tuple[int, ...]  # [P] indices of this rank's parameters in `known`
    ranks: tuple[frozenset[int], ...]  # [P] for each of this rank's parameters, the ranks that have it

    def names(self, own: Names) -> Names:
        """The names of all ranks, followed by this rank's names that are new since watch()."""
        new = slice(len(self.places), None)
        return Names(self.known.names + own.names[new], self.known.trainable + own.trainable[new])

    def window(self, own: RankWindow) -> RankWindow:
        """The window with rows for the parameters of all ranks; rows of other ranks are missing and not counted."""
        names, histogram = self.known.names + own.names[len(self.places) :], own.flush.histogram
        places, num_names = [*self.places, *range(len(self.known.names), len(names))], len(names)
        if histogram is not None:
            histogram = placed(histogram, places, num_names, fill=0)
        return replace(
            own,
            samples=tuple(replace(sample, rows=placed(sample.rows, places, num_names)) for sample in own.samples),
            flush=replace(own.flush, histogram=histogram),
            names=names,
            counted=placed(own.counted, places, num_names, fill=False),
        )


class RankParts:
    """Publishes this rank's parameters, including frozen ones, and reads those of the other ranks.

    Args:
        name: distinguishes the keys of this watcher from those of others; the same on every rank.
    """

    def __init__(self, registry: ParameterRegistry, name: str) -> None:
        self._prefix = registry.prefix  # removed, because it may differ between ranks that log to different runs
        self._store = rank_store(f"{name}/parts")
        with_shapes = not has_fsdp1(registry.models())  # with FSDP1, one parameter has different shapes on the ranks
        own = [
            (registry.names[slot].removeprefix(self._prefix), list(p.shape) if with_shapes else [], p.requires_grad)
            for slot, p in registry.scan()
        ]
        text = json.dumps(own)
        self._digest = hashlib.sha256(text.encode()).hexdigest()
        if not self._store.check([f"what/{self._digest}"]):
            self._store.set(f"what/{self._digest}", text)
        self._store.set(f"rank/{dist.get_rank()}", self._digest)
        self._store.add(f"alike/{self._digest}", 1)
        self._store.add("all", 1)

    def whole(self) -> WholeModel | None:
        """The parameters of all ranks; None if all ranks have the same ones, or if some ranks do not watch."""
        world = dist.get_world_size()
        if self._store.add(f"alike/{self._digest}", 0) == world or self._store.add("all", 0) != world:
            return None
        digests = [self._store.get(f"rank/{rank}").decode() for rank in range(world)]
        texts = {digest: json.loads(self._store.get(f"what/{digest}")) for digest in set(digests)}
        return _whole_model([texts[digest] for digest in digests], dist.get_rank(), self._prefix)


def _whole_model(of_ranks: Sequence[Sequence[tuple[str, Sequence[int], bool]]], rank: int, prefix: str) -> WholeModel:
    """Combine the parameters of each rank, given as (name, shape, trainable); their names get the prefix."""
    place_of: dict[tuple[str, tuple[int, ...]], int] = {}
    names: dict[str, bool] = {}  # name -> whether it is trainable, in the order of the indices
    ranks: list[set[int]] = []
    for index, parameters in enumerate(of_ranks):
        for name, shape, trainable in parameters:
            key = (name, tuple(shape))
            if key not in place_of:
                place_of[key] = len(names)
                names[name if name not in names else f"rank{index}.{name}"] = trainable
                ranks.append(set())
            ranks[place_of[key]].add(index)
    places = tuple(place_of[name, tuple(shape)] for name, shape, _ in of_ranks[rank])
    known = Names(tuple(prefix + name for name in names), tuple(names.values()))
    return WholeModel(known, places, tuple(frozenset(ranks[place]) for place in places))
