"""Rule for exploding gradients: norms far above what the run has survived, growing steadily, or absurdly large."""

import itertools
import math
import operator
import statistics
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import ClassVar, Final

import numpy as np

from .._analysis.baseline import bounded_exp, evenly_apart, steady_growth
from .._analysis.formatting import clip_advice, listing, number, worst_first
from .._analysis.memory import PerKind, PerName, Remembers
from .._analysis.movement import Movement, Progress
from .._measure.columns import Column, FloatArray
from ..snapshot import Snapshot, keys
from ..snapshot._arrays import LEAST_SUM_SQ
from ..snapshot._overview import Overview
from ._base import FROM_0, FROM_1, Alert, Bounds, Level, ShippedRule, values_of
from ._parameters import JUMP

# S samples, P watched parameters, N queued samples

_USUAL_WEIGHT: Final = 0.1  # weight of the newest healthy sample in the moving average of a parameter's log norm
_WINDOW: Final = 64  # number of newest norms that define what is usual and are searched for a steady rise
_FIRST: Final = 5  # number of norms of a run's beginning, which are forgotten when as many have followed
_DECAY: Final = math.log(2) / 100  # of the log record per sample: it halves in 100, so that old norms excuse nothing
# Multiple of the record that is reported at once. Rare classes in small batches reach 42 times the record, an LSTM that
# leaves a plateau 33 times, and both fall back in the next sample.
_AT_ONCE: Final = 100.0
_CLEARLY: Final = 10.0  # multiple of the record reported at the second sample; less if it moves parameters, or stays
_GROWS: Final = 1.5  # multiple of the largest norm since the rise began: a norm that still grows will not pass
_STAYS: Final = 5  # samples in a row above the limit; no healthy spike below `_CLEARLY` lasts as long
_OF_RECORD: Final = 0.25  # share of `deviations` that is added to the record, which is above the median already
_WORTH_A_WORD: Final = 4.0  # multiple of the record from which a spike that has passed is reported, as INFO
_MOVED: Final = 0.05  # share of the parameters' norm that an update moves; healthy, after the first steps: 2.5 %
_MOVING: Final = 3  # updates in a row that moved parameters, as when a run begins: they excuse those after a spike
_LOWER_RATE: Final = "divide the learning rate by 10 or lengthen its warm-up, and {clip}"
# kind -> (probable cause, remedy), as far as the norm alone shows. The diagnosis adds what layers and parameters show.
# {clip} is the advice about clipping, which depends on whether the training clips already.
_CAUSES: Final[dict[str, tuple[str, str]]] = {
    "rise": (
        "not clear: either a learning rate that is too high, or a new scale of the inputs, targets or loss; whether "
        "the learning rate or the loss rose before this step tells them apart",
        f"{_LOWER_RATE}; look at what changed in the data and the loss",
    ),
    "spike": (
        "not clear: either one bad batch, or the data has changed; whether the norm falls back tells them apart",
        "look at the batch of this step and at what changed in the data, and {clip}",
    ),
    "stays": (
        "not clear: either the data has changed, to a new level of inputs or targets, or the loss is multiplied by "
        "something new; a look at the inputs and targets of this step tells them apart",
        "look at what changed in the data, the targets or the loss at this step; normalise it",
    ),
    "moved": JUMP,
    "grows": (
        "not clear: either a learning rate that is too high, or one bad batch whose gradient nothing clipped; whether "
        "the learning rate rose before this step tells them apart",
        "look at the batch of this step and at the learning rate's schedule; {clip}",
    ),
    "passed": ("one bad batch", "look at the batch of this step, and {clip}"),
    "passed, moved": (
        "not clear: either one bad batch whose gradient nothing clipped, or a learning rate that is too high; a look "
        "at that batch tells them apart",
        "look at the batch of this step, {clip}, and lower the learning rate if it happens again",
    ),
    "large from the start": (
        "not clear: either a large scale of the inputs, targets or loss, or poor initialisation; the size of the loss "
        "at the first step tells them apart",
        "normalise the inputs and the targets, take the mean in the loss, and initialise anew",
    ),
    "large": (
        "not clear: either a learning rate that is too high, or a large scale of the inputs, targets or loss; whether "
        "the norm was large from the first step on tells them apart",
        f"normalise the inputs and the targets, take the mean in the loss; if the norm has grown, {_LOWER_RATE}",
    ),
}
_SMALL: Final = 0.005  # share of the parameters' norm below which a gradient is negligible
_CAUSES["broken"] = _CAUSES["grows"]
_PAST: Final = frozenset({"passed", "passed, moved", "broken"})  # kinds that are reported when they are over
SPIKES: Final = _PAST | {"spike", "grows"}  # kinds that one bad batch can cause


