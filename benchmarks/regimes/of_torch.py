"""Regimes of torch itself."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from . import (
    CLIP,
    LEARNING_RATE,
    STEPS,
    TOKENS,
    Regime,
    Training,
    Truth,
    _full,
    averaging,
    batch,
    gradients_of,
    loss_of,
    part,
    regime,
    together,
    whole,
)


@regime("DistributedDataParallel")
def ddp(rank: int, world: int) -> Training:
    return averaging(nn.parallel.DistributedDataParallel(whole()), rank, are_replicas=True)


@regime("DistributedDataParallel, micro-batches under no_sync")
def ddp_accumulated(rank: int, world: int) -> Training:
    model = nn.parallel.DistributedDataParallel(whole(), gradient_as_bucket_view=True)

    def backward(step: int) -> None:
        tokens = batch(step, [rank])
        for rows, context in zip(tokens.chunk(2), (model.no_sync, contextlib.nullcontext), strict=True):
            with context():
                (loss_of(model(rows), rows) / 2).backward()

    return Training(model, backward, are_replicas=True)


@regime("DistributedDataParallel, static graph, gradients as views of the buckets")
def ddp_static(rank: int, world: int) -> Training:
    model = nn.parallel.DistributedDataParallel(whole(), static_graph=True, gradient_as_bucket_view=True)
    return averaging(model, rank, are_replicas=True)


@regime("DistributedDataParallel inside Join")
def ddp_join(rank: int, world: int) -> Training:
    training = averaging(model := nn.parallel.DistributedDataParallel(whole()), rank, are_replicas=True)
    own_backward = training.backward

    def backward(step: int) -> None:
        with model.join():
            own_backward(step)

    training.backward = backward
    return training


@regime("DistributedDataParallel, communication in float16")
def ddp_float16(rank: int, world: int) -> Training:
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

    model = nn.parallel.DistributedDataParallel(whole())
    model.register_comm_hook(dist.group.WORLD, fp16_compress_hook)
    return averaging(model, rank, are_replicas=True, precision="float16")


@regime("DistributedDataParallel, PowerSGD of full rank")
def ddp_powersgd(rank: int, world: int) -> Training:
    from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

    model = nn.parallel.DistributedDataParallel(whole())
    state = PowerSGDState(
        dist.group.WORLD,
        matrix_approximation_rank=TOKENS,
        start_powerSGD_iter=2,
        min_compression_rate=0.1,
        orthogonalization_epsilon=0.0,
    )
    model.register_comm_hook(state, powerSGD_hook)
    return averaging(model, rank, are_replicas=True)


@regime("ZeroRedundancyOptimizer")
def zero_redundancy(rank: int, world: int) -> Training:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    def make(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return ZeroRedundancyOptimizer(parameters, optimizer_class=torch.optim.SGD, lr=LEARNING_RATE)

    model = nn.parallel.DistributedDataParallel(whole())
    return averaging(model, rank, make_optimizer=make, are_replicas=True)


def _fsdp2(model: nn.Module, mesh: Any, **options: Any) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    for layer in model.children():
        if list(layer.parameters()):
            fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def _mesh(*shape: int) -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", shape, mesh_dim_names=("outer", "inner")[-len(shape) :])


@regime("FSDP2")
def fsdp2(rank: int, world: int) -> Training:
    return averaging(_fsdp2(whole(), _mesh(world)), rank)


@regime("FSDP2, micro-batches without a reduction in between")
def fsdp2_accumulated(rank: int, world: int) -> Training:
    model: Any = _fsdp2(whole(), _mesh(world), reshard_after_forward=False)

    def backward(step: int) -> None:
        for rows, is_last in zip(batch(step, [rank]).chunk(2), (False, True), strict=True):
            model.set_requires_gradient_sync(is_last)
            model.set_reshard_after_backward(is_last)
            (loss_of(model(rows), rows) / 2).backward()

    return Training(model, backward)


@regime("FSDP2, mixed precision in bfloat16")
def fsdp2_bfloat16(rank: int, world: int) -> Training:
    from torch.distributed.fsdp import MixedPrecisionPolicy

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return averaging(_fsdp2(whole().float(), _mesh(world), mp_policy=policy), rank, precision="bfloat16")


@regime("FSDP2, shards along the second dimension")
def fsdp2_second_dimension(rank: int, world: int) -> Training:
    from torch.distributed.tensor import Shard

    place = lambda parameter: Shard(1) if parameter.ndim > 1 else Shard(0)  # noqa: E731
    return averaging(_fsdp2(whole(), _mesh(world), shard_placement_fn=place), rank)


@regime("FSDP2, embedding and head tied")
def fsdp2_tied(rank: int, world: int) -> Training:
    from torch.distributed.fsdp import fully_shard

    return averaging(fully_shard(whole(tied=True), mesh=_mesh(world)), rank, tied=True)


@regime("FSDP2, hybrid (2 x 2)", 4)
def hsdp(rank: int, world: int) -> Training:
    return averaging(_fsdp2(whole(), _mesh(2, 2)), rank)


@regime("FSDP1")
def fsdp1(rank: int, world: int) -> Training:
    from torch.distributed.fsdp import FullyShardedDataParallel

    model = FullyShardedDataParallel(whole().float(), use_orig_params=True, device_id=torch.device("cpu"))
    return averaging(model, rank, clip=lambda: model.clip_grad_norm_(CLIP), precision="float32")


def _tensor_parallel(model: nn.Module, mesh: Any, *, sequence: bool = False) -> nn.Module:
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor import parallel as tp

    inside: Any = Shard(0) if sequence else Replicate()
    plan: dict[str, Any] = {
        "embedding": tp.RowwiseParallel(input_layouts=Replicate(), output_layouts=inside),
        "up": tp.ColwiseParallel(input_layouts=inside),
        "down": tp.RowwiseParallel(),
        "head": tp.ColwiseParallel(output_layouts=Replicate()),
    }
    return tp.parallelize_module(
        model, mesh, plan | ({"norm": tp.SequenceParallel(sequence_dim=0)} if sequence else {})
    )


@regime("tensor parallel: embedding, columns, rows")
def tensor_parallel(rank: int, world: int) -> Training:
    return together(_tensor_parallel(whole(), _mesh(world)), world)


@regime("tensor parallel, embedding and head tied")
def tensor_parallel_tied(rank: int, world: int) -> Training:
    model = _tensor_parallel(whole(tied=True), _mesh(world))
    model.head.weight = model.embedding.weight
    return together(model, world, tied=True)


@regime("tensor and sequence parallel")
def sequence_parallel(rank: int, world: int) -> Training:
    return together(_tensor_parallel(whole(), _mesh(world), sequence=True), world)


@regime("FSDP2 and tensor parallel (2 x 2)", 4)
def fsdp2_tensor_parallel(rank: int, world: int) -> Training:
    mesh = _mesh(2, 2)
    model = _fsdp2(_tensor_parallel(whole(), mesh["inner"], sequence=True), mesh["outer"])

    def backward(step: int) -> None:
        row = rank // 2  # the ranks of a row share the batches of two ranks
        tokens = batch(step, [2 * row, 2 * row + 1])
        loss_of(model(tokens), tokens).backward()

    return Training(model, backward)


@regime("context parallel, ring attention")
def context_parallel(rank: int, world: int) -> Training:
    from torch.distributed.tensor.experimental import context_parallel

    inputs = [torch.randn(1, 1, 8, 4) for _ in range(3)]
    with context_parallel(_mesh(world), buffers=inputs, buffer_seq_dims=[2, 2, 2]):
        nn.functional.scaled_dot_product_attention(*inputs, is_causal=True)  # raises on the CPU
    raise RuntimeError("torch has ring attention for the CPU by now: train a model with it here")


_PARTS = (("embedding", "norm"), ("up", "act"), ("down",), ("head",))  # the layers of four stages


def _pipeline(schedule: str, places: tuple[tuple[int, ...], ...], wrap: Any = lambda model: model) -> Regime:
    """Return a pipeline; `places` are the numbers of each rank's stages: there are four, or two of twice the size."""

    def make(rank: int, world: int) -> Training:
        from torch.distributed import pipelining

        num_stages, own = sum(map(len, places)), places[rank]
        size = len(_PARTS) // num_stages
        models = [wrap(part(*sum(_PARTS[size * at : size * (at + 1)], ()))) for at in own]
        stages = [
            pipelining.PipelineStage(model, at, num_stages, torch.device("cpu"))
            for model, at in zip(models, own, strict=True)
        ]
        of_class = getattr(pipelining, schedule)
        run = of_class(stages[0] if len(stages) == 1 else stages, n_microbatches=4, loss_fn=loss_of)

        def backward(step: int) -> None:
            tokens = batch(step, range(world))
            run.step(*([tokens] if 0 in own else []), **({"target": tokens} if num_stages - 1 in own else {}))

        return Training(models[0] if len(models) == 1 else models, backward, are_stages=True)

    return make


