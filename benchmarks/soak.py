"""Train for a long time, and check that resources do not grow with the number of steps.

A tiny model is trained and watched for a million optimizer steps and logs to an offline run. A tenth of the steps are
all sampled, of the rest every tenth. Resident memory, open files, threads and Python objects are printed at twenty
points of each part, and at the end their slopes, and the types of objects that grew from every point to the next. The
exit status is 1 if something grew, or a row is missing.

    python -m benchmarks.soak [--steps 1000000] [--minutes 10] [--json FILE]
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import sys
import threading
import time
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from torch import nn

import wandb_gradwatch
from benchmarks.machine import describe_machine
from benchmarks.rows import history_rows, steps_of, tally
from benchmarks.traffic import offline_run
from wandb_gradwatch import Snapshot
from wandb_gradwatch.rules import Alert
from wandb_gradwatch.sinks import Sink, WandbSink

_POINTS = 20
_WARM_UP = 5000  # steps after which every history and cache of fixed size is full
_ALLOWED_MIB = 4.0  # between the first and the last quarter of a part, because the allocator's memory varies


@dataclass(frozen=True)
class Part:
    """A share of the steps, and the options of watch() for them."""

    share: float
    sample_every: int
    log_every: int


PARTS = (Part(0.1, sample_every=1, log_every=50), Part(0.9, sample_every=10, log_every=500))


@dataclass(frozen=True)
class Look:
    """The resources of the process after a number of steps."""

    step: int
    rss_mib: float
    open_files: int
    threads: int
    objects: int
    by_type: Counter[str]


class CountingSink(Sink):
    """Count the rows and samples that sinks receive, which should all be in the run's file."""

    def __init__(self) -> None:
        self.rows = self.samples = 0

    def write(self, snapshot: Snapshot) -> None:
        self.rows, self.samples = self.rows + 1, self.samples + len(snapshot)

    def alert(self, alert: Alert) -> None:
        """Fail: the training is healthy, so an alert is a false alarm."""
        raise AssertionError(alert.text)

    def close(self) -> None:
        """Do nothing."""


class Soak:
    """A watched training of any length, as a context manager.

    Args:
        run: the W&B run.
        sample_every, log_every: as of watch().
        user_logs_every: the script logs a loss at every such step; 0: never.
        rules: as of watch().
    """

    def __init__(
        self, *, run: Any, sample_every: int = 1, log_every: int = 50, user_logs_every: int = 1, rules: Any = None
    ) -> None:
        torch.manual_seed(0)
        self._run, self._user_logs_every = run, user_logs_every
        self._model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=1e-3)
        self._batch = torch.randn(16, 8)
        self.counted = CountingSink()
        self.watcher = wandb_gradwatch.watch(
            self._model,
            sinks=[WandbSink(run), self.counted],
            sample_every=sample_every,
            log_every=log_every,
            rules=rules,
        )
        self.done = 0

    def __enter__(self) -> Soak:
        return self

    def __exit__(self, *_: object) -> None:
        self.watcher.remove()

    def steps(self, count: int) -> None:
        """Continue the training."""
        for _ in range(count):
            loss = self._model(self._batch).square().mean() + 1.0
            loss.backward()
            self._optimizer.step()
            self._optimizer.zero_grad()
            self.done += 1
            if self._user_logs_every and self.done % self._user_logs_every == 0:
                self._run.log({"loss": 0.0})


def count_objects() -> Counter[str]:
    """Return the number of Python objects that the garbage collector tracks, by type."""
    gc.collect()
    return Counter(type(thing).__name__ for thing in gc.get_objects())


def look(step: int) -> Look:
    """Return the current resources of the process."""
    process = psutil.Process()
    objects = count_objects()
    return Look(
        step,
        process.memory_info().rss / 2**20,
        process.num_fds() if hasattr(process, "num_fds") else process.num_handles(),
        threading.active_count(),
        sum(objects.values()),
        objects,
    )


