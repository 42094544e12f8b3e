"""Merge a window over the ranks, for sharded models or metrics that compare ranks: two all-reduces, and one to compare.

Rows are mergeable: sums are all-reduced as sums, extremes as maxima (a minimum is a negated maximum), in fixed
positions. `rank_merger.py` decides when the ranks call this together.

The probes' sums are merged too. For every sample and kind of sums there is an array [P, K + 1]: the sums of each
parameter, and a 1 from each rank that has them. Sums that belong to no parameter are a kind with one row.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch.distributed as dist

from .._measure.columns import MAX_COLUMNS, MIN_COLUMNS, NUM_BINS, NUM_COLUMNS, SUM_COLUMNS, Column, FloatArray
from .._measure.probe_values import ArrivedSums, Meaning, MetricHistogram, merge_histograms
from .._transfer.transfers import ArrivedFlush, ArrivedSample
from ..snapshot import keys
from .assembly import NO_HISTOGRAM
from .rank_tree import RankTree

# S samples in the window, P watched parameters, C columns, B histogram bins, K sums of a kind, R ranks

_SUMS: Final = list(SUM_COLUMNS)
_EXTREMES: Final = [*MIN_COLUMNS, *MAX_COLUMNS]
_SIGN: Final = np.array([-1.0] * len(MIN_COLUMNS) + [1.0] * len(MAX_COLUMNS))
_NOTHING_BAD: Final = -np.inf
_BAD_LEFT: Final = [Column.NUM_NAN, Column.NUM_INF]
_BAD_RECEIVED: Final = [Column.RECEIVED_NUM_NAN, Column.RECEIVED_NUM_INF]
_CHANGE: Final = (keys.CLIPPED, keys.CHANGED)
_NOTHING: Final = MetricHistogram(
    np.zeros(NUM_BINS, dtype=np.int64), np.inf, -np.inf
)  # the histogram of a parameter that another rank counts

_OTHER_STEPS: Final = "other ranks have measured other steps"
_DIFFERENT: Final = "other ranks watch other parameters, have other metrics, or have loaded another state"


@dataclass(frozen=True)
class RankWindow:
    """A window of one rank; after the merge, with the rows and histograms of all ranks."""

    samples: tuple[ArrivedSample, ...]  # at least one
    flush: ArrivedFlush  # contains the histogram
    names: tuple[str, ...]  # [P] the same on every rank
    # [P] True where this rank's rows are counted: it holds a shard, or is the one of several replicas to be counted
    counted: npt.NDArray[np.bool_]
    overhead_ratio: float = math.nan  # of this rank; not merged
    has_shards: bool = True  # whether ranks hold different gradients
    are_averaged: bool = False  # whether the backward left averages over ranks, so that no alert can name one for them
    num_uncounted: int = 0  # steps in the number of a step that this process has not counted

    def of(self, samples: Sequence[ArrivedSample]) -> RankWindow:
        """The window of some of the samples, without histograms."""
        without = tuple(replace(sample, histograms={}) for sample in samples)
        return replace(self, samples=without, flush=NO_HISTOGRAM)


class Outcome(NamedTuple):
    """A window and, if it is not merged and contains only what this rank has measured, the reason."""

    window: RankWindow
    reason: str = ""


class _Probes(NamedTuple):
    """What probes have measured in a window that is merged over ranks."""

    kinds: Sequence[Sequence[_Kind]]  # [S] of sums
    histograms: Mapping[str, MetricHistogram]  # by key
    of_parameters: Set[str]  # the keys of histograms of parameters

    @staticmethod
    def of(window: RankWindow) -> _Probes:
        histograms = merge_histograms(sample.histograms for sample in window.samples)
        of_parameters = histograms.keys() & set(_histogram_keys(window.names))
        return _Probes(_kinds_of([sample.sums for sample in window.samples]), histograms, of_parameters)


def merge_in_step(window: RankWindow, tree: RankTree, rank: int, world: int) -> tuple[list[Outcome], list[RankWindow]]:
    """Merge this rank's oldest window with those of the other ranks, which call this at the same time.

    Usually all windows have the same steps. Otherwise the steps are merged that all ranks have, up to the end of the
    window that ends first, without histograms, because these may be of other steps.

    Returns:
        The outcomes in the order of the steps, and the part of the window after that end, if any.
    """
    probes = _Probes.of(window)
    is_same, begin, end = _compared(tree, window, probes)
    if is_same:
        return [Outcome(_merged(tree, window, probes, rank, world))], []
    until_end = [sample for sample in window.samples if sample.sample.step <= end]
    later = [sample for sample in window.samples if sample.sample.step > end]
    steps = _steps_of_all(tree, until_end, range(begin, end + 1), world)
    common = [sample for sample in until_end if sample.sample.step in steps]
    alone = [sample for sample in until_end if sample.sample.step not in steps]
    outcomes = [Outcome(window.of(alone), _OTHER_STEPS)] if alone else []
    if common:
        part = window.of(common)
        probes = _Probes.of(part)
        is_same, *_ = _compared(tree, part, probes)
        outcomes.append(Outcome(_merged(tree, part, probes, rank, world)) if is_same else Outcome(part, _DIFFERENT))
    outcomes.sort(key=lambda outcome: outcome.window.samples[-1].sample.step)
    return outcomes, [window.of(later)] if later else []


def _compared(tree: RankTree, window: RankWindow, probes: _Probes) -> tuple[bool, int, int]:
    """Whether all ranks have the same window, and the least first and the least last step of the ranks' windows."""
    steps = [sample.sample.step for sample in window.samples]
    # A rank that has flushed alone may have taken the histogram at other steps.
    histogram_steps = None if window.flush.histogram is None else window.flush.histogram_steps
    of_probes = (probes.kinds, bool(probes.of_parameters))
    what = repr((steps, window.num_uncounted, window.names, histogram_steps, of_probes)).encode()
    digest = float(int.from_bytes(hashlib.sha256(what).digest()[:6], "big"))  # 48 bits: exact in float64
    most_4 = np.array([digest, -digest, -steps[0], -steps[-1]], dtype=np.float64)
    tree.all_reduce(most_4, dist.ReduceOp.MAX)
    return bool(most_4[0] == -most_4[1]), -int(most_4[2]), -int(most_4[3])


