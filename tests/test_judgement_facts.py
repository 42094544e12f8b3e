"""Facts of odd samples: the judgement takes any, says nothing of what it does not know, and disturbs no others."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from grad_samples import measured, of_norms, random_samples, sample_of, together
from hypothesis import given, settings
from hypothesis import strategies as st

from wandb_gradwatch._analysis.baseline import evenly_apart
from wandb_gradwatch._analysis.memory import PerKind, PerName
from wandb_gradwatch._judgement.facts import Facts
from wandb_gradwatch._judgement.observer import Observer
from wandb_gradwatch._judgement.past import SCALARS, WINDOW
from wandb_gradwatch._judgement.structure import ModelInfo, Structure
from wandb_gradwatch._measure.columns import NUM_COLUMNS
from wandb_gradwatch._pipeline.alert_manager import AlertManager
from wandb_gradwatch.rules import Alert, Judgement, default_rules
from wandb_gradwatch.snapshot import Snapshot, keys
from wandb_gradwatch.snapshot._shapes import select_samples

NAN, INF = math.nan, math.inf
Grads = dict[str, Any]


@pytest.fixture(autouse=True)
def nothing_is_dropped(caplog: pytest.LogCaptureFixture) -> Any:
    """No test here may make the judgement raise."""
    yield
    assert not caplog.records, caplog.text


def training(grads: Sequence[Grads], *, start: int = 1, every: int = 1, **more: Any) -> Snapshot:
    """Samples of these gradients; every parameter is near 1 and changes in each sample."""
    samples = []
    for place, of_sample in enumerate(grads):
        values = {
            name: np.full(np.size(grad) if grad is not None else 300, 1 + 1e-3 * math.sin(place))
            for name, grad in of_sample.items()
        }
        samples.append(sample_of(of_sample, step=start + every * place, parameters=values, **more))
    return together(samples)


def calm(size: int = 300, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 0.1, size)


def found(samples: Snapshot, info: ModelInfo | None = None) -> list[tuple[int, str]]:
    """The steps and kinds of what is told above INFO."""
    alerts = AlertManager(default_rules(), info).process(samples)
    return [(alert.step, alert.incident.kind) for alert in alerts if alert.incident and alert.level != "INFO"]


@np.errstate(all="ignore")  # as the judgement is
def facts_of(samples: Snapshot, info: ModelInfo | None = None) -> list[Facts]:
    observer = Observer(info or ModelInfo())
    return [facts for sample in samples.overview if (facts := observer.see(samples, sample)) is not None]


# Odd samples


def odd() -> dict[str, Snapshot]:
    many = {f"layers.{at}.weight": [0.1, -0.1, 0.1] for at in range(2000)}
    return {
        "one element": of_norms([1.0] * 20),
        "no elements": training([{"a.weight": [], "b.weight": calm(seed=at)} for at in range(20)]),
        "only parameters without elements": training([{"a.weight": []}] * 20),
        "no gradients": training([{"a.weight": None, "b.weight": None}] * 2),
        "2000 parameters": training([many] * 12),
        "no parameters": Snapshot(np.arange(1, 20), (), np.zeros((19, 0, NUM_COLUMNS))),
        "nan": training([{"a.weight": [NAN] * 300}] * 20),
        "inf": training([{"a.weight": [INF, -INF] * 150}] * 20),
        "some nan": training([{"a.weight": [NAN, 1.0] * 150, "a.bias": [1.0, 2.0]}] * 20),
        "tiny": training([{"a.weight": [1e-300] * 300}] * 20),
        "huge": training([{"a.weight": [1e200] * 300}] * 20),
        "from tiny to huge": training([{"a.weight": [10.0 ** (20 * at - 200)] * 300} for at in range(20)]),
        "zero": training([{"a.weight": [0.0] * 300, "a.bias": [0.0] * 4}] * 20),
        "weights of 0": together([sample_of({"a": [1.0]}, step=s, parameters={"a": np.zeros(1)}) for s in range(1, 9)]),
        "weights of nan": together(
            [sample_of({"a": [1.0] * 300}, step=s, parameters={"a": np.full(300, NAN)}) for s in range(1, 20)]
        ),
        "unknown weights": together([sample_of({"a": calm(seed=s)}, step=s) for s in range(1, 20)]),
        "one step again and again": together([sample_of({"a": calm(seed=s)}, step=7) for s in range(20)]),
        "steps that go back": together([sample_of({"a": calm(seed=s)}, step=100 - 5 * s) for s in range(20)]),
        "huge steps": together([sample_of({"a": calm(seed=s)}, step=2**53 - 100 + s) for s in range(20)]),
        "skipped": training([{"a.weight": calm(seed=at)} for at in range(4)], skipped=True, loss_scale=2.0**16),
        "odd names": training([{"": calm(seed=at), ".": [1.0], "a..b": [1.0], "weight.": [2.0]} for at in range(20)]),
    }


ODD = odd()


@pytest.mark.parametrize("name", ODD)
def test_no_sample_is_too_odd(name: str, caplog: pytest.LogCaptureFixture) -> None:
    samples = ODD[name]
    with np.errstate(all="raise"):  # the caller's own setting does not matter
        alerts = AlertManager(default_rules()).process(samples)
    assert not caplog.records
    assert all(0 < len(alert.text) <= 400 for alert in alerts)
    assert len(facts_of(samples)) == len(samples)
    for facts in facts_of(samples)[-1:]:
        assert set(facts.scalars()) == set(SCALARS)
    titles = {alert.title for alert in alerts if alert.level == "ERROR"}
    expected = {"nan": {"NaN gradient"}, "inf": {"Inf gradient"}, "some nan": {"NaN gradient"}}
    assert titles >= expected.get(name, set())
    assert not titles & {"NaN gradient", "Inf gradient"} or name in expected


@pytest.mark.parametrize("seed", range(8))
def test_random_samples_are_judged_with_any_facts_and_names(seed: int, caplog: pytest.LogCaptureFixture) -> None:
    rng, samples = np.random.default_rng(seed), []
    for one in random_samples(seed):
        odd_values = np.array([NAN, INF, -INF, 0.0, -1.0, 1.0, 1e300, 65504.0])
        facts = {keys.FACT + name: rng.choice(odd_values, 1) for name in keys.SAMPLE_FACTS if rng.random() < 0.7}
        known = {key: rng.choice(odd_values, 1) for key in (keys.LOSS, keys.LEARNING_RATE) if rng.random() < 0.9}
        known |= {key: rng.choice(np.array([0.0, 1.0]), 1) for key in (keys.NUM_NONFINITE_LOSS, keys.INFERRED)}
        of_each = {name: rng.choice(odd_values, (1, len(one.names))) for name in keys.PARAMETER_FACTS}
        samples.append(replace(one, metrics=facts | known, per_parameter=of_each if rng.random() < 0.8 else {}))
    classes = {str(at): kind for at, kind in enumerate(("Linear", "BatchNorm1d", "LSTM", "MultiheadAttention"))}
    manager = AlertManager(default_rules(), ModelInfo(classes, {"0.weight": (2, 3), "1.weight": (), "2.bias": (0,)}))
    with np.errstate(all="raise"):  # the caller's own setting does not matter
        alerts = [alert for sample in samples for alert in manager.process(sample)]
    assert not caplog.records
    assert alerts
    assert all(len(alert.text.partition("\n")[0]) <= 120 and len(alert.text) <= 400 for alert in alerts)


@given(sizes=st.lists(st.integers(1, 16), min_size=1, max_size=12), seed=st.integers(0, 3))
@settings(max_examples=12, deadline=None)
def test_what_is_told_does_not_depend_on_how_samples_are_batched(sizes: list[int], seed: int) -> None:
    samples, whole, parts = together(random_samples(seed)), AlertManager(default_rules()), AlertManager(default_rules())
    expected, alerts, place = whole.process(samples), list[Alert](), 0
    for turn in range(len(samples)):
        end = min(place + sizes[turn % len(sizes)], len(samples))
        if end > place:
            alerts += parts.process(select_samples(samples, np.arange(place, end)))
        place = end
    assert [(one.step, one.text) for one in alerts] == [(one.step, one.text) for one in expected]
    assert str(parts.state_dict()["judge"]) == str(whole.state_dict()["judge"])


# What is not known


def test_a_snapshot_without_facts_is_judged_by_its_rows() -> None:
    samples = training([{"a.weight": calm(seed=at) * (1e4 if at == 40 else 1)} for at in range(60)])
    assert samples.per_parameter == {}
    assert not [key for key in samples.metrics if key.startswith(keys.FACT)]
    assert found(samples) == [(41, "exploding_gradient")]


def test_what_is_not_known_is_nan_and_compares_false() -> None:
    first = facts_of(of_norms([1.0]))[0]
    for value in (
        first.loss,
        first.rate,
        first.usual,
        first.fact("input_rms"),
        first.moved,
        first.change,
        first.cosine,
    ):
        assert math.isnan(value)
    assert math.isnan(first.above(2))
    assert np.isnan(first.per_parameter("learning_rate")).all()
    named = ("is_unusual", "loss_falls", "loss_rises", "loss_known", "loss_below_0", "loss_is_usual", "is_moving")
    assert not [name for name in named if getattr(first, name)]


@pytest.mark.parametrize(
    ("steps", "kept"),
    [
        ([], []),
        ([7], [7]),
        ([*range(1, 11), 110], [10, 110]),  # at least 50 apart, half of 110 - 10
        ([*range(1, 11), 110, 150, 210], [10, 110, 150, 210]),  # 30 apart
        ([100, 200, 201, 202, 203], [100, 200, 201, 202, 203]),  # a sample in a burst is compared with all samples
        ([100, 200, 201, 202, 302], [100, 202, 302]),  # later samples take the burst as one sample
    ],
)
def test_samples_that_are_half_as_far_apart_as_the_last_two_are_kept(steps: list[int], kept: list[int]) -> None:
    assert [steps[place] for place in evenly_apart(steps)] == kept


def test_only_samples_about_as_far_apart_as_the_newest_two_are_compared() -> None:
    """Ten samples in a row say little about what is usual a hundred steps later."""
    steps = [*range(1, 11), 110, 210, 310]
    samples = together([sample_of({"a": calm(seed=step)}, step=step) for step in steps])
    observer, places = Observer(ModelInfo()), {}
    for sample in samples.overview:
        facts = observer.see(samples, sample)
        assert facts is not None
        places[sample.step] = [steps[place] for place in facts.places]
    assert places[10] == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert places[310][-2:] == [110, 210]
    assert len(places[310]) <= 3


def test_slow_trends_are_looked_for_again_after_a_rollback() -> None:
    """A training goes back to step 1, as from an old checkpoint: samples 20 steps apart are seen from there on."""
    observer = Observer(ModelInfo(), every=20)
    seen = [
        facts.step
        for samples in (of_norms([1.0] * 100), of_norms([1.0] * 60))
        for sample in samples.overview
        if (facts := observer.see(samples, sample)) is not None
    ]
    assert seen == [1, 21, 41, 61, 81, 1, 21, 41]


def test_64_samples_are_remembered_and_no_more() -> None:
    samples = of_norms([1.0 + 0.01 * (at % 5) for at in range(200)])
    observer = Observer(ModelInfo())
    for sample in samples.overview:
        facts = observer.see(samples, sample)
        assert facts is not None
        assert len(facts.past) <= WINDOW
        assert len(facts.past.rows) <= WINDOW
    assert facts.seen == WINDOW


# Parameters that come and go


def test_numbers_by_name_follow_names_that_come_and_go() -> None:
    memory = PerName()
    memory.of(("a", "b"))[:] = [1.0, 2.0]
    assert memory.of(("b", "c")).tolist() == [2.0, 0.0]
    assert memory.of(("a", "b", "c")).tolist() == [1.0, 2.0, 0.0]


def test_kinds_ignore_one_parameter_more_and_tell_disjoint_sets_apart() -> None:
    kinds, names = PerKind(PerName), ("a", "b", "c", "d")
    of = [kinds.of(names, np.array(mask, bool)) for mask in ([1, 1, 1, 0], [1, 1, 1, 1], [0, 0, 0, 1], [1, 1, 0, 0])]
    assert [kept is of[0] for kept in of] == [True, True, False, True]


@pytest.mark.parametrize(
    "later",
    [
        {"a.weight": 300, "b.weight": 300},  # added
        {"b.weight": 300},  # renamed
        {"a.weight": 300, "z": 1, "y.bias": 2, "x.weight": 90},
        {"b.weight": 40, "a.weight": 300},  # inserted before
    ],
)
def test_parameters_may_appear_or_be_renamed(later: Mapping[str, int]) -> None:
    before = training([{"a.weight": calm(seed=at)} for at in range(40)])
    after = training([{name: calm(size, at) for name, size in later.items()} for at in range(40)], start=41)
    manager = AlertManager(default_rules())
    assert manager.process(before) == []
    assert [alert for alert in manager.process(after) if alert.level != "INFO"] == []
    broken = training([{name: np.full(size, NAN) for name, size in later.items()}], start=81)
    assert [alert.title for alert in manager.process(broken)] == ["NaN gradient"]


def test_a_parameter_of_another_size_is_no_obstacle() -> None:
    samples = [training([{"a.weight": calm(size)}], start=1 + at) for at, size in enumerate([300] * 20 + [7] * 20)]
    assert len(facts_of(together(samples))) == 40


def test_unfreezing_the_body_is_no_explosion() -> None:
    body = [f"body.{at}.weight" for at in range(3)]
    grads = [
        dict.fromkeys(body, None if at < 60 else calm(seed=at)) | {"head.weight": 0.01 * calm(seed=at)}
        for at in range(120)
    ]
    assert "exploding_gradient" not in [kind for _, kind in found(training(grads))]


def test_frozen_parameters_need_no_gradient_and_trainable_ones_are_told_once() -> None:
    grads = [{"a.weight": None, "b.weight": calm(seed=at)} for at in range(40)]
    assert found(training(grads, trainable=[False, True])) == []
    told = found(training(grads, trainable=[True, True]))
    assert [kind for _, kind in told] == ["no_gradient"]


def test_an_expert_that_one_batch_in_ten_uses_is_neither_cut_off_nor_a_kind_of_its_own() -> None:
    rng = np.random.default_rng(0)
    grads = [
        {
            "in.weight": calm(seed=at),
            "expert.weight": calm(seed=at) if rng.random() < 0.1 else None,
            "out.weight": calm(seed=at),
        }
        for at in range(150)
    ]
    assert found(training(grads)) == []


def test_two_kinds_of_samples_have_pasts_of_their_own() -> None:
    """A GAN's: the critic's gradients are ten thousand times the generator's, in every second sample."""
    grads: list[Grads] = [
        {"critic.weight": 1e4 * calm(seed=at), "generator.weight": None}
        if at % 2
        else {"critic.weight": None, "generator.weight": calm(seed=at)}
        for at in range(80)
    ]
    assert found(training(grads)) == []
    grads[70] = {"critic.weight": None, "generator.weight": 1e4 * calm(seed=70)}
    assert found(training(grads)) == [(71, "exploding_gradient")]


