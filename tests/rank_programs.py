"""The programs that ranks run in test_distributed.py: small watched trainings under every kind of parallelism."""

from __future__ import annotations

import contextlib
import logging
import shutil
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from gradients import watch
from torch import nn

import wandb_gradwatch
from wandb_gradwatch import MemorySink
from wandb_gradwatch._pipeline.rank_tree import GROUP

LEARNING_RATE = 0.1


def build(width: int = 5) -> nn.Module:
    """Return a small MLP, the same on every rank. Its 5 and 3 rows do not divide evenly over 2 or 4 ranks."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 3), nn.Tanh(), nn.Linear(3, 1))


def batch_of(rank: int, step: int, micro: int = 0) -> torch.Tensor:
    return torch.randn(6, 4, generator=torch.Generator().manual_seed(1000 * step + 10 * micro + rank))


def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).square().mean()


def shard(model: nn.Module, mesh: Sequence[int], **options: Any) -> nn.Module:
    """Apply FSDP2 to each linear layer and to the root, over a mesh of [shards] or [replicas, shards] ranks."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    names = ("replicate", "shard")[-len(mesh) :]
    options["mesh"] = init_device_mesh("cpu", tuple(mesh), mesh_dim_names=names)
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, **options)
    return fully_shard(model, **options)


def shard1(model: nn.Module, original: bool) -> nn.Module:
    """Apply FSDP1 to each linear layer, with its original parameters or one flat parameter."""
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    policy = ModuleWrapPolicy({nn.Linear})
    options: dict[str, Any] = {"use_orig_params": original, "device_id": torch.device("cpu")}
    return FullyShardedDataParallel(model, auto_wrap_policy=policy, **options)


