"""Gradients assigned to `.grad` without a backward are measured, checked and guarded at the step."""

from __future__ import annotations

import gc
import math

import numpy as np
import pytest
import torch
from gradients import Chosen, of, only, samples, step, watch
from torch import nn

import wandb_gradwatch
from wandb_gradwatch.sinks._history_row import HistoryRow

VALUES = {"a": [3.0, 4.0], "b": [12.0]}


def by_autograd_grad(model, scale):
    names, parameters = zip(*model.named_parameters(), strict=True)
    loss = scale * model.loss(**{name: VALUES[name] for name in names})
    for parameter, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
        parameter.grad = gradient


def by_func_grad(model, scale):
    def loss(parameters):
        return scale * sum((parameters[name] * torch.tensor(VALUES[name])).sum() for name in parameters)

    values = {name: parameter.detach() for name, parameter in model.named_parameters()}
    for name, gradient in torch.func.grad(loss)(values).items():
        model.get_parameter(name).grad = gradient


def in_place(model, scale):  # as evolution strategies do, and others that keep the tensors
    for name, parameter in model.named_parameters():
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        parameter.grad.zero_().add_(torch.tensor(VALUES[name]), alpha=scale)


def in_inference_mode(model, scale):  # of which torch counts no versions
    with torch.inference_mode():
        for name, parameter in model.named_parameters():
            parameter.grad = scale * torch.tensor(VALUES[name])


PUTS = [by_autograd_grad, by_func_grad, in_place, in_inference_mode]
WAYS = pytest.mark.parametrize("put", PUTS, ids=lambda put: put.__name__)
FUSED = pytest.mark.parametrize("fused", [False, True], ids=["for loop", "fused"])


@WAYS
def test_without_an_optimizer_they_are_measured_when_the_user_says_that_an_update_was_made(put):
    model = Chosen(a=2, b=1)
    watcher, sink = watch(model, sample_every=1, rules=None)
    for number in range(1, 7):
        put(model, number)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.01 * parameter.grad
        watcher.mark_step()
    snapshot = samples(watcher, sink)
    assert snapshot.total_grad_norm == pytest.approx([13 * number for number in range(1, 7)])
    assert snapshot.total_grad_norm_clipped == pytest.approx(snapshot.total_grad_norm)
    assert not sink.alerts


@pytest.mark.parametrize(("num_updates", "is_said"), [(1, False), (50, True)], ids=["a checkpoint", "a training"])
def test_a_training_of_which_nothing_is_seen_is_told_at_the_end(num_updates, is_said, said):
    model = Chosen(a=2, b=1)
    watcher, sink = watch(model)
    for _ in range(num_updates):
        parameters = tuple(model.parameters())
        gradients = torch.autograd.grad(model.loss(a=[3.0, 4.0], b=[12.0]), parameters)
        with torch.no_grad():
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter -= 0.01 * gradient
    watcher.remove()
    assert any("the model is trained, but no gradient was seen" in text for text in said()) is is_said
    assert not sink.snapshots


@pytest.mark.parametrize(
    ("num_steps", "own_step_at", "is_said"), [(99, None, False), (250, None, True), (250, 50, False)]
)
def test_the_training_of_a_copy_is_told_once(num_steps, own_step_at, is_said, said):
    model, copy = Chosen(a=2), Chosen(a=2)
    watcher, _ = watch(model, sample_every=None)
    own, others = (torch.optim.SGD(one.parameters(), lr=0.1) for one in (model, copy))
    for number in range(num_steps):
        step(copy, others, a=[3.0, 4.0])
        if number == own_step_at:  # a generator whose critic came first
            step(model, own, a=[3.0, 4.0])
    assert sum("no backward has reached the watched model" in text for text in said()) == is_said
    watcher.remove()


def by_remove(watcher, models, run):
    watcher.remove()


def by_the_end_of_the_model(watcher, models, run):
    models.clear()
    gc.collect()


def by_the_end_of_the_run(watcher, models, run):
    run.finish()


