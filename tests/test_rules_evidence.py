"""Rules and diagnosis claim no more than the evidence supports: texts also name other causes of the same numbers."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest
from grad_samples import measured, of_norms, sample_of, together
from wandb_gradwatch._diagnosis import diagnose, with_diagnosis

from wandb_gradwatch._measure.columns import Column
from wandb_gradwatch.rules import (
    DeadGradient,
    ExplodingGradient,
    FastParameters,
    LargeInputs,
    LossScaleCollapse,
    LossSpike,
    NaNGradient,
    NoGradient,
    PoorInitialisation,
    Rule,
    TightClipping,
    UnchangedParameters,
    VanishingGradient,
)
from wandb_gradwatch.snapshot import Snapshot, keys


def steps(check: Rule, snapshot: Snapshot) -> list[int]:
    """Return the steps of the alerts, checking one sample at a time with a rule restored from its state each time."""
    told = []
    for place in range(len(snapshot)):
        kind = type(check)()
        kind.load_state_dict(json.loads(json.dumps(check.state_dict())))
        check = kind
        told += [alert.step for alert in check.check(snapshot.sample(place))]
    return told


@pytest.mark.parametrize(("scatter", "is_told"), [(0.05, True), (1.2, False)])
def test_norms_that_scatter_have_a_limit_of_their_own(scatter: float, is_told: bool) -> None:
    """Add five samples of 2.5 times the record, and of at least 6 times the median.

    With scatter 0.05 the limit is 5 times the median. With scatter 1.2, a factor of e^1.2 = 3.3, the limit is 3.3 times
    the record, because the noise of small batches, as in reinforcement learning, often exceeds the record.
    """
    norms = np.exp(np.random.default_rng(0).normal(0, scatter, 60))
    level = max(2.5 * norms.max(), 6.0)
    assert bool(steps(ExplodingGradient(), of_norms([*norms, *[level] * 5]))) == is_told


def clipped(factors: list[float], norm: float = 1.0) -> Snapshot:
    """Return samples whose norms clipping has divided by these factors; the first norm is 1, the others are `norm`."""
    norms = np.array([1.0] + [norm] * (len(factors) - 1))
    samples = of_norms(norms)
    rows = samples.rows.copy()
    rows[:, 0, Column.RECEIVED_SUM_SQ] = np.square(norms / np.array(factors))
    return Snapshot(samples.steps, samples.names, rows)


def test_too_tight_a_clip_is_certain_at_once_only_where_nothing_can_have_exploded_before() -> None:
    assert steps(TightClipping(), clipped([5000.0] * 4)) == [3, 4]
    assert steps(TightClipping(), clipped([2.0, *[5000.0] * 3])) == [4]  # the norms are as before
    assert steps(TightClipping(), clipped([2.0, *[5000.0] * 20], norm=9.0)) == [21]  # clipping may hold an explosion


@pytest.mark.parametrize(
    ("missing", "told"),
    [
        ("ab", [10, 11, 12]),  # all layers from the input up to b: the backward is cut after b
        ("b", []),  # an unused expert or head: a layer before it has gradients
        ("ad", []),
    ],
)
def test_a_way_back_that_is_cut_is_told_after_ten_samples(missing: str, told: list[int]) -> None:
    samples = [sample_of({n: None if n in missing else [1.0] for n in "abcd"}, step=s) for s in range(1, 13)]
    assert steps(NoGradient(), together(samples)) == told


@pytest.mark.parametrize("loss", [0.7, 0.0])
def test_no_gradient_at_all_is_told_at_the_third_sample(loss: float) -> None:
    """Like a loss that was rebuilt from a number: the backward reaches no parameter."""
    samples = [sample_of({n: None for n in "ab"}, step=s) for s in range(1, 5)]
    assert steps(NoGradient(), measured(together(samples), loss=[loss] * 4)) == [3, 4]


def test_samples_in_which_a_parameter_was_frozen_are_no_missing_gradients() -> None:
    thawed = [sample_of({"a": None, "b": [1.0]}, step=s, trainable=[s > 200, True]) for s in range(1, 206)]
    check = NoGradient()
    assert [alert for sample in thawed for alert in check.check(sample)] == []


@pytest.mark.parametrize(("faint", "told"), [(1e-30, [5, 6]), (1e-17, [])])  # rounding of float64: 1e-17
def test_a_layer_at_next_to_nothing_of_the_others_is_told(faint: float, told: list[int]) -> None:
    samples = [sample_of({"a.weight": [faint], "b.weight": [1.0]}, step=s) for s in range(1, 7)]
    assert steps(VanishingGradient(), together(samples)) == told


@pytest.mark.parametrize(
    ("name", "size", "share", "rises", "told"),
    [
        ("a.weight", 64, 1e-9, 1.0, [20, 21]),  # a normalisation of a single number, or a factor of almost 0, follows
        ("a.weight", 64, 1e-9, 1.1, []),  # a layer scale of 1e-6 opens slowly during a warm-up
        ("a.weight", 64, 1e-6, 1.0, []),
        ("a.weight", 63, 1e-9, 1.0, []),  # a gain or a temperature
        ("a.bias", 64, 1e-9, 1.0, []),  # a normalisation cancels it, up to rounding
    ],
)
def test_weights_whose_gradients_are_as_small_as_rounding_are_told(
    name: str, size: int, share: float, rises: float, told: list[int]
) -> None:
    samples = [sample_of({name: np.full(size, share / 8 * rises**s), "b.weight": [1.0]}, step=s) for s in range(1, 22)]
    assert steps(VanishingGradient(), together(samples)) == told


@pytest.mark.parametrize(
    ("dtype", "size", "told"),
    [
        (np.float16, 3e-8, [5, 6]),  # 2^-24 is 6e-8: elements are 0, 1, 2 ... of them
        (np.float16, 1e-3, []),  # large enough for float16
        (np.float32, 3e-8, []),  # as small, and exact
    ],
)
def test_gradients_of_which_float16_has_kept_only_its_smallest_steps_are_told(
    dtype: type, size: float, told: list[int]
) -> None:
    rng = np.random.default_rng(0)
    samples = [
        sample_of({name: rng.normal(0, size, 300).astype(dtype) for name in ("a.weight", "b.weight")}, step=step)
        for step in range(1, 7)
    ]
    assert steps(VanishingGradient(), together(samples)) == told


@pytest.mark.parametrize(("healthy", "told"), [(250, [5, 6]), (350, [])])
def test_a_healthy_layer_hides_no_underflow_of_most_of_the_elements(healthy: int, told: list[int]) -> None:
    # 300 underflowed elements beside 250 ordinary ones, which make up the whole norm; beside 350 they are a minority.
    rng = np.random.default_rng(0)
    samples = [
        sample_of(
            {"a.weight": rng.normal(0, 3e-8, 300).astype(np.float16), "head.weight": rng.normal(0, 0.1, healthy)},
            step=step,
        )
        for step in range(1, 7)
    ]
    assert steps(VanishingGradient(), together(samples)) == told


def test_weights_that_the_first_update_has_shrunk_are_compared_with_those_before_it() -> None:
    """As if all weights were clamped after each step."""
    samples = [
        sample_of(
            {"a.weight": np.ones(300)}, step=step, parameters={"a.weight": np.full(300, 1.0 if step == 1 else 0.1)}
        )
        for step in range(1, 4)
    ]
    assert steps(FastParameters(), together(samples)) == [2, 3]


@pytest.mark.parametrize(
    ("loss", "words"), [(3e-13, "either too small a loss (3e-13)"), (2.0, "a saturated or dead network")]
)
def test_small_gradients_of_a_small_loss_are_the_losss(loss: float, words: str) -> None:
    (alert,) = VanishingGradient().check(measured(of_norms([1e-9] * 10), loss=[loss] * 10))
    assert words in alert.text


def units(dead: int, *, of: int = 40) -> dict[str, list[float]]:
    return {"a.weight": [0.0] * dead + [1.0] * (of - dead), "a.bias": [0.0] * dead + [1.0] * (of - dead)}


@pytest.mark.parametrize(
    ("shares", "is_told"),
    [
        ([20] * 10 + [29] * 30, False),  # switched off one by one: a training that needs fewer units
        ([37] * 20, True),  # nine tenths of them
        ([10] * 12 + [30] * 3, True),  # half of them at once
    ],
)
def test_units_that_are_switched_off_while_others_learn_are_no_alarm(shares: list[int], is_told: bool) -> None:
    samples = [sample_of(units(dead) | {"b.weight": [1.0]}, step=s) for s, dead in enumerate(shares, 1)]
    assert bool(steps(DeadGradient(), together(samples))) == is_told


def test_dead_units_that_a_batch_reaches_now_and_then_are_one_lasting_fault() -> None:
    """From step 18 on, each third sample reaches one more of 40 units, each thirteenth 25. At step 90 they recover."""
    shares = [10] * 15 + [39] * 2 + [15 if s % 13 == 0 else 40 - (s % 3 == 0) for s in range(18, 90)] + [10] * 30
    samples = [sample_of(units(dead) | {"b.weight": [1.0]}, step=s) for s, dead in enumerate(shares, 1)]
    assert steps(DeadGradient(), together(samples)) == list(range(17, 92))  # until three of five samples have recovered


@pytest.mark.parametrize(("apart", "is_told"), [(1, True), (60, False)])
def test_units_that_died_in_steps_that_were_not_measured_may_have_died_one_by_one(apart: int, is_told: bool) -> None:
    """The default cadence measures the first ten steps, and may then measure only every 60th."""
    later = [10 + apart * n for n in (1, 2)]
    samples = [sample_of(units(26 if s > 10 else 12) | {"b.weight": [1.0]}, step=s) for s in [*range(1, 11), *later]]
    assert bool(steps(DeadGradient(), together(samples))) == is_told


@pytest.mark.parametrize(("b", "told"), [(0.0, False), (1.0, True)])
def test_a_layer_that_waits_for_a_weight_of_0_is_not_dead_however_long(b: float, told: bool) -> None:
    """Like LoRA with a learning rate of 0 in the first steps: B stays 0, so A gets no gradient."""
    parameters = {"a.weight": np.ones(4), "a.bias": np.ones(4), "b.weight": np.full(4, b)}
    grads = {"a.weight": np.zeros(4), "a.bias": np.zeros(4), "b.weight": np.ones(4)}
    samples = [sample_of(grads, step=s, parameters=parameters) for s in range(1, 31)]
    assert bool(steps(DeadGradient(), together(samples))) == told


def trained(
    norms: Mapping[int, float],
    sizes: Mapping[int, float],
    *,
    num: int = 24,
    layers: tuple[str, ...] = ("a.weight", "b.weight"),
) -> Snapshot:
    """Return samples with norms near 1 and parameters near 10, but for the factors `norms` and `sizes` by step."""
    rng, size, samples = np.random.default_rng(1), 10.0, []
    for step in range(1, num + 1):
        size *= sizes.get(step, 1.0 + 1e-3 * float(rng.random()))
        grads = {n: np.full(200, norms.get(step, 1.0) * float(np.exp(0.05 * rng.normal())) / 20) for n in layers}
        samples.append(sample_of(grads, step=step, parameters={n: np.full(200, size / 20) for n in layers}))
    return together(samples)


RATE = [0.1] * 20


@pytest.mark.parametrize(
    ("norms", "sizes", "rates", "is_rate", "words"),
    [
        # The learning rate rises a hundredfold in the update of step 21, which moves the parameters: it is the cause.
        (
            {22: 50.0, 23: 80.0},
            {22: 1.4, 23: 1.4},
            [*RATE, 10.0, 10.0, 10.0, 10.0],
            True,
            "(it rose from 0.1 to 10 at step 21)",
        ),
        # The norm is 50 times the usual one before the parameters move unusually, at the same learning rate.
        ({21: 50.0, 22: 80.0}, {22: 1.4, 23: 1.4}, [0.1] * 24, False, "either one bad batch"),
        ({21: 50.0, 22: 80.0}, {22: 1.4, 23: 1.4}, None, False, "either one bad batch"),
    ],
)
@pytest.mark.parametrize("title", ["Exploding gradient", "Parameters grow too fast"])
def test_the_learning_rate_is_blamed_where_it_rose_and_not_where_the_gradient_came_first(
    norms: dict[int, float], sizes: dict[int, float], rates: list[float] | None, is_rate: bool, words: str, title: str
) -> None:
    samples = trained(norms, sizes)
    samples = samples if rates is None else measured(samples, learning_rate=rates)
    rules: dict[str, Rule] = {"Exploding gradient": ExplodingGradient(), "Parameters grow too fast": FastParameters()}
    first, *_ = (alert for alert in rules[title].check(samples) if alert.level == "ERROR")
    text = with_diagnosis(first, samples).text
    assert ("learning rate too high" in text) == is_rate
    assert words in text


def test_parameters_that_grow_from_the_start_leave_the_rate_and_the_scale_open_where_nothing_decides() -> None:
    layers = tuple(f"{number}.weight" for number in range(5))
    samples = trained({}, dict.fromkeys(range(2, 25), 1.07), layers=layers)  # 7 % a step, after ordinary gradients
    *_, alert = FastParameters().check(samples)
    assert "not clear: either a learning rate that is too high, or a large scale of the inputs" in alert.text


@pytest.mark.parametrize(("second", "is_loss"), [(1000.0, True), (30.0, False)])
def test_a_loss_that_is_multiplied_raises_the_loss_and_every_layer_alike(second: float, is_loss: bool) -> None:
    samples = trained({21: 1000.0, 22: 1000.0}, {}, num=22)
    rows = samples.rows.copy()
    rows[20:, 1, Column.GRAD_SUM_SQ] *= (second / 1000.0) ** 2
    samples = measured(Snapshot(samples.steps, samples.names, rows), loss=[*[0.7] * 20, 700.0, 720.0])
    causes = [found.cause for found in diagnose(samples)]
    assert ("the scale of the loss has changed" in causes) == is_loss


def test_a_loss_that_stays_up_after_a_rise_of_the_rate_is_the_rates() -> None:
    samples = measured(
        of_norms([1.0] * 48), loss=[*[1.0, 1.1] * 20, *[9.0] * 8], learning_rate=[*[0.1] * 38, *[5.0] * 10]
    )
    (alert,) = LossSpike().check(samples)
    assert "learning rate too high (it rose from 0.1 to 5 at step 39)" in with_diagnosis(alert, samples).text


def test_what_reads_no_learning_rate_waits_longer_for_parameters_that_do_not_change() -> None:
    """Parameters do not change despite large gradients; the number of samples needed depends on the learning rate."""
    still = together([sample_of({"a": [1.0]}, step=s, parameters={"a": np.array([3.0])}) for s in range(1, 103)])
    assert steps(UnchangedParameters(), still)[0] == 21
    assert steps(UnchangedParameters(), measured(still, learning_rate=[0.0] * 102))[0] == 26
    assert steps(UnchangedParameters(), measured(still, learning_rate=[0.1] * 102))[0] == 11
    # A known learning rate proves that step() was called.
    for rate, remedy in (
        (math.nan, "call optimizer.step()"),
        (0.0, "check the learning"),
        (0.1, "look for code that overwrites the parameters"),
    ):
        alert = next(iter(UnchangedParameters().check(measured(still, learning_rate=[rate] * 102))))
        assert f"Remedy: {remedy}" in alert.text
    warmed_up = measured(
        still, learning_rate=[0.0] * 20 + [0.1] * 82
    )  # the effect of the first rate above 0 is visible one sample later
    assert steps(UnchangedParameters(), warmed_up)[0] == 30


@pytest.mark.parametrize(("start", "first_told"), [(2.0**16, 5), (2.0**30, 19), (2.0**12, 5)])  # 2^30 / 2^18 is 4096
def test_a_loss_scale_that_begins_too_high_is_on_its_way_until_it_is_where_models_settle(
    start: float, first_told: int
) -> None:
    skipped = [sample_of({"a": [np.inf]}, step=s, skipped=True, loss_scale=start / 2 ** (s - 1)) for s in range(1, 25)]
    assert steps(LossScaleCollapse(), together(skipped))[0] == first_told
    trained_before = sample_of({"a": [1.0]}, step=0, loss_scale=start)
    assert steps(LossScaleCollapse(), together([trained_before, *skipped]))[0] == 5


def test_a_training_that_has_converged_but_for_a_batch_now_and_then_does_not_vanish() -> None:
    norms = np.where(np.arange(200) % 10 == 0, 1e-3, 2e-7)  # their plain mean is 1e-4, a thousand times the floor
    assert steps(VanishingGradient(), of_norms([*norms, *[5e-8] * 12])) == []


def test_the_other_networks_learning_rate_in_a_gan_is_no_rise() -> None:
    samples = []
    for step in range(1, 42):
        norm = 500.0 if step == 41 else 1.0
        mine, other = ("d", "g") if step % 2 else ("g", "d")
        samples.append(
            sample_of({mine: [norm], other: None} if mine < other else {other: None, mine: [norm]}, step=step)
        )
    both = measured(together(samples), learning_rate=[1.0 if step % 2 else 0.1 for step in range(1, 42)])
    alerts = [a for a in ExplodingGradient().check(both) if a.step == 41]
    assert "either one bad batch" in with_diagnosis(alerts[0], both).text
    assert "learning rate" not in with_diagnosis(alerts[0], both).text


def test_a_new_level_is_diagnosed_by_all_samples_that_it_was_found_in() -> None:
    samples = trained(dict.fromkeys(range(21, 25), 40.0), {})
    samples = measured(samples, loss=[*[0.7] * 20, *[28.0] * 4])
    first, *_ = (alert for alert in ExplodingGradient().check(samples) if alert.level == "WARN")
    assert (first.step, "the scale of the loss has changed" in with_diagnosis(first, samples).text) == (21, True)


@pytest.mark.parametrize(
    ("rule", "first", "factor", "told"),
    [
        (PoorInitialisation(), 10.0, 1.1, [2]),  # a root mean square of 10 in 16 inputs is a gain of 40
        (UnchangedParameters(), 0.25, 1.0, [22, 24, 26, 28, 30]),  # 20 steps after step 2
        (
            FastParameters(),
            0.25,
            1.6,
            [*range(6, 22, 2), *range(24, 31, 2)],
        ),  # 1.26 per step, twice, also after step 20
    ],
)
def test_the_parameters_of_two_networks_that_train_in_turn_are_judged(
    rule: Rule, first: float, factor: float, told: list[int]
) -> None:
    """A GAN's samples contain one network each; the second one's parameters are at fault."""
    rng, samples = np.random.default_rng(0), []
    signs = rng.choice([-1.0, 1.0], (2, 16, 16)) * rng.uniform(0.5, 1.5, (2, 16, 16))
    for step in range(1, 31):
        parameters = {
            "a.0.weight": 0.25 * 1.001**step * signs[0],
            "b.0.weight": first * factor ** (step // 2) * signs[1],
        }
        mine = "ba"[step % 2]
        grads = {name: rng.normal(size=(16, 16)) if name[0] == mine else None for name in parameters}
        samples.append(sample_of(grads, step=step, parameters=parameters))
    assert steps(rule, together(samples)) == told


@pytest.mark.parametrize(
    ("rule", "part", "factor", "received", "told"),
    [
        (DeadGradient(), "b.0", 0.0, 1.0, 20),  # after ten samples of network b, and so the next one
        (VanishingGradient(), "b", 1e-10, 1.0, 20),
        (TightClipping(), "b", 1.0, 1e-8, 6),  # after three
    ],
)
def test_the_gradients_of_two_networks_that_train_in_turn_are_judged(
    rule: Rule, part: str, factor: float, received: float, told: int
) -> None:
    """Of the second network `part` has gradients of this factor, of whose squares this share is left by clipping."""
    rng, samples = np.random.default_rng(0), []
    parts = (("weight", (16, 16)), ("bias", (16,)))
    sizes = {f"{name}.{layer}.{kind}": size for name in "ab" for layer in "01" for kind, size in parts}
    parameters = {name: 0.2 * rng.normal(size=size) for name, size in sizes.items()}
    for step in range(1, 25):
        mine = "ba"[step % 2]
        grads = {
            name: rng.normal(size=size) * (factor if name.startswith(part) else 1.0) if name[0] == mine else None
            for name, size in sizes.items()
        }
        sample = sample_of(grads, step=step, parameters=parameters)
        rows = sample.rows.copy()
        rows[..., Column.RECEIVED_SUM_SQ] *= received if mine == "b" else 1.0
        samples.append(replace(sample, rows=rows))
    assert steps(rule, together(samples))[0] == told


@pytest.mark.parametrize(("weight", "bias", "told"), [(1.0, 0.0, 1), (0.8, 0.1, 0), (0.0, 0.0, 1)])
def test_large_weights_of_a_model_that_was_trained_before_are_no_initialisation(
    weight: float, bias: float, told: int
) -> None:
    """A trained GPT-2 has weights of up to 4 times the size that preserves a signal, and changed normalisations."""
    rng = np.random.default_rng(0)
    parameters = {
        "ln_1.weight": np.full(32, weight), "ln_1.bias": np.full(32, bias),
        "fc.weight": rng.normal(0, 3.6 / 32**0.5, (32, 32)), "fc.bias": np.zeros(32),
    }  # fmt: skip
    grads = {name: rng.normal(size=value.shape) for name, value in parameters.items()}
    assert len(list(PoorInitialisation().check(sample_of(grads, parameters=parameters)))) == told


@pytest.mark.parametrize(
    ("left", "others_left", "told"),
    [
        (0.91, 1.0, [9, 10]),  # the first change is that of the second sample: nine samples have eight
        (0.97, 1.0, []),  # a graph network's first layer and a renderer's colours do so while they learn
        (0.97, 0.97, [9, 10]),
        (0.99, 0.99, []),
    ],
)
def test_a_decay_shrinks_most_weights_or_halves_one_within_eight_updates(
    left: float, others_left: float, told: list[int]
) -> None:
    samples = []
    for step in range(1, 11):
        parameters = {"a.weight": np.full(200, left**step), "b.weight": np.full(2000, others_left**step)}
        samples.append(sample_of({n: np.ones(v.size) for n, v in parameters.items()}, step=step, parameters=parameters))
    assert steps(FastParameters(), together(samples)) == told
    worst = f"Worst layers: a.weight {100 * (1 - left):.0f} %"
    assert all(worst in alert.text for alert in FastParameters().check(together(samples)))


def test_large_embeddings_hide_no_decay_of_smaller_weights() -> None:
    """Torch initialises embeddings with a deviation of 1, linear layers of 32 inputs with about 0.1."""
    samples = []
    for step in range(1, 11):
        parameters = {f"{n}.weight": np.full(400, 0.1 * 0.97**step) for n in "ab"}
        parameters["words.weight"] = np.full(2000, 0.997**step)
        samples.append(sample_of({n: np.ones(v.size) for n, v in parameters.items()}, step=step, parameters=parameters))
    assert steps(FastParameters(), together(samples)) == [9, 10]


def test_many_small_parameters_of_which_one_grows_do_not_all_shrink() -> None:
    # 9 parameters of 40 elements: each is too small to be judged alone; together they shrink by about 3 % per sample.
    samples = []
    for step in range(1, 12):
        parameters = {f"{n}.scale": np.full(40, 0.97**step if n else 0.01 * 1.01**step) for n in range(9)}
        samples.append(sample_of({n: np.ones(40) for n in parameters}, step=step, parameters=parameters))
    assert steps(FastParameters(), together(samples)) == []


@pytest.mark.parametrize("level", [90.0, -110.0])  # a loss has no scale of its own, and may be negative
def test_a_loss_that_is_told_at_its_first_sample_is_not_falling_yet(level: float) -> None:
    loss = np.where(np.arange(41) < 40, level + 0.01 * (np.arange(41) % 5), level + 20)
    samples = replace(of_norms([1.0] * 41), metrics={keys.LOSS: loss})
    assert [alert.level for alert in LossSpike(stays=1).check(samples)] == ["WARN"]


def test_what_no_optimizer_holds_was_told_as_such_in_a_sample_that_had_all_gradients() -> None:
    # All gradients are present in 21 samples, then that of b is missing. If b has an optimizer, the 23rd sample without
    # a gradient raises the alert: 23^(-23 / 5) < 1e-6. If no optimizer holds b, there is no alert.
    samples = [sample_of({"a": [1.0], "b": [1.0] if s <= 21 else None}, step=s) for s in range(1, 51)]
    found = replace(samples[5], metrics={keys.WIRING_UNOWNED + "b": np.ones(1)})
    for told, sixth in (([], found), (list(range(44, 51)), samples[5])):
        check = NoGradient()
        alerts = [alert for sample in [*samples[:5], sixth, *samples[6:]] for alert in check.check(sample)]
        assert [alert.step for alert in alerts] == told


def test_of_layers_that_are_cut_off_the_one_next_to_the_cut_is_named_first() -> None:
    samples = [sample_of({n: None if n < "g" else [1.0] for n in "abcdefgh"}, step=s) for s in range(1, 11)]
    (alert,) = NoGradient().check(together(samples))
    assert "Worst layers: f (10 samples), e (10 samples)" in alert.text


def test_parameters_that_begin_to_move_later_were_moved_by_no_batch() -> None:
    """Like a momentum of 0.9995: the norm is 8 times the usual one for 5 samples before the parameters grow."""
    samples = trained(dict.fromkeys(range(16, 25), 8.0), dict.fromkeys(range(21, 25), 1.13))
    *_, alert = FastParameters().check(samples)
    assert "one bad batch" not in with_diagnosis(alert, samples).text


@pytest.mark.parametrize(
    ("bad_loss", "words"), [(1.0, "either inputs or labels"), (0.0, "without a finite derivative")]
)
def test_nothing_arose_on_the_way_back_of_a_loss_that_is_not_finite(bad_loss: float, words: str) -> None:
    """The middle one of three heads has a NaN target: the trunk gets NaN, the other heads stay finite."""
    calm = [
        sample_of({n: [1.0] for n in ("trunk.weight", "heads.0.weight", "heads.1.weight", "heads.2.weight")}, step=s)
        for s in range(1, 21)
    ]
    norms = [np.nan, 1.0, np.nan, 1.0]
    bad = sample_of({n: [norm] for n, norm in zip(calm[0].names, norms, strict=True)}, step=21)
    samples = measured(together([*calm, bad]), num_nonfinite_loss=[*[0.0] * 20, bad_loss])
    assert words in with_diagnosis(next(iter(NaNGradient().check(samples.sample(20)))), samples).text


def test_a_peak_that_has_passed_long_before_makes_no_nan() -> None:
    norms = {step: 6.0 if step == 8 else 1.0 for step in range(1, 25)}
    samples = [sample_of({"rnn.weight_hh_l0": [norm], "head.weight": [0.1]}, step=step) for step, norm in norms.items()]
    broken = together([*samples, sample_of({"rnn.weight_hh_l0": [np.nan], "head.weight": [np.nan]}, step=25)])
    assert "explosion through recurrence" not in [found.cause for found in diagnose(broken)]


def told_of(check: Rule, samples: Snapshot, **context: dict[str, str]) -> str:
    """Return the text of the last alert of these samples."""
    *_, alert = check.check(samples)
    return with_diagnosis(alert, samples, **context).text


def layer(weight: float, bias: float, name: str = "0", *, shape: tuple[int, int] = (8, 16)) -> dict[str, np.ndarray]:
    """Return the gradients of a layer whose elements all have this value."""
    return {f"{name}.weight": np.full(shape, weight), f"{name}.bias": np.full(shape[0], bias)}


def test_a_rise_alone_may_be_the_rate_or_a_new_scale() -> None:
    text = told_of(ExplodingGradient(), of_norms([*[1.0] * 30, *1.3 ** np.arange(20)]))
    assert "either learning rate too high" in text
    assert "or a new scale of the inputs, targets or loss" in text


@pytest.mark.parametrize(("ratio", "is_alone"), [(0.3, True), (3.0, False)])
def test_parameters_that_run_from_the_start_are_the_rates_alone_where_the_first_gradient_is_ordinary(
    ratio: float, is_alone: bool
) -> None:
    """Each update grows the parameters by 30 %. If the gradient is larger than they are, its scale may be the cause."""
    weights = [np.full(300, 1.3**step) for step in range(4)]
    samples = [sample_of({"a": ratio * weights[0]}, step=s, parameters={"a": w}) for s, w in enumerate(weights, 1)]
    text = with_diagnosis(
        next(iter(FastParameters(max_first_growth=0.2).check(together(samples)))), together(samples)
    ).text
    assert ("either learning rate too high" in text) != is_alone
    assert ("or a large scale of the inputs, targets or loss" in text) != is_alone


@pytest.mark.parametrize(
    ("weight", "bias", "loss", "words"),
    [
        (np.nan, np.nan, 1.0, "cause: an operation without a finite derivative (at step 21 the loss is finite"),
        (np.nan, np.nan, np.nan, "either inputs or labels of the batch that are not finite"),
        (np.nan, 1.0, 1.0, "cause: inputs or labels of the batch that are not finite"),  # masked in the loss
    ],
)
def test_a_finite_loss_acquits_the_forward_and_a_finite_bias_the_backward(
    weight: float, bias: float, loss: float, words: str
) -> None:
    calm = [sample_of(layer(1.0, 1.0), step=s) for s in range(1, 21)]
    samples = together([*calm, sample_of(layer(weight, bias), step=21)])
    samples = measured(samples, loss=[*[1.0] * 20, loss], num_nonfinite_loss=[*[0.0] * 20, float(np.isnan(loss))])
    assert words in told_of(NaNGradient(), samples)


@pytest.mark.parametrize(
    ("kind", "bias", "words"),
    [
        ("BatchNorm1d", 1e4, "either a batch norm, or another normalisation"),
        ("Linear", 1e4, "cause: something in the backward of a layer"),
        ("Linear", 1.0, "either one bad batch"),  # the gradient at layer 0's output is usual: its input was large
    ],
)
def test_what_multiplies_a_gradient_on_its_way_is_a_normalisation_or_the_input_or_else_a_backward(
    kind: str, bias: float, words: str
) -> None:
    def sample(step: int, weight: float, bias: float) -> Snapshot:
        return sample_of(layer(weight, bias) | layer(1.0, 1.0, "1") | layer(1.0, 1.0, "2"), step=step)

    rng = np.random.default_rng(0)
    calm = [sample(s, *np.exp(rng.normal(0, 0.05, 2)).tolist()) for s in range(1, 21)]
    samples = together([*calm, sample(21, 1e4, bias)])
    assert words in told_of(ExplodingGradient(), samples, modules={"0": "Linear", "1": kind, "2": "Linear"})


def test_a_recurrence_whose_inputs_are_large_is_not_blamed() -> None:
    def sample(step: int, inputs: float, states: float) -> Snapshot:
        grads = {"rnn.weight_ih_l0": [inputs], "rnn.weight_hh_l0": [states], "head.weight": [0.1]}
        return sample_of(grads, step=step)

    for states, is_blamed in ((2.0, False), (300.0, True)):
        samples = together([*[sample(s, 1.0, 1.0) for s in range(1, 21)], sample(21, 300.0, states)])
        assert ("explosion through recurrence" in [found.cause for found in diagnose(samples)]) == is_blamed


@pytest.mark.parametrize(
    ("gain", "fall", "words"),
    [
        (1.0, 4.0, "cause: saturating activations"),  # each sigmoid leaves a quarter
        (0.4, 2.5, "either weights too small for the depth"),  # 1 / 0.4: a tanh that is linear
    ],
)
def test_a_gradient_that_fades_is_the_weights_where_these_alone_make_it(gain: float, fall: float, words: str) -> None:
    grads: dict[str, np.ndarray] = {}
    weights: dict[str, np.ndarray] = {}
    for place in range(12):
        grads |= layer(fall ** (place - 11), fall ** (place - 11), str(place))
        weights |= {f"{place}.weight": np.full((8, 16), gain / 4), f"{place}.bias": np.zeros(8)}  # fan-in 16
    samples = together([sample_of(grads, step=s, parameters=weights) for s in range(1, 11)])
    kinds = dict.fromkeys(map(str, range(12)), "Linear") | {"activation": "Tanh"}
    assert words in told_of(VanishingGradient(), samples, modules=kinds)


@pytest.mark.parametrize(
    ("before", "words"),
    [
        (0, ("either poor initialisation", "or a constant loss")),
        (20, ("either dead units before the loss", "or a loss")),
    ],
)
def test_gradients_that_are_0_from_the_start_come_from_the_first_weights_and_later_ones_do_not(
    before: int, words: tuple[str, str]
) -> None:
    zeros = together([sample_of({"a.weight": [float(s <= before)]}, step=s) for s in range(1, before + 12)])
    assert all(one in told_of(NoGradient(), zeros) for one in words)


@pytest.mark.parametrize(("norm", "words"), [(2.0, "cause: the clipping is far too tight"), (50.0, "or a large scale")])
def test_what_is_clipped_a_thousandfold_may_itself_be_far_too_large(norm: float, words: str) -> None:
    samples = clipped([5000.0] * 4)  # parameters of 1
    rows = samples.rows.copy()
    rows[:, 0, [Column.GRAD_SUM_SQ, Column.RECEIVED_SUM_SQ]] *= norm**2
    assert words in told_of(TightClipping(), Snapshot(samples.steps, samples.names, rows))


def test_parameters_that_are_gone_at_once_were_taken_by_no_decay() -> None:
    weights = {"at once": [1.0] * 5 + [0.01] * 2, "by and by": [0.8**n for n in range(11)]}
    for how, sizes in weights.items():
        samples = [
            sample_of({"a": np.ones(300)}, step=s, parameters={"a": np.full(300, w)}) for s, w in enumerate(sizes, 1)
        ]
        told = next(
            alert.text for alert in FastParameters().check(together(samples)) if alert.title == "Parameters shrink"
        )
        assert ("or weights that were loaded or rescaled" in told) == (how == "at once")


@pytest.mark.parametrize(("factor", "part", "told"), [(2.0, "weight", []), (20.0, "weight", [31]), (20.0, "bias", [])])
def test_weights_that_are_multiplied_once_in_a_run_are_told_in_the_next_sample(
    factor: float, part: str, told: list[int]
) -> None:
    samples = trained({}, {31: factor}, num=36, layers=(f"a.{part}", f"b.{part}"))
    assert steps(FastParameters(), samples) == told
    if told:
        rated = measured(samples, learning_rate=[0.1] * 36)
        assert "cause: an optimizer's state that was lost, or weights that were loaded" in told_of(
            FastParameters(), rated
        )


def test_a_bias_that_a_normalisation_takes_away_is_no_measure_of_the_inputs_wherever_it_stands() -> None:
    grads = layer(1.0, 1e-7, "convs.0") | layer(1.0, 1e-7, "convs.1") | layer(1.0, 1.0, "norms.0", shape=(8, 1))
    assert list(LargeInputs().check(together([sample_of(grads, step=s) for s in (1, 2)]))) == []


def test_zeros_over_zeros_speak_for_an_eps_of_0_and_one_broken_element_does_not() -> None:
    for num_broken, is_alone in ((3, True), (1, False)):
        weight = np.ones(8)
        calm = [sample_of({"a": [0.0] * 3 + [0.1] * 5}, step=s, parameters={"a": weight}) for s in range(1, 21)]
        after = np.where(np.arange(8) < num_broken, np.nan, 1.0)
        broken = sample_of({"a": [np.nan] * 8}, step=21, parameters={"a": after})
        text = told_of(NaNGradient(), together([*calm, broken]))
        assert ("either NaN made by the optimizer's update" in text) != is_alone


@pytest.mark.parametrize(("loss", "told"), [(0.0, [100]), (0.7, list(range(3, 101)))])
def test_gradients_of_0_of_a_loss_that_is_0_are_its_own(loss: float, told: list[int]) -> None:
    zeros = together([sample_of({"a.weight": [0.0]}, step=s) for s in range(1, 101)])
    assert steps(NoGradient(), measured(zeros, loss=[loss] * 100)) == told


def test_a_bias_without_a_weight_beside_it_is_no_layer_that_dies() -> None:
    """In a GAN's hinge loss +1 for real and -1 for fake samples cancel in the bias; the weight is parametrized."""
    names = ("0.parametrizations.weight.original", "0.bias", "2.parametrizations.weight.original", "2.bias")
    samples = [
        sample_of({n: np.full(9, 0.0 if n == "2.bias" and s % 9 > 2 else 1.0) for n in names}, step=s)
        for s in range(1, 30)
    ]
    assert steps(DeadGradient(), together(samples)) == []


