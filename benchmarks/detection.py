"""Measure which faults are detected at sparse cadences, and with which delay. Writes docs/detection.md and
benchmarks/results/detection.json.

A tiny MLP learns which of ten directions is the largest, with twenty faults of its loss: it becomes NaN permanently, it
becomes 10,000 times larger permanently, or it is 100 times larger for one step. After each fault's part of the
training, the parameters and the state of the judgement are restored to those before the fault, so that each fault meets
the same judgement.

    python -m benchmarks.detection [--steps 100000] [--faults 20]
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import multiprocessing
import random
import statistics
from concurrent.futures import ProcessPoolExecutor
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

import wandb_gradwatch
from benchmarks.machine import describe_machine
from benchmarks.models import TinyMLP
from wandb_gradwatch import Alert, Snapshot
from wandb_gradwatch._measure.cpu_compiled import is_installed
from wandb_gradwatch._measure.measure import compile_for_cpu

PAGE = Path(__file__).parent.parent / "docs/detection.md"
RESULTS = Path(__file__).parent / "results/detection.json"


@dataclass(frozen=True)
class Kind:
    """A kind of fault of the loss."""

    name: str
    factor: float
    stays: bool
    found_as: tuple[str, ...]  # kinds of incidents that count as detection


KINDS = (
    Kind("NaN for good", math.nan, True, ("nan_gradient",)),
    Kind("explosion that stays, 10,000 times", 1e4, True, ("exploding_gradient", "nan_gradient")),  # NaN soon follows
    Kind("spike of one step, 100 times", 100.0, False, ("exploding_gradient", "gradient_spike")),
)
CADENCES: dict[str, dict[str, Any]] = {
    "1 %, the default": {},
    "5 %": {"max_overhead": 0.05},
    "every step": {"sample_every": 1},
}


@dataclass(frozen=True)
class Fault:
    """A fault: its first step, and the last step of its part of the training."""

    kind: Kind
    first: int
    last: int

    def factor(self, step: int) -> float:
        return self.kind.factor if step == self.first or (self.kind.stays and step > self.first) else 1.0


@dataclass(frozen=True)
class Told:
    """An incident that was told, the step at which it was found, and the step of the training at which it was told."""

    kind: str
    step: int
    said_at: int


class Training:
    """The training of the tiny MLP with its faults, at one cadence."""

    def __init__(self, faults: list[Fault], **cadence: Any) -> None:
        torch.manual_seed(0)
        self.step = 0
        self.told: list[Told] = []
        self.num_samples, self.overhead_ratio = 0, math.nan
        self._faults = faults
        self._model, self._directions = TinyMLP(), torch.randn(32, 10)
        self._cadence = cadence

    def run(self) -> Training:
        optimizer = torch.optim.SGD(self._model.parameters(), lr=0.05)
        counter = _Counter()
        watcher = wandb_gradwatch.watch(self._model, sinks=[counter], on_alert=self._note, **self._cadence)
        judged = watcher._alert_manager
        with watcher:
            for fault in self._faults:
                while self.step < fault.last:
                    self.step += 1
                    if self.step == fault.first:
                        parameters, remembered = deepcopy(self._model.state_dict()), deepcopy(judged.state_dict())
                    (self._loss() * fault.factor(self.step)).backward()
                    optimizer.step()
                    optimizer.zero_grad()
                self._model.load_state_dict(parameters)
                judged.load_state_dict(remembered)
        self.num_samples, self.overhead_ratio = counter.num_samples, counter.overhead_ratio
        return self

    def _loss(self) -> torch.Tensor:
        rows = torch.randn(64, 32)
        return functional.cross_entropy(self._model(rows), (rows @ self._directions).argmax(dim=1))

    def _note(self, alert: Alert) -> None:
        assert alert.incident is not None
        self.told.append(Told(alert.incident.kind, alert.step, self.step))

    def lateness(self, fault: Fault) -> int | None:
        """Return the number of steps from a fault to its first alert; None: it was not detected."""
        said = [
            told.said_at
            for told in self.told
            if told.kind in fault.kind.found_as and fault.first <= told.step <= fault.last
        ]
        return min(said) - fault.first if said else None

    def results(self, faults: list[Fault]) -> dict[str, Any]:
        late = [self.lateness(fault) for fault in faults]
        return {"samples": self.num_samples, "overhead_ratio": self.overhead_ratio, "steps_late": late}


class _Counter(wandb_gradwatch.Sink):
    num_samples, overhead_ratio = 0, math.nan

    def write(self, snapshot: Snapshot) -> None:
        self.num_samples += len(snapshot)
        self.overhead_ratio = snapshot.overhead_ratio


def plan(steps: int, num_faults: int) -> list[Fault]:
    """Divide the training into equal parts, each with a fault at a random step of its middle third."""
    chance, part = random.Random(0), steps // num_faults
    kinds = [KINDS[i % len(KINDS)] for i in range(num_faults)]
    chance.shuffle(kinds)
    return [
        Fault(kinds[i], i * part + chance.randint(part // 3, 2 * part // 3), (i + 1) * part) for i in range(num_faults)
    ]


def trained(cadence: str, faults: list[Fault]) -> dict[str, Any]:
    """Run the training at this cadence and return its results."""
    torch.set_num_threads(1)
    if is_installed():
        compile_for_cpu("compiled")  # otherwise compiled in the background during the first steps
    return Training(faults, **CADENCES[cadence]).run().results(faults)


def render(cadences: dict[str, dict[str, Any]], faults: list[Fault], machine: dict[str, Any], day: str) -> str:
    lines = []
    for cadence, of in cadences.items():
        cells = [cadence, f"{faults[-1].last / of['samples']:.1f}", f"{of['overhead_ratio']:.1%}"]
        for kind in KINDS:
            late = [steps for fault, steps in zip(faults, of["steps_late"], strict=True) if fault.kind == kind]
            found = [steps for steps in late if steps is not None]
            words = f", {statistics.median(found):g} steps late, at most {max(found)}" if found else ""
            cells.append(f"{len(found)} of {len(late)}{words}")
        lines.append("| " + " | ".join(cells) + " |")
    titles = " | ".join(kind.name for kind in KINDS)
    return f"""# What a sparse cadence finds

