"""Only one process compiles. The others wait until it has compiled or ended, for a limited time."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from wandb_gradwatch._measure import compilation
from wandb_gradwatch._measure.compilation import after_other_processes

fcntl = pytest.importorskip("fcntl", reason="Windows knows no such locks")

FOREVER = 60.0  # seconds: a test that waits for so long has failed

HOLDER = """
import sys
from wandb_gradwatch._measure.compilation import after_other_processes
with after_other_processes("kernel", longest=0.0):
    print("holds", flush=True)
    sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def locks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)  # TMPDIR is looked at again


@pytest.fixture
def holder() -> Iterator[subprocess.Popen[str]]:
    """A process that compiles a kernel for as long as it lives."""
    process = subprocess.Popen([sys.executable, "-c", HOLDER], stdin=-1, stdout=-1, text=True)
    assert process.stdin is not None
    assert process.stdout is not None
    with process:
        assert process.stdout.readline() == "holds\n"
        yield process
        process.kill()


def go_on(longest: float, what: str = "kernel") -> tuple[threading.Thread, threading.Event]:
    """A thread that waits for the lock, and whether it has gone on."""
    has_gone_on = threading.Event()

    def wait() -> None:
        with after_other_processes(what, longest=longest):
            has_gone_on.set()

    thread = threading.Thread(target=wait)
    thread.start()
    return thread, has_gone_on


def test_those_that_wait_go_on_together_when_the_first_is_done(holder: subprocess.Popen[str]) -> None:
    waiting = [go_on(FOREVER) for _ in range(3)]
    assert not any(has_gone_on.wait(0.1) for _, has_gone_on in waiting)
    assert holder.stdin is not None
    holder.stdin.close()
    for thread, has_gone_on in waiting:
        thread.join(FOREVER / 2)
        assert has_gone_on.is_set()


def test_what_nobody_else_compiles_is_not_waited_for(holder: subprocess.Popen[str]) -> None:
    thread, has_gone_on = go_on(FOREVER, what="another kernel")
    thread.join(FOREVER / 2)
    assert has_gone_on.is_set()


def test_a_process_that_was_killed_while_it_compiles_holds_up_no_other(holder: subprocess.Popen[str]) -> None:
    thread, has_gone_on = go_on(FOREVER)
    assert not has_gone_on.wait(0.1)
    holder.kill()
    thread.join(FOREVER / 2)
    assert has_gone_on.is_set()


def test_a_process_that_was_stopped_while_it_compiles_holds_up_others_for_so_long_only(
    holder: subprocess.Popen[str],
) -> None:
    os.kill(holder.pid, signal.SIGSTOP)
    thread, has_gone_on = go_on(0.2)
    assert not has_gone_on.wait(0.1)
    thread.join(FOREVER / 2)
    assert has_gone_on.is_set()


@pytest.mark.parametrize("folder", ["missing", "file"])
def test_without_a_folder_for_locks_everybody_compiles(
    folder: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(compilation, "_lock_file", lambda what: tmp_path / folder / what)
    with after_other_processes("kernel", longest=0.0), after_other_processes("kernel", longest=0.0):
        pass
