"""The programs that ranks run in test_rank_parts.py: parameters that only some ranks have."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from gradients import watch
from rank_programs import LEARNING_RATE, batch_of, build, collect_warnings, loss_of, report, train
from torch import nn

Parallel = nn.parallel.DistributedDataParallel


def experts(rank: int, world: int, *, bad: bool = False) -> dict[str, Any]:
    """Train a layer that DDP averages, and an expert on each rank: of one name and shape, with other values."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"trunk": nn.Linear(4, 4), "expert": nn.Linear(4, 4)})
    model.forward = lambda x: model["expert"](torch.tanh(model["trunk"](x)))
    nn.init.normal_(model["expert"].weight, generator=torch.Generator().manual_seed(rank))
    Parallel._set_params_and_buffers_to_ignore_for_model(model, ["expert.weight", "expert.bias"])
    engine, said = Parallel(model), collect_warnings()
    watcher, sink = watch(engine, rules=None)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    totals = []
    for step in range(4):
        optimizer.zero_grad()
        loss_of(engine, batch_of(rank, step)).backward()
        squares = [sum(p.grad.double().square().sum() for p in model[name].parameters()) for name in model]
        dist.all_reduce(squares[1])
        totals.append(sum(squares).sqrt().item())
        if bad and rank == 1 and step == 2:
            model["expert"].weight.grad[0, 0] = torch.nan
        optimizer.step()
    return report(watcher, sink) | {"totals": totals, "said": said}


def unlike_before_ddp(rank: int, world: int, *, steps: int) -> dict[str, Any]:
    """Watch a model whose values differ between ranks until DDP copies those of rank 0."""
    said, model = collect_warnings(), build()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += rank
    watcher, sink = watch(model)
    train(Parallel(model), rank, steps)
    return report(watcher, sink) | {"said": said}


def guarded_parts(rank: int, world: int) -> dict[str, Any]:
    """Train another layer on each rank, with a guard; rank 1 gets NaN in the first step."""
    said, model = collect_warnings(), nn.Module()
    model.register_parameter(f"layer{rank}", nn.Parameter(torch.ones(1)))
    watcher, _ = watch(model, guard="skip")
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    dist.barrier()
    for step in range(2):
        optimizer.zero_grad()
        (next(model.parameters()) * (torch.nan if rank == 1 and step == 0 else 1.0)).sum().backward()
        if rank == 1:  # rank 0 has ended its guard when this rank looks whether the ranks are alike
            dist.barrier()
        optimizer.step()
        if rank == 0:
            dist.barrier()
    watcher.remove()
    return {"value": next(model.parameters()).item(), "said": said}


def guarded_stages(rank: int, world: int, *, stage_first: bool) -> dict[str, Any]:
    """Give a pipeline stage a guard, before or after the stage is made from the module."""
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    said, model = collect_warnings(), nn.Linear(4, 4)
    make = lambda: PipelineStage(model, rank, world, torch.device("cpu"))  # noqa: E731
    stage = make() if stage_first else None
    try:
        watcher, _ = watch(model, guard="skip")
    except ValueError as error:
        return {"said": [str(error)]}
    schedule = ScheduleGPipe(stage or make(), n_microbatches=2, loss_fn=nn.functional.mse_loss)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for _ in range(2):
        optimizer.zero_grad()
        schedule.step(*([torch.ones(4, 4)] if rank == 0 else []), **({"target": torch.zeros(4, 4)} if rank else {}))
        optimizer.step()
    watcher.remove()
    return {"said": said}
