"""Process samples as they arrive on the host, and write complete windows."""

import logging
import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final

import numpy as np

from .._boundary import CallbackError
from .._capture.parts import CaptureParts
from .._measure.change import MULTIPLIED, is_limit
from .._measure.columns import NONFINITE_COLUMNS, Column
from .._measure.probe_values import MetricHistogram, merge_histograms
from .._runtime.notices import Notice
from .._runtime.rank_session import RankSession
from .._transfer.transfers import ArrivedFlush, ArrivedSample, Names
from ..snapshot import Snapshot, keys
from . import rank_merger
from .assembly import NO_HISTOGRAM, padded, snapshot_of, with_totals
from .dispatcher import Dispatcher
from .rank_merge import Outcome, RankWindow
from .rank_merger import RankMerger
from .rank_parts import WholeModel, trained_description, united, whole_model
from .replicas import Replicas
from .rule_runner import RuleRunner
from .waiting import WaitingSamples

# P watched parameters, C columns

logger: Final = logging.getLogger("wandb_gradwatch")

# Norms of float64 gradients may be infinite: nobody wants to be warned of arithmetic with them. Not a decorator, whose
# state before NumPy 2 is wrong after a call within a call, as by a user's callback that flushes.
_extremes: Final = partial(np.errstate, all="ignore")

GUARD_SECONDS: Final = 2.0  # that the first decision of a guard waits until it is known what other ranks train
_MOST_WAITING: Final = 256  # samples that wait until it is known what other ranks train
_UNUSUAL_GROWTH: Final = 3.0  # a norm that grew by this factor is unusual: more samples are taken, without an alert
_KNOWN: Final = 4  # number of samples before one can be unusual
# A larger norm may overflow in float16 clipping, which then multiplies by 0: zero_grad() was not called.
_CLIPPED_TO_NOTHING: Final = 65504.0


