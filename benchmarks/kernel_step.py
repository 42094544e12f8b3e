"""Measure the time that watching adds to a real training step on a GPU: GPT-2 small, bfloat16 autocast, every step
sampled. Blocks of steps alternate: plain, watched, plain. The difference of the two plain blocks is the noise.
"""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.models import TASKS, Trainee
from wandb_gradwatch import MemorySink, Watcher, watch
from wandb_gradwatch._watch import wait_for_kernels

LOG_EVERY = 50


@dataclass(frozen=True)
class AddedTime:
    """Medians over rounds, in milliseconds per step or sample.

    Args:
        plain: time of a plain step.
        added: time that watching adds to a step, on the host and the device together.
        noise: difference of two blocks of plain steps.
        said: time per sample that the monitor itself accounts for, from which it chooses its cadence.
        default_every: steps per sample with watch()'s defaults, after the first steps.
        gpu: time of the monitor's kernels on the device, per sample.
        gpu_everything: the same with a histogram in every sample.
        num_waits: number of waits of the host for the device that watching adds to a block.
    """

    plain: float
    added: float
    noise: float
    said: float
    default_every: float
    gpu: float
    gpu_everything: float
    num_waits: int

    @property
    def added_ratio(self) -> float:
        """The share of a plain step's time."""
        return self.added / self.plain


def training_step(trainee: Trainee) -> Callable[[], None]:
    """Train one step."""
    optimizer = torch.optim.AdamW(trainee.parameters(), lr=1e-4, fused=True)

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = trainee(light=False)
        loss.backward()
        optimizer.step()

    return step


def measure_added_time(*, tiny: bool, rounds: int) -> AddedTime:
    """Train with and without the monitor.

    Args:
        tiny: train an MLP for a few steps, only to check that everything runs.
    """
    torch.manual_seed(0)
    trainee = TASKS["mlp" if tiny else "gpt2"].make(torch.device("cuda"))
    options = {"backend": "torch"} if tiny else {}  # a tiny run may have Triton's interpreter only
    step = training_step(trainee)
    num_steps = 1 if tiny else LOG_EVERY
    for _ in range(2 if tiny else 20):
        step()
    plain, added, noise, said = [], [], [], []
    for _ in range(rounds):
        before = _block(step, num_steps)
        with _watched(trainee, step, **options) as watcher:
            spent = watcher._sampler.seconds_spent
            watched = _block(step, num_steps)
            said.append((watcher._sampler.seconds_spent - spent) / num_steps)
        after = _block(step, num_steps)
        plain.append((before + after) / 2)
        added.append(watched - plain[-1])
        noise.append(abs(after - before))
    return AddedTime(
        plain=statistics.median(plain) * 1e3,
        added=statistics.median(added) * 1e3,
        noise=statistics.median(noise) * 1e3,
        said=statistics.median(said) * 1e3,
        default_every=_default_every(trainee, step, num_steps, **options),
        gpu=_gpu_seconds(trainee, step, num_steps, histogram_every=None, **options) * 1e3,
        gpu_everything=_gpu_seconds(trainee, step, num_steps, histogram_every=1, **options) * 1e3,
        num_waits=_waits_more(trainee, step, num_steps, **options),
    )


def _watched(trainee: Trainee, step: Callable[[], None], **options: Any) -> Watcher:
    """Return a watcher after its warm-up: kernels compiled, optimizers known, the first samples compared by value."""
    watcher = watch(trainee, sinks=[MemorySink()], sample_every=1, log_every=LOG_EVERY, **options)
    for _ in range(4):
        step()
    wait_for_kernels()
    return watcher


def _block(step: Callable[[], None], num_steps: int) -> float:
    """Return the seconds per step, of the slower of device and host."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(num_steps):
        step()
    torch.cuda.synchronize()
    return (time.perf_counter() - began) / num_steps


def _default_every(trainee: Trainee, step: Callable[[], None], num_steps: int, **options: Any) -> float:
    """Return the steps per sample that the default budget allows in a second block of steps."""
    sink = MemorySink()
    with watch(trainee, sinks=[sink], log_every=LOG_EVERY, **options) as watcher:
        _block(step, num_steps)
        wait_for_kernels()
        first = watcher.step
        _block(step, num_steps)
    num_samples = sum(int((snapshot.steps > first).sum()) for snapshot in sink.snapshots)
    return num_steps / max(num_samples, 1)


def _gpu_seconds(trainee: Trainee, step: Callable[[], None], num_steps: int, **options: Any) -> float:
    """Return the device time per sample, from the events that a budget uses."""
    with _watched(trainee, step, **options) as watcher:
        timer = watcher._sampler._commits._timer
        torch.cuda.synchronize()
        before = timer.seconds()
        _block(step, num_steps)
        return (timer.seconds() - before) / num_steps


def _waits_more(trainee: Trainee, step: Callable[[], None], num_steps: int, **options: Any) -> int:
    plain = _waits(step, num_steps)
    with _watched(trainee, step, **options):
        return _waits(step, num_steps) - plain


def _waits(step: Callable[[], None], num_steps: int) -> int:
    torch.cuda.synchronize()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            for _ in range(num_steps):
                step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return sum("called a synchronizing" in str(warning.message) for warning in caught)
