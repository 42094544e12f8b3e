"""Check the CUDA kernels on a GPU, and time them beside a copy and other implementations.

Every figure is the median over rounds; all candidates run in turn, each after the cache is emptied. GPU time is between
CUDA events, with the device kept busy until the host has queued everything; host time ends when the call returns.
 "of copy" is the share of the bandwidth of a device-to-device copy in the same run, for bytes that must be read
once. Finally the time that watching adds to a real training step is measured (kernel_step.py).

    python -m benchmarks.kernel [--models "GPT-2 small" ...] [--dtypes bfloat16 ...] [--rounds 20] [--json FILE]
        [--what lists step]

A failure is printed with its traceback and named in the table; the other parts still run, and the exit status is 1. The
JSON is written after every part. --tiny only checks that everything runs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.kernel_step import measure_added_time
from benchmarks.kernel_table import failures_of, render, targets
from benchmarks.machine import describe_machine
from benchmarks.shapes import MODELS, num_elements
from wandb_gradwatch._measure.columns import Column
from wandb_gradwatch._measure.measure import measure, measure_received

TINY: list[tuple[int, ...]] = [(40,), (129, 130), (2,), (7,)]  # one whole chunk and parts of chunks

Tensors = list[torch.Tensor]


def check(gradients: Tensors, parameters: Tensors) -> None:
    """Compare the kernels with the reference on the tensors to be timed, and with a second run of themselves.

    Raises:
        AssertionError: a number is wrong.
    """
    some = sorted({0, 1, len(gradients) // 2, len(gradients) - 1})
    measured = measure(gradients, parameters, histogram=True, backend="cuda")
    again = measure(gradients, parameters, histogram=True, backend="cuda")
    expected = measure([gradients[i] for i in some], [parameters[i] for i in some], histogram=True, backend="reference")
    assert measured.histogram is not None
    assert expected.histogram is not None
    counts, rows = measured.histogram.cpu()[some], measured.rows.cpu()[some]
    torch.testing.assert_close(counts, expected.histogram.cpu(), rtol=0, atol=0)
    expected_rows = expected.rows.cpu()
    for column in Column:
        rtol = 1e-5 if column in (Column.GRAD_SUM_SQ, Column.RECEIVED_SUM_SQ, Column.PARAM_SUM_SQ) else 0
        atol = 0.0
        if column is Column.GRAD_SUM:  # terms cancel: the tolerance is relative to the sum of absolute values
            atol = (
                1e-5
                * float((expected_rows[:, Column.NUM_ELEMENTS] * expected_rows[:, Column.GRAD_SUM_SQ]).max()) ** 0.5
            )
        torch.testing.assert_close(rows[:, column], expected_rows[:, column], rtol=rtol, atol=atol, equal_nan=True)
    assert torch.equal(measured.rows.view(torch.int64), again.rows.view(torch.int64)), "not the same bits twice"


def assert_no_sync(gradients: Tensors, parameters: Tensors) -> None:
    """Measure with torch's sync debug mode set to raise."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        measure(gradients, parameters, histogram=True, backend="cuda")
    finally:
        torch.cuda.set_sync_debug_mode("default")


def per_tensor_ops(gradients: Tensors) -> list[torch.Tensor]:
    """Do what hooks on parameters do: norm, mean, deviation, extremes, zeros, NaN and Inf, one operation each."""
    return [
        torch.stack(
            [
                g.norm().float(),
                *(statistic.float() for statistic in (g.mean(), g.std(), g.min(), g.max())),
                *((mask).sum().float() for mask in (g == 0, g.isnan(), g.isinf())),
            ]
        )
        for g in gradients
    ]


def wandb_watch_ops(gradients: Tensors, num_bins: int = 64) -> list[list[float]]:
    """Do what wandb.watch(log="gradients") does per gradient: finite check, extremes and a histogram on the host."""
    histograms = []
    for gradient in gradients:
        flat = gradient.float().flatten()
        flat = flat[torch.isfinite(flat)]
        low, high = flat.min().item(), flat.max().item()
        histograms.append(torch.histc(flat, bins=num_bins, min=low, max=high).cpu().tolist())
    return histograms


