"""Keep everything in lists: for tests, notebooks and programs that read the numbers themselves."""

from __future__ import annotations

from collections import deque

from ..rules import Alert
from ..snapshot import Snapshot, concatenate


class MemorySink:
    """Keep the newest snapshots and alerts.

    Args:
        max_snapshots: how many of each are kept; None keeps all.
    """

    def __init__(self, max_snapshots: int | None = None) -> None:
        self.snapshots: deque[Snapshot] = deque(maxlen=max_snapshots)
        self.alerts: deque[Alert] = deque(maxlen=max_snapshots)
        self.closed = False

    def write(self, snapshot: Snapshot) -> None:
        self.snapshots.append(snapshot)

    def alert(self, alert: Alert) -> None:
        self.alerts.append(alert)

    def close(self) -> None:
        self.closed = True

    def merged(self) -> Snapshot | None:
        """All kept samples as one snapshot; None before the first flush."""
        return concatenate(list(self.snapshots))
