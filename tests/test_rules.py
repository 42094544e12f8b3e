"""Each rule on the smallest samples that show its behaviour."""

from __future__ import annotations

import json
import math
import re
import warnings
from dataclasses import replace

import numpy as np
import pytest
from grad_samples import of_norms, random_samples, row_of, sample_of, together

from wandb_gradwatch._analysis.baseline import student_factor
from wandb_gradwatch._analysis.formatting import listing, number
from wandb_gradwatch._analysis.memory import PerKind, PerName
from wandb_gradwatch.metrics import EntropyCollapse
from wandb_gradwatch.rules import (
    Alert,
    DeadGradient,
    ExplodingGradient,
    FastParameters,
    InfGradient,
    LargeInputs,
    LossScaleCollapse,
    NaNGradient,
    NoGradient,
    PoorInitialisation,
    Rule,
    VanishingGradient,
    default_rules,
    rule,
)
from wandb_gradwatch.rules._base import MAX_TITLE, as_rule
from wandb_gradwatch.snapshot import Snapshot, keys

NAN, INF = math.nan, math.inf


def steps(alerts) -> list[int]:
    return [alert.step for alert in alerts]


def test_nan_is_reported_with_its_own_step_and_layer_and_not_the_last_of_the_call():
    good = {"a": [3.0, 4.0], "b": [1.0, 2.0, 2.0]}
    bad = {"a": [3.0, 4.0], "b": [1.0, NAN, 2.0]}
    window = together([sample_of(good, step=6), sample_of(bad, step=7), sample_of(good, step=8)])
    (alert,) = NaNGradient().check(window)
    assert (alert.title, alert.step, alert.level) == ("NaN gradient", 7, "ERROR")
    assert "Step 7: NaN in the gradient of 1 of 2 parameters" in alert.text
    assert "b (1 of 3 elements)" in alert.text
    assert list(InfGradient().check(window)) == []


def test_infinities_of_both_signs_are_infs_and_no_nan():
    sample = sample_of({"a": [INF, -INF, 1.0], "b": [1.0]})
    (alert,) = InfGradient().check(sample)
    assert alert.title == "Inf gradient"
    assert "a (2 of 3 elements)" in alert.text
    assert list(NaNGradient().check(sample)) == []


def test_layers_are_named_in_the_backwards_order_five_of_them_and_how_many_more():
    sample = sample_of({f"layer{i}": [NAN] for i in range(8)} | {"head": [1.0]})
    (alert,) = NaNGradient().check(sample)
    assert "which the backward reached first in layer7." in alert.text
    assert "layer7 (1 of 1 elements), layer6" in alert.text
    assert "layer3 (1 of 1 elements), and 3 more." in alert.text  # 8 layers, five shown
    assert "layer2" not in alert.text


def test_a_skipped_sample_is_the_loss_scales_and_not_a_nan_alert():
    sample = sample_of({"a": [NAN, INF]}, skipped=True)
    assert list(NaNGradient().check(sample)) == list(InfGradient().check(sample)) == []


def test_the_rank_is_named_where_it_is_known():
    sample = sample_of({"a": [NAN]})
    with_rank = Snapshot(sample.steps, sample.names, sample.rows, metrics={keys.FIRST_NONFINITE_RANK: np.array([3.0])})
    assert "on rank 3" in next(iter(NaNGradient().check(with_rank))).text
    assert "rank" not in next(iter(NaNGradient().check(sample))).text.split("\n")[0]


def test_a_parameter_that_was_broken_before_the_step_is_the_cause():
    sample = sample_of({"a": [NAN]}, parameters={"a": np.array([NAN])})
    assert "the parameter a was already non-finite before this step" in next(iter(NaNGradient().check(sample))).text


def test_an_isolated_skip_is_calibration_and_five_in_a_row_are_a_collapse():
    check = LossScaleCollapse()
    bad, good = {"a": [INF]}, {"a": [1.0]}
    calibration = [sample_of(bad, step=s, skipped=True, loss_scale=2.0 ** (17 - s)) for s in range(1, 5)]
    assert list(check.check(together(calibration))) == []
    assert list(check.check(sample_of(good, step=5, loss_scale=4096.0))) == []
    stalled = [sample_of(bad, step=s, skipped=True, loss_scale=2.0 ** (17 - s)) for s in range(6, 13)]
    alerts = list(check.check(together(stalled)))
    assert steps(alerts) == [10, 11, 12]  # 6, 7, 8, 9 are four skips, 10 is the fifth
    assert alerts[0].title == "Loss scale collapse"
    assert "5 updates in a row were skipped (threshold 5), the loss scale is 128" in alerts[0].text  # 2^(17-10)


def test_a_scale_below_the_floor_is_said_but_blocks_no_step():
    (alert,) = LossScaleCollapse(min_scale=1.0).check(sample_of({"a": [1.0]}, loss_scale=0.5))
    assert "the loss scale is 0.5, below 1" in alert.text
    assert alert.level == "WARN"  # with ERROR a guard would skip every good step from here on
    assert list(LossScaleCollapse().check(sample_of({"a": [1.0]}))) == []  # no scaler: the scale is missing


def test_nan_at_any_scale_is_not_blamed_on_the_scale():
    stalled = together([sample_of({"a": [NAN]}, step=s, skipped=True, loss_scale=1024.0) for s in range(1, 6)])
    (alert,) = LossScaleCollapse().check(stalled)
    assert "NaN at any scale" in alert.text


