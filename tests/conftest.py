"""Fixtures for all tests: an isolated home, W&B runs without an account, and a W&B server on the loopback interface."""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from loopback import LoopbackServer

# W&B settings of every run, including those of scripts: W&B is offline and collects no data by itself.
QUIET = {
    "DISABLE_GIT": "true",
    "ERROR_REPORTING": "false",
    "MODE": "offline",  # so that a test without an explicit mode does not use the network
    "SAVE_CODE": "false",
    "SILENT": "true",
    "X_DISABLE_META": "true",
    "X_DISABLE_STATS": "true",
    "X_SAVE_REQUIREMENTS": "false",
}


def pytest_configure(config: pytest.Config) -> None:
    """Set the number of examples of property tests: 20 without slow tests, otherwise 100. No test has a deadline."""
    settings.register_profile("few", max_examples=20, deadline=None)
    settings.register_profile("many", max_examples=100, deadline=None)
    settings.load_profile("few" if config.option.markexpr == "not slow" else "many")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Extend `--dist loadfile`: one worker runs all files whose tests start processes, so there is one fork server.

    The groups of pytest-xdist have no effect under pytest 9.
    """
    from xdist.scheduler import LoadFileScheduling

    starts = re.compile("^(from processes import|import ranks)", re.MULTILINE)
    starting = {path.name for path in Path(__file__).parent.glob("test_*.py") if starts.search(path.read_text("utf-8"))}

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file: str = super()._split_scope(nodeid)
            return "processes" if file.rpartition("/")[2] in starting else file

    return Scheduling(config, log) if config.getvalue("dist") == "loadfile" else None


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print into how many functions test_injections.py has injected an exception."""
    found = {outcome: terminalreporter.stats.get(outcome, []) for outcome in ("passed", "failed")}
    properties = [dict(report.user_properties) for reports in found.values() for report in reports]
    injections = [one for one in properties if "injected" in one]
    if injections:
        num_failed = sum("injected" in dict(report.user_properties) for report in found["failed"])
        terminalreporter.write_line(
            f"{sum(one['injected'] for one in injections)} exceptions injected in "
            f"{len({one['configuration'] for one in injections})} trainings: "
            + (f"{num_failed} tests have failed" if num_failed else "0 reached the loop")
        )


@pytest.fixture(scope="session", autouse=True)
def isolated_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Set an empty HOME and WANDB_DIR and remove the caller's W&B variables, for this process and its children."""
    home = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("WANDB_")]:
            patch.delenv(name)
        patch.setenv("HOME", str(home))
        patch.setenv("WANDB_DIR", str(home))
        for name, value in QUIET.items():
            patch.setenv(f"WANDB_{name}", value)
        yield home
        if "wandb" in sys.modules:
            sys.modules["wandb"].teardown()


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait for every answer of W&B's process: on a busy machine, too, a row is placed where the test expects it."""
    monkeypatch.setattr("wandb_gradwatch.sinks._row_scheduler.PATIENCE", None)


@pytest.fixture(autouse=True)
def new_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget which messages this process has said: each test finds the state of a process that begins."""
    monkeypatch.setattr("wandb_gradwatch._runtime.notices.Notices.said_in_process", set())


@pytest.fixture
def loopback() -> Iterator[LoopbackServer]:
    """A W&B server on 127.0.0.1, which records what runs send (see `loopback.py`)."""
    with LoopbackServer() as server:
        yield server


@pytest.fixture
def start_run(tmp_path: Path, loopback: LoopbackServer) -> Iterator[Callable[..., Any]]:
    """Start W&B runs that end with the test: `start_run(mode="offline", **wandb.init arguments)`.

    `server=` takes a `LoopbackServer` that an online run uses; `settings=` takes a dict of W&B settings.
    """
    import wandb

    del loopback  # requested only so that the server outlives the runs: finish() waits for it
    runs = []

    def start(
        *,
        mode: str = "offline",
        server: LoopbackServer | None = None,
        settings: dict[str, Any] | None = None,
        **more: Any,
    ) -> Any:
        quiet = {"console": "off", "finish_timeout": 30.0} | (settings or {})  # finish() would wait for days
        chosen = wandb.Settings(mode=mode, **quiet)
        if server is not None:
            chosen = server.settings(mode="shared" if mode == "shared" else "online", **quiet)
        run = wandb.init(
            **{"project": "loopback", "dir": str(tmp_path), "reinit": "create_new"} | more, settings=chosen
        )
        runs.append(run)
        return run

    yield start
    for run in runs:
        run.finish()


@pytest.fixture
def offline_run(start_run: Callable[..., Any]) -> Any:
    """One offline run."""
    return start_run()


@pytest.fixture
def watched() -> Iterator[Callable[..., Any]]:
    """Make a model with parameters of these sizes, watched until the test ends; return it, its SGD and its sink."""
    import torch
    from gradients import Chosen, watch

    with contextlib.ExitStack() as stack:

        def make(sizes: dict[str, int], *, fused: bool = False, lr: float = 1.0, **options: Any) -> Any:
            model = Chosen(**sizes)
            watcher, sink = watch(model, **options)
            stack.callback(watcher.remove)
            return model, torch.optim.SGD(model.parameters(), lr=lr, fused=fused), sink

        yield make


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """A function that returns the messages that the package has logged so far."""
    return lambda: [record.getMessage() for record in caplog.records if record.name.startswith("wandb_gradwatch")]
