"""Measure the cost of this package and of other monitors on this machine: prints a table and writes JSON.

python -m benchmarks [--models mlp resnet50 gpt2 1b] [--monitors gradwatch ...] [--pairs 100] [--json FILE]
python -m benchmarks --quick    # only the tiny MLP, with few pairs: takes two minutes
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, replace
from pathlib import Path

import torch

from benchmarks.harness import chosen_monitors, measure_task
from benchmarks.machine import describe_machine, free_gib
from benchmarks.models import TASKS, TINY_TASKS
from benchmarks.table import render
from wandb_gradwatch._measure.cpu_compiled import is_installed
from wandb_gradwatch._measure.measure import compile_for_cpu

RESULTS = Path(__file__).parent / "results"
_QUICK_PAIRS = 50
_NEEDED_GIB = {"1b": 32.0}  # three models with gradients, the activations of one, and room for a monitor's copies


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(TASKS), help="default: all, the last only on a GPU")
    parser.add_argument("--monitors", nargs="+", default=[], help="those whose name holds one of these words")
    parser.add_argument("--pairs", type=int, help="blocks of unwatched and of watched steps per monitor")
    parser.add_argument("--once", nargs="+", default=[], help="only one pair of monitors whose name holds such a word")
    parser.add_argument("--settled-pairs", type=int, help="at most, until a monitor's own cadence is stable")
    parser.add_argument("--tiny", action="store_true", help="tiny models: only checks that everything runs")
    parser.add_argument("--quick", action="store_true", help="the tiny MLP alone, and few pairs")
    parser.add_argument("--threads", type=int, help="of torch; default: torch's own choice")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path, help="default: benchmarks/results/<device or quick>.json")
    arguments = parser.parse_args()

    device = torch.device(arguments.device)
    if device.type == "cpu" and is_installed():
        compile_for_cpu("compiled")  # otherwise compiled in the background during the first blocks
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    tasks = TINY_TASKS if arguments.tiny else TASKS
    everything = [key for key in tasks if key != "1b" or device.type == "cuda"]
    models = arguments.models or (["mlp"] if arguments.quick else everything)
    chosen = chosen_monitors(arguments.monitors, device.type)
    once = chosen_monitors(arguments.once, device.type)[1:] if arguments.once else []
    results = {"machine": describe_machine(device), "tasks": []}
    path = arguments.json or RESULTS / f"{'quick' if arguments.quick else device.type}.json"
    if not (arguments.json or arguments.quick or arguments.models):
        (RESULTS / "quick.json").unlink(missing_ok=True)  # it would precede the new results in the tables, but is older
    path.parent.mkdir(parents=True, exist_ok=True)
    for key in models:
        task = tasks[key]
        if free_gib(device) < _NEEDED_GIB.get(key, 0.0):
            print(f"{task.name}: left out, it needs {_NEEDED_GIB[key]:.0f} GiB of memory", file=sys.stderr)
            continue
        if arguments.settled_pairs:
            task = replace(task, settled_pairs=min(task.settled_pairs, arguments.settled_pairs))
        pairs = arguments.pairs or (_QUICK_PAIRS if arguments.quick else task.pairs)
        monitors = {monitor: 1 if monitor in once else pairs for monitor in chosen}
        before = results["tasks"]
        for result in measure_task(task, device, monitors, lambda line: print(line, file=sys.stderr)):
            results["tasks"] = [*before, asdict(result)]
            path.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    print(render(results))


if __name__ == "__main__":
    main()
