"""Read the rows of an offline run's file with W&B's own reader."""

from __future__ import annotations

import json
import subprocess
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple


def history_rows(file: Path) -> list[dict[str, Any]]:
    """Return the history rows of an offline run that has ended, in order; nested keys are joined by "."."""
    from wandb.util import get_core_path

    command = [get_core_path(), "leet", "inspect", "--no-observability", "--json", "--follow", "--idle-timeout", "10s"]
    done = subprocess.run(
        [*command, "--run-file", str(file), str(file.parent)], capture_output=True, text=True, check=True
    )
    records = map(json.loads, done.stdout.splitlines())
    return [record["history"]["item"] for record in records if record["type"] == "history"]


class Tally(NamedTuple):
    """The numbers of expected, found, lost and duplicated rows."""

    expected: int
    found: int
    lost: int
    duplicated: int


def tally(expected: Sequence[Any], found: Sequence[Any]) -> Tally:
    """Compare what was logged with what arrived.

    >>> tally(expected=[5, 10, 15], found=[5, 5, 15])
    Tally(expected=3, found=3, lost=1, duplicated=1)
    """
    due, there = Counter(expected), Counter(found)
    return Tally(len(expected), len(found), (due - there).total(), (there - due).total())


def steps_of(rows: Sequence[dict[str, Any]]) -> list[int]:
    """Return the steps of the monitor's rows."""
    return [int(row["gradwatch/step"]) for row in rows if "gradwatch/grad_norm" in row]
