"""Measure how cost grows with the number of tensors, series in W&B, samples, and ranks. Writes docs/growth.md.

Up to a few hundred ranks run as processes on this machine. The cost of thousands of ranks is computed from measured
quantities: the bytes of one flush, the share of them that each position in a group sends, and the time of a message, of
a byte and of a request to the store.

    python -m benchmarks.growth [--tensors 10 148 ...] [--rounds 5] [--ranks 8 32 64 128] [--json FILE]
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

import wandb_gradwatch
from benchmarks.harness import Bench
from benchmarks.machine import describe_machine
from benchmarks.models import Task, TensorList, Trainee
from benchmarks.monitors import Attached
from benchmarks.ranks import computed, measure_pieces, measured_scale, measured_tree, requests_per_second
from benchmarks.traffic import monitor_rows, offline_run
from wandb_gradwatch._capture.parameter_registry import ParameterRegistry
from wandb_gradwatch._measure.columns import NUM_BINS, NUM_COLUMNS
from wandb_gradwatch._measure.measure import compile_for_cpu
from wandb_gradwatch._pipeline.rank_merge import RankWindow, _pack
from wandb_gradwatch._pipeline.rank_tree import GROUP
from wandb_gradwatch._transfer.transfers import ArrivedFlush, ArrivedSample, Sample
from wandb_gradwatch.sinks import MemorySink, WandbSink

# S samples in the window, P parameters, C columns, R ranks

PAGE = Path(__file__).parent.parent / "docs/growth.md"
SOAK = Path(__file__).parent / "results/soak.json"  # written by `python -m benchmarks.soak --json`
ELEMENTS = 64  # per tensor: small, so that the cost is that of the calls, not of reading
SAMPLES = 50  # per window: the default
RANKS = (8, 64, 1000, 10_000)
BEGIN_SCALE, END_SCALE = "<!-- begin: python -m benchmarks.growth --scale -->", "<!-- end: scale -->"


def cost_of_tensors(num_tensors: int, rounds: int) -> dict[str, float]:
    """Measure the milliseconds that watching adds to a step, and the size of a W&B row, by the number of tensors."""

    def make(device: torch.device) -> Trainee:
        return Trainee(TensorList([(ELEMENTS,)] * num_tensors, torch.float32), None)

    task = Task("tensors", make, {}, light=True, steps=max(4, min(40, 20_000 // num_tensors)), pairs=rounds)
    with offline_run() as run:
        bench = Bench(task, torch.device("cpu"), run)
        for _ in range(3):
            bench.step(Attached())
        measured: dict[str, list[float]] = {"unwatched": [], "sampled": [], "not sampled": []}
        for _ in range(rounds):
            base = _median_ms(bench)
            measured["unwatched"].append(base)
            for name, every in (("sampled", 1), ("not sampled", 1_000_000)):
                options: dict[str, Any] = {"log_every": 1_000_000, "sample_every": every, "histogram_every": 0}
                with wandb_gradwatch.watch(bench.model, sinks=[MemorySink(1)], **options):
                    for _ in range(4):  # the first samples also compare gradients by value
                        bench.step(Attached())
                    measured[name].append(_median_ms(bench) - base)
        began = time.perf_counter()
        ParameterRegistry(bench.model)
        walk_ms = (time.perf_counter() - began) * 1e3
    keys, row_bytes = _row_of(bench)
    result = {name: statistics.median(values) for name, values in measured.items()}
    return {"tensors": num_tensors, "walk": walk_ms, "keys": keys, "row_bytes": row_bytes} | result


def _median_ms(bench: Bench) -> float:
    """Measure processor time, which other programs on the machine disturb less than wall time."""
    return statistics.median(cpu for _, cpu in bench.times(Attached(), bench.task.steps)) * 1e3


def _row_of(bench: Bench) -> tuple[int, int]:
    """Return the number of metric names and the bytes of one row with histograms."""
    with offline_run() as run:
        bench.run = run
        keys: set[str] = set()
        log = run._log

        def counting(data: dict[str, Any], **more: Any) -> Any:
            keys.update(key for key in data if key != "loss")
            return log(data, **more)

        run._log = counting
        with wandb_gradwatch.watch(bench.model, sinks=[WandbSink(run)], log_every=1, sample_every=1, rules=[]):
            bench.step(Attached())
        run.log({"loss": 0.0})
        file = Path(run.settings.sync_file)
        run.finish()
        _, size = monitor_rows(file)
    return len(keys), size


def window_of(num_parameters: int) -> RankWindow:
    """Return a window of the default length, as a rank passes it to the merge."""
    rows_PC = np.ones((num_parameters, NUM_COLUMNS))
    samples = tuple(
        ArrivedSample(Sample(step, False, ()), rows_PC, float("nan"), False) for step in range(1, SAMPLES + 1)
    )
    histogram = np.ones((num_parameters, NUM_BINS), dtype=np.int64)
    names = tuple(f"layer{index}.weight" for index in range(num_parameters))
    return RankWindow(samples, ArrivedFlush(histogram, (SAMPLES,)), names, np.ones(num_parameters, dtype=bool))


def bytes_of_flush(num_parameters: int) -> dict[str, float]:
    """Return the bytes that one rank passes to the all-reduces of one flush, and the time that packing takes."""
    window = window_of(num_parameters)
    began = time.perf_counter()
    rows_SPC = np.stack([sample.rows for sample in window.samples])
    sums, extremes = _pack(rows_SPC, window, 0, 2)
    return {
        "parameters": num_parameters,
        "sums": sum(part.nbytes for part in sums),
        "extremes": sum(part.nbytes for part in extremes),
        "pack_ms": (time.perf_counter() - began) * 1e3,
    }


def soaked(seen: dict[str, Any] | None) -> str:
    """Return the results of benchmarks/soak.py as a table."""
    if seen is None:
        return ""
    lines = [
        f"| {part['sample_every']} | {part['steps']:,} | {part['cpu_us_per_step'] * part['steps'] / 6e7:.1f} | "
        f"{part['rss_mib'][0]:.1f} | {part['rss_mib'][-1]:.1f} | {part['per_million_steps']['rss_mib']:.1f} | "
        f"{part['open_files'][0]}, {part['open_files'][1]} | {part['threads'][0]}, {part['threads'][1]} | "
        f"{part['objects'][0]:,}, {part['objects'][1]:,} |"
        for part in seen["parts"]
    ]
    return f"""
