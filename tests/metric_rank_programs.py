"""The programs that ranks run in the tests of metrics: small trainings with metrics under every kind of parallelism."""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from gradients import only
from metric_probes import seen, values, watch
from rank_programs import LEARNING_RATE, batch_of, build, collect_warnings, loss_of, shard, shard1, split
from rank_programs import train as train_ranks
from torch import nn

from wandb_gradwatch._pipeline.alert_manager import AlertManager
from wandb_gradwatch.metrics import (
    Activations,
    Attention,
    Metric,
    NoiseScale,
    OptimizerState,
    Ranks,
    Reference,
    Router,
    SlowRank,
    Spectrum,
    Updates,
)
from wandb_gradwatch.rules import Judgement
from wandb_gradwatch.sinks._history_row import HistoryRow


def expected(world: int, steps: int, *, width: int = 5, same_batch: bool = False) -> dict[str, np.ndarray]:
    """Compute in one process in float64: the values of Updates, Reference and rank 0's activations, by key."""
    model, first = build(width).double(), build(width).double()
    found: dict[str, list[float]] = {}

    def note(key: str, difference: Any, other: Any, names: tuple[str, str]) -> None:
        norm = difference.norm().item()
        found.setdefault(f"{key}/{names[0]}", []).append(norm)
        found.setdefault(f"{key}/{names[1]}", []).append(norm / other.norm().item())

    for step in range(steps):
        model.zero_grad()
        outputs: list[torch.Tensor] = []
        with torch.no_grad():
            for layer in model:
                outputs.append(layer(outputs[-1] if outputs else batch_of(0, step).double()))
            started = first[0](batch_of(0, step).double())
        found.setdefault("activation/2/norm", []).append(outputs[2].norm().item())
        note("activation/0", outputs[0] - started, started, ("difference", "relative_difference"))
        for rank in range(world):
            (loss_of(model, batch_of(0 if same_batch else rank, step).double()) / world).backward()
        for (name, parameter), original in zip(model.named_parameters(), first.parameters(), strict=True):
            with torch.no_grad():
                note(f"parameter/{name}", parameter - original, original, ("difference", "relative_difference"))
                update = LEARNING_RATE * parameter.grad
                note(f"update/{name}", update, parameter, ("norm", "ratio"))
                parameter -= update
    return {key: np.array(of) for key, of in found.items()}


def probes(model: nn.Module) -> list[Any]:
    """Return metrics of parameters and activations, with custom functions wherever a metric takes functions."""
    return [
        Updates(),
        Reference(model, activations="^0$", functions={"largest": lambda t, r: (t - r).abs().max()}),
        Activations("^2$", statistics=["norm", "histogram"]),
        *(Metric("own", lambda t: t.abs().max(), on=on) for on in ("parameter", "gradient", "update", "activation")),
    ]


def report(watcher: Any, sink: Any, said: list[str]) -> dict[str, Any]:
    watcher.remove()
    snapshot = sink.merged() if sink.snapshots else watcher.latest
    assert snapshot is not None, said
    return {
        "metrics": {key: np.asarray(of) for key, of in snapshot.metrics.items()},
        "histogram": int(snapshot.metric_histograms["activation/2/histogram"].counts.sum()),
        "num_snapshots": len(sink.snapshots),
        "said": said,
    }


def ddp(rank: int, world: int, *, steps: int):
    said = collect_warnings()
    model = build()
    metrics = probes(model)
    wrapped = nn.parallel.DistributedDataParallel(model)
    watcher, sink = watch(wrapped, metrics, histogram_every=1)
    train_ranks(wrapped, rank, steps)
    return report(watcher, sink, said)


def fsdp2(rank: int, world: int, *, steps: int, watch_first: bool = False, mesh: list[int], log_every: int = 1):
    said = collect_warnings()
    model = build()
    metrics = probes(model)
    if watch_first:
        watcher, sink = watch(model, metrics, log_every=log_every)
    shard(model, mesh)
    if not watch_first:
        watcher, sink = watch(model, metrics, log_every=log_every)
    train_ranks(model, rank, steps)
    return report(watcher, sink, said)


def parameter_histograms(rank: int, world: int, *, steps: int, mesh: list[int]):
    """Train with parameter histograms; return those of every window, and the whole parameters after the last update."""
    model = shard(build(), mesh)
    watcher, sink = watch(model, [], log="all", histogram_every=1)
    train_ranks(model, rank, steps)
    watcher.remove()
    whole = {name: parameter.full_tensor().detach().numpy() for name, parameter in model.named_parameters()}
    found = [dict(snapshot.metric_histograms) for snapshot in sink.snapshots]
    return {"found": found, "whole": whole, "rows": [HistoryRow.of(snapshot).scalars() for snapshot in sink.snapshots]}