@pytest.mark.parametrize(("after", "told"), [("b", [13]), ("", [])])
def test_outputs_that_the_loss_has_no_use_for_are_no_dead_units(after: str, told: list[int]) -> None:
    """32 of 40 units die at once, in a hidden layer or in the last layer, where classes may no longer occur."""
    follows = {f"{after}.weight": [1.0]} if after else {}
    samples = [sample_of(units(32 if s > 11 else 4) | follows, step=s) for s in range(1, 14)]
    assert steps(DeadGradient(), together(samples)) == told


@pytest.mark.parametrize(("gradient", "told"), [(0.0, [2, 3]), (1.0, [])])
def test_a_weight_of_0_that_has_no_gradient_either_excuses_nobody(gradient: float, told: list[int]) -> None:
    """A hidden layer of zeros before a ReLU blocks all gradients, and will never change itself."""
    grads = layer(0.0, 0.0) | layer(gradient, 0.0, "1") | layer(0.0, 1.0, "2")
    parameters = {name: np.full(grad.shape, float(name != "1.weight")) for name, grad in grads.items()}
    samples = [sample_of(grads, step=s, parameters=parameters) for s in range(1, 4)]
    assert steps(DeadGradient(), together(samples)) == told


@pytest.mark.parametrize(("rate", "told"), [(1e-9, [26, 27]), (9e-7, [26, 27]), (1e-5, [])])
def test_a_learning_rate_that_changes_single_bits_only_is_next_to_nothing(rate: float, told: list[int]) -> None:
    # Gradients of 1 and weights of 1: the learning rate is the relative size of an update. Below 1e-6 an update changes
    # single bits of float32 weights.
    large = rate if rate > 1e-6 else 0.0
    weights = [np.append(np.full(8, 1 + large * s), 1e-7 * s) for s in range(1, 28)]
    samples = [sample_of({"a": np.ones(9)}, step=s, parameters={"a": one}) for s, one in enumerate(weights, 1)]
    seen = measured(together(samples), learning_rate=[rate] * 27)
    assert steps(UnchangedParameters(), seen) == told
    words = "Step 26: the learning rate has been almost 0 in the 25 steps since step 1, although"
    assert [alert.text.startswith(words) for alert in UnchangedParameters().check(seen)] == [True, False][: len(told)]


