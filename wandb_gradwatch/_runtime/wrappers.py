"""Wrappers around models (torch.compile, DDP, FSDP), the tensors in what models return, hooks that can be pickled."""

import contextlib
import dataclasses
import functools
import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final, Literal, Protocol, TypeGuard, cast

import torch
from torch import Tensor, nn

from .._interruptions import raise_interruption

logger: Final = logging.getLogger("wandb_gradwatch")

# A model's output of more objects consists of data rather than of tensors, or makes new ones whenever it is read.
_MAX_OBJECTS: Final = 10_000

# Names of the child in which wrappers store the wrapped module. "module" is also an ordinary name, so it is stripped
# only below the classes that are known to use it.
_FSDP1_CHILD: Final = "_fsdp_wrapped_module"
_TRANSPARENT_CHILDREN: Final = frozenset({"_orig_mod", _FSDP1_CHILD, "_checkpoint_wrapped_module", "_forward_module"})
_TRANSPARENT_PARENTS: Final = frozenset(
    {"DistributedDataParallel", "DataParallel", "DeepSpeedEngine", "PipelineEngine", "Float16Module"}
)


def is_transparent(parent: nn.Module, key: str) -> bool:
    """Whether the parent is a wrapper and this child the wrapped module, which gets the parent's name."""
    return key in _TRANSPARENT_CHILDREN or (key == "module" and type(parent).__name__ in _TRANSPARENT_PARENTS)


def unwrapped(model: nn.Module) -> nn.Module:
    """Remove the wrappers around a whole model, which may be added or removed during training.

    FSDP1's wrapper is kept, because the flat parameters are found through it.
    """
    for key, child in model._modules.items():
        if child is not None and key != _FSDP1_CHILD and is_transparent(model, key):
            return unwrapped(child)
    return model


def named_modules(module: nn.Module, prefix: str = "", seen: set[int] | None = None) -> Iterator[tuple[str, nn.Module]]:
    """Every module once, with the prefix of its parameters' names. A wrapper and its wrapped module share a prefix.

    Args:
        prefix: the prefix of the module itself; "" or a text that ends with a dot.
        seen: ids of modules to leave out; the ids of the yielded modules are added.
    """
    seen = set() if seen is None else seen
    if id(module) in seen:
        return
    seen.add(id(module))
    yield prefix, module
    for key, child in list(module._modules.items()):  # a copy, because another thread may change them
        if child is not None:
            yield from named_modules(child, prefix if is_transparent(module, key) else f"{prefix}{key}.", seen)


def named_tensors(
    modules: Iterable[tuple[str, nn.Module]], kind: Literal["_parameters", "_buffers"] = "_parameters"
) -> dict[str, Tensor]:
    """Every parameter, or buffer, once, by its full name."""
    found: dict[int, tuple[str, Tensor]] = {}
    for prefix, module in modules:
        for key, tensor in getattr(module, kind).items():
            if tensor is not None:
                found.setdefault(id(tensor), (prefix + key, tensor))
    return dict(found.values())


class HookOwner(Protocol):
    """An owner of transient hooks."""

    @property
    def is_open(self) -> bool:
        """Whether the hooks do anything now."""

    def caught(self, error: Exception) -> None:
        """Get an exception that a hook has raised, as `Boundary.caught`."""


class TransientHook:
    """A module hook that calls a function while its owner `is_open`, and has no effect if it is copied or pickled.

    A closure would make these operations fail. The replacement is a function of the standard library, so that a saved
    model can be loaded where this package is not installed. The hook is an entry point in one frame: it is called for
    every module, in every forward.
    """

    def __init__(self, owner: HookOwner, function: Callable[..., None]) -> None:
        self._owner, self._function = owner, function

    def __call__(self, *args: Any) -> None:
        # This must be the first check: a compiler that traces the hook then sees a constant and adds no guard.
        if torch.compiler.is_compiling():
            return
        try:
            if self._owner.is_open:
                self._function(*args)
        except Exception as error:
            self._owner.caught(error)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (contextlib.nullcontext(), "__exit__")


def leaves_in(
    output: Any, path: str = "", *, is_leaf: Callable[[object], TypeGuard[Tensor]] | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor in an output for which `is_leaf` is true, attached to the graph as it is, with its path.

    Without `is_leaf`, these are the measurable ones.

    A lone tensor has the path "". Tensors in tuples, lists, mappings and dataclasses have paths such as "output_0" and
    "output_hidden_1", made of indices and keys. A container is visited once, even if it occurs several times or
    contains itself. A container that cannot be read, because its class raises or it has too many items, is left out
    with a message, which is logged once for each class.
    """
    accepts = is_measurable if is_leaf is None else is_leaf
    found: list[tuple[str, Any]] = [(path, output)]  # to be visited, the next one last
    containers: dict[int, Any] = {}  # by id; the reference keeps the id unique
    num_left = _MAX_OBJECTS
    while found:
        where, thing = found.pop()
        try:
            is_accepted = accepts(thing)
            items = [] if is_accepted or id(thing) in containers else _items_of(thing, where or "output", num_left)
        except Exception as error:
            raise_interruption(error)
            _say_left_out(type(thing).__name__, f"it raises {type(error).__name__} when it is read")
            continue
        if is_accepted:
            yield where, thing
        elif items:
            containers[id(thing)] = thing
            num_left -= len(items)
            found += reversed(items)


def _items_of(thing: Any, path: str, most: int) -> list[tuple[str, Any]]:
    """Return the items of a container with their paths; none for any other object, or if there are too many."""
    kind = type(thing)  # not isinstance, which runs the code of a class that defines `__class__`
    items: Iterable[tuple[Any, Any]] = ()
    if issubclass(kind, Mapping):
        items = thing.items()
    elif issubclass(kind, tuple | list):
        items = zip(getattr(kind, "_fields", itertools.count()), thing, strict=False)
    elif dataclasses.is_dataclass(kind):
        missing = object()  # of a field that is not set
        values = ((one.name, getattr(thing, one.name, missing)) for one in dataclasses.fields(kind))
        items = (item for item in values if item[1] is not missing)
    listed = [(f"{path}_{key}", value) for key, value in itertools.islice(items, most + 1)]
    if len(listed) <= most:
        return listed
    _say_left_out(kind.__name__, f"one output has more than {_MAX_OBJECTS:,} objects")
    return []


@functools.cache
def _say_left_out(kind: str, why: str) -> None:
    logger.warning("wandb_gradwatch: tensors in a %s of the model's inputs or outputs are left out: %s.", kind, why)


def is_measurable(thing: object) -> TypeGuard[Tensor]:
    """Return whether this is a non-empty floating-point or complex tensor.

    A tensor under vmap or grad represents many tensors and has no elements of its own.
    """
    if not issubclass(type(thing), Tensor):  # not isinstance, which runs the code of a class that defines `__class__`
        return False
    tensor = cast("Tensor", thing)
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return False
    return tensor.numel() > 0 and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)
