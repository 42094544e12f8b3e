"""Rule for parameters that get no gradient, and for gradients that are all 0."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import ClassVar, Final

import numpy as np
import numpy.typing as npt

from .._analysis.formatting import listing, worst_first
from .._analysis.layers import beside_modules, cancelled_biases, leading
from .._analysis.memory import ALIKE, PerName, Streaks
from .._measure.columns import BoolArray, FloatArray
from ..snapshot import Snapshot, keys
from ._base import FROM_1, Alert, Bounds, ShippedRule, values_of

# S samples, P watched parameters

_LOST_CHANCE: Final = 1e-6  # probability of a pause by chance below which a gradient is lost
_MIN_BEFORE: Final = 10  # least number of samples before a pause: fewer may be another phase of the training
_PHASE: Final = 10  # samples without a gradient after which a parameter that gets one begins a new phase


def _cut_off(never_P: BoolArray, missing_P: BoolArray, in_order_P: BoolArray) -> BoolArray:
    """Return the parameters that never had a gradient if they are the first `in_order_P` and no other lacks one: [P].

    An idle expert or an unused head is not cut off: it comes after parameters that do get a gradient.
    """
    num = leading(never_P[in_order_P])
    is_cut = bool(num) and not missing_P[in_order_P][num:].any()
    return never_P & in_order_P & is_cut


@dataclass(kw_only=True)
class NoGradient(ShippedRule):
    """Raises the alert "No gradient" if parameters get no gradient, or if all gradients are exactly 0.

    Parameters that `Snapshot.trainable` excludes need no gradient.

    Args:
        patience: number of samples in a row without a gradient that raises the alert for a watched parameter.
        lost_patience: the same for a parameter that had a gradient in so many samples before that a pause by chance is
            next to impossible, and for all parameters together.
        cut_patience: the same for all trainable parameters from the input up to one, if none of them ever had a
            gradient and all others have one. A critic may be updated several times before its generator is.
        zero_patience: number of samples in a row in which all gradients are exactly 0. Instead, `lost_patience` counts
            if the loss is known and not 0, and `patience` if the loss is 0.
    """

    patience: int = 100
    lost_patience: int = 3
    cut_patience: int = 10
    zero_patience: int = 10
    _missing: Streaks = field(default_factory=Streaks, init=False, repr=False)
    _num_zero: int = field(default=0, init=False)
    _was_nothing: bool = field(default=False, init=False)  # whether all gradients of the last sample were missing or 0
    _is_often_nothing: bool = field(default=False, init=False)  # they are so now and then, as with a hinge loss
    # Numbers of samples: of all; the newest in which no gradient was missing, and in which each parameter had one; and
    # in which a parameter lost its gradient because another phase of the training began.
    _num_samples: int = field(default=0, init=False)
    _complete: int = field(default=0, init=False)
    _newest: PerName = field(default_factory=PerName, init=False, repr=False)
    _handed_over: PerName = field(default_factory=PerName, init=False, repr=False)
    _unowned: set[str] = field(default_factory=set, init=False)  # keys of parameters that no optimizer holds

    title: ClassVar[str] = "No gradient"
    bounds: ClassVar[Bounds] = dict.fromkeys(("patience", "lost_patience", "cut_patience", "zero_patience"), FROM_1)

    def check(self, snapshot: Snapshot) -> Iterable[Alert]:
        unowned = [key for key in snapshot.metrics if key.startswith(keys.WIRING_UNOWNED)]
        all_here = all([sample.is_complete and sample.norm > 0 for sample in snapshot.overview])
        if all_here and not unowned:  # the usual case
            self._is_often_nothing |= self._was_nothing
            self._missing.end(snapshot.names, len(snapshot))
            self._num_samples = self._complete = self._num_samples + len(snapshot)
            self._num_zero, self._was_nothing = 0, False
            return
        for sample, loss in zip(snapshot.overview, values_of(snapshot, keys.LOSS), strict=True):
            missing_P = ~snapshot.present[sample.place]
            # Samples in which a parameter is frozen do not count. NotInOptimizer reports those without an optimizer.
            self._unowned |= {key for key in unowned if snapshot.metrics[key][sample.place] > 0}
            # A parameter with a gradient was trainable, even if it is frozen by now, as CycleGAN's discriminators are.
            wanted_P = snapshot.trainable | ~missing_P
            if self._unowned:
                wanted_P = wanted_P & [keys.WIRING_UNOWNED + name not in self._unowned for name in snapshot.names]
            wanted_P = wanted_P & ~self._have_had_their_phase(snapshot.names, missing_P)
            late_P = missing_P & wanted_P
            all_zero = sample.norm == 0 and not sample.has_nonfinite
            is_nothing = all_zero or bool(missing_P.all())
            self._is_often_nothing |= self._was_nothing and not is_nothing
            self._was_nothing = is_nothing
            seen = self._missing.see(snapshot.names, late_P, wanted_P)
            if seen is not None:
                row_P, before_P, chance_P = seen
                late_P = row_P >= self.patience
                lost_P = (row_P >= self.lost_patience) & (before_P >= _MIN_BEFORE) & (chance_P < _LOST_CHANCE)
                late_P |= lost_P & (chance_P ** (1 / ALIKE) < _LOST_CHANCE)
                in_order_P = wanted_P & ~beside_modules(snapshot.names)
                late_P |= _cut_off(lost_P, missing_P, in_order_P)
                late_P |= _cut_off((row_P >= self.cut_patience) & (before_P == 0), missing_P, in_order_P)
                late_P |= (row_P[wanted_P] >= self.lost_patience).all() and not self._is_often_nothing
            self._num_zero = self._num_zero + 1 if all_zero else 0
            # A loss of 0 may have no gradient for long: rewards can be rare, or a hinge loss satisfied.
            patience = self.zero_patience if math.isnan(loss) else self.lost_patience if loss else self.patience
            if self._num_zero >= patience and not self._is_often_nothing:
                yield self._zero_alert(sample.step, patience)
            elif (late := np.flatnonzero(late_P & wanted_P)).size:
                yield self._missing_alert(sample.step, snapshot.names, row_P, late)

    def _have_had_their_phase(self, names: tuple[str, ...], missing_P: BoolArray) -> BoolArray:
        """Return which parameters lack a gradient since others got one for the first time, or after a pause: [P].

        A training that goes on to other layers, as from a generator to its discriminator, has lost nothing.
        """
        self._num_samples += 1
        if not missing_P.any():
            self._complete = self._num_samples
            return missing_P
        newest_P, handed_over_P = self._newest.of(names), self._handed_over.of(names)
        np.maximum(newest_P, self._complete, out=newest_P)
        lost_P = missing_P & (newest_P == self._num_samples - 1)
        if lost_P.any() and (self._num_samples - newest_P[~missing_P] > _PHASE).any():
            handed_over_P[lost_P] = self._num_samples
            self._missing.begin_anew(names)  # how often gradients were missing before says nothing about this phase
        newest_P[~missing_P] = self._num_samples
        return handed_over_P > newest_P

    def _zero_alert(self, step: int, patience: int) -> Alert:
        fact = f"all gradients have been exactly 0 for {self._num_zero} samples (threshold {patience})."
        cause = (
            "not clear: either dead units before the loss (an output that is clamped, masked or multiplied by 0), or a "
            "loss that is saturated or constant; whether the outputs change with the inputs tells them apart"
        )
        if self._num_zero >= step:
            cause = (
                "not clear: either poor initialisation (with these weights the outputs are 0, clamped or saturated "
                "from the start), or a constant loss; whether the outputs change with the inputs tells them apart"
            )
        remedy = "check what the last layer's output passes through, and the loss; in float16 use a GradScaler"
        return self._finding(step, fact, cause, remedy)

    def _missing_alert(
        self, step: int, names: tuple[str, ...], count_P: FloatArray, late: npt.NDArray[np.intp]
    ) -> Alert:
        missing = worst_first(count_P, late[::-1])  # among those missing equally long, the one nearest the output first
        fact = (
            f"{len(missing)} of {len(names)} watched parameters have had no gradient for {count_P[missing[-1]]:.0f} "
            "samples or more."
        )
        layers = listing(missing, lambda p: f"{names[p]} ({count_P[p]:.0f} samples)")
        is_cancelled = bool(cancelled_biases(names, count_P > 0)[late].all())
        cause = "layers frozen by mistake, detached from the loss, or not used by the forward"
        if is_cancelled:
            cause = "biases that the loss does not depend on, or that the forward leaves out"
        remedy = "check requires_grad, detach() and torch.no_grad(); pass exclude= for layers frozen on purpose"
        return self._finding(step, fact, cause, remedy, layers=layers, level="INFO" if is_cancelled else "WARN")
