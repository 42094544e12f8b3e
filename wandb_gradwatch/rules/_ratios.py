"""Ratios between gradient and parameter and between layers. Useful to look at; not alarmed by default (see each)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from .._analysis.formatting import listing, number, worst_first
from .._analysis.memory import Streaks
from .._measure.columns import FloatArray
from ..snapshot import Snapshot
from ._base import FROM_0, FROM_1, Alert, Bounds, ShippedRule, finding

# S samples, P watched parameters, L modules


@dataclass(kw_only=True)
class GradParamRatio(ShippedRule):
    """A gradient's norm is out of proportion to its parameter's: "Gradient to parameter ratio".

    Not among the default rules: the ratio of a summed loss is healthy above 1, that of a finished training below 1e-6,
    and an adaptive optimizer cares for neither. It is missing, and never alarmed, for a parameter that is all zero.

    Args:
        max_ratio: more is too much.
        min_ratio: less is too little; a gradient that is exactly 0 is another rule's.
        patience: samples in a row in which a parameter's ratio was outside.
    """

    max_ratio: float = 1.0
    min_ratio: float = 1e-6
    patience: int = 10
    _outside: Streaks = field(default_factory=Streaks, init=False, repr=False)

    title: ClassVar[str] = "Gradient to parameter ratio"
    bounds: ClassVar[Bounds] = {"max_ratio": FROM_0, "min_ratio": FROM_0, "patience": FROM_1}

    def check(self, snapshot: Snapshot) -> Iterable[Alert]:
        ratio_SP = snapshot.grad_param_ratio
        outside_SP = (ratio_SP > self.max_ratio) | ((ratio_SP > 0) & (ratio_SP < self.min_ratio))
        for step, ratio_P, outside_P in zip(snapshot.steps.tolist(), ratio_SP, outside_SP, strict=True):
            late_P = self._outside.last(snapshot.names, outside_P, self.patience, ~np.isnan(ratio_P))
            if late_P.any():
                yield self._alert(step, snapshot.names, ratio_P, np.flatnonzero(late_P).tolist())

    def _alert(self, step: int, names: tuple[str, ...], ratio_P: FloatArray, late: list[int]) -> Alert:
        with np.errstate(divide="ignore"):
            distance_P = np.abs(np.log(ratio_P))
        fact = (
            f"Step {step}: grad_norm / param_norm of {len(late)} of {len(names)} parameters has been outside "
            f"{number(self.min_ratio)} to {number(self.max_ratio)} for {self.patience} samples or more."
        )
        layers = listing(worst_first(distance_P, late), lambda p: f"{names[p]} {number(ratio_P[p])}")
        cause = "a learning rate, an initialisation or a loss's reduction that does not fit these layers"
        remedy = (
            "above: lower the learning rate or clip; below: check that the layer still learns, raise its learning rate"
        )
        return finding(self.title, fact, layers, cause, remedy, step, "WARN")


@dataclass(kw_only=True)
class LayerSpread(ShippedRule):
    """The largest layer's gradient norm is out of proportion to the smallest one's: "Layer spread".

    Not among the default rules: an attention's key bias has, but for rounding, no gradient at all (softmax does not see
    it), so a healthy transformer exceeds any threshold. A gradient that fades from layer to layer, VanishingGradient
    finds by its order.

    Args:
        max_spread: the largest module's norm over the smallest one's above 0.
        patience: samples in a row before it counts.
    """

    max_spread: float = 100.0
    patience: int = 10
    _num_wide: int = field(default=0, init=False)

    title: ClassVar[str] = "Layer spread"
    bounds: ClassVar[Bounds] = {"max_spread": FROM_1, "patience": FROM_1}

    def check(self, snapshot: Snapshot) -> Iterable[Alert]:
        modules = snapshot.by_group("module")
        for sample in range(len(snapshot)):
            norm_L = modules.grad_norm[sample]
            seen = worst_first(norm_L, np.flatnonzero(np.isfinite(norm_L) & (norm_L > 0)))
            if len(seen) < 2:
                continue
            spread = float(norm_L[seen[0]] / norm_L[seen[-1]])
            self._num_wide = self._num_wide + 1 if spread > self.max_spread else 0
            if self._num_wide >= self.patience:
                yield self._alert(int(modules.steps[sample]), modules.names, norm_L, seen, spread)

    def _alert(self, step: int, names: tuple[str, ...], norm_L: FloatArray, seen: list[int], spread: float) -> Alert:
        fact = (
            f"Step {step}: the largest layer's gradient norm is {number(spread)} times the smallest one's "
            f"(threshold {number(self.max_spread)}), for {self._num_wide} samples."
        )
        layers = listing((seen[0], *reversed(seen[1:])), lambda index: f"{names[index]} {number(norm_L[index])}")
        cause = "gradients that fade or grow through the depth, or layers of very different scale"
        remedy = "check initialisation and normalisation, or give the layers learning rates of their own"
        return finding(self.title, fact, layers, cause, remedy, step, "WARN")