# What the samples are of


def test_structure_is_read_from_names_classes_and_shapes() -> None:
    names = ("embed.weight", "rnn.weight_hh_l0", "attn.qkv.weight", "norm.weight", "head.weight", "head.bias")
    classes = {
        "embed": "Embedding",
        "rnn": "LSTM",
        "attn.qkv": "Linear",
        "norm": "LayerNorm",
        "act": "ReLU",
        "head": "Linear",
    }
    structure = Structure(names, ModelInfo(classes, {"head.weight": (10, 32), "head.bias": (10,)}))
    assert structure.is_embedding_P.tolist() == [True, *[False] * 5]
    assert structure.is_recurrent_P.tolist() == [False, True, *[False] * 4]
    assert structure.is_attention_P.tolist() == [False, False, True, *[False] * 3]
    assert structure.is_norm_P.tolist() == [*[False] * 3, True, False, False]
    assert structure.is_bias_P.tolist() == [*[False] * 5, True]
    assert structure.fan_in_P[4] == 32
    assert np.isnan(structure.fan_in_P[[0, 1, 5]]).all()
    assert structure.feeds_relu(structure.modules.names.index("norm"))
    assert not structure.feeds_relu(structure.modules.names.index("head"))
    assert (structure.has_norm, structure.has_batch_norm, structure.has_relu, structure.squashes) == (
        True,
        False,
        True,
        True,
    )


