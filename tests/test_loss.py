"""watcher.loss(value): the loss of each sample, of its own step, never read before the sample arrives."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from gradients import Chosen, watch

from wandb_gradwatch.rules import NonFiniteLoss, default_rules
from wandb_gradwatch.sinks._history_row import HistoryRow

LOSS, NUM_NONFINITE = "gradwatch/loss", "gradwatch/num_nonfinite_loss"


def trained(steps: Sequence[Sequence[Any]], *, share: bool = False, after: bool = False, **options: Any) -> Any:
    """The snapshots of a training whose steps are handed these values, one for each backward."""
    model = Chosen(a=1)
    watcher, sink = watch(model, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for values in steps:
        optimizer.zero_grad()
        for value in values:
            if not after:
                watcher.loss(value, is_share=share)
            model.loss(a=[1.0]).backward()
            if after:
                watcher.loss(value, is_share=share)
        optimizer.step()
    watcher.remove()
    return sink


@pytest.mark.parametrize("after", [False, True])
def test_a_loss_is_of_its_own_step_before_and_after_the_backward(after: bool) -> None:
    sink = trained([[3.0], [torch.tensor(2.5)], [torch.tensor([[0.25]], dtype=torch.float16)]], after=after)
    assert sink.merged().metrics[LOSS].tolist() == [3.0, 2.5, 0.25]
    assert [HistoryRow.of(snapshot).scalars()[LOSS] for snapshot in sink.snapshots] == [3.0, 2.5, 0.25]


def test_micro_batches_are_averaged_and_shares_are_added() -> None:
    # (1 + 2 + 6) / 3 = 3, and 1 + 2 + 6 = 9, in float64 whatever their dtype
    micros = [torch.tensor(value, dtype=torch.bfloat16) for value in (1.0, 2.0, 6.0)]
    assert trained([micros]).merged().metrics[LOSS].tolist() == [3.0]
    assert trained([micros], share=True).merged().metrics[LOSS].tolist() == [9.0]


def test_a_step_without_one_has_none_and_a_row_does_not_take_an_earlier_ones() -> None:
    for last, num_nonfinite in (([], 0), ([math.nan], 1)):
        [snapshot] = trained([[1.0], last], log_every=2).snapshots
        np.testing.assert_array_equal(snapshot.metrics[LOSS], [1.0, math.nan])
        row = HistoryRow.of(snapshot).scalars()
        assert LOSS not in row
        assert row[NUM_NONFINITE] == num_nonfinite


def test_only_samples_have_one_and_values_of_other_steps_are_not_kept() -> None:
    sink = trained([[float(step)] for step in range(1, 7)], sample_every=3, log_every=3)
    assert sink.merged().steps.tolist() == [3, 6]
    assert sink.merged().metrics[LOSS].tolist() == [3.0, 6.0]


def test_the_loss_of_the_next_step_is_not_that_of_a_sample_that_is_still_open() -> None:
    """Two optimizers, of which the second has stopped: a sample stays open until the next backward begins."""
    model = Chosen(a=1, b=1)
    watcher, sink = watch(model)
    optimizers = [torch.optim.SGD([parameter], lr=0.1) for parameter in (model.a, model.b)]
    for step in range(1, 5):
        watcher.loss(float(step))
        model.loss(a=[1.0], b=[1.0]).backward()
        for optimizer in optimizers[: 2 if step == 1 else 1]:
            optimizer.step()
    watcher.remove()
    assert sink.merged().metrics[LOSS].tolist() == [1.0, 2.0, 3.0, 4.0]


def test_what_the_caller_does_with_the_value_in_place_does_not_change_it() -> None:
    model = Chosen(a=1)
    watcher, sink = watch(model)
    value = torch.tensor(4.0, dtype=torch.float64)
    watcher.loss(value)
    value /= 2
    model.loss(a=[1.0]).backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    watcher.remove()
    assert sink.merged().metrics[LOSS].tolist() == [4.0]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_not_finite_is_missing_counted_and_told_with_its_step(value: float) -> None:
    sink = trained([[1.0], [2.0, torch.tensor(value)], [1.0]], rules=[NonFiniteLoss()])
    np.testing.assert_array_equal(sink.merged().metrics[LOSS], [1.0, math.nan, 1.0])
    assert sink.merged().metrics[NUM_NONFINITE].tolist() == [0, 1, 0]
    [alert] = sink.alerts
    assert (alert.title, alert.step, alert.level) == ("Non-finite loss", 2, "ERROR")


def test_finite_losses_and_none_at_all_are_no_alert() -> None:
    assert trained([[1e30]] * 3, rules=[NonFiniteLoss()]).alerts == deque()
    assert trained([[]] * 3, rules=[NonFiniteLoss()]).alerts == deque()
    assert any(isinstance(rule, NonFiniteLoss) for rule in default_rules())


@pytest.mark.parametrize(
    ("value", "error", "match"),
    [
        (torch.ones(2), ValueError, r"one real element, but got shape \[2\]"),
        (torch.ones(1, dtype=torch.complex64), ValueError, "complex64"),
        ("0.5", TypeError, "must be a tensor of one element, or a number"),
        (None, TypeError, "must be a tensor of one element, or a number"),
    ],
)
def test_what_is_no_loss_is_refused_at_once(value: Any, error: type[Exception], match: str) -> None:
    watcher, _ = watch(Chosen(a=1))
    with pytest.raises(error, match=match):
        watcher.loss(value)
    watcher.remove()


def test_a_removed_watcher_takes_nothing_and_says_nothing() -> None:
    watcher, _ = watch(Chosen(a=1))
    watcher.remove()
    watcher.loss(torch.tensor(1.0))
