"""Train, watched, with the installed torch and W&B against the loopback server. Needs no pytest.

    python tests/oldest_versions.py     # from an environment with the oldest versions that pyproject.toml allows

Covers the features that depend on internals of torch and W&B: hooks, accumulation, clipping, the loss scaler, a
compiled optimizer step, rows beside the user's own, histograms, and the end of the run.
"""

from __future__ import annotations

import os
import tempfile
from typing import Any

from loopback import LoopbackServer

STEPS, LOG_EVERY = 20, 5


def train(run: Any) -> None:
    import torch

    import wandb_gradwatch

    model = torch.nn.Linear(2, 1, bias=False)
    torch.nn.init.ones_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    wandb_gradwatch.watch(model, run=run, sample_every=1, log_every=LOG_EVERY)
    for number in range(STEPS):
        optimizer.zero_grad()
        for share in (0.25, 0.75):  # two micro-batches
            batch = torch.tensor([[30.0, 40.0]]) * share
            scaler.scale(model(batch).sum()).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 10.0)
        scaler.step(optimizer)
        scaler.update()
        run.log({"loss": float(number)}, step=number)


def watch_a_compiled_step() -> None:
    """Watch a compiled optimizer step: torch < 2.7 traces into hooks unless tracing is disabled for them."""
    import torch

    import wandb_gradwatch
    from wandb_gradwatch.sinks import MemorySink

    model = torch.nn.Linear(2, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    memory = MemorySink()

    @torch.compile(backend="eager")
    def update() -> None:
        optimizer.step()

    with wandb_gradwatch.watch(model, sinks=[memory], sample_every=1, log_every=1):
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.tensor([[3.0, 4.0]])).sum().backward()
            update()
    merged = memory.merged()
    assert merged is not None, "the monitor stopped at the compiled step"
    assert merged.total_grad_norm.round(5).tolist() == [5.0, 5.0, 5.0], merged.total_grad_norm


def check(server: LoopbackServer, run_id: str) -> None:
    rows = server.runs[run_id].history
    users = [(row["_step"], row["loss"]) for row in rows if "loss" in row]
    assert users == [(number, float(number)) for number in range(STEPS)], users
    ours = [row for row in rows if "gradwatch/grad_norm" in row]
    assert [row["gradwatch/step"] for row in ours] == [5, 10, 15, 20], [row["gradwatch/step"] for row in ours]
    for row in ours[:-1]:  # 30^2 + 40^2 = 50^2, clipped to 10
        assert abs(row["gradwatch/grad_norm"] - 50) < 1e-3, row["gradwatch/grad_norm"]
        assert abs(row["gradwatch/grad_norm_clipped"] - 10) < 1e-3, row["gradwatch/grad_norm_clipped"]
        assert row["gradwatch/grad_scale"] == 1024.0, row["gradwatch/grad_scale"]
    assert ours[0]["gradients/weight"]["_type"] == "histogram", ours[0]["gradients/weight"]  # with the first row
    assert not [key for key in server.runs[run_id].summary if key.startswith("gradients/")], "histograms in the summary"


def main() -> None:
    with LoopbackServer() as server, tempfile.TemporaryDirectory() as directory:
        os.environ |= server.environment() | {"WANDB_DIR": directory, "HOME": directory, "WANDB_SILENT": "true"}
        import numpy
        import torch
        import wandb

        run = wandb.init()
        train(run)
        run_id = run.id
        run.finish()
        check(server, run_id)
        watch_a_compiled_step()
        print(f"watches with torch {torch.__version__}, wandb {wandb.__version__}, numpy {numpy.__version__}")


if __name__ == "__main__":
    main()
