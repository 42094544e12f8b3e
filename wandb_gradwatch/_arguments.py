"""Checks of arguments: the error says what was passed, and what the argument must be."""

from numbers import Integral, Real
from typing import TypeGuard


def check(is_valid: bool, argument: str, value: object, what: str, error: type[Exception] = ValueError) -> None:
    """Raise an error that begins with `argument=value` unless the value is valid; `what` says what it must be."""
    if not is_valid:
        raise error(f"{argument}={value!r} must be {what}")


def is_number(value: object) -> TypeGuard[float]:
    """Return whether a value is a real number; NaN and bools are none."""
    return isinstance(value, Real) and not isinstance(value, bool) and value == value


def is_whole(value: object) -> TypeGuard[int]:
    """Return whether a value is a whole number; bools are none."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def check_flags(caller: str, **flags: object) -> None:
    """Raise a TypeError for a flag that is neither True nor False: any other value would count as one of them."""
    for name, value in flags.items():
        check(isinstance(value, bool), f"{caller}: {name}", value, "True or False", TypeError)


def check_function(caller: str, name: str, value: object, what: str) -> None:
    """Raise a TypeError for a value that is neither a function nor None; `what` describes the function."""
    is_function = value is None or (callable(value) and not isinstance(value, type))
    check(is_function, f"{caller}: {name}", value, f"{what}, or None", TypeError)
