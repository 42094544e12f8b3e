"""Which parameters are watched, under which names, and where each has its place in the window.

Keeps no reference to a parameter, strong or weak: a strong one leaks the model, a weak one makes `model.to()` raise
where it swaps tensors. The model is held weakly and walked again whenever its parameters are needed, which is also how
new, replaced and unfrozen parameters are found.
"""

from __future__ import annotations

import itertools
import re
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from .._runtime.autograd import Entry
from .._runtime.wrappers import named_modules, unwrapped

NameFilter = str | re.Pattern[str] | Callable[[str], bool] | Sequence["str | re.Pattern[str]"]
Models = nn.Module | Sequence[nn.Module] | Mapping[str, nn.Module]


class ParameterRegistry:
    """Names, places (slots) and the way back to the living parameters.

    A slot belongs to a name for good: a parameter that is replaced inherits it, one that appears later gets the next.

    Args:
        models: one model, or several with distinct prefixes ("model0.", "model1.", or the mapping's keys).
        include: watch only names that match; a regular expression (searched), several of them, or a function.
        exclude: do not watch names that match.

    Raises:
        TypeError: models is not a module, a sequence or a mapping of modules.
        ValueError: nothing trainable is left to watch.
    """

    def __init__(self, models: Models, *, include: NameFilter | None = None, exclude: NameFilter | None = None) -> None:
        self._models = [(prefix, weakref.ref(unwrapped(model))) for prefix, model in with_prefixes(models)]
        self._include = name_predicate(include, "include")
        self._exclude = name_predicate(exclude, "exclude")
        self._scanned = False
        self.prefix = ""  # of every name, which the user's filters do not see
        self._watched: dict[str, bool] = {}  # the filters' verdict on every name seen so far
        self.slot_of_name: dict[str, int] = {}
        self.names: list[str] = []
        self.trainable: list[bool] = []  # by slot, as of the last scan
        self._require_grad: list[bool] | None = None  # the same of that scan's entries, in their order
        self.slot_of_id: dict[int, int] = {}  # id(parameter) -> slot, as of the last scan
        self.version = 0  # changes whenever slot_of_id does
        self.changes = 0  # changes whenever there may be something to hook: another parameter, or an unfrozen one
        self._seen = _Walked()
        entries = self.scan()
        if not any(parameter.requires_grad for _, parameter in entries):
            raise ValueError(self._nothing_to_watch(include, exclude))

    def put_below(self, prefix: str) -> None:
        """Begin every name with a prefix, before anything is measured: another watcher's names are the same."""
        self.prefix = f"{prefix}."
        self._models = [(f"{prefix}.{own}", reference) for own, reference in self._models]
        self._watched, self.slot_of_name, self.names, self.trainable = {}, {}, [], []
        self._seen = _Walked()
        self.scan()

    def models(self) -> list[nn.Module]:
        """The models that are still alive, without what wraps the whole of one."""
        return [model for _, reference in self._models if (model := reference()) is not None]

    def parts(self) -> dict[str, list[int]]:
        """The slots of each model, by what its names begin with; none of a model that is alone."""
        if len(self._models) == 1:
            return {}
        prefixes = sorted((prefix for prefix, _ in self._models), key=len, reverse=True)  # "a.b." before "a."
        found: dict[str, list[int]] = {}
        for slot, name in enumerate(self.names):
            prefix = next(prefix for prefix in prefixes if name.startswith(prefix))
            found.setdefault(prefix.removesuffix("."), []).append(slot)
        return found

    def some_names(self, slots: Iterable[int]) -> str:
        """The first three of these slots' names, and how many more there are: for a message."""
        names = [self.names[slot] for slot in slots]
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        return ", ".join(names[:3]) + more

    def scan(self) -> list[Entry]:
        """Walk the models: (slot, parameter) of every watched parameter, in model order, a tied one once.

        Cost: a walk over the modules where nothing has changed since the last scan, a few times as much else.
        """
        entries = self._seen.entries()
        if entries is None:
            entries = self._scan_anew()
        require_grad = [parameter.requires_grad for _, parameter in entries]
        if require_grad != self._require_grad:
            self._require_grad, self.trainable = require_grad, [False] * len(self.names)
            for (slot, _), requires_grad in zip(entries, require_grad, strict=True):
                self.trainable[slot] = requires_grad
            self.changes += 1
        return entries

    def _scan_anew(self) -> list[Entry]:
        entries: list[Entry] = []
        slot_of_id: dict[int, int] = {}
        slots: set[int] = set()
        modules: list[nn.Module] = []
        for name, parameter in self._walk(modules):
            if parameter is None or id(parameter) in slot_of_id:
                continue
            slot = self.slot_of_name.get(name)
            if slot is None:
                if not self._is_watched(name, parameter):
                    continue
                slot = self.slot_of_name[name] = len(self.names)
                self.names.append(name)
            if slot in slots:
                if not self._scanned:
                    raise ValueError(f"two parameters would both be called {name!r}; give the models other keys")
                continue
            slots.add(slot)
            slot_of_id[id(parameter)] = slot
            entries.append((slot, parameter))
        self.changes, self._require_grad = self.changes + 1, None
        if slot_of_id != self.slot_of_id:  # other parameters, or the same under other names
            self.version += 1
        self.slot_of_id = slot_of_id
        self._seen = _Walked(modules if len(self.models()) == len(self._models) else None, entries)
        self._scanned = True
        return entries

    def _walk(self, modules: list[nn.Module]) -> Iterator[tuple[str, nn.Parameter | None]]:
        """Every parameter's place, with its name; the modules are added to the list in the order of the walk."""
        seen: set[int] = set()
        for prefix, reference in self._models:
            if (model := reference()) is not None:
                for below, module in named_modules(model, prefix, seen):
                    modules.append(module)
                    for key, parameter in list(module._parameters.items()):  # another thread may change them meanwhile
                        yield below + key, parameter

    def _is_watched(self, name: str, parameter: Tensor) -> bool:
        verdict = self._watched.get(name)
        if verdict is None:
            own = name.removeprefix(self.prefix)
            wanted = (self._include is None or self._include(own)) and not (self._exclude and self._exclude(own))
            # Integer tensors (quantised weights) can never have a gradient.
            verdict = wanted and (parameter.is_floating_point() or parameter.is_complex())
            self._watched[name] = verdict
        return verdict

    def _nothing_to_watch(self, include: NameFilter | None, exclude: NameFilter | None) -> str:
        modules: list[nn.Module] = []
        parameters = {name: parameter for name, parameter in self._walk(modules) if parameter is not None}
        if not parameters:
            return _nothing_registered(modules)
        trainable = [name for name, parameter in parameters.items() if parameter.requires_grad]
        if not trainable:
            return (
                "watch() found no trainable parameter: the model has none with requires_grad=True; "
                "pass the model that is trained, or unfreeze a layer first"
            )
        matching = f"matching include={include!r}" if include is not None else "left"
        excluded = f" after exclude={exclude!r}" if exclude is not None else ""
        return f"watch() found no trainable parameter {matching}{excluded}; the first names are {trainable[:3]}"


