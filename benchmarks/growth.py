"""How cost grows: with the number of tensors, series in W&B, samples, and ranks. Writes docs/growth.md.

What one machine can hold is measured. What it cannot, thousands of ranks, is computed from measured pieces: the bytes
of one flush, and the time of one message and of one byte between two processes here.

    python -m benchmarks.growth [--tensors 10 148 ...] [--rounds 5] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch import Tensor

import wandb_gradwatch
from benchmarks.harness import Bench, monitor_rows, offline_run
from benchmarks.machine import describe_machine
from benchmarks.models import Task, TensorList, Trainee
from benchmarks.monitors import Attached
from wandb_gradwatch.capture.roster import Roster
from wandb_gradwatch.reduction import LocalWindow, _pack
from wandb_gradwatch.sinks import MemorySink, WandbSink
from wandb_gradwatch.statistics.columns import NUM_BINS, NUM_COLUMNS
from wandb_gradwatch.window import ArrivedFlush, ArrivedSample, Sample

# S samples in the window, P parameters, C columns, R ranks

PAGE = Path(__file__).parent.parent / "docs/growth.md"
ELEMENTS = 64  # of each tensor: the calls are counted here, not the reading
SAMPLES = 50  # of a window, by default
RANKS = (8, 64, 1000, 10_000)


def cost_of_tensors(num_tensors: int, rounds: int) -> dict[str, float]:
    """Milliseconds that watching adds to a step of so many tensors, and what a row of them is in W&B."""

    def make(device: torch.device) -> Trainee:
        return Trainee(TensorList([(ELEMENTS,)] * num_tensors, torch.float32), None)

    task = Task("tensors", make, {}, light=True, steps=max(4, min(40, 20_000 // num_tensors)), rounds=rounds)
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
                    for _ in range(4):  # the first samples are compared by value too
                        bench.step(Attached())
                    measured[name].append(_median_ms(bench) - base)
        began = time.perf_counter()
        Roster(bench.model)
        walk_ms = (time.perf_counter() - began) * 1e3
    keys, row_bytes = _row_of(bench)
    result = {name: statistics.median(values) for name, values in measured.items()}
    return {"tensors": num_tensors, "walk": walk_ms, "keys": keys, "row_bytes": row_bytes} | result


def _median_ms(bench: Bench) -> float:
    return statistics.median(wall for wall, _ in bench.times(Attached(), bench.task.steps)) * 1e3


def _row_of(bench: Bench) -> tuple[int, int]:
    """Metric names and bytes of one row with histograms."""
    with offline_run() as run:
        bench.run = run
        keys: set[str] = set()
        log = run._log

        def counting(data: dict[str, Any], **more: Any) -> Any:
            keys.update(key for key in data if key != "loss")
            return log(data, **more)

        run._log = counting
        with wandb_gradwatch.watch(bench.model, sinks=[WandbSink(run)], log_every=1, rules=[]):
            bench.step(Attached())
        run.log({"loss": 0.0})
        file = Path(run.settings.sync_file)
        run.finish()
        _, size = monitor_rows(file)
    return len(keys), size


def window_of(num_parameters: int) -> LocalWindow:
    """A default window as a rank hands it to the reduction."""
    rows_PC = np.ones((num_parameters, NUM_COLUMNS))
    samples = tuple(
        ArrivedSample(Sample(step, False, ()), rows_PC, float("nan"), False) for step in range(1, SAMPLES + 1)
    )
    histogram = np.ones((num_parameters, NUM_BINS), dtype=np.int64)
    names = tuple(f"layer{index}.weight" for index in range(num_parameters))
    return LocalWindow(samples, ArrivedFlush(histogram, (SAMPLES,)), names, np.ones(num_parameters, dtype=bool))


def bytes_of_flush(num_parameters: int) -> dict[str, float]:
    """What one rank gives to the all-reduces of one flush, and how long packing takes."""
    window = window_of(num_parameters)
    began = time.perf_counter()
    rows_SPC = np.stack([sample.rows for sample in window.samples])
    sums, extremes = _pack(rows_SPC, window, 0, 2)
    return {
        "parameters": num_parameters,
        "sums": sums.nbytes,
        "extremes": extremes.nbytes,
        "pack_ms": (time.perf_counter() - began) * 1e3,
    }


def measure_transport() -> dict[str, float]:
    """Two and four processes here, over gloo and loopback: a message's time, a byte's, and sockets per neighbour."""
    with tempfile.TemporaryDirectory() as directory:
        found = {world: _in_processes(world, Path(directory) / str(world)) for world in (2, 4)}
    large = found[2]["large_bytes"]
    # Of a ring of two each rank sends 2 * (R - 1) = 2 messages, and 2 * (R - 1) / R = 1 times the data.
    return {
        "message_us": found[2]["small_us"] / 2,
        "gb_per_s": large / ((found[2]["large_us"] - found[2]["small_us"]) * 1e3),
        "files_per_neighbour": (found[4]["files"] - found[2]["files"]) / 2,
    }


def _in_processes(world: int, path: Path) -> dict[str, float]:
    multiprocessing.spawn(_rank_program, (world, str(path)), nprocs=world)
    result: dict[str, float] = json.loads(Path(f"{path}.json").read_text(encoding="utf-8"))
    return result


def _rank_program(rank: int, world: int, path: str) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    store = dist.FileStore(path, world)
    before = psutil.Process().num_fds()
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=60))
    small, large = torch.zeros(1, dtype=torch.float64), torch.zeros(2**19, dtype=torch.float64)
    times = {name: _all_reduce_us(tensor) for name, tensor in (("small_us", small), ("large_us", large))}
    files = psutil.Process().num_fds() - before
    if rank == 0:
        found = times | {"files": files, "large_bytes": large.nbytes}
        Path(f"{path}.json").write_text(json.dumps(found), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


def _all_reduce_us(tensor: Tensor) -> float:
    taken = []
    for _ in range(30):
        began = time.perf_counter()
        dist.all_reduce(tensor)
        taken.append(time.perf_counter() - began)
    return statistics.median(taken) * 1e6


def ring(num_bytes: float, ranks: int, transport: dict[str, float]) -> dict[str, float]:
    """Bytes that one rank sends, and the time, of one ring all-reduce: 2 (R - 1) messages of 1/R of the data."""
    sent = 2 * (ranks - 1) / ranks * num_bytes
    seconds = 2 * (ranks - 1) * transport["message_us"] * 1e-6 + sent / (transport["gb_per_s"] * 1e9)
    return {"sent": sent, "seconds": seconds}


def render(found: dict[str, Any]) -> str:
    machine, transport = found["machine"], found["transport"]
    tensors = [
        f"| {row['tensors']:,} | {row['unwatched']:.2f} | {row['not sampled']:.2f} | {row['sampled']:.2f} | "
        f"{row['sampled'] / row['tensors'] * 1e3:.1f} | {row['keys']:,} | {row['row_bytes'] / 1024:,.0f} |"
        for row in found["tensors"]
    ]
    flushes, rings = [], []
    for flush in found["flushes"]:
        total = flush["sums"] + flush["extremes"]
        flushes.append(
            f"| {flush['parameters']:,} | {flush['sums'] / 1024:,.0f} | {flush['extremes'] / 1024:,.0f} | "
            f"{total / SAMPLES / 1024:,.1f} | {flush['pack_ms']:.1f} |"
        )
        for ranks in RANKS:
            parts = [ring(flush[key], ranks, transport) for key in ("sums", "extremes")] + [ring(16, ranks, transport)]
            rings.append(
                f"| {flush['parameters']:,} | {ranks:,} | {sum(p['sent'] for p in parts) / 1024:,.0f} | "
                f"{sum(p['seconds'] for p in parts):.2f} | {transport['files_per_neighbour'] * (ranks - 1):,.0f} |"
            )
    return f"""# How cost grows

