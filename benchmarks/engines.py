"""Train one small model under every engine and set-up that runs here, and compare what is measured with one process.

The reference trains in one process, in float64, on the batches of all ranks. Writes the table of docs/distributed.md.
DeepSpeed and Megatron-core are installed apart, without what they need on a GPU:

    DS_BUILD_OPS=0 pip install --no-deps deepspeed einops hjson msgpack ninja py-cpuinfo megatron-core

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
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

import wandb_gradwatch
from benchmarks.regimes import (
    BAD_RANK,
    BAD_STEP,
    LEARNING_RATE,
    REGIMES,
    STEPS,
    TOLERANCE,
    Training,
    Truth,
    of_deepspeed,
    of_megatron,
    of_torch,
)
from benchmarks.table import write_rows
from wandb_gradwatch import MemorySink
from wandb_gradwatch._measure.columns import NUM_BINS, bins_of
from wandb_gradwatch.metrics import Ranks

__all__ = ["REGIMES", "TOLERANCE", "measured", "of_deepspeed", "of_megatron", "of_torch"]

PAGE = Path(__file__).parent.parent / "docs/distributed.md"
BEGIN, END = "<!-- begin: python -m benchmarks.engines -->\n", "<!-- end -->\n"
VERBOSE = bool(os.environ.get("VERBOSE"))  # show what the ranks print
TIME_LIMIT = 300  # seconds for all ranks of a regime to end
HEAD = ("norm", "per layer", "after clipping", "steps", "histogram", "a NaN names", "untouched", "ends")


def _together() -> None:
    """Wait for all ranks: flush() and remove() wait half a second or more for others, and a busy machine is slower."""
    if dist.is_initialized():
        dist.barrier()


@contextlib.contextmanager
def _nan_in_backward(training: Training) -> Iterator[None]:
    """Make this rank's part of a gradient NaN, before an engine averages it if hooks see it then."""
    parameters: list[Any] = training.parameters
    first = parameters[training.bad]

    def spoil(parameter: Any) -> None:
        parameter.grad.mul_(torch.nan)

    if hasattr(first, "_local_tensor"):  # FSDP2 and tensor parallelism call only these hooks
        handle = first.register_post_accumulate_grad_hook(spoil)
    else:
        handle = first.register_hook(lambda gradient: gradient * torch.nan)
    yield
    handle.remove()
    gradients = [local(one.grad) for one in parameters if one.grad is not None]
    if gradients and all(one.isfinite().all() for one in gradients):  # FSDP1 calls no hook of the parameter
        training.bad = next(number for number, one in enumerate(parameters) if one.grad is not None)
        spoil(parameters[training.bad])


def _train(name: str, rank: int, world: int, *, poisoned: bool = False, **options: Any) -> tuple[Training, Any, Any]:
    """Train under a regime; with `poisoned` unclipped, with a NaN. Returns the training, the watcher and its sink.

    Without `options` of watch() the model is not watched, and the watcher is None.
    """
    training, sink = REGIMES[name][0](rank, world), MemorySink()
    optimizer = None
    if training.update is None:
        make = training.make_optimizer or (lambda some: torch.optim.SGD(some, lr=LEARNING_RATE, foreach=False))
        optimizer = make(training.parameters)
    watcher = None
    if options:
        options |= {"metrics": [Ranks()]} if poisoned and training.are_replicas else {}
        watcher = wandb_gradwatch.watch(training.model, sinks=[sink], sample_every=1, histogram_every=1, **options)
    for step in range(STEPS):
        if optimizer is not None:
            optimizer.zero_grad()
        is_bad = poisoned and rank == BAD_RANK and step + 1 == BAD_STEP
        with _nan_in_backward(training) if is_bad else contextlib.nullcontext():
            training.backward(step)
        if optimizer is None:
            training.update()
            continue
        if not poisoned:
            training.clip_all()
        optimizer.step()
        if training.after_step is not None:
            training.after_step(step)
    return training, watcher, sink


