"""The first cause is named, not its consequences; if the evidence does not decide between two, both are."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from grad_samples import sample_of, together
from wandb_gradwatch._diagnosis import diagnose, with_diagnosis
from wandb_gradwatch._diagnosis.causes import INVALID

from wandb_gradwatch.rules import DeadGradient, FastParameters, LossScaleCollapse, NoGradient, UnchangedParameters
from wandb_gradwatch.snapshot import Snapshot, keys


def causes(samples: Snapshot, modules: dict[str, str] | None = None) -> list[str]:
    return [found.cause for found in diagnose(samples, modules=modules)]


@pytest.mark.parametrize(
    ("falls_from", "last_step", "cause"),
    [
        (1, 12, "weights too small for the depth: poor initialisation"),
        (2, 12, "learning rate too high"),  # the norms of the first step were even: updates made them fall
        (2, 60, None),  # much later, other data may be the cause
    ],
)
def test_initial_weights_make_no_fall_that_the_first_step_does_not_show(falls_from, last_step, cause):
    # Eight weights of a tenth of the size that preserves a signal behind a ReLU: each layer passes on a tenth.
    weights = {f"{layer}.weight": np.full((4, 4), 0.1 * 2**0.5 / 2) for layer in range(8)}
    parameters = weights | {f"{layer}.bias": np.zeros(4) for layer in range(8)}

    def norms(step: int) -> dict[str, np.ndarray]:
        size = {layer: 10.0 ** (layer - 7) if step >= falls_from else 1.0 for layer in range(8)}
        return {name: np.full(parameter.shape, size[int(name[0])]) for name, parameter in parameters.items()}

    samples = [sample_of(norms(step), step=step, parameters=parameters) for step in (*range(1, 12), last_step)]
    assert causes(together(samples), {"0": "Linear", "activation": "ReLU"})[:1] == ([cause] if cause else [])


@pytest.mark.parametrize(
    ("gradient", "cause"), [(1e4, "a large scale of the inputs or the targets"), (1.0, "dead units: ")]
)
def test_units_that_die_of_a_huge_first_gradient_are_its_consequence(gradient, cause):
    ones = {"0.weight": np.ones(4), "1.weight": np.ones(4)}
    grads = {"0.weight": np.zeros(4), "1.weight": np.full(4, gradient)}
    (found,) = causes(together([sample_of(grads, step=step, parameters=ones) for step in range(1, 11)]))
    assert found.startswith(cause)


@pytest.mark.parametrize(
    ("losses", "cause", "rival"),
    [
        ([1.0, 1.0], "something in the backward", ""),  # which does not change the loss of its own step
        ([1.0, 0.1], "something in the backward", "a term of the loss that acts there"),
        ([1.0, -0.5], "the wrong sign of the loss", ""),  # a single update does not move the loss there
        ([-1.0, -9.0], "something in the backward", "a term of the loss that acts there"),  # it may be negative
    ],
)
def test_a_gradient_from_one_layer_on_back_may_be_a_terms_of_the_loss_if_this_has_moved(losses, cause, rival):
    usual, norms = (
        {f"{layer}.weight": [0.0, 1.0] for layer in range(3)},
        {"0.weight": [0.0, 1e4], "1.weight": [0.0, 1e4], "2.weight": [0.0, 1.0]},
    )
    ones = {name: np.ones(2) for name in usual}
    calm = [
        sample_of(usual, step=step, parameters={n: (1 + 1e-6 * step) * w for n, w in ones.items()})
        for step in range(1, 21)
    ]
    samples = together([*calm, sample_of(norms, step=21, parameters={n: (1 + 21e-6) * w for n, w in ones.items()})])
    loss = np.array([losses[0] + 1e-3 * (step % 3) for step in range(20)] + losses[1:])
    first = diagnose(replace(samples, metrics={keys.LOSS: loss}))[0]
    assert (first.cause.startswith(cause), first.rival.startswith(rival) if rival else first.rival == "") == (
        True,
        True,
    )


@pytest.mark.parametrize(("shares", "is_told"), [([0, 3, 5, 7, 13], False), ([5, 5, 6, 6, 13], True)])
def test_units_that_die_one_by_one_have_not_died_at_once_where_steps_between_were_not_measured(shares, is_told):
    """6 or more of 20 units are more than a quarter. If 7 died in earlier samples, the earlier cause continues."""
    dead = [*[shares[0]] * 5, *shares, shares[-1]]

    def grads(num: int) -> dict[str, np.ndarray]:
        units = np.append(np.zeros(num), np.ones(20 - num))
        return {"0.weight": units, "0.bias": units, "1.weight": np.ones(20)}

    samples = [sample_of(grads(num), step=20 * place) for place, num in enumerate(dead, 1)]
    assert bool(list(DeadGradient().check(together(samples)))) == is_told


def test_the_last_bias_of_a_network_whose_derivative_is_trained_is_no_frozen_layer():
    ones = {name: [1.0] for name in ("0.weight", "0.bias", "1.weight")}
    for missing, level, num in (({"1.bias": None}, "INFO", 0), ({"1.bias": None, "2.weight": None}, "WARN", 1)):
        samples = together([sample_of({**ones, **missing}, step=step) for step in range(1, 101)])
        assert [alert.level for alert in NoGradient().check(samples)] == [level]
        assert len(diagnose(samples)) == num


@pytest.mark.parametrize(("first", "is_told"), [(-0.002, False), (0.002, True)])
def test_a_loss_that_begins_below_0_has_no_wrong_sign_for_falling_at_once(first, is_told):
    """Like an update at a far too high learning rate, which doubles the parameters."""
    samples = [sample_of({"a": [1.0]}, step=step, parameters={"a": np.array([2.0**step])}) for step in range(1, 4)]
    found = causes(replace(together(samples), metrics={keys.LOSS: np.array([first, -0.15, -0.29])}))
    assert ("the wrong sign of the loss, or a loss without a lower bound" in found) == is_told


@pytest.mark.parametrize(
    ("first", "weight_after", "rival"),
    [
        (0.0, 1.0, "an operation that no gradient passes"),  # like a rounding, from the first step on
        (0.0, 0.0, ""),  # the next layer gets 0 from units that never fire
        (1.0, 1.0, ""),  # it had a gradient at first, so no operation blocks gradients
    ],
)
def test_units_that_never_fire_give_0_to_what_follows_them(first, weight_after, rival):
    def grads(step: int) -> dict[str, np.ndarray]:
        cut = np.full(4, first if step == 1 else 0.0)
        after = {"2.weight": np.full(4, weight_after), "2.bias": np.ones(4)}
        # Half of the units of the layer after that are off, as in any untrained layer.
        half = np.array([0.0, 0.0, 0.0, 1.0])
        return {"0.weight": cut, "0.bias": cut, **after, "3.weight": half, "3.bias": half, "5.bias": np.ones(4)}

    kinds = {"0": "Linear", "1": "ReLU", "2": "Linear", "3": "Linear", "4": "ReLU", "5": "Linear"}
    (found,) = diagnose(together([sample_of(grads(step), step=step) for step in range(1, 11)]), modules=kinds)
    assert (found.cause.startswith("dead units"), found.rival[:36]) == (True, rival)


@pytest.mark.parametrize(
    ("norms", "steps_told"),
    [
        (range(100), []),  # updates of equal size from 0 on, like Adam's: factors of 2, 1.5, 1.33 ...
        ([step * min(step, 30) for step in range(100)], []),  # with a learning rate that rises for 30 steps
        ([*range(60), *(60 * 1.5**num for num in range(1, 4))], [62]),  # factors of 1.5, visible at samples 61 and 62
    ],
)
def test_parameters_that_begin_at_0_do_not_grow_too_fast_from_there(norms, steps_told):
    weights = [{"weight": np.full((20, 20), float(norm))} for norm in norms]
    samples = [sample_of({"weight": np.ones((20, 20))}, step=s, parameters=one) for s, one in enumerate(weights, 1)]
    assert [alert.step for alert in FastParameters().check(together(samples))][:1] == steps_told


@pytest.mark.parametrize(
    ("inputs", "output", "cause"),
    [
        (1.0, 1.0, "an explosion inside the model"),
        (1e3, 1.0, "a large scale of the inputs, targets or loss"),
        (1.0, 1e3, "a large scale of the inputs, targets or loss"),
        (1.0, 2.0, "an explosion inside the model"),  # as of a mean squared error with targets near 1
    ],
)
def test_neither_ordinary_inputs_nor_an_ordinary_loss_have_made_a_huge_first_gradient(inputs, output, cause):
    """The ratio of weight and bias gradients is the size of a layer's inputs; the last bias has the loss's gradient."""
    grads = {
        "0.weight": np.full((4, 4), 1e5 * inputs),
        "0.bias": np.full(4, 1e5),
        "1.weight": np.ones((4, 4)),
        "1.bias": np.array([output]),
    }
    # each update grows the weights 30 times
    samples = [
        sample_of(grads, step=step, parameters={name: 30.0**step * np.ones_like(g) for name, g in grads.items()})
        for step in range(1, 4)
    ]
    assert causes(together(samples))[0].startswith(cause)


@pytest.mark.parametrize(("size", "is_told"), [(1e-7, True), (0.1, False)])
def test_weights_without_a_bias_are_too_small_where_their_norm_is(size, is_told):
    """A weight's gain is its root mean square times the root of its fan-in, which is at most all of its elements: it is
    at most the weight's norm, of 8 x 8 elements of 0.1 a norm of 0.8."""
    weights = {f"{layer}.weight": np.full((8, 8), size) for layer in range(3)}
    samples = together([sample_of(weights, step=step, parameters=weights) for step in range(1, 4)])
    assert ("poor initialisation" in causes(samples)) == is_told