@pytest.mark.parametrize(("gradient", "rate", "told"), [(1e-7, 0.1, []), (1e-4, 1e-4, [26, 27])])
def test_updates_are_short_at_the_end_of_a_converged_training_that_is_watched_again(
    gradient: float, rate: float, told: list[int]
) -> None:
    """An overfitted batch: no gradient larger than a share of 1e-7 of the weights was ever seen, and the rate is usual.

    Both trainings move weights of 1 by the same 5e-9 per step, so that only the gradient tells them apart.
    """
    moves = [1 + 0.5 * rate * gradient * s for s in range(1, 28)]
    samples = [
        sample_of({"a": np.full(64, gradient)}, step=s, parameters={"a": np.full(64, moved)})
        for s, moved in enumerate(moves, 1)
    ]
    assert steps(UnchangedParameters(), measured(together(samples), learning_rate=[rate] * 27)) == told


def test_a_schedule_that_ends_at_0_changes_nothing_in_its_last_steps_and_is_no_fault() -> None:
    """A half cosine over 100,000 steps from 1e-3: in the last 195, 3 times the rate is below 1e-8 of the norm, 2.83."""
    left = np.arange(200, 0, -1)
    weights = [{"a": np.append(np.ones(8), 1e-7 * n)} for n in left]
    samples = [sample_of({"a": np.ones(9)}, step=100_000 - n, parameters=w) for n, w in zip(left, weights, strict=True)]
    rates = 0.5e-3 * (1 - np.cos(np.pi * left / 100_000))
    assert steps(UnchangedParameters(), measured(together(samples), learning_rate=rates.tolist())) == []


