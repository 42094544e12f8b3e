"""Clipping that leaves next to nothing of the gradient."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import ClassVar, Final

import numpy as np

from .._analysis.formatting import number
from ..snapshot import Snapshot
from ._base import FROM_1, Alert, Bounds, ShippedRule, finding

_LARGE_GRADIENT: Final = 10.0  # times the parameters' norm: more than ordinary inputs and losses make


@dataclass(kw_only=True)
class TightClipping(ShippedRule):
    """Every gradient is clipped to a tiny part of itself: "Clipping too tight".

    Args:
        max_factor: the norm before clipping over the one after. Healthy: at most 99, faults from 2,300.
        patience: samples in a row; before them an explosion that the clipping holds looks the same.
        first_patience: the same where nothing has exploded: from the run's first sample on, and of norms that are no
            larger than those before.
    """

    max_factor: float = 1000.0
    patience: int = 20
    first_patience: int = 3
    _num_tight: int = field(default=0, init=False)
    _num_certain: int = field(default=0, init=False)  # in a row, of these
    _largest: float = field(default=0.0, init=False)  # norm before a clipping that was not too tight

    title: ClassVar[str] = "Clipping too tight"
    bounds: ClassVar[Bounds] = {"max_factor": FROM_1, "patience": FROM_1, "first_patience": FROM_1}

    def check(self, snapshot: Snapshot) -> Iterable[Alert]:
        for sample in snapshot.overview:
            if not (sample.norm > 0 and sample.clipped_norm > 0):
                continue
            factor = sample.norm / sample.clipped_norm
            self._num_tight = self._num_tight + 1 if factor > self.max_factor else 0
            if not self._num_tight:
                self._largest = max(self._largest, sample.norm)
            # What is no larger than norms that were clipped less has not exploded, nor has what the run began with.
            has_exploded = 0 < self._largest < sample.norm
            self._num_certain = self._num_certain + 1 if self._num_tight and not has_exploded else 0
            if self._num_certain >= self.first_patience or self._num_tight >= self.patience:
                yield self._alert(snapshot, sample.place, factor)

    def _alert(self, snapshot: Snapshot, sample: int, factor: float) -> Alert:
        step, scale = int(snapshot.steps[sample]), float(snapshot.loss_scale[sample])
        fact = (
            f"Step {step}: {self._num_tight} gradients in a row were clipped to less than a "
            f"{number(self.max_factor)}th of their norm, this one by {number(factor)}."
        )
        cause = "the clipping is far too tight"
        remedy = "raise max_norm to about the usual norm; with a GradScaler call unscale_(optimizer) before clipping"
        if scale > self.max_factor:
            cause = "not clear: either unscale_() is missing before clip_grad_norm_, or the clipping is far too tight"
        elif snapshot.total_grad_norm[sample] > _LARGE_GRADIENT * np.linalg.norm(
            np.nan_to_num(snapshot.param_norm[sample])
        ):
            cause = (
                f"not clear: either {cause}, or a large scale of the inputs, targets or loss: the gradient before "
                "clipping is far larger than the parameters; the size of the loss tells them apart"
            )
            remedy = f"normalise the inputs and the targets, take the mean in the loss; otherwise {remedy}"
        return finding(self.title, fact, "", cause, remedy, step, "WARN")
