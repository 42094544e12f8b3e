"""Facts about the parameters and the layers in a history: sizes, updates, norms over the depth, dead units, kinds."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np

from .._analysis.layers import DepthTrend, dead_units, initial_gains, modules_of, trend_of, without_inputs
from .._measure.columns import Column, FloatArray, IntArray
from ..snapshot import Snapshot, keys

# S samples, P watched parameters, L modules, N clean samples, or samples with a known update

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
# Shares of a module's units: more do not die within one sample of a training; more are not off in an ordinary training.
_AT_ONCE, _MANY = 0.25, 0.9
_RECURRENT_WORDS: Final = ("weight_hh", "bias_hh", "weight_ih", "bias_ih")
_RECURRENT_KINDS: Final = ("RNN", "LSTM", "GRU", "RNNCell", "LSTMCell", "GRUCell")


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
        num_N = np.maximum(np.diff(self.history.steps[known]), 1)  # a sample that the loop left out makes no step
        of_update_N = np.diff(0.5 * np.log(total_S[known])) / num_N
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


@dataclass(frozen=True, eq=False)
class Layers:
    """The layers in a history."""

    history: Snapshot
    clean: IntArray  # [N] indices of the samples with a finite, non-zero gradient
    kinds: Mapping[str, str]  # the class name of each module by its name; {} if unknown

    @cached_property
    def by_module(self) -> Snapshot:
        return self.history.by_group("module")

    @cached_property
    def depth(self) -> DepthTrend | None:
        """The trend over the depth of the modules' typical norms in the clean samples; None if there is none."""
        return trend_of(self.by_module.names, _median_or_nan(self.by_module.grad_norm[self.clean]))

    @cached_property
    def first_depth(self) -> DepthTrend | None:
        """The same trend in the first clean sample."""
        first = self.clean[:1]
        return trend_of(self.by_module.names, self.by_module.grad_norm[first[0]]) if first.size else None

    @cached_property
    def scatter_L(self) -> FloatArray:
        """The typical change of each module's log norm from sample to sample: [L]."""
        norm_NL = self.by_module.grad_norm[self.clean]
        log_NL = np.log(np.where(norm_NL > 0, norm_NL, np.nan))
        # The median of the changes, which neither a trend nor a single spike makes large.
        return _median_or_nan(np.abs(np.diff(log_NL, axis=0)))

    @cached_property
    def _dead_NL(self) -> FloatArray:
        return dead_units(self.history.names, self.history.dead_ratio)[self.clean]

    @cached_property
    def dead_L(self) -> FloatArray:
        """Each module's typical share of dead units in the newest clean samples: [L]."""
        return _median_or_nan(self._dead_NL[-20:])

    def died_one_by_one(self, place: int) -> bool | None:
        """Whether nine tenths of a module's units are dead, more than at first, and in no sample more than a quarter
        died; None if more died over several steps of which only the last was measured."""
        share_N = self._dead_NL[:, place]
        if not (share_N[-1] > np.fmin.reduce(share_N) and share_N[-1] >= _MANY):
            return False
        rise_N = np.nan_to_num(np.diff(share_N))
        if rise_N.max() <= _AT_ONCE:
            return True
        return None if np.diff(self.history.steps[self.clean])[rise_N.argmax()] > 1 else False

    def is_next_fed(self, place: int) -> bool | None:
        """Whether the next module has inputs other than 0; None if it is dead too, or this one was not always dead.

        In a module whose inputs are 0 only the bias has a gradient. A module that saturates later had one at first.
        """
        share_NL = self._dead_NL
        is_first = self.history.steps[self.clean[0]] == 1
        if place + 1 == share_NL.shape[1] or not (is_first and (share_NL[:, place] == 1.0).all()):
            return None
        if without_inputs(self.history.names, self.history.dead_ratio[self.clean[-1]])[place + 1]:
            return False
        return True if share_NL[-1, place + 1] < 1.0 else None

    def all_bad(self, sample: int) -> bool:
        """Whether the gradient of every module that has one is not finite."""
        return bool((self.by_module.num_nonfinite[sample, self.by_module.present[sample]] > 0).all())

    def rise_at(self, sample: int, *, of_parameters: bool = False) -> FloatArray:
        """Return each module's norm in a sample / its median in the clean samples before, NaN if unknown: [L]; or
        the same ratio for each parameter: [P]."""
        norm_SN = (self.history if of_parameters else self.by_module).grad_norm
        before = self.clean[self.clean < sample][-NEIGHBOURS:]
        with np.errstate(divide="ignore", invalid="ignore"):
            rise_N = norm_SN[sample] / _median_or_nan(norm_SN[before])
        return np.where(np.isfinite(rise_N), rise_N, np.nan)

    def split(self, place: int) -> tuple[list[int], list[int]]:
        """Return the indices of a module's weights and of its biases.

        A bias has the gradient of the module's output; a weight has that gradient times the module's input.
        """
        modules = modules_of(self.history.names)
        own = np.flatnonzero(modules.of_parameter == place)
        return own[~modules.is_bias[own]].tolist(), own[modules.is_bias[own]].tolist()

    def batch_norms(self) -> list[int]:
        """Return the indices of the batch norms: by the modules' classes, otherwise by a weight as long as the bias."""
        size_P = np.max(np.nan_to_num(self.history.num_elements), axis=0)
        modules, places = modules_of(self.history.names), []
        for place, module in enumerate(modules.names):
            kind, sizes = self.kinds.get(module), size_P[modules.of_parameter == place]
            as_long = len(sizes) == 2 and sizes[0] == sizes[1]
            looks_like = as_long and "ln" not in module and "layernorm" not in module.lower()
            if looks_like if kind is None else "BatchNorm" in kind:
                places.append(place)
        return places

    def is_normalisation(self, place: int) -> bool:
        """Whether a module is a normalisation, which divides by a deviation: a batch norm or another kind."""
        return place in self.batch_norms() or "Norm" in self.kinds.get(self.by_module.names[place], "")

    def recurrent(self) -> list[int]:
        """Return the indices of recurrent parameters, by the class of their module or by torch's names for them."""
        return [
            index
            for index, name in enumerate(self.history.names)
            if self.kinds.get(name.rpartition(".")[0]) in _RECURRENT_KINDS
            or any(word in name.rpartition(".")[2] for word in _RECURRENT_WORDS)
        ]

    def is_before_relu(self, module: str) -> bool:
        """Whether the next module is known to be a ReLU, whose output is 0 for inputs below 0."""
        following = dict(zip(self.kinds, [*self.kinds.values()][1:], strict=False))
        return following.get(module) in ("ReLU", "ReLU6")

    def has_kind(self, kinds: Sequence[str]) -> str | None:
        """Return the first of these class names that the model has; None if it has none, or if they are unknown."""
        return next((kind for kind in kinds if kind in self.kinds.values()), None)


def _median_or_nan(values_NL: FloatArray) -> FloatArray:
    """Return the median over the samples of the values that are not missing: [L]."""
    present = ~np.isnan(values_NL)
    filled = [values_NL[present[:, index], index] for index in range(values_NL.shape[1])]
    return np.array([float(np.median(column)) if column.size else np.nan for column in filled])
