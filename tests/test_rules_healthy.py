"""Observations from healthy trainings, in the smallest samples that show them: no rule reports a fault."""

from __future__ import annotations

import numpy as np
import pytest
from grad_samples import measured, of_norms, sample_of, together

from wandb_gradwatch.rules import (
    DeadGradient,
    ExplodingGradient,
    FastParameters,
    LossSpike,
    NoGradient,
    PoorInitialisation,
    Rule,
    UnchangedParameters,
    VanishingGradient,
)
from wandb_gradwatch.snapshot import Snapshot


def levels(check: Rule, snapshot: Snapshot) -> list[tuple[int, str]]:
    """Return the step and the level of each alert, without INFO, which is no alarm."""
    return [(alert.step, alert.level) for alert in check.check(snapshot) if alert.level != "INFO"]


def branches(*, critic: float, inputs: float = 1.0) -> dict[str, np.ndarray]:
    """Gradients of an actor and a critic of two layers each; inputs: those of the critic's second layer."""
    grads = {f"actor.{layer}.{kind}": np.ones(9) for layer in "01" for kind in ("weight", "bias")}
    grads |= {f"critic.0.{kind}": np.full(9, critic) for kind in ("weight", "bias")}
    return grads | {"critic.1.weight": np.full(9, critic * inputs), "critic.1.bias": np.full(9, critic or 1 - inputs)}


@pytest.mark.parametrize(("inputs", "told"), [(1.0, []), (0.0, [(32, "WARN"), (33, "WARN")])])
def test_an_output_that_the_loss_does_without_for_some_samples_is_not_dead(
    inputs: float, told: list[tuple[int, str]]
) -> None:
    """The clipped value loss of PPO has exactly no gradient where all values of a batch are beyond the clip.

    Dead units differ: the inputs of the next layer are 0, but its bias has a gradient.
    """
    samples = [
        sample_of(branches(critic=float(s <= 30), inputs=inputs if s > 30 else 1.0), step=s) for s in range(1, 34)
    ]
    assert levels(DeadGradient(), together(samples)) == told


def test_a_branch_that_is_not_asked_for_any_more_is_told_once_that_is_no_chance() -> None:
    # 32^(-9 / 5) = 2e-3, and 32^(-10 / 5) < 1e-3: ten in a row, as many as are no chance for the same units either.
    samples = [sample_of(branches(critic=float(s <= 30)), step=s) for s in range(1, 42)]
    assert levels(DeadGradient(), together(samples))[0] == (40, "WARN")


@pytest.mark.parametrize(("num_units", "told"), [(2, []), (16, [(10, "WARN")])])
def test_a_few_limits_that_no_activation_reaches_yet_are_no_dead_units(
    num_units: int, told: list[tuple[int, str]]
) -> None:
    """PACT learns where activations are clipped, from 10 on, which at first none reaches: a number for each layer."""
    grads = {"0.weight": np.ones(64), "0.bias": np.ones(8), "limit": np.zeros(num_units), "1.weight": np.ones(64)}
    samples = [sample_of(grads, step=s) for s in range(1, 61)]
    assert levels(DeadGradient(), together(samples))[:1] == told


@pytest.mark.parametrize(("is_idle", "told"), [(True, []), (False, [(22, "WARN")])])
def test_an_expert_with_a_single_token_has_no_dead_units(is_idle: bool, told: list[tuple[int, str]]) -> None:
    """An expert that gets no token now and then may get one in two samples in a row, which half of its units ignore."""
    samples = []
    for s in range(1, 23):
        num_dead = 8 if s < 21 else 26
        grad = None if is_idle and s == 5 else np.arange(40) >= num_dead
        samples.append(sample_of({"e.weight": grad, "e.bias": grad} | {n: [1.0] for n in "abc"}, step=s))
    assert levels(DeadGradient(), together(samples)) == told


@pytest.mark.parametrize(("lost", "told"), [("c", []), ("a", [23])])
def test_an_expert_that_is_idle_for_a_while_is_not_lost(lost: str, told: list[int]) -> None:
    """An expert with a load-balancing loss may be idle for 21 samples from step 19 on; a first layer may not."""
    samples = [
        sample_of({n: None if n == lost and 18 < s < 40 else [1.0] for n in "abcd"}, step=s) for s in range(1, 60)
    ]
    assert [step for step, _ in levels(NoGradient(), together(samples))][:1] == told  # 20^-5 < 1e-6


