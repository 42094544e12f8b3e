"""Metric and Updates, with functions that fail; all metrics with invalid arguments, and their effect on a training."""

from __future__ import annotations

import gc
import math
import weakref
from functools import partial

import numpy as np
import pytest
import torch
from gradients import Chosen, step
from metric_probes import seen, train, values, watch
from torch import nn

from wandb_gradwatch.metrics import (
    Activations,
    Attention,
    Metric,
    ModuleProbe,
    NoiseScale,
    OptimizerState,
    Ranks,
    Reference,
    Router,
    Spectrum,
    Updates,
)
from wandb_gradwatch.metrics._metric import SUBJECTS, probes_of

SGD = torch.optim.SGD


def norm(tensor):
    return torch.linalg.vector_norm(tensor)


def test_parameter_gradient_and_update_are_those_of_the_step():
    model = Chosen(a=2, b=1)
    metrics = [
        Metric("l2", norm, match="^a$"),
        Metric("l2", norm, on="gradient"),
        Metric("largest", lambda change: change.abs().max(), on="update", match="^a$"),
    ]
    watcher, sink = watch(model, metrics)
    optimizer = SGD(model.parameters(), lr=0.5)
    for _ in range(2):
        step(model, optimizer, a=[3, 4], b=[12])
    found = values(watcher, sink)
    # a is (1, 1) before the first step and (1 - 1.5, 1 - 2) before the second.
    np.testing.assert_allclose(found["parameter/a/l2"], [math.sqrt(2), math.sqrt(0.25 + 1)])
    np.testing.assert_allclose(found["gradient/a/l2"], [5, 5])
    np.testing.assert_allclose(found["gradient/b/l2"], [12, 12])
    np.testing.assert_allclose(found["update/a/largest"], [2, 2])  # 0.5 * 4
    assert not any(key.startswith(("parameter/b", "update/b")) for key in found)


def test_the_gradient_is_accumulated_unscaled_and_before_clipping():
    model = Chosen(a=1)
    watcher, sink = watch(model, [Metric("sum", torch.sum, on="gradient")])
    optimizer = SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for gradient in (1, 1, 1, -2):
        scaler.scale(model.loss(a=[gradient])).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    scaler.step(optimizer)
    scaler.update()
    assert values(watcher, sink)["gradient/a/sum"].tolist() == [1]  # not a mean of 1, 2, 3 and 1


def test_update_norm_and_ratio():
    model = Chosen(a=2, b=1)
    with torch.no_grad():
        model.a.copy_(torch.tensor([3.0, 4.0]))
        model.b.zero_()
    watcher, sink = watch(model, [Updates()])
    optimizer = SGD(model.parameters(), lr=0.1)
    model.loss(a=[6, 8], b=[2]).backward()
    optimizer.step()
    found = values(watcher, sink)
    assert found["update/a/norm"][0] == pytest.approx(1.0)  # 0.1 * 10
    assert found["update/a/ratio"][0] == pytest.approx(0.2)  # 1 / 5
    assert found["update/b/norm"][0] == pytest.approx(0.2)
    assert math.isnan(found["update/b/ratio"][0]), "a parameter that was 0 has no ratio"


class SetTo(torch.optim.Optimizer):
    """Sets every element to -1."""

    def __init__(self, parameters):
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            parameter.fill_(-1.0)


def test_a_half_precision_update_is_subtracted_exactly():
    model = Chosen(dtype=torch.bfloat16, a=4)
    with torch.no_grad():
        model.a.fill_(256.0)
    watcher, sink = watch(model, [Updates()])
    model.loss(a=[1, 1, 1, 1]).backward()
    SetTo(model.parameters()).step()
    # From 256 to -1 is 257, of which bfloat16's eight bits would make 256.
    assert values(watcher, sink)["update/a/norm"].tolist() == [514]


