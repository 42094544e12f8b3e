"""The programs that ranks run in test_one_rank_alone.py: one rank does alone what all ranks should do."""

from __future__ import annotations

import atexit
import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from gradients import watch
from rank_programs import LEARNING_RATE, batch_of, build, collect_warnings, loss_of, shard, split
from torch import nn

from wandb_gradwatch._pipeline import rank_merger
from wandb_gradwatch._runtime import rank_session
from wandb_gradwatch._runtime.steps import STEP_HOOKS


@contextlib.contextmanager
def impatient() -> Iterator[None]:
    """Wait for no other rank, so that no result depends on a time."""
    limits = dict.fromkeys(("FLUSH_SECONDS", "LAST_SECONDS"), 0.0)
    with mock.patch.multiple(rank_merger, **limits):
        yield


def train(model: nn.Module, rank: int, first: int, last: int) -> None:
    """Train from one step, counted from 1, to another."""
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    for step in range(first - 1, last):
        optimizer.zero_grad()
        loss_of(model, batch_of(rank, step)).backward()
        optimizer.step()


def rows(watcher: Any, sink: Any, said: list[str]) -> dict[str, Any]:
    merged = sink.merged() if sink.snapshots else None
    return {
        "windows": [snapshot.steps.tolist() for snapshot in sink.snapshots],
        "norms": {} if merged is None else dict(zip(merged.steps.tolist(), merged.total_grad_norm, strict=True)),
        "latest": None if watcher.latest is None else watcher.latest.steps.tolist(),
        "said": said,
    }


def flush(rank: int, world: int, *, alone: int) -> dict[str, Any]:
    """Flush on one rank in the middle of a window, and remove on all."""
    said, model = collect_warnings(), shard(build(), [world])
    watcher, sink = watch(model, rules=None, log_every=5)
    train(model, rank, 1, 7)
    if rank == alone:
        with impatient():
            watcher.flush()
    train(model, rank, 8, 13)
    watcher.remove()
    return rows(watcher, sink, said)


def end(rank: int, world: int, *, alone: int, how: str, **cadence: Any) -> dict[str, Any]:
    """End on one rank in the middle of a window, while the others go on."""
    said, model = collect_warnings(), shard(build(), [world])
    watcher, sink = watch(model, rules=None, **({"log_every": 5} | cadence))
    train(model, rank, 1, 5)
    watcher.flush()
    train(model, rank, 6, 7)
    if rank == alone:
        with impatient():
            if how == "remove":
                watcher.remove()
            elif how == "exception":
                with contextlib.suppress(ZeroDivisionError), watcher:
                    raise ZeroDivisionError
            elif how == "script":
                watcher._script_ends()
    train(model, rank, 8, 40)
    watcher.remove()
    return rows(watcher, sink, said)


def remove_guard(rank: int, world: int, *, alone: int) -> dict[str, Any]:
    """Remove a guard on one rank, and at last on all. The gradients of step 9 are huge on all ranks."""
    said, model = collect_warnings(), shard(build(), [world])
    watcher, _ = watch(model, log_every=5, guard="skip")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
    num_listeners = []
    for step in range(1, 16):
        if (step == 8 and rank == alone) or step == 14:
            with impatient():
                watcher.remove()
        optimizer.zero_grad()
        (loss_of(model, batch_of(rank, step)) * (1e12 if step == 9 else 1)).backward()
        optimizer.step()
        own = {watcher._sampler._steps, watcher._parts.guard._voter}
        num_listeners.append(len(own & {*STEP_HOOKS._listeners}))
    return {"said": said, "num_listeners": num_listeners, "first": float(next(model.parameters()).full_tensor()[0, 0])}


def watch_before(rank: int, world: int, *, is_alike: bool, stays: bool) -> dict[str, Any]:
    """Watch another model on rank 0 first, as for a search of the learning rate, or for an evaluation that `stays`."""
    another = build(5 if is_alike else 6)
    other = watch(another, log_every=1)[0] if rank == 0 else None
    if other is not None and not stays:
        train(another, rank, 1, 2)
        other.remove()
    said, model = collect_warnings(), shard(build(), [world])
    watcher, sink = watch(model, rules=None, log_every=5)
    train(model, rank, 1, 12)
    watcher.remove()
    if other is not None:
        other.remove()
    return rows(watcher, sink, said)


def load(rank: int, world: int, *, state_of: str) -> dict[str, Any]:
    """Load a state that was saved in the middle of a window: its own on every rank, rank 0's, or only on rank 0."""
    model = shard(build(), [world])
    watcher, _ = watch(model, rules=None, log_every=5)
    train(model, rank, 1, 7)
    state = watcher.state_dict()
    watcher.remove()
    states = [state]
    if state_of == "rank 0":
        dist.broadcast_object_list(states, 0)
    said = collect_warnings()
    watcher, sink = watch(model, rules=None, log_every=5)
    if state_of != "rank 0 alone" or rank == 0:
        watcher.load_state_dict(states[0])
    train(model, rank, 8, 30)
    watcher.remove()
    return rows(watcher, sink, said)


def restart(rank: int, world: int) -> dict[str, Any]:
    """Die in the middle of a training, with two watchers on rank 0, and train again with the same store."""
    died = shard(build(), [world])
    watchers = [watch(died, rules=None, log_every=3)[0]]
    if rank == 0:
        watchers.append(watch(build(), rules=None)[0])
    train(died, rank, 1, 7)
    for watcher in watchers:
        atexit.unregister(watcher._script_ends)
        watcher._sampler.stop()
        watcher._pipeline.close()  # its thread
    rank_session._LIVE.clear()  # a new process knows nothing of them
    said, model = collect_warnings(), shard(build(), [world])
    watcher, sink = watch(model, rules=None, log_every=3)
    train(model, rank, 1, 8)
    watcher.remove()
    return rows(watcher, sink, said)


def destroy_first(rank: int, world: int) -> dict[str, Any]:
    """Destroy the default group before the last window ends. The last layer is replicated, the others are split."""
    said, model = collect_warnings(), split(build(width=6), world)
    watcher, sink = watch(model, rules=None, log_every=5)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, foreach=False)
    for step in range(7):
        optimizer.zero_grad()
        loss_of(model, batch_of(0, step)).backward()  # the same batch on every rank
        optimizer.step()
    dist.barrier()
    dist.destroy_process_group()
    watcher.remove()
    return rows(watcher, sink, said)
