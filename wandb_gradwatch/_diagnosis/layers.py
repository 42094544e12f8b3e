"""Facts about the layers in a history: typical norms over the depth, scatter, dead units, kinds of modules."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np

from .._analysis.depth import DepthTrend, trend_of
from .._analysis.layers import dead_units, modules_of, without_inputs
from .._measure.columns import FloatArray, IntArray
from ..snapshot import Snapshot
from .parameters import NEIGHBOURS

# S samples, P watched parameters, L modules, N clean samples

# Shares of a module's units: more do not die within one sample of a training; more are not off in an ordinary training.
_AT_ONCE, _MANY = 0.25, 0.9
_RECURRENT_WORDS: Final = ("weight_hh", "bias_hh", "weight_ih", "bias_ih")
_RECURRENT_KINDS: Final = ("RNN", "LSTM", "GRU", "RNNCell", "LSTMCell", "GRUCell")


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
