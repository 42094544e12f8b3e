"""What the integrations share: every sample for the framework, and the framework's numbers for the W&B row."""

from __future__ import annotations

import logging
import sys
from collections import deque
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, Final

import numpy as np

from .._measure.columns import Column
from .._runtime.sharding import rank
from ..rules import Alert
from ..sinks import Sink
from ..snapshot import GroupBy, Snapshot, keys

# S samples in the window

logger: Final = logging.getLogger("wandb_gradwatch")


class SampleQueue:
    """Keeps every sample until the framework has a moment for it.

    A rule, because rules are given each sample once, in order, as soon as it is on the host, where sinks get
    windows. It finds nothing.
    """

    def __init__(self) -> None:
        self._inbox: deque[Snapshot] = deque()

    def check(self, snapshot: Snapshot) -> Iterable[Alert]:
        self._inbox.extend(snapshot.sample(index) for index in range(len(snapshot)))
        return ()

    def take(self) -> list[Snapshot]:
        """The samples that have arrived since the last call, in order, one snapshot each."""
        taken = list(self._inbox)
        self._inbox.clear()
        return taken

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing is remembered: who saves a state has taken what is in the inbox."""


def sample_numbers(sample: Snapshot, *, per_layer: GroupBy | None, sparsity: bool) -> dict[str, float]:
    """The numbers of one sample by name: of the whole model, and with a slash in the name those of the layers.

    Args:
        sample: a snapshot of one sample.
        per_layer: what a layer is, None to leave layers out.
        sparsity: with the share of dead elements.

    Returns:
        What is missing in the sample has no name here.
    """
    if not sample.names:
        return {}
    total = sample.total
    numbers = {
        "grad_norm": float(total.grad_norm[0, 0]),
        "grad_mean": float(total.grad_mean[0, 0]),
        "grad_std": float(total.grad_std[0, 0]),
    }
    if sparsity:
        numbers["grad_sparsity"] = float(total.dead_ratio[0, 0])
    if per_layer is not None:
        layers = sample.by_group(per_layer)
        norms = layers.grad_norm[0].tolist()
        layer_keys = [keys.layer_key(keys.LAYER_GRAD_NORM, name) for name in layers.names]
        numbers |= dict(zip(layer_keys, norms, strict=True))
    return {name: number for name, number in numbers.items() if number == number}


def newest_of(samples: list[Snapshot]) -> Snapshot:
    """One sample out of several: each parameter as in the last of them that has it (a GAN's two updates of a batch)."""
    merged = samples[0].merge(*samples[1:])
    newest = merged.sample(-1)
    rows = newest.rows.copy()
    for earlier in reversed(range(len(merged) - 1)):
        absent = np.isnan(rows[0, :, Column.NUM_ELEMENTS])
        rows[0, absent] = merged.rows[earlier, absent]
    return replace(newest, rows=rows)


def is_due(sample: Snapshot, place: int, every: int) -> bool:
    """Whether a framework that logs every n-th step logs this sample: the first one at or after each n-th.

    Args:
        place: of the sample in the framework's count, from 1.
        every: n; 0: none.
    """
    since = int(sample.metrics[keys.SAMPLE_EVERY][0]) if keys.SAMPLE_EVERY in sample.metrics else 1  # the one before
    return every > 0 and place // every > (place - since) // every


def is_update(sample: Snapshot) -> bool:
    """Whether a finite gradient led to an update: what an average may be made of."""
    return not sample.skipped[0] and float(np.nansum(sample.num_nonfinite)) == 0


def active_run() -> Any:
    """The W&B run of this process; None where there is none, W&B was never imported, or the rank is not 0."""
    return getattr(sys.modules.get("wandb"), "run", None) if rank() == 0 else None


class AlertLog(Sink):
    """Writes alerts to the program's log, for trainings without W&B; an ERROR goes to standard error by itself."""

    def alert(self, alert: Alert) -> None:
        if alert.level != "ERROR":
            logger.warning("%s: %s", alert.title, alert.text)