def _nothing_registered(modules: Sequence[nn.Module]) -> str:
    """Why these modules, the model first, have no parameter at all."""
    for module in modules:
        for name, value in vars(module).items():
            members = value.values() if isinstance(value, dict) else value
            is_plain = isinstance(value, list | tuple | dict) and not name.startswith("_")
            if is_plain and any(isinstance(member, nn.Module) for member in members):
                kind = type(value).__name__
                return (
                    f"watch() found nothing: no parameter is registered in {type(module).__name__}, whose {name!r} is "
                    f"a plain {kind} of modules, which torch does not look into (nor does an optimizer that is given "
                    f"model.parameters()); use torch.nn.{'ModuleDict' if kind == 'dict' else 'ModuleList'}"
                )
    return (
        f"watch() found nothing: no parameter is registered in {type(modules[0]).__name__}: pass the model that is "
        "trained; layers that it keeps in a plain list or dict belong into torch.nn.ModuleList or ModuleDict"
    )


class _Walked:
    """What the last walk met, to be compared with what is there now. Holds modules weakly, and no tensor.

    Args:
        modules: in the order of the walk, each once; None where it cannot be repeated by asking these.
        watched: the parameters that are watched, by their slots.
    """

    def __init__(self, modules: Sequence[nn.Module] | None = None, watched: Iterable[Entry] = ()) -> None:
        self._modules = None if modules is None else [weakref.ref(module) for module in modules]
        values, self._keys = _contents(modules or ())
        self._ids = list(map(id, values))
        place_of_id = dict(zip(self._ids, itertools.count(), strict=False))
        self._places = [(slot, place_of_id.get(id(parameter), -1)) for slot, parameter in watched]
        if any(place < 0 for _, place in self._places):  # another thread has exchanged one meanwhile
            self._modules = None

    def entries(self) -> list[Entry] | None:
        """The watched parameters now; None if any module has other parameters, children or names than then.

        A parameter that was freed and replaced by another of the same id is the same place of the same name.
        """
        if self._modules is None:
            return None
        modules = [module for reference in self._modules if (module := reference()) is not None]
        values, keys = _contents(modules)
        if len(modules) < len(self._modules) or list(map(id, values)) != self._ids or keys != self._keys:
            return None
        return [(slot, values[place]) for slot, place in self._places]