def test_a_spike_of_some_branches_whose_loss_is_as_ever_began_in_the_backward() -> None:
    for loss, words in ((1.0, "cause: something in the backward of a layer"), (50.0, "either one bad batch")):
        rng = np.random.default_rng(0)
        calm = [
            sample_of(layer(*np.exp(rng.normal(0, 0.05, 2)), "down") | layer(1.0, 1.0, "up"), step=s)
            for s in range(1, 21)
        ]
        samples = together([*calm, sample_of(layer(1e4, 1e4, "down") | layer(1.0, 1.0, "up"), step=21)])
        assert words in told_of(ExplodingGradient(), measured(samples, loss=[*[0.9, 1.1] * 10, loss]))


def test_other_data_has_no_part_in_a_spike_whose_loss_is_as_ever() -> None:
    samples = of_norms([*[1.0, 1.05] * 15, 1000.0])
    text = told_of(ExplodingGradient(), measured(samples, loss=[*[0.9, 1.1] * 15, 1.0]))
    assert "either one bad batch" in text
    assert "or something in the backward" in text


@pytest.mark.parametrize(("end", "is_sign"), [(-50.0, True), (50.0, False)])
def test_a_norm_that_grows_while_the_loss_falls_without_end_is_no_learning_rates(end: float, is_sign: bool) -> None:
    samples = of_norms([*[1.0] * 20, *1.3 ** np.arange(20)])
    text = told_of(ExplodingGradient(), measured(samples, loss=[*[0.2] * 20, *np.linspace(0.2, end, 20)]))
    assert ("the wrong sign of the loss" in text) == is_sign