def measured(rank: int, world: int, *, name: str) -> dict[str, Any]:
    """Train without watch(), with it, and with a NaN on one rank; compare with the truth of one process."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("wandb_gradwatch").addHandler(handler)
    try:
        trial = REGIMES[name][0](rank, world)
    except ImportError as error:
        return {"outcome": f"not installed here: {error.name}"}
    except NotImplementedError:
        return {"outcome": "cannot run here: needs a GPU"}
    try:
        wandb_gradwatch.watch(trial.model, sinks=[MemorySink()]).remove()
    except ValueError as error:
        return {"outcome": "refused", "said": [str(error)]}
    plain = [local(parameter) for parameter in _train(name, rank, world)[0].parameters]
    training, watcher, sink = _train(name, rank, world, rules=[], log_every=2)
    _together()
    watcher.remove()
    snapshot = sink.merged()
    same = all(torch.equal(one, local(other)) for one, other in zip(plain, training.parameters, strict=True))
    if snapshot is None:
        return {"outcome": "nothing measured", "said": said}
    options: dict[str, Any] = {"tied": True} if training.tied else {}
    truth = training.truth(world, **options)
    names = [training.rename(name.split(".", 1)[1] if name.startswith("model") else name) for name in snapshot.names]
    order, rows = [names.index(name) for name in truth.names], snapshot.steps - 1
    left, received = Truth.norms(truth.left)[rows], Truth.norms(truth.received)[rows]
    bad, bad_watcher, bad_sink = _train(name, rank, world, poisoned=True, log_every=STEPS)
    for _ in range(2):  # the second one gets what came late to the first
        _together()
        bad_watcher.flush()
    before_bad = bad_sink.merged().grad_norm[: BAD_STEP - 1, order]
    clips_itself = training.update is not None
    as_left = truth if clips_itself else training.truth(world, clip=math.inf, **options)
    messages = [alert.text for alert in bad_sink.alerts]
    names_of_bad: list[Any] = [None] * world
    dist.all_gather_object(names_of_bad, bad.name_of_bad)
    return {
        "outcome": "measured",
        "precision": training.precision,
        "norm": _error(snapshot.total_grad_norm, np.sqrt(np.square(left).sum(axis=1))),
        "per layer": max(
            _error(snapshot.grad_norm[:, order], left), _error(before_bad, Truth.norms(as_left.left)[: BAD_STEP - 1])
        ),
        "after clipping": _error(snapshot.grad_norm_clipped[:, order], received),
        "elements": snapshot.num_elements[-1][order].astype(int).tolist() == [one.numel() for one in truth.left[0]],
        "clip_ratio": float(snapshot.clip_ratio),
        "steps": snapshot.steps.tolist(),
        "histogram": _histogram_error(snapshot, order, truth),
        "untouched": same,
        "rank of NaN": any(f"on rank {BAD_RANK}" in text for text in messages),
        "layer of NaN": any(names_of_bad[BAD_RANK] in text for text in messages),
        "skipped": bool(bad_sink.merged().skipped[BAD_STEP - 1]),
        "said": said,
        "alerts": messages,
    }


def local(tensor: Any) -> Tensor:
    return getattr(tensor, "ds_tensor", getattr(tensor, "_local_tensor", tensor)).detach().clone()


def _error(found: Any, truth: Any) -> float:
    """Return the largest relative difference; infinite if a number is missing."""
    return float(np.nan_to_num(np.abs(found - truth) / truth, nan=np.inf).max())


def _histogram_error(snapshot: Any, order: list[int], truth: Truth) -> float:
    """Return the share of elements in other bins than in one process; infinite if any is lost or counted twice.

    Rounding moves elements over the edges of bins: under lower precision some, otherwise next to none.
    """
    if snapshot.histogram is None:
        return math.inf
    num_moved = num_elements = 0
    for place, number in enumerate(order):
        values = [truth.left[step - 1][place].flatten().numpy() for step in snapshot.histogram_steps]
        expected = np.bincount(bins_of(np.concatenate(values)), minlength=NUM_BINS)
        counts = snapshot.histogram[number]
        if counts.sum() != expected.sum():
            return math.inf
        num_moved += int(np.abs(counts - expected).sum()) // 2
        num_elements += int(expected.sum())
    return num_moved / num_elements


def run(name: str) -> dict[str, Any]:
    """Run a regime in processes of its own. `ends` is whether every rank exits with status 0, without remove()."""
    world = REGIMES[name][1]
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "benchmarks.engines", name, "--folder", folder, "--rank"]
        environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
        quiet = None if VERBOSE else subprocess.DEVNULL
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
    try:
        found = measured(rank, world, name=name)
    except Exception:
        traceback.print_exc(file=sys.__stderr__)
        raise
    if rank == 0:
        Path(folder, "result.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def line(name: str, found: dict[str, Any]) -> str:
    """Return the regime's line of the table."""
    cells = [name, str(REGIMES[name][1])]
    if found["outcome"] != "measured":
        return f"| {' | '.join([*cells, found['outcome'], *[''] * (len(HEAD) - 2), _said(found['ends'])])} |"
    norm, per_layer, received = (_exactness(found[key], found["precision"]) for key in HEAD[:3])
    per_layer = per_layer if found["elements"] else "elements counted wrongly"
    received = received if found["clip_ratio"] == 1 else f"clip_ratio {found['clip_ratio']:.2g}"
    steps = f"{len(found['steps'])} of {STEPS}"
    most = 0.01 if found["precision"].endswith(("64", "32")) else 0.1
    histogram = "right" if found["histogram"] <= most else f"**{found['histogram']:.0%} of elements elsewhere**"
    named = [what for what in ("rank", "layer") if found[f"{what} of NaN"]]
    nothing = "nothing: loss scaling skips the step" if found["skipped"] else "**nothing**"
    answers = [" and ".join(named) or nothing, _said(found["untouched"]), _said(found["ends"])]
    return f"| {' | '.join([*cells, norm, per_layer, received, steps, histogram, *answers])} |"


def _exactness(error: float, precision: str) -> str:
    """Return "right" below 1e-6; in lower precision the error, up to the tolerance of that precision."""
    if error < TOLERANCE["float64"]:
        return "right"
    return f"{error:.0e} ({precision})" if error < TOLERANCE[precision] else f"**{error:.1e}**"


def _said(is_true: bool) -> str:
    return "yes" if is_true else "**no**"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="regimes; without any, all")
    parser.add_argument("--write", action="store_true", help="write the lines into docs/distributed.md")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank is not None:
        _run_rank(arguments.names[0], arguments.rank, arguments.folder)
        return
    head = ["engine or set-up", "ranks", *HEAD]
    lines = [f"| {' | '.join(head)} |", f"|---|{'--:|' * (len(head) - 1)}"]
    for text in lines:
        print(text)
    for name in arguments.names or sorted(REGIMES, key=lambda name: name.startswith(("DeepSpeed", "Megatron"))):
        lines.append(line(name, run(name)))
        print(lines[-1], flush=True)
    if arguments.write:
        write_rows(PAGE, lines, begin=BEGIN, end=END, keep=bool(arguments.names))


if __name__ == "__main__":
    main()
