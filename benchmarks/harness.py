"""Time monitors against an unwatched twin of their model, in pairs of blocks, and count what they send.

The watched model and its twin are stepped in turn in the same process, in blocks so short that the machine's speed is
the same in both, with alternating order. The cost of a sampled step is the median of the differences within pairs. The
cost of all steps is a mean, because a median hides rare, expensive steps. One of the monitors does nothing: the
distance of its figure from 0 is the noise of all figures.
"""

from __future__ import annotations

import contextlib
import gc
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from benchmarks.models import Task, Trainee
from benchmarks.monitors import MONITORS, WARM_UP, Attached, Monitor, gradients
from benchmarks.traffic import count_host_reads, monitor_rows, offline_run, peak_mib

_TRAFFIC_STEPS = 3
_MONITOR_SECONDS = 10.0  # after this time the pairs of a slow monitor end with the current cycle
_FEWEST_PAIRS = 4
_REAL_STEPS_SECONDS = 2.0
_TRIMMED = 0.25  # share of the pairs of one kind that is trimmed at either end, as disturbed by other programs


@dataclass
class Cost:
    """The cost of one monitor, in milliseconds unless named otherwise.

    Args:
        sampled_ms: time that the monitor adds to a sampled step, median of the pairs.
        amortised_ms: time that the monitor adds per step at its real cadence, on average; see `_amortised`.
        spread_ms: half of the interquartile range of the pairs' `sampled_ms`.
        sampled_cpu_ms: processor time that the monitor adds to a sampled step.
        host_reads: number of values in a sampled step for which the host waits.
        row_bytes: bytes of a logged row as JSON, without the user's own values.
        rows_per_step: number of rows per step with values of the monitor.
        peak_mib: difference of the peak memory of a watched and an unwatched step.
        steps_per_sample: steps per sample of a monitor that chooses its own cadence.
        start_s: seconds that such a monitor added, in all, to the steps before its cadence was stable.
    """

    sampled_ms: float
    amortised_ms: float
    spread_ms: float
    sampled_cpu_ms: float
    host_reads: float = 0.0
    row_bytes: float = 0.0
    rows_per_step: float = 0.0
    peak_mib: float = 0.0
    steps_per_sample: float | None = None
    start_s: float | None = None


@dataclass
class TaskResult:
    """The results for one model.

    Args:
        step_ms: time of a real unwatched step; None if the task has no real step.
        pass_ms: time of one `torch._foreach_norm` over all gradients.
    """

    name: str
    num_tensors: int
    num_elements: int
    batch: str
    step_ms: float | None
    pass_ms: float
    pairs: int
    costs: dict[str, Cost] = field(default_factory=dict)


@dataclass
class Pair:
    """A block of unwatched and a block of watched steps, in either order: wall and processor seconds of each step."""

    unwatched: list[tuple[float, float]]
    watched: list[tuple[float, float]]

    def added(self, column: int) -> list[float]:
        """Milliseconds by which each watched step took longer; column 0: wall time, 1: processor time."""
        base = statistics.median(step[column] for step in self.unwatched)
        return [(step[column] - base) * 1e3 for step in self.watched]

    def mean_added(self) -> float:
        """Milliseconds of wall time per step by which the watched block took longer."""
        return (_mean_wall(self.watched) - _mean_wall(self.unwatched)) * 1e3


@dataclass
class Measured:
    """The pairs of one monitor.

    Args:
        samples, rows: positions of the watched steps that it sampled, and of those in which it wrote a row.
        settling: the pairs before these, in which its cadence became stable.
    """

    pairs: list[Pair]
    samples: set[int]
    rows: set[int]
    settling: list[Pair] = field(default_factory=list)

    @property
    def block(self) -> int:
        return len(self.pairs[0].watched)

    def steps_of(self, number: int) -> range:
        """The positions of a pair's watched steps."""
        return range(number * self.block, (number + 1) * self.block)

    def added_at_start(self) -> float:
        """Seconds that the monitor added, in all, to the steps before its cadence was stable."""
        return sum(pair.mean_added() for pair in self.settling) * self.block / 1e3

    def share_of_steps(self, chosen: set[int]) -> float:
        return len(chosen) / (len(self.pairs) * self.block)


