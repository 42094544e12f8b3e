"""A long run: does anything grow with the steps?

A tiny model is trained and watched for a million steps, or as many as fit into the time, and logs to an offline run as
users do. Printed at even distances: resident memory, open files, threads, Python objects, and the types of objects that
grew from every line to the next.

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
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import nn

import wandb_gradwatch
from benchmarks.harness import offline_run

_LINES = 20
_WARM_UP = 5000  # steps after which every history and cache of fixed size is full


class Soak:
    """A watched training that can go on and on. A context manager.

    Args:
        run: the W&B run.
        log_every: as of watch().
        user_logs: whether the script logs a loss at every step.
    """

    def __init__(self, *, run: Any, log_every: int = 50, user_logs: bool = True) -> None:
        torch.manual_seed(0)
        self._run, self._user_logs = run, user_logs
        self._model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=1e-3)
        self._batch = torch.randn(16, 8)
        self.watcher = wandb_gradwatch.watch(self._model, run=run, log_every=log_every)

    def __enter__(self) -> Soak:
        return self

    def __exit__(self, *_: object) -> None:
        self.watcher.remove()

    def steps(self, count: int) -> None:
        """Train on."""
        for _ in range(count):
            loss = self._model(self._batch).square().mean()
            loss.backward()
            self._optimizer.step()
            self._optimizer.zero_grad()
            if self._user_logs:
                self._run.log({"loss": 0.0})


def count_objects() -> Counter[str]:
    """Python objects that the collector knows, by type."""
    gc.collect()
    return Counter(type(thing).__name__ for thing in gc.get_objects())


def look(step: int) -> dict[str, Any]:
    """What the process holds now."""
    process = psutil.Process()
    objects = count_objects()
    return {
        "step": step,
        "rss_mib": process.memory_info().rss / 2**20,
        "open_files": process.num_fds() if hasattr(process, "num_fds") else process.num_handles(),
        "threads": threading.active_count(),
        "objects": sum(objects.values()),
        "by_type": objects,
    }


def growing_types(counts: list[Counter[str]]) -> dict[str, int]:
    """Types with more objects in every count than in the one before; one more is the count that was kept itself."""
    histories = {name: [count[name] for count in counts] for name in counts[-1]}
    return {
        name: history[-1] - history[0]
        for name, history in histories.items()
        if all(later > earlier + 1 for earlier, later in itertools.pairwise(history))
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--minutes", type=float, default=10.0, help="end here, however many steps were made")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    began = time.perf_counter()
    looks = []
    with offline_run() as run, Soak(run=run) as soak:
        soak.steps(_WARM_UP)
        done = _WARM_UP
        looks.append(look(done))
        block = max(1, (arguments.steps - done) // _LINES)
        while done < arguments.steps and time.perf_counter() - began < arguments.minutes * 60:
            until = min((len(looks)) / _LINES, 1.0) * arguments.minutes * 60
            for _ in range(block // 1000 + 1):
                soak.steps(1000)
                done += 1000
                if time.perf_counter() - began > until:
                    break
            looks.append(look(done))
            print({key: value for key, value in looks[-1].items() if key != "by_type"}, file=sys.stderr)
    seconds = time.perf_counter() - began
    summary = {
        "steps": done,
        "minutes": round(seconds / 60, 1),
        "rss_mib": [round(looks[0]["rss_mib"], 1), round(looks[-1]["rss_mib"], 1)],
        "open_files": [looks[0]["open_files"], looks[-1]["open_files"]],
        "threads": [looks[0]["threads"], looks[-1]["threads"]],
        "objects": [looks[0]["objects"], looks[-1]["objects"]],
        "growing_types": growing_types([look["by_type"] for look in looks]),
    }
    print(json.dumps(summary, indent=1))
    if arguments.json:
        arguments.json.write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
