"""Operations from snapshots to snapshots: group names, select samples, merge."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from .._measure.columns import NUM_BINS, NUM_COLUMNS, merge_rows
from .._measure.probe_values import merge_histograms
from . import keys

if TYPE_CHECKING:
    from ._snapshot import Snapshot

# S samples, P watched parameters (or groups)

GroupBy = str | Callable[[str], str]
Places = npt.NDArray[np.intp] | slice


def group_function(group_by: GroupBy) -> Callable[[str], str]:
    """Resolve `group_by` to a function from a parameter's name to its group's name.

    Raises:
        ValueError: `group_by` is neither "parameter", "module" nor callable.

    Examples:
        >>> group_function("module")("blocks.0.attn.weight")
        'blocks.0.attn'
    """
    if callable(group_by):
        return group_by
    if group_by == "parameter":
        return lambda name: name
    if group_by == "module":
        return lambda name: name.rpartition(".")[0] or name
    raise ValueError(f'group_by={group_by!r} must be "parameter", "module" or a function from a name to its group')


def group_names(snapshot: Snapshot, group_of: Callable[[str], str]) -> Snapshot:
    """Merge the names of each group, in the order in which the groups first appear; facts per parameter are dropped."""
    members: dict[str, list[int]] = {}
    for index, name in enumerate(snapshot.names):
        members.setdefault(group_of(name), []).append(index)
    rows = np.empty((len(snapshot), len(members), NUM_COLUMNS))
    histogram = None if snapshot.histogram is None else np.empty((len(members), NUM_BINS), dtype=np.int64)
    trainable = np.empty(len(members), dtype=bool)
    for index, places in enumerate(members.values()):
        # Most groups consist of neighbours, for which a slice avoids a copy.
        are_neighbours = places[-1] - places[0] == len(places) - 1
        group: Places = slice(places[0], places[-1] + 1) if are_neighbours else np.array(places)
        rows[:, index] = merge_rows(snapshot.rows[:, group], axis=1)
        trainable[index] = np.logical_or.reduce(snapshot.trainable[group])
        if histogram is not None and snapshot.histogram is not None:
            histogram[index] = np.add.reduce(snapshot.histogram[group], axis=0)
    begin = f"{keys.PARAMETER_HISTOGRAMS}/"  # histograms of parameters are grouped as rows are
    histograms = (
        {begin + group_of(key.removeprefix(begin)) if key.startswith(begin) else key: of_name}
        for key, of_name in snapshot.metric_histograms.items()
    )
    return replace(
        snapshot,
        names=tuple(members),
        rows=rows,
        histogram=histogram,
        trainable=trainable,
        metric_histograms=merge_histograms(histograms),
        per_parameter={},
    )


def select_samples(snapshot: Snapshot, indices: Sequence[int] | npt.NDArray[np.intp]) -> Snapshot:
    """Select samples of a snapshot. Histograms are dropped, because they cannot be split by sample."""
    chosen = slice(None) if list(indices) == list(range(len(snapshot))) else list(indices)
    return replace(
        snapshot,
        steps=snapshot.steps[chosen],
        rows=snapshot.rows[chosen],
        histogram=None,
        histogram_steps=(),
        loss_scale=snapshot.loss_scale[chosen],
        skipped=snapshot.skipped[chosen],
        metrics={name: values[chosen] for name, values in snapshot.metrics.items()},
        metric_histograms={},
        per_parameter={name: values[chosen] for name, values in snapshot.per_parameter.items()},
    )


def merge_snapshots(snapshots: Sequence[Snapshot]) -> Snapshot:
    """Concatenate at least one snapshot in the order given; names and metrics that a snapshot lacks become NaN."""
    names, places = _joint_names(snapshots)
    rows = np.full((sum(map(len, snapshots)), len(names), NUM_COLUMNS), np.nan)
    trainable = np.zeros(len(names), dtype=bool)
    facts = dict.fromkeys(name for snapshot in snapshots for name in snapshot.per_parameter)
    per_parameter = {name: np.full(rows.shape[:2], np.nan) for name in facts}
    histogram = None
    start = 0
    for snapshot in snapshots:
        here = places[snapshot.names]
        rows[start : start + len(snapshot), here] = snapshot.rows
        trainable[here] = snapshot.trainable
        for name, values_SP in snapshot.per_parameter.items():
            per_parameter[name][start : start + len(snapshot), here] = values_SP
        start += len(snapshot)
        if snapshot.histogram is not None:
            histogram = np.zeros((len(names), NUM_BINS), dtype=np.int64) if histogram is None else histogram
            histogram[here] += snapshot.histogram
    return replace(
        snapshots[-1],
        steps=np.concatenate([s.steps for s in snapshots]),
        names=names,
        rows=rows,
        histogram=histogram,
        histogram_steps=tuple(step for s in snapshots for step in s.histogram_steps),
        loss_scale=np.concatenate([s.loss_scale for s in snapshots]),
        skipped=np.concatenate([s.skipped for s in snapshots]),
        trainable=trainable,
        metrics={
            key: np.concatenate([s.metrics[key] if key in s.metrics else np.full(len(s), np.nan) for s in snapshots])
            for key in dict.fromkeys(key for snapshot in snapshots for key in snapshot.metrics)
        },
        metric_histograms=merge_histograms(s.metric_histograms for s in snapshots),
        per_parameter=per_parameter,
    )


def _joint_names(snapshots: Sequence[Snapshot]) -> tuple[tuple[str, ...], dict[tuple[str, ...], Places]]:
    """All names in the order in which they first appear; and for each snapshot's names, their indices among all."""
    distinct = dict.fromkeys(snapshot.names for snapshot in snapshots)
    place = {name: index for index, name in enumerate(dict.fromkeys(chain.from_iterable(distinct)))}
    names = tuple(place)
    return names, {
        some: slice(None) if some == names else np.array([place[name] for name in some], dtype=np.intp)
        for some in distinct
    }
