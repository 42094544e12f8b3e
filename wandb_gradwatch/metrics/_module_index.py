"""Names of modules and parameters, as the registry gives them, what a `match=` chooses among them, and which are whole.

Sums of squares over the parts of a sharded parameter add up to those of the whole, so distances merge over ranks, as
rows do. Any other function of a part is not the function of the whole: it is left out, and that is said.
"""

from __future__ import annotations

import functools
import itertools
import logging
import math
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final

from torch import Tensor, nn

from .._capture.parameter_registry import NameFilter, name_predicate
from .._runtime.sharding import local_part
from .._runtime.wrappers import named_modules

logger: Final = logging.getLogger("wandb_gradwatch")

# The whole model's output has a name too: that of the model, or this where the model has none.
ROOT: Final = "root"


class ModuleIndex:
    """The watched models, held weakly: what each one's names begin with ("" or ending in a dot), and the model.

    Of their parameters those `watched` are told to probes; None: all.
    """

    def __init__(self, models: Iterable[tuple[str, nn.Module]] = (), *, watched: Collection[str] | None = None) -> None:
        self._watched = None if watched is None else frozenset(watched)
        self._models = [(prefix, weakref.ref(model)) for prefix, model in models]

    def alive(self) -> list[tuple[str, nn.Module]]:
        return [(prefix, model) for prefix, reference in self._models if (model := reference()) is not None]

    def modules(self) -> Iterator[tuple[str, nn.Module]]:
        """Every module once; a wrapper comes before what it wraps, under the same name."""
        return ((prefix.removesuffix(".") or ROOT, module) for prefix, module in self._walk())

    def parameters(self) -> dict[str, Tensor]:
        """Every parameter once, under the name that the snapshot gives it."""
        found: dict[int, tuple[str, Tensor]] = {}
        for prefix, module in self._walk():
            for key, parameter in module._parameters.items():
                if parameter is not None:
                    found.setdefault(id(parameter), (prefix + key, parameter))
        return dict(found.values())

    def watched_parameters(self) -> dict[str, Tensor]:
        """Those that probes are told of."""
        return {name: p for name, p in self.parameters().items() if self._watched is None or name in self._watched}

    def _walk(self) -> Iterator[tuple[str, nn.Module]]:
        seen: set[int] = set()
        return itertools.chain.from_iterable(named_modules(model, prefix, seen) for prefix, model in self.alive())


def matcher(match: NameFilter | None, owner: str) -> Callable[[str], bool]:
    """A `match=` as a function from a name: a regular expression (searched), several, a function; None: everything."""
    predicate = name_predicate(match, f"{owner}: match")
    return (lambda _: True) if predicate is None else functools.cache(predicate)


def chosen_by(
    matches: Callable[[str], bool], names: Iterable[str], *, owner: str, match: object, what: str
) -> list[str]:
    """The names that a `match=` chooses; a ValueError where it chooses none."""
    known = list(names)
    if not (chosen := list(filter(matches, known))):
        first = ", ".join(map(repr, known[:3])) or "none at all"
        raise ValueError(f"{owner} with match={match!r} matches no {what}; the first names are {first}")
    return chosen


@dataclass(frozen=True)
class Layout:
    """How a sharded parameter lies on its ranks."""

    cuts: tuple[tuple[int, int, int], ...]  # dimension, into how many chunks, the place of this rank's among them
    num_ranks: int

    @property
    def num_replicas(self) -> int:
        """How many ranks hold the same part."""
        return self.num_ranks // math.prod(size for _, size, _ in self.cuts)


class ProbeShards:
    """Tells whole parameters from sharded ones, and says once of everything that is left out."""

    def __init__(self, models: ModuleIndex) -> None:
        self._models = models
        self.layouts: dict[str, Layout | None] = {}  # of sharded parameters; None where it is not known how
        self._said: set[str] = set()

    def look(self) -> None:
        """Look again, whenever parameters are there to be measured: models are sharded after watch() too."""
        all_flat = self.uses_fsdp1
        self.layouts = {
            name: _layout(parameter)
            for name, parameter in self._models.parameters().items()
            if all_flat or local_part(parameter) is not parameter
        }

    @property
    def uses_fsdp1(self) -> bool:
        """Whether parameters are pieces of flat ones, of whose layout nobody else knows."""
        return any(type(module).__name__ == "FullyShardedDataParallel" for _, module in self._models.modules())

    def is_whole(self, name: str, *, needed_by: str | None = None) -> bool:
        """Whether a function of this parameter, as it is here, is one of the whole; if not, `needed_by` is told."""
        if name in self.layouts and needed_by is not None:
            self._say(name, needed_by)
        return name not in self.layouts

    def part(self, name: str, whole: Tensor, *, needed_by: str) -> Tensor | None:
        """The part of a tensor like the parameter that this rank holds; None, which is said, where it is unknown."""
        if name not in self.layouts:
            return whole
        layout = self.layouts[name]
        if layout is None:
            self._say(name, needed_by)
            return None
        for dim, size, index in layout.cuts:
            chunks = whole.chunk(size, dim=dim)
            # More ranks than rows: this one may hold nothing.
            whole = chunks[index] if index < len(chunks) else whole.narrow(dim, 0, 0)
        return whole

    def _say(self, name: str, left_out: str) -> None:
        if left_out not in self._said:
            self._said.add(left_out)
            text = (
                "wandb_gradwatch: %d parameters are sharded, %r among them, and of those this rank holds a part only: "
                "%s are left out for them. Updates() and the norms of gradients are those of the whole."
            )
            logger.warning(text, len(self.layouts), name, left_out)


def _layout(parameter: Any) -> Layout | None:
    """That of a DTensor, with the cuts in the order of its mesh, as `distribute_tensor` makes them.

    None where it is another way: flat (FSDP1), interleaved (two kinds of parallelism on one dimension), or none here.
    """
    if local_part(parameter) is parameter or (coordinate := parameter.device_mesh.get_coordinate()) is None:
        return None
    mesh, placements = parameter.device_mesh, parameter.placements
    if any(not placement.is_replicate() and type(placement).__name__ != "Shard" for placement in placements):
        return None
    parts = zip(placements, mesh.shape, coordinate, strict=True)
    cuts = ((placement.dim, size, index) for placement, size, index in parts if not placement.is_replicate())
    return Layout(tuple(cuts), mesh.size())
