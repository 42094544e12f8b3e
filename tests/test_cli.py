"""The command line: arguments, output, errors and exit codes."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import time
import types
import urllib.request
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner, Result
from fake_run import write_fake_run
from processes import forked

from wandb_gradwatch import __version__
from wandb_gradwatch import _cli as cli
from wandb_gradwatch import _doctor as doctor
from wandb_gradwatch._doctor import Check, OverheadMeasurement
from wandb_gradwatch._judgement.incident import Incident
from wandb_gradwatch._output import as_json, paragraph
from wandb_gradwatch._page import commands, page, read
from wandb_gradwatch._page.history import OwnSeries, RunHistory
from wandb_gradwatch._report import report

ROOT = Path(__file__).parent.parent
COMMANDS = ("demo", "view", "verdict", "diff", "report", "workspace", "doctor")

SENTENCE = "broke at step 50: NaN gradient; seen until step 50; 2 of 51 steps measured"


def make_history(*, finished: bool = True, rows: int = 2) -> RunHistory:
    return RunHistory(
        path=Path("run-abcd1234.wandb"),
        run_id="abcd1234",
        steps=np.arange(1, rows + 1) * 50,
        values={"gradwatch/grad_norm": np.ones(rows), "grad_norm/head": np.ones(rows)},
        finished=finished,
        incidents=(Incident("nan_gradient", "NaN gradient", "ERROR", 50, 50, 50, "a fact"),),
    )


def run(*arguments: str, **settings: Any) -> Result:
    """Run the command and return what it printed on each stream, and its exit code."""
    return CliRunner().invoke(cli.main, arguments, prog_name=cli.PROGRAM, catch_exceptions=False, **settings)


def test_help_lists_every_command() -> None:
    result = run("--help")
    assert result.exit_code == 0
    assert [name for name in COMMANDS if f"  {name}" not in result.output] == []


@pytest.mark.parametrize("command", COMMANDS)
def test_the_examples_in_the_help_are_right_usage(command: str) -> None:
    examples = run(command, "--help").output.partition("Examples:\n")[2].splitlines()
    assert examples, f"the help of {command} shows no example"
    for example in examples:
        program, name, *arguments = shlex.split(example)
        assert (program, name) == (cli.PROGRAM, command)
        cli.main.commands[command].make_context(command, arguments)  # raises if the usage is wrong


def test_version_is_the_package_version() -> None:
    assert run("--version").output == f"wandb-gradwatch {__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["improve"], "No such command 'improve'"),
        (["report", "only-one"], "'only-one' is not ENTITY/PROJECT or ENTITY/PROJECT/RUN"),
        (["report", "a/b", "--output", "x.html"], "--output is where --dry-run writes the preview"),
        (["report", "a/b/c/d"], "'a/b/c/d' is not ENTITY/PROJECT or ENTITY/PROJECT/RUN"),
        (["workspace", "a/b/c"], "a workspace belongs to a project, not to a run: a/b"),
        (["workspace", "a/b", "--output", "x.html"], "--output is where --dry-run writes the preview"),
        (["doctor", "--parameters", "many"], "'many' is not a number of parameters such as 500k, 10M or 1.3B"),
        (["doctor", "--parameters", "0"], "'0' is not a number of parameters"),
        (["view"], "Missing argument 'PATH'"),
    ],
)
def test_wrong_usage_ends_with_2_and_says_why(arguments: list[str], message: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert message in result.stderr


@pytest.mark.parametrize(
    ("text", "count"), [("500k", 500_000), ("10M", 10_000_000), ("1.3B", 1_300_000_000), ("1_000", 1000), ("7", 7)]
)
def test_a_count_is_read_as_people_write_it(text: str, count: int) -> None:
    context = cli.main.commands["doctor"].make_context("doctor", ["--parameters", text])
    assert context.params["parameters"] == count


@pytest.mark.parametrize(
    ("text", "target"),
    [
        ("team/project", ("team", "project", None)),
        ("team/project/abcd1234", ("team", "project", "abcd1234")),
        ("/team/project/", ("team", "project", None)),
        ("https://host.example/team/my%20project/runs/abcd1234?nw=x", ("team", "my project", "abcd1234")),
        ("https://host.example/team/project/workspace?nw=x", ("team", "project", None)),
        ("https://host.example/team/project/sweeps", ("team", "project", None)),
    ],
)
def test_a_target_is_a_path_or_the_address_of_its_page(text: str, target: tuple[str, str, str | None]) -> None:
    assert cli.main.commands["report"].make_context("report", [text]).params["target"] == target


def test_a_user_error_is_one_line_and_status_1(tmp_path: Path) -> None:
    missing = tmp_path / "no-such-run"
    result = run("view", str(missing))
    assert result.exit_code == 1
    assert (result.stdout, result.stderr) == ("", f"Error: there is no file or directory {missing}\n")


@pytest.mark.parametrize(("arguments", "settings"), [(["--debug"], {}), ([], {"env": {cli.DEBUG_VARIABLE: "1"}})])
def test_debug_shows_the_traceback_of_a_user_error(arguments: list[str], settings: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="there is no file or directory"):
        run(*arguments, "view", str(tmp_path / "no-such-run"), **settings)


@pytest.mark.parametrize(("raised", "status"), [(KeyError("ours"), None), (KeyboardInterrupt(), 130)])
def test_an_error_of_our_own_keeps_its_traceback_and_ctrl_c_ends_with_130(
    raised: BaseException, status: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(path: Path, progress: object) -> RunHistory:
        raise raised

    monkeypatch.setattr(read, "find_run_files", lambda path: [path])
    monkeypatch.setattr(read, "read_run", broken)
    if status is None:
        with pytest.raises(KeyError, match="ours"):
            run("view", "anything")
    else:
        result = run("view", "anything")
        assert (result.exit_code, result.stderr) == (status, "\nStopped.\n")


def test_a_reader_that_has_read_enough_gets_no_traceback() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    program = [sys.executable, "-m", "wandb_gradwatch", "doctor", "--no-measure", "--json"]
    result = subprocess.run(program, cwd=ROOT, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=600)
    os.close(writer)
    assert result.stderr == ""


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[RunHistory]:
    """Replace reading by these results, the last one repeated; written pages hold only their number of rows."""
    histories = [make_history()]

    def read_run(path: Path, *, progress: object = None) -> RunHistory:
        return histories.pop(0) if histories[1:] else histories[0]

    monkeypatch.setattr(read, "find_run_files", lambda path: [path])
    monkeypatch.setattr(read, "read_run", read_run)

    def write_page(history: RunHistory, output: Path, *, others: list[RunHistory]) -> None:
        output.write_text(f"{len(history.steps)}" + f", beside {len(others)}" * bool(others))

    monkeypatch.setattr(page, "write_page", write_page)
    monkeypatch.chdir(tmp_path)
    return histories


@pytest.mark.parametrize(
    ("output", "page"), [([], "gradwatch-abcd1234.html"), (["--output", "pages"], "pages/gradwatch-abcd1234.html")]
)
def test_view_names_the_page_after_the_run(output: list[str], page: str, recorded: list[RunHistory]) -> None:
    Path("pages").mkdir()
    result = run("view", "wandb/latest-run", *output)
    assert result.exit_code == 0
    assert Path(page).read_text() == "2"
    assert result.stdout == f"{page}  2 rows, 1 name, {SENTENCE}\n"


def test_view_says_so_where_no_row_is_ours(recorded: list[RunHistory]) -> None:
    recorded[:] = [replace(make_history(rows=0), num_rows=20, values={}, incidents=())]
    result = run("view", "wandb/latest-run")
    assert result.exit_code == 0
    assert result.stdout.startswith("The run has rows, but none of wandb_gradwatch: call watch(model)")


def test_view_says_where_the_rows_of_a_killed_script_that_logged_nothing_are(recorded: list[RunHistory]) -> None:
    recorded[:] = [replace(make_history(rows=0), num_rows=0, values={}, incidents=())]
    result = run("view", "wandb/latest-run")
    assert result.exit_code == 0
    assert "a process that is killed loses them" in " ".join(result.stdout.split())
    assert "sinks=[WandbSink(commit=True)]" in result.stdout


def test_view_as_json_is_one_object(recorded: list[RunHistory]) -> None:
    result = run("view", "wandb/latest-run", "--json", "--output", "p.html")
    assert result.exit_code == 0
    facts = json.loads(result.stdout)
    assert facts == {
        "page": str(Path("p.html").resolve()),
        "run": "abcd1234",
        "finished": True,
        "rows": 2,
        "names": ["head"],
        "verdict": make_history().verdict.to_dict(),
        "notes": [],
    }


def test_view_of_several_runs_is_one_page(recorded: list[RunHistory]) -> None:
    recorded[:] = [make_history(), replace(make_history(rows=3), run_id="b")]
    result = run("view", "one", "other")
    assert Path("gradwatch-abcd1234-b.html").read_text() == "2, beside 1"
    assert result.stdout.splitlines() == [
        f"abcd1234  2 rows, 1 name, {SENTENCE}",
        f"b  3 rows, 1 name, {SENTENCE.replace('2 of 51', '3 of 101')}",
        "gradwatch-abcd1234-b.html",
    ]
    runs = json.loads(run("view", "one", "other", "--json").stdout)["runs"]
    assert [facts["rows"] for facts in runs] == [3, 3]
    assert "--watch follows one run" in run("view", "one", "other", "--watch").output


def test_diff_says_where_runs_part_and_its_status_says_whether(recorded: list[RunHistory]) -> None:
    rows = 4
    jump = replace(
        make_history(rows=rows),
        values={"gradwatch/grad_norm": np.ones(rows), "grad_norm/head": np.array([1.0, 1.0, 50.0, 50.0])},
        config={"lr": 3},
        own={"loss": OwnSeries(np.arange(1.0, 201), np.full(200, 2.5))},
    )
    calm = replace(jump, values={"grad_norm/head": np.ones(rows)}, config={"lr": 1})

    def diff(*histories: RunHistory, options: tuple[str, ...] = ()) -> Result:
        recorded[:] = histories
        return run("diff", "a", "b", *options)

    assert diff(calm, calm).exit_code == 0
    parted, late = diff(calm, jump), diff(calm, replace(jump, steps=jump.steps[:0]))
    assert (parted.exit_code, late.exit_code) == (1, 2)
    assert [line.split("  ")[-1].strip() for line in parted.stdout.splitlines()] == [
        "A and B part at step 150: the gradient of head is 50 times as large in B.",
        *["abcd1234: broke at step 50: NaN gradient; seen until step 50; 4 of 200 steps measured"] * 2,
        "1 layer, 4 windows, steps 50 to 200",
        "1 of 1",
        "to six digits up to step 100",
        "2.5 in A, 2.5 in B at step 200",
        "lr 1 → 3",
    ]
    assert late.stderr == "Error: the runs have no steps in common: there is nothing to compare\n"
    facts = json.loads(diff(calm, jump, options=("--json",)).stdout)
    assert (facts["alike"], facts["step"], facts["layer"], facts["equal_until"]) == (False, 150, "head", 100)


def test_view_watch_serves_the_page_until_the_run_has_finished_and_writes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run_directory = write_fake_run(tmp_path, names=("a.weight",), num_flushes=3, alerts=(), with_table=False)
    data = next(run_directory.glob("*.wandb")).read_bytes()
    growing = tmp_path / "run-grows.wandb"  # wandb-core may still hold the run's own file after run.finish()
    growing.write_bytes(data[: len(data) // 2])
    pages: list[str] = []

    def pause(seconds: float) -> None:  # meanwhile a browser reads the page, and the run continues
        address = opened[0]
        with urllib.request.urlopen(address) as answer:
            pages.append(answer.read().decode())
        growing.write_bytes(data)

    opened: list[str] = []
    monkeypatch.setattr(commands.webbrowser, "open", lambda url: opened.append(url) or True)
    # Replace only this module's `time`: other threads, such as those of W&B, still sleep.
    clock = types.SimpleNamespace(sleep=pause, monotonic=time.monotonic, strftime=time.strftime)
    monkeypatch.setattr(commands, "time", clock)
    result = run("view", str(growing), "--watch", "--open", "--output", "p.html")
    assert result.exit_code == 0
    assert result.stdout.startswith(f"{opened[0]}  follows the run on this machine alone")
    assert result.stdout.splitlines()[1].endswith("3 rows, no alert in 30 of 30 steps measured")
    assert "The file has no end record" in pages[0]
    assert "The file has no end record" not in Path("p.html").read_text(encoding="utf-8")


@pytest.mark.parametrize(("opened", "said"), [(True, ""), (False, "no browser could be started")])
def test_view_open_says_where_the_page_is_when_no_browser_starts(
    opened: bool, said: str, recorded: list[RunHistory], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    monkeypatch.setattr(commands.webbrowser, "open", lambda url: asked.append(url) or opened)
    result = run("view", "wandb/latest-run", "--open", "--output", "p.html")
    assert result.exit_code == 0
    assert asked == [Path("p.html").resolve().as_uri()]
    printed = result.stdout
    assert said in printed
    assert opened or asked[0] in printed


@pytest.mark.parametrize(
    ("arguments", "called"),
    [
        (["report", "team/project"], ("team", "project", None)),
        (["report", "team/project/abcd1234"], ("team", "project", "abcd1234")),
        (["workspace", "team/project"], ("team", "project")),
    ],
)
def test_report_and_workspace_print_the_url(
    arguments: list[str], called: tuple[str | None, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[str | None, ...]] = []

    def make(*target: str | None, history: object) -> str:
        assert history is None  # there is no run with this id
        calls.append(target)
        return "https://host.example/made"

    for name, function in {
        "create_report": make,
        "save_workspace": make,
        "run_on_disk": lambda run, path: None,
    }.items():
        monkeypatch.setattr(report, name, function)
    result = run(*arguments)
    assert result.exit_code == 0
    assert result.stdout == "https://host.example/made\n"
    result = run(*arguments, "--json")
    assert result.exit_code == 0
    assert json.loads(result.stdout) == {"url": "https://host.example/made"}
    assert calls == [called, called]


def test_doctor_as_json_names_every_requirement() -> None:
    result = run("doctor", "--no-measure", "--json")
    assert result.exit_code == 0
    facts = json.loads(result.stdout)
    assert {"Python", "torch", "numpy", "wandb", "device", "W&B"} <= {check["name"] for check in facts["checks"]}
    assert facts["overhead"] is None


@pytest.mark.parametrize("seed", [3, 7, 12])  # with torch's own initialisation these vanished
def test_the_training_that_doctor_measures_raises_no_alert(seed: int, capfd: pytest.CaptureFixture[str]) -> None:
    """With a learning rate of 1e-6 the first command of a new user showed "Parameters unchanged" three times."""
    torch.manual_seed(seed)
    doctor.measure_overhead(10_000, blocks=range(2))
    assert capfd.readouterr().err == ""


def test_doctor_finds_a_version_below_its_floor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_floors", lambda: {"numpy": "99.0"})
    result = run("doctor", "--no-measure")
    assert result.exit_code == 1
    said = [line.strip() for line in result.stdout.splitlines()]
    # The command is on its own line, so that it can be copied.
    assert said[said.index("numpy 99.0 or newer is needed:") + 1] == "pip install --upgrade 'numpy>=99.0'"


@pytest.mark.parametrize(
    ("version", "floor", "verdict"),
    [
        ("2.13.0+cpu", "2.4", "good"),
        ("2.4", "2.4", "good"),
        ("2.10.1", "2.9", "good"),  # not compared as text
        ("2.3.1", "2.4", "problem"),
    ],
)
def test_versions_are_compared_as_numbers(
    version: str, floor: str, verdict: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor.metadata, "version", lambda name: version)
    assert doctor._check_version("torch", {"torch": floor}).verdict == verdict


def _refuse(backend: str) -> None:
    raise RuntimeError(f"no {backend} loops")


@pytest.mark.parametrize(
    ("version", "compile_it", "verdict", "found", "advice"),
    [
        (None, _refuse, "note", "absent: the backend is 'cpu'", "pip install --upgrade 'wandb-gradwatch[fast]'"),
        ("0.1", _refuse, "problem", "0.1, and it does not work: no compiled loops", "pip install --upgrade"),
        ("0.68", lambda backend: None, "good", "0.68: the backend is 'compiled'", ""),
    ],
)
def test_doctor_says_what_measures_on_the_cpu(
    version: str | None, compile_it: Any, verdict: str, found: str, advice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor.torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(doctor, "_version_or_none", lambda name: version)
    monkeypatch.setattr(doctor, "compile_for_cpu", compile_it)
    check = doctor._check_backend("numba")
    assert (check.verdict, check.found) == (verdict, found)
    assert advice in check.advice


@pytest.mark.parametrize(
    ("version", "failure", "verdict", "found"),
    [
        (None, None, "note", "absent"),
        (
            "3.2",
            RuntimeError("Failed to find C compiler."),
            "problem",
            "needs a C compiler but finds none: install gcc",
        ),
        ("3.9", None, "good", "3.9: the backend is 'cuda'"),
    ],
)
def test_doctor_says_what_measures_on_cuda_and_what_its_compiler_lacks(
    version: str | None, failure: Exception | None, verdict: str, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure(*_: object, **__: object) -> None:
        if failure is not None:
            raise failure

    monkeypatch.setattr(doctor.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(doctor.torch, "ones", lambda *_, **__: None)
    monkeypatch.setattr(doctor, "_version_or_none", lambda name: version)
    monkeypatch.setattr(doctor, "measure", measure)
    check = doctor._check_backend("triton")
    assert check.verdict == verdict
    assert found in check.found


@pytest.mark.parametrize(
    ("mode", "has_credentials", "verdict", "found"),
    [
        ("offline", False, "good", "mode offline"),
        ("disabled", True, "note", "mode disabled"),
        ("online", True, "good", "credentials for http://host found (not tried)"),
        ("online", False, "note", "no credentials for http://host"),
    ],
)
def test_the_login_is_judged_by_mode_and_credentials(
    mode: str, has_credentials: bool, verdict: str, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = types.SimpleNamespace(mode=mode, base_url="http://host")
    monkeypatch.setattr(doctor.wandb, "setup", lambda: types.SimpleNamespace(settings=settings))
    monkeypatch.setattr(doctor.wandb, "login", lambda **_: has_credentials)
    check = doctor._check_login()
    assert check.verdict == verdict
    assert found in check.found
    assert bool(check.advice) == (verdict == "note")


def say_login(variables: dict[str, str]) -> None:
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        del os.environ[name]
    os.environ.update(variables)
    print(doctor._check_login().found)


def test_the_login_is_checked_without_the_network(tmp_path: Path) -> None:
    # Nothing listens on port 9: a check that asked the server would fail. W&B reads its environment once per process.
    settings = {"HOME": str(tmp_path), "WANDB_BASE_URL": "http://127.0.0.1:9", "WANDB_API_KEY": "k" * 40}
    (ended,) = forked(say_login, (settings,))
    assert ended.stdout == "mode online, credentials for http://127.0.0.1:9 found (not tried)\n", ended.stderr


def test_overhead_is_the_middle_pairs_share_of_blocks_in_alternating_order(monkeypatch: pytest.MonkeyPatch) -> None:
    # Two warm-up blocks, then three pairs. The machine slows down by 1 ms per block; watching costs 10 % more.
    order: list[bool] = []

    def block(model: object, optimizer: object, batch: object, steps: int, *, watched: bool) -> float:
        order.append(watched)
        return (9.0 + len(order)) * (1.1 if watched else 1.0)

    monkeypatch.setattr(doctor, "_train_block", block)
    measured = doctor.measure_overhead(800)
    assert order == [False, True, False, True, True, False, False, True]
    # The pairs' blocks take 12..17 ms without watching, so the shares of watching in the watched blocks are
    # 1 - 12/14.3 = 0.1608, 1 - 15/15.4 = 0.0260, 1 - 16/18.7 = 0.1444. The median is the last.
    assert (measured.step_ms, measured.watched_step_ms) == pytest.approx((16, 18.7))
    assert measured.ratio == pytest.approx(1 - 16 / 18.7)
    assert measured.spread == pytest.approx(15 / 15.4 - 12 / 14.3)
    # 0.1444 / 0.01 = 14.4: every fifteenth step keeps it within 1 %.
    assert measured.sample_every == 15
    # Eight layers of 10 x 10 weights and 10 biases.
    assert measured.num_parameters == 880


def test_doctor_measures_a_real_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "STEPS_PER_BLOCK", 3)
    monkeypatch.setattr(doctor, "PAIRS", 2)
    result = run("doctor", "--parameters", "1k", "--json")
    measured = json.loads(result.stdout)["overhead"]
    assert min(measured["step_ms"], measured["watched_step_ms"]) > 0
    printed = run("doctor", "--parameters", "1k")
    assert (result.exit_code, printed.exit_code) == (0, 0)
    assert "ms without" in printed.stdout
    # "measure again" on a machine that is busy.
    assert "watch(model" in printed.stdout or "measure again" in printed.stdout


@pytest.mark.parametrize(
    ("ratio", "spread", "advice"),
    [
        (0.008, 0.01, "can measure every step"),
        (0.02, 0.01, "about one step in 7 "),
        (0.2, 0.01, "about one step in 7 "),
        (0.2, 0.3, "measure again when the machine is less busy"),
        (-0.02, 0.01, "can measure every step"),  # within the noise, and below zero
    ],
)
def test_the_advice_follows_the_measurement(ratio: float, spread: float, advice: str) -> None:
    measured = OverheadMeasurement("cpu", 880, 256, 10.0, 10.0 * (1 + ratio), ratio, spread, sample_every=7)
    assert advice in doctor._advice(measured)


def test_a_problem_and_its_advice_are_printed_together(capsys: pytest.CaptureFixture[str]) -> None:
    doctor._say_checks([Check("torch", "1.0", "problem", "upgrade it"), Check("numpy", "2.0")])
    assert capsys.readouterr().out.splitlines() == ["  ✗ torch  1.0", "           upgrade it", "  ✓ numpy  2.0"]


@pytest.mark.parametrize(("environment", "coloured"), [({}, True), ({"NO_COLOR": "1"}, False)])
def test_no_colour_where_it_is_unwanted(environment: dict[str, str], coloured: bool) -> None:
    result = run("doctor", "--no-measure", env=environment, color=True)
    assert ("\x1b[" in result.output) == coloured


def test_json_has_no_nan(capsys: pytest.CaptureFixture[str]) -> None:
    as_json({"a": float("nan"), "b": [1.5, float("inf")]})
    assert json.loads(capsys.readouterr().out) == {"a": None, "b": [1.5, None]}


def test_a_path_is_never_broken_in_two(capsys: pytest.CaptureFixture[str]) -> None:
    path = "folder/" * 30
    paragraph(f"look at {path} now", indent=2)
    assert path in capsys.readouterr().out