def test_two_optimizers_of_one_sample_each_update_their_own():
    model = Chosen(a=1, b=1)
    watcher, sink = watch(model, [Updates()])
    first, second = SGD([model.a], lr=0.1), SGD([model.b], lr=0.2)
    for _ in range(2):
        first.zero_grad(), second.zero_grad()
        model.loss(a=[1], b=[1]).backward()
        first.step()
        second.step()
    found = values(watcher, sink)
    np.testing.assert_allclose(found["update/a/norm"], [0.1, 0.1], rtol=1e-6)
    np.testing.assert_allclose(found["update/b/norm"], [0.2, 0.2], rtol=1e-6)


def test_copies_for_updates_are_bounded_and_gone_between_steps():
    others = {
        id(one): one for one in gc.get_objects() if type(one) in (torch.Tensor, nn.Parameter)
    }  # left by other tests
    model = nn.Linear(1024, 1024, bias=False)  # 4 MiB
    with pytest.raises(ValueError, match=r"would copy 4 MiB .* max_mib=3; match fewer"):
        watch(model, [Updates(max_mib=3)])
    optimizer = SGD(model.parameters(), lr=0.1)
    watcher, _ = watch(model, [Updates()])
    train(model, [torch.randn(2, 1024)], optimizer=optimizer)
    tensors = [t for t in gc.get_objects() if type(t) in (torch.Tensor, nn.Parameter) and id(t) not in others]
    known = {model.weight.data_ptr(), model.weight.grad.data_ptr()}
    assert [t for t in tensors if t.shape == model.weight.shape and t.data_ptr() not in known] == []
    watcher.remove()


def test_during_a_step_there_is_one_copy_of_what_matches_and_none_of_the_rest():
    model = Chosen(a=1003, b=2003, c=3003)
    copies = []

    class Looks(SGD):
        def step(self, closure=None):
            known = {t.data_ptr() for p in model.parameters() for t in (p, p.grad)}
            there = [
                t
                for t in gc.get_objects()
                if type(t) is torch.Tensor and t.shape in [p.shape for p in model.parameters()]
            ]
            copies.extend(sorted(t.numel() for t in there if t.data_ptr() not in known))
            return super().step(closure)

    optimizer = Looks(model.parameters(), lr=0.1)
    watcher, _ = watch(model, [Updates("a|b")])
    gradients = {name: torch.ones(p.shape) for name, p in model.named_parameters()}
    loss = model.loss(**gradients)
    del gradients
    loss.backward()
    del loss
    optimizer.step()
    watcher.remove()
    assert copies == [1003, 2003]


def test_every_measures_each_nth_sampled_step_and_other_steps_raise_no_warning(said):
    model = nn.Linear(1, 1)
    metrics = [Metric("x", torch.sum, every=5), Metric("z", torch.sum, on="activation", every=5)]
    found = seen(model, [*metrics, Metric("y", torch.sum)], torch.ones(12, 1, 1))
    for key in ("parameter/weight/x", "activation/root/z"):
        assert np.flatnonzero(~np.isnan(found[key])).tolist() == [4, 9]
    assert not np.isnan(found["parameter/weight/y"]).any()
    assert said() == []  # no metric is due in steps 1 to 4


def test_dims_keep_dimensions_apart():
    model = nn.Linear(3, 2, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 9.0]]))
    metrics = [
        Metric("mean", lambda w: w, dims={0: "unit"}),
        Metric("max", lambda w: w, dims={-1: "input", 0: "unit"}, aggregate="max"),
    ]
    found = seen(model, metrics, [torch.ones(1, 3)])
    assert found["parameter/weight/unit_0/mean"][0] == 2
    assert found["parameter/weight/unit_1/mean"][0] == 6
    assert found["parameter/weight/input_2/unit_1/max"][0] == 9