def _fsdp2_of_one(model: nn.Module) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh

    return _fsdp2(model, init_device_mesh("cpu", (2, 1), mesh_dim_names=("stages", "shards"))["shards"])


_ONE, _LOOPED, _V = ((0,), (1,)), ((0, 2), (1, 3)), ((0, 3), (1, 2))
for _schedule, _places in (
    ("ScheduleGPipe", _ONE),
    ("Schedule1F1B", _ONE),
    ("ScheduleInterleaved1F1B", _LOOPED),
    ("ScheduleLoopedBFS", _LOOPED),
    ("ScheduleInterleavedZeroBubble", _LOOPED),
    ("ScheduleZBVZeroBubble", _V),
    ("ScheduleDualPipeV", _V),
):
    regime(f"pipeline, {_schedule}")(_pipeline(_schedule, _places))
regime("pipeline of FSDP2 modules, Schedule1F1B")(_pipeline("Schedule1F1B", _ONE, _fsdp2_of_one))


@regime("pipeline and tensor parallel (2 x 2), ScheduleGPipe", 4)
def pipeline_tensor_parallel(rank: int, world: int) -> Training:
    from torch.distributed import pipelining

    mesh = _mesh(2, 2)
    own = mesh.get_coordinate()[0]
    model = part(*(("embedding", "norm") if own == 0 else ("up", "act", "down", "head")))
    model = _tensor_parallel(model, mesh["inner"])
    group = mesh["outer"].get_group()
    stage = pipelining.PipelineStage(model, own, 2, torch.device("cpu"), group=group)
    run = pipelining.ScheduleGPipe(stage, n_microbatches=4, loss_fn=loss_of)

    def backward(step: int) -> None:
        tokens = batch(step, range(world))
        run.step(*([tokens] if own == 0 else []), **({"target": tokens} if own == 1 else {}))

    def clip() -> None:
        gradients = [_full(parameter.grad) for parameter in model.parameters()]
        squares = torch.stack([gradient.square().sum() for gradient in gradients]).sum()
        dist.all_reduce(squares, group=group)
        nn.utils.clip_grads_with_norm_(model.parameters(), CLIP, squares.sqrt(), foreach=False)

    return Training(model, backward, clip=clip, are_stages=True)


