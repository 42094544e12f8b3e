"""Small real trainings: with one fault, the diagnosis names that fault first; without a fault it names none."""

from __future__ import annotations

import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch
import trainings
from grad_samples import module_kinds, of_norms, random_samples, sample_of, together
from gradients import watch
from torch import nn
from wandb_gradwatch._diagnosis import CAUSES, Diagnosis, _in_words, causes, diagnose, with_diagnosis

from wandb_gradwatch._analysis.formatting import sentence
from wandb_gradwatch._measure.columns import NUM_COLUMNS
from wandb_gradwatch._pipeline.recorder import FlightRecorder
from wandb_gradwatch.rules import Alert, ExplodingGradient, LossSpike, default_rules
from wandb_gradwatch.rules._base import finding
from wandb_gradwatch.snapshot import Snapshot, keys

NAN, INF = float("nan"), float("inf")

FAULTS = [
    (trainings.wild_mlp, "learning rate too high"),
    (trainings.wild_sgd, "learning rate too high"),
    (trainings.wild_transformer, "learning rate too high"),
    (trainings.large_initialisation, "poor initialisation"),
    (trainings.small_initialisation, "poor initialisation"),
    (trainings.growing_depth, "explosion through depth"),
    (trainings.unclipped_rnn, "explosion through recurrence"),
    (trainings.sigmoid_stack, "saturating activations"),
    (trainings.batch_norm_of_two, "batch norm on small batches"),
    (trainings.tiny_loss_fp16, "float16 underflow"),
    (trainings.dead_relus, "dead units: ReLUs that never fire, or an output that is multiplied by 0 or not used"),
    (trainings.detached_layer, "frozen or unused layers"),
    (trainings.poisoned_batch, "one bad batch"),
    (trainings.invalid_operation, "an operation without a finite derivative"),
]
HEALTHY = [
    trainings.mlp, trainings.summed_loss, trainings.toy_curve, trainings.conv_net, trainings.char_transformer,
    trainings.lora, trainings.lstm,
]  # fmt: skip


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize(("faulty", "cause"), FAULTS, ids=lambda value: getattr(value, "__name__", value))
def test_a_real_faults_cause_is_named_first(faulty, cause, seed):
    training = faulty(seed=seed)
    samples = training.run(80)
    for context in ({}, {"modules": module_kinds(training.model)}):
        found = diagnose(samples, **context)
        assert found[0].cause == cause, [str(d) for d in found]


@pytest.mark.parametrize("healthy", HEALTHY, ids=lambda value: value.__name__)
def test_a_healthy_training_has_no_diagnosis_at_any_time(healthy):
    training = healthy(seed=0)
    samples = training.run(120)
    for kept in (20, 60, 120):
        recorder = FlightRecorder(max_samples=kept)
        for end in range(kept, 121, 20):
            recorder.add(together([samples.sample(index) for index in range(end - 20, end)]))
        for context in ({}, {"modules": module_kinds(training.model)}):
            assert diagnose(recorder.history(), **context) == []


def test_evidence_is_quoted_with_steps_layers_and_numbers():
    def first(training, num_steps=80):
        return diagnose(training.run(num_steps))[0].evidence

    assert " from 16 back to 0, layer by layer" in first(trainings.sigmoid_stack(depth=8))  # 8 sigmoids, head at 16
    assert "at step 60" in first(trainings.poisoned_batch(at=60))
    assert "2.weight, 2.bias" in first(trainings.detached_layer())
    assert "100 % of 2" in first(trainings.dead_relus(layer=2))
    assert "rnn.weight_hh_l0" in first(trainings.unclipped_rnn())
    assert "finite in above and non-finite from below back" in first(trainings.invalid_operation(at=40))
    assert "2^-24" in first(trainings.tiny_loss_fp16())


def test_the_kinds_of_modules_are_quoted_where_they_are_known():
    training = trainings.sigmoid_stack()
    found = diagnose(training.run(20), modules=module_kinds(training.model))
    assert "the model has Sigmoid layers" in found[0].evidence