# What samples say of themselves


def test_an_isolated_skip_is_calibration_and_many_in_a_row_are_one_incident() -> None:
    ok = {"a.weight": calm()}
    bad = {"a.weight": np.full(300, INF)}

    def scaled(*flags: bool) -> Snapshot:
        samples = [
            sample_of(bad if skip else ok, step=1 + at, skipped=skip, loss_scale=1024.0)
            for at, skip in enumerate(flags)
        ]
        return together(samples)

    assert found(scaled(*[False] * 10, True, *[False] * 10, True)) == []
    told = found(scaled(*[False] * 10, *[True] * 12))
    assert [kind for _, kind in told] == ["loss_scale_collapse"]


def test_layers_are_named_from_the_output_back_at_most_five_and_the_rank_where_it_is_known() -> None:
    names = [f"{at}.weight" for at in range(8)]
    samples = training(
        [{name: calm(seed=at) for name in names} for at in range(10)] + [dict.fromkeys(names, [NAN] * 300)]
    )
    known = {keys.FIRST_NONFINITE_RANK: np.array([*[NAN] * 10, 3.0])}
    (alert,) = AlertManager(default_rules()).process(replace(samples, metrics=known))
    assert alert.incident is not None
    assert [layer.name for layer in alert.incident.layers] == names[:2:-1]
    assert alert.incident.rank == 3


