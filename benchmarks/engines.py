"""Train one small model under every engine and set-up that runs here, and compare what is measured with one process.

The reference trains in one process, in float64, on the batches of all ranks. Writes the table of docs/distributed.md.

    python -m benchmarks.engines [NAME ...] [--write]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import math
import os
import subprocess
import sys
import tempfile
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

import wandb_gradwatch
from wandb_gradwatch import MemorySink
from wandb_gradwatch.metrics import Ranks

PAGE = Path(__file__).parent.parent / "docs/distributed.md"
BEGIN, END = "<!-- begin: python -m benchmarks.engines -->\n", "<!-- end -->\n"
STEPS, BAD_STEP, CLIP, LEARNING_RATE = 4, 3, 0.1, 0.1
TOKENS, BATCH = 8, 16  # the vocabulary, and the tokens of a rank at a step
BAD_RANK = 1  # of which a gradient becomes NaN
TOLERANCE = 1e-5  # relative; some engines work in float32
TIME_LIMIT = 120  # seconds for all ranks of a regime to end


def whole(*, tied: bool = False) -> nn.Sequential:
    """Return the whole model, the same on every rank; all its sizes are even."""
    torch.manual_seed(0)
    layers = {"embedding": nn.Embedding(TOKENS, 4), "norm": nn.LayerNorm(4), "up": nn.Linear(4, 6), "act": nn.Tanh()}
    layers |= {"down": nn.Linear(6, 4), "head": nn.Linear(4, TOKENS, bias=False)}
    if tied:
        layers["head"].weight = layers["embedding"].weight
    return nn.Sequential(OrderedDict(layers)).double()


def part(*names: str) -> nn.Sequential:
    """Return these layers of the model, under their names."""
    return nn.Sequential(OrderedDict((name, layer) for name, layer in whole().named_children() if name in names))


def batch(step: int, ranks: Iterable[int]) -> Tensor:
    """Return the tokens of these ranks at a step."""
    generators = [torch.Generator().manual_seed(100 * step + rank) for rank in ranks]
    return torch.cat([torch.randint(0, TOKENS, (BATCH,), generator=generator) for generator in generators])


def loss_of(logits: Tensor, tokens: Tensor) -> Tensor:
    """Return the mean loss of predicting the square of each token."""
    return nn.functional.cross_entropy(logits, tokens**2 % TOKENS)


@dataclass
class Training:
    """A model under an engine. `backward(step)` makes the gradients that the optimizer would use without clipping."""

    model: nn.Module | list[nn.Module]
    backward: Callable[[int], None]
    clip: Callable[[], object] | None = None  # None: by the norm over all ranks
    make_optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer] | None = None  # None: SGD
    tied: bool = False
    are_replicas: bool = False  # each rank has all parameters, and only `Ranks()` sees the rank's own gradient
    are_stages: bool = False  # each rank has parameters of its own
    parameters: list[nn.Parameter] = field(init=False)

    def __post_init__(self) -> None:
        models = self.model if isinstance(self.model, list) else [self.model]
        self.parameters = [parameter for model in models for parameter in model.parameters()]

    def clip_all(self) -> None:
        """Clip the norm over all ranks, as a training of this kind does."""
        if self.clip is not None:
            self.clip()
            return
        gradients = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        squares = torch.stack([_full(gradient).square().sum() for gradient in gradients]).sum()
        if self.are_stages:
            dist.all_reduce(squares)
        nn.utils.clip_grads_with_norm_(self.parameters, CLIP, squares.sqrt(), foreach=False)


def _full(tensor: Any) -> Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


Regime = Callable[[int, int], Training]
REGIMES: dict[str, tuple[Regime, int]] = {}  # by name: the function of rank and world, and the number of ranks


def regime(name: str, num_ranks: int = 2) -> Callable[[Regime], Regime]:
    def add(function: Regime) -> Regime:
        REGIMES[name] = function, num_ranks
        return function

    return add


def _averaging(model: nn.Module, rank: int, **options: Any) -> Training:
    """Return the training of an engine that averages over ranks, each with its own batch."""
    return Training(model, lambda step: loss_of(model(batch(step, [rank])), batch(step, [rank])).backward(), **options)


def _together(model: nn.Module, world: int, **options: Any) -> Training:
    """Return the training of an engine in which all ranks have the same batch."""

    def backward(step: int) -> None:
        tokens = batch(step, range(world))
        loss_of(model(tokens), tokens).backward()

    return Training(model, backward, **options)


@regime("DistributedDataParallel")
def ddp(rank: int, world: int) -> Training:
    return _averaging(nn.parallel.DistributedDataParallel(whole()), rank, are_replicas=True)


@regime("DistributedDataParallel, micro-batches under no_sync")
def ddp_accumulated(rank: int, world: int) -> Training:
    model = nn.parallel.DistributedDataParallel(whole(), gradient_as_bucket_view=True)

    def backward(step: int) -> None:
        tokens = batch(step, [rank])
        for rows, context in zip(tokens.chunk(2), (model.no_sync, contextlib.nullcontext), strict=True):
            with context():
                (loss_of(model(rows), rows) / 2).backward()

    return Training(model, backward, are_replicas=True)


@regime("ZeroRedundancyOptimizer")
def zero_redundancy(rank: int, world: int) -> Training:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    def make(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return ZeroRedundancyOptimizer(parameters, optimizer_class=torch.optim.SGD, lr=LEARNING_RATE)

    model = nn.parallel.DistributedDataParallel(whole())
    return _averaging(model, rank, make_optimizer=make, are_replicas=True)


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
    return _averaging(_fsdp2(whole(), _mesh(world)), rank)


@regime("FSDP2, hybrid (2 x 2)", 4)
def hsdp(rank: int, world: int) -> Training:
    return _averaging(_fsdp2(whole(), _mesh(2, 2)), rank)


@regime("FSDP1")
def fsdp1(rank: int, world: int) -> Training:
    from torch.distributed.fsdp import FullyShardedDataParallel

    model = FullyShardedDataParallel(whole().float(), use_orig_params=True, device_id=torch.device("cpu"))
    return _averaging(model, rank, clip=lambda: model.clip_grad_norm_(CLIP))


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
    return _together(_tensor_parallel(whole(), _mesh(world)), world)


@regime("tensor parallel, embedding and head tied")
def tensor_parallel_tied(rank: int, world: int) -> Training:
    model = _tensor_parallel(whole(tied=True), _mesh(world))
    model.head.weight = model.embedding.weight
    return _together(model, world, tied=True)


@regime("tensor and sequence parallel")
def sequence_parallel(rank: int, world: int) -> Training:
    return _together(_tensor_parallel(whole(), _mesh(world), sequence=True), world)


@regime("FSDP2 and tensor parallel (2 x 2)", 4)
def fsdp2_tensor_parallel(rank: int, world: int) -> Training:
    mesh = _mesh(2, 2)
    model = _fsdp2(_tensor_parallel(whole(), mesh["inner"], sequence=True), mesh["outer"])

    def backward(step: int) -> None:
        row = rank // 2  # the ranks of a row share the batches of two ranks
        tokens = batch(step, [2 * row, 2 * row + 1])
        loss_of(model(tokens), tokens).backward()

    return Training(model, backward)


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


@regime("gradients averaged by hand")
def by_hand(rank: int, world: int) -> Training:
    training = _averaging(model := whole(), rank, are_replicas=True)
    own_backward = training.backward

    def backward(step: int) -> None:
        own_backward(step)
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= world

    training.backward = backward
    return training


@regime("DeepSpeed, ZeRO 0")
def deepspeed(rank: int, world: int) -> Training:
    os.environ |= {"DS_ACCELERATOR": "cpu", "LOCAL_SIZE": str(world)}
    import deepspeed

    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # would need a compiler
    deepspeed.init_distributed(dist_backend="gloo")
    model = whole().float()
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    config = {"train_micro_batch_size_per_gpu": BATCH, "zero_allow_untested_optimizer": True}
    return _averaging(deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0], rank)


@regime("Megatron-core, DistributedDataParallel")
def megatron(rank: int, world: int) -> Training:
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.transformer import TransformerConfig

    torch.cuda.current_device = lambda: torch.device("cpu")
    parallel_state.initialize_model_parallel()
    config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1, use_cpu_initialization=True)
    model = DistributedDataParallel(config, DistributedDataParallelConfig(), whole(), disable_bucketing=True)
    return _averaging(model, rank)


def reference(world: int, *, tied: bool, clip: float = CLIP) -> dict[str, Any]:
    """Train in one process on the batches of all ranks. Returns norms [S, P] before and after clipping, and names."""
    model, names = (one := whole(tied=tied)), [name for name, _ in one.named_parameters()]
    parameters, left, received = list(model.parameters()), [], []
    for step in range(STEPS):
        model.zero_grad()
        tokens = batch(step, range(world))
        loss_of(model(tokens), tokens).backward()
        left.append([parameter.grad.norm().item() for parameter in parameters])
        nn.utils.clip_grad_norm_(parameters, clip)
        received.append([parameter.grad.norm().item() for parameter in parameters])
        torch.optim.SGD(parameters, lr=LEARNING_RATE).step()
    sizes = [parameter.numel() for parameter in parameters]
    return {"names": names, "left": np.array(left), "received": np.array(received), "sizes": sizes}


@contextlib.contextmanager
def _nan_in_backward(parameters: list[Any]) -> Iterator[None]:
    """Make this rank's part of the first gradient NaN, before an engine averages it if hooks see it then."""
    first = parameters[0]

    def spoil(parameter: Any) -> None:
        parameter.grad.mul_(torch.nan)

    if hasattr(first, "_local_tensor"):  # FSDP2 and tensor parallelism call only these hooks
        handle = first.register_post_accumulate_grad_hook(spoil)
    else:
        handle = first.register_hook(lambda gradient: gradient * torch.nan)
    yield
    handle.remove()
    gradients = [local(one.grad) for one in parameters if one.grad is not None]
    if all(one.isfinite().all() for one in gradients):  # FSDP1 calls no hook of the parameter
        spoil(next(one for one in parameters if one.grad is not None))


