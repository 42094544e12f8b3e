"""Assemble a snapshot from samples that have arrived, with the current names of the parameters."""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from .._measure.columns import FloatArray
from .._measure.probe_values import merge_histograms
from .._transfer.transfers import ArrivedFlush, ArrivedSample, Names
from ..snapshot import Snapshot, keys

# S samples in the window, P watched parameters, F facts per parameter

Number = TypeVar("Number", np.float64, np.int64, np.bool_)
NO_HISTOGRAM: Final = ArrivedFlush(None, ())


def snapshot_of(
    samples: Sequence[ArrivedSample], known: Names, flush: ArrivedFlush = NO_HISTOGRAM, overhead_ratio: float = math.nan
) -> Snapshot:
    """The snapshot of at least one sample, with these names. Names that a sample lacks are missing (NaN)."""
    num_names = len(known.names)
    return Snapshot(
        steps=np.array([one.sample.step for one in samples], dtype=np.int64),
        names=known.names,
        rows=np.array([padded(one.rows, num_names) for one in samples]),
        histogram=None if flush.histogram is None else padded(flush.histogram, num_names, fill=0),
        histogram_steps=flush.histogram_steps,
        loss_scale=np.array([one.loss_scale for one in samples]),
        skipped=np.array([one.skipped for one in samples]),
        trainable=np.array(known.trainable, dtype=bool),
        metrics=_stacked([one.metrics for one in samples]),
        overhead_ratio=overhead_ratio,
        metric_histograms=merge_histograms(one.histograms for one in samples),
        per_parameter=_per_parameter(samples, num_names),
    )


def _per_parameter(samples: Sequence[ArrivedSample], num_names: int) -> dict[str, FloatArray]:
    """The facts of each parameter by name, each [S, P]; {} if no sample has any."""
    if all(one.facts is None for one in samples):
        return {}
    unknown_PF: FloatArray = np.full((num_names, len(keys.PARAMETER_FACTS)), np.nan)
    facts_SPF = np.array([unknown_PF if one.facts is None else padded(one.facts, num_names) for one in samples])
    return {name: facts_SPF[..., place] for place, name in enumerate(keys.PARAMETER_FACTS)}


def with_totals(snapshot: Snapshot, parts: Mapping[str, Sequence[int]]) -> Snapshot:
    """Add the total norm of each part if there are several parts: models, or optimizers that step in turn."""
    if len(parts) < 2:
        return snapshot
    part_of = {snapshot.names[slot]: part for part, slots in parts.items() for slot in slots}
    grouped = snapshot.by_group(lambda name: part_of.get(name, ""))
    totals = {keys.TOTAL + name: grouped.grad_norm[:, place] for place, name in enumerate(grouped.names) if name}
    return replace(snapshot, metrics={**snapshot.metrics, **totals})


def padded(values: NDArray[Number], num_names: int, *, fill: float = math.nan) -> NDArray[Number]:
    """Append rows of `fill` for names that appeared after the values were measured: [P, any]."""
    return values if len(values) == num_names else placed(values, slice(len(values)), num_names, fill=fill)


def placed(
    values: NDArray[Number], places: Sequence[int] | slice, num_names: int, *, fill: float = math.nan
) -> NDArray[Number]:
    """Move rows to these places among those of all names: [P, any]; all other rows are `fill`."""
    whole = np.full((num_names, *values.shape[1:]), fill, dtype=values.dtype)
    whole[places] = values
    return whole


def _stacked(metrics: Sequence[Mapping[str, float]]) -> dict[str, FloatArray]:
    """The values of each key over all samples, NaN where a sample lacks the key: each [S]."""
    keys = dict.fromkeys(itertools.chain.from_iterable(metrics))
    found = [values.get(key, math.nan) for key in keys for values in metrics]
    # One array for all keys, because there are hundreds of keys with metrics of every module.
    return dict(zip(keys, np.array(found, dtype=np.float64).reshape(len(keys), len(metrics)), strict=True))
