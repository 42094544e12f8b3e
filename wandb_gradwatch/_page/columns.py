"""The columns of a layers x steps picture: what each value is about, so that it is drawn where it was measured.

A row's maxima and counts are about all its samples, its other values about the last one. The flight recorder's steps
have columns of their own, which divide those of the rows.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from .._measure.columns import FloatArray, IntArray
from ..snapshot import keys
from .history import RecordedTable, RunHistory, recorded_rows
from .packing import number_of, pool, pool_steps

# R rows of the run, W pooled rows, C columns of the picture, P names

_ROUNDING: Final = 1e-5  # relative; logged numbers may be rounded
_SAME_NORM: Final = 1e-4  # relative
OF_WINDOW: Final = frozenset({keys.LAYER_GRAD_NORM_MAX, keys.LAYER_NUM_NONFINITE})
# By metric: the columns of the flight recorder's table whose sum it is.
_RECORDED: Final = {
    keys.LAYER_GRAD_NORM_MAX: ("grad_norm",),
    keys.LAYER_NUM_NONFINITE: ("num_nan", "num_inf"),
    **{name: (name,) for name in ("grad_norm", "grad_norm_clipped", "grad_abs_max", "param_norm", "dead_ratio")},
}


@dataclass(frozen=True)
class Columns:
    """Disjoint intervals of steps, ascending."""

    first: IntArray  # [C]
    last: IntArray  # [C]
    row_of: IntArray  # [C] the pooled row that the interval belongs to; -1: only the flight recorder has it
    recorded: npt.NDArray[np.bool_]  # [C] whether the interval is a step of the flight recorder
    is_whole: npt.NDArray[np.bool_]  # [C] whether it is the row's window, undivided
    ends_row: npt.NDArray[np.bool_]  # [C] whether it has the row's last step


def window_starts(history: RunHistory, width: int) -> IntArray:
    """The first step of each pooled row: [W]; no row begins before the previous one ends."""
    first = history.first_samples.copy()
    first[1:] = np.maximum(first[1:], history.steps[:-1] + 1)
    return np.asarray(first[::width])


def columns_of(history: RunHistory, width: int, recorded: Sequence[int] = ()) -> Columns:
    """Divide the windows of the pooled rows at the steps that the flight recorder holds."""
    begins, ends = window_starts(history, width), pool_steps(history.steps, width)[1]
    single = np.array(recorded if len(ends) else (), dtype=np.int64)
    first = np.unique(np.concatenate([begins, single, single + 1]))
    row = np.searchsorted(ends, first)
    is_recorded = np.isin(first, single)
    in_row = (row < len(ends)) & (begins[np.minimum(row, len(ends) - 1)] <= first)
    kept = in_row | is_recorded
    first, row, is_recorded, in_row = first[kept], row[kept], is_recorded[kept], in_row[kept]
    row = np.where(in_row, row, -1)
    last = np.where(in_row, ends[row], first)
    last = np.where(is_recorded, first, np.minimum(last, np.append(first[1:] - 1, last[-1:])))
    ends_row = in_row & (last == ends[row])
    is_whole = ends_row & (first == begins[row]) & ~is_recorded
    return Columns(first, last, row, is_recorded, is_whole, ends_row)


def recorded_values(table: RecordedTable, steps: Sequence[int]) -> Mapping[str, Mapping[str, FloatArray]]:
    """The flight recorder's values by name as in keys, then by metric: one for each of `steps`; NaN if missing."""
    place_of = {step: place for place, step in enumerate(steps)}
    found: dict[str, dict[str, FloatArray]] = {}
    for row in recorded_rows(table):
        of_name = found.setdefault(keys.in_key(row["name"]), {})
        for metric, parts in _RECORDED.items():
            values = of_name.setdefault(metric, np.full(len(steps), np.nan))
            values[place_of[row["step"]]] = sum(number_of(row.get(part)) for part in parts)
    return found


def recorded_totals(history: RunHistory) -> dict[int, float]:
    """The norm of all gradients as the optimizer received them, by step of the flight recorder.

    A step counts only if the norm before clipping, from the same rows, is the sample's: so all parameters are there.
    """
    if history.flight_recorder is None:
        return {}
    squares: dict[int, list[float]] = {}
    for row in recorded_rows(history.flight_recorder):
        sums = squares.setdefault(row["step"], [0.0, 0.0])
        for place, column in enumerate(("grad_norm", "grad_norm_clipped")):
            sums[place] += np.nan_to_num(number_of(row.get(column))) ** 2
    norm_of = dict(zip(history.samples.steps.tolist(), history.samples.norms.tolist(), strict=True))
    return {
        step: math.sqrt(received)
        for step, (before, received) in squares.items()
        if math.isclose(math.sqrt(before), norm_of.get(step, math.nan), rel_tol=_SAME_NORM)
    }


def spread(metric: str, values_R: FloatArray, columns: Columns, width: int, recorded: FloatArray | None) -> FloatArray:
    """One name's values of a metric in each column: [C]; NaN where the run holds none.

    The rest of a window that the flight recorder divides has the window's value only if the recorder has it not.
    """
    rows = np.append(pool(values_R, width, metric), np.nan)
    if metric not in OF_WINDOW:
        values = np.where(columns.ends_row, rows[columns.row_of], np.nan)
    elif recorded is None:
        values = rows[columns.row_of]
    else:
        seen = np.full(len(rows), -np.inf)
        np.fmax.at(seen, columns.row_of[columns.recorded], recorded)
        values = np.where(seen < rows * (1 - _ROUNDING), rows, np.nan)[columns.row_of]
    if recorded is not None:
        values[columns.recorded] = recorded
    return np.asarray(values)
