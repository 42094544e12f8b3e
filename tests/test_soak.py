"""A long run costs no more at its end than at its start: memory, objects, handles and threads stay flat.

`python -m benchmarks.soak` is the same over a million steps.
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

import wandb_gradwatch
from benchmarks.soak import Soak, count_objects, growing_types
from wandb_gradwatch import MemorySink

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


def test_growth_would_be_seen() -> None:
    class Leak:
        pass

    kept = []
    counts = []
    for _ in range(5):
        kept += [Leak() for _ in range(3)]
        counts.append(count_objects())
    assert growing_types(counts)["Leak"] == 12


def test_threads_and_open_files_are_those_of_the_start(offline_run: Any) -> None:
    process = psutil.Process()
    with Soak(run=offline_run, log_every=10) as soak:
        soak.steps(_BLOCK)
        before = (process.num_fds(), threading.active_count())
        soak.steps(_BLOCK)
        assert (process.num_fds(), threading.active_count()) == before


def test_rows_that_wait_are_bounded_in_a_script_that_never_logs(offline_run: Any) -> None:
    with Soak(run=offline_run, log_every=1, user_logs=False) as soak:
        assert growing_types(counts_over_blocks(soak)) == {}


@pytest.mark.parametrize("rounds", [50])
def test_watching_and_unwatching_leaves_nothing(rounds: int) -> None:
    model = Chosen(a=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)

    def once() -> None:
        with wandb_gradwatch.watch(model, sinks=[MemorySink()], log_every=2):
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
    assert not model.a._post_accumulate_grad_hooks
