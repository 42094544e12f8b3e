"""Inject failures, and compare the rows that arrived with the rows that were logged.

A W&B server on the loopback interface answers 500, hangs, drops connections or disappears; the process is killed or
forked, its disk is full, its clock jumps; a sink and a rule raise. Every scenario trains the same small model and logs
the user's rows beside those of the monitor. The exit status is 1 if a row is missing or duplicated.

    python -m benchmarks.faults [--steps 3000] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import wandb

import wandb_gradwatch
from benchmarks.machine import describe_machine
from benchmarks.rows import Tally, history_rows, steps_of, tally

ROOT = Path(__file__).parent.parent
sys.path.append(str(ROOT / "tests"))
from loopback import LoopbackServer, Trouble  # noqa: E402
from processes import inherited  # noqa: E402

LOG_EVERY = 5
_QUIET = {"console": "off", "disable_git": True, "silent": True, "x_disable_stats": True, "x_disable_meta": True}


@dataclass(frozen=True)
class Outcome:
    """The result of a scenario: what was logged, and what arrived."""

    scenario: str
    steps_per_s: float | None  # None: the process was killed
    faults: int
    ours: Tally
    users: Tally
    messages: int  # number of messages that the monitor logged


class TroubledServer(LoopbackServer):
    """Let every second request fail, at most `limit` of them, and count the failures."""

    def __init__(self, trouble: Trouble | None = None, limit: int = 0) -> None:
        super().__init__()
        self.injected = 0
        self._trouble, self._limit, self._asked = trouble, limit, 0

    def trouble_for(self, operation: str) -> Trouble | None:
        found = super().trouble_for(operation)
        self._asked += 1
        if found is None and self._asked % 2 and self.injected < self._limit:
            found = self._trouble
        self.injected += found is not None
        return found


class Messages(logging.Handler):
    """Count the monitor's log messages."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def emit(self, record: logging.LogRecord) -> None:
        self.count += 1


@contextmanager
def counted_messages() -> Iterator[Messages]:
    messages, logger = Messages(), logging.getLogger("wandb_gradwatch")
    logger.addHandler(messages)
    logger.propagate = False
    try:
        yield messages
    finally:
        logger.removeHandler(messages)
        logger.propagate = True


@contextmanager
def started(directory: str, server: LoopbackServer | None = None) -> Iterator[Any]:
    """Start a run that is finished at the end of the block."""
    if server is None:
        settings = wandb.Settings(mode="offline", **_QUIET)
    else:
        settings = server.settings(**_QUIET, finish_timeout=60.0)
        settings.x_file_stream_transmit_interval = 0.1  # many requests, so that enough of them fail
    run = wandb.init(project="faults", dir=directory, reinit="create_new", settings=settings)
    try:
        yield run
    finally:
        run.finish()


