"""Names of modules and parameters, as the registry gives them, and what a `match=` chooses among them."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Final

from torch import Tensor, nn

from .._capture.parameter_registry import NameFilter, name_predicate
from .._runtime.wrappers import is_transparent

# The whole model's output has a name too: that of the model, or this where the model has none.
ROOT: Final = "root"


class ModuleIndex:
    """The watched models, held weakly.

    Args:
        models: what each model's names begin with ("" or ending in a dot), and the model.
        watched: the names of the parameters that are watched; None: all.
    """

    def __init__(self, models: Iterable[tuple[str, nn.Module]], *, watched: Collection[str] | None = None) -> None:
        self._watched = None if watched is None else frozenset(watched)
        self._models = [(prefix, weakref.ref(model)) for prefix, model in models]

    def alive(self) -> list[tuple[str, nn.Module]]:
        """Those that are not collected yet."""
        return [(prefix, model) for prefix, reference in self._models if (model := reference()) is not None]

    def modules(self) -> Iterator[tuple[str, nn.Module]]:
        """Every module once; a wrapper comes before what it wraps, under the same name."""
        for prefix, module in self._walk():
            yield prefix.removesuffix(".") or ROOT, module

    def parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Every parameter once, under the name that the snapshot gives it."""
        seen: set[int] = set()
        for prefix, module in self._walk():
            for key, parameter in module._parameters.items():
                if parameter is not None and id(parameter) not in seen:
                    seen.add(id(parameter))
                    yield prefix + key, parameter

    def watched_parameters(self) -> dict[str, Tensor]:
        """Those that probes are told of."""
        return {name: p for name, p in self.parameters() if self._watched is None or name in self._watched}

    def _walk(self) -> Iterator[tuple[str, nn.Module]]:
        seen: set[int] = set()
        for prefix, model in self.alive():
            yield from _walk(model, prefix, seen)


def _walk(module: nn.Module, prefix: str, seen: set[int]) -> Iterator[tuple[str, nn.Module]]:
    if id(module) in seen:
        return
    seen.add(id(module))
    yield prefix, module
    for key, child in module._modules.items():
        if child is not None:
            yield from _walk(child, prefix if is_transparent(module, key) else f"{prefix}{key}.", seen)


ModuleFilter = NameFilter | type[nn.Module]


class ModuleMatcher:
    """A `match=` of modules as a function from a name: as `matcher`, or a class, whose modules are looked up.

    Raises:
        ValueError: it is not a regular expression; `owner` begins the message.
    """

    def __init__(self, match: ModuleFilter | None, owner: str) -> None:
        self._class = match if isinstance(match, type) else None
        self._names: frozenset[str] = frozenset()  # of the class's modules
        self._by_name: Callable[[str], bool] = lambda name: name in self._names
        if not isinstance(match, type):
            self._by_name = matcher(match, owner)

    def look(self, models: ModuleIndex) -> None:
        """Find the modules that there are now."""
        if self._class is not None:
            of_class = self._class
            self._names = frozenset(name for name, module in models.modules() if isinstance(module, of_class))

    def __call__(self, name: str) -> bool:
        return self._by_name(name)


def matcher(match: NameFilter | None, owner: str) -> Callable[[str], bool]:
    """A `match=` as a function from a name: a regular expression (searched), several, a function; None: everything.

    Raises:
        ValueError: it is not a regular expression; `owner` begins the message.
    """
    predicate = name_predicate(match, f"{owner}: match")
    return (lambda _: True) if predicate is None else functools.cache(predicate)


def nothing_matches(owner: str, match: object, what: str, names: Sequence[str]) -> ValueError:
    """The error of a `match=` that chooses none of the names."""
    first = ", ".join(repr(name) for name in names[:3]) or "none at all"
    return ValueError(f"{owner} with match={match!r} matches no {what}; the first names are {first}")
