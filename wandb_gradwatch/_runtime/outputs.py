"""The tensors in what a module returns."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, TypeGuard

import torch
from torch import Tensor


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


def tensors_of(output: Any) -> list[Tensor]:
    """Return the tensors of `leaves_in`."""
    return [tensor for _, tensor in leaves_in(output)]