def train(run: Any, steps: int, at: Callable[[int], None] | None = None, **options: Any) -> float:
    """Train with the gradient {3, 4} and log a loss per step; return the steps per second."""
    model = torch.nn.Linear(2, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    batch = torch.tensor([[3.0, 4.0]])
    wandb_gradwatch.watch(
        model, **{"run": run, "sample_every": 1, "log_every": LOG_EVERY, "histogram_every": 0} | options
    )
    began = time.perf_counter()
    for number in range(steps):
        optimizer.zero_grad()
        model(batch).sum().backward()
        optimizer.step()
        run.log({"loss": float(number)}, step=number)
        if at is not None:
            at(number)
    return steps / (time.perf_counter() - began)


def counted(rows: list[dict[str, Any]], steps: int) -> tuple[Tally, Tally]:
    """Compare the rows with those that `steps` steps must have logged; a wrong value counts as a lost row."""
    right = [row for row in rows if row.get("gradwatch/grad_norm", 5.0) == 5.0]  # 9 + 16 = 25
    ours = tally(list(range(LOG_EVERY, steps + 1, LOG_EVERY)), steps_of(right))
    users = tally(
        [(number, float(number)) for number in range(steps)], [(r["_step"], r["loss"]) for r in rows if "loss" in r]
    )
    return ours, users


def server_in_trouble(trouble: Trouble | None, limit: int, steps: int) -> Outcome:
    """Let every second request fail at the beginning, in the middle and at the end of the training."""
    with (
        tempfile.TemporaryDirectory() as directory,
        TroubledServer(trouble, limit) as server,
        counted_messages() as messages,
    ):
        with started(directory, server) as run:
            speed = train(run, steps)
            if trouble == "hang":
                threading.Timer(2.0, server.heal).start()  # then hanging requests are dropped, and sent again
        ours, users = counted(server.runs[run.id].history, steps)
    names = {None: "none", "500": "server answers 500", "drop": "server drops connections", "hang": "server hangs"}
    return Outcome(names[trouble], speed, server.injected, ours, users, messages.count)


def server_gone(steps: int) -> Outcome:
    """The server disappears after the start of the run: the rows in the run's own file are counted."""
    with tempfile.TemporaryDirectory() as directory, counted_messages() as messages:
        server = TroubledServer()
        server.__enter__()
        with started(directory, server) as run:
            run.settings.finish_timeout = 1.0
            server.__exit__()
            speed = train(run, steps)
            file = Path(run.settings.sync_file)
        ours, users = counted(history_rows(file), steps)
    return Outcome("server is gone", speed, 1, ours, users, messages.count)


def offline(scenario: str, steps: int, faults: int, **how: Any) -> Outcome:
    """Run a scenario that needs no server."""
    with tempfile.TemporaryDirectory() as directory, counted_messages() as messages:
        with started(directory) as run:
            speed = train(run, steps, **how)
            file = Path(run.settings.sync_file)
        ours, users = counted(history_rows(file), steps)
    return Outcome(scenario, speed, faults, ours, users, messages.count)


class BrokenSink(wandb_gradwatch.Sink):
    """A sink that always raises."""

    def write(self, snapshot: object) -> None:
        raise OSError(28, "No space left on device")

    def alert(self, alert: object) -> None:
        raise OSError(28, "No space left on device")

    def close(self) -> None:
        raise OSError(28, "No space left on device")


def broken_rule(snapshot: object) -> None:
    raise ZeroDivisionError("a rule of the user's")


def fork_at(every: int) -> Callable[[int], None]:
    def fork(number: int) -> None:
        if number % every == 0:
            child = os.fork()
            if child == 0:
                os._exit(0)
            os.waitpid(child, 0)

    return fork


def clock_jumps(steps: int) -> Outcome:
    """Make time.time() jump by a day, forward or back, at every call."""
    now, calls = time.time, iter(range(10**9))

    def jumping() -> float:
        return now() + (-1) ** next(calls) * 86400.0

    with mock.patch.object(time, "time", jumping):
        seen = offline("clock jumps by a day", steps, 0)
    return replace(seen, faults=next(calls))


_PROGRAM = """
import os, signal, sys
sys.path[:0] = {path!r}
import wandb
from benchmarks.faults import train, started
steps, end, trouble = int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
with started(sys.argv[1]) as run:
    if trouble == "disk":
        import psutil, resource
        for process in [psutil.Process(), *psutil.Process().children(recursive=True)]:
            resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (16384, 16384))
    train(run, steps, at=lambda number: os.kill(os.getpid(), signal.SIGKILL) if number == end else None)
print("trained", flush=True)
"""


def processes_that_end(scenario: str, steps: int, ends: list[int], trouble: str) -> Outcome:
    """Each row of the monitor that was due by the last user's row that W&B kept must be there, once."""
    program = _PROGRAM.format(path=[str(ROOT), str(ROOT / "tests")])
    with tempfile.TemporaryDirectory() as folder:
        children = []
        for number, end in enumerate(ends):
            directory = Path(folder, str(number))
            directory.mkdir()
            command = [sys.executable, "-c", program, str(directory), str(steps), str(end), trouble]
            # The child needs its own wandb-core: this process's would survive the child, and not see its full disk.
            child = subprocess.Popen(command, env=inherited(), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
            children.append((directory, child))
        tallies, messages = [], 0
        for directory, child in children:
            output, errors = child.communicate()
            if trouble == "disk":
                assert b"trained" in output, errors.decode()
            messages += errors.count(b"wandb_gradwatch")
            [file] = directory.rglob("run-*.wandb")
            rows = history_rows(file)
            kept = len([row for row in rows if "loss" in row])
            tallies.append(counted(rows, kept))
    ours, users = (Tally(*map(sum, zip(*column, strict=True))) for column in zip(*tallies, strict=True))
    return Outcome(scenario, None, len(ends), ours, users, messages)


def scenarios(steps: int) -> Iterator[Callable[[], Outcome]]:
    """Return all scenarios, to be run one after the other."""
    yield lambda: server_in_trouble(None, 0, steps)
    yield lambda: server_in_trouble("500", 10, steps)
    yield lambda: server_in_trouble("drop", 10, steps)
    yield lambda: server_in_trouble("hang", 10, steps)
    yield lambda: server_gone(steps)
    yield lambda: processes_that_end("disk is full", steps, [-1], "disk")
    yield lambda: processes_that_end("kill -9", steps, [steps // 7 * part for part in (1, 3, 5, 6)], "")
    yield lambda: offline("forks, child ends", steps, len(range(0, steps, 100)), at=fork_at(100))
    yield lambda: clock_jumps(steps)
    yield lambda: offline("sink raises", steps, 1, sinks=[BrokenSink()])
    yield lambda: offline("rule raises", steps, 1, rules=[broken_rule])


def render(outcomes: list[Outcome]) -> str:
    """Return the results as a Markdown table."""
    lines = [
        "| trouble | steps/s | faults | rows due, ours + user's | lost | doubled | messages |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    lines += [
        f"| {seen.scenario} | {f'{seen.steps_per_s:,.0f}' if seen.steps_per_s else '–'} | {seen.faults:,} | "
        f"{seen.ours.expected:,} + {seen.users.expected:,} | {seen.ours.lost + seen.users.lost} | "
        f"{seen.ours.duplicated + seen.users.duplicated} | {seen.messages} |"
        for seen in outcomes
    ]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    outcomes = []
    for scenario in scenarios(arguments.steps):
        outcomes.append(scenario())
        print(render(outcomes).splitlines()[-1], file=sys.stderr, flush=True)
    print(render(outcomes))
    if arguments.json:
        found = {"machine": describe_machine(torch.device("cpu")), "outcomes": [asdict(seen) for seen in outcomes]}
        arguments.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    bad = [seen for seen in outcomes for part in (seen.ours, seen.users) if part.lost or part.duplicated]
    return 1 if bad else 0


if __name__ == "__main__":
    raise SystemExit(main())
