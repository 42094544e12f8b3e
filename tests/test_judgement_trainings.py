"""Small real trainings, each with one fault: the incident that is told, and its cause, at two cadences."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
import trainings
from judging import (
    Found,
    Loop,
    Scaled,
    Watchable,
    classifier,
    judged,
    scale_parameters,
    with_inputs,
    with_loss,
    with_output,
    with_rate,
)
from torch import nn

from wandb_gradwatch._judgement.incident import Incident

AT = 60  # the step at which a fault begins that does not begin with the training
STEPS, SPARSE_STEPS, SPARSE = 120, 400, 20
Make = Callable[[], Any]


@dataclass(frozen=True)
class Fault:
    """A training, the kinds of incidents that may be told first, and the causes of which one must be named.

    `sparse`: every 20th step shows the fault as well. It does not where the fault is in a single step, where only the
    steps right before show what it is, or where the first step must be seen.
    """

    make: Make
    kinds: frozenset[str]
    causes: frozenset[str]
    sparse: bool


FAULTS: dict[str, Fault] = {}


def fault(kinds: str, causes: str, *, sparse: bool = False) -> Callable[[Make], Make]:
    def register(make: Make) -> Make:
        FAULTS[make.__name__] = Fault(make, frozenset(kinds.split()), frozenset(causes.split()), sparse)
        return make

    return register


EXPLODES = "exploding_gradient gradient_spike parameters_grow loss_spike nan_gradient inf_gradient dead_gradient"


@fault(EXPLODES, "learning_rate_too_high")
def rate_1000_times_too_high() -> Loop:
    return classifier(lr=50.0)


@fault(EXPLODES, "learning_rate_too_high")
def adams_rate_too_high() -> Loop:
    return classifier(lr=3.0, optimizer=torch.optim.Adam)


@fault(EXPLODES, "learning_rate_too_high")
def transformer_with_a_rate_100_times_too_high() -> Any:
    return Watchable(trainings.wild_transformer())


@fault(EXPLODES, "learning_rate_too_high")
def rate_jumps() -> Loop:
    return with_rate(classifier(), lambda step: 0.05 if step < AT else 50.0)


@fault(EXPLODES, "bad_batch data_changed")
def one_batch_of_large_inputs() -> Loop:
    return with_inputs(classifier(lr=1e-3), lambda x, step: x * 3000 if step == AT else x)


@fault(EXPLODES, "data_changed data_scale bad_batch")
def inputs_that_are_no_longer_normalised() -> Loop:
    return with_inputs(classifier(lr=1e-3), lambda x, step: x * 300 if step >= AT else x)


@fault("nan_gradient nonfinite_loss", "nonfinite_inputs")
def nan_in_a_batch() -> Loop:
    return with_inputs(classifier(), lambda x, step: x * math.nan if step == AT else x)


@fault("nan_gradient", "invalid_operation")
def nan_from_a_square_root_of_0() -> Any:
    return Watchable(trainings.invalid_operation())


@fault("nan_gradient inf_gradient nonfinite_loss", "loss_or_labels invalid_operation")
def logarithm_of_0() -> Loop:
    return with_loss(classifier(), lambda loss, step: loss - torch.log(0 * loss) if step == AT else loss)


@fault("nan_gradient nonfinite_loss", "broken_weights optimizer_settings")
def nan_written_into_a_weight() -> Loop:
    loop = classifier()

    def write(step: int) -> None:
        if step == AT:
            loop.model[2].weight.data[0, 0] = math.nan

    loop.after.append(write)
    return loop


@fault("nan_gradient", "code_after_backward")
def nan_made_after_the_backward() -> Loop:
    loop = classifier()
    loop.after_backward.append(lambda step: loop.model[2].weight.grad.mul_(math.nan if step == AT else 1.0))
    return loop


@fault("dead_gradient", "dead_units poor_initialisation", sparse=True)
def a_layer_that_never_fires() -> Loop:
    loop = classifier()
    nn.init.constant_(loop.model[2].bias, -6.0)
    return loop


@fault(
    "dead_gradient no_gradient exploding_gradient",
    "dead_units learning_rate_too_high broken_weights unused_layers",
    sparse=True,
)
def a_layer_that_stops_firing() -> Loop:
    loop = classifier()
    loop.after.append(lambda step: loop.model[2].bias.data.fill_(-100.0) if step == AT else None)
    return loop


@fault("no_gradient", "unused_layers frozen_layers", sparse=True)
def a_layer_cut_off() -> Loop:
    return with_output(classifier(), "2", lambda output, step: output.detach())


@fault("no_gradient", "unused_layers frozen_layers", sparse=True)
def a_layer_cut_off_later() -> Loop:
    return with_output(classifier(), "2", lambda output, step: output.detach() if step >= AT else output)


@fault("parameters_unchanged", "learning_rate_zero", sparse=True)
def rate_0() -> Loop:
    return classifier(lr=0.0)


@fault("parameters_unchanged", "updates_undone", sparse=True)
def updates_undone() -> Loop:
    loop = classifier()
    kept = {name: value.clone() for name, value in loop.model.state_dict().items()}
    loop.after.append(lambda step: loop.model.load_state_dict(kept))
    return loop


@fault("parameters_unchanged", "optimizer_settings learning_rate_zero")
def eps_too_large() -> Loop:
    return classifier(lr=1e-3, optimizer=torch.optim.Adam, eps=1e6)


@fault("not_in_optimizer", "not_in_optimizer", sparse=True)
def head_replaced() -> Loop:
    loop = classifier()
    loop.model[4] = nn.Linear(32, 4)
    return loop


@fault("gradients_not_reset", "zero_grad_missing", sparse=True)
def zero_grad_forgotten() -> Loop:
    loop = classifier()
    loop.zeroes = False
    return loop


@fault("learning_rate_negative", "schedule", sparse=True)
def schedule_below_0() -> Loop:
    return with_rate(classifier(), lambda step: 0.05 * (1 - step / 80))


@fault("initial_weights exploding_gradient", "poor_initialisation")
def weights_30_times_too_large() -> Loop:
    loop = classifier(lr=1e-4)
    scale_parameters((loop.model[0].weight, loop.model[2].weight), 30.0)
    return loop


@fault("initial_weights vanishing_gradient", "poor_initialisation")
def weights_next_to_0() -> Any:
    return Watchable(trainings.small_initialisation())


@fault("equal_units", "constant_initialisation")
def all_units_equal() -> Loop:
    loop = classifier()
    for layer in (0, 2):
        nn.init.constant_(loop.model[layer].weight, 0.05)
    return loop


@fault("large_inputs exploding_gradient", "data_scale")
def inputs_of_255() -> Loop:
    return with_inputs(classifier(lr=1e-5), lambda x, step: 60 * x + 128)


@fault("zero_inputs dead_gradient", "inputs_zero", sparse=True)
def inputs_of_0() -> Loop:
    return with_inputs(classifier(), lambda x, step: 0 * x)


@fault("repeated_inputs", "inputs_repeated")
def the_same_batch_again() -> Loop:
    loop = classifier()
    plain, kept = loop.batch, []

    def batch(step: int) -> Any:
        if step <= AT:
            kept[:] = [plain(step)]
        return kept[0]

    loop.batch = batch
    return loop


@fault("parameters_grow exploding_gradient", "weight_decay learning_rate_too_high broken_weights")
def parameters_grow_by_a_fifth() -> Loop:
    loop = classifier()
    loop.after.append(lambda step: scale_parameters(loop.model.parameters(), 1.2))
    return loop


@fault("parameters_shrink", "weight_decay", sparse=True)
def weight_decay_of_a_tenth() -> Loop:
    return classifier(weight_decay=2.0)


@fault("clipping_too_tight", "clipping_too_tight data_scale", sparse=True)
def clipped_to_almost_nothing() -> Loop:
    loop = classifier()
    loop.after_backward.append(lambda step: nn.utils.clip_grad_norm_(loop.model.parameters(), 1e-5))
    return loop


@fault("gradient_changed", "code_after_backward", sparse=True)
def gradients_multiplied_after_the_backward() -> Loop:
    loop = classifier(lr=1e-4)

    def multiply(step: int) -> None:
        for parameter in loop.model.parameters():
            parameter.grad.mul_(100.0)

    loop.after_backward.append(multiply)
    return loop


@fault("loss_below_zero exploding_gradient", "wrong_sign unbounded_loss", sparse=True)
def sign_of_the_loss_turned() -> Loop:
    return with_loss(classifier(lr=0.02), lambda loss, step: -loss if step >= AT else loss)


@fault("vanishing_gradient", "saturation poor_initialisation depth", sparse=True)
def sigmoids() -> Any:
    return Watchable(trainings.sigmoid_stack(depth=10))


@fault("vanishing_gradient parameters_unchanged", "loss_reduction underflow learning_rate_zero")
def loss_divided_too_often() -> Loop:
    return with_loss(classifier(), lambda loss, step: loss * 1e-10)


@fault("exploding_gradient initial_weights", "depth poor_initialisation data_scale")
def gain_through_depth() -> Any:
    return Watchable(trainings.growing_depth())


@fault("exploding_gradient layer_jump", "backward_scaled")
def backward_multiplied_in_one_layer() -> Loop:
    return with_output(classifier(lr=1e-4), "2", lambda out, step: Scaled.apply(out, 1e4 if step >= AT else 1.0))


@fault(
    "no_gradient parameters_unchanged",
    "gradients_zeroed code_after_backward learning_rate_zero dead_units",
    sparse=True,
)
def zeroed_before_the_step() -> Loop:
    loop = classifier()
    loop.after_backward.append(lambda step: loop.optimizer.zero_grad(set_to_none=False))
    return loop


@fault("loss_scale_collapse", "loss_or_labels invalid_operation overflow loss_scale", sparse=True)
def nan_at_every_loss_scale() -> Loop:
    loop = with_loss(classifier(), lambda loss, step: loss * math.nan if step >= AT else loss)
    loop.scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    return loop


@fault("exploding_gradient nan_gradient", "recurrence learning_rate_too_high")
def recurrence_without_clipping() -> Any:
    return Watchable(trainings.unclipped_rnn())


@fault("vanishing_gradient dead_gradient", "backward_zeroed saturation dead_units")
def backward_set_to_0_in_one_layer() -> Loop:
    return with_output(classifier(), "2", lambda out, step: Scaled.apply(out, 0.0 if step >= AT else 1.0))


@fault("loss_spike exploding_gradient", "data_changed learning_rate_too_high")
def loss_shifted() -> Loop:
    return with_loss(classifier(lr=1e-4), lambda loss, step: loss + (100.0 if step >= AT else 0.0))


@cache
def found_in(name: str, every: int) -> Found:
    return judged(FAULTS[name].make(), STEPS if every == 1 else SPARSE_STEPS, every=every)


def first_told(found: Found) -> Incident:
    told = [alert.incident for alert in found.alerts if alert.level != "INFO"]
    assert told, "nothing was told"
    assert told[0] is not None
    return told[0]


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_told_with_its_cause(name: str) -> None:
    fault, told = FAULTS[name], first_told(found_in(name, 1))
    assert told.kind in fault.kinds
    assert fault.causes & {told.cause, told.rival}, told.text


@pytest.mark.parametrize("name", [name for name, fault in FAULTS.items() if fault.sparse])
def test_measuring_every_step_finds_what_every_20th_finds_and_no_later(name: str) -> None:
    fault, sparse, dense = FAULTS[name], first_told(found_in(name, SPARSE)), first_told(found_in(name, 1))
    assert sparse.kind in fault.kinds
    assert fault.causes & {sparse.cause, sparse.rival}, sparse.text
    assert dense.found_step <= sparse.found_step


@pytest.mark.parametrize("name", FAULTS)
def test_one_fault_is_few_messages(name: str) -> None:
    """Once when it begins, once more when it is worse or clear; what a broken training does later may be told apart."""
    found = found_in(name, 1)
    assert len(found.told) <= 4, [alert.text for alert in found.alerts]
    assert found.verdict.status in ("warn", "error")
    for alert in found.alerts:
        assert alert.incident is not None
        assert alert.text == alert.incident.message
        assert alert.step == alert.incident.found_step
        assert alert.incident.first_step <= alert.incident.found_step
