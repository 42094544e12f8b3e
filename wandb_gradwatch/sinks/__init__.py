"""Where snapshots and alerts go."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from ..rules import Alert
from ..snapshot import Snapshot
from ._console import ConsoleSink
from ._memory import MemorySink
from ._wandb_run import WandbSink
from ._webhook import WebhookSink

__all__ = ["ConsoleSink", "MemorySink", "Sink", "WandbSink", "WebhookSink"]


@runtime_checkable
class Sink(Protocol):
    """Receives every flushed snapshot and every alert. A sink that raises is dropped, with one message.

    It is called by the training's own thread: what may have to wait belongs in a thread of the sink's own, as in
    `WebhookSink`.
    """

    def write(self, snapshot: Snapshot) -> None: ...

    def alert(self, alert: Alert) -> None: ...

    def close(self) -> None: ...
