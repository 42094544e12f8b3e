"""The cost of a long run does not grow: memory, objects, handles and threads stay constant.

`python -m benchmarks.soak` runs the same for a million steps.
"""

from __future__ import annotations

import gc
import threading
from collections import Counter
from typing import Any

import psutil
import pytest
import torch
from gradients import Chosen, step
from offline import history

import wandb_gradwatch
from benchmarks.rows import steps_of, tally
from benchmarks.soak import Look, Part, Soak, count_objects, growing_types, look, slopes, soak, what_grew
from wandb_gradwatch import MemorySink

pytestmark = pytest.mark.slow

_BLOCK = 200  # steps; a multiple of every cadence below


def counts_over_blocks(soak: Soak, blocks: int = 5) -> list[Counter[str]]:
    soak.steps(2 * _BLOCK)  # histories and caches of fixed size fill up
    counts = []
    for _ in range(blocks):
        soak.steps(_BLOCK)
        counts.append(count_objects())
    return counts


def test_no_type_of_object_grows_with_the_steps(offline_run: Any) -> None:
    with Soak(run=offline_run, log_every=10) as soak:
        assert growing_types(counts_over_blocks(soak)) == {}


class Leaking:
    """A rule that keeps what it is given."""

    title, level = "Leaking", "INFO"

    def __init__(self) -> None:
        self.kept: list[Any] = []

    def check(self, snapshot: Any) -> list[Any]:
        self.kept += [[step] for step in snapshot.steps]
        return []

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """It has no state."""


def test_a_planted_leak_is_found(offline_run: Any) -> None:
    looks = []
    with Soak(run=offline_run, log_every=10, user_logs_every=10, rules=[Leaking()]) as training:
        for _ in range(4):
            training.steps(50)
            looks.append(look(training.done))
    [grew] = [found for found in what_grew(looks) if found.endswith(" list")]
    assert int(grew.split()[0]) >= 150  # one for each sample between the first look and the last
    assert slopes(looks)["objects"] >= 1e6  # one a step


def test_every_number_that_grows_is_named() -> None:
    flat = [Look(step, 100.0, 10, 5, 1000, Counter()) for step in range(0, 8000, 1000)]
    assert what_grew(flat) == []
    assert what_grew([*flat[:-1], Look(8000, 100.0, 11, 5, 1000, Counter())]) == ["open_files: 10, then 11"]
    assert what_grew([*flat[:-1], Look(8000, 100.0, 10, 6, 1000, Counter())]) == ["threads: 5, then 6"]
    rising = [Look(number, 100.0 + number, 10, 5, 1000, Counter()) for number in range(8)]
    assert what_grew(rising) == ["resident memory: 100.5 MiB, then 106.5"]
    # 1 MiB at every step: a million of them in a million steps
    assert abs(slopes(rising)["rss_mib"] - 1e6) < 1


def test_a_short_soak_is_flat_and_every_row_is_there(start_run: Any) -> None:
    run = start_run()
    seen = soak(run, Part(1.0, sample_every=2, log_every=20), 400, deadline=float("inf"), points=3)
    run.finish()
    assert (seen["steps"], seen["samples"], seen["samples_expected"]) == (400, 200, 200)
    assert len(seen["rss_mib"]) == 3
    assert seen["threads"][0] == seen["threads"][1]
    assert seen["open_files"][0] == seen["open_files"][1]
    found = steps_of(history(run))
    assert tally(list(range(20, 401, 20)), found) == (20, 20, 0, 0)
    assert tally(list(range(20, 421, 20)), [*found, 400]) == (21, 21, 1, 1)  # lost and doubled rows would be counted


def test_threads_and_open_files_are_those_of_the_start(offline_run: Any) -> None:
    process = psutil.Process()
    with Soak(run=offline_run, log_every=10) as soak:
        soak.steps(_BLOCK)
        before = (process.num_fds(), threading.active_count())
        soak.steps(_BLOCK)
        assert (process.num_fds(), threading.active_count()) == before


def test_rows_that_wait_are_bounded_in_a_script_that_never_logs(offline_run: Any) -> None:
    with Soak(run=offline_run, log_every=1, user_logs_every=0) as soak:
        assert growing_types(counts_over_blocks(soak)) == {}


@pytest.mark.parametrize("rounds", [50])
def test_watching_and_unwatching_leaves_nothing(rounds: int) -> None:
    model = Chosen(a=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)

    def once() -> None:
        with wandb_gradwatch.watch(model, sinks=[MemorySink()], sample_every=1, log_every=2):
            for _ in range(4):
                step(model, optimizer, a=[3, 4])

    once()
    counts = []
    for _ in range(3):
        for _ in range(rounds // 5):
            once()
        gc.collect()
        counts.append(count_objects())
    assert growing_types(counts) == {}
    assert not model.a._backward_hooks
