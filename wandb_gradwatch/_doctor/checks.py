"""What is installed here and whether it works; nothing here talks to the network."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from typing import Final, Literal

import torch
import wandb

from .._measure.measure import compile_for_cpu, measure, why_not

Verdict = Literal["good", "note", "problem"]

DISTRIBUTION: Final = "wandb-gradwatch"


@dataclass(frozen=True)
class Check:
    """One thing that was looked at."""

    name: str
    found: str  # what is there
    verdict: Verdict = "good"  # "note": it works, and could be better; "problem": it does not work
    advice: str = ""  # what to do


def check_environment() -> list[Check]:
    """Every check but the measurement; nothing here talks to the network."""
    floors = _floors()
    return [
        Check("Python", f"{platform.python_version()} on {platform.system()} {platform.machine()}"),
        *(_check_version(name, floors) for name in ("torch", "numpy", "wandb")),
        _check_device(),
        _check_triton(),
        _check_numba(),
        _check_login(),
        _check_workspaces(floors),
    ]


def _floors() -> dict[str, str]:
    """Lowest version of each requirement, from the package's own metadata; empty in a bare source tree."""
    try:
        requirements = metadata.requires(DISTRIBUTION) or []
    except metadata.PackageNotFoundError:
        return {}
    found = (re.match(r"([\w.-]+)>=([\w.]+)", requirement) for requirement in requirements)
    return {match[1]: match[2] for match in found if match}


def _check_version(name: str, floors: dict[str, str]) -> Check:
    version, floor = metadata.version(name), floors.get(name)
    if floor and _release(version) < _release(floor):
        advice = f"{name} {floor} or newer is needed:\npip install --upgrade '{name}>={floor}'"
        return Check(name, version, "problem", advice)
    return Check(name, version + (f" (needs {floor} or newer)" if floor else ""))


def _release(version: str) -> tuple[int, ...]:
    """(2, 13, 0) of "2.13.0+cpu"."""
    match = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(int(part) for part in match[0].split(".")) if match else ()


def _check_device() -> Check:
    if torch.cuda.is_available():
        return Check("device", f"{torch.cuda.get_device_name()}, CUDA {torch.version.cuda}")
    counts = {"core": os.cpu_count(), "thread": torch.get_num_threads()}
    threads = ", ".join(["CPU", *(f"{count} {what}{'' if count == 1 else 's'}" for what, count in counts.items())])
    if torch.version.cuda:
        advice = "this torch is built for CUDA and sees no device: look at nvidia-smi and at CUDA_VISIBLE_DEVICES"
        return Check("device", threads, "note", advice)
    return Check("device", threads)


def _check_triton() -> Check:
    """What measures gradients on CUDA; where Triton is installed, a kernel is run to know that it works."""
    version = _version_or_none("triton")
    if not torch.cuda.is_available():
        return Check("triton", f"{version or 'absent'} (only used on CUDA)")
    advice = "the fused kernels need Triton; without it plain torch measures, more slowly"
    if version is None:
        return Check("triton", "absent", "note", f"{advice}: pip install triton")
    try:
        measure([torch.ones(1, device="cuda")], None, backend="cuda")
    except Exception as error:  # whatever it is: the kernels are a compiler, a driver and a GPU
        return Check("triton", f"{version}, and its kernels do not work: {why_not(error)}", "problem", advice)
    return Check("triton", f"{version}: the backend is 'cuda'")


def _check_numba() -> Check:
    """What measures gradients on the CPU; where numba is installed, its loops are compiled to know that they work."""
    version = _version_or_none("numba")
    if torch.cuda.is_available():
        return Check("numba", f"{version or 'absent'} (only used on CPU)")
    if version is None:
        advice = f"torch and numpy measure; compiled loops are several times faster: pip install '{DISTRIBUTION}[fast]'"
        return Check("numba", "absent: the backend is 'cpu'", "note", advice)
    try:
        compile_for_cpu("compiled")
    except RuntimeError as error:
        advice = f"torch and numpy measure instead, more slowly: pip install --upgrade '{DISTRIBUTION}[fast]'"
        return Check("numba", f"{version}, and it does not work: {error}", "problem", advice)
    return Check("numba", f"{version}: the backend is 'compiled'")


def _check_login() -> Check:
    settings = wandb.setup().settings
    return _judge_login(str(settings.mode), settings.base_url, lambda: wandb.login(prompt=False, verify=False))


def _judge_login(mode: str, base_url: str, has_credentials: Callable[[], bool]) -> Check:
    if mode == "disabled":
        advice = "nothing is logged: unset WANDB_MODE, or set it to online or offline"
        return Check("W&B", "mode disabled", "note", advice)
    if mode == "offline":
        return Check("W&B", "mode offline: runs are kept in files; `wandb sync` uploads them")
    if has_credentials():
        return Check("W&B", f"mode {mode}, credentials for {base_url} found (not tried)")
    advice = "run `wandb login`, set WANDB_API_KEY, or set WANDB_MODE=offline to keep runs in files"
    return Check("W&B", f"mode {mode}, no credentials for {base_url}", "note", advice)


def _check_workspaces(floors: dict[str, str]) -> Check:
    name, advice = "wandb-workspaces", f"pip install '{DISTRIBUTION}[report]'"
    if _version_or_none(name) is None:
        return Check(name, "absent (optional: W&B reports and workspaces)", "note", advice)
    return _check_version(name, floors)


def _version_or_none(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
