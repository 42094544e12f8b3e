"""Ranks that hold different parameters (pipeline stages, experts): their parameters together are the whole model.

At watch(), each rank publishes the description of its parameters; at the first sample, before the rules check it, the
rank looks whether those of the other ranks are different (`_runtime/rank_session.py`). No rank waits.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace

from .._capture.parameter_registry import ParameterRegistry
from .._runtime.rank_session import RankSession
from .._runtime.sharding import has_fsdp1
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


def description(registry: ParameterRegistry) -> str:
    """The name, shape and trainability of each parameter on this rank, including frozen ones, as text.

    Names are without the registry's prefix, which may differ between ranks that log to different runs.
    """
    with_shapes = not has_fsdp1(registry.models())  # with FSDP1, one parameter has different shapes on the ranks
    return json.dumps(
        [
            (registry.names[slot].removeprefix(registry.prefix), list(p.shape) if with_shapes else [], p.requires_grad)
            for slot, p in registry.scan()
        ]
    )


def whole_model(session: RankSession, prefix: str) -> WholeModel | None:
    """The parameters of all ranks, with this prefix; None if all ranks have the same ones, or some do not watch."""
    texts = session.descriptions if session.is_found else []
    known = {text: json.loads(text) for text in set(texts)}
    return _whole_model([known[text] for text in texts], session.rank, prefix) if texts else None


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