def _contents(modules: Sequence[nn.Module]) -> tuple[list[Any], list[str]]:
    """Every parameter and child of these modules, and their keys."""
    tables: list[Any] = [table for module in modules for table in (module._parameters, module._modules) if table]
    # keys(): a scripted module's cannot be iterated over.
    return [value for table in tables for value in table.values()], [key for table in tables for key in table.keys()]  # noqa: SIM118


def with_prefixes(models: Models, *, asked_by: str = "watch()") -> Iterable[tuple[str, nn.Module]]:
    """Each model with what its names begin with; one alone has no prefix. `asked_by` begins the messages.

    Raises:
        TypeError, ValueError: as the ParameterRegistry's.
    """
    if isinstance(models, nn.Module):
        return [("", models)]
    if isinstance(models, Mapping):
        named = [(f"{key}.", model) for key, model in models.items()]
    elif isinstance(models, Sequence) and not isinstance(models, str):
        named = [("" if len(models) == 1 else f"model{index}.", model) for index, model in enumerate(models)]
    else:
        named = [("", models)]
    for _, model in named:
        if not isinstance(model, nn.Module):
            raise TypeError(
                f"{asked_by} needs a torch.nn.Module, or a list or dict of them, but got {type(model).__name__}; "
                "pass the model itself, not its parameters or its optimizer"
            )
    if not named:
        raise ValueError(f"{asked_by} got an empty collection of models; pass at least one torch.nn.Module")
    return named


def name_predicate(names: NameFilter | None, argument: str) -> Callable[[str], bool] | None:
    """The filter as a function; None where there is none.

    Raises:
        ValueError: not a regular expression; `argument` is its name in the message.
    """
    if names is None:
        return None
    if callable(names):
        return names
    if not isinstance(names, str | re.Pattern | Sequence):
        raise ValueError(f"{argument}={names!r} must be a regular expression, several of them, or a function of a name")
    patterns = [names] if isinstance(names, str | re.Pattern) else list(names)
    try:
        compiled = [re.compile(pattern) for pattern in patterns]
    except (re.error, TypeError) as error:
        raise ValueError(f"{argument}={names!r} is not a regular expression: {error}") from None
    return lambda name: any(pattern.search(name) for pattern in compiled)
