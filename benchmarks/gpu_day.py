"""Run all tests and benchmarks that need a GPU, the most important first, each in its own process: `make gpu`.

    python -m benchmarks.gpu_day [--json FILE] [--only WORD ...]   # runs the parts, in nine minutes at most
    python -m benchmarks.gpu_day --page [--json FILE]   # writes docs/gpu.md and the README's sentence, on any machine

Results are written after every part, so that they survive the loss of the machine. A part that fails, takes too long
or lacks a package is named in the results, and the other parts still run.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
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
_JSON = "{json}"  # a placeholder in commands for the file to which figures are written


class Part(NamedTuple):
    """A command line for Python.

    Args:
        seconds: the time limit.
        needs: required packages; the part is left out if one is missing.
    """

    name: str
    command: tuple[str, ...]
    seconds: int
    needs: tuple[str, ...] = ()


_TESTS = ("-m", "pytest", "-q", "-p", "no:cacheprovider")
_KERNELS = ("-m", "benchmarks.kernel", "--models", "GPT-2 small", "GPT 1.2B", "--rounds", "10", "--json", _JSON)
_MONITORS = ("-m", "benchmarks", "--pairs", "12", "--json", _JSON, "--monitors", "total norm", "module-monitor", "1000")
_MONITORS += ("gradwatch", "--models")
PARTS = (
    Part("the kernels equal the reference", (*_TESTS, "tests/kernel_suite.py"), 60, ("triton", "pytest")),
    Part("tests on the GPU", (*_TESTS, "tests/test_gpu.py", "tests/test_gpu_trainings.py"), 100, ("pytest",)),
    Part("bandwidth of the kernels", _KERNELS, 100, ("triton",)),
    Part("GPT-2 small", (*_MONITORS, "gpt2"), 100, ("wandb",)),
    Part("tiny MLP", (*_MONITORS, "mlp"), 90, ("wandb",)),
    Part("1.2 B parameters", (*_MONITORS, "1b"), 90, ("wandb",)),
)


def run_part(part: Part) -> dict[str, Any]:
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
        command = [sys.executable, *(str(file) if word == _JSON else word for word in part.command)]
        try:
            done = subprocess.run(
                command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=part.seconds
            )
            output, outcome = done.stdout, "passed" if done.returncode == 0 else f"failed with {done.returncode}"
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


def run_all(parts: Sequence[Part], path: Path) -> dict[str, Any]:
    """Run the parts in order, and write the results after each part."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    results: dict[str, Any] = {"machine": describe_machine(device), "parts": []}
    path.parent.mkdir(parents=True, exist_ok=True)
    for part in parts:
        results["parts"].append(run_part(part))
        path.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
        print("{name}: {outcome}, {seconds} s".format(**results["parts"][-1]), flush=True)
    return results


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
        if part["figures"] is not None and "results" in part["figures"]:
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
    """Run the parts or write the pages; return 1 if a part has not passed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, default=RESULTS)
    parser.add_argument("--only", nargs="+", default=[], help="run only parts whose name contains one of these words")
    parser.add_argument("--page", action="store_true", help="only write docs/gpu.md and the README's sentence")
    options = parser.parse_args(arguments)
    if options.page:
        write_pages(options.json)
        return 0
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks.gpu_day needs a CUDA device, but torch finds none")
    parts = [part for part in PARTS if not options.only or any(word in part.name for word in options.only)]
    results = run_all(parts, options.json)
    return int(any(part["outcome"] != "passed" for part in results["parts"]))


if __name__ == "__main__":
    sys.exit(main())
