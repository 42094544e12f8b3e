"""Run a training under `watch`, and record everything that rules and other detectors can use."""

from __future__ import annotations

import contextlib
import io
import logging
import math
import os
import pickle
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

import wandb_gradwatch
from wandb_gradwatch import Alert, MemorySink, Snapshot
from wandb_gradwatch._capture.measurer import Measurer
from wandb_gradwatch._judgement.structure import ModelInfo
from wandb_gradwatch._judgement.symptoms import SYMPTOMS
from wandb_gradwatch._measure.columns import NUM_COLUMNS
from wandb_gradwatch._pipeline.alert_manager import AlertManager
from wandb_gradwatch.rules import default_rules

from .cases import CASES, Case, build

CACHE = Path(__file__).parent / ".recordings"
_PATIENCE = 30  # steps with a NaN loss after which the training ends


@dataclass(frozen=True)
class Told:
    """An alert and the step at which it was sent, which may be later than the alert's own step."""

    alert: Alert
    at: int


@dataclass(frozen=True)
class Recording:
    """The recording of a training, in the watcher's steps.

    Args:
        case: which training, by name; seed: of all that is random in it.
        samples: every sample; None where nothing was ever sampled.
        losses: (the watcher's step, the loss) after each step of the loop.
        first_bad: the watcher's step in which the fault begins; None for a healthy training.
        info: class names by module and shapes by parameter.
        told: what the live watcher told.
        anomaly: the loop's step in which `detect_anomaly` found a backward that returned NaN, and its words; it is
            asked only where the loss was not finite.
        error: why the training ended early.
    """

    case: str
    seed: int
    samples: Snapshot | None
    losses: tuple[tuple[int, float], ...]
    first_bad: int | None
    info: ModelInfo
    told: tuple[Told, ...]
    anomaly: tuple[int, str] | None = None
    error: str | None = None


def record(case: Case, seed: int, every: int = 1) -> Recording:
    """Run a training once, watched with the default rules, without messages in the log or on the terminal.

    Args:
        every: 1: every step is sampled. n: the default cadence decides, on a clock of which the first ten steps and
            then about every n-th are sampled, besides what looks unusual.
    """
    logger = logging.getLogger("wandb_gradwatch")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        # Alerts also go to standard error, where they would reveal results of locked families.
        with contextlib.redirect_stderr(io.StringIO()), _clock(every) as step_begins:
            return _record(case, seed, None if every > 1 else 1, step_begins)
    finally:
        logger.setLevel(level)


@contextlib.contextmanager
def _clock(every: int) -> Iterator[Callable[[], None]]:
    """Replace the clock by one on which a step takes a second, and a sample half of what n steps earn at 1 %.

    The other half repays the debt of the first steps, during all of these short trainings. Yields a function to be
    called at the beginning of each step.
    """
    now, measure = [0.0], Measurer.measure

    def step_begins() -> None:
        now[0] += 1.0

    def slow(*arguments: Any, **options: Any) -> None:
        now[0] += 0.01 * every / 2
        measure(*arguments, **options)

    with patch("time.perf_counter", lambda: now[0]), patch.object(Measurer, "measure", slow):
        yield step_begins


