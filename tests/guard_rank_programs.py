"""The programs that ranks run in test_guard_ranks.py: small sharded trainings with a guard, and a fault on one rank."""

from __future__ import annotations

import logging
import math
import operator
from typing import Any
from unittest import mock

import torch
from gradients import watch
from rank_programs import batch_of, build, loss_of, shard, split
from torch import nn

import wandb_gradwatch
from wandb_gradwatch import MemorySink, SkipGuard, unwatch
from wandb_gradwatch._capture.cadence import Budget
from wandb_gradwatch._runtime.steps import STEP_HOOKS

OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9, foreach=False),
    "adamw fused": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, fused=True),
}


def sharded(kind: str, world: int) -> nn.Module:
    """Return the model, sharded or replicated as `kind` says."""
    if kind == "tensor parallel":
        return split(build(width=6), world)
    if kind == "ddp":
        return nn.parallel.DistributedDataParallel(build())
    return shard(build(), {"fsdp2": [world], "hsdp": [world, 1]}[kind])


def guarded(
    rank: int, world: int, *, kind: str, optimizer: str, steps: int, poison: dict[int, float], guard: bool = True
) -> dict[str, Any]:
    """Train; in the poisoned steps the last rank multiplies its part of one gradient by a factor.

    Args:
        poison: step -> factor.
        guard: True: a guard skips the poisoned steps. False: the loop leaves the poisoned steps out.
    """
    model = sharded(kind, world)
    inner = model.module if kind == "ddp" else model
    chosen = OPTIMIZERS[optimizer](model.parameters())
    skip_guard = SkipGuard()
    watcher = watch(model, guard=skip_guard, sample_every=3)[0] if guard else None

    def multiply(parameter: Any) -> None:
        gradient = parameter.grad
        if guard and rank == world - 1 and step in poison:
            with torch.no_grad():
                getattr(gradient, "_local_tensor", gradient).mul_(poison[step])

    inner[2].weight.register_post_accumulate_grad_hook(multiply)
    for step in range(steps):
        if not guard and step in poison:
            continue
        chosen.zero_grad()
        loss_of(model, batch_of(0 if kind == "tensor parallel" else rank, step)).backward()
        chosen.step()
    if watcher is not None:
        watcher.remove()
    parameters = [getattr(p, "_local_tensor", p).detach().numpy().copy() for p in model.parameters()]
    pasts = [past for _, past in skip_guard.state_dict()["norms"]["_pasts"]]
    return {
        "parameters": parameters,
        "num_skipped": skip_guard.num_skipped,
        "norms": [math.exp(log_norm) for log_norm in pasts[0]["all"]] if pasts else [],
    }


class Logarithm(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * 0 if x.abs().max() > 1e3 else x.abs() + 1).log()


def replayed(rank: int, world: int, *, kind: str, guard: str | None) -> dict[str, Any]:
    """Train a model with dropout; in step 3 the last rank's second micro-batch is so large that the model takes log(0).

    Args:
        guard: the guard; None: the loop leaves the bad step out.
    """
    said, handler = messages()
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Dropout(0.25), nn.Linear(4, 4), Logarithm(), nn.Linear(4, 1))
    if kind == "ddp":
        model: nn.Module = nn.parallel.DistributedDataParallel(inner)
    else:
        from torch.distributed.fsdp import fully_shard

        model = fully_shard(inner)
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    memory = MemorySink()
    watcher = wandb_gradwatch.watch(model, sinks=[memory], sample_every=1, guard=guard) if guard else None
    torch.manual_seed(1 + rank)
    for number in range(1, 7):
        for micro in range(2):
            is_bad = number == 3 and micro == 1 and rank == world - 1
            loss_of(model, batch_of(rank, number, micro) * (1e6 if is_bad else 1)).backward()
        if guard or number != 3:
            optimizer.step()
        optimizer.zero_grad()
    notes = {}
    if watcher is not None:
        watcher.flush()
        notes = {step: dict(note) for step, note in watcher._dispatcher.recorder.notes.items()}
        watcher.remove()
    logging.getLogger("wandb_gradwatch").removeHandler(handler)
    parameters = [getattr(p, "_local_tensor", p).detach().numpy().copy() for p in model.parameters()]
    alerts = [(alert.title, alert.step, alert.text) for alert in memory.alerts]
    return {"parameters": parameters, "said": said, "notes": notes, "alerts": alerts}