class Candidate(NamedTuple):
    """A function to be timed.

    Args:
        run: the function.
        num_bytes: the bytes that it must read, and for a copy also write.
        waits: whether it makes the host wait for the device.
    """

    run: Callable[[], Any]
    num_bytes: int
    waits: bool = False


def candidates_for(gradients: Tensors, parameters: Tensors) -> dict[str, Candidate]:
    """Return the candidates by name; the others are compared with the first."""
    size = sum(g.numel() * g.element_size() for g in gradients)
    source = torch.empty(size, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return {
        # A copy reads and writes: twice the bytes.
        "copy": Candidate(lambda: target.copy_(source), 2 * size),
        "columns": Candidate(lambda: measure(gradients, None, backend="cuda"), size),
        "+ parameters": Candidate(lambda: measure(gradients, parameters, backend="cuda"), 2 * size),
        "+ histogram": Candidate(lambda: measure(gradients, None, histogram=True, backend="cuda"), size),
        "all": Candidate(lambda: measure(gradients, parameters, histogram=True, backend="cuda"), 2 * size),
        "sum_sq": Candidate(lambda: measure_received(gradients, backend="cuda"), size),
        "backend torch": Candidate(lambda: measure(gradients, None, backend="torch"), size),
        "_foreach_norm": Candidate(lambda: torch._foreach_norm(gradients), size),
        "ops per tensor": Candidate(lambda: per_tensor_ops(gradients), size),
        "as wandb.watch": Candidate(lambda: wandb_watch_ops(gradients), size, waits=True),
    }


class Clock:
    """Time functions on a GPU and on the host."""

    _CYCLES_PER_MS = 2_000_000  # of a fast GPU: a slower one is kept busy for longer
    _LONGEST_MS = 200.0

    def __init__(self, cache_bytes: int = 2**28) -> None:
        self._cache = torch.empty(cache_bytes, dtype=torch.uint8, device="cuda")

    def time(self, run: Callable[[], Any], *, busy_ms: float) -> tuple[float, float]:
        """Return milliseconds on the GPU, and on the host until the call returns.

        Args:
            busy_ms: how long the device is kept busy first, longer than the host needs to queue everything.
        """
        self._cache.zero_()
        torch.cuda.synchronize()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        if busy_ms:
            torch.cuda._sleep(int(min(busy_ms, self._LONGEST_MS) * self._CYCLES_PER_MS))
        start.record()
        began = time.perf_counter()
        run()
        host = (time.perf_counter() - began) * 1e3
        end.record()
        end.synchronize()
        return start.elapsed_time(end), host


def benchmark(
    shapes: list[tuple[int, ...]], dtype: torch.dtype, clock: Clock, *, rounds: int, warming: int = 3
) -> dict[str, Any]:
    """Check, then time every candidate on one list.

    Returns:
        candidates: figures by name; failures: reasons by the name of the failed part.

    Raises:
        AssertionError: a number is wrong, so that nothing is timed.
    """
    gradients = [(torch.randn(shape, device="cuda") * 1e-3).to(dtype) for shape in shapes]
    parameters = [(torch.randn(shape, device="cuda") * 0.02).to(dtype) for shape in shapes]
    check(gradients, parameters)
    failures: dict[str, str] = {}
    _attempt("no sync", failures, lambda: assert_no_sync(gradients, parameters))
    candidates = candidates_for(gradients, parameters)
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in candidates}
    busy_ms = dict.fromkeys(candidates, 0.0)
    for round_number in range(warming + rounds):
        for name, candidate in candidates.items():
            if name in failures:
                continue
            taken = _attempt(name, failures, lambda c=candidate, n=name: clock.time(c.run, busy_ms=busy_ms[n]))
            if taken is not None and round_number >= warming:  # after compilation, tuning and the first touch of memory
                times[name].append(taken)
            elif taken is not None and round_number and not candidate.waits:
                busy_ms[name] = 1.0 + 2 * taken[1]
    figures: dict[str, dict[str, float]] = {}
    for name, candidate in candidates.items():
        if name not in failures:
            gpu, host = (statistics.median(column) for column in zip(*times[name], strict=True))
            num_bytes = candidate.num_bytes
            figures[name] = {"gpu_ms": gpu, "host_ms": host, "num_bytes": num_bytes, "gb_per_s": num_bytes / gpu / 1e6}
    copy = figures.get("copy", {}).get("gb_per_s", float("nan"))
    for figure in figures.values():
        figure["of_copy"] = figure["gb_per_s"] / copy
        figure["limit_ms"] = figure["num_bytes"] / copy / 1e6
    return {"candidates": figures, "failures": failures}