@pytest.mark.parametrize(
    ("aggregate", "expected"),
    [
        ("mean", 2.5),  # (1 + 2 + 3 + 4) / 4: the mean of all elements, not the mean of the means 1.5 and 3.5
        ("sum", 10.0),
        ("min", 1.0),
        ("max", 4.0),
        (lambda all_values: all_values.median(), 2.0),  # torch's median of 1, 2, 3, 4
    ],
)
def test_micro_batches_of_different_sizes_are_merged(aggregate, expected):
    model = nn.Identity()
    model.weight = nn.Parameter(torch.ones(1))
    metric = Metric("x", lambda a: a, on="activation", match="^0$", aggregate=aggregate)
    stack = nn.Sequential(model, nn.Linear(1, 1))
    watcher, sink = watch(stack, [metric])
    optimizer = SGD(stack.parameters(), lr=0.1)
    for batch in ([[1.0]], [[2.0], [3.0], [4.0]]):
        stack(torch.tensor(batch)).sum().backward()
    optimizer.step()
    assert values(watcher, sink)["activation/0/x"].tolist() == [expected]


def test_half_precision_arrives_as_float32():
    model = Chosen(dtype=torch.float16, a=300)
    watcher, sink = watch(model, [Metric("sum_sq", lambda g: g.square().sum(), on="gradient")])
    model.loss(a=[100] * 300).backward()
    SGD(model.parameters(), lr=0.0).step()
    assert values(watcher, sink)["gradient/a/sum_sq"].tolist() == [3e6]  # beyond float16's 65504


@pytest.mark.parametrize(
    "metrics",
    [
        [Metric("noise", lambda w: (w * torch.randn_like(w)).sum(), on=on) for on in SUBJECTS],
        [Activations(of=("input", "output", "grad")), Metric("sum", torch.sum, on="activation")],
        [Updates(), OptimizerState(), Spectrum(of=("parameter", "gradient", "update")), NoiseScale()],
    ],
)
def test_training_and_its_random_numbers_are_bitwise_the_same(metrics):
    def trained(metrics):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(inplace=True), nn.Dropout(0.3), nn.Linear(8, 1))
        watcher, _ = watch(model, metrics)
        train(model, torch.randn(5, 3, 4), optimizer=torch.optim.AdamW(model.parameters(), lr=0.1))
        watcher.remove()
        return [parameter.tolist() for parameter in model.parameters()]

    assert trained(metrics) == trained([])


