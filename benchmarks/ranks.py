"""Real processes that merge over a tree of groups, as many as asked for: connections, bytes and time of each.

    python -m benchmarks.ranks --ranks 64 [--group 32] [--numbers 100000]

Every rank is a forked process that holds nothing but its part of the tree, about 4 MiB, so that hundreds fit on one
machine. Times are those of this machine's few cores doing everybody's work.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
import torch.distributed as dist

from wandb_gradwatch.rank_tree import GROUP, RankTree

_WAIT = timedelta(seconds=120)
_ROUNDS = 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--group", type=int, default=GROUP)
    parser.add_argument("--numbers", type=int, default=100_000, help="float64 values that are merged")
    arguments = parser.parse_args()
    print(json.dumps(measure(arguments.ranks, arguments.group, arguments.numbers)))


def measure(world: int, size: int, numbers: int) -> dict[str, Any]:
    """Fork the ranks, let them merge; what rank 0, which is first in all its groups, and the median rank took."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        children = []
        for rank in range(world):
            child = os.fork()
            if child == 0:
                status = 1
                try:
                    found = _rank(rank, world, size, numbers, port)
                    Path(folder, str(rank)).write_text(json.dumps(found), encoding="utf-8")
                    status = 0
                finally:
                    os._exit(status)
            children.append(child)
        codes = [os.waitpid(child, 0)[1] for child in children]
        assert not any(codes), f"{sum(map(bool, codes))} of {world} ranks failed"
        ranks = [json.loads(Path(folder, str(rank)).read_text(encoding="utf-8")) for rank in range(world)]
    middle = {name: statistics.median(found[name] for found in ranks) for name in ranks[0]}
    return {
        "ranks": world,
        "group": size,
        "numbers": numbers,
        "first": ranks[0],
        "median": middle,
        "wrong": sum(not found["right"] for found in ranks),
    }


def _rank(rank: int, world: int, size: int, numbers: int, port: int) -> dict[str, float]:
    store = dist.TCPStore("127.0.0.1", port, is_master=rank == 0, wait_for_workers=False, timeout=_WAIT)
    _all_here(store, "started", world)
    files = psutil.Process().num_fds()
    began = time.perf_counter()
    tree = RankTree(dist.PrefixStore("tree", store), rank, world, _WAIT, size=size)
    met = time.perf_counter() - began
    files = psutil.Process().num_fds() - files
    right = True
    sent, taken = _bytes_written(), []
    for _ in range(_ROUNDS):
        values = np.ones(numbers)
        began = time.perf_counter()
        tree.all_reduce(values, dist.ReduceOp.SUM)
        taken.append(time.perf_counter() - began)
        right = right and bool((values == world).all())
    found = {
        "files": files,
        "meeting_s": met,
        "merge_ms": statistics.median(taken) * 1e3,
        "times_sent": (_bytes_written() - sent) / _ROUNDS / (8 * numbers),
        "right": right,
    }
    _all_here(store, "done", world)
    if rank == 0:
        if world > 1:
            store.wait(["left"], _WAIT)  # the store's server is the last to go
    elif store.add("leaving", 1) == world - 1:
        store.set("left", "")
    return found


def _all_here(store: dist.TCPStore, name: str, world: int) -> None:
    if store.add(name, 1) == world:
        store.set(f"{name}, all", "")
    store.wait([f"{name}, all"], _WAIT)


def _bytes_written() -> int:
    """What this process has written so far; gloo's messages are all that it writes."""
    [line] = [line for line in Path("/proc/self/io").read_text().splitlines() if line.startswith("wchar")]
    return int(line.split()[1])


if __name__ == "__main__":
    main()
