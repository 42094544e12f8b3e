"""Rules for NaN and Inf in gradients and in the loss, and for a loss scale that does not settle."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import ClassVar, Final

import numpy as np

from .._analysis.formatting import listing, number
from .._measure.columns import Column, FloatArray
from ..snapshot import Snapshot, keys
from ..snapshot._overview import Overview
from ._base import FROM_0, FROM_1, Alert, Bounds, Level, ShippedRule, values_of

# S samples, P watched parameters

# torch's loss scale begins at 65536, and has been halved to this in the fifth skipped step in a row.
_SETTLED: Final = 4096.0
_CAUSE_AFTER: Final = (
    "code between backward() and step() changed the gradients, such as a division by 0, a reduction over ranks, or "
    "clipping or unscaling by hand"
)
_RELOAD: Final = "load the last good checkpoint"
_REMEDY_AFTER: Final = "check that code for divisors and factors that can be 0, NaN or infinite at this step"


def _broken_parameter(snapshot: Snapshot, sample: int) -> tuple[str, str] | None:
    """Return the cause and the remedy if a parameter was not finite before the sample's update; otherwise None."""
    broken = np.flatnonzero(snapshot.column(Column.PARAM_NUM_NONFINITE)[sample] > 0)
    if not broken.size:
        return None
    cause = f"the parameter {snapshot.names[broken[0]]} was already non-finite before this step"
    return cause, f"{_RELOAD}, then lower the learning rate or clip: too large an update broke it"


def _first_nonfinite_output(snapshot: Snapshot, sample: int) -> str | None:
    """Return the first module in the forward with a non-finite output; None if there is none, or no `Activations`."""
    found = (keys.nonfinite_output(key) for key, counts_S in snapshot.metrics.items() if counts_S[sample] > 0)
    return next((output for output in found if output is not None), None)


@dataclass(kw_only=True)
class _NonFiniteGradient(ShippedRule):
    """Base of the rules for NaN and Inf. They ignore samples that AMP skipped: LossScaleCollapse checks those."""

    is_for_rare_samples: ClassVar[bool] = True
    what: ClassVar[str]
    counts: ClassVar[str]  # name of the snapshot's array with the number of such elements of each gradient
    cause: ClassVar[str]
    remedy: ClassVar[str]
    remedy_without_steps: ClassVar[str]  # where no optimizer step was seen

    def check(self, snapshot: Snapshot) -> Iterator[Alert]:
        for sample in snapshot.overview:
            if sample.has_nonfinite and (not sample.skipped or sample.left_out):
                counts_P = getattr(snapshot, self.counts)[sample.place]
                if np.any(counts_P > 0):
                    yield self._alert(snapshot, sample, counts_P)

    def _alert(self, snapshot: Snapshot, sample: Overview, counts_P: FloatArray) -> Alert:
        # The backward runs from the last layer to the first: the last one in model order became non-finite first.
        backward, size_P = np.flatnonzero(counts_P > 0)[::-1], snapshot.num_elements[sample.place]
        num_present = np.count_nonzero(snapshot.present[sample.place])
        layers = listing(backward, lambda p: f"{snapshot.names[p]} ({counts_P[p]:.0f} of {size_P[p]:.0f} elements)")
        rank = values_of(snapshot, keys.FIRST_NONFINITE_RANK)[sample.place]
        first, on_rank = ("", "") if math.isnan(rank) else (f", first on rank {rank:.0f}", f", on rank {rank:.0f}")
        fact = f"{self.what} in the gradient of {len(backward)} of {num_present} parameters (threshold: 0), which "
        if snapshot.arose_after_backward[sample.place]:
            fact += f"arose after the backward{first}: what the backward left was finite, what the optimizer received "
            fact += "was not."
            return self._finding(sample.step, fact, _CAUSE_AFTER, _REMEDY_AFTER, layers=layers, level="ERROR")
        fact += f"the backward reached first in {snapshot.names[backward[0]]}{on_rank}."
        if (output := _first_nonfinite_output(snapshot, sample.place)) is not None:
            fact += f" Before that, in the forward, the output of {output} was the first that was not finite."
        if sample.left_out:
            fact += " The training loop left this step out: the gradients were reset before an optimizer used them."
        broken = _broken_parameter(snapshot, sample.place)
        cause, remedy = broken or (self.cause, self.remedy)
        level: Level = "WARN" if sample.left_out else "ERROR"
        if snapshot.inferred[sample.place]:
            fact += " No optimizer step was seen: this may be a trial point of a line search."
            level, remedy = ("ERROR", _RELOAD) if broken else ("WARN", self.remedy_without_steps)
        return self._finding(sample.step, fact, cause, remedy, layers=layers, level=level)


@dataclass(kw_only=True)
class NaNGradient(_NonFiniteGradient):
    """Raises the alert "NaN gradient" if a gradient has NaN elements, in every sample that AMP did not skip."""

    title: ClassVar[str] = "NaN gradient"
    what: ClassVar[str] = "NaN"
    counts: ClassVar[str] = "num_nan"
    cause: ClassVar[str] = "a bad batch, or an operation without a finite derivative (0/0, log 0, sqrt at 0)"
    remedy: ClassVar[str] = (
        "look at the batch of this step, and add an epsilon inside log, sqrt and divisions; "
        'watch(model, on_nonfinite="trace") names the operation'
    )
    remedy_without_steps: ClassVar[str] = remedy


