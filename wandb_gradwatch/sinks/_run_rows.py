"""Our rows as the row scheduler sees them: mergeable while they wait, made into W&B's types when their turn comes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from ..snapshot import keys
from ._history_row import HistoryRow, Number
from ._rebinning import Rebinner

MAX_ROW_BYTES: Final = 1_000_000  # W&B skips a row above 10.4 MB whole, with the user's keys in it
_NUMBER_BYTES: Final = 24  # of a float as JSON, with its comma


@dataclass(frozen=True)
class RunRow:
    """One window's row, in as many parts as W&B's size limit asks for.

    Args:
        row: its values.
        rebinner: what draws its histograms; None: it has none.
        namespace: what the whole model's numbers are logged below; "": nothing.
    """

    row: HistoryRow
    rebinner: Rebinner | None
    namespace: str = ""

    def merge(self, later: RunRow) -> RunRow:
        return RunRow(self.row.merge(later.row), later.rebinner, later.namespace)

    def joins(self, other: object) -> bool:
        return isinstance(other, RunRow) and other.row.step == self.row.step

    def parts(self) -> list[dict[str, Any]]:
        values: list[tuple[str, Any, int]] = [
            (key, value, len(key) + _NUMBER_BYTES)
            for key, value in in_namespace(self.row.scalars(), self.namespace).items()
        ]
        if self.rebinner is not None:
            values += _histograms(self.rebinner, self.row)
        return _spread(values, {keys.STEP: self.row.step})


@dataclass(frozen=True)
class TableRow:
    """The flight recorder's table: the later of two holds what the earlier did."""

    columns: list[str]
    rows: list[list[Any]]

    def merge(self, later: TableRow) -> TableRow:
        return later

    def joins(self, other: object) -> bool:
        return False

    def parts(self) -> list[dict[str, Any]]:
        import wandb

        newest = max(row[self.columns.index("step")] for row in self.rows)
        # W&B learns the columns' types row by row, in a second for ten thousand: those that differ are enough.
        kinds = {tuple(map(type, row)): row for row in self.rows}
        table = wandb.Table(columns=[*self.columns], data=[*kinds.values()])
        table.data[:] = self.rows
        return [{keys.STEP: newest, keys.FLIGHT_RECORDER: table}]


def in_namespace(values: dict[str, Number], namespace: str) -> dict[str, Number]:
    """The whole model's numbers below a namespace; the step, and what has a layer's name, stay."""
    return {keys.in_namespace(key, namespace): value for key, value in values.items()}


def _histograms(rebinner: Rebinner, row: HistoryRow) -> Iterator[tuple[str, Any, int]]:
    import wandb

    drawn = {} if row.pictured is None else rebinner.of(row.pictured)
    keyed = {keys.layer_key(keys.GRADIENT_HISTOGRAMS, name): picture for name, picture in drawn.items()}
    for key, (counts, edges) in (keyed | rebinner.of_metrics(row.metric_histograms)).items():
        size = len(key) + len(edges) * _NUMBER_BYTES + len(counts) * (len(str(max(counts))) + 2)
        # It asks for arrays and turns them into the lists that these are already.
        yield key, wandb.Histogram(np_histogram=(counts, edges)), size  # type: ignore[arg-type]


def _spread(values: list[tuple[str, Any, int]], step: dict[str, int]) -> list[dict[str, Any]]:
    """Fill rows up to the size limit, in order, each with the step."""
    parts: list[dict[str, Any]] = [dict(step)]
    filled = 0
    for key, value, size in values:
        if filled + size > MAX_ROW_BYTES and len(parts[-1]) > len(step):
            parts.append(dict(step))
            filled = 0
        parts[-1][key] = value
        filled += size
    return parts
