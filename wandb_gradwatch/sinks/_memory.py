"""Keep everything in lists: for tests, notebooks and programs that read the numbers themselves."""

from __future__ import annotations

from collections import deque

from ..rules import Alert
from ..snapshot import Snapshot
from ..snapshot._shapes import concatenate
from ._base import Sink


class MemorySink(Sink):
    """Keep the newest snapshots and alerts.

    Args:
        max_snapshots: how many of each are kept; None keeps all.

    Raises:
        ValueError: max_snapshots is not a whole number, at least 1.

    Example:
        >>> import torch, wandb_gradwatch
        >>> model = torch.nn.Linear(2, 1, bias=False)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> memory = wandb_gradwatch.MemorySink()
        >>> with wandb_gradwatch.watch(model, sinks=[memory]):
        ...     for _ in range(3):
        ...         optimizer.zero_grad()
        ...         model(torch.tensor([[3.0, 4.0]])).sum().backward()  # the gradient is the input
        ...         optimizer.step()
        >>> memory.merged().steps.tolist()
        [1, 2, 3]
        >>> memory.merged().total_grad_norm.round(4).tolist()
        [5.0, 5.0, 5.0]
    """

    def __init__(self, max_snapshots: int | None = None) -> None:
        if max_snapshots is not None and (not isinstance(max_snapshots, int) or max_snapshots < 1):
            raise ValueError(f"MemorySink(max_snapshots={max_snapshots!r}) must be at least 1, or None for all")
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
