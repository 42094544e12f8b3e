"""Read the offline file of a W&B run with W&B's own reader (`wandb leet inspect`)."""

from __future__ import annotations

import json
import subprocess
import threading
from pathlib import Path
from typing import Any


def offline_file(run_or_directory: Any) -> Path:
    """Return the `.wandb` file of a run, or of the only offline run below a directory."""
    if isinstance(run_or_directory, Path):
        for _ in range(100):  # the script can end before wandb-core has created the file
            if paths := list(run_or_directory.rglob("run-*.wandb")):
                (path,) = paths
                return path
            threading.Event().wait(0.1)
        raise FileNotFoundError(f"no offline run below {run_or_directory}")
    return Path(run_or_directory.settings.sync_file)


def records(run_or_directory: Any, *, idle_timeout: str = "10s") -> list[dict[str, Any]]:
    """Return all records of a run that has ended, in order.

    Args:
        run_or_directory: a run, or a directory that holds one offline run.
        idle_timeout: how long to wait for the exit record, which a run that could not finish does not write.
    """
    from wandb.util import get_core_path

    path = offline_file(run_or_directory)
    # The command behind `wandb leet inspect --json --follow`, without the second that the CLI takes to import.
    # run.finish() can return before the file is complete: --follow reads until the exit record.
    command = [get_core_path(), "leet", "inspect", "--no-observability", "--json", "--follow"]
    command += ["--idle-timeout", idle_timeout, "--run-file", str(path), str(path.parent)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return [json.loads(line) for line in done.stdout.splitlines()]


def history(run_or_directory: Any) -> list[dict[str, Any]]:
    """Return the history rows of an offline run that has ended. Nested keys are joined by "."; NaN is a string."""
    return [record["history"]["item"] for record in records(run_or_directory) if record["type"] == "history"]
