"""Silent faults that TrainCheck (OSDI 2025) has collected from public issues, made small: what is told, and when.

Of its twenty, the nine that gradients, parameters or inputs can show. Each is trained with the fault and repaired, on
synthetic data, with every step measured. No model, data or code is that of the issues.

    python -m benchmarks.silent [NAME ...] [--write]

`--write` writes the table into docs/compared.md.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import wandb_gradwatch
from benchmarks.table import write_rows
from wandb_gradwatch import MemorySink
from wandb_gradwatch.metrics import Ranks

PAGE: Final = Path(__file__).parent.parent / "docs/compared.md"
BEGIN, END = "<!-- begin: python -m benchmarks.silent -->\n", "<!-- end -->\n"
STEPS: Final = 25
_LOG_EVERY: Final = 5
SOON: Final = 10  # steps after the first bad one
_NUM_CLASSES, _SIZE, _BATCH = 4, 12, 16


@dataclass(frozen=True)
class Fault:
    """One fault.

    Args:
        name: the issue.
        what: what goes wrong, in words.
        causes: the identifiers of causes that are right.
        first_step: the first step that it spoils.
        train: trains on one rank, with the fault or repaired; yields after every step.
        world: the number of ranks.
    """

    name: str
    what: str
    causes: frozenset[str]
    first_step: int
    train: Callable[[Run], Iterator[None]]
    world: int = 1
    metrics: tuple[type, ...] = ()


class Run:
    """One training of a classifier on one rank.

    Args:
        is_faulty: whether it has the fault.
    """

    def __init__(self, rank: int, world: int, *, is_faulty: bool, metrics: tuple[type, ...] = ()) -> None:
        self.rank, self.world, self.is_faulty, self.metrics = rank, world, is_faulty, metrics
        torch.manual_seed(0)
        self.centres = torch.randn(_NUM_CLASSES, _SIZE)
        self.model = nn.Sequential(
            nn.Linear(_SIZE, 24), nn.LayerNorm(24), nn.ReLU(), nn.Linear(24, 24), nn.ReLU(), nn.Linear(24, _NUM_CLASSES)
        )
        self.watcher: Any = None

    def watch(self, model: nn.Module) -> None:
        options: dict[str, Any] = {
            "sample_every": 1,
            "log_every": _LOG_EVERY,
            "metrics": [one() for one in self.metrics],
        }
        self.watcher = wandb_gradwatch.watch(model, sinks=[MemorySink()], **options)

    def batch(self, number: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(1000 * number + self.rank)
        labels = torch.randint(0, _NUM_CLASSES, (_BATCH,), generator=generator)
        return self.centres[labels] + 0.8 * torch.randn(_BATCH, _SIZE, generator=generator), labels

    def backward(self, model: nn.Module, number: int) -> None:
        inputs, labels = self.batch(number)
        functional.cross_entropy(model(inputs), labels).backward()

    def average(self) -> None:
        for parameter in self.model.parameters():
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad)
            parameter.grad /= self.world


def _missing_zero_grad(run: Run) -> Iterator[None]:
    run.watch(run.model)
    optimizer = torch.optim.Adam(run.model.parameters(), lr=1e-3)
    for step in range(1, STEPS + 1):
        if not run.is_faulty:
            optimizer.zero_grad()
        run.backward(run.model, step)
        optimizer.step()
        yield


def _hooks_on_old_parameters(run: Run) -> Iterator[None]:
    """The parameters are replaced after the wrapping, as a move to another device may do: no hook averages the new."""
    wrapped = DistributedDataParallel(run.model)
    if run.is_faulty:
        for module in run.model.modules():
            for name, parameter in list(module.named_parameters(recurse=False)):
                setattr(module, name, nn.Parameter(parameter.detach().clone()))
    run.watch(wrapped)
    optimizer = torch.optim.Adam(run.model.parameters(), lr=1e-3)
    for step in range(1, STEPS + 1):
        optimizer.zero_grad()
        run.backward(wrapped.module if run.is_faulty else wrapped, step)
        optimizer.step()
        yield


def _wrapped_now_and_then(run: Run) -> Iterator[None]:
    wrapped = DistributedDataParallel(run.model)
    run.watch(wrapped)
    optimizer = torch.optim.Adam(run.model.parameters(), lr=1e-3)
    for step in range(1, STEPS + 1):
        optimizer.zero_grad()
        run.backward(run.model if run.is_faulty and step % 2 == 0 else wrapped, step)
        optimizer.step()
        yield


def _clipped_on_one_rank(run: Run) -> Iterator[None]:
    """The gradients of the normalisation, which all ranks hold, are clipped on rank 0 alone."""
    run.watch(run.model)
    optimizer = torch.optim.SGD(run.model.parameters(), lr=0.05)
    for step in range(1, STEPS + 1):
        optimizer.zero_grad()
        run.backward(run.model, step)
        run.average()
        if run.rank == 0 or not run.is_faulty:
            nn.utils.clip_grad_norm_(run.model[1].parameters(), 0.01)
        optimizer.step()
        yield


def _losing(run: Run, *, sent: bool) -> Iterator[None]:
    """At step 5, the gradient that rank 1 sends to the average, or that it receives, is lost: it gets zeros."""
    wrapped, step = DistributedDataParallel(run.model), 0

    def average(bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        is_lost = run.is_faulty and run.rank == 1 and step == 5
        own = bucket.buffer().div_(run.world)
        if is_lost and sent:
            own.zero_()
        future = dist.all_reduce(own, async_op=True).get_future()
        return future.then(lambda one: torch.zeros_like(own) if is_lost and not sent else one.value()[0])

    wrapped.register_comm_hook(None, lambda _, bucket: average(bucket))
    run.watch(wrapped)
    optimizer = torch.optim.SGD(run.model.parameters(), lr=0.05)
    for step in range(1, STEPS + 1):
        optimizer.zero_grad()
        run.backward(wrapped, step)
        optimizer.step()
        yield


class _Obsolete(torch.optim.Adam):
    """After some steps it runs code that was made for parameters without gradients: it changes nothing any more."""

    num_steps = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        self.num_steps += 1
        return None if self.num_steps > 5 else super().step(closure)


def _compiled_for_no_gradient(run: Run) -> Iterator[None]:
    run.watch(run.model)
    optimizer = (_Obsolete if run.is_faulty else torch.optim.Adam)(run.model.parameters(), lr=1e-3)
    for step in range(1, STEPS + 1):
        optimizer.zero_grad()
        run.backward(run.model, step)
        optimizer.step()
        yield


def _stale_optimizer(run: Run) -> Iterator[None]:
    """The optimizer is made from the parameters before the model's are replaced by those that are trained."""
    optimizer = torch.optim.SGD(run.model.parameters(), lr=0.05)
    for module in run.model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(parameter.detach().clone()))
    if not run.is_faulty:
        optimizer = torch.optim.SGD(run.model.parameters(), lr=0.05)
    run.watch(run.model)
    for step in range(1, STEPS + 1):
        optimizer.zero_grad()
        run.model.zero_grad()
        run.backward(run.model, step)
        optimizer.step()
        yield


