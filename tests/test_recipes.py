"""The recipes of docs/frameworks.md, run on two ranks as they are written."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import socket
import sys
from pathlib import Path

import pytest
from processes import ROOT, forked

pytestmark = pytest.mark.distributed

_TEXT = (ROOT / "docs/frameworks.md").read_text("utf-8").partition("## Recipes")[2]
RECIPES = dict(re.findall(r"^\*\*([\w-]+)\*\*.*?```python\n(.*?)```", _TEXT, re.MULTILINE | re.DOTALL))
NEEDS = {"torchrun": "torch", "Accelerate": "accelerate", "DeepSpeed": "deepspeed", "Megatron-core": "megatron"}


def run(name: str, rank: int, port: int, folder: str) -> None:
    """Run a recipe as one of two ranks, and write what it has measured."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "ACCELERATE_USE_CPU": "true"}
    os.environ |= {"DS_ACCELERATOR": "cpu", "LOCAL_SIZE": "2", "WANDB_DIR": folder, "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    import torch

    from wandb_gradwatch._pipeline import rank_merger

    rank_merger.FLUSH_SECONDS = rank_merger.LAST_SECONDS = rank_merger.END_SECONDS = 60.0  # the machine may be busy
    context = contextlib.nullcontext()
    if name == "DeepSpeed":
        import deepspeed  # noqa: F401

        sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # it would need a compiler
    if name == "Megatron-core":
        from benchmarks.regimes.of_megatron import OnCpu

        torch.cuda.current_device = lambda: torch.device("cpu")
        context = OnCpu()
    names: dict = {}
    with context:
        exec(compile(RECIPES[name], f"{name} of docs/frameworks.md", "exec"), names)
    snapshot = names["watcher"].latest
    found = {"step": names["watcher"].step, "norms": snapshot.total_grad_norm.tolist(), "names": list(snapshot.names)}
    Path(folder, f"found.{rank}").write_text(json.dumps(found | {"loss": "gradwatch/loss" in snapshot.metrics}))


def test_there_is_a_recipe_for_each():
    assert RECIPES.keys() == NEEDS.keys()


@pytest.mark.slow
@pytest.mark.parametrize("name", NEEDS)
def test_a_recipe_measures_every_layer(name, tmp_path):
    if importlib.util.find_spec(NEEDS[name]) is None:
        pytest.skip(f"{NEEDS[name]} is not installed; .ci/run installs it apart")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ended = forked(run, *((name, rank, port, str(tmp_path)) for rank in range(2)), timeout=300, GLOO_SOCKET_IFNAME="lo")
    assert not any(one.returncode for one in ended), "\n".join(one.stdout + one.stderr for one in ended)
    for rank in range(2):
        found = json.loads((tmp_path / f"found.{rank}").read_text())
        assert found["step"] == 100
        assert found["names"] == ["weight", "bias"]
        assert found["loss"]
        assert found["norms"]
        assert all(norm > 0 for norm in found["norms"])
