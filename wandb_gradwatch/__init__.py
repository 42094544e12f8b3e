"""Monitor the gradients of every layer of a PyTorch model in Weights & Biases, with one line:

wandb_gradwatch.watch(model)
"""

from ._guard.guard import SkipGuard
from ._judgement.incident import Incident
from ._judgement.verdict import Verdict
from ._nonfinite.search import find_nonfinite, trace_nonfinite
from ._nonfinite.trace import Finding
from ._pipeline.recording import Recording, load_recording
from ._watch import unwatch, watch
from ._watcher import Watcher
from .rules import Alert, Rule, default_rules, rule
from .sinks import ConsoleSink, MemorySink, Sink, WandbSink, WebhookSink
from .snapshot import Snapshot

__version__ = "0.2.0"

__all__ = [
    "Alert",
    "ConsoleSink",
    "Finding",
    "Incident",
    "MemorySink",
    "Recording",
    "Rule",
    "Sink",
    "SkipGuard",
    "Snapshot",
    "Verdict",
    "WandbSink",
    "Watcher",
    "WebhookSink",
    "__version__",
    "default_rules",
    "find_nonfinite",
    "load_recording",
    "rule",
    "trace_nonfinite",
    "unwatch",
    "watch",
]
