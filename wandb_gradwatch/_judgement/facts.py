"""The facts of one sample: everything that rules and causes may look at, each computed when it is first asked for.

A fact of the past compares with earlier samples of the same kind that are about as far apart as the newest two. A value
that is not known is NaN, for which every comparison is False. Logarithms are natural.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from .._analysis.baseline import steady_growth
from .._analysis.layers import dead_units, feed_nothing, num_units, trend_of, without_inputs
from .._analysis.memory import PerName, Remembers, Streaks
from .._measure.columns import BoolArray, Column, FloatArray
from ..snapshot import Snapshot, keys
from ..snapshot._arrays import derived
from ..snapshot._overview import Overview
from .past import Past
from .structure import MIN_WEIGHTS, Structure

# P watched parameters, L modules, N earlier samples

_CLIMBS: Final = 3.0  # log factor of a steady rise
X2, X3, X5, X10, X30, X100, X1000 = (math.log(factor) for factor in (2, 3, 5, 10, 30, 100, 1000))
NOTHING: Final = 1e-6  # share of what it is compared with
SMALL: Final = 0.005  # share of the parameters' norm below which a gradient counts as that much
EARLY: Final = 20  # first steps, in which adaptive optimizers move parameters far
_NEWEST: Final = 4  # losses whose median is the present level
_LEVEL: Final = 16  # losses, or norms of a parameter, that define the level before
_UPDATES: Final = 8  # newest updates in which weights may shrink
_NOTICED: Final = 0.01  # smallest change of a log norm per step that is looked at


Streak = tuple[FloatArray, FloatArray, FloatArray]


class Run(Remembers):
    """What is remembered of the run as a whole: facts of its beginning, and streaks over all kinds of samples."""

    def __init__(self) -> None:
        self.num_samples = 0
        self.first_step = 0
        self.of_first = math.nan  # log(gradient norm / parameters' norm) of the first sample
        self.loss_first = math.nan  # the largest magnitude of the first losses
        self.num_losses = 0
        self.loss_least = math.inf
        self.loss_least_before = math.inf  # without the newest one
        self.loss_top = -math.inf  # the largest of the first 16 losses
        self.depth_first = 0.0
        self.gain_first = math.nan
        self.least_gain = math.nan
        self.inputs_first = math.nan
        self.outputs_first = math.nan
        self.num_updates = 0  # samples with an update
        self.last_present_step = 0
        self.missing, self.still = Streaks(), Streaks()
        self.had = PerName()  # 1: the parameter has had a gradient
        self.num_zero = self.num_empty = 0  # samples in a row with gradients of 0, and without any gradient
        self.num_pauses = 0  # how often gradients of 0 were followed by others
        self.num_skipped = 0  # in a row
        self.num_repeated = self.num_varied = 0  # samples in a row with repeated inputs; samples with new ones
        self.came_step = -(10**9)  # the step at which parameters got a gradient that had none before
        self.num_jumping = 0  # samples in a row in which a single gradient is far above its usual size
        self.has_stepped = False
        # By the newest checksums of `Ranks()`: the ranks whose parameters are not those of most ranks, and the step of
        # the first of these checksums in a row
        self.num_exact = self.num_inexact = 0  # samples of `Ranks()` whose average over ranks is right, and the others
        self.apart_ranks: list[int] = []
        self.apart_step = 0


class Facts:
    """One sample.

    Args:
        snapshot: holds the sample, perhaps among others.
        sample: which one.
        structure: what the parameters are.
        past: the earlier samples of its kind; only until the sample is added to them.
        run: the run so far, this sample included.
    """

    def __init__(self, snapshot: Snapshot, sample: Overview, structure: Structure, past: Past, run: Run) -> None:
        self.snapshot, self.sample, self.structure, self.past, self.run = snapshot, sample, structure, past, run
        self.place = sample.place
        self.step = sample.step
        self.gap = max(sample.step - past.last_step, 1) if len(past) else 1
        self.num_before = len(past)
        self.is_first = run.num_samples <= 2 and sample.step <= 2
        self.rows_PC: FloatArray = sample.rows
        skipped = sample.skipped and not sample.left_out
        self.skipped = skipped
        self.bad = sample.has_nonfinite and not skipped
        ok = not sample.has_nonfinite and not skipped
        self.norm = sample.norm if ok else math.nan
        self.received = sample.clipped_norm if ok else math.nan
        self.g = _log(self.norm)
        self.loss = self.metric(keys.LOSS)
        self.rate = self.metric(keys.LEARNING_RATE)
        # Streaks up to this sample, each as (length, samples before it, probability by chance); None without any.
        self.missing: Streak | None = None  # [P] parameters without a gradient
        self.still: Streak | None = None  # [P] parameters that do not change
        self.dead: Streak | None = None  # [L] modules nearly all of whose units are dead
        self.cut: Streak | None = None  # [L] modules without any gradient before one whose inputs are 0

    def metric(self, key: str) -> float:
        values_S = self.snapshot.metrics.get(key)
        return math.nan if values_S is None else float(values_S[self.place])

    def fact(self, name: str) -> float:
        """A fact of the model's inputs, outputs or loss."""
        return self.metric(keys.FACT + name)

    def ranks(self, name: str) -> float:
        """What `Ranks()` has found of all ranks together."""
        return self.metric(f"{keys.RANKS}/all/{name}")

    def per_parameter(self, name: str) -> FloatArray:
        """A fact of each parameter: [P]."""
        values_SP = self.snapshot.per_parameter.get(name)
        return np.full(len(self.structure.names), np.nan) if values_SP is None else values_SP[self.place]

    # The model in this sample

    @derived
    def sizes_P(self) -> FloatArray:
        """Numbers of elements: [P]; 0 without a gradient."""
        sizes_P: FloatArray = self.rows_PC[:, Column.NUM_ELEMENTS]
        return sizes_P if self.sample.is_complete else np.nan_to_num(sizes_P)

    @derived
    def num_elements(self) -> float:
        num = self.sample.sums[Column.NUM_ELEMENTS]
        return num if num == num else float(self.sizes_P.sum())

    @derived
    def present_P(self) -> BoolArray:
        present_P: BoolArray = ~np.isnan(self.rows_PC[:, Column.NUM_ELEMENTS])
        return present_P

    @derived
    def is_weight_P(self) -> BoolArray:
        return self.structure.is_weight(self.sizes_P)

    @derived
    def g_P(self) -> FloatArray:
        """Log gradient norms: [P]; NaN where the gradient is missing, 0, or has nothing finite."""
        return _half_log(self.rows_PC[:, Column.GRAD_SUM_SQ])

    @derived
    def w_P(self) -> FloatArray:
        """Log norms of the parameters: [P]; NaN where it is missing or 0."""
        return _half_log(self.rows_PC[:, Column.PARAM_SUM_SQ])

    @derived
    def bad_P(self) -> BoolArray:
        bad_P: BoolArray = self.snapshot.num_nonfinite[self.place] > 0
        return bad_P

    @derived
    def broken_P(self) -> BoolArray:
        """Which parameters are not finite themselves: [P]."""
        broken_P: BoolArray = self.rows_PC[:, Column.PARAM_NUM_NONFINITE] > 0
        return broken_P

    @derived
    def is_broken(self) -> bool:
        num = self.sample.sums[Column.PARAM_NUM_NONFINITE]
        return num > 0 if num == num else bool(self.broken_P.any())

    @derived
    def weights(self) -> float:
        """Log norm of all parameters, also of those that are missing now; NaN if one is not finite."""
        if self.is_broken:
            return math.nan
        total = self.sample.weights_sq
        if total != total:
            known_P = self.past.known_sq.of(self.structure.names)
            own_P = self.rows_PC[:, Column.PARAM_SUM_SQ]
            total = float(np.nansum(np.where(np.isnan(own_P), known_P, own_P)))
        return 0.5 * _log(total)

    @derived
    def of_weights(self) -> float:
        """Log of gradient norm / parameters' norm."""
        return self.g - self.weights

    @derived
    def raised(self) -> float:
        """Log norm, at least that of a negligible gradient: leaving a plateau is no explosion."""
        if self.g != self.g:
            return math.nan
        small = math.log(SMALL) + self.weights
        return max(self.g, small) if small == small else self.g

    # Compared with earlier samples of the kind

    @derived
    def places(self) -> Sequence[int]:
        return self.past.places(self.step)

    def before(self, name: str, newest: int = 64) -> list[float]:
        """The known values of a number in the newest earlier samples, oldest first."""
        if not newest:
            return []
        values = self.past.scalars[name]
        found = values if len(self.places) == len(values) else [values[place] for place in self.places]
        return [value for value in found[-newest:] if value == value]

    def last(self, name: str, now: float, num: int) -> list[float]:
        """The newest values of a number, this sample's included; fewer if they are not known."""
        return [*self.before(name, num - 1), now] if now == now else []

    @derived
    def seen(self) -> int:
        """How many earlier norms there are to compare with."""
        return len(self.before("raised"))

    @derived
    def median_before(self) -> float:
        return _median(self.before("raised"))

    @derived
    def usual(self) -> float:
        """Log of the norm / the median before."""
        return self.raised - self.median_before

    @derived
    def scatter(self) -> float:
        """Robust standard deviation of the log norms before."""
        values, median = self.before("raised"), self.median_before
        return 1.4826 * _median([abs(value - median) for value in values])

    def above(self, num: int) -> float:
        """Log of the smallest of the newest norms / the largest before them, which fades."""
        norms = self.last("raised", self.raised, num)
        records = self.past.scalars["record"]
        if len(norms) < num or len(records) < num - 1:
            return math.nan
        record = self.past.record if num == 1 else records[1 - num]
        return min(norms) - record if record > -math.inf else math.nan

    @derived
    def is_unusual(self) -> bool:
        """Whether the norm is above the usual one by far more than norms scatter."""
        far = X5 + 0.5 * math.log(self.gap) if self.seen < 5 else X5
        return self.usual > far and self.usual > 4 * self.scatter

    @derived
    def of_begin(self) -> float:
        """Log of the norm / the largest of the first five."""
        return self.g - self.past.beginning if self.past.num_norms >= 5 else math.nan

    @derived
    def of_largest(self) -> float:
        """Log of the norm / the largest so far, this one included."""
        return self.g - max(_log(self.past.largest) if self.past.largest > 0 else -math.inf, self.g)

    @derived
    def climb(self) -> float:
        """Log of the factor of a steady rise up to this sample, above all norms before; 0 without one."""
        norms = [*self.before("raised"), self.raised]
        if self.raised != self.raised or len(norms) < 5 or self.raised - min(norms) < _CLIMBS:
            return 0.0
        steps = self.past.scalars["step"]
        known = [
            steps[place]
            for place in self.places
            if self.past.scalars["raised"][place] == self.past.scalars["raised"][place]
        ]
        growth = steady_growth(norms, [*map(int, known), self.step], factor=math.exp(_CLIMBS))
        return 0.0 if growth is None else math.log(growth.factor)

    @derived
    def fell(self) -> float:
        """Log of the largest before / the largest of the newest five, all of which are below all before."""
        norms, earlier = self.last("raised", self.raised, 5), self.before("raised")[:-4]
        return min(earlier) - max(norms) if len(norms) == 5 and len(earlier) >= 5 else math.nan

    # How the parameters move

    @derived
    def moved(self) -> float:
        """Absolute change of the log norm of all parameters per step since the sample before."""
        before = self.past.scalars["weights"][-1] if len(self.past) else math.nan
        return abs(self.weights - before) / self.gap

    @derived
    def moved_twice(self) -> float:
        """The second largest of the newest five `moved`: a single giant update can be one bad batch."""
        return _second(self.last("moved", self.moved, 5))

    @derived
    def w_before_P(self) -> FloatArray:
        """Log norms of the parameters in the sample before: [P]."""
        return _half_log(self.past.rows.back(Column.PARAM_SUM_SQ, self.structure.names))

    @derived
    def is_moving(self) -> bool:
        """Whether any parameter's norm has changed noticeably since the sample before."""
        before_P = self.past.rows.back(Column.PARAM_SUM_SQ, self.structure.names)
        change_P = np.abs(self.rows_PC[:, Column.PARAM_SUM_SQ] - before_P)
        return bool(np.count_nonzero(change_P > 2 * _NOTICED * self.gap * before_P))

    @derived
    def changes_NP(self) -> FloatArray:
        """Growth of each weight's log norm per step, by each of the newest updates, this sample's last: [N, P].

        A weight that begins at or near 0 may grow at any speed to a typical size, or to one that preserves a signal.
        NaN for parameters that are no weights.
        """
        names, steps = self.structure.names, self.past.scalars["step"]
        squares_NP = self.past.rows.column(Column.PARAM_SUM_SQ, names, _UPDATES)
        if not len(squares_NP):
            return squares_NP
        steps_N = np.array([*steps[-len(squares_NP) :], self.step][-len(squares_NP) - 1 :])
        w_NP = _half_log(np.concatenate([squares_NP, self.rows_PC[None, :, Column.PARAM_SUM_SQ]]))
        gaps_N1 = np.maximum(np.diff(steps_N), 1.0)[:, None]
        typical = self.past.scalars["weights"][-1] - 0.5 * math.log(max(self.num_elements, 1.0))
        floor_P = np.fmax(typical, -0.25 * np.log(self.sizes_P) - X2) + 0.5 * np.log(self.sizes_P)
        shrunk_NP, grown_NP = np.diff(w_NP, axis=0), np.diff(np.fmax(w_NP, floor_P), axis=0)
        changes_NP = np.where(shrunk_NP < 0, shrunk_NP, grown_NP) / gaps_N1
        return np.where(self.is_weight_P, changes_NP, np.nan)

    @derived
    def change_P(self) -> FloatArray:
        """Growth of each weight's log norm per step since the sample before: [P]."""
        known = self.changes_NP
        return known[-1] if len(known) else np.full(len(self.structure.names), np.nan)

    @derived
    def grows(self) -> float:
        """Largest growth of a weight's log norm per step; 0 where none has changed noticeably."""
        return _largest(self.change_P) if self.num_before and self.is_moving else 0.0

    @derived
    def grew_twice_P(self) -> FloatArray:
        """Second largest growth of each weight in the newest five updates: [P]."""
        rows = self.changes_NP[-5:]
        if len(rows) < 2:
            return np.full(len(self.structure.names), np.nan)
        second_P: FloatArray = np.sort(np.nan_to_num(rows, nan=-1.0), axis=0)[-2]
        return second_P

    @derived
    def grows_twice(self) -> float:
        """Second largest growth of a weight in five updates; 0 where no weight grows noticeably."""
        noticed = max([self.grows, *self.before("grows", 4)], default=0.0)
        return _largest(self.grew_twice_P) if noticed > 0.05 else 0.0

    @derived
    def leap(self) -> float:
        """Largest growth of a weight's log norm since the sample before, whatever the number of steps."""
        return self.grows * self.gap

    @derived
    def shrinks_P(self) -> FloatArray:
        """The weakest change of each weight by the newest eight updates: [P], below 0 where it shrinks in all."""
        rows = self.changes_NP if self.num_before >= _UPDATES and self.is_moving else np.zeros((0, 0))
        return np.fmax.reduce(rows, axis=0) if len(rows) == _UPDATES else np.full(len(self.structure.names), np.nan)

    @derived
    def lost_P(self) -> FloatArray:
        """Change of each weight's log norm over the newest eight updates: [P]."""
        return self.w_P - _half_log(self.past.rows.back(Column.PARAM_SUM_SQ, self.structure.names, _UPDATES))

    @derived
    def left(self) -> float:
        """Log of the parameters' norm / that of the first sample of the kind."""
        return self.weights - self.past.first.get("weights", math.nan)

    @derived
    def change(self) -> float:
        """Median over the weights of the relative change per step since the sample before, by witnesses."""
        values_P = self.per_parameter("weight_change")[self.is_weight_P]
        return _median(values_P[np.isfinite(values_P)].tolist()) / self.gap

    @derived
    def cosine(self) -> float:
        """Median over the weights of the cosine of this gradient and the one before, by witnesses."""
        values_P = self.per_parameter("grad_cosine")[self.is_weight_P]
        return _median(values_P[np.isfinite(values_P)].tolist())

    @derived
    def epsilon(self) -> float:
        """Largest eps of an optimizer's group."""
        return _largest(self.per_parameter("epsilon"))

    @derived
    def typical_gradient(self) -> float:
        """Root mean square of the gradient's elements."""
        return self.norm / math.sqrt(max(self.num_elements, 1.0))

    @derived
    def moves_nothing(self) -> bool:
        """Whether the learning rate is so small that no update can matter: its longest is below a millionth.

        Not of parameters that have exploded, beside which every update is small.
        """
        if self.left > X5:
            return False
        longest = _log(abs(self.rate)) + max(self.g, 0.5 * _log(self.num_elements)) if self.rate else -math.inf
        return longest - self.weights < math.log(NOTHING)

    @derived
    def matters(self) -> bool:
        """Whether the training has not converged: its gradient is a part of the largest, and of the parameters."""
        return self.of_largest > -X1000 and self.of_weights > math.log(1e-5)

    # Clipping and what happens after the backward

    @derived
    def clip(self) -> float:
        """Log of the norm before / after everything that was done to it after the backward."""
        if not (self.norm > 0 and self.received > 0):
            return math.nan
        return math.log(self.norm) - math.log(self.received)

    @derived
    def is_clipped(self) -> bool:
        return bool(self.snapshot.clipped[self.place] == 1)

    @derived
    def clip_usual(self) -> float:
        """`clip` compared with its median before."""
        return self.clip - _median(self.before("clip")) if len(self.before("clip")) >= 5 else math.nan

    # The loss

    @derived
    def bad_loss(self) -> bool:
        return self.metric(keys.NUM_NONFINITE_LOSS) > 0

    @derived
    def loss_stays_above(self) -> float:
        """The smallest of the newest eight losses above the largest of the 32 before them, in their unit."""
        newest = self.last("loss", self.loss, 8)
        earlier = self.before("loss", 39)[:-7]
        if len(newest) < 8 or len(earlier) < 32 or not min(newest) > max(earlier):
            return math.nan
        median = _median(earlier)
        deviation = 1.4826 * _median([abs(value - median) for value in earlier])
        unit = max(max(earlier) - min(earlier), 10 * deviation, 1e-3 * abs(median))
        return (min(newest) - max(earlier)) / unit if unit > 0 else math.nan

    @derived
    def loss_is_usual(self) -> bool:
        values = self.before("loss", _LEVEL)
        if len(values) < 3:
            return False
        return abs(self.loss - _median(values)) <= 2 * (max(values) - min(values))

    @derived
    def loss_falls(self) -> bool:
        """Whether the newest losses are below the level before: the training learns."""
        newest, earlier = self.last("loss", self.loss, _NEWEST), self.before("loss", _LEVEL + _NEWEST - 1)
        earlier = earlier[: 1 - _NEWEST]
        if len(newest) < 3 or len(earlier) < 3 or self.loss > max(earlier):
            return False
        return 0 <= _median(newest) < _median(earlier[: max(len(earlier) // 2, 3)])

    @derived
    def loss_rises(self) -> bool:
        newest, earlier = self.last("loss", self.loss, _NEWEST), self.before("loss", _LEVEL + _NEWEST - 1)
        earlier = earlier[: 1 - _NEWEST]
        if len(newest) < 3 or len(earlier) < 3:
            return False
        return _median(newest) > _median(earlier)

    @derived
    def loss_known(self) -> bool:
        return self.loss == self.loss or self.bad_loss

    @derived
    def loss_below_0(self) -> bool:
        """Whether the loss, which was always above 0, falls through 0 faster than it has approached 0."""
        newest = self.last("loss", self.loss, 2)
        earlier = self.before("loss", 42)
        earlier = earlier[:-10] if len(earlier) > 18 else earlier[:-1]
        if len(newest) < 2 or len(earlier) < 8 or min(earlier) <= 0:
            return False
        level = _median(earlier[-8:])
        fell = _median(earlier[:16]) - level
        return max(newest) < -level and level - self.loss > 2 * max(fell, 0.0)

    @derived
    def loss_of_first(self) -> float:
        """The loss / the largest magnitude of the first ones."""
        return self.loss / self.run.loss_first if self.run.loss_first > 0 else math.nan

    # The learning rate

    @derived
    def rate_rise(self) -> float:
        """Log of the learning rate / that of the sample before."""
        before = self.past.scalars["rate"][-1] if len(self.past) else math.nan
        return _log(self.rate) - _log(before)

    @derived
    def rate_climb(self) -> float:
        """Log of the learning rate / the smallest of the samples before that was not 0."""
        before = [rate for rate in self.past.scalars["rate"] if rate > 0]
        return _log(self.rate) - _log(min(before)) if before else math.nan

    @derived
    def rates_P(self) -> FloatArray:
        return self.per_parameter("learning_rate")

    # Layers

    @derived
    def rise_P(self) -> FloatArray:
        """Log of each gradient norm / its median before: [P]."""
        squares = self.past.rows.column(Column.GRAD_SUM_SQ, self.structure.names, _LEVEL)
        return self.g_P - _nan_median(_half_log(squares)) if len(squares) >= 3 else np.full(len(self.g_P), np.nan)

    @derived
    def share_P(self) -> FloatArray:
        """Log of each gradient norm / the largest one: [P]."""
        return self.g_P - _largest(self.g_P)

    @derived
    def dead_L(self) -> FloatArray:
        """Share of each module's units without a gradient: [L]; NaN where it is missing."""
        if not self.norm > 0:
            return np.full(len(self.structure.modules.names), np.nan)
        dead_L: FloatArray = dead_units(self.structure.names, _dead_share(self.rows_PC[None]))[0]
        return dead_L

    @derived
    def is_any_dead(self) -> bool:
        """Whether at least half of a parameter's elements have no gradient."""
        return bool(np.count_nonzero(self.rows_PC[:, Column.NUM_DEAD] >= 0.5 * self.rows_PC[:, Column.NUM_ELEMENTS]))

    @derived
    def has_died(self) -> bool:
        """Whether more of a parameter's elements are without a gradient, by a fifth, than four samples ago."""
        names = self.structure.names
        dead_P, size_P = (self.past.rows.back(c, names, 4) for c in (Column.NUM_DEAD, Column.NUM_ELEMENTS))
        now_P, size_now_P = self.rows_PC[:, Column.NUM_DEAD], self.rows_PC[:, Column.NUM_ELEMENTS]
        return self.is_any_dead and bool(np.count_nonzero(now_P / size_now_P > dead_P / size_P + 0.2))

    def dead_before(self, newest: int) -> FloatArray:
        """Share of each module's units without a gradient in the newest samples before: [N, L]."""
        names = self.structure.names
        dead, size = (self.past.rows.column(c, names, newest) for c in (Column.NUM_DEAD, Column.NUM_ELEMENTS))
        shares = dead / size
        return dead_units(names, shares) if len(shares) else np.full((0, len(self.structure.modules.names)), np.nan)

    def g_before(self, newest: int) -> FloatArray:
        """Log gradient norm of each module in the newest samples before: [N, L]."""
        modules = self.structure.modules
        squares = np.nan_to_num(self.past.rows.column(Column.GRAD_SUM_SQ, self.structure.names, newest))
        return _half_log(np.add.reduceat(squares[:, modules.order], modules.starts, axis=1))

    @derived
    def is_empty_L(self) -> BoolArray:
        """Modules whose weights have no gradient but whose bias has one: their inputs are 0: [L]."""
        return without_inputs(self.structure.names, self.snapshot.dead_ratio[self.place])

    @derived
    def feeds_nothing_L(self) -> BoolArray:
        """Modules without any gradient that are followed by one whose inputs are 0: [L]."""
        return feed_nothing(np.equal(self.dead_L, 1.0), self.is_empty_L, ~np.isnan(self.dead_L))

    @derived
    def num_units_L(self) -> FloatArray:
        return num_units(self.snapshot, self.place)

    @derived
    def g_L(self) -> FloatArray:
        """Log gradient norm of each module: [L]."""
        modules = self.structure.modules
        squares_P = np.nan_to_num(self.rows_PC[:, Column.GRAD_SUM_SQ])[modules.order]
        return _half_log(np.add.reduceat(squares_P, modules.starts))

    @derived
    def rise_L(self) -> FloatArray:
        """Log of each module's gradient norm / its median before: [L]."""
        before = self.g_before(_LEVEL)
        return self.g_L - _nan_median(before) if len(before) >= 3 else np.full(len(self.g_L), np.nan)

    @derived
    def has_fallen(self) -> bool:
        """Whether a parameter's gradient is below a fiftieth of that of five samples ago."""
        before_P = self.past.rows.back(Column.GRAD_SUM_SQ, self.structure.names, 5)
        return bool(np.count_nonzero(self.rows_PC[:, Column.GRAD_SUM_SQ] * 50.0**2 < before_P))

    @derived
    def spread(self) -> float:
        """Log of the largest gradient norm of a parameter / the smallest that is not 0."""
        g_P = self.g_P
        return float(np.fmax.reduce(g_P) - np.fmin.reduce(g_P)) if len(g_P) else math.nan

    @derived
    def fell_L(self) -> FloatArray:
        """Log of the smallest norm before / the largest of the newest five, of each module: [L]."""
        if self.num_before < 25 or not self.has_fallen:
            return np.full(len(self.structure.modules.names), np.nan)
        before = self.g_before(64)
        newest = np.concatenate([before[-4:], self.g_L[None]])
        lowest: FloatArray = np.min(before[:-4], axis=0) - np.max(newest, axis=0)
        return lowest

    @derived
    def depth(self) -> float:
        """Log of the last layer's gradient norm / the first layer's, on a line, if the norms are in order; else 0."""
        if not self.spread > (X1000 if self.run.num_samples > 1 else X100):
            return 0.0
        norms_L = np.exp(np.clip(self.g_L, -700, 700))
        trend = trend_of(self.structure.modules.names, norms_L)
        if trend is None or abs(trend.order) <= 0.9 or not 0 < trend.factor < math.inf:
            return 0.0
        return math.log(trend.factor)

    @derived
    def is_held_up(self) -> bool:
        """Whether a weight is still 0 and has a gradient: none passes it yet."""
        zero_P = ~self.structure.is_bias_P & (self.rows_PC[:, Column.PARAM_SUM_SQ] == 0)
        return bool((zero_P & (self.rows_PC[:, Column.GRAD_SUM_SQ] > 0)).any())

    @derived
    def gain_P(self) -> FloatArray:
        """Root mean square of each weight times sqrt(fan-in), about 1 where a signal keeps its size: [P].

        Known for weights with units; the fan-in is from the shape, or from the size of the layer's bias.
        """
        structure = self.structure
        sum_sq_P, size_P = self.rows_PC[:, Column.PARAM_SUM_SQ], self.sizes_P
        fan_in_P = structure.fan_in_P
        known_P = self.is_weight_P & ~structure.is_embedding_P & ~structure.is_norm_P & (fan_in_P > 1)
        gain_P = np.sqrt(sum_sq_P / size_P * fan_in_P)
        return np.where(known_P, gain_P, np.nan)

    @derived
    def rms_P(self) -> FloatArray:
        rms_P: FloatArray = np.sqrt(self.rows_PC[:, Column.PARAM_SUM_SQ] / self.sizes_P)
        return rms_P

    @derived
    def gain(self) -> float:
        known_P = self.gain_P[np.isfinite(self.gain_P)]
        return float(np.median(known_P)) if known_P.size else math.nan

    @derived
    def is_fresh(self) -> bool:
        """Whether the model begins here: it is not small, not half frozen, its normalisations are as they are made."""
        structure = self.structure
        if (
            self.run.first_step > 2
            or self.step > 10
            or self.num_elements < 256
            or 2 * self.snapshot.trainable.sum() <= len(structure.names)
        ):
            return False
        for name in ("weight",):
            made_P = structure.is_norm_P & np.array([one.endswith(name) for one in structure.names])
            if (made_P & (np.abs(self.rms_P - 1) > 0.1) & (self.rms_P > 0)).any():
                return False
        return True

    @derived
    def inputs(self) -> float:
        """Root mean square of the model's inputs; estimated from the first layer's gradients where it is not known."""
        known = self.fact("input_rms")
        return known if known == known else math.nan

    @derived
    def is_half(self) -> bool:
        """Whether the outputs, or the loss, are float16."""
        return self.fact("output_largest") == 65504 or self.fact("loss_largest") == 65504

    @derived
    def half_P(self) -> BoolArray:
        """Which gradients are in half precision, by their lowest bits: [P]."""
        extremes = self.rows_PC[:, [Column.GRAD_MIN, Column.GRAD_MAX, Column.GRAD_ABS_MIN_NONZERO]].astype(np.float32)
        half_P: BoolArray = np.all((extremes.view(np.uint32) & 0x1FFF) == 0, axis=1)
        return half_P

    @derived
    def coarse(self) -> float:
        """Share of zeros, where the smallest other elements are the smallest numbers of float16; else 0."""
        if self.fact("output_largest") > 65504 and self.fact("loss_largest") > 65504 and not self.scale > 0:
            return 0.0  # no float16
        scale = self.scale
        smallest = self.rows_PC[:, Column.GRAD_ABS_MIN_NONZERO] * (scale if scale > 0 else 1.0)
        units = float(np.nanmin(np.where(smallest > 0, smallest, np.nan), initial=np.inf)) * 2.0**24
        if not (0.5 < units < 1024 and abs(units - round(units)) < 1e-6):
            return 0.0
        return float(np.nansum(self.rows_PC[:, Column.NUM_ZERO])) / max(self.num_elements, 1.0)

    @derived
    def missing_P(self) -> BoolArray:
        """Trainable parameters without a gradient, of the optimizers that step in this sample: [P]."""
        missing_P: BoolArray = ~self.present_P & self.snapshot.trainable & (self.per_parameter("trainable") != 0)
        stepped_P = np.isfinite(self.rates_P)  # in this sample; the others belong to an optimizer that steps in turn
        if np.count_nonzero(stepped_P):
            missing_P &= stepped_P
        return missing_P

    @derived
    def same_P(self) -> BoolArray:
        """Parameters whose norm has the same bits as in the sample before, although an update was made: [P]."""
        before_P = self.past.rows.back(Column.PARAM_SUM_SQ, self.structure.names)
        same_P: BoolArray = self.rows_PC[:, Column.PARAM_SUM_SQ] == before_P
        return same_P & ~(self.per_parameter("weight_moved") > 0) if np.count_nonzero(same_P) else same_P

    @derived
    def is_still(self) -> bool:
        """Whether no parameter has changed by a bit since the sample before, which had a gradient."""
        if not self.num_before or not self.present_P.any() or self.skipped:
            return False
        return bool(self.same_P[self.present_P].all())

    # Kinds of failures

    @derived
    def all_zero(self) -> bool:
        return self.sample.norm == 0 and not self.sample.has_nonfinite and not self.is_empty

    @derived
    def is_empty(self) -> bool:
        return not (self.sample.is_complete and len(self.rows_PC)) and not self.present_P.any()

    @derived
    def scale(self) -> float:
        return float(self.snapshot.loss_scale[self.place])

    def scalars(self) -> dict[str, float]:
        """The numbers that are remembered of this sample."""
        return {
            "step": float(self.step),
            "norm": self.norm,
            "raised": self.raised,
            "record": self.past.record,
            "usual": self.usual,
            "weights": self.weights,
            "moved": self.moved,
            "grows": self.grows,
            "leap": self.leap,
            "clip": self.clip,
            "loss": self.loss,
            "rate": self.rate,
            "change": self.change,
            "cosine": self.cosine,
            "inputs": self.inputs,
            "growth": self.of_weights,
            "shrinkage": self.left,
        }


def _dead_share(rows_SPC: FloatArray) -> FloatArray:
    """Share of the finite elements without a gradient: [S, P]; NaN where none is finite."""
    share: FloatArray = rows_SPC[..., Column.NUM_DEAD] / rows_SPC[..., Column.NUM_ELEMENTS]
    return share


def where(mask: npt.NDArray[np.bool_]) -> list[int]:
    """The positions that are True."""
    found: list[int] = np.flatnonzero(mask).tolist()
    return found


def _log(value: float) -> float:
    if not value > 0:
        return math.nan
    return math.log(value) if value < math.inf else 1e3


def _half_log(squares: FloatArray) -> FloatArray:
    return np.where(squares > 0, 0.5 * np.log(squares), np.nan)


def _median(values: Sequence[float]) -> float:
    return statistics.median(values) if values else math.nan


def _nan_median(rows_NP: FloatArray) -> FloatArray:
    """Median of the known values of each column: [P]; NaN where fewer than three are known."""
    known_P = np.count_nonzero(~np.isnan(rows_NP), axis=0)
    ordered = np.sort(rows_NP, axis=0)  # NaN comes last
    at_P = np.maximum(known_P - 1, 0) // 2
    middle: FloatArray = np.where(known_P >= 3, ordered[at_P, np.arange(rows_NP.shape[1])], np.nan)
    return middle


def _second(values: Sequence[float]) -> float:
    return sorted(values)[-2] if len(values) > 1 else math.nan


def _largest(values: FloatArray) -> float:
    known = values[values == values]
    return float(known.max()) if known.size else math.nan


__all__ = ["MIN_WEIGHTS", "Facts", "Run", "where"]