def _workers_of_one_seed(run: Run) -> Iterator[None]:
    """Four workers deliver the same random batch each."""
    run.watch(run.model)
    optimizer = torch.optim.Adam(run.model.parameters(), lr=1e-3)
    for step in range(1, STEPS + 1):
        optimizer.zero_grad()
        run.backward(run.model, (step - 1) // 4 if run.is_faulty else step)
        optimizer.step()
        yield


_SENT, _RECEIVED = (lambda run: _losing(run, sent=True)), (lambda run: _losing(run, sent=False))
FAULTS: Final = {
    fault.name: fault
    for fault in (
        Fault(
            "stackoverflow-60335387", "zero_grad() is missing", frozenset({"zero_grad_missing"}), 2, _missing_zero_grad
        ),
        Fault(
            "pytorch-104336", "DDP's hooks are on parameters that were replaced", frozenset({"not_averaged"}), 1,
            _hooks_on_old_parameters, world=2,
        ),
        Fault(
            "x-jxmnop-ddp-out-of-sync", "the model is wrapped by DDP in every second step only",
            frozenset({"not_averaged"}), 2, _wrapped_now_and_then, world=2,
        ),
        Fault(
            "deepspeed-1801", "one rank alone clips gradients of a layer that all hold (BLOOM-176B)",
            frozenset({"rank_gradient"}), 1, _clipped_on_one_rank, world=3,
        ),
        Fault(
            "pytorch-84803", "what a rank receives from the average is lost once", frozenset({"rank_gradient"}), 5,
            _RECEIVED, world=3,
        ),
        Fault(
            "pytorch-96600", "what a rank sends to the average is lost once; with `Ranks()`",
            frozenset({"contribution_lost"}), 5, _SENT, world=3, metrics=(Ranks,),
        ),
        Fault(
            "pytorch-115607", "a compiled step() no longer updates anything",
            frozenset({"updates_undone"}), 6, _compiled_for_no_gradient,
        ),
        Fault(
            "accelerate-2665", "the optimizer holds the parameters of before the preparation",
            frozenset({"stale_optimizer"}), 1, _stale_optimizer,
        ),
        Fault(
            "stackoverflow-67180955", "workers with one seed deliver every batch four times",
            frozenset({"inputs_repeated"}), 2, _workers_of_one_seed,
        ),
    )
}  # fmt: skip


def told(rank: int, world: int, *, name: str, is_faulty: bool) -> list[dict[str, Any]]:
    """Train, and return the incidents above INFO on this rank."""
    fault = FAULTS[name]
    run = Run(rank, world, is_faulty=is_faulty, metrics=fault.metrics)
    for step, _ in enumerate(fault.train(run), start=1):
        if world > 1:
            _compare(run, step, f"{name} {is_faulty} {step}")
    incidents = [one.to_dict() for one in run.watcher.verdict().incidents if one.level != "INFO"]
    run.watcher.remove()
    if world > 1:
        dist.barrier()
    return incidents


def _compare(run: Run, step: int, key: str) -> None:
    """Wait until the background has compared what it compares after this step: a step of a real model takes as long."""
    store = dist.distributed_c10d._get_default_store()
    if run.rank == 0:
        while (step <= 8 or step % _LOG_EVERY == 0) and _compared_until(run.watcher) < step:
            time.sleep(0.005)
            run.watcher.verdict()  # delivers samples
        store.set(key, "")
    while not store.check([key]):
        time.sleep(0.005)
        run.watcher.verdict()


def _compared_until(watcher: Any) -> int:
    replicas = watcher._pipeline._replicas
    return 0 if replicas is None or replicas._compared is None else replicas._compared.step


def run_all(name: str, *, is_faulty: bool) -> list[dict[str, Any]]:
    """Run one training in new processes; return the incidents of rank 0."""
    world = FAULTS[name].world
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "benchmarks.silent", name, "--folder", folder, "--rank"]
        environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
        ranks = [
            subprocess.Popen([*command, str(rank), *(["--repaired"] * (not is_faulty))], env=environment)
            for rank in range(world)
        ]
        assert not any([rank.wait() for rank in ranks]), name
        found: list[dict[str, Any]] = json.loads(Path(folder, "found.json").read_text(encoding="utf-8"))
    return found


