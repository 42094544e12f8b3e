"""Time monitors against the unwatched step, in turn and in one process, and count what they send.

A round takes for each monitor a block of unwatched steps and a block of watched ones (A B1 A B2 A ...), or watched and
unwatched steps by turns where the blocks are long: what a monitor adds is the difference within its pair, and of the
pairs the median counts. One monitor is nothing at all: how far its
figure is from 0 says how far to trust the others.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import math
import statistics
import time
from collections.abc import Callable
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
_BLOCK_SECONDS = 2.0  # a block of a slow monitor ends here, with two steps at least
_SETTLED_IN = 2  # of so many rounds monitors that must settle take part in one: their blocks are long


@dataclass
class Cost:
    """What one monitor adds; milliseconds.

    Args:
        sampled_ms: to a step that it measures, median of the pairs.
        amortised_ms: to a step of its real cadence, on average.
        spread_ms: half of the range that holds the middle half of the pairs' `sampled_ms`.
        sampled_cpu_ms: processor time of the process for a sampled step.
        host_reads: values that a sampled step makes the host wait for.
        row_bytes: of a row that it logs, as JSON, the user's own values not counted.
        rows_per_step: rows that hold values of it.
        peak_mib: by how much a watched step's peak of memory is above an unwatched one's.
        steps_per_sample: of a monitor that chooses which steps it measures: one in how many that was.
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


@dataclass
class TaskResult:
    """One model's table.

    Args:
        step_ms: a real unwatched step; None where there is none.
        unwatched_ms: the step that monitors were measured on.
        pass_ms: one `torch._foreach_norm` over all gradients.
    """

    name: str
    num_tensors: int
    num_elements: int
    batch: str
    step_ms: float | None
    unwatched_ms: float
    pass_ms: float
    rounds: int
    costs: dict[str, Cost] = field(default_factory=dict)


@dataclass
class Block:
    """Steps of one monitor beside unwatched ones: wall and processor seconds of each step.

    Args:
        samples, rows: places of the watched steps that a monitor chose to measure, and of those that wrote a row.
    """

    unwatched: list[tuple[float, float]]
    watched: list[tuple[float, float]]
    samples: set[int]
    rows: set[int]


class Clock:
    """The wall's, which can be put forward, or stopped, between steps: a monitor that goes by time sees real ones."""

    def __init__(self) -> None:
        self._now, self._ahead = time.perf_counter, 0.0

    def __call__(self) -> float:
        return self._now() + self._ahead

    def put_forward(self, seconds: float) -> None:
        self._ahead += seconds


class Bench:
    """One task, ready to be stepped."""

    def __init__(self, task: Task, device: torch.device, run: Any) -> None:
        torch.manual_seed(0)
        self.task, self.device, self.run = task, device, run
        self.model: Trainee = task.make(device)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-6)
        self.light = task.light

    def step(self, monitor: Attached, *, light: bool | None = None) -> None:
        loss = self.model(light=self.light if light is None else light)
        loss.backward()
        values = monitor.after_backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.run.log({"loss": 0.0, **values})

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def times(
        self,
        monitor: Attached,
        steps: int,
        *,
        at_most: float = math.inf,
        between: Callable[[], None] = lambda: None,
    ) -> list[tuple[float, float]]:
        """Wall and processor seconds of each step; `between` is called after each."""
        taken: list[tuple[float, float]] = []
        while len(taken) < steps and (len(taken) < 2 or sum(wall for wall, _ in taken) < at_most):
            self.wait()
            wall, cpu = time.perf_counter(), time.process_time()
            self.step(monitor)
            self.wait()
            taken.append((time.perf_counter() - wall, time.process_time() - cpu))
            between()
        return taken

    def attach(self, monitor: Monitor, steps: int) -> Attached:
        return monitor.attach(self.model, self.run, steps)


