"""Run all tests and benchmarks that need a GPU, the most important first, each in its own process: `make gpu`.

    python -m benchmarks.gpu_day [--json FILE] [--only WORD ...]   # runs the parts, in nine minutes at most
    python -m benchmarks.gpu_day --page [--json FILE]   # writes docs/gpu.md and the README's sentence, on any machine
    python -m benchmarks.gpu_day --dry   # runs small versions of all parts on a simulated GPU

Results are written after every part, so that they survive the loss of the machine. A part that fails, takes too long
or lacks a package is named in the results, and the other parts still run. A second call on the same machine, with the
same versions, continues: first the parts that have not run, then those that have not passed.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks import kernel_code_table, kernel_table, table
from benchmarks.machine import describe_machine

ROOT = Path(__file__).parent.parent
RESULTS, PAGE = ROOT / "benchmarks/results/gpu.json", ROOT / "docs/gpu.md"
DRY_RESULTS = ROOT / "build/gpu_dry.json"
_JSON = "{json}"  # a placeholder in commands for the file to which figures are written
_SKIPPED = re.compile(r"^SKIPPED \[\d+\] [^:]+:\d+: (.*)$", re.MULTILINE)


class Part(NamedTuple):
    """A command line for Python.

    Args:
        seconds: the time limit.
        needs: required packages; the part is left out if one is missing.
        dry: the command line of a small version that runs on a simulated GPU (tests/pretend_run.py).
    """

    name: str
    command: tuple[str, ...]
    seconds: int
    needs: tuple[str, ...] = ()
    dry: tuple[str, ...] = ()


_PRETENDED = ("-m", "pretend_run")


def _tests(name: str, seconds: int, *files: str, few: str = "", runner: tuple[str, ...] = _PRETENDED) -> Part:
    """A part of tests. `few`: those that a dry run makes, if not all, as for `pytest -k`."""
    options = ("pytest", "-rs", "-p", "no:cacheprovider", *files)
    chosen = ("-k", few) if few else ()
    return Part(name, ("-m", *options), seconds, ("pytest", "triton"), (*runner, *options, *chosen))


def _kernels(name: str, seconds: int, what: str, rounds: int) -> Part:
    module = ("benchmarks.kernel", "--what", what, "--json", _JSON)
    models = ("--models", "GPT-2 small", "GPT 1.2B", "--rounds", f"{rounds}")
    tiny = ("--tiny", "--rounds", "1", "--dtypes", "bfloat16")
    return Part(name, ("-m", *module, *models), seconds, ("triton",), (*_PRETENDED, *module, *tiny))


def _monitors(name: str, seconds: int, model: str, *options: str) -> Part:
    # Ours first: if the limit cuts the part off, it cuts off others.
    module = ("benchmarks", "--models", model, "--json", _JSON, *options)
    module += ("--monitors", "gradwatch**, default", "gradwatch**, every step", "_foreach_norm", "module-monitor")
    module += ('"gradients", every step', "1000")
    # In Triton's interpreter a sample would take a second.
    dry = (*_PRETENDED, "--without-triton", *module, "--tiny", "--pairs", "4")
    return Part(name, ("-m", *module, "--pairs", "12"), seconds, ("wandb",), dry)


PARTS = (  # the most valuable first
    _tests(
        "the kernels equal the reference",
        40,
        "tests/kernel_suite.py",
        few="worked or witnesses or mixed or thread",
        runner=("-m",),  # in Triton's interpreter, without a device
    ),
    _monitors("GPT-2 small", 75, "gpt2"),
    _monitors("1.2 B parameters", 95, "1b", "--once", "module-monitor", "wandb.watch"),
    _tests(
        "tests on the GPU",
        75,
        "tests/test_gpu.py",
        "tests/test_gpu_trainings.py",
        few="alerts or one_model or inside_the_backward or (deterministic and torch)",
    ),
    _kernels("bandwidth of the kernels", 65, "lists", rounds=10),
    _kernels("a training step of GPT-2 small", 50, "step", rounds=3),
    _monitors("tiny MLP", 75, "mlp", "--settled-pairs", "150"),
    _tests("CUDA graphs, a compiled step, two streams and float8", 60, "tests/test_gpu_regimes.py"),
)


def run_part(part: Part, *, dry: bool = False) -> dict[str, Any]:
    """Run a part to its end, or to its time limit.

    Returns:
        name; outcome: "passed", or the reason why not; seconds; output: its last 15 lines; figures: the contents of its
        JSON file, or None.
    """
    missing = [name for name in part.needs if importlib.util.find_spec(name) is None]
    if missing:
        outcome = f"left out: {', '.join(missing)} is not installed"
        return {"name": part.name, "outcome": outcome, "seconds": 0.0, "output": [], "figures": None}
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "figures.json"
        words = part.dry if dry else part.command
        command = [sys.executable, *(str(file) if word == _JSON else word for word in words)]
        try:
            done = subprocess.run(
                command,
                cwd=ROOT,
                env=_dry_environment() if dry else None,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=part.seconds,
            )
            output, outcome = done.stdout, "passed" if done.returncode == 0 else f"failed with {done.returncode}"
            if skipped := "; ".join(dict.fromkeys(_SKIPPED.findall(output))):
                outcome += f", but some tests were skipped: {skipped}"
        except subprocess.TimeoutExpired as error:
            output = error.stdout.decode(errors="replace") if isinstance(error.stdout, bytes) else error.stdout or ""
            outcome = f"not done after {part.seconds} seconds"
        figures = json.loads(file.read_text(encoding="utf-8")) if file.exists() else None
    for folder in (ROOT, sys.prefix):  # the results are to name no paths of the machine
        output = output.replace(f"{folder}/", "")
    seconds = round(time.perf_counter() - began, 1)
    return {
        "name": part.name,
        "outcome": outcome,
        "seconds": seconds,
        "output": output.splitlines()[-15:],
        "figures": figures,
    }


def _dry_environment() -> dict[str, str]:
    path = os.pathsep.join([str(ROOT / "tests"), str(ROOT), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "PYTHONPATH": path, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}


def run_all(
    parts: Sequence[Part], path: Path, *, only: Sequence[str] = ("",), dry: bool = False, fresh: bool = False
) -> dict[str, Any]:
    """Run the parts in order, and write the results after each part.

    Args:
        path: the results; those of the same machine and versions that are there already are continued.
        only: run only parts whose name contains one of these words.
        fresh: begin anew.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    machine = describe_machine(device)
    before = None if fresh else _read(path)
    done = {part["name"]: part for part in before["parts"]} if before and before["machine"] == machine else {}
    path.parent.mkdir(parents=True, exist_ok=True)
    wanted = [part for part in parts if any(word in part.name for word in only)]
    waiting = [part for part in wanted if part.name not in done]
    waiting += [part for part in wanted if part.name in done and not is_done(done[part.name])]
    for part in waiting:
        done[part.name] = run_part(part, dry=dry)
        in_order = [done[each.name] for each in parts if each.name in done]
        path.write_text(json.dumps({"machine": machine, "parts": in_order}, indent=1) + "\n", encoding="utf-8")
        print("{name}: {outcome}, {seconds} s".format(**done[part.name]), flush=True)
    return {"machine": machine, "parts": [done[part.name] for part in wanted]}


