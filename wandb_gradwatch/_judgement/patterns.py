"""Why: one row per way in which a cause shows itself. The first row that fits, and that no fact refutes, is told.

A row that does not decide alone names its rival, which is told as well unless a fact refutes it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from .._analysis.formatting import number
from ..snapshot import keys
from . import replicas
from .causes import CAUSES, Cause
from .evidence import Evidence
from .facts import X3, X10, X30, X100
from .symptoms import percent, times


@dataclass(frozen=True)
class Pattern:
    """One row.

    Args:
        cause: the identifier of a cause.
        kinds: letters of KINDS, of the symptoms that it explains.
        when: whether the facts show it.
        shows: the facts that speak for it, in words.
        rival: the identifier of another cause that the same facts allow.
    """

    cause: str
    kinds: str
    when: Callable[[Evidence], bool]
    shows: Callable[[Evidence], str] = lambda _: ""
    rival: str = ""


KINDS: Final = {
    "exploding_gradient": "E", "gradient_spike": "Q", "nan_gradient": "N", "inf_gradient": "N", "nonfinite_loss": "F",
    "loss_spike": "L", "parameters_grow": "G", "parameters_shrink": "S", "vanishing_gradient": "V",
    "dead_gradient": "D", "no_gradient": "M", "parameters_unchanged": "U", "initial_weights": "I", "equal_units": "Y",
    "clipping_too_tight": "C", "loss_scale_collapse": "A", "loss_below_zero": "B", "large_inputs": "X",
    "not_in_optimizer": "O", "gradients_not_reset": "Z", "learning_rate_negative": "R", "gradient_changed": "H",
    "zero_inputs": "0", "layers_frozen": "K", "repeated_inputs": "2", "layer_jump": "J", "nothing_learned": "T",
    "ranks_disagree": "P",
}  # fmt: skip
_UP: Final = "EQGLNFA"  # what too large updates lead to
_DEEP: Final = 12  # layers
_HUGE_FIRST: Final = X10  # a first gradient of ten times the parameters: no ordinary inputs and losses make it


def _rate_rose(e: Evidence) -> bool:
    return e.rate_rise > X3 and (e.moved_twice > 0.005 or e.changed > 0.02)


def _bad_inputs(e: Evidence) -> bool:
    return e.inputs_are_bad


def _forward_overflows(e: Evidence) -> bool:
    return e.f.fact("output_num_nonfinite") > 0 and e.f.fact("output_largest") == 65504 and e.inputs_are_good


def _zeros(e: Evidence) -> bool:
    return e.f.all_zero


_PATTERNS: Final = (
    # What decides alone, whatever else is there
    Pattern("not_in_optimizer", "O", lambda e: True),
    Pattern(
        "contribution_lost", "P", lambda e: replicas.has_lost(e.f),
        lambda e: f"its sum is off by {number(e.f.ranks(keys.AVERAGE_ERROR))} of the norm, that rank's share",
    ),
    Pattern(
        "replicas_began_apart", "P", lambda e: replicas.began_apart(e.f),
        lambda e: f"{percent(e.f.fact('replicas_begun_averaged'))} of these parameters got equal gradients",
    ),
    Pattern(
        "rank_gradient", "P", lambda e: replicas.others_gradient(e.f),
        lambda e: f"the gradients of {percent(e.f.fact('replicas_gradients'))} of the parameters differ",
    ),
    Pattern(
        "not_averaged", "P", lambda e: not replicas.moved_apart(e.f),
        lambda e: f"the gradients of {percent(e.f.fact('replicas_gradients'))} of the parameters differ",
    ),
    Pattern("replica_changed", "P", lambda e: True, lambda e: "all ranks apply the same gradients"),
    Pattern("rank_gradient", "P", lambda e: True, lambda e: "the gradients have differed before"),
    Pattern(
        "zero_grad_missing", "Z", lambda e: True, lambda e: "gradients were neither None nor 0 before the backward",
    ),
    Pattern("schedule", "R", lambda e: True, lambda e: f"the learning rate is {number(e.f.rate)}"),
    Pattern(
        "inputs_zero", "0DMVTA", lambda e: e.f.fact("input_zero_ratio") == 1,
        lambda e: "all elements of the inputs are 0",
    ),
    Pattern("inputs_repeated", "2", lambda e: True),
    Pattern(
        "nonfinite_inputs", "NFA", _bad_inputs,
        lambda e: f"{e.f.fact('input_num_nonfinite'):.0f} elements of the inputs are NaN or infinite",
    ),
    Pattern(
        "code_after_backward", "NH", lambda e: e.f.snapshot.arose_after_backward[e.f.place],
        lambda e: "the backward left finite gradients",
    ),
    Pattern("code_after_backward", "H", lambda e: True, lambda e: ""),
    Pattern(
        "learning_rate_zero", "U", lambda e: e.f.rate == 0 or e.rate_is_zero_there,
        lambda e: "the learning rate is 0" if e.f.rate == 0 else "the learning rate of their group is 0",
    ),
    Pattern("learning_rate_zero", "U", lambda e: e.f.moves_nothing, lambda e: f"it is {number(e.f.rate)}"),
    Pattern(
        "optimizer_settings", "U", lambda e: e.f.epsilon > 100 * e.f.typical_gradient,
        lambda e: f"eps is {number(e.f.epsilon)}, the gradient's elements are about {number(e.f.typical_gradient)}",
    ),
    Pattern(
        "learning_rate_too_high", _UP + "VDSMTB", _rate_rose,
        lambda e: f"the learning rate rose {times(e.rate_rise)} in the samples before",
    ),
    Pattern(
        "data_changed", "EQLGDAN", lambda e: abs(e.inputs_jump) > X3 and e.inputs_stay,
        lambda e: f"the inputs are {number(math.exp(e.inputs_jump))} times their usual size, and stay so",
    ),
    Pattern(
        "bad_batch", "EQLG", lambda e: abs(e.inputs_jump) > X3,
        lambda e: f"the inputs were {number(math.exp(e.inputs_jump))} times their usual size", "data_changed",
    ),
    Pattern("wrong_sign", "B", lambda e: e.f.loss_below_0, lambda e: "the loss fell through 0", "unbounded_loss"),
    Pattern("wrong_sign", "B", lambda e: True, lambda e: f"the loss is {number(e.f.loss)}", "unbounded_loss"),
    # The beginning
    Pattern(
        "data_scale", _UP + "CDVXT", lambda e: e.run.inputs_first > 50 and e.is_early,
        lambda e: f"the first inputs have a root mean square of {number(e.run.inputs_first)}",
    ),
    Pattern(
        "data_scale", "T", lambda e: e.loss_begin > 1000, lambda e: f"the first loss is {number(e.loss_begin)}",
    ),
    Pattern(
        "data_scale", _UP, lambda e: e.loss_begin > 1e6, lambda e: f"the first loss is {number(e.loss_begin)}",
    ),
    Pattern("data_scale", "X", lambda e: True),
    Pattern("constant_initialisation", "Y", lambda e: True),
    Pattern("poor_initialisation", "I", lambda e: True),
    Pattern(
        "poor_initialisation", _UP, lambda e: e.run.least_gain < 1e-3 and e.step < 10,
        lambda e: f"the weights of a layer are {number(e.run.least_gain)} times what keeps a signal's size",
    ),
    Pattern(
        "recurrence", "E", lambda e: e.recurrent_share > 0.3 and e.run.of_first > _HUGE_FIRST and e.is_start,
        lambda e: f"{percent(e.recurrent_share)} of the first gradient is in recurrent layers", "data_scale",
    ),
    Pattern(
        "poor_initialisation", _UP + "VDT", lambda e: e.run.gain_first > 4 or e.run.gain_first < 0.04,
        lambda e: f"the first weights are {number(e.run.gain_first)} times what keeps a signal's size",
    ),
    Pattern(
        "depth", _UP, lambda e: e.run.depth_first < -X100,
        lambda e: f"the first norm grows {times(e.run.depth_first)} from the last layer back to the first",
    ),
    Pattern(
        "data_scale", _UP + "C",
        lambda e: e.run.of_first > _HUGE_FIRST + X10 and e.is_early and e.structure.num_layers < _DEEP,
        lambda e: f"the first gradient is {times(e.run.of_first)} the parameters",
    ),
    # Weights
    Pattern(
        "broken_weights", "S", lambda e: e.f.moved * e.f.gap > 0.5, lambda e: f"one update took {percent(e.f.moved)}",
        "weight_decay",
    ),
    Pattern("weight_decay", "EG", lambda e: e.alike and e.step > 5, lambda e: "all parameters grow by one factor"),
    Pattern(
        "weight_decay", "S", lambda e: True,
        lambda e: f"{percent(math.exp(min(e.f.left, 0)))} of the first norm is left",
    ),
    Pattern(
        "unscale_missing", "C", lambda e: e.f.scale > 1000, lambda e: f"the loss scale is {number(e.f.scale)}",
        "clipping_too_tight",
    ),
    Pattern(
        "data_scale", "C", lambda e: e.run.of_first > _HUGE_FIRST and e.loss_begin > 1000,
        lambda e: f"the first loss is {number(e.loss_begin)}, its gradient {times(e.run.of_first)} the parameters",
        "clipping_too_tight",
    ),
    Pattern("clipping_too_tight", "C", lambda e: True, lambda e: f"gradients shrink to 1/{times(e.f.clip)[:-1]}"),
    Pattern("no_step", "U", lambda e: e.f.rate != e.f.rate, lambda e: "no optimizer has stepped", "learning_rate_zero"),
    Pattern(
        "updates_undone", "U", lambda e: True, lambda e: f"the learning rate is {number(e.f.rate)}",
        "learning_rate_zero",
    ),
    # NaN and Inf
    Pattern(
        "loss_scale", "AN", lambda e: e.f.scale > 1 and e.has_inf_only and e.loss_is_good and not e.is_broken,
        lambda e: f"Inf at the loss scale {number(e.f.scale)}, while the loss is finite",
    ),
    Pattern(
        "broken_weights", "A", lambda e: e.is_broken, lambda e: "a parameter is not finite", "learning_rate_too_high",
    ),
    Pattern(
        "overflow", "NFA", _forward_overflows,
        lambda e: f"{e.f.fact('output_num_nonfinite'):.0f} elements of the outputs, in float16, are not finite",
    ),
    Pattern(
        "optimizer_settings", "NFA", lambda e: e.is_broken and not e.had_grown and e.broken_where_zero,
        lambda e: "parameters are not finite exactly where the gradient was 0",
    ),
    Pattern(
        "learning_rate_too_high", "NFA", lambda e: e.is_broken and e.had_grown,
        lambda e: "parameters are not finite after the gradient had grown",
    ),
    Pattern(
        "optimizer_settings", "NFA", lambda e: e.is_broken and e.f.gap == 1,
        lambda e: "parameters are not finite after an ordinary gradient", "broken_weights",
    ),
    Pattern(
        "overflow", "N", lambda e: not e.is_broken and e.loss_factor > 10,
        lambda e: f"the loss is 10^{e.loss_factor:.0f} times all before", "bad_batch",
    ),
    Pattern(
        "nonfinite_inputs", "N", lambda e: not e.is_broken and e.bias_is_clean and e.bad_is_first and not e.f.bad_loss,
        lambda e: f"the weights of {e.bad_at} are affected, its bias is not", "bad_batch",
    ),
    Pattern(
        "learning_rate_too_high", "NF", lambda e: e.f.rate_climb > X10 and e.is_broken,
        lambda e: f"the learning rate has risen {times(e.f.rate_climb)}",
    ),
    Pattern(
        "unseen", "N", lambda e: e.is_broken and e.f.gap > 1,
        lambda e: f"the parameters were finite {e.f.gap:.0f} steps before, and are not any more",
    ),
    Pattern(
        "wrong_sign", "ENLG", lambda e: e.f.loss_of_first < -5 and e.f.loss <= e.run.loss_least,
        lambda e: f"the loss falls without bound, to {number(e.f.loss)}", "unbounded_loss",
    ),
    Pattern("another_rank", "N", lambda e: not e.is_broken and e.is_of_another_rank),
    Pattern(
        "another_rank", "N", lambda e: not e.is_broken and e.may_be_of_another_rank,
        lambda e: "all that this rank has seen of its own batch is finite", "invalid_operation",
    ),
    Pattern(
        "invalid_operation", "N", lambda e: not e.is_broken and e.loss_is_good,
        lambda e: f"the loss is finite, the gradient is not from {e.bad_at} back",
    ),
    Pattern("learning_rate_too_high", "NF", lambda e: e.had_grown, lambda e: "the gradient had grown before"),
    Pattern(
        "invalid_operation", "NA", lambda e: not e.is_broken and e.clean_after and not e.f.bad_loss,
        lambda e: f"the gradient is not finite from {e.bad_at} back",
    ),
    Pattern(
        "loss_or_labels", "NFA", lambda e: e.f.bad_loss and e.outputs_are_good and not e.is_broken,
        lambda e: "the outputs are finite, the loss is not",
    ),
    Pattern(
        "invalid_operation", "NFA", lambda e: e.outputs_are_bad and e.inputs_are_good and not e.is_broken,
        lambda e: "the inputs are finite, the outputs are not",
    ),
    Pattern(
        "loss_or_labels", "NFA", lambda e: e.f.bad_loss and not e.is_broken, lambda e: "the loss is not finite",
        "invalid_operation",
    ),
    Pattern(
        "overflow", "A", lambda e: e.has_inf_only, lambda e: f"Inf at the loss scale {number(e.f.scale)}", "loss_scale",
    ),
    Pattern("invalid_operation", "A", lambda e: e.nan_share > 0, lambda e: "NaN at any loss scale", "overflow"),
    # What rises
    Pattern(
        "bad_batch", "Q", lambda e: not e.only_parameters, lambda e: "the norm was usual before and is usual again",
    ),
    Pattern(
        "small_batch_norm", "E", lambda e: e.is_behind_norm,
        lambda e: f"far above usual from {e.edge_at} back, behind a normalisation", "backward_scaled",
    ),
    Pattern(
        "backward_scaled", "EQ", lambda e: bool(e.edge_at) and e.f.loss_is_usual,
        lambda e: f"usual up to {e.edge_after}, far above from {e.edge_at} back, and the loss is usual",
    ),
    Pattern(
        "backward_scaled", "EQ", lambda e: bool(e.only_parameters) and e.f.loss_is_usual and not e.moves_far,
        lambda e: f"only the gradient of {e.only_parameters[0]} is far above usual, and the loss is usual",
    ),
    Pattern("backward_scaled", "J", lambda e: True, lambda e: "the others and the loss are usual"),
    Pattern(
        "small_batch_norm", "EVDT",
        lambda e: e.structure.has_batch_norm and (e.is_tiny_batch or e.scatter_before_norm > 1.2),
        lambda e: "batch norm over few inputs",
    ),
    Pattern(
        "recurrence", "EN",
        lambda e: e.recurrent_share > 0.3 and e.jump > X3
        and not (e.f.is_clipped or e.moves_far or e.loss_factor > 0.5),
        lambda e: f"{percent(e.recurrent_share)} of it is in recurrent layers", "learning_rate_too_high",
    ),
    Pattern(
        "broken_weights", "EGL", lambda e: e.one_moved > 0.5 and e.step > 10 and not e.moves_far,
        lambda e: "one update changed a weight far more than all before", "learning_rate_too_high",
    ),
    Pattern(
        "attention_logits", "E", lambda e: e.attention_share > 0.8 and e.step > 10,
        lambda e: f"{percent(e.attention_share)} of it is in attention", "learning_rate_too_high",
    ),
    Pattern(
        "routing", "E", lambda e: e.router_share > 0.8, lambda e: f"{percent(e.router_share)} of it is in the router",
    ),
    Pattern(
        "backward_scaled", "E", lambda e: bool(e.only_branch) and e.f.loss_is_usual,
        lambda e: f"only {e.only_branch} is far above usual",
    ),
    Pattern(
        "learning_rate_too_high", _UP + "VDT", lambda e: e.f.rate_climb > X10 and e.moved_twice > 0.005,
        lambda e: f"the learning rate has risen {times(e.f.rate_climb)}",
    ),
    Pattern(
        "depth", _UP, lambda e: e.run.of_first > _HUGE_FIRST and e.structure.num_layers >= _DEEP and e.is_early,
        lambda e: f"the first gradient is {times(e.run.of_first)} the parameters; {e.structure.num_layers} layers",
        "data_scale",
    ),
    Pattern(
        "learning_rate_too_high", _UP, lambda e: e.moves_far and not e.gradient_came_first,
        lambda e: f"the parameters' norm moves by {percent(e.moved_twice)} per step",
    ),
    Pattern(
        "data_scale", _UP + "D", lambda e: e.run.of_first > _HUGE_FIRST and e.is_early,
        lambda e: f"the first gradient is {times(e.run.of_first)} the parameters", "learning_rate_too_high",
    ),
    Pattern(
        "learning_rate_too_high", "EQGL", lambda e: e.update_came_first and not e.gradient_came_first,
        lambda e: f"an update before it moved the parameters' norm by {percent(e.moved_before)}", "broken_weights",
    ),
    Pattern(
        "wrong_sign", "L", lambda e: e.f.climb > 3 and e.step < 100, lambda e: "the loss rises from the start",
        "learning_rate_too_high",
    ),
    Pattern(
        "data_changed", "E", lambda e: e.gradient_came_first and e.stayed >= 2,
        lambda e: f"at step {e.onset_step} the norm rose {times(e.jump)} and stays", "data_scale",
    ),
    Pattern(
        "bad_batch", "EQ", lambda e: e.gradient_came_first and e.stayed < 2,
        lambda e: f"at step {e.onset_step} the norm was {times(e.jump)} the usual one", "data_changed",
    ),
    Pattern(
        "learning_rate_too_high", "EGL", lambda e: e.f.climb > 3,
        lambda e: f"the gradient norm grew {times(e.f.climb)} step by step", "data_scale",
    ),
    Pattern("data_changed", "L", lambda e: True, lambda e: "the loss has a new level", "learning_rate_too_high"),
    Pattern(
        "learning_rate_too_high", "G", lambda e: True, lambda e: "weights grow in update after update", "data_scale",
    ),
    Pattern("bad_batch", "E", lambda e: e.f.num_before > 5, lambda e: "the norm jumps", "data_changed"),
    Pattern(
        "learning_rate_too_high", "E", lambda e: True, lambda e: "the norm jumps within the first samples",
        "data_scale",
    ),
    # What falls silent
    Pattern(
        "underflow", "VMDT", lambda e: e.f.coarse > 0.05,
        lambda e: f"{percent(e.f.coarse)} of the elements are 0, the smallest others are the smallest of float16",
    ),
    Pattern(
        "underflow", "M", lambda e: e.f.is_half and not e.f.scale > 1 and e.f.loss > 0,
        lambda e: "the outputs are float16, and there is no loss scale", "dead_units",
    ),
    Pattern("routing", "DMV", lambda e: e.are_experts),
    Pattern("frozen_layers", "K", lambda e: True),
    Pattern("unused_layers", "M", lambda e: e.f.is_empty),
    Pattern(
        "dead_units", "M", lambda e: _zeros(e) and e.past.num_seen > 3, lambda e: "gradients were there before",
        "unused_layers",
    ),
    Pattern("poor_initialisation", "M", _zeros, lambda e: "all gradients were 0 from the start", "dead_units"),
    Pattern("frozen_layers", "M", lambda e: e.places[:1] == [0], lambda e: "from the input on", "unused_layers"),
    Pattern("unused_layers", "M", lambda e: True, lambda e: "", "frozen_layers"),
    Pattern(
        "learning_rate_too_high", "VDT", lambda e: e.moves_far and not e.dead_from_start,
        lambda e: f"the parameters' norm moves by {percent(e.moved_twice)} per step",
    ),
    Pattern(
        "data_changed", "D",
        lambda e: e.is_first_empty and not e.dead_from_start and not e.f.fact("input_zero_ratio") < 1,
        lambda e: "the inputs of the first layer are 0", "inputs_zero",
    ),
    Pattern(
        "dead_units", "D", lambda e: e.learns_in_front and not e.dead_from_start,
        lambda e: "a layer in front of them has a gradient", "backward_zeroed",
    ),
    Pattern("unused_layers", "D", lambda e: e.is_last_dead, lambda e: "even the last layer has none", "dead_units"),
    Pattern(
        "poor_initialisation", "D", lambda e: e.dead_from_start and e.is_early, lambda e: "dead from the first step on",
        "dead_units",
    ),
    Pattern(
        "dead_units", "D", lambda e: e.feeds_nothing or e.feeds_relu,
        lambda e: "the layers after them get nothing but 0",
    ),
    Pattern(
        "learning_rate_too_high", "D", lambda e: e.died_slowly and e.f.left > 0,
        lambda e: "one unit died after the other", "dead_units",
    ),
    Pattern("dead_units", "D", lambda e: True, lambda e: "", "unused_layers"),
    Pattern(
        "learning_rate_too_high", "V",
        lambda e: e.f.depth > X100 and abs(e.run.depth_first) < e.f.depth / 2 and e.is_early,
        lambda e: f"the norm falls {times(e.f.depth)} layer by layer, and did not at first",
    ),
    Pattern(
        "saturation", "V", lambda e: e.f.depth > X100 and e.structure.squashes,
        lambda e: f"the norm falls {times(e.f.depth)} layer by layer, and the model has squashing layers",
        "poor_initialisation",
    ),
    Pattern(
        "poor_initialisation", "V", lambda e: e.f.depth > X100,
        lambda e: f"the norm falls {times(e.f.depth)} layer by layer", "depth",
    ),
    Pattern(
        "loss_reduction", "V", lambda e: e.of == "" and e.f.of_begin == e.f.of_begin and e.f.of_begin > -X10,
        lambda e: f"the gradient norm was {number(e.f.norm)} from the start", "underflow",
    ),
    Pattern(
        "saturation", "VT", lambda e: e.kind == "vanishing_gradient" or e.f.of_begin < -X30, lambda e: "", "dead_units",
    ),
    Pattern(
        "learning_rate_too_low", "T", lambda e: e.f.change * e.step < 0.01 or (e.f.cosine > 0.9 and e.f.change < 1e-3),
        lambda e: f"weights change by {number(e.f.change)} of their size per step",
    ),
    Pattern("no_signal", "T", lambda e: True, lambda e: "the loss is that of guessing", "learning_rate_too_low"),
)  # fmt: skip
PATTERNS: Final = {
    kind: tuple(pattern for pattern in _PATTERNS if letter in pattern.kinds) for kind, letter in KINDS.items()
}


@dataclass(frozen=True)
class Explanation:
    """A cause that the facts allow, the facts that speak for it, and a rival that they allow as well."""

    cause: Cause
    shows: str
    rival: Cause | None


def explain(evidence: Evidence) -> Explanation | None:
    """The first cause whose pattern fits and that no fact refutes; None where none is left."""
    for pattern in PATTERNS.get(evidence.kind, ()):
        cause = CAUSES[pattern.cause]
        if pattern.when(evidence) and not cause.is_refuted(evidence):
            rival = CAUSES[pattern.rival] if pattern.rival else None
            if rival is not None and rival.is_refuted(evidence):
                rival = None
            return Explanation(cause, pattern.shows(evidence), rival)
    return None
