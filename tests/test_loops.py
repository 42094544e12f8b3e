"""Unusual backwards and steps: compiled, checkpointed, steps inside the backward, nested, in threads."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import torch
import torch._dynamo
from gradients import Chosen, of, samples, step, watch
from torch import nn
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint

import wandb_gradwatch
from wandb_gradwatch import MemorySink
from wandb_gradwatch._measure.measure import measure_received

SGD = torch.optim.SGD


def float64_norms(model, batch):
    """Return the gradient norm of each parameter for the mean squared output, computed by autograd in float64."""
    twin = copy.deepcopy(getattr(model, "_orig_mod", model)).double()
    twin.zero_grad()
    twin(batch.double()).square().mean().backward()
    return [parameter.grad.norm().item() for parameter in twin.parameters()]


def mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))


def batches(number=4):
    return [torch.randn(16, 4, generator=torch.Generator().manual_seed(seed)) for seed in range(number)]


def train(model, optimizer, *, forward=None, steps=4):
    expected = []
    for batch in batches(steps):
        expected.append(float64_norms(model, batch))
        optimizer.zero_grad()
        (forward or model)(batch).square().mean().backward()
        optimizer.step()
    return np.array(expected)


class Checkpointed(nn.Module):
    def __init__(self, use_reentrant, *, tied=False):
        super().__init__()
        self.first, self.second, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 1)
        if tied:
            self.second.weight = self.first.weight
        self.use_reentrant = use_reentrant

    def forward(self, x):
        if self.use_reentrant:
            x = x.detach().requires_grad_()
        for layer in (self.first, self.second):
            x = checkpoint(lambda h, layer=layer: layer(h).tanh(), x, use_reentrant=self.use_reentrant)
        return self.last(x)


def test_updates_by_hand_with_everything_inside_a_reentrant_checkpoint():
    """The inner backward marks every parameter, and ends before a hook reports the outer backward."""
    model = Chosen(a=2, b=1)
    watcher, sink = watch(model)
    for _ in range(5):
        for _ in range(2):
            factor = torch.ones(1, requires_grad=True)
            loss = checkpoint(lambda f: model.loss(a=[3, 0], b=[4]) * f, factor, use_reentrant=True)
            loss.backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.1 * parameter.grad
        model.zero_grad()
    snapshot = samples(watcher, sink)
    assert snapshot.total_grad_norm.tolist() == [10] * 5


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activation_checkpointing(use_reentrant, tied):
    torch.manual_seed(0)
    model = Checkpointed(use_reentrant, tied=tied)
    watcher, sink = watch(model)
    expected = train(model, SGD(model.parameters(), lr=0.1))
    snapshot = samples(watcher, sink)
    assert snapshot.steps.tolist() == [1, 2, 3, 4]
    np.testing.assert_allclose(snapshot.grad_norm, expected, rtol=1e-5)


def test_everything_inside_reentrant_checkpoints():
    torch.manual_seed(0)
    model = Checkpointed(use_reentrant=True)
    model.last = nn.Identity()
    watcher, sink = watch(model)
    expected = train(model, SGD(model.parameters(), lr=0.1))
    snapshot = samples(watcher, sink)
    np.testing.assert_allclose(snapshot.grad_norm, expected, rtol=1e-5)


@pytest.mark.parametrize(
    ("backend", "watch_first"),
    [pytest.param("inductor", False, marks=pytest.mark.slow), ("aot_eager", False), ("aot_eager", True)],
)
def test_compiled_model(backend, watch_first):
    torch._dynamo.reset()
    model = mlp()
    if watch_first:
        watcher, sink = watch(model)
        compiled = torch.compile(model, backend=backend)
    else:
        compiled = torch.compile(model, backend=backend)
        watcher, sink = watch(compiled)
    torch._dynamo.utils.counters.clear()
    expected = train(model, SGD(model.parameters(), lr=0.1), forward=compiled)
    assert not torch._dynamo.utils.counters["graph_break"]
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    snapshot = samples(watcher, sink)
    assert snapshot.names == tuple(name for name, _ in model.named_parameters())
    np.testing.assert_allclose(snapshot.grad_norm, expected, rtol=1e-4)


@pytest.mark.parametrize("compiled", ["the step itself", "a function around the step", "the whole training step"])
def test_compiled_optimizer_step(compiled):
    torch._dynamo.reset()
    model = mlp()
    watcher, sink = watch(model)
    optimizer = SGD(model.parameters(), lr=0.1)

    def update():
        optimizer.step()

    def training_step(batch):
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        update()

    if compiled == "the step itself":
        optimizer.step = torch.compile(optimizer.step, backend="aot_eager")
    elif compiled == "a function around the step":
        update = torch.compile(update, backend="aot_eager")
    else:
        training_step = torch.compile(training_step, backend="aot_eager")
    expected = []
    for batch in batches():
        expected.append(float64_norms(model, batch))
        training_step(batch)
    np.testing.assert_allclose(samples(watcher, sink).grad_norm, expected, rtol=1e-5)


@pytest.mark.slow
def test_compiled_autograd():
    torch._dynamo.reset()
    model = mlp()
    watcher, sink = watch(model)
    optimizer = SGD(model.parameters(), lr=0.1)
    expected = []
    for batch in batches():
        expected.append(float64_norms(model, batch))
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        with torch._dynamo.compiled_autograd._enable(torch.compile(backend="aot_eager")):
            loss.backward()
        optimizer.step()
    snapshot = samples(watcher, sink)
    assert snapshot.steps.tolist() == [1, 2, 3, 4]
    np.testing.assert_allclose(snapshot.grad_norm_clipped, expected, rtol=1e-5)
    seen = ~np.isnan(snapshot.grad_norm)
    np.testing.assert_allclose(snapshot.grad_norm[seen], np.array(expected)[seen], rtol=1e-5)


def apply_in_backward(model):
    from torch.distributed.optim import _apply_optimizer_in_backward

    _apply_optimizer_in_backward(SGD, model.parameters(), {"lr": 0.1})


def hand_written_hooks(model):
    optimizers = {parameter: SGD([parameter], lr=0.1) for parameter in model.parameters()}

    def update(parameter):
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(update)


@pytest.mark.parametrize("watch_first", [False, True])
@pytest.mark.parametrize("fuse", [apply_in_backward, hand_written_hooks])
def test_optimizer_in_backward(fuse, watch_first):
    model = mlp()
    if watch_first:
        watcher, sink = watch(model)
        fuse(model)
    else:
        fuse(model)
        watcher, sink = watch(model)
    expected = []
    for batch in batches(5):
        expected.append(float64_norms(model, batch))
        model(batch).square().mean().backward()
    snapshot = samples(watcher, sink)
    assert snapshot.steps.tolist() == [1, 2, 3, 4, 5]
    np.testing.assert_allclose(snapshot.grad_norm, expected, rtol=1e-5)


def test_sam_counts_the_last_backward():
    class Sam(torch.optim.Optimizer):
        def __init__(self, parameters, base):
            super().__init__(parameters, {})
            self.base = base

        def step(self, closure):
            with torch.enable_grad():
                closure()
            self.base.step()

    model = Chosen(a=1)
    base = SGD(model.parameters(), lr=0.0)
    optimizer = Sam(model.parameters(), base)
    watcher, sink = watch(model)
    for number in (1, 2):
        optimizer.zero_grad()
        model.loss(a=[100]).backward()

        def closure(number=number):
            optimizer.zero_grad()
            loss = model.loss(a=[number])
            loss.backward()
            return loss

        optimizer.step(closure)
    snapshot = samples(watcher, sink)
    assert snapshot.steps.tolist() == [1, 2]
    assert of(snapshot, "a", "grad_norm").tolist() == [1, 2]


def test_closure_of_an_ordinary_optimizer():
    model = Chosen(a=1)
    optimizer = SGD(model.parameters(), lr=0.1)
    watcher, sink = watch(model)
    for number in (1, 2, 3):

        def closure(number=number):
            optimizer.zero_grad()
            loss = model.loss(a=[number])
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            return loss

        optimizer.step(closure)
    snapshot = samples(watcher, sink)
    assert of(snapshot, "a", "grad_norm").tolist() == [1, 2, 3]
    assert of(snapshot, "a", "grad_norm_clipped") == pytest.approx([0.5] * 3, rel=1e-5)


def test_schedulers_do_not_disturb():
    model = Chosen(a=1)
    optimizer = SGD(model.parameters(), lr=0.1)
    watcher, sink = watch(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    for number in (1, 2, 3):
        step(model, optimizer, a=[number])
        scheduler.step()
    assert of(samples(watcher, sink), "a", "grad_norm").tolist() == [1, 2, 3]


def test_master_weights_with_the_optimizer_given():
    model = Chosen(a=1)
    master = model.a.detach().double().requires_grad_()
    optimizer = SGD([master], lr=0.1)
    watcher, sink = watch(model, optimizer=optimizer)
    for number in (1, 2, 3):
        model.loss(a=[number]).backward()
        master.grad = model.a.grad.double()
        optimizer.step()
        model.a.grad = None
    assert of(samples(watcher, sink), "a", "grad_norm").tolist() == [1, 2, 3]


def test_an_optimizer_that_is_no_torch_optimizer():
    model = Chosen(a=1)
    watcher, sink = watch(model)
    for number in (1, 2, 3, 4):
        model.loss(a=[number]).backward()
        with torch.no_grad():
            model.a.sub_(model.a.grad)
        model.zero_grad()
    assert of(samples(watcher, sink), "a", "grad_norm").tolist() == [1, 2, 3, 4]


def test_parametrization_and_pruning():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    nn.utils.parametrizations.weight_norm(model[0])
    prune.random_unstructured(model[1], "weight", amount=0.5)
    watcher, sink = watch(model)
    optimizer = SGD(model.parameters(), lr=0.1)
    expected = []
    for batch in batches():
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        expected.append([parameter.grad.double().norm().item() for parameter in model.parameters()])
        optimizer.step()
    snapshot = samples(watcher, sink)
    assert snapshot.names == tuple(name for name, _ in model.named_parameters())
    np.testing.assert_allclose(snapshot.grad_norm, expected, rtol=1e-5)


@pytest.mark.parametrize("steps_before", [1, 4])  # within, and after, the first 3 steps, which differ
def test_swapped_tensors_are_followed(steps_before):
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model = nn.Linear(4, 1)
        watcher, sink = watch(model)
        train(model, SGD(model.parameters(), lr=0.1), steps=steps_before)
        model.to(torch.float64)  # fails for tensors that have weak references
        expected = []
        optimizer = SGD(model.parameters(), lr=0.1)
        for batch in batches(3):
            expected.append(float64_norms(model, batch))
            optimizer.zero_grad()
            model(batch.double()).square().mean().backward()
            optimizer.step()
        snapshot = samples(watcher, sink)
        np.testing.assert_allclose(snapshot.grad_norm_clipped[-3:], expected, rtol=1e-6)
        seen = ~np.isnan(snapshot.grad_norm[-3:])
        np.testing.assert_allclose(snapshot.grad_norm[-3:][seen], np.array(expected)[seen], rtol=1e-6)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


def test_higher_order_gradients():
    model = Chosen(a=1)
    optimizer = SGD(model.parameters(), lr=0.0)
    watcher, sink = watch(model)
    (model.a**3).sum().backward(create_graph=True)  # 3 a^2 = 3
    optimizer.step()
    assert of(samples(watcher, sink), "a", "grad_norm") == 3
    model.a.grad = None


def test_nothing_is_measured_while_a_cuda_graph_is_captured(monkeypatch):
    model = Chosen(a=1)
    optimizer = SGD(model.parameters(), lr=0.0)
    watcher, sink = watch(model)
    step(model, optimizer, a=[3])
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    step(model, optimizer, a=[100])
    monkeypatch.undo()
    step(model, optimizer, a=[4])
    assert of(samples(watcher, sink), "a", "grad_norm").tolist() == [3, 4]


@pytest.mark.parametrize("sample_every", [1, 3])
def test_an_optimizer_that_begins_to_step_later_splits_no_sample(sample_every):
    """Only one of two optimizers steps at first. The first step of the other one opens no sample."""
    model = Chosen(a=1, b=1)
    first, second = SGD([model.a], lr=0.1), SGD([model.b], lr=0.1)
    watcher, sink = watch(model, sample_every=sample_every)
    for i in range(1, 7):
        first.zero_grad()
        second.zero_grad()
        model.loss(a=[i], b=[10 * i]).backward()
        first.step()
        if i >= 4:
            second.step()
    sampled = slice(sample_every - 1, None, sample_every)
    snapshot = samples(watcher, sink)
    assert snapshot.steps.tolist() == [1, 2, 3, 4, 5, 6][sampled]
    assert of(snapshot, "a", "grad_norm").tolist() == [1, 2, 3, 4, 5, 6][sampled]
    np.testing.assert_equal(of(snapshot, "b", "grad_norm"), [np.nan, np.nan, np.nan, 40, 50, 60][sampled])


# `reached`: for each update, the parameters that its backward reaches.
@pytest.mark.parametrize("sample_every", [1, 5])
@pytest.mark.parametrize("set_to_none", [False, True], ids=["zeroed", "none"])
@pytest.mark.parametrize("reached", ["ab ab ab ab", "a a a a", "b b b b", "b a b a"])
@pytest.mark.parametrize("second_from", [0, 2])
@pytest.mark.parametrize("watched_from", ["backward", "first step"])
def test_watch_in_mid_training_splits_no_sample(sample_every, set_to_none, reached, second_from, watched_from):
    model = Chosen(a=1, b=1)
    first, second = SGD([model.a], lr=0.1), SGD([model.b], lr=0.1)
    step(model, first, a=[1])
    step(model, second, b=[1])  # both have gradients from before watch()
    watcher = None
    for number, names in enumerate(reached.split()):
        first.zero_grad(set_to_none=set_to_none)
        second.zero_grad(set_to_none=set_to_none)
        if not watcher and watched_from == "backward":
            watcher, _ = watch(model, sample_every=sample_every)
        model.loss(**{name: [3] for name in names}).backward()
        if not watcher:
            watcher, _ = watch(model, sample_every=sample_every)
        first.step()
        if number >= second_from:
            second.step()
    watcher.remove()
    assert watcher.step == 4


def test_a_parameter_added_and_first_used_alone_is_missing_once_which_is_said(said):
    """This backward reaches no parameter with a hook, so its gradient may be clipped before it is first measured."""
    model = Chosen(a=1)
    optimizer = SGD(model.parameters(), lr=0.1)
    watcher, sink = watch(model)
    step(model, optimizer, a=[1])
    model.b = nn.Parameter(torch.ones(1))
    optimizer.add_param_group({"params": [model.b]})
    for _ in range(3):
        step(model, optimizer, b=[2])
    snapshot = samples(watcher, sink)
    np.testing.assert_equal(of(snapshot, "b", "grad_norm"), [np.nan, np.nan, 2, 2])
    np.testing.assert_equal(of(snapshot, "b", "grad_norm_clipped"), [np.nan, 2, 2, 2])
    assert [text for text in said() if "the gradients of b could not be seen before clipping in step 2" in text] != []


def test_one_of_two_optimizers_made_anew_keeps_the_samples_together():
    model = Chosen(a=1, b=1)
    first, second = SGD([model.a], lr=0.1), SGD([model.b], lr=0.1)
    watcher, sink = watch(model)
    for i in range(1, 7):
        if i == 4:
            second = SGD([model.b], lr=0.1)
        first.zero_grad()
        second.zero_grad()
        model.loss(a=[i], b=[10 * i]).backward()
        first.step()
        second.step()
    snapshot = samples(watcher, sink)
    assert snapshot.steps.tolist() == [1, 2, 3, 4, 5, 6]
    assert of(snapshot, "b", "grad_norm").tolist() == [10, 20, 30, 40, 50, 60]


@pytest.mark.parametrize("num_optimizers", [1, 2])
def test_gradients_assigned_by_hand_belong_together_as_the_optimizers_step(num_optimizers):
    model = Chosen(a=1, b=1)
    optimizers = [SGD([model.a], lr=0.1), SGD([model.b], lr=0.1)] if num_optimizers == 2 else [SGD(model.parameters())]
    watcher, sink = watch(model)
    for i in range(1, 5):
        model.a.grad, model.b.grad = torch.tensor([1.0 * i]), torch.tensor([10.0 * i])
        for optimizer in optimizers:
            optimizer.step()
    snapshot = samples(watcher, sink)
    assert snapshot.steps.tolist() == [1, 2, 3, 4]
    assert of(snapshot, "a", "grad_norm_clipped").tolist() == [1, 2, 3, 4]
    assert of(snapshot, "b", "grad_norm_clipped").tolist() == [10, 20, 30, 40]
    assert of(snapshot, "a", "grad_norm").tolist() == [1, 2, 3, 4]


def test_clipping_through_data_is_seen_whatever_the_cadences_are():
    """sample_every does not divide log_every, so the last sample of a window is not at the step of the flush."""
    model = Chosen(a=1)
    optimizer = SGD(model.parameters(), lr=0.1)
    watcher, sink = watch(model, sample_every=3, log_every=7)
    for i in range(42):
        optimizer.zero_grad()
        model.loss(a=[10]).backward()
        if i > 14:
            model.a.grad.data.mul_(0.1)
        optimizer.step()
    snapshot = samples(watcher, sink)
    received = of(snapshot, "a", "grad_norm_clipped")
    assert received[:5].tolist() == [10] * 5  # steps 3 to 15
    assert received[6:].tolist() == [pytest.approx(1)] * 8  # from step 21: the last sample of the third window


def test_rows_that_follow_each_other_closely_compare_every_gradient_in_turn(monkeypatch):
    """Comparing every gradient for every row would be a second pass over the gradients at every step."""
    compared = []

    def counting(gradients, **more):
        compared.append(len(gradients))
        return measure_received(gradients, **more)

    monkeypatch.setattr("wandb_gradwatch._capture.measurer.measure_received", counting)
    model = Chosen(a=1, b=1, c=1, d=1)
    optimizer = SGD(model.parameters(), lr=0.1)
    watcher, sink = watch(model, log_every=1)
    for i in range(70):
        optimizer.zero_grad()
        model.loss(a=[10], b=[10], c=[10], d=[10]).backward()
        if i >= 20:
            model.c.grad.data.mul_(0.1)
        optimizer.step()
    received = of(samples(watcher, sink), "c", "grad_norm_clipped")
    assert compared[:6] == [4, 4, 4, 1, 1, 1]  # steps 1 to 3; 8, 13 and 18
    assert received[:20].tolist() == [10] * 20
    assert received[40:].tolist() == [pytest.approx(1)] * 30  # one of four per row: c was compared within 20 steps


def test_another_default_device_changes_nothing():
    """The package's own tensors have explicit devices, whatever torch.set_default_device() has set."""
    model = Chosen(a=1, b=1)
    optimizer = SGD(model.parameters(), lr=0.1)
    with torch.device("meta"):
        watcher, sink = watch(model, log_every=2, histogram_every=1)
        for _ in range(4):
            optimizer.zero_grad()
            (3 * model.a.sum() + 4 * model.b.sum()).backward()
            optimizer.step()
        snapshot = samples(watcher, sink)
    assert snapshot.total_grad_norm.tolist() == [5] * 4
    assert snapshot.histogram is not None
    assert snapshot.histogram.sum() == 8