@dataclass(kw_only=True)
class InfGradient(_NonFiniteGradient):
    """Raises the alert "Inf gradient" if a gradient has infinite elements, in every sample that AMP did not skip."""

    title: ClassVar[str] = "Inf gradient"
    what: ClassVar[str] = "Inf"
    counts: ClassVar[str] = "num_inf"
    cause: ClassVar[str] = "an overflow: values beyond the range of the dtype, by growth or by a division by almost 0"
    remedy: ClassVar[str] = (
        "lower the learning rate or clip the gradients, use bfloat16 instead of float16, add an epsilon to divisions"
    )
    remedy_without_steps: ClassVar[str] = "use a dtype with a larger range, or add an epsilon to divisions"


NONFINITE_TITLES: Final = (NaNGradient.title, InfGradient.title)


@dataclass(kw_only=True)
class NonFiniteLoss(ShippedRule):
    """Raises the alert "Non-finite loss" if the loss is NaN or infinite.

    Samples that AMP skipped are ignored, because a loss scale settles by overflows. Samples with a non-finite gradient
    or parameter are ignored too, because "NaN gradient" or "Inf gradient" reports them.
    """

    title: ClassVar[str] = "Non-finite loss"
    is_for_rare_samples: ClassVar[bool] = True

    def check(self, snapshot: Snapshot) -> Iterator[Alert]:
        for sample, num in zip(snapshot.overview, values_of(snapshot, keys.NUM_NONFINITE_LOSS), strict=True):
            is_reported = sample.has_nonfinite or (sample.skipped and not sample.left_out)
            if not num > 0 or is_reported or _broken_parameter(snapshot, sample.place) is not None:
                continue
            fact = "the loss is NaN or infinite (threshold: 0)."
            if (output := _first_nonfinite_output(snapshot, sample.place)) is not None:
                fact += f" In the forward the output of {output} was the first that was not finite."
            if sample.left_out:
                fact += " The training loop left this step out."
            cause = (
                "not clear: either inputs or labels of the batch that are not finite, or an invalid operation in the "
                "forward or in the loss (log 0, 0/0, an overflow); wandb_gradwatch.find_nonfinite, which names the "
                "operation, tells them apart"
            )
            remedy = "look at the batch and the outputs of this step; add an epsilon to the operation that is found"
            yield self._finding(sample.step, fact, cause, remedy, level="WARN" if sample.left_out else "ERROR")


@dataclass(kw_only=True)
class LossScaleCollapse(ShippedRule):
    """Raises the alert "Loss scale collapse" if AMP skips many updates in a row, or its scale falls below a floor.

    A single skipped update is normal: a loss scale settles by overflows. So are skipped updates at the beginning of a
    run, as long as the scale is above 4096, a level at which models settle.

    Args:
        patience: number of skipped samples in a row that raises the alert. torch's scale starts at 65536 and is halved
            by each skip: 5 of them lead to 2048, below the level at which a healthy model settles within a few steps.
        min_scale: the floor; below the default of 1 even unscaled gradients overflow.
    """

    patience: int = 5
    min_scale: float = 1.0
    _num_in_a_row: int = field(default=0, init=False)
    _has_updated: bool = field(default=False, init=False)

    title: ClassVar[str] = "Loss scale collapse"
    bounds: ClassVar[Bounds] = {"patience": FROM_1, "min_scale": FROM_0}

    def check(self, snapshot: Snapshot) -> Iterable[Alert]:
        for sample, scale in zip(snapshot.overview, snapshot.loss_scale.tolist(), strict=True):
            is_skipped = sample.skipped and not sample.left_out
            self._num_in_a_row = self._num_in_a_row + 1 if is_skipped else 0
            self._has_updated |= not is_skipped
            finds_its_place = not self._has_updated and scale > _SETTLED
            stalled, low = self._num_in_a_row >= self.patience and not finds_its_place, scale < self.min_scale
            if stalled or low:
                yield self._alert(snapshot, sample, scale, stalled)

    def _alert(self, snapshot: Snapshot, sample: Overview, scale: float, stalled: bool) -> Alert:
        fact = f"the loss scale is {number(scale)}, below {number(self.min_scale)}."
        if stalled:
            at_scale = "" if math.isnan(scale) else f", the loss scale is {number(scale)}"
            fact = (
                f"{self._num_in_a_row} updates in a row were skipped (threshold {self.patience})"
                f"{at_scale}; the model is not learning."
            )
        num_P = snapshot.num_nonfinite[sample.place]
        layers = listing(np.flatnonzero(num_P > 0)[::-1], lambda p: f"{snapshot.names[p]} ({num_P[p]:.0f} non-finite)")
        cause = "gradients beyond the range of float16, because they have grown or because the model needs bfloat16"
        if np.any(snapshot.num_nan[sample.place] > 0):
            cause = "the gradients are NaN at any scale: the loss or an operation is broken, not the scale"
        remedy = "look for NaN with autocast off, clip after unscale_(), lower the learning rate, or use bfloat16"
        cause, remedy = _broken_parameter(snapshot, sample.place) or (cause, remedy)
        # Only a stalled sample is an ERROR: AMP has not applied it, so a guard that skips it loses nothing.
        return self._finding(sample.step, fact, cause, remedy, layers=layers, level="ERROR" if stalled else "WARN")
