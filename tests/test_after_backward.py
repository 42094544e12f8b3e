"""Gradients that change between the backward and the step are measured: NaN is counted, checked and reported."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from gradients import Chosen, of, only, samples, step, watch
from torch.optim.optimizer import register_optimizer_step_pre_hook


def everything_nan(model):
    for parameter in model.parameters():
        parameter.grad.div_(0.0).mul_(0.0)  # Inf * 0, and 0 / 0 for elements of 0


def one_nan(model):
    model.a.grad[0] = math.nan


def one_inf(model):
    model.b.grad[1] = math.inf


BROKEN = {  # (NaN in a, NaN in b, Inf in a, Inf in b) of gradients with 2 and 3 elements
    everything_nan: (2, 3, 0, 0),
    one_nan: (1, 0, 0, 0),
    one_inf: (0, 0, 0, 1),
}
OPTIMIZERS = {
    "for loop": {"foreach": False, "fused": False},
    "foreach": {"foreach": True, "fused": False},
    "fused": {"foreach": False, "fused": True},
}
GRADIENTS = {"a": [3, -4], "b": [0, 0, 12]}  # norm 13


def counts(snapshot):
    return np.stack([of(snapshot, name, what) for what in ("num_nan", "num_inf") for name in "ab"], axis=1).tolist()


@pytest.mark.parametrize("breaks", BROKEN)
@pytest.mark.parametrize("when", ["no scaler", "before unscale_", "after unscale_", "scaler unscales"])
@pytest.mark.parametrize("variant", OPTIMIZERS)
def test_nan_that_arises_after_the_backward_is_counted_at_its_step_and_told_as_such(breaks, when, variant):
    model = Chosen(a=2, b=3)
    optimizer = torch.optim.Adam(model.parameters(), **OPTIMIZERS[variant])
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, enabled=when != "no scaler")
    alerts = []
    watcher, sink = watch(model, rules=[only("nan_gradient", "inf_gradient")], on_alert=alerts.append)
    for number in range(1, 4):
        optimizer.zero_grad()
        scaler.scale(model.loss(**GRADIENTS)).backward()
        if when == "after unscale_":
            scaler.unscale_(optimizer)
        if number == 2:
            breaks(model)
        if when == "before unscale_":
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
    snapshot = samples(watcher, sink)
    assert snapshot.total_grad_norm == pytest.approx([13, 13, 13])
    assert counts(snapshot) == [[0] * 4, list(BROKEN[breaks]), [0] * 4]
    applied = when in ("no scaler", "after unscale_")  # a scaler that checks after the change skips the step
    assert snapshot.skipped.tolist() == [False, not applied, False]
    kind = "inf_gradient" if breaks is one_inf else "nan_gradient"
    assert [(alert.incident.kind, alert.step) for alert in alerts] == ([(kind, 2)] if applied else [])
    assert all(alert.incident.cause == "code_after_backward" for alert in alerts)


def test_a_nan_of_the_backward_that_clipping_spreads_is_counted_where_it_was():
    model = Chosen(a=2, b=3)
    alerts = []
    watcher, sink = watch(model, rules=[only("nan_gradient")], on_alert=alerts.append)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    model.loss(a=[3, 4], b=[1, math.nan, 2]).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # the norm is NaN, so clipping makes every element NaN
    optimizer.step()
    snapshot = samples(watcher, sink)
    assert counts(snapshot) == [[0, 1, 0, 0]]
    assert alerts[0].incident.cause != "code_after_backward"


@pytest.mark.parametrize("variant", OPTIMIZERS)
@pytest.mark.parametrize("sample_every", [1, 100])
@pytest.mark.parametrize("breaks", BROKEN)
def test_the_guard_leaves_out_what_became_nan_after_the_backward(breaks, sample_every, variant):
    model = Chosen(a=2, b=3)
    optimizer = torch.optim.Adam(model.parameters(), **OPTIMIZERS[variant])
    watcher, _ = watch(model, guard="skip", sample_every=sample_every)
    step(model, optimizer, **GRADIENTS)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    optimizer.zero_grad()
    model.loss(**GRADIENTS).backward()
    breaks(model)
    optimizer.step()
    assert all(map(torch.equal, before, model.parameters()))
    step(model, optimizer, **GRADIENTS)
    assert not any(map(torch.equal, before, model.parameters()))
    assert all(parameter.isfinite().all() for parameter in model.parameters())
    watcher.remove()


def clip_to_one_half(optimizer, *_):
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    torch.nn.utils.clip_grad_norm_(parameters, 0.5)


def hooked_itself(optimizer):
    return optimizer.register_step_pre_hook(clip_to_one_half)


def hooked_globally(_):
    return register_optimizer_step_pre_hook(clip_to_one_half)


@pytest.mark.parametrize("hook", [hooked_itself, hooked_globally])
def test_what_a_step_pre_hook_of_the_users_does_comes_before_the_step(hook):
    model = Chosen(a=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    watcher, sink = watch(model)
    handle = hook(optimizer)
    for _ in range(3):
        step(model, optimizer, a=[4, 0])
    handle.remove()
    step(model, optimizer, a=[4, 0])
    assert not optimizer._optimizer_step_pre_hooks  # the package's hook exists during a step only
    snapshot = samples(watcher, sink)
    assert snapshot.total_grad_norm.tolist() == [4] * 4
    assert snapshot.total_grad_norm_clipped == pytest.approx([0.5, 0.5, 0.5, 4])
    assert snapshot.clipped.tolist() == [1, 1, 1, 0]


def test_a_guard_withholds_what_the_users_hook_breaks_and_a_step_that_raises_leaves_no_hook():
    model = Chosen(a=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    watcher, _ = watch(model, guard="skip")

    def break_it(*_):
        model.a.grad.fill_(math.nan)

    with optimizer.register_step_pre_hook(break_it):
        step(model, optimizer, a=[4, 0])
    assert model.a.tolist() == [1, 1]

    def raise_it(*_):
        raise ValueError("the user's own")

    with optimizer.register_step_pre_hook(raise_it), pytest.raises(ValueError, match="the user's own"):
        step(model, optimizer, a=[4, 0])
    step(model, optimizer, a=[1, 0])
    assert not optimizer._optimizer_step_pre_hooks
    assert model.a.tolist() == [0, 1]
    watcher.remove()