def _record(case: Case, seed: int, every: int | None, step_begins: Callable[[], None]) -> Recording:
    torch.set_num_threads(1)
    torch.manual_seed(1000 * seed + 17)
    loop = build(case)
    memory, told, losses, error = MemorySink(), [], [], None
    first_bad = None
    options = {"sinks": [memory], "backend": "cpu", "sample_every": every, "histogram_every": 0} | loop.options
    watcher = wandb_gradwatch.watch(
        loop.model if loop.watched is None else loop.watched,
        on_alert=lambda alert: told.append(Told(alert, max(alert.step, int(watcher.step)))),
        **options,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for step in range(1, loop.steps + 1):
            step_begins()
            if case.first_bad == step:
                first_bad = int(watcher.step) + 1
            try:
                losses.append((int(watcher.step), loop.advance(step)))
                losses[-1] = (int(watcher.step), losses[-1][1])
            except (RuntimeError, ValueError) as failed:
                error = str(failed)
                break
            if len(losses) > _PATIENCE and all(math.isnan(loss) for _, loss in losses[-_PATIENCE:]):
                break
    watcher.wait()
    watcher.remove()
    recording = Recording(
        case.name,
        seed,
        memory.merged(),
        tuple(losses),
        first_bad,
        ModelInfo(
            {name: type(module).__name__ for name, module in loop.model.named_modules()},
            {name: tuple(parameter.shape) for name, parameter in loop.model.named_parameters()},
        ),
        tuple(told),
        error=error,
    )
    broken = next((step for step, (_, loss) in enumerate(losses, 1) if not math.isfinite(loss)), None)
    return recording if broken is None else replace(recording, anomaly=anomaly_of(case, seed, broken))


def anomaly_of(case: Case, seed: int, broken: int) -> tuple[int, str] | None:
    """Return where `torch.autograd.detect_anomaly` stops the same training, whose loss is not finite at step `broken`.

    detect_anomaly is on for the last steps only, because it makes steps many times slower.
    """
    torch.manual_seed(1000 * seed + 17)
    loop = build(case)
    for step in range(1, broken + 1):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                with torch.autograd.set_detect_anomaly(step > broken - 5):
                    loop.advance(step)
            except (RuntimeError, ValueError) as stopped:
                return step, str(stopped).partition("\n")[0]
    return None


def replay(recording: Recording) -> Recording:
    """Judge recorded samples by the present judgement. Alerts of the capture itself are kept."""
    manager, told = AlertManager(default_rules(), recording.info), []
    for index in range(0 if recording.samples is None else len(recording.samples)):
        sample = recording.samples.sample(index)  # type: ignore[union-attr]  # there are samples
        told += [Told(alert, int(sample.steps[0])) for alert in manager.process(sample)]
    judged = {symptom.kind for symptom in SYMPTOMS}
    kept = [one for one in recording.told if one.alert.incident is None or one.alert.incident.kind not in judged]
    return replace(recording, told=tuple(sorted([*told, *kept], key=lambda one: one.at)))


def recordings(
    chosen: Iterable[tuple[Case, int]],
    *,
    map_: Callable[..., Iterable[Any]] = map,
    replayed: bool = False,
    resumed: str = "",
    every: int = 1,
) -> Iterable[Recording]:
    """Run each (case, seed); what ran before is kept: for good, to apply the rules of now to it, or by a name.

    Args:
        map_: as the built-in; that of a pool of processes.
        replayed: run only those that are not kept, and say what the rules of now tell of all.
        every: as in `record`.
        resumed: the name under which live recordings are kept, so that a second call goes on where the first ended.
            With `replayed`, the present judgement judges what is kept under this name.
    """
    return map_(_replayed if replayed else _live, [(case.name, seed, resumed, every) for case, seed in chosen])


def _live(which: tuple[str, int, str, int]) -> Recording:
    case, seed, resumed, every = which
    path = _path(resumed, case, seed)
    if resumed and path.exists():
        return pickle.loads(path.read_bytes())
    live = record(CASES[case], seed, every)
    if resumed:
        _write(path, live)
    return live


def _replayed(which: tuple[str, int, str, int]) -> Recording:
    case, seed, resumed, every = which
    path = _path(resumed, case, seed)
    if path.exists():
        return replay(pickle.loads(path.read_bytes()))
    live = _live((case, seed, "", every))
    _write(path, live)
    return replay(live)


def _path(folder: str, case: str, seed: int) -> Path:
    """Load a recording, unless its rows have other columns than the current ones."""
    name = "".join(letter if letter.isalnum() else "_" for letter in case)
    return CACHE / (folder or f"columns-{NUM_COLUMNS}") / f"{name}-{seed}.pickle"


def _write(path: Path, recording: Recording) -> None:
    """Write a recording completely or not at all, even if the process is killed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(f".{os.getpid()}")
    temporary.write_bytes(pickle.dumps(recording))
    temporary.replace(path)
