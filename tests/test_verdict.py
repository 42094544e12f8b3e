"""A run's incidents and verdict: in the run's summary, read from its file, asked of the watcher, and as a command."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from gradients import only, step
from offline import history, records
from processes import ROOT, inherited
from wandb.proto.wandb_internal_pb2 import Record

import wandb_gradwatch
from benchmarks.page import write_record
from wandb_gradwatch import MemorySink, WandbSink, load_recording
from wandb_gradwatch._cli import main
from wandb_gradwatch._judgement.incident import Incident, Layer
from wandb_gradwatch._judgement.verdict import MAX_INCIDENTS, incidents_within
from wandb_gradwatch._page.read import HEADER, MAX_INCIDENTS_TEXT, RunReader, read_finished_run
from wandb_gradwatch.rules import default_rules

CALM, BAD = [1.0] * 300, [math.nan] * 300  # more than 256 elements: smaller models may begin anywhere


def trained(watched: Any, *gradients: list[float], **options: Any) -> Any:
    """Train a step with each of these gradients under the default rules; return the watcher, and the model."""
    model, optimizer, _ = watched({"a": 300}, lr=1e-4, rules=default_rules(), **options)
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


def test_the_watcher_the_alert_and_the_recorders_file_have_the_same_incident(watched: Any, tmp_path: Path) -> None:
    sink = MemorySink()
    watcher, _model = trained(watched, *[CALM] * 30, BAD, sinks=[sink])
    verdict = watcher.verdict()
    assert (verdict.status, verdict.num_steps, verdict.num_measured) == ("error", 31, 31)
    assert [alert.incident for alert in sink.alerts] == list(verdict.incidents)
    (path,) = watcher.record(tmp_path / "flight.npz")
    recorded = load_recording(path).incidents
    assert [one.to_dict() for one in recorded] == [one.to_dict() for one in verdict.incidents]


def test_while_an_incident_lasts_its_last_step_in_the_run_goes_on(watched: Any, offline_run: Any) -> None:
    _, _model = trained(watched, *[CALM] * 30, *[BAD] * 8, sinks=[WandbSink(offline_run)])
    (told,) = json.loads(offline_run.summary["gradwatch/incidents"])
    assert told["first_step"] == 31
    assert 34 <= told["last_step"] <= 38  # after 1, 2, 4, ... rows


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
        {"a": 300}, rules=[warns_at_2, only("nan_gradient")], sinks=[WandbSink(offline_run)], log_every=2
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
}
NO_INCIDENTS = {
    "a number": 1,
    "nothing": {},
    "a huge step": incident().to_dict() | {"last_step": 10**300},
    "a huge value": incident().to_dict() | {"values": {"a": 10**400}},
    "layers without names": incident().to_dict() | {"layers": [{"value": 1.0}]},
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


@pytest.mark.parametrize("told", NO_INCIDENTS.values(), ids=list(NO_INCIDENTS))
def test_what_is_no_incident_is_left_out_with_a_note_and_the_others_stay(told: Any) -> None:
    reader = RunReader(Path("run-x.wandb"))
    reader.take_summary(summary(json.dumps(json.dumps([told, incident(7).to_dict()]))).summary)
    of_run = reader.history()
    assert [one.first_step for one in of_run.incidents] == [7]
    assert any("cannot be read" in note and "gradwatch/incidents" in note for note in of_run.notes)


BROKE = "broke at step 2: NaN gradient; seen until step 2"


def command(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["verdict", *arguments], catch_exceptions=False)


def run_file(folder: Path, *told: Incident, num_rows: int = 4) -> str:
    """Write the file of a run that has ended, with rows of one measured step each and with these incidents."""
    path = folder / "run-abc.wandb"
    with path.open("wb") as file:
        file.write(HEADER)
        for number in range(1, num_rows + 1):
            record = Record()
            for key, value in {
                "gradwatch/step": number,
                "gradwatch/grad_norm": 1.0,
                "gradwatch/num_samples": 1,
            }.items():
                item = record.history.item.add()
                item.key, item.value_json = key, json.dumps(value)
            write_record(file, record.SerializeToString())
        if told:
            write_record(file, summary(json.dumps(json.dumps([one.to_dict() for one in told]))).SerializeToString())
        end = Record()
        end.exit.exit_code = 0
        write_record(file, end.SerializeToString())
    return str(path)


@pytest.mark.parametrize(
    ("levels", "status", "sentence"),
    [
        ([], 0, "no alert in 4 of 4 steps measured"),
        (["INFO"], 0, "no alert, 1 remark in 4 of 4 steps measured"),
        (["WARN", "INFO"], 1, "unusual at step 1: NaN gradient; seen until step 1; 4 of 4 steps measured"),
        (
            ["WARN", "ERROR"],
            2,
            "broke at step 2: NaN gradient; seen until step 2; 1 more incident; 4 of 4 steps measured",
        ),
    ],
)
def test_the_command_says_the_verdict_and_its_status_is_the_worst_level(
    levels: list[Any], status: int, sentence: str, tmp_path: Path
) -> None:
    path = run_file(tmp_path, *(incident(number, level=level) for number, level in enumerate(levels, start=1)))
    shown, told = command(path), command(path, "--json")
    assert (shown.exit_code, told.exit_code) == (status, status)
    assert shown.stdout.splitlines()[0] == f"{sentence}."
    assert shown.stdout.count("NaN gradient") >= len(levels)
    found = json.loads(told.stdout)
    assert (found["sentence"], found["num_steps"], found["num_measured"]) == (sentence, 4, 4)
    assert [one["level"] for one in found["incidents"]] == levels


def test_what_cannot_be_read_has_status_3_and_still_one_json_object(tmp_path: Path) -> None:
    nothing = run_file(tmp_path, num_rows=0)
    assert command(nothing).exit_code == 3
    assert json.loads(command(nothing, "--json").stdout)["status"] == "unknown"
    missing = command(str(tmp_path / "none"), "--json")
    assert missing.exit_code == 3
    assert json.loads(missing.stdout)["status"] == "unknown"
    assert "there is no file or directory" in missing.stderr
    assert command().exit_code == 3  # wrong usage says nothing of a run
    assert command(nothing, "--jsno").exit_code == 3


def test_however_much_happened_the_command_fits_a_screen_and_the_json_about_1000_tokens(tmp_path: Path) -> None:
    path = run_file(
        tmp_path, *(incident(n, **LONG | {"layers": (Layer("a"),), "fact": "f" * 300}) for n in range(1, 4))
    )
    assert len(command(path).stdout.splitlines()) <= 40
    told = json.loads(command(path, "--json").stdout)
    assert len(json.dumps(told)) <= 3_000  # a token of JSON has about three characters
    assert told["num_incidents"] == len(told["incidents"]) == 3
    many = run_file(tmp_path, *(incident(n) for n in range(1, 21)))
    assert len(command(many).stdout.splitlines()) <= 40
    told = json.loads(command(many, "--json").stdout)
    assert len(json.dumps(told)) <= 3_000
    assert told["num_incidents"] == 20
    assert 0 < len(told["incidents"]) <= 20


RECIPES = (Path(__file__).parent.parent / "docs/recipes.md").read_text(encoding="utf-8")
# Stands in for a training whose run has an ERROR: it waits for the signal that ends it.
_TRAINING = "import signal\nprint('begins', flush=True)\nsignal.pause()\n"


@pytest.mark.skipif(not hasattr(signal, "pause"), reason="the system has no signals of POSIX")
def test_the_loop_of_the_recipe_ends_a_broken_training_and_leaves_another_alone(tmp_path: Path) -> None:
    """As it is written, but for the minute between two looks."""
    (loop,) = re.findall(r"```sh\n(.*?)```", RECIPES, re.DOTALL)
    commands = tmp_path / "bin"
    commands.mkdir()
    for name, text in {
        "python": f'exec {sys.executable} "$@"',
        "wandb-gradwatch": f'exec {sys.executable} -m wandb_gradwatch "$@"',
        "sleep": "exit 0",
    }.items():
        (commands / name).write_text(f"#!/bin/sh\n{text}\n")
        (commands / name).chmod(0o755)
    environment = inherited() | {"PATH": f"{commands}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}

    def looped(training: str, *told: Incident) -> subprocess.CompletedProcess[str]:
        folder = tmp_path / f"run{len(told)}" / "wandb" / "latest-run"
        folder.mkdir(parents=True)
        run_file(folder, *told)
        script = folder.parent.parent / "train.py"
        script.write_text(training)
        return subprocess.run(
            ["sh", "-c", loop], cwd=script.parent, env=environment, capture_output=True, text=True, timeout=300
        )

    broken = looped(_TRAINING, incident(3, level="ERROR"))
    assert broken.returncode == 128 + signal.SIGTERM, broken.stderr
    assert '"status": "error"' in broken.stdout
    calm = looped("print('trained')")
    assert (calm.returncode, calm.stdout) == (0, "trained\n"), calm.stderr


def test_the_filter_of_the_recipe_is_what_an_automation_takes() -> None:
    from wandb.automations import RunEvent

    (text,) = re.findall(r"`RunEvent\.metric\((.+?)\)`? >= 3`", RECIPES)
    assert repr(RunEvent.metric(json.loads(text)) >= 3) == "'gradwatch/alert_level >= 3'"
