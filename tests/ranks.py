"""Run a function on several ranks: real processes that communicate with gloo over loopback, with a time limit."""

from __future__ import annotations

import importlib
import pickle
import tempfile
from pathlib import Path
from typing import Any

from processes import forked

Call = tuple[str, dict[str, Any]]


def run(module: str, calls: list[Call], world: int, *, timeout: float = 600, patient: bool = True) -> list[list[Any]]:
    """Call `module.function(rank, world, **arguments)` on every rank, one call after the other in the same processes.

    `patient`: ranks wait long for each other at the end of a window; False: as short as they do for users.

    Returns:
        [calls][ranks]: what each call returned on each rank.
    """
    with tempfile.TemporaryDirectory() as folder:
        ended = forked(
            _rank,
            *((rank, world, folder, module, calls, patient) for rank in range(world)),
            timeout=timeout,
            GLOO_SOCKET_IFNAME="lo",
        )
        said = [
            f"rank {rank}, exit status {one.returncode}:\n{one.stdout}{one.stderr}" for rank, one in enumerate(ended)
        ]
        assert not any(one.returncode for one in ended), f"the ranks failed, or not within {timeout} s\n" + "\n".join(
            said
        )
        of_ranks = [pickle.loads(Path(f"{folder}/results.{rank}").read_bytes()) for rank in range(world)]
        return [[pickle.loads(result) for result in results] for results in zip(*of_ranks, strict=True)]


def _rank(rank: int, world: int, folder: str, module: str, calls: list[Call], patient: bool) -> None:
    import torch
    import torch.distributed as dist

    from wandb_gradwatch._pipeline import rank_merger

    if patient:  # on a busy machine, ranks that do the same may be seconds apart
        rank_merger.FLUSH_SECONDS = rank_merger.LAST_SECONDS = rank_merger.END_SECONDS = 60.0
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=world)
    try:
        programs = importlib.import_module(module)
        # Pickle each result at once, because the next program may still change the object.
        results = [pickle.dumps(getattr(programs, name)(rank, world, **arguments)) for name, arguments in calls]
        Path(f"{folder}/results.{rank}").write_bytes(pickle.dumps(results))
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
