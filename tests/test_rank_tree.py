"""Merging over any number of ranks: equal results on all, few connections per rank, and no endless wait.

The ranks here are threads, each with its own gloo groups; `test_distributed.py` uses processes.
"""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch.distributed as dist
from processes import inherited

from wandb_gradwatch._pipeline.rank_tree import RankTree, places

pytestmark = pytest.mark.distributed


@pytest.fixture(autouse=True)
def loopback_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")


def on_ranks(world: int, program: Callable[[int, dist.Store], Any], absent: tuple[int, ...] = ()) -> dict[int, Any]:
    """What `program(rank, store)` returned on each rank, or the error that it raised."""
    store, results = dist.HashStore(), {}

    def run(rank: int) -> None:
        try:
            results[rank] = program(rank, store)
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world) if rank not in absent]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


@pytest.mark.parametrize("size", [2, 3, 4, 32])
@pytest.mark.parametrize("world", [*range(1, 12), 27, 28, 64, 100])
def test_every_group_is_complete_and_all_groups_lead_to_one(world: int, size: int) -> None:
    members: dict[tuple[str, int], list[int]] = {}
    tops = set()
    for rank in range(world):
        for place in places(rank, world, size):
            members.setdefault((place.group, place.size), []).append(place.rank)
            if place.is_top:
                tops.add(place.group)
    assert len({group for group, _ in members}) == len(members)  # all agree on a group's size
    assert all(sorted(found) == list(range(group_size)) for (_, group_size), found in members.items())
    assert len(tops) == 1
    # Every group but the top is represented above by its first rank: no value is left out or added twice.
    assert sum(group_size for _, group_size in members) == world + len(members) - 1


def test_ten_thousand_ranks_hold_fewer_than_a_hundred_connections_each() -> None:
    connections = [sum(place.size - 1 for place in places(rank, 10_000, 32)) for rank in range(10_000)]
    assert max(connections) == 31 + 31 + 9  # rank 0: of 10,000, of 313 groups, of 10 groups of groups
    assert sorted(connections)[5000] == 31


@pytest.mark.parametrize(("world", "size"), [(1, 2), (2, 2), (3, 2), (9, 2), (9, 3), (7, 3), (5, 32)])
def test_all_ranks_get_the_sums_and_the_maxima(world: int, size: int) -> None:
    def program(rank: int, store: dist.Store) -> tuple[np.ndarray, np.ndarray]:
        tree = RankTree(store, rank, world, timedelta(seconds=30), size=size)
        sums, maxima = np.array([1.0, 10.0**rank, 0.1]), np.array([float(rank), -float(rank), -np.inf])
        tree.all_reduce(sums, dist.ReduceOp.SUM)
        tree.all_reduce(maxima, dist.ReduceOp.MAX)
        return sums, maxima

    results = on_ranks(world, program)
    for rank in range(world):
        sums, maxima = results[rank]
        # 1 + 10 + 100 + ...: each rank's digit is there once
        assert sums[:2].tolist() == [world, int("1" * world)]
        assert sums[2] == results[0][0][2]  # rounded, but to the same bits everywhere
        assert sums[2] == pytest.approx(0.1 * world)
        assert maxima.tolist() == [world - 1, 0, -np.inf]


def test_a_group_needs_one_connection_for_each_other_rank_in_it() -> None:
    before = psutil.Process().num_fds()

    def program(rank: int, store: dist.Store) -> RankTree:
        return RankTree(store, rank, 9, timedelta(seconds=30), size=3)

    trees = on_ranks(9, program)
    # Three groups of three and one of three at the top, each with 3 * 2 ends of connections; a group of gloo has four
    # files more on each of its ranks. Nine ranks in one group would have 9 * 8 ends.
    assert psutil.Process().num_fds() - before == 4 * 3 * (2 + 4)
    assert not any(isinstance(tree, Exception) for tree in trees.values())


@pytest.mark.parametrize("absent", [(0,), (4,), (8,)])
def test_a_rank_that_never_comes_is_waited_for_once(absent: tuple[int, ...]) -> None:
    def program(rank: int, store: dist.Store) -> None:
        tree = RankTree(store, rank, 9, timedelta(seconds=1), size=3)
        tree.all_reduce(np.ones(1), dist.ReduceOp.SUM)

    results = on_ranks(9, program, absent)
    assert all(isinstance(error, RuntimeError) for error in results.values())
    assert len(results) == 8


def test_a_rank_that_goes_away_later_is_waited_for_once() -> None:
    def program(rank: int, store: dist.Store) -> float:
        tree = RankTree(store, rank, 9, timedelta(seconds=1), size=3)
        values = np.ones(1)
        tree.all_reduce(values, dist.ReduceOp.SUM)
        for _ in range(1 if rank != 4 else 0):
            tree.all_reduce(values, dist.ReduceOp.SUM)
        return float(values[0])

    results = on_ranks(9, program)
    assert results.pop(4) == 9
    # Its own group and those who wait for that group's part hear of it; nobody gets a sum with a rank missing.
    assert all(isinstance(error, RuntimeError) for error in results.values())


def test_places_are_the_same_from_both_sides() -> None:
    """The first rank of a group stands for it: rank 3 of 8 in threes is the second of the upper group."""
    upper = [[place for place in places(rank, 8, 3)][1] for rank in (0, 3, 6)]
    assert [place.rank for place in upper] == [0, 1, 2]
    assert all(first.group == second.group for first, second in itertools.pairwise(upper))


@pytest.mark.slow
def test_forked_ranks_are_measured() -> None:
    """`benchmarks/ranks.py`, from which docs/growth.md has its figures, on five processes in groups of two."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.ranks", "--ranks", "5", "--group", "2", "--numbers", "1000"],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parent.parent,
        env=inherited(),
    )
    found = json.loads(done.stdout)
    assert found["wrong"] == 0
    assert found["first"]["times_sent"] > found["median"]["times_sent"] > 0.5
    assert found["first"]["files"] > found["median"]["files"] > 0
