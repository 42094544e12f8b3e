"""Check the environment, measure what watching costs here, and say what to change."""

from __future__ import annotations

from dataclasses import asdict
from typing import Final

import click

from .._output import as_json, pairs, paragraph, title
from . import measurement
from .checks import Check, check_environment
from .measurement import ACCEPTABLE_OVERHEAD, OverheadMeasurement, measure_overhead

__all__ = ["Check", "OverheadMeasurement", "check_environment", "measure_overhead", "run_doctor"]

_SIGNS: Final = {"good": ("✓", "green"), "note": ("▲", "yellow"), "problem": ("✗", "red")}


def run_doctor(num_parameters: int | None, *, json: bool) -> int:
    """Look at everything, print it, and return the exit status: 1 where something does not work.

    Overhead is measured with a model of about `num_parameters`; None: not at all.
    """
    checks = check_environment()
    if json:
        overhead = measure_overhead(num_parameters) if num_parameters else None
        as_json({"checks": [asdict(check) for check in checks], "overhead": asdict(overhead) if overhead else None})
    else:
        _say_checks(checks)
        if num_parameters:
            _say_overhead(num_parameters)
    return 1 if any(check.verdict == "problem" for check in checks) else 0


def _say_checks(checks: list[Check]) -> None:
    width = max(len(check.name) for check in checks)
    for check in checks:
        sign, colour = _SIGNS[check.verdict]
        click.echo(f"  {click.style(sign, fg=colour)} {check.name.ljust(width)}  {check.found}")
        paragraph(check.advice, indent=width + 6)


def _say_overhead(num_parameters: int) -> None:
    title(f"Training about {num_parameters:,} parameters here, with and without watch(sample_every=1)")
    with click.progressbar(length=2 * measurement.PAIRS, label="  blocks of steps") as bar:
        measured = measure_overhead(num_parameters, lambda done: bar.update(done - bar.pos))
    pairs(
        [
            ("model", f"{measured.num_parameters:,} parameters, {measured.batch} rows per step, on {measured.device}"),
            ("a step", f"{measured.step_ms:.2f} ms without, {measured.watched_step_ms:.2f} ms measured"),
            ("overhead", f"{measured.ratio:.1%} of a measured step (the pairs differ by {measured.spread:.1%})"),
        ]
    )
    paragraph(_advice(measured))


def _advice(measured: OverheadMeasurement) -> str:
    if measured.spread > max(measured.ratio, ACCEPTABLE_OVERHEAD):
        return "The pairs differ by more than what they should show: measure again when the machine is less busy."
    if measured.ratio <= ACCEPTABLE_OVERHEAD:
        return f"That is within {ACCEPTABLE_OVERHEAD:.0%} of the time: watch(model) will measure every step here."
    return (
        f"To stay within {ACCEPTABLE_OVERHEAD:.0%} of the time, watch(model) will measure about one step in "
        f"{measured.sample_every:,} here; sample_every=1 measures all, max_overhead=0.05 about five times as many. A "
        "larger batch per step has more of them measured: the cost depends on the parameters, not on the data."
    )
