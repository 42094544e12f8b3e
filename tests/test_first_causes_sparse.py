"""First causes at the default cadence: samples far apart, and between them samples of which no loss is known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from grad_samples import sample_of, together
from wandb_gradwatch._diagnosis import Diagnosis, diagnose, with_diagnosis

from wandb_gradwatch.rules import DeadGradient, ExplodingGradient, FastParameters, LossSpike
from wandb_gradwatch.rules._base import finding
from wandb_gradwatch.snapshot import Snapshot, keys

FIRST_STEPS = (*range(1, 11), 30)


def history_of(
    steps: Sequence[int],
    norms: dict[str, Sequence[float]],
    *,
    size: int = 4,
    weights: Sequence[float] | None = None,
    losses: Sequence[float] | None = None,
    rates: Sequence[float] | None = None,
) -> Snapshot:
    """Return samples of parameters with these gradients, with all weights of one value in each sample, usually near 1,
    and with these losses and learning rates, if they are known."""
    values = 1 + 1e-6 * np.arange(len(steps)) if weights is None else weights
    samples = [
        sample_of(
            {name: np.full(1 if name == "heat" else size, norm[place]) for name, norm in norms.items()},
            step=step,
            parameters={name: np.full(1 if name == "heat" else size, values[place]) for name in norms},
        )
        for place, step in enumerate(steps)
    ]
    known = {keys.LOSS: losses, keys.LEARNING_RATE: rates}
    return replace(
        together(samples), metrics={key: np.array(values) for key, values in known.items() if values is not None}
    )


def first_of(history: Snapshot) -> Diagnosis:
    return diagnose(history)[0]


def told_of(title: str, history: Snapshot) -> str:
    """Return the text of an alert of the newest sample, with its diagnosis."""
    alert = finding(title, "A fact.", "", "not clear: anything", "nothing", int(history.steps[-1]))
    return with_diagnosis(alert, history).text.partition("Probable cause: ")[2]


BACKWARD = "something in the backward of a layer multiplies the gradient"


@pytest.mark.parametrize(
    ("steps", "raised", "loss", "rival"),
    [
        ((10, 30, 50), 1e3, 0.02, ""),  # two samples before show what is usual, as three layers are compared
        ((10, 30, 50), 1e3, 5.0, "a term of the loss that acts there"),
        ((1, 2, 3, 4, 5, 10, 30, 50), 1e3, np.nan, ""),  # a sample between the planned ones: its loss is not known
    ],
)
def test_few_samples_show_a_gradient_that_grows_between_two_layers(steps, raised, loss, rival):
    norms = {f"{layer}.weight": [1.0] * (len(steps) - 1) + [raised if layer < 2 else 1.0] for layer in range(4)}
    found = first_of(history_of(steps, norms, losses=[*np.linspace(0.1, 0.06, len(steps) - 1), loss]))
    assert (found.cause, found.rival.startswith(rival) if rival else found.rival == "") == (BACKWARD, True)


@pytest.mark.parametrize(("loss", "is_sure"), [(0.05, True), (np.nan, False)])
def test_of_two_branches_one_may_rise_with_its_data_where_the_loss_is_not_known(loss, is_sure):
    names = ("heat", "seen.weight", "words.weight")  # a temperature has no place in the depth
    norms = {name: [1.0, 1.1, 0.9, 1.0, 1.1, 0.9, 1e4 if name == "seen.weight" else 1.0] for name in names}
    found = first_of(history_of((5, 10, 30, 50, 70, 90, 110), norms, losses=[*np.linspace(0.1, 0.05, 6), loss]))
    assert found.cause == BACKWARD
    assert found.rival.startswith("" if is_sure else "one bad batch, in what these layers alone get")
    assert (found.rival == "") == is_sure


def test_a_norm_of_three_times_the_usual_is_usual_behind_layers_that_have_risen_a_thousandfold():
    norms = {f"{layer}.weight": [*[1.0] * 11, 1e3 if layer < 2 else 4.0] for layer in range(4)}
    assert first_of(history_of((*FIRST_STEPS, 50), norms)).cause == BACKWARD


def test_a_gradient_that_was_multiplied_two_samples_ago_is_still_the_cause_when_all_of_it_explodes():
    steps, weights = (*FIRST_STEPS, 50, 52), [*[1.0] * 12, 3.0]
    norms = {f"{layer}.weight": [*[1.0] * 11, 1e3 if layer < 2 else 1.0, 1e7] for layer in range(4)}
    found = first_of(history_of(steps, norms, weights=weights, losses=[*np.linspace(0.1, 0.04, 12), 1e4]))
    assert found.cause == BACKWARD
    assert "at step 50" in found.evidence


def test_units_that_die_while_the_loss_falls_below_0_die_of_its_sign():
    norms = {"0.weight": [0.0] * 12, "1.weight": [*[0.1] * 11, 10.0]}
    history = history_of(range(1, 13), norms, losses=[*[0.5] * 11, -9.0])
    assert told_of("Dead gradient", history).startswith("the wrong sign of the loss, or")


def test_an_explosion_through_depth_is_why_parameters_grow():
    norms = {f"{layer}.weight": [10.0 ** (3 - layer)] * 3 for layer in range(4)}  # tenfold from layer to layer
    text = told_of("Parameters grow too fast", history_of((1, 2, 3), norms, weights=[10.0, 10.4, 10.8]))
    assert text.startswith("explosion through depth (norm grows 1000x from 3 back to 0, layer by layer)")


def test_a_rate_that_rose_in_steps_that_were_not_measured_is_told_with_their_interval():
    rates = [0.003, 0.003, 0.003, 0.003, 0.3]
    found = first_of(history_of((1, 30, 50, 70, 136), {"a.weight": [0.1] * 5}, weights=[1.0] * 4 + [9.0], rates=rates))
    assert found.evidence == "it rose from 0.003 to 0.3 between steps 70 and 136"


@pytest.mark.parametrize(("weight", "is_felt"), [(1.01, False), (5.0, True)])
def test_a_rate_that_rises_step_by_step_is_felt_where_the_weights_have_doubled_since(weight, is_felt):
    steps = (1, 30, 50, 70, 90, 110, 130)
    weights = np.append(np.ones(4), np.linspace(1.0, weight, 3))
    # A warm-up may rise as far from step 1, but not from step 50.
    rates = [0.003, 0.003, 0.003, 0.0075, 0.019, 0.047, 0.118]
    found = first_of(history_of(steps, {"a.weight": [0.1] * 7}, weights=weights, rates=rates))
    assert found.cause == "learning rate too high"
    assert found.evidence == "it rose from 0.003 to 0.118 up to step 130"
    assert found.explains("Dead gradient") == is_felt


@pytest.mark.parametrize(
    ("steps", "factor", "is_told"),
    [
        ((30, 50), 10.0, True),
        ((30, 50), 4.0, False),  # healthy weights grow up to 2.7-fold in a hundred steps
        ((30, 530), 10.0, False),  # and any distance over many
        ((10, 30), 10.0, False),  # the first steps may be large
    ],
)
def test_weights_that_have_grown_manifold_since_the_sample_before_are_told(steps, factor, is_told):
    history = history_of((*range(1, 11), *steps), {"a.weight": [0.1] * 12}, size=300, weights=[*[1.0] * 11, factor])
    alerts = list(FastParameters().check(history))
    assert [alert.step for alert in alerts] == ([steps[-1]] if is_told else [])
    assert all("either too large an update, or weights that were loaded or rescaled" in alert.text for alert in alerts)


@pytest.mark.parametrize(
    ("weight", "words"), [(1.0, "parameters have hardly moved"), (8.0, "parameters had moved far")]
)
def test_a_norm_that_stays_high_after_the_parameters_have_leapt_is_not_said_to_be_new_data(weight, words):
    steps = (*FIRST_STEPS, 50, 70, 90, 110, 111, 112)
    history = history_of(steps, {"a.weight": [*[1.0] * 15, 40.0, 35.0]}, weights=[*[1.0] * 15, weight, weight])
    (alert,) = ExplodingGradient().check(history)
    assert (alert.step, words in alert.text) == (111, True)
    assert ("either the data has changed" in alert.text) == (weight == 1.0)


@pytest.mark.parametrize("steps", [(5, 10, 30, 50, 70, 90, 110), (70, 90, 110)])
@pytest.mark.parametrize(("weight", "is_leap"), [(1.0, False), (8.0, True)])
def test_a_spike_behind_updates_that_were_not_measured_and_moved_the_parameters_is_no_bad_batch(steps, weight, is_leap):
    num = len(steps) - 1
    history = history_of(steps, {"a.weight": [*[1.0] * num, 40.0]}, weights=[*[1.0] * num, weight])
    found = {one.cause: one.evidence for one in diagnose(history)}
    assert ("too large an update" in found, "one bad batch" in found) == (is_leap, not is_leap and num > 5)
    if is_leap:
        assert found["too large an update"].startswith("the updates of steps 90 to 109, of which only the first was")


@pytest.mark.parametrize(("begins", "may_be_dead"), [(7, False), (0, True)])  # small weights may grow fast at first
def test_units_that_die_while_the_parameters_fly_off_die_of_the_updates(begins, may_be_dead):
    norms, weights = {"0.weight": [0.0] * 20, "1.weight": [1.0] * 20}, 1.2 ** np.clip(np.arange(20) - begins, 0, 5)
    text = told_of("Dead gradient", history_of(range(1, 21), norms, weights=weights))
    assert "learning rate too high (the parameters' norm changed by 20 %" in text
    assert ("dead units" in text) == may_be_dead


def test_a_loss_that_rises_with_the_gradient_from_the_first_steps_on_may_have_the_wrong_sign():
    growth = 1.3 ** np.arange(20)
    rising, falling = (
        first_of(history_of(range(1, 21), {"a.weight": growth}, losses=losses))
        for losses in (growth, 2 - 0.01 * growth)
    )
    assert rising.cause == falling.cause == "learning rate too high"
    assert rising.rival.startswith("the wrong sign of the loss")
    assert "check the sign of the loss" in rising.remedy
    assert "sign" not in falling.rival + falling.remedy


@pytest.mark.parametrize(("last", "is_told"), [(-90.0, True), (-9.0, False)])
def test_a_loss_that_began_below_0_and_falls_tenfold_with_a_growing_gradient_may_have_the_wrong_sign(last, is_told):
    norms, losses = [0.7, 1.5, 1.1, 2.0, 2.0, 4.6, 8.7, 18.0, 47.0], [-1.4, -1.5, -1.5, -1.9, -2.1, -3.5, -4, -5, last]
    history = history_of(range(1, 10), {"a.weight": norms}, losses=losses)
    found = [one for one in diagnose(history) if one.cause.startswith("the wrong sign of the loss")]
    assert [one.rival.startswith("a learning rate that is too high") for one in found] == [True] * is_told


def test_a_first_layer_without_any_gradient_shows_that_its_inputs_are_gone():
    def sample(step: int) -> Snapshot:
        inner = np.where(np.arange(16) < 12, 0.0, 1.0) if step > 12 else np.ones(16)  # most of its channels are off
        first = np.zeros(16) if step > 12 else np.ones(16)
        gradients = {"0.weight": first}
        for layer, gradient in enumerate((np.ones(16), inner, np.ones(16)), 1):
            gradients |= {f"{layer}.weight": gradient, f"{layer}.bias": gradient}
        return sample_of(gradients, step=step, parameters=dict.fromkeys(gradients, np.ones(16)))

    alert = next(iter(DeadGradient().check(together([sample(step) for step in range(1, 20)]))))
    assert "either dead units in the first layer, which has no bias, or the data has changed" in alert.text


def test_a_gradient_behind_updates_that_were_already_too_large_did_not_come_first():
    for growth, cause in ((1.3, "learning rate too high"), (1.0001, "one bad batch")):
        history = history_of(range(1, 16), {"a.weight": [*[1.0, 1.1] * 7, 1e3]}, weights=growth ** np.arange(15))
        assert first_of(history).cause == cause


def test_the_first_steps_are_searched_too_where_few_samples_are_evenly_apart():
    losses = [-1.1, -1.0, -2.2, -2.0, -0.7, -3.5, -1.7, -2.0, -3.7, -2.8, -489.0]
    norms = [1.6, 1.5, 1.8, 1.4, 1.6, 4.4, 2.6, 3.5, 4.8, 4.4, 801.0]
    history = history_of((*range(1, 11), 60), {"a.weight": norms}, losses=losses)
    assert "the wrong sign of the loss" in told_of("Exploding gradient", history)


def test_a_rate_that_is_known_to_have_risen_needs_no_other_reason_for_a_leap():
    rates = [0.01] * 6 + [1.0]
    steps, norms = (5, 10, 30, 50, 70, 90, 110), {"a.weight": [*[1.0] * 6, 40.0]}
    found = diagnose(history_of(steps, norms, weights=[*[1.0] * 6, 8.0], rates=rates))
    assert [one.cause for one in found] == ["learning rate too high"]


@pytest.mark.parametrize(
    ("losses", "is_told"),
    [
        ((-10.0, -25.0), True),
        ((-0.2, -1.0), False),  # a likelihood goes on falling as before
        ((-10.0, 0.3), False),  # one batch
        ((-1.2, -2.4), False),  # as far below 0 as it was above, but less than five times as fast
    ],
)
def test_few_losses_show_one_that_falls_through_0_faster_than_ever(losses, is_told):
    steps, before = (*range(1, 11), 30, 50, 70, 90), [2.0 - 0.03 * step for step in (*range(1, 11), 30, 50)]
    alerts = list(LossSpike().check(history_of(steps, {"a.weight": [1.0] * 14}, losses=[*before, *losses])))
    assert [(alert.title, alert.step) for alert in alerts] == [("Loss below 0", 90)] * is_told


def test_a_norm_that_grew_steadily_has_not_jumped_between_the_last_two_samples():
    # A tenth per step: 6.7-fold in the 20 steps between the last two samples, which alone looks like a bad batch.
    steps = (*range(1, 41), 60)
    history = history_of(steps, {"a.weight": [1.1**step for step in steps]}, losses=[1.0] * 41)
    assert "one bad batch" not in [found.cause for found in diagnose(history) if found.confidence > 0.7]


def test_a_warm_up_that_is_not_felt_has_not_made_a_weight_nan():
    rates, steps = [0.01 * step for step in range(1, 11)], range(1, 12)
    for broken in (False, True):
        weights = [1.0] * 10 + [np.nan if broken else 1.0]
        history = history_of(steps, {"a.weight": [1.0] * 11}, weights=weights, rates=[*rates, 0.1])
        assert ("learning rate too high" in [found.cause for found in diagnose(history)]) == (not broken)
