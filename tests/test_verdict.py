"""A run's incidents and verdict: in the run's summary, read from its file, asked of the watcher, and as a command."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from gradients import step
from offline import history, records
from wandb.proto.wandb_internal_pb2 import Record

import wandb_gradwatch
from wandb_gradwatch import WandbSink
from wandb_gradwatch._judgement.incident import Incident, Layer
from wandb_gradwatch._judgement.verdict import MAX_INCIDENTS, incidents_within
from wandb_gradwatch._page.read import MAX_INCIDENTS_TEXT, RunReader, read_finished_run
from wandb_gradwatch.rules import NaNGradient, default_rules

CALM, BAD = [1.0] * 300, [math.nan] * 300  # more than 256 elements: smaller models may begin anywhere


def trained(watched: Any, *gradients: list[float], **options: Any) -> Any:
    """Train a step with each of these gradients under the default rules; return the watcher, and the model."""
    model, optimizer, _ = watched({"a": 300}, rules=default_rules(), **options)
    for values in gradients:
        step(model, optimizer, a=values)
    (watcher,) = wandb_gradwatch._watcher.WATCHERS
    return watcher, model


def summary_of(run: Any) -> dict[str, Any]:
    """Return what the file of a run that has ended says of its summary, as far as it is set by its key."""
    found = {}
    for record in records(run):
        if record["type"] == "summary":
            found |= record["summary"].get("update", {})
    return found


def test_an_incident_is_in_the_runs_file_with_its_end(watched: Any, offline_run: Any) -> None:
    watcher, _model = trained(watched, *[CALM] * 30, BAD, *[CALM] * 30, sinks=[WandbSink(offline_run)])
    assert "gradwatch/incidents" in dict(offline_run.summary)
    watcher.remove()
    offline_run.finish()
    of_run = read_finished_run(Path(offline_run.dir).parent)
    (incident,) = of_run.incidents
    assert (incident.kind, incident.level, incident.first_step) == ("nan_gradient", "ERROR", 31)
    assert incident.recovered_step is not None
    assert (of_run.verdict.status, of_run.verdict.num_steps, of_run.verdict.num_measured) == ("error", 61, 61)
    assert summary_of(offline_run)["gradwatch/verdict"] == of_run.verdict.sentence


def test_a_calm_run_has_a_verdict_at_its_end_and_no_incidents(watched: Any, offline_run: Any) -> None:
    _, _model = trained(watched, *[CALM] * 5, sinks=[WandbSink(offline_run)])
    assert "gradwatch/verdict" not in dict(offline_run.summary)
    offline_run.finish()  # before the watcher is removed, as by a script
    assert read_finished_run(Path(offline_run.dir).parent).verdict.sentence == "no alert in 5 of 5 steps measured"
    summary = summary_of(offline_run)
    assert summary["gradwatch/verdict"] == "no alert in 5 of 5 steps measured"
    assert "gradwatch/incidents" not in summary


def test_a_run_of_two_trainings_has_the_incidents_of_both(watched: Any, offline_run: Any) -> None:
    trained(watched, *[CALM] * 30, BAD, sinks=[WandbSink(offline_run)])[0].remove()
    trained(watched, *[CALM] * 30, sinks=[WandbSink(offline_run)], start_step=31)[0].remove()
    offline_run.finish()
    assert [one.first_step for one in read_finished_run(Path(offline_run.dir).parent).incidents] == [31]
    assert summary_of(offline_run)["gradwatch/verdict"].endswith("61 of 61 steps measured")


def test_a_callback_that_ends_the_process_finds_the_incident_told(watched: Any, offline_run: Any) -> None:
    told = []
    trained(
        watched,
        *[CALM] * 30,
        BAD,
        sinks=[WandbSink(offline_run)],
        on_alert=lambda _: told.append(offline_run.summary["gradwatch/incidents"]),
    )
    assert [one["first_step"] for one in json.loads(told[0])] == [31]


def test_the_row_of_a_window_has_the_worst_level_of_its_alerts(watched: Any, offline_run: Any) -> None:
    def warns_at_2(snapshot: Any) -> str | None:
        return "odd" if 2 in snapshot.steps else None

    model, optimizer, _ = watched(
        {"a": 300}, rules=[warns_at_2, NaNGradient()], sinks=[WandbSink(offline_run)], log_every=2
    )
    for values in (CALM, CALM, BAD, CALM, CALM, CALM, CALM, CALM):
        step(model, optimizer, a=values)
        offline_run.log({"loss": 1.0})
    offline_run.finish()
    rows = [row for row in history(offline_run) if "gradwatch/grad_norm" in row]
    levels = {row["gradwatch/step"]: row["gradwatch/alert_level"] for row in rows}
    assert {step: level for step, level in levels.items() if step % 2 == 0} == {2: 2, 4: 3, 6: 0, 8: 0}


def incident(number: int = 1, **more: Any) -> Incident:
    return Incident(
        **{
            "kind": "nan_gradient",
            "title": "NaN gradient",
            "level": "WARN",
            "first_step": number,
            "found_step": number,
            "last_step": number,
            "fact": "a fact",
        }
        | more
    )


LONG = {
    "fact": "f" * 5000,
    "evidence": "e" * 5000,
    "remedy": "r" * 5000,
    "layers": tuple(Layer("n" * 500, 1.0, 2.0) for _ in range(3000)),
    "values": {f"v{n}": float(n) for n in range(500)},
}


@pytest.mark.parametrize("max_bytes", [300, 2_600, 20_000])
@pytest.mark.parametrize("more", [{}, LONG])
@pytest.mark.parametrize("num", [0, 1, 7, 300])
def test_incidents_have_a_bounded_size_and_can_be_read_again(num: int, more: dict[str, Any], max_bytes: int) -> None:
    levels = ["ERROR" if number % 50 == 0 else "WARN" for number in range(num)]
    told = incidents_within([incident(n, level=levels[n], **more) for n in range(num)], max_bytes)
    assert len(json.dumps(told)) <= max_bytes
    again = [Incident.from_dict(one) for one in json.loads(json.dumps(told))]
    assert len(again) <= MAX_INCIDENTS
    assert bool(again) == bool(num)
    steps = [one.first_step for one in again]
    assert steps == sorted(steps)
    if num == 300 and len(again) == MAX_INCIDENTS:  # all six errors, and the newest warnings
        assert {n for n in steps if n % 50 == 0} == {0, 50, 100, 150, 200, 250}
        assert steps[-1] == 299


def test_one_incident_with_room_is_told_in_full() -> None:
    full = incident(
        evidence="because", layers=(Layer("a", 1.0, math.nan),), values={"loss": 2.0}, cause="one_bad_batch"
    )
    (told,) = incidents_within([full], 20_000)
    assert Incident.from_dict(told).to_dict() == full.to_dict()


def summary(text: str, *, nested: bool = False) -> Record:
    record = Record()
    item = record.summary.update.add()
    if nested:
        item.nested_key.append("gradwatch/incidents")
    else:
        item.key = "gradwatch/incidents"
    item.value_json = text
    return record


BROKEN = {
    "no JSON": "[",
    "no text": json.dumps([incident().to_dict()]),
    "no list": json.dumps(json.dumps({"a": 1})),
    "too many": json.dumps(json.dumps([incident().to_dict()] * 21)),
    "too long": json.dumps(json.dumps([incident(fact="f" * MAX_INCIDENTS_TEXT).to_dict()])),
    "too deep": json.dumps("[" * 40_000),
    "no incident": json.dumps(json.dumps([1])),
    "a huge step": json.dumps(json.dumps([incident().to_dict() | {"last_step": 10**300}])),
    "a huge value": json.dumps(json.dumps([incident().to_dict() | {"values": {"a": 10**400}}])),
}


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("text", BROKEN.values(), ids=list(BROKEN))
def test_what_a_stranger_writes_in_place_of_incidents_is_left_out_with_a_note(text: str, nested: bool) -> None:
    reader = RunReader(Path("run-x.wandb"))
    reader.take_summary(summary(json.dumps(json.dumps([incident(7).to_dict()])), nested=nested).summary)
    reader.take_summary(summary(text, nested=nested).summary)
    of_run = reader.history()
    assert [one.first_step for one in of_run.incidents] == [7]
    assert any("cannot be read" in note and "gradwatch/incidents" in note for note in of_run.notes)