class Clock:
    """A wall clock that can be advanced or stopped between steps, for monitors whose cadence depends on time."""

    def __init__(self) -> None:
        self._now, self._ahead = time.perf_counter, 0.0

    def __call__(self) -> float:
        return self._now() + self._ahead

    def put_forward(self, seconds: float) -> None:
        self._ahead += seconds


class Bench:
    """A task with its model and optimizer, ready for steps."""

    def __init__(self, task: Task, device: torch.device, run: Any) -> None:
        torch.manual_seed(0)
        self.task, self.device, self.run = task, device, run
        self.model: Trainee = task.make(device)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-6)
        # On a GPU a real step is short, and only a real one keeps the device busy, which hides the host's work.
        self.light = task.light and not (device.type == "cuda" and task.batch)

    def step(self, monitor: Attached, *, light: bool | None = None) -> None:
        large_on_gpu = self.task.light and self.device.type == "cuda"
        with torch.autocast("cuda", torch.bfloat16, enabled=large_on_gpu):
            loss = self.model(light=self.light if light is None else light)
        loss.backward()
        values = monitor.after_backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.run.log({"loss": 0.0, **values})

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def times(self, monitor: Attached, steps: int) -> list[tuple[float, float]]:
        """Run steps; return wall and processor seconds of each."""
        taken: list[tuple[float, float]] = []
        for _ in range(steps):
            self.wait()
            wall, cpu = time.perf_counter(), time.process_time()
            self.step(monitor)
            self.wait()
            taken.append((time.perf_counter() - wall, time.process_time() - cpu))
        return taken


def measure_task(
    task: Task, device: torch.device, monitors: dict[Monitor, int], say: Callable[[str], None]
) -> Iterator[TaskResult]:
    """Measure monitors on one model.

    Args:
        monitors: with the number of pairs of each.

    Yields:
        The results so far, after each monitor: what is measured survives if the next monitor takes too long.
    """
    with offline_run() as run, offline_run("create_new") as twins_run, contextlib.ExitStack() as stack:
        bench = Bench(task, device, run)
        for _ in range(WARM_UP):
            bench.step(Attached())
        gc.freeze()  # otherwise each monitor's garbage collection scans all imported packages
        stack.callback(gc.unfreeze)
        step_ms = _real_step_ms(bench) if task.batch else None
        parameters = list(bench.model.parameters())
        result = TaskResult(
            name=task.name,
            num_tensors=len(parameters),
            num_elements=sum(p.numel() for p in parameters),
            batch=task.batch.get(device.type, ""),
            step_ms=step_ms,
            pass_ms=statistics.median(_pass_ms(bench) for _ in range(5)),
            pairs=max(monitors.values()),
        )
        for monitor, pairs in monitors.items():
            if step_ms is None and monitor.settles:
                continue
            say(f"{task.name}: {monitor.name}")
            measured = _measure(task, device, (run, twins_run), monitor, pairs, step_ms or 0.0)
            result.costs[monitor.name] = _cost(monitor, measured, _cycle(task, monitor) / monitor.every)
            yield result
        say(f"{task.name}: what is sent")
        for monitor in monitors:  # at the end: W&B's own watch() logs to the newest run, and the others must be over
            if monitor.name in result.costs:
                _add_traffic(bench, monitor, result.costs[monitor.name])
                yield result


def _cycle(task: Task, monitor: Monitor) -> int:
    """Return the number of steps of the monitor's cycle in this benchmark."""
    return min(monitor.every, task.steps)