def test_the_remedies_of_two_possible_causes_do_not_repeat_each_other():
    """Bytes as inputs: the remedy of a high learning rate already ends with that of a large scale."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watcher, sink = watch(model, rules=None)
    for _ in range(8):
        inputs = (torch.randn(64, 20) * 60 + 128).clamp(0, 255)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), inputs[:, :3].argmax(1)).backward()
        optimizer.step()
    watcher.remove()
    unclear = [alert.text for alert in sink.alerts if "or a large scale of the inputs" in alert.text]
    assert unclear
    assert [text.count("normalise the inputs") for text in unclear] == [1] * len(unclear)


def test_a_note_of_the_bad_step_is_quoted():
    found = diagnose(trainings.poisoned_batch(at=60).run(70), notes={60: {"batch_index": 4711}, 61: {"batch_index": 1}})
    assert "at step 60 (noted: batch_index 4711)" in found[0].evidence


def test_gradients_that_grow_towards_the_input_are_explosion_through_depth():
    # 1000 nearest the input, 1 at the head: 10 per layer
    stack = {f"{i}.weight": [10.0 ** (3 - i)] for i in range(4)}
    (found,) = diagnose(together([sample_of(stack, step=s) for s in range(1, 6)]))
    assert found.cause == "explosion through depth"
    assert found.evidence == "norm grows 1000x from 3 back to 0, layer by layer"


def test_a_nan_out_of_a_calm_recurrent_network_is_not_blamed_on_the_recurrence():
    calm = [sample_of({"rnn.weight_hh_l0": [1.0], "head.weight": [0.5]}, step=s) for s in range(1, 21)]
    broken = sample_of({"rnn.weight_hh_l0": [NAN], "head.weight": [NAN]}, step=21)
    (found,) = diagnose(together([*calm, broken]))
    assert found.cause == "inputs or labels of the batch that are not finite"
    assert found.rival.startswith("an invalid operation in the forward or in the loss (log 0, 0/0, an overflow); ")
    # clipping would spread a NaN
    assert ": look at the batch of this step; skip such steps with guard='skip'; watch(" in found.remedy


@pytest.mark.parametrize(("step", "begins"), [(21, "NaN made by the optimizer"), (120, "not clear: ")])
def test_what_broke_the_parameters_is_known_only_where_the_step_before_was_measured(step, begins):
    weight = {"a.weight": np.array([1.0])}
    calm = [sample_of({"a.weight": [0.5]}, parameters=weight, step=s) for s in range(1, 21)]
    broken = sample_of({"a.weight": [NAN]}, parameters={"a.weight": np.array([NAN])}, step=step)
    found = diagnose(together([*calm, broken]))[0]
    assert found.cause.startswith(begins)
    if step == 21:
        assert "1 of 1 parameters are no longer finite at step 21, first a.weight, but the" in found.evidence


def after_a_calm(last: dict[str, float], *, usual: float = 1.0) -> list[str]:
    """Return the causes named for a sample with these norms, after 20 samples of about the usual norm."""
    rng = np.random.default_rng(0)
    samples = [
        sample_of({f"{name}.weight": [0.0, usual * float(np.exp(rng.normal(0, 0.1)))] for name in last}, step=step)
        for step in range(1, 21)
    ]
    spike = sample_of({f"{name}.weight": [0.0, norm] for name, norm in last.items()}, step=21)
    return [found.cause for found in diagnose(together([*samples, spike]))]


BACKWARD = "something in the backward of a layer multiplies the gradient"


@pytest.mark.parametrize(
    ("last", "is_named"),
    [
        ({"0": 1e4, "1": 1e4, "2": 1.0}, True),  # usual in the head, 10,000 times the usual in the layers before it
        ({"0": 1e4, "1": 1e4, "2": 1e4}, False),  # all layers: a bad batch, bad targets or the loss
        ({"0": 1e4, "1": 1.0, "2": 1.0}, True),
        ({"0": 1.0, "1": 1e4, "2": 1.0}, False),  # a factor in the backward would also apply to all layers before it
        ({"actor.0": 1e4, "actor.1": 1e4, "critic.0": 1.0}, True),  # branches side by side: it may be the actor's data
    ],
)
def test_a_spike_that_spares_the_layers_after_one_began_in_its_backward(last, is_named):
    assert (BACKWARD in after_a_calm(last)) == is_named


@pytest.mark.parametrize(("head", "is_named"), [(2.0, True), (1000.0, False)])
def test_a_recurrence_that_only_passes_on_what_comes_from_above_is_not_blamed(head, is_named):
    def sample(step, *, memory, head):
        return sample_of(
            {"memory.weight_hh_l0": [memory], "memory.bias_hh_l0": [memory], "head.weight": [head]}, step=step
        )

    rng = np.random.default_rng(1)
    calm = [sample(s, memory=float(np.exp(rng.normal(0, 0.1))), head=1.0) for s in range(1, 21)]
    found = diagnose(together([*calm, sample(21, memory=1000.0, head=head)]))
    assert ("explosion through recurrence" in [one.cause for one in found]) == is_named


def test_layers_that_fade_in_no_order_are_no_saturation():
    def causes(norms):
        grads = {f"{index}.weight": [norm] for index, norm in enumerate(norms)}
        return [found.cause for found in diagnose(together([sample_of(grads, step=s) for s in range(1, 9)]))]

    # both rise far more than 30x over the depth, but only the second one layer by layer
    assert causes([1e-6, 1.0, 1e-5, 1.1, 0.9, 1.0]) == []
    assert causes([1e-6, 1e-5, 1e-3, 1e-2, 0.1, 1.0]) == ["saturating activations"]


def test_growth_of_the_norm_alone_is_a_learning_rate_too_high():
    (found,) = diagnose(of_norms(1.2 ** np.arange(40)))
    assert found.cause == "learning rate too high"
    assert "step by step, up to step 40" in found.evidence


def test_skips_for_inf_are_the_scale_and_skips_for_nan_are_an_operation():
    def stalled(value):
        good = [sample_of({"a": [1.0], "b": [1.0]}, step=s, loss_scale=1024.0) for s in range(1, 4)]
        bad = [sample_of({"a": [value], "b": [value]}, step=s, skipped=True, loss_scale=64.0) for s in range(4, 9)]
        return diagnose(together(good + bad))[0]

    assert stalled(INF).cause == "loss scale too high or values beyond float16"
    assert "the last 5 updates were skipped for Inf, the loss scale is 64" in stalled(INF).evidence
    assert stalled(NAN).cause == "an operation without a finite derivative"


def test_an_isolated_skip_has_no_diagnosis():
    samples = [sample_of({"a": [1.0]}, step=s, loss_scale=1024.0) for s in range(1, 20)]
    samples[0] = sample_of({"a": [INF]}, step=1, loss_scale=65536.0, skipped=True)
    assert diagnose(together(samples)) == []


def test_a_rank_that_is_always_the_first_bad_one_is_named():
    bad = together([sample_of({"a": [1.0]}, step=1)] + [sample_of({"a": [NAN]}, step=s) for s in (2, 3)])
    one = Snapshot(bad.steps, bad.names, bad.rows, metrics={keys.FIRST_NONFINITE_RANK: np.array([NAN, 3.0, 3.0])})
    assert diagnose(one)[0].cause == "one bad rank"
    assert "rank 3 was the first" in diagnose(one)[0].evidence
    two = Snapshot(bad.steps, bad.names, bad.rows, metrics={keys.FIRST_NONFINITE_RANK: np.array([NAN, 3.0, 1.0])})
    assert "one bad rank" not in [found.cause for found in diagnose(two)]


def test_causes_are_ranked_by_confidence_and_known():
    for faulty, _ in FAULTS[:4]:
        found = diagnose(faulty(seed=0).run(40))
        assert [d.confidence for d in found] == sorted((d.confidence for d in found), reverse=True)
        assert all(d.cause in CAUSES and 0 < d.confidence < 1 for d in found)


def test_every_cause_explains_titles_of_shipped_rules_only():
    titles = {check.title for check in default_rules()} | {LossSpike.negative}
    assert all(set(explained) <= titles for explained in CAUSES.values())


def test_an_alert_carries_the_diagnosis_in_place_of_its_general_cause():
    samples = trainings.wild_mlp(seed=0).run(3)
    alert = next(iter(ExplodingGradient().check(samples)))
    told = with_diagnosis(alert, samples)
    assert (told.title, told.step, told.level) == (alert.title, alert.step, alert.level)
    assert told.text.split("\n")[0] == alert.text.split("\n")[0]
    assert told.text.count("Probable cause: ") == 1
    assert "Probable cause: learning rate too high (the" in told.text
    assert "Remedy: divide the learning rate by 10" in told.text


@pytest.mark.parametrize(
    ("title", "level", "num_before", "is_inherited"),
    [
        ("Exploding gradient", "ERROR", 40, True),
        ("Exploding gradient", "ERROR", 41, False),
        ("Exploding gradient", "ERROR", -1, False),  # the alert of a later step, although sent earlier
        ("Exploding gradient", "WARN", 3, False),  # a problem that may have ended
        ("Optimizer without the model", "WARN", 90, True),  # a problem that has not ended
    ],
)
def test_what_decides_nothing_by_itself_has_the_cause_of_the_error_before_it(title, level, num_before, is_inherited):
    samples = together([sample_of({"a.weight": [1.0]}, step=10 * step) for step in range(1, 101)])
    open_one = finding("Parameters unchanged", "Fact.", "", "not clear: either A or B", "look", 1000, "ERROR")
    text = sentence("Fact.", "", "cause (it rose)", "do this")
    before = Alert(title, text, 1000 - 10 * num_before, level)
    unclear = Alert("Loss spike", sentence("Fact.", "", "not clear: C or D", "look"), 990, "ERROR")
    words = f'as in the earlier alert "{before.title}": cause (it rose)'
    expected = sentence("Fact.", "", words, "do this") if is_inherited else open_one.text
    assert with_diagnosis(open_one, samples, earlier=[before, unclear]).text == expected
    told = Alert("Loss spike", expected, 995, "ERROR")  # the alert's own words are used
    assert with_diagnosis(open_one, samples, earlier=[told]).text == expected
    clear = finding("Parameters unchanged", "Fact.", "", "the learning rate is 0", "raise it", 1000, "ERROR")
    assert with_diagnosis(clear, samples, earlier=[before]).text == clear.text


@pytest.mark.parametrize(("gradient", "both"), [(1.0, False), (1e3, True)])
def test_a_first_gradient_far_beyond_the_parameters_is_no_learning_rates(gradient, both):
    weights = [1.0, 30.0, 900.0]  # each update grows the weight 30 times
    samples = together(
        [sample_of({"a": [gradient]}, step=s, parameters={"a": np.array([w])}) for s, w in enumerate(weights, 1)]
    )
    found = {one.cause for one in diagnose(samples)}
    assert found == {"learning rate too high", *(["a large scale of the inputs, targets or loss"] if both else [])}


def test_nan_in_every_layer_at_any_loss_scale_may_be_an_overflow_of_the_forward():
    for last, both in ((NAN, True), (1.0, False)):  # with a finite last layer NaN arose in the backward
        samples = together(
            [sample_of({"a": [NAN], "b": [last]}, step=s, skipped=True, loss_scale=2.0**-s) for s in range(1, 6)]
        )
        found = {one.cause for one in diagnose(samples)}
        assert "an operation without a finite derivative" in found
        assert ("activations beyond the range of float16" in found) == both


def test_a_missing_gradient_is_not_taken_for_nan():
    values = (INF, INF, INF, INF, NAN)
    samples = together(
        [sample_of({"a": [v], "b": None}, step=s, skipped=True, loss_scale=2.0**-s) for s, v in enumerate(values, 1)]
    )
    assert "activations beyond the range of float16" not in {one.cause for one in diagnose(samples)}


def test_two_samples_of_one_step_have_no_update_between_them():
    weights = {1: 1.0, 2: 1.1, 3: 1.2}
    samples = together(
        [sample_of({"a": [1.0]}, step=step, parameters={"a": np.array([weights[step]])}) for step in (1, 2, 2, 3)]
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        diagnose(samples)


@pytest.mark.parametrize(("kind", "is_named"), [("Tanh", True), ("ReLU", False), ("Linear", True)])  # a function's
def test_saturation_is_not_named_for_a_model_whose_activations_cannot_saturate(kind, is_named):
    # 8 layers, each with a tenth of the next one's gradient: ten million times over the depth.
    layers = {f"{layer}.weight": np.full(4, 10.0 ** (layer - 7)) for layer in range(8)}
    ones = {name: np.ones(4) for name in layers}
    samples = together([sample_of(layers, step=s, parameters=ones) for s in range(1, 31)])
    found = {one.cause for one in diagnose(samples, modules={"0": "Linear", "activation": kind})}
    assert ("saturating activations" in found) == is_named


def test_nobody_can_tell_a_bad_batch_from_other_data_in_its_own_step_and_it_is_said_so():
    samples = trainings.poisoned_batch(at=60).run(80)
    alert = next(alert for alert in ExplodingGradient().check(samples) if alert.step == 60)
    assert "not clear: either one bad batch (a lone spike of" in with_diagnosis(alert, samples).text


def test_the_first_alert_of_too_high_a_learning_rate_says_so_with_one_update_to_look_at():
    samples = trainings.wild_mlp(seed=0).run(2)
    (alert,) = ExplodingGradient().check(samples)
    assert "learning rate too high (the update of step 1 changed" in with_diagnosis(alert, samples).text


@pytest.mark.parametrize("seed", [0, 1])
def test_a_rate_that_jumps_is_told_from_a_bad_batch_at_the_first_spike(seed):
    """Both start with a single spike, but a bad batch moves the parameters after the spike, not before it.

    Loaded weights look like a jump of an unknown learning rate; if the rate is known and constant, they are the cause.
    """
    samples = trainings.rate_jumps(seed, at=60).run(63)
    alert = next(alert for alert in ExplodingGradient().check(samples) if alert.step == 61)
    unseen = "not clear: either learning rate too high (the update of step 60, just before the spike, changed"
    assert unseen in with_diagnosis(alert, samples).text
    for rates, words in (
        (
            np.where(samples.steps < 60, 1e-3, 0.1),
            "cause: learning rate too high (it rose from 0.001 to 0.1 at step 60)",
        ),
        (np.full(63, 1e-3), "cause: an optimizer's state that was lost, or weights that were loaded or rescaled"),
    ):
        assert words in with_diagnosis(alert, replace(samples, metrics={keys.LEARNING_RATE: rates})).text


def test_an_alerts_diagnosis_looks_at_no_later_sample_and_at_fitting_causes_only():
    calm = of_norms([1.0] * 30)
    later = of_norms([1e6], start=31)
    alert = Alert("Exploding gradient", "Step 20: ...\nProbable cause: general. Remedy: general.", 20, "ERROR")
    assert with_diagnosis(alert, calm.merge(later)) == alert
    dead = Alert("Dead gradient", "text", 31)
    assert with_diagnosis(dead, calm.merge(later)) == dead  # a bad batch explains no dead layer
    assert with_diagnosis(Alert("My own rule", "text", 31), calm.merge(later)).text == "text"
    assert with_diagnosis(alert, None) == alert


def test_a_diagnosis_reads_as_a_sentence():
    found = Diagnosis("one bad batch", 0.7, "a lone spike of 9x at step 3", "look at it")
    assert str(found) == "one bad batch (a lone spike of 9x at step 3). Remedy: look at it."


@pytest.mark.parametrize("seed", range(6))
def test_no_history_breaks_it(seed):
    samples = random_samples(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for num in (1, 2, 5, 6, 30, 60):
            diagnose(together(samples[:num]))
            diagnose(together(samples[-num:]))
        diagnose(together([sample_of({"a": None}, step=s) for s in range(1, 9)]))
        diagnose(together([sample_of({"a": [NAN]}, step=s) for s in range(1, 9)]))
        diagnose(sample_of({}))
        diagnose(Snapshot(np.zeros(0, dtype=np.int64), ("a",), np.zeros((0, 1, NUM_COLUMNS))))


def test_the_remedy_for_float16_underflow_names_the_loss_scale_that_still_fits():
    # The largest element is 1000 x 2^-24 = 5.96e-5: 65504 / 5.96e-5 lies between 2^30 and 2^31.
    tiny = 2.0**-24 * np.array([0, 0, 0, 1, 2, 3, 1000.0])
    (found,) = diagnose(together([sample_of({"a": tiny, "b": tiny}, step=s) for s in range(1, 21)]))
    assert found.cause == "float16 underflow"
    assert "a larger loss scale (up to 2^30 the largest gradient seen still fits)" in found.remedy


def test_a_loss_scale_that_float16_cannot_hold_is_named_first():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
    watcher, sink = watch(model, rules=None)
    for _ in range(10):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = 2.0**28 * (model(torch.randn(16, 8)) - 3).float().square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    watcher.remove()
    (alert,) = sink.alerts
    assert alert.title == "Loss scale collapse"
    assert diagnose(sink.merged())[0].cause == "loss scale too high or values beyond float16"


def test_float16_underflow_is_quoted_with_what_became_of_the_other_elements():
    """The share of elements below 2^-14 among those that are not 0, from the last flushed histogram of watch()."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    watcher, _ = watch(model, rules=None, log_every=10, histogram_every=10)
    batch = torch.randn(16, 8)
    for _ in range(20):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = 1e-6 * model(batch).square().mean()
        loss.backward()
        optimizer.step()
    elements = torch.cat([parameter.grad.flatten() for parameter in model.parameters()]).abs()
    kept = elements[elements > 0]
    share = 100 * (kept < 2.0**-14).double().mean().item()
    watcher.remove()
    evidence = diagnose(watcher._dispatcher.recorder.history())[0].evidence
    assert watcher.latest.histogram_steps == (20,)
    assert "where float16 ends" in evidence
    assert f"; {share:.0f} % of the others have lost digits (step 20)" in evidence


