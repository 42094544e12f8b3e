"""Gradients that never arrive."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import ClassVar, Final

import numpy as np
import numpy.typing as npt

from .._analysis.formatting import listing, worst_first
from .._analysis.layers import cancelled_biases
from .._analysis.memory import ALIKE, Streaks
from .._measure.columns import FloatArray
from ..snapshot import Snapshot, keys
from ._base import FROM_1, Alert, Bounds, ShippedRule, finding

# S samples, P watched parameters

_LOST_CHANCE: Final = 1e-6  # that a gradient pauses
_MIN_BEFORE: Final = 10  # samples: phases of a training are longer than a few


def _cut_off(
    never_P: npt.NDArray[np.bool_], missing_P: npt.NDArray[np.bool_], trainable_P: npt.NDArray[np.bool_]
) -> npt.NDArray[np.bool_]:
    """Those that never had a gradient, if they are the first of the trainable ones and no other is missing: [P].

    An expert that nothing was sent to, and a head that is not used yet, have others before them that do get one.
    """
    never = never_P[trainable_P]
    num = int(np.argmin(never)) if not never.all() else 0
    is_cut = bool(num) and not missing_P[trainable_P][num:].any()
    return never_P & trainable_P if is_cut else np.zeros_like(never_P)


@dataclass(kw_only=True)
class NoGradient(ShippedRule):
    """Parameters whose gradient does not arrive, or gradients that are all exactly 0: "No gradient".

    What is not trainable, by the snapshot, needs no gradient.

    Args:
        patience: samples in a row in which a watched parameter had no gradient.
        lost_patience: the same for one that had a gradient in so many samples before that a pause is next to
            impossible, and for all of them together.
        cut_patience: the same for all trainable ones from the input up to one, where none has had any and all others
            have one: a critic may be updated several times before its generator is.
        zero_patience: samples in a row in which all gradients were exactly 0: `lost_patience` where the loss is known
            and not 0, `patience` where it is 0.
    """

    patience: int = 100
    lost_patience: int = 3
    cut_patience: int = 10
    zero_patience: int = 10
    _missing: Streaks = field(default_factory=Streaks, init=False, repr=False)
    _num_zero: int = field(default=0, init=False)
    _is_often_zero: bool = field(default=False, init=False)  # a hinge loss whose samples are satisfied, now and then
    _unowned: set[str] = field(default_factory=set, init=False)  # keys of parameters that no optimizer holds

    title: ClassVar[str] = "No gradient"
    bounds: ClassVar[Bounds] = dict.fromkeys(("patience", "lost_patience", "cut_patience", "zero_patience"), FROM_1)

    def check(self, snapshot: Snapshot) -> Iterable[Alert]:
        unowned = [key for key in snapshot.metrics if key.startswith(keys.WIRING_UNOWNED)]
        all_here = all([sample.is_complete and sample.norm > 0 for sample in snapshot.overview])
        if all_here and not unowned:  # as nearly always: no sample needs a look
            self._is_often_zero |= self._num_zero > 0
            self._missing.end(snapshot.names, len(snapshot))
            self._num_zero = 0
            return
        loss_S = snapshot.metrics.get(keys.LOSS, np.full(len(snapshot), np.nan))
        for sample, missing_P in enumerate(~snapshot.present):
            # Samples in which it was frozen do not count, once it is thawed; what no optimizer holds is told as such.
            self._unowned |= {key for key in unowned if snapshot.metrics[key][sample] > 0}
            # What has a gradient was, whatever it is now: CycleGAN freezes discriminators while generators train.
            wanted_P = snapshot.trainable | ~missing_P
            if self._unowned:
                wanted_P = wanted_P & [keys.WIRING_UNOWNED + name not in self._unowned for name in snapshot.names]
            late_P = missing_P & wanted_P
            seen = self._missing.see(snapshot.names, late_P, wanted_P)
            if seen is not None:
                row_P, before_P, chance_P = seen
                late_P = row_P >= self.patience
                lost_P = (row_P >= self.lost_patience) & (before_P >= _MIN_BEFORE) & (chance_P < _LOST_CHANCE)
                late_P |= lost_P & (chance_P ** (1 / ALIKE) < _LOST_CHANCE)
                late_P |= _cut_off(lost_P, missing_P, wanted_P)
                late_P |= _cut_off((row_P >= self.cut_patience) & (before_P == 0), missing_P, wanted_P)
                late_P |= (row_P[wanted_P] >= self.lost_patience).all()
            all_zero = snapshot.total_grad_norm[sample] == 0 and not np.any(snapshot.num_nonfinite[sample] > 0)
            self._is_often_zero |= self._num_zero > 0 and not all_zero
            self._num_zero = self._num_zero + 1 if all_zero else 0
            # Rewards that are rare, and a hinge that is satisfied: what is 0 has no gradient.
            loss = loss_S[sample]
            patience = self.zero_patience if np.isnan(loss) else self.lost_patience if loss else self.patience
            if self._num_zero >= patience and not self._is_often_zero:
                yield self._zero_alert(int(snapshot.steps[sample]), patience)
            elif (late := np.flatnonzero(late_P & wanted_P)).size:
                yield self._missing_alert(int(snapshot.steps[sample]), snapshot.names, row_P, late)

    def _zero_alert(self, step: int, patience: int) -> Alert:
        fact = f"Step {step}: all gradients have been exactly 0 for {self._num_zero} samples (threshold {patience})."
        cause = (
            "not clear: either dead units before the loss (an output that is clamped, masked or multiplied by 0), or a "
            "loss that is saturated or constant; whether the outputs change with the inputs tells them apart"
        )
        if self._num_zero >= step:
            cause = (
                "not clear: either poor initialisation (with these weights the outputs are 0, clamped or saturated "
                "from the start), or a constant loss; whether the outputs change with the inputs tells them apart"
            )
        remedy = "look at what the last layer's output goes through, and at the loss; in float16 use a GradScaler"
        return finding(self.title, fact, "", cause, remedy, step, "WARN")

    def _missing_alert(
        self, step: int, names: tuple[str, ...], count_P: FloatArray, late: npt.NDArray[np.intp]
    ) -> Alert:
        missing = worst_first(count_P, late[::-1])  # of those missing as long, the one next to the cut first
        fact = (
            f"Step {step}: {len(missing)} of {len(names)} watched parameters have had no gradient for "
            f"{count_P[missing[-1]]:.0f} samples or more."
        )
        layers = listing(missing, lambda p: f"{names[p]} ({count_P[p]:.0f} samples)")
        is_cancelled = bool(cancelled_biases(names, count_P > 0)[late].all())
        cause = "layers frozen by mistake, detached from the loss, or not used by the forward"
        if is_cancelled:
            cause = "biases that the loss does not depend on, or that the forward leaves out"
        remedy = "check requires_grad, detach() and torch.no_grad(); exclude= what is frozen on purpose"
        return finding(self.title, fact, layers, cause, remedy, step, "INFO" if is_cancelled else "WARN")