@pytest.mark.parametrize("end", [by_remove, by_the_end_of_the_model, by_the_end_of_the_run])
@pytest.mark.parametrize("num_steps", [0, 1, 60])
def test_the_training_of_a_copy_is_told_at_the_end_of_a_short_run_too(num_steps, end, offline_run, said):
    models, copy = [Chosen(a=2)], Chosen(a=2)
    watcher = wandb_gradwatch.watch(models[0], run=offline_run)
    others = torch.optim.SGD(copy.parameters(), lr=0.1)
    for _ in range(num_steps):
        step(copy, others, a=[3.0, 4.0])
    end(watcher, models, offline_run)
    watcher.remove()
    texts = [text for text in said() if "no backward has reached the watched model" in text]
    steps = {0: [], 1: ["1 optimizer step has been made"], 60: ["60 optimizer steps have been made"]}[num_steps]
    assert len(texts) == len(steps)
    assert all(words in text for words, text in zip(steps, texts, strict=True))


def test_an_optimizer_without_the_model_is_told_at_the_end_of_a_single_step_too():
    model, copy = Chosen(a=2), Chosen(a=2)
    watcher, sink = watch(model)
    model.loss(a=[3.0, 4.0]).backward()
    torch.optim.SGD(copy.parameters(), lr=0.1).step()
    watcher.remove()
    assert [alert.title for alert in sink.alerts] == ["Optimizer without the model"]


@WAYS
@FUSED
@pytest.mark.parametrize("sample_every", [1, 2])
def test_they_are_measured_and_told_when_they_are_first_seen(put, fused, sample_every, said):
    model = Chosen(a=2, b=1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.0, fused=fused)
    watcher, sink = watch(model, sample_every=sample_every)
    for number in range(1, 7):
        put(model, number)
        optimizer.step()
        if put is not in_place:
            optimizer.zero_grad()
    snapshot = samples(watcher, sink)
    steps = list(range(sample_every, 7, sample_every))
    assert snapshot.steps.tolist() == steps
    assert of(snapshot, "a", "grad_norm").tolist() == [5 * number for number in steps]
    assert snapshot.total_grad_norm == pytest.approx([13 * number for number in steps])
    assert snapshot.total_grad_norm_clipped == pytest.approx([13 * number for number in steps])
    told = [text for text in said() if "assigned to .grad without a backward" in text]
    assert [text for text in told if "times in all" not in text] == told[:1] != []