def _measure(
    task: Task, device: torch.device, runs: tuple[Any, Any], monitor: Monitor, most: int, step_ms: float
) -> Measured:
    """Measure pairs of new models, in whole cycles.

    A monitor whose cadence depends on time first runs some steps to find its cadence. Its clock stops during the twin's
    steps. If a light step replaces a real one, the clock is advanced by the difference of their times.
    """
    bench, twin = (Bench(task, device, run) for run in runs)
    clock, cycle = Clock(), _cycle(task, monitor)
    pairs: list[Pair] = []
    settling: list[Pair] = []
    bench.times(Attached(), WARM_UP)
    light = _mean_wall(twin.times(Attached(), WARM_UP)[1:])
    left_out = (step_ms / 1e3 - light) * task.block if bench.light else 0.0
    steps_before = task.settled_pairs * task.block if monitor.settles else WARM_UP

    def step_both(*, twin_first: bool) -> Pair:
        watched = [] if twin_first else bench.times(attached, task.block)
        unwatched = twin.times(Attached(), task.block)
        clock.put_forward(left_out - sum(wall for wall, _ in unwatched))
        return Pair(unwatched, watched or bench.times(attached, task.block))

    def is_over() -> bool:
        too_slow = not monitor.settles and time.monotonic() - began > _MONITOR_SECONDS
        in_cycle = len(pairs) * task.block % cycle
        return not in_cycle and (len(pairs) >= most or (too_slow and len(pairs) >= _FEWEST_PAIRS))

    gc.collect()
    gc.disable()  # so that no step includes a garbage collection
    try:
        with mock.patch.object(time, "perf_counter", clock):
            attached = monitor.attach(bench.model, bench.run, steps_before if monitor.settles else cycle)
            try:
                if monitor.settles:
                    most = max(most, 2 * task.settled_pairs)
                    for _ in range(task.settled_pairs):
                        settling.append(step_both(twin_first=True))
                else:
                    bench.times(attached, steps_before)
                began = time.monotonic()
                while not is_over():
                    pairs.append(step_both(twin_first=len(pairs) % 2 == 0))
                samples, rows = attached.samples_and_rows()
            finally:
                attached.close()
    finally:
        gc.enable()
    places = range(len(pairs) * task.block)
    if monitor.settles:
        samples, rows = ({p for p in places if p + steps_before + 1 in chosen} for chosen in (samples, rows))
    else:
        rows = set(places[monitor.row_at % cycle :: cycle]) if monitor.row_at is not None else set()
        samples = set(places) - rows if monitor.samples else rows
    return Measured(pairs, samples, rows, settling)


def _cost(monitor: Monitor, measured: Measured, cycle: float) -> Cost:
    """Return the cost of a monitor whose real cycle is `cycle` times shorter than the measured one."""
    wall, cpu = [], []
    for number, pair in enumerate(measured.pairs):
        sampled = [place % measured.block for place in measured.steps_of(number) if place in measured.samples]
        if sampled:
            for values, column in ((wall, 0), (cpu, 1)):
                added = pair.added(column)
                values.append(statistics.median(added[index] for index in sampled))
    if not wall:
        raise RuntimeError(f"{monitor.name} has measured no step: it needs more of them")
    ordered = sorted(wall)
    quarter = len(ordered) // 4
    return Cost(
        sampled_ms=statistics.median(wall),
        amortised_ms=_amortised(measured, cycle),
        spread_ms=(ordered[-1 - quarter] - ordered[quarter]) / 2,
        sampled_cpu_ms=statistics.median(cpu),
        rows_per_step=measured.share_of_steps(measured.rows) if monitor.settles else 0.0,
        steps_per_sample=1 / measured.share_of_steps(measured.samples) if monitor.settles else None,
        start_s=measured.added_at_start() if monitor.settles else None,
    )


