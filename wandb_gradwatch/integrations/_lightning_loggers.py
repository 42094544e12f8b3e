"""Where the numbers of a Lightning training go: its loggers, callback_metrics, and the W&B runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from ..sinks import Sink
from ..sinks._history_row import Details
from ..sinks._wandb_run import WandbSink
from ..snapshot import GroupBy, Snapshot
from ._batch_index import BatchPlace
from ._sample_queue import active_run


def place_of(trainer: Any, every: int) -> BatchPlace:
    """Where the training is; every n-th batch that ends in an update is due, with 0 none."""
    loop = trainer.fit_loop.epoch_loop
    # Private, and what Trainer gives its loggers for a step; global_step counts every optimizer's.
    batch = getattr(loop, "_batches_that_stepped", trainer.global_step)
    return BatchPlace(batch, trainer.current_epoch, every)


def log(trainer: Any, numbers: Mapping[str, float], prefix: str, *, step: int, with_wandb: bool) -> None:
    """Give numbers to every logger under their own step, and those of the whole model to callback_metrics.

    Not by log_dict: it writes under the step at which the trainer happens to write, or never, takes 0.3 ms a name, and
    on several ranks asks for a collective to average what is equal on all of them.

    Args:
        numbers: by name, without prefix; one with a slash is a layer's.
        with_wandb: False where the runs get the numbers in the rows of their own sinks.
    """
    if not numbers:
        return
    loggers = trainer.loggers if trainer.is_global_zero else ()
    for logger in loggers:
        if with_wandb or not _is_wandb(logger):
            logger.log_metrics(prefixed(prefix, numbers), step=step)
    whole = prefixed(prefix, without_layers(numbers))
    trainer.callback_metrics.update({name: torch.tensor(number) for name, number in whole.items()})


class NamedWandbSink(WandbSink):
    """The W&B run, with the framework's own names for some numbers in the same row.

    Args:
        run: the W&B run.
        numbers_of: a sample's further numbers by key; {} for none.
        rows: write rows at all, or only alerts.
        options: further arguments of WandbSink.
    """

    def __init__(
        self, run: Any, numbers_of: Callable[[int], Mapping[str, float]], *, rows: bool, **options: Any
    ) -> None:
        super().__init__(run, **options)
        self._numbers_of = numbers_of
        self._writes_rows = rows

    def write(self, snapshot: Snapshot) -> None:
        if not self._writes_rows:
            return
        numbers_S = [self._numbers_of(int(step)) for step in snapshot.steps]
        keys = dict.fromkeys(key for numbers in numbers_S for key in numbers)
        named = {key: np.array([numbers.get(key, np.nan) for numbers in numbers_S]) for key in keys}
        super().write(replace(snapshot, metrics={**snapshot.metrics, **named}) if named else snapshot)


def sinks_for(
    trainer: Any,
    run: Any,
    group_by: GroupBy,
    numbers_of: Callable[[int], Mapping[str, float]],
    *,
    rows: bool,
    namespace: str,
    details: Details,
) -> list[Sink]:
    """The runs of the WandbLoggers, otherwise the active one; beyond rank zero, only a run that the user gave.

    Args:
        run: the only run, where the user gave one.
        numbers_of: the further numbers of a sample's row, by its step.
        rows: False to send alerts only.
        namespace, details: as in WandbSink: what the whole model's numbers are logged below, and further numbers.
    """
    runs = [] if run is None else [run]
    if not runs and trainer.is_global_zero:
        runs = [logger.experiment for logger in trainer.loggers if _is_wandb(logger)]
        if not runs and (active := active_run()) is not None:
            runs = [active]
    options: dict[str, Any] = {"group_by": group_by, "namespace": namespace, "details": details}
    each_once = {id(each): each for each in runs}.values()
    return [NamedWandbSink(each, numbers_of, rows=rows, **options) for each in each_once]


def _is_wandb(logger: Any) -> bool:
    return any(cls.__name__ == "WandbLogger" for cls in type(logger).__mro__)


def without_layers(numbers: Mapping[str, float]) -> dict[str, float]:
    """The numbers of the whole model."""
    return {name: number for name, number in numbers.items() if "/" not in name}


def prefixed(prefix: str, numbers: Mapping[str, float]) -> dict[str, float]:
    """The numbers under their full names."""
    return {prefix + name: number for name, number in numbers.items()}
