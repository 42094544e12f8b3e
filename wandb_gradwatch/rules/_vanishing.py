"""Gradients that fade, die or never arrive."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from .._analysis.depth import DepthTrend, depth_trends
from .._analysis.formatting import listing, number, sentence, worst_first
from .._analysis.layers import dead_units, modules_of
from .._analysis.memory import PerName
from .._measure.columns import FloatArray
from ..snapshot import Snapshot
from ._base import Alert, check_limits

# S samples, P watched parameters, L modules

_CHANCE: float = 1e-3  # that a layer which is now and then without a gradient is so as often in a row
_ARRIVED: float = 1e-6  # of the largest norm so far: what fits exactly has layers without any gradient, and is done
_ABRUPT: float = 1e3  # a fall below the floor from a norm this many times above it is no slow convergence


@dataclass(kw_only=True)
class VanishingGradient:
    """The gradient fades: all of it, or on its way back to the input: "Vanishing gradient".

    A total norm that sinks slowly below the floor is a training that has converged, and no alert; one that was below
    it from the start, or fell off a cliff, is one.

    Args:
        min_norm: a total norm above 0 and below this is too small.
        depth_factor: how much smaller the first layer's norm may be than the last one's, if the norms fall layer by
            layer (rank correlation at least `min_order`); without an order, layers differ for healthy reasons.
        min_order: see `depth_factor`.
        patience: samples in a row before it counts.
    """

    min_norm: float = 1e-7
    depth_factor: float = 1e3
    min_order: float = 0.9
    patience: int = 10
    _num_small: int = field(default=0, init=False)
    _num_faded: int = field(default=0, init=False)
    _last_large: float = field(default=math.nan, init=False)  # the newest norms that were not too small, averaged
    _converged: bool = field(default=False, init=False)

    title: ClassVar[str] = "Vanishing gradient"

    def __post_init__(self) -> None:
        check_limits(self, min_norm=(0.0, math.inf), depth_factor=(1.0, math.inf))
        check_limits(self, min_order=(0.0, 1.0), patience=(1.0, math.inf))

    def check(self, snapshot: Snapshot) -> Iterable[Alert]:
        steep = depth_trends(snapshot, above=self.depth_factor)
        for sample in np.flatnonzero(snapshot.total_grad_norm > 0).tolist():
            small = self._is_small(float(snapshot.total_grad_norm[sample]))
            trend = steep.get(sample)
            faded = trend is not None and trend.order >= self.min_order
            self._num_faded = self._num_faded + 1 if faded else 0
            if small and self._num_small >= self.patience:
                yield self._small_alert(snapshot, sample)
            elif trend is not None and self._num_faded >= self.patience:
                yield self._faded_alert(snapshot, sample, trend)

    def _is_small(self, norm: float) -> bool:
        if norm >= self.min_norm:
            self._last_large = norm if math.isnan(self._last_large) else 0.9 * self._last_large + 0.1 * norm
            self._num_small, self._converged = 0, False
            return False
        if self._num_small == 0:
            self._converged = self._last_large < _ABRUPT * self.min_norm
        self._num_small += 1
        return not self._converged

    def _small_alert(self, snapshot: Snapshot, sample: int) -> Alert:
        step, norm_P = int(snapshot.steps[sample]), snapshot.grad_norm[sample]
        fact = (
            f"Step {step}: the gradient norm is {number(snapshot.total_grad_norm[sample])}, "
            f"below {number(self.min_norm)} for {self._num_small} samples."
        )
        order = worst_first(-norm_P, range(len(norm_P)))
        layers = listing(order, lambda p: f"{snapshot.names[p]} {number(norm_P[p])}")
        cause = (
            "a saturated or dead network, a loss divided too often, or float16 gradients with too small a loss scale"
        )
        remedy = "check the loss's reduction and scale, the activations and the initialisation, or use bfloat16"
        return Alert(self.title, sentence(fact, layers, cause, remedy), step, "WARN")

    def _faded_alert(self, snapshot: Snapshot, sample: int, trend: DepthTrend) -> Alert:
        step, norm_P = int(snapshot.steps[sample]), snapshot.grad_norm[sample]
        fact = (
            f"Step {step}: the norm falls {number(trend.factor)}x from {trend.last} back to {trend.first}, layer by "
            f"layer (threshold {number(self.depth_factor)}x), for {self._num_faded} samples."
        )
        order = worst_first(-norm_P, np.flatnonzero(norm_P > 0))
        layers = listing(order, lambda p: f"{snapshot.names[p]} {number(norm_P[p])}")
        cause = "saturating activations (sigmoid, tanh) or too small an initialisation in a deep network"
        remedy = "use ReLU or GELU, residual connections, normalisation, and Kaiming or Xavier initialisation"
        return Alert(self.title, sentence(fact, layers, cause, remedy), step, "WARN")

    def state_dict(self) -> dict[str, Any]:
        return {
            "num_small": self._num_small,
            "num_faded": self._num_faded,
            "last_large": None if math.isnan(self._last_large) else self._last_large,
            "converged": self._converged,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._num_small, self._num_faded = int(state["num_small"]), int(state["num_faded"])
        self._last_large = math.nan if state["last_large"] is None else float(state["last_large"])
        self._converged = bool(state["converged"])


@dataclass(kw_only=True)
class DeadGradient:
    """Units of a layer get no gradient at all, and they are the same ones from sample to sample: "Dead gradient".

    A count of one sample says nothing: at a batch of 1 half of all ReLU units are off in every sample, though never the
    same half. That the same units are dead shows where the count does not scatter as a chance would have it. A whole
    layer without any gradient is told at the second sample if it never was so before; experts and losses that are now
    and then without one take longer by Laplace's rule of succession.

    Args:
        max_ratio: the share of a layer's units that may be dead. 5 % and 20 %, as is often read, is what an untrained
            `Linear(1, 32)` before a ReLU has (a quarter of its units fire for no input in [-1, 1]); half is not.
        patience: samples in a row before it counts: LoRA's A and all before a zero-initialised layer are dead at first.
    """

    max_ratio: float = 0.5
    patience: int = 10
    _recent: deque[FloatArray] = field(default_factory=deque, init=False, repr=False)  # shares of the last samples: [L]
    _largest: float = field(default=0.0, init=False)
    _modules: tuple[str, ...] = field(default=(), init=False, repr=False)
    _num_seen: PerName = field(default_factory=PerName, init=False, repr=False)
    _num_whole: PerName = field(default_factory=PerName, init=False, repr=False)  # samples with all dead, before
    _num_in_a_row: PerName = field(default_factory=PerName, init=False, repr=False)  # and up to now

    title: ClassVar[str] = "Dead gradient"

    def __post_init__(self) -> None:
        check_limits(self, max_ratio=(0.0, 1.0), patience=(1.0, math.inf))

    def check(self, snapshot: Snapshot) -> Iterable[Alert]:
        modules, share_SL = dead_units(snapshot)
        if modules != self._modules:
            places = [self._modules.index(name) if name in self._modules else -1 for name in modules]
            self._recent = deque(np.append(shares, np.nan)[places] for shares in self._recent)
            self._modules = modules
        seen_L, whole_L, row_L = (kept.of(modules) for kept in (self._num_seen, self._num_whole, self._num_in_a_row))
        for sample in np.flatnonzero(snapshot.total_grad_norm > 0).tolist():  # nothing at all is NoGradient's
            self._largest = max(self._largest, float(snapshot.total_grad_norm[sample]))
            if snapshot.total_grad_norm[sample] < _ARRIVED * self._largest:
                continue
            share_L = share_SL[sample]
            present_L, all_dead_L = ~np.isnan(share_L), share_L == 1.0
            alive_L = present_L & ~all_dead_L
            whole_L[alive_L] += row_L[alive_L]
            row_L[alive_L], row_L[all_dead_L] = 0, row_L[all_dead_L] + 1
            seen_L[present_L] += 1
            before_L = seen_L - row_L
            chance_L = ((whole_L + 1) / (before_L + 2)) ** row_L
            suddenly_L = all_dead_L & (chance_L < _CHANCE) & (row_L >= 2)
            self._recent.append(share_L)
            if len(self._recent) > self.patience:
                self._recent.popleft()
            dead_L = suddenly_L | self._are_the_same(snapshot, sample)
            if dead_L.any():
                yield self._alert(snapshot, sample, share_L, np.flatnonzero(dead_L)[::-1].tolist())

    def _are_the_same(self, snapshot: Snapshot, sample: int) -> npt.NDArray[np.bool_]:
        """Layers with too many dead units in each of the last samples, so equally many that they must be the same."""
        has_many_L: npt.NDArray[np.bool_] = self._recent[-1] > self.max_ratio
        if len(self._recent) < self.patience or not has_many_L.any():
            return np.zeros_like(has_many_L)
        recent = np.stack(self._recent)
        least_L, spread_L = recent.min(axis=0), recent.max(axis=0) - recent.min(axis=0)
        modules = modules_of(snapshot.names)
        size_L = np.full(len(modules.names), np.inf)
        np.fmin.at(size_L, modules.of_parameter, snapshot.num_elements[sample])  # a bias has one element per unit
        mean_L = recent.mean(axis=0)
        with np.errstate(invalid="ignore"):
            scatter_L = np.sqrt(mean_L * (1 - mean_L) / size_L)
            same: npt.NDArray[np.bool_] = (least_L > self.max_ratio) & (spread_L <= scatter_L)
        return same

    def _alert(self, snapshot: Snapshot, sample: int, share_L: FloatArray, dead: list[int]) -> Alert:
        step, modules = int(snapshot.steps[sample]), modules_of(snapshot.names)
        first = {int(place): name for name, place in zip(snapshot.names[::-1], modules.of_parameter[::-1], strict=True)}
        fact = (
            f"Step {step}: the same units of {len(dead)} of {len(modules.names)} layers, more than "
            f"{100 * self.max_ratio:.0f} % of each, have no gradient in sample after sample; of these layers "
            f"{first[dead[0]]} is nearest to the output."
        )
        layers = listing(dead, lambda index: f"{first[index]} {100 * share_L[index]:.0f} %")
        cause = "dead units: ReLUs that never fire, or a layer whose output is multiplied by 0 or not used"
        remedy = (
            "check what follows the layer nearest to the output (masks, dropout, its use), its bias and its "
            "initialisation; lower the learning rate, use LeakyReLU or GELU"
        )
        return Alert(self.title, sentence(fact, layers, cause, remedy), step, "WARN")

    def state_dict(self) -> dict[str, Any]:
        return {
            "largest": self._largest,
            "modules": list(self._modules),
            "recent": [shares.tolist() for shares in self._recent],  # NaN where a layer was missing
            "num_seen": self._num_seen.state_dict(),
            "num_whole": self._num_whole.state_dict(),
            "num_in_a_row": self._num_in_a_row.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._largest, self._modules = float(state["largest"]), tuple(state["modules"])
        self._recent = deque(np.array(shares, dtype=np.float64) for shares in state["recent"])
        for name in ("num_seen", "num_whole", "num_in_a_row"):
            getattr(self, f"_{name}").load_state_dict(state[name])


@dataclass(kw_only=True)
class NoGradient:
    """Parameters whose gradient does not arrive, or gradients that are all exactly 0: "No gradient".

    What is not trainable, by the snapshot, needs no gradient.

    Args:
        patience: samples in a row in which a watched parameter had no gradient.
        zero_patience: samples in a row in which all gradients were exactly 0.
    """

    patience: int = 100
    zero_patience: int = 10
    _num_missing: PerName = field(default_factory=PerName, init=False, repr=False)
    _num_zero: int = field(default=0, init=False)
    _is_often_zero: bool = field(default=False, init=False)  # a hinge loss whose samples are satisfied, now and then

    title: ClassVar[str] = "No gradient"

    def __post_init__(self) -> None:
        check_limits(self, patience=(1.0, math.inf), zero_patience=(1.0, math.inf))

    def check(self, snapshot: Snapshot) -> Iterable[Alert]:
        count_P = self._num_missing.of(snapshot.names)
        missing_SP = np.isnan(snapshot.num_elements)
        if not missing_SP.any() and (snapshot.total_grad_norm > 0).all():  # as nearly always: no sample needs a look
            self._is_often_zero |= self._num_zero > 0
            count_P[:], self._num_zero = 0, 0
            return
        for sample, missing_P in enumerate(missing_SP):
            count_P[missing_P] += 1
            count_P[~missing_P] = 0
            all_zero = snapshot.total_grad_norm[sample] == 0 and not np.any(snapshot.num_nonfinite[sample] > 0)
            self._is_often_zero |= self._num_zero > 0 and not all_zero
            self._num_zero = self._num_zero + 1 if all_zero else 0
            if self._num_zero >= self.zero_patience and not self._is_often_zero:
                yield self._zero_alert(int(snapshot.steps[sample]))
            elif (late := np.flatnonzero((count_P >= self.patience) & snapshot.trainable)).size:
                yield self._missing_alert(int(snapshot.steps[sample]), snapshot.names, count_P, late)

    def _zero_alert(self, step: int) -> Alert:
        fact = (
            f"Step {step}: all gradients have been exactly 0 for {self._num_zero} samples "
            f"(threshold {self.zero_patience})."
        )
        cause = "gradients zeroed between backward() and step(), a constant loss, or an underflow of float16 gradients"
        remedy = "call zero_grad() before backward(), not after it; check the loss; use GradScaler or bfloat16"
        return Alert(self.title, sentence(fact, "", cause, remedy), step, "WARN")

    def _missing_alert(
        self, step: int, names: tuple[str, ...], count_P: FloatArray, late: npt.NDArray[np.intp]
    ) -> Alert:
        missing = worst_first(count_P, late.tolist())
        fact = (
            f"Step {step}: {len(missing)} of {len(names)} watched parameters have had no gradient for "
            f"{self.patience} samples or more."
        )
        layers = listing(missing, lambda p: f"{names[p]} ({count_P[p]:.0f} samples)")
        cause = "layers frozen by mistake, detached from the loss, or not used by the forward"
        remedy = "check requires_grad, detach() and torch.no_grad(); exclude= what is frozen on purpose"
        return Alert(self.title, sentence(fact, layers, cause, remedy), step, "WARN")

    def state_dict(self) -> dict[str, Any]:
        return {
            "num_missing": self._num_missing.state_dict(),
            "num_zero": self._num_zero,
            "is_often_zero": self._is_often_zero,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._num_missing.load_state_dict(state["num_missing"])
        self._num_zero, self._is_often_zero = int(state["num_zero"]), bool(state["is_often_zero"])