@pytest.mark.parametrize(("is_next_phase", "told"), [(True, []), (False, [44])])
def test_what_rests_while_another_phase_of_the_training_goes_on_is_not_lost(
    is_next_phase: bool, told: list[int]
) -> None:
    """SeqGAN's generator is trained first, then its discriminator, then both: the generator at every fourth step."""
    samples = []
    for step in range(1, 140):
        is_generator = step <= 40 or (step > 120 and step % 4 == 0)
        given = {"generator": is_generator, "discriminator": not is_generator if is_next_phase else True}
        samples.append(sample_of({name: [1.0] if has else None for name, has in given.items()}, step=step))
    assert [step for step, _ in levels(NoGradient(), together(samples))][:1] == told  # 42^-4 < 1e-6


@pytest.mark.parametrize(("recovers", "told"), [(True, []), (False, [10, 11, 12])])
def test_a_fall_over_the_depth_that_is_getting_less_was_the_first_steps(recovers: bool, told: list[int]) -> None:
    """A decoder that learns its biases before it uses the code: from 13,000x to 1,900x within ten steps."""
    stack = [
        {f"{n}": np.full(9, 10.0 ** (n * (0.55 if s < 6 or not recovers else 0.42))) for n in range(9)}
        for s in range(1, 13)
    ]
    samples = together([sample_of(grads, step=s) for s, grads in enumerate(stack, 1)])
    assert [step for step, _ in levels(VanishingGradient(), samples)] == told


@pytest.mark.parametrize(("level", "told"), [(5.5, []), (9.0, [(31, "WARN")])])
def test_a_new_level_of_less_than_four_times_the_record_that_moves_nothing_is_no_alarm(
    level: float, told: list[tuple[int, str]]
) -> None:
    """After a copy to the target network the gradient is 2.1 times the record, 7 times the usual, for some steps."""
    assert levels(ExplodingGradient(), of_norms([*[1.0] * 29, 2.0, *[level] * 5])) == told


def test_a_spike_that_is_still_coming_down_has_not_stayed() -> None:
    """A diffusion model's loss is weighted with 1 / t: one batch has 56 times the record, the next 2.5 times."""
    assert levels(ExplodingGradient(), of_norms([*[1.0] * 30, 56.0, 5.5, 1.0])) == []
    assert levels(ExplodingGradient(), of_norms([*[1.0] * 30, 56.0, 30.0])) == [(31, "WARN")]


@pytest.mark.parametrize(("begins", "told"), [(1, []), (6, [(7, "ERROR")])])
def test_where_every_first_update_moves_the_parameters_the_one_after_a_spike_says_nothing(
    begins: int, told: list[tuple[int, str]]
) -> None:
    """RMSprop with momentum moves a tenth per update, from the first update on, or from the one before the spike on."""
    norms, weight, samples = [1.0] * 6 + [6.0, 1.0], 3.0, []
    for step, norm in enumerate(norms, 1):
        weight *= 1.1 if step > begins else 1.0
        samples.append(sample_of({"a": [norm]}, step=step, parameters={"a": np.array([weight])}))
    assert levels(ExplodingGradient(), together(samples)) == told


def test_one_sample_is_no_history_unless_the_updates_have_moved_the_parameters() -> None:
    """MoCo's queue holds random vectors at first and keys from step 2 on: 35 times the norm, falling at once."""
    assert levels(ExplodingGradient(), of_norms([0.43, 15.0, 13.0, 11.0, 9.0, 5.7, 5.0])) == []
    weights = [3.0, 4.0]  # by a third
    samples = [
        sample_of({"a": [g]}, step=s, parameters={"a": np.array([w])})
        for s, g, w in zip((1, 2), (0.43, 50.0), weights, strict=True)
    ]
    assert levels(ExplodingGradient(), together(samples)) == [(2, "WARN")]


def grown(factors: list[float], loss: list[float]) -> Snapshot:
    """Return samples of parameters that grow by these factors from sample to sample, with these losses."""
    sizes = np.cumprod(factors)
    samples = [
        sample_of({"a.weight": np.ones(256)}, step=s, parameters={"a.weight": np.full(256, size)})
        for s, size in enumerate(sizes.tolist(), 1)
    ]
    return measured(together(samples), loss=loss)


FALLING = [2.0 - 0.05 * n for n in range(30)]