@pytest.mark.parametrize(
    ("leaps_to", "scatter", "rival"),
    [
        (4.0, 1.0, "too large an update of scale"),
        (4.0, 5.0, "too large an update of scale"),  # 10 times all recent changes, whatever their scatter
        (1.2, 1.0, "the data has changed"),
    ],
)
def test_a_spike_just_after_one_parameter_has_leapt_may_be_that_updates(leaps_to, scatter, rival):
    """A temperature of norm 1 beside parameters of norm 100: the total norm changes by less than a thousandth."""
    samples = []
    for step in range(1, 21):
        scale = leaps_to if step == 20 else 1.0 + 0.1 * (step % 2)
        parameters = {"scale": np.array([scale]), "weight": np.array([100.0 + 0.1 * (step % 3)])}
        grads = {name: [1e3 if step == 20 else scatter ** (step % 3)] for name in parameters}
        samples.append(sample_of(grads, step=step, parameters=parameters))
    (found,) = diagnose(together(samples))
    assert (found.cause, found.rival.startswith(rival)) == ("one bad batch", True)


@pytest.mark.parametrize(("num_ranks", "is_named"), [(1, True), (2, False)])
def test_one_ranks_finite_loss_does_not_clear_the_batches_of_the_others(num_ranks, is_named):
    """Gradients that are averaged over ranks are NaN on all ranks, whichever rank had the bad batch."""
    bad = {"0.weight": np.full(4, np.nan), "1.weight": np.full(4, np.nan)}
    good = {name: np.ones(4) for name in bad}
    samples = together([*[sample_of(good, step=step) for step in range(1, 6)], sample_of(bad, step=6)])
    found = diagnose(replace(samples, metrics={keys.LOSS: np.ones(6)}), num_ranks=num_ranks)
    assert [diagnosis.cause for diagnosis in found if diagnosis.cause == INVALID] == [INVALID] * is_named
    assert found


