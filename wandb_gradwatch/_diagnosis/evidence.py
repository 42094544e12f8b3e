"""What a history shows, measured once for all patterns."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cached_property
from typing import Final

import numpy as np
import numpy.typing as npt

from .._analysis.baseline import Growth, steady_growth
from .._analysis.depth import DepthTrend
from .._analysis.formatting import clip_advice, number
from .._analysis.layers import input_scale
from .._measure.columns import Column, FloatArray
from ..snapshot import Snapshot, keys
from .layers import Layers
from .onset import Onset, RateRise, onset_of, rate_rise
from .parameters import Parameters

# S samples, N clean samples

_FAR: Final = 0.05  # of the parameters' norm, by one update
FIRST_GRADIENT: Final = 10.0  # times the parameters' norm: more than ordinary inputs and losses make
_DECIDES: Final = 10.0  # times that: of a smaller one a learning rate may be the cause as well
_ORDINARY_INPUT, _ORDINARY_OUTPUT = 10.0, 3.0  # root mean square, and norm of the last bias's gradient: 2 at most
DEEP: Final = 12  # layers, through which ordinary gradients may grow beyond the parameters
_FIRST_STEPS: Final = 2  # before which hardly an update was made
_EARLY: Final = 40
_FADES, _IN_ORDER = 30.0, 0.9  # times from the last layer to the first, and Spearman's rank correlation with the depth
_SPIKE_FACTOR: Final = 5.0
_ALONE_FACTOR: Final = 3.0
_NEIGHBOURS: Final = 16  # samples on each side that a spike is compared with
_MIN_NEIGHBOURS: Final = 5


class Evidence:
    """A history and what may be known besides it.

    Args:
        history: samples of one training, oldest first.
        modules: the class name of each module by its name, as `named_modules()` gives them; patterns that ask for a
            kind of module fall back to names and numbers without it.
        notes: what the user said about a step.
        num_ranks: that make the gradient together; the loss is that of one.
    """

    def __init__(
        self,
        history: Snapshot,
        *,
        modules: Mapping[str, str],
        notes: Mapping[int, Mapping[str, object]],
        num_ranks: int,
    ) -> None:
        self.history, self.modules, self.notes, self._num_ranks = history, modules, notes, num_ranks

    def step(self, sample: int) -> int:
        return int(self.history.steps[sample])

    def note_of(self, sample: int) -> str:
        """What the user noted about a sample, as the end of a sentence."""
        note = self.notes.get(self.step(sample))
        return "" if not note else " (noted: " + ", ".join(f"{key} {value}" for key, value in note.items()) + ")"

    @property
    def clip_advice(self) -> str:
        """What to do about clipping: the training clips where it did in one of the last samples."""
        return clip_advice(float(np.any(self.history.clipped[-_NEIGHBOURS:] == 1)))

    @cached_property
    def parameters(self) -> Parameters:
        """The parameters themselves."""
        return Parameters(self.history, self.spikes)

    @cached_property
    def first_norms(self) -> tuple[float, float]:
        """The first clean sample's norms: of the gradient, and of the parameters."""
        first = int(self.clean[0])
        weights = float(np.sqrt(np.nansum(self.history.column(Column.PARAM_SUM_SQ)[first])))
        return float(self.history.total_grad_norm[first]), weights

    @cached_property
    def rate_rise(self) -> RateRise | None:
        """A learning rate that has just gone up at once."""
        return rate_rise(self.history)

    @cached_property
    def onset(self) -> Onset | None:
        """Where the norm has just left its usual level at once."""
        return onset_of(self.log_norm_N, self.clean, self.parameters)

    @property
    def gradient_came_first(self) -> bool:
        """The norm jumped after an ordinary update, by a learning rate that did not: no update has made it so large.

        Where the parameters have begun to move far only some updates later, it was no batch that has moved them.
        """
        if self.onset is None or not self.onset.ordinary_update or self.rate_rise is not None:
            return False
        changes, samples = self.parameters.changes
        moved = samples[(changes > _FAR) & (samples >= self.onset.sample)]
        return not moved.size or bool(moved[0] <= self.onset.sample + 1)

    @cached_property
    def fading(self) -> DepthTrend | None:
        """A typical norm that falls layer by layer on its way back to the input."""
        trend = self.layers.depth
        return None if trend is None or trend.factor < _FADES or trend.order < _IN_ORDER else trend

    @property
    def began_to_fade(self) -> bool:
        """At the training's first step the norm fell by less than half of that, digit by digit: no initial weights
        make it fade."""
        first = self.layers.first_depth
        if self.fading is None or first is None or self.step(0) > _FIRST_STEPS:
            return False
        return abs(math.log(first.factor)) < 0.5 * math.log(self.fading.factor)

    @property
    def is_early(self) -> bool:
        """The training has just begun: what has changed since, updates have made, and no other data."""
        return self.step(-1) <= _EARLY

    @cached_property
    def layers(self) -> Layers:
        """The layers in the model's order."""
        return Layers(self.history, self.clean, self.modules)

    # ---- samples

    @cached_property
    def bad_S(self) -> npt.NDArray[np.bool_]:
        """Samples with NaN or Inf."""
        bad: npt.NDArray[np.bool_] = np.any(self.history.num_nonfinite > 0, axis=1)
        return bad

    @cached_property
    def first_bad(self) -> int | None:
        """The first bad sample that was not skipped."""
        found = np.flatnonzero(self.bad_S & ~self.history.skipped)
        return int(found[0]) if found.size else None

    def is_broken(self, sample: int) -> bool:
        """Whether a parameter was not finite before this sample's update: then every gradient of it is bad."""
        return bool(np.any(self.history.column(Column.PARAM_NUM_NONFINITE)[sample] > 0))

    def has_bad_loss(self, sample: int) -> bool:
        """Whether the loss is known not to be finite: then nothing that is not finite arose on the way back."""
        counts_S = self.history.metrics.get(keys.NUM_NONFINITE_LOSS)
        return counts_S is not None and bool(counts_S[sample] > 0)

    def has_good_loss(self, sample: int) -> bool:
        """Whether the loss is known to be finite, on all ranks: then the forward has made nothing that reached it."""
        return self._num_ranks == 1 and self.is_loss_known(sample) and not self.has_bad_loss(sample)

    def is_loss_known(self, sample: int) -> bool:
        """Whether the loss is known as a number."""
        return bool(np.isfinite(self.loss_S[sample]))

    @cached_property
    def loss_S(self) -> FloatArray:
        """The losses, NaN where they are not known."""
        return self.history.metrics.get(keys.LOSS, np.full(len(self.history), np.nan))

    def has_usual_loss(self, sample: int) -> bool:
        """Whether the loss is known and among those before it: nothing in the forward has made this gradient."""
        before = self.loss_S[self.clean[self.clean < sample][-_NEIGHBOURS:]]
        before = before[np.isfinite(before)]
        if len(before) < _MIN_NEIGHBOURS:
            return False
        return bool(abs(self.loss_S[sample] - (before.min() + before.max()) / 2) <= np.ptp(before))

    def loss_factor(self, sample: int) -> float:
        """How many times the largest before it the loss is; NaN where that is not known."""
        before = np.abs(self.loss_S[:sample][np.isfinite(self.loss_S[:sample])])
        return float(np.abs(self.loss_S[sample]) / before.max()) if before.any() else math.nan

    @cached_property
    def first_ratio(self) -> float:
        """The first gradient's norm over the parameters', before any update; NaN where that was not seen."""
        if not self.clean.size or self.step(int(self.clean[0])) > _FIRST_STEPS:
            return math.nan
        norm, weights = self.first_norms
        return norm / weights if weights > 0 else math.nan

    @property
    def is_of_large_data(self) -> bool:
        """The first gradient is so large that the scale of the inputs, the targets or the loss has made it."""
        is_huge = self.first_ratio > _DECIDES * FIRST_GRADIENT and len(self.parameters.gains) < DEEP
        return is_huge and not self.grows_inside

    @cached_property
    def grows_inside(self) -> str:
        """In words, that neither the inputs nor what the loss gives to the last bias have made so large a first
        gradient: what is between them has; "" where that is not known."""
        if not self.first_ratio > _DECIDES * FIRST_GRADIENT:
            return ""
        first, name = int(self.clean[0]), self.history.names[-1]
        inputs, output = input_scale(self.history, first), float(self.history.grad_norm[first, -1])
        if inputs is None or inputs[1] > _ORDINARY_INPUT or "bias" not in name or not output <= _ORDINARY_OUTPUT:
            return ""
        if not self.first_norms[0] > FIRST_GRADIENT * output:  # nothing has grown: the parameters are small
            return ""
        ordinary = f"the inputs of {inputs[0]} are of about {number(inputs[1])}"
        return f"{ordinary}, and the gradient of {name} has a norm of {number(output)}"

    @property
    def first_gradient(self) -> str:
        """The first gradient beside the parameters, in words."""
        return (
            f"the gradient of step {self.step(int(self.clean[0]))} had a norm of {number(self.first_norms[0])}, "
            f"{number(self.first_ratio)}x the parameters', before any update"
        )

    def began_with_inf(self, sample: int) -> bool:
        """Whether the first bad layer in the backward's order has Inf: what comes after it may be NaN for that."""
        bad = np.flatnonzero(self.layers.by_module.num_nonfinite[sample] > 0)
        return bool(bad.size) and bool(self.layers.by_module.num_inf[sample, bad[-1]] > 0)

    @cached_property
    def num_last_skipped(self) -> int:
        """How many updates in a row were skipped, up to the last one."""
        skipped_S = self.history.skipped & ~self.history.left_out
        return len(skipped_S) if skipped_S.all() else int(np.argmin(skipped_S[::-1]))

    @cached_property
    def clean(self) -> npt.NDArray[np.int64]:
        """Indices of the samples with a finite, non-zero gradient."""
        return np.flatnonzero(~self.bad_S & ~self.history.skipped & (self.history.total_grad_norm > 0))

    @cached_property
    def log_norm_N(self) -> FloatArray:
        """Log of the clean samples' total norm."""
        return np.log(self.history.total_grad_norm[self.clean])

    @cached_property
    def growth(self) -> tuple[Growth, int] | None:
        """A steady rise of the norm anywhere in the history, at least 20 times, and the sample where it was seen."""
        for end in range(len(self.log_norm_N), 0, -1):
            rise = steady_growth(self.log_norm_N[:end].tolist(), factor=20.0)
            if rise is not None:
                return rise, int(self.clean[end - 1])
        return None

    @cached_property
    def spikes(self) -> list[tuple[int, float]]:
        """Lone samples whose norm is far above both sides: (sample, factor over the median of its neighbours).

        Far: 5 times, 6 times the neighbours' own scatter, and 3 times all of them but one, so that heavy tails are no
        spikes. What follows at once and is smaller is its aftermath. The last sample has one side only.
        """
        found = []
        place = _MIN_NEIGHBOURS
        while place < len(self.log_norm_N):
            before = self.log_norm_N[max(place - _NEIGHBOURS, 0) : place]
            after = self.log_norm_N[place + 1 : place + 1 + _NEIGHBOURS]
            norm, usual = float(self.log_norm_N[place]), float(np.median(before))
            scatter = 1.4826 * float(np.median(np.abs(before - usual)))
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
        """The newest sample if it is far above all lately, however these scatter; otherwise the last lone spike."""
        past_N = self.log_norm_N
        if len(past_N) > _MIN_NEIGHBOURS and past_N[-1] > past_N[-_NEIGHBOURS - 1 : -1].max() + np.log(10):
            return int(self.clean[-1])
        return self.spikes[-1][0] if self.spikes else None


def _length_of_run(flags_N: npt.NDArray[np.bool_]) -> int:
    """How many flags at the beginning are set."""
    return len(flags_N) if flags_N.all() else int(np.argmin(flags_N))