NO_PARAMETER = r"Metric\('x', on='\w+'\) with match='nope' matches no parameter; the first names are '0.weight'"
NO_MODULE = r"match='nope' matches no module; the first names are 'root', '0'"
MODEL = nn.Sequential(nn.Linear(2, 2))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        *((partial(Metric, "x", norm, on=on, match="nope"), NO_PARAMETER) for on in SUBJECTS if on != "activation"),
        # A parameter that `include` leaves out cannot be matched.
        (lambda: Metric("x", norm, match="bias"), "match='bias' matches no parameter; the first names are '0.weight'"),
        (lambda: Metric("x", norm, on="activation", match="nope"), NO_MODULE),
        (lambda: Activations("nope"), NO_MODULE),
        (lambda: Activations(nn.LSTM), "matches no module"),
        (lambda: Activations("("), r"Activations\(\): match='\(' is not a regular expression"),
        (lambda: Activations(of="grad"), "of='grad' must be a sequence"),
        (lambda: Activations(of=None), "of=None must be a sequence"),
        (lambda: Activations(statistics=5), r"Activations\(\): statistics=5 must be a sequence of names out of"),
        (lambda: Activations(statistics=[["norm"]]), r"statistics=\[\['norm'\]\] must be a sequence of names out of"),
        (lambda: Activations(dead_threshold=-1), "dead_threshold=-1 must be a number, at least 0"),
        (lambda: Activations(dead_threshold="0"), "dead_threshold='0' must be a number, at least 0"),
        (lambda: Activations(evaluation="no"), r"Activations\(\): evaluation='no' must be True or False"),
        (lambda: Activations(of=("grad",), evaluation=True), 'has "grad", but an evaluation has no backward'),
        (lambda: Attention(statistics="norm"), "statistics='norm' must be a sequence of names"),
        (lambda: Attention(statistics=None), r"Attention\(\): statistics=None must be a sequence of names"),
        (lambda: Attention(weights=1), r"Attention\(\): weights=1 must be True or False"),
        (lambda: Metric("x", norm, aggregate=["mean"]), r"aggregate=\['mean'\] must be one of .* or a function"),
        (lambda: NoiseScale(batch_size=0), "must be the number of examples"),
        (lambda: NoiseScale(batch_size="8"), r"NoiseScale\(\): batch_size='8' must be the number of examples"),
        (lambda: NoiseScale(group_by="layer"), 'must be "parameter", "module"'),
        (lambda: NoiseScale("nope"), "matches no parameter"),
        (lambda: OptimizerState("nope"), r"OptimizerState\(\) with match='nope' matches no parameter"),
        (lambda: Ranks(checksum_every=-1), "must be a number of sampled steps, 0 for never"),
        (lambda: Ranks("nope"), "matches no parameter"),
        (lambda: Reference(MODEL, functions=[norm]), "must be a dict from name to function, or None"),
        (lambda: Reference(MODEL, functions={"difference": torch.dot}), "'difference' is the name of the distance"),
        (lambda: Reference(MODEL, match="nope"), "match='nope' matches no parameter"),
        (lambda: Reference(MODEL, activations="nope"), NO_MODULE),
        (lambda: Router("nope"), NO_MODULE),
        (lambda: Router("0", top_k=0), "must be the number of experts"),
        (lambda: Spectrum(of="gradient"), "must be a sequence of names out of"),
        (lambda: Spectrum(of=("activation",)), "must be a sequence of names out of"),
        (lambda: Spectrum("bias"), "matches no matrix; the first names are '0.weight'"),
        (lambda: Updates("nope"), "match='nope' matches no parameter"),
        (lambda: Updates(max_mib=0), r"Updates\(\): max_mib=0 must be a number of MiB above 0"),
        (lambda: Updates(max_mib="1"), "max_mib='1' must be a number of MiB above 0"),
    ],
)
def test_metrics_reject_invalid_arguments(make, words):
    with pytest.raises((TypeError, ValueError), match=words):
        watch(MODEL, [make()], include="weight")


@pytest.mark.parametrize("make", [Activations, Attention, Updates, OptimizerState, Spectrum, NoiseScale, Ranks, Router])
def test_a_match_that_is_no_regular_expression_is_refused_when_the_metric_is_made(make):
    for match in ("(", 5, [3]):
        with pytest.raises(ValueError, match=rf"{make.__name__}\(\): match=.* regular expression"):
            make(match)
        with pytest.raises(ValueError, match=r"Metric\('x', on='parameter'\): match=.* regular expression"):
            Metric("x", norm, match=match)


def test_rules_of_probes_are_added_to_the_default_rules_only():
    model, alerts = nn.Sequential(nn.Linear(1, 1)), []
    for rules, expected in ((None, {"NaN gradient", "Non-finite activation"}), ([], set())):
        alerts.clear()
        watcher, _ = watch(model, [Activations()], rules=rules, on_alert=alerts.append)
        train(model, [torch.full((1, 1), math.nan)])
        watcher.remove()
        assert {alert.title for alert in alerts} == expected