The newest figures, of commit {seen["machine"]["commit"]}, at the first and the last of twenty points of each part; of
{seen["rows"]["expected"]:,} rows {seen["rows"]["lost"]} were lost and {seen["rows"]["duplicated"]} doubled.
The MiB include the data that the benchmark itself keeps of each point, a count of every type of object:

| sample_every | steps | CPU minutes | MiB | MiB at the end | MiB per million steps | files | threads | objects |
| --: | --: | --: | --: | --: | --: | --: | --: | --: |
{chr(10).join(lines)}"""


def render(found: dict[str, Any]) -> str:
    machine, pieces = found["machine"], found["pieces"]
    tensors = [
        f"| {row['tensors']:,} | {row['unwatched']:.2f} | {row['not sampled']:.2f} | {row['sampled']:.2f} | "
        f"{row['sampled'] / row['tensors'] * 1e3:.1f} | {row['keys']:,} | {row['row_bytes'] / 1024:,.0f} |"
        for row in found["tensors"]
    ]
    flushes, large = [], []
    for flush in found["flushes"]:
        total = flush["sums"] + flush["extremes"]
        flushes.append(
            f"| {flush['parameters']:,} | {flush['sums'] / 1024:,.0f} | {flush['extremes'] / 1024:,.0f} | "
            f"{total / SAMPLES / 1024:,.1f} | {flush['pack_ms']:.1f} |"
        )
        for ranks in RANKS:
            one = computed(total, ranks, pieces)
            large.append(
                f"| {flush['parameters']:,} | {ranks:,} | {one['sent'] / 2**20:,.1f} | {one['seconds']:.2f} | "
                f"{one['connections']} | {one['meeting']:.1f} |"
            )
    trees = [
        f"| {tree['ranks']:,} | {tree['first']['files']:.0f} | {tree['median']['files']:.0f} | "
        f"{tree['first']['times_sent']:.1f} | {tree['median']['times_sent']:.1f} | {tree['median']['meeting_s']:.2f} | "
        f"{tree['median']['merge_ms']:,.0f} | {tree['wrong']} |"
        for tree in found["trees"]
    ]
    return f"""# How cost grows

