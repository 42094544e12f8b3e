"""Measure the cost of searching for the first bad operation: nothing until a failure, then one slow step.

A step of GPT-2 small, plain, under `torch.autograd.detect_anomaly`, and traced; and a training of the tiny MLP with a
guard, whose replay is on or off, in alternating pairs. Writes benchmarks/results/nonfinite.json, and the table into
docs/nonfinite.md.

    python -m benchmarks.nonfinite [--repetitions 2]
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch

import wandb_gradwatch
from benchmarks.machine import describe_machine
from benchmarks.models import TASKS
from wandb_gradwatch import MemorySink, SkipGuard, trace_nonfinite

RESULTS = Path(__file__).parent / "results/nonfinite.json"
PAGE = Path(__file__).parent.parent / "docs/nonfinite.md"
BEGIN, END = "<!-- nonfinite:begin -->", "<!-- nonfinite:end -->"

_PAIRED_STEPS = 300
_PAIRS = 15


def seconds_of_a_step(task: str, around: Callable[[torch.nn.Module], AbstractContextManager[Any]], times: int) -> float:
    """Return the median time of some steps, each inside the context `around`, after one warm-up step."""
    torch.manual_seed(0)
    model = TASKS[task].make(torch.device("cpu"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    taken = []
    for number in range(times + 1):
        began = time.perf_counter()
        with around(model) if number else nullcontext():
            optimizer.zero_grad()
            model(light=False).backward()
            optimizer.step()
        taken.append(time.perf_counter() - began)
    return statistics.median(taken[1:])


def replay_on_over_off() -> list[float]:
    """Return the ratio of the times of guarded steps with and without replay, for each pair."""
    ratios = []
    models = {is_on: TASKS["mlp"].make(torch.device("cpu")) for is_on in (True, False)}
    optimizers = {is_on: torch.optim.AdamW(model.parameters(), lr=1e-5) for is_on, model in models.items()}
    for is_on, model in models.items():
        wandb_gradwatch.watch(model, sinks=[MemorySink(max_snapshots=1)], rules=[], guard=SkipGuard(replay=is_on))
    for pair in range(_PAIRS + 1):
        seconds = {}
        for is_on in (True, False) if pair % 2 else (False, True):
            began = time.perf_counter()
            for _ in range(_PAIRED_STEPS):
                optimizers[is_on].zero_grad()
                models[is_on](light=False).backward()
                optimizers[is_on].step()
            seconds[is_on] = time.perf_counter() - began
        ratios.append(seconds[True] / seconds[False])
    wandb_gradwatch.unwatch()
    return ratios[1:]  # the first pair is a warm-up


def render(results: dict[str, Any]) -> str:
    """Return the table, and a line about the machine."""
    machine, plain = results["machine"], results["seconds"]["plain"]
    rows = [f"| {name} | {seconds:.1f} s | {seconds / plain:.1f} |" for name, seconds in results["seconds"].items()]
    low, middle, high = (100 * (value - 1) for value in results["replay_on_over_off"])
    return "\n".join(
        [
            "| a step of GPT-2 small, 2 x 256 tokens | time | relative to the plain step |",
            "| --- | --: | --: |",
            *rows,
            "",
            f"Before the first failure, the automatic search adds {middle:+.1f} % to a guarded step of a tiny MLP "
            f"(median of {_PAIRS} pairs of {_PAIRED_STEPS} steps with and without it; quartiles {low:+.1f} % and "
            f"{high:+.1f} %).",
            "",
            f"Made by `python -m benchmarks.nonfinite` on {results['day']} on {machine['device']}, {machine['cores']} "
            f"cores, {machine['threads']} thread{'s' if machine['threads'] > 1 else ''} of torch, torch "
            f"{machine['versions']['torch']}, commit {machine['commit']}.",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=2, help="steps of GPT-2 small of each kind")
    arguments = parser.parse_args()
    kinds: dict[str, Callable[[torch.nn.Module], AbstractContextManager[Any]]] = {
        "plain": lambda model: nullcontext(),
        "`torch.autograd.detect_anomaly()`": lambda model: torch.autograd.detect_anomaly(),
        "`trace_nonfinite(model)`": trace_nonfinite,
    }
    results = {
        "seconds": {name: seconds_of_a_step("gpt2", around, arguments.repetitions) for name, around in kinds.items()},
        "replay_on_over_off": statistics.quantiles(replay_on_over_off(), n=4),
        "day": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "machine": describe_machine(torch.device("cpu")),
    }
    RESULTS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    after = rest.partition(END)[2]
    PAGE.write_text(f"{before}{BEGIN}\n\n{render(results)}\n\n{END}{after}", encoding="utf-8")
    print(render(results))


if __name__ == "__main__":
    main()