@pytest.mark.parametrize(
    ("fn", "error", "words"),
    [
        (lambda w: w.norm().item(), TypeError, r"returned the Python number .* without \.item\(\)"),
        (lambda w: None, TypeError, "must return a real tensor, but returned NoneType"),
        (lambda w: w.to(torch.complex64), TypeError, "must return a real tensor, but returned a complex tensor"),
        (lambda w: w @ w, ValueError, r"Metric\('x', on='parameter'\) does not work on 'bias' of shape \[3\]"),
    ],
)
def test_watch_rejects_a_function_that_cannot_work(fn, error, words):
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.bias = nn.Parameter(torch.ones(3, 4)), nn.Parameter(torch.ones(3))

    match = "bias" if error is TypeError else None
    if error is ValueError:
        fn = lambda w: w @ torch.ones(7)  # noqa: E731
    with pytest.raises(error, match=words):
        watch(Odd(), [Metric("x", fn, match=match)])


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        (dict(name="a/b", fn=norm), ValueError, "without slashes, dots and stars"),
        (dict(name="w*x", fn=norm), ValueError, "without slashes, dots and stars"),
        (dict(name="", fn=norm), ValueError, "without slashes, dots and stars"),
        (dict(name=3, fn=norm), ValueError, "without slashes, dots and stars"),
        (dict(name="x", fn=3), TypeError, "fn=3 must be a function"),
        (dict(name="x", fn=norm, on="weight"), ValueError, "on='weight' must be one of"),
        (dict(name="x", fn=norm, aggregate="median"), ValueError, "aggregate='median' must be one of"),
        (dict(name="x", fn=norm, every=0), ValueError, "every=0 must be a whole number"),
        (dict(name="x", fn=norm, dims=[1]), ValueError, r"dims=\[1\] must be dimensions with their names"),
    ],
)
def test_a_metric_rejects_invalid_arguments(arguments, error, words):
    with pytest.raises(error, match=words):
        Metric(**arguments)


@pytest.mark.parametrize(
    ("metrics", "error", "words"),
    [
        ([Activations], TypeError, r"holds the class Activations; write Activations\(\)"),
        ([norm], TypeError, "which is not a metric"),
        (Metric("x", norm), TypeError, r"must be a sequence; write metrics=\[\.\.\.\]"),
        (
            [Metric("x", norm), Metric("x", torch.sum)],
            ValueError,
            r"Metric\('x', .* and Metric\('x', .* would both log",
        ),
    ],
)
def test_invalid_elements_of_metrics_are_named(metrics, error, words):
    with pytest.raises(error, match=words):
        probes_of(metrics, nn.Linear(2, 2))


def test_a_metric_that_fails_during_training_is_dropped_alone_with_one_message(said):
    def moody(gradient):
        if (gradient == 7).any():
            raise RuntimeError("seven")
        return gradient.sum()

    model = Chosen(a=1)
    broken_aggregate = Metric("broken", lambda g: g, on="gradient", aggregate=lambda v: v[:0])
    metrics = [Metric("moody", moody, on="gradient"), broken_aggregate, Metric("steady", torch.sum, on="gradient")]
    watcher, sink = watch(model, metrics)
    optimizer = SGD(model.parameters(), lr=0.0)
    for gradient in (1, 7, 1, 7):
        step(model, optimizer, a=[gradient])
    found = values(watcher, sink)
    assert found["gradient/a/steady"].tolist() == [1, 7, 1, 7]
    assert found["gradient/a/moody"][0] == 1
    assert np.isnan(found["gradient/a/moody"][1:]).all()
    assert "gradient/a/broken" not in found
    assert len([text for text in said() if "Metric('moody', on='gradient') failed on the gradient 'a'" in text]) == 1
    assert len([text for text in said() if "Metric('broken'" in text]) == 1


def test_a_probe_that_fails_is_dropped_alone_with_one_message(said, monkeypatch):
    model, probe = Chosen(a=1), Updates()
    watcher, sink = watch(model, [probe, Metric("sum", torch.sum, on="gradient")])

    def full(*_):
        raise torch.OutOfMemoryError("no room for the copies")

    monkeypatch.setattr(probe, "before_update", full)
    optimizer = SGD(model.parameters(), lr=1.0)
    for _ in range(3):
        step(model, optimizer, a=[1])
    found = values(watcher, sink)
    assert found["gradient/a/sum"].tolist() == [1, 1, 1]
    assert sink.merged().grad_norm[:, 0].tolist() == [1, 1, 1]
    assert len([text for text in said() if "Updates() failed and is dropped; training" in text]) == 1


