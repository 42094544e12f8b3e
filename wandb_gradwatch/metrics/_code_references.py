"""Whether code refers to a function, by whatever name and through whatever helper, found without running the code."""

import sys
from collections.abc import Collection, Iterable
from contextlib import suppress
from functools import cached_property, partial, partialmethod
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any, Final

from torch import nn

# Code of these top-level packages is not followed: it does not refer to functions of this package's users.
_NOT_FOLLOWED: Final = sys.stdlib_module_names - {"__main__"} | {
    "builtins",
    "numpy",
    "torch",
    "wandb",
    "wandb_gradwatch",
}


def refer_to(targets: Collection[Any], users: Iterable[Any]) -> bool:
    """Return whether these objects can run code that refers to a target.

    References are followed through methods, attributes and hooks of modules, closures, decorators, and functions and
    classes of the user's code. Code that assembles a name while it runs is not understood.

    Args:
        targets: functions and classes; their own names count as references, too.
        users: modules (`nn.Module`), functions or classes.
    """
    names = {target.__name__ for target in targets}
    waiting = list(users)
    followed: dict[int, Any] = {}  # by id; holds the objects, so that no id is used twice
    while waiting:
        one = waiting.pop()
        if any(one is target for target in targets):
            return True
        if id(one) in followed:
            continue
        followed[id(one)] = one
        if isinstance(one, FunctionType) and not names.isdisjoint(_names_in(one)):
            return True
        waiting += _referred_by(one)
    return False


def _is_followed(module: object) -> bool:
    """Return whether code in the module of this name may be the user's."""
    return str(module).partition(".")[0] not in _NOT_FOLLOWED


def _referred_by(one: Any) -> list[Any]:
    """Return what an object refers to, as far as code may be reached through it."""
    if isinstance(one, FunctionType | type) and not _is_followed(one.__module__):
        return []
    if isinstance(one, FunctionType):
        return _referred_by_function(one)
    if isinstance(one, type):
        return [*one.__mro__, *vars(one).values()]
    if isinstance(one, MethodType | staticmethod | classmethod):
        return [one.__func__]
    if isinstance(one, partial | partialmethod | cached_property):
        return [one.func]
    if isinstance(one, property):
        return [one.fget]
    if isinstance(one, nn.Module):
        return [type(one), *vars(one).values(), *one._forward_pre_hooks.values(), *one._forward_hooks.values()]
    if isinstance(one, list | tuple | dict):
        return [value for value in (one.values() if isinstance(one, dict) else one) if callable(value)]
    return [type(one)]


def _referred_by_function(function: FunctionType) -> list[Any]:
    names = _names_in(function)
    found = [function.__globals__.get(name) for name in names]
    for cell in function.__closure__ or ():
        with suppress(ValueError):  # the cell is empty
            found.append(cell.cell_contents)
    # A name may be an attribute of a module, which may itself be one of a package.
    modules = [one for one in found if isinstance(one, ModuleType)]
    for module in modules:  # grows
        if _is_followed(module.__name__):
            attributes = [vars(module).get(name) for name in names]
            found += attributes
            modules += [one for one in attributes if isinstance(one, ModuleType) and one not in modules]
    return found


def _names_in(function: FunctionType) -> set[str]:
    """Return the global names and attributes in a function's code, and in that of functions defined inside it."""
    codes, names = [function.__code__], set[str]()
    for code in codes:  # grows
        codes += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
        names.update(code.co_names)
    return names
