"""One line that tells you, in Weights & Biases, what the gradients of every layer do.

    wandb_gradwatch.watch(model)
"""

from .rules import Alert, Rule
from .sinks import MemorySink, Sink
from .snapshot import Snapshot
from .watch import Watcher, unwatch, watch

__version__ = "0.1.0"

__all__ = ["Alert", "MemorySink", "Rule", "Sink", "Snapshot", "Watcher", "__version__", "unwatch", "watch"]