Made by `python -m benchmarks.growth` on {machine["device"]}, {machine["cores"]} cores, torch
{machine["versions"]["torch"]}, commit {machine["commit"]}.

## Tensors, and series in W&B

Tensors of {ELEMENTS} elements, so that the calls take the time, not reading memory; medians of {found["rounds"]}
pairs, in milliseconds of processor time per step. Rows include histograms. Above 256 names, series are grouped,
with one message, and rows stop growing.

| tensors | unwatched | added, not sampled | added, sampled | µs per tensor | metric names | KiB per row |
| --: | --: | --: | --: | --: | --: | --: |
{chr(10).join(tensors)}

## Samples

A window holds a row of {NUM_COLUMNS} numbers per parameter and sample on the host until it is flushed:
{NUM_COLUMNS * 8} bytes. {SAMPLES} samples of 1,000 parameters are
{SAMPLES * 1000 * NUM_COLUMNS * 8 / 2**20:.1f} MiB.

## Steps

Memory, files, threads and time do not grow with the number of steps, as `tests/test_soak.py` and, for a million steps,
`python -m benchmarks.soak` check.{soaked(found.get("soak"))}

## Ranks

Sharded models, ranks with different parameters, and those with `Ranks()` or `NoiseScale()` are merged over ranks, by
three all-reduces per flush: a check that all ranks merge the same window
(four numbers), the sums, and the extremes. Their size does not depend on the number of ranks. These are the sizes for a
window of {SAMPLES} samples, as `sample_every=1`
makes them, with its histogram:

| parameters | sums, KiB | extremes, KiB | total, KiB per step | packing, ms |
| --: | --: | --: | --: | --: |
{chr(10).join(flushes)}

No rank is connected to all others. Groups of {GROUP} neighbours merge, then the first ranks of the groups, and so on
(`wandb_gradwatch/_pipeline/rank_tree.py`). **Measured** with as many processes on this machine. The times are those of
{machine["cores"]} cores that do the work of all ranks; the other figures do not depend on that. The merge was of
{found["trees"][0]["numbers"]:,} numbers; "sent" is in multiples of them:

| ranks | open files, rank 0 | median rank | sent, rank 0 | median rank | s to connect | ms per merge | wrong results |
| --: | --: | --: | --: | --: | --: | --: | --: |
{chr(10).join(trees)}

**Computed** from measurements of the parts, for rank 0, which is the first of all its groups and sends most: between
two processes here, a message takes {pieces["message_us"]:.0f} µs and the bandwidth is {pieces["gb_per_s"]:.2f} GB/s;
the first rank of a group of {GROUP} sends its values {pieces["first_sends"]:.1f} times, another rank
{pieces["member_sends"]:.1f} times; a `TCPStore` answers {pieces["requests_per_s"]:,.0f} requests per second.
The table shows one flush, and the connecting of the ranks before the first flush:

| parameters | ranks | MiB sent | seconds in the background | connections | seconds to connect |
| --: | --: | --: | --: | --: | --: |
{chr(10).join(large)}

