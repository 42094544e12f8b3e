"""The CUDA kernels on a GPU: right first, then how fast, beside a copy and beside what others do.

Every figure is the median over rounds, all candidates in turn in one run, the cache emptied before each. GPU time is
between CUDA events, with the device kept busy until the host has queued everything; host time is until the call
returns. "of copy" is the share of the bandwidth that a device-to-device copy reaches in the same run, by the bytes that
must be read once. Last, what a real training step takes longer (kernel_step.py).

    python -m benchmarks.kernel [--models "GPT-2 small" ...] [--dtypes bfloat16 ...] [--rounds 20] [--json FILE]

Writes the README's table between its markers with --readme; --tiny only shows that everything runs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks.kernel_step import AddedTime, measure_added_time
from benchmarks.machine import describe_machine
from benchmarks.shapes import MODELS, num_elements
from benchmarks.table import README, with_table
from wandb_gradwatch.statistics.columns import Column
from wandb_gradwatch.statistics.measure import measure, sum_sq

BEGIN, END = "<!-- kernel:begin -->", "<!-- kernel:end -->"
TINY: list[tuple[int, ...]] = [(40,), (129, 130), (2,), (7,)]  # one whole chunk, and parts of chunks

Tensors = list[torch.Tensor]


def check(gradients: Tensors, parameters: Tensors) -> None:
    """Compare the kernels with the reference on the tensors to be timed, and with themselves.

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
        if column is Column.GRAD_SUM:  # signs cancel: right to a share of what was added up
            atol = (
                1e-5
                * float((expected_rows[:, Column.NUM_ELEMENTS] * expected_rows[:, Column.GRAD_SUM_SQ]).max()) ** 0.5
            )
        torch.testing.assert_close(rows[:, column], expected_rows[:, column], rtol=rtol, atol=atol, equal_nan=True)
    assert torch.equal(measured.rows.view(torch.int64), again.rows.view(torch.int64)), "not the same bits twice"