def measure_task(
    task: Task, device: torch.device, monitors: list[Monitor], rounds: int, say: Callable[[str], None]
) -> TaskResult:
    """Everything about one model."""
    with offline_run() as run, contextlib.ExitStack() as stack:
        bench = Bench(task, device, run)
        nothing = Attached()
        for _ in range(WARM_UP):
            bench.step(nothing)
        gc.freeze()  # what is there already: otherwise each block's collection looks through every imported package
        stack.callback(gc.unfreeze)
        step_ms = _real_step_ms(bench) if task.batch else None
        monitors = [monitor for monitor in monitors if step_ms is not None or not monitor.settles]
        blocks: dict[str, list[Block]] = {}
        unwatched: list[float] = []
        passes: list[float] = []
        for number in range(rounds):
            say(f"{task.name}: round {number + 1} of {rounds}")
            passes.append(_pass_ms(bench))
            for monitor in monitors:
                if monitor.settles and number % _SETTLED_IN:
                    continue
                block = _settled_block(bench, monitor, step_ms or 0.0) if monitor.settles else _block(bench, monitor)
                blocks.setdefault(monitor.name, []).append(block)
                unwatched += [wall for wall, _ in block.unwatched]
        parameters = list(bench.model.parameters())
        result = TaskResult(
            name=task.name,
            num_tensors=len(parameters),
            num_elements=sum(p.numel() for p in parameters),
            batch=task.batch.get(device.type, ""),
            step_ms=step_ms,
            unwatched_ms=statistics.median(unwatched) * 1e3,
            pass_ms=statistics.median(passes),
            rounds=rounds,
        )
        for monitor in monitors:
            result.costs[monitor.name] = _cost(monitor, blocks[monitor.name])
    say(f"{task.name}: what is sent")
    for monitor in monitors:
        _add_traffic(bench, monitor, result.costs[monitor.name])
    return result


def _block(bench: Bench, monitor: Monitor) -> Block:
    steps = bench.task.steps
    before = bench.times(Attached(), steps)
    attached = bench.attach(monitor, steps)
    gc.collect()
    gc.disable()  # a collection belongs to nobody's step
    try:
        for _ in range(WARM_UP if monitor.special else 1):
            bench.step(attached)
        # Where steps differ, all kinds of them are needed.
        watched = bench.times(attached, steps, at_most=math.inf if monitor.special else _BLOCK_SECONDS)
    finally:
        gc.enable()
        attached.close()
    return Block(before, watched, set(), set())