@pytest.mark.parametrize(
    ("loss", "told"),
    [
        (FALLING, []),  # Rprop and Prodigy begin with a tiny rate, and one-cycle schedules raise theirs, as they learn
        ([2.0] * 30, [23]),
        ([-0.1 - n for n in range(30)], [23]),  # a loss without a lower bound falls, too, while the parameters explode
    ],
)
def test_parameters_that_grow_fast_while_the_loss_falls_are_learning(loss: list[float], told: list[int]) -> None:
    samples = grown([1.0] * 21 + [1.15, 1.15] + [1.0] * 7, loss)
    assert [step for step, _ in levels(FastParameters(), samples)][:1] == told


@pytest.mark.parametrize(("loss", "told"), [(2.0, []), (2.2, [(25, "WARN")]), (np.nan, [(25, "WARN")])])
def test_weights_that_leap_without_harm_were_moved_on_purpose(loss: float, told: list[tuple[int, str]]) -> None:
    """Codes of a quantiser that are out of use are drawn anew from its inputs, larger than the first codes."""
    samples = grown([1.0] * 24 + [3.0] + [1.0] * 5, [2.0] * 24 + [loss] * 6)
    assert levels(FastParameters(), samples)[:1] == told


@pytest.mark.parametrize(
    ("loss", "told"), [([4.6, 4.7, 4.6, 4.5, 4.7, 4.6], []), ([4.6, 5.6, 5.8, 5.5, 5.7, 5.9], [4])]
)
def test_a_small_table_may_grow_to_its_size_unless_the_loss_rises(loss: list[float], told: list[int]) -> None:
    """Adagrad's first steps move each looked-up row by the rate: 256 elements may reach 256^(-1/4) = 0.25, or half."""
    samples = grown([0.1, 1.4, 1.3, 1.25, 1.15, 1.1], loss)
    assert [step for step, _ in levels(FastParameters(), samples)][:1] == told


@pytest.mark.parametrize(("slope", "told"), [(0.0, []), (0.3, [(12, "WARN")])])
def test_a_gradient_that_grows_while_the_loss_does_not_rise_leaves_a_plateau(
    slope: float, told: list[tuple[int, str]]
) -> None:
    """Attention behind a gate that begins at 0, as Flamingo's, has a gradient that grows a hundredfold in 40 steps."""
    norms, loss = [1.35**n for n in range(14)], [4.2 + slope * n for n in range(14)]  # 1.35^11 = 27 > 20
    assert levels(ExplodingGradient(), measured(of_norms(norms), loss=loss))[:1] == told


@pytest.mark.parametrize(("loss", "told"), [(FALLING, []), ([2.0] * 30, [(22, "ERROR")])])
def test_a_spike_that_moves_parameters_while_the_loss_falls_has_done_no_harm(
    loss: list[float], told: list[tuple[int, str]]
) -> None:
    """Prodigy raises its rate until the updates move the parameters; the norm doubles for a sample, the loss falls."""
    samples = [
        sample_of({"a": [6.0 if s == 22 else 1.0]}, step=s, parameters={"a": np.array([1.0 if s < 23 else 1.1])})
        for s in range(1, 31)
    ]
    assert levels(ExplodingGradient(), measured(together(samples), loss=loss)) == told


def test_norms_that_scatter_at_a_new_level_do_not_grow() -> None:
    """A network that has fitted its data begins another task: norms of 14, 8, 12.5 and 13, then less and less."""
    assert set(levels(ExplodingGradient(), of_norms([*[1.0] * 30, 14.0, 8.0, 12.5, 13.0]))) == {(31, "WARN")}
    assert (31, "ERROR") in levels(ExplodingGradient(), of_norms([*[1.0] * 30, 14.0, 22.0]))


def test_another_phase_of_a_training_may_have_another_loss() -> None:
    """An autoencoder is trained first, and then a model of its codes, by a loss that is larger all the time."""
    first, second = {"a": [1.0], "b": None}, {"a": None, "b": [1.0]}
    samples = together([sample_of(first if s <= 50 else second, step=s) for s in range(1, 80)])
    loss = [0.1 + 0.01 * (s % 3) if s <= 50 else 2.0 + 0.01 * s for s in range(1, 80)]
    assert levels(LossSpike(), measured(samples, loss=loss)) == []
    same = together([sample_of({name: [1.0] for name in "ab"}, step=s) for s in range(1, 80)])
    assert levels(LossSpike(), measured(same, loss=loss))[0] == (51, "WARN")