@FUSED
def test_a_loss_scale_is_divided_out_and_what_is_clipped_after_it_is_seen(fused):
    model = Chosen(a=2, b=1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.0, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    watcher, sink = watch(model)
    for clips in (False, True):
        parameters = list(model.parameters())
        gradients = torch.autograd.grad(scaler.scale(model.loss(**VALUES)), parameters)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        if clips:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(parameters, 1.0)
        scaler.step(optimizer)
        scaler.update()
    snapshot = samples(watcher, sink)
    assert snapshot.total_grad_norm == pytest.approx([13, 13])
    assert snapshot.total_grad_norm_clipped == pytest.approx([13, 1])


@WAYS
@FUSED
@pytest.mark.parametrize("sample_every", [1, 1000])
def test_a_spike_is_left_out_by_the_guard(put, fused, sample_every):
    model = Chosen(a=2, b=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, fused=fused)
    watcher, _ = watch(model, guard="skip", sample_every=sample_every)
    for number in range(40):
        before = model.a.detach().clone()
        put(model, 1e6 if number == 30 else 1 + number % 3 / 10)
        optimizer.step()
        assert torch.equal(before, model.a) == (number == 30)
    watcher.remove()


def test_a_spike_is_alerted():
    model = Chosen(a=2, b=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    alerts = []
    watcher, _ = watch(model, rules=[only("exploding_gradient")], on_alert=alerts.append)
    for number in range(1, 41):
        by_autograd_grad(model, 1e6 if number == 31 else 1 + number % 3 / 10)
        optimizer.step()
    watcher.remove()
    assert alerts[0].step == 31


def test_some_by_hand_and_some_by_a_backward():
    model = Chosen(a=2, b=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    watcher, sink = watch(model)
    step(model, optimizer, **VALUES)
    for _ in range(2):
        optimizer.zero_grad()
        model.loss(a=[3, 4]).backward()
        model.b.grad = torch.tensor([12.0])
        optimizer.step()
    snapshot = samples(watcher, sink)
    assert snapshot.total_grad_norm.tolist() == [13, 13, 13]


def test_what_was_there_before_watch_and_what_zero_grad_left_is_none():
    """Gradients that exist before watch() may be clipped already; zeros among them are left over from zero_grad()."""
    model = Chosen(a=2, b=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    model.loss(**VALUES).backward()
    watcher, sink = watch(model)
    for parameter in model.parameters():
        parameter.grad.mul_(1 / 13)
    for _ in range(2):
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    snapshot = samples(watcher, sink)
    np.testing.assert_equal(snapshot.total_grad_norm, [np.nan, np.nan])


def test_a_swapped_tensor_is_not_taken_for_one_that_the_user_fills():
    model, other = Chosen(a=2, b=1), Chosen(a=2, b=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    watcher, sink = watch(model)
    for _ in range(5):
        step(model, optimizer, **VALUES)
    for mine, new in zip(model.parameters(), other.parameters(), strict=True):
        mine.grad = None
        torch.utils.swap_tensors(mine, new)
    for clips in (False, True, True):
        optimizer.zero_grad()
        model.loss(**VALUES).backward()
        if clips:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    assert samples(watcher, sink).total_grad_norm.tolist() == [13] * 8


@pytest.mark.parametrize("skip", [False, True])
def test_in_ignite_they_are_judged_and_left_out(skip):
    pytest.importorskip("ignite")
    from ignite.engine import Engine

    from wandb_gradwatch.integrations.ignite import GradWatch

    model = Chosen(a=2, b=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    flags = []

    def train(engine, scale):
        by_autograd_grad(model, scale)
        optimizer.step()
        flags.append(engine.state.unhealthy_spike)

    engine = Engine(train)
    GradWatch(model, max_norm=20.0, skip=skip).attach(engine)
    state = engine.run([1.0, 12.0])
    assert flags == [False, True]
    assert state.metrics["grad_norm"] == 156  # 12 * 13
    assert model.b.item() == (1 - 12 if skip else 1 - 12 - 144)


def test_a_frozen_parameter_made_in_inference_mode_is_none_of_the_steps_business():
    model = Chosen(a=2, b=1)
    with torch.inference_mode():
        model.b = nn.Parameter(torch.ones(1), requires_grad=False)
    optimizer = torch.optim.SGD([model.a], lr=0.0)
    watcher, sink = watch(model)
    for _ in range(3):
        step(model, optimizer, a=VALUES["a"])
    assert samples(watcher, sink).total_grad_norm.tolist() == [5, 5, 5]


@pytest.mark.parametrize("sample_every", [1, 2])
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("limit", [None, 0.5])
@pytest.mark.parametrize("to_none", [True, False])
def test_what_replaces_the_gradients_of_several_backwards_is_the_gradient(to_none, limit, scaled, sample_every):
    """Return PCGrad's gradient: the sum of the tasks' gradients without the component against the other task."""
    model = Chosen(a=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, enabled=scaled)
    watcher, sink = watch(model, sample_every=sample_every)
    for number in range(1, 5):
        tasks = []
        for task in ([number, 0.0], [-number, number]):
            optimizer.zero_grad(set_to_none=to_none)
            scaler.scale(model.loss(a=task)).backward()
            tasks.append(model.a.grad.clone())
        one, other = tasks
        model.a.grad = (one - one @ other / (other @ other) * other) + (other - other @ one / (one @ one) * one)
        if limit is not None:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), limit)
        scaler.step(optimizer)
        scaler.update()
    snapshot = samples(watcher, sink)
    # Of (1, 0) and (-1, 1): (1, 0) + (-1, 1) / 2 = (1/2, 1/2), and (-1, 1) + (1, 0) = (0, 1); the sum is (1/2, 3/2).
    norms = [2.5**0.5 * number for number in range(sample_every, 5, sample_every)]
    assert snapshot.steps.tolist() == list(range(sample_every, 5, sample_every))
    assert snapshot.total_grad_norm == pytest.approx(norms)
    assert snapshot.total_grad_norm_clipped == pytest.approx([limit or norm for norm in norms], rel=1e-5)
    assert snapshot.clip_ratio == (limit is not None)
    assert not np.any(snapshot.changed == 1)


def test_a_guard_judges_what_replaces_the_gradients_of_several_backwards():
    model = Chosen(a=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    watcher, _ = watch(model, guard=wandb_gradwatch.SkipGuard(threshold=100.0))
    for factor in (1.0, 1000.0):
        before = model.a.tolist()
        total = torch.zeros(2)
        for _ in range(2):
            optimizer.zero_grad()
            model.loss(a=[3.0, 4.0]).backward()
            total += factor * model.a.grad
        model.a.grad = total
        optimizer.step()
        assert (model.a.tolist() == before) == (factor > 1)
    watcher.remove()


def line_searches(model, points, *, bad=()):
    """Evaluate a loss of 1e6 * (a - 1)^2 at these points, as a fit by scipy or BoTorch does; NaN at the bad ones."""
    for point in points:
        with torch.no_grad():
            model.a.fill_(point)
        model.zero_grad()
        (1e6 * (model.a - (math.nan if point in bad else 1.0)).square().sum()).backward()


# Each search begins far outside, as one along a direction whose curvature is not known yet, and comes back.
POINTS = [0.0] + [1 + sign * far for sign in (1, -1) for far in (1e9, 1e5, 3.0, 0.1, 1e-3, 1e-6)] * 3


def test_trial_points_of_a_line_search_are_no_steps_of_an_optimizer_and_are_said_once_per_process(said):
    for _ in range(3):
        model = Chosen(a=300)
        watcher, sink = watch(model, rules=None)
        line_searches(model, POINTS)
        watcher.remove()
        assert len(sink.merged()) == len(POINTS)
        assert not sink.alerts
        assert "gradwatch/inferred" not in HistoryRow.of(sink.merged()).scalars()
    assert len([text for text in said() if "no optimizer step was seen" in text]) == 1


def test_a_trial_point_that_is_not_finite_is_no_error_and_no_reason_to_lower_a_learning_rate():
    model = Chosen(a=300)
    watcher, sink = watch(model, rules=None)
    line_searches(model, [*POINTS, -7.0, 0.9, 0.99], bad=[-7.0])
    watcher.remove()
    [alert] = sink.alerts
    assert (alert.incident.kind, alert.level, alert.step) == ("nan_gradient", "WARN", len(POINTS) + 1)
    assert "learning rate" not in alert.text
    assert "clip" not in alert.text


def test_steps_that_the_user_marks_are_judged_like_those_of_an_optimizer():
    model = Chosen(a=300)
    watcher, sink = watch(model, rules=None)
    for point in POINTS:
        line_searches(model, [point])
        watcher.mark_step()
    watcher.remove()
    assert "exploding_gradient" in {alert.incident.kind for alert in sink.alerts}


def test_a_loop_that_never_calls_step_is_told_so_without_a_word_on_its_learning_rate():
    model = Chosen(a=300)
    watcher, sink = watch(model, rules=None)
    for _ in range(60):
        model.zero_grad()
        (model.a * torch.linspace(-1, 1, 300)).sum().backward()
    watcher.remove()
    [alert] = sink.alerts
    assert (alert.incident.kind, alert.incident.cause) == ("parameters_unchanged", "no_step")
    assert "learning rate" not in alert.text
