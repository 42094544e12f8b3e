"""What a layer is: parameters' names to the names of their groups."""

from __future__ import annotations

from collections.abc import Callable

GroupBy = str | Callable[[str], str]


def group_function(group_by: GroupBy) -> Callable[[str], str]:
    """Resolve `group_by` to a function from a parameter's name to its group's name.

    Raises:
        ValueError: it is neither "parameter", "module" nor callable.

    Example:
        >>> group_function("module")("blocks.0.attn.weight")
        'blocks.0.attn'
    """
    if callable(group_by):
        return group_by
    if group_by == "parameter":
        return lambda name: name
    if group_by == "module":
        return lambda name: name.rpartition(".")[0] or name
    raise ValueError(f'group_by={group_by!r} must be "parameter", "module" or a function from a name to its group')