@pytest.mark.parametrize(("factors", "is_decay"), [((1.3, 1.3, 1.3), True), ((1.3, 1.2, 1.4), False)])
def test_parameters_that_all_grow_by_one_factor_are_multiplied(factors: tuple[float, ...], is_decay: bool) -> None:
    samples = []
    for step in range(1, 5):
        weights = {f"{n}": np.full(100, (1 + n) * f**step) for n, f in enumerate(factors)}
        samples.append(sample_of({n: 0.1 * np.ones(100) for n in weights}, step=step, parameters=weights))
    text = told_of(FastParameters(max_first_growth=0.2), together(samples))
    assert ("a weight decay below 0" in text) == is_decay


@pytest.mark.parametrize(
    ("jump", "words"), [(0.1, "cause: learning rate too high (it rose"), (1e-3, "either dead units")]
)
def test_units_that_die_in_an_explosion_of_a_rate_that_rose_are_its_consequence(jump: float, words: str) -> None:
    samples = [
        sample_of(
            units(4 if step < 30 else 30) | {"b.weight": [1.0]},
            step=step,
            parameters={n: np.full(40, 1.0 if step < 29 else 3.0) for n in ("a.weight", "a.bias")}
            | {"b.weight": np.ones(1)},
        )
        for step in range(1, 32)
    ]
    rates = [1e-3 if step < 28 else jump for step in range(1, 32)]
    assert words in told_of(DeadGradient(), measured(together(samples), learning_rate=rates))