def fsdp1(rank: int, world: int, *, steps: int, original: bool):
    said = collect_warnings()
    model = build()
    metrics = probes(model) if original else [Updates(), Activations("^2$")]
    wrapped = shard1(model, original)
    watcher, sink = watch(wrapped, metrics)
    train_ranks(wrapped, rank, steps)
    return report(watcher, sink, said)


def tensor_parallel(rank: int, world: int, *, steps: int, local_output: bool):
    """Train with tensor parallelism, with the same batch on every rank."""
    said = collect_warnings()
    model = build(width=6)
    metrics = probes(model)
    split(model, world, local_output=local_output)
    watcher, sink = watch(model, metrics)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, foreach=False)
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(model, batch_of(0, step)).backward()
        optimizer.step()
    return report(watcher, sink, said)


def a_reference_that_is_made_too_late(rank: int, world: int):
    from torch.distributed.fsdp import fully_shard

    model = build()
    fully_shard(model)
    try:
        Reference(model)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


OPTIMIZED = {
    "adamw": lambda model: (torch.optim.AdamW(model.parameters(), lr=1e-2), [OptimizerState()]),
    "noise": lambda model: (torch.optim.SGD(model.parameters(), lr=1e-2), [NoiseScale()]),
    "sgd": lambda model: (torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9), [OptimizerState()]),
}


def optimized_alone(kind: str, *, world: int = 2, micros: int = 1) -> dict[str, np.ndarray]:
    """Train in one process with the batches of all ranks; return the metrics of parameters by key."""
    return _optimized(build(), kind, range(world), micros)


def optimized(rank: int, world: int, *, kind: str, micros: int = 1) -> dict[str, np.ndarray]:
    """Train under FSDP2, each rank with its own batch; return this rank's metrics after the merge."""
    from torch.distributed.fsdp import fully_shard

    return _optimized(fully_shard(build()), kind, [rank], micros)


def _optimized(model: nn.Module, kind: str, ranks: Sequence[int], micros: int) -> dict[str, np.ndarray]:
    optimizer, metrics = OPTIMIZED[kind](model)
    watcher, sink = watch(model, metrics)
    for step in range(4):
        optimizer.zero_grad()
        for micro in range(micros):
            losses = [loss_of(model, batch_of(rank, step, micro)) for rank in ranks]
            (torch.stack(losses).mean() / micros).backward()
        optimizer.step()
    return values(watcher, sink)


class Mixture(nn.Module):
    """A model with attention and a router."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.gate = nn.Linear(8, 4)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        attended, _ = self.attention(batch, batch, batch)
        return self.gate(attended).softmax(-1)[..., 0]


def forwards(rank: int, world: int, *, sharded: bool = True, steps: int = 3):
    """Train with metrics of attention, router and activations, the same batches on every rank; FSDP2 if `sharded`."""
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model: nn.Module = Mixture()
    if sharded:
        fully_shard(model)
    probes_of_all = [Attention(), Router("gate", top_k=2), Activations(of=("input", "output", "grad"))]
    batches = [torch.randn(3, 5, 8, generator=torch.Generator().manual_seed(step)) for step in range(steps)]
    return seen(model, probes_of_all, batches, optimizer=torch.optim.SGD(model.parameters(), lr=0.5))


SPECTRUM_STEPS = 16


class Matrices(nn.Module):
    """Two parameters with chosen gradients: a 7 x 6 matrix, and a convolution's 5 x (2 * 3)."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        scales = torch.logspace(1, 0, 7)[:, None]
        self.flat = nn.Parameter(torch.randn(7, 6, generator=generator) * scales)
        self.cube = nn.Parameter((torch.randn(5, 6, generator=generator) * scales[:5]).view(5, 2, 3))
        self.register_buffer("towards_flat", torch.randn(7, 6, generator=generator) * scales)
        self.register_buffer("towards_cube", (torch.randn(5, 6, generator=generator) * scales[:5]).view(5, 2, 3))

    def forward(self) -> torch.Tensor:
        return (self.flat * self.towards_flat).sum() + (self.cube * self.towards_cube).sum()


