"""Facts about the parameters in a history: their size, and how far each update moved them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np

from .._analysis.layers import initial_gains
from .._measure.columns import Column, FloatArray, IntArray
from ..snapshot import Snapshot, keys

# S samples, P watched parameters, N samples with a known update

_MAX_MOVEMENT: Final = 0.08
_MAX_FIRST_MOVEMENT: Final = 0.15
FIRST_UPDATES: Final = 5  # steps up to which an adaptive optimizer makes large updates
MAX_LEAP: Final = 0.5
# Change of the parameters' norm by one update; a healthy update makes a tenth of it once a run is under way.
_MIN_JUMP: Final = 0.005
_UNSEEN_LEAP: Final = 5.0  # the same by all updates between two samples; a healthy weight grows by 1.7 in a hundred
_JUMP_FACTOR: Final = 20.0
NEIGHBOURS: Final = 16  # number of samples, or of updates, that define what is usual
MIN_NEIGHBOURS: Final = 5
_MOVEMENT_SAMPLES: Final = 5
_MIN_ELEMENTS: Final = 16  # least size of a parameter that is compared with others
_UNUSUAL: Final = 3.0  # multiple of the largest before from which a gradient or learning rate may explain an update


@dataclass(frozen=True, eq=False)
class Parameters:
    """The parameters in a history."""

    history: Snapshot
    spikes: Sequence[tuple[int, float]]  # the lone spikes of the gradient norm: (sample, factor)

    @cached_property
    def changes(self) -> tuple[FloatArray, IntArray]:
        """|relative change| of the parameters' total norm by each update, and the samples of these updates: [N] each.

        If samples are several steps apart, the change is the average over the updates between them.
        """
        sum_sq_SP = self.history.column(Column.PARAM_SUM_SQ)
        broken_S = np.nansum(self.history.column(Column.PARAM_NUM_NONFINITE), axis=1) > 0
        together_P = ~np.any(np.isnan(sum_sq_SP), axis=0)  # the same set in all samples; the norm depends on the set
        total_S = np.sum(sum_sq_SP[:, together_P], axis=1)
        known = np.flatnonzero((total_S > 0) & np.isfinite(total_S) & ~broken_S)
        of_update_N = np.diff(0.5 * np.log(total_S[known])) / np.diff(self.history.steps[known])
        return np.abs(np.expm1(np.clip(of_update_N, -700, 700))), known[:-1]

    def change_from(self, sample: int) -> float:
        """Return |relative change| of the norm from this sample to the next, by all updates between; 0 if unknown."""
        changes, samples = self.changes
        place = int(np.searchsorted(samples, sample))
        if place == len(samples) or samples[place] != sample:
            return 0.0
        return math.expm1(min(math.log1p(float(changes[place])) * self.num_updates_from(sample), 700.0))

    def factor_since(self, sample: int) -> float:
        """Return the parameters' norm in the newest sample / their norm in this one; NaN if it is unknown."""
        before, now = np.nansum(self.history.column(Column.PARAM_SUM_SQ)[[sample, -1]], axis=1).tolist()
        return math.sqrt(now / before) if before > 0 else math.nan

    def num_updates_from(self, sample: int) -> int:
        """Return the number of updates from this sample to the next one."""
        return int(self.history.steps[sample + 1] - self.history.steps[sample])

    @cached_property
    def movement(self) -> tuple[float, int] | None:
        """The speed at which the parameters move for several steps, and the sample where that began; None if it is
        unknown, or one that a training survives: healthy parameters stay below 5 % per step.

        The second largest change of five in a row, in the stretch where that is largest: one giant update can be a bad
        batch, two in a row are due to the learning rate.
        """
        changes, samples = self.changes
        if len(changes) < 2:
            return None
        length = min(_MOVEMENT_SAMPLES, len(changes))
        lesser = np.sort(np.lib.stride_tricks.sliding_window_view(changes, length), axis=1)[:, -2]
        limit = self._movement_limit(samples[: len(lesser)])
        place = int(np.argmax(lesser / limit))
        return (float(lesser[place]), int(samples[place])) if lesser[place] > limit[place] else None

    def _movement_limit(self, samples_N: IntArray) -> FloatArray:
        """Return the speed allowed from these samples on: [N]. The first steps of adaptive optimizers are large."""
        return np.where(self.history.steps[samples_N] <= FIRST_UPDATES, _MAX_FIRST_MOVEMENT, _MAX_MOVEMENT)

    @cached_property
    def leap(self) -> int | None:
        """The first sample, other than a spike, whose update changed the parameters' norm by more than half."""
        changes, samples = self.changes
        spiky = {sample for sample, _ in self.spikes}
        return next((sample for sample in samples[changes > MAX_LEAP].tolist() if sample not in spiky), None)

    def update_before(self, sample: int) -> tuple[float, float] | None:
        """Return the change by the update before a sample, and the largest of those before it; None if unknown."""
        changes, samples = self.changes
        place = int(np.searchsorted(samples, sample - 1))
        if place < MIN_NEIGHBOURS or place == len(samples) or samples[place] != sample - 1:
            return None
        return float(changes[place]), float(changes[max(place - NEIGHBOURS, 0) : place].max())

    def leapt_unseen(self, sample: int) -> bool:
        """Whether the parameters' norm grew manifold in unmeasured steps just before, so that the gradient follows."""
        return sample > 0 and self.num_updates_from(sample - 1) > 1 and self.change_from(sample - 1) > _UNSEEN_LEAP

    def leapt(self, sample: int) -> tuple[str, float, float] | None:
        """Return a parameter, of any size, whose norm the update before a sample changed by more than half, and by far
        more than the updates before: its name, its norm before and its norm now."""
        first = max(sample - 1 - NEIGHBOURS, 0)
        num = sample - first
        if num <= MIN_NEIGHBOURS or np.ptp(self.history.steps[first : sample + 1]) != num:
            return None
        norm_SP = self.history.param_norm[first : sample + 1]
        change_SP = np.abs(np.diff(norm_SP, axis=0))
        limit_P = np.maximum(_UNUSUAL * change_SP[:-1].max(axis=0), MAX_LEAP * norm_SP[-2])
        is_far_P = (norm_SP[-2] > 0) & (change_SP[-1] > limit_P)
        place = int(np.argmax(is_far_P))
        return (self.history.names[place], *norm_SP[-2:, place].tolist()) if is_far_P[place] else None

    @cached_property
    def jump(self) -> tuple[float, int] | None:
        """An update just before a spike that moved the parameters far more than any before it, as no bad batch does:
        its change / the largest of the changes before, and its sample; None if there is none."""
        for spike, _ in self.spikes:
            change, most_before = self.update_before(spike) or (0.0, 0.0)
            if change >= _MIN_JUMP and (factor := change / max(most_before, 1e-12)) > _JUMP_FACTOR:
                return factor, spike - 1
        return None

    @cached_property
    def unexplained(self) -> tuple[float, int] | None:
        """An update that changed the parameters' norm far more than any before, although neither the gradient nor the
        known learning rate was unusual: the relative change, and its sample; None if there is none."""
        changes, samples = self.changes
        rate_S, norm_S = self.history.metrics.get(keys.LEARNING_RATE), self.history.total_grad_norm
        if rate_S is None:
            return None
        for place in range(MIN_NEIGHBOURS, len(samples)):
            before, sample = slice(max(place - NEIGHBOURS, 0), place), int(samples[place])
            is_far = changes[place] >= max(_MIN_JUMP, _JUMP_FACTOR * float(changes[before].max()))
            if not is_far or self.num_updates_from(sample) > 1:  # of several updates, some gradients are not known
                continue
            if all(0 <= v[sample] <= _UNUSUAL * float(v[samples[before]].max()) for v in (rate_S, norm_S)):
                return float(changes[place]), sample
        return None

    def was_moving(self, sample: int) -> bool:
        """Whether two of the last updates before a sample were already larger than any training survives."""
        changes, samples = self.changes
        is_before = (samples < sample) & (samples >= sample - NEIGHBOURS)
        return bool(np.count_nonzero(changes[is_before] > self._movement_limit(samples[is_before])) > 1)

    def grow_alike(self, sample: int) -> bool:
        """Whether all parameters, of different sizes, grew by one factor up to the next sample, as no gradient does."""
        sum_sq_SP = self.history.column(Column.PARAM_SUM_SQ)[[sample, sample + 1]]
        known_P = (self.history.num_elements[sample] >= _MIN_ELEMENTS) & (sum_sq_SP > 0).all(axis=0)
        if np.count_nonzero(known_P) < 3:
            return False
        sizes = np.sqrt(sum_sq_SP[0, known_P] / self.history.num_elements[sample, known_P])
        log_factor = 0.5 * np.log(sum_sq_SP[1, known_P] / sum_sq_SP[0, known_P])
        return bool(sizes.max() > 1.5 * sizes.min() and np.ptp(log_factor) < 0.1 * log_factor.min())

    @cached_property
    def gains(self) -> dict[str, float]:
        """Each layer's RMS weight times sqrt(fan-in) in the first sample; about 1 preserves the size of a signal."""
        return initial_gains(self.history, 0)
