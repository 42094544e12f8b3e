"""Merge windows over the ranks, for sharded models or metrics that compare ranks: two all-reduces per flush.

Rows are mergeable: sums are all-reduced as sums, extremes as maxima (a minimum is a negated maximum), in fixed
positions. The training loop never waits, because a separate thread communicates over separate process groups
(`rank_tree.py`), independent of the user's collectives. If a rank never takes part, merging stops with one message.

The probes' sums are merged too. For every sample and kind of sums there is an array [P, K + 1]: the sums of each
parameter, and a 1 from each rank that has them. Sums that belong to no parameter are a kind with one row.
"""

import hashlib
import logging
import math
import queue
import threading
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from concurrent import futures
from concurrent.futures import Future
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch.distributed as dist

from .._measure.columns import MAX_COLUMNS, MIN_COLUMNS, NUM_BINS, NUM_COLUMNS, SUM_COLUMNS, Column, FloatArray
from .._measure.probe_values import ArrivedSums, Meaning, MetricHistogram, merge_histograms
from .._runtime.sharding import rank_store
from .._transfer.transfers import ArrivedFlush, ArrivedSample
from ..snapshot import keys
from .rank_tree import GROUP, RankTree

# S samples in the window, P watched parameters, C columns, B histogram bins, K sums of a kind, R ranks

logger: Final = logging.getLogger("wandb_gradwatch")

WAIT: Final = timedelta(seconds=60)  # the time limit for the slowest rank to reach the same flush
_RANKS_MET_IN_WAIT: Final = 2000  # ranks that can exchange addresses through one store within WAIT: docs/growth.md
_CLOSING_WAIT: Final = 5.0  # seconds in addition to the time limit of the collectives

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


@dataclass(frozen=True)
class RankWindow:
    """A window of one rank; after the merge, with the rows and histograms of all ranks."""

    samples: tuple[ArrivedSample, ...]  # with the same steps on every rank
    flush: ArrivedFlush  # contains the histogram
    names: tuple[str, ...]  # [P] the same on every rank
    # [P] True where this rank's rows are counted: it holds a shard, or is the one of several replicas to be counted
    counted: npt.NDArray[np.bool_]
    overhead_ratio: float = math.nan  # of this rank; not merged
    has_shards: bool = True  # True: ranks hold different gradients, so an alert can name a rank


_Submitted = tuple[RankWindow, Future[RankWindow]]  # a window, and the same window after the merge


class RankMerger:
    """Merges windows in order, in a thread. The name, equal on every rank, identifies the messages of this merger."""

    def __init__(self, name: str) -> None:
        self._rank, self._world = dist.get_rank(), dist.get_world_size()
        self._wait = WAIT * max(1, self._world // _RANKS_MET_IN_WAIT)
        self._todo: queue.SimpleQueue[_Submitted | None] = queue.SimpleQueue()
        self._under_way: deque[_Submitted] = deque()
        self._thread: threading.Thread | None = None
        self._store = rank_store(f"{name}/merge")  # here: the user may destroy the default group before the first flush
        self.given_up = False

    def submit(self, window: RankWindow) -> None:
        """Queue a window, which is merged when all ranks have submitted it; returns at once."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="gradwatch-reducer", daemon=True)
            self._thread.start()
        submitted = (window, Future[RankWindow]())
        self._under_way.append(submitted)
        self._todo.put(submitted)

    def poll(self, *, wait: bool = False) -> list[RankWindow]:
        """Return the windows merged since the last poll, in order; `wait` waits a limited time for the others."""
        if wait:
            futures.wait([merged for _, merged in self._under_way], self._wait.total_seconds() + _CLOSING_WAIT)
        arrived = []
        while self._under_way and self._under_way[0][1].done():
            arrived.append(self._under_way.popleft()[1].result())
        return arrived

    def give_back(self) -> list[RankWindow]:
        """Return the windows that are not merged, as they were submitted. `poll` does not return them later."""
        submitted, self._under_way = self._under_way, deque()
        return [window for window, _ in submitted]

    def close(self) -> None:
        """End the thread after its last window. Idempotent.

        This method waits for the thread, up to a limit, because a thread that destroys its process group while the
        interpreter exits crashes the process.
        """
        if self._thread is not None:
            self._todo.put(None)
            self._thread.join(_CLOSING_WAIT)
            self._thread = None

    def _run(self) -> None:
        tree: RankTree | None = None
        while (submitted := self._todo.get()) is not None:
            window, future = submitted
            merged = window
            if not self.given_up:
                try:
                    tree = tree or self._meet()
                    merged = self._merge(tree, window)
                except Exception as error:
                    tree = None  # closes the connections, which ends the wait of other ranks for this one
                    self._give_up(error)
            future.set_result(merged)

    def _meet(self) -> RankTree:
        clone = getattr(self._store, "clone", None)  # torch >= 2.6: waiting on a clone does not block the store
        return RankTree(self._store if clone is None else clone(), self._rank, self._world, self._wait, size=GROUP)

    def _give_up(self, error: Exception) -> None:
        self.given_up = True
        logger.warning(
            "wandb_gradwatch: the gradients of the ranks are no longer merged: rank %d waited %.0f s for the other "
            "ranks, or they watch other parameters or steps (%s). From now on, the statistics are those of this rank's "
            "shards only. Call watch() on every rank, with the same arguments.",
            self._rank,
            self._wait.total_seconds(),
            error,
        )

    def _merge(self, tree: RankTree, window: RankWindow) -> RankWindow:
        of_samples = [sample.sums for sample in window.samples]
        kinds = _kinds_of(of_samples)
        histograms = merge_histograms(sample.histograms for sample in window.samples)
        of_parameters = histograms.keys() & set(_histogram_keys(window.names))
        self._check_agreement(tree, window, (kinds, bool(of_parameters)))
        rows_SPC = np.stack([sample.rows for sample in window.samples])
        sums, extremes = _pack(rows_SPC, window, self._rank, self._world)
        of_kinds = _pack_sums(of_samples, kinds, window.names, window.counted)
        of_histograms = _pack_histograms(histograms, window.names, window.counted) if of_parameters else ()
        all_sums = _all_reduced(tree, [*sums, *of_kinds, *of_histograms[:1]], dist.ReduceOp.SUM)
        all_extremes = _all_reduced(tree, [*extremes, *of_histograms[1:]], dist.ReduceOp.MAX)
        merged = _unpack(all_sums[: len(sums)], all_extremes[: len(extremes)], window, self._world)
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

    def _check_agreement(self, tree: RankTree, window: RankWindow, probes: object) -> None:
        """Check that all ranks merge the same window. Otherwise they would wait forever, or merge different data."""
        steps = [sample.sample.step for sample in window.samples]
        what = repr((steps, window.names, window.flush.histogram is not None, probes)).encode()
        digest = float(int.from_bytes(hashlib.sha256(what).digest()[:6], "big"))  # 48 bits: exact in float64
        both = np.array([digest, -digest])
        tree.all_reduce(both, dist.ReduceOp.MAX)
        if both[0] != digest or both[1] != -digest:
            raise RuntimeError(f"rank {self._rank} has {len(window.names)} parameters, steps {steps[0]} to {steps[-1]}")


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
            said[keys.FIRST_NONFINITE_RANK] = float(int(-code) % world)
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
