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
RESULTS = tuple(ROOT / f"benchmarks/results/{name}.json" for name in ("quick", "cpu", "cuda"))  # newest first
BEGIN, END = "<!-- bench:begin -->", "<!-- bench:end -->"

OURS = "**wandb_gradwatch**"
SUMMARY = {  # columns of the README's table: the monitors of these names
    "default": f"{OURS}, default",
    "default, without numba": f"{OURS}, default, without numba",
    "every step": f"{OURS}, every step",
    "every step, without numba": f"{OURS}, every step, without numba",
    "`wandb.watch`, default": '`wandb.watch`, default ("gradients", every 1000)',
}

_INTRODUCTION = """# What watching costs

Made by `make bench`. A watched model and an identical unwatched model are trained alternately in one process. The
blocks are so short that the machine's speed is the same in both (20 steps of the tiny MLP, one step of the other
models), and their order alternates; two blocks are a pair. In the row "nothing, again", neither model is watched: the
distance of its figures from 0 shows the accuracy of the others.

- **adds**: the additional wall time of a measured step in milliseconds, as the median over the pairs; **±**: half of
  the interquartile range; **CPU**: the additional processor time of the process, with all its threads.
- **passes**: "adds" divided by the time of one `torch._foreach_norm` over all gradients.
- **amortised**: the additional time per step at the monitor's own cadence, rows included. This is a mean over whole
  windows, because a median hides rare, expensive steps. Pairs with a row, with a measured step and with neither are
  averaged separately (the middle half of each), and weighted by their frequency. **of a step**: the amortised time
  divided by the time of a real step on random data with the named batch. A larger batch makes every share smaller.
- **measures one in**: the average number of steps per measured step, for monitors that choose their cadence by their
  cost, as this package does by default. These monitors first run until their cadence is stable; **at the start**: the
  seconds that they added in all until then. This package may add one second there, besides its share.
- **host reads**: the number of tensors whose values the host reads (`item`, `tolist`, `cpu`, `bool`, ...; on CUDA:
  synchronisations) in a measured step, its row included.
- **bytes**: the size of the monitor's values in the run's history as JSON, per row and per step.
- **peak**: the peak memory in watched steps minus that in unwatched steps.

For models whose steps take seconds, the backward of these steps only assigns precomputed gradients to the same
parameters, hooks and optimizer: the cost of a monitor does not depend on the origin of a gradient. On a GPU large
models make real steps, in bfloat16 autocast.
"""
_HEADER = (
    "monitor",
    "adds, ms",
    "±",
    "CPU, ms",
    "passes",
    "amortised, ms",
    "of a step",
    "measures one in",
    "at the start, s",
    "host reads",
    "bytes a row",
    "bytes a step",
    "peak, MiB",
)


def render(results: dict[str, Any]) -> str:
    """One table per model, and what it was measured on."""
    return "\n\n".join([_machine(results), *map(_task_table, results["tasks"])])


def render_summary(results: dict[str, Any]) -> str:
    """One row per model: what share of a real step each of a few monitors adds, at its own cadence."""
    lines = [_line(("model", "a step", *SUMMARY)), _line(["---", *["--:"] * (1 + len(SUMMARY))])]
    for task in results["tasks"]:
        if task["step_ms"] is not None:
            shares = (_share(task, monitor) or "not measured" for monitor in SUMMARY.values())
            lines.append(_line((task["name"], f"{task['batch']}, {_ms(task['step_ms'])} ms", *shares)))
    return "\n\n".join(["\n".join(lines), _machine(results)])


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
    title += f" ({task['pairs']} pairs)"
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
                    "" if (steps := cost.get("steps_per_sample")) is None else f"{steps:.1f}",
                    "" if (start := cost.get("start_s")) is None else f"{start:.2f}",
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


def write_rows(page: Path, rows: list[str], *, begin: str, end: str, keep: bool) -> None:
    """Write the rows of a Markdown table between the markers of a page, each a line; `keep` its rows of other names."""
    before, rest = page.read_text(encoding="utf-8").split(begin)
    table, after = rest.split(end, 1)
    kept = table.splitlines() if keep else []
    of_name = {row.split(" | ")[0]: row for row in [*kept, *rows]}
    page.write_text(f"{before}{begin}" + "\n".join(of_name.values()) + f"\n{end}{after}", encoding="utf-8")


def pages(readme: str, results: list[dict[str, Any]]) -> dict[Path, str]:
    """The text that each page should have."""
    results = _without_older(results)
    summary, details = ("\n\n".join(map(show, results)) for show in (render_summary, render))
    return {README: with_table(readme, summary), PAGE: f"{_INTRODUCTION}\n{details}\n"}


def _without_older(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The results without tasks that earlier ones of the same machine have too."""
    seen: set[tuple[str, str]] = set()
    kept = []
    for one in results:
        device = one["machine"]["device"]
        kept.append(one | {"tasks": [task for task in one["tasks"] if (device, task["name"]) not in seen]})
        seen |= {(device, task["name"]) for task in one["tasks"]}
    return [one for one in kept if one["tasks"]]


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