@pytest.mark.parametrize(("num_between", "told"), [(40, []), (20, [(71, "WARN")])])
def test_a_loss_of_long_ago_says_nothing_about_that_of_another_phase(
    num_between: int, told: list[tuple[int, str]]
) -> None:
    """Learning without forgetting: a network, then only its new head, then all by a loss that has one more term."""
    parts = ["a"] * 50 + ["b"] * num_between + ["ab"] * 20
    samples = [sample_of({n: [1.0] if n in part else None for n in "ab"}, step=s) for s, part in enumerate(parts, 1)]
    loss = [(3.6 if part == "ab" else 0.1) + 0.001 * (s % 3) for s, part in enumerate(parts)]
    assert levels(LossSpike(), measured(together(samples), loss=loss))[:1] == told


@pytest.mark.parametrize(("pauses", "told"), [((20,), []), ((), [31])])
def test_updates_without_any_gradient_now_and_then_are_no_loss(pauses: tuple[int, ...], told: list[int]) -> None:
    """An evolution strategy has no direction where all its members reach the best reward: for one step, then three."""
    samples = [
        sample_of(dict.fromkeys("ab", None if s in pauses or 29 <= s < 32 else [1.0]), step=s) for s in range(1, 40)
    ]
    assert [step for step, _ in levels(NoGradient(), together(samples))][:1] == told


@pytest.mark.parametrize(("name", "told"), [("poles", []), ("weight", [(1, "WARN")])])
def test_parameters_that_are_no_weights_may_begin_at_any_size(name: str, told: list[tuple[int, str]]) -> None:
    """The imaginary parts of S4D's poles are multiples of pi, of which 64 have a root mean square of 115."""
    grads, poles = {name: np.ones(256)}, np.tile(np.pi * np.arange(64), 4)
    assert levels(PoorInitialisation(), sample_of(grads, parameters={name: poles})) == told


@pytest.mark.parametrize(("is_frozen", "told"), [(True, []), (False, [(1, "WARN")])])
def test_a_head_that_was_trained_before_may_be_large(is_frozen: bool, told: list[tuple[int, str]]) -> None:
    """A trained head may have three times the usual size. That most layers are frozen shows that it was trained."""
    sizes = {f"{n}.{kind}": 256 if kind == "weight" else 16 for n in ("body", "head") for kind in ("weight", "bias")}
    parameters = {name: np.full(size, 0.9 if name == "head.weight" else 0.1) for name, size in sizes.items()}
    grads = {n: None if is_frozen and n[0] == "b" else np.arange(size) - 0.5 for n, size in sizes.items()}
    sample = sample_of(grads, parameters=parameters, trainable=[not is_frozen] * 2 + [True] * 2)
    assert levels(PoorInitialisation(), sample) == told


@pytest.mark.parametrize(("inner", "told"), [(1.0, []), (0.0, [(1, "WARN")])])
def test_weights_of_0_that_all_have_a_gradient_become_different(inner: float, told: list[tuple[int, str]]) -> None:
    """Medusa's heads are residual blocks that begin as the identity; a network of zeros passes no gradient back."""
    layers = {f"{n}.{kind}": np.zeros(256 if kind == "weight" else 16) for n in "ab" for kind in ("weight", "bias")}
    grads = {name: np.linspace(-1.0, 1.0, len(zeros)) * (inner if name[0] == "a" else 1.0)
             for name, zeros in layers.items()}  # fmt: skip
    assert levels(PoorInitialisation(), sample_of(grads, parameters=layers)) == told


def test_a_critics_loss_may_rise_beside_that_of_the_actor() -> None:
    """The error of a critic grows with the rewards, from 0.4 to 5 within 100 updates; the actor's loss stays near 1."""
    grads = [{"a": None, "c": [1.0]}, {"a": [1.0], "c": None}]
    samples = together([sample_of(grads[s % 2], step=s) for s in range(300)])
    loss = [(1.0 + 0.01 * (s % 3)) if s % 2 else 0.4 * 1.02 ** (s / 2) for s in range(300)]
    assert levels(LossSpike(), measured(samples, loss=loss)) == []


@pytest.mark.parametrize(("norm", "told"), [(2e-6, []), (2e-4, [(12, "ERROR")])])
def test_an_optimizer_that_stops_at_a_negligible_gradient_has_converged(
    norm: float, told: list[tuple[int, str]]
) -> None:
    """L-BFGS on an image: after step 1 the gradient is a twentieth of the first one, and a millionth of the image."""
    samples = [
        sample_of({"a": [20 * norm if s == 1 else norm]}, step=s, parameters={"a": np.array([1.0 if s > 1 else 0.9])})
        for s in range(1, 16)
    ]
    assert levels(UnchangedParameters(), measured(together(samples), learning_rate=[1.0] * 15))[:1] == told