def test_a_line_searchs_trial_points_are_not_judged_but_nan_is() -> None:
    """L-BFGS: gradients of trial points may be anything; whether they are steps is not known."""
    grads = [{"a.weight": calm(seed=at) * (1e6 if at % 4 == 3 else 1)} for at in range(60)]
    trial = {keys.INFERRED: np.array([float(at % 4 == 3) for at in range(60)])}
    samples = training(grads)
    assert found(replace(samples, metrics=trial)) == []
    assert found(samples) != []
    grads[59] = {"a.weight": [NAN] * 300}
    assert found(replace(training(grads), metrics=trial)) == [(60, "nan_gradient")]


def test_an_adapter_that_begins_at_0_is_not_dead_and_what_waits_for_it_is_not_cut_off() -> None:
    """LoRA: B is 0, so A has a gradient of 0 until B has moved."""
    grads = [
        {"lora_A.weight": np.zeros(300) if at == 0 else calm(seed=at), "lora_B.weight": calm(seed=at)}
        for at in range(40)
    ]
    assert found(training(grads)) == []


@pytest.mark.parametrize("prefixes", [("actor.", "critic."), ("model0.", "model1."), ("0.", "1."), ("q1.", "q2.")])
def test_networks_side_by_side_are_no_depth_however_they_are_called(prefixes: tuple[str, str]) -> None:
    """Within each network norms differ less than tenfold, between them by a hundred thousand times."""
    sizes = {f"{one}{at}.weight": 1e-5**place * 2.0**at for place, one in enumerate(prefixes) for at in range(3)}
    grads = [{name: size * calm(seed=at) for name, size in sizes.items()} for at in range(40)]
    assert found(training(grads)) == []


