"""Check the environment, measure the overhead of watch(), and recommend changes. Nothing uses the network."""

import io
import math
import os
import platform
import re
import statistics
import time
from collections.abc import Iterable
from contextlib import ExitStack, redirect_stderr
from dataclasses import asdict, dataclass
from importlib import metadata
from typing import Final, Literal

import click
import torch
import wandb
from torch import nn

from ._measure.measure import compile_for_cpu, measure, why_not
from ._output import as_json, pairs, paragraph, say, styled, title
from ._watch import wait_for_kernels, watch
from ._watcher import Watcher
from .sinks import MemorySink

Verdict = Literal["good", "note", "problem"]

DISTRIBUTION: Final = "wandb-gradwatch"
LAYERS: Final = 8  # of the model that is trained to measure the overhead
BATCH: Final = 256  # rows per step
PAIRS: Final = 3  # pairs of blocks, one without and one with watch()
STEPS_PER_BLOCK: Final = 50  # the default log_every: each watched block has one flush, as in a real run
WARM_UP_STEPS: Final = 5
ACCEPTABLE_OVERHEAD: Final = 0.01  # share of the training time, the default of max_overhead
_SIGNS: Final = {"good": ("✓", "green"), "note": ("▲", "yellow"), "problem": ("✗", "red")}


@dataclass(frozen=True)
class Check:
    """The result of one check."""

    name: str
    found: str  # what was found
    verdict: Verdict = "good"  # "note": it works but could be better; "problem": it does not work
    advice: str = ""  # what to do


@dataclass(frozen=True)
class OverheadMeasurement:
    """The overhead of watch() on this machine."""

    device: str
    num_parameters: int  # of the model that was trained
    batch: int  # rows per step
    step_ms: float  # time per step without watch(), from the pair of blocks with the median overhead
    watched_step_ms: float  # time per step with watch() from the same pair, including its share of a flush
    ratio: float  # (watched_step_ms - step_ms) / watched_step_ms, as in `gradwatch/overhead_ratio`
    spread: float  # largest minus smallest overhead of the pairs; shows how reliable the ratio is
    sample_every: int  # keeps the overhead within ACCEPTABLE_OVERHEAD; about what the default cadence chooses


def run_doctor(num_parameters: int | None, *, json: bool) -> int:
    """Run and print all checks; return the exit status: 1 if something does not work.

    The overhead is measured with a model of about `num_parameters`; None: it is not measured.
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
        say("  ", styled(sign, fg=colour), f" {check.name.ljust(width)}  {check.found}")
        paragraph(check.advice, indent=width + 6)


def _say_overhead(num_parameters: int) -> None:
    title(f"Training about {num_parameters:,} parameters here, with and without watch(sample_every=1)")
    with click.progressbar(range(2 * PAIRS), label="  blocks of steps") as blocks:
        measured = measure_overhead(num_parameters, blocks)
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
        return "The pairs differ by more than the overhead: measure again when the machine is less busy."
    if measured.ratio <= ACCEPTABLE_OVERHEAD:
        return f"That is within {ACCEPTABLE_OVERHEAD:.0%} of the time: watch(model) can measure every step here."
    return (
        f"To stay within {ACCEPTABLE_OVERHEAD:.0%} of the time, watch(model) will measure about one step in "
        f"{measured.sample_every:,} here; sample_every=1 measures all, max_overhead=0.05 about five times as many. "
        "With larger batches a larger share of steps is measured: the cost depends on the parameters, not on the data."
    )


def check_environment() -> list[Check]:
    """Run all checks except the measurement."""
    floors = _floors()
    return [
        Check("Python", f"{platform.python_version()} on {platform.system()} {platform.machine()}"),
        *(_check_version(name, floors) for name in ("torch", "numpy", "wandb")),
        _check_device(),
        *map(_check_backend, ("triton", "numba")),
        _check_login(),
        _check_version("wandb-workspaces", floors),
    ]


def _floors() -> dict[str, str]:
    """Return the minimum version of each requirement, from the package's metadata; {} in a bare source tree."""
    try:
        requirements = metadata.requires(DISTRIBUTION) or []
    except metadata.PackageNotFoundError:
        return {}
    found = (re.match(r"([\w.-]+)>=([\w.]+)", requirement) for requirement in requirements)
    return {match[1]: match[2] for match in found if match}


def _check_version(name: str, floors: dict[str, str]) -> Check:
    version, floor = _version_or_none(name), floors.get(name)
    if version is None:  # only one requirement is optional
        found = "absent (optional: W&B reports and workspaces)"
        return Check(name, found, "note", f"pip install '{DISTRIBUTION}[report]'")
    if floor and _release(version) < _release(floor):
        advice = f"{name} {floor} or newer is needed:\npip install --upgrade '{name}>={floor}'"
        return Check(name, version, "problem", advice)
    return Check(name, version + (f" (needs {floor} or newer)" if floor else ""))