@pytest.mark.parametrize(("size", "told"), [(1e-22, [2, 3]), (1e-9, [])])
def test_a_first_gradient_of_next_to_nothing_is_told_at_the_second_sample(size: float, told: list[int]) -> None:
    assert steps(VanishingGradient(), of_norms([size] * 3)) == told


def test_a_loss_that_is_nan_under_a_scaler_is_no_matter_of_float16_alone() -> None:
    bad = [sample_of({"a": [np.nan]}, step=s, skipped=True, loss_scale=2.0**-s) for s in range(1, 6)]
    (found, *_) = diagnose(measured(together(bad), num_nonfinite_loss=[1.0] * 5))
    assert found.in_words.startswith("not clear: either activations beyond the range of float16")
    assert "or the loss or its inputs" in found.in_words


@pytest.mark.parametrize(("growth", "level"), [(1.0, "WARN"), (1.06, "ERROR")])
def test_a_steady_rise_is_an_error_once_it_moves_the_parameters(growth: float, level: str) -> None:
    """At the edge of stability a full batch's norm rises a hundredfold within 20 steps, then falls without help."""
    samples = trained({21 + n: 1.4**n for n in range(14)}, {21 + n: growth for n in range(14)}, num=34)
    rising = [alert for alert in ExplodingGradient(record_factor=None).check(samples) if "step by step" in alert.text]
    assert {alert.level for alert in rising} == {level}


