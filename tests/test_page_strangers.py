"""A run's file may come from a stranger: it can neither write elsewhere nor control the terminal nor stop the page."""

from __future__ import annotations

import ast
import io
import json
import math
import os
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result
from fake_run import GPT_NAMES
from hypothesis import given
from hypothesis import strategies as st
from wandb.proto.wandb_internal_pb2 import Record

import wandb_gradwatch
from benchmarks.page import write_record
from wandb_gradwatch._cli import main
from wandb_gradwatch._judgement.incident import Incident, Layer
from wandb_gradwatch._judgement.verdict import verdict_of
from wandb_gradwatch._page import packing, read, step_axis
from wandb_gradwatch._page.history import MAX_DEPTH
from wandb_gradwatch._page.page import page_in, write_html
from wandb_gradwatch._page.read import HEADER, read_run
from wandb_gradwatch._page.redaction import HIDDEN, redacted
from wandb_gradwatch.rules import Alert
from wandb_gradwatch.sinks import ConsoleSink

ESCAPES = (
    "\x1b]0;owned\x07\x1b[2J\x9b31m\u202e\r"  # a title, a cleared screen, a C1 control, other direction, an overwrite
)


def settings(pairs: dict[str, Any], run_id: str = "r1", name: str = "a name") -> Record:
    record = Record()
    record.run.run_id, record.run.display_name, record.run.project = run_id, name, "p"
    for key, value in pairs.items():
        item = record.run.config.update.add()
        item.key, item.value_json = key, json.dumps(value)
    return record


def row(values: dict[str, Any], raw: dict[str, str] | None = None) -> Record:
    """One row of a history; `raw` are values as they stand in the file, valid JSON or not."""
    record = Record()
    for key, text in ({key: json.dumps(value) for key, value in values.items()} | (raw or {})).items():
        item = record.history.item.add()
        item.key, item.value_json = key, text
    return record


def rows(num: int = 20, name: str = "head/weight", factor: float = 1.0) -> list[Record]:
    return [
        row(
            {"_step": i, "gradwatch/step": 5 * i, "gradwatch/grad_norm": 1.0, f"grad_norm/{name}": factor * (1 + i % 3)}
        )
        for i in range(num)
    ]


def alert(title: str, text: str) -> Record:
    record = Record()
    record.alert.title, record.alert.text, record.alert.level = title, text, "ERROR"
    return record


def incidents(title: str, text: str) -> Record:
    """A record of a run's summary with one incident, all of whose texts are these."""
    told = Incident(
        kind=text,
        title=title,
        level="ERROR",
        first_step=5,
        found_step=5,
        last_step=5,
        fact=text,
        cause_text=text,
        evidence=text,
        advice=text,
        remedy=text,
        layers=(Layer(text),),
        values={text: 1.0},
    )
    record = Record()
    item = record.summary.update.add()
    item.key, item.value_json = "gradwatch/incidents", json.dumps(json.dumps([told.to_dict()]))
    return record


def write(folder: Path, records: Iterable[Record]) -> Path:
    folder.mkdir(parents=True)
    with (folder / "run-r1.wandb").open("wb") as file:
        file.write(HEADER)
        for record in records:
            write_record(file, record.SerializeToString())
        end = Record()
        end.exit.exit_code = 0
        write_record(file, end.SerializeToString())
    return folder


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments, catch_exceptions=False)


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


@pytest.mark.parametrize("run_id", ["x/../../escaped", "/etc/escaped", "..", "a\x00b\x1b[2J", "x" * 5000, "é/\u202e"])
def test_the_page_of_a_run_with_any_id_is_a_plain_file_here(run_id: str, tmp_path: Path, here: Path) -> None:
    (here / "gradwatch-x").mkdir()
    path = write(tmp_path / "run", [settings({}, run_id=run_id.replace("\x00", "")), *rows()])
    before = set(tmp_path.rglob("*"))
    assert run("view", str(path)).exit_code == 0
    (page,) = set(tmp_path.rglob("*")) - before
    assert page.parent == here
    assert page.name.startswith("gradwatch-")
    assert page.name.isascii()


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="the system has no named pipes")
@pytest.mark.parametrize("planted", ["link", "link to nothing", "fifo", "link to fifo"])
def test_what_is_planted_under_the_pages_name_is_neither_followed_nor_waited_for(planted: str, tmp_path: Path) -> None:
    target, page = tmp_path / "precious", Path("gradwatch-r1.html")
    if "fifo" in planted:
        os.mkfifo(target if "link" in planted else page)
    elif planted == "link":
        target.write_text("precious")
    if "link" in planted:
        page.symlink_to(target)
    result = run("view", str(write(tmp_path / "run", [settings({}), *rows()])))
    assert result.exit_code == 1
    assert "gradwatch-r1.html is there as a link or another special file" in result.stderr
    assert planted != "link" or target.read_text() == "precious"
    assert planted != "link to nothing" or not target.exists()


