"""Measure the cost of this package and of other monitors on this machine: prints a table and writes JSON.

python -m benchmarks [--models mlp resnet50 gpt2 1b] [--monitors gradwatch ...] [--pairs 100] [--json FILE]
python -m benchmarks --quick    # only the tiny MLP, with few pairs: takes two minutes
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

import torch

from benchmarks.harness import chosen_monitors, measure_task
from benchmarks.machine import describe_machine, free_gib
from benchmarks.models import TASKS
from benchmarks.table import render
from wandb_gradwatch._measure.cpu_compiled import is_installed
from wandb_gradwatch._measure.measure import compile_for_cpu

RESULTS = Path(__file__).parent / "results"
_QUICK_PAIRS = 50
_NEEDED_GIB = {"1b": 12.0}  # parameters, gradients, prepared gradients, and room for a monitor's copies


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(TASKS), help="default: all, the last only on a GPU")
    parser.add_argument("--monitors", nargs="+", default=[], help="those whose name holds one of these words")
    parser.add_argument("--pairs", type=int, help="blocks of unwatched and of watched steps per monitor")
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
    everything = [key for key in TASKS if key != "1b" or device.type == "cuda"]
    models = arguments.models or (["mlp"] if arguments.quick else everything)
    monitors = chosen_monitors(arguments.monitors, device.type)
    results = {"machine": describe_machine(device), "tasks": []}
    path = arguments.json or RESULTS / f"{'quick' if arguments.quick else device.type}.json"
    if not (arguments.json or arguments.quick or arguments.models):
        (RESULTS / "quick.json").unlink(missing_ok=True)  # it would precede the new results in the tables, but is older
    path.parent.mkdir(parents=True, exist_ok=True)
    for key in models:
        if free_gib(device) < _NEEDED_GIB.get(key, 0.0):
            print(f"{TASKS[key].name}: left out, it needs {_NEEDED_GIB[key]:.0f} GiB of memory", file=sys.stderr)
            continue
        pairs = arguments.pairs or (_QUICK_PAIRS if arguments.quick else TASKS[key].pairs)
        task = measure_task(TASKS[key], device, monitors, pairs, lambda line: print(line, file=sys.stderr))
        results["tasks"].append(asdict(task))
        path.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    print(render(results))


if __name__ == "__main__":
    main()