def test_convergence_is_no_vanishing_gradient() -> None:
    grads = [{"a.weight": calm(seed=at) * 0.9**at, "b.weight": calm(seed=at + 1) * 0.9**at} for at in range(200)]
    samples = measured(training(grads), loss=[0.5 * 0.9**at + 1e-3 for at in range(200)])
    assert found(samples) == []


@pytest.mark.parametrize("seed", range(5))
def test_norms_that_scatter_raise_nothing(seed: int) -> None:
    rng = np.random.default_rng(seed)
    assert found(of_norms(np.exp(rng.normal(0, 0.4, 600)))) == []


def test_one_unusual_sample_excuses_no_later_one() -> None:
    """NaN is no number to compare with: the usual norm stays what it was."""
    norms = [*[1.0] * 30, NAN, INF, *[1.0] * 30, 1e4]
    kinds = [kind for _, kind in found(of_norms(norms))]
    assert (kinds[0], kinds[-1]) == ("nan_gradient", "exploding_gradient")


def test_the_judgement_needs_no_other_rule() -> None:
    samples = of_norms([*[1.0] * 20, NAN])
    assert len(AlertManager([Judgement()]).process(samples)) == 1
    assert len(AlertManager([Judgement(), Judgement()]).process(samples)) == 1  # twice is once
