"""Time measure() on the CPU, in units of one read of the gradients.

One read is torch.dot of every gradient with itself. Each figure is the median over rounds of time / read, both timed in
the same round on one thread, so that changes of the machine's speed between rounds cancel. The row "read again" is the
read in units of itself: its distance from 1 is the noise of all figures.

    python -m benchmarks.cpu_rows [--models MLP ...] [--backends cpu compiled ...] [--dtype float32] [--zeros 0.5]
        [--nans 0.01] [--rounds 9] [--json FILE]

--zeros and --nans are shares of the elements; the compiled backend needs numba.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.shapes import MODELS, num_elements
from wandb_gradwatch._measure.cpu_compiled import is_installed
from wandb_gradwatch._measure.measure import measure, measure_received


def median_ratios(candidates: dict[str, Callable[[], object]], rounds: int) -> tuple[float, dict[str, float]]:
    """Time the candidates in turn; the first is the unit. Return its seconds and every candidate's median ratio."""
    unit = next(iter(candidates))
    ratios: dict[str, list[float]] = {name: [] for name in candidates}
    seconds = []
    for round_number in range(rounds + 1):
        times = {name: _seconds(candidate) for name, candidate in candidates.items()}
        if round_number == 0:
            continue  # the first round touches memory and loads code for the first time
        seconds.append(times[unit])
        for name, taken in times.items():
            ratios[name].append(taken / times[unit])
    return statistics.median(seconds), {name: statistics.median(r) for name, r in ratios.items() if name != unit}


def _seconds(candidate: Callable[[], object], at_least: float = 0.005) -> float:
    """Return the seconds of one call, averaged over enough calls for the resolution of the clock."""
    repeats = 0
    start = time.perf_counter()
    while True:
        candidate()
        repeats += 1
        taken = time.perf_counter() - start
        if taken >= at_least:
            return taken / repeats


def candidates_for(
    gradients: list[torch.Tensor], parameters: list[torch.Tensor], backends: list[str]
) -> dict[str, Callable[[], object]]:
    same = [g.float().flatten() for g in gradients]  # the read uses float32 elements for every dtype

    def read() -> None:
        for gradient in same:
            torch.dot(gradient, gradient)

    candidates: dict[str, Callable[[], object]] = {"read": read, "read again": read}
    for backend in backends:
        candidates |= {
            f"{backend}: columns": lambda b=backend: measure(gradients, None, backend=b),
            f"{backend}: + parameters": lambda b=backend: measure(gradients, parameters, backend=b),
            f"{backend}: + histogram": lambda b=backend: measure(gradients, None, histogram=True, backend=b),
            f"{backend}: all": lambda b=backend: measure(gradients, parameters, histogram=True, backend=b),
            f"{backend}: sum_sq": lambda b=backend: measure_received(gradients, backend=b),
        }
    return candidates


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=["MLP", "ResNet-50", "GPT-2 small"])
    parser.add_argument("--backends", nargs="+", default=["cpu", *(["compiled"] if is_installed() else [])])
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16", "float64"])
    parser.add_argument("--zeros", type=float, default=0.0, help="share of the elements that are zero")
    parser.add_argument("--nans", type=float, default=0.0, help="share of the elements that are NaN")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()

    torch.set_num_threads(1)
    torch.manual_seed(0)
    results: dict[str, object] = {"machine": platform.processor() or platform.machine(), "torch": torch.__version__}
    for model in arguments.models:
        shapes = MODELS[model]()
        dtype = getattr(torch, arguments.dtype)
        gradients = [(torch.randn(shape) * 1e-3).to(dtype) for shape in shapes]
        for share, value in ((arguments.zeros, 0.0), (arguments.nans, math.nan)):
            if share:
                gradients = [g.masked_fill(torch.rand(g.shape) < share, value) for g in gradients]
        parameters = [(torch.randn(shape) * 0.02).to(dtype) for shape in shapes]
        rounds = arguments.rounds
        seconds, ratios = median_ratios(candidates_for(gradients, parameters, arguments.backends), rounds)
        print(f"{model}, {arguments.dtype}: {len(shapes)} tensors, {num_elements(shapes) / 1e6:.2f} million elements")
        print(f"  {'one read':<22}{seconds * 1e3:10.3f} ms")
        for name, ratio in ratios.items():
            print(f"  {name:<22}{ratio * seconds * 1e3:10.3f} ms {ratio:7.2f} reads")
        results[model] = {"dtype": arguments.dtype, "read_seconds": seconds, "reads": ratios}
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
