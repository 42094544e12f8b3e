"""The programs that ranks run in test_rank_traffic.py: what a watched training asks of collectives and of the store."""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from gradients import watch
from rank_programs import batch_of, build, loss_of
from torch import nn
from torch.distributed.distributed_c10d import PrefixStore
from torch.nn.parallel import DistributedDataParallel

REQUESTS = ("get", "set", "add", "check", "wait", "multi_get", "multi_set", "delete_key")


@contextlib.contextmanager
def counted_requests() -> Iterator[Counter[str]]:
    """Count the keys that this process asks the store for, by the thread."""
    counts: Counter[str] = Counter()

    def counting(name: str, original: Any) -> Any:
        def request(self: Any, *arguments: Any) -> Any:
            thread = threading.current_thread()
            num_keys = len(arguments[0]) if isinstance(arguments[0], list) else 1
            counts["training" if thread is threading.main_thread() else thread.name] += num_keys
            return original(self, *arguments)

        return request

    with contextlib.ExitStack() as stack:
        for name in REQUESTS:
            original = getattr(PrefixStore, name)
            stack.enter_context(mock.patch.object(PrefixStore, name, counting(name, original), create=True))
        yield counts


def collectives() -> int:
    return sum(group._get_sequence_number_for_group() for group in dist.distributed_c10d._world.pg_map)


def trained(rank: int, world: int, *, kind: str, is_watched: bool, steps: int) -> dict[str, Any]:
    """Train; return the number of collectives, and of keys that the training asked the store for, by step."""
    model = build()
    if kind == "stages":
        model = nn.Sequential(*list(model)[:3]) if rank % 2 else nn.Sequential(*list(model)[:1], nn.Linear(5, 3))
    trained_model = DistributedDataParallel(model) if kind == "ddp" else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    watcher = watch(trained_model, sample_every=None, log_every=2)[0] if is_watched else None
    dist.barrier()
    before, of_each = collectives(), []
    with counted_requests() as counts:
        for step in range(steps):
            optimizer.zero_grad()
            loss_of(trained_model, batch_of(rank, step)).backward()
            optimizer.step()
            of_each.append(counts.pop("training", 0))
        num = collectives() - before
    dist.barrier()
    if watcher is not None:
        watcher.remove()
    dist.barrier()
    return {"collectives": num, "requests": of_each}