def one_bad_rank(rank: int, world: int) -> list[int | None]:
    """Train with NaN on the last rank in three steps; return the ranks of the incidents."""
    model = sharded("fsdp2", world)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    watcher, _ = watch(model, guard="skip", rules=None)

    def break_gradient(parameter: Any) -> None:
        if rank == world - 1 and step in (6, 9, 11):
            with torch.no_grad():
                parameter.grad._local_tensor[0, 0] = float("nan")

    model[2].weight.register_post_accumulate_grad_hook(break_gradient)
    for step in range(12):
        optimizer.zero_grad()
        loss_of(model, batch_of(rank, step)).backward()
        optimizer.step()
    watcher.flush()
    found = [incident.rank for incident in watcher.verdict().incidents if incident.kind == "nan_gradient"]
    watcher.remove()
    return found


def messages() -> tuple[list[str], logging.Handler]:
    """Collect the package's messages from now on; return their list, and the handler to remove from the logger."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("wandb_gradwatch").addHandler(handler)
    return said, handler


@mock.patch.object(Budget, "START_SECONDS", 0.0)
def over_budget(rank: int, world: int) -> dict[str, Any]:
    """Train a sharded model with a budget that one sample exceeds a thousandfold, without its second at the start."""
    said, handler = messages()
    model = sharded("fsdp2", world)
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    watcher, _ = watch(model, sample_every=None, max_overhead=1e-6, log_every=None)
    sampled: list[int] = []
    commit = watcher._parts.window.commit
    watcher._parts.window.commit = lambda sample, found: (sampled.append(sample.step), commit(sample, found))
    for step in range(24):
        optimizer.zero_grad()
        loss_of(model, batch_of(rank, step)).backward()
        optimizer.step()
    watcher.remove()
    logging.getLogger("wandb_gradwatch").removeHandler(handler)
    return {"said": said, "steps": sampled}


def failing(rank: int, world: int, *, kind: str, optimizer: str, where: str | None) -> dict[str, Any]:
    """Train with a guard; the monitor fails on the last rank at step 6, and step 9 has huge gradients on all ranks.

    Args:
        where: the method below the watcher that raises; None: train without a guard.
    """
    said, handler = messages()
    model = sharded(kind, world)
    chosen = OPTIMIZERS[optimizer](model.parameters())
    watcher = watch(model, guard="skip")[0] if where else None

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("planted")

    def one_step(step: int) -> None:
        chosen.zero_grad()
        (loss_of(model, batch_of(rank, step)) * (1e6 if step == 9 else 1)).backward()
        chosen.step()

    for step in range(20):
        if step == 6 and where and rank == world - 1:
            owner, _, method = where.rpartition(".")
            setattr(operator.attrgetter(owner)(watcher), method, fail)
        one_step(step)
    if watcher is not None:
        unwatch()
    one_step(20)  # in the vote of this step all ranks learn that nobody guards any more
    assert watcher is None or not {watcher._sampler._steps, watcher._parts.guard._voter} & {*STEP_HOOKS._listeners}
    one_step(21)
    logging.getLogger("wandb_gradwatch").removeHandler(handler)
    parameters = [getattr(p, "_local_tensor", p).detach().numpy().copy() for p in model.parameters()]
    return {"parameters": parameters, "said": said}


def refused(rank: int, world: int) -> list[str]:
    """Return the errors of watch() for guards and models with which the ranks could not decide alike."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    said = []
    whole = FullyShardedDataParallel(build(), device_id=torch.device("cpu"))
    for model, guard in ((whole, "skip"), (sharded("fsdp2", world), lambda snapshot: False)):
        try:
            watch(model, guard=guard)
        except ValueError as error:
            said.append(str(error))
    return said
