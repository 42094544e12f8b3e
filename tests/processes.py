"""Run tests' code in new processes, forked from a server that has imported the slow packages (see preloaded.py)."""

from __future__ import annotations

import atexit
import functools
import json
import multiprocessing
import os
import runpy
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from multiprocessing import connection, forkserver
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

ROOT = Path(__file__).parent.parent
_PATH = [str(ROOT), str(ROOT / "tests")]


class Ended(NamedTuple):
    """How a process ended. `returncode` is negative if a signal ended the process."""

    returncode: int
    stdout: str
    stderr: str


def inherited() -> dict[str, str]:
    """Return this process's environment without WANDB_SERVICE, the address of its wandb-core that wandb.init() adds.

    With that address a script would send its run to this process's wandb-core, which writes to another folder.
    """
    return {name: value for name, value in os.environ.items() if name != "WANDB_SERVICE"}


@functools.cache
def _fork_server() -> Any:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["preloaded"])
    # Before Python 3.12.8 the server does not inherit sys.path, so it needs PYTHONPATH to find `preloaded`.
    with mock.patch.dict(os.environ, PYTHONPATH=os.pathsep.join([*_PATH, os.environ.get("PYTHONPATH", "")])):
        forkserver.ensure_running()
    return context


def forked(
    function: Callable[..., object], *calls: Sequence[Any], timeout: float = 600, **environment: str
) -> list[Ended]:
    """Call a function with each tuple of arguments, each in its own process at the same time, and wait for all.

    If one process fails, or at the time limit, the others are killed, because they may wait for the failed one.

    Args:
        function: a function in a module that the processes can import.
        environment: variables that differ from those of this process.
    """
    variables = inherited() | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""} | environment
    with tempfile.TemporaryDirectory() as folder:
        outputs = [(f"{folder}/output{number}", f"{folder}/errors{number}") for number in range(len(calls))]
        children = [
            _fork_server().Process(target=_call, args=(function, call, variables, streams))
            for call, streams in zip(calls, outputs, strict=True)
        ]
        deadline = time.monotonic() + timeout
        try:
            for child in children:
                child.start()
            left = {child.sentinel: child for child in children}
            while ready := connection.wait(left, max(deadline - time.monotonic(), 0)):
                ended = [left.pop(sentinel) for sentinel in ready]
                for child in ended:
                    child.join()
                if not left or any(child.exitcode for child in ended):
                    break
        finally:
            for child in children:
                child.kill()
                child.join()
        read = [[Path(path).read_text() if os.path.exists(path) else "" for path in streams] for streams in outputs]
        return [Ended(child.exitcode, *texts) for child, texts in zip(children, read, strict=True)]


def _call(function: Callable[..., object], arguments: Sequence[Any], variables: dict[str, str], streams: Any) -> None:
    os.environ.clear()
    os.environ.update(variables)
    for number, path in enumerate(streams, start=1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), number)
    sys.path[:0] = [path for path in _PATH if path not in sys.path]
    # multiprocessing skips sys.excepthook and atexit, which W&B needs to record an exception and to finish runs.
    try:
        function(*arguments)
    except SystemExit:
        raise
    except BaseException as error:
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename in (__file__, "<frozen runpy>"):
            trace = trace.tb_next
        sys.excepthook(type(error), error, trace)
        raise SystemExit(1) from None
    finally:
        atexit._run_exitfuncs()


def script(path: Path, *arguments: Any, folder: Path, world: int = 1, **how: Any) -> Ended:
    """Run a script as `python PATH ARGUMENTS` does, offline. `folder` is its home, and holds its W&B runs.

    Args:
        world: the number of ranks, started as torchrun does; the outputs of all ranks are joined.
        how: `timeout` and environment variables for `forked`.
    """
    home: dict[str, Any] = {"HOME": str(folder), "WANDB_DIR": str(folder), "WANDB_MODE": "offline"} | how
    if world == 1:
        return forked(_run, (path, arguments, folder), **home)[0]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    home |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world)}
    home |= {"GROUP_RANK": "0", "TORCHELASTIC_RUN_ID": "tests", "GLOO_SOCKET_IFNAME": "lo"}
    each = [{"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(world)]
    ended = forked(_run, *((path, arguments, folder, variables) for variables in each), **home)
    status = next((one.returncode for one in ended if one.returncode), 0)
    return Ended(status, "".join(one.stdout for one in ended), "".join(one.stderr for one in ended))


def _run(path: Path, arguments: Sequence[Any], folder: Path, variables: dict[str, str] | None = None) -> None:
    os.environ.update(variables or {})
    os.chdir(folder)
    sys.argv = [str(path), *map(str, arguments)]
    runpy.run_path(str(path), run_name="__main__")


def launch(worker: str, folder: Path) -> tuple[list[dict[str, Any]], str]:
    """Run a program on two ranks; return the JSON that each has written to RANK.json, and their standard error."""
    program = folder / "worker.py"
    program.write_text(worker)
    ended = script(program, folder, folder=folder, world=2)
    assert ended.returncode == 0, ended.stderr[-4000:]
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in (0, 1)], ended.stderr
