"""Sums over sharded parameters, merged over the ranks: in fixed positions, so that they add up.

What is added is for every sample and kind of sums an array [P, K + 1]: of every parameter its sums, and a 1 from each
rank that has them. Sums that are of no parameter are a kind with one row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from .columns import FloatArray
from .probe_values import ArrivedSums, Meaning

# S samples in the window, P watched parameters, K sums of a kind


class Kind(NamedTuple):
    """What the keys of these sums begin with, their meaning, and whether the names of parameters follow."""

    begin: str
    meaning: Meaning
    of_parameters: bool

    def names(self, names: Sequence[str]) -> Sequence[str]:
        """Of the rows: those of the parameters, or the one that is of none."""
        return names if self.of_parameters else ("",)


def kinds_of(samples: Sequence[Mapping[str, ArrivedSums]]) -> list[list[Kind]]:
    """The kinds of sums that are merged, of each sample; the same on every rank that has the same probes.

    What is of parameters any sample of the window may have; the rest is told apart by sample, as it can be long.
    """
    of_samples = [
        {
            Kind(key.removesuffix(one.parameter or ""), one.meaning, one.parameter is not None)
            for key, one in of_sample.items()
            if one.parameter is not None or one.meaning.of_every_rank
        }
        for of_sample in samples
    ]
    of_parameters = {kind for kinds in of_samples for kind in kinds if kind.of_parameters}
    return [sorted(kinds | of_parameters, key=repr) for kinds in of_samples]


def pack(
    samples: Sequence[Mapping[str, ArrivedSums]],
    kinds: Sequence[Sequence[Kind]],
    names: Sequence[str],
    counted: npt.NDArray[np.bool_],
) -> FloatArray:
    """What this rank adds, all kinds of a sample one behind the other; zeros for what another rank counts."""
    packed = []
    for of_sample, of_kinds in zip(samples, kinds, strict=True):
        for kind in of_kinds:
            rows = kind.names(names)
            sums_PK = np.zeros((len(rows), kind.meaning.num_sums + 1))
            for index, name in enumerate(rows):
                one = of_sample.get(kind.begin + name) if kind.meaning.of_every_rank or counted[index] else None
                if one is not None and one.meaning == kind.meaning:
                    sums_PK[index] = (*one.sums, 1.0)
            packed.append(sums_PK.ravel())
    return np.concatenate(packed) if packed else np.empty(0)


def unpack(packed: FloatArray, kinds: Sequence[Sequence[Kind]], names: Sequence[str]) -> list[dict[str, ArrivedSums]]:
    """The sums of all ranks, by key, for every sample."""
    samples: list[dict[str, ArrivedSums]] = []
    begin_at = 0
    for of_kinds in kinds:
        of_sample: dict[str, ArrivedSums] = {}
        for kind in of_kinds:
            rows = kind.names(names)
            end = begin_at + len(rows) * (kind.meaning.num_sums + 1)
            sums_PK, begin_at = packed[begin_at:end].reshape(len(rows), -1), end
            for index in np.flatnonzero(sums_PK[:, -1]).tolist():
                sums = tuple(sums_PK[index, :-1].tolist())
                parameter = rows[index] if kind.of_parameters else None
                of_sample[kind.begin + rows[index]] = ArrivedSums(sums, kind.meaning, parameter)
        samples.append(of_sample)
    return samples