def _run_rank(name: str, rank: int, folder: str, *, is_faulty: bool) -> None:
    world = FAULTS[name].world
    if world > 1:
        dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=world)
    found = told(rank, world, name=name, is_faulty=is_faulty)
    if rank == 0:
        Path(folder, "found.json").write_text(json.dumps(found), encoding="utf-8")
    if world > 1:
        dist.destroy_process_group()


def line(name: str) -> str:
    """The row of the table: what is told of the fault and of its repaired twin."""
    fault, found, repaired = FAULTS[name], run_all(name, is_faulty=True), run_all(name, is_faulty=False)
    right = [one for one in found if one["cause"] in fault.causes]
    after = f"{right[0]['found_step'] - fault.first_step}" if right else "–"
    what = f"{right[0]['cause_text']}" if right else found[0]["cause_text"] if found else "nothing"
    alarms = ", ".join(one["title"] for one in repaired) or "none"
    return f"| {name} | {fault.what} | {fault.world} | {what} | {after} | {alarms} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="faults; without any, all")
    parser.add_argument("--write", action="store_true", help="write the table into docs/compared.md")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    parser.add_argument("--repaired", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.rank is not None:
        _run_rank(arguments.names[0], arguments.rank, arguments.folder, is_faulty=not arguments.repaired)
        return
    head = ["fault", "what goes wrong", "ranks", "told", "steps later", "alarms when repaired"]
    lines = [f"| {' | '.join(head)} |", "|---|---|--:|---|--:|---|"]
    for name in arguments.names or FAULTS:
        lines.append(line(name))
        print(lines[-1], flush=True)
    if arguments.write:
        write_rows(PAGE, lines, begin=BEGIN, end=END, keep=bool(arguments.names))


if __name__ == "__main__":
    main()
