"""How many series a run gets: the groups that the user asked for, or few enough that W&B shows them well."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Final

from ..snapshot import GroupBy, Snapshot, group_function

logger: Final = logging.getLogger("wandb_gradwatch")

MAX_SERIES: Final = 256  # names per key family, of which there are a dozen


class SeriesGrouping:
    """The groups that the user asked for, or ones that keep the number of series sane.

    Owns the grouping that was found to be coarse enough: it stays, and is said once.

    Args:
        group_by: what the user asked for; "parameter": as long as there are few enough of them.
    """

    def __init__(self, group_by: GroupBy) -> None:
        self._chosen = group_by
        self._automatic: GroupBy = "parameter"

    def apply(self, snapshot: Snapshot) -> Snapshot:
        """The snapshot with one name per series."""
        if self._chosen != "parameter":
            return snapshot.by_group(self._chosen)
        grouped = snapshot.by_group(self._automatic)
        if len(grouped.names) <= MAX_SERIES:
            return grouped
        names = snapshot.names
        self._automatic, description = next(
            (coarser for coarser in _coarser(names) if _num_groups(names, coarser[0]) <= MAX_SERIES),
            _neighbours(names),
        )
        grouped = snapshot.by_group(self._automatic)
        logger.warning(
            "%d parameters are more than the %d series that W&B shows well: they are logged as %d groups (%s). "
            "Pass group_by= (a function from a name to its group's; group_by=str keeps every parameter) to choose.",
            len(snapshot.names),
            MAX_SERIES,
            len(grouped.names),
            description,
        )
        return grouped


def _coarser(names: tuple[str, ...]) -> Iterator[tuple[GroupBy, str]]:
    """Groupings from fine to coarse."""
    yield "module", "one per module"
    for depth in range(max(name.count(".") for name in names), 0, -1):
        yield _prefix(depth), f"by the first {depth} part{'s' if depth > 1 else ''} of the name"


def _neighbours(names: tuple[str, ...]) -> tuple[GroupBy, str]:
    """Thousands of modules side by side, which no part of their names divides: so many in a row are one group."""
    modules = list(dict.fromkeys(map(_prefix(1), names)))
    size = -(-len(modules) // (MAX_SERIES - 1))  # one series is for what appears later
    groups: dict[str, str] = {}
    for start in range(0, len(modules), size):
        members = modules[start : start + size]
        groups |= dict.fromkeys(members, f"{members[0]}-{members[-1]}" if len(members) > 1 else members[0])
    return lambda name: groups.get(_prefix(1)(name), "later"), f"{size} neighbours each"


def _num_groups(names: tuple[str, ...], group_by: GroupBy) -> int:
    return len(set(map(group_function(group_by), names)))


def _prefix(depth: int) -> Callable[[str], str]:
    return lambda name: ".".join(name.split(".")[:depth])
