"""Run a function on several ranks, as real processes that talk gloo over loopback, within a hard time limit."""

from __future__ import annotations

import contextlib
import pickle
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from processes import inherited

_CHILD = """
import pickle, sys, traceback
sys.path[:0] = {path!r}
import torch, torch.distributed as dist
torch.set_num_threads(1)
rank, world, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
dist.init_process_group("gloo", init_method="file://" + folder + "/meet", rank=rank, world_size=world)
import {module} as module
try:
    for number, (function, arguments) in enumerate(pickle.load(open(folder + "/calls", "rb"))):
        result = getattr(module, function)(rank, world, **arguments)
        with open(f"{{folder}}/result{{number}}.{{rank}}", "wb") as file:
            pickle.dump(result, file)
finally:
    if dist.is_initialized():
        dist.destroy_process_group()
"""

Call = tuple[str, dict[str, Any]]


def run(module: str, calls: list[Call], world: int, *, timeout: float = 90) -> list[list[Any]]:
    """Call `module.function(rank, world, **arguments)` on every rank, one call after the other.

    Returns:
        For each call what each rank returned. One start of the processes serves all calls: it takes most of the time.
    """
    root = Path(__file__).parent
    code = _CHILD.format(path=[str(root), str(root.parent)], module=module)
    environment = inherited() | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as open_files:
        Path(f"{folder}/calls").write_bytes(pickle.dumps(calls))
        outputs = [open_files.enter_context(open(f"{folder}/output{rank}", "w+")) for rank in range(world)]
        children = [
            subprocess.Popen(
                [sys.executable, "-c", code, str(rank), str(world), folder],
                env=environment,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
            for rank, output in enumerate(outputs)
        ]
        try:
            for child in children:
                child.wait(timeout)
            ended = True
        except subprocess.TimeoutExpired:
            ended = False
        finally:
            for child in children:
                child.kill()
                child.wait()
        said = []
        for rank, (child, output) in enumerate(zip(children, outputs, strict=True)):
            output.seek(0)
            said.append(f"rank {rank}, exit status {child.returncode}:\n{output.read()}")
        assert ended, f"the ranks did not finish within {timeout} s\n" + "\n".join(said)
        assert not any(child.returncode for child in children), "\n".join(said)
        return [
            [pickle.loads(Path(f"{folder}/result{number}.{rank}").read_bytes()) for rank in range(world)]
            for number in range(len(calls))
        ]