@pytest.mark.parametrize(
    ("loss", "told"),
    [
        ([0.2 + 0.01 * (n % 3) for n in range(40)] + [-0.2, -0.21, -0.3], [42, 43]),  # sign flipped: it is maximised
        ([2.0 - 0.04 * n for n in range(80)], []),  # a likelihood that passes through 0
        ([1.0 * 0.9**n - 0.2 for n in range(80)], []),
        ([0.2 * (-1) ** n for n in range(80)], []),  # a loss of both signs, such as a policy loss
        ([0.2 + 0.01 * (n % 3) for n in range(40)] + [-0.2, 0.2, 0.2], []),
    ],
)
def test_a_loss_that_turns_around_at_0_is_told_and_one_that_comes_down_to_it_is_not(
    loss: list[float], told: list[int]
) -> None:
    found = measured(of_norms([1.0] * len(loss)), loss=loss)
    check = LossSpike()
    alerts = [alert for place in range(len(loss)) for alert in check.check(found.sample(place))]
    assert [alert.step for alert in alerts if alert.title == "Loss below 0"] == told
    assert all("the wrong sign of the loss" in alert.text for alert in alerts)


def test_weights_that_are_no_longer_finite_have_not_shrunk() -> None:
    weights = [np.ones(5000)] * 30 + [np.append(np.full(4990, np.nan), np.ones(10))] * 30
    samples = [sample_of({"w": np.ones(5000)}, step=s, parameters={"w": w}) for s, w in enumerate(weights, 1)]
    assert list(FastParameters().check(together(samples))) == []


def test_a_loss_that_has_been_below_0_before_may_fall_there_again() -> None:
    # A critic's loss: below 0 in the first samples, above it for longer than the window, and below it again.
    loss = [-0.15, -0.3, *[1.0 + 0.01 * (n % 3) for n in range(120)], *[-2.0] * 8]
    assert list(LossSpike().check(measured(of_norms([1.0] * len(loss)), loss=loss))) == []


@pytest.mark.parametrize(("peak", "told"), [(5e-3, []), (2e-2, [71])])
def test_after_convergence_a_loss_is_no_spike_that_is_nothing_beside_the_first_losses(
    peak: float, told: list[int]
) -> None:
    loss = [*np.geomspace(1.0, 1e-9, 30).tolist(), *[1e-9 + 1e-11 * (n % 3) for n in range(40)], *[peak] * 8]
    assert [alert.step for alert in LossSpike().check(measured(of_norms([1.0] * 78), loss=loss))] == told


