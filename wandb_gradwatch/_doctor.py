"""Check the environment, measure what watching costs here, and say what to change. Nothing talks to the network."""

from __future__ import annotations

import math
import os
import platform
import re
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from importlib import metadata
from typing import Final, Literal

import click
import torch
import wandb
from torch import nn

from ._measure.measure import compile_for_cpu, measure, why_not
from ._output import as_json, pairs, paragraph, title
from ._watch import wait_for_kernels, watch
from .sinks import MemorySink

Verdict = Literal["good", "note", "problem"]

DISTRIBUTION: Final = "wandb-gradwatch"
LAYERS: Final = 8  # of the model that is trained to measure the overhead
BATCH: Final = 256  # rows of its batch
PAIRS: Final = 3  # blocks with and without watching, in turn
STEPS_PER_BLOCK: Final = 50  # the default log_every: each watched block holds one flush, as in a real run
WARM_UP_STEPS: Final = 5
ACCEPTABLE_OVERHEAD: Final = 0.01  # of the training's time, as max_overhead by default
_SIGNS: Final = {"good": ("✓", "green"), "note": ("▲", "yellow"), "problem": ("✗", "red")}


def run_doctor(num_parameters: int | None, *, json: bool) -> int:
    """Look at everything, print it, and return the exit status: 1 where something does not work.

    Overhead is measured with a model of about `num_parameters`; None: not at all.
    """
    checks = check_environment()
    if json:
        overhead = measure_overhead(num_parameters) if num_parameters else None
        as_json({"checks": [asdict(check) for check in checks], "overhead": asdict(overhead) if overhead else None})
    else:
        _say_checks(checks)
        if num_parameters:
            _say_overhead(num_parameters)
    return 1 if any(check.verdict == "problem" for check in checks) else 0


def _say_checks(checks: list[Check]) -> None:
    width = max(len(check.name) for check in checks)
    for check in checks:
        sign, colour = _SIGNS[check.verdict]
        click.echo(f"  {click.style(sign, fg=colour)} {check.name.ljust(width)}  {check.found}")
        paragraph(check.advice, indent=width + 6)


def _say_overhead(num_parameters: int) -> None:
    title(f"Training about {num_parameters:,} parameters here, with and without watch(sample_every=1)")
    with click.progressbar(length=2 * PAIRS, label="  blocks of steps") as bar:
        measured = measure_overhead(num_parameters, lambda done: bar.update(done - bar.pos))
    pairs(
        [
            ("model", f"{measured.num_parameters:,} parameters, {measured.batch} rows per step, on {measured.device}"),
            ("a step", f"{measured.step_ms:.2f} ms without, {measured.watched_step_ms:.2f} ms measured"),
            ("overhead", f"{measured.ratio:.1%} of a measured step (the pairs differ by {measured.spread:.1%})"),
        ]
    )
    paragraph(_advice(measured))


def _advice(measured: OverheadMeasurement) -> str:
    if measured.spread > max(measured.ratio, ACCEPTABLE_OVERHEAD):
        return "The pairs differ by more than what they should show: measure again when the machine is less busy."
    if measured.ratio <= ACCEPTABLE_OVERHEAD:
        return f"That is within {ACCEPTABLE_OVERHEAD:.0%} of the time: watch(model) will measure every step here."
    return (
        f"To stay within {ACCEPTABLE_OVERHEAD:.0%} of the time, watch(model) will measure about one step in "
        f"{measured.sample_every:,} here; sample_every=1 measures all, max_overhead=0.05 about five times as many. A "
        "larger batch per step has more of them measured: the cost depends on the parameters, not on the data."
    )


# ---- what is installed here, and whether it works


@dataclass(frozen=True)
class Check:
    """One thing that was looked at."""

    name: str
    found: str  # what is there
    verdict: Verdict = "good"  # "note": it works, and could be better; "problem": it does not work
    advice: str = ""  # what to do


def check_environment() -> list[Check]:
    """Every check but the measurement."""
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
    mode, base_url = str(settings.mode), settings.base_url
    if mode == "disabled":
        advice = "nothing is logged: unset WANDB_MODE, or set it to online or offline"
        return Check("W&B", "mode disabled", "note", advice)
    if mode == "offline":
        return Check("W&B", "mode offline: runs are kept in files; `wandb sync` uploads them")
    if wandb.login(prompt=False, verify=False):
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


# ---- what watching every step costs here: the same training with and without it, in turn


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
    with watch(model, sinks=[memory], sample_every=1, log_every=steps) if watched else nullcontext():
        _synchronize(batch.device)
        started = time.perf_counter()
        for _ in range(steps):
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
        _synchronize(batch.device)
        seconds = time.perf_counter() - started
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