@dataclass(frozen=True)
class _Found:
    """A fault of a norm: its kind in `_CAUSES`, the alert's level, the step of the fault, and the fact in words."""

    kind: str
    level: Level
    step: int
    words: str


class _Past(Remembers):
    """The history of one kind of sample: its total log norms, newest last, and what they have shown."""

    def __init__(self) -> None:
        self.norms: list[float] = []
        self.steps: list[int] = []  # the steps of the norms
        self.record = -math.inf  # the largest norm that the run has survived; it decays
        self.beginning = -math.inf  # the largest of the first norms, if they were forgotten as unusually large
        self.num_survived = 0
        self.num_large = 0  # number of norms above the threshold
        self.num_above = 0  # number of norms above the limit, in a row up to now
        self.began = 0  # the step of the first of these
        self.num_moving = 0  # number of updates that moved the parameters far, in a row up to now
        self.was_moving = False  # whether such updates preceded the first norm above the limit
        self.was_moved = False  # whether the updates since the sample before it moved the parameters far
        self.largest_above = -math.inf  # the largest norm above the limit, in the current row
        self.sum_sq_above = PerName(math.nan)  # squared norm of each gradient in the sample with that norm
        self.movement = Movement()
        self.progress = Progress()

    def see(self, log_norm: float, step: int) -> int:
        """Add the newest norm, before it is judged. Returns the number of steps since the previous one."""
        gap = step - self.steps[-1] if self.steps else 1
        self.norms.append(log_norm)
        self.steps.append(step)
        if len(self.norms) > _WINDOW:
            del self.norms[0], self.steps[0]
        return gap

    def evenly_apart(self, gap: int) -> tuple[list[float], list[int]]:
        """Return the newest norm and the earlier ones that are as far apart as the newest two, `gap`, and the steps."""
        if gap == 1 or min(map(operator.sub, self.steps[1:], self.steps), default=gap) >= gap / 2:
            return self.norms, self.steps
        places = evenly_apart(self.steps)
        return [self.norms[place] for place in places], [self.steps[place] for place in places]

    def survive(self, log_norm: float) -> None:
        """Record that this norm was no explosion."""
        self.num_survived += 1
        # The first norms of a run are often 100 times as large as all later ones, and would hide the next explosion.
        if self.num_survived == 2 * _FIRST and max(self.norms[:-_FIRST], default=math.inf) > max(self.norms[-_FIRST:]):
            self.beginning, self.norms, self.steps = max(self.norms), self.norms[-_FIRST:], self.steps[-_FIRST:]
            self.record = max(self.norms)
        self.record = max(self.record - _DECAY, log_norm)

    def end_row(self) -> None:
        """End the row of norms above the limit."""
        self.num_above, self.largest_above = 0, -math.inf


