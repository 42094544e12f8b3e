"""Facts that a history shows, computed once for all patterns."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Final, NamedTuple

import numpy as np

from .._analysis.baseline import Growth, median_and_scatter, steady_growth
from .._analysis.formatting import clip_advice, number, when
from .._analysis.layers import DepthTrend, input_scale
from .._measure.columns import BoolArray, Column, FloatArray, IntArray
from ..rules._base import FIRST_STEPS, values_of
from ..snapshot import Snapshot, keys
from .facts import MIN_NEIGHBOURS, NEIGHBOURS, Layers, Parameters

# S samples, N clean samples

_SUDDEN, _CALM = math.log(5.0), math.log(3.0)  # log of norm / usual norm: least at an onset, most in the sample before
_RECENT: Final = 12  # number of newest samples in which the fault of an alert begins
_ROSE: Final = 3.0  # least learning rate / previous one at a rise; a warm-up schedule reaches 2 at most
_ORDINARY: Final = 3.0  # most size of an ordinary update / the largest update before
_FAR: Final = 0.05  # change of the parameters' norm by one update, as a share of the norm
FIRST_GRADIENT: Final = 10.0  # multiple of the parameters' norm; ordinary inputs and losses make smaller gradients
_DECIDES: Final = 10.0  # multiple of FIRST_GRADIENT up to which a learning rate may be the cause as well
_ORDINARY_INPUT, _ORDINARY_OUTPUT = 10.0, 3.0  # limits: inputs' root mean square; norm of the last bias's gradient
DEEP: Final = 12  # number of layers over which ordinary gradients may grow larger than the parameters
_EARLY: Final = 40
_MIN_LOSSES: Final = 8
_FADES, _IN_ORDER = 30.0, 0.9  # limits: norm of the last layer / first layer; Spearman's rank correlation with depth
_SPIKE_FACTOR: Final = 5.0
_ALONE_FACTOR: Final = 3.0


class RateRise(NamedTuple):
    """A rise of the learning rate: at once in the update of a sample, or step by step up to it, since another one."""

    before: float
    after: float
    since: int
    sample: int
    at_once: bool


class Onset(NamedTuple):
    """A clean sample whose norm is far above the norms before it."""

    sample: int
    factor: float  # its norm / the median of the norms before it


@dataclass(frozen=True, eq=False)
class Evidence:
    """A history with additional knowledge about the training, as in `diagnose`, and the facts derived from them."""

    history: Snapshot
    modules: Mapping[str, str]
    notes: Mapping[int, Mapping[str, object]]
    num_ranks: int

    def step(self, sample: int) -> int:
        return int(self.history.steps[sample])

    def when(self, sample: int) -> str:
        """Return when something changed that this sample shows first: "at step 7", or "between steps 4 and 7"."""
        return when(self.history.steps, sample)

    def note_of(self, sample: int) -> str:
        """Return the user's note about a sample as the end of a sentence; "" without one."""
        note = self.notes.get(self.step(sample))
        return "" if not note else " (noted: " + ", ".join(f"{key} {value}" for key, value in note.items()) + ")"

    @property
    def clip_advice(self) -> str:
        """The advice about clipping: it depends on whether the training clipped in any of the last samples."""
        return clip_advice(clips=1 in self.history.clipped[-NEIGHBOURS:])

    @cached_property
    def parameters(self) -> Parameters:
        return Parameters(self.history, self.spikes)

    @cached_property
    def layers(self) -> Layers:
        return Layers(self.history, self.clean, self.modules)

    @cached_property
    def rate_rise(self) -> RateRise | None:
        """The newest rise of the learning rate: at once among the last samples, otherwise over the whole history."""
        rate_S = self.history.metrics.get(keys.LEARNING_RATE)
        if rate_S is None:
            return None
        present = self.history.present
        known = np.flatnonzero((rate_S > 0) & (present == present[-1:]).all(axis=1))  # other optimizers, other rates

        def least(before: int, now: int) -> float:
            """Return the least unusual factor. A linear warm-up rises by the ratio of the steps; if all steps between
            are known, a steeper rise would show."""
            first, last = self.history.steps[[before, now]].tolist()
            return _ROSE * float(last / max(first, 1)) if last - first > now - before else _ROSE

        for before, now in zip(known[-2::-1].tolist(), known[:0:-1].tolist(), strict=True):
            if now >= len(self.history) - _RECENT and rate_S[now] >= least(before, now) * rate_S[before]:
                return RateRise(float(rate_S[before]), float(rate_S[now]), before, now, at_once=True)
        last = int(known[-1]) if known.size else 0
        rises = ((float(rate_S[last] / rate_S[since]) / least(since, last), since) for since in known.tolist())
        rise, since = max(rises, default=(0.0, 0))
        return RateRise(float(rate_S[since]), float(rate_S[last]), since, last, at_once=False) if rise >= 1 else None

    @cached_property
    def onset(self) -> Onset | None:
        """The newest of the last samples in which the norm has left its usual level at once."""
        past_N = self.log_norm_N
        for place in range(len(past_N) - 1, max(MIN_NEIGHBOURS, len(past_N) - _RECENT) - 1, -1):
            usual = float(np.median(past_N[max(place - NEIGHBOURS, 0) : place]))
            if past_N[place] - usual >= _SUDDEN and past_N[place - 1] - usual <= _CALM:
                return Onset(int(self.clean[place]), math.exp(min(float(past_N[place]) - usual, 700.0)))
        return None

    @property
    def gradient_came_first(self) -> bool:
        """Whether the norm jumped after an ordinary update with an ordinary learning rate, so that no update caused it.

        False if the parameters begin to move far only some updates later: then no batch has moved them.
        """
        if self.onset is None or self.rate_rise is not None:
            return False
        sample = self.onset.sample
        update, (changes, samples) = self.parameters.update_before(sample), self.parameters.changes
        if update is None or not update[0] <= _ORDINARY * update[1] or self.parameters.was_moving(sample):
            return False
        moved = samples[(changes > _FAR) & (samples >= sample)]
        return not (self.growth and self.growth[1] >= sample) and not (moved.size and moved[0] > sample + 1)

    @cached_property
    def fading(self) -> DepthTrend | None:
        """The trend of typical norms that fall layer by layer towards the input; None if they do not."""
        trend = self.layers.depth
        return None if trend is None or trend.factor < _FADES or trend.order < _IN_ORDER else trend

    @property
    def began_to_fade(self) -> bool:
        """Whether the norm fell by less than half as much (of the log) at first: no initial weights caused it."""
        first = self.layers.first_depth
        if self.fading is None or first is None or self.step(0) > FIRST_STEPS:
            return False
        return abs(math.log(first.factor)) < 0.5 * math.log(self.fading.factor)

    @property
    def is_early(self) -> bool:
        """Whether the training has just begun, so that updates have made the changes, and not other data."""
        return self.step(-1) <= _EARLY

    @cached_property
    def first_bad(self) -> int | None:
        """The first bad sample that was not skipped."""
        found = np.flatnonzero(self.history.has_nonfinite & ~self.history.skipped)
        return int(found[0]) if found.size else None

    def is_broken(self, sample: int) -> bool:
        """Whether a parameter was not finite before this sample's update, so that its gradients say nothing."""
        return bool(np.any(self.history.column(Column.PARAM_NUM_NONFINITE)[sample] > 0))

    def has_bad_loss(self, sample: int) -> bool:
        """Whether the loss is known not to be finite, so that NaN and Inf arose before the backward."""
        return values_of(self.history, keys.NUM_NONFINITE_LOSS)[sample] > 0

    def has_good_loss(self, sample: int) -> bool:
        """Whether the loss is known to be finite on all ranks, so that no NaN or Inf of the forward has reached it."""
        return self.num_ranks == 1 and self.is_loss_known(sample) and not self.has_bad_loss(sample)

    def is_loss_known(self, sample: int) -> bool:
        """Whether the loss is known as a number."""
        return bool(np.isfinite(self.loss_S[sample]))

    @cached_property
    def loss_S(self) -> FloatArray:
        """The losses, NaN if unknown: [S]."""
        return self.history.metrics.get(keys.LOSS, np.full(len(self.history), np.nan))

    def is_loss_above_0(self, end: int) -> bool:
        """Whether all known losses before this sample are above 0."""
        return bool(np.fmin.reduce(self.loss_S[:end], initial=np.inf) > 0)

    @property
    def loss_only_rises(self) -> bool:
        """Whether a loss above 0 has risen almost all the time from the first steps on, by a fifth in each half."""
        known = self.loss_S[np.isfinite(self.loss_S)]
        if len(known) < _MIN_LOSSES or self.step(0) > _EARLY:
            return False
        first, half, last = known[[0, len(known) // 2, -1]]
        if not last > 1.2 * half > 1.2**2 * first > 0:
            return False
        ranks = np.argsort(np.argsort(known))
        return bool(np.corrcoef(ranks, np.arange(len(known)))[0, 1] > _IN_ORDER)

    def has_usual_loss(self, sample: int) -> bool:
        """Whether the loss is near the range of those before it, so that nothing in the forward made this gradient."""
        before = self.loss_S[self.clean[self.clean < sample][-NEIGHBOURS:]]
        before = before[np.isfinite(before)]
        if len(before) < MIN_NEIGHBOURS:
            return len(before) > 1 and bool(0 <= self.loss_S[sample] <= before.max())
        return bool(abs(self.loss_S[sample] - (before.min() + before.max()) / 2) <= np.ptp(before))

    def loss_factor(self, sample: int) -> float:
        """Return |loss| of a sample / the largest |loss| before it; NaN if unknown."""
        before = np.abs(self.loss_S[:sample][np.isfinite(self.loss_S[:sample])])
        return float(np.abs(self.loss_S[sample]) / before.max()) if before.any() else math.nan

    @cached_property
    def first_ratio(self) -> float:
        """The norm of the first gradient / the norm of the parameters, before any update; NaN if not measured."""
        if not self.clean.size or self.step(self.clean[0]) > FIRST_STEPS:
            return math.nan
        weights = math.sqrt(np.nansum(self.history.column(Column.PARAM_SUM_SQ)[self.clean[0]]))
        return float(self.history.total_grad_norm[self.clean[0]]) / weights if weights > 0 else math.nan

    @property
    def is_of_large_data(self) -> bool:
        """Whether the first gradient is so large that the scale of the inputs, the targets or the loss is the cause."""
        is_huge = self.first_ratio > _DECIDES * FIRST_GRADIENT and len(self.parameters.gains) < DEEP
        return is_huge and not self.grows_inside

    @cached_property
    def grows_inside(self) -> str:
        """Evidence, as a text, that the layers have made a large first gradient: inputs and output's gradient are
        ordinary. "" if that is not known."""
        if not self.first_ratio > _DECIDES * FIRST_GRADIENT:
            return ""
        first, name = int(self.clean[0]), self.history.names[-1]
        inputs, output = input_scale(self.history, first), float(self.history.grad_norm[first, -1])
        if inputs is None or inputs[1] > _ORDINARY_INPUT or "bias" not in name or not output <= _ORDINARY_OUTPUT:
            return ""
        # Otherwise the gradient has not grown: the parameters are small.
        if not self.history.total_grad_norm[first] > FIRST_GRADIENT * output:
            return ""
        ordinary = f"the inputs of {inputs[0]} have a root mean square of about {number(inputs[1])}"
        return f"{ordinary}, and the gradient of {name} has a norm of {number(output)}"

    @property
    def first_gradient(self) -> str:
        """The comparison of the first gradient with the parameters, as a text."""
        first = int(self.clean[0])
        return (
            f"the gradient of step {self.step(first)} had a norm of {number(self.history.total_grad_norm[first])}, "
            f"{number(self.first_ratio)}x the parameters', before any update"
        )

    def began_with_inf(self, sample: int) -> bool:
        """Whether the first non-finite layer in the order of the backward has Inf, which may make later layers NaN."""
        bad = np.flatnonzero(self.layers.by_module.num_nonfinite[sample] > 0)
        return bool(bad.size) and bool(self.layers.by_module.num_inf[sample, bad[-1]] > 0)

    @cached_property
    def num_last_skipped(self) -> int:
        """The number of skipped updates in a row, up to the last sample."""
        return _length_of_run((self.history.skipped & ~self.history.left_out)[::-1])

    @cached_property
    def clean(self) -> IntArray:
        """Indices of the samples with a finite, non-zero gradient."""
        return np.flatnonzero(~self.history.has_nonfinite & ~self.history.skipped & (self.history.total_grad_norm > 0))

    @cached_property
    def log_norm_N(self) -> FloatArray:
        """The logs of the clean samples' total norms: [N]."""
        return np.log(self.history.total_grad_norm[self.clean])

    def log_norms_before(self, sample: int) -> FloatArray:
        """Return the logs of the norms of the clean samples before a sample."""
        return self.log_norm_N[self.clean < sample]

    def had_grown(self, sample: int) -> bool:
        """Whether the last clean norm before a sample was more than 10 times the usual one."""
        before = self.log_norms_before(sample)[-NEIGHBOURS - 1 :]
        return len(before) > 0 and bool(before[-1] > np.median(before) + math.log(10))

    @cached_property
    def growth(self) -> tuple[Growth, int] | None:
        """The last steady rise of the norm by a factor of 20 or more, and its last sample; None if there is none."""
        # A cause needs less evidence than an alert: the samples count as consecutive steps.
        for end in range(len(self.log_norm_N), 0, -1):
            rise = steady_growth(self.log_norm_N[:end].tolist(), range(end), factor=20.0)
            if rise is not None:
                return rise, int(self.clean[end - 1])
        return None

    @cached_property
    def spikes(self) -> list[tuple[int, float]]:
        """Lone samples whose norm is far above both sides: (sample, norm / median of the samples before).

        Far: 5 times the median, 6 times the scatter, and 3 times all neighbours but one, so that heavy tails are no
        spikes. Smaller high norms right after a spike belong to it. The last sample has neighbours on one side only.
        """
        found = []
        place = MIN_NEIGHBOURS
        while place < len(self.log_norm_N):
            before = self.log_norm_N[max(place - NEIGHBOURS, 0) : place]
            after = self.log_norm_N[place + 1 : place + 1 + NEIGHBOURS]
            norm, (usual, scatter) = float(self.log_norm_N[place]), median_and_scatter(before)
            back = not len(after) or float(np.median(after)) - usual < (norm - usual) / 2
            aftermath = _length_of_run((after > usual + np.log(_SPIKE_FACTOR)) & (after < norm))
            others = np.sort(np.concatenate([before, after[aftermath:]]))
            is_alone = norm > others[-2] + np.log(_ALONE_FACTOR)
            if norm - usual > max(np.log(_SPIKE_FACTOR), 6 * scatter) and back and is_alone:
                found.append((int(self.clean[place]), float(np.exp(min(norm - usual, 700.0)))))
                place += aftermath
            place += 1
        return found

    @property
    def last_spike(self) -> int | None:
        """The newest sample if its norm is 10 times the largest of the 16 before it; otherwise the last lone spike."""
        past_N = self.log_norm_N
        if len(past_N) > MIN_NEIGHBOURS and past_N[-1] > past_N[-NEIGHBOURS - 1 : -1].max() + np.log(10):
            return int(self.clean[-1])
        return self.spikes[-1][0] if self.spikes else None

    @property
    def spike_began(self) -> int | None:
        """The first of the newest samples in a row that are each 10 times the largest of the 16 before, of which two
        are enough; otherwise the last spike."""
        past_N, began = self.log_norm_N, len(self.log_norm_N)
        while began > 2 and past_N[began - 1] > past_N[max(began - 1 - NEIGHBOURS, 0) : began - 1].max() + np.log(10):
            began -= 1
        return int(self.clean[began]) if began < len(past_N) else self.last_spike


def _length_of_run(flags_N: BoolArray) -> int:
    """Return how many flags are set at the beginning."""
    return len(flags_N) if flags_N.all() else int(np.argmin(flags_N))