Connections and messages grow with the logarithm of the number of ranks, and the bytes with the number of levels. The
merge runs in a background thread during {SAMPLES} training steps. The time to connect grows with the
ranks, because all addresses pass through the job's single store, over one more connection from each rank. The ranks
connect once, after the first sample, also in the background. Before each merge, every rank tells the store that it has
come, and waits there for the last one, by four requests. If ranks cannot be connected, no rows are written, with one
message, and training continues.

{BEGIN_SCALE}
{scale_section(found["scale"], machine, pieces["requests_per_s"])}
{END_SCALE}
"""


def scale_section(rows: list[dict[str, float]], machine: dict[str, Any], per_second: float) -> str:
    """What rank 0 does for all ranks."""
    lines = [
        f"| {row['ranks']:,.0f} | {row['publications_s']:.2f} | "
        f"{row['publication_bytes'] * row['ranks'] / 2**20:.1f} | {row['compare_ms']:.1f} | "
        f"{row['unite_ms']:.1f} | {row['united_bytes'] / 1024:.0f} | {row['derive_ms']:.1f} |"
        for row in rows
    ]
    return f"""## What every training on several ranks asks of the others

Measured on {machine["device"]}, {machine["cores"]} cores, by `python -m benchmarks.growth --scale`; a `TCPStore`
answers {per_second:,.0f} requests per second here. **On the training thread nothing grows with the number of ranks**,
except that a rank of stages or experts reads one list of all ranks, once: a rank asks the store for a few keys at its
first sample, and rank 0 for one key at a flush, with which it publishes the cadence. `tests/test_rank_traffic.py`
counts both, and that no collective is added under DistributedDataParallel. Everything else happens in a thread of each
rank, whose requests are spread so that all ranks together make at most 2,000 per second:

- the other ranks fetch the cadence, one or two requests each between two flushes;
- [replicas](distributed.md#replicas) are compared at the first eight samples and at every flush: each rank replaces
  one key, and rank 0 reads all. The fewer numbers a rank publishes, the more ranks there are;
- if ranks hold different parts, rank 0 reads what they watch, once, and publishes the whole, which each rank reads;
- what `Ranks()` compares travels with the merge, and is read in its thread.

In milliseconds of processor time on rank 0, for 1,000 parameters, or 8 stages of 100 parameters each:

| ranks | store, s per publication | MiB, rank 0 reads | compare a step | unite parts once | KiB | `Ranks()`, a sample |
| --: | --: | --: | --: | --: | --: | --: |
{chr(10).join(lines)}"""


def write_scale() -> None:
    """Measure only what rank 0 does for all ranks, and write that section."""
    per_second = requests_per_second()
    rows = [measured_scale(ranks, {"requests_per_s": per_second}) for ranks in RANKS]
    section = scale_section(rows, describe_machine(torch.device("cpu")), per_second)
    before, rest = PAGE.read_text(encoding="utf-8").split(BEGIN_SCALE)
    after = rest.split(END_SCALE)[1]
    PAGE.write_text(f"{before}{BEGIN_SCALE}\n{section}\n{END_SCALE}{after}", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tensors", type=int, nargs="+", default=[10, 148, 1000, 5000, 20_000])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 32, 64, 128])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--scale", action="store_true", help="measure and write only what rank 0 does for all ranks")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.scale:
        write_scale()
        return
    if importlib.util.find_spec("numba") is not None:
        compile_for_cpu("compiled")  # otherwise compiled in the background during the first block
    found: dict[str, Any] = {
        "machine": describe_machine(torch.device("cpu")),
        "rounds": arguments.rounds,
        "tensors": [cost_of_tensors(number, arguments.rounds) for number in arguments.tensors],
        "flushes": [bytes_of_flush(number) for number in (148, 1000)],
        "trees": [measured_tree(world) for world in arguments.ranks],
        "pieces": measure_pieces(),
    }
    found["scale"] = [measured_scale(ranks, found["pieces"]) for ranks in RANKS]
    if SOAK.exists():
        found["soak"] = json.loads(SOAK.read_text(encoding="utf-8"))
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(render(found), encoding="utf-8")
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(PAGE.read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
