"""What a history shows, measured once for all patterns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Final

import numpy as np
import numpy.typing as npt

from ..rules.baseline import Growth, steady_growth
from ..rules.depth import DepthTrend, trend_of
from ..rules.layers import dead_units, modules_of
from ..snapshot import Snapshot
from ..statistics.columns import Column, FloatArray

# S samples, P watched parameters, L modules, R ranks

SPIKE_FACTOR: Final = 5.0
MAX_MOVEMENT: Final = 0.08
MAX_FIRST_MOVEMENT: Final = 0.15
_FIRST_STEPS: Final = 5
MAX_LEAP: Final = 0.5
_MIN_JUMP: Final = (
    0.005  # of the parameters' norm, by one update; healthy ones are a tenth of that once a run is under way
)
_JUMP_FACTOR: Final = 20.0
_ALONE_FACTOR: Final = 3.0
_NEIGHBOURS: Final = 16  # samples on each side that a spike is compared with
_MIN_NEIGHBOURS: Final = 5
_MOVEMENT_SAMPLES: Final = 5
_RECURRENT_WORDS: Final = ("weight_hh", "bias_hh", "weight_ih", "bias_ih")
RECURRENT_KINDS: Final = ("RNN", "LSTM", "GRU", "RNNCell", "LSTMCell", "GRUCell")


class Evidence:
    """A history and what may be known besides it.

    Args:
        history: samples of one training, oldest first.
        modules: the class name of each module by its name, as `named_modules()` gives them; patterns that ask for a
            kind of module fall back to names and numbers without it.
        batch_size: samples per batch, where known.
        rank_grad_norm: [S, R] each rank's own total gradient norm, NaN where it was non-finite.
        notes: what the user said about a step.
    """

    def __init__(
        self,
        history: Snapshot,
        *,
        modules: Mapping[str, str] | None = None,
        batch_size: int | None = None,
        rank_grad_norm: FloatArray | None = None,
        notes: Mapping[int, Mapping[str, object]] | None = None,
    ) -> None:
        self.history = history
        self.modules = modules or {}
        self.batch_size = batch_size
        self.rank_grad_norm = rank_grad_norm
        self.notes = notes or {}

    def step(self, sample: int) -> int:
        return int(self.history.steps[sample])

    def note_of(self, sample: int) -> str:
        """What the user noted about a sample, as the end of a sentence."""
        note = self.notes.get(self.step(sample))
        return "" if not note else " (noted: " + ", ".join(f"{key} {value}" for key, value in note.items()) + ")"

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

    def began_with_inf(self, sample: int) -> bool:
        """Whether the first bad layer in the backward's order has Inf: what comes after it may be NaN for that."""
        bad = np.flatnonzero(self.by_module.num_nonfinite[sample] > 0)
        return bool(bad.size) and bool(self.by_module.num_inf[sample, bad[-1]] > 0)

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
            aftermath = _length_of_run((after > usual + np.log(SPIKE_FACTOR)) & (after < norm))
            others = np.sort(np.concatenate([before, after[aftermath:]]))
            is_alone = norm > others[-2] + np.log(_ALONE_FACTOR)
            if norm - usual > max(np.log(SPIKE_FACTOR), 6 * scatter) and back and is_alone:
                found.append((int(self.clean[place]), float(np.exp(min(norm - usual, 700.0)))))
                place += aftermath
            place += 1
        return found

    # ---- the parameters

    @cached_property
    def changes(self) -> tuple[FloatArray, npt.NDArray[np.int64]]:
        """|relative change| of the parameters' total norm by each update, and the samples of these updates."""
        sum_sq_SP = self.history.column(Column.PARAM_SUM_SQ)
        broken_S = np.nansum(self.history.column(Column.PARAM_NUM_NONFINITE), axis=1) > 0
        together_P = ~np.any(np.isnan(sum_sq_SP), axis=0)  # one set of parameters, or the norm changes with the set
        total_S = np.sum(sum_sq_SP[:, together_P], axis=1)
        known = np.flatnonzero((total_S > 0) & np.isfinite(total_S) & ~broken_S)
        return np.abs(np.expm1(np.clip(np.diff(0.5 * np.log(total_S[known])), -700, 700))), known[:-1]

    @cached_property
    def movement(self) -> tuple[float, int] | None:
        """How fast the parameters move for some steps in a row, and the sample where that began; None if unknown.

        The second largest change of five in a row, the largest over all such stretches: one giant update can be a bad
        batch, two in a row are a learning rate.
        """
        changes, samples = self.changes
        if len(changes) < 2:
            return None
        length = min(_MOVEMENT_SAMPLES, len(changes))
        lesser = np.sort(np.lib.stride_tricks.sliding_window_view(changes, length), axis=1)[:, -2]
        place = int(np.argmax(lesser / self._movement_limit(samples[: len(lesser)])))
        return float(lesser[place]), int(samples[place])

    def _movement_limit(self, samples_N: npt.NDArray[np.int64]) -> FloatArray:
        """How fast the parameters may move from these samples on: the first steps of adaptive optimizers are large."""
        return np.where(self.history.steps[samples_N] <= _FIRST_STEPS, MAX_FIRST_MOVEMENT, MAX_MOVEMENT)

    @cached_property
    def leap(self) -> tuple[float, int] | None:
        """An ordinary sample whose update changed the parameters' norm by half or more: the change, the sample."""
        changes, samples = self.changes
        spiky = {sample for sample, _ in self.spikes}
        leaps = [(float(c), int(s)) for c, s in zip(changes, samples, strict=True) if c > MAX_LEAP and s not in spiky]
        return leaps[0] if leaps else None

    @cached_property
    def jump(self) -> tuple[float, float, int] | None:
        """An update just before a spike that moved the parameters far more than any of those before it.

        A bad batch moves them after its spike, not before.

        Returns:
            The relative change of the parameters' norm, how many times the largest of the 16 before it that is, and the
            sample of the update; None where there is none.
        """
        changes, samples = self.changes
        for spike, _ in self.spikes:
            place = int(np.searchsorted(samples, spike - 1))
            if place == len(samples) or samples[place] != spike - 1:
                continue
            before = changes[max(place - _NEIGHBOURS, 0) : place]
            if len(before) < _MIN_NEIGHBOURS or changes[place] < _MIN_JUMP:
                continue
            factor = float(changes[place] / max(float(before.max()), 1e-12))
            if factor > _JUMP_FACTOR:
                return float(changes[place]), factor, int(samples[place])
        return None

    @property
    def is_moving(self) -> bool:
        """The parameters move faster than any training survives: healthy ones stay below 5 % per step."""
        if self.movement is None:
            return False
        change, sample = self.movement
        return change > float(self._movement_limit(np.array([sample]))[0])

    @cached_property
    def gains(self) -> list[tuple[str, float]]:
        """Each layer's RMS weight times sqrt(fan-in) in the first sample: about 1 keeps a signal's size.

        The fan-in is the number of a weight's elements over that of its bias, so layers without a bias are left out,
        and so are normalisation layers, whose weight and bias are equally many.
        """
        names = {name: index for index, name in enumerate(self.history.names)}
        size_P, sum_sq_P = self.history.num_elements[0], self.history.column(Column.PARAM_SUM_SQ)[0]
        found = []
        for name, weight in names.items():
            module, _, parameter = name.rpartition(".")
            bias = names.get(f"{module}.{parameter.replace('weight', 'bias')}") if "weight" in parameter else None
            if bias is None or not size_P[weight] > size_P[bias] or not sum_sq_P[weight] >= 0:
                continue
            fan_in = size_P[weight] / size_P[bias]
            found.append((name, float(np.sqrt(sum_sq_P[weight] / size_P[weight] * fan_in))))
        return found

    # ---- the layers

    @cached_property
    def by_module(self) -> Snapshot:
        return self.history.by_group("module")

    @cached_property
    def module_norm_L(self) -> FloatArray:
        """Each module's median norm over the clean samples, NaN where it has none."""
        return _median_or_nan(self.by_module.grad_norm[self.clean])

    @cached_property
    def depth(self) -> DepthTrend | None:
        """How the typical norm changes over the depth."""
        return trend_of(self.by_module.names, self.module_norm_L)

    @cached_property
    def first_depth(self) -> DepthTrend | None:
        """The same at the first clean sample."""
        first = self.clean[:1]
        return trend_of(self.by_module.names, self.by_module.grad_norm[first[0]]) if first.size else None

    @cached_property
    def scatter_L(self) -> FloatArray:
        """How much each module's log norm scatters from sample to sample."""
        norm_NL = self.by_module.grad_norm[self.clean]
        log_NL = np.log(np.where(norm_NL > 0, norm_NL, np.nan))
        change_NL = np.diff(log_NL, axis=0)
        # A median of changes, because a trend is no scatter and one spike is none either.
        return _median_or_nan(np.abs(change_NL))

    @cached_property
    def dead_L(self) -> tuple[tuple[str, ...], FloatArray]:
        """Each module's typical share of dead units over the newest clean samples."""
        names, share_SL = dead_units(self.history)
        return names, _median_or_nan(share_SL[self.clean[-20:]])

    def batch_norms(self) -> list[int]:
        """Places of the batch norms among the modules: by their kind, else by a weight as long as its bias."""
        size_P = np.max(np.nan_to_num(self.history.num_elements), axis=0)
        sizes: list[list[float]] = [[] for _ in self.by_module.names]
        for place, size in zip(modules_of(self.history.names).of_parameter, size_P.tolist(), strict=True):
            sizes[place].append(size)
        places = []
        for place, module in enumerate(self.by_module.names):
            kind = self.modules.get(module)
            as_long = len(sizes[place]) == 2 and sizes[place][0] == sizes[place][1]
            looks_like = as_long and "ln" not in module and "layernorm" not in module.lower()
            if looks_like if kind is None else "BatchNorm" in kind:
                places.append(place)
        return places

    def recurrent(self) -> list[int]:
        """Indices of the recurrent parameters, by the kind of their module or by torch's names for them."""
        return [
            index
            for index, name in enumerate(self.history.names)
            if self.modules.get(name.rpartition(".")[0]) in RECURRENT_KINDS
            or any(word in name.rpartition(".")[2] for word in _RECURRENT_WORDS)
        ]

    def has_kind(self, kinds: Sequence[str]) -> str | None:
        """The first of these kinds that the model has; None if it has none or the kinds are not known."""
        return next((kind for kind in kinds if kind in self.modules.values()), None)


def _length_of_run(flags_N: npt.NDArray[np.bool_]) -> int:
    """How many flags at the beginning are set."""
    return len(flags_N) if flags_N.all() else int(np.argmin(flags_N))


def _median_or_nan(values_NL: FloatArray) -> FloatArray:
    """The median over the samples of what is not missing: [L]."""
    present = ~np.isnan(values_NL)
    filled = [values_NL[present[:, index], index] for index in range(values_NL.shape[1])]
    return np.array([float(np.median(column)) if column.size else np.nan for column in filled])