Made by `python -m benchmarks.detection --steps {faults[-1].last}` on {day} on {machine["device"]}, {machine["cores"]}
cores, torch {machine["versions"]["torch"]}, commit {machine["commit"]}.

A tiny MLP that learns, {faults[-1].last:,} steps, {len(faults)} faults at random steps:
{"; ".join(kind.name for kind in KINDS)}.
The table shows how many faults are reported, and how many steps after the first bad step: the median and the
largest number. "Measures one in" is the average number of steps per measured step; the share of the time is
`gradwatch/overhead_ratio`. One second of monitoring is allowed in addition at the start of a run, so that the
first seconds are measured nearly whole, and the cadence becomes sparser after them.

| cadence | measures one in | share of the time | {titles} |
| --- | --: | --: | --: | --: | --: |
{chr(10).join(lines)}

Between measured steps nothing is checked. A fault that lasts is found at the next measured step, and one that is over
by then is not: to find every spike, measure every step with `watch(model, sample_every=1)`, or use a guard, which
checks every step.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--faults", type=int, default=20)
    arguments = parser.parse_args()
    faults = plan(arguments.steps, arguments.faults)
    # The longest training first, two at a time: each uses one thread.
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn")) as pool:
        running = {name: pool.submit(trained, name, faults) for name in reversed(CADENCES)}
        cadences = {name: running[name].result() for name in CADENCES}
    day = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    machine = describe_machine(torch.device("cpu"))
    results = {
        "machine": machine,
        "faults": [{"kind": fault.kind.name, "first": fault.first, "last": fault.last} for fault in faults],
        "cadences": cadences,
    }
    RESULTS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    PAGE.write_text(render(cadences, faults, machine, day), encoding="utf-8")
    print(PAGE.read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
