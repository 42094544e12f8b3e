"""Ranks that hold different parameters (pipeline stages, experts): their parameters together are the whole model.

At watch(), each rank publishes the description of its parameters; at the first sample, before the rules check it, the
rank looks whether those of the other ranks are different (`_runtime/rank_session.py`). If they are, rank 0 unites them
in the background; until then the samples wait. No rank waits.

Experts can have the same names and shapes on every rank: then their values at watch() differ, while those of replicas
are equal. Parameters that DistributedDataParallel synchronises are replicas whatever they were at watch().
"""

import gc
import json
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from .._capture.parameter_registry import ParameterRegistry
from .._measure.elements import bits_of
from .._runtime.sharding import has_fsdp1, local_part
from .._transfer.transfers import Names
from .assembly import placed
from .rank_merge import RankWindow

# P watched parameters, R ranks


_Key = tuple[str, tuple[int, ...], int]  # of a parameter: its name, shape and checksum


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


def trained_description(at_watch: str, registry: ParameterRegistry) -> str:
    """The description at watch(), without checksums of parameters that are synchronised by now."""
    synchronised = _synchronised(registry)
    return json.dumps(
        [
            (name, shape, trainable, 0 if name in synchronised else checksum)
            for name, shape, trainable, checksum in json.loads(at_watch)
        ]
    )


def united(of_ranks: Mapping[str, Sequence[int]]) -> str:
    """Unite the parameters of all ranks, from the ranks of each description; "" if all have the same ones.

    The work and the result grow with the number of different descriptions, and not with that of the ranks, except for
    one list of all ranks.
    """
    if len(of_ranks) == 1:
        return ""
    ordered = sorted(of_ranks.items(), key=lambda one: min(one[1]))
    described = [_keys_of(text) for text, _ in ordered]
    owners: dict[_Key, list[int]] = {}  # the places of the descriptions
    trainable: dict[_Key, bool] = {}
    for place, of_rank in enumerate(described):
        for key, is_trainable in of_rank.items():
            owners.setdefault(key, []).append(place)
            trainable.setdefault(key, is_trainable)
    names: dict[str, _Key] = {}
    for key, places in owners.items():
        names[key[0] if key[0] not in names else f"rank{min(ordered[places[0]][1])}.{key[0]}"] = key
    shapes = Counter(key[:2] for key in owners)
    return json.dumps(
        {
            "ranks": [list(ranks) for _, ranks in ordered],
            "parameters": [(name, *key, trainable[key], owners[key]) for name, key in names.items()],
            "have_same_names": all([key[:2] for key in one] == [key[:2] for key in described[0]] for one in described),
            "num_apart": len({key[0] for key in owners if shapes[key[:2]] > 1}),
        }
    )


def whole_model(text: str, own: str, prefix: str) -> WholeModel | None:
    """What `united` has found, for a rank with this description of its `own`; names get the prefix."""
    if not text:
        return None
    whole = json.loads(text)
    ranks = [frozenset(of) for of in whole["ranks"]]
    parameters, keys = whole["parameters"], list(_keys_of(own))
    places = {(name, tuple(shape), check): place for place, (_, name, shape, check, _, _) in enumerate(parameters)}
    owners_of = {key: tuple(parameters[places[key]][-1]) for key in keys}
    united_ranks = {of: frozenset[int]().union(*(ranks[owner] for owner in of)) for of in set(owners_of.values())}
    return WholeModel(
        Names(tuple(prefix + one[0] for one in parameters), tuple(one[4] for one in parameters)),
        tuple(places[key] for key in keys),
        tuple(united_ranks[owners_of[key]] for key in keys),
        whole["have_same_names"],
        whole["num_apart"],
    )


def _keys_of(text: str) -> dict[_Key, bool]:
    """The parameters of a description, and whether each is trainable."""
    return {(name, tuple(shape), checksum): trainable for name, shape, trainable, checksum in json.loads(text)}


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