def assert_no_sync(gradients: Tensors, parameters: Tensors) -> None:
    """Measure with torch's sync debugging set to raise."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        measure(gradients, parameters, histogram=True, backend="cuda")
    finally:
        torch.cuda.set_sync_debug_mode("default")


def per_tensor_ops(gradients: Tensors) -> list[torch.Tensor]:
    """What a hook per parameter does: norm, mean, deviation, extremes, zeros, NaN and Inf, one operation each."""
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
    """What wandb.watch(log="gradients") does to every gradient: finite check, extremes and a histogram on the host."""
    histograms = []
    for gradient in gradients:
        flat = gradient.float().flatten()
        flat = flat[torch.isfinite(flat)]
        low, high = flat.min().item(), flat.max().item()
        histograms.append(torch.histc(flat, bins=num_bins, min=low, max=high).cpu().tolist())
    return histograms


def candidates_for(gradients: Tensors, parameters: Tensors) -> dict[str, tuple[Callable[[], Any], int]]:
    """Name -> (what to time, bytes that it must read)."""
    size = sum(g.numel() * g.element_size() for g in gradients)
    source = torch.empty(size, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return {
        # A copy reads and writes: twice the bytes.
        "copy": (lambda: target.copy_(source), 2 * size),
        "columns": (lambda: measure(gradients, None, backend="cuda"), size),
        "+ parameters": (lambda: measure(gradients, parameters, backend="cuda"), 2 * size),
        "+ histogram": (lambda: measure(gradients, None, histogram=True, backend="cuda"), size),
        "all": (lambda: measure(gradients, parameters, histogram=True, backend="cuda"), 2 * size),
        "sum_sq": (lambda: sum_sq(gradients, backend="cuda"), size),
        "backend torch": (lambda: measure(gradients, None, backend="torch"), size),
        "_foreach_norm": (lambda: torch._foreach_norm(gradients), size),
        "ops per tensor": (lambda: per_tensor_ops(gradients), size),
        "as wandb.watch": (lambda: wandb_watch_ops(gradients), size),
    }


class Clock:
    """Times on a GPU and on the host: median figures need many of them, so an idle device must not be in the way."""

    def __init__(self, busy_cycles: int = 8_000_000, cache_bytes: int = 2**28) -> None:
        self._busy_cycles = busy_cycles  # some 4 ms: longer than any candidate takes to be queued, if it does not wait
        self._cache = torch.empty(cache_bytes, dtype=torch.uint8, device="cuda")

    def time(self, run: Callable[[], Any]) -> tuple[float, float]:
        """Milliseconds on the GPU, and on the host until the call returns."""
        self._cache.zero_()
        torch.cuda.synchronize()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(self._busy_cycles)
        start.record()
        began = time.perf_counter()
        run()
        host = (time.perf_counter() - began) * 1e3
        end.record()
        end.synchronize()
        return start.elapsed_time(end), host


def benchmark(
    shapes: list[tuple[int, ...]], dtype: torch.dtype, clock: Clock, *, rounds: int, warming: int = 2
) -> dict[str, dict[str, float]]:
    gradients = [(torch.randn(shape, device="cuda") * 1e-3).to(dtype) for shape in shapes]
    parameters = [(torch.randn(shape, device="cuda") * 0.02).to(dtype) for shape in shapes]
    check(gradients, parameters)
    assert_no_sync(gradients, parameters)
    candidates = candidates_for(gradients, parameters)
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in candidates}
    for round_number in range(warming + rounds):
        for name, (run, _) in candidates.items():
            taken = clock.time(run)
            if round_number >= warming:  # compiled, tuned and touched by then
                times[name].append(taken)
    results = {}
    for name, (_, num_bytes) in candidates.items():
        gpu, host = (statistics.median(column) for column in zip(*times[name], strict=True))
        results[name] = {"gpu_ms": gpu, "host_ms": host, "gb_per_s": num_bytes / gpu / 1e6}
    for result in results.values():
        result["of_copy"] = result["gb_per_s"] / results["copy"]["gb_per_s"]
    return results


def render(report: dict[str, Any]) -> str:
    """The README's table: every list, what of ours and of others' takes how long, and the real step."""
    machine = report["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    names = list(report["results"][0]["candidates"])
    lines = [
        f"{machine['device']}, {versions}. GPU ms (share of a copy's bandwidth) / host ms.",
        "",
        "| list | " + " | ".join(names) + " |",
        "|---|" + "---|" * len(names),
    ]
    for result in report["results"]:
        cells = [f"{r['gpu_ms']:.3f} ({r['of_copy']:.0%}) / {r['host_ms']:.2f}" for r in result["candidates"].values()]
        lines.append(f"| {result['model']}, {result['dtype']} | " + " | ".join(cells) + " |")
    added = AddedTime(**report["added_time"])
    lines += [
        "",
        f"A training step of GPT-2 small (bfloat16 autocast, 8 x 1024 tokens) takes {added.plain:.2f} ms. Watching "
        f"each adds {added.added:.3f} ms ({added.added_ratio:.2%}; noise {added.noise:.3f} ms): per sample "
        f"{added.host:.2f} ms of the host and {added.gpu:.3f} ms of the GPU, {added.gpu_everything:.3f} ms with a "
        f"histogram every step. The host waited {added.num_waits} times more often.",
    ]
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=["ResNet-50", "GPT-2 small", "GPT 1.2B"])
    parser.add_argument(
        "--dtypes", nargs="+", choices=["bfloat16", "float32", "float16"], default=["bfloat16", "float32"]
    )
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--readme", type=Path, nargs="?", const=README, help="write the table there")
    parser.add_argument("--tiny", action="store_true", help="a few small tensors instead of the models")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks.kernel needs a CUDA device, and torch finds none here")

    torch.manual_seed(0)
    report: dict[str, Any] = {"machine": describe_machine(torch.device("cuda")), "results": []}
    print(report["machine"])
    clock = Clock(1000, 1000) if options.tiny else Clock()
    lists = {"tiny": TINY} if options.tiny else {name: MODELS[name]() for name in options.models}
    for model, shapes in lists.items():
        for dtype in options.dtypes:
            print(f"{model}, {dtype}: {len(shapes)} tensors, {num_elements(shapes) / 1e6:.1f} million elements")
            warming = 0 if options.tiny else 2
            results = benchmark(shapes, getattr(torch, dtype), clock, rounds=options.rounds, warming=warming)
            print(f"  {'':<16}{'GPU ms':>10}{'host ms':>10}{'GB/s':>8}{'of copy':>9}")
            for name, r in results.items():
                print(f"  {name:<16}{r['gpu_ms']:10.3f}{r['host_ms']:10.3f}{r['gb_per_s']:8.0f}{r['of_copy']:9.0%}")
            report["results"].append({"model": model, "dtype": dtype, "candidates": results})
            torch.cuda.empty_cache()
    report["added_time"] = asdict(measure_added_time(tiny=options.tiny, rounds=min(options.rounds, 5)))
    table = render(report)
    print(table)
    if options.json:
        options.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    if options.readme:
        text = options.readme.read_text(encoding="utf-8")
        options.readme.write_text(with_table(text, table, begin=BEGIN, end=END), encoding="utf-8")


if __name__ == "__main__":
    main()
