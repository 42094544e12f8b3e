"""FSDP2 inside torch.distributed.pipelining reduces the gradients after the last micro-batch, outside of a backward."""

from __future__ import annotations

from pathlib import Path

import pytest
from processes import launch

WORKER = """
import json, sys
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

import wandb_gradwatch
from wandb_gradwatch import MemorySink

dist.init_process_group("gloo")
rank = dist.get_rank()
mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "pp"))


def train(*, watched, clips):
    torch.manual_seed(rank)
    model = nn.Sequential()
    model.add_module(f"stage{rank}", nn.Linear(4, 4))
    model.add_module("tanh", nn.Tanh())
    fully_shard(model, mesh=mesh["dp"])
    stage = PipelineStage(model, rank, 2, torch.device("cpu"), group=mesh["pp"].get_group())
    schedule = ScheduleGPipe(stage, n_microbatches=2, loss_fn=nn.functional.mse_loss)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sink, norms = MemorySink(), []
    if watched:
        watcher = wandb_gradwatch.watch(model, sinks=[sink], sample_every=1, log_every=1)
    for step in range(3):
        optimizer.zero_grad()
        if rank == 0:
            schedule.step(torch.full((4, 4), 1.0 + step))
        else:
            schedule.step(target=torch.zeros(4, 4))
        grads = {name: p.grad.full_tensor().double() for name, p in model.named_parameters()}
        norms.append({name: float(torch.linalg.vector_norm(grad)) for name, grad in grads.items()})
        if clips:
            nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        optimizer.step()
    found = {}
    if watched:
        watcher.remove()
        snapshot = sink.merged()
        found = {name: snapshot.grad_norm[:, at].tolist() for at, name in enumerate(snapshot.names)}
        found["steps"] = snapshot.steps.tolist()
    return norms, found, [p.detach().full_tensor().tolist() for p in model.parameters()]


results = []
for clips in (False, True):
    _, _, plain = train(watched=False, clips=clips)
    norms, found, watched = train(watched=True, clips=clips)
    results.append([norms, found, plain == watched])
with open(f"{sys.argv[1]}/{rank}.json", "w") as file:
    json.dump(results, file)
dist.destroy_process_group()
"""


@pytest.mark.distributed
def test_gradients_that_arrive_outside_of_a_backward_are_measured_at_the_step(tmp_path: Path) -> None:
    (first, second), stderr = launch(WORKER, tmp_path)
    assert "Traceback" not in stderr
    for (norms, found, is_untouched), (others_norms, _, others_is_untouched) in zip(first, second, strict=True):
        assert is_untouched
        assert others_is_untouched
        # Rank 0 gets the rows of both stages. Expected are the norms of `.grad` after the schedule, before clipping.
        expected = {
            name: [of_step[name] for of_step in of_steps] for of_steps in (norms, others_norms) for name in of_steps[0]
        }
        assert found.pop("steps") == [1, 2, 3]
        assert found == {name: pytest.approx(values, rel=1e-5) for name, values in expected.items()}