def _release(version: str) -> tuple[int, ...]:
    """Parse a version: "2.13.0+cpu" gives (2, 13, 0)."""
    match = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(int(part) for part in match[0].split(".")) if match else ()


def _check_device() -> Check:
    if torch.cuda.is_available():
        return Check("device", f"{torch.cuda.get_device_name()}, CUDA {torch.version.cuda}")
    counts = {"core": os.cpu_count(), "thread": torch.get_num_threads()}
    threads = ", ".join(["CPU", *(f"{count} {what}{'' if count == 1 else 's'}" for what, count in counts.items())])
    if torch.version.cuda:
        advice = "this torch is built for CUDA but finds no device: check nvidia-smi and CUDA_VISIBLE_DEVICES"
        return Check("device", threads, "note", advice)
    return Check("device", threads)


def _check_backend(name: str) -> Check:
    """Check Triton, which measures gradients on CUDA, or numba, which does on the CPU; if it is installed, run it."""
    on_cuda, version = name == "triton", _version_or_none(name)
    if on_cuda != torch.cuda.is_available():
        return Check(name, f"{version or 'absent'} (only used on {'CUDA' if on_cuda else 'CPU'})")
    package = "triton" if on_cuda else f"'{DISTRIBUTION}[fast]'"
    advice = f"gradients are measured several times faster with it: pip install --upgrade {package}"
    if version is None:
        return Check(name, f"absent: the backend is {'torch' if on_cuda else 'cpu'!r}", "note", advice)
    try:
        if on_cuda:
            measure([torch.ones(1, device="cuda")], None, backend="cuda")
        else:
            compile_for_cpu("compiled")
    except Exception as error:  # any error of the compiler, the driver or the GPU
        reason = why_not(error) if on_cuda else error
        return Check(name, f"{version}, and it does not work: {reason}", "problem", advice)
    return Check(name, f"{version}: the backend is {'cuda' if on_cuda else 'compiled'!r}")


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


def _version_or_none(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def measure_overhead(num_parameters: int, blocks: Iterable[int] = range(2 * PAIRS)) -> OverheadMeasurement:
    """Train a multi-layer perceptron in pairs of blocks, one with and one without watch(), and compare each pair.

    The order alternates (without-with, with-without, ...), so that a machine that slows down or is shared affects both
    sides equally. `blocks` counts the blocks from 0.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    width = max(round(math.sqrt(num_parameters / LAYERS)), 1)
    model = nn.Sequential(*(layer for _ in range(LAYERS) for layer in (nn.Linear(width, width), nn.ReLU()))).to(device)
    for weight in [one for one in model.parameters() if one.ndim > 1]:  # torch's default lets the gradients vanish
        nn.init.kaiming_normal_(weight, nonlinearity="relu")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)  # a training that the rules find nothing wrong with
    batch = torch.randn(BATCH, width, device=device)
    for watched in (False, True):
        _train_block(model, optimizer, batch, WARM_UP_STEPS, watched=watched)
    wait_for_kernels()  # compiling slows down the steps, but only once per training
    times_ms: dict[bool, list[float]] = {False: [], True: []}
    for block in blocks:
        watched = block % 4 in (1, 2)
        times_ms[watched].append(_train_block(model, optimizer, batch, STEPS_PER_BLOCK, watched=watched))
    pairs_ms = zip(times_ms[False], times_ms[True], strict=True)
    of_pairs = [((with_it - without) / with_it, without, with_it) for without, with_it in pairs_ms]
    ratio, step_ms, watched_step_ms = statistics.median_low(of_pairs)
    shares = [share for share, *_ in of_pairs]
    return OverheadMeasurement(
        device=device.type,
        num_parameters=sum(parameter.numel() for parameter in model.parameters()),
        batch=BATCH,
        step_ms=step_ms,
        watched_step_ms=watched_step_ms,
        ratio=ratio,
        spread=max(shares) - min(shares),
        sample_every=max(math.ceil(ratio / ACCEPTABLE_OVERHEAD), 1),
    )


def _train_block(
    model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor, steps: int, *, watched: bool
) -> float:
    """Return the milliseconds per step of a block, without the time of watch() and remove(), which a run calls once."""
    memory = MemorySink(max_snapshots=1)
    with ExitStack() as stack:
        if watched:
            watcher = watch(model, sinks=[memory], sample_every=1, log_every=steps)
            stack.callback(_remove_silently, watcher)
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
            f"only {0 if seen is None else len(seen)} of {steps} steps were measured, so the overhead is unknown; "
            "the reason is logged above"
        )
    return seconds / steps * 1e3


def _remove_silently(watcher: Watcher) -> None:
    """Remove a watcher without the line at the end of a run: this is no run of the user."""
    with redirect_stderr(io.StringIO()):
        watcher.remove()


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