Made by `python -m benchmarks.growth` on {machine["device"]}, {machine["cores"]} cores, torch
{machine["versions"]["torch"]}, commit {machine["commit"]}.

## Tensors, and series in W&B

Tensors of {ELEMENTS} elements, so that it is the calls that are seen and not the reading; medians of {found["rounds"]}
pairs, milliseconds a step. A row is one with histograms. Above 256 names the series are grouped, and a row stops
growing.

| tensors | unwatched | adds, not sampled | adds, sampled | µs a tensor | metric names | KiB a row |
| --: | --: | --: | --: | --: | --: | --: |
{chr(10).join(tensors)}

## Samples

A window holds a row of {NUM_COLUMNS} numbers per parameter and sample on the host until it is flushed:
{NUM_COLUMNS * 8} bytes. {SAMPLES} samples of 1,000 parameters are
{SAMPLES * 1000 * NUM_COLUMNS * 8 / 2**20:.1f} MiB. Nothing grows with the number of steps: `tests/test_soak.py`,
and `python -m benchmarks.soak` for a million of them.

## Ranks

Only sharded models are merged over ranks, once per flush: a check that all agree (two numbers), the sums, the extremes.
What a rank gives to them does not depend on the number of ranks. A window of {SAMPLES} samples with its histogram:

| parameters | sums, KiB | extremes, KiB | together, KiB a step | packing, ms |
| --: | --: | --: | --: | --: |
{chr(10).join(flushes)}

**Computed, not measured:** a ring all-reduce over R ranks sends 2 (R - 1) messages of 1/R of the data. Between two
processes on this machine, over loopback, a message takes {transport["message_us"]:.0f} µs and a second moves
{transport["gb_per_s"]:.2f} GB; a rank holds {transport["files_per_neighbour"]:.1f} sockets for each other rank.
With these figures one flush costs:

| parameters | ranks | KiB sent by a rank | seconds in the background | open sockets of a rank |
| --: | --: | --: | --: | --: |
{chr(10).join(rings)}

The bytes hold at any number of ranks: twice the data at most. The time is that of the messages, grows with the ranks,
and passes in a thread of its own beside {SAMPLES} training steps. What does not hold is the number of connections: a
gloo group connects every rank with every other, and a process may often hold no more than 1,024 open files. Near a
thousand ranks that limit must be raised (`ulimit -n`); where the group cannot be made, the sharded rows are not logged,
which is said once, and training goes on.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tensors", type=int, nargs="+", default=[10, 148, 1000, 5000, 20_000])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    found: dict[str, Any] = {
        "machine": describe_machine(torch.device("cpu")),
        "rounds": arguments.rounds,
        "tensors": [cost_of_tensors(number, arguments.rounds) for number in arguments.tensors],
        "flushes": [bytes_of_flush(number) for number in (148, 1000)],
        "transport": measure_transport(),
    }
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(render(found), encoding="utf-8")
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(PAGE.read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