@pytest.mark.parametrize(("size", "is_told"), [(1e-6, False), (1.0, True)])
def test_a_gradient_that_is_large_beside_small_parameters_alone_has_not_grown(size, is_told):
    """The last bias has nearly all of the norm; then also with a first layer's gradient that is 1e5 times larger."""
    first = 1e5 if is_told else 0.05
    grads = {"0.weight": np.full((4, 4), first), "0.bias": np.full(4, first), "1.bias": np.array([0.5])}
    samples = [
        sample_of(grads, step=s, parameters={name: size * 30.0**s * np.ones_like(g) for name, g in grads.items()})
        for s in range(1, 4)
    ]
    assert any(cause.startswith("an explosion inside") for cause in causes(together(samples))) == is_told


@pytest.mark.parametrize(
    ("dead", "cause", "rivals"),  # rivals: at every step sampled, and at every 20th
    [
        ([10, 12, 14, 16, 18, 19, 19], "a learning rate that is too high", ("a large scale",) * 2),  # one by one
        ([10, 10, 10, 19, 19, 19, 19], "dead units", ("", "a learning rate")),  # at once: a bias, a mask, other data
        ([19, 19, 19, 19, 19, 19, 19], "dead units", ("", "")),  # from the start
        ([10, 10, 11, 11, 12, 12, 12], "dead units", ("", "")),  # like half of an ordinary layer
    ],
)
def test_units_that_die_one_by_one_are_killed_by_updates(dead, cause, rivals):
    def grads(num: int) -> dict[str, np.ndarray]:
        units = np.append(np.zeros(num), np.ones(20 - num))
        return {"0.weight": units, "0.bias": units, "2.weight": np.ones(20), "2.bias": np.ones(20)}

    for every, rival in zip((1, 20), rivals, strict=True):
        samples = together([sample_of(grads(num), step=every * place) for place, num in enumerate(dead, 1)])
        (found,) = diagnose(samples, modules={"0": "Linear", "1": "ReLU", "2": "Linear"})
        assert found.cause.startswith(cause)
        assert found.rival.startswith(rival) if rival else not found.rival


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_weight_that_is_not_finite_is_the_cause_where_a_scaler_skips_step_after_step(value):
    grads, weights = {"0.weight": np.full(4, value), "1.weight": np.full(4, np.nan)}, np.array([value, 1.0, 1.0, 1.0])
    samples = [
        sample_of(
            grads,
            step=step,
            skipped=True,
            loss_scale=2.0**-step,
            parameters={"0.weight": np.ones(4), "1.weight": weights},
        )
        for step in range(1, 6)
    ]
    *_, alert = LossScaleCollapse().check(together(samples))
    text = with_diagnosis(alert, together(samples)).text
    assert (
        "Probable cause: the parameter 1.weight was already non-finite before this step. Remedy: load the last" in text
    )