def _amortised(measured: Measured, cycle: float) -> float:
    """Return milliseconds per step, on average over whole cycles.

    Whole blocks are compared, because the cost of a sample or a row extends to the steps after it and to other threads.
    A mean of all pairs would include disturbances by other programs. A median or trimmed mean of all pairs would leave
    out the pairs with rare, expensive steps. So pairs with a row, with a sample and with neither are trimmed
    separately, and their means are weighted by their frequency in the real cycle, which may be longer than the cycle
    that is measured.
    """
    kinds: defaultdict[tuple[bool, bool], list[float]] = defaultdict(list)
    for number, pair in enumerate(measured.pairs):
        steps = measured.steps_of(number)
        around = {steps.start - 1, *steps}  # a sample is delivered one step later
        kinds[bool(around & measured.rows), bool(around & measured.samples)].append(pair.mean_added())
    with_row = sum(len(added) for (has_row, _), added in kinds.items() if has_row) / len(measured.pairs)
    without = (1 - with_row * cycle) / (1 - with_row) if with_row < 1 else 0.0
    return sum(
        _trimmed_mean(added) * len(added) / len(measured.pairs) * (cycle if has_row else without)
        for (has_row, _), added in kinds.items()
    )


def _trimmed_mean(values: list[float]) -> float:
    cut = int(len(values) * _TRIMMED)
    return statistics.fmean(sorted(values)[cut : len(values) - cut])


def _mean_wall(steps: list[tuple[float, float]]) -> float:
    return statistics.fmean(wall for wall, _ in steps)


def _real_step_ms(bench: Bench) -> float:
    bench.step(Attached(), light=False)
    taken: list[float] = []
    while len(taken) < 4 or (not bench.light and len(taken) < 200 and sum(taken) < _REAL_STEPS_SECONDS):
        bench.wait()
        began = time.perf_counter()
        bench.step(Attached(), light=False)
        bench.wait()
        taken.append(time.perf_counter() - began)
    return statistics.median(taken) * 1e3


def _pass_ms(bench: Bench) -> float:
    bench.model(light=bench.task.light).backward()
    present: list[Tensor] = gradients(bench.model)
    taken = []
    for _ in range(5):
        bench.wait()
        began = time.perf_counter()
        torch._foreach_norm(present)
        bench.wait()
        taken.append(time.perf_counter() - began)
    bench.optimizer.zero_grad()
    return statistics.median(taken) * 1e3


def _add_traffic(bench: Bench, monitor: Monitor, cost: Cost) -> None:
    """Run a few steps in a separate run; its file afterwards holds what W&B would receive."""
    steps = _TRAFFIC_STEPS
    with offline_run() as run:
        bench.run = run
        for _ in range(WARM_UP):
            bench.step(Attached())
        unwatched_peak = peak_mib(bench.device, lambda: bench.step(Attached()), steps)
        attached = monitor.attach(bench.model, bench.run, steps)
        try:
            with count_host_reads(bench.device) as reads:
                watched_peak = peak_mib(bench.device, lambda: bench.step(attached), steps)
        finally:
            attached.close()
        run.log({"loss": 0.0})  # a row for queued values to join
        file = Path(run.settings.sync_file)
        run.finish()
        rows, size = monitor_rows(file)
    cost.host_reads = reads[0] / (steps if monitor.samples else 1)
    cost.peak_mib = max(watched_peak - unwatched_peak, 0.0)
    if rows:
        cost.row_bytes = size / rows
        cost.rows_per_step = cost.rows_per_step if monitor.settles else 1 / monitor.every


def chosen_monitors(names: list[str], device_type: str) -> list[Monitor]:
    """Return the monitors that run here and whose name contains one of these words, in the order of the words.

    The one that does nothing is always the first.
    """
    installed = [monitor for monitor in MONITORS if monitor.runs_on(device_type)]
    if not names:
        return installed
    chosen = (monitor for name in names for monitor in installed if name.lower() in monitor.name.lower())
    return list(dict.fromkeys([installed[0], *chosen]))
