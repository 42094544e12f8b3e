"""The rows of ours that wait for a place, in order."""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass
from typing import Any, Final, Protocol


class Row(Protocol):
    """A row that waits; it becomes one or several dictionaries only when a place is found."""

    def merge(self, later: Any) -> Any:
        """This row and a later one of the same owner as one."""

    def joins(self, other: Any) -> bool:
        """Whether this row may share a place with a row of another owner: both are of the same step."""

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
        return len(self._waiting) + (1 if self._parts else 0)

    def put(self, owner: object, row: Row) -> None:
        """To the end of the line."""
        with self._lock:
            self._waiting.append(_QueuedRow(owner, row))
            if len(self._waiting) > self._max_waiting:
                self._merge_neighbours()

    def next_part(self) -> dict[str, Any] | None:
        """The part whose turn it is."""
        while not self._parts:
            with self._lock:
                if not self._waiting:
                    return None
                first = self._waiting.popleft()
                rows = [first.row, *(queued.row for queued in self._pop_those_that_join(first))]
            for row in rows:
                self._add_parts(row)
        return self._parts[0]

    def has_several_of(self, owner: object) -> bool:
        """Whether two rows of this owner, or more, have no place yet."""
        return sum(queued.owner is owner for queued in self._waiting) + bool(self._parts) > 1

    def _pop_those_that_join(self, first: _QueuedRow) -> list[_QueuedRow]:
        """The rows of other owners that share the first one's place: otherwise they would take turns, and fall behind.

        Of each owner its oldest row, so that none overtakes another; at most as many as W&B's size limit allows.
        """
        oldest_of: dict[int, _QueuedRow] = {id(first.owner): first}
        for queued in self._waiting:
            oldest_of.setdefault(id(queued.owner), queued)
        joining = [queued for queued in oldest_of.values() if queued is not first and first.row.joins(queued.row)]
        joining = joining[: _MAX_TOGETHER - 1]
        for queued in joining:
            self._waiting.remove(queued)
        return joining

    def _add_parts(self, row: Row) -> None:
        """Put each part into the place of one that has nothing else under its keys, or into a new place at the end."""
        for index, part in enumerate(row.parts()):
            here = self._parts[index] if index < len(self._parts) else None
            if here is not None and all(_is_same(here[key], part[key]) for key in here.keys() & part.keys()):
                self._parts[index] = {**here, **part}
            else:
                self._parts.append(part)

    def take_part(self) -> dict[str, Any] | None:
        """The part whose turn it is, out of the line."""
        return None if self.next_part() is None else self._parts.popleft()

    def put_back(self, part: dict[str, Any]) -> None:
        """It is this part's turn still."""
        self._parts.appendleft(part)

    def have_several(self) -> bool:
        """Whether another part or row waits behind the next part."""
        self.next_part()
        return len(self._parts) + len(self._waiting) > 1

    def clear(self) -> None:
        """Nothing waits any more."""
        self._waiting.clear()
        self._parts.clear()

    def _merge_neighbours(self) -> None:
        """Merge the two neighbours of one owner that together hold the fewest windows; the oldest of equals."""
        pair = self._lightest_neighbours()
        if pair is None:
            return  # as many owners as rows
        previous, index = pair
        earlier, later = self._waiting[previous], self._waiting[index]
        merged = _QueuedRow(later.owner, earlier.row.merge(later.row), earlier.num_windows + later.num_windows)
        # Neither holds where a signal handler has ended the run meanwhile.
        if index < len(self._waiting) and self._waiting[previous] is earlier:
            self._waiting[index] = merged
            del self._waiting[previous]

    def _lightest_neighbours(self) -> tuple[int, int] | None:
        last_of: dict[int, int] = {}
        pairs: list[tuple[int, int]] = []
        for index, waiting in enumerate(self._waiting):
            if (previous := last_of.get(id(waiting.owner))) is not None:
                pairs.append((previous, index))
            last_of[id(waiting.owner)] = index
        return min(pairs, key=lambda pair: sum(self._waiting[place].num_windows for place in pair), default=None)


def _is_same(one: object, other: object) -> bool:
    """W&B's histograms do not compare what they hold: two watchers of one layer would take turns for them."""
    return getattr(one, "__dict__", one) == getattr(other, "__dict__", other)