@dataclass(kw_only=True)
class ExplodingGradient(ShippedRule):
    """Raises the alert "Exploding gradient" if the total gradient norm is too large.

    A norm is too large above a multiple of the largest norm that the run has survived (the record) and of the usual
    norm. A norm that falls back at once and has hardly moved the parameters is INFO, if it is reported at all, and may
    raise the record. A norm that stays is a WARN; one that keeps growing, moves the parameters or ends in NaN is an
    ERROR, and so is a norm above `threshold`. A steady rise above all earlier norms is a WARN, and an ERROR once it
    moves the parameters. While the loss falls, updates that move the parameters are not held against the norm.

    The norm before clipping counts. Samples with NaN or Inf, skipped by AMP or without gradients are ignored. A norm
    below 0.5 % of the parameters' norm counts as that much, because leaving a plateau is no explosion.

    Args:
        threshold: a norm above it is too large whatever came before; None: no such limit. A fixed "critical" norm, such
            as 100, depends on the loss's reduction: a loss summed over 500,000 tokens has healthy norms above 1e6. The
            default is above all healthy norms; the other limits find what is unusual for a run.
        record_factor: a norm below this multiple of the record is no explosion. None switches this check off.
        min_factor: a norm below this multiple of the median of the last 64 norms is no explosion. If norms scatter, as
            with small batches and in reinforcement learning, both limits are higher.
        deviations: standard deviations of the log norm between the median and the limit; a quarter of them lies between
            the record and the limit.
        first_factor: replaces both factors in the first 5 samples: a multiple of the largest norm so far (after one
            sample that moved no parameter at least 100), which grows with the square root of the steps between samples.
            Samples less than half that distance apart count as one.
        growth: largest factor of a steady rise over 5 to 64 samples, during which the loss has risen or the parameters
            have moved far; over more than 40 steps the factor is 5 times as large. None switches this check off.
        adapt_after: after this many samples in a row above the limit, their level counts as usual.
    """

    threshold: float | None = 1e8
    record_factor: float | None = 2.0
    min_factor: float = 5.0
    deviations: float = 4.0
    first_factor: float = 20.0
    growth: float | None = 20.0
    adapt_after: int = 20
    _pasts: PerKind[_Past] = field(default_factory=lambda: PerKind(_Past), init=False, repr=False)
    _usual: PerName = field(default_factory=lambda: PerName(math.nan), init=False, repr=False)
    # Squared norms that are not in `_usual` yet: they are added when an alert needs them, or 64 wait.
    _unlearnt: list[tuple[tuple[str, ...], FloatArray]] = field(default_factory=list, init=False, repr=False)

    title: ClassVar[str] = "Exploding gradient"
    judges_updates: ClassVar[bool] = True
    bounds: ClassVar[Bounds] = {
        **dict.fromkeys(("record_factor", "min_factor", "first_factor", "growth", "adapt_after"), FROM_1),
        **dict.fromkeys(("threshold", "deviations"), FROM_0),
    }
    may_be_none: ClassVar[frozenset[str]] = frozenset(("threshold", "record_factor", "growth"))

    def check(self, snapshot: Snapshot) -> Iterable[Alert]:
        losses = values_of(snapshot, keys.LOSS)
        samples = [one for one in snapshot.overview if not one.skipped and (one.has_nonfinite or one.norm > 0)]
        judged = [
            (*sample_and_update, past)
            for past, of_kind in self._pasts.of_samples(snapshot, samples)
            for sample_and_update in zip(of_kind, past.movement.see(snapshot, of_kind), strict=True)
        ]
        for sample, update, past in sorted(judged, key=operator.itemgetter(0)):
            past.progress.see(losses[sample.place])
            # Parameters that move far while the loss falls are learning, not exploding.
            moved = past.movement.is_beyond(_MOVED, update, sample) and not past.progress.has_fallen()
            found = self._broken(past) if sample.has_nonfinite else self._judge(snapshot.names, sample, past, moved)
            if found is not None:
                yield self._alert(snapshot, sample, past, found)
            elif not (sample.has_nonfinite or past.num_above):
                if len(self._unlearnt) == _WINDOW:
                    self._work_out()
                self._unlearnt.append((snapshot.names, sample.rows[:, Column.GRAD_SUM_SQ]))

    def _log_limit(self, past: _Past, norms: list[float], gap: int, moved: bool) -> float:
        """Return the log norm above which the newest norm is too large; a lower number if it is below that anyway."""
        if self.record_factor is None or not past.num_survived:
            return math.inf
        # Ten steps in a row say little about the hundredth step after them.
        if min(past.num_survived, len(norms) - 1) < _FIRST:
            # One sample is no history unless updates moved the parameters: MoCo, for example, then fills its queue.
            factor = self.first_factor if past.num_survived > 1 or moved else max(self.first_factor, _AT_ONCE)
            return past.record + math.log(factor) + (0.0 if moved else 0.5 * math.log(gap))
        survived = past.record + math.log(self.record_factor)
        if norms[-1] <= survived:  # the usual case: the median below costs more than all else here
            return survived
        far = self.deviations * _scatter(norms[:-1])
        usual = statistics.median(norms[:-1]) + max(math.log(self.min_factor), far)
        return max(survived, past.record + _OF_RECORD * far, usual)

    def _judge(self, names: tuple[str, ...], sample: Overview, past: _Past, moved: bool) -> _Found | None:
        """Return what is wrong with the total norm, or None, and add the norm to the history."""
        norm, step = sample.norm, sample.step
        squares = sample.sums[Column.PARAM_SUM_SQ]
        small = math.log(_SMALL) + 0.5 * math.log(squares) if squares > 0 else -math.inf
        log_norm = max(math.log(norm) if norm < math.inf else 1e3, small)
        gap = past.see(log_norm, step)
        past.num_moving = past.num_moving + 1 if moved else 0
        norms, steps = past.evenly_apart(gap)
        limit = self._log_limit(past, norms, gap, moved)
        if self.threshold is not None and norm > self.threshold:
            words = f"the gradient norm is {number(norm)}, above the threshold {number(self.threshold)}"
            spike = log_norm > past.record + math.log(_AT_ONCE) and past.num_survived >= _FIRST and not moved
            kind = "spike" if spike else "large" if past.num_survived or past.num_large else "large from the start"
            past.num_large += 1
            return _Found("rise" if kind == "large" and moved else kind, "ERROR", step, words)
        if log_norm <= small:
            return self._below(past, log_norm, moved)
        # A rise that does not move the parameters is over soon if it only leads back to where the run began, as at the
        # edge of stability. If the loss does not rise with it, a plateau is left or a gate opens.
        if self.growth and log_norm - min(norms) >= math.log(self.growth):
            harms = log_norm > past.beginning + math.log(self.min_factor) and past.progress.may_have_risen()
            if (moved or harms) and (rise := steady_growth(norms, steps, factor=self.growth)) is not None:
                more = " or more" if norms[-rise.num_samples] <= small else ""
                words = (
                    f"the gradient norm is {number(norm)} and has grown {number(rise.factor)} times{more} over the "
                    f"last {rise.num_samples} samples, step by step, above all norms before (threshold "
                    f"{number(self.growth)} times)"
                )
                # At the edge of stability the norm rises a hundredfold, and falls before the parameters have moved.
                return _Found("rise", "ERROR" if moved else "WARN", step, words)
        if log_norm <= limit:
            return self._below(past, log_norm, moved)
        if not past.num_above:
            past.began = step
            past.was_moving = past.num_moving >= _MOVING and past.num_survived < 2 * _FIRST
            past.was_moved = moved
        past.num_above += 1
        grows = log_norm > past.largest_above + math.log(_GROWS)  # norms that stay may scatter as much
        if log_norm > past.largest_above:
            past.largest_above = log_norm
            past.sum_sq_above.of(names)[:] = sample.rows[:, Column.GRAD_SUM_SQ]
        factor, now = (bounded_exp(one - past.record) for one in (past.largest_above, log_norm))
        words, moved = _above(norm, past, limit, small), moved and not past.was_moving
        if past.num_above >= self.adapt_after:
            past.end_row()
            past.survive(log_norm)
        elif past.num_above > 1 and (moved or (factor > _CLEARLY and grows)):
            return _Found("grows", "ERROR", past.began, f"{words}; it has not fallen back since step {past.began}")
        elif now > _WORTH_A_WORD and past.num_above >= (2 if now > _CLEARLY else _STAYS):
            words += f"; it has stayed there since step {past.began}, "
            if past.was_moved:
                return _Found("moved", "WARN", past.began, f"{words}just after the parameters had moved far")
            return _Found("stays", "WARN", past.began, f"{words}and the parameters have hardly moved")
        elif factor > _AT_ONCE:
            # In the first steps of a run nothing shows that a bad batch is the cause.
            return _Found("spike" if past.num_survived >= _FIRST else "grows", "WARN", step, words)
        return None

    def _below(self, past: _Past, log_norm: float, moved: bool) -> _Found | None:
        """Record that the newest norm is no explosion. Returns a finding about norms above the limit just before it."""
        found: _Found | None = None
        if past.num_above:
            factor = bounded_exp(past.largest_above - past.record)
            words = (
                f"the gradient norm was {number(bounded_exp(past.largest_above))}, {number(factor)} times the largest "
                f"that the run had survived, and has fallen back to {number(bounded_exp(log_norm))}"
            )
            if moved and not past.was_moving:
                words = f"{words}, but the update has moved the parameters far"
                found = _Found("passed, moved", "ERROR", past.began, words)
            # Above `_AT_ONCE` it was reported at once. Where usual norms scatter, the limit may be as high as this one.
            elif not moved and _WORTH_A_WORD < factor <= _AT_ONCE and log_norm < past.largest_above - math.log(2):
                found = _Found("passed", "INFO", past.began, f"{words}; the parameters have hardly moved")
            # The record at most doubles; otherwise one spike would hide the next.
            past.survive(min(past.largest_above, past.record + math.log(2)))
            past.end_row()
        past.survive(log_norm)
        return found

    def _broken(self, past: _Past) -> _Found | None:
        """Return a finding if a norm was too large just before a sample with NaN or Inf: it was no passing spike."""
        if not past.num_above:
            return None
        words = f"the gradient norm was {number(bounded_exp(past.largest_above))}, and the next gradient is not finite"
        past.end_row()
        return _Found("broken", "ERROR", past.began, words)

    def _work_out(self) -> None:
        """Add the norms that wait to the moving averages of the layers, which only alerts need."""
        for then, queued in itertools.groupby(self._unlearnt, operator.itemgetter(0)):
            usual_P, squares_NP = self._usual.of(then), np.array([squares_P for _, squares_P in queued])
            log_NP = np.full_like(squares_NP, np.nan)  # NaN where a gradient is missing or 0
            np.log(np.sqrt(squares_NP), where=squares_NP >= LEAST_SUM_SQ, out=log_NP)
            np.copyto(usual_P, log_NP[0], where=np.isnan(usual_P))
            is_plain = bool(np.isfinite(log_NP).all() and np.isfinite(usual_P).all())
            for log_P in log_NP:
                if not is_plain:
                    np.copyto(log_P, usual_P, where=np.isnan(log_P))
                    np.copyto(usual_P, log_P, where=np.isnan(usual_P))
                usual_P += _USUAL_WEIGHT * (log_P - usual_P)
        self._unlearnt.clear()

    def _alert(self, snapshot: Snapshot, sample: Overview, past: _Past, found: _Found) -> Alert:
        self._work_out()
        norm_P, usual_P = snapshot.grad_norm[sample.place], np.exp(self._usual.of(snapshot.names))
        if found.kind in _PAST:
            norm_P = np.sqrt(past.sum_sq_above.of(snapshot.names))
        present = np.flatnonzero(norm_P > 0)
        worst = worst_first(norm_P / usual_P if np.isfinite(usual_P[present]).all() else norm_P, present)
        layers = listing(
            worst,
            lambda p: (
                f"{snapshot.names[p]} {number(norm_P[p])}"
                + (f" (usually {number(usual_P[p])})" if np.isfinite(usual_P[p]) else "")
            ),
        )
        at = found.step if found.kind in _PAST else sample.step
        cause, remedy = _CAUSES[found.kind]
        remedy = remedy.format(clip=clip_advice(clips=snapshot.clipped[sample.place] == 1))
        told = self._finding(at, f"{found.words}.", cause, remedy, layers=layers, level=found.level)
        seen = sample.step if found.kind in ("stays", "moved") else 0
        return replace(told, step=found.step, kind=found.kind, found_in=sample.step, seen=seen)


def _above(norm: float, past: _Past, limit: float, small: float) -> str:
    log_usual = statistics.median(past.norms[:-1])
    usual, less = bounded_exp(log_usual), " or less" if log_usual <= small else ""
    return (
        f"the gradient norm is {number(norm)}, {number(norm / usual)} times the usual {number(usual)}{less} and "
        f"{number(norm / bounded_exp(past.record))} times the largest that the run has survived (threshold "
        f"{number(bounded_exp(limit))})"
    )


def _scatter(log_norms: list[float]) -> float:
    """Return the standard deviation of log norms around their trend, estimated from successive changes."""
    changes = [abs(after - before) for before, after in itertools.pairwise(log_norms)]
    return 1.4826 / math.sqrt(2) * statistics.median(changes) if changes else 0.0
