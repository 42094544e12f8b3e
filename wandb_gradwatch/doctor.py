"""Check the environment, measure what watching costs here, and say what to change."""

from __future__ import annotations

import math
import os
import platform
import re
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib import metadata
from typing import Final, Literal

import torch
import wandb
from torch import nn

from .sinks import MemorySink
from .statistics.measure import compile_for_cpu
from .terminal import Progress, Terminal
from .watch import watch

Verdict = Literal["good", "note", "problem"]

DISTRIBUTION: Final = "wandb-gradwatch"
LAYERS: Final = 8  # of the model that is trained to measure the overhead
BATCH: Final = 256  # rows of its batch
PAIRS: Final = 3  # blocks with and without watching, in turn
STEPS_PER_BLOCK: Final = 50  # the default log_every: each watched block holds one flush, as in a real run
WARM_UP_STEPS: Final = 5
ACCEPTABLE_OVERHEAD: Final = 0.03  # of the step's time; above it the advice is to measure fewer steps


@dataclass(frozen=True)
class Check:
    """One thing that was looked at.

    Args:
        name: what.
        found: what is there.
        verdict: "good", "note" (works, could be better) or "problem" (does not work).
        advice: what to do; "" where there is nothing to do.
    """

    name: str
    found: str
    verdict: Verdict = "good"
    advice: str = ""


@dataclass(frozen=True)
class Overhead:
    """What watching costs on this machine.

    Args:
        device: where the model was trained.
        num_parameters: of the trained model.
        batch: rows per step.
        step_ms: median time of a step that nobody watches.
        watched_step_ms: median time of a watched one, its share of a flush included.
        ratio: median over the pairs of (watched - unwatched) / unwatched.
        spread: largest minus smallest ratio: how far to trust it.
        sample_every: that keeps the ratio at ACCEPTABLE_OVERHEAD or below; 1: every step.
    """

    device: str
    num_parameters: int
    batch: int
    step_ms: float
    watched_step_ms: float
    ratio: float
    spread: float
    sample_every: int


def run_doctor(num_parameters: int | None, *, as_json: bool, terminal: Terminal) -> int:
    """Look at everything, print it, and return the exit status: 1 where something does not work.

    Args:
        num_parameters: size of the model to measure with; None: do not measure.
        as_json: print one JSON object instead of words.
        terminal: where to write.
    """
    checks = check_environment()
    if as_json:
        overhead = measure_overhead(num_parameters) if num_parameters else None
        terminal.json({"checks": [asdict(c) for c in checks], "overhead": asdict(overhead) if overhead else None})
    else:
        _say_checks(checks, terminal)
        if num_parameters:
            _say_overhead(num_parameters, terminal)
    return 1 if any(check.verdict == "problem" for check in checks) else 0


