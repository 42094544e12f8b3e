"""What the row scheduler knows: our rows that are not logged yet, in order, and the state of W&B's open row."""

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Protocol

from .._interruptions import raise_interruption


class Row(Protocol):
    """A queued row. It is converted to dictionaries only when it can be logged."""

    @property
    def step(self) -> int | None:
        """Rows of different owners with the same step share one W&B row; a row with None shares with no other."""

    def merge(self, later: Any) -> Any:
        """Return one row that replaces this row and a later one of the same owner."""

    def parts(self) -> list[dict[str, Any]]:
        """The dictionaries to log, in order. Each part needs a W&B row of its own."""


MAX_WAITING: Final = 64  # rows, about 35 MB with 256 histograms each; above this number, neighbouring rows are merged
_MAX_TOGETHER: Final = 8  # rows that share one W&B row; their parts have at most 1 MB, and W&B drops rows above 10.4 MB


@dataclass(eq=False)
class _QueuedRow:
    owner: object
    row: Row
    num_windows: int = 1


class RowQueue:
    """The queued rows, and the remaining parts of the row that is being logged.

    A row that cannot be converted is left out, and `left_out` receives the exception.

    The lock is not held during a log call, so `put` never waits for one. The lock is re-entrant because a signal
    handler can log or finish the run at any point in this code.
    """

    def __init__(self, left_out: Callable[[Exception], None]) -> None:
        self._left_out = left_out
        self._waiting: deque[_QueuedRow] = deque()
        self._parts: deque[dict[str, Any]] = deque()
        self._lock = threading.RLock()

    def __len__(self) -> int:
        """The number of rows that are not logged, or not logged completely."""
        return len(self._waiting) + bool(self._parts)

    def put(self, owner: object, row: Row) -> None:
        with self._lock:
            self._waiting.append(_QueuedRow(owner, row))
            if len(self._waiting) > MAX_WAITING:
                self._merge_neighbours()

    def next_part(self) -> dict[str, Any] | None:
        """Return the next part to log without removing it; None if the queue is empty."""
        while not self._parts:
            with self._lock:
                rows = self._pop_rows_of_one_place()
            if not rows:
                return None
            for row in rows:
                try:
                    self._add_parts(row)
                except Exception as error:
                    raise_interruption(error)
                    self._left_out(error)
        return self._parts[0]

    def remove(self, part: dict[str, Any]) -> None:
        """Remove the next part after it has been logged."""
        if self._parts and self._parts[0] is part:  # False if a signal handler also logged the part and ended the run
            self._parts.popleft()

    def keep_plain_values(self, part: dict[str, Any]) -> None:
        """Remove tables and histograms from the next part, which could not be logged; if it has none, the part."""
        values = plain_values(part)
        if self._parts and self._parts[0] is part:
            self._parts.popleft()
            if len(values) < len(part):
                self._parts.appendleft(values)

    def has_several_of(self, owner: object) -> bool:
        return sum(queued.owner is owner for queued in self._waiting) + bool(self._parts) > 1

    def has_several(self) -> bool:
        """Whether another part or row follows the next part."""
        self.next_part()
        return len(self._parts) + len(self._waiting) > 1

    def clear(self) -> None:
        self._waiting.clear()
        self._parts.clear()

    def _pop_rows_of_one_place(self) -> list[Row]:
        """Pop the first row and the rows of other owners with the same step, so that no owner falls behind.

        Only the oldest row of each owner qualifies, which keeps the order; W&B's size limit bounds their number.
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
        """Merge each part into the queued part of the same index, or append it if a key has another value there."""
        for index, part in enumerate(row.parts()):
            here = self._parts[index] if index < len(self._parts) else None
            if here is not None and all(_is_same(here[key], part[key]) for key in here.keys() & part.keys()):
                self._parts[index] = {**here, **part}
            else:
                self._parts.append(part)

    def _merge_neighbours(self) -> None:
        """Merge the two neighbouring rows of one owner with the fewest windows in sum; of equal pairs, the oldest."""
        pairs: list[tuple[_QueuedRow, _QueuedRow]] = []
        newest_of: dict[object, _QueuedRow] = {}
        for queued in self._waiting:
            if queued.owner in newest_of:
                pairs.append((newest_of[queued.owner], queued))
            newest_of[queued.owner] = queued
        if not pairs:
            return  # every row has another owner
        earlier, later = min(pairs, key=lambda pair: pair[0].num_windows + pair[1].num_windows)
        merged = earlier.row.merge(later.row)
        # If a signal handler has ended the run meanwhile, neither row is in the queue any more.
        if earlier in self._waiting and later in self._waiting:
            later.row, later.num_windows = merged, earlier.num_windows + later.num_windows
            self._waiting.remove(earlier)


def plain_values(part: dict[str, Any]) -> dict[str, Any]:
    """Return a part without tables and histograms."""
    return {key: value for key, value in part.items() if isinstance(value, int | float | str)}


def _is_same(one: object, other: object) -> bool:
    """Compare by content: wandb.Histogram compares by identity, so two watchers of a layer would never share a row."""
    return getattr(one, "__dict__", one) == getattr(other, "__dict__", other)


class OpenRow:
    """The known state of W&B's open row; only `note_call` and `note_step` change it."""

    def __init__(self, step: int) -> None:
        self.step = step
        self.num_earlier = 0  # rows before it that this process has seen
        self.has_own = False  # whether the open row already contains a row of ours
        self.timestamp: float | None = None  # the timestamp that the user gave for the row
        self.users: set[str] = set()  # the keys of the row that are the user's

    def is_left_by(self, step: int | None) -> bool:
        """Whether a log call with this step closes the row and opens a later one."""
        return step is not None and step > self.step

    def note_call(self, step: int | None, closes: bool, *, own: bool = False) -> None:
        """Record a log call that W&B did not drop. `closes`: it closed its row; `own`: it contained a row of ours."""
        if step is not None:
            self.note_step(step)
        self.has_own |= own
        if closes:
            self.note_step(self.step + 1)

    def note_step(self, step: int) -> None:
        """Record the step of the open row; a larger step than before means that another row is open."""
        if step > self.step:
            self.step, self.has_own, self.timestamp, self.users = step, False, None, set()
            self.num_earlier += 1
