"""Convert the probes' sums and histograms to arrays that can be added over the ranks, and back.

For every sample and kind of sums there is an array [P, K + 1]: the sums of each parameter, and a 1 from each rank that
has them. Sums that belong to no parameter are a kind with one row.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from .._measure.columns import NUM_BINS, FloatArray
from .._measure.probe_values import ArrivedSums, Meaning, MetricHistogram
from ..snapshot import keys

# S samples in the window, P watched parameters, K sums of a kind, B histogram bins

_NOTHING: Final = MetricHistogram(np.zeros(NUM_BINS, dtype=np.int64), np.inf, -np.inf)


class Kind(NamedTuple):
    """The prefix of the keys of some sums, their meaning, and whether names of parameters follow the prefix."""

    begin: str
    meaning: Meaning
    of_parameters: bool

    def names(self, names: Sequence[str]) -> Sequence[str]:
        """The names of the rows: those of the parameters, or one empty name."""
        return names if self.of_parameters else ("",)


def kinds_of(samples: Sequence[Mapping[str, ArrivedSums]]) -> list[list[Kind]]:
    """The kinds of sums to merge for each sample; the same on every rank with the same probes.

    Kinds of parameters are included for every sample of the window; other kinds, which can be long, only where present.
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


def pack_sums(
    samples: Sequence[Mapping[str, ArrivedSums]],
    kinds: Sequence[Sequence[Kind]],
    names: Sequence[str],
    counted: npt.NDArray[np.bool_],
) -> list[FloatArray]:
    """This rank's summands, by sample and kind; zeros for parameters that another rank counts."""
    packed = []
    for of_sample, of_kinds in zip(samples, kinds, strict=True):
        for kind in of_kinds:
            rows = kind.names(names)
            sums_PK = np.zeros((len(rows), kind.meaning.num_sums + 1))
            for index, name in enumerate(rows):
                one = of_sample.get(kind.begin + name) if kind.meaning.of_every_rank or counted[index] else None
                if one is not None and one.meaning == kind.meaning:
                    sums_PK[index] = (*one.sums, 1.0)
            packed.append(sums_PK)
    return packed


def unpack_sums(
    packed: Iterable[FloatArray], kinds: Sequence[Sequence[Kind]], names: Sequence[str]
) -> list[dict[str, ArrivedSums]]:
    """The sums over all ranks by key, for every sample."""
    arrays, samples = iter(packed), []
    for of_kinds in kinds:
        of_sample: dict[str, ArrivedSums] = {}
        for kind in of_kinds:
            rows, sums_PK = kind.names(names), next(arrays)
            for index in np.flatnonzero(sums_PK[:, -1]).tolist():
                parameter = rows[index] if kind.of_parameters else None
                sums = tuple(sums_PK[index, :-1].tolist())
                of_sample[kind.begin + rows[index]] = ArrivedSums(sums, kind.meaning, parameter)
        samples.append(of_sample)
    return samples


def histogram_keys(names: Sequence[str]) -> list[str]:
    """The key of each parameter's histogram: [P]."""
    return [f"{keys.PARAMETER_HISTOGRAMS}/{name}" for name in names]


def pack_histograms(
    histograms: Mapping[str, MetricHistogram], names: Sequence[str], counted: npt.NDArray[np.bool_]
) -> tuple[FloatArray, FloatArray]:
    """This rank's summands [P, B], and its values for the maxima (minima are negated) [2, P]."""
    found = [
        histograms.get(key, _NOTHING) if counts else _NOTHING
        for key, counts in zip(histogram_keys(names), counted.tolist(), strict=True)
    ]
    counts_PB = np.stack([one.counts for one in found]).astype(np.float64)
    return counts_PB, np.array([[-one.low for one in found], [one.high for one in found]])


def unpack_histograms(
    counts_PB: FloatArray, extremes_2P: FloatArray, names: Sequence[str]
) -> dict[str, MetricHistogram]:
    """The histograms of the whole parameters by key; empty histograms are left out."""
    low_P, high_P = -extremes_2P[0], extremes_2P[1]
    whole = zip(histogram_keys(names), counts_PB.astype(np.int64), low_P.tolist(), high_P.tolist(), strict=True)
    return {key: MetricHistogram(counts_B, low, high) for key, counts_B, low, high in whole if counts_B.any()}
