"""Modules around a model that come and go while it is trained, and hooks that a model can be copied with."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any, Final, Literal

from torch import Tensor, nn

# Child names that wrappers put between a module and itself. "module" is an ordinary name too, so it is only stripped
# below the classes that are known to add it.
_FSDP1_CHILD: Final = "_fsdp_wrapped_module"
_TRANSPARENT_CHILDREN: Final = frozenset({"_orig_mod", _FSDP1_CHILD, "_checkpoint_wrapped_module", "_forward_module"})
_TRANSPARENT_PARENTS: Final = frozenset({"DistributedDataParallel", "DataParallel"})


def is_transparent(parent: nn.Module, key: str) -> bool:
    """Whether this child is the module that its parent only wraps: it has the parent's name."""
    return key in _TRANSPARENT_CHILDREN or (key == "module" and type(parent).__name__ in _TRANSPARENT_PARENTS)


def unwrapped(model: nn.Module) -> nn.Module:
    """What is inside of wrappers around a whole model, which come and go while it is trained.

    FSDP1's is kept: it is how its flat parameters are found.
    """
    for key, child in model._modules.items():
        if child is not None and key != _FSDP1_CHILD and is_transparent(model, key):
            return unwrapped(child)
    return model


def named_modules(module: nn.Module, prefix: str = "", seen: set[int] | None = None) -> Iterator[tuple[str, nn.Module]]:
    """Every module once, with what its parameters' names begin with; a wrapper comes before what it wraps, named alike.

    Args:
        prefix: of the module itself; "" or ending in a dot.
        seen: ids of modules that another walk has met, to which those of this one are added.
    """
    seen = set() if seen is None else seen
    if id(module) in seen:
        return
    seen.add(id(module))
    yield prefix, module
    for key, child in list(module._modules.items()):  # another thread may change them meanwhile
        if child is not None:
            yield from named_modules(child, prefix if is_transparent(module, key) else f"{prefix}{key}.", seen)


def named_tensors(
    modules: Iterable[tuple[str, nn.Module]], kind: Literal["_parameters", "_buffers"] = "_parameters"
) -> dict[str, Tensor]:
    """Every parameter, or buffer, once, by its name in these modules."""
    found: dict[int, tuple[str, Tensor]] = {}
    for prefix, module in modules:
        for key, tensor in getattr(module, kind).items():
            if tensor is not None:
                found.setdefault(id(tensor), (prefix + key, tensor))
    return dict(found.values())


class TransientHook:
    """A module's hook that, copied, pickled or saved with the module, becomes a function that does nothing.

    A closure would make all of that fail. And what it becomes is the standard library's: a saved model can be loaded
    where this package is not installed.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (contextlib.nullcontext(), "__exit__")
