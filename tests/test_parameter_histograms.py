"""watch(log=...): histograms of parameters after each update, like those of wandb.watch."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from gradients import Chosen, watch
from offline import history

import wandb_gradwatch
from wandb_gradwatch._measure.columns import NUM_BINS, bins_of
from wandb_gradwatch.sinks._history_row import NUM_LOGGED_BINS, HistoryRow

GRADIENT = torch.tensor([0.5, -3.0, 1.0, 0.0])  # from ones, with a learning rate of 1: 0.5, 4, 0, 1


def counts(*values: float) -> list[int]:
    return np.bincount(bins_of(np.array(values)), minlength=NUM_BINS).tolist()


def trained(steps: int = 1, **options: Any) -> Any:
    model = Chosen(a=4)
    watcher, sink = watch(model, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for _ in range(steps):
        optimizer.zero_grad()
        model.loss(a=GRADIENT).backward()
        optimizer.step()
    watcher.remove()
    return sink.snapshots


def test_a_histogram_is_of_the_parameter_as_the_update_has_left_it() -> None:
    first, second = trained(2, log="all", histogram_every=1)
    assert first.metric_histograms["parameters/a"].counts.tolist() == counts(0.5, 4.0, 0.0, 1.0)
    assert second.metric_histograms["parameters/a"].counts.tolist() == counts(0.0, 7.0, -1.0, 1.0)
    assert (second.metric_histograms["parameters/a"].low, second.metric_histograms["parameters/a"].high) == (-1, 7)


@pytest.mark.parametrize(
    ("log", "gradients", "parameters"), [("gradients", True, False), ("parameters", False, True), ("all", True, True)]
)
def test_log_says_of_what_there_are_histograms_and_norms_stay(log: str, gradients: bool, parameters: bool) -> None:
    [snapshot] = trained(log=log)
    assert (snapshot.histogram is not None, bool(snapshot.metric_histograms)) == (gradients, parameters)
    assert snapshot.total_grad_norm[0] == math.sqrt(0.25 + 9 + 1)


def test_histograms_that_are_off_are_off_for_parameters_too() -> None:
    [snapshot] = trained(log="all", histogram_every=0)
    assert snapshot.metric_histograms == {}


def test_a_window_adds_up_what_histogram_every_takes_and_otherwise_shows_the_newest() -> None:
    [added] = trained(2, log="all", log_every=2, histogram_every=1)
    assert added.metric_histograms["parameters/a"].counts.tolist() == counts(0.5, 4, 0, 1, 0, 7, -1, 1)
    [newest] = trained(2, log="all", log_every=2)
    assert newest.metric_histograms["parameters/a"].counts.tolist() == counts(0, 7, -1, 1)


def test_nan_and_inf_are_in_no_bin() -> None:
    model = Chosen(a=4)
    watcher, sink = watch(model, log="parameters")
    model.loss(a=torch.tensor([math.nan, math.inf, 1.0, 0.5])).backward()
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    watcher.remove()
    assert sink.snapshots[0].metric_histograms["parameters/a"].counts.tolist() == counts(0.0, 0.5)


def test_an_update_by_hand_has_one_too() -> None:
    model = Chosen(a=4)
    watcher, sink = watch(model, log="all")
    model.loss(a=GRADIENT).backward()
    with torch.no_grad():
        model.a -= model.a.grad
    watcher.mark_step()
    watcher.remove()
    assert sink.snapshots[0].metric_histograms["parameters/a"].counts.tolist() == counts(0.5, 4.0, 0.0, 1.0)


def test_groups_have_the_histogram_of_their_parameters_together() -> None:
    model = Chosen(a=2, b=1)
    watcher, sink = watch(model, log="all")
    model.loss(a=[0.5, 0.0], b=[3.0]).backward()
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    watcher.remove()
    grouped = sink.snapshots[0].by_group(lambda _: "all.of")
    assert grouped.metric_histograms["parameters/all.of"].counts.tolist() == counts(0.5, 1.0, -2.0)
    assert "parameters/all/of" in HistoryRow.of(grouped).histograms


def test_w_and_b_gets_the_picture_under_the_key_of_wandb_watch_and_not_in_the_summary(offline_run: Any) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 2))
    watcher = wandb_gradwatch.watch(model, run=offline_run, log="all", sample_every=1, log_every=1)
    model(torch.ones(1, 3)).sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    watcher.remove()
    offline_run.finish()
    [row] = history(offline_run)
    for family in ("gradients", "parameters"):
        assert f"{family}/0/weight" not in set(offline_run.summary.keys())
        bins = row[f"{family}/0/weight.values"]
        assert len(bins) == NUM_LOGGED_BINS
        assert sum(bins) == 6


@pytest.mark.parametrize("log", [None, "weights", True, ("gradients",)])
def test_what_log_may_be_is_said_at_once(log: Any) -> None:
    with pytest.raises(ValueError, match=r'must be "gradients", "parameters" or "all"'):
        watch(Chosen(a=1), log=log)
