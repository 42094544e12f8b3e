"""Describe the machine and the versions that a measurement was made with."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path

import torch

import wandb_gradwatch

_VERSIONS = ("torch", "numpy", "numba", "wandb", "lightning", "torch-module-monitor", "triton")


def describe_machine(device: torch.device) -> dict[str, object]:
    """Return the processor or GPU, cores, memory, versions and the commit."""
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else _processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        # The metadata of an editable installation have the version at the time of installation.
        "versions": {"wandb-gradwatch": wandb_gradwatch.__version__}
        | {name: version for name in _VERSIONS if (version := _version(name))},
        "commit": _commit(),
    }


def free_gib(device: torch.device) -> float:
    """Return the memory that is available without swapping."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0] / 2**30
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _commit() -> str:
    here = Path(__file__).parent
    try:
        done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=here, capture_output=True, text=True)
    except OSError:
        return "unknown"
    return done.stdout.strip() or "unknown"
