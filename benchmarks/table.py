"""Results as Markdown: the README's table between its markers, and all of them in docs/benchmarks.md.

python -m benchmarks.table          # write both from benchmarks/results/*.json
python -m benchmarks.table --check  # fail if they do not show those results
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
README, PAGE = ROOT / "README.md", ROOT / "docs/benchmarks.md"
RESULTS = (ROOT / "benchmarks/results/cpu.json", ROOT / "benchmarks/results/cuda.json")
BEGIN, END = "<!-- bench:begin -->", "<!-- bench:end -->"

_INTRODUCTION = """# What watching costs

Made by `make bench`; every figure is the median over pairs of an unwatched and a watched block of steps, taken in turn
in one process. "nothing, again" is such a pair with nothing watched in both: how far its figures are from 0 says how
far to trust the others.

- **adds**: wall milliseconds that a step which is measured takes longer; **±** half of the range that holds the middle
  half of the pairs; **CPU** the same in processor time of the process, all its threads.
- **passes**: adds / one `torch._foreach_norm` over all gradients.
- **amortised**: per step at the monitor's own cadence, rows included; **of a step**: of a real one on random data, with
  the batch that is named. A larger batch makes every share smaller.
- **host reads**: tensors' values that the host asks for (`item`, `tolist`, `cpu`, `bool`, ...; on CUDA:
  synchronisations) in a step that is measured, its row included.
- **bytes**: of the monitor's values in the run's history, as JSON, per row and per step.
- **peak**: how far the peak of memory in watched steps lies above that in unwatched ones.

For models whose step takes seconds the monitors run on steps with a backward that only hands out ready gradients to the
same parameters, hooks and optimizer; what a monitor adds does not depend on where a gradient came from.
"""
_HEADER = (
    "monitor",
    "adds, ms",
    "±",
    "CPU, ms",
    "passes",
    "amortised, ms",
    "of a step",
    "host reads",
    "bytes a row",
    "bytes a step",
    "peak, MiB",
)


def render(results: dict[str, Any]) -> str:
    """One table per model, and what it was measured on."""
    return "\n\n".join([_machine(results), *map(_task_table, results["tasks"])])


def render_summary(results: dict[str, Any]) -> str:
    """One table: what each monitor adds to a step of each model at its own cadence, and what it sends."""
    tasks = results["tasks"]
    trained = [task for task in tasks if task["step_ms"] is not None]
    last = tasks[-1]
    header = ["monitor", *(f"{task['name']}, of a step" for task in trained)]
    header += [f"{last['name']}: passes when it measures", "host reads", "KiB a step to W&B"]
    lines = [_line(header), _line(["---", *["--:"] * (len(header) - 1)])]
    for name, cost in last["costs"].items():
        lines.append(
            _line(
                (
                    name,
                    *(_share(task, name) for task in trained),
                    f"{cost['sampled_ms'] / last['pass_ms']:.1f}",
                    f"{cost['host_reads']:.0f}",
                    f"{cost['row_bytes'] * cost['rows_per_step'] / 1024:.1f}",
                )
            )
        )
    steps = "; ".join(f"{task['name']}: {task['batch']}, {_ms(task['step_ms'])} ms" for task in trained)
    return "\n\n".join(["\n".join(lines), f"A step is: {steps}. {_machine(results)}"])


def _share(task: dict[str, Any], name: str) -> str:
    if name not in task["costs"]:
        return ""
    return f"{task['costs'][name]['amortised_ms'] / task['step_ms'] * 100:.1f} %"


def _machine(results: dict[str, Any]) -> str:
    machine = results["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    return (
        f"Measured on {machine['device']}, {machine['cores']} cores, {machine['threads']} threads of torch, "
        f"{machine['system']}, Python {machine['python']}, {versions}, commit {machine['commit']}."
    )


def _task_table(task: dict[str, Any]) -> str:
    elements = f"{task['num_elements'] / 1e6:.3g} million elements"
    title = f"**{task['name']}**: {task['num_tensors']} tensors, {elements}, one pass {_ms(task['pass_ms'])} ms"
    if task["step_ms"] is not None:
        title += f", a step of {task['batch']} {_ms(task['step_ms'])} ms"
    title += f" ({task['rounds']} pairs)"
    lines = [_line(_HEADER), _line(["---", *["--:"] * (len(_HEADER) - 1)])]
    for name, cost in task["costs"].items():
        lines.append(
            _line(
                (
                    name,
                    _ms(cost["sampled_ms"]),
                    _ms(cost["spread_ms"]),
                    _ms(cost["sampled_cpu_ms"]),
                    f"{cost['sampled_ms'] / task['pass_ms']:.1f}",
                    _ms(cost["amortised_ms"]),
                    _share(task, name) if task["step_ms"] is not None else "",
                    f"{cost['host_reads']:.0f}",
                    f"{cost['row_bytes']:,.0f}",
                    f"{cost['row_bytes'] * cost['rows_per_step']:,.0f}",
                    f"{cost['peak_mib']:.0f}",
                )
            )
        )
    return title + "\n\n" + "\n".join(lines)


def _ms(value: float) -> str:
    if abs(value) >= 99.5:
        return f"{value:.0f}"
    return f"{value:.1f}" if abs(value) >= 9.95 else f"{value:.2f}"


def _line(cells: Any) -> str:
    return "| " + " | ".join(cells) + " |"


def with_table(text: str, table: str, *, begin: str = BEGIN, end: str = END) -> str:
    """The README with this table between its markers.

    Raises:
        ValueError: it has no markers.
    """
    pattern = re.compile(f"{re.escape(begin)}\n.*?{re.escape(end)}", re.DOTALL)
    if not pattern.search(text):
        raise ValueError(f"README.md lacks the markers {begin} and {end}")
    return pattern.sub(lambda _: f"{begin}\n\n{table}\n\n{end}", text)


def pages(readme: str, results: list[dict[str, Any]]) -> dict[Path, str]:
    """The text that each page should have."""
    summary, details = ("\n\n".join(map(show, results)) for show in (render_summary, render))
    return {README: with_table(readme, summary), PAGE: f"{_INTRODUCTION}\n{details}\n"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing")
    arguments = parser.parse_args()
    results = [json.loads(path.read_text(encoding="utf-8")) for path in RESULTS if path.exists()]
    for path, text in pages(README.read_text(encoding="utf-8"), results).items():
        if arguments.check and (not path.exists() or path.read_text(encoding="utf-8") != text):
            sys.exit(f"{path.name} does not show the results of benchmarks/results: python -m benchmarks.table")
        if not arguments.check:
            path.parent.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
