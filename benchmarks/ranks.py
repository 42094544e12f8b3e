"""Merge over a tree of groups with any number of real processes: connections, bytes and time of each.

    python -m benchmarks.ranks --ranks 64 [--group 32] [--numbers 100000]

Every rank is a forked process that holds only its part of the tree, about 4 MiB, so that hundreds fit on one machine.
The times include waiting for this machine's few cores, which all ranks share.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

from wandb_gradwatch._measure.columns import FloatArray
from wandb_gradwatch._measure.probe_values import ArrivedSums
from wandb_gradwatch._pipeline.rank_parts import united
from wandb_gradwatch._pipeline.rank_tree import GROUP, RankTree, places
from wandb_gradwatch._pipeline.replicas import _starts, compare
from wandb_gradwatch.metrics import Ranks
from wandb_gradwatch.metrics._module_probe import ReadByProbe
from wandb_gradwatch.metrics._ranks import _FIELDS
from wandb_gradwatch.snapshot import keys

_WAIT = timedelta(seconds=120)
_ROUNDS = 5
_MERGES = 3  # per flush: the agreement, the sums, the extremes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--group", type=int, default=GROUP)
    parser.add_argument("--numbers", type=int, default=100_000, help="float64 values that are merged")
    arguments = parser.parse_args()
    print(json.dumps(measure(arguments.ranks, arguments.group, arguments.numbers)))


def measure(world: int, size: int, numbers: int) -> dict[str, Any]:
    """Fork the ranks and let them merge; return the cost of the median rank and of rank 0, first in all its groups."""
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
            store.wait(["left"], _WAIT)  # the process with the store's server ends last
    elif store.add("leaving", 1) == world - 1:
        store.set("left", "")
    return found


def _all_here(store: dist.TCPStore, name: str, world: int) -> None:
    if store.add(name, 1) == world:
        store.set(f"{name}, all", "")
    store.wait([f"{name}, all"], _WAIT)


def _bytes_written() -> int:
    """Return the bytes that this process has written so far, which are all gloo's messages."""
    [line] = [line for line in Path("/proc/self/io").read_text().splitlines() if line.startswith("wchar")]
    return int(line.split()[1])


def measured_scale(ranks: int, pieces: dict[str, float]) -> dict[str, float]:
    """Measure what rank 0 does for all ranks, in the background, and compute the store's share."""
    groups = len(_starts(1000, ranks))
    headers, sums = np.ones((ranks, 3)), np.ones((ranks, 3, groups))
    parts = [json.dumps([(f"layers.{stage}.{place}", [8, 8], True, 0) for place in range(100)]) for stage in range(8)]
    of_parts = {part: [*range(place, ranks, 8)] for place, part in enumerate(parts)}
    of_each = ReadByProbe(len(_FIELDS), side_by_side=True)
    numbers = ArrivedSums(tuple(np.random.default_rng(0).random(ranks * len(_FIELDS))), of_each, None)
    return {
        "ranks": ranks,
        "publications_s": ranks / pieces["requests_per_s"],
        "publication_bytes": 16 * 8 * (3 + 3 * groups),
        "compare_ms": _median_ms(lambda: compare(headers, sums, None, is_first=True)),
        "unite_ms": _median_ms(lambda: united(of_parts)),
        "united_bytes": len(united(of_parts)),
        "derive_ms": _median_ms(lambda: Ranks().derive({keys.RANKS: numbers})),
    }


def _median_ms(action: Callable[[], object]) -> float:
    """Processor time, which other programs disturb less than wall time."""
    taken = []
    for _ in range(_ROUNDS):
        began = time.process_time()
        action()
        taken.append(time.process_time() - began)
    return statistics.median(taken) * 1e3


def measured_tree(world: int) -> dict[str, Any]:
    """Run this module with that many ranks in a new interpreter, because the ranks are forked."""
    command = [sys.executable, "-m", "benchmarks.ranks", "--ranks", str(world)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parent.parent)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def measure_pieces() -> dict[str, float]:
    """Measure the quantities from which the figures for thousands of ranks are computed."""
    pair = measured_message()
    # 33 ranks: rank 0 is the first of a group of 32 below and one of two at the top, where it sends the values once.
    tree = measured_tree(GROUP + 1)
    return pair | {
        "first_sends": tree["first"]["times_sent"] - 1.0,
        "member_sends": tree["median"]["times_sent"],
        "requests_per_s": requests_per_second(),
    }


def measured_message() -> dict[str, float]:
    """Measure microseconds per message and bytes per second between two processes over loopback."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "pair"
        multiprocessing.spawn(_pair, (str(path),), nprocs=2)
        found = json.loads(Path(f"{path}.json").read_text(encoding="utf-8"))
    # Each of R = 2 ranks sends 2 (R - 1) = 2 messages, and 2 (R - 1) / R = 1 times the data.
    return {
        "message_us": found["small_us"] / 2,
        "gb_per_s": found["large_bytes"] / ((found["large_us"] - found["small_us"]) * 1e3),
    }


def _pair(rank: int, path: str) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    tree = RankTree(dist.FileStore(path, 2), rank, 2, timedelta(seconds=60))
    small, large = np.zeros(1), np.zeros(2**19)
    times = {name: _all_reduce_us(tree, values) for name, values in (("small_us", small), ("large_us", large))}
    if rank == 0:
        Path(f"{path}.json").write_text(json.dumps(times | {"large_bytes": large.nbytes}), encoding="utf-8")


def _all_reduce_us(tree: RankTree, values: FloatArray) -> float:
    taken = []
    for _ in range(30):
        began = time.perf_counter()
        tree.all_reduce(values, dist.ReduceOp.SUM)
        taken.append(time.perf_counter() - began)
    return statistics.median(taken) * 1e6


def requests_per_second(count: int = 1000) -> float:
    """Measure the requests per second of a TCPStore in another process for one client, the best of ten times."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        port = pool.apply(_serve)
        store = dist.TCPStore("127.0.0.1", port, is_master=False)
        store.set("key", "x" * 120)  # about the size of a rank's address
        taken = []
        for _ in range(10):
            began = time.perf_counter()
            for _ in range(count):
                store.get("key")
            taken.append(time.perf_counter() - began)
        return count / min(taken)


_SERVED: list[dist.TCPStore] = []


def _serve() -> int:
    _SERVED.append(dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False))
    return int(_SERVED[0].port)


def computed(num_bytes: float, ranks: int, pieces: dict[str, float]) -> dict[str, float]:
    """Compute rank 0's cost of one flush of this many bytes, its connections, and the cost of connecting.

    Rank 0 is the first of all its groups. A reduction in a group of n passes 2 (n - 1) messages in sequence (a ring,
    then to the first), a broadcast log2(n), the all-reduce at the top 2 (n - 1).
    """
    levels = list(places(0, ranks, GROUP))
    factor = sum(2 * (place.size - 1) / place.size if place.is_top else pieces["first_sends"] for place in levels)
    messages = sum(2 * (place.size - 1) + (0 if place.is_top else math.ceil(math.log2(place.size))) for place in levels)
    meetings = sum(sum(place.size for place in places(rank, ranks, GROUP)) for rank in range(ranks))
    return {
        "sent": factor * num_bytes,
        "seconds": _MERGES * messages * pieces["message_us"] * 1e-6 + factor * num_bytes / (pieces["gb_per_s"] * 1e9),
        "connections": sum(place.size - 1 for place in levels),
        "meeting": 2 * meetings / pieces["requests_per_s"],
    }


if __name__ == "__main__":
    main()
