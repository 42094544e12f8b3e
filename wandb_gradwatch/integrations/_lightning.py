"""Where the numbers of a Lightning training go (loggers, callback_metrics, W&B runs), and of which batch they are.

A sample may close late (the second of a GAN) and arrive late (from a GPU).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch

from ..sinks._wandb_run import WandbSink
from ..snapshot import Snapshot
from ..snapshot._arrays import last_present
from ._session import active_run, is_due, named


class BatchPlace(NamedTuple):
    """Where in the training an update was made."""

    batch: int  # what loggers call the step: batches that ended in an update, from 0
    epoch: int


class BatchIndex:
    """Knows the place of every sample that is under way, and keeps those of a due batch until all have arrived."""

    def __init__(self, here: Callable[[], BatchPlace], every: int) -> None:
        self._here = here  # the place of an update that would be made now
        self._every = every  # the numbers of every n-th batch are logged; 0: of none
        self._places: dict[int, BatchPlace] = {}  # by the step of a sample that has not arrived
        self._new: list[tuple[BatchPlace, Snapshot]] = []
        self._due: dict[int, list[Snapshot]] = {}  # by batch

    def note(self, step: int) -> None:
        """The sample of this step is made by the batch under way."""
        self._places[step] = self._here()

    def enter(self, samples: list[Snapshot]) -> None:
        for sample in samples:
            step = int(sample.steps[0])
            place = self._places.get(step) or self._here()
            # They arrive in order: an earlier one that was noted was not measured and never comes.
            self._places = {later: where for later, where in self._places.items() if later > step}
            self._new.append((place, sample))
            if is_due(sample, place.batch + 1, self._every):
                self._due.setdefault(place.batch, []).append(sample)

    def take_new(self) -> list[tuple[BatchPlace, Snapshot]]:
        new, self._new = self._new, []
        return new

    def take_due(self) -> list[tuple[int, Snapshot]]:
        """The due batches of which every sample has arrived, each as one sample."""
        waiting = {place.batch for place in self._places.values()}
        complete = [batch for batch in self._due if batch not in waiting]
        return [(batch, newest_of(self._due.pop(batch))) for batch in complete]

    def due_sample(self, step: int) -> Snapshot | None:
        """What has arrived of the due batch whose newest sample has this step; None if that is not due."""
        return next((newest_of(samples) for samples in self._due.values() if samples[-1].steps[0] == step), None)


def newest_of(samples: list[Snapshot]) -> Snapshot:
    """One sample out of several: each parameter as in the last of them that has it (a GAN's two updates of a batch)."""
    merged = samples[0].merge(*samples[1:])
    return replace(merged.sample(-1), rows=last_present(merged.rows, merged.present)[None])


def place_of(trainer: Any) -> BatchPlace:
    # Private, and what Trainer gives its loggers for a step; global_step counts every optimizer's.
    batch = getattr(trainer.fit_loop.epoch_loop, "_batches_that_stepped", trainer.global_step)
    return BatchPlace(batch, trainer.current_epoch)


def log(trainer: Any, numbers: Mapping[str, float], prefix: str, *, step: int, with_wandb: bool) -> None:
    """Give numbers to every logger under their own step, and those of the whole model to callback_metrics.

    Not by log_dict: it writes under the step at which the trainer happens to write, or never, takes 0.3 ms a name, and
    on several ranks asks for a collective to average what is equal on all of them. Without W&B's loggers where the runs
    get the numbers in the rows of their own sinks.
    """
    if not numbers:
        return
    for logger in trainer.loggers if trainer.is_global_zero else ():
        if with_wandb or not _is_wandb(logger):
            logger.log_metrics(named(prefix, numbers), step=step)
    whole = named(prefix, numbers, layers=False)
    trainer.callback_metrics.update({name: torch.tensor(number) for name, number in whole.items()})


class NamedWandbSink(WandbSink):
    """The W&B run, with the framework's own names for some numbers in the same row."""

    def __init__(
        self, run: Any, numbers_of: Callable[[int], Mapping[str, float]], *, rows: bool, **options: Any
    ) -> None:
        super().__init__(run, **options)
        self._numbers_of = numbers_of  # a sample's further numbers by key, from its step
        self._writes_rows = rows  # or only alerts

    def write(self, snapshot: Snapshot) -> None:
        if not self._writes_rows:
            return
        numbers_S = [self._numbers_of(int(step)) for step in snapshot.steps]
        keys = dict.fromkeys(key for numbers in numbers_S for key in numbers)
        columns = {key: np.array([numbers.get(key, np.nan) for numbers in numbers_S]) for key in keys}
        super().write(replace(snapshot, metrics={**snapshot.metrics, **columns}) if columns else snapshot)


def runs_of(trainer: Any, run: Any) -> list[Any]:
    """The run that the user gave, otherwise on rank zero those of the WandbLoggers, otherwise the active one."""
    runs = [] if run is None else [run]
    if not runs and trainer.is_global_zero:
        runs = [logger.experiment for logger in trainer.loggers if _is_wandb(logger)]
        if not runs and (active := active_run()) is not None:
            runs = [active]
    return list({id(each): each for each in runs}.values())


def _is_wandb(logger: Any) -> bool:
    return any(cls.__name__ == "WandbLogger" for cls in type(logger).__mro__)