def _settled_block(bench: Bench, monitor: Monitor, step_ms: float) -> Block:
    """As `_block`, after as many steps again in which the monitor has found its cadence.

    So long a block sees the machine's pace drift: every watched step is followed by an unwatched one of a twin, a model
    of its own in a run of its own, during which the monitor's clock stands still. A light step stands for a real one:
    the rest of that one's time passes on the clock alone.
    """
    steps, clock = bench.task.settled_steps, Clock()
    unwatched: list[tuple[float, float]] = []
    with offline_run("create_new") as run:
        twin = Bench(bench.task, bench.device, run)
        light = statistics.median(wall for wall, _ in twin.times(Attached(), max(steps // 4, 2)))
        left_out = step_ms / 1e3 - light if bench.light else 0.0

        def step_twin() -> None:
            ((wall, cpu),) = twin.times(Attached(), 1)
            unwatched.append((wall, cpu))
            clock.put_forward(left_out - wall)

        gc.collect()
        gc.disable()
        try:
            with mock.patch.object(time, "perf_counter", clock):
                attached = bench.attach(monitor, steps)
                try:
                    bench.times(attached, steps, between=step_twin)
                    unwatched.clear()
                    watched = bench.times(attached, steps, between=step_twin)
                    samples, rows = attached.samples_and_rows()
                finally:
                    attached.close()
        finally:
            gc.enable()
    places = range(steps)
    return Block(
        unwatched,
        watched,
        {place for place in places if place + steps + 1 in samples},
        {place for place in places if place + steps + 1 in rows},
    )


def _cost(monitor: Monitor, blocks: list[Block]) -> Cost:
    sampled, amortised, cpu = [], [], []
    for block in blocks:
        watched = block.watched
        base_wall, base_cpu = (statistics.median(column) for column in zip(*block.unwatched, strict=True))
        added = [(wall - base_wall) * 1e3 for wall, _ in watched]
        added_cpu = [(used - base_cpu) * 1e3 for _, used in watched]
        if monitor.settles:
            special, every = block.samples | block.rows, len(watched)
            measured = sorted(block.samples)
        else:
            special, every = {index % len(watched) for index in monitor.special}, monitor.every
            measured = [i for i in range(len(added)) if not special or (i in special) != monitor.samples]
        plain = [value for index, value in enumerate(added) if index not in special] or [0.0]
        if measured:  # otherwise nothing was, in a block that a slow start has left without credit
            sampled.append(statistics.median(added[i] for i in measured))
            cpu.append(statistics.median(added_cpu[i] for i in measured))
        of_special = sum(added[index] for index in special)
        amortised.append((of_special + (every - len(special)) * statistics.median(plain)) / every)
    if not sampled:
        raise RuntimeError(f"{monitor.name} has measured no step of any block: the blocks are too short for it")
    ordered = sorted(sampled)
    quarter = len(ordered) // 4
    return Cost(
        sampled_ms=statistics.median(sampled),
        amortised_ms=statistics.median(amortised),
        spread_ms=(ordered[-1 - quarter] - ordered[quarter]) / 2,
        sampled_cpu_ms=statistics.median(cpu),
        rows_per_step=_share_of_steps([block.rows for block in blocks], blocks) if monitor.settles else 0.0,
        steps_per_sample=1 / _share_of_steps([block.samples for block in blocks], blocks) if monitor.settles else None,
    )


def _share_of_steps(chosen: list[set[int]], blocks: list[Block]) -> float:
    return sum(map(len, chosen)) / sum(len(block.watched) for block in blocks)


def _real_step_ms(bench: Bench) -> float:
    steps = 200 if not bench.light else 4
    bench.step(Attached(), light=False)
    taken = []
    for _ in range(steps):
        bench.wait()
        began = time.perf_counter()
        bench.step(Attached(), light=False)
        bench.wait()
        taken.append(time.perf_counter() - began)
    return statistics.median(taken) * 1e3


def _pass_ms(bench: Bench) -> float:
    bench.model(light=bench.light).backward()
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


# ---- what is sent, read and held


def _add_traffic(bench: Bench, monitor: Monitor, cost: Cost) -> None:
    """A few steps in a run of their own; what is in its file afterwards is what W&B would have got."""
    steps = _TRAFFIC_STEPS
    with offline_run() as run:
        bench.run = run
        for _ in range(WARM_UP):
            bench.step(Attached())
        unwatched_peak = peak_mib(bench.device, lambda: bench.step(Attached()), steps)
        attached = bench.attach(monitor, steps)
        try:
            with count_host_reads(bench.device) as reads:
                watched_peak = peak_mib(bench.device, lambda: bench.step(attached), steps)
        finally:
            attached.close()
        run.log({"loss": 0.0})  # a place for what still waits
        file = Path(run.settings.sync_file)
        run.finish()
        rows, size = monitor_rows(file)
    sampled = steps if monitor.samples or not monitor.special else len(monitor.special)
    cost.host_reads = reads[0] / sampled
    cost.peak_mib = max(watched_peak - unwatched_peak, 0.0)
    if rows:
        cost.row_bytes = size / rows
        cost.rows_per_step = cost.rows_per_step if monitor.settles else 1 / monitor.every


def chosen_monitors(names: list[str], device_type: str) -> list[Monitor]:
    """Those that run here and whose name holds one of these, or all; always with A against A."""
    installed = [monitor for monitor in MONITORS if monitor.runs_on(device_type)]
    if not names:
        return installed
    wanted = (any(name.lower() in monitor.name.lower() for name in names) for monitor in installed)
    chosen = list(itertools.compress(installed, wanted))
    return chosen if installed[0] in chosen else [installed[0], *chosen]
