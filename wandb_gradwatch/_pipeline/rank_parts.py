"""Ranks that hold different parameters (pipeline stages, experts): their parameters together are the whole model.

At watch(), each rank publishes the description of its parameters; at the first sample, before the rules check it, the
rank looks whether those of the other ranks are different (`_runtime/rank_session.py`). No rank waits.

Experts can have the same names and shapes on every rank: then their values at watch() differ, while those of replicas
are equal. Parameters that DistributedDataParallel synchronises are replicas whatever they were at watch().
"""

import gc
import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from .._capture.parameter_registry import ParameterRegistry
from .._measure.elements import bits_of
from .._runtime.rank_session import RankSession
from .._runtime.sharding import has_fsdp1, local_part
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
    have_same_names: bool = False  # all ranks have parameters of the same names and shapes, with different values
    num_apart: int = 0  # number of names that several ranks have with different values

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
    """The name, shape, trainability and checksum of each parameter on this rank, including frozen ones, as text.

    Names are without the registry's prefix, which may differ between ranks that log to different runs.
    """
    with_shapes = not has_fsdp1(registry.models())  # with FSDP1, one parameter has different shapes on the ranks
    values = _checksums(registry)
    return json.dumps(
        [
            (
                registry.names[slot].removeprefix(registry.prefix),
                list(p.shape) if with_shapes else [],
                p.requires_grad,
                values.get(slot, 0),
            )
            for slot, p in registry.scan()
        ]
    )


def whole_model(session: RankSession, registry: ParameterRegistry) -> WholeModel | None:
    """The parameters of all ranks; None if all ranks have the same ones, or if some do not watch."""
    texts = session.descriptions if session.is_found else []
    if not texts:
        return None
    known = {text: json.loads(text) for text in set(texts)}
    return _whole_model([known[text] for text in texts], session.rank, registry.prefix, _synchronised(registry))


def _checksums(registry: ParameterRegistry) -> dict[int, int]:
    """Return a checksum of the values by slot, the same for all parameters of one module; waits for the device.

    One for a module, because experts that are initialised differently can have equal biases. Shards have none.
    """
    if has_fsdp1(registry.models()):
        return {}
    of_device: defaultdict[torch.device, dict[int, Tensor]] = defaultdict(dict)
    for slot, parameter in registry.scan():
        is_whole = local_part(parameter) is parameter and not (is_lazy(parameter) or parameter.is_meta)
        if is_whole and parameter.requires_grad:
            of_device[parameter.device][slot] = bits_of(parameter.detach())
    sums: defaultdict[str, int] = defaultdict(int)  # by module
    for sums_of_slots in of_device.values():
        for slot, one in zip(sums_of_slots, torch.stack([*sums_of_slots.values()]).tolist(), strict=True):
            sums[_module(registry.names[slot])] += one
    return {slot: sums[_module(registry.names[slot])] for slots in of_device.values() for slot in slots}


def _module(name: str) -> str:
    return name.rpartition(".")[0]


def _synchronised(registry: ParameterRegistry) -> frozenset[str]:
    """Return the names, without the registry's prefix, of parameters that are not experts, whatever they were before.

    They are sharded by now, or DistributedDataParallel synchronises them.
    """
    engines = [one for one in gc.get_objects() if issubclass(type(one), nn.parallel.DistributedDataParallel)]
    by_ddp = {
        id(parameter)
        for engine in engines
        for name, parameter in engine.module.named_parameters()
        if name not in engine.parameters_to_ignore
    }
    all_sharded = has_fsdp1(registry.models())
    return frozenset(
        registry.names[slot].removeprefix(registry.prefix)
        for slot, parameter in registry.scan()
        if all_sharded or id(parameter) in by_ddp or local_part(parameter) is not parameter
    )


def _whole_model(
    of_ranks: Sequence[Sequence[tuple[str, Sequence[int], bool, int]]],
    rank: int,
    prefix: str,
    synchronised: frozenset[str] = frozenset(),
) -> WholeModel | None:
    """Combine the parameters of each rank: (name, shape, trainable, checksum); names get the prefix.

    The checksums of `synchronised` names are ignored. None: all ranks have the same parameters.
    """
    place_of: dict[tuple[str, tuple[int, ...], int], int] = {}
    names: dict[str, bool] = {}  # name -> whether it is trainable, in the order of the indices
    ranks: list[set[int]] = []
    apart: set[str] = set()
    keys = [
        [(name, tuple(shape), 0 if name in synchronised else checksum) for name, shape, _, checksum in parameters]
        for parameters in of_ranks
    ]
    if all(of_rank == keys[0] for of_rank in keys):
        return None
    for index, parameters in enumerate(of_ranks):
        for key, (name, _, trainable, _) in zip(keys[index], parameters, strict=True):
            if key not in place_of:
                if any(other[:2] == key[:2] for other in place_of):
                    apart.add(name)
                place_of[key] = len(names)
                names[name if name not in names else f"rank{index}.{name}"] = trainable
                ranks.append(set())
            ranks[place_of[key]].add(index)
    places = tuple(place_of[key] for key in keys[rank])
    known = Names(tuple(prefix + name for name in names), tuple(names.values()))
    have_same_names = all([key[:2] for key in of_rank] == [key[:2] for key in keys[0]] for of_rank in keys)
    return WholeModel(known, places, tuple(frozenset(ranks[place]) for place in places), have_same_names, len(apart))
