"""ParameterRegistry: which parameters are watched, their names, and their slots in the window.

It keeps no reference to a parameter: a strong one would leak the model, a weak one makes `model.to()` raise where that
swaps tensors. It holds the model weakly and walks it again whenever the parameters are needed, which also finds new,
replaced and unfrozen parameters. Only the modules' own tables of parameters are held, each until its module is freed,
because parameters can be looked at a last time while the model is being freed, at the end of a `main()`.
"""

import re
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn

from .._runtime.autograd import Entry
from .._runtime.wrappers import named_modules, named_tensors, unwrapped
from .gradient_versions import version_of

NameFilter = str | re.Pattern[str] | Callable[[str], bool] | Sequence["str | re.Pattern[str]"]
Models = nn.Module | Sequence[nn.Module] | Mapping[str, nn.Module]
_Tables = dict[int, dict[str, nn.Parameter | None]]  # by a module's id: its `_parameters`


class ParameterRegistry:
    """Maps names to slots and finds the current parameters.

    The slot of a name never changes: a replacement of a parameter inherits its slot, a new name gets the next one.

    `given`: the models as the user gave them, if these are watched in their place (shadows of models under an engine).

    Several models get distinct prefixes: "model0.", "model1.", or the mapping's keys. Regular expressions in `include`
    and `exclude` are searched in the names.

    Raises:
        TypeError: models is not a module, nor a sequence or mapping of modules.
        ValueError: no trainable parameter is left to watch.
    """

    def __init__(
        self,
        models: Models,
        *,
        include: NameFilter | None = None,
        exclude: NameFilter | None = None,
        given: Models | None = None,
    ) -> None:
        self._models = [(prefix, weakref.ref(unwrapped(model))) for prefix, model in with_prefixes(models)]
        self._roots = [weakref.ref(model) for _, model in with_prefixes(models if given is None else given)]
        self._include = name_predicate(include, "include")
        self._exclude = name_predicate(exclude, "exclude")
        self.prefix = ""  # of every name; include and exclude match names without it
        self._left_out: set[str] = set()  # names that include and exclude do not select
        self.slot_of_name: dict[str, int] = {}
        self.names: list[str] = []
        self.trainable: set[int] = set()  # the slots of parameters with requires_grad, as of the last scan
        self._require_grad: list[bool] | None = None  # requires_grad of the last scan's entries
        self.slot_of_id: dict[int, int] = {}  # id(parameter) -> slot, as of the last scan
        self.version = 0  # changes whenever slot_of_id changes
        self.changes = 0  # changes whenever there may be a parameter to hook: a new or an unfrozen one
        # Of the last walk, to detect changes since: the modules in its order; the ids and keys of their parameters and
        # children, [] if the walk cannot be relied on; each watched slot with the place of its parameter among these.
        self._walked: list[weakref.ref[nn.Module]] = []
        self._identities: tuple[list[int], list[str]] = [], []
        self._places: list[tuple[int, int]] = []
        self._tables: _Tables = {}
        entries = self.scan()
        if not any(parameter.requires_grad for _, parameter in entries):
            raise ValueError(self._nothing_to_watch(include, exclude))

    def put_below(self, prefix: str) -> None:
        """Put a prefix before every name, because another watcher has the same names. Only before any measurement."""
        self.prefix = f"{prefix}."
        self._models = [(f"{prefix}.{own}", reference) for own, reference in self._models]
        self._left_out, self.slot_of_name, self.names = set(), {}, []
        self._walked = []
        self.scan()

    def models(self) -> list[nn.Module]:
        """Return the models that still exist, without wrappers such as DDP around a whole model."""
        return [model for _, reference in self._models if (model := reference()) is not None]

    def roots(self) -> list[nn.Module]:
        """Return the modules that were passed to watch() and still exist, with their wrappers."""
        return [model for reference in self._roots if (model := reference()) is not None]

    def parts(self) -> dict[str, list[int]]:
        """Return the slots of each model by its prefix; {} for a single model."""
        if len(self._models) == 1:
            return {}
        prefixes = sorted((prefix for prefix, _ in self._models), key=len, reverse=True)  # "a.b." before "a."
        found: dict[str, list[int]] = {}
        for slot, name in enumerate(self.names):
            prefix = next(prefix for prefix in prefixes if name.startswith(prefix))
            found.setdefault(prefix.removesuffix("."), []).append(slot)
        return found

    def some_names(self, slots: Iterable[int]) -> str:
        """Return the first three names of these slots and the number of the others, for a message."""
        names = [self.names[slot] for slot in slots]
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        return ", ".join(names[:3]) + more

    def scan(self) -> list[Entry]:
        """Walk the models. Returns (slot, parameter) of every watched parameter in model order, tied ones once.

        While the last model is being freed, returns those of the last scan. Cost: a walk over the modules if nothing
        has changed since the last scan; otherwise a few times as much.
        """
        entries = self._unchanged()
        if entries is None and not self.models():
            last = {id(p): p for table in list(self._tables.values()) for p in table.values() if p is not None}
            return [(slot, last[number]) for number, slot in self.slot_of_id.items() if number in last]
        if entries is None:
            entries = self._scan_anew()
        require_grad = [parameter.requires_grad for _, parameter in entries]
        if require_grad != self._require_grad:
            self._require_grad, self.changes = require_grad, self.changes + 1
            self.trainable = {slot for slot, parameter in entries if parameter.requires_grad}
        return entries

    def versions(self) -> dict[int, int]:
        """Return every watched parameter's version by slot. It changes with each write, except through `.data`."""
        return {slot: version_of(parameter) for slot, parameter in self.scan()}

    def _scan_anew(self) -> list[Entry]:
        found: dict[int, Tensor] = {}  # by slot
        slot_of_id: dict[int, int] = {}
        modules = self._modules()
        # Copies of the tables, because another thread may change them.
        named = [(below + key, p) for below, module in modules for key, p in list(module._parameters.items())]
        for name, parameter in named:
            if parameter is None or id(parameter) in slot_of_id:
                continue
            slot = self.slot_of_name.get(name)
            if slot is None:
                if name in self._left_out or not self._is_selected(name, parameter):
                    self._left_out.add(name)
                    continue
                slot = self.slot_of_name[name] = len(self.names)
                self.names.append(name)
            if slot in found:
                if not self.changes:  # the first scan
                    raise ValueError(f"two parameters would both be called {name!r}; give the models other keys")
                continue
            found[slot] = parameter
            slot_of_id[id(parameter)] = slot
        self.changes, self._require_grad = self.changes + 1, None
        if slot_of_id != self.slot_of_id:  # other parameters, or the same under other names
            self.version += 1
        self.slot_of_id = slot_of_id
        walked = [module for _, module in modules]
        _, self._identities = _contents(walked)
        place_of_id = {number: place for place, number in enumerate(self._identities[0])}
        self._places = [(slot, place_of_id.get(id(parameter), -1)) for slot, parameter in found.items()]
        is_lost = len(self.models()) < len(self._models)
        if is_lost or any(place < 0 for _, place in self._places):  # another thread has replaced one meanwhile
            self._identities = [], []
        self._tables = {id(module): module._parameters for module in walked}
        # The last model is looked at while it is freed, by a callback that may come after these: its table must stay.
        roots, models = set(map(id, self.models())), [reference for _, reference in self._models]
        self._walked = [
            weakref.ref(one, partial(_drop, self._tables, id(one), models if id(one) in roots else None))
            for one in walked
        ]
        return list(found.items())

    def let_go(self) -> None:
        """Drop what is held until the models are freed: nobody will look at their parameters any more."""
        self._tables.clear()

    def _unchanged(self) -> list[Entry] | None:
        """Return the watched parameters; None if any module has other parameters, children or names than at the walk.

        A freed parameter whose id was given to its replacement is no problem: name and slot are the same.
        """
        modules = [module for reference in self._walked if (module := reference()) is not None]
        if not modules or len(modules) < len(self._walked):
            return None
        values, contents = _contents(modules)
        if contents != self._identities:
            return None
        return [(slot, values[place]) for slot, place in self._places]

    def _modules(self) -> list[tuple[str, nn.Module]]:
        """Return every module once, with what precedes the names of its parameters."""
        seen: set[int] = set()
        models = [(prefix, model) for prefix, reference in self._models if (model := reference()) is not None]
        return [named for prefix, model in models for named in named_modules(model, prefix, seen)]

    def _is_selected(self, name: str, parameter: Tensor) -> bool:
        own = name.removeprefix(self.prefix)
        selected = (self._include is None or self._include(own)) and not (self._exclude and self._exclude(own))
        # Integer tensors (quantised weights) can never have a gradient.
        return selected and (parameter.is_floating_point() or parameter.is_complex())

    def _nothing_to_watch(self, include: NameFilter | None, exclude: NameFilter | None) -> str:
        modules = self._modules()
        parameters = named_tensors(modules)
        if not parameters:
            return _nothing_registered([module for _, module in modules])
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
    """Return the message for modules, the model first, that have no registered parameter at all."""
    for module in modules:
        for name, value in vars(module).items():
            members = value.values() if isinstance(value, dict) else value
            is_plain = isinstance(value, list | tuple | dict) and not name.startswith("_")
            if is_plain and any(isinstance(member, nn.Module) for member in members):
                kind = type(value).__name__
                return (
                    f"watch() found nothing: no parameter is registered in {type(module).__name__}, whose {name!r} is "
                    f"a plain {kind} of modules, so that model.parameters() does not include them, and an optimizer "
                    f"does not update them; use torch.nn.{'ModuleDict' if kind == 'dict' else 'ModuleList'}"
                )
    return (
        f"watch() found nothing: no parameter is registered in {type(modules[0]).__name__}; pass the model that is "
        "trained, and keep layers in a torch.nn.ModuleList or ModuleDict instead of a plain list or dict"
    )


