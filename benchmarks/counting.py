"""Measure what a step costs that is only counted: `_COUNTING` in wandb_gradwatch/_capture/rest.py.

Blocks of steps of the tiny MLP with our hooks on backwards and optimizers alternate with blocks without any. The figure
is the median of the pairs, in processor time of the training's thread, with its standard error.

    python -m benchmarks.counting [--pairs 600]
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from benchmarks.models import TASKS
from wandb_gradwatch import MemorySink, watch

STEPS = 32  # in a block


def measure(pairs: int) -> tuple[float, float]:
    """Return the microseconds that counting adds to a step, and their standard error."""
    model = TASKS["mlp"].make(torch.device("cpu"))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)

    def step() -> None:
        optimizer.zero_grad()
        model(light=False).backward()
        optimizer.step()

    with watch(model, sinks=[MemorySink()], rules=[], sample_every=10**9):
        for _ in range(100):  # until the hooks on parameters are off
            step()
        gc.collect()
        gc.disable()
        added = []
        for number in range(pairs):
            with_first = bool(number % 2)
            counted = _block(step) if with_first else 0.0
            with _no_hooks():
                plain = _block(step)
            added.append((counted if with_first else _block(step)) - plain)
        gc.enable()
    error = 1.25 * statistics.stdev(added) / len(added) ** 0.5  # of a median
    return statistics.median(added), error


def _block(step: Callable[[], None]) -> float:
    began = time.thread_time()
    for _ in range(STEPS):
        step()
    return (time.thread_time() - began) / STEPS * 1e6


@contextmanager
def _no_hooks() -> Iterator[None]:
    tables = (_global_optimizer_pre_hooks, _global_optimizer_post_hooks)
    kept, backward = [dict(table) for table in tables], torch.autograd.backward
    for table in tables:
        table.clear()
    torch.autograd.backward = backward.__wrapped__
    yield
    torch.autograd.backward = backward
    for table, hooks in zip(tables, kept, strict=True):
        table.update(hooks)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=600, help="blocks with and without hooks")
    pairs = parser.parse_args().pairs
    torch.set_num_threads(1)
    micros, error = measure(pairs)
    print(f"{micros:.1f} ± {error:.1f} microseconds per step")