class Pipeline:
    """Receives samples from the sample buffer, and passes snapshots of windows to the dispatcher.

    Owns the queue of arrived samples, those that the rules have not judged, the samples of the open window, the windows
    in the merge over ranks, and the newest snapshot.

    Args:
        seconds_spent: returns the seconds that the monitor has taken so far.
        session: finds this watcher's counterparts on other ranks; None without other ranks.
    """

    def __init__(
        self,
        parts: CaptureParts,
        rule_runner: RuleRunner,
        dispatcher: Dispatcher,
        seconds_spent: Callable[[], float],
        session: RankSession | None,
    ) -> None:
        self.window: list[ArrivedSample] = []  # samples since the last flush
        self._parts, self._source, self._shards = parts, parts.window, parts.shards
        self._names, self._totals = parts.optimizers.names, parts.optimizers.parts
        self._rule_runner = rule_runner
        self._dispatcher = dispatcher
        self._seconds_spent = seconds_spent
        self._began, self._spent_before = time.perf_counter(), seconds_spent()
        self._session = session
        self._has_looked = False  # whether it is known what other ranks train
        self._own_part = ""  # the description of this rank's parameters, if others have others
        self._whole: WholeModel | None = None  # set if ranks have different parameters
        self._replicas: Replicas | None = None  # set if all ranks have the same parameters, and none is sharded
        self._probes = parts.probes
        self._arrived: deque[tuple[ArrivedSample | ArrivedFlush, Names]] = deque()  # with the names at that time
        self.waiting = WaitingSamples()
        self._unjudged: list[ArrivedSample] = []
        self._known = self._names()  # the names of the unjudged samples
        self._merger: RankMerger | None = None
        self._has_left_out = False  # a window was not written, because it could not be merged
        self.merges = True  # False after an exception: other ranks may have ended
        self._newest: Snapshot | None = None
        self._unreturned: Snapshot | None = None
        self._sums_sq: deque[float] = deque(maxlen=16)  # squared norms of the last samples

    @property
    def has_work(self) -> bool:
        """Whether samples wait, or samples or windows may have arrived."""
        return bool(self._source.sent or self._arrived or self._merger)

    def receive(self, *, wait: bool = False) -> bool:
        """Receive what has arrived; with `wait`, all that was sent. Returns whether it must be delivered now.

        Samples may wait for the next ones if the user has chosen to measure every step and nothing is notable.
        """
        is_due = self._merger is not None and self._merger.has_outcomes
        if not self._source.sent:  # the usual case
            return is_due
        schedule = self._parts.schedule
        for arrived in self._source.poll(wait=wait):
            self._arrived.append((arrived, self._names()))
            is_due |= isinstance(arrived, ArrivedFlush) or not (
                self.waiting.add(arrived, now=time.perf_counter())
                and schedule.is_sampled
                and not (schedule.is_open_ended or self._parts.guard is not None or self._parts.merges_ranks)
                and not (arrived.changed_without_a_trace and schedule.comparisons.trusts_versions)
            )
        return is_due

    @property
    def newest(self) -> Snapshot | None:
        """The newest flushed snapshot; before the first flush, that of all samples so far; None without samples.

        Samples that are not merged yet contain only this rank's shards, so they are not shown.
        """
        if self._newest is not None:
            return self._newest
        return snapshot_of(self.window, self._names()) if self.window and not self._shards.any else None

    def _overhead_ratio(self) -> float:
        """The monitor's share of the time since watch(). The page, summary() and the demo show the last row's value."""
        ratio = (self._seconds_spent() - self._spent_before) / max(time.perf_counter() - self._began, 1e-9)
        return min(max(ratio, 0.0), 1.0)

    def pop_unreturned(self) -> Snapshot | None:
        """Return the newest window, once; None if an earlier call has returned it."""
        snapshot, self._unreturned = self._unreturned, None
        return snapshot

    def deliver(self, *, wait: bool = False, flushed: bool = False, final: bool = False) -> None:
        """Process the samples and windows that have arrived; with `wait`, all that were sent.

        If a window was `flushed`, wait a limited time for its merge over ranks; after the `final` one, end the merges.

        Raises:
            CallbackError: a user's callback raised; all samples and windows were processed nevertheless.
        """
        raised: list[CallbackError] = []

        def attempt(action: Callable[..., None], *arguments: Any) -> None:
            try:
                with _extremes():
                    action(*arguments)
            except CallbackError as error:
                raised.append(error)

        self.receive(wait=wait)
        seconds = rank_merger.LAST_SECONDS if final else rank_merger.FLUSH_SECONDS if wait else 0.0
        # A user's callback may flush, which processes the rest of the same queue.
        while self._arrived and self.compare_ranks(seconds=seconds, gives_up=final):
            arrived, known = self._arrived.popleft()
            if known is not self._known:
                attempt(self._judge)
                self._known = known
            attempt(self._take if isinstance(arrived, ArrivedSample) else self._end_window, arrived)
        attempt(self._judge)
        if self._merger is not None:
            if final:
                self._merger.end(merge=self.merges)
            elif flushed:
                self._merger.wait()
            for outcome in self._merger.take():
                attempt(self._take_outcome, outcome)
        if raised:
            raise raised[0]

    def _take(self, sample: ArrivedSample) -> None:
        if self._replicas is not None:
            self._replicas.add(sample)
            if found := self._replicas.facts():
                sample = replace(sample, metrics={**sample.metrics, **found})
        if sample.sample.left_out:
            if not (num_bad := np.nansum(sample.rows[:, [Column.NUM_NAN, Column.NUM_INF]])):
                return
            if self._parts.merges_ranks:  # the sample is dropped, because other ranks may not have it
                self._dispatcher.notice(
                    "left out",
                    f"the training loop left step {sample.sample.step} out: {num_bad:.0f} elements of the gradients on "
                    "this rank were NaN or infinite. Such steps are not logged where ranks hold different parts of the "
                    "model.",
                )
                return
            sample = replace(sample, metrics={**sample.metrics, keys.LEFT_OUT: 1.0})
        self._dispatcher.news.is_untraced |= sample.changed_without_a_trace
        total_C = sample.total_C
        self._look(total_C)
        was_zeroed = False
        # Usually a single optimizer has received gradients for all parameters, and none was zeroed.
        are_some_missing = bool(np.isnan(sample.rows[:, Column.GRAD_SUM_SQ]).any())
        if are_some_missing or not total_C[Column.RECEIVED_SUM_SQ] or len(sample.sample.updated) > 1:
            was_zeroed = not sample.sample.left_out and _drop_zeroed(sample)
        if sample.metrics.get(keys.CLIPPED) == MULTIPLIED and not self._shards.any:
            self._say_multiplied(sample.sample.step, total_C)
        merges_ranks = self._parts.merges_ranks
        if not merges_ranks:
            sample = self._derived(sample)
        if sample.histograms:
            sample = self._with_earlier_histograms(sample)
        self.window.append(sample)  # before any alert is sent, because a user's callback may raise
        try:
            if was_zeroed:
                self._say_zeroed(sample.sample.step)
        finally:
            if not merges_ranks:
                self._unjudged.append(sample)

    def compare_ranks(self, *, seconds: float = 0.0, gives_up: bool = False) -> bool:
        """Learn once, at the first sample or before the guard's first decision, whether ranks train different parts.

        If they do, rank 0 finds out in the background which part is whose: wait for it so long, and perhaps give up. If
        windows are to be merged, meet the other ranks.

        Returns:
            Whether that is known. Until then samples wait.

        Raises:
            CannotWatchError: they train different parts, and there is a guard.
        """
        session = self._session
        if self._has_looked or session is None:
            return True
        is_open = False
        if not session.is_found:
            self._own_part = self._own_part or trained_description(session.description, self._parts.registry)
            session.settle(self._own_part, united, seconds=seconds if session.is_open else 0.0)
            is_open = session.is_open
            if is_open and not gives_up and len(self._arrived) <= _MOST_WAITING:
                return False
        self._has_looked = True
        self._divide(session, is_unknown=is_open or session.is_ambiguous)
        if self._parts.merges_ranks:
            self._meet_ranks()
        return True

    def _divide(self, session: RankSession, *, is_unknown: bool) -> None:
        """Learn which parts of the model are whose. If that stays unknown, no rank's rows are those of the whole."""
        has_shards = self._shards.any
        whole = whole_model(session.whole, self._own_part, self._parts.registry.prefix)
        if whole is not None and self._shards.split(whole.ranks):
            self._whole = whole
            if whole.num_apart:
                self._dispatcher.notice(
                    "different values",
                    f"the values of {whole.num_apart} parameters differed between ranks at watch(), and "
                    "DistributedDataParallel does not synchronise them: each rank's are counted, as those of experts. "
                    "If they are replicas, call watch() after they are made equal.",
                )
        if self._parts.guard is not None and (self._whole is not None or is_unknown):
            self._parts.guard.refuse_parts()
        if not has_shards and not is_unknown and (whole is None or whole.have_same_names):
            self._replicas = Replicas(session, self._parts.registry, logs=self._dispatcher.logs_to_run)
        self._shards.any |= is_unknown

    def _meet_ranks(self) -> None:
        """Start the merger, if every rank watches."""
        if self._session is not None and (store := self._session.store("merge")) is not None:
            self._merger = RankMerger(store, self._session.rank, self._session.world, self._finished)

    def _judge(self, written: Snapshot | None = None) -> None:
        """Run the rules on the samples that they have not judged; `written`: the snapshot of exactly these, if any."""
        samples, self._unjudged = self._unjudged, []
        self.waiting.end()
        if samples:
            self._rule_runner.check(written or snapshot_of(samples, self._known))

    def _derived(self, sample: ArrivedSample) -> ArrivedSample:
        """Add the metrics that the probes derive from the sample's sums, which are those of all ranks."""
        found = self._probes.derive(sample.sums) if self._probes.active else {}
        return replace(sample, metrics={**sample.metrics, **found}) if found else sample

    def _finished(self, sample: ArrivedSample) -> ArrivedSample:
        """The merged sample with what probes derive, without the sums of all ranks. In the merger's thread."""
        with _extremes():
            return replace(self._derived(sample), sums={})

    def _say_multiplied(self, step: int, total_C: Sequence[float]) -> None:
        before, after = (math.sqrt(total_C[column]) for column in (Column.GRAD_SUM_SQ, Column.RECEIVED_SUM_SQ))
        if not is_limit(after):
            self._dispatcher.notice(
                "multiplied",
                f"in step {step} every gradient was multiplied by {after / before:.3g} between the backward and the "
                "optimizer's step, but not by torch's clipping functions. It is unknown whether this is clipping, so "
                "clip_ratio is missing. If it is a change of unit, such as an average over tokens, pass loss_scale= "
                "(the divisor of the gradients, or a function from the step to the divisor).",
            )

    def _look(self, total_C: Sequence[float]) -> None:
        sum_sq, nonfinite = total_C[Column.GRAD_SUM_SQ], total_C[Column.NUM_NAN] + total_C[Column.NUM_INF] > 0
        limit = sum_sq / _UNUSUAL_GROWTH**2  # compared with the minimum first, which is cheaper than the median
        is_large = len(self._sums_sq) >= _KNOWN and limit > min(self._sums_sq)
        if nonfinite or (is_large and limit > statistics.median(self._sums_sq)):
            self._dispatcher.news.is_unusual = True
        self._sums_sq.append(sum_sq)

    def _say_zeroed(self, step: int) -> None:
        fact = (
            "every gradient was already None or zero when the optimizer stepped, though the backward had computed them"
        )
        self._rule_runner.alert_once(Notice("No gradient", fact, step, cause="gradients_zeroed"))

    def _with_earlier_histograms(self, sample: ArrivedSample) -> ArrivedSample:
        """Move all histograms of the window to its newest sample, merged, so that memory does not grow."""
        earlier: list[Mapping[str, MetricHistogram]] = []
        for index, other in enumerate(self.window):
            if other.histograms:
                earlier.append(other.histograms)
                self.window[index] = replace(other, histograms={})
        if self._source.keep_newest_histogram:
            return sample
        return replace(sample, histograms=merge_histograms([*earlier, sample.histograms]))

    def _end_window(self, flush: ArrivedFlush) -> None:
        samples, self.window = self.window, []
        if not samples:
            return
        if self._replicas is not None:
            self._replicas.end_window()
        overhead_ratio = self._overhead_ratio()
        if not self._parts.merges_ranks:
            self._write(samples, flush, overhead_ratio)
        else:
            self._submit(samples, flush, overhead_ratio)

    def _submit(self, samples: Sequence[ArrivedSample], flush: ArrivedFlush, overhead_ratio: float) -> None:
        """Start the merge of a window over ranks in the background."""
        names = self._names().names
        # Facts per parameter are those of this rank's part: in the whole model they are missing.
        rows = tuple(replace(sample, rows=padded(sample.rows, len(names)), facts=None) for sample in samples)
        if flush.histogram is not None:
            flush = replace(flush, histogram=padded(flush.histogram, len(names), fill=0))
        window = RankWindow(
            rows,
            flush,
            names,
            self._shards.counted(len(names)),
            overhead_ratio,
            has_shards=self._shards.any,
            are_averaged=self._shards.are_averaged,
            num_uncounted=self._parts.schedule.num_uncounted,
        )
        if self._whole is not None:
            window = self._whole.window(window)
        if self._merger is None:
            self._meet_ranks()  # the model was sharded after its first step
        if self._merger is None:
            self._take_outcome(Outcome(window, "not every rank calls watch()"))
        else:
            self._merger.submit(window)

    def _take_outcome(self, outcome: Outcome) -> None:
        """Write a merged window. One that is not merged is written if it is complete but for comparisons of ranks."""
        window, reason = outcome
        if not (reason and window.has_shards):
            samples = [self._derived(sample) for sample in window.samples] if reason else list(window.samples)
            self._write(samples, window.flush, window.overhead_ratio, samples)
        elif not self._has_left_out:
            self._has_left_out = True
            logger.warning(
                "wandb_gradwatch: steps %d to %d are left out of the rows: this rank has measured only its part of "
                "the gradients, which was not merged, because %s. Further such steps are left out without a message. "
                "Call watch(), flush(), load_state_dict() and remove() on every rank, with the same arguments.",
                window.samples[0].sample.step,
                window.samples[-1].sample.step,
                reason,
            )

    def _write(
        self,
        samples: Sequence[ArrivedSample],
        flush: ArrivedFlush,
        overhead_ratio: float,
        unseen: Sequence[ArrivedSample] = (),
    ) -> None:
        """Write the window of the whole model to the sinks; run the rules on its `unseen` samples first."""
        known = self._names() if self._whole is None else self._whole.names(self._names())
        snapshot = without_totals = snapshot_of(samples, known, flush, overhead_ratio)
        # The rules see no histogram. Otherwise they share what has been derived from the samples with the sinks.
        are_unjudged = known is self._known and [*map(id, samples)] == [*map(id, self._unjudged)]
        if self._whole is None:  # totals need the parts of all parameters, unknown for those of other ranks
            snapshot = with_totals(snapshot, self._totals())
        self._newest = self._unreturned = snapshot
        self._dispatcher.recorder.keep_histogram(snapshot)  # before the rules, because alerts may use the histogram
        try:
            self._judge(without_totals if are_unjudged and flush.histogram is None else None)
            if unseen:
                self._rule_runner.check(snapshot_of(unseen, known))
        finally:  # a user's callback may raise
            began = time.perf_counter()
            self._dispatcher.write(snapshot)
            self._rule_runner.window_ends()
            self._dispatcher.news.seconds_on_rows += time.perf_counter() - began

    def rescue(self) -> None:
        """After an error of the monitor, write the open window without its histogram, unless the model is sharded."""
        with _extremes():
            while self._arrived:
                arrived, _ = self._arrived.popleft()
                if isinstance(arrived, ArrivedSample):
                    self._take(arrived)
            if self.window and not self._shards.any:
                samples, self.window = self.window, []
                self._write(samples, NO_HISTOGRAM, self._overhead_ratio())

    def close(self) -> None:
        """End the merge over ranks. Idempotent."""
        if self._merger is not None:
            self._merger.end(merge=False)


