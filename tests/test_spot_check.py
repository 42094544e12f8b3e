"""Between samples one small gradient is checked: a sudden fault is sampled at its own step, as if every step were."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from gradients import Chosen, of, samples, watch

from wandb_gradwatch._capture import rest, spot_check
from wandb_gradwatch._capture.cadence import Budget, Cadence
from wandb_gradwatch._capture.clock import SampleClock
from wandb_gradwatch._capture.measurer import Measurer
from wandb_gradwatch._capture.schedule import Schedule
from wandb_gradwatch._capture.spot_check import SpotCheck

SGD = torch.optim.SGD
STEPS, FAULTY = 400, 303  # the budget samples every 20th step or so
SAMPLE, STEP = 9e-4, 5e-3  # seconds that a sample and a step take


@pytest.fixture
def clock(monkeypatch) -> list[float]:
    """A clock that only steps and samples advance."""
    now, measure = [0.0], Measurer.measure

    def slow(*args, **kwargs) -> None:
        now[0] += SAMPLE
        measure(*args, **kwargs)

    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    monkeypatch.setattr(Measurer, "measure", slow)
    return now


Update = Callable[[Chosen, SGD, list[float]], None]


def plain(model: Chosen, optimizer: SGD, gradient: list[float]) -> None:
    optimizer.zero_grad()
    model.loss(a=gradient, b=[1, 1]).backward()
    optimizer.step()


def accumulated(model: Chosen, optimizer: SGD, gradient: list[float]) -> None:
    optimizer.zero_grad()
    for _ in range(2):
        model.loss(a=[one / 2 for one in gradient], b=[0.5, 0.5]).backward()
    optimizer.step()


def clipped(model: Chosen, optimizer: SGD, gradient: list[float]) -> None:
    optimizer.zero_grad()
    model.loss(a=gradient, b=[1, 1]).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()


def clipped_by_hand(model: Chosen, optimizer: SGD, gradient: list[float]) -> None:
    optimizer.zero_grad()
    model.loss(a=gradient, b=[1, 1]).backward()
    for parameter in model.parameters():
        parameter.grad.clamp_(-0.1, 0.1)
    optimizer.step()


def with_a_closure(model: Chosen, optimizer: SGD, gradient: list[float]) -> None:
    def evaluate() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model.loss(a=gradient, b=[1, 1])
        loss.backward()
        return loss

    optimizer.step(evaluate)


def of_two_optimizers(model: Chosen, optimizer: SGD, gradient: list[float]) -> None:
    plain(model, optimizer, gradient)
    model.others.step()


def train(clock: list[float], update: Update, faulty: list[float], *, at: int = FAULTY, **options):
    model = Chosen(a=2, b=2)
    own = [model.a] if update is of_two_optimizers else model.parameters()
    optimizer, model.others = SGD(own, lr=0.0), SGD([model.b], lr=0.0)
    watcher, sink = watch(model, **({"sample_every": None, "log_every": 50} | options))
    for number in range(1, STEPS + 1):
        clock[0] += STEP
        update(model, optimizer, faulty if number == at else [3, 4])
    return samples(watcher, sink)


@pytest.mark.parametrize("at", [FAULTY, 350])  # a window ends at step 350
@pytest.mark.parametrize("update", [plain, accumulated, clipped])
@pytest.mark.parametrize(("faulty", "norm"), [([300, 400], 500), ([math.inf, 4], 4), ([math.nan, 4], 4), ([0, 0], 0)])
def test_a_sudden_fault_is_sampled_at_its_own_step(clock, update, faulty, norm, at):
    assert at not in train(clock, update, [3, 4]).steps
    snapshot = train(clock, update, faulty, at=at)
    assert len(snapshot) < STEPS / 5  # most steps are not sampled
    (place,) = np.flatnonzero(snapshot.steps == at)
    assert of(snapshot, "a", "grad_norm")[place] == norm  # before clipping, of the finite elements
    assert of(snapshot, "a", "num_nan")[place] + of(snapshot, "a", "num_inf")[place] == 2 - np.isfinite(faulty).sum()
    assert of(snapshot, "b", "grad_norm")[place] == pytest.approx(math.sqrt(2))
    received = 0.1 if update is clipped and math.isfinite(sum(faulty)) else snapshot.total_grad_norm[place]
    if math.isfinite(sum(faulty)):
        assert snapshot.total_grad_norm_clipped[place] == pytest.approx(received, rel=1e-4)


@pytest.mark.parametrize(
    ("update", "options"),
    [
        (clipped_by_hand, {}),  # the gradient that the check would find may be clipped
        (with_a_closure, {}),  # the gradient before the step is an old one
        (of_two_optimizers, {}),
        (plain, {"sample_every": 20}),  # the user's choice
    ],
)
def test_no_check_where_it_could_mislead(clock, update, options):
    assert FAULTY not in train(clock, update, [300, 400], **options).steps


def test_a_healthy_training_is_sampled_at_the_same_steps_as_without_checks(clock, monkeypatch):
    checked = train(clock, plain, [3, 4]).steps.tolist()
    monkeypatch.setattr(rest, "spot_check_of", lambda *_: None)
    assert train(clock, plain, [3, 4]).steps.tolist() == checked


def test_another_optimizer_is_checked_by_a_parameter_of_its_own(clock):
    model = Chosen(a=2, b=2)
    watcher, sink = watch(model, sample_every=None, log_every=50)
    for number in range(1, STEPS + 1):
        clock[0] += STEP
        if number in (1, STEPS // 2):
            optimizer = SGD(model.parameters() if number == 1 else [model.b, model.a], lr=0.0)
        optimizer.zero_grad()
        model.loss(a=[3, 4], b=[300, 400] if number == FAULTY else [1, 1]).backward()
        optimizer.step()
    assert FAULTY not in samples(watcher, sink).steps  # it begins at b, but a is nearer to the input


@pytest.mark.parametrize("change", ["sparse", "removed", "half"])
def test_a_gradient_that_can_no_longer_be_read_is_not_read(clock, change):
    model = Chosen(a=2, b=2)
    optimizer = SGD(model.parameters(), lr=0.0)
    watcher, sink = watch(model, sample_every=None, log_every=50)
    for number in range(1, STEPS + 1):
        clock[0] += STEP
        optimizer.zero_grad()
        model.loss(a=[3, 4], b=[1, 1]).backward()
        if number > FAULTY and change == "sparse":
            model.a.grad = model.a.grad.to_sparse()
        elif number == FAULTY and change == "removed":
            optimizer.param_groups[0]["params"] = [model.b]
        elif number == FAULTY and change == "half":
            model.half()
            model.a.grad = model.a.grad.half()
            model.b.grad = model.b.grad.half()
        optimizer.step()
    assert watcher.step == STEPS  # the monitor has not failed
    samples(watcher, sink)


def test_checks_take_a_fifth_of_the_budget_with_what_they_cost_afterwards(clock, monkeypatch):
    """One percent of a step of 5 ms is 50 us. A fifth of that pays a check of 10 us, which costs 30, at every 3rd."""
    norm, checks = spot_check._norm, []

    def slow(gradient) -> float:
        checks.append(clock[0])
        clock[0] += 1e-5
        return norm(gradient)

    monkeypatch.setattr(spot_check, "_norm", slow)
    snapshot = train(clock, plain, [3, 4])
    late = [at for at in checks if at > checks[-1] / 2]  # the cost of a check is known by then
    assert 40 <= len(late) <= STEPS / 2 / 3
    counted = (STEPS - len(snapshot)) * rest._QUICK
    spent = len(snapshot) * SAMPLE + len(checks) * 3e-5 + counted
    assert snapshot.overhead_ratio * clock[0] == pytest.approx(spent, rel=0.01)


class Told:
    """What a check of these gradients finds, one after the other, at the first parameter of an optimizer."""

    def __init__(self, *, is_covered: bool) -> None:
        self.parameter = torch.nn.Parameter(torch.ones(2))
        self.optimizer, self.check = SGD([self.parameter], lr=0.0), SpotCheck(0, 0)
        self.check.is_covered = is_covered
        self(*[1.0] * 10)

    def __call__(self, *norms: float | None) -> list[bool]:
        found = []
        for norm in norms:
            self.parameter.grad = None if norm is None else torch.tensor([norm, 0.0])
            found.append(self.check.finds(self.optimizer))
        return found


@pytest.mark.parametrize("faulty", [math.nan, math.inf, 100.0, 1e-5, 0.0, None])
def test_a_fault_that_stays_is_found_once_and_again_after_a_usual_gradient(faulty):
    """What follows a level that was found is compared with that level, so that the end of a fall is found too."""
    told = Told(is_covered=True)
    assert told(faulty, faulty) == [True, False]
    has_fallen = faulty in (1e-5, 0.0, None)
    assert told(1.0, 1.0, 1.0) == [has_fallen, False, False]
    assert told(math.nan) == [True]


def test_an_explosion_that_is_over_does_not_hide_the_next_one():
    told = Told(is_covered=True)
    assert told(1e4, 1e4, 1.0, 1.0, 1e4) == [True, False, True, False, True]


def test_a_rise_is_found_as_soon_as_the_budget_covers_a_sample_and_nan_at_once():
    told = Told(is_covered=False)
    assert told(100.0, 100.0) == [False, False]
    told.check.is_covered = True
    assert told(100.0, 100.0) == [True, False]
    told.check.is_covered = False
    assert told(math.nan, math.nan) == [True, False]


def test_norms_that_vary_as_in_a_healthy_training_are_not_found():
    assert not any(Told(is_covered=True)(*[1.0, 3.9, 0.5, 2.0, 0.1, 3.0] * 10))


def test_the_first_gradients_only_show_what_is_usual():
    told = Told(is_covered=True)
    told.check = SpotCheck(0, 0)
    told.check.is_covered = True
    assert told(1.0, 100.0, 0.0, math.nan) == [False, False, False, True]


def test_a_rise_is_sampled_in_debt_too_but_once_in_a_thousand_steps():
    steps = SampleClock()
    schedule, check, covered = Schedule(steps, Cadence(None), Budget(0.01)), SpotCheck(0, 0), []
    schedule.start(0.0, 0.0)
    schedule.add_sample(1, skipped=False, now=2.0, seconds_spent=1.99)  # of a step of 0.01 s
    for steps.step in (10, 500, 1010, 1011):
        schedule.plan(check)
        covered.append(check.is_covered)
        if steps.step == 10:
            schedule.sample_now()  # at step 11
    assert covered == [True, False, False, True]


def test_a_rise_in_debt_is_sampled_twice_so_that_rules_can_tell_a_spike_from_an_explosion():
    steps = SampleClock()
    schedule = Schedule(steps, Cadence(None), Budget(0.01))
    schedule.start(0.0, 0.0)
    schedule.add_sample(1, skipped=False, now=2.0, seconds_spent=1.99)  # of a step of 0.01 s
    steps.step = 10
    schedule.sample_now()
    sampled = []
    for steps.step in range(10, 20):
        schedule.open()
        if schedule.is_sampled:
            number = steps.open_step
            sampled.append(number)
            schedule.add_sample(number, skipped=False, now=2.0 + number / 100, seconds_spent=1.99 + number / 1000)
    assert sampled == [11, 12]
