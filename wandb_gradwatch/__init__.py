"""Monitor the gradients of every layer of a PyTorch model in Weights & Biases, with one line:

wandb_gradwatch.watch(model)
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from ._guard.guard import SkipGuard
    from ._judgement.incident import Incident
    from ._judgement.verdict import Verdict
    from ._nonfinite.search import find_nonfinite, trace_nonfinite
    from ._nonfinite.trace import Finding
    from ._pipeline.recording import Recording, load_recording
    from ._watch import unwatch, watch
    from ._watcher import Watcher
    from .rules import Alert, Rule, default_rules, rule
    from .sinks import ConsoleSink, JSONLSink, MemorySink, Sink, WandbSink, WebhookSink
    from .snapshot import Snapshot

__version__ = "0.2.0"

__all__ = [
    "Alert",
    "ConsoleSink",
    "Finding",
    "Incident",
    "JSONLSink",
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

# Imported when they are first used, so that the commands that only read a run start without torch.
_NAMES_IN: Final[dict[str, tuple[str, ...]]] = {
    "._guard.guard": ("SkipGuard",),
    "._judgement.incident": ("Incident",),
    "._judgement.verdict": ("Verdict",),
    "._nonfinite.search": ("find_nonfinite", "trace_nonfinite"),
    "._nonfinite.trace": ("Finding",),
    "._pipeline.recording": ("Recording", "load_recording"),
    "._watch": ("unwatch", "watch"),
    "._watcher": ("Watcher",),
    ".rules": ("Alert", "Rule", "default_rules", "rule"),
    ".sinks": ("ConsoleSink", "JSONLSink", "MemorySink", "Sink", "WandbSink", "WebhookSink"),
    ".snapshot": ("Snapshot",),
}
_HOME_OF: Final = {name: module for module, names in _NAMES_IN.items() for name in names}
_MODULES: Final = ("metrics", "rules", "sinks", "snapshot")


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f".{name}", __name__)
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_HOME_OF[name], __name__), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
