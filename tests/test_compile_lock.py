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

# The module alone: with the package a program would also import torch, which takes seconds.
LOAD = f"""
import importlib.util, os, sys, threading
spec = importlib.util.spec_from_file_location("compilation", {compilation.__file__!r})
compilation = importlib.util.module_from_spec(spec)
spec.loader.exec_module(compilation)
"""
HOLDER = """
with compilation.after_other_processes("kernel", longest=0.0):
    print("holds", flush=True)
    sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def locks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)  # TMPDIR is looked at again


@pytest.fixture
def holder() -> Iterator[subprocess.Popen[str]]:
    """A process that compiles a kernel for as long as it lives."""
    process = subprocess.Popen([sys.executable, "-c", LOAD + HOLDER], stdin=-1, stdout=-1, text=True)
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


def test_the_lock_is_in_the_users_own_cache_where_nobody_else_can_write(tmp_path: Path) -> None:
    with after_other_processes("kernel", longest=0.0):
        pass
    folder = tmp_path / "cache" / "wandb-gradwatch"
    (lock,) = folder.iterdir()
    assert folder.stat().st_mode & 0o077 == lock.stat().st_mode & 0o077 == 0


def plant(kind: str, lock: Path, target: Path) -> None:
    """Put something in the lock's place, as another user could in a shared folder."""
    if kind == "link":
        lock.symlink_to(target)
    elif kind == "fifo":
        os.mkfifo(lock)
    else:
        lock.mkdir()


@pytest.mark.parametrize("kind", ["link", "fifo", "folder"])
def test_what_is_planted_in_the_locks_place_is_neither_followed_nor_waited_for(kind: str, tmp_path: Path) -> None:
    with after_other_processes("kernel", longest=0.0):
        pass
    (lock,) = (tmp_path / "cache" / "wandb-gradwatch").iterdir()
    lock.unlink()
    plant(kind, lock, tmp_path / "target")
    thread, has_gone_on = go_on(FOREVER)
    thread.join(FOREVER / 2)
    assert has_gone_on.is_set()
    assert not (tmp_path / "target").exists()


@pytest.mark.parametrize("planted", ["link", "file", "writable by others"])
def test_a_folder_that_others_control_is_not_used(planted: str, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (tmp_path / "cache").touch()  # no folder can be made there
    (tmp_path / "home").touch()
    folder = tmp_path / f"wandb-gradwatch-{os.geteuid()}"
    if planted == "link":
        folder.symlink_to(elsewhere)
    elif planted == "file":
        folder.touch()
    else:
        folder.mkdir()
        folder.chmod(0o777)
    with after_other_processes("kernel", longest=0.0), after_other_processes("kernel", longest=0.0):
        pass
    assert not any(elsewhere.iterdir())
    assert not folder.is_dir() or not any(folder.iterdir())


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder to another user")
def test_a_folder_of_another_user_is_not_used(tmp_path: Path) -> None:
    (tmp_path / "cache").touch()
    (tmp_path / "home").touch()
    folder = tmp_path / f"wandb-gradwatch-{os.geteuid()}"
    folder.mkdir(mode=0o700)
    os.chown(folder, 65534, 65534)
    with after_other_processes("kernel", longest=0.0):
        pass
    assert not any(folder.iterdir())


# The compilation waits for the holder, which goes on for as long as the test does.
WAITS = """
waits = threading.Event()
compilation._has_locked = lambda file, how, real=compilation._has_locked: real(file, how) or waits.set()
waiting = compilation.Compilation(lambda: "made", name="kernel")
waiting.start()
assert waits.wait(60)
"""
FORKS = """
child = os.fork()
if child == 0:
    again = compilation.Compilation(lambda: "made")
    os._exit(0 if waiting.made is None and again.wait() == "made" and waiting._thread is None else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert waiting.made is None  # it still waits
"""


def run(program: str) -> None:
    """Run a program that must end, without an error, long before the holder does."""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=FOREVER / 2)
    assert (ended.returncode, ended.stderr) == (0, "")


@pytest.mark.parametrize("then", ["", FORKS], ids=["exit", "fork and exit"])
def test_neither_an_exit_nor_a_fork_waits_for_another_process(then: str, holder: subprocess.Popen[str]) -> None:
    run(LOAD + WAITS + then)


def test_a_forked_child_can_compile_what_its_parent_waits_for(holder: subprocess.Popen[str]) -> None:
    in_child = """
child = os.fork()
if child == 0:
    waiting._name = None  # otherwise the child would wait as well
    os._exit(0 if waiting.wait() == "made" else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
"""
    run(LOAD + WAITS + in_child)


def test_without_a_folder_for_locks_everybody_compiles(tmp_path: Path) -> None:
    for name in ("cache", "home", f"wandb-gradwatch-{os.geteuid()}"):
        (tmp_path / name).touch()
    with after_other_processes("kernel", longest=0.0), after_other_processes("kernel", longest=0.0):
        pass