def _steps_of_all(tree: RankTree, samples: Sequence[ArrivedSample], within: range, world: int) -> Set[int]:
    """The steps in a range that every rank has measured."""
    num_ranks = np.zeros(len(within))
    num_ranks[[sample.sample.step - within.start for sample in samples]] = 1.0
    tree.all_reduce(num_ranks, dist.ReduceOp.SUM)
    return {within.start + place for place in np.flatnonzero(num_ranks == world).tolist()}


def _merged(tree: RankTree, window: RankWindow, probes: _Probes, rank: int, world: int) -> RankWindow:
    """Merge a window that is the same on all ranks, by two messages."""
    kinds, histograms, of_parameters = probes
    of_samples = [sample.sums for sample in window.samples]
    rows_SPC = np.stack([sample.rows for sample in window.samples])
    sums, extremes = _pack(rows_SPC, window, rank, world)
    of_kinds = _pack_sums(of_samples, kinds, window, rank, world)
    of_histograms = _pack_histograms(histograms, window.names, window.counted) if of_parameters else ()
    all_sums = _all_reduced(tree, [*sums, *of_kinds, *of_histograms[:1]], dist.ReduceOp.SUM)
    all_extremes = _all_reduced(tree, [*extremes, *of_histograms[1:]], dist.ReduceOp.MAX)
    merged = _unpack(all_sums[: len(sums)], all_extremes[: len(extremes)], window, world)
    samples = []
    of_all = _unpack_sums(all_sums[len(sums) :], kinds, window.names)
    for sample, whole in zip(merged.samples, of_all, strict=True):
        meant = {name: value for key, one in whole.items() for name, value in one.metrics(key).items()}
        samples.append(replace(sample, sums={**sample.sums, **whole}, metrics={**sample.metrics, **meant}))
    if of_parameters:
        of_whole = _unpack_histograms(all_sums[-1], all_extremes[-1], window.names)
        others = {key: one for key, one in histograms.items() if key not in of_parameters}
        samples = [replace(sample, histograms={}) for sample in samples]
        samples[-1] = replace(samples[-1], histograms=others | of_whole)
    return replace(merged, samples=tuple(samples))


