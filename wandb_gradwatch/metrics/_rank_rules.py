"""Rules that read what Ranks() measures."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from .._analysis.formatting import listing, number
from ..rules import Alert
from ..rules._base import check_limits, finding
from ..snapshot import Snapshot, keys


@dataclass(kw_only=True)
class RanksDisagree:
    """A rank's replica of the parameters is not that of the others: "Ranks disagree", naming the rank.

    Replicas that begin alike and take the same updates have the same bits. One that has not trains another model, and
    its gradients spoil those of all. Said again at every sample until a checksum finds them alike.
    """

    _apart: list[int] = field(default_factory=list, init=False, repr=False)

    title: ClassVar[str] = "Ranks disagree"

    def check(self, snapshot: Snapshot) -> Iterable[Alert]:
        num_apart_S = snapshot.metrics.get(f"{keys.RANKS}/all/{keys.APART}", np.full(len(snapshot), np.nan))
        of_rank = {
            int(parts[1].removeprefix("rank_")): values
            for key, values in snapshot.metrics.items()
            if (parts := keys.split_metric(key)) and parts[::2] == (keys.RANKS, keys.APART) and parts[1] != "all"
        }
        for sample, num_apart in enumerate(num_apart_S.tolist()):
            if num_apart == num_apart:
                self._apart = sorted(rank for rank, values in of_rank.items() if values[sample] == 1)
            if self._apart:
                yield self._alert(int(snapshot.steps[sample]))

    def _alert(self, step: int) -> Alert:
        which = listing(self._apart, lambda rank: f"rank {rank}")
        return finding(
            self.title,
            f"Step {step}: the parameters of {which} are not those that most ranks have.",
            "",
            "memory or arithmetic of a device that fails and says nothing, or parameters that only this rank has "
            "changed, such as a checkpoint that not all ranks have loaded",
            "stop, and go on from a checkpoint of before this step on all ranks; where it happens again on the same "
            "rank, have its device tested",
            step,
            "ERROR",
        )

    def state_dict(self) -> dict[str, Any]:
        return {"apart": list(self._apart)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._apart = list(map(int, state["apart"]))


@dataclass(kw_only=True)
class SlowRank:
    """The same rank comes last with its own work in every sample: "Slow rank", naming it; all others wait for it.

    Args:
        factor: times the median of the ranks.
        least: seconds more than the median: what is less is not worth a word.
        patience: samples in a row.
    """

    factor: float = 1.5
    least: float = 0.01
    patience: int = 8
    _last: tuple[int, int] = field(default=(-1, 0), init=False, repr=False)  # a rank, and its samples in a row

    title: ClassVar[str] = "Slow rank"

    def __post_init__(self) -> None:
        check_limits(self, factor=(1.0, np.inf), least=(0.0, np.inf), patience=(1.0, np.inf))

    def check(self, snapshot: Snapshot) -> Iterable[Alert]:
        names = (f"highest/{keys.SECONDS}_rank", f"highest/{keys.SECONDS}", f"median/{keys.SECONDS}")
        if not all(f"{keys.RANKS}/{name}" in snapshot.metrics for name in names):
            return
        columns = np.stack([snapshot.metrics[f"{keys.RANKS}/{name}"] for name in names], axis=1)
        for step, (rank, slowest, median) in zip(snapshot.steps.tolist(), columns.tolist(), strict=True):
            if slowest > max(self.factor * median, median + self.least):
                self._last = (int(rank), self._last[1] + 1 if self._last[0] == rank else 1)
            elif rank == rank:
                self._last = (-1, 0)
            if self._last[1] >= self.patience and rank == rank:
                yield self._alert(step, int(rank), slowest, median)

    def _alert(self, step: int, rank: int, slowest: float, median: float) -> Alert:
        return finding(
            self.title,
            f"Step {step}: rank {rank} has needed more than {number(self.factor)} times as long as the median rank for "
            f"{self.patience} samples, now {number(slowest)} s and not {number(median)} s, and the others wait for it.",
            "",
            "data that this rank loads more slowly, other work on its host, or a host or device that is slower",
            "compare what its data loader and its host do with those of another rank",
            step,
        )

    def state_dict(self) -> dict[str, Any]:
        return {"last": list(self._last)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._last = (int(state["last"][0]), int(state["last"][1]))
