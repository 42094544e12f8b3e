"""What is noticed: one row per symptom. A row says when it is there, for how long it must last, and how bad it is.

The table holds no cause: causes.py explains symptoms. All limits come from one ladder: factors of 2, 5, 10, 30, 100 and
1000, a millionth, and patiences of 3, 10 and 25 samples.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, Literal

import numpy as np

from .._analysis.formatting import number
from .._measure.columns import BoolArray, Column
from ..snapshot import keys
from . import replicas
from .facts import EARLY, NOTHING, SMALL, X2, X5, X10, X30, X100, X1000, Facts
from .incident import Level

SOON, SURE, LONG = 3, 10, 25  # samples in a row
MOVED: Final = 0.05  # change of the parameters' log norm per step; healthy, after the first steps: 2.5 %
FAST, FAST_AT_FIRST = 0.11, 0.18  # growth of a weight's log norm per step
SHRUNK: Final = 0.02  # loss of a weight's log norm per step
CHANCE: Final = 1e-3  # probability
MIN_ELEMENTS: Final = 256  # in all parameters together: smaller models may begin anywhere, and pass through 0
HUGE: Final = 1e8  # a norm that is too large whatever came before
TINY: Final = 1e-7  # a norm that is too small whatever came before
_FEW_UNITS: Final = 16
_VERY_LONG: Final = 100  # samples after which a parameter that never had a gradient is reported


@dataclass(frozen=True)
class Symptom:
    """One row.

    Args:
        kind: the identifier; rows of one kind have one title.
        title: at most 63 characters.
        level: how bad it is.
        when: whether it is there in a sample; an array says of which parameters or modules.
        says: what was seen, with numbers, in words.
        samples: samples in a row in which it must be there. Three of them are enough if they span five times as many
            steps: where few steps are measured, samples are far apart.
        share: the share of all steps so far that it must last, as well.
        of: what the array is about. True in place of an array: most of them.
        always: it is also judged in trial points of a line search, whose update is only inferred.
        slow: it is also looked for from every twentieth step to the next.
        of_begin: it is about the first samples alone, so that later ones cannot show that it is over.
    """

    kind: str
    title: str
    level: Level
    when: Callable[[Facts], bool | BoolArray]
    says: Callable[[Facts], str]
    samples: int = 1
    share: float = 0.0
    of: Literal["", "parameters", "modules"] = ""
    always: bool = False
    slow: bool = False
    of_begin: bool = False


def times(logarithm: float) -> str:
    """A factor from its logarithm."""
    return f"{number(math.exp(min(abs(logarithm), 690.0)))}x"


def percent(share: float) -> str:
    return f"{number(100 * share)} %"


def _fast(facts: Facts) -> float:
    return FAST_AT_FIRST if facts.step <= EARLY else FAST


def _is_large(facts: Facts) -> bool:
    return facts.num_elements >= MIN_ELEMENTS


def _grown(facts: Facts) -> bool:
    """The norm rises steadily, and the rise does harm."""
    if not facts.climb > 0 or facts.of_largest < 0 or facts.loss_falls:
        return False
    harm = facts.moved_twice > MOVED or (facts.loss_rises and facts.of_begin > X5)
    return harm or facts.loss_of_first < -5


def _far_above(facts: Facts) -> bool:
    more = 0.5 * math.log(facts.gap) if facts.seen < 5 else 0.0
    return facts.above(1) > X100 + more and facts.is_unusual and facts.seen > 0


def _passed(facts: Facts) -> bool:
    """The norm of the sample before was far above usual, and this one is usual again."""
    usual = facts.past.scalars["usual"]
    if len(usual) < SURE or facts.bad or facts.skipped:
        return False
    return usual[-1] > X10 and not usual[-2] > X5 and facts.usual < X2 and usual[-1] > 4 * facts.scatter


def _faint_P(facts: Facts) -> bool | BoolArray:
    """Weights whose gradient is a ten-millionth of the largest one, and of themselves."""
    if not facts.spread > -math.log(TINY):
        return False
    own_P = facts.g_P - facts.w_P
    faint_P: BoolArray = (facts.share_P < math.log(TINY)) & (own_P < math.log(NOTHING)) & facts.is_weight_P
    return faint_P if not facts.is_held_up else False


def _silent_L(facts: Facts) -> bool | BoolArray:
    """Modules that have fallen to a hundredth at once, while the whole has not."""
    if facts.seen < LONG or not facts.has_fallen or facts.fell > X10:
        return False
    silent_L: BoolArray = facts.fell_L > X100 + X2
    return silent_L


def _is_layer_L(facts: Facts) -> BoolArray:
    """Modules that are layers: a module without a weight, of a few numbers, is none."""
    is_layer_L: BoolArray = facts.structure.modules.has_weight | (facts.num_units_L >= _FEW_UNITS)
    return is_layer_L


def _varies_L(facts: Facts, samples: int = SURE) -> BoolArray:
    """Modules whose share of dead units varies: not the same units are dead."""
    rows = np.concatenate([facts.dead_before(samples - 1), facts.dead_L[None]])
    with np.errstate(invalid="ignore"):
        varies_L: BoolArray = ~(np.ptp(rows, axis=0) < MOVED)
    return varies_L


def _dead_L(facts: Facts) -> bool | BoolArray:
    """Modules in which the same units have no gradient for longer than chance explains."""
    if facts.dead is None or facts.is_held_up or not facts.of_largest > math.log(NOTHING):
        return False
    row_L, _, chance_L = facts.dead
    return (row_L >= SURE) & (chance_L < CHANCE) & ~_varies_L(facts) & _is_layer_L(facts) & ~facts.is_empty_L


def _cut_L(facts: Facts) -> bool | BoolArray:
    """Modules that have lost any gradient, because the module after them has inputs of 0."""
    if facts.cut is None or facts.is_held_up:
        return False
    row_L, _, chance_L = facts.cut
    cut_L: BoolArray = (row_L >= 2) & (chance_L < CHANCE)
    return cut_L


def _died_L(facts: Facts) -> bool | BoolArray:
    """Modules half of whose units have died at once."""
    if facts.num_before < SURE or not facts.has_died or not (np.nan_to_num(facts.dead_L) >= 0.5).any():
        return False
    rows = facts.dead_before(64)
    newest = np.concatenate([rows[-SOON:], facts.dead_L[None]])
    with np.errstate(invalid="ignore"):
        low_L, most_L = np.min(newest, axis=0), np.max(rows[:-SOON], axis=0)
        died_L: BoolArray = (low_L >= 0.5) & (low_L - most_L > 0.25) & ~_varies_L(facts, SOON + 1)
    died_L[-1] = False  # after the last layer comes the loss: its units may be outputs out of use
    return died_L & ~facts.is_empty_L & (facts.num_units_L >= _FEW_UNITS / 2)


def _emptied_L(facts: Facts) -> bool | BoolArray:
    """Modules whose inputs are all 0."""
    if not facts.norm > 0 or not facts.is_any_dead:
        return False
    return facts.is_empty_L


def _lost_P(facts: Facts) -> bool | BoolArray:
    """Parameters that have had a gradient, or never had one beside the others, and have none for long."""
    if facts.missing is None or facts.is_empty:
        return False
    row_P, before_P, chance_P = facts.missing
    is_phase = facts.run.came_step >= facts.step - facts.gap * row_P.max()
    lost_P: BoolArray = (row_P >= 5) & (chance_P < NOTHING)
    if is_phase:
        return False
    # A loss of differences of outputs does not depend on the last bias.
    cancelled_P = facts.structure.is_bias_P & ~facts.missing_P[_sibling(facts)]
    lost_P &= ~cancelled_P & ((before_P > 0) | (row_P >= _VERY_LONG))
    return lost_P


def _sibling(facts: Facts) -> np.ndarray:
    """For each parameter the first of its module: [P]."""
    modules = facts.structure.modules
    first = {int(module): place for place, module in reversed(list(enumerate(modules.of_parameter)))}
    return np.array([first[int(module)] for module in modules.of_parameter])


def _cut_off_P(facts: Facts) -> bool | BoolArray:
    """Parameters that never had a gradient: all from the input up to a layer, while all others have one."""
    missing_P = facts.missing_P
    if facts.missing is None or not missing_P.any() or missing_P.all():
        return False
    _, before_P, _ = facts.missing
    num = int(np.argmin(missing_P))
    if not num or missing_P[num:].any() or before_P[:num].any():
        return False
    cut_off_P = np.zeros(len(missing_P), dtype=bool)
    cut_off_P[:num] = True
    return cut_off_P


def _unowned_P(facts: Facts) -> bool | BoolArray:
    begin = keys.WIRING_UNOWNED
    found = {key.removeprefix(begin) for key in facts.snapshot.metrics if key.startswith(begin)}
    if not found:
        return False
    return np.array([name in found and facts.metric(begin + name) > 0 for name in facts.structure.names])


def _still_P(facts: Facts) -> bool | BoolArray:
    """Parameters that do not change by a bit, although others do."""
    if facts.still is None or facts.is_still or not facts.rate > 0 or facts.of_largest <= -X1000:
        return False
    row_P, _, _ = facts.still
    with np.errstate(invalid="ignore"):
        zero_P = facts.rows_PC[:, Column.PARAM_SUM_SQ] == 0
        has_gradient_P = (facts.g_P > math.log(NOTHING) + facts.w_P) | (zero_P & np.isfinite(facts.g_P))
    still_P: BoolArray = (row_P >= LONG) & facts.is_weight_P & ~facts.half_P & has_gradient_P
    return still_P


def _updates_lost(facts: Facts) -> bool:
    """Weights change by less than a thousandth of what the learning rate implies."""
    if not facts.rate > 0 or facts.is_still or not facts.matters:
        return False
    adaptive = facts.epsilon > 0
    if facts.epsilon > 100 * facts.typical_gradient and facts.epsilon > SMALL:
        return True
    size = 0.5 * math.log(max(facts.num_elements, 1.0)) if adaptive else facts.g
    implied = math.log(facts.rate) + size - facts.weights
    return facts.change == 0 or (facts.change > 0 and math.log(facts.change) < implied - X1000)


def _large_gain_P(facts: Facts) -> bool | BoolArray:
    if not (facts.is_fresh and facts.num_before == 0):
        return False
    limit_P = np.where(facts.structure.is_recurrent_P, 1.5, 2.5)
    unknown_P = np.isnan(facts.gain_P) & ~facts.structure.is_bias_P & facts.is_weight_P & ~facts.structure.is_norm_P
    large_P: BoolArray = (facts.gain_P > limit_P) | (unknown_P & (facts.rms_P > 10))
    return large_P


def _large_outputs(facts: Facts) -> bool:
    """The first outputs are large, and the loss is far above that of guessing among as many classes."""
    if not (facts.is_fresh and facts.is_first and facts.num_before == 0) or facts.inputs > 10:
        return False
    width = facts.fact("output_width")
    return facts.fact("output_rms") > 10 and width > 1 and facts.loss > 3 * math.log(width)


def _large_bias_P(facts: Facts) -> bool | BoolArray:
    if not (facts.is_fresh and facts.num_before == 0):
        return False
    large_P: BoolArray = facts.structure.is_bias_P & (facts.rms_P > 7) & (facts.sizes_P >= 4)
    large_P[-1] = False
    return large_P


def _constant_P(facts: Facts) -> bool | BoolArray:
    """Layers whose units are all equal: their biases have one gradient, or their weights one value."""
    if not (facts.is_fresh and facts.num_before == 0):
        return False
    low_P, high_P = facts.rows_PC[:, Column.GRAD_MIN], facts.rows_PC[:, Column.GRAD_MAX]
    is_bias_P, size_P, rms_P, gain_P = facts.structure.is_bias_P, facts.sizes_P, facts.rms_P, facts.gain_P
    equal_P = (low_P == high_P) & (high_P != 0) & is_bias_P & (size_P >= 4)
    with np.errstate(invalid="ignore"):
        exact_P = np.abs(rms_P - np.float32(rms_P).astype(float)) < 1e-13 * rms_P
        on_purpose_P = (np.abs(gain_P - 1) < 1e-3) | (np.abs(gain_P**2 - rms_P) < 1e-3 * rms_P)
    all_zero = bool(np.nanmax(gain_P, initial=0.0) == 0)
    zero_P = np.isfinite(gain_P) & bool((facts.rows_PC[:, Column.GRAD_SUM_SQ] == 0).any()) & all_zero
    value_P = exact_P & ~on_purpose_P & np.isfinite(gain_P) & (rms_P > 0) & facts.is_weight_P
    has_one_value_P = value_P | (facts.rows_PC[:, Column.PARAM_SUM_SQ] == 0)
    of_module_P = facts.structure.module_P
    equal_P &= np.isin(of_module_P, of_module_P[has_one_value_P & ~is_bias_P])
    constant_P: BoolArray = equal_P | zero_P | value_P
    return constant_P


def _changed_at_once(facts: Facts) -> bool:
    """The optimizer receives far more, or far less, than was computed, and did not before."""
    if facts.clip_usual < -X5 and facts.clip < -X5:
        return True
    return facts.clip_usual > X100 and not facts.is_clipped and abs(facts.usual) < X5


def _frozen_P(facts: Facts) -> bool | BoolArray:
    """Parameters that had a gradient before, and are no longer trainable."""
    trainable_P = facts.per_parameter("trainable")
    if not np.count_nonzero(trainable_P == 0):
        return False
    steps_P = np.isfinite(facts.rates_P)  # otherwise its optimizer steps in turn, as that of a GAN's critic
    frozen_P: BoolArray = (
        (trainable_P == 0) & ~facts.present_P & steps_P & (facts.run.had.of(facts.structure.names) > 0)
    )
    return frozen_P


def _jumping_P(facts: Facts) -> bool | BoolArray:
    """Weights whose gradient has jumped far above its own usual, while the others and the loss are usual."""
    if facts.num_before < SURE or not facts.loss_is_usual or facts.moved > MOVED:
        return False
    before_P = facts.past.rows.back(Column.GRAD_SUM_SQ, facts.structure.names)
    if not np.count_nonzero(facts.rows_PC[:, Column.GRAD_SUM_SQ] > 100 * before_P) and not facts.run.num_jumping:
        return False
    rise_P = facts.rise_P
    high_P: BoolArray = (rise_P > X30) & facts.is_weight_P & ~facts.structure.is_embedding_P
    others = np.abs(rise_P[facts.is_weight_P & ~high_P])
    others = others[np.isfinite(others)]
    facts.run.num_jumping = 0
    if not high_P.any() or not others.size or not np.median(others) < X2:
        return False
    facts.run.num_jumping = 1
    return high_P


def _grew_P(facts: Facts) -> bool | BoolArray:
    if not _is_large(facts) or facts.loss_falls or not facts.grows_twice > _fast(facts):
        return False
    grew_P: BoolArray = facts.grew_twice_P > _fast(facts)
    return grew_P


def _halved_P(facts: Facts) -> bool | BoolArray:
    if not (_is_large(facts) and facts.is_moving):
        return False
    halved_P: BoolArray = (facts.shrinks_P < -SHRUNK) & (facts.lost_P < -X2)
    return halved_P


def _most_shrink(facts: Facts) -> bool:
    if not (_is_large(facts) and facts.is_moving):
        return False
    known_P = facts.shrinks_P[np.isfinite(facts.shrinks_P)]
    return bool(known_P.size and np.median(known_P) < -SHRUNK)


def _rises_for_long(facts: Facts) -> bool:
    """The loss rises all the time, and is far above where it began."""
    losses = [*facts.before("loss"), facts.loss]
    top = facts.run.loss_top
    if len(losses) < 64 or not min(losses[-8:]) > 5 * top > 0:
        return False
    blocks = [float(np.median(losses[at : at + 8])) for at in range(len(losses) % 8, len(losses), 8)]
    return all(after > before for before, after in pairwise(blocks))


def _at_chance(facts: Facts) -> bool:
    """The loss is still that of guessing among as many classes as the model has outputs."""
    width, trainable_P = facts.fact("output_width"), facts.snapshot.trainable
    is_mostly_frozen = 2 * np.count_nonzero(trainable_P) < len(trainable_P)
    if not width > 1 or facts.step < (200 if is_mostly_frozen else 1000):  # healthy trainings stay on plateaus
        return False
    chance = math.log(width)
    return abs(facts.loss - chance) < 0.02 * chance and facts.run.loss_least > 0.95 * chance


def _creeps(facts: Facts) -> bool:
    """The loss is where it began, the gradient too, and the weights have moved by a hundredth at most."""
    if facts.step < 200 or not abs(facts.of_begin) < X2 or not facts.loss_of_first > 0.95 or facts.rate_climb > X2:
        return False
    return facts.change * facts.step < 0.01 or (facts.cosine > 0.99 and facts.change < 1e-4)


def _saturated(facts: Facts) -> bool:
    """The gradient has fallen a hundredfold, but the loss is where it began."""
    first = facts.past.first.get("loss", math.nan)
    return facts.of_begin < -X100 and abs(facts.loss - first) < 0.05 * abs(first) and facts.run.loss_least > 0.9 * first


def _falls_below(facts: Facts) -> bool:
    """A negative loss stays near its lowest, far from where it began, while the gradient grows."""
    return facts.loss_of_first < -10 and facts.loss <= 0.8 * facts.run.loss_least and facts.of_begin > X30


_NAN, _INF = Column.NUM_NAN, Column.NUM_INF


def _has_nan(facts: Facts) -> bool:
    return facts.bad and bool(np.nansum(facts.snapshot.num_nan[facts.place]) > 0)


def _share_bad(facts: Facts) -> str:
    bad, present = int(facts.bad_P.sum()), int(facts.present_P.sum())
    return f"{bad} of {present} parameters"


def _growing(facts: Facts) -> str:
    return f"{number(facts.norm)}, {times(facts.usual)} the usual {number(math.exp(min(facts.median_before, 690.0)))}"


EXPLODING: Final = ("exploding_gradient", "Exploding gradient")
VANISHING: Final = ("vanishing_gradient", "Vanishing gradient")
DEAD: Final = ("dead_gradient", "Dead gradient")
MISSING: Final = ("no_gradient", "No gradient")
UNCHANGED: Final = ("parameters_unchanged", "Parameters unchanged")
INITIAL: Final = ("initial_weights", "Initial weights")
GROW: Final = ("parameters_grow", "Parameters grow too fast")
SHRINK: Final = ("parameters_shrink", "Parameters shrink")
SPIKE: Final = ("loss_spike", "Loss spike")
BELOW: Final = ("loss_below_zero", "Loss below 0")
TIGHT: Final = ("clipping_too_tight", "Clipping too tight")
CHANGED: Final = ("gradient_changed", "Gradient changed after the backward")
RANKS: Final = ("ranks_disagree", "Ranks disagree")
STUCK: Final = ("nothing_learned", "Nothing is learned")

SYMPTOMS: Final[tuple[Symptom, ...]] = (
    Symptom(
        "nan_gradient", "NaN gradient", "ERROR", _has_nan, lambda f: f"NaN in the gradient of {_share_bad(f)}",
        always=True,
    ),
    Symptom(
        "inf_gradient", "Inf gradient", "ERROR", lambda f: f.bad and not _has_nan(f),
        lambda f: f"Inf in the gradient of {_share_bad(f)}", always=True,
    ),
    Symptom(
        "nonfinite_loss", "Non-finite loss", "ERROR",
        lambda f: f.bad_loss and not f.sample.has_nonfinite and not f.is_broken and not f.skipped,
        lambda f: "the loss is NaN or infinite, the gradients are finite", always=True,
    ),
    Symptom(
        "loss_scale_collapse", "Loss scale collapse", "ERROR",
        lambda f: (f.run.num_skipped >= 5 and (f.run.num_updates > 0 or f.scale <= 4096)) or 0 < f.scale < 1,
        lambda f: f"{f.run.num_skipped} updates in a row were skipped, the loss scale is {number(f.scale)}",
        always=True,
    ),
    Symptom(
        "not_in_optimizer", "Not in any optimizer", "ERROR", _unowned_P,
        lambda f: "trainable parameters have a gradient, but no optimizer holds them", of="parameters", always=True,
        of_begin=True,
    ),
    Symptom(
        "gradients_not_reset", "Gradients not reset", "ERROR", lambda f: f.metric(keys.WIRING_CARRIED) > 0,
        lambda f: "the gradients of the step before were still there when this step's backward added to them",
        always=True,
    ),
    Symptom(
        *RANKS, "ERROR", lambda f: replicas.others_gradient(f) and replicas.named_P(f), replicas.said_of_gradients,
        of="parameters", always=True,
    ),
    Symptom(
        *RANKS, "ERROR", lambda f: replicas.never_averaged(f) and replicas.named_P(f), replicas.said_of_gradients,
        of="parameters", always=True,
    ),
    Symptom(*RANKS, "ERROR", replicas.has_lost, replicas.said_of_average, always=True),
    Symptom(*RANKS, "WARN", replicas.averaged_by_nothing, replicas.said_of_gradients, always=True),
    Symptom(
        *RANKS, "ERROR", lambda f: (replicas.began_apart(f) or replicas.moved_apart(f)) and replicas.named_P(f),
        replicas.said_of_parameters, of="parameters", always=True,
    ),
    Symptom(
        "learning_rate_negative", "Learning rate below 0", "ERROR", lambda f: f.rate < 0,
        lambda f: f"the learning rate is {number(f.rate)}: this update increases the loss", always=True,
    ),
    Symptom(*EXPLODING, "WARN", _far_above, lambda f: f"the gradient norm is {_growing(f)}"),
    Symptom(
        *EXPLODING, "ERROR", lambda f: f.above(2) > X10 and f.seen > 5,
        lambda f: f"the gradient norm is {_growing(f)}; two in a row are {times(f.above(2))} the largest before",
    ),
    Symptom(
        *EXPLODING, "WARN", lambda f: f.above(5) > 2 * X2 and f.seen > SURE,
        lambda f: f"the gradient norm is {_growing(f)}; five in a row are {times(f.above(5))} the largest before",
    ),
    Symptom(
        *EXPLODING, "ERROR",
        lambda f: f.above(2) > X2 and f.seen > 5 and f.is_unusual and f.moved > MOVED and not f.loss_falls,
        lambda f: f"the gradient norm is {_growing(f)}, and the parameters' norm moves by {percent(f.moved)} per step",
    ),
    Symptom(
        *EXPLODING, "WARN", _grown, lambda f: f"the gradient norm is {number(f.norm)}, risen {times(f.climb)} in order",
        slow=True,
    ),
    Symptom(
        *EXPLODING, "ERROR", lambda f: f.norm > HUGE and f.past.first.get("norm", math.inf) < HUGE / 100,
        lambda f: f"the gradient norm is {number(f.norm)}",
    ),
    Symptom(
        *EXPLODING, "WARN", lambda f: f.norm > HUGE, lambda f: f"the gradient norm is {number(f.norm)} from the start",
        samples=SOON,
    ),
    Symptom(
        "gradient_spike", "Gradient spike", "INFO", _passed,
        lambda f: f"the gradient norm of step {int(f.past.scalars['step'][-1])} was "
        f"{times(f.past.scalars['usual'][-1])} the usual one, and is usual again",
    ),
    Symptom(
        *VANISHING, "WARN", lambda f: 0 < f.norm < TINY and f.of_largest >= -X10,
        lambda f: f"the gradient norm is {number(f.norm)}, and was never much larger", samples=SURE,
    ),
    Symptom(
        *VANISHING, "WARN", lambda f: f.norm > 0 and f.of_weights < 2 * math.log(NOTHING) and f.of_largest >= -X10,
        lambda f: f"the gradient norm is {number(f.norm)}, {number(math.exp(f.of_weights))} of the parameters'",
        samples=2,
    ),
    Symptom(
        *VANISHING, "WARN", lambda f: f.fell > X1000 and f.norm < TINY,
        lambda f: f"the gradient norm has fallen {times(f.fell)} at once, to {number(f.norm)}",
    ),
    Symptom(
        *VANISHING, "WARN", lambda f: f.depth > X1000,
        lambda f: f"the gradient norm falls {times(f.depth)} layer by layer, from the last back to the first",
        samples=SURE,
    ),
    Symptom(
        *VANISHING, "WARN", lambda f: f.depth > 2 * X1000,
        lambda f: f"the gradient norm falls {times(f.depth)} layer by layer, from the last back to the first",
        samples=SOON,
    ),
    Symptom(
        *VANISHING, "WARN", _faint_P, lambda f: "gradients of less than a ten-millionth of the largest one: rounding",
        samples=LONG, of="parameters",
    ),
    Symptom(
        *VANISHING, "WARN", _silent_L, lambda f: "the gradients of some layers have fallen to less than a hundredth",
        of="modules",
    ),
    Symptom(
        *VANISHING, "WARN", lambda f: f.coarse > 0.25,
        lambda f: f"{percent(f.coarse)} of the elements are 0, the smallest others are the smallest numbers of float16",
        samples=SURE,
    ),
    Symptom(*DEAD, "WARN", _dead_L, lambda f: "the same units have no gradient in sample after sample", of="modules"),
    Symptom(
        *DEAD, "WARN", _cut_L, lambda f: "layers without any gradient, before a layer whose inputs are 0", of="modules",
    ),
    Symptom(*DEAD, "WARN", _died_L, lambda f: "half of a layer's units lost their gradient at once", of="modules"),
    Symptom(
        *DEAD, "WARN", _emptied_L, lambda f: "weights without a gradient beside a bias with one: inputs of 0",
        samples=SURE, of="modules",
    ),
    Symptom(
        *MISSING, "WARN",
        lambda f: f.run.num_pauses < SOON
        and f.run.num_zero >= (SURE if not f.loss_known else 100 if f.loss == 0 else SOON),
        lambda f: f"all gradients are exactly 0, for {f.run.num_zero} samples",
    ),
    Symptom(
        *MISSING, "WARN", lambda f: f.run.num_empty >= SOON,
        lambda f: f"no gradient has arrived at all, for {f.run.num_empty} samples",
    ),
    Symptom(*MISSING, "WARN", _lost_P, lambda f: "trainable parameters without a gradient", of="parameters"),
    Symptom(
        *MISSING, "WARN", _cut_off_P, lambda f: "no gradient has ever reached the layers from the input up to one",
        samples=SURE, of="parameters",
    ),
    Symptom(
        *UNCHANGED, "ERROR", lambda f: f.is_still and f.matters and f.rate == f.rate,
        lambda f: f"no parameter changes by a single bit, although the gradient norm is {number(f.norm)} "
        f"(learning rate {number(f.rate)})",
        samples=SURE,
    ),
    Symptom(
        *UNCHANGED, "ERROR", lambda f: f.is_still and f.matters and f.rate != f.rate,
        lambda f: f"no parameter changes, although the gradient norm is {number(f.norm)}: no optimizer step was seen",
        samples=2 * SURE, always=True,
    ),
    Symptom(
        *UNCHANGED, "ERROR", lambda f: f.moves_nothing and f.of_largest > -X1000 and f.norm > 0,
        lambda f: f"the learning rate is {number(f.rate)}: no update changes more than a millionth of the parameters",
        samples=LONG, share=0.1,
    ),
    Symptom(
        *UNCHANGED, "WARN", _updates_lost,
        lambda f: f"weights change by {number(f.change)} of their size per step, not a thousandth of what the learning "
        f"rate {number(f.rate)} implies",
        samples=LONG,
    ),
    Symptom(
        *UNCHANGED, "WARN", _still_P, lambda f: "parameters do not change by a single bit, although others do",
        of="parameters",
    ),
    Symptom(
        *INITIAL, "WARN", _large_gain_P, lambda f: "weights are far larger than what keeps a signal's size",
        of="parameters", of_begin=True,
    ),
    Symptom(
        *INITIAL, "WARN", lambda f: f.is_fresh and f.is_first and f.gain < 0.03,
        lambda f: f"weights are {number(f.gain)} times what keeps a signal's size", of_begin=True,
    ),
    Symptom(*INITIAL, "WARN", _large_bias_P, lambda f: "biases are far from 0", of="parameters", of_begin=True),
    Symptom(
        "equal_units", "Equal units", "WARN", _constant_P,
        lambda f: "all units of a layer begin equal, and get equal updates", of="parameters", of_begin=True,
    ),
    Symptom(
        *INITIAL, "WARN", _large_outputs,
        lambda f: f"the first outputs have a root mean square of {number(f.fact('output_rms'))}, the first loss is "
        f"{number(f.loss)}",
        of_begin=True,
    ),
    Symptom(
        "large_inputs", "Large inputs", "WARN",
        lambda f: f.is_first and f.inputs > 50 and not f.structure.begins_with_norm,
        lambda f: f"the inputs have a root mean square of {number(f.inputs)}", samples=2, of_begin=True,
    ),
    Symptom(
        "zero_inputs", "Inputs of 0", "WARN", lambda f: f.fact("input_rms") == 0, lambda f: "all inputs are 0",
        samples=SOON,
    ),
    Symptom(
        "repeated_inputs", "Repeated inputs", "WARN", lambda f: f.run.num_repeated >= SURE and f.run.num_varied >= SURE,
        lambda f: f"the same inputs {f.run.num_repeated + 1} measured steps in a row, after {f.run.num_varied} others",
    ),
    Symptom(*GROW, "ERROR", _grew_P, lambda f: f"weights grow by {percent(f.grows_twice)} per step", of="parameters"),
    Symptom(
        *GROW, "ERROR", lambda f: f.moved_twice > _fast(f) and f.left > 0 and not f.loss_falls and _is_large(f),
        lambda f: f"the parameters' norm moves by {percent(f.moved_twice)} per step",
    ),
    Symptom(
        *GROW, "WARN",
        lambda f: f.leap > (X2 + 0.2) * (1 if f.gap == 1 else 2) and f.step > EARLY
        and not f.loss_falls and _is_large(f),
        lambda f: f"a weight has grown {times(f.leap)} since the sample before",
    ),
    Symptom(*SHRINK, "WARN", _most_shrink, lambda f: "most weights shrink in update after update"),
    Symptom(*SHRINK, "WARN", _halved_P, lambda f: "weights have lost half of their norm", of="parameters"),
    Symptom(
        *SHRINK, "WARN", lambda f: f.left < -X5 and _is_large(f),
        lambda f: f"{percent(math.exp(f.left))} of the parameters' first norm is left",
    ),
    Symptom(
        *TIGHT, "WARN", lambda f: f.clip > X1000 and (f.of_largest <= -X2 or f.num_before < SURE),
        lambda f: f"gradients are clipped to 1/{times(f.clip)[:-1]} of their norm", samples=SOON,
    ),
    Symptom(
        *TIGHT, "WARN", lambda f: f.clip > X1000,
        lambda f: f"gradients are clipped to 1/{times(f.clip)[:-1]} of their norm", samples=2 * SURE,
    ),
    Symptom(
        *CHANGED, "WARN", lambda f: f.clip < -X5,
        lambda f: f"the optimizer receives {times(f.clip)} the gradient that the backward computed", samples=SOON,
    ),
    Symptom(
        *CHANGED, "WARN", _changed_at_once,
        lambda f: f"the optimizer receives {times(f.clip)} {'less' if f.clip > 0 else 'more'} than was computed",
    ),
    Symptom(
        "layer_jump", "One layer's gradient jumps", "WARN", _jumping_P,
        lambda f: "the gradients of a few parameters have jumped, all others and the loss are as usual", samples=SOON,
        of="parameters",
    ),
    Symptom(
        *SPIKE, "WARN", lambda f: f.loss_stays_above > 1 and f.loss > 0.01 * f.run.loss_top and f.loss_rises,
        lambda f: f"the loss has risen to {number(f.loss)} and stays there",
    ),
    Symptom(
        *SPIKE, "WARN", _rises_for_long,
        lambda f: f"the loss rises all the time, from {number(f.run.loss_top)} at first to {number(f.loss)}", slow=True,
    ),
    Symptom(
        *BELOW, "WARN", lambda f: f.loss_below_0, lambda f: f"the loss has fallen to {number(f.loss)}, and was above 0",
    ),
    Symptom(
        *BELOW, "WARN", _falls_below,
        lambda f: f"the loss falls to {number(f.loss)} while the gradient norm has grown {times(f.of_begin)}",
        samples=SOON, slow=True,
    ),
    Symptom(
        "layers_frozen", "Layers frozen", "INFO", _frozen_P, lambda f: "parameters that were trained are now frozen",
        of="parameters",
    ),
    Symptom(
        *STUCK, "WARN", _at_chance,
        lambda f: f"the loss is still {number(f.loss)}, that of guessing among {f.fact('output_width'):.0f} outputs",
        samples=LONG,
    ),
    Symptom(
        *STUCK, "WARN", _creeps,
        lambda f: f"the loss is {percent(f.loss_of_first)} of the first, and weights change by "
        f"{number(f.change)} of their size per step",
        samples=LONG,
    ),
    Symptom(
        *STUCK, "WARN", _saturated,
        lambda f: f"the gradient has fallen {times(f.of_begin)}, and the loss is still {number(f.loss)}", samples=SURE,
    ),
)  # fmt: skip