def test_a_metric_is_tried_on_a_parameter_with_elements():
    model = Chosen(a=0, b=2)
    watcher, sink = watch(model, [Metric("largest", torch.max, on="gradient")])
    model.loss(b=[1, 3]).backward()
    SGD(model.parameters(), lr=1.0).step()
    assert values(watcher, sink)["gradient/b/largest"].tolist() == [3]


class Forgetful(ModuleProbe):
    """A user's probe whose state_dict() raises."""

    def state_dict(self):
        raise KeyError("lost")


def test_a_probe_whose_state_raises_loses_no_state_of_other_probes(said):
    model = Chosen(a=1)
    watcher, _ = watch(model, [Forgetful(), NoiseScale()])
    assert list(watcher.state_dict()["metrics"]) == ["NoiseScale.0"]
    assert len([text for text in said() if "Forgetful" in text and "failed and is dropped" in text]) == 1


class Vector(ModuleProbe):
    """A user's probe that returns several numbers under one key."""

    def take(self):
        return {"vector": torch.arange(3.0), "after": torch.tensor(7.0)}


def test_several_numbers_under_one_key_never_shift_the_values_of_other_keys(said):
    model = Chosen(a=1)
    watcher, sink = watch(model, [Vector()])
    model.loss(a=[1]).backward()
    SGD(model.parameters(), lr=1.0).step()
    assert values(watcher, sink) == {}
    assert sink.merged().grad_norm.tolist() == [[1]]
    assert len([text for text in said() if "Vector" in text and "failed and is dropped" in text]) == 1


@pytest.mark.parametrize("probe", [Updates, OptimizerState])
@pytest.mark.parametrize("has_optimizer", [False, True])
def test_a_metric_of_updates_says_after_ten_samples_that_there_is_no_optimizer(probe, has_optimizer, said):
    model = nn.Linear(2, 2)
    watcher, sink = watch(model, [probe()])
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(12):
        model(torch.ones(1, 2)).sum().backward()
        if has_optimizer:
            optimizer.step()
        else:
            watcher.mark_step()
    assert bool(values(watcher, sink)) is has_optimizer
    told = [text for text in said() if f"{probe.__name__}() has measured nothing in 10 samples" in text]
    assert len(told) == (0 if has_optimizer else 1)


def test_two_metrics_that_log_one_key_are_named_once_and_the_later_value_is_kept(said):
    model, few, many = nn.Linear(2, 2), Activations(dead_threshold=0.0), Activations(dead_threshold=9.0)
    watcher, sink = watch(model, [few, many])
    train(model, [torch.ones(1, 2)] * 2)
    assert values(watcher, sink)["activation/root/dead_ratio"].tolist() == [1, 1]
    assert len([text for text in said() if "two of metrics= log 'activation/root/dead_ratio'" in text]) == 1


@pytest.mark.parametrize("probe", [Activations, Updates])
def test_a_probe_that_still_measures_another_model_raises_a_warning(probe, said):
    first, second, shared = nn.Linear(2, 2), nn.Linear(2, 2), [probe()]
    watcher, _ = watch(first, shared)
    watcher, _ = watch(first, shared)  # replaces the first watcher
    assert not any("another watched model" in text for text in said())
    watcher.remove()
    watcher, _ = watch(first, shared)
    other, _ = watch(second, shared)
    [text] = [text for text in said() if "another watched model" in text]
    assert f"make a new {probe.__name__} for each model" in text
    watcher.remove()
    other.remove()


def test_nothing_keeps_the_model_alive():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    metrics = [Activations(), Updates(), Metric("x", norm), Metric("y", norm, on="activation")]
    watcher, _ = watch(model, metrics)
    train(model, [torch.randn(2, 4)])
    reference = weakref.ref(model)
    del model
    gc.collect()
    assert reference() is None
    watcher.remove()