def _all_reduced(tree: RankTree, parts: Sequence[FloatArray], operation: Any) -> list[FloatArray]:
    """All-reduce arrays, which have the same shapes on every rank, in one message."""
    flat = np.concatenate([part.ravel() for part in parts])
    tree.all_reduce(flat, operation)
    ends = np.cumsum([part.size for part in parts])[:-1]
    return [piece.reshape(part.shape) for piece, part in zip(np.split(flat, ends), parts, strict=True)]


def _pack(rows_SPC: FloatArray, window: RankWindow, rank: int, world: int) -> tuple[list[FloatArray], list[FloatArray]]:
    """This rank's values for the sums and for the maxima over the ranks.

    sums:     the sum columns [S, P, any], 1 where the row is present [S, P], 1 where skipped [S], the histogram [P, B]
    extremes: the extremes, minima negated, [S, P, any], the loss scale [S], whether it was clipped or changed
              otherwise [S, 2], and the code of the first non-finite row [S]
    """
    present_SP = ~np.isnan(rows_SPC[..., Column.NUM_ELEMENTS]) & window.counted
    sums = np.where(present_SP[..., None], rows_SPC[..., _SUMS], 0.0)
    extremes = np.where(present_SP[..., None], rows_SPC[..., _EXTREMES] * _SIGN, -np.inf)
    skipped_S = np.array([float(sample.skipped) for sample in window.samples])
    scale_S = np.array([sample.loss_scale for sample in window.samples])
    change_S2 = np.array([[sample.metrics.get(key, np.nan) for key in _CHANGE] for sample in window.samples])
    histogram = window.flush.histogram
    counts = np.empty(0) if histogram is None else np.where(window.counted[:, None], histogram, 0).astype(np.float64)
    # A maximum of NaN is not defined everywhere; that a column could not be seen is known from the sums.
    known = [np.where(np.isnan(part), -np.inf, part) for part in (extremes, scale_S, change_S2)]
    return (
        [sums, present_SP.astype(np.float64), skipped_S, counts],
        [*known, _codes_of_first_bad(rows_SPC, present_SP, rank, world)],
    )


def _unpack(sums: Sequence[FloatArray], extremes: Sequence[FloatArray], window: RankWindow, world: int) -> RankWindow:
    sums_SPC, present_SP, skipped_S, counts = sums
    extremes_SPC, scale_S, change_S2, code_S = extremes
    rows_SPC = np.full((*present_SP.shape, NUM_COLUMNS), np.nan)
    rows_SPC[..., _SUMS], rows_SPC[..., _EXTREMES] = sums_SPC, extremes_SPC * _SIGN
    hidden_SP = np.isnan(rows_SPC[..., Column.GRAD_SUM_SQ])
    rows_SPC[..., _EXTREMES] = np.where(hidden_SP[..., None], np.nan, rows_SPC[..., _EXTREMES])
    rows_SPC[present_SP == 0] = np.nan
    samples = []
    for sample, rows, skipped, scale, change, code in zip(
        window.samples, rows_SPC, skipped_S, scale_S.tolist(), change_S2.tolist(), code_S.tolist(), strict=True
    ):
        said = {key: value for key, value in zip(_CHANGE, change, strict=True) if value != -np.inf}
        if window.has_shards and code != _NOTHING_BAD:
            place, rank = divmod(int(-code), world)
            if not window.are_averaged or place >= len(window.names):  # after the backward
                said[keys.FIRST_NONFINITE_RANK] = float(rank)
        known_scale = scale if math.isfinite(scale) else math.nan
        metrics = {**sample.metrics, **said}
        samples.append(replace(sample, rows=rows, skipped=bool(skipped), loss_scale=known_scale, metrics=metrics))
    flush = window.flush
    if flush.histogram is not None:
        flush = replace(flush, histogram=counts.astype(np.int64))
    return replace(window, samples=tuple(samples), flush=flush)


