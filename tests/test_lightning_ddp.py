"""Lightning on two processes: the numbers of the whole batch, equal on both ranks, logged once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from processes import inherited

pytest.importorskip("lightning.pytorch")

WORKER = """
import json, os, sys
from datetime import timedelta
import torch
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.strategies import DDPStrategy
from test_lightning import Notes, Regression, batches, trainer_of
from wandb_gradwatch.integrations.lightning import GradWatchCallback

rank = int(os.environ["LOCAL_RANK"])

data = batches(8)  # rank 0 takes the even ones, rank 1 the odd ones
module, notes = Regression(), Notes()
stopping = EarlyStopping("train_epoch/grad_norm", patience=99)  # raises on a rank that does not know the number
trainer = trainer_of(
    [GradWatchCallback(per_layer=True), stopping], notes=notes, max_epochs=2, devices=2, gradient_clip_val=0.05,
    strategy=DDPStrategy(process_group_backend="gloo", timeout=timedelta(seconds=30)), use_distributed_sampler=False,
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


@pytest.mark.distributed
@pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no torch.distributed")
def test_two_ranks_log_the_averaged_gradient_once(tmp_path: Path) -> None:
    worker = tmp_path / "worker.py"
    worker.write_text(WORKER)
    here = Path(__file__).parent
    environment = {**inherited(), "PYTHONPATH": f"{here.parent}{os.pathsep}{here}", "OMP_NUM_THREADS": "1"}
    # torchrun gives each process its rank, and ends both when one fails.
    launched = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", worker, tmp_path],
        env=environment, capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert launched.returncode == 0, launched.stderr[-4000:]
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1))

    # DDP averages: the gradient of a step is the mean of the ranks' own, as float64 computes each.
    norms = [
        float(
            torch.cat([((torch.tensor(a) + torch.tensor(b)) / 2).flatten() for a, b in zip(*looks, strict=True)]).norm()
        )
        for looks in zip(first["gradients"], second["gradients"], strict=True)
    ]
    assert len(norms) == 8  # four steps in each of two epochs
    logged = [(step, metrics["train/grad_norm"]) for step, metrics in first["calls"] if "train/grad_norm" in metrics]
    assert logged == [(step, pytest.approx(norm, rel=1e-5)) for step, norm in enumerate(norms)]
    means = [sum(norms[:4]) / 4, sum(norms[4:]) / 4]
    of_epochs = [
        metrics["train_epoch/grad_norm"] for _, metrics in first["calls"] if "train_epoch/grad_norm" in metrics
    ]
    assert of_epochs == pytest.approx(means, rel=1e-5)
    assert not [key for _, metrics in second["calls"] for key in metrics if "grad" in key]
    # Every rank knows the numbers, so that each decides alike; loggers are those of rank 0.
    assert first["norm"] == second["norm"] == pytest.approx(means[1], rel=1e-5)
    assert first["best"] == second["best"] == pytest.approx(min(means), rel=1e-5)
    assert "sync_dist" not in launched.stderr
