"""Cases with known answers: small watched training loops, with expected values from closed forms."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import math
import operator
import pickle
import weakref

import numpy as np
import pytest
import torch
from gradients import Chosen, of, samples, step, train, watch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import wandb_gradwatch

SGD = torch.optim.SGD


NAN, INF = math.nan, math.inf


# The gradient of each parameter (of ones), options, and expected statistics. ".total": of all parameters as one layer.
@pytest.mark.parametrize(
    ("gradients", "options", "expected"),
    [
        ({"a": [3, 4], "b": [12]}, {}, {"a.grad_norm": 5, "b.grad_norm": 12, ".total_grad_norm": 13}),  # 9 + 16 + 144
        # The mean of 3, -4 and 0 is -1/3, that of their squares 25/3.
        ({"a": [3, -4], "b": [0]}, {}, {".total.grad_mean": -1 / 3, ".total.grad_std": math.sqrt(25 / 3 - 1 / 9)}),
        # With one NaN the norm is that of the finite elements: 1 + 4 = 5.
        (
            {"a": [3, 4], "b": [1, NAN, 2]},
            {},
            {"a.grad_norm": 5, "b.num_nan": 1, "b.num_inf": 0, "b.grad_norm": math.sqrt(5)},
        ),
        # `a` has no finite element.
        (
            {"a": [NAN, NAN], "b": [INF, 3, 4], "c": [-INF, 6, 8]},
            {},
            {"a.grad_norm": NAN, "b.grad_norm": 5, "c.grad_norm": 10, ".total_grad_norm": math.sqrt(125)}
            | {"a.num_nan": 2, "b.num_nan": 0, "c.num_nan": 0, "a.num_inf": 0, "b.num_inf": 1, "c.num_inf": 1}
            | {"b.grad_max": 4},
        ),
        ({"empty": [], "a": [3, 4]}, {}, {".total_grad_norm": 5}),
        ({"a": [1e-7] * 10}, {}, {"a.dead_ratio": 0}),
        ({"a": [1e-7, -1e-7, 0, 1]}, {"dead_threshold": 1e-6}, {"a.dead_ratio": 0.75, "a.zero_ratio": 0.25}),
    ],
)
def test_the_numbers_of_one_step(gradients, options, expected):
    model = Chosen(**{name: len(values) for name, values in gradients.items()})
    watcher, sink = watch(model, **options)
    step(model, SGD(model.parameters(), lr=0.1), **gradients)
    snapshot = samples(watcher, sink)
    for key, value in expected.items():
        name, _, statistic = key.partition(".")
        found = of(snapshot, name, statistic) if name else operator.attrgetter(statistic)(snapshot)
        assert found.item() == pytest.approx(value, rel=1e-12, nan_ok=True), key


@pytest.mark.parametrize(("parameter", "ratio"), [(0.0, NAN), (2.0, 0.5)])
def test_a_zero_parameter_has_no_ratio(parameter, ratio):
    model = Chosen(a=1)
    nn.init.constant_(model.a, parameter)
    watcher, sink = watch(model)
    step(model, SGD(model.parameters(), lr=0.0), a=[1])
    np.testing.assert_array_equal(of(samples(watcher, sink), "a", "grad_param_ratio"), [ratio])


def test_micro_batches_are_one_sample_of_their_sum():
    model = Chosen(a=1)
    optimizer = SGD(model.parameters(), lr=0.1)
    watcher, sink = watch(model)
    for _ in range(3):
        optimizer.zero_grad()
        for gradient in (1, 1, 1, -3):
            model.loss(a=[gradient]).backward()
        optimizer.step()
    snapshot = samples(watcher, sink)
    assert snapshot.steps.tolist() == [1, 2, 3]
    assert of(snapshot, "a", "grad_norm").tolist() == [0, 0, 0]


@pytest.mark.parametrize("groups", [[4, 4, 4, 2, 4], [2, 2, 3, 2], [1, 3, 1, 3]])
def test_a_change_of_accumulation_gives_no_wrong_number(groups):
    model = Chosen(a=1)
    optimizer = SGD(model.parameters(), lr=0.1)
    watcher, sink = watch(model)
    for micro_batches in groups:
        optimizer.zero_grad()
        for _ in range(micro_batches):
            model.loss(a=[1]).backward()
        optimizer.step()
    assert of(samples(watcher, sink), "a", "grad_norm").tolist() == groups


def test_every_micro_batch_is_measured_once(monkeypatch):
    model = Chosen(a=1)
    optimizer = SGD(model.parameters(), lr=0.1)
    watcher, sink = watch(model)
    measured = []
    from wandb_gradwatch._capture import measurer

    original = measurer.measure
    monkeypatch.setattr(measurer, "measure", lambda *a, **k: measured.append(1) or original(*a, **k))
    for _ in range(10):
        optimizer.zero_grad()
        for _ in range(4):
            model.loss(a=[1]).backward()
        optimizer.step()
    assert of(samples(watcher, sink), "a", "grad_norm").tolist() == [4] * 10
    assert len(measured) == 10 * 4  # any backward may be the last before a step: the last group may be shorter


def test_two_losses_one_step():
    model = Chosen(a=1)
    watcher, sink = watch(model)
    optimizer = SGD(model.parameters(), lr=0.1)
    model.loss(a=[1]).backward()
    model.loss(a=[100]).backward()
    optimizer.step()
    snapshot = samples(watcher, sink)
    assert snapshot.steps.tolist() == [1]
    assert of(snapshot, "a", "grad_norm").tolist() == [101]


def test_optimizers_in_a_row_make_one_sample():
    model = Chosen(a=2, b=1)
    muon, adamw = SGD([model.a], lr=0.1), torch.optim.AdamW([model.b], lr=0.1)
    watcher, sink = watch(model)
    for _ in range(3):
        model.zero_grad()
        model.loss(a=[3, 4], b=[12]).backward()
        muon.step()
        adamw.step()
    assert watcher.step == 3
    snapshot = samples(watcher, sink)
    assert snapshot.steps.tolist() == [1, 2, 3]
    assert snapshot.total_grad_norm.tolist() == [13, 13, 13]


def test_a_late_optimizer_without_gradients_joins_silently():
    model = Chosen(a=1, b=1)
    first, second = SGD([model.a], lr=0.1), SGD([model.b], lr=0.1)
    watcher, sink = watch(model)
    for _ in range(3):
        first.zero_grad()
        model.loss(a=[2]).backward()
        first.step()
        second.step()
    assert watcher.step == 3
    assert of(samples(watcher, sink), "a", "grad_norm").tolist() == [2, 2, 2]


def test_gan_counts_each_parameter_once_per_step_of_its_own_optimizer():
    model = Chosen(d=1, g=1)
    d_optimizer, g_optimizer = SGD([model.d], lr=0.1), SGD([model.g], lr=0.1)
    watcher, sink = watch(model)
    for _ in range(3):
        d_optimizer.zero_grad()
        model.loss(d=[3]).backward()
        d_optimizer.step()
        g_optimizer.zero_grad()
        model.loss(d=[100], g=[7]).backward()  # the discriminator gets a gradient that no update uses
        g_optimizer.step()
    snapshot = samples(watcher, sink)
    assert snapshot.steps.tolist() == [1, 2, 3, 4, 5, 6]
    d, g = of(snapshot, "d", "grad_norm"), of(snapshot, "g", "grad_norm")
    assert d[0::2].tolist() == [3, 3, 3]
    assert np.isnan(d[1::2]).all()
    assert g[1::2].tolist() == [7, 7, 7]
    assert np.isnan(g[0::2]).all()


def test_lbfgs_records_its_first_evaluation_and_one_step():
    model = Chosen(a=1)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=5)
    watcher, sink = watch(model)
    first_gradients, evaluations = [], []

    def closure():
        optimizer.zero_grad()
        loss = ((model.a - 3) ** 4).sum()
        loss.backward()
        evaluations.append(model.a.grad.norm().item())
        return loss

    for _ in range(2):
        evaluations.clear()
        optimizer.step(closure)
        assert len(evaluations) > 1
        first_gradients.append(evaluations[0])
    assert of(samples(watcher, sink), "a", "grad_norm").tolist() == first_gradients


def test_frozen_is_missing_and_unfrozen_is_followed():
    model = Chosen(a=1, b=1)
    model.b.requires_grad_(False)
    optimizer = SGD(model.parameters(), lr=0.1)
    watcher, sink = watch(model)
    for trained in (False, True, True, False):
        model.b.requires_grad_(trained)
        step(model, optimizer, a=[3], b=[4])
    snapshot = samples(watcher, sink)
    assert of(snapshot, "a", "grad_norm").tolist() == [3, 3, 3, 3]
    assert np.isnan(of(snapshot, "b", "grad_norm")).tolist() == [True, False, False, True]
    assert of(snapshot, "b", "grad_norm")[1:3].tolist() == [4, 4]


def test_tied_weights_are_one_entry_with_both_uses():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(3, 2)
            self.head = nn.Linear(2, 3, bias=False)
            self.head.weight = self.embedding.weight

    model = Tied()
    optimizer = SGD(model.parameters(), lr=0.0)
    watcher, sink = watch(model)
    weight = model.embedding.weight
    (weight.sum() * 3 + model.head.weight.sum() * 4).backward()
    optimizer.step()
    snapshot = samples(watcher, sink)
    assert snapshot.names == ("embedding.weight",)
    assert snapshot.grad_norm[0, 0] == pytest.approx(7 * math.sqrt(6))  # six elements, each 3 + 4


def test_one_dead_relu_unit_of_four():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1))
    with torch.no_grad():
        model[0].weight.abs_()
        model[0].bias.fill_(1.0)
        model[0].weight[2] = 0
        model[0].bias[2] = -1  # a unit that is off for this input
    optimizer = SGD(model.parameters(), lr=0.0)
    watcher, sink = watch(model)
    model(torch.rand(8, 3) + 0.1).sum().backward()
    optimizer.step()
    snapshot = samples(watcher, sink)
    assert of(snapshot, "0.weight", "zero_ratio") == 0.25
    assert of(snapshot, "0.bias", "zero_ratio") == 0.25


def test_complex_parameter():
    model = Chosen(torch.complex64, a=1)
    watcher, sink = watch(model)
    optimizer = SGD(model.parameters(), lr=0.1)
    (model.a * torch.tensor(3 - 4j)).real.sum().backward()
    optimizer.step()
    assert of(samples(watcher, sink), "a", "grad_norm") == 5


def test_sparse_uncoalesced_embedding():
    model = nn.Embedding(10, 4, sparse=True)
    optimizer = SGD(model.parameters(), lr=0.1)
    watcher, sink = watch(model)
    model(torch.tensor([1, 1, 2])).sum().backward()
    optimizer.step()
    snapshot = samples(watcher, sink)
    assert snapshot.total_grad_norm[0] == pytest.approx(math.sqrt(20))  # row 1: four 2s, row 2: four 1s
    assert of(snapshot, "weight", "zero_ratio") == 0.8


def test_scalar_parameter_and_other_memory_formats():
    model = nn.Module()
    model.scale = nn.Parameter(torch.tensor(2.0))
    model.conv = nn.Conv2d(2, 3, 2).to(memory_format=torch.channels_last)
    model.transposed = nn.Parameter(torch.ones(3, 2).t())
    optimizer = SGD(model.parameters(), lr=0.0)
    watcher, sink = watch(model)
    image = torch.rand(1, 2, 4, 4).to(memory_format=torch.channels_last)
    ramp = torch.arange(6.0).reshape(2, 3)
    (model.scale * 3 + model.conv(image).sum() + (model.transposed * ramp).sum()).backward()
    expected = model.conv.weight.grad.double().norm().item()
    optimizer.step()
    snapshot = samples(watcher, sink)
    assert of(snapshot, "scale", "grad_norm") == 3
    assert of(snapshot, "conv.weight", "grad_norm") == pytest.approx(expected)
    assert of(snapshot, "transposed", "grad_norm") == pytest.approx(math.sqrt(55))  # 0 + 1 + 4 + 9 + 16 + 25


def test_autograd_grad_records_nothing():
    model = Chosen(a=1)
    optimizer = SGD(model.parameters(), lr=0.1)
    watcher, sink = watch(model)
    for _ in range(2):
        optimizer.zero_grad()
        torch.autograd.grad(model.loss(a=[100]), [model.a])
        model.loss(a=[1]).backward()
        torch.autograd.grad(model.loss(a=[100]), [model.a])
        optimizer.step()
    assert of(samples(watcher, sink), "a", "grad_norm").tolist() == [1, 1]


def test_one_flush_of_the_accumulated_gradient_at_step_ten():
    model = Chosen(a=1)
    optimizer = SGD(model.parameters(), lr=0.1)
    watcher, sink = watch(model, log_every=10)
    for _ in range(10):
        optimizer.zero_grad()
        for _ in range(4):
            model.loss(a=[1]).backward()
        optimizer.step()
    watcher.remove()
    assert len(sink.snapshots) == 1
    assert sink.snapshots[0].steps.tolist() == list(range(1, 11))
    assert sink.snapshots[0].total_grad_norm.tolist() == [4] * 10
    assert 10 in sink.snapshots[0].histogram_steps


@pytest.mark.parametrize("histogram_every", [None, 1, 2])
def test_histograms_of_accumulated_gradients_count_every_element_once(histogram_every):
    model = Chosen(a=4)
    optimizer = SGD(model.parameters(), lr=0.1)
    watcher, sink = watch(model, log_every=4, histogram_every=histogram_every)
    for _ in range(8):
        optimizer.zero_grad()
        for _ in range(3):
            model.loss(a=[1, 1, 0, -1]).backward()
        optimizer.step()
    watcher.remove()
    steps = {None: [(4,), ()], 1: [(1, 2, 3, 4), (5, 6, 7, 8)], 2: [(2, 4), (6, 8)]}[histogram_every]
    assert [snapshot.histogram_steps for snapshot in sink.snapshots] == steps
    for snapshot, counted in zip(sink.snapshots, steps, strict=True):
        if not counted:  # the second row
            assert snapshot.histogram is None
            continue
        assert snapshot.histogram.sum() == 4 * len(counted)
        assert snapshot.histogram[0, 128] == len(counted)  # the bin of zero


def test_sample_every_is_in_optimizer_steps():
    model = Chosen(a=1)
    optimizer = SGD(model.parameters(), lr=0.1)
    watcher, sink = watch(model, sample_every=5, log_every=10)
    for number in range(1, 21):
        step(model, optimizer, a=[number])
    watcher.remove()
    assert [snapshot.steps.tolist() for snapshot in sink.snapshots] == [[5, 10], [15, 20]]
    assert [snapshot.total_grad_norm.tolist() for snapshot in sink.snapshots] == [[5, 10], [15, 20]]


def test_eval_forwards_have_no_effect():
    model = nn.Linear(2, 1)
    optimizer = SGD(model.parameters(), lr=0.1)
    watcher, sink = watch(model)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        model.eval()
        with torch.no_grad():
            model(torch.ones(5, 2))
        model.train()
    assert samples(watcher, sink).steps.tolist() == [1, 2, 3]


def test_two_models_get_distinct_stable_names():
    models = [Chosen(a=1), Chosen(a=1)]
    watcher, _ = watch(models)
    assert watcher.parameter_names == ("model0.a", "model1.a")
    watcher.remove()
    watcher, _ = watch({"student": models[0], "teacher": models[1]})
    assert watcher.parameter_names == ("student.a", "teacher.a")
    watcher.remove()


def test_watching_twice_replaces_with_a_warning(caplog):
    model = Chosen(a=1)
    first, first_sink = watch(model)
    second, second_sink = watch(model)
    assert "already watched" in caplog.text
    step(model, SGD(model.parameters(), lr=0.1), a=[1])
    first.remove()
    assert not first_sink.snapshots
    assert len(samples(second, second_sink)) == 1


def test_unwatch_leaves_no_hook_behind():
    from torch.optim import optimizer as optimizer_module

    before = len(optimizer_module._global_optimizer_pre_hooks)
    model = Chosen(a=1)
    scale, unscale = torch.amp.GradScaler.scale, torch.amp.GradScaler.unscale_
    watch(model)
    assert model.a._backward_hooks
    wandb_gradwatch.unwatch(model)
    assert not model.a._backward_hooks
    assert len(optimizer_module._global_optimizer_pre_hooks) == before
    assert (torch.amp.GradScaler.scale, torch.amp.GradScaler.unscale_) == (scale, unscale)
    wandb_gradwatch.unwatch()
    watcher, sink = watch(model)
    step(model, SGD(model.parameters(), lr=0.1), a=[5])
    assert samples(watcher, sink).total_grad_norm.tolist() == [5]


def test_a_copied_or_saved_model_works_and_is_not_monitored(tmp_path):
    model = Chosen(a=1)
    watcher, sink = watch(model)
    step(model, SGD(model.parameters(), lr=0.0), a=[1])
    torch.save(model, tmp_path / "model.pt")
    copies = [
        copy.deepcopy(model),
        pickle.loads(pickle.dumps(model)),
        torch.load(tmp_path / "model.pt", weights_only=False),
        torch.optim.swa_utils.AveragedModel(model).module,
    ]
    for other in copies:
        step(other, SGD(other.parameters(), lr=0.0), a=[100])
    step(model, SGD(model.parameters(), lr=0.0), a=[2])
    assert of(samples(watcher, sink), "a", "grad_norm").tolist() == [1, 2]


def test_a_replaced_parameter_is_followed_and_said_once(caplog):
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 1, bias=False))
    watcher, _ = watch(model)
    for number in range(3):
        if number == 1:
            model[1] = nn.Linear(2, 1, bias=False)
        optimizer = SGD(model.parameters(), lr=0.0)
        optimizer.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        expected = model[1].weight.grad.double().norm().item()
        optimizer.step()
        assert watcher.latest.grad_norm[0, 1] == pytest.approx(expected)
    watcher.remove()
    assert caplog.text.count("now following") == 1
    assert "1.weight" in caplog.text


def test_lora_added_after_watch():
    class Lora(nn.Module):
        def __init__(self, base):
            super().__init__()
            self.base = base
            self.down = nn.Parameter(torch.ones(1, 2))
            self.up = nn.Parameter(torch.zeros(1, 1))

        def forward(self, x):
            return self.base(x) + x @ self.down.t() @ self.up.t()

    model = nn.Sequential(nn.Linear(2, 1, bias=False))
    watcher, sink = watch(model)
    step_of(model, SGD(model.parameters(), lr=0.0))
    model[0].weight.requires_grad_(False)
    model[0] = Lora(model[0])
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for _ in range(2):
        step_of(model, SGD(trained, lr=0.0))
    snapshot = samples(watcher, sink)
    assert set(snapshot.names) == {"0.weight", "0.down", "0.up", "0.base.weight"}
    # All ones: up receives x . down = 2, down receives up * x = 0.
    assert of(snapshot, "0.up", "grad_norm")[-1] == 2
    assert of(snapshot, "0.down", "grad_norm")[-1] == 0
    assert np.isnan(of(snapshot, "0.weight", "grad_norm")[1:]).all()


def step_of(model, optimizer):
    optimizer.zero_grad()
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()


def test_load_state_dict_assign_is_followed():
    model = nn.Linear(2, 1, bias=False)
    watcher, sink = watch(model)
    step_of(model, SGD(model.parameters(), lr=0.0))
    model.load_state_dict({"weight": torch.ones(1, 2)}, assign=True)
    optimizer = SGD(model.parameters(), lr=0.0)
    for _ in range(2):
        step_of(model, optimizer)
    assert of(samples(watcher, sink), "weight", "grad_norm")[-1] == pytest.approx(math.sqrt(2))


def test_changing_the_dtype_of_the_model_is_followed():
    model = nn.Linear(2, 1, bias=False)
    watcher, sink = watch(model)
    step_of(model, SGD(model.parameters(), lr=0.0))
    model.to(torch.float64)
    optimizer = SGD(model.parameters(), lr=0.0)
    optimizer.zero_grad()
    model(torch.ones(1, 2, dtype=torch.float64)).sum().backward()
    optimizer.step()
    assert of(samples(watcher, sink), "weight", "grad_norm").tolist() == pytest.approx([math.sqrt(2)] * 2)


def test_a_backward_that_raises_does_not_stop_the_monitoring():
    class Bad(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            raise RuntimeError("backward is broken")

    model = Chosen(a=1, b=1)
    optimizer = SGD(model.parameters(), lr=0.1)
    watcher, sink = watch(model)
    step(model, optimizer, a=[1], b=[1])
    optimizer.zero_grad()
    with pytest.raises(RuntimeError, match="backward is broken"):
        (model.loss(b=[5]) + Bad.apply(model.a).sum()).backward()
    for _ in range(2):
        step(model, optimizer, a=[3], b=[4])
    assert samples(watcher, sink).total_grad_norm.tolist() == [pytest.approx(math.sqrt(2)), 5, 5]


def test_a_step_that_raises_is_a_sample_and_monitoring_goes_on():
    class Fragile(SGD):
        fails = True

        def step(self, closure=None):
            if self.fails:
                raise RuntimeError("step is broken")
            return super().step(closure)

    model = Chosen(a=1)
    optimizer = Fragile(model.parameters(), lr=0.1)
    watcher, sink = watch(model)
    model.loss(a=[1]).backward()
    with pytest.raises(RuntimeError, match="step is broken"):
        optimizer.step()
    optimizer.fails = False
    for _ in range(2):
        step(model, optimizer, a=[2])
    assert of(samples(watcher, sink), "a", "grad_norm").tolist() == [1, 2, 2]


def test_steps_inside_steps_count_once():
    class Outer(SGD):
        def step(self, closure=None):
            return super().step(closure)

    model = Chosen(a=1)
    SGD(model.parameters(), lr=0.1)  # so that the step() of the base class is hooked too
    optimizer = Outer(model.parameters(), lr=0.1)
    watcher, sink = watch(model)
    for number in (1, 2, 3):
        step(model, optimizer, a=[number])
    assert of(samples(watcher, sink), "a", "grad_norm").tolist() == [1, 2, 3]


def test_updates_by_hand_without_any_optimizer(caplog):
    model = Chosen(a=1)
    watcher, sink = watch(model)
    for number in range(1, 6):
        model.loss(a=[number]).backward()
        with torch.no_grad():
            model.a -= 0.1 * model.a.grad
        model.a.grad = None
    assert of(samples(watcher, sink), "a", "grad_norm").tolist() == [1, 2, 3, 4, 5]
    assert caplog.text.count("no optimizer step was seen") == 1


def test_updates_by_hand_with_accumulation():
    model = Chosen(a=1)
    watcher, sink = watch(model)
    for _ in range(5):
        for _ in range(3):
            model.loss(a=[2]).backward()
        with torch.no_grad():
            model.a -= 0.1 * model.a.grad
        model.a.grad.zero_()
    assert of(samples(watcher, sink), "a", "grad_norm").tolist() == [6] * 5


def test_warm_up_backwards_before_the_first_step_are_no_samples():
    model = Chosen(a=1)
    optimizer = SGD(model.parameters(), lr=0.1)
    watcher, sink = watch(model)
    for _ in range(2):
        model.loss(a=[50]).backward()
        optimizer.zero_grad()
    for number in (1, 2):
        step(model, optimizer, a=[number])
    snapshot = samples(watcher, sink)
    assert snapshot.steps.tolist() == [1, 2]
    assert of(snapshot, "a", "grad_norm").tolist() == [1, 2]


def test_warm_up_backwards_teach_nothing_about_accumulation():
    model = Chosen(a=2)
    optimizer = SGD(model.parameters(), lr=0.1)
    watcher, sink = watch(model)
    for _ in range(3):
        model.loss(a=[50, 50]).backward()
    for _ in range(3):  # one backward per step, fewer than in the warm-up
        optimizer.zero_grad()
        model.loss(a=[3, 4]).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    snapshot = samples(watcher, sink)
    np.testing.assert_allclose(of(snapshot, "a", "grad_norm"), [5, 5, 5])
    np.testing.assert_allclose(of(snapshot, "a", "grad_norm_clipped"), [1, 1, 1], rtol=1e-5)


def test_a_backward_that_writes_twice_to_a_gradient_accumulates_all_the_same(caplog):
    """DistributedDataParallel does so: it overwrites the accumulated gradient with the average over ranks."""
    model = Chosen(a=1, b=1)
    optimizer = SGD(model.parameters(), lr=0.1)
    watcher, sink = watch(model)
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: p.grad.mul_(1.0) and None)
    for _ in range(2):
        optimizer.zero_grad()
        for _ in range(8):  # more than the number of resets after which updates by hand are assumed
            model.loss(a=[3], b=[4]).backward()
        optimizer.step()
    snapshot = samples(watcher, sink)
    assert snapshot.steps.tolist() == [1, 2]
    np.testing.assert_allclose(snapshot.total_grad_norm, [40, 40])
    assert "no optimizer" not in caplog.text


def test_watcher_step_is_the_clock_of_exotic_loops():
    model = Chosen(a=1)
    watcher, sink = watch(model)
    for number in (1, 2, 3):
        model.loss(a=[number]).backward()
        model.a.grad = None
        watcher.mark_step()
    assert watcher.step == 3
    assert of(samples(watcher, sink), "a", "grad_norm").tolist() == [1, 2, 3]


@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_zeroed_before_the_step_are_missing_and_said_once(set_to_none):
    model = Chosen(a=1)
    optimizer = SGD(model.parameters(), lr=0.1)
    watcher, sink = watch(model)
    for _ in range(4):
        model.loss(a=[3]).backward()
        optimizer.zero_grad(set_to_none=set_to_none)
        optimizer.step()
    snapshot = samples(watcher, sink)
    assert np.isnan(of(snapshot, "a", "grad_norm")).all()
    assert [alert.title for alert in sink.alerts] == ["No gradient"]
    assert "zero_grad()" in sink.alerts[0].text
    assert (sink.alerts[0].incident.cause, sink.alerts[0].step) == ("gradients_zeroed", 1)


def test_unused_parameters_with_zeroed_gradients_are_missing_not_dead():
    model = Chosen(a=1, b=1)
    optimizer = SGD(model.parameters(), lr=0.1)
    watcher, sink = watch(model)
    step(model, optimizer, a=[1], b=[1])
    for _ in range(2):
        optimizer.zero_grad(set_to_none=False)
        model.loss(a=[1]).backward()
        optimizer.step()
    snapshot = samples(watcher, sink)
    assert np.isnan(of(snapshot, "b", "dead_ratio")).tolist() == [False, True, True]


@pytest.mark.parametrize("is_traced", [False, True])
def test_a_collected_model_takes_its_watcher_along(is_traced):
    """Tensors have no data while a compiler traces: the flush then waits until the watcher is removed."""
    model = Chosen(a=1)
    watcher, sink = watch(model)
    reference = weakref.ref(model.a)
    step(model, SGD(model.parameters(), lr=0.1), a=[1])
    with FakeTensorMode() if is_traced else contextlib.nullcontext():
        del model
        gc.collect()
    assert reference() is None
    assert sink.closed != is_traced
    watcher.remove()
    assert sink.merged().steps.tolist() == [1]


class LikeFabrics(nn.Module):
    """A wrapper that holds the model twice, like that of Lightning Fabric."""

    def __init__(self, model):
        super().__init__()
        self._forward_module = self._original_module = model


@pytest.mark.parametrize("wrap", [nn.DataParallel, LikeFabrics, functools.partial(torch.compile, backend="eager")])
def test_a_wrapper_may_be_thrown_away_while_its_model_is_trained(wrap):
    """A wrapper is discarded by watch(torch.compile(model)), or when a notebook cell wraps the model again."""
    model = Chosen(a=1)
    watcher, sink = watch(wrap(model))
    gc.collect()
    for number in (1, 2):
        step(model, SGD(model.parameters(), lr=0.1), a=[number])
    snapshot = samples(watcher, sink)
    assert snapshot.names == ("a",)
    assert of(snapshot, "a", "grad_norm").tolist() == [1, 2]


def test_a_wrapped_model_and_the_model_are_one_model_to_watch_and_unwatch(caplog):
    model = Chosen(a=1)
    wrapped = nn.DataParallel(model)
    _, replaced = watch(wrapped)
    _, sink = watch(model)
    assert "already watched" in caplog.text
    assert (replaced.closed, sink.closed) == (True, False)
    wandb_gradwatch.unwatch(wrapped)
    assert sink.closed


def test_training_is_bitwise_the_same():
    def make():
        return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))

    data = [torch.randn(16, 4, generator=torch.Generator().manual_seed(seed)) for seed in range(10)]
    plain = train(make, data, watched=False)
    watched = train(make, data, watched=True)
    assert all(torch.equal(plain[name], watched[name]) for name in plain)


def test_a_checker_of_equal_training_can_fail():
    def make():
        return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))

    data = [torch.randn(16, 4, generator=torch.Generator().manual_seed(seed)) for seed in range(10)]
    plain = train(make, data, watched=False)
    other = train(make, [*data[:-1], data[-1] + 1e-3], watched=True)
    assert not all(torch.equal(plain[name], other[name]) for name in plain)


def test_several_losses_before_the_first_step_are_one_sample():
    model = Chosen(a=1, b=1)
    first, second = SGD([model.a], lr=0.0), SGD([model.b], lr=0.0)
    watcher, sink = watch(model)
    for _ in range(3):
        model.zero_grad()
        model.loss(a=[3]).backward()
        model.loss(b=[4]).backward()
        first.step()
        second.step()
    assert watcher.step == 3
    assert samples(watcher, sink).total_grad_norm.tolist() == [5, 5, 5]


def test_an_overflowing_clip_is_an_explosion_not_a_zeroed_gradient():
    model = Chosen(a=4)
    optimizer = SGD(model.parameters(), lr=0.1)
    watcher, sink = watch(model, rules=None)
    for number in range(12):
        optimizer.zero_grad()
        model.loss(a=[1e20 if number == 10 else 0.5] * 4).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    snapshot = samples(watcher, sink)
    assert snapshot.total_grad_norm[10] == pytest.approx(2e20)
    assert snapshot.total_grad_norm_clipped[10] == 0  # torch's norm overflows, so it clips to 0
    assert [alert.title for alert in sink.alerts] == ["Exploding gradient"]


def test_blocks_that_are_trained_in_turn():
    model = Chosen(head=1, body=1)
    optimizer = SGD(model.parameters(), lr=0.0)
    model.body.requires_grad_(False)
    watcher, sink = watch(model)
    step(model, optimizer, head=[2], body=[3])
    model.head.requires_grad_(False)
    model.body.requires_grad_(True)
    for _ in range(3):
        step(model, optimizer, head=[2], body=[3])
    snapshot = samples(watcher, sink)
    # The first gradient after the change is first measured at the step, when it may already be clipped.
    assert of(snapshot, "body", "grad_norm")[2:].tolist() == [3, 3]
    assert of(snapshot, "body", "grad_norm_clipped")[1:].tolist() == [3, 3, 3]
    assert np.isnan(of(snapshot, "head", "grad_norm")[1:]).all()


def test_an_optimizer_whose_parameters_are_exchanged():
    model = Chosen(a=1, b=1)
    optimizer = SGD([model.a], lr=0.0)
    watcher, sink = watch(model)
    for parameter in (model.a, model.b, model.a):
        optimizer.param_groups[0]["params"] = [parameter]
        step(model, optimizer, a=[3], b=[4])
    snapshot = samples(watcher, sink)
    assert of(snapshot, "a", "grad_norm")[[0, 2]].tolist() == [3, 3]
    assert of(snapshot, "b", "grad_norm")[1] == 4


def test_a_gradient_replaced_twice_is_not_taken_for_the_first():
    model = Chosen(a=1)
    optimizer = SGD(model.parameters(), lr=0.0)
    watcher, sink = watch(model)
    for _ in range(8):
        optimizer.zero_grad()
        model.loss(a=[4]).backward()
        model.a.grad = model.a.grad * 0.5
        model.a.grad = model.a.grad * 0.5
        optimizer.step()
    snapshot = samples(watcher, sink)
    assert of(snapshot, "a", "grad_norm").tolist() == [4] * 8
    assert of(snapshot, "a", "grad_norm_clipped").tolist() == [1] * 8


def test_a_flush_in_the_middle_of_an_accumulation_invents_no_sample():
    model = Chosen(a=1)
    optimizer = SGD(model.parameters(), lr=0.0)
    watcher, sink = watch(model)
    for number in range(4):
        model.loss(a=[1]).backward()
        if number == 1:
            assert watcher.flush() is None
    optimizer.step()
    snapshot = samples(watcher, sink)
    assert snapshot.steps.tolist() == [1]
    assert of(snapshot, "a", "grad_norm").tolist() == [4]


def test_a_step_on_zeroed_gradients_without_a_backward_logs_no_zero():
    model = Chosen(a=1)
    optimizer = SGD(model.parameters(), lr=0.0)
    watcher, sink = watch(model)
    step(model, optimizer, a=[3])
    optimizer.zero_grad(set_to_none=False)
    optimizer.step()
    snapshot = samples(watcher, sink)
    assert np.isnan(of(snapshot, "a", "grad_norm_clipped")).tolist() == [False, True]


def test_an_optimizer_without_a_hash():
    class Comparable(SGD):
        def __eq__(self, other):
            return self is other

        __hash__ = None

    model = Chosen(a=1)
    optimizer = Comparable(model.parameters(), lr=0.0)
    watcher, sink = watch(model)
    for _ in range(2):
        step(model, optimizer, a=[3])
    assert of(samples(watcher, sink), "a", "grad_norm").tolist() == [3, 3]


def test_modules_that_exchange_their_names_exchange_their_rows():
    # The parameters, their ids and the optimizer stay the same; only the names change.
    model = nn.ModuleDict({"a": Chosen(p=1), "b": Chosen(p=1), "c": Chosen(p=1)})
    optimizer = SGD(model.parameters(), lr=0.0)
    watcher, sink = watch(model)

    def train(**gradients):
        optimizer.zero_grad()
        sum(model[name].loss(p=[gradient]) for name, gradient in gradients.items()).backward()
        optimizer.step()

    train(a=1, b=2, c=3)
    model["a"], model["b"] = model["b"], model["a"]
    train(a=10, b=20, c=30)
    train(a=11)
    model["d"] = model.pop("c")
    train(a=12, b=22, d=32)
    nan = math.nan
    rows = samples(watcher, sink)
    assert rows.names == ("a.p", "b.p", "c.p", "d.p")
    expected = [[1, 2, 3, nan], [10, 20, 30, nan], [11, nan, nan, nan], [12, 22, nan, 32]]
    np.testing.assert_array_equal(rows.grad_norm, expected)


def test_hooks_go_with_the_names_of_their_parameters():
    # Also for a frozen parameter, which cannot be hooked again. Zeros that a hook has reported are measured.
    model = nn.ModuleDict({"a": Chosen(p=1), "b": Chosen(p=1)})
    optimizer = SGD(model.parameters(), lr=0.0)
    watcher, sink = watch(model)
    for _ in range(2):
        model["a"], model["b"] = model["b"], model["a"]
        model["b"].p.requires_grad_(False)
        for gradient in (3, 0):
            optimizer.zero_grad()
            model["a"].loss(p=[gradient]).backward()
            optimizer.step()
        model["b"].p.requires_grad_(True)
    rows = samples(watcher, sink)
    np.testing.assert_array_equal(rows.grad_norm, [[3, math.nan], [0, math.nan]] * 2)


def test_zeros_that_zero_grad_left_are_in_no_histogram():
    model = Chosen(a=2, b=2)
    optimizer = SGD(model.parameters(), lr=0.0)
    watcher, sink = watch(model, histogram_every=1)
    for gradients in ({"a": [1, 0], "b": [1, 2]}, {"a": [1, 0]}):
        optimizer.zero_grad(set_to_none=False)
        model.loss(**gradients).backward()
        optimizer.step()
    watcher.remove()
    assert [snapshot.histogram.sum(axis=1).tolist() for snapshot in sink.snapshots] == [[2, 2], [2, 0]]