def test_a_link_that_is_asked_for_is_refused_and_stays(tmp_path: Path) -> None:
    target, link = tmp_path / "precious", tmp_path / "page.html"
    target.write_text("precious")
    link.symlink_to(target)
    with pytest.raises(OSError, match="is a link, which is not followed"):
        write_html("page", link)
    assert target.read_text() == "precious"


def test_a_page_that_cannot_be_written_leaves_the_old_one_and_no_other_file(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text("old")
    with pytest.raises(UnicodeEncodeError):
        write_html("\ud800", page)
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["page.html"]
    assert page.read_text() == "old"


def test_names_from_outside_never_make_a_path(tmp_path: Path) -> None:
    assert page_in(tmp_path, "report", "../../x").parent == tmp_path


def test_files_of_a_run_that_lead_elsewhere_are_not_read(tmp_path: Path) -> None:
    secret = tmp_path / "home"
    secret.mkdir()
    (secret / "table.json").write_text('{"columns": ["a"], "data": [["SECRET"]]}')
    table = row({"gradwatch/flight_recorder": {"_type": "table-file", "path": "table.json"}})
    path = write(tmp_path / "run", [settings({}), *rows(), table])
    (path / "files").symlink_to(secret)
    result = run("view", str(path))
    assert "is not in the run's directory" in " ".join(result.stdout.split())
    assert "SECRET" not in Path("gradwatch-r1.html").read_text()


SECRETS = (  # the name of a setting, its value, and what of it must not be seen
    ("wandb_api_key", "abcXYZ", "abcXYZ"),
    ("openai.apiKey", "abcXYZ", "abcXYZ"),
    ("password", 123454321, "123454321"),
    ("db", {"connectionString": "abcXYZ"}, "abcXYZ"),
    ("credentials", ["abcXYZ"], "abcXYZ"),
    ("hub_token", "abcXYZ", "abcXYZ"),
    ("env", "postgres://me:hunter2@host/runs", "hunter2"),
    ("url", "https://hooks.slack.com/services/T0/B0/abcXYZ", "abcXYZ"),
    ("note", "sk-" + 12 * "a1", "a1a1"),
    ("x", "ghp_" + 12 * "ab1", "ab1ab1"),
    ("y", ["hf_" + 10 * "abc"], "abcabc"),
    ("z", "AKIA" + 4 * "ABC1", "ABC1ABC1"),
    ("w", 4 * "0123456789", "0123456789"),
    ("args", "--lr 0.1 --api-key s3cr3t-value", "s3cr3t"),
    ("kwargs", [{"token": "abcXYZ"}], "abcXYZ"),
    ("jwt", "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.abcXYZ", "abcXYZ"),
    ("pem", "-----BEGIN RSA PRIVATE KEY-----\nabcXYZ", "abcXYZ"),
)
HARMLESS = {
    "model.num_tokens": 2048,
    "key_dim": 64,
    "tokenizer": "gpt2",
    "git_commit": "0123456789abcdef0123456789abcdef01234567",
    "monkey": "a",
    "text": "predict the next token quickly",
    "lr": 0.1,
    "url": "https://example.com/data?page=2",
    "api_key": None,
}


@pytest.mark.parametrize(("key", "value", "unseen"), SECRETS)
def test_what_looks_like_a_secret_is_hidden_in_the_page_of_a_run_of_two_and_in_diff(
    key: str, value: Any, unseen: str, tmp_path: Path
) -> None:
    first = write(tmp_path / "a", [settings({key: value, "lr": 1}), *rows()])
    second = write(tmp_path / "b", [settings({"lr": 2}), *rows()])
    assert run("view", str(first), "--output", "page.html").exit_code == 0
    assert run("view", str(first), str(second), "--output", "pages.html").exit_code == 0
    assert unseen not in Path("pages.html").read_text()
    printed = [run("diff", str(first), str(second), *options).output for options in ([], ["--json"])]
    for text in (Path("page.html").read_text(), *printed):
        assert HIDDEN in text
        assert unseen not in text


def test_other_settings_are_shown() -> None:
    assert {key: redacted(key, value) for key, value in HARMLESS.items()} == HARMLESS


def controls(text: str) -> list[str]:
    """The characters of a text that control a terminal, other than the ends of lines."""
    return [char for char in text if char != "\n" and (ord(char) < 32 or 127 <= ord(char) < 160 or char == "\u202e")]


def test_no_command_prints_what_controls_the_terminal(tmp_path: Path) -> None:
    def hostile(folder: str, lr: float) -> str:
        named = settings({f"lr{ESCAPES}": lr, "text": f"{lr}{ESCAPES}"}, run_id=f"id{ESCAPES}", name=f"name{ESCAPES}")
        series = rows(name=f"a{ESCAPES}/weight", factor=lr)
        sent = alert(f"title{ESCAPES}", f"text{ESCAPES}\nline")
        return str(write(tmp_path / folder, [named, *series, sent, incidents(f"title{ESCAPES}", f"text{ESCAPES}\n")]))

    first, second = hostile("a", 1.0), hostile("b", 1000.0)
    commands = (
        *(["view", first], ["view", first, second], ["diff", first, second], ["diff", first, second, "--json"]),
        *(["verdict", first], ["verdict", first, "--json"], ["verdict", str(tmp_path / f"none{ESCAPES}")]),
    )
    for command in commands:
        result = run(*command)
        assert controls(result.output) == [], command
        assert result.exit_code in ((2, 3) if "verdict" in command else (0, 1))
    assert "‹U+001B›" in run("diff", first, second).output  # it has printed them
    result = run("view", str(tmp_path / f"none{ESCAPES}"))
    assert (result.exit_code, controls(result.output)) == (1, [])


def test_neither_the_console_nor_an_alert_nor_the_summary_controls_the_terminal() -> None:
    from grad_samples import sample_of

    from wandb_gradwatch._summary import summarise

    file, sent = io.StringIO(), Alert(f"title{ESCAPES}", f"text{ESCAPES}", 1)
    sink, snapshot = ConsoleSink(file), sample_of({f"a{ESCAPES}": [3.0], GPT_NAMES[0]: [1.0]}, step=1)
    sink.write(snapshot)
    sink.alert(sent)
    incident = Incident("kind", f"title{ESCAPES}", "WARN", 1, 1, 1, "a fact")
    told = verdict_of([incident], num_steps=1, num_measured=1)
    for text in (file.getvalue(), str(sent), str(summarise(snapshot, verdict=told))):
        assert "‹U+001B›" in text
        assert controls(text) == []


ODD_VALUES = (
    *("-", "Nope", "1e5x", "--1", "0x10", "[", "{", "NaN", "-Infinity", "1e999", "-5", "2.5", "null", "true", '"x"'),
    *("1" * 5000, "[" * 100_000, '{"a":' * 100_000, '{"' + "k" * 5000 + '":1}', '{"_type":"table-file","path":5}'),
    '{"_type":"histogram","bins":"x","values":[1]}',
    *('[["gradients/head/weight"]]', '[["gradients/head/weight",-Infinity,NaN,1e999,-1e999]]'),
    f'[["gradients/head/weight",1,-1,{"9" * 400}],["gradients/head/weight",-1e300,1e300,{"9" * 300},1]]',
)
ODD_KEYS = (
    "_step",
    "_timestamp",
    "gradwatch/step",
    "grad_norm/head/weight",
    "loss",
    "gradients/head/weight",
    "gradwatch/histograms",
    "k" * 3000,
)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("key", ODD_KEYS, ids=lambda key: key[:20])
def test_an_odd_value_costs_no_other_row_and_is_said(key: str, tmp_path: Path) -> None:
    spoiled = [
        row({"loss": 1.0} | ({} if key == "_step" else {"_step": 20 + i}), {key: odd})
        for i, odd in enumerate(ODD_VALUES)
    ]
    path = write(tmp_path / "run", [settings({}), *rows(20), *spoiled, *rows(1, name="last/weight")])
    history = read_run(path)
    assert set(range(0, 100, 5)) <= set(history.steps.tolist())
    assert {"head/weight", "last/weight"} <= set(history.names)
    (note,) = [note for note in history.notes if "cannot be read and are left out" in note]
    assert (
        f"values in run-r1.wandb cannot be read and are left out; the first of them has the key '{key[:100]}'" in note
    )
    for command in (["view", str(path)], ["view", str(path), str(path)], ["diff", str(path), str(path)]):
        assert run(*command).exit_code == 0


@pytest.mark.parametrize("odd", [odd for odd in ODD_VALUES if odd[0] in "-N1[{"])
def test_an_odd_setting_or_table_costs_nothing_else(odd: str, tmp_path: Path) -> None:
    configured = settings({"lr": 0.1})
    item = configured.run.config.update.add()
    item.key, item.value_json = "odd", odd
    configured.run.start_time.seconds = 2**62  # no such year
    table = row({"gradwatch/flight_recorder": {"_type": "table-file", "path": "table.json"}})
    path = write(tmp_path / "run", [configured, *rows(), table])
    (path / "files").mkdir()
    (path / "files" / "table.json").write_text(f'{{"columns": ["a"], "data": [[{odd}], 1]}}')
    history = read_run(path)
    assert (len(history.steps), history.config["lr"], history.started_at) == (20, 0.1, "")
    assert any("table.json' cannot be read" in note for note in history.notes)
    assert run("view", str(path)).exit_code == 0


def test_a_record_that_is_none_is_left_out(tmp_path: Path) -> None:
    path = write(tmp_path / "run", [settings({}), *rows(10)])
    (file,) = path.iterdir()
    with file.open("ab") as opened:
        write_record(opened, b"\xff\xff\xff")
        for record in rows(20)[10:]:
            write_record(opened, record.SerializeToString())
    history = read_run(path)
    assert len(history.steps) == 20
    assert any("corrupt data was skipped in 1" in note for note in history.notes)


@given(st.lists(st.tuples(st.integers(1, 4), st.integers(1, 9)), min_size=1, max_size=6))
def test_the_rate_between_steps_is_what_trying_all_rates_gives(gaps: list[tuple[int, int]]) -> None:
    placed, sampled = (np.cumsum([0, *one]).astype(float) for one in zip(*gaps, strict=True))

    def fits(rate: float) -> bool:
        return max(sampled - rate * placed) <= min(sampled[1:] - rate * placed[:-1])

    mean = sampled[-1] / placed[-1]
    tried = [rate for rate in (mean, *range(1, math.ceil(mean) + 1)) if rate % 1 == 0 and fits(rate)]
    found = step_axis._whole_rate(placed, sampled)
    assert (None if found is None else found[0]) == next(iter(tried), None)


def test_few_rates_are_tried_however_large_the_steps_are(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []
    argmax = np.argmax
    monkeypatch.setattr(step_axis.np, "argmax", lambda values: tried.append(values) or argmax(values))
    step_axis.steps_between(np.array([5.0]), np.array([0.0, 1, 2]), np.array([0.0, 10, 2.0**52 + 1]))
    assert 0 < len(tried) < 20


def test_histograms_of_any_number_of_names_are_thinned_seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "MAX_STORED", 100)
    collector = packing.HistogramCollector()
    for name in range(1000):
        collector.add(1, [[f"gradients/{name}", -1.0, 1.0, 5.0]])
    assert len(collector.series()[""]) == 50  # with more, each name's only histogram would be thinned again and again
    assert collector._stride == 1


def test_more_keys_than_a_run_can_have_are_left_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(read, "MAX_KEYS", 30)
    history = read_run(write(tmp_path / "run", [*rows(), *(row({"_step": i, f"own{i}": 1.0}) for i in range(100))]))
    assert len(history.own) < 30
    assert len(history.steps) == 20
    assert any("values in run-r1.wandb cannot be read" in note for note in history.notes)


def test_prefixes_of_names_are_limited(tmp_path: Path) -> None:
    history = replace(read_run(write(tmp_path / "run", rows())), config={"gradwatch": {"names": ["a." * 100_000, 1]}})
    assert len(history._places) <= MAX_DEPTH + 1
    assert history.names == ["head/weight"]


def calls(tree: ast.AST, is_one: Callable[[str], bool]) -> list[str]:
    return [name for node in ast.walk(tree) if isinstance(node, ast.Call) and is_one(name := ast.unparse(node.func))]


def test_only_output_writes_to_the_terminal_of_a_command() -> None:
    root = Path(wandb_gradwatch.__file__).parent
    found = {
        path.relative_to(root).as_posix()
        for path in root.rglob("*.py")
        if calls(
            ast.parse(path.read_text()), lambda name: name in ("click.echo", "click.style", "click.secho", "print")
        )
    }
    # The sinks and the dispatcher speak during a training, where click is not needed; tested above.
    assert found == {"_output.py", "sinks/_base.py", "_pipeline/dispatcher.py"}