def test_students_factor_is_the_table_of_t_quantiles():
    # One-sided p = 0.00135 is 3 standard deviations: t of 4 degrees of freedom is 6.620, of 9 it is 4.094, of 29
    # 3.280 (tables); times sqrt(1 + 1/n). Wallace's approximation has an error of at most 3 % there.
    for n, t in ((5, 6.620), (10, 4.094), (30, 3.280)):
        assert student_factor(3.0, n) == pytest.approx(t * math.sqrt(1 + 1 / n), rel=0.03)
    assert student_factor(3.0, 100_000) == pytest.approx(3.0, rel=1e-3)


def test_fifty_norms_of_exactly_1_and_then_1_00001_are_silent():
    norms = [1.0] * 50 + [1.00001]
    assert list(ExplodingGradient().check(of_norms(norms))) == []
    lower = ExplodingGradient(min_factor=1.0, record_factor=1.0)
    assert list(lower.check(of_norms(norms))) == []  # one sample above the limit is not enough


def test_each_number_of_a_rise_stands_beside_its_own_step() -> None:
    check, told = ExplodingGradient(), []
    for step, norm in enumerate([1.0] * 100 + [200.0, 400.0], 1):  # one sample at a time, as during training
        told += check.check(of_norms([norm], start=step))
    assert [(alert.step, alert.level) for alert in told] == [(101, "WARN"), (101, "ERROR")]  # where the rise starts
    assert told[0].text.startswith("Step 101: the gradient norm is 200, ")
    assert told[1].text.startswith("Step 102: the gradient norm is 400, ")
    assert "it has not fallen back since step 101." in told[1].text


@pytest.mark.parametrize("at", [8, 10, 25, 100])
def test_a_tenfold_spike_is_found_within_its_sample_and_nothing_else_is(at):
    norms = np.exp(np.random.default_rng(at).normal(0, 0.2, 120))
    norms[at - 1] = 10 * np.exp(norms.std())
    assert steps(ExplodingGradient().check(of_norms(norms))) == [at]


def test_nan_at_50_and_a_thousandfold_spike_at_110_are_both_found_and_no_good_step():
    norms = np.exp(np.random.default_rng(0).normal(0, 0.3, 200))
    norms[109] *= 1000
    samples = of_norms(norms)
    rows = samples.rows.copy()
    rows[49, 0] = row_of(np.array([NAN]), np.array([1.0]))
    samples = Snapshot(samples.steps, samples.names, rows)
    assert steps(NaNGradient().check(samples)) == [50]
    assert steps(ExplodingGradient().check(samples)) == [110]


def test_a_second_spike_soon_after_a_first_is_found():
    norms = np.exp(np.random.default_rng(1).normal(0, 0.3, 120))
    norms[[99, 101]] = [1e5, 50.0]  # the first would hide the second if the rule learned it unlimited
    assert steps(ExplodingGradient().check(of_norms(norms))) == [100, 102]


@pytest.mark.parametrize("log_norm", np.linspace(2.0, 6.0, 21))
def test_norms_that_scatter_have_not_fallen_back_where_they_hardly_differ(log_norm):
    calm = np.exp(np.random.default_rng(3).normal(0, 0.5, 60))
    peak = float(np.exp(log_norm))
    told = ExplodingGradient(deviations=6.0).check(of_norms([*calm, peak, 0.8 * peak, *calm]))
    assert not [alert.text for alert in told if f"has fallen back to {number(0.8 * peak)}" in alert.text]


def test_a_spike_that_the_run_has_survived_before_is_no_alarm():
    # A spike of 8 times the usual norm, after norms of 20 times the usual norm.
    norms = [20.0] * 20 + [1.0] * 40 + [8.0] + [1.0] * 10
    assert list(ExplodingGradient().check(of_norms(norms))) == []


@pytest.mark.parametrize(("factor", "level"), [(3.0, []), (30.0, ["INFO"]), (300.0, ["WARN"])])
def test_a_spike_that_falls_back_at_once_is_no_error_and_teaches(factor, level):
    calm = np.exp(np.random.default_rng(7).normal(0, 0.05, 60))
    norms = np.concatenate([calm, [factor * calm.max() * 0.99], calm])
    check = ExplodingGradient(min_factor=1.0)
    assert [alert.level for alert in check.check(of_norms(norms))] == level
    # The spike at most doubles the record: a later spike of three times raises no alert.
    assert list(check.check(of_norms([3.5, *calm], start=200))) == []


def test_what_grows_on_moves_the_parameters_or_ends_in_nan_is_an_error():
    calm = [sample_of({"a": [1.0]}, step=s, parameters={"a": np.array([3.0])}) for s in range(1, 31)]
    after = {
        "grows": sample_of({"a": [30.0]}, step=32, parameters={"a": np.array([3.0])}),
        "moves": sample_of({"a": [1.0]}, step=32, parameters={"a": np.array([4.0])}),  # by a third
        "breaks": sample_of({"a": [NAN]}, step=32, parameters={"a": np.array([3.0])}),
        "stays": sample_of({"a": [12.0]}, step=32, parameters={"a": np.array([3.0])}),
        "passes": sample_of({"a": [1.0]}, step=32, parameters={"a": np.array([3.0])}),
    }
    levels = {}
    for name, sample in after.items():
        spike = sample_of({"a": [11.0]}, step=31, parameters={"a": np.array([3.0])})
        alerts = list(ExplodingGradient().check(together([*calm, spike, sample])))
        assert steps(alerts) == [31], name
        levels[name] = alerts[0].level
    assert levels == {"grows": "ERROR", "moves": "ERROR", "breaks": "ERROR", "stays": "WARN", "passes": "INFO"}