def test_a_weight_of_a_file_that_is_not_finite_may_have_been_loaded():
    good, bad = np.ones(4), np.array([np.inf, 1.0, 1.0, 1.0])
    samples = [sample_of({"a": good}, step=step, parameters={"a": good}) for step in range(1, 10)]
    samples.append(sample_of({"a": np.full(4, np.nan)}, step=10, parameters={"a": bad}))
    (found,) = diagnose(together(samples))
    assert found.rival.startswith("weights that were loaded")


@pytest.mark.parametrize(
    ("change", "grad", "told"),
    [
        ((0.0, 1e-3), 1e-2, "a learning rate of 0 in the group of these parameters"),
        ((0.0, 1e-3), 1e-9, None),  # so small a gradient does not change a weight of 1
        ((1e-3, 1e-3), 1e-2, None),
        ((1e-9, 1e-9), 1e-2, "the optimizer's eps"),  # SGD makes updates of 1e-4 of it, Adam larger ones
        ((1e-9, 1e-3), 1e-2, None),
        ((0.0, 1e-3), 2.0**-7, None),  # for bfloat16 weights, rounding may undo each update
    ],
)
def test_updates_that_do_not_arrive_are_told_of_one_parameter_and_of_all(change, grad, told):
    def sample(step: int) -> Snapshot:
        weights = {name: np.full(300, 1 + by * step) for name, by in zip("ab", change, strict=True)}
        return sample_of({"a": np.full(300, grad), "b": np.full(300, 1e-2)}, step=step, parameters=weights)

    samples = together([sample(step) for step in range(1, 40)])
    samples = replace(samples, metrics={keys.LEARNING_RATE: np.full(39, 1e-2)})
    texts = [alert.text for alert in UnchangedParameters().check(samples)]
    assert bool(texts) == (told is not None)
    assert all(f"Probable cause: not clear: either {told}" in text for text in texts)
    if told:
        assert next(iter(UnchangedParameters().check(samples))).step == 26


