"""Data parallel training: every rank measures the averaged gradient, and rank 0 logs it to W&B.

    torchrun --nproc-per-node 2 examples/ddp.py

Uses nccl if CUDA is available, and otherwise gloo on CPUs.
"""

import os

import torch
import torch.distributed as dist
import wandb
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import wandb_gradwatch
from wandb_gradwatch.metrics import Ranks

os.environ.setdefault("WANDB_MODE", "offline")


def main() -> None:
    use_cuda = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])  # NCCL needs a GPU for each rank
    dist.init_process_group("nccl" if use_cuda else "gloo")
    rank = dist.get_rank()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if use_cuda else torch.device("cpu")

    torch.manual_seed(0)  # the same model and the same teacher on every rank
    teacher = nn.Linear(32, 8).to(device)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 8)).to(device)
    model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(rank)  # different data on each rank

    if rank == 0:  # as usual, only rank 0 has a W&B run
        wandb.init(project="gradwatch-examples", name="ddp")
    # Every rank calls watch(); ranks other than 0 need no W&B run.
    watcher = wandb_gradwatch.watch(model, sample_every=1, log_every=10, metrics=[Ranks()])

    for _ in range(int(os.environ.get("STEPS", "100"))):
        x = torch.randn(64, 32, device=device)
        loss = nn.functional.mse_loss(model(x), teacher(x).detach())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0:
            wandb.log({"loss": loss.item()})

    watcher.remove()  # the last flush communicates between the ranks: call it on every rank
    if rank == 0:
        slowest = watcher.latest.metrics["ranks/highest/seconds_rank"][-1]
        print(f"final loss {loss.item():.5f}; rank {slowest:.0f} was the slowest in the last step")
        wandb.finish()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
