"""Models and optimizers that step in turn: every row has the total norm of each."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from gradients import Chosen, watch
from torch import nn

from wandb_gradwatch.sinks._history_row import HistoryRow

SGD = torch.optim.SGD
LAST, LARGEST = "gradwatch/grad_norm_total/", "gradwatch/grad_norm_total_max/"


def totals(snapshot):
    """Last and largest norm of each part, by name."""
    row = HistoryRow.of(snapshot).scalars()
    names = [key.removeprefix(LAST) for key in row if key.startswith(LAST)]
    return {name: (row[LAST + name], row[LARGEST + name]) for name in names}


class Gan(nn.Module):
    def __init__(self, *, flat: bool) -> None:
        super().__init__()
        if flat:
            self.a, self.b = (nn.Parameter(torch.ones(1)) for _ in range(2))
        else:
            self.generator, self.critic = Chosen(p=1), Chosen(p=1)


@pytest.mark.parametrize("log_every", [2, 3, 4])
@pytest.mark.parametrize("kind", ["dict", "list", "modules", "parameters"])
def test_both_totals_of_a_gan_are_in_every_row_whatever_log_every_is(kind, log_every):
    gan = Gan(flat=kind == "parameters")
    first, second = list(gan.parameters())
    models = {
        "dict": {"generator": gan.generator, "critic": gan.critic} if kind == "dict" else None,
        "list": [gan.generator, gan.critic] if kind == "list" else None,
    }
    names = {"dict": ("generator", "critic"), "list": ("model0", "model1"), "modules": ("generator", "critic")}
    of_first, of_second = names.get(kind, ("optimizer0", "optimizer1"))
    optimizers = SGD([first], lr=0.0), SGD([second], lr=0.0)
    watcher, sink = watch(models.get(kind) or gan, log_every=log_every)
    for number in range(1, 13):  # the first has norms 1 to 12, the second 100 times those, in turn
        for scale, parameter, optimizer in zip((1, 100), (first, second), optimizers, strict=True):
            optimizer.zero_grad()
            (parameter * number * scale).sum().backward()
            optimizer.step()
    watcher.remove()
    for end, snapshot in enumerate(sink.snapshots, 1):
        newest = end * log_every  # samples 1, 3, 5 are of the first, 2, 4, 6 of the second
        last = {of_first: (newest + 1) // 2, of_second: newest // 2 * 100}
        assert totals(snapshot) == {name: (value, value) for name, value in last.items()}
        norm = HistoryRow.of(snapshot).scalars()["gradwatch/grad_norm"]
        assert norm == (last[of_second] if newest % 2 == 0 else last[of_first])


def test_what_steps_together_is_one_total_unless_it_is_of_several_models():
    for models, expected in ((lambda pair: nn.ModuleDict(pair), {}), (dict, {"a": (3, 3), "b": (4, 4)})):
        pair = {"a": Chosen(p=1), "b": Chosen(p=1)}
        optimizers = [SGD(model.parameters(), lr=0.0) for model in pair.values()]
        watched = models(pair)
        watcher, sink = watch(watched, log_every=2)
        for _ in range(2):
            for optimizer in optimizers:
                optimizer.zero_grad()
            (pair["a"].loss(p=[3.0]) + pair["b"].loss(p=[4.0])).backward()
            for optimizer in optimizers:
                optimizer.step()
        watcher.remove()
        assert totals(sink.snapshots[-1]) == expected
        assert HistoryRow.of(sink.snapshots[-1]).scalars()["gradwatch/grad_norm"] == 5


def test_rows_of_windows_of_one_model_each_keep_both_totals_when_they_are_logged_as_one():
    pair = {"a": Chosen(p=1), "b": Chosen(p=1)}
    watcher, sink = watch(pair, log_every=1)
    for number, model in enumerate([*pair.values()] * 2, 1):
        model.loss(p=[float(number)]).backward()
        SGD(model.parameters(), lr=0.0).step()
        model.zero_grad()
    watcher.remove()
    rows = [HistoryRow.of(snapshot) for snapshot in sink.snapshots]
    merged = rows[0].merge(rows[1]).merge(rows[2]).merge(rows[3]).scalars()
    assert [merged[LAST + name] for name in "ab"] == [3, 4]
    assert not any(math.isnan(value) for value in merged.values())
    assert np.isfinite(merged["gradwatch/grad_norm"])


def test_the_first_sample_of_several_optimizers_has_all_networks_though_gradients_were_reset_before_it():
    pair = nn.ModuleDict({"a": Chosen(p=1), "b": Chosen(p=1)})
    first, second = (SGD(model.parameters(), lr=0.0) for model in pair.values())
    watcher, sink = watch(pair)
    for _ in range(3):
        first.zero_grad()
        (pair["a"].loss(p=[3.0]) + pair["b"].loss(p=[100.0])).backward()  # as an actor's loss flows through its critic
        second.zero_grad()
        pair["b"].loss(p=[4.0]).backward()
        first.step()
        second.step()
    watcher.remove()
    merged = sink.merged()
    assert merged is not None
    assert merged.steps.tolist() == [1, 2, 3]
    assert merged.total_grad_norm.tolist() == [5, 5, 5]


def test_gradients_whose_optimizer_has_not_stepped_yet_are_not_said_to_be_missing(caplog):
    model = nn.ModuleList([Chosen(p=1), Chosen(p=1)])
    first, second = (SGD(one.parameters(), lr=0.0) for one in model)
    watcher, sink = watch(model, rules=None, sample_every=1)
    for step in range(1, 301):
        model.zero_grad()
        sum(3 * one.p.sum() for one in model).backward()
        (first if step <= 150 else second).step()
    watcher.remove()
    assert [alert.title for alert in sink.alerts if alert.title == "No gradient"] == []
    [said] = [record.getMessage() for record in caplog.records if "have not been used" in record.getMessage()]
    assert "the gradients of 1.p have not been used in 100 measured steps" in said


@pytest.mark.parametrize("every", [2, 3])
def test_an_optimizer_may_step_for_the_first_time_after_another_one(every: int) -> None:
    """Its slots have no owner yet when the other optimizer steps: the sample waits for it until the next backward."""
    model = nn.ModuleList([Chosen(p=1), Chosen(p=1)])
    watcher, sink = watch(model, sample_every=1)
    often, seldom = (SGD(one.parameters(), lr=0.0) for one in model)
    for step in range(1, 7):
        often.zero_grad()
        seldom.zero_grad()
        sum(3 * one.p.sum() for one in model).backward()
        often.step()
        if step % every == 0:
            seldom.step()
        assert watcher.step == step or step > every  # from then on, the sample waits for both until the next backward
    watcher.remove()
    expected = [math.hypot(3, 3 if step % every == 0 else 0) for step in range(1, 7)]
    assert sink.merged().total_grad_norm.tolist() == pytest.approx(expected)
