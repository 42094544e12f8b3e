"""watcher.loss(value): the loss of each sample's own step, read only when the sample arrives."""

from __future__ import annotations

import gc
import math
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from grad_samples import of_norms
from gradients import Chosen, only, watch

from wandb_gradwatch._pipeline.alert_manager import AlertManager
from wandb_gradwatch.rules import Alert
from wandb_gradwatch.sinks._history_row import HistoryRow
from wandb_gradwatch.snapshot import Snapshot

LOSS, NUM_NONFINITE = "gradwatch/loss", "gradwatch/num_nonfinite_loss"


def trained(steps: Sequence[Sequence[Any]], *, share: bool = False, after: bool = False, **options: Any) -> Any:
    """Return the snapshots of a training that passes these values to watcher.loss(), one per backward."""
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


@pytest.mark.parametrize("value", [1.5, np.float32(1.5), np.float64(1.5), 2, torch.tensor(1.5)])
def test_any_number_is_a_loss(value: Any) -> None:
    model = Chosen(a=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watcher, _ = watch(model)
    watcher.loss(value)
    model.loss(a=[1]).backward()
    optimizer.step()
    assert watcher.flush().metrics[LOSS].tolist() == [float(value)]


def test_a_marked_step_has_its_loss_without_a_backward() -> None:
    model = Chosen(a=1)
    watcher, sink = watch(model)
    for value in (3.0, 2.0, 1.0):
        watcher.loss(value)
        model.a.grad = torch.ones(1)
        watcher.mark_step()
    watcher.remove()
    assert sink.merged().metrics[LOSS].tolist() == [3.0, 2.0, 1.0]


def test_a_step_that_a_scaler_skips_keeps_its_loss() -> None:
    model = Chosen(a=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    watcher, sink = watch(model)
    for value, gradient in ((3.0, 1.0), (2.0, math.inf), (1.0, 1.0)):
        optimizer.zero_grad()
        scaler.scale(model.loss(a=[gradient])).backward()
        watcher.loss(value)
        scaler.step(optimizer)
        scaler.update()
    watcher.remove()
    assert sink.merged().skipped.tolist() == [False, True, False]
    assert sink.merged().metrics[LOSS].tolist() == [3.0, 2.0, 1.0]


def test_a_loss_scale_of_zero_makes_a_loss_that_is_not_finite_and_stops_nothing() -> None:
    # The second step's loss scale has collapsed to 0: 3 / 0 is not finite.
    model = Chosen(a=1)
    watcher, sink = watch(model, loss_scale=lambda step: torch.tensor(0.0 if step == 2 else 4.0))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for _ in range(3):
        optimizer.zero_grad()
        (model.loss(a=[1.0]).sum() * 0 + 3).backward()
        optimizer.step()
    watcher.remove()
    metrics = sink.merged().metrics
    np.testing.assert_array_equal(metrics[LOSS], [0.75, math.nan, 0.75])
    assert metrics[NUM_NONFINITE].tolist() == [0, 1, 0]


def test_micro_batches_are_averaged_and_shares_are_added() -> None:
    # (1 + 2 + 6) / 3 = 3, and 1 + 2 + 6 = 9, in float64 whatever their dtype
    micros = [torch.tensor(value, dtype=torch.bfloat16) for value in (1.0, 2.0, 6.0)]
    assert trained([micros]).merged().metrics[LOSS].tolist() == [3.0]
    assert trained([micros], share=True).merged().metrics[LOSS].tolist() == [9.0]


def test_a_step_without_one_has_none_and_a_row_does_not_take_an_earlier_ones() -> None:
    for last, num_nonfinite in (([], math.nan), ([math.nan], 1.0)):
        [snapshot] = trained([[1.0], last], log_every=2).snapshots
        np.testing.assert_array_equal(snapshot.metrics[LOSS], [1.0, math.nan])
        np.testing.assert_array_equal(snapshot.metrics[NUM_NONFINITE], [0.0, num_nonfinite])
        assert LOSS not in HistoryRow.of(snapshot).scalars()


def test_only_samples_have_one_and_values_of_other_steps_are_not_kept() -> None:
    sink = trained([[float(step)] for step in range(1, 7)], sample_every=3, log_every=3)
    assert sink.merged().steps.tolist() == [3, 6]
    assert sink.merged().metrics[LOSS].tolist() == [3.0, 6.0]


def test_the_loss_of_the_next_step_is_not_that_of_a_sample_that_is_still_open() -> None:
    """The second of two optimizers has stopped stepping: a sample stays open until the next backward begins."""
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
    sink = trained([[1.0], [2.0, torch.tensor(value)], [1.0]], rules=[only("nonfinite_loss")])
    np.testing.assert_array_equal(sink.merged().metrics[LOSS], [1.0, math.nan, 1.0])
    assert sink.merged().metrics[NUM_NONFINITE].tolist() == [0, 1, 0]
    [alert] = sink.alerts
    assert (alert.incident.kind, alert.step, alert.level) == ("nonfinite_loss", 2, "ERROR")


def test_finite_losses_and_none_at_all_are_no_alert() -> None:
    assert trained([[1e30]] * 3, rules=[only("nonfinite_loss")]).alerts == deque()
    assert trained([[]] * 3, rules=[only("nonfinite_loss")]).alerts == deque()


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


def test_without_being_handed_over_the_loss_is_what_backward_was_called_on() -> None:
    """Two micro-batches of half the loss, as accumulation divides it: 1.5 + 2.5 in step 1, 3 + 5 in step 2."""
    model = Chosen(a=1)
    watcher, sink = watch(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for factors in ((1.5, 2.5), (3.0, 5.0)):
        for factor in factors:
            model.loss(a=[factor]).backward()
        optimizer.step()
        optimizer.zero_grad()
    model.loss(a=[9.0]).backward()
    watcher.loss(7.0)  # an explicit value takes precedence
    optimizer.step()
    watcher.remove()
    assert sink.merged().metrics[LOSS].tolist() == [4.0, 8.0, 7.0]


@pytest.mark.parametrize(
    ("backward", "found"),
    [
        (lambda loss: torch.autograd.backward([loss]), [2.0]),
        (lambda loss: loss.expand(3).backward(torch.ones(3)), None),
        (lambda loss: loss.backward(torch.tensor(2.0)), None),  # the differentiated value may not be the loss
        (lambda loss: torch.autograd.backward([loss, loss]), None),
    ],
)
def test_only_a_backward_of_one_number_tells_the_loss(backward: Any, found: list[float] | None) -> None:
    model = Chosen(a=1)
    watcher, sink = watch(model)
    backward(model.loss(a=[2.0]))
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    watcher.remove()
    values = sink.merged().metrics.get(LOSS)
    assert (values if values is None else values.tolist()) == found


def test_the_loss_scale_is_divided_out_of_what_backward_was_called_on() -> None:
    model = Chosen(a=1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    watcher, sink = watch(model, scaler=scaler)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for _ in range(2):
        optimizer.zero_grad()
        scaler.scale(model.loss(a=[3.0])).backward()
        scaler.step(optimizer)
        scaler.update()
    watcher.remove()
    assert sink.merged().metrics[LOSS].tolist() == [3.0, 3.0]


def test_the_first_scaled_step_of_an_optimizer_that_stepped_without_a_scaler_has_the_loss_without_the_scale() -> None:
    model = Chosen(a=1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    watcher, sink = watch(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for is_scaled in (False, True, True):
        optimizer.zero_grad()
        loss = model.loss(a=[3.0])
        if is_scaled:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        else:
            loss.backward()
            optimizer.step()
    watcher.remove()
    assert sink.merged().metrics[LOSS].tolist() == [3.0, 3.0, 3.0]


def of_losses(losses: Sequence[float], norms: Sequence[float] | None = None) -> Snapshot:
    samples = of_norms([1.0] * len(losses) if norms is None else norms)
    return replace(samples, metrics={LOSS: np.asarray(losses, dtype=np.float64)})


def wobbling(number: int) -> list[float]:
    """Return a loss that falls from -1 to -2 and varies by 0.2: a loss has no scale, and may be negative."""
    rng = np.random.default_rng(0)
    return (-1 - np.linspace(0, 1, number) + 0.2 * rng.standard_normal(number)).tolist()


def told(losses: Sequence[float], norms: Sequence[float] | None = None) -> list[Alert]:
    """Return the alerts about a loss that rises, of these losses and gradient norms."""
    return AlertManager([only("loss_spike")]).process(of_losses(losses, norms))


def test_a_loss_that_rises_and_stays_is_told_of_once_with_its_first_step() -> None:
    usual = wobbling(60)
    # The median is near -1.5, the scatter below 0.6 and the maximum below 0: 10 deviations above that is below 6.
    [alert] = told([*usual, *[6.0, 7.0] * 10])
    assert (alert.incident.kind, alert.level) == ("loss_spike", "WARN")
    assert 61 <= alert.step <= 70
    assert "and stays there" in alert.text
    assert told([*usual, 6.0, 6.0, usual[-1], 6.0, *usual[:20]]) == []  # hard batches
    assert told([*usual, 0.0, *usual[-3:]]) == []  # within the span of the usual losses


def test_a_loss_that_rises_all_the_time_is_told_and_one_that_rises_a_little_is_not() -> None:
    """As with `maximize=True`: 3 % more per step, from 2."""
    assert len(told([2 * 1.03**step for step in range(1, 161)])) == 1
    assert told([2 * 1.01**step for step in range(120)]) == []  # 2.8 times as high


def test_few_samples_are_no_past_and_a_missing_loss_is_no_spike() -> None:
    assert told([*wobbling(5), 9.0]) == []
    assert told([*wobbling(60), *[math.nan] * 20]) == []


def test_a_backward_leaves_no_reference_to_its_loss():
    model = Chosen(a=1)
    with watch(model)[0]:
        gc.collect()
        gc.disable()
        try:
            loss = model.loss(a=[1.0])
            loss.backward()
            kept = weakref.ref(loss)
            del loss
            assert kept() is None
        finally:
            gc.enable()
