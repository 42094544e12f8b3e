"""A JSONLSink's file: what the commands read from it is what was measured, whatever the file has become since."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from fake_run import FROZEN, fake_snapshots

import wandb_gradwatch
from wandb_gradwatch import JSONLSink, watch
from wandb_gradwatch._cli import main
from wandb_gradwatch._judgement.incident import Incident, Layer
from wandb_gradwatch._judgement.verdict import verdict_of
from wandb_gradwatch._page.compare import compare
from wandb_gradwatch._page.read import find_run_file, find_run_files, read_run, reader_of
from wandb_gradwatch.rules import Alert
from wandb_gradwatch.sinks._history_row import HistoryRow
from wandb_gradwatch.snapshot import Snapshot, keys

RECIPES = Path(__file__).parent.parent / "docs" / "recipes.md"
INCIDENT = Incident("nan_gradient", "NaN gradient", "ERROR", 7, 7, 9, "a fact", layers=(Layer("a.b", 2.0),))


def written(path: Path, *, num_flushes: int = 3, **options: Any) -> list[Snapshot]:
    snapshots = list(fake_snapshots(num_flushes=num_flushes))
    sink = JSONLSink(path, **options)
    for snapshot in snapshots:
        sink.write(snapshot)
    sink.verdict(verdict_of((INCIDENT,), num_steps=30, num_measured=30))
    sink.log_table(["step", "name", "grad_norm"], [[9, "a", 2.5], [9, "b", math.inf]])
    sink.close()
    return snapshots


def run(*arguments: str) -> Any:
    return CliRunner().invoke(main, arguments)


def test_a_run_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    snapshots = written(path, name="a name", config={"lr": 0.1, "optimizer": {"name": "sgd"}, "api_key": "abcXYZ"})
    history = read_run(path)
    assert (history.run_id, history.name, history.finished, history.notes) == ("run", "a name", True, ())
    assert history.steps.tolist() == [10, 20, 30]
    assert history.config["optimizer"] == {"name": "sgd"}
    # In the model's order; one is frozen, and so has no gradient yet.
    assert history.spelled(history.names) == [name for name in snapshots[0].names if name != FROZEN]
    for place, snapshot in enumerate(snapshots):
        for key, value in HistoryRow.of(snapshot).scalars().items():
            if key != keys.STEP and not key.endswith("num_nonfinite_loss"):
                assert history.values[key][place] == pytest.approx(value), key
    samples = np.concatenate([snapshot.total_grad_norm for snapshot in snapshots])
    np.testing.assert_allclose(history.samples.norms, samples, rtol=1e-5)  # six digits are kept
    loss = np.concatenate([snapshot.metrics[keys.LOSS] for snapshot in snapshots])
    np.testing.assert_allclose(history.own["loss"].values, loss)  # of every sample
    assert history.own["loss"].steps.tolist() == list(range(1, 31))
    assert sorted(history.histograms) == sorted(history.names)
    assert history.incidents == (INCIDENT,)
    assert history.flight_recorder.rows == [[9, "a", 2.5], [9, "b", "Infinity"]]


def test_a_loss_that_is_not_finite_is_a_value_and_not_a_missing_one(tmp_path: Path) -> None:
    sink = JSONLSink(tmp_path / "run.jsonl")
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with watch(model, sinks=[sink], sample_every=1, rules=[]):
        for factor in (1.0, math.nan):
            optimizer.zero_grad()
            (model(torch.ones(1, 2)).sum() * factor).backward()
            optimizer.step()
    loss = read_run(tmp_path / "run.jsonl").own["loss"]
    assert loss.steps.tolist() == [1, 2]
    assert np.isnan(loss.values).tolist() == [False, True]


def test_every_line_is_strict_json(tmp_path: Path) -> None:
    written(tmp_path / "run.jsonl")

    def refuse(text: str) -> float:
        raise AssertionError(text)

    for line in (tmp_path / "run.jsonl").read_text(encoding="utf-8").splitlines():
        json.loads(line, parse_constant=refuse)


def test_the_row_has_the_worst_alert_since_the_row_before(tmp_path: Path) -> None:
    sink = JSONLSink(tmp_path / "run.jsonl")
    first, second = fake_snapshots(num_flushes=2)
    sink.alert(Alert("A title", "a text", 3, "ERROR"))
    sink.alert(Alert("A title", "a text", 4, "INFO"))
    sink.write(first)
    sink.write(second)
    sink.close()
    assert read_run(tmp_path / "run.jsonl").values[keys.ALERT_LEVEL].tolist() == [3, 0]


def test_a_file_that_is_cut_or_damaged_or_goes_on_gives_its_complete_rows(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    written(path)
    whole = path.read_bytes()
    lines = whole.splitlines(keepends=True)
    rows = [place for place, line in enumerate(lines) if line.startswith(b'{"row"')]
    path.write_bytes(b"".join(lines[: rows[1]]) + lines[rows[1]][:100])
    reader = reader_of(path)
    reader.read_on()
    assert reader.history().steps.tolist() == [10]
    assert not reader.history().finished
    path.write_bytes(whole)
    reader.read_on()
    assert reader.history().steps.tolist() == [10, 20, 30]
    assert reader.history().finished
    path.write_bytes(b"".join([*lines[: rows[1]], b"no json\n", b'{"row": 3}\n', b"[1]\n", *lines[rows[1] :]]))
    damaged = read_run(path)
    assert damaged.steps.tolist() == [10, 20, 30]
    assert "corrupt data was skipped in 3" in damaged.notes[0]


@pytest.mark.parametrize(
    "line",
    [
        '{"row": {"gradwatch/step": 1e999}}',
        '{"row": {"gradwatch/step": -3, "grad_norm/a": "no number"}}',
        '{"row": {"gradwatch/step": 5, "gradwatch/samples": {"a": 1}, "gradwatch/histograms": [[1]]}}',
        '{"row": {"gradwatch/step": 5}, "series": {"loss": [[1, [2]], 3]}}',
        '{"summary": {"gradwatch/incidents": [{"kind": 3}, "x"]}}',
        '{"summary": 3}',
        '{"config": ' + '{"a": ' * 200 + "1" + "}" * 201,
        '{"table": {"data": 3}}',
        '{"run": {"name": "x", "started_at": 1e300, "config": {}}}',
        '{"wandb_gradwatch": 2}',
        "[" * 100_000,
        '{"row": {"gradwatch/step": ' + "9" * 5000 + "}}",
    ],
)
def test_what_a_stranger_wrote_is_left_out_and_the_rest_is_read(line: str, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    written(path, num_flushes=1)
    lines = path.read_text(encoding="utf-8").splitlines()
    path.write_text("\n".join([lines[0], line, *lines[1:]]) + "\n", encoding="utf-8")
    history = read_run(path)
    assert 10 in history.steps
    result = run("view", str(path), "--output", str(tmp_path / "page.html"))
    assert result.exit_code == 0, result.output


def test_a_line_without_an_end_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "run.jsonl"
    written(path, num_flushes=1)
    monkeypatch.setattr("wandb_gradwatch._page.jsonl.MAX_LINE", 100)
    with pytest.raises(ValueError, match="a line of more than 100 bytes"):
        read_run(path)


def test_files_of_others_are_neither_continued_nor_read(tmp_path: Path) -> None:
    other = tmp_path / "data.jsonl"
    other.write_text('{"text": "a sample of a data set"}\n')
    with pytest.raises(ValueError, match="not one of this sink"):
        JSONLSink(other)
    with pytest.raises(ValueError, match=r"must end in \.jsonl"):
        JSONLSink(tmp_path / "data.json")
    assert other.read_text() == '{"text": "a sample of a data set"}\n'
    with pytest.raises(ValueError, match="not a file of JSONLSink"):
        read_run(other)
    with pytest.raises(ValueError, match="holds no"):
        find_run_file(tmp_path)
    written(tmp_path / "run.jsonl", num_flushes=1)
    assert find_run_files(tmp_path) == [tmp_path / "run.jsonl"]


def test_a_training_that_continues_appends(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    first, second = fake_snapshots(num_flushes=2)
    for snapshot in (first, second):
        sink = JSONLSink(path)
        sink.write(snapshot)
        assert not read_run(path).finished
        sink.close()
    assert read_run(path).steps.tolist() == [10, 20]


def test_a_training_is_written_viewed_judged_and_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = []
    for place in range(2):
        path = tmp_path / f"run{place}.jsonl"
        paths.append(path)
        model, optimizer = _model()
        with watch(model, sinks=[JSONLSink(path)], sample_every=1, log_every=5):
            _train(model, optimizer)
    assert f"wandb-gradwatch view {paths[1]}" in capsys.readouterr().err
    assert compare(*map(read_run, paths)).alike
    assert run("verdict", str(paths[0])).stdout.startswith("no alert in 20 of 20 steps measured")
    assert run("diff", *map(str, paths)).exit_code == 0
    result = run("view", str(tmp_path), "--output", str(tmp_path / "page.html"))  # both of the folder
    assert result.exit_code == 0
    assert "<title>2 runs" in (tmp_path / "page.html").read_text(encoding="utf-8")


def _model() -> Any:
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 1)
    return model, torch.optim.SGD(model.parameters(), lr=0.01)


def _train(model: Any, optimizer: Any, steps: int = 20) -> None:
    torch.manual_seed(1)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(8, 2)).square().mean().backward()
        optimizer.step()


def test_a_folder_of_runs_leaves_out_what_cannot_be_read(tmp_path: Path) -> None:
    for name in ("a", "b"):
        written(tmp_path / f"{name}.jsonl", num_flushes=1)
    (tmp_path / "run-c.wandb").write_bytes(b"no run at all")
    result = run("view", str(tmp_path), "--output", str(tmp_path / "page.html"))
    assert result.exit_code == 0
    assert "left out: " in " ".join(result.output.split())
    assert "<title>2 runs" in (tmp_path / "page.html").read_text(encoding="utf-8")


def test_a_run_without_rows_is_said_and_stands_beside_the_others(tmp_path: Path) -> None:
    written(tmp_path / "a.jsonl", num_flushes=1)
    JSONLSink(tmp_path / "b.jsonl").close()
    result = run("view", str(tmp_path), "--output", str(tmp_path / "page.html"))
    assert result.exit_code == 0
    told = " ".join(result.output.split())
    assert "The file has no rows yet" in told
    assert "run.log()" not in told  # W&B's way
    assert "<title>2 runs" in (tmp_path / "page.html").read_text(encoding="utf-8")


def test_the_verdict_of_a_folder_says_of_which_run_it_is(tmp_path: Path) -> None:
    for number, name in enumerate(("old", "new")):
        written(tmp_path / f"{name}.jsonl", num_flushes=1)
        os.utime(tmp_path / f"{name}.jsonl", (number, number))
    assert "holds 2 runs: this is the newest, new." in " ".join(run("verdict", str(tmp_path)).stderr.split())


@pytest.mark.parametrize("command", [["view", "--output"], ["verdict"], ["diff"]])
def test_a_run_is_read_without_torch(command: list[str], tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    written(path, num_flushes=1)
    more = {"view": [str(tmp_path / "page.html"), str(path)], "verdict": [str(path)], "diff": [str(path), str(path)]}
    arguments = [*command, *more[command[0]]]
    assert reads(arguments) == ""
    if command == ["verdict"]:
        assert "AssertionError" in reads(arguments, "torch")  # which would be noticed


def reads(arguments: list[str], *modules: str) -> str:
    """Run a command in a process that has imported these modules; return the error if torch is among its modules."""
    program = (
        f"import {', '.join(['sys', *modules])}; from wandb_gradwatch._cli import main; "
        "main(sys.argv[1:], standalone_mode=False); assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=False)
    return done.stderr if done.returncode else ""


def test_as_row_is_the_row_of_its_sample() -> None:
    """The same numbers as in W&B, of any sample of the window."""
    (snapshot,) = fake_snapshots(num_flushes=1)
    for place in (0, 4, 9):
        alone = Snapshot(
            snapshot.steps[place : place + 1],
            snapshot.names,
            snapshot.rows[place : place + 1],
            loss_scale=snapshot.loss_scale[place : place + 1],
            metrics={key: values[place : place + 1] for key, values in snapshot.metrics.items()},
        )
        row = snapshot.as_row(int(snapshot.steps[place]))
        logged = HistoryRow.of(alone).scalars()
        assert row[keys.STEP] == snapshot.steps[place]
        shared = row.keys() & logged.keys()
        assert {key: row[key] for key in shared} == pytest.approx({key: logged[key] for key in shared})
        assert row.keys() - logged.keys() <= {keys.LEARNING_RATE}
        assert f"grad_norm/{keys.in_key(snapshot.names[0])}" in shared
        assert all(isinstance(value, (int, float)) and value == value for value in row.values())
    assert snapshot.as_row() == snapshot.as_row(10)


def test_as_row_of_a_step_that_was_not_measured_says_so() -> None:
    (snapshot,) = fake_snapshots(num_flushes=1)
    with pytest.raises(ValueError, match=r"as_row\(step=11\): no sample of this step; the snapshot has steps 1 to 10"):
        snapshot.as_row(11)
    nothing = Snapshot(snapshot.steps[:0], snapshot.names, snapshot.rows[:0])
    with pytest.raises(ValueError, match="the snapshot has none"):
        nothing.as_row()


def test_the_recipes_for_other_trackers_send_every_sample_and_alert_in_fifteen_lines() -> None:
    (snapshot,) = fake_snapshots(num_flushes=1)
    recipes = re.findall(
        r"```python\n(import wandb_gradwatch\n\n\nclass .*?)```", RECIPES.read_text(encoding="utf-8"), re.DOTALL
    )
    assert len(recipes) == 3
    for recipe in recipes:
        assert len(recipe.splitlines()) <= 15
        names: dict[str, Any] = {"wandb_gradwatch": wandb_gradwatch}
        exec(recipe, names)
        (made,) = (one for name, one in names.items() if name.endswith("Sink"))
        tracker = MagicMock()
        sink = made(tracker)
        sink.write(snapshot)
        sent = {repr(call) for call in tracker.mock_calls}
        norms = snapshot.total_grad_norm.tolist()
        assert all(
            any(f"{norm!r}" in call and f"{step}" in call for call in sent) for step, norm in enumerate(norms, 1)
        )
        sink.alert(Alert("A title", "a text", 3, "ERROR"))
        assert "A title" in repr(tracker.mock_calls[-1])


def test_a_missing_gradient_has_no_key_in_as_row() -> None:
    (snapshot,) = fake_snapshots(num_flushes=1)  # embed.position is frozen
    assert "grad_norm/embed/position" not in snapshot.as_row()
