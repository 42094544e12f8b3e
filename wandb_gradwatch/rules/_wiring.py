"""Rules for updates that do not reach the parameters, or use wrong gradients, clipping or a wrong learning rate."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final

import numpy as np

from .._analysis.formatting import listing, number
from .._analysis.layers import MIN_WEIGHTS, are_half_precision
from .._analysis.memory import Streaks
from .._analysis.movement import Movement, Update, any_parameter
from .._measure.columns import Column
from ..snapshot import Snapshot, keys
from ..snapshot._overview import Overview
from ._base import FROM_1, Alert, Bounds, PerKindRule, ShippedRule, values_of

# S samples, P watched parameters

_LARGE_GRADIENT: Final = 10.0  # multiple of the parameters' norm; ordinary inputs and losses make smaller gradients
_LEAST_SAMPLES: Final = 3
_LONG: Final = 0.1  # share of the steps so far
_NOTHING: Final = 1e-6  # share of the parameters' norm: a hundred thousand such updates move them by a tenth at most
_BFLOAT16: Final = 2.0**-12  # share of the parameters' norm: an eighth of what changes a typical element
_OF_RATE: Final = 0.1  # share of the rate; updates that arrive change a norm by about the rate, or more
_EXACT: Final = 1e-8  # relative error of a norm of 64 float32 elements or more, each of which is rounded by 2^-24
_LOST: Final = 1e-3  # share of the implied update: a healthy training moves some parameter by 0.03
# Share of the largest norm so far, below which a training may have converged: L-BFGS stops at 1e-5 or less.
_CONVERGED: Final = 1e-3
_NEGLIGIBLE: Final = 1e-5  # the same, as a share of the parameters' norm
_CHECK_RATE: Final = (
    "check the learning rate, its warm-up, and whether a schedule made for epochs is stepped at each batch"
)
# Why parameters do not change -> (probable cause, remedy)
_CAUSES: Final = {
    "zero": ("the learning rate is 0", _CHECK_RATE),
    "too small": ("a learning rate that is far too small for the parameters to change ({rate})", _CHECK_RATE),
    "no step": ("step() is never called: no optimizer step was seen", "call optimizer.step() after backward()"),
    "unknown": (
        "not clear: either step() is never called, or the learning rate is 0; its value tells them apart",
        "call optimizer.step() after backward(); check the learning rate, its schedule and its warm-up",
    ),
    "undone": (
        "not clear: either updates of 0, or something that undoes them (learning rate {rate})",
        "look for code that overwrites the parameters after step(), such as load_state_dict() or an average that is "
        "copied into the model; check what the optimizer does with its gradients",
    ),
    "lost": (
        "not clear: either the optimizer's eps, so large that updates are almost 0, or something that undoes them; the "
        "optimizer's settings tell them apart",
        "check eps (usually 1e-8), and other code that writes to the parameters, as an average that is copied back",
    ),
    "still": (
        "not clear: either a learning rate of 0 in the group of these parameters, or something that undoes their "
        "updates; the learning rates in the optimizer's param_groups tell them apart",
        "check the learning rate of each group of the optimizer; call requires_grad_(False) on parameters that are "
        "frozen on purpose",
    ),
}


@dataclass(kw_only=True)
class NotInOptimizer(ShippedRule):
    """Raises the alert "Not in any optimizer" if trainable parameters get a gradient, but no optimizer holds them."""

    title: ClassVar[str] = "Not in any optimizer"
    is_for_rare_samples: ClassVar[bool] = True

    def check(self, snapshot: Snapshot) -> Iterable[Alert]:
        cause = "no optimizer owns them: they were added or replaced after the optimizer was built"
        remedy = (
            "build the optimizer after the model is complete, or pass new parameters to add_param_group(); call "
            "requires_grad_(False) on parameters that are not to be trained"
        )
        begin = keys.WIRING_UNOWNED
        found = {key.removeprefix(begin): of_key for key, of_key in snapshot.metrics.items() if key.startswith(begin)}
        for sample in snapshot.overview:
            if names := [name for name, values_S in found.items() if values_S[sample.place] > 0]:
                fact = (
                    f"{len(names)} of the trainable parameters have a gradient, but no optimizer holds them, and no "
                    f"other code has changed them: {listing(names)}."
                )
                yield self._finding(sample.step, fact, cause, remedy)


@dataclass(kw_only=True)
class GradientsNotReset(ShippedRule):
    """Raises the alert "Gradients not reset" if an optimizer's gradients still contain those of its last step."""

    title: ClassVar[str] = "Gradients not reset"
    is_for_rare_samples: ClassVar[bool] = True

    def check(self, snapshot: Snapshot) -> Iterable[Alert]:
        fact = (
            "the gradients of the step before were neither None nor 0 when this step's backward added to them; every "
            "update uses the sum over all steps since they were reset."
        )
        cause = "zero_grad() is missing: the gradients are added up over the steps"
        remedy = "call optimizer.zero_grad() once per update, before backward() or after step()"
        for sample, carried in zip(snapshot.overview, values_of(snapshot, keys.WIRING_CARRIED), strict=True):
            if carried > 0:
                yield self._finding(sample.step, fact, cause, remedy, level="ERROR")


