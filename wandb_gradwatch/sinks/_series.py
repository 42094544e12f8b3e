"""How many series a run gets: the groups that the user asked for, or few enough that W&B shows them well."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable
from typing import Final

from ..snapshot import Snapshot
from ..snapshot._shapes import GroupBy, group_function

logger: Final = logging.getLogger("wandb_gradwatch")

MAX_SERIES: Final = 256  # names per key family, of which there are a dozen
_LATER: Final = "later"  # the group of what appears after the neighbours were chosen
# What counts neighbours: the last part of a name that is a number; where there is none, the last digits.
_INDEX: Final = re.compile(r"(?<![^.])\d+(?![^.])(?!.*(?<![^.])\d+(?![^.]))")
_DIGITS: Final = re.compile(r"\d+(?!.*\d)")

Grouping = Callable[[str], str]


class SeriesGrouping:
    """The groups that the user asked for, otherwise parameters, or groups that keep the number of series sane.

    Owns the grouping that was found to be coarse enough: it stays, and is said once.
    """

    def __init__(self, group_by: GroupBy | None) -> None:
        self._chosen = group_by
        self._automatic: GroupBy = "parameter"

    def apply(self, snapshot: Snapshot) -> Snapshot:
        """The snapshot with one name per series."""
        if self._chosen is not None:
            return snapshot.by_group(self._chosen)
        grouped = snapshot.by_group(self._automatic)
        if len(grouped.names) <= MAX_SERIES:
            return grouped
        self._automatic, description = coarse_grouping(snapshot.names)
        grouped = snapshot.by_group(self._automatic)
        logger.warning(
            "%d parameters are more than the %d series that W&B shows well: they are logged as %d groups (%s). "
            'Pass group_by= to choose: a function from a name to its group\'s, or "parameter" to keep every one.',
            len(snapshot.names),
            MAX_SERIES,
            len(grouped.names),
            description,
        )
        return grouped


def coarse_grouping(names: tuple[str, ...]) -> tuple[Grouping, str]:
    """The finest grouping of more than MAX_SERIES names that gives at most so many groups, and what to call it.

    Modules, or what the first parts of the names divide, if that gives at least half of what is allowed; otherwise
    neighbours of one kind together: blocks.0-1.fc, blocks.2-3.fc, ...
    """
    levels = [(group_function("module"), "one per module")]  # from fine to coarse
    for depth in range(max(name.count(".") for name in names), 0, -1):
        levels.append((_prefix(depth), f"by the first {depth} part{'s' if depth > 1 else ''} of the name"))
    natural = next((level for level in levels if len(_groups(names, level[0])) <= MAX_SERIES), None)
    if natural is not None and len(_groups(names, natural[0])) >= MAX_SERIES // 2:
        return natural
    # What divides too little leaves nothing to join; the names themselves, if everything does: a long ParameterList.
    finer: list[Grouping] = [level for level, _ in levels if len(_groups(names, level)) > MAX_SERIES] or [str]
    kinds: dict[str, list[str]] = {}
    for level in finer:
        kinds = {}  # groups whose names differ in their last number only
        for group in _groups(names, level):
            number = _number_in(group)
            kind = group if number is None else f"{group[: number.start()]}\0{group[number.end() :]}"
            kinds.setdefault(kind, []).append(group)
        if len(kinds) < MAX_SERIES:
            break
    else:  # no numbers in the names: neighbours of any kind
        kinds = {"": _groups(names, level)}
    group_of, largest = _joined(kinds)
    return (lambda name: group_of.get(level(name), _LATER)), f"up to {largest} neighbours of one kind each"


def _prefix(depth: int) -> Grouping:
    return lambda name: ".".join(name.split(".")[:depth])


def _groups(names: Iterable[str], group_of: Grouping) -> list[str]:
    return list(dict.fromkeys(map(group_of, names)))


def _joined(kinds: dict[str, list[str]]) -> tuple[dict[str, str], int]:
    """Each group's series, and the most groups that one series joins; the kinds share the series by their sizes.

    One series is left for what appears later.
    """
    # Each kind has one series for certain: the others go to where most is left to join, so that sizes are alike.
    num_series = dict.fromkeys(kinds, 1)
    for _ in range(MAX_SERIES - 1 - len(kinds)):
        num_series[max(kinds, key=lambda kind: len(kinds[kind]) / num_series[kind])] += 1
    group_of: dict[str, str] = {}
    largest = 1
    for kind, members in kinds.items():
        count = num_series[kind]
        for index in range(count):
            joined = members[index * len(members) // count : (index + 1) * len(members) // count]
            group_of |= dict.fromkeys(joined, _joined_name(joined))
            largest = max(largest, len(joined))
    return group_of, largest


def _joined_name(members: list[str]) -> str:
    first, last = members[0], members[-1]
    if first == last:
        return first
    begin, end = _number_in(first), _number_in(last)
    if begin is None or end is None or first[: begin.start()] != last[: end.start()]:
        return f"{first}-{last}"
    return f"{first[: begin.end()]}-{end[0]}{first[begin.end() :]}"


def _number_in(name: str) -> re.Match[str] | None:
    return _INDEX.search(name) or _DIGITS.search(name)