def test_master_weights_own_what_is_added_too():
    model = nn.ModuleDict({"a": Chosen(p=1)})
    optimizer = SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    watcher, sink = watch(model, optimizer=optimizer)
    for number in (1, 2, 3, 4):
        if number == 3:
            model["b"] = Chosen(p=1)
        sum(one.loss(p=[number]) for one in model.values()).backward()
        optimizer.step()
        model.zero_grad()
    snapshot = samples(watcher, sink)
    assert snapshot.steps.tolist() == [1, 2, 3, 4]
    assert of(snapshot, "a.p", "grad_norm_clipped").tolist() == [1, 2, 3, 4]
    assert of(snapshot, "b.p", "grad_norm_clipped")[2:].tolist() == [3, 4]


def test_names_move_from_one_optimizer_to_another():
    model = nn.ModuleDict({"a": Chosen(p=1), "b": Chosen(p=1)})
    often, seldom = (SGD(one.parameters(), lr=0.0) for one in model.values())
    watcher, sink = watch(model)
    for number in range(1, 5):
        if number == 2:
            model["a"], model["b"] = model["b"], model["a"]
        model.zero_grad()
        (model["a"].loss(p=[number]) + model["b"].loss(p=[10 * number])).backward()
        often.step()
        if number % 2:
            seldom.step()
    snapshot = samples(watcher, sink)
    nan = math.nan
    assert snapshot.steps.tolist() == [1, 2, 3, 4]
    np.testing.assert_array_equal(snapshot.grad_norm, [[1, 10], [nan, 20], [3, 30], [nan, 40]])