@regime("gradients averaged by hand")
def by_hand(rank: int, world: int) -> Training:
    training = averaging(model := whole(), rank, are_replicas=True)
    own_backward = training.backward

    def backward(step: int) -> None:
        own_backward(step)
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= world

    training.backward = backward
    return training


def _experts(rank: int, world: int) -> nn.Module:
    """Return the whole model with two layers that are different on every rank."""
    model = whole()
    torch.manual_seed(1 + rank)
    model.up, model.down = nn.Linear(4, 6).double(), nn.Linear(6, 4).double()
    return model


_OF_EXPERTS = ("up.", "down.")


def _truth_of_experts(world: int, *, clip: float = CLIP) -> Truth:
    """Train the models of all ranks in one process: what they share has the average gradient."""
    models = [_experts(rank, world) for rank in range(world)]
    names = [name for name, _ in models[0].named_parameters()]
    is_expert = [name.startswith(_OF_EXPERTS) for name in names]
    truth = Truth([*names, *(f"rank1.{name}" for name in names if name.startswith(_OF_EXPERTS))], [], [])
    for step in range(STEPS):
        for rank, model in enumerate(models):
            model.zero_grad()
            loss_of(model(batch(step, [rank])), batch(step, [rank])).backward()
        own = [[parameter.grad for parameter in model.parameters()] for model in models]
        for number, expert in enumerate(is_expert):
            if not expert:
                mean = torch.stack([gradients[number] for gradients in own]).mean(dim=0)
                for gradients in own:
                    gradients[number].copy_(mean)
        every = [*own[0], *(one for one, expert in zip(own[1], is_expert, strict=True) if expert)]
        truth.left.append([one.clone() for one in every])
        norm = torch.stack([one.square().sum() for one in every]).sum().sqrt()
        for model in models:
            nn.utils.clip_grads_with_norm_(model.parameters(), clip, norm)
        truth.received.append([one.clone() for one in every])
        for model in models:
            torch.optim.SGD(model.parameters(), lr=LEARNING_RATE).step()
    return truth


