"""Measure which faults are detected at sparse cadences, and with which delay. Writes docs/detection.md and
benchmarks/results/detection.json.

A tiny MLP is trained with twenty faults of its loss: it becomes NaN permanently, it becomes 10,000 times larger
permanently, or it is 100 times larger for one step. After each fault's part of the training, the parameters and the
state of the rules are restored to those before the fault, so that each fault meets the same rules.

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
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import wandb_gradwatch
from benchmarks.machine import describe_machine
from benchmarks.models import TASKS
from wandb_gradwatch import Alert, Rule, Snapshot
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
    titles: tuple[str, ...]  # titles of the alerts that count as detection


KINDS = (
    Kind("NaN for good", math.nan, True, ("NaN gradient",)),
    Kind("explosion that stays, 10,000 times", 1e4, True, ("Exploding gradient",)),
    Kind("spike of one step, 100 times", 100.0, False, ("Exploding gradient",)),
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
class Finding:
    """An alert of a rule, and the step of the training at which the rule returned it."""

    title: str
    step: int
    said_at: int


class Noted(Rule):
    """Wrap a rule and record all its alerts, not only the first of an episode."""

    def __init__(self, rule: Rule, training: Training) -> None:
        self._rule, self._training = rule, training

    def check(self, snapshot: Snapshot) -> Iterable[Alert]:
        found = list(self._rule.check(snapshot))
        said_at = self._training.step
        self._training.findings += [Finding(alert.title, alert.step, said_at) for alert in found]
        return found

    def state_dict(self) -> dict[str, Any]:
        return deepcopy(self._rule.state_dict())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._rule.load_state_dict(deepcopy(state))


class Training:
    """The training of the tiny MLP with its faults, at one cadence."""

    def __init__(self, faults: list[Fault], **cadence: Any) -> None:
        torch.manual_seed(0)
        self.step = 0
        self.findings: list[Finding] = []
        self.num_samples, self.overhead_ratio = 0, math.nan
        self._faults = faults
        self._model = TASKS["mlp"].make(torch.device("cpu"))
        self._rules = [Noted(rule, self) for rule in wandb_gradwatch.default_rules()]
        self._cadence = cadence

    def run(self) -> Training:
        optimizer = torch.optim.SGD(self._model.parameters(), lr=1e-6)  # so small that only the faults change anything
        counter = _Counter()
        with wandb_gradwatch.watch(self._model, sinks=[counter], rules=self._rules, **self._cadence):
            for fault in self._faults:
                while self.step < fault.last:
                    self.step += 1
                    if self.step == fault.first:
                        parameters = deepcopy(self._model.state_dict())
                        remembered = [rule.state_dict() for rule in self._rules]
                    (self._model(light=False) * fault.factor(self.step)).backward()
                    optimizer.step()
                    optimizer.zero_grad()
                self._model.load_state_dict(parameters)
                for rule, state in zip(self._rules, remembered, strict=True):
                    rule.load_state_dict(state)
        self.num_samples, self.overhead_ratio = counter.num_samples, counter.overhead_ratio
        return self

    def lateness(self, fault: Fault) -> int | None:
        """Return the number of steps from a fault to its first alert; None: it was not detected."""
        said = [
            finding.said_at
            for finding in self.findings
            if finding.title in fault.kind.titles and fault.first <= finding.step <= fault.last
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

A tiny MLP, {faults[-1].last:,} steps, {len(faults)} faults at random steps: {"; ".join(kind.name for kind in KINDS)}.
The table shows how many faults the rules report, and how many steps after the first bad step: the median and the
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