def is_done(part: dict[str, Any]) -> bool:
    """Whether a part has passed, perhaps without tests for which this machine lacks something."""
    outcome: str = part["outcome"]
    return outcome.startswith("passed")


def page_of(results: dict[str, Any] | None, code: dict[str, Any] | None) -> str:
    """Return the text of docs/gpu.md.

    Args:
        results: the results of `run_all` on a GPU, or None.
        code: the results of kernel_code.py, or None.
    """
    lines = ["# On a GPU", ""]
    if results is None:
        lines += [
            "The kernels have not run on a GPU yet. They are compiled to machine code for sm_80, sm_90, sm_100 and "
            "sm_120, and an emulator executes this code (`pytest -m slow`). `make gpu` on a machine with a GPU "
            "replaces this paragraph with measurements."
        ]
    else:
        lines += _measured(results)
    if code is not None:
        lines += ["", "## Resources of the kernels' machine code", "", kernel_code_table.render(code)]
    return "\n".join([*lines, ""])


def _measured(results: dict[str, Any]) -> list[str]:
    machine = results["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    lines = [
        f"Measured on {machine['device']}, Python {machine['python']}, {versions}, commit {machine['commit']}.",
        "",
    ]
    lines += ["| part | outcome | seconds |", "|---|---|---|"]
    lines += ["| {name} | {outcome} | {seconds} |".format(**part) for part in results["parts"]]
    for part in results["parts"]:
        if part["figures"] is not None:
            of_kernels = "results" in part["figures"]
            lines += ["", f"## {part['name'][0].upper()}{part['name'][1:]}", ""]
            lines.append(kernel_table.render(part["figures"]) if of_kernels else table.render(part["figures"]))
            lines += ["", *(f"- {line}" for line in kernel_table.targets(part["figures"]))] if of_kernels else []
        elif part["outcome"] != "passed" and part["output"]:
            lines += ["", f"## {part['name']}: {part['outcome']}", "", "```", *part["output"], "```"]
    return lines


def readme_with(results: dict[str, Any] | None, text: str) -> str:
    """Return the README's text, with the sentence about a GPU replaced if the results contain one."""
    for part in results["parts"] if results is not None else ():
        if part["figures"] is not None and part["figures"].get("added_time") is not None:
            shown = kernel_table.sentence(part["figures"])
            text = table.with_table(text, shown, begin=kernel_table.BEGIN, end=kernel_table.END)
    return text


def _read(path: Path) -> dict[str, Any] | None:
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def write_pages(path: Path) -> None:
    """Write docs/gpu.md and the README's sentence, from the results in the file `path` if it exists."""
    results = _read(path)
    PAGE.write_text(page_of(results, _read(kernel_code_table.RESULTS)), encoding="utf-8")
    table.README.write_text(readme_with(results, table.README.read_text(encoding="utf-8")), encoding="utf-8")


def main(arguments: list[str] | None = None) -> int:
    """Run the parts or write the pages; return 1 if a part is not done."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help=f"default: {RESULTS.relative_to(ROOT)}, of a dry run build/")
    parser.add_argument("--only", nargs="+", default=[""], help="run only parts whose name contains one of these words")
    parser.add_argument("--fresh", action="store_true", help="repeat the parts that have passed, too")
    parser.add_argument("--dry", action="store_true", help="check, without a GPU, that every part runs")
    parser.add_argument("--page", action="store_true", help="only write docs/gpu.md and the README's sentence")
    options = parser.parse_args(arguments)
    path = options.json or (DRY_RESULTS if options.dry else RESULTS)
    if options.page:
        write_pages(path)
        return 0
    if not options.dry and not torch.cuda.is_available():
        raise SystemExit("benchmarks.gpu_day needs a CUDA device, but torch finds none")
    results = run_all(PARTS, path, only=options.only, dry=options.dry, fresh=options.fresh or options.dry)
    return int(not all(map(is_done, results["parts"])))


if __name__ == "__main__":
    sys.exit(main())
