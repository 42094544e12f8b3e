"""Rule for gradients that vanish."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final

import numpy as np
import numpy.typing as npt

from .._analysis.formatting import listing, number, worst_first
from .._analysis.layers import MIN_WEIGHTS, depth_trends, modules_of
from .._analysis.memory import PerName, Streaks
from .._measure.columns import Column, FloatArray
from ..snapshot import Snapshot, keys
from ..snapshot._arrays import LEAST_SUM_SQ
from ..snapshot._overview import Overview
from ._base import FROM_0, FROM_1, SHARE, Alert, Bounds, PerKindRule, values_of

# S samples, P watched parameters, L modules

_CERTAIN: Final = 5  # number of samples in a row that no healthy training has
_FAINT: Final = 1e-20  # share of the largest gradient; one that cancels up to rounding has 1e-9, in float64 1e-17
_ROUNDED: Final = 1e-7  # the same for weights, which do not cancel as biases may: float32 ends. Healthy: from 1e-4
_ROUNDED_FOR, _RISES = 20, 3.0  # samples in a row that show it, in which the share rises by less than this factor
_TINY_LOSS: Final = 1e-6
_NOTHING: Final = 1e-12  # share of the parameters' norm; no training begins with a smaller gradient
_SMALLEST_NORMAL, _SMALLEST = 2.0**-14, 2.0**-24  # the smallest normal and the smallest positive float16
_STEEP: Final = 1e6  # fall of the norm over the depth, as a factor, that needs only three samples
_RECOVERED: Final = 0.25  # share of the steepest fall so far; a smaller fall belonged to the first steps and is over
_ABRUPT: Final = 1e3  # a fall below the floor from a norm this many times above it is no slow convergence
# kind of finding -> (probable cause, remedy)
_CAUSES: Final[dict[str, tuple[str, str]]] = {
    "small": (
        "a saturated or dead network, a loss divided too often, or float16 gradients with too small a loss scale",
        "check the loss's reduction and scale, the activations and the initialisation, or use bfloat16",
    ),
    "faded": (
        "saturating activations (sigmoid, tanh) or too small an initialisation in a deep network",
        "use ReLU or GELU, residual connections, normalisation, and Kaiming or Xavier initialisation",
    ),
    "faint": (
        "not clear: either a saturated gate, router or activation, or a factor of almost 0 on the way back to these "
        "layers (a residual or loss weight, many small factors through depth or time); the outputs of what follows "
        "them tell them apart",
        "check what follows these layers: gates, scales, weights of the loss; normalise its inputs",
    ),
    "coarse": ("float16 underflow", "use torch.amp.GradScaler, divide the loss by less, or use bfloat16"),
}


@dataclass(kw_only=True)
class VanishingGradient(PerKindRule):
    """Raises the alert "Vanishing gradient" if the total norm is too small, or norms fall layer by layer to the input.

    A total norm that sinks slowly below the floor is convergence and raises no alert; a norm that was below it from the
    start, or fell abruptly, does. So do weights whose gradients are below 1e-7 of the largest one, other parameters
    below 1e-20 (rounding leaves 1e-9), and float16 gradients of which only the smallest float16 numbers are left.

    Args:
        min_norm: the floor: a total norm above 0 and below it is too small.
        depth_factor: how many times smaller the first layer's norm may be than the last one's, if the norms fall layer
            by layer. Without such an order, layers differ for healthy reasons.
        min_order: smallest rank correlation of norm and depth that counts as such an order.
        patience: number of samples in a row that raises the alert.
    """

    min_norm: float = 1e-7
    depth_factor: float = 1e3
    min_order: float = 0.9
    patience: int = 10
    _num_small: int = field(default=0, init=False)
    _num_faded: int = field(default=0, init=False)
    _steepest: float = field(default=0.0, init=False)  # the largest factor among these samples
    _last_large: float = field(default=math.nan, init=False)  # the last norm above the floor
    _usual_large: float = field(default=math.nan, init=False)  # moving geometric mean of these norms
    _converged: bool = field(default=False, init=False)
    _faint: Streaks = field(default_factory=Streaks, init=False, repr=False)
    _rounded: Streaks = field(default_factory=Streaks, init=False, repr=False)
    # The smallest norm of each parameter, as a share of the largest parameter's
    _least_share: PerName = field(default_factory=lambda: PerName(math.inf), init=False, repr=False)
    _num_coarse: int = field(default=0, init=False)

    title: ClassVar[str] = "Vanishing gradient"
    judges_updates: ClassVar[bool] = True
    bounds: ClassVar[Bounds] = {"min_norm": FROM_0, "depth_factor": FROM_1, "min_order": SHARE, "patience": FROM_1}

    def prepared(self, snapshot: Snapshot, samples: Sequence[Overview]) -> Iterable[tuple[Overview, Any]]:
        trends, are_coarse = depth_trends(snapshot, above=self.depth_factor), _are_coarse(snapshot)
        return [(sample, (trends[sample.place], are_coarse[sample.place])) for sample in samples]

    def check_sample(self, snapshot: Snapshot, sample: Overview, value: Any, /) -> Iterable[Alert]:
        if not sample.norm > 0:
            return
        trend, is_coarse = value
        small, faded = self._is_small(sample.norm), trend is not None and trend.order >= self.min_order
        self._num_faded = self._num_faded + 1 if faded else 0
        self._steepest = max(self._steepest, trend.factor) if faded else 0.0
        is_nothing = sample.norm < _NOTHING * math.sqrt(sample.sums[Column.PARAM_SUM_SQ])
        is_steep = trend is not None and (
            self._num_faded >= 3
            if trend.factor > _STEEP
            else self._num_faded >= self.patience and trend.factor > _RECOVERED * self._steepest
        )
        if small and self._num_small >= (2 if is_nothing and math.isnan(self._last_large) else self.patience):
            how_long = f"for {self._num_small} samples."
            words = f"the gradient norm is {number(sample.norm)}, below {number(self.min_norm)} {how_long}"
            yield self._alert(snapshot, sample, "small", words, range(len(snapshot.names)))
        elif is_steep:
            words = (
                f"the norm falls {number(trend.factor)}x from {trend.last} back to {trend.first}, layer by layer "
                f"(threshold {number(self.depth_factor)}x), for {self._num_faded} samples."
            )
            present = np.flatnonzero(snapshot.grad_norm[sample.place] > 0)
            yield self._alert(snapshot, sample, "faded", words, present)
        elif (faint := self._faint_at(snapshot, sample)).size:
            words = (
                f"the gradients of {len(faint)} of {len(snapshot.names)} parameters have been less than "
                f"{number(_ROUNDED)} of the largest one for sample after sample: no more than rounding."
            )
            yield self._alert(snapshot, sample, "faint", words, faint)
        self._num_coarse = self._num_coarse + 1 if is_coarse else 0
        if self._num_coarse >= _CERTAIN:
            words = (
                f"for {_CERTAIN} samples or more, most gradients are below 2^-14 and their smallest elements are "
                "multiples of 2^-24, the smallest number of float16: smaller elements have become 0."
            )
            yield self._alert(snapshot, sample, "coarse", words, [])

    def _faint_at(self, snapshot: Snapshot, sample: Overview) -> npt.NDArray[np.intp]:
        """Return the indices of parameters whose gradients have been tiny beside the largest one for some samples."""
        names, squares_P = snapshot.names, sample.rows[:, Column.GRAD_SUM_SQ]
        # The usual case, in which no gradient is missing or faint, is clear from the sum of all.
        is_usual = sample.least_sum_sq > max(LEAST_SUM_SQ, _ROUNDED**2 * sample.sums[Column.GRAD_SUM_SQ])
        if is_usual or _are_present(names, squares_P):
            self._faint.end(names, 1)
            self._rounded.end(names, 1)
            return np.zeros(0, dtype=np.intp)
        norm_P = snapshot.grad_norm[sample.place]
        present_P, are_weights_P = norm_P > 0, ~modules_of(names).is_bias
        share_P = norm_P / np.max(norm_P, initial=0.0, where=present_P)
        least_P = self._least_share.of(names)
        np.fmin(least_P, share_P, out=least_P, where=present_P)
        # Behind a gate that opens, as a layer scale of 1e-6 does, gradients rise: only rounding stays what it is.
        rounded_P = are_weights_P & (sample.rows[:, Column.NUM_ELEMENTS] >= MIN_WEIGHTS)
        rounded_P &= present_P & (share_P < _ROUNDED) & (share_P < _RISES * least_P)
        found_P = self._rounded.last(names, rounded_P, _ROUNDED_FOR, present_P)
        return np.flatnonzero(found_P | self._faint.last(names, present_P & (share_P < _FAINT), _CERTAIN, present_P))

    def _is_small(self, norm: float) -> bool:
        if norm >= self.min_norm:
            # A geometric mean, because after convergence one batch in ten has a norm a thousand times as large.
            before = norm if math.isnan(self._usual_large) else self._usual_large
            self._last_large, self._usual_large = norm, before**0.9 * norm**0.1
            self._num_small, self._converged = 0, False
            return False
        if self._num_small == 0:  # with steps between samples, the mean lags behind a convergence
            self._converged = min(self._last_large, self._usual_large) < _ABRUPT * self.min_norm
        self._num_small += 1
        return not self._converged

    def _alert(self, snapshot: Snapshot, sample: Overview, kind: str, words: str, which: npt.ArrayLike) -> Alert:
        norm_P, (cause, remedy) = snapshot.grad_norm[sample.place], _CAUSES[kind]
        layers = listing(worst_first(-norm_P, which), lambda p: f"{snapshot.names[p]} {number(norm_P[p])}")
        loss = values_of(snapshot, keys.LOSS)[sample.place]
        if kind == "small" and abs(loss) < _TINY_LOSS:
            cause = (
                f"not clear: either too small a loss ({number(loss)}), divided too often or of too small a weight, or "
                "a tiny scale of the targets; a look at the targets tells them apart"
            )
        return self._finding(sample.step, words, cause, remedy, layers=layers)


def _are_present(names: tuple[str, ...], squares_P: FloatArray) -> bool:
    """Whether no gradient is missing or faint."""
    most, least = np.max(squares_P, initial=-math.inf), np.min(squares_P, initial=math.inf)
    least_weight = np.min(squares_P, where=~modules_of(names).is_bias, initial=math.inf)
    return bool(least > max(LEAST_SUM_SQ, _FAINT**2 * most) and least_weight > _ROUNDED**2 * most)


def _are_coarse(snapshot: Snapshot) -> list[bool]:
    """Whether most gradient elements belong to gradients that are multiples of the smallest float16 number."""
    scale_S1 = np.array([[1.0 if math.isnan(scale) else scale] for scale in snapshot.loss_scale.tolist()])
    steps_SP = snapshot.column(Column.GRAD_ABS_MIN_NONZERO) * (scale_S1 / _SMALLEST)
    are_coarse_SP = steps_SP == np.rint(steps_SP)
    if not np.count_nonzero(are_coarse_SP):
        return [False] * len(snapshot)  # the usual case: no gradient consists of such multiples
    largest_SP = np.maximum(snapshot.column(Column.GRAD_MAX), -snapshot.column(Column.GRAD_MIN)) * scale_S1
    are_coarse_SP &= (steps_SP >= 1) & (largest_SP < _SMALLEST_NORMAL)
    size_SP = np.where(largest_SP > 0, snapshot.num_elements, 0.0)
    are_coarse_S = size_SP.sum(axis=1, where=are_coarse_SP) > 0.5 * size_SP.sum(axis=1)
    coarse: list[bool] = are_coarse_S.tolist()
    return coarse