def _drop(tables: _Tables, number: int, unless: Sequence[weakref.ref[nn.Module]] | None, _: object) -> None:
    """Drop the table of a module that is being freed, `unless` none of these models is left."""
    if unless is None or any(reference() is not None for reference in unless):
        tables.pop(number, None)


def _contents(modules: Sequence[nn.Module]) -> tuple[list[Any], tuple[list[int], list[str]]]:
    """Return every parameter and child of these modules, and their ids and keys."""
    tables: list[Any] = [table for module in modules for table in (module._parameters, module._modules) if table]
    values = [value for table in tables for value in table.values()]
    # keys(), because a scripted module's tables cannot be iterated over
    return values, (list(map(id, values)), [key for table in tables for key in table.keys()])  # noqa: SIM118


def with_prefixes(models: Models, *, asked_by: str = "watch()") -> Iterable[tuple[str, nn.Module]]:
    """Return each model with the prefix of its names; a single model has none. `asked_by` is the caller in messages."""
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
    """Return the filter as a function; None if there is none. `argument` is its name in messages."""
    if names is None or callable(names):
        return names
    if not isinstance(names, str | re.Pattern | Sequence):
        raise ValueError(f"{argument}={names!r} must be a regular expression, several of them, or a function of a name")
    patterns = [names] if isinstance(names, str | re.Pattern) else list(names)
    try:
        compiled = [re.compile(pattern) for pattern in patterns]
    except (re.error, TypeError) as error:
        raise ValueError(f"{argument}={names!r} is not a regular expression: {error}") from None
    return lambda name: any(pattern.search(name) for pattern in compiled)