@dataclass(kw_only=True)
class NegativeLearningRate(ShippedRule):
    """Raises the alert "Learning rate below 0" if an update has a negative learning rate, which increases the loss."""

    title: ClassVar[str] = "Learning rate below 0"
    is_for_rare_samples: ClassVar[bool] = True

    def check(self, snapshot: Snapshot) -> Iterable[Alert]:
        cause = "the schedule goes below 0 instead of ending there"
        remedy = "end the schedule at 0, or give it as many steps as the training has"
        for sample, rate in zip(snapshot.overview, values_of(snapshot, keys.LEARNING_RATE), strict=True):
            if rate < 0:
                fact = f"the learning rate is {number(rate)}: this update increases the loss."
                yield self._finding(sample.step, fact, cause, remedy, level="ERROR")


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
    judges_updates: ClassVar[bool] = True
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
            yield self._alert(snapshot, sample, factor)

    def _alert(self, snapshot: Snapshot, sample: Overview, factor: float) -> Alert:
        fact = (
            f"{self._num_tight} gradients in a row were clipped to less than a {number(self.max_factor)}th of their "
            f"norm, this one by a factor of {number(factor)}."
        )
        cause = "the clipping is far too tight"
        remedy = "raise max_norm to about the usual norm; with a GradScaler call unscale_(optimizer) before clipping"
        if snapshot.loss_scale[sample.place] > self.max_factor:
            cause = "not clear: either unscale_() is missing before clip_grad_norm_, or the clipping is far too tight"
        elif sample.norm > _LARGE_GRADIENT * math.sqrt(sample.sums[Column.PARAM_SUM_SQ]):
            cause = (
                f"not clear: either {cause}, or a large scale of the inputs, targets or loss: the gradient before "
                "clipping is far larger than the parameters; the size of the loss tells them apart"
            )
            remedy = f"normalise the inputs and the targets, take the mean in the loss; otherwise {remedy}"
        return self._finding(sample.step, fact, cause, remedy)


