"""Rule for clipping that leaves almost nothing of the gradient."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import ClassVar, Final

import numpy as np

from .._analysis.formatting import number
from ..snapshot import Snapshot
from ..snapshot._overview import Overview
from ._base import FROM_1, Alert, Bounds, PerKindRule, finding

_LARGE_GRADIENT: Final = 10.0  # multiple of the parameters' norm; ordinary inputs and losses make smaller gradients


@dataclass(kw_only=True)
class TightClipping(PerKindRule):
    """Raises the alert "Clipping too tight" if every gradient is clipped to a tiny part of its norm.

    Args:
        max_factor: limit of the norm before clipping / norm after it. Healthy: at most 99; faults: from 2,300.
        patience: number of samples in a row that raises the alert; fewer may be an explosion that clipping holds back.
        first_patience: the same number where nothing can have exploded: from the first sample of a run on, or for norms
            that are no larger than earlier ones that were clipped less.
    """

    max_factor: float = 1000.0
    patience: int = 20
    first_patience: int = 3
    _num_tight: int = field(default=0, init=False)
    _num_certain: int = field(default=0, init=False)  # those in a row that are no explosion
    _largest: float = field(default=0.0, init=False)  # the largest norm that was not clipped too tightly

    title: ClassVar[str] = "Clipping too tight"
    bounds: ClassVar[Bounds] = {"max_factor": FROM_1, "patience": FROM_1, "first_patience": FROM_1}

    def check_sample(self, snapshot: Snapshot, sample: Overview, value: float, /) -> Iterable[Alert]:
        if not (sample.norm > 0 and sample.clipped_norm > 0):
            return
        factor = sample.norm / sample.clipped_norm
        self._num_tight = self._num_tight + 1 if factor > self.max_factor else 0
        if not self._num_tight:
            self._largest = max(self._largest, sample.norm)
        # A norm has not exploded if it is no larger than one that was clipped less, or if the run began with it.
        has_exploded = 0 < self._largest < sample.norm
        self._num_certain = self._num_certain + 1 if self._num_tight and not has_exploded else 0
        if self._num_certain >= self.first_patience or self._num_tight >= self.patience:
            yield self._alert(snapshot, sample.place, factor)

    def _alert(self, snapshot: Snapshot, sample: int, factor: float) -> Alert:
        step, scale = int(snapshot.steps[sample]), float(snapshot.loss_scale[sample])
        fact = (
            f"Step {step}: {self._num_tight} gradients in a row were clipped to less than a "
            f"{number(self.max_factor)}th of their norm, this one by a factor of {number(factor)}."
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
