"""The command `diff`: where two runs part, in a few lines, with an exit status for scripts."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import click
import numpy as np

from .._analysis.formatting import listing, number
from .._output import as_json, pairs
from . import read
from .compare import Comparison, compare, differing_settings, sentence
from .history import RunHistory
from .payload import own_role
from .verdict import judge

ALIKE: Final = 0
DIFFERENT: Final = 1
UNUSABLE: Final = 2


def run_diff(first: Path, second: Path, *, json: bool) -> int:
    """Print where two runs part, and return the exit status: ALIKE, DIFFERENT or UNUSABLE."""
    try:
        runs = (read.read_run(first), read.read_run(second))
        found = compare(*runs)
    except ValueError as error:
        click.echo(f"Error: {error}", err=True)
        return UNUSABLE
    if json:
        as_json(_facts(found, runs))
    else:
        _say(found, runs)
    return ALIKE if found.alike else DIFFERENT


def _say(found: Comparison, runs: tuple[RunHistory, RunHistory]) -> None:
    click.echo(click.style(sentence(found) + ".", bold=True))
    lines = [(letter, f"{run.name or run.run_id}: {judge(run).text}") for letter, run in zip("AB", runs, strict=True)]
    lines.append(
        (
            "compared",
            f"{len(found.names)} layers, {len(found.steps)} windows, steps {found.steps[0]} to {found.steps[-1]}",
        )
    )
    if found.parting is not None:
        lines.append(("layers that part", f"{found.parting.num_layers} of {len(found.names)}"))
        if found.equal_until is not None:
            lines.append(("equal", f"to six digits up to step {found.equal_until}"))
    for letter, names in (("A", found.only_first), ("B", found.only_second)):
        if names:
            lines.append((f"only in {letter}", listing(names)))
    lines += [
        (key, f"{number(one)} in A, {number(other)} in B at step {step}")
        for key, step, one, other in _losses(found, runs)
    ]
    settings = differing_settings(runs[0].config, runs[1].config)
    lines.append(
        (
            "settings",
            listing(list(settings), lambda key: f"{key} {_setting(settings[key][0])} → {_setting(settings[key][1])}")
            or "the same",
        )
    )
    pairs(lines)


def _setting(value: Any) -> str:
    return "(not set)" if value is None else str(value)


def _losses(found: Comparison, runs: tuple[RunHistory, RunHistory]) -> list[tuple[str, int, float, float]]:
    """Each loss that both runs logged, at the last common step: its key, the step, and the values in effect there."""
    last = int(found.steps[-1])
    keys = [key for key in runs[0].own if key in runs[1].own and own_role(key) == "loss"]
    at = {key: [_at(run, key, last) for run in runs] for key in keys[:2]}
    return [(key, last, values[0], values[1]) for key, values in at.items() if None not in values]


def _at(run: RunHistory, key: str, step: int) -> Any:
    """The newest value up to a step; None before the first."""
    series = run.own[key]
    place = int(np.searchsorted(series.steps, step, side="right")) - 1
    return float(series.values[place]) if place >= 0 else None


def _facts(found: Comparison, runs: tuple[RunHistory, RunHistory]) -> dict[str, object]:
    parting = found.parting
    return {
        "alike": found.alike,
        "sentence": sentence(found),
        "runs": [{"run": run.run_id, "name": run.name, "verdict": judge(run).text} for run in runs],
        "step": None if parting is None else parting.step,
        "layer": None if parting is None else parting.name,
        "layers_that_part": 0 if parting is None else parting.num_layers,
        "equal_until": found.equal_until,
        "only_in_a": found.only_first,
        "only_in_b": found.only_second,
        "settings": differing_settings(runs[0].config, runs[1].config),
    }
