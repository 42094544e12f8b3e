"""Where snapshots and alerts go."""

from __future__ import annotations

from ._base import Sink
from ._console import ConsoleSink
from ._memory import MemorySink
from ._wandb_run import WandbSink
from ._webhook import WebhookSink

__all__ = ["ConsoleSink", "MemorySink", "Sink", "WandbSink", "WebhookSink"]