@pytest.mark.parametrize(("known_from", "is_told"), [(0, "from -41 to -59"), (41, "from -41 to -59"), (50, None)])
def test_a_loss_that_is_known_at_some_samples_falls_from_one_that_was_known(known_from, is_told):
    """Growth of 20 times, 1.2**17 = 22, raises an alert from sample 43 of 60 on, whose loss is not known."""
    samples = of_norms([1.0] * 20 + [1.2**number for number in range(40)])
    loss = -np.arange(60.0)
    loss[:known_from] = loss[42] = np.nan
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = diagnose(replace(samples, metrics={keys.LOSS: loss}))
    told = [diagnosis.evidence for diagnosis in found if "without a lower bound" in diagnosis.cause]
    assert [evidence.rpartition("the loss fell ")[2] for evidence in told] == ([is_told] if is_told else [])


def test_of_two_causes_of_which_one_is_unknown_the_text_says_once_that_it_is_not_clear():
    fitting = [Diagnosis(cause, 0.8, "seen", "do it") for cause in (causes.LEARNING_RATE, causes.UNMEASURED)]
    for either, other in (fitting, fitting[::-1]):
        words, _ = _in_words([either, other])
        assert words.count("not clear") == 1
        assert "parameters became NaN or Inf in a step that was not measured (seen)" in words


def test_an_embedding_without_any_gradient_may_be_given_padding_alone():
    model = nn.ModuleDict({"words": nn.Embedding(9, 4), "net": nn.Linear(4, 4), "head": nn.Linear(4, 1)})
    grads = {name: np.ones(p.numel()) * (not name.startswith("words")) for name, p in model.named_parameters()}
    samples = together([sample_of(grads, step=step) for step in range(1, 12)])
    (found,) = diagnose(samples, modules=module_kinds(model))
    assert found.in_words.endswith(
        "or an embedding that is given padding alone; the indices of a batch tell them apart"
    )
    assert found.remedy.startswith("look at the indices of a batch")
