"""Sums over sharded parameters, merged over the ranks: in fixed positions, so that they add up.

What is added is for every sample and kind of sums an array [P, K + 1]: of every parameter its sums, and a 1 from each
rank that has them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from .columns import FloatArray
from .probe_values import ArrivedSums, Meaning

# S samples in the window, P watched parameters, K sums of a kind

Kind = tuple[str, Meaning]  # what the key begins with


def kinds_of(samples: Sequence[Mapping[str, ArrivedSums]]) -> list[Kind]:
    """The kinds of sums in a window that concern parameters; the same on every rank that has the same probes."""
    found = {
        (key.removesuffix(one.parameter), one.meaning)
        for of_sample in samples
        for key, one in of_sample.items()
        if one.parameter is not None
    }
    return sorted(found, key=repr)


def pack(
    samples: Sequence[Mapping[str, ArrivedSums]],
    kinds: Sequence[Kind],
    names: Sequence[str],
    counted: npt.NDArray[np.bool_],
) -> FloatArray:
    """What this rank adds, all kinds of a sample one behind the other; zeros for what another rank counts."""
    place = {name: index for index, name in enumerate(names) if counted[index]}
    packed = []
    for of_sample in samples:
        for begin, meaning in kinds:
            sums_PK = np.zeros((len(names), meaning.num_sums + 1))
            for name, index in place.items():
                one = of_sample.get(begin + name)
                if one is not None and one.meaning == meaning:
                    sums_PK[index] = (*one.sums, 1.0)
            packed.append(sums_PK.ravel())
    return np.concatenate(packed) if packed else np.empty(0)


def unpack(
    packed: FloatArray, num_samples: int, kinds: Sequence[Kind], names: Sequence[str]
) -> list[dict[str, ArrivedSums]]:
    """The sums of all ranks, by key, for every sample."""
    samples: list[dict[str, ArrivedSums]] = []
    begin_at = 0
    for _ in range(num_samples):
        of_sample: dict[str, ArrivedSums] = {}
        for begin, meaning in kinds:
            end = begin_at + len(names) * (meaning.num_sums + 1)
            sums_PK, begin_at = packed[begin_at:end].reshape(len(names), -1), end
            for index in np.flatnonzero(sums_PK[:, -1]).tolist():
                sums = tuple(sums_PK[index, :-1].tolist())
                of_sample[begin + names[index]] = ArrivedSums(sums, meaning, names[index])
        samples.append(of_sample)
    return samples