def split(model: nn.Module, world: int, *, local_output: bool = True) -> nn.Module:
    """Apply tensor parallelism: the first linear layer is split by rows, the next by columns, the last is replicated.

    The model's width must be even, because DTensor's backward needs even shards here.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    plan = {"0": ColwiseParallel(use_local_output=local_output), "2": RowwiseParallel()}
    return parallelize_module(model, init_device_mesh("cpu", (world,)), plan)


def expected(
    world: int,
    steps: int,
    *,
    micros: int = 1,
    clip: float | None = None,
    width: int = 5,
    learning_rate: float = LEARNING_RATE,
) -> dict[str, np.ndarray]:
    """Compute the training in one process in float64: gradients are averaged over ranks, summed over micro-batches."""
    model = build(width).double()
    norms, clipped = [], []
    for step in range(steps):
        model.zero_grad()
        for rank in range(world):
            for micro in range(micros):
                (loss_of(model, batch_of(rank, step, micro).double()) / world).backward()
        parameters = list(model.parameters())
        norms.append([parameter.grad.norm().item() for parameter in parameters])
        if clip is not None:
            nn.utils.clip_grad_norm_(parameters, clip)
        clipped.append([parameter.grad.norm().item() for parameter in parameters])
        with torch.no_grad():
            for parameter in parameters:
                parameter -= learning_rate * parameter.grad
    return {"grad_norm": np.array(norms), "grad_norm_clipped": np.array(clipped)}


def report(watcher: Any, sink: Any) -> dict[str, Any]:
    """Remove the watcher and return what this rank has measured."""
    watcher.remove()
    snapshot = watcher.latest if not sink.snapshots else sink.merged()
    assert snapshot is not None
    return {
        "steps": snapshot.steps.tolist(),
        "names": list(snapshot.names),
        "grad_norm": snapshot.grad_norm,
        "grad_norm_clipped": snapshot.grad_norm_clipped,
        "total": snapshot.total_grad_norm,
        "num_elements": snapshot.num_elements,
        "clip_ratio": snapshot.clip_ratio,
        "histogram": None if snapshot.histogram is None else snapshot.histogram.sum(axis=1),
        "num_snapshots": len(sink.snapshots),
        "alerts": [alert.text for alert in sink.alerts],
        "first_bad_rank": snapshot.metrics.get("gradwatch/first_nonfinite_rank"),
    }


def collect_warnings() -> list[str]:
    messages: list[str] = []

    class Collector(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append(record.getMessage())
            print(record.getMessage(), file=sys.stderr)  # shown if a rank fails

    logging.getLogger("wandb_gradwatch").addHandler(Collector())
    return messages


def train(model: nn.Module, rank: int, steps: int, *, micros: int = 1, clip: Any = None, no_sync: Any = None) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    for step in range(steps):
        optimizer.zero_grad()
        for micro in range(micros):
            with no_sync(micro < micros - 1) if no_sync else contextlib.nullcontext():
                loss_of(model, batch_of(rank, step, micro)).backward()
        if clip is not None:
            clip(model)
        optimizer.step()


def ddp(
    rank: int,
    world: int,
    *,
    steps: int,
    micros: int = 1,
    clip: float | None = None,
    hook: bool = False,
    sync_every: bool = False,
    **options,
):
    model = nn.parallel.DistributedDataParallel(build(), **options)
    if hook:
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

        model.register_comm_hook(None, default_hooks.allreduce_hook)
    watcher, sink = watch(model)
    train(
        model,
        rank,
        steps,
        micros=micros,
        clip=(lambda m: nn.utils.clip_grad_norm_(m.parameters(), clip)) if clip else None,
        no_sync=lambda quiet: model.no_sync() if quiet and not sync_every else contextlib.nullcontext(),
    )
    return report(watcher, sink)


def in_step(rank: int, world: int, *, steps: int, average: str = "", clip: float = 0.0, kind: str = "") -> Any:
    """An optimizer that averages over ranks and clips inside its own step, as Horovod's and detectron2's do.

    average: "in place", "replace", or "" for a model in DistributedDataParallel; kind: how it clips.
    """
    model = build()
    train = model if average else nn.parallel.DistributedDataParallel(model)

    class Own(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            gradients = [parameter.grad for parameter in model.parameters()]
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                if average == "replace":
                    parameter.grad = gradient = gradient.clone()
                if average:
                    dist.all_reduce(gradient)
                    gradient /= world
            if kind == "by hand":
                total = torch.stack([gradient.norm() for gradient in gradients]).norm()
                for gradient in gradients:
                    gradient *= clip / total
            elif kind:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            super().step(closure)

    optimizer = Own(model.parameters(), lr=LEARNING_RATE)
    watcher, sink = watch(model)
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(train, batch_of(rank, step)).backward()
        optimizer.step()
    return report(watcher, sink)


def discards(rank: int, world: int) -> list[str]:
    """A loop over shards that makes no step if a gradient is not finite; returns what this rank has said of it."""
    messages, model = collect_warnings(), shard(build(), [world])
    watcher, _ = watch(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    for step in range(4):
        optimizer.zero_grad()
        (loss_of(model, batch_of(rank, step)) * (float("nan") if step in (1, 2) else 1.0)).backward()
        if nn.utils.clip_grad_norm_(model.parameters(), 1.0).isfinite():
            optimizer.step()
    watcher.remove()
    return [message for message in messages if "left step" in message and "times in all" not in message]


def fsdp2(
    rank: int,
    world: int,
    *,
    steps: int,
    watch_first: bool = False,
    micros: int = 1,
    clip: float | None = None,
    sync_every: bool = True,
    mesh: list[int] | None = None,
    log_every: int = 1,
    offload: bool = False,
    group: int | None = None,
):
    """Train under FSDP2; `group` is the size of the groups in which ranks are merged, as in large jobs."""
    from wandb_gradwatch._pipeline import rank_merger

    rank_merger.GROUP = group or GROUP
    options: dict[str, Any] = {}
    if offload:
        from torch.distributed.fsdp import CPUOffloadPolicy

        options["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
    model = build()
    if watch_first:
        watcher, sink = watch(model, log_every=log_every, histogram_every=1)
    shard(model, mesh or [world], **options)
    if not watch_first:
        watcher, sink = watch(model, log_every=log_every, histogram_every=1)

    @contextlib.contextmanager
    def no_sync(quiet):
        if not sync_every:
            model.set_requires_gradient_sync(not quiet)
        yield

    train(
        model,
        rank,
        steps,
        micros=micros,
        clip=(lambda m: nn.utils.clip_grad_norm_(m.parameters(), clip)) if clip else None,
        no_sync=no_sync,
    )
    return report(watcher, sink)


def tensor_parallel(rank: int, world: int, *, steps: int, watch_first: bool = False):
    model = build(width=6)
    if watch_first:
        watcher, sink = watch(model)
    split(model, world)
    if not watch_first:
        watcher, sink = watch(model)
    # Foreach cannot mix plain tensors and DTensors, and the last layer has plain tensors.
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, foreach=False)
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(model, batch_of(0, step)).backward()  # the same batch on every rank
        optimizer.step()
    return report(watcher, sink)


def fsdp1(rank: int, world: int, *, steps: int, original: bool, clip: float | None = None, micros: int = 1):
    model = shard1(build(), original)
    watcher, sink = watch(model)
    train(model, rank, steps, micros=micros, clip=(lambda m: m.clip_grad_norm_(clip)) if clip else None)
    return report(watcher, sink)


def fsdp1_loss_scale(rank: int, world: int, *, steps: int, clip: float | None = None):
    """Train under FSDP1 with its own gradient scaler, which overrides methods of torch.amp.GradScaler."""
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

    model = FullyShardedDataParallel(build(), use_orig_params=True, device_id=torch.device("cpu"))
    watcher, sink = watch(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    scaler = ShardedGradScaler(device="cpu", init_scale=1024.0)
    for step in range(steps):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, batch_of(rank, step))).backward()
        scaler.unscale_(optimizer)
        if clip is not None:
            model.clip_grad_norm_(clip)
        scaler.step(optimizer)
        scaler.update()
    return report(watcher, sink)


def nan_on_one_rank(rank: int, world: int, *, in_backward: tuple[int, ...], after_it: tuple[int, ...]):
    """Put NaN into these ranks' shards of one layer's gradient in the third of four steps."""
    from torch.distributed.fsdp import fully_shard

    model = build()
    fully_shard(model)
    watcher, sink = watch(model, rules=None, log_every=4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)

    def poison(parameter: Any, ranks: tuple[int, ...] = in_backward) -> None:
        if rank in ranks and step == 2:
            with torch.no_grad():
                parameter.grad._local_tensor[0, 0] = float("nan")

    model[2].weight.register_post_accumulate_grad_hook(poison)
    for step in range(4):
        optimizer.zero_grad()
        loss_of(model, batch_of(rank, step)).backward()
        poison(model[2].weight, after_it)
        optimizer.step()
    return report(watcher, sink)


def nan_in_a_batch(rank: int, world: int, *, bad: int, sharded: bool):
    """Give this rank a batch with NaN in the third of four steps, under FSDP2 or DDP, which average the gradients."""
    from torch.distributed.fsdp import fully_shard

    model = fully_shard(build()) if sharded else nn.parallel.DistributedDataParallel(build())
    watcher, sink = watch(model, rules=None, log_every=4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for step in range(4):
        optimizer.zero_grad()
        batch = batch_of(rank, step)
        loss_of(model, batch * float("nan") if step == 2 and rank == bad else batch).backward()
        optimizer.step()
    return report(watcher, sink)


def used_on_one_rank_only(rank: int, world: int, *, steps: int):
    """Train under DDP with unused parameters: only rank 0 uses one branch of the model."""

    class Branching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.always, self.sometimes = nn.Linear(4, 1, bias=False), nn.Linear(4, 1, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.always(x) + (self.sometimes(x) if rank == 0 else 0)

    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(Branching(), find_unused_parameters=True)
    watcher, sink = watch(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    local = []
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(model, batch_of(rank, step)).backward()
        local.append([parameter.grad.double().norm().item() for parameter in model.parameters()])
        optimizer.step()
    return report(watcher, sink) | {"local": local}


def own_parts(rank: int, world: int, *, inf: bool = False, same_name: bool = False, frozen: bool = False):
    """Train a different layer on each rank, like pipeline stages, with a gradient of 3 on rank 0 and 4 on rank 1."""
    model = nn.Module()
    size = rank + 1 if same_name else 1
    model.register_parameter("layer" if same_name else f"layer{rank}", nn.Parameter(torch.ones(size)))
    if frozen and rank == 1:
        model.register_parameter("embedding", nn.Parameter(torch.ones(1), requires_grad=False))
    said = collect_warnings()
    watcher, sink = watch(model, rules=None, log_every=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for step in range(4):
        optimizer.zero_grad()
        gradient = torch.zeros(size)
        gradient[0] = float("inf") if inf and rank == 1 and step == 2 else 3.0 + rank
        (next(model.parameters()) * gradient).sum().backward()
        handed_on = torch.zeros(1)
        dist.all_reduce(handed_on)  # pipeline stages wait for each other
        optimizer.step()
    return report(watcher, sink) | {"said": said}


def two_watchers_of_one_run(rank: int, world: int, *, steps: int, kind: str):
    """Watch two models with equal names, sharded or replicated ("ddp"), with a W&B run on rank 0 only."""
    import wandb
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    folder = tempfile.mkdtemp()
    run = wandb.init(mode="offline", dir=folder, settings=wandb.Settings(silent=True)) if rank == 0 else None
    models = [build(), build()]
    options: dict[str, Any] = {}
    if kind == "ddp":
        models = [nn.parallel.DistributedDataParallel(model) for model in models]
        options = {"sinks": [MemorySink()]} if rank else {}
    else:
        for model in models:
            fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    watchers = [wandb_gradwatch.watch(model, run=run, rules=[], sample_every=1, **options) for model in models]
    for model in models:
        train(model, rank, steps)
    norms = [watcher.flush().total_grad_norm.tolist() for watcher in watchers]
    names = [watcher.latest.names for watcher in watchers]
    for watcher in watchers:
        watcher.remove()
    if run is not None:
        run.finish()
    shutil.rmtree(folder)
    return {"norms": norms, "names": names}


def rank_that_watches_something_else(rank: int, world: int, *, steps: int):
    """Watch different parameters of a sharded model on each rank."""
    from torch.distributed.fsdp import fully_shard

    said = collect_warnings()
    model = build()
    fully_shard(model)
    watcher, sink = watch(model, include="weight" if rank == 0 else "bias")
    train(model, rank, steps)
    watcher.remove()
    return {"num_rows": len(sink.snapshots), "latest": watcher.latest, "said": said}


def rank_that_does_not_watch(rank: int, world: int, *, steps: int):
    """Call watch() on rank 0 only, although the model is sharded."""
    from torch.distributed.fsdp import fully_shard

    said = collect_warnings()
    model = build()
    fully_shard(model)
    if rank == 0:
        watcher, sink = watch(model)
    train(model, rank, steps)
    if rank == 0:
        watcher.remove()
    dist.barrier()
    return {"num_rows": len(sink.snapshots) if rank == 0 else 0, "said": said}