def test_a_late_step_that_is_skipped_joins_its_sample_like_any_other():
    model = Chosen(a=1, b=1)
    first, second = SGD([model.a], lr=0.0), SGD([model.b], lr=0.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
    watcher, sink = watch(model)
    for gradients, optimizers in (
        ({"a": [1], "b": [1]}, (first, second)),
        ({"a": [2], "b": [math.inf]}, (first,)),
        ({"a": [3]}, (first, second)),  # b still has the infinite gradient of the step before
    ):
        first.zero_grad()
        scaler.scale(model.loss(**gradients)).backward()
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
    assert samples(watcher, sink).steps.tolist() == [1, 2, 3]


def test_asking_for_the_newest_sample_makes_no_sample_of_a_backward_without_an_update():
    model = Chosen(a=1)
    optimizer = SGD(model.parameters(), lr=0.0)
    watcher, sink = watch(model)
    for gradient in (7, 8):  # backwards before the training, without an update
        model.zero_grad()
        model.loss(a=[gradient]).backward()
        assert watcher.latest is None
    for gradient in (1, 2):
        step(model, optimizer, a=[gradient])
    snapshot = samples(watcher, sink)
    assert snapshot.steps.tolist() == [1, 2]
    assert of(snapshot, "a", "grad_norm").tolist() == [1, 2]
    assert watcher.verdict().sentence == "no alert in 2 of 2 steps measured"


def test_clipping_through_data_is_seen_after_the_first_steps_were_skipped():
    model = Chosen(a=1)
    optimizer = SGD(model.parameters(), lr=0.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    watcher, sink = watch(model, log_every=100)
    for gradient in (math.inf, math.inf, math.inf, math.inf, 8, 8):
        optimizer.zero_grad()
        scaler.scale(model.loss(a=[gradient])).backward()
        scaler.unscale_(optimizer)
        model.a.grad.data.mul_(0.5)
        scaler.step(optimizer)
        scaler.update()
    snapshot = samples(watcher, sink)
    assert of(snapshot, "a", "grad_norm")[4:].tolist() == [8, 8]
    assert of(snapshot, "a", "grad_norm_clipped")[4:].tolist() == [4, 4]


def test_a_lazy_model_is_watched_before_its_first_forward():
    """Uninitialised parameters have no shape, and most functions of torch raise for them."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.LazyLinear(3), nn.Tanh(), nn.LazyLinear(1))
    watcher, sink = watch(model)
    model(batches()[0])  # the dry run that torch's documentation requires
    expected = train(model, SGD(model.parameters(), lr=0.1))
    snapshot = samples(watcher, sink)
    assert snapshot.names == tuple(name for name, _ in model.named_parameters())
    np.testing.assert_allclose(snapshot.grad_norm, expected, rtol=1e-5)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_a_scripted_model_is_watched_like_any_other():
    """Scripted modules keep their parameters in wrappers that have items() and keys() but cannot be iterated over."""
    model = torch.jit.script(mlp())
    watcher, sink = watch(model)
    expected, optimizer = [], SGD(model.parameters(), lr=0.1)
    for batch in batches():
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        expected.append([parameter.grad.double().norm().item() for parameter in model.parameters()])
        optimizer.step()
    snapshot = samples(watcher, sink)
    assert snapshot.names == tuple(name for name, _ in model.named_parameters())
    np.testing.assert_allclose(snapshot.grad_norm, expected, rtol=1e-5)


@pytest.mark.parametrize("every", [1, 3])
def test_backwards_for_several_tasks_before_the_first_step_are_no_updates(every):
    """PCGrad: five backwards, each reset before the next, whose gradients are combined for one step."""
    model = Chosen(a=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watcher, sink = watch(model, sample_every=every)
    for _ in range(6):
        gradients = []
        for task in range(1, 6):
            optimizer.zero_grad()
            model.loss(a=[task]).backward()
            gradients.append(model.a.grad.clone())
        model.a.grad = sum(gradients)  # 1 + 2 + 3 + 4 + 5
        optimizer.step()
    snapshot = samples(watcher, sink)
    assert watcher.step == 6
    assert snapshot.steps.tolist() == list(range(every, 7, every))
    assert (snapshot.total_grad_norm == 15).all()


def test_gradients_that_hooks_collect_elsewhere_are_measured_at_the_step():
    """Megatron's main_grad and offloading: hooks take each micro-batch's gradient, which is put back for the step."""
    model = Chosen(a=1, b=1)
    optimizer, held = torch.optim.SGD(model.parameters(), lr=0.1), {}

    def take(parameter):
        held[parameter] = held.get(parameter, 0) + parameter.grad
        parameter.grad = None

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(take)
    watcher, sink = watch(model)
    for _ in range(5):
        held.clear()
        for _ in range(4):
            model.loss(a=[3], b=[4]).backward()
        for parameter in model.parameters():
            parameter.grad = held[parameter]
        optimizer.step()
        optimizer.zero_grad()
    assert watcher.step == 5
    assert samples(watcher, sink).total_grad_norm.tolist() == [20] * 5  # 4 times 5


def test_parameters_that_move_within_an_optimizers_group_are_followed():
    """LISA: the optimizer's list always begins and ends with the same parameters."""
    model = Chosen(first=1, b=1, c=1, last=1)
    optimizer = torch.optim.SGD([model.first, model.b, model.last], lr=0.1)
    watcher, sink = watch(model)
    for middle in (model.b, model.b, model.c, model.c):
        optimizer.param_groups[0]["params"] = [model.first, middle, model.last]
        model.b.requires_grad_(middle is model.b)
        model.c.requires_grad_(middle is model.c)
        step(model, optimizer, first=[1], b=[2], c=[3], last=[1])
    present = samples(watcher, sink).present
    assert present[:, [1, 2]].tolist() == [[True, False]] * 2 + [[False, True]] * 2


def test_the_differences_that_an_outer_optimizer_uses_are_kept_out_of_the_series(caplog):
    """DiLoCo and Reptile: after some inner steps, the way back to where they began is the outer gradient."""
    model = Chosen(a=1)
    inner, outer = torch.optim.SGD(model.parameters(), lr=0.5), torch.optim.SGD(model.parameters(), lr=1.0)
    watcher, sink = watch(model)
    for _ in range(3):
        begin = model.a.detach().clone()
        for _ in range(2):
            step(model, inner, a=[4])
        with torch.no_grad():
            model.a.grad, moved = begin - model.a, model.a.detach().clone()
            model.a.copy_(begin)
        assert moved.item() == begin.item() - 4  # two steps of 0.5 * 4
        outer.step()
    snapshot = samples(watcher, sink)
    assert snapshot.total_grad_norm.tolist() == [4, 4] * 3  # the inner gradients, not the ways of 4 between them
    assert watcher.step == 6
    assert sum("its gradients are not in the series" in text for text in caplog.messages) == 1


def test_a_parameter_that_is_updated_by_hand_beside_an_optimizer_is_not_called_one_without_gradient():
    """Dual ascent, a temperature: it has a gradient, but no optimizer uses it."""
    model = Chosen(multiplier=1, a=300)
    optimizer = torch.optim.SGD([model.a], lr=1e-3)
    sink = MemorySink()
    with wandb_gradwatch.watch(model, sinks=[sink], sample_every=1):
        for number in range(20):
            model.zero_grad()
            model.loss(a=torch.full((300,), 0.1), multiplier=[0.5 + 0.01 * number]).backward()
            optimizer.step()
            with torch.no_grad():
                model.multiplier += 0.01 * model.multiplier.grad
    assert not [alert for alert in sink.alerts if alert.title == "No gradient"]


@pytest.mark.parametrize("every", [1, 2, 3, 5])
def test_a_new_optimizer_of_new_parameters_makes_its_first_step_at_once(every):
    """As when the best checkpoint is loaded with assign=True: the old hooks see nothing of the first backward."""
    model = Chosen(a=1)
    watcher, sink = watch(model, sample_every=every)
    for number in range(24):
        if number % 7 == 0:
            model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step(model, optimizer, a=[number + 1])
    assert watcher.step == 24
    snapshot = samples(watcher, sink)
    # The gradient of a new parameter may have been clipped before it was first seen: its norm is missing.
    expected = [math.nan if number % 7 == 1 else number for number in snapshot.steps.tolist()]
    np.testing.assert_array_equal(snapshot.total_grad_norm, expected)


def test_a_script_that_makes_numpy_raise_loses_no_rule(caplog):
    """Gradients of 1e-120, which float32 cannot hold: rules compute with norms that underflow."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with np.errstate(all="raise"), wandb_gradwatch.watch(model, sinks=[MemorySink()], sample_every=1, backend="cpu"):
        for _ in range(3):
            optimizer.zero_grad()
            (model(torch.randn(16, 8, dtype=torch.float64)).pow(2).mean() * 1e-120).backward()
            optimizer.step()
    assert not [record for record in caplog.records if record.exc_info], caplog.text


def test_a_backward_that_is_called_by_an_earlier_name_is_measured_where_its_gradients_are_used(caplog):
    model = Chosen(a=1)
    optimizer = SGD(model.parameters(), lr=0.0)
    unseen = torch.autograd.backward
    watcher, sink = watch(model)
    for number in range(1, 6):
        optimizer.zero_grad()
        for _ in range(2):
            unseen(model.loss(a=[3 * number]))
        nn.utils.clip_grad_norm_(model.parameters(), 1.5)
        optimizer.step()
    snapshot = samples(watcher, sink)
    assert snapshot.total_grad_norm.tolist() == [6, 12, 18, 24, 30]
    np.testing.assert_allclose(of(snapshot, "a", "grad_norm_clipped"), 1.5, rtol=1e-5)
    assert caplog.text.count("was not called as torch.autograd.backward") == 1


def test_a_backward_that_raises_is_no_part_of_the_next_one(caplog):
    model = Chosen(a=1, b=1)
    optimizer = SGD(model.parameters(), lr=0.0)
    watcher, sink = watch(model)

    class Raises(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            raise MemoryError("in the backward")

    for number in range(1, 6):
        optimizer.zero_grad()
        if number == 3:
            with pytest.raises(MemoryError):
                (model.loss(a=[50]) + Raises.apply(model.loss(b=[50]))).backward()
            optimizer.zero_grad()
        model.loss(a=[number]).backward()
        optimizer.step()
    snapshot = samples(watcher, sink)
    assert snapshot.steps.tolist() == [1, 2, 3, 4, 5]
    assert snapshot.total_grad_norm.tolist() == [1, 2, 3, 4, 5]
    assert np.isnan(of(snapshot, "b", "grad_norm")).all()
    assert "was not called as" not in caplog.text


def test_what_others_put_around_the_backward_stays_and_each_backward_counts_once():
    original = torch.autograd.backward
    model, called = Chosen(a=1), []
    optimizer = SGD(model.parameters(), lr=0.0)
    watcher, _ = watch(model)
    ours = torch.autograd.backward

    def theirs(*args, **kwargs):
        called.append(len(called))
        return ours(*args, **kwargs)

    torch.autograd.backward = theirs
    try:
        watcher.remove()
        assert torch.autograd.backward is theirs
        watcher, sink = watch(model)
        for number in range(1, 4):
            step(model, optimizer, a=[number])
        assert samples(watcher, sink).total_grad_norm.tolist() == [1, 2, 3]
        assert called == [0, 1, 2]
        assert torch.autograd.backward is theirs
    finally:
        torch.autograd.backward = original