@dataclass(kw_only=True)
class UnchangedParameters(PerKindRule):
    """Raises the alert "Parameters unchanged" if parameters do not change although they have gradients.

    Convergence raises no alert: its gradients are a small part of the largest ones so far, or of the parameters, as
    those of L-BFGS, which stops by itself and had 79 samples without a change.

    The alert covers three faults: no parameter changes by a single bit; one of 64 elements or more does not, while
    others do (a smaller one may be clamped, as CLIP's temperature is); or all change by less than a thousandth of the
    updates that the learning rate and the received gradients imply. The last two leave out parameters in half
    precision, whose updates are often smaller than the distance to the next number.

    Args:
        patience: number of steps without any change, at a learning rate that can change parameters, that raises the
            alert; at least 3 samples.
        unknown_patience: the same if no learning rate was read, because no optimizer has stepped.
        zero_patience: the same for a single parameter, for updates below a thousandth, and for a learning rate of 0 or
            so small that no update reaches a millionth of the parameters' norm. If rounding changes single bits, such a
            rate must last a tenth of the run, too: a warm-up from 0 has fewer such steps.
    """

    patience: int = 10
    unknown_patience: int = 20
    zero_patience: int = 25
    _movement: Movement = field(default_factory=Movement, init=False, repr=False)
    _num_unchanged: int = field(default=0, init=False)
    _since: int = field(default=0, init=False)  # the step of the newest sample whose parameters have changed
    _able: int = field(default=0, init=False)  # the same, or the newest step whose learning rate could change nothing
    _largest: float = field(default=0.0, init=False)
    _num_nothing: int = field(default=0, init=False)  # samples in a row whose learning rate could change nothing
    _felt: int = field(default=0, init=False)  # the step of the last sample before these, or of the first one
    _rate: float = field(default=math.inf, init=False)  # the newest rate that could: exploding weights dwarf it later
    _last_rate: float = field(default=math.inf, init=False)  # of the sample before
    _arrived: int = field(default=0, init=False)  # the step of the newest sample whose update was not lost
    _still: Streaks = field(default_factory=Streaks, init=False, repr=False)  # parameters that do not change alone

    title: ClassVar[str] = "Parameters unchanged"
    metric: ClassVar[str] = keys.LEARNING_RATE
    bounds: ClassVar[Bounds] = dict.fromkeys(("patience", "unknown_patience", "zero_patience"), (2.0, math.inf))

    def prepared(self, snapshot: Snapshot, samples: Sequence[Overview]) -> Iterable[tuple[Overview, Any]]:
        samples = [one for one in samples if (one.norm > 0 or one.has_nonfinite) and not (one.skipped or one.guarded)]
        updates, rates = self._movement.see(snapshot, samples), values_of(snapshot, self.metric)
        have_still = any_parameter(np.equal, updates)
        return zip(samples, zip([rates[one.place] for one in samples], updates, have_still, strict=True), strict=True)

    def check_sample(
        self, snapshot: Snapshot, sample: Overview, value: tuple[float, Update, bool], /
    ) -> Iterable[Alert]:
        rate, update, has_still = value
        norm = 0.0 if sample.has_nonfinite else sample.norm  # NaN restarts the count; other rules report it
        self._largest = max(self._largest, norm)
        converged = max(_CONVERGED * self._largest, _NEGLIGIBLE * math.sqrt(sample.sums[Column.PARAM_SUM_SQ]))
        now_P, before_P = update.after, update.before
        same = not (update.total_before < update.total_after or update.total_after < update.total_before)
        if same:  # rarely; parameters that are missing in either sample are neither equal nor different
            same = not ((now_P < before_P) | (before_P < now_P)).any() and bool(now_P[now_P == before_P].any())
        self._num_unchanged = self._num_unchanged + 1 if same and norm > converged else 0
        if not self._num_unchanged:
            self._since = self._able = sample.step
        is_first = not same and abs(rate) <= self._last_rate and math.isinf(self._rate)
        is_nothing = _is_nothing(abs(rate), norm, sample, update, is_first=is_first) and abs(rate) < self._rate
        self._last_rate = abs(rate)
        if is_nothing:
            self._able = sample.step
        elif not math.isnan(rate) and update.total_before > 0:  # an update has been seen
            self._rate = abs(rate)
        self._num_nothing = self._num_nothing + 1 if is_nothing and norm > _CONVERGED * self._largest else 0
        if not (self._num_nothing and self._felt):
            self._felt = sample.step
        # Equal bits in two samples mean no change in between: steps count, not samples.
        needed = self.unknown_patience if math.isnan(rate) else self.patience
        is_still = sample.step - self._able >= needed or (
            is_nothing and sample.step - self._since >= self.zero_patience
        )
        # A schedule that ends at 0 is close to 0 for a thousandth of the run.
        is_long = sample.step - self._felt >= max(self.zero_patience, _LONG * sample.step)
        if (is_still and self._num_unchanged >= _LEAST_SAMPLES) or (self._num_nothing >= _LEAST_SAMPLES and is_long):
            yield self._alert(sample.step, norm, rate, is_nothing, is_seen=not snapshot.inferred[sample.place])
        elif not same and sample.is_complete:  # of two optimizers' models, a critic's weights may be clamped
            yield from self._look_for_lost(snapshot.names, sample, update, abs(rate), has_still)

    def _look_for_lost(
        self, names: tuple[str, ...], sample: Overview, update: Update, rate: float, has_still: bool
    ) -> Iterable[Alert]:
        """Yield an alert if the updates of some parameters, or most of every update, do not arrive."""
        received = rate * min(sample.clipped_norm, math.sqrt(sample.sums[Column.NUM_ELEMENTS]))
        moved = abs(math.sqrt(update.total_after) - math.sqrt(update.total_before))
        is_lost = moved < _LOST * received
        if not is_lost:
            self._arrived = sample.step
        if not has_still:
            self._still.end(names, 1)
        if not (is_lost or has_still):
            return  # the usual case
        # The smaller of the updates that SGD and Adam would make, if the parameter's precision can show it.
        size_P, given_P = sample.rows[:, Column.NUM_ELEMENTS], sample.rows[:, Column.RECEIVED_SUM_SQ]
        norm_P, received_P = np.sqrt(update.after), rate * np.sqrt(np.minimum(given_P, size_P))
        visible_P = (received_P > _NOTHING * norm_P) & ~are_half_precision(sample.rows)
        visible_P &= sample.rows[:, Column.PARAM_NUM_NONFINITE] == 0
        arrives_P = visible_P & (np.abs(norm_P - np.sqrt(update.before)) >= _LOST * received_P)
        if not visible_P.any() or arrives_P.any():
            self._arrived = sample.step
        if sample.step - self._arrived >= self.zero_patience:
            fact = (
                f"in the {sample.step - self._arrived} steps since step {self._arrived} every parameter has moved by "
                f"less than {number(_LOST)} of the update that the learning rate and its gradient imply."
            )
            yield self._finding(sample.step, fact, *_CAUSES["lost"])
        elif has_still:
            # A parameter that is equal in two samples has not changed at the steps between them.
            needed = max(_LEAST_SAMPLES, math.ceil(self.zero_patience / update.num_steps))
            still_P = (update.after == update.before) & visible_P & (size_P >= MIN_WEIGHTS)
            still_P = self._still.last(names, still_P, needed, ~np.isnan(received_P))
            if still_P.any():
                fact = (
                    "parameters have not changed by a single bit in sample after sample, although they have a gradient "
                    "and others change."
                )
                layers = listing([names[p] for p in np.flatnonzero(still_P)])
                yield self._finding(sample.step, fact, *_CAUSES["still"], layers=layers)

    def _alert(self, step: int, norm: float, rate: float, is_nothing: bool, *, is_seen: bool) -> Alert:
        what, since = "no parameter has changed by a single bit", self._since
        if is_nothing and self._felt < since:
            what, since = "the learning rate has been almost 0", self._felt
        fact = f"{what} in the {step - since} steps since step {since}, although the gradient norm is {norm:.3g}."
        kind = ("too small" if rate else "zero") if is_nothing else "unknown" if math.isnan(rate) else "undone"
        kind = kind if is_seen else "no step"
        cause, remedy = _CAUSES[kind]
        return self._finding(step, fact, cause.format(rate=number(rate)), remedy, level="ERROR")