def _attempt(what: str, failures: dict[str, str], run: Callable[[], Any]) -> Any:
    """Return the function's result; None if it raises, after printing and recording the failure."""
    try:
        return run()
    except Exception as error:
        print(f"{what} failed:", file=sys.stderr)
        traceback.print_exc()
        failures[what] = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"
        return None


def main(arguments: list[str] | None = None) -> int:
    """Returns: 1 if anything failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=["ResNet-50", "GPT-2 small", "GPT 1.2B"])
    parser.add_argument(
        "--dtypes", nargs="+", choices=["bfloat16", "float32", "float16"], default=["bfloat16", "float32"]
    )
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--what", nargs="+", choices=["lists", "step"], default=["lists", "step"])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--tiny", action="store_true", help="a few small tensors instead of the models")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks.kernel needs a CUDA device, and torch finds none here")
    report = measure_all(options)
    print("\n".join([render(report), "", *targets(report)]))
    return 1 if failures_of(report) else 0


def measure_all(options: argparse.Namespace) -> dict[str, Any]:
    """Measure every list of tensors, then a real training step; write the results after each."""
    torch.manual_seed(0)
    machine = describe_machine(torch.device("cuda"))
    report: dict[str, Any] = {"machine": machine, "results": [], "added_time": None, "failures": {}}
    print(report["machine"])
    clock = Clock(1000) if options.tiny else Clock()
    lists = {"tiny": TINY} if options.tiny else {name: MODELS[name]() for name in options.models}
    for model, shapes in lists.items() if "lists" in options.what else ():
        for dtype in options.dtypes:
            print(f"{model}, {dtype}: {len(shapes)} tensors, {num_elements(shapes) / 1e6:.1f} million elements")
            warming = 0 if options.tiny else 3

            def run(shapes: list[tuple[int, ...]] = shapes, dtype: str = dtype, warming: int = warming) -> Any:
                return benchmark(shapes, getattr(torch, dtype), clock, rounds=options.rounds, warming=warming)

            failures: dict[str, str] = {}
            result = _attempt("the list", failures, run) or {"candidates": {}, "failures": failures}
            print(f"  {'':<16}{'GPU ms':>10}{'host ms':>10}{'GB/s':>8}{'of copy':>9}")
            for name, r in result["candidates"].items():
                print(f"  {name:<16}{r['gpu_ms']:10.3f}{r['host_ms']:10.3f}{r['gb_per_s']:8.0f}{r['of_copy']:9.0%}")
            report["results"].append({"model": model, "dtype": dtype, **result})
            _write(report, options.json)
            _attempt("freeing memory", report["failures"], torch.cuda.empty_cache)
    if "step" in options.what:
        rounds = min(options.rounds, 5)
        added = _attempt("a step", report["failures"], lambda: measure_added_time(tiny=options.tiny, rounds=rounds))
        report["added_time"] = None if added is None else asdict(added)
        _write(report, options.json)
    return report


def _write(report: dict[str, Any], path: Path | None) -> None:
    if path is not None:
        path.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
