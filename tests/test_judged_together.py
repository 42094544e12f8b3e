"""Samples that look healthy wait for each other before rules see them: nobody is told anything else, or later."""

from __future__ import annotations

import math

import pytest
from gradients import Chosen, step, watch
from torch.optim import SGD

from wandb_gradwatch import Watcher, rule
from wandb_gradwatch._pipeline import rule_runner
from wandb_gradwatch._pipeline.rule_runner import RuleRunner
from wandb_gradwatch.rules import DeadGradient, ExplodingGradient, NaNGradient, NoGradient
from wandb_gradwatch.snapshot import Snapshot

USUAL = {"a": [3.0, 4.0], "b": [1.0] * 300}


@pytest.fixture(autouse=True)
def _as_quick_as_it_gets(monkeypatch: pytest.MonkeyPatch) -> None:
    """However slow this machine is."""
    monkeypatch.setattr(rule_runner, "_SLOW", math.inf)
    monkeypatch.setattr(rule_runner, "_LONGEST", math.inf)


@pytest.fixture
def judged(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The steps of the samples that the rules have seen."""
    steps, judge = [], RuleRunner.judge

    def spy(self: RuleRunner, samples: list, known: object) -> None:
        steps.extend(sample.sample.step for sample in samples)
        judge(self, samples, known)

    monkeypatch.setattr(RuleRunner, "judge", spy)
    return steps


def trained(steps: int = 19, **options: object) -> tuple[Chosen, SGD, Watcher, object]:
    """A healthy training, watched: the norm of its first 16 samples says what is usual."""
    model = Chosen(a=2, b=300)
    optimizer = SGD(model.parameters(), lr=1e-6)
    watcher, sink = watch(model, **({"rules": None, "log_every": 10_000} | options))
    for _ in range(steps):
        step(model, optimizer, **USUAL)
    return model, optimizer, watcher, sink


def test_the_17th_healthy_sample_is_the_first_that_waits_and_4_of_them_are_judged(judged: list[int]) -> None:
    model, optimizer, watcher, _ = trained()
    assert judged == list(range(1, 17))
    step(model, optimizer, **USUAL)  # the fourth that waits
    assert judged == list(range(1, 21))
    watcher.remove()


def large(number: int) -> dict[str, list[float]]:
    return {"a": [3.0, 4.0], "b": [1e6 if number >= 70 else 1.0] * 300}


def spiky(number: int) -> dict[str, list[float]]:
    return {"a": [3.0, 4.0], "b": [1e4 if number % 37 == 0 else 1.0] * 300}


def broken(number: int) -> dict[str, list[float]]:
    return {"a": [math.nan if number == 75 else 3.0, 4.0], "b": [1.0] * 300}


def dies(number: int) -> dict[str, list[float]]:
    return {"a": [0.0 if number > 40 else 3.0] * 2, "b": [1.0] * 300}


def vanishes(number: int) -> dict[str, list[float]]:
    return {"a": [3.0, 4.0], "b": [1.0] * 300} if number <= 60 else {"a": [3e-12, 4e-12], "b": [1e-12] * 300}


@pytest.mark.parametrize("gradients", [large, spiky, broken, dies, vanishes])
def test_how_many_are_judged_together_changes_no_alert(
    gradients: object, monkeypatch: pytest.MonkeyPatch, judged: list[int]
) -> None:
    told, waited = [], []
    for together in (1, 3, 16):
        monkeypatch.setattr(rule_runner, "_TOGETHER", together)
        model, optimizer, watcher, sink = trained()
        for number in range(20, 120):
            step(model, optimizer, **gradients(number))
            waited.append(len(watcher._rule_runner.waiting))
        watcher.remove()
        told.append(sink.alerts)
    assert told[0]
    assert told[1] == told[0]
    assert told[2] == told[0]
    assert judged == [*range(1, 120)] * 3  # each once, in order
    assert max(waited[:100]) == 0
    assert max(waited[100:200]) == 2
    assert max(waited[200:]) == 15


@pytest.mark.parametrize(
    ("fault", "rules"),
    [
        ({"a": [math.nan, 4.0]}, [NaNGradient()]),
        ({"a": [3e4, 4e4]}, [ExplodingGradient()]),
        ({"b": [0.0] * 300}, [DeadGradient()]),
    ],
)
def test_what_looks_unusual_is_judged_at_once_after_what_has_waited(
    fault: dict, rules: list, judged: list[int]
) -> None:
    model, optimizer, watcher, _ = trained(rules=rules)
    step(model, optimizer, **(USUAL | fault))
    assert judged == list(range(1, 21))
    watcher.remove()


def test_what_breaks_after_the_backward_is_judged_at_once(judged: list[int]) -> None:
    model, optimizer, watcher, sink = trained(rules=[NaNGradient()])
    optimizer.zero_grad()
    model.loss(**USUAL).backward()
    model.a.grad[0] = math.nan
    optimizer.step()
    assert judged == list(range(1, 21))
    assert [alert.step for alert in sink.alerts] == [20]
    watcher.remove()


def test_a_gradient_that_stays_away_is_judged_at_once(judged: list[int]) -> None:
    model, optimizer, watcher, _ = trained(rules=[NoGradient()])
    step(model, optimizer, a=[3.0, 4.0])
    assert judged == list(range(1, 21))
    watcher.remove()


ASKS = [
    lambda watcher: watcher.healthy,
    Watcher.diagnose,
    Watcher.summary,
    Watcher.state_dict,
    lambda watcher: watcher.load_state_dict(watcher.state_dict()),
    Watcher.flush,
    Watcher.wait,
    Watcher.remove,
    lambda watcher: watcher.latest,
]


@pytest.mark.parametrize("ask", ASKS)
def test_whoever_asks_finds_everything_judged(ask: object, judged: list[int]) -> None:
    _model, _, watcher, _ = trained()
    assert judged == list(range(1, 17))
    ask(watcher)
    assert judged == list(range(1, 20))
    watcher.remove()


def test_a_row_is_written_after_what_it_holds_was_judged(judged: list[int]) -> None:
    _model, _, watcher, _ = trained(25, log_every=22)
    assert judged == list(range(1, 23))
    watcher.remove()


def test_a_rule_of_the_users_own_sees_every_sample_when_it_arrives(judged: list[int]) -> None:
    @rule(title="Seen")
    def seen(snapshot: Snapshot) -> str:
        return f"{snapshot.steps[0]}"

    _model, _, watcher, _ = trained(rules=[seen, NaNGradient()])
    assert judged == list(range(1, 20))
    watcher.remove()


def test_a_slow_training_is_judged_at_every_sample(judged: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rule_runner, "_SLOW", 0.0)
    _model, _, watcher, _ = trained()
    assert judged == list(range(1, 20))
    watcher.remove()
