"""The saved state of the judgement: a training goes on as if it had not been interrupted, whatever the state is."""

from __future__ import annotations

import copy
import io
import json
import math
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import trainings
from grad_samples import of_norms, random_samples, sample_of, together
from judging import Loop, classifier, judged, with_inputs, with_rate

import wandb_gradwatch
from wandb_gradwatch import MemorySink
from wandb_gradwatch._pipeline.alert_manager import AlertManager
from wandb_gradwatch._pipeline.saved_state import _with_arrays, _with_tensors
from wandb_gradwatch.rules import Alert, Judgement, default_rules, rule
from wandb_gradwatch.snapshot import Snapshot
from wandb_gradwatch.snapshot._shapes import select_samples

NAN = math.nan


def rate_jumps() -> Loop:
    return with_rate(classifier(), lambda step: 0.05 if step < 40 else 50.0)


def bad_batches() -> Loop:
    return with_inputs(classifier(lr=1e-3), lambda x, step: 3000 * x if step in (30, 45, 46) else x)


def dead_layer() -> Loop:
    loop = classifier()
    torch.nn.init.constant_(loop.model[2].bias, -6.0)
    return loop


def cut_off() -> Loop:
    loop = classifier()
    loop.model[2].register_forward_hook(lambda module, args, output: output.detach())
    return loop


def recorded(make: Callable[[], Loop]) -> Snapshot:
    return judged(make(), 70).samples


def spikes() -> Snapshot:
    return of_norms([*[1.0] * 30, 500.0, *[1.0] * 12, NAN, NAN, *[2.0] * 15, 900.0, 1e5, 1e7])


SAMPLES: dict[str, Callable[[], Snapshot]] = {
    **{make.__name__: lambda make=make: recorded(make) for make in (rate_jumps, bad_batches, cut_off)},
    "spikes": spikes,
    "decoded": lambda: trainings.wild_mlp().run(60),
    "random": lambda: together(random_samples(3)),
}


def part(samples: Snapshot, begin: int, end: int) -> Snapshot:
    return select_samples(samples, np.arange(begin, end))


def told(alerts: list[Alert]) -> list[tuple[int, str, str, str]]:
    return [(alert.step, alert.title, alert.level, alert.text) for alert in alerts]


def through_nothing(state: Any) -> Any:
    return copy.deepcopy(state)


def through_json(state: Any) -> Any:
    return json.loads(json.dumps(state, default=lambda array: array.tolist()))


