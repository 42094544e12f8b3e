"""The rows of ours that wait for a place, in order."""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass
from typing import Any, Final, Protocol


class Row(Protocol):
    """A row that waits; it becomes one or several dictionaries only when a place is found."""

    @property
    def step(self) -> int | None:
        """Rows of different owners that are of one step share a place; None: with none."""

    def merge(self, later: Any) -> Any:
        """This row and a later one of the same owner as one."""

    def parts(self) -> list[dict[str, Any]]:
        """What to log, in order; each part takes a place of its own."""


_MAX_TOGETHER: Final = 8  # rows, of at most 1 MB a part: W&B skips rows above 10.4 MB


@dataclass(eq=False)
class _QueuedRow:
    owner: object
    row: Row
    num_windows: int = 1


class RowQueue:
    """Rows in a line, and in front of them the parts of the row whose placing has begun. Owns both.

    The lock is never held while logging, so that `put` never waits for a log call, and it is re-entrant, because a
    signal handler may log or finish the run in the middle of anything here.
    When more than `max_waiting` rows wait, neighbours of one owner are merged.
    """

    def __init__(self, max_waiting: int) -> None:
        self._max_waiting = max_waiting
        self._waiting: deque[_QueuedRow] = deque()
        self._parts: deque[dict[str, Any]] = deque()
        self._lock = threading.RLock()

    def __len__(self) -> int:
        """Rows that have no place yet."""
        return len(self._waiting) + bool(self._parts)

    def put(self, owner: object, row: Row) -> None:
        with self._lock:
            self._waiting.append(_QueuedRow(owner, row))
            if len(self._waiting) > self._max_waiting:
                self._merge_neighbours()

    def next_part(self) -> dict[str, Any] | None:
        """The part whose turn it is; it stays where it is."""
        while not self._parts:
            with self._lock:
                rows = self._pop_rows_of_one_place()
            if not rows:
                return None
            for row in rows:
                self._add_parts(row)
        return self._parts[0]

    def remove(self, part: dict[str, Any]) -> None:
        """This part, whose turn it was, is logged."""
        if self._parts and self._parts[0] is part:  # otherwise a signal handler has logged it, too, and ended the run
            self._parts.popleft()

    def has_several_of(self, owner: object) -> bool:
        """Whether two rows of this owner, or more, have no place yet."""
        return sum(queued.owner is owner for queued in self._waiting) + bool(self._parts) > 1

    def has_several(self) -> bool:
        """Whether another part or row waits behind the next part."""
        self.next_part()
        return len(self._parts) + len(self._waiting) > 1

    def clear(self) -> None:
        self._waiting.clear()
        self._parts.clear()

    def _pop_rows_of_one_place(self) -> list[Row]:
        """The first row, and those of other owners that share its place: otherwise they would fall behind.

        Of each owner its oldest row, so that none overtakes another; at most as many as W&B's size limit allows.
        """
        oldest_of: dict[object, _QueuedRow] = {}
        for queued in self._waiting:
            oldest_of.setdefault(queued.owner, queued)
        oldest = list(oldest_of.values())
        sharing = oldest[:1] + [one for one in oldest[1:] if one.row.step == oldest[0].row.step is not None]
        for queued in sharing[:_MAX_TOGETHER]:
            self._waiting.remove(queued)
        return [queued.row for queued in sharing[:_MAX_TOGETHER]]

    def _add_parts(self, row: Row) -> None:
        """Put each part into the place of one that has nothing else under its keys, or into a new place at the end."""
        for index, part in enumerate(row.parts()):
            here = self._parts[index] if index < len(self._parts) else None
            if here is not None and all(_is_same(here[key], part[key]) for key in here.keys() & part.keys()):
                self._parts[index] = {**here, **part}
            else:
                self._parts.append(part)

    def _merge_neighbours(self) -> None:
        """Merge the two neighbours of one owner that together hold the fewest windows; the oldest of equals."""
        pairs: list[tuple[_QueuedRow, _QueuedRow]] = []
        newest_of: dict[object, _QueuedRow] = {}
        for queued in self._waiting:
            if queued.owner in newest_of:
                pairs.append((newest_of[queued.owner], queued))
            newest_of[queued.owner] = queued
        if not pairs:
            return  # as many owners as rows
        earlier, later = min(pairs, key=lambda pair: pair[0].num_windows + pair[1].num_windows)
        merged = earlier.row.merge(later.row)
        # Neither is there where a signal handler has ended the run meanwhile.
        if earlier in self._waiting and later in self._waiting:
            later.row, later.num_windows = merged, earlier.num_windows + later.num_windows
            self._waiting.remove(earlier)


def _is_same(one: object, other: object) -> bool:
    """W&B's histograms do not compare what they hold: two watchers of one layer would take turns for them."""
    return getattr(one, "__dict__", one) == getattr(other, "__dict__", other)