@pytest.mark.parametrize(("after", "kind"), [([1.0], "passed"), ([NAN], "broken")])
def test_the_layers_of_a_spike_that_is_over_are_those_of_the_spike_not_of_the_sample_after_it(after, kind):
    check = ExplodingGradient()
    calm = [sample_of({"a": [1.0], "b": [1.0]}, step=s) for s in range(1, 31)]
    list(check.check(together([*calm, sample_of({"a": [0.5], "b": [20.0]}, step=31)])))
    [alert] = check.check(sample_of({"a": after, "b": [0.1]}, step=32))
    assert alert.kind == kind
    assert alert.layers == "b 20 (usually 1), a 0.5 (usually 1)"


def test_what_stays_at_a_few_times_the_record_and_moves_nothing_is_told_at_the_fifth_sample():
    """An LSTM that leaves a plateau has two samples of 5 times the record; clipped, they hardly move parameters."""
    for num, told in ((4, []), (5, [31])):
        assert steps(ExplodingGradient().check(of_norms([1.0] * 30 + [6.0] * num))) == told


def test_a_first_step_a_hundred_times_larger_is_no_alarm_and_hides_none():
    norms = np.exp(np.random.default_rng(2).normal(0, 0.2, 60))
    norms[0] = 100.0
    norms[[11, 39]] = 15.0
    assert steps(ExplodingGradient().check(of_norms(norms))) == [12, 40]


@pytest.mark.parametrize("factor", [1.1, 1.3, 2.0])
@pytest.mark.parametrize("num_healthy", [0, 50])
def test_growth_is_found_before_it_has_grown_a_thousandfold(factor, num_healthy):
    rng = np.random.default_rng(3)
    growing = factor ** np.arange(1 + int(math.log(1000) / math.log(factor)))  # up to 1000; parameters do not move
    norms = np.concatenate([np.ones(num_healthy), growing])
    norms *= np.exp(rng.normal(0, 0.05, len(norms)))
    alerts = list(ExplodingGradient().check(of_norms(norms)))
    assert alerts
    assert alerts[0].step > num_healthy


def test_a_fall_a_jump_and_a_return_to_where_it_began_are_no_steady_growth():
    for norms in (np.geomspace(1e4, 1, 100), [1.0] * 30 + [50.0] * 30, [*[1.0] * 20, 0.01, *np.geomspace(0.01, 1, 30)]):
        assert list(ExplodingGradient(threshold=None, record_factor=None).check(of_norms(norms))) == []


@pytest.mark.parametrize(("peak", "is_told"), [(1.6, False), (40.0, True)])  # 2 and 50 times the first norm
def test_a_rise_back_to_where_the_run_began_is_no_explosion(peak, is_told):
    """At the edge of stability the norm rises to 40 times the plateau within 18 steps."""
    norms = [0.8, 0.4, 0.2, 0.1, 0.06, *[0.04] * 80, *np.geomspace(0.04, peak, 18)]
    assert bool(steps(ExplodingGradient(record_factor=None).check(of_norms(norms)))) == is_told


def test_a_new_level_is_one_alarm_after_another_until_it_is_the_usual_one():
    alerts = list(ExplodingGradient(adapt_after=20, growth=None).check(of_norms([1.0] * 30 + [500.0] * 60)))
    assert steps(alerts) == [31] * 19  # one alert per sample from 31 to 49, each with the first step
    assert {alert.level for alert in alerts} == {"WARN"}  # the parameters do not move: perhaps other data


def test_100_times_too_high_a_learning_rate_shows_at_the_second_step_and_is_an_error_at_the_third():
    alerts = list(ExplodingGradient().check(of_norms([0.9, 3e4, 2e5])))
    assert [(alert.step, alert.level) for alert in alerts] == [(2, "WARN"), (2, "ERROR")]


def test_the_static_threshold_is_the_users_and_the_default_knows_summed_losses():
    assert steps(ExplodingGradient(threshold=100.0).check(of_norms([99.0, 101.0]))) == [2]
    assert list(ExplodingGradient().check(of_norms([2e6] * 10))) == []  # 500,000 tokens, 4 each, summed
    (alert,) = ExplodingGradient().check(of_norms([2e9]))
    assert "the gradient norm is 2e9, above the threshold 1e8" in alert.text


def test_the_two_kinds_of_samples_of_a_gan_are_judged_apart():
    rng = np.random.default_rng(4)
    samples = []
    for step in range(1, 101):
        d, g = 100 * math.exp(rng.normal(0, 0.1)), 0.1 * math.exp(rng.normal(0, 0.1))
        if step == 80:
            g *= 20  # far below the discriminator's norms
        samples.append(sample_of({"d": [d], "g": None} if step % 2 else {"d": None, "g": [g]}, step=step))
    assert steps(ExplodingGradient().check(together(samples))) == [80]


def test_unfreezing_the_body_is_no_explosion():
    head = [sample_of({"body1": None, "body2": None, "head": [1.0]}, step=s) for s in range(1, 31)]
    whole = [sample_of({"body1": [30.0], "body2": [40.0], "head": [1.0]}, step=s) for s in range(31, 61)]
    assert list(ExplodingGradient().check(together(head + whole))) == []


def test_an_explosions_text_names_step_values_threshold_and_layers():
    calm = [sample_of({"a": [3.0], "b": [4.0]}, step=s) for s in range(1, 21)]
    *_, alert = ExplodingGradient().check(together([*calm, sample_of({"a": [3.0], "b": [600.0]}, step=21)]))
    # usual 5 = |(3, 4)|, found |(3, 600)| = 600.01; the norms do not scatter, so the limit is 5 times the usual: 25
    fact = (
        "Step 21: the gradient norm is 600, 120 times the usual 5 and 120 times the largest that the run has survived"
    )
    assert fact in alert.text
    assert "Worst layers: b 600 (usually 4), a 3 (usually 3)." in alert.text
    assert "Probable cause: " in alert.text
    assert "Remedy: " in alert.text