def check_environment() -> list[Check]:
    """Every check but the measurement; nothing here talks to the network."""
    floors = _floors()
    return [
        Check("Python", f"{platform.python_version()} on {platform.system()} {platform.machine()}"),
        _check_version("torch", floors),
        _check_version("numpy", floors),
        _check_version("wandb", floors),
        _check_device(),
        _check_triton(),
        _check_numba(),
        _check_login(),
        *_check_extras(floors),
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
    threads = f"CPU with {torch.get_num_threads()} threads of {os.cpu_count()} cores"
    if torch.version.cuda:
        advice = "this torch is built for CUDA and sees no device: look at nvidia-smi and at CUDA_VISIBLE_DEVICES"
        return Check("device", threads, "note", advice)
    return Check("device", threads)


def _check_triton() -> Check:
    version = _version_or_none("triton")
    if not torch.cuda.is_available():
        return Check("triton", f"{version or 'absent'} (only used on CUDA)")
    if version is None:
        advice = "the fused kernel needs triton, so plain torch measures, more slowly: pip install triton"
        return Check("triton", "absent", "note", advice)
    return Check("triton", version)


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


# What each optional package is for, in a few words. The names are those of the extras in pyproject.toml.
_EXTRAS: Final = {
    "wandb-workspaces": ("report", "W&B reports and workspaces"),
}


def _check_extras(floors: dict[str, str]) -> Iterator[Check]:
    for name, (extra, purpose) in _EXTRAS.items():
        if _version_or_none(name) is None:
            yield Check(name, f"absent (optional: {purpose})", "note", f"pip install '{DISTRIBUTION}[{extra}]'")
        else:
            yield _check_version(name, floors)


def _version_or_none(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def measure_overhead(num_parameters: int, progress: Callable[[int, int], None] | None = None) -> Overhead:
    """Train a multi-layer perceptron in blocks, every second one watched, and compare neighbours.

    The comparison is paired and the order alternates (without-with, with-without, ...), so that a machine that slows
    down or is shared disturbs both sides alike.

    Args:
        num_parameters: about how many the model has.
        progress: called with (blocks done, blocks in all).
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    width = max(round(math.sqrt(num_parameters / LAYERS)), 1)
    model = nn.Sequential(*(layer for _ in range(LAYERS) for layer in (nn.Linear(width, width), nn.ReLU()))).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    batch = torch.randn(BATCH, width, device=device)
    _train_block(model, optimizer, batch, WARM_UP_STEPS, watched=False)
    _train_block(model, optimizer, batch, WARM_UP_STEPS, watched=True)
    plain_ms: list[float] = []
    watched_ms: list[float] = []
    for pair in range(PAIRS):
        order = (False, True) if pair % 2 == 0 else (True, False)
        for place, watched in enumerate(order):
            times = watched_ms if watched else plain_ms
            times.append(_train_block(model, optimizer, batch, STEPS_PER_BLOCK, watched=watched))
            if progress is not None:
                progress(2 * pair + place + 1, 2 * PAIRS)
    ratios = [(with_it - without) / without for with_it, without in zip(watched_ms, plain_ms, strict=True)]
    ratio = statistics.median(ratios)
    return Overhead(
        device=device.type,
        num_parameters=sum(parameter.numel() for parameter in model.parameters()),
        batch=BATCH,
        step_ms=statistics.median(plain_ms),
        watched_step_ms=statistics.median(watched_ms),
        ratio=ratio,
        spread=max(ratios) - min(ratios),
        sample_every=max(math.ceil(ratio / ACCEPTABLE_OVERHEAD), 1),
    )


def _train_block(
    model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor, steps: int, *, watched: bool
) -> float:
    """Milliseconds per step of a block; arming and disarming are outside the clock, as a real run does them once."""
    memory = MemorySink(max_snapshots=1)
    watcher = watch(model, sinks=[memory], log_every=steps) if watched else None
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


def _say_checks(checks: list[Check], terminal: Terminal) -> None:
    marks = terminal.marks
    signs = {
        "good": terminal.style(marks.good, "green"),
        "note": terminal.style(marks.warning, "yellow"),
        "problem": terminal.style(marks.bad, "red"),
    }
    width = max(len(check.name) for check in checks)
    for check in checks:
        terminal.print(f"  {signs[check.verdict]} {check.name.ljust(width)}  {check.found}")
        if check.advice:
            terminal.paragraph(check.advice, indent=width + 6)


def _say_overhead(num_parameters: int, terminal: Terminal) -> None:
    terminal.title(f"Training about {num_parameters:,} parameters here, with and without watch()")
    with Progress(terminal, 2 * PAIRS) as progress:
        measured = measure_overhead(num_parameters, lambda done, _: progress.update(done, "blocks"))
    terminal.pairs(
        [
            ("model", f"{measured.num_parameters:,} parameters, {measured.batch} rows per step, on {measured.device}"),
            ("a step", f"{measured.step_ms:.2f} ms without, {measured.watched_step_ms:.2f} ms with watch()"),
            ("overhead", f"{measured.ratio:+.1%} (the pairs differ by {measured.spread:.1%})"),
        ]
    )
    terminal.paragraph(_advice(measured))


def _advice(measured: Overhead) -> str:
    if measured.spread > max(measured.ratio, ACCEPTABLE_OVERHEAD):
        return "The pairs differ by more than what they should show: measure again when the machine is less busy."
    if measured.ratio <= ACCEPTABLE_OVERHEAD:
        return f"That is within {ACCEPTABLE_OVERHEAD:.0%}: measure every step, as watch(model) does by default."
    return (
        f"To stay within {ACCEPTABLE_OVERHEAD:.0%}: watch(model, sample_every={measured.sample_every}). "
        "A larger batch per step has the same effect: the cost depends on the parameters, not on the data."
    )
