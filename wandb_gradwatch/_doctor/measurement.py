"""What watching every step costs here: the same training with and without it, in turn."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch
from torch import nn

from .._watch import wait_for_kernels, watch
from ..sinks import MemorySink

LAYERS: Final = 8  # of the model that is trained to measure the overhead
BATCH: Final = 256  # rows of its batch
PAIRS: Final = 3  # blocks with and without watching, in turn
STEPS_PER_BLOCK: Final = 50  # the default log_every: each watched block holds one flush, as in a real run
WARM_UP_STEPS: Final = 5
ACCEPTABLE_OVERHEAD: Final = 0.01  # of the training's time, as max_overhead by default


@dataclass(frozen=True)
class OverheadMeasurement:
    """What watching costs on this machine."""

    device: str
    num_parameters: int  # of the model that was trained
    batch: int  # rows per step
    step_ms: float  # of a step that nobody watches, in the pair of blocks whose share is the median
    watched_step_ms: float  # of a watched one there, its share of a flush included
    ratio: float  # (watched_step_ms - step_ms) / watched_step_ms, as in `gradwatch/overhead_ratio`
    spread: float  # largest minus smallest share of a pair of blocks: how far to trust it
    sample_every: int  # keeps the ratio at ACCEPTABLE_OVERHEAD or below, about what the default comes to


def measure_overhead(num_parameters: int, progress: Callable[[int], object] | None = None) -> OverheadMeasurement:
    """Train a multi-layer perceptron in blocks, every second one watched, and compare neighbours.

    The comparison is paired and the order alternates (without-with, with-without, ...), so that a machine that slows
    down or is shared disturbs both sides alike. `progress` is called with how many blocks are done.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    width = max(round(math.sqrt(num_parameters / LAYERS)), 1)
    model = nn.Sequential(*(layer for _ in range(LAYERS) for layer in (nn.Linear(width, width), nn.ReLU()))).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    batch = torch.randn(BATCH, width, device=device)
    for watched in (False, True):
        _train_block(model, optimizer, batch, WARM_UP_STEPS, watched=watched)
    wait_for_kernels()  # compiling takes time from the steps, once in a training
    plain_ms: list[float] = []
    watched_ms: list[float] = []
    for done in range(2 * PAIRS):
        watched = done % 4 in (1, 2)
        times = watched_ms if watched else plain_ms
        times.append(_train_block(model, optimizer, batch, STEPS_PER_BLOCK, watched=watched))
        if progress is not None:
            progress(done + 1)
    shares = [(with_it - without) / with_it for with_it, without in zip(watched_ms, plain_ms, strict=True)]
    ratio = statistics.median_low(shares)
    middle = shares.index(ratio)  # what is shown belongs to one pair, so that a reader can divide it
    return OverheadMeasurement(
        device=device.type,
        num_parameters=sum(parameter.numel() for parameter in model.parameters()),
        batch=BATCH,
        step_ms=plain_ms[middle],
        watched_step_ms=watched_ms[middle],
        ratio=ratio,
        spread=max(shares) - min(shares),
        sample_every=max(math.ceil(ratio / ACCEPTABLE_OVERHEAD), 1),
    )


def _train_block(
    model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor, steps: int, *, watched: bool
) -> float:
    """Milliseconds per step of a block; arming and disarming are outside the clock, as a real run does them once."""
    memory = MemorySink(max_snapshots=1)
    watcher = watch(model, sinks=[memory], sample_every=1, log_every=steps) if watched else None
    try:
        _synchronize(batch.device)
        started = time.perf_counter()
        for _ in range(steps):
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
        _synchronize(batch.device)
        seconds = time.perf_counter() - started
    finally:
        if watcher is not None:
            watcher.remove()
    seen = memory.merged()
    if watched and (seen is None or len(seen) != steps):
        raise RuntimeError(
            f"of {steps} steps {0 if seen is None else len(seen)} were measured, so there is no overhead to tell; "
            "the reason is logged above"
        )
    return seconds / steps * 1e3


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