def spectrum(rank: int, world: int, *, mesh: Sequence[int] = (), cut: int = 0, fsdp1: bool = False):
    """Train with Spectrum() under FSDP2, merged after every step; without a mesh the model is not sharded.

    Args:
        cut: the dimension along which parameters are sharded.
        fsdp1: use FSDP1 instead of FSDP2.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
    from torch.distributed.tensor import Shard

    said = collect_warnings()
    model: nn.Module = Matrices()
    if fsdp1:
        model = FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))
    elif mesh:
        device_mesh = init_device_mesh("cpu", tuple(mesh), mesh_dim_names=("replicate", "shard")[-len(mesh) :])
        fully_shard(model, mesh=device_mesh, shard_placement_fn=lambda _: Shard(cut))
    watcher, sink = watch(model, [Spectrum(of=("parameter", "gradient", "update"))], histogram_every=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.5)
    for _ in range(SPECTRUM_STEPS):
        optimizer.zero_grad()
        model().backward()
        optimizer.step()
        watcher.flush()
    metrics = {key: of for key, of in values(watcher, sink).items() if key.endswith(("_value", "_rank"))}
    return {"metrics": metrics, "said": said}


def side_by_side(
    rank: int,
    world: int,
    *,
    steps: int,
    micros: int = 1,
    no_sync: bool = True,
    flip_on: int | None = None,
    late_on: int | None = None,
    nan_on: int | None = None,
    sharded: Sequence[int] = (),
    by_hand: bool = False,
    scale: float = 1.0,
    script_ends: bool = False,
    is_watched: bool = True,
    **options: Any,
):
    """Train under DDP with Ranks() and NoiseScale(); also compute this rank's own gradients in float64.

    Args:
        flip_on: the rank that has one bit of a parameter flipped before the fourth step.
        late_on: the rank whose clock shows 10 seconds more in every step; each reading of a clock adds 1 ms.
        nan_on: the rank whose first batch of the last step is NaN.
        sharded: the shape of a mesh, (shards,) or (replicas, shards): use FSDP2 instead of DDP.
        by_hand: average gradients after the backward instead of DDP.
        scale: the loss scale of a GradScaler; 1: no GradScaler.
        script_ends: end without the merge of remove(), as at the end of a script.
        is_watched: False: remove the watcher before the training.
        options: arguments of DistributedDataParallel.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    said = collect_warnings()
    model = build()
    wrapped: Any = model
    if sharded:
        names = ("replicate", "shard")[-len(sharded) :]
        fully_shard(model, mesh=init_device_mesh("cpu", tuple(sharded), mesh_dim_names=names))
    elif not by_hand:
        wrapped = nn.parallel.DistributedDataParallel(model, **options)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale, enabled=scale != 1.0)
    compared = Ranks(checksum_every=2)
    looks, lateness = itertools.count(), [0.0]
    compared._clock = lambda: lateness[0] + next(looks) / 1000
    rules = [only("ranks_disagree"), SlowRank()]
    watcher, sink = watch(wrapped, [compared, NoiseScale()], rules=rules, log_every=4, histogram_every=4, log="all")
    if not is_watched:
        watcher.remove()
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    own: list[torch.Tensor] = []
    losses: list[float] = []
    for step in range(steps):
        if rank == flip_on and step == 3:
            with torch.no_grad():
                part = getattr(model[0].weight, "_local_tensor", model[0].weight)
                part.view(-1)[:1].view(torch.int32).bitwise_xor_(1 << 24)  # a bit of the exponent
        lateness[0] += 10 * (rank == late_on)
        optimizer.zero_grad()
        batches = [batch_of(rank, step, micro) for micro in range(micros)]
        if rank == nan_on and step == steps - 1:
            batches[0] = batches[0] * torch.nan
        if not sharded:
            alone = copy.deepcopy(model).double()
            alone_loss = sum(loss_of(alone, batch.double()) for batch in batches)
            gradients = torch.autograd.grad(alone_loss, list(alone.parameters()))
            own.append(torch.cat([gradient.flatten() for gradient in gradients]))
            losses.append(float(alone_loss.detach()))
        for micro, batch in enumerate(batches):
            is_last = micro == micros - 1
            with contextlib.nullcontext() if is_last or not no_sync else wrapped.no_sync():
                scaler.scale(loss_of(wrapped, batch)).backward()
        if by_hand:
            for parameter in model.parameters():
                torch.distributed.all_reduce(parameter.grad)
                parameter.grad /= world
        scaler.step(optimizer)
        scaler.update()
        if script_ends and step == 3:
            watcher.flush()  # waits until the first window is merged
    watcher._remove(merge=not script_ends)
    parameters = [] if sharded else [parameter.tolist() for parameter in model.parameters()]
    if not is_watched:
        return parameters
    merged = sink.merged()
    return {
        "parameters": parameters,
        "steps": merged.steps.tolist(),
        "norm": merged.total_grad_norm,
        "nan": [alert.incident for alert in AlertManager([Judgement()]).process(merged)],
        "histograms": {key: int(of.counts.sum()) for key, of in sink.snapshots[-1].metric_histograms.items()},
        "own": torch.stack(own).numpy() if own else None,
        "losses": losses,
        "metrics": {key: np.asarray(of) for key, of in merged.metrics.items()},
        "alerts": [(alert.title, alert.step, alert.text) for alert in sink.alerts],
        "said": said,
    }