def _train(name: str, rank: int, world: int, *, poisoned: bool = False, **options: Any) -> tuple[Training, Any, Any]:
    """Train under a regime; with `poisoned` unclipped, with a NaN. Returns the training, the watcher and its sink.

    Without `options` of watch() the model is not watched, and the watcher is None.
    """
    training, sink = REGIMES[name][0](rank, world), MemorySink()
    make = training.make_optimizer or (lambda some: torch.optim.SGD(some, lr=LEARNING_RATE, foreach=False))
    optimizer = make(training.parameters)
    watcher = None
    if options:
        options |= {"metrics": [Ranks()]} if poisoned and training.are_replicas else {}
        watcher = wandb_gradwatch.watch(training.model, sinks=[sink], sample_every=1, **options)
    for step in range(STEPS):
        optimizer.zero_grad()
        is_bad = poisoned and rank == BAD_RANK and step + 1 == BAD_STEP
        with _nan_in_backward(training.parameters) if is_bad else contextlib.nullcontext():
            training.backward(step)
        if not poisoned:
            training.clip_all()
        optimizer.step()
    return training, watcher, sink


def measured(rank: int, world: int, *, name: str) -> dict[str, Any]:
    """Train without watch(), with it, and unclipped with a NaN on one rank; compare with `reference`."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("wandb_gradwatch").addHandler(handler)
    try:
        plain = [local(parameter) for parameter in _train(name, rank, world)[0].parameters]
    except ImportError as error:
        return {"outcome": f"not installed here: {error.name}"}
    try:
        training, watcher, sink = _train(name, rank, world, rules=[], log_every=2)
    except ValueError as error:
        return {"outcome": "refused", "said": [str(error)]}
    watcher.remove()
    snapshot, truth = sink.merged(), reference(world, tied=training.tied)
    if snapshot is None:
        return {"outcome": "nothing measured", "said": said}
    names = [name.split(".", 1)[1] if name.startswith("model") else name for name in snapshot.names]
    order, rows = [names.index(name) for name in truth["names"]], snapshot.steps - 1
    same = all(torch.equal(one, local(other)) for one, other in zip(plain, training.parameters, strict=True))
    _, bad_watcher, bad_sink = _train(name, rank, world, poisoned=True, log_every=STEPS)
    bad_watcher.flush()
    before_bad = bad_sink.merged().grad_norm[: BAD_STEP - 1, order]
    unclipped = reference(world, tied=training.tied, clip=math.inf)["left"][: BAD_STEP - 1]
    return {
        "outcome": "measured",
        "norm": max(_error(snapshot.grad_norm[:, order], truth["left"][rows]), _error(before_bad, unclipped)),
        "received": _error(snapshot.grad_norm_clipped[:, order], truth["received"][rows]),
        "elements": snapshot.num_elements[-1][order].astype(int).tolist() == truth["sizes"],
        "clip_ratio": float(snapshot.clip_ratio),
        "steps": snapshot.steps.tolist(),
        "untouched": same,
        "rank_of_nan": any(f"on rank {BAD_RANK}" in alert.text for alert in bad_sink.alerts),
        "said": said,
    }


def local(tensor: Any) -> Tensor:
    return getattr(tensor, "_local_tensor", tensor).detach().clone()


def _error(found: Any, truth: Any) -> float:
    """Return the largest relative difference; infinite if a number is missing."""
    return float(np.nan_to_num(np.abs(found - truth) / truth, nan=np.inf).max())


def run(name: str) -> dict[str, Any]:
    """Run a regime in processes of its own. `ends` is whether every rank exits with status 0, without remove()."""
    world = REGIMES[name][1]
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "benchmarks.engines", name, "--folder", folder, "--rank"]
        environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
        quiet = subprocess.DEVNULL
        ranks = [
            subprocess.Popen([*command, str(rank)], env=environment, stdout=quiet, stderr=quiet)
            for rank in range(world)
        ]
        try:
            codes = [one.wait(TIME_LIMIT) for one in ranks]
        except subprocess.TimeoutExpired:
            codes = [-1]
        for one in ranks:
            one.kill()
        result = Path(folder) / "result.json"
        found = json.loads(result.read_text()) if result.exists() else {"outcome": "the training failed"}
    return found | {"ends": not any(codes)}


def _run_rank(name: str, rank: int, folder: str) -> None:
    world = REGIMES[name][1]
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=world)
    found = measured(rank, world, name=name)
    if rank == 0:
        Path(folder, "result.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def line(name: str, found: dict[str, Any]) -> str:
    """Return the regime's line of the table."""
    cells = [name, str(REGIMES[name][1])]
    if found["outcome"] != "measured":
        return f"| {' | '.join([*cells, found['outcome'], *[''] * 4, _said(found['ends'])])} |"
    exact = [f"{error:.1e}" if error > TOLERANCE else "right" for error in (found["norm"], found["received"])]
    exact[0] = exact[0] if found["elements"] else "elements counted wrongly"
    exact[1] = exact[1] if found["clip_ratio"] == 1 else f"clip_ratio {found['clip_ratio']:.2g}"
    steps = f"{len(found['steps'])} of {STEPS}"
    answers = [_said(found[key]) for key in ("rank_of_nan", "untouched", "ends")]
    return f"| {' | '.join([*cells, *exact, steps, *answers])} |"


def _said(is_true: bool) -> str:
    return "yes" if is_true else "**no**"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="regimes; without any, all")
    parser.add_argument("--write", action="store_true", help="write the table into docs/distributed.md")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank is not None:
        _run_rank(arguments.names[0], arguments.rank, arguments.folder)
        return
    head = ["engine or set-up", "ranks", "norm", "after clipping", "steps", "rank of a NaN", "untouched", "ends"]
    lines = [f"| {' | '.join(head)} |", f"|---|{'--:|' * (len(head) - 1)}"]
    for text in lines:
        print(text)
    for name in arguments.names or REGIMES:
        lines.append(line(name, run(name)))
        print(lines[-1], flush=True)
    if arguments.write:
        page = PAGE.read_text(encoding="utf-8")
        before, after = page.split(BEGIN)[0], page.split(END, 1)[1]
        PAGE.write_text(f"{before}{BEGIN}" + "\n".join(lines) + f"\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
