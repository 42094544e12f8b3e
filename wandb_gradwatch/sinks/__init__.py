"""Destinations of snapshots and alerts: the W&B run, the console, a webhook and memory."""

from ._base import ConsoleSink, MemorySink, Sink
from ._wandb_run import WandbSink
from ._webhook import WebhookSink

__all__ = ["ConsoleSink", "MemorySink", "Sink", "WandbSink", "WebhookSink"]
