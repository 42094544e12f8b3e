"""Wrappers around models (torch.compile, DDP, FSDP), the tensors in what models return, hooks that can be pickled."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final, Literal, Protocol, TypeGuard

import torch
from torch import Tensor, nn

# Names of the child in which wrappers store the wrapped module. "module" is also an ordinary name, so it is stripped
# only below the classes that are known to use it.
_FSDP1_CHILD: Final = "_fsdp_wrapped_module"
_TRANSPARENT_CHILDREN: Final = frozenset({"_orig_mod", _FSDP1_CHILD, "_checkpoint_wrapped_module", "_forward_module"})
_TRANSPARENT_PARENTS: Final = frozenset({"DistributedDataParallel", "DataParallel"})


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


def leaves_in(output: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor in an output that is measurable, attached to the graph as it is, with its path.

    A lone tensor has the path "". Tensors in tuples, lists, dicts and dataclasses have paths such as "output_0" and
    "output_hidden_1", made of indices and keys.
    """
    if is_measurable(output):
        yield path, output
    items: Any = ()
    if isinstance(output, Mapping):
        items = output.items()
    elif isinstance(output, tuple | list):
        items = zip(getattr(output, "_fields", range(len(output))), output, strict=True)
    elif dataclasses.is_dataclass(output) and not isinstance(output, type):
        items = [(field.name, getattr(output, field.name)) for field in dataclasses.fields(output)]
    for key, value in items:
        yield from leaves_in(value, f"{path or 'output'}_{key}")


def is_measurable(thing: object) -> TypeGuard[Tensor]:
    """Return whether this is a non-empty floating-point or complex tensor.

    A tensor under vmap or grad represents many tensors and has no elements of its own.
    """
    if not isinstance(thing, Tensor) or not (thing.is_floating_point() or thing.is_complex()):
        return False
    return thing.numel() > 0 and not torch._C._functorch.is_functorch_wrapped_tensor(thing)
