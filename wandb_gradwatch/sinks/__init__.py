"""Destinations of snapshots and alerts: the W&B run, a file, the console, a webhook and memory."""

from ._base import ConsoleSink, MemorySink, Sink
from ._jsonl import JSONLSink
from ._wandb_run import WandbSink
from ._webhook import WebhookSink

__all__ = ["ConsoleSink", "JSONLSink", "MemorySink", "Sink", "WandbSink", "WebhookSink"]