def growing_types(counts: list[Counter[str]]) -> dict[str, int]:
    """Return types whose number grew from every count to the next, by more than the stored count itself."""
    histories = {name: [count[name] for count in counts] for name in counts[-1]}
    return {
        name: history[-1] - history[0]
        for name, history in histories.items()
        if all(later > earlier + 1 for earlier, later in itertools.pairwise(history))
    }


def slopes(looks: list[Look]) -> dict[str, float]:
    """Return the growth of each number per million steps, by least squares over all points."""
    steps = [point.step / 1e6 for point in looks]
    names = ("rss_mib", "open_files", "threads", "objects")
    return {name: float(np.polyfit(steps, [getattr(point, name) for point in looks], 1)[0]) for name in names}


def what_grew(looks: list[Look]) -> list[str]:
    """Describe what has grown; empty if nothing has."""
    found = [f"{more} more {name}" for name, more in growing_types([point.by_type for point in looks]).items()]
    for name in ("open_files", "threads"):
        first, last = getattr(looks[0], name), getattr(looks[-1], name)
        if last > first:
            found.append(f"{name}: {first}, then {last}")
    quarter = max(1, len(looks) // 4)
    early, late = (float(np.median([point.rss_mib for point in part])) for part in (looks[:quarter], looks[-quarter:]))
    if late - early > _ALLOWED_MIB:
        found.append(f"resident memory: {early:.1f} MiB, then {late:.1f}")
    return found


def soak(run: Any, part: Part, steps: int, deadline: float, points: int = _POINTS) -> dict[str, Any]:
    """Run one part and print its measurements; it ends at the deadline of `time.perf_counter` at the latest."""
    looks: list[Look] = []
    with Soak(
        run=run, sample_every=part.sample_every, log_every=part.log_every, user_logs_every=part.log_every
    ) as training:
        began, cpu = time.perf_counter(), time.process_time()
        training.steps(min(_WARM_UP, steps // 4))
        block = (steps - training.done) // points
        for _ in range(points):
            if time.perf_counter() > deadline:
                break
            training.steps(block)
            looks.append(look(training.done))
            point = {name: value for name, value in asdict(looks[-1]).items() if name != "by_type"}
            print(f"sample_every={part.sample_every}", point, file=sys.stderr, flush=True)
        seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
    return {
        "sample_every": part.sample_every,
        "log_every": part.log_every,
        "steps": training.done,
        "seconds": round(seconds, 1),
        "cpu_us_per_step": round(cpu / training.done * 1e6, 1),
        "samples": training.counted.samples,
        "samples_expected": training.done // part.sample_every,
        "rows": training.counted.rows,
        "rss_mib": [round(point.rss_mib, 1) for point in looks],
        "open_files": [looks[0].open_files, looks[-1].open_files],
        "threads": [looks[0].threads, looks[-1].threads],
        "objects": [looks[0].objects, looks[-1].objects],
        "per_million_steps": {name: round(value, 2) for name, value in slopes(looks).items()},
        "grew": what_grew(looks),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--minutes", type=float, default=10.0, help="end here, however many steps were made")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    deadline = time.perf_counter() + arguments.minutes * 60
    with offline_run() as run:
        parts = [soak(run, part, int(arguments.steps * part.share), deadline) for part in PARTS]
        run.finish()
        rows = tally(
            [step for part in parts for step in range(part["log_every"], part["steps"] + 1, part["log_every"])],
            steps_of(history_rows(Path(run.settings.sync_file))),
        )
    seen = {
        "machine": describe_machine(torch.device("cpu")),
        "steps": sum(part["steps"] for part in parts),
        "minutes": round(sum(part["seconds"] for part in parts) / 60, 1),
        "parts": parts,
        "rows": rows._asdict(),
    }
    print(json.dumps(seen, indent=1))
    if arguments.json:
        arguments.json.write_text(json.dumps(seen, indent=1) + "\n", encoding="utf-8")
    whole = seen["steps"] == arguments.steps and all(part["samples"] == part["samples_expected"] for part in parts)
    return 0 if whole and not (rows.lost or rows.duplicated or any(part["grew"] for part in parts)) else 1


if __name__ == "__main__":
    raise SystemExit(main())
