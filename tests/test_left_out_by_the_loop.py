"""A loop that discards gradients that are not finite: the NaN counts as a skipped step and is no error."""

from __future__ import annotations

import math

import pytest
import torch
from gradients import Chosen, only, watch
from torch import nn

from wandb_gradwatch.sinks._history_row import HistoryRow


def train(bad, *, set_to_none=True, guard=None, **options):
    """Ten batches of which some have a NaN; every update has the norm 5, clipped to 1."""
    model = Chosen(a=2, b=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    alerts = []
    rules = [only("nan_gradient", "loss_scale_collapse")]
    watcher, sink = watch(model, rules=rules, on_alert=alerts.append, guard=guard, **options)
    for number in range(10):
        model.loss(a=[3, 4], b=[math.nan if number in bad else 0]).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if norm.isfinite():
            optimizer.step()
        optimizer.zero_grad(set_to_none=set_to_none)
    num_steps = watcher.step
    watcher.remove()
    return sink.merged(), alerts, num_steps


@pytest.mark.parametrize("guard", [None, "skip"])
@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("bad", [{4}, {4, 6}, {9}, {0}, {0, 1}])
def test_the_nan_is_counted_told_and_no_update_is_lost(bad, set_to_none, guard):
    snapshot, alerts, num_steps = train(bad, set_to_none=set_to_none, guard=guard)
    good = ~snapshot.left_out
    assert num_steps == 10 - len(bad)
    assert snapshot.steps[good].tolist() == list(range(1, num_steps + 1))
    assert snapshot.total_grad_norm[good].tolist() == [5] * num_steps
    scalars = HistoryRow.of(snapshot).scalars()
    assert scalars["gradwatch/num_nan"] == scalars["gradwatch/num_skipped_steps"] == len(bad)
    first = min(bad) + 1  # the step that was to be made
    assert snapshot.steps[~good][0] == first
    assert [(alert.title, alert.step, alert.level) for alert in alerts] == [("NaN gradient", first, "WARN")]
    assert "left this step out" in alerts[0].text


def test_several_in_a_row_are_no_collapse_of_a_loss_scale():
    snapshot, alerts, _ = train({4, 5, 6})
    assert snapshot.num_nan.sum() == 3
    assert {alert.title for alert in alerts} == {"NaN gradient"}


def test_a_backward_that_is_dropped_although_it_is_finite_is_no_step():
    """As SAM's first one, or a probe of the user's."""
    model = Chosen(a=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    watcher, sink = watch(model)
    for _ in range(5):
        model.loss(a=[30, 40]).backward()
        optimizer.zero_grad()
        model.loss(a=[3, 4]).backward()
        optimizer.step()
        optimizer.zero_grad()
    watcher.remove()
    snapshot = sink.merged()
    assert snapshot.steps.tolist() == [1, 2, 3, 4, 5]
    assert snapshot.total_grad_norm.tolist() == [5] * 5
    assert not snapshot.skipped.any()


@pytest.mark.parametrize("log_every", [1, 50])
@pytest.mark.parametrize("bad", [True, False])
def test_a_loop_that_ends_at_a_nan_is_told_of_it_and_one_that_ends_within_an_update_has_no_more_samples(bad, log_every):
    model = Chosen(a=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    watcher, sink = watch(model, rules=[only("nan_gradient")], log_every=log_every)
    for _ in range(3):
        model.loss(a=[3, 4]).backward()
        optimizer.step()
        optimizer.zero_grad()
    model.loss(a=[math.nan if bad else 3, 4]).backward()
    watcher.remove()
    snapshot = sink.merged()
    assert snapshot.steps.tolist() == [1, 2, 3, 4][: 3 + bad]
    assert [(alert.title, alert.step, alert.level) for alert in sink.alerts] == [("NaN gradient", 4, "WARN")] * bad


def drop_all(model, optimizer):
    optimizer.zero_grad()


def drop_all_in_place(model, optimizer):
    optimizer.zero_grad(set_to_none=False)


def drop_the_bad_ones(model, optimizer):
    for parameter in model.parameters():
        if not parameter.grad.isfinite().all():
            parameter.grad = None


@pytest.mark.parametrize("guard", [None, "skip"])
@pytest.mark.parametrize("drop", [drop_all, drop_all_in_place, drop_the_bad_ones])
@pytest.mark.parametrize("bad", [{4}, {0, 5}])
def test_a_nan_that_the_loop_drops_before_a_step_is_counted_and_no_remedy_would_apply_it(drop, bad, guard):
    """The steps are made, with what is left: nothing, zeros, or the gradients of the other parameters."""
    model = Chosen(a=2, b=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    watcher, sink = watch(model, rules=None, guard=guard)
    for number in range(10):
        optimizer.zero_grad()
        model.loss(a=[3, 4], b=[math.nan if number in bad else 12]).backward()
        if number in bad:
            drop(model, optimizer)
        optimizer.step()
    watcher.remove()
    snapshot = sink.merged()
    assert snapshot.steps.tolist() == list(range(1, 11))
    assert [step - 1 for step in snapshot.steps[snapshot.total.num_nan[:, 0] > 0].tolist()] == sorted(bad)
    assert [norm for norm in snapshot.total_grad_norm if norm != 5] == [13] * (10 - len(bad))
    assert [(alert.title, alert.step) for alert in sink.alerts] == [("NaN gradient", min(bad) + 1)]
    assert "zero_grad" not in sink.alerts[0].text


def test_finite_gradients_that_are_dropped_before_the_step_are_in_no_row_and_no_histogram():
    model = Chosen(a=2, b=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    watcher, sink = watch(model, log_every=4, histogram_every=1)
    for number in range(4):
        optimizer.zero_grad()
        model.loss(a=[3, 4], b=[12]).backward()
        if number == 2:
            optimizer.zero_grad()
        optimizer.step()
    watcher.remove()
    snapshot = sink.merged()
    assert snapshot.present.all(axis=1).tolist() == [True, True, False, True]
    assert snapshot.histogram.sum() == 3 * 3
