"""Samples may wait for the next ones before they are judged: which do, for how long, and who is never kept waiting."""

from __future__ import annotations

import math

import pytest
import torch

from wandb_gradwatch import MemorySink, load_recording, unwatch, watch
from wandb_gradwatch.rules import Alert
from wandb_gradwatch.snapshot import Snapshot


class Seen:
    """A rule that notes which steps it is called with."""

    def __init__(self) -> None:
        self.steps: list[list[int]] = []

    def check(self, snapshot: Snapshot) -> list[Alert]:
        self.steps.append(snapshot.steps.tolist())
        return []

    def state_dict(self) -> dict[str, object]:
        return {}

    def load_state_dict(self, state: dict[str, object]) -> None:
        pass

    def since(self, step: int) -> list[list[int]]:
        """Return the batches that begin after this step."""
        return [steps for steps in self.steps if steps[0] > step]


CLOCK = [0.0]


@pytest.fixture(autouse=True)
def clock(monkeypatch) -> None:
    """A clock that only steps advance."""
    monkeypatch.setattr("time.perf_counter", lambda: CLOCK[0])


class Loop:
    """A training whose steps take `seconds` each, with gradients of 1 times `factor`."""

    def __init__(self, *, seconds: float = 1e-3, **kwargs: object) -> None:
        torch.manual_seed(0)
        self.model, self.seen = torch.nn.Linear(3, 2), Seen()
        self.optimizer, self.seconds = torch.optim.SGD(self.model.parameters(), lr=1e-3), seconds
        arguments = {"sinks": [MemorySink()], "sample_every": 1, "log_every": 10**6} | kwargs
        self.watcher = watch(self.model, rules=[self.seen], **arguments)

    def step(self, factor: float = 1.0, *, parameters: int = 2) -> None:
        CLOCK[0] += self.seconds
        self.optimizer.zero_grad()
        sum(factor * parameter.sum() for parameter in list(self.model.parameters())[:parameters]).backward()
        self.optimizer.step()

    def steps(self, num: int) -> Loop:
        for _ in range(num):
            self.step()
        return self


@pytest.fixture(autouse=True)
def nothing_stays_watched():
    yield
    unwatch()


def test_at_most_64_samples_wait_after_the_first_100():
    loop = Loop().steps(240)
    assert loop.seen.steps == [[step] for step in range(1, 101)] + [list(range(101, 165)), list(range(165, 229))]


def test_no_sample_waits_longer_than_200_ms():
    assert list(map(len, Loop(seconds=40.1e-3).steps(160).seen.since(100)))[:5] == [5] * 5  # after 160.4 ms
    assert list(map(len, Loop(seconds=200.1e-3).steps(160).seen.since(100))) == [1] * 60


def test_nothing_waits_between_samples_that_are_apart_nor_where_the_budget_decides_nor_with_a_guard():
    for arguments in ({"sample_every": 2}, {"sample_every": None, "max_overhead": 0.99}, {"guard": "skip"}):
        assert {len(steps) for steps in Loop(**arguments).steps(260).seen.steps} == {1}, arguments


@pytest.mark.parametrize(
    "notable",
    [
        lambda loop: loop.step(math.nan),
        lambda loop: loop.step(math.inf),
        lambda loop: loop.step(2.1),
        lambda loop: loop.step(0.0),
        lambda loop: loop.step(parameters=1),
        lambda loop: (loop.watcher.loss(math.nan), loop.step()),
        lambda loop: (loop.model.bias.data.fill_(math.nan), loop.step()),
    ],
)
def test_a_notable_sample_is_judged_at_its_own_step_with_all_that_wait(notable):
    loop = Loop().steps(104)
    notable(loop)
    assert loop.seen.since(100) == [[101, 102, 103, 104, 105]]


def test_five_samples_after_a_notable_one_are_judged_at_once_because_they_show_whether_it_stays():
    loop = Loop().steps(104)
    for _ in range(70):
        loop.step(2.1)
    assert loop.seen.since(100)[1:7] == [*([step] for step in range(106, 111)), list(range(111, 175))]


@pytest.mark.parametrize(
    "ask",
    [
        lambda watcher: watcher.latest,
        lambda watcher: watcher.summary(),
        lambda watcher: watcher.verdict(),
        lambda watcher: watcher.wait(),
        lambda watcher: watcher.flush(),
        lambda watcher: watcher.state_dict(),
        lambda watcher: watcher.remove(),
    ],
)
def test_whoever_asks_gets_the_verdict_on_every_sample(ask):
    loop = Loop().steps(105)
    ask(loop.watcher)
    assert loop.seen.since(100) == [[101, 102, 103, 104, 105]]


def test_the_row_of_a_flush_and_a_recording_contain_judged_samples_only(tmp_path):
    assert Loop(log_every=105).steps(105).seen.since(100) == [[101, 102, 103, 104, 105]]
    loop = Loop().steps(105)
    [path] = loop.watcher.record(tmp_path / "recording")
    assert load_recording(path).snapshot.steps.tolist() == list(range(1, 106))


def test_sums_that_overflow_are_no_warning(recwarn):
    torch.manual_seed(0)
    model, sink = torch.nn.Linear(3, 2).double(), MemorySink()
    with watch(model, sinks=[sink], rules=[], sample_every=1):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        sum(5e153 * parameter.sum() for parameter in model.parameters()).backward()
        optimizer.step()
    assert not list(recwarn)
    assert sink.snapshots[-1].grad_norm.max() > 1e154
    assert sink.snapshots[-1].total_grad_norm.tolist() == [math.inf]


def test_samples_that_wait_are_written_if_the_monitor_fails(monkeypatch):
    loop = Loop(sinks=[sink := MemorySink()]).steps(104)

    def fails(*_: object) -> None:
        raise RuntimeError("the capture fails")

    monkeypatch.setattr(type(loop.watcher._sampler._sample), "close", fails)
    loop.step()
    assert sink.snapshots[-1].steps.tolist() == list(range(1, 105))


def test_samples_before_and_after_a_parameter_is_frozen_are_judged_apart():
    loop = Loop().steps(103)
    loop.model.bias.requires_grad = False
    loop.step(parameters=1)
    assert loop.seen.since(100) == [[101, 102, 103], [104]]


def test_after_a_rollback_samples_are_judged_one_by_one():
    loop = Loop().steps(105)
    loop.watcher.load_state_dict(loop.watcher.state_dict())
    assert loop.steps(50).seen.since(105) == [[step] for step in range(106, 156)]