def _drop_zeroed(arrived: ArrivedSample) -> bool:
    """Mark rows of gradients that were zeroed before the step as missing, in place: the optimizer received none.

    Returns:
        Whether all gradients of an optimizer were zeroed after the backward had computed them.
    """
    rows_PC = arrived.rows
    num_bad_P = np.add.reduce(rows_PC[:, NONFINITE_COLUMNS], axis=1)
    # zero_grad() left these zeros: no backward has computed them.
    unseen_P = np.isnan(rows_PC[:, Column.GRAD_SUM_SQ]) & (rows_PC[:, Column.RECEIVED_SUM_SQ] == 0)
    rows_PC[unseen_P & (num_bad_P == 0)] = np.nan
    found = False
    for slots in map(list, arrived.sample.updated):
        rows = rows_PC[slots]
        num_bad = np.nansum(np.add.reduce(rows[:, NONFINITE_COLUMNS], axis=1))
        received = rows[~np.isnan(rows[:, Column.NUM_ELEMENTS]), Column.RECEIVED_SUM_SQ]  # NaN where it is unknown
        if arrived.skipped or num_bad or received.sum() != 0:
            continue
        if 0 < np.nansum(rows[:, Column.GRAD_SUM_SQ]) < _CLIPPED_TO_NOTHING**2:
            rows_PC[slots] = np.nan
            found = True
    return found