def test_a_spike_is_compared_in_words_with_the_losses_that_set_its_limit() -> None:
    loss = [*[9.0 + 0.01 * (n % 3) for n in range(32)], *[1.0 + 0.01 * (n % 3) for n in range(32)], *[8.0] * 8, 5.0]
    stays, falls = LossSpike().check(measured(of_norms([1.0] * len(loss)), loss=loss))
    assert "and stays there; the 32 losses before were between 1 and 1.02 (threshold" in stays.text
    assert ("and falls again;" in falls.text, falls.level) == (True, "INFO")


def test_a_loss_that_had_fallen_far_may_not_rise_back_half_the_way() -> None:
    # From 2 to 0.1 within 30 samples, then 40 between 0.1 and 0.12: 1.5 is far above the latest losses.
    loss = [
        *np.linspace(2.0, 0.1, 30).tolist(),
        *[0.1 + 0.01 * (n % 3) for n in range(40)],
        *[1.5 + 0.01 * n for n in range(8)],
    ]
    (alert,) = LossSpike().check(measured(of_norms([1.0] * 78), loss=loss))
    assert (alert.step, alert.level) == (71, "WARN")


@pytest.mark.parametrize(("loss", "is_sign"), [(-3.0, True), (3.0, False)])
def test_parameters_that_run_away_while_the_loss_falls_below_0_follow_the_wrong_sign(
    loss: float, is_sign: bool
) -> None:
    samples = trained({}, dict.fromkeys(range(20, 25), 1.3))
    samples = measured(samples, loss=[*[-1.0 + 0.01 * (n % 5) for n in range(20)], *[loss * 1.5**n for n in range(4)]])
    assert ("the wrong sign of the loss" in told_of(FastParameters(), samples)) == is_sign


@pytest.mark.parametrize(("ratio", "is_alone"), [(300.0, True), (30.0, False)])
def test_a_first_gradient_far_beyond_the_parameters_is_no_learning_rates(ratio: float, is_alone: bool) -> None:
    weights = [np.full(300, 1.5**step) for step in range(4)]
    samples = [sample_of({"a": ratio * weights[0]}, step=s, parameters={"a": w}) for s, w in enumerate(weights, 1)]
    text = told_of(FastParameters(), together(samples))
    assert "a large scale of the inputs, targets or loss" in text
    assert ("learning rate too high" in text) != is_alone


@pytest.mark.parametrize(
    ("names", "bias", "told"),
    [
        ("0 1", -40.0, 1),
        ("1 0", -40.0, 0),  # the last bias may fit the mean of the targets
        ("0 1", -5.1, 0),  # Mamba's step sizes: softplus(-4.6) = 0.01, from 0.001 to 0.1
    ],
)
def test_biases_far_from_0_close_their_units_or_gates(names: str, bias: float, told: int) -> None:
    rng = np.random.default_rng(0)
    sizes = dict(zip(names.split(), (bias, 0.0), strict=True))
    parameters = {}
    for name in sorted(sizes):
        parameters |= {f"{name}.weight": rng.normal(0, 0.2, (32, 32)), f"{name}.bias": np.full(32, sizes[name])}
    grads = {name: rng.normal(size=value.shape) for name, value in parameters.items()}
    alerts = list(PoorInitialisation().check(sample_of(grads, parameters=parameters)))
    assert len(alerts) == told
    assert all("biases are far from 0: 0.bias 40" in alert.text for alert in alerts)


@pytest.mark.parametrize(("fade", "told"), [(1e-3, [3, 4, 5]), (0.05, [])])
def test_a_norm_that_falls_a_millionfold_over_the_depth_is_told_at_the_third_sample(
    fade: float, told: list[int]
) -> None:
    # Over four layers the norm falls by fade^3: 1e-9 is certain at once, 1e-4 takes ten samples.
    samples = [sample_of({f"{n}.weight": [fade ** (3 - n)] for n in range(4)}, step=s) for s in range(1, 6)]
    assert steps(VanishingGradient(), together(samples)) == told


def test_a_spike_of_the_first_steps_is_not_blamed_on_the_batch_alone() -> None:
    early, *_ = ExplodingGradient().check(of_norms([1.0, 1.0, 1e4]))
    late, *_ = ExplodingGradient().check(of_norms([*[1.0] * 20, 1e4]))
    assert ["learning rate" in alert.text.partition("cause: ")[2].partition(";")[0] for alert in (early, late)] == [
        True,
        False,
    ]


@pytest.mark.parametrize(
    ("loss", "words"), [(3e38, "either an overflow"), (1.1, "an operation without a finite derivative")]
)
def test_a_loss_at_the_end_of_its_type_overflows_on_the_way_back(loss: float, words: str) -> None:
    norms = [*[1.0] * 20, np.nan]
    samples = together(
        [sample_of({n: [norm] for n in ("0.weight", "1.weight")}, step=s) for s, norm in enumerate(norms, 1)]
    )
    samples = measured(samples, loss=[*[1.0] * 20, loss], num_nonfinite_loss=[0.0] * 21)
    assert words in told_of(NaNGradient(), samples)


@pytest.mark.parametrize(("second", "bias", "is_data"), [(1.0, 0, True), (0.0, 0, False), (1.0, 1, False)])
def test_a_first_layer_without_a_bias_that_dies_alone_may_be_given_nothing(
    second: float, bias: int, is_data: bool
) -> None:
    """Like a convolution before a batch norm. With inputs of 0 a bias would still have a gradient."""
    calm = {"0.weight": [1.0] * 2, **({"0.bias": [1.0] * 2} if bias else {}), "1.weight": [1.0] * 2, "2.weight": [1.0]}
    dead = {n: [second] * 2 if n == "1.weight" else [0.0] * 2 if n[0] == "0" else v for n, v in calm.items()}
    # The next layer has no bias that would prove its inputs to be 0: it takes ten samples in a row.
    samples = together([sample_of(dead if s > 20 else calm, step=s) for s in range(1, 31)])
    alert, *_ = DeadGradient().check(samples)
    assert (alert.step, "the data has changed" in alert.text) == (30, is_data)
    assert "either dead units" in alert.text


def test_the_state_from_before_a_nan_is_restored_after_it() -> None:
    """After a rollback: a step number has replaced the infinity that says that no step was seen."""
    before, rule = FastParameters(), FastParameters()
    broken = sample_of({"a.weight": np.full(300, np.nan)}, parameters={"a.weight": np.full(300, np.nan)}, step=1)
    list(rule.check(broken))
    assert rule.state_dict() != before.state_dict()
    rule.load_state_dict(before.state_dict())
    assert rule.state_dict() == before.state_dict()
