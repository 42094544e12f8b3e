"""Which batch a sample belongs to: a sample may close late (the second of a GAN) and arrive late (from a GPU)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..snapshot import Snapshot
from ._sample_queue import is_due, newest_of


@dataclass(frozen=True)
class BatchPlace:
    """Where in the training an update was made.

    Args:
        batch: what loggers call the step: batches that ended in an update, from 0.
        epoch: the epoch, from 0.
        every: the numbers of every n-th batch are logged; 0: of none.
    """

    batch: int
    epoch: int
    every: int


class BatchIndex:
    """Knows the place of every sample that is under way, and keeps those of a due batch until all have arrived.

    Args:
        here: the place of an update that would be made now.
    """

    def __init__(self, here: Callable[[], BatchPlace]) -> None:
        self._here = here
        self._places: dict[int, BatchPlace] = {}  # by the step of a sample that has not arrived
        self._new: list[tuple[BatchPlace, Snapshot]] = []
        self._due: dict[int, list[Snapshot]] = {}  # by batch

    def note(self, step: int) -> None:
        """The sample of this step is made by the batch under way."""
        self._places[step] = self._here()

    def enter(self, samples: list[Snapshot]) -> None:
        """Samples have arrived, in order."""
        for sample in samples:
            step = int(sample.steps[0])
            place = self._places.get(step) or self._here()
            # They arrive in order: an earlier one that was noted was not measured and never comes.
            self._places = {later: where for later, where in self._places.items() if later > step}
            self._new.append((place, sample))
            if is_due(sample, place.batch + 1, place.every):
                self._due.setdefault(place.batch, []).append(sample)

    def take_new(self) -> list[tuple[BatchPlace, Snapshot]]:
        """The samples that arrived since the last call."""
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