@pytest.mark.parametrize(("moves", "told"), [(1e-8, True), (1e-6, False)])  # by the gradient of 0.01, or by its sign
def test_a_rate_that_is_too_small_for_plain_descent_may_be_large_enough_for_adam(moves, told):
    # Rounding: a single element moves by a fifth more than it should.
    weights = [{"a": np.full(300, 0.1 - moves * step), "b": np.array([0.3 - 1.2e-8 * step])} for step in range(1, 40)]
    grads = {"a": np.full(300, 0.01), "b": np.array([0.01])}
    samples = [sample_of(grads, step=s, parameters=one) for s, one in enumerate(weights, 1)]
    seen = replace(together(samples), metrics={keys.LEARNING_RATE: np.full(39, 1e-6)})
    steps = [alert.step for alert in UnchangedParameters().check(seen)]
    assert steps == (list(range(26, 40)) if told else [])


@pytest.mark.parametrize(("warm_up", "told"), [(0.0, True), (1e-9, False)])
def test_updates_that_bfloat16_rounds_away_are_told_unless_the_rate_is_still_rising(warm_up, told):
    """A rate of 1e-6 changes elements near 0 alone."""

    def sample(step: int) -> Snapshot:
        weights = np.append(1e-5 * step, np.full(299, 0.1))
        return sample_of({"a": np.full(300, 0.5)}, step=step, parameters={"a": weights})

    rates = 1e-6 + warm_up * np.arange(39)
    seen = replace(together(map(sample, range(1, 40))), metrics={keys.LEARNING_RATE: rates})
    assert [alert.step for alert in UnchangedParameters().check(seen)] == (list(range(26, 40)) if told else [])


def test_what_does_not_change_over_many_steps_need_not_be_seen_in_as_many_samples():
    weights = [{"a": np.ones(100), "b": np.full(100, 1 + 1e-2 * step)} for step in range(5)]
    grads = {name: np.full(100, 0.3) for name in "ab"}  # not representable in half precision
    samples = [sample_of(grads, step=1 + 20 * place, parameters=one) for place, one in enumerate(weights)]
    seen = replace(together(samples), metrics={keys.LEARNING_RATE: np.full(5, 1e-2)})
    assert [alert.step for alert in UnchangedParameters().check(seen)] == [61, 81]


def test_weights_that_explode_make_no_learning_rate_too_small():
    norms = [1.0] * 10 + [1e9 * (1 + 1e-3 * step) for step in range(60)]
    samples = [
        sample_of({"a": np.ones(9)}, step=s, parameters={"a": np.full(9, one)}) for s, one in enumerate(norms, 1)
    ]
    assert not list(UnchangedParameters().check(replace(together(samples), metrics={keys.LEARNING_RATE: np.ones(70)})))


def test_a_clamped_scale_may_stay_where_it_is():
    """CLIP clamps the logarithm of its temperature to ln(100), and its gradient goes on pushing it there."""

    def sample(step: int) -> Snapshot:
        parameters = {"logit_scale": np.array([math.log(100)]), "fc.weight": np.full(300, 1 + 1e-3 * step)}
        gradients = {"logit_scale": np.array([0.3]), "fc.weight": np.full(300, 0.3)}
        return sample_of(gradients, step=step, parameters=parameters)

    samples = together([sample(step) for step in range(1, 80)])
    samples = replace(samples, metrics={keys.LEARNING_RATE: np.full(79, 1e-2)})
    assert not list(UnchangedParameters().check(samples))


def test_a_learning_rate_of_0_is_told_although_the_first_one_was_not_read():
    samples = together(
        [
            sample_of({"a": np.full(300, 0.3)}, step=step, parameters={"a": np.full(300, 1 + 1e-9 * step)})
            for step in range(1, 80)  # rounding changes single bits
        ]
    )
    rates = np.array([math.nan, *[0.0] * 78])
    first = next(iter(UnchangedParameters().check(replace(samples, metrics={keys.LEARNING_RATE: rates}))))
    assert first.step == 26
