"""What tests share: a home of their own, W&B runs that need no account, and a W&B server on the loopback interface."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from loopback import LoopbackServer
from processes import inherited

# Of a run that logs nothing by itself, and starts at once.
QUIET = {
    "console": "off",
    "disable_git": True,
    "finish_timeout": 30.0,  # a run whose server is gone would retry for days
    "save_code": False,
    "silent": True,
    "x_disable_meta": True,
    "x_disable_stats": True,
    "x_save_requirements": False,
}


@pytest.fixture(scope="session", autouse=True)
def isolated_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """An empty HOME and WANDB_DIR, and none of the caller's W&B variables, for this process and those it starts."""
    home = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("WANDB_")]:
            patch.delenv(name)
        patch.setenv("HOME", str(home))
        patch.setenv("WANDB_DIR", str(home))
        patch.setenv("WANDB_MODE", "offline")  # a test that forgets to say where still reaches nobody
        patch.setenv("WANDB_SILENT", "true")
        patch.setenv("WANDB_ERROR_REPORTING", "false")
        yield home
        if "wandb" in sys.modules:
            sys.modules["wandb"].teardown()


@pytest.fixture(scope="session")
def script_environment(isolated_home: Path) -> Callable[..., dict[str, str]]:
    """The environment of a script in a process of its own: `script_environment(WANDB_DIR=...)`.

    For runs on the loopback server add `**loopback.environment()`.
    """

    def environment(**more: str) -> dict[str, str]:
        return inherited() | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))} | more

    return environment


@pytest.fixture
def loopback() -> Iterator[LoopbackServer]:
    """A W&B server on 127.0.0.1: see `loopback.py`."""
    with LoopbackServer() as server:
        yield server


@pytest.fixture
def start_run(tmp_path: Path, loopback: LoopbackServer) -> Iterator[Callable[..., Any]]:
    """Start W&B runs that are finished with the test: `start_run(mode="offline", **wandb.init arguments)`.

    `server=` takes a `LoopbackServer` and makes the run an online one there; `settings=` takes a dict.
    """
    import wandb

    del loopback  # asked for so that it outlives the runs: finish() waits for its server
    runs = []

    def start(
        *,
        mode: str = "offline",
        server: LoopbackServer | None = None,
        settings: dict[str, Any] | None = None,
        **more: Any,
    ) -> Any:
        known = wandb.Settings.model_fields  # finish_timeout is younger than the oldest W&B that is supported
        quiet = {name: value for name, value in (QUIET | (settings or {})).items() if name in known}
        if server is None:
            chosen = wandb.Settings(mode=mode, **quiet)
        else:
            chosen = server.settings(**quiet | ({"mode": mode} if mode == "shared" else {}))
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
def said(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """What the package has said so far, through its logger."""
    return lambda: [record.getMessage() for record in caplog.records if record.name.startswith("wandb_gradwatch")]
