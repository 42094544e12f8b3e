"""Distances of sharded parameters over the ranks: sums of squares in fixed positions, so that they add up.

What is added is an array [S, K, P, 3]: of every sample, kind of distance and parameter the two sums, and a 1 from each
rank that has them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from .columns import FloatArray
from .probe_values import Distance

# S samples in the window, K kinds of distances, P watched parameters

Kind = tuple[str, tuple[str, str]]  # what the key begins with, and the names


def kinds_of(samples: Sequence[Mapping[str, Distance]]) -> list[Kind]:
    """The kinds of distances in a window that concern parameters; the same on every rank that has the same probes."""
    found = {
        (key.removesuffix(distance.parameter), distance.names)
        for distances in samples
        for key, distance in distances.items()
        if distance.parameter is not None
    }
    return sorted(found)


def pack(
    samples: Sequence[Mapping[str, Distance]],
    kinds: Sequence[Kind],
    names: Sequence[str],
    counted: npt.NDArray[np.bool_],
) -> FloatArray:
    """What this rank adds: [S * K * P * 3]; zeros for parameters that another rank counts."""
    packed = np.zeros((len(samples), len(kinds), len(names), 3))
    place = {name: index for index, name in enumerate(names) if counted[index]}
    for sample, distances in enumerate(samples):
        for kind, (begin, _) in enumerate(kinds):
            for name, index in place.items():
                distance = distances.get(begin + name)
                if distance is not None:
                    packed[sample, kind, index] = (*distance.sums, 1.0)
    return packed.ravel()


def unpack(packed: FloatArray, num_samples: int, kinds: Sequence[Kind], names: Sequence[str]) -> list[dict[str, float]]:
    """What the sums of all ranks mean, by key, for every sample."""
    sums_SKP3 = packed.reshape(num_samples, len(kinds), len(names), 3)
    metrics: list[dict[str, float]] = []
    for sums_KP3 in sums_SKP3:
        of_sample: dict[str, float] = {}
        for (begin, kind_names), sums_P3 in zip(kinds, sums_KP3, strict=True):
            for index in np.flatnonzero(sums_P3[:, 2]).tolist():
                sums = (float(sums_P3[index, 0]), float(sums_P3[index, 1]))
                of_sample |= Distance(sums, kind_names, names[index]).metrics(begin + names[index])
        metrics.append(of_sample)
    return metrics
