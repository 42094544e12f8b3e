"""Lightning on two processes, DDP and FSDP2: statistics of the whole batch, equal on both ranks, logged once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from processes import launch

pytest.importorskip("lightning.pytorch")

WORKER = """
import json, os, sys
from datetime import timedelta
import torch
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.strategies import DDPStrategy
from lightning_programs import Notes, Regression, batches, trainer_of
from wandb_gradwatch.integrations.lightning import GradWatchCallback

rank = int(os.environ["LOCAL_RANK"])

data = batches(8)  # rank 0 takes the even ones, rank 1 the odd ones
module, notes = Regression(), Notes()
stopping = EarlyStopping("train_epoch/grad_norm", patience=99)  # raises on a rank that does not know the number
trainer = trainer_of(
    # Compared bit for bit: not by loops that one rank has compiled earlier than the other.
    [GradWatchCallback(sample_every=1, per_layer=True, backend="cpu"), stopping],
    notes=notes, max_epochs=2, devices=2, gradient_clip_val=0.05,
    strategy=DDPStrategy(process_group_backend="gloo", timeout=timedelta(seconds=300)), use_distributed_sampler=False,
)
trainer.fit(module, torch.utils.data.DataLoader(data[rank::2], batch_size=None))
json.dump(
    {
        "calls": notes.calls,
        "norm": float(trainer.callback_metrics["train_epoch/grad_norm"]),
        "gradients": [[g.tolist() for g in look] for look in module.expected.gradients],
        "best": float(stopping.best_score),
    },
    open(os.path.join(sys.argv[1], f"{rank}.json"), "w"),
)
"""

SHARDED = """
import json, os, sys
from datetime import timedelta
import torch
from torch.distributed.fsdp import fully_shard
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning_programs import Notes, Regression, batches, pl, trainer_of
from test_lightning_resume import ResumableData
from wandb_gradwatch.integrations.lightning import GradWatchCallback

rank, folder = int(os.environ["LOCAL_RANK"]), sys.argv[1]
data = batches(8)  # rank 0 takes the even ones, rank 1 the odd ones


class Sharded(Regression):
    def configure_model(self):
        mesh = self.device_mesh["data_parallel"]
        for part in (self.net[0], self.net[2], self.net):
            fully_shard(part, mesh=mesh)


class Kill(pl.Callback):
    def on_train_batch_end(self, trainer, *_):
        if trainer.global_step == 6:  # the middle of the second epoch
            trainer.save_checkpoint(folder + "/last.ckpt")
            raise KeyError("killed")


def fit(path, *more):
    module, notes = Sharded(), Notes()
    strategy = ModelParallelStrategy(
        data_parallel_size=2, tensor_parallel_size=1, process_group_backend="gloo", timeout=timedelta(seconds=300)
    )
    trainer = trainer_of(
        [GradWatchCallback(sample_every=1, log_every_n_steps=1, backend="cpu"), *more],
        notes=notes, max_epochs=2, devices=2, strategy=strategy, gradient_clip_val=0.05, use_distributed_sampler=False,
    )
    try:
        trainer.fit(module, ResumableData(data[rank::2]), ckpt_path=path)
    except KeyError:
        pass
    assert type(next(module.parameters())).__name__ == "DTensor"
    return {"calls": notes.calls, "gradients": [[g.tolist() for g in look] for look in module.expected.gradients]}


through, killed = fit(None), fit(None, Kill())
resumed = fit(folder + "/last.ckpt")
json.dump({"through": through, "killed": killed, "resumed": resumed}, open(os.path.join(folder, f"{rank}.json"), "w"))
"""


def averaged(of_ranks: list[list[list[Any]]]) -> list[float]:
    """Return the norms of the mean of the ranks' gradients, by step."""
    return [
        float(
            torch.cat([((torch.tensor(a) + torch.tensor(b)) / 2).flatten() for a, b in zip(*looks, strict=True)]).norm()
        )
        for looks in zip(*of_ranks, strict=True)
    ]


def series(calls: list[Any], key: str) -> list[tuple[int, float]]:
    return [(step, metrics[key]) for step, metrics in calls if key in metrics]


@pytest.mark.distributed
@pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no torch.distributed")
def test_fully_sharded_ranks_log_the_whole_norm_also_after_a_resume(tmp_path: Path) -> None:
    """FSDP2 through ModelParallelStrategy, because FSDPStrategy needs a GPU."""
    (first, second), _ = launch(SHARDED, tmp_path)
    norms = averaged([first["through"]["gradients"], second["through"]["gradients"]])
    assert len(norms) == 8
    means = [sum(norms[:4]) / 4, sum(norms[4:]) / 4]
    logged = first["through"]["calls"]
    steps = series(logged, "train/grad_norm")
    assert steps == [(step, pytest.approx(norm, rel=1e-5)) for step, norm in enumerate(norms)]
    assert series(logged, "train_epoch/grad_norm") == [(3, pytest.approx(means[0])), (7, pytest.approx(means[1]))]
    # The killed and the resumed training together log what the uninterrupted one logs.
    before, after = first["killed"]["calls"], first["resumed"]["calls"]
    assert series(before, "train/grad_norm") == steps[:6]
    assert series(after, "train/grad_norm") == steps[6:]
    assert series(after, "train_epoch/grad_norm") == [(7, pytest.approx(means[1]))]
    assert not [key for _, metrics in second["through"]["calls"] for key in metrics if "grad" in key]


@pytest.mark.distributed
@pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no torch.distributed")
def test_two_ranks_log_the_averaged_gradient_once(tmp_path: Path) -> None:
    (first, second), said = launch(WORKER, tmp_path)

    # DDP averages: the gradient of a step is the mean of the ranks' own, as float64 computes each.
    norms = averaged([first["gradients"], second["gradients"]])
    assert len(norms) == 8  # four steps in each of two epochs
    logged = [(step, metrics["train/grad_norm"]) for step, metrics in first["calls"] if "train/grad_norm" in metrics]
    assert logged == [(step, pytest.approx(norm, rel=1e-5)) for step, norm in enumerate(norms)]
    means = [sum(norms[:4]) / 4, sum(norms[4:]) / 4]
    of_epochs = [
        metrics["train_epoch/grad_norm"] for _, metrics in first["calls"] if "train_epoch/grad_norm" in metrics
    ]
    assert of_epochs == pytest.approx(means, rel=1e-5)
    assert not [key for _, metrics in second["calls"] for key in metrics if "grad" in key]
    # Every rank has the metrics, so that all decide alike; only rank 0 has loggers.
    assert first["norm"] == second["norm"] == pytest.approx(means[1], rel=1e-5)
    assert first["best"] == second["best"] == pytest.approx(min(means), rel=1e-5)
    assert "sync_dist" not in said
