"""The sink interface, with defaults that do nothing, and two sinks that stay on this machine: memory and console."""

import sys
from collections import deque
from collections.abc import Callable
from typing import Any, TextIO

import numpy as np

from .._analysis.formatting import number, visible_text
from .._judgement.verdict import Verdict
from ..rules import Alert
from ..snapshot import Snapshot
from ..snapshot._shapes import merge_snapshots


class Sink:
    """Receives every flushed snapshot and every alert. A sink that raises is removed, with one message.

    Derive a class from Sink and override the methods that it needs. The training thread calls these methods, so work
    that can block belongs in a thread of its own, as in `WebhookSink`.
    """

    def write(self, snapshot: Snapshot) -> None:
        """Receive the snapshot of a flushed window."""

    def alert(self, alert: Alert) -> None:
        """Receive an alert as soon as it is sent."""

    def verdict(self, verdict: Verdict) -> None:
        """Receive all that is known of the run: after every alert, when an incident ends, and at the end of the run."""

    def log_table(self, columns: list[str], rows: list[list[Any]]) -> None:
        """Receive the samples of the flight recorder as a table: one row for each layer at each step."""

    def close(self) -> None:
        """Release the sink's resources. No other method is called after `close`."""

    @property
    def directory(self) -> str | None:
        """The folder for the flight recorder's file; None if the sink has no folder."""
        return None

    @property
    def viewable(self) -> str | None:
        """The folder or file on this machine that `wandb-gradwatch view` reads; None if there is none."""
        return None

    @property
    def is_terminal(self) -> bool:
        """Whether this sink prints alerts in the terminal. If so, ERROR alerts are not printed there a second time."""
        return False

    def namespace_in(self, run: object) -> str | None:
        """The namespace of the model-wide keys in this W&B run, "" for none; None if the sink writes elsewhere."""
        return None

    def pop_seconds(self) -> float:
        """Training time in seconds that the sink took outside of these methods since the last call of `pop_seconds`."""
        return 0.0

    def before_run_ends(self, callback: Callable[[], object]) -> None:
        """Register a callback for a last flush: it is called once, before the sink's destination is closed."""


class MemorySink(Sink):
    """Keep the newest snapshots and alerts in memory.

    Args:
        max_snapshots: the number of snapshots, and of alerts, to keep; None keeps all.

    Raises:
        ValueError: max_snapshots is not an integer of at least 1.

    Examples:
        >>> import torch, wandb_gradwatch
        >>> model = torch.nn.Linear(2, 1, bias=False)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> memory = wandb_gradwatch.MemorySink()
        >>> with wandb_gradwatch.watch(model, sinks=[memory], sample_every=1):
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
        """Merge the kept snapshots into one; returns None before the first flush."""
        return merge_snapshots(list(self.snapshots)) if self.snapshots else None


class ConsoleSink(Sink):
    """Print one line per snapshot, and every alert in full.

        step 150 (50 samples)  grad_norm 13  max 20.1  largest head.weight 12  clip_ratio 0

    Args:
        file: an open text file; None prints to the `sys.stderr` of the moment.

    Raises:
        TypeError: `file` is not an open text file.
    """

    def __init__(self, file: TextIO | None = None) -> None:
        if file is not None and not hasattr(file, "write"):
            raise TypeError(f"ConsoleSink(file={file!r}) must be an open text file, as open(name, 'w') returns it")
        self._file = file

    def write(self, snapshot: Snapshot) -> None:
        if len(snapshot):
            self._print(summary_line(snapshot))

    def alert(self, alert: Alert) -> None:
        self._print(str(alert))

    @property
    def is_terminal(self) -> bool:
        return self._file in (None, sys.stdout, sys.stderr)

    def _print(self, text: str) -> None:
        print(visible_text(text), file=sys.stderr if self._file is None else self._file, flush=True)


def summary_line(snapshot: Snapshot) -> str:
    """Format a snapshot with at least one sample as one line; missing values and counts of 0 are left out."""
    norms, total = snapshot.total_grad_norm, snapshot.total
    largest = np.fmax.reduce(snapshot.grad_norm, axis=0)
    fields = [f"step {snapshot.steps[-1]} ({len(snapshot)} sample{'s' if len(snapshot) != 1 else ''})"]
    fields += _value("grad_norm", norms[-1]) + _value("max", np.fmax.reduce(norms))
    if not np.isnan(largest).all():
        worst = int(np.nanargmax(largest))
        fields += _value(f"largest {snapshot.names[worst]}", largest[worst])
    fields += _count("NaN", np.nansum(total.num_nan)) + _count("Inf", np.nansum(total.num_inf))
    fields += _value("clip_ratio", snapshot.clip_ratio) + _count("loss_scale", snapshot.loss_scale[-1])
    fields += _count("skipped", snapshot.skipped.sum()) + _count("withheld", snapshot.num_guarded_steps)
    return visible_text("  ".join(fields), keep="")


def _value(name: str, value: float) -> list[str]:
    return [] if np.isnan(value) else [f"{name} {number(float(value))}"]


def _count(name: str, value: float) -> list[str]:
    return [f"{name} {value:g}"] if value > 0 else []