def through_a_checkpoint(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(_with_tensors(state), file)
    file.seek(0)
    return _with_arrays(torch.load(file, weights_only=True))


@pytest.mark.parametrize("carry", [through_nothing, through_json, through_a_checkpoint])
@pytest.mark.parametrize("name", SAMPLES)
def test_a_judgement_that_is_saved_and_loaded_tells_the_same(name: str, carry: Callable[[Any], Any]) -> None:
    samples = SAMPLES[name]()
    whole = AlertManager(default_rules())
    expected, num = told(whole.process(samples)), len(samples)
    assert expected
    for cut in (1, 5, num // 3, num // 2, num // 2 + 1, num - 10, num - 1):
        first, second = AlertManager(default_rules()), AlertManager(default_rules())
        found = first.process(part(samples, 0, cut))
        second.load_state_dict(carry(first.state_dict()))
        assert second.incidents == first.incidents or str(second.incidents) == str(first.incidents)
        found += second.process(part(samples, cut, num))
        assert told(found) == expected, cut
        assert [one.to_dict() for one in second.incidents] == [one.to_dict() for one in whole.incidents]


def test_an_incident_whose_beginning_is_no_longer_remembered_is_not_told_as_a_new_one() -> None:
    """A saved state has the rows of 16 samples, of the 64 that a training remembers: enough to go on."""
    samples = recorded(dead_layer)
    first, second = AlertManager(default_rules()), AlertManager(default_rules())
    first.process(part(samples, 0, 23))
    second.load_state_dict(first.state_dict())
    second.process(part(samples, 23, len(samples)))
    (incident,) = second.incidents
    assert (incident.kind, incident.first_step, incident.last_step) == ("dead_gradient", 10, 70)


def test_without_its_state_a_judgement_tells_something_else() -> None:
    """The test above could fail: in the middle of an incident, a new manager tells it again."""
    samples = spikes()
    first, second = AlertManager(default_rules()), AlertManager(default_rules())
    cut = 44
    found = first.process(part(samples, 0, cut)) + second.process(part(samples, cut, len(samples)))
    assert told(found) != told(AlertManager(default_rules()).process(samples))


def test_a_watched_training_goes_on_from_a_checkpoint_in_the_middle_of_an_incident() -> None:
    """NaN from step 30 on, saved after step 35: it is told once in both runs together."""

    def watched(loop: Loop, alerts: list[Alert], start: int) -> Any:
        options = {"sinks": [MemorySink()], "sample_every": 1, "histogram_every": 0}
        return wandb_gradwatch.watch(loop.model, on_alert=alerts.append, start_step=start, **options)

    loop, alerts, file = with_inputs(classifier(), lambda x, step: x * NAN if step >= 30 else x), [], io.BytesIO()
    with watched(loop, alerts, 0) as watcher:
        loop.run(35)
        torch.save({"model": loop.model.state_dict(), "watcher": watcher.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    loop = with_inputs(classifier(), lambda x, step: x * NAN)
    loop.model.load_state_dict(saved["model"])
    with watched(loop, alerts, 35) as watcher:
        watcher.load_state_dict(saved["watcher"])
        loop.run(5, start=36)
        (incident,) = watcher.verdict().incidents
    assert [alert.step for alert in alerts] == [30]
    assert (incident.first_step, incident.last_step) == (30, 40)


# States that do not fit


def leaves(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths of everything within a state, containers included."""
    found = [path] if path else []
    if isinstance(value, dict):
        found += [one for key in value for one in leaves(value[key], (*path, key))]
    elif isinstance(value, list):
        found += [one for at in range(min(len(value), 3)) for one in leaves(value[at], (*path, at))]
    return found


ODD = (None, [], {}, "x", -1, 1e300, [["x"]], {"x": 1}, np.zeros(3), True)


@pytest.mark.parametrize("seed", range(8))
def test_a_hostile_state_costs_the_memory_at_most(seed: int, caplog: pytest.LogCaptureFixture) -> None:
    """Whatever a state contains, loading it does not raise, and the judgement goes on to judge."""
    chance, samples = random.Random(seed), spikes()
    first = AlertManager(default_rules())
    first.process(part(samples, 0, 44))
    saved = first.state_dict()
    paths = [path for path in leaves(saved) if len(path) > 1]
    assert len(paths) > 100
    for path in chance.sample(paths, 60):
        state = copy.deepcopy(saved)
        place = state
        for key in path[:-1]:
            place = place[key]
        if chance.random() < 0.3 and isinstance(place, dict):
            del place[path[-1]]
        else:
            place[path[-1]] = chance.choice(ODD)
        second = AlertManager(default_rules())
        second.load_state_dict(state)
        caplog.clear()
        alerts = second.process(together([of_norms([NAN], start=step) for step in range(100, 104)]))
        assert not caplog.records, (path, caplog.text[-1500:])
        assert max(one.last_step for one in second.incidents) >= 103, path
        assert all(len(alert.text) <= 400 for alert in alerts)


@pytest.mark.parametrize("part_of_state", ["judge", "book"])
def test_a_state_that_does_not_fit_is_said_once_and_the_rest_is_loaded(part_of_state: str, caplog: Any) -> None:
    first = AlertManager(default_rules())
    first.process(of_norms([*[1.0] * 20, NAN]))
    second = AlertManager(default_rules())
    second.load_state_dict(first.state_dict() | {part_of_state: {"from": "another version"}})
    (record,) = caplog.records
    assert "could not load its state and starts without saved state" in record.getMessage()
    assert len(second.incidents) == (part_of_state != "book")


def test_a_book_that_points_outside_itself_is_refused_and_nothing_is_changed(caplog: Any) -> None:
    first = AlertManager(default_rules())
    first.process(of_norms([*[1.0] * 20, NAN]))
    state = first.state_dict()
    state["book"]["open"][0][0] = 99
    second = AlertManager(default_rules())
    second.process(of_norms([NAN]))
    before = second.incidents
    second.load_state_dict(state)
    assert "an open incident is not among the incidents" in caplog.text
    assert str(second.incidents) == str(before)


def test_a_state_loads_into_other_rules_and_into_none() -> None:
    @rule(title="Large", level="WARN")
    def large(snapshot: Snapshot) -> str | None:
        return "large" if snapshot.total_grad_norm[0] > 10 else None

    first = AlertManager([Judgement(), large])
    first.process(of_norms([*[1.0] * 30, 20.0]))
    second = AlertManager([large, Judgement(without=["gradient_spike"]), lambda snapshot: None])
    second.load_state_dict(first.state_dict())
    assert [one.kind for one in second.incidents] == [one.kind for one in first.incidents]
    assert [alert.title for alert in second.process(of_norms([1.0, 5000.0], start=32))] == ["Exploding gradient"]
    none = AlertManager([])
    none.load_state_dict(first.state_dict())
    assert none.process(of_norms([NAN], start=32)) == []
    again = AlertManager(default_rules())
    again.load_state_dict(none.state_dict())  # of a run without the judgement
    assert len(again.process(of_norms([NAN], start=33))) == 1


def test_a_state_of_other_parameters_is_no_obstacle() -> None:
    first, second = AlertManager(default_rules()), AlertManager(default_rules())
    first.process(together([sample_of({"a.weight": np.ones(300)}, step=step) for step in range(1, 30)]))
    second.load_state_dict(first.state_dict())
    renamed = [sample_of({"b.weight": np.ones(300), "c": [NAN]}, step=step) for step in range(30, 35)]
    assert [alert.step for alert in second.process(together(renamed))] == [30]


def test_a_state_does_not_change_when_the_training_goes_on() -> None:
    found = AlertManager(default_rules())
    found.process(of_norms([*[1.0] * 30, NAN]))
    state = found.state_dict()
    before = json.dumps(state, default=lambda array: array.tolist())
    found.process(of_norms([5.0] * 30, start=32))
    assert json.dumps(state, default=lambda array: array.tolist()) == before


def test_a_state_is_bounded_however_long_the_training_is() -> None:
    found, sizes = AlertManager(default_rules()), []
    for block in range(4):
        found.process(of_norms([1.0 + 0.01 * (at % 7) for at in range(1400)], start=1 + 1400 * block))
        sizes.append(len(json.dumps(found.state_dict(), default=lambda array: array.tolist())))
    assert max(sizes[1:]) < 1.05 * sizes[0]  # 64 samples are remembered, of those 20 steps apart as well