def test_false_alarms_on_healthy_log_normal_norms_are_rare():
    rng = np.random.default_rng(5)
    early = late = num_late = 0
    num_runs = 60
    for run in range(num_runs):
        sigma = (0.1, 0.3, 0.6, 1.0)[run % 4]
        found = steps(ExplodingGradient().check(of_norms(np.exp(rng.normal(0, sigma, 300)))))
        early += sum(step <= 20 for step in found)
        late += sum(step > 20 for step in found)
        num_late += 280
    assert early / num_runs <= 0.1
    assert 1000 * late / num_late <= 1.35


def test_the_rate_of_false_alarms_can_be_exceeded():
    # With a limit at the largest norm so far, there are false alarms, so the test above can fail.
    norms = np.exp(np.random.default_rng(6).normal(0, 3.0, 300))
    check = ExplodingGradient(min_factor=1.0, record_factor=1.0, deviations=0.0)
    assert len(list(check.check(of_norms(norms)))) > 1


def test_numbers_are_written_as_people_write_them():
    values = (0.0, 1.0, 999.6, 1234.5, 65536.0, -113_250.4, 999_499.4, 1e6, 1.911e11, 0.0123, 5.51e-7, math.inf)
    written = ["0", "1", "1000", "1230", "65536", "-113000", "999000", "1e6", "1.91e11", "0.0123", "5.51e-7", "inf"]
    assert [number(value) for value in values] == written


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ExplodingGradient(min_factor=0.5), "(min_factor=0.5): min_factor must be a number, at least 1"),
        (
            lambda: ExplodingGradient(record_factor=0),
            "(record_factor=0): record_factor must be a number, at least 1, or None",
        ),
        (lambda: EntropyCollapse(threshold=2), "threshold=2): threshold must be a number, between 0 and 1"),
        (lambda: VanishingGradient(min_norm="1e-7"), "VanishingGradient(min_norm='1e-7'): min_norm must be a number"),
        (lambda: VanishingGradient(min_order=2), "must be a number, between 0 and 1"),
        (lambda: DeadGradient(max_ratio=50), "DeadGradient(max_ratio=50): max_ratio must be a number, between 0 and 1"),
        (lambda: DeadGradient(patience=math.inf), "patience must be a number, between 1 and 1e+09"),
        (lambda: NoGradient(patience=0), "NoGradient(patience=0): patience must be a number, at least 1"),
        (lambda: LossScaleCollapse(min_scale=NAN), "LossScaleCollapse(min_scale=nan): min_scale must be a number"),
    ],
)
def test_impossible_limits_are_refused_before_training(make, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        make()


def test_a_norm_below_the_floor_from_the_start_is_vanishing_after_patience():
    assert steps(VanishingGradient(patience=10).check(of_norms([1e-9] * 12))) == [10, 11, 12]


def test_a_cliff_is_vanishing_and_a_slow_fall_is_convergence():
    assert steps(VanishingGradient().check(of_norms([1.0] * 30 + [1e-9] * 10))) == [40]
    assert list(VanishingGradient().check(of_norms(np.geomspace(1.0, 1e-9, 300)))) == []


def test_healthy_late_training_with_all_gradients_1e_7_raises_nothing():
    # 1000 elements of 1e-7: norm 3.2e-6, above the floor; no element is exactly 0
    late = [sample_of({"a.weight": np.full(900, 1e-7), "a.bias": np.full(100, 1e-7)}, step=s) for s in range(1, 151)]
    for check in default_rules():
        assert list(check.check(together(late))) == []


def test_a_gradient_that_fades_layer_by_layer_is_named_from_both_ends():
    stack = {f"{i}.weight": [10.0 ** (i - 5)] for i in range(6)}  # 1e-5 nearest the input, 1 at the head
    alerts = list(VanishingGradient().check(together([sample_of(stack, step=s) for s in range(1, 11)])))
    assert steps(alerts) == [10]
    assert "the norm falls 100000x from 5 back to 0, layer by layer (threshold 1000x), for 10 samples" in alerts[0].text


def test_layers_of_very_different_norms_without_an_order_are_healthy():
    mixed = {f"{i}.weight": [norm] for i, norm in enumerate((1.0, 1e-6, 1.0, 1e-6, 1.0, 1e-6))}
    assert list(VanishingGradient().check(together([sample_of(mixed, step=s) for s in range(1, 31)]))) == []


def test_a_layer_whose_units_are_all_dead_is_named_after_patience():
    grads = {"a.weight": [0.0, 0.0], "a.bias": [0.0], "b.weight": [1.0, 0.0], "b.bias": [1.0]}
    (alert,) = DeadGradient(patience=10).check(together([sample_of(grads, step=s) for s in range(1, 11)]))
    assert alert.step == 10
    assert "the same units of 1 of 2 layers, more than 50 % of each" in alert.text
    assert "a.weight 100 %" in alert.text


@pytest.mark.parametrize(
    "innocent",
    [
        {"tokens.weight": [0.0] * 99 + [1.0]},  # an embedding: rows of unused tokens
        {"in.weight": [0.0, 0.0, 0.0, 1.0], "in.bias": [1.0]},  # inputs that are always 0
        {"conv.weight": [1.0, 2.0], "conv.bias": [0.0, 0.0]},  # a bias that a batch norm cancels
        {"relu.weight": [0.0, 1.0, 1.0, 1.0], "relu.bias": [0.0, 1.0, 1.0, 1.0]},  # one unit of 4 never fires
    ],
)
def test_innocent_zeros_are_not_dead(innocent):
    samples = together([sample_of(innocent | {"head.weight": [1.0]}, step=s) for s in range(1, 51)])
    assert list(DeadGradient().check(samples)) == []


def test_loras_first_step_is_not_dead():
    first = sample_of({"lora_A.weight": [0.0, 0.0], "lora_B.weight": [1.0]})
    later = [sample_of({"lora_A.weight": [0.1, 0.1], "lora_B.weight": [1.0]}, step=s) for s in range(2, 30)]
    for check in default_rules():
        assert list(check.check(together([first, *later]))) == []


def _never_lost_and_pausing() -> Snapshot:
    return together(
        sample_of({"lost": [1.0] if s <= 20 else None, "never": None, "pauses": None if s % 2 else [1.0]}, step=s)
        for s in range(1, 121)
    )


def test_a_trainable_parameter_without_a_gradient_for_long_is_said_and_one_that_pauses_is_not():
    (first, *_, last) = alerts = list(NoGradient(patience=100).check(_never_lost_and_pausing()))
    # Present up to 20. Chance of a missing gradient: 1 in 22 samples, and 5 in a row are alike: 22^(-23 / 5) < 1e-6.
    assert steps(alerts) == list(range(43, 121))
    assert "lost (23 samples)." in first.text
    assert "2 of 3 watched parameters have had no gradient for 100 samples" in last.text
    assert "never (120 samples), lost (100 samples)" in last.text


@pytest.mark.parametrize("seed", range(10))
def test_a_parameter_that_one_batch_in_ten_uses_is_neither_cut_off_nor_lost(seed):
    """torch lists what a model holds itself before its modules: here the embedding of a missing condition."""
    used = np.random.default_rng(seed).random(600) < 0.1
    samples = [
        sample_of({"null": [1.0] if is_used else None, "net.0.weight": [1.0], "net.1.weight": [1.0]}, step=s)
        for s, is_used in enumerate(used, 1)
    ]
    assert list(NoGradient().check(together(samples))) == []


def test_heads_that_wait_for_their_turn_are_told_of_once():
    heads = [
        sample_of({"net": [1.0], **{f"heads.{h}": [1.0] if h == turn else None for h in range(4)}}, step=150 * turn + s)
        for turn in range(4)
        for s in range(1, 151)
    ]
    assert steps(NoGradient().check(together(heads))) == list(range(100, 451))  # until the last has had its turn


def test_what_is_not_trainable_needs_no_gradient():
    samples = _never_lost_and_pausing()
    assert samples.names == ("lost", "never", "pauses")
    *_, alert = NoGradient(patience=100).check(replace(samples, trainable=np.array([True, False, True])))
    assert (alert.step, "lost (100 samples)" in alert.text, "never" in alert.text) == (120, True, False)
    nothing_left = replace(samples, trainable=np.array([False, False, True]))
    assert list(NoGradient(patience=100).check(nothing_left)) == []


def test_gradients_that_are_all_exactly_0_are_no_gradient_and_not_dead():
    zeros = together([sample_of({"a.weight": [0.0], "a.bias": [0.0]}, step=s) for s in range(1, 12)])
    assert steps(NoGradient(zero_patience=10).check(zeros)) == [10, 11]
    assert list(DeadGradient().check(zeros)) == []


def first_sample(*, without_gradient: str = "", **weights: np.ndarray) -> list[str]:
    """Return the texts about a model whose layers start with these weights, and with biases of 0.1."""
    rng, grads, parameters = np.random.default_rng(0), {}, {}
    for name, weight in weights.items():
        beside = name.replace("weight", "bias").replace("_", ".")
        name = name.replace("_", ".")
        parameters |= {name: weight, beside: np.full(len(weight), 0.1)}
        grads |= {name: rng.normal(size=weight.shape), beside: rng.normal(size=len(weight))}
        grads[name] *= name != without_gradient
    return [alert.text for alert in PoorInitialisation().check(sample_of(grads, parameters=parameters))]


def random_weight(gain: float, units: int = 32) -> np.ndarray:
    weight: np.ndarray = np.random.default_rng(1).normal(0, gain / units**0.5, (units, units)).astype(np.float32)
    return weight


@pytest.mark.parametrize(
    ("weight", "words"),
    [
        (random_weight(1.0), None),
        (np.eye(32, dtype=np.float32), None),  # gain 1: a recurrence may start as the identity
        (np.full((32, 32), np.float32(1 / 32)), None),  # an average of the inputs, as DLinear begins with
        (np.full((32, 32), np.float32(0.05)), "all elements of a weight are equal"),
        (random_weight(3.0), "far larger"),  # above 2.5
        (random_weight(0.01), "far smaller"),  # below 0.03
    ],
)
def test_first_weights_are_told_where_they_are_constant_or_of_another_size(weight, words):
    found = first_sample(a_weight=weight)
    assert [words in text for text in found] == ([] if words is None else [True])


def test_all_weights_of_0_are_told_and_one_layer_that_begins_at_0_is_not():
    zero = np.zeros((32, 32), dtype=np.float32)
    texts = first_sample(a_weight=zero, b_weight=zero, without_gradient="a.weight")
    assert ["a constant initialisation" in text for text in texts] == [True]
    assert first_sample(a_weight=random_weight(1.0), b_weight=zero) == []


def test_a_recurrent_weight_above_a_gain_of_one_and_a_half_is_told():
    def found(gain: float) -> list[Alert]:
        weights = {"rnn.weight_hh_l0": random_weight(gain), "rnn.bias_hh_l0": np.zeros(32)}
        grads = {name: np.random.default_rng(2).normal(size=value.shape) for name, value in weights.items()}
        return list(PoorInitialisation().check(sample_of(grads, parameters=weights)))

    assert [len(found(gain)) for gain in (1.0, 2.0)] == [0, 1]


@pytest.mark.parametrize(
    ("dtype", "share", "told"), [(np.float16, 1e-3, []), (np.float16, 1e-2, [2]), (np.float32, 1e-3, [2])]
)
def test_rounding_of_half_precision_in_a_bias_that_a_norm_cancels_is_no_large_input(dtype, share, told):
    """Modules may be defined in another order than the forward's: two convolutions, and then their norms.

    The scale is about the inverse of the bias's share, 1000 or 100; the rounding of half precision begins at 256.
    """
    rng, samples = np.random.default_rng(3), []
    for step in range(1, 4):
        sizes = {
            "stem.weight": 36,
            "stem.bias": 4,
            "inner.weight": 144,
            "inner.bias": 4,
            "norm.weight": 4,
            "norm.bias": 4,
        }
        grads = {name: rng.normal(size=size).astype(dtype) for name, size in sizes.items()}
        grads["stem.bias"] = (share * rng.normal(size=4)).astype(dtype)
        samples.append(sample_of(grads, step=step))
    assert steps(LargeInputs().check(together(samples))) == told


@pytest.mark.parametrize(("inputs", "normalised", "told"), [(1.0, False, []), (130.0, False, [2]), (130.0, True, [])])
def test_large_inputs_are_told_at_the_second_sample_by_the_first_layers_gradients(inputs, normalised, told):
    rng, samples = np.random.default_rng(3), []
    for step in range(1, 6):
        x, delta = inputs * (1 + 0.5 * rng.normal(size=(16, 8))), rng.normal(size=(16, 4))
        grads = {"0.weight": delta.T @ x, "0.bias": delta.sum(axis=0)}
        if normalised:  # a batch norm cancels the bias
            grads |= {"0.bias": 1e-9 * delta.sum(axis=0), "1.weight": delta[0], "1.bias": delta[1]}
        samples.append(sample_of(grads | {"2.weight": [1.0]}, step=step))
    assert steps(LargeInputs().check(together(samples))) == told


@pytest.mark.parametrize(
    ("first", "second", "told"),
    [
        ([1.02] * 30, [1.0] * 30, []),
        ([1.25] * 3, [1.0] * 3, [3, 4]),  # one of two weights grows by more than 20 % twice
        ([1.19] * 8, [1.0] * 8, [8, 9]),  # by 1.19^6 = 2.8, without the largest of seven updates
        ([1.11] * 3, [1.11] * 3, []),
        ([1.0] * 20 + [1.13] * 2, [1.0] * 22, [23]),  # later in a run the limit is about half
        ([1.0] * 20 + [1.11] * 4, [1.0] * 24, []),  # like a healthy LSTM at a learning rate of 20
        ([1.0, 50.0, *[1.0] * 20], [1.0] * 22, []),
    ],
)
def test_a_weight_that_grows_faster_than_any_training_survives_is_told_and_one_jump_is_not(first, second, told):
    sizes = zip(*(np.cumprod([1.0, *factors]) for factors in (first, second)), strict=True)
    grads, samples = {"a": np.ones(300), "b": np.ones(6000)}, []
    for step, (a, b) in enumerate(sizes, 1):
        samples.append(sample_of(grads, step=step, parameters={"a": np.full(300, a), "b": np.full(6000, b)}))
    alerts = list(FastParameters().check(together(samples)))
    assert steps(alerts) == told
    assert all(("Worst layers: a" in alert.text) == (first != second) for alert in alerts)
    assert all(("the norm of 1 of 2 parameters has" in alert.text) == (first != second) for alert in alerts)


@pytest.mark.parametrize(("num_weights", "told"), [(4, []), (5, [3, 4])])
def test_of_many_weights_that_grow_alike_half_as_much_is_as_bad(num_weights, told):
    names = [f"layer{number}.weight" for number in range(num_weights)]
    sizes = [{name: np.full(300, 1.11**step) for name in names} for step in range(4)]
    ones = dict.fromkeys(names, np.ones(300))
    samples = [sample_of(ones, step=step, parameters=weights) for step, weights in enumerate(sizes, 1)]
    assert steps(FastParameters().check(together(samples))) == told


@pytest.mark.parametrize(("rate", "told"), [(0.01, []), (1.0, [3, 4, 5, 6])])
def test_tables_that_begin_small_may_grow_by_the_learning_rate_per_step(rate, told):
    """Embeddings that start at 0.01 (matrix factorisation) grow under Adam by factors of 2, 1.5, 1.33, ..."""
    sizes = [0.01 + rate * step for step in range(6)]
    grads = {"users.weight": np.full(1600, 0.01), "items.weight": np.full(1600, 0.01)}
    tables = [{name: np.full(1600, size) for name in grads} for size in sizes]
    samples = [sample_of(grads, step=step, parameters=both) for step, both in enumerate(tables, 1)]
    assert steps(FastParameters().check(together(samples))) == told


@pytest.mark.parametrize(("parameter", "told"), [(1.0, [6]), (1000.0, [])])
def test_who_leaves_a_plateau_comes_from_next_to_nothing(parameter, told):
    """A gradient norm that rises from 1e-6 to 1 is negligible beside a parameter norm of 2000, but not of 2."""
    norms = [*[1e-6] * 5, 1.0, 1.0, 1.0]
    samples = [
        sample_of({"w": np.full(4, norm / 2)}, step=step, parameters={"w": np.full(4, parameter)})
        for step, norm in enumerate(norms, 1)
    ]
    assert steps(ExplodingGradient().check(together(samples)))[:1] == told


@pytest.mark.parametrize(("is_frozen", "told"), [(True, []), (False, [1])])
def test_adapters_of_a_frozen_model_may_begin_next_to_0(is_frozen, told):
    rng = np.random.default_rng(0)
    adapter = {"adapter.weight": 1e-4 * rng.normal(size=(8, 64)), "adapter.bias": np.zeros(8)}
    base = {f"{layer}.{kind}": 1e-4 * rng.normal(size=64) for layer in range(3) for kind in ("weight", "bias")}
    grads = {name: rng.normal(size=value.shape) for name, value in adapter.items()}
    grads |= {name: None if is_frozen else rng.normal(size=64) for name in base}
    samples = sample_of(grads, parameters=adapter | base, trainable=[True] * 2 + [not is_frozen] * 6)
    assert steps(PoorInitialisation().check(samples)) == told


def test_a_weight_that_leaves_0_may_grow_as_it_likes():
    """Like LoRA's B: its norm doubles with each update, and ends at a hundredth of the other norm."""
    sizes = [0.0, *(1e-4 * 2.0 ** np.arange(7))]
    weights = [{"a": np.full(300, 1.0), "b": np.full(300, size)} for size in sizes]
    grads = {"a": np.ones(300), "b": np.ones(300)}
    samples = [sample_of(grads, step=step, parameters=both) for step, both in enumerate(weights, 1)]
    assert steps(FastParameters().check(together(samples))) == []


def test_a_decorated_function_is_a_rule_of_its_own_title_asked_sample_by_sample():
    @rule(title="Head too large", level="ERROR")
    def head_too_large(snapshot):
        norm = snapshot.grad_norm[0, snapshot.names.index("w")]
        return f"{norm:.0f} at step {snapshot.steps[0]}" if norm > 10 else None

    assert isinstance(head_too_large, Rule)
    (alert,) = head_too_large.check(of_norms([1.0, 20.0, 1.0]))
    assert alert == Alert("Head too large", "20 at step 2", 2, "ERROR")


def test_a_plain_function_is_titled_by_its_name_and_may_return_an_alert():
    def loss_is_weird(snapshot):
        return "hm" if snapshot.steps[0] == 1 else Alert("Other", "text", int(snapshot.steps[0]), "INFO")

    assert list(as_rule(loss_is_weird).check(of_norms([1.0, 1.0]))) == [
        Alert("Loss is weird", "hm", 1, "WARN"),
        Alert("Other", "text", 2, "INFO"),
    ]


def test_bad_rules_say_what_to_do():
    with pytest.raises(TypeError, match=r"write NaNGradient\(\)"):
        as_rule(NaNGradient)
    with pytest.raises(TypeError, match="must have check"):
        as_rule(3)
    with pytest.raises(ValueError, match="1 to 63 characters"):
        rule(title="x" * 64)(lambda snapshot: None)
    with pytest.raises(TypeError, match="must return a str, an Alert or None, but returned 3"):
        list(as_rule(lambda snapshot: 3).check(of_norms([1.0])))


def test_titles_are_short_stable_and_one_per_kind():
    titles = [check.title for check in default_rules()]
    assert len(set(titles)) == len(titles)
    assert all(0 < len(title) <= MAX_TITLE for title in titles)
    assert default_rules()[2] is not default_rules()[2]


@pytest.mark.parametrize("seed", range(6))
def test_state_survives_json_and_one_call_or_many_find_the_same(seed):
    samples = random_samples(seed)
    for whole, parts in zip(default_rules(), default_rules(), strict=True):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            expected = list(whole.check(together(samples)))
            found = []
            for start in range(0, len(samples), 7):
                found += list(parts.check(together(samples[start : start + 7])))
                resumed = type(parts)()
                resumed.load_state_dict(json.loads(json.dumps(parts.state_dict())))
                parts = resumed
        # Windows before a late parameter do not have its name: numbers of parameters in texts may differ, but steps and
        # titles may not.
        assert [(a.step, a.title, a.level) for a in found] == [(a.step, a.title, a.level) for a in expected], whole


def test_therandom_samples_above_do_raise_alarms():
    titles = {a.title for check in default_rules() for s in range(2) for a in check.check(together(random_samples(s)))}
    assert titles >= {"NaN gradient", "Inf gradient", "Exploding gradient", "Loss scale collapse"}


def test_per_name_numbers_follow_names_that_come_and_go():
    memory = PerName()
    memory.of(("a", "b"))[:] = [1.0, 2.0]
    assert memory.of(("b", "c")).tolist() == [2.0, 0.0]
    assert memory.of(("a", "b", "c")).tolist() == [1.0, 2.0, 0.0]


def test_kinds_ignore_one_parameter_more_and_tell_disjoint_sets_apart():
    kinds, names = PerKind(PerName), ("a", "b", "c", "d")
    of = [kinds.of(names, np.array(mask)) for mask in ([1, 1, 1, 0], [1, 1, 1, 1], [0, 0, 0, 1], [1, 1, 0, 0])]
    assert [kept is of[0] for kept in of] == [True, True, False, True]


def test_a_listing_has_five_items_and_counts_the_rest():
    assert listing(["a"] * 5) == "a, a, a, a, a"
    assert listing(["a"] * 7) == "a, a, a, a, a, and 2 more"


def test_branches_side_by_side_are_no_depth():
    # The critic's norms are a hundred thousand times the actor's, but norms do not vanish within either branch.
    sizes = {f"actor.{i}.weight": [1e-5 * 1.5**i] for i in range(4)} | {
        f"critic.{i}.weight": [1.5**i] for i in range(4)
    }
    check = VanishingGradient()
    assert list(check.check(together([sample_of(sizes, step=s) for s in range(1, 31)]))) == []
    chain = {f"actor.{i}.weight": [10.0**-i] for i in range(5)} | {"critic.weight": [1.0]}
    chain = dict(reversed(chain.items()))  # the model's first parameter has the smallest norm
    assert steps(VanishingGradient(patience=3).check(together([sample_of(chain, step=s) for s in range(1, 4)]))) == [3]


@pytest.mark.parametrize("prefixes", [("actor.", "critic."), ("model0.", "model1."), ("0.", "1."), ("q1.", "q2.")])
def test_networks_side_by_side_are_no_depth_however_they_are_called(prefixes):
    # Within each network norms differ by less than 10 times, between them by a hundred thousand times.
    sizes = {
        f"{prefix}{layer}.weight": [size * 2.0**layer]
        for prefix, size in zip(prefixes, (1e-5, 1.0), strict=True)
        for layer in range(3)
    }
    samples = together([sample_of(sizes, step=s) for s in range(1, 31)])
    assert list(VanishingGradient(min_order=0.8).check(samples)) == []


def test_units_that_are_off_in_every_sample_but_never_the_same_ones_are_not_dead():
    rng = np.random.default_rng(8)
    samples = []
    for step in range(1, 101):  # a batch of 1: each sample has two thirds of 24 ReLU units off, at random
        on = rng.random(24) < 1 / 3
        samples.append(
            sample_of({"a.weight": np.outer(on, np.ones(3)), "a.bias": on * 1.0, "b.bias": [1.0]}, step=step)
        )
    assert list(DeadGradient().check(together(samples))) == []


def layers(*, dead: dict[str, int], units: int = 64, weight: float = 1.0, empty: str = "") -> dict[str, np.ndarray]:
    """Return gradients of layers 0, 1 and 2; `dead`: number of dead units by layer; `empty`: a layer with input 0."""
    grads = {}
    for name in "012":
        on = (np.arange(units) >= dead.get(name, 0)) * weight
        grads[f"{name}.weight"] = np.outer(on, np.full(2, float(name != empty)))
        grads[f"{name}.bias"] = on
    return grads


def dead_steps(*grads: dict[str, np.ndarray], parameters: float = 1.0) -> list[int]:
    """Return the steps of DeadGradient's alerts for these samples of gradients, with parameters of this size."""
    samples = [
        sample_of(one, step=step, parameters={name: np.full(grad.shape, parameters) for name, grad in one.items()})
        for step, one in enumerate(grads, 1)
    ]
    return steps(DeadGradient().check(together(samples)))


def test_half_of_an_untrained_layers_units_are_off_by_chance_and_more_are_not():
    # 64 fair coins: 32 + 4 deviations of 4 is 48; training may switch off more units, up to 0.9 * 64 = 57.6.
    # The same units in every sample, as with a fixed batch.
    assert dead_steps(*[layers(dead={"1": 57})] * 30) == []
    assert dead_steps(*[layers(dead={"1": 58})] * 12) == [10, 11, 12]


def test_half_of_a_layer_that_dies_at_once_is_told_at_the_second_sample():
    before, after = [layers(dead={"1": 4})] * 20, [layers(dead={"1": 36})] * 2
    assert dead_steps(*before, *after) == [22]
    drifting = [layers(dead={"1": 16 + step}) for step in range(24)]  # one more unit per sample, up to 39
    assert dead_steps(*drifting) == []


def test_layers_that_are_dead_from_the_first_step_on_are_told_at_the_second_unless_weights_of_0_hold_them_up():
    dead = [layers(dead={"0": 64, "1": 64})] * 11
    assert dead_steps(*dead) == list(range(2, 12))
    assert dead_steps(*dead, parameters=0.0) == []  # another rule reports weights that are all 0
    expert = [layers(dead={"1": 64})] * 11  # the layers before have gradients: an unused branch
    assert dead_steps(*expert) == [10, 11]
    assert dead_steps(*[layers(dead={"0": 4}, units=4)] * 9) == []  # with four units it is not rare that all are off


def test_a_layer_whose_inputs_become_0_is_told_at_the_second_sample():
    before, after = [layers(dead={})] * 50, [layers(dead={}, empty="0")] * 2
    check = DeadGradient()
    samples = together([sample_of(grads, step=s) for s, grads in enumerate([*before, *after], 1)])
    (alert,) = check.check(samples)
    assert alert.step == 52
    assert "the weights of 0 have had no gradient while its bias has one" in alert.text
    assert "the data has changed" in alert.text
    assert dead_steps(*[layers(dead={}, empty="0")] * 30) == []  # inputs that were 0 from the start


def test_units_that_die_together_with_the_inputs_do_not_hide_that_there_are_none():
    before, after = [layers(dead={})] * 50, [layers(dead={"0": 40}, empty="0")] * 20
    check = DeadGradient()
    samples = together([sample_of(grads, step=s) for s, grads in enumerate([*before, *after], 1)])
    alerts = list(check.check(samples))
    assert all("every input of this layer is 0" in alert.text for alert in alerts)
    assert alerts[0].step == 52


def test_a_whole_layer_that_dies_is_told_at_the_second_sample():
    alive = {"a.weight": [1.0], "a.bias": [1.0], "b.weight": [1.0], "b.bias": [1.0]}
    dead = {"a.weight": [0.0], "a.bias": [0.0], "b.weight": [0.0], "b.bias": [1.0]}
    samples = [sample_of(alive, step=s) for s in range(1, 51)] + [sample_of(dead, step=s) for s in (51, 52)]
    assert steps(DeadGradient().check(together(samples))) == [52]  # by chance (1 / 52)^2
    experts = [sample_of(dead if s % 3 else alive, step=s) for s in range(1, 101)]  # used by one of three batches
    assert list(DeadGradient().check(together(experts))) == []