def _is_nothing(rate: float, norm: float, sample: Overview, update: Update, *, is_first: bool) -> bool:
    """Whether no update at this learning rate can change the parameters by anything that matters.

    An update is at most the rate in each element (Adam). From the first step on (`is_first`: something has changed, and
    no rate was larger or could change what matters), there are two smaller limits: plain descent moves no parameter by
    more than the rate times its gradient; and an element in bfloat16 does not change by less than 2^-9 of itself.
    """
    weights = math.sqrt(sample.sums[Column.PARAM_SUM_SQ])
    longest = rate * max(norm, math.sqrt(sample.sums[Column.NUM_ELEMENTS]))
    is_short = rate * norm < _NOTHING * weights and norm > _NEGLIGIBLE * weights  # a smaller one may have converged
    is_coarse = longest < _BFLOAT16 * weights
    if longest < _NOTHING * weights or not (is_first and (is_short or is_coarse)):
        return longest < _NOTHING * weights  # the usual case
    large_P = sample.rows[:, Column.NUM_ELEMENTS] >= MIN_WEIGHTS  # rounding may double the change of a few elements
    if not large_P.any():
        return False
    moved_P, norm_P = np.abs(np.sqrt(update.after) - np.sqrt(update.before)), np.sqrt(update.after)
    descends_P = moved_P <= rate * np.sqrt(sample.rows[:, Column.GRAD_SUM_SQ]) + _EXACT * norm_P
    if is_short and descends_P[large_P].all():
        return True
    is_still = is_coarse and bool((moved_P <= _OF_RATE * rate)[large_P].all())
    return is_still and bool(are_half_precision(sample.rows, lost_bits=16).all())