def _codes_of_first_bad(rows_SPC: FloatArray, present_SP: npt.NDArray[np.bool_], rank: int, world: int) -> FloatArray:
    """For each sample a number whose maximum over the ranks identifies the first non-finite row: [S].

    The first row is that of the last layer in the model's order, since the backward reaches it first, and of the lowest
    rank. Rows that became non-finite after the backward follow those that the backward left.
    """
    looks_SPL = np.stack([rows_SPC[..., columns].sum(axis=-1) for columns in (_BAD_LEFT, _BAD_RECEIVED)], axis=-1)
    bad_SN = (present_SP[..., None] & (looks_SPL > 0)).swapaxes(1, 2)[..., ::-1].reshape(len(rows_SPC), -1)
    return np.where(bad_SN.any(axis=1), -(bad_SN.argmax(axis=1) * world + rank).astype(np.float64), _NOTHING_BAD)


class _Kind(NamedTuple):
    """The prefix of the keys of some sums, their meaning, and whether names of parameters follow the prefix."""

    begin: str
    meaning: Meaning
    of_parameters: bool

    def names(self, names: Sequence[str]) -> Sequence[str]:
        """The names of the rows: those of the parameters, or one empty name."""
        return names if self.of_parameters else ("",)


def _kinds_of(samples: Sequence[Mapping[str, ArrivedSums]]) -> list[list[_Kind]]:
    """The kinds of sums to merge for each sample; the same on every rank with the same probes.

    Kinds of parameters are included for every sample of the window; other kinds, which can be long, only where present.
    """
    of_samples = [
        {
            _Kind(key.removesuffix(one.parameter or ""), one.meaning, one.parameter is not None)
            for key, one in of_sample.items()
            if one.parameter is not None or one.meaning.of_every_rank
        }
        for of_sample in samples
    ]
    of_parameters = {kind for kinds in of_samples for kind in kinds if kind.of_parameters}
    return [sorted(kinds | of_parameters, key=repr) for kinds in of_samples]


def _pack_sums(
    samples: Sequence[Mapping[str, ArrivedSums]],
    kinds: Sequence[Sequence[_Kind]],
    window: RankWindow,
    rank: int,
    world: int,
) -> list[FloatArray]:
    """This rank's summands, by sample and kind; zeros for parameters that another rank counts, and for other ranks."""
    packed = []
    for of_sample, of_kinds in zip(samples, kinds, strict=True):
        for kind in of_kinds:
            rows, num = kind.names(window.names), kind.meaning.num_sums
            num_before, num_all = (rank * num, world * num) if kind.meaning.side_by_side else (0, num)
            sums_PK = np.zeros((len(rows), num_all + 1))
            for index, name in enumerate(rows):
                one = of_sample.get(kind.begin + name) if kind.meaning.of_every_rank or window.counted[index] else None
                if one is not None and one.meaning == kind.meaning:
                    sums_PK[index, num_before : num_before + num] = one.sums
                    sums_PK[index, -1] = 1.0
            packed.append(sums_PK)
    return packed


def _unpack_sums(
    packed: Iterable[FloatArray], kinds: Sequence[Sequence[_Kind]], names: Sequence[str]
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


def _histogram_keys(names: Sequence[str]) -> list[str]:
    """The key of each parameter's histogram: [P]."""
    return [f"{keys.PARAMETER_HISTOGRAMS}/{name}" for name in names]


def _pack_histograms(
    histograms: Mapping[str, MetricHistogram], names: Sequence[str], counted: npt.NDArray[np.bool_]
) -> tuple[FloatArray, FloatArray]:
    """This rank's summands [P, B], and its values for the maxima (minima are negated) [2, P]."""
    found = [
        histograms.get(key, _NOTHING) if counts else _NOTHING
        for key, counts in zip(_histogram_keys(names), counted.tolist(), strict=True)
    ]
    counts_PB = np.stack([one.counts for one in found]).astype(np.float64)
    return counts_PB, np.array([[-one.low for one in found], [one.high for one in found]])


def _unpack_histograms(
    counts_PB: FloatArray, extremes_2P: FloatArray, names: Sequence[str]
) -> dict[str, MetricHistogram]:
    """The histograms of the whole parameters by key; empty histograms are left out."""
    low_P, high_P = -extremes_2P[0], extremes_2P[1]
    whole = zip(_histogram_keys(names), counts_PB.astype(np.int64), low_P.tolist(), high_P.tolist(), strict=True)
    return {key: MetricHistogram(counts_B, low, high) for key, counts_B, low, high in whole if counts_B.any()}
