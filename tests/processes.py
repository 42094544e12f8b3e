"""Scripts in processes of their own: what they inherit, and two ranks that torchrun starts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any


def inherited() -> dict[str, str]:
    """This process's environment, without the address of its wandb-core, which wandb.init() leaves in it.

    A script that found it would write its run there, and nothing would be left in its own folder.
    """
    return {name: value for name, value in os.environ.items() if name != "WANDB_SERVICE"}


def launch(worker: str, folder: Path) -> tuple[list[dict[str, Any]], str]:
    """What each of two ranks has written, and what they said."""
    program = folder / "worker.py"
    program.write_text(worker)
    here = Path(__file__).parent
    environment = {**inherited(), "PYTHONPATH": f"{here.parent}{os.pathsep}{here}", "OMP_NUM_THREADS": "1"}
    # torchrun gives each process its rank, and ends both when one fails.
    launched = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", program, folder],
        env=environment, capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert launched.returncode == 0, launched.stderr[-4000:]
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in (0, 1)], launched.stderr
