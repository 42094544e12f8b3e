"""Measure what a monitor sends, reads and holds: rows of a run, values for which the host waits, memory."""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import torch
import wandb
from torch import Tensor

from benchmarks.rows import history_rows

_READS = ("item", "tolist", "cpu", "__float__", "__int__", "__bool__")

QUIET = {
    "console": "off",
    "disable_git": True,
    "mode": "offline",
    "save_code": False,
    "silent": True,
    "x_disable_meta": True,
    "x_disable_stats": True,
    "x_save_requirements": False,
}


def peak_mib(device: torch.device, step: Callable[[], None], steps: int) -> float:
    """Return the peak memory of the process during some steps; 0 if the platform does not report it."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    else:
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")  # resets the peak to the memory that is resident now
    for _ in range(steps):
        step()
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return 0.0
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM")) / 2**10


@contextlib.contextmanager
def count_host_reads(device: torch.device) -> Iterator[list[int]]:
    """Count how often the host reads a value: on CUDA every synchronisation, on the CPU what would be one on CUDA.

    Arithmetic of this package's CPU kernels on the host is not counted, because CUDA kernels replace it on a GPU.
    """
    count = [0]
    if device.type == "cuda":
        torch.cuda.set_sync_debug_mode("warn")
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                yield count
        finally:
            torch.cuda.set_sync_debug_mode("default")
        count[0] = sum("synchroniz" in str(warning.message) for warning in caught)
        return
    originals = {name: getattr(Tensor, name) for name in _READS}

    def counting(original: Callable[..., Any]) -> Callable[..., Any]:
        def read(*args: Any, **kwargs: Any) -> Any:
            if not sys._getframe(1).f_globals.get("__name__", "").startswith("wandb_gradwatch._measure.cpu"):
                count[0] += 1
            return original(*args, **kwargs)

        return read

    try:
        for name, original in originals.items():
            setattr(Tensor, name, counting(original))
        yield count
    finally:
        for name, original in originals.items():
            setattr(Tensor, name, original)


@contextlib.contextmanager
def offline_run(reinit: Literal["finish_previous", "create_new"] = "finish_previous") -> Iterator[Any]:
    """Start a run whose file is in a temporary folder."""
    with tempfile.TemporaryDirectory() as directory:
        run = wandb.init(project="benchmarks", dir=directory, settings=wandb.Settings(**QUIET), reinit=reinit)
        try:
            yield run
        finally:
            run.finish()


def monitor_rows(file: Path) -> tuple[int, int]:
    """Return the rows with more than the user's loss, and the bytes of their other values as JSON."""
    sizes = []
    for row in history_rows(file):
        values = {key: value for key, value in row.items() if key != "loss" and not key.startswith("_")}
        if values:
            sizes.append(len(json.dumps(values, separators=(",", ":"))))
    return len(sizes), sum(sizes)
