"""Fully sharded training (FSDP2): each rank measures its shards, and the statistics are merged once per flush.

    torchrun --nproc-per-node 2 examples/fsdp2.py

The norms are those of the whole parameters, as a run on a single device would show them.
"""

import os

import torch
import torch.distributed as dist
import wandb
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import wandb_gradwatch

os.environ.setdefault("WANDB_MODE", "offline")


def main() -> None:
    # NCCL needs a GPU for each rank.
    device_type = "cuda" if torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]) else "cpu"
    dist.init_process_group("nccl" if device_type == "cuda" else "gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if device_type == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    device = torch.device(device_type)
    mesh = init_device_mesh(device_type, (world_size,))

    torch.manual_seed(0)  # the same model and the same teacher on every rank
    teacher = nn.Linear(32, 8).to(device)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 8)).to(device)
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(rank)  # different data on each rank

    if rank == 0:
        wandb.init(project="gradwatch-examples", name="fsdp2")
    # Every rank calls watch(); ranks other than 0 need no W&B run.
    watcher = wandb_gradwatch.watch(model, sample_every=1, log_every=10)

    for _ in range(int(os.environ.get("STEPS", "100"))):
        x = torch.randn(64, 32, device=device)
        loss = nn.functional.mse_loss(model(x), teacher(x).detach())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if rank == 0:
            wandb.log({"loss": loss.item()})

    watcher.remove()  # the last flush communicates between the ranks: call it on every rank
    if rank == 0:
        print(f"final loss {loss.item():.5f}")
        wandb.finish()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