@regime("experts of one name on every rank, the rest averaged by DistributedDataParallel")
def experts(rank: int, world: int) -> Training:
    model = _experts(rank, world)
    own = [name for name, _ in model.named_parameters() if name.startswith(_OF_EXPERTS)]
    nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, own)
    wrapped = nn.parallel.DistributedDataParallel(model)

    def clip() -> None:
        squares = torch.zeros((), dtype=torch.float64)
        for name, parameter in model.named_parameters():
            squares += parameter.grad.square().sum() / (1 if name in own else world)
        dist.all_reduce(squares)
        nn.utils.clip_grads_with_norm_(model.parameters(), CLIP, squares.sqrt(), foreach=False)

    return averaging(wrapped, rank, clip=clip, are_stages=True, truth=_truth_of_experts)


_PERIOD = 2  # steps between two averages of local SGD


def _averaged(models: list[nn.Module]) -> None:
    for parameters in zip(*(model.parameters() for model in models), strict=True):
        mean = torch.stack([one.data for one in parameters]).mean(dim=0)
        for one in parameters:
            one.data.copy_(mean)


def _truth_of_rank_0(world: int, *, clip: float = CLIP) -> Truth:
    """Train the models of all ranks in one process, averaged every other step. Returns the gradients of rank 0."""
    models = [whole() for _ in range(world)]
    truth = Truth([name for name, _ in models[0].named_parameters()], [], [])
    for step in range(STEPS):
        for rank, model in enumerate(models):
            model.zero_grad()
            loss_of(model(batch(step, [rank])), batch(step, [rank])).backward()
            if rank == 0:
                truth.left.append(gradients_of([model]))
            nn.utils.clip_grad_norm_(model.parameters(), clip)
            if rank == 0:
                truth.received.append(gradients_of([model]))
            torch.optim.SGD(model.parameters(), lr=LEARNING_RATE).step()
        if (step + 1) % _PERIOD == 0:
            _averaged(models)
    return truth


@regime("PostLocalSGDOptimizer, averaged every other step")
def post_local_sgd(rank: int, world: int) -> Training:
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
    from torch.distributed.optim import PostLocalSGDOptimizer

    # The averager counts from 0 and averages when it has counted a multiple of the period: a warm-up of one step
    # makes it average after steps 2 and 4.
    def make(parameters: list[nn.Parameter]) -> Any:
        averager = PeriodicModelAverager(period=_PERIOD, warmup_steps=1)
        return PostLocalSGDOptimizer(torch.optim.SGD(parameters, lr=LEARNING_RATE, foreach=False), averager)

    return averaging(whole(), rank, make_optimizer=make, truth=_truth_of_rank_0, are_replicas=True)


@regime("local SGD with an outer optimizer (DiLoCo), every other step")
def diloco(rank: int, world: int) -> Training:
    model = whole()
    begin = [parameter.data.clone() for parameter in model.parameters()]
    outer = torch.optim.SGD(model.parameters(), lr=1.0)

    def after_step(step: int) -> None:
        if (step + 1) % _PERIOD:
            return
        for parameter, old in zip(model.parameters(), begin, strict=True):
            parameter.grad = old - parameter.data
            dist.all_reduce(parameter.grad)
            parameter.grad /= world
            parameter.data.copy_(old)
        outer.step()
        for parameter, old in zip(model.parameters(), begin, strict=True):
            old.copy_(parameter.data)

    return averaging(model, rank, after_step=after_step, truth=_truth_of_rank_0, are_replicas=True)
