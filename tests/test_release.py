"""What new users see first: the README, the tables, the API pages, and the oldest supported versions."""

from __future__ import annotations

import inspect
import json
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest
from processes import ROOT, script

import wandb_gradwatch
from benchmarks import table
from benchmarks.monitors import MONITORS

README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_tables_are_those_of_the_results() -> None:
    results = [json.loads(path.read_text(encoding="utf-8")) for path in table.RESULTS if path.exists()]
    if not results:
        pytest.skip("no results: run make bench")
    for path, text in table.pages(README, results).items():
        assert path.read_text(encoding="utf-8") == text, f"{path.name}: run python -m benchmarks.table"


def test_another_result_changes_the_readme() -> None:
    cost = {"sampled_ms": 1.0, "amortised_ms": 0.5, "spread_ms": 0.1, "sampled_cpu_ms": 1.0}
    cost |= {"host_reads": 2.0, "row_bytes": 2048.0, "rows_per_step": 0.5, "peak_mib": 3.0}
    settled = cost | {"steps_per_sample": 12.5, "start_s": 0.75}
    task = {"name": "a model", "num_tensors": 2, "num_elements": 3_000_000, "batch": "4 rows", "pairs": 7}
    task |= {"step_ms": 50.0, "pass_ms": 0.25}
    task["costs"] = {table.SUMMARY["every step"]: cost, table.SUMMARY["default"]: settled}
    machine = {"device": "an abacus", "cores": 1, "threads": 1, "system": "Linux", "python": "3", "commit": "abc"}
    results = {"machine": machine | {"versions": {"torch": "9"}}, "tasks": [task]}
    pages = table.pages(README, [results])
    # 0.5 of 50 ms are 1 %; 1 ms are 4 passes of 0.25 ms; 2 KiB every second step are 1 KiB per step.
    missing = "not measured"
    assert f"| a model | 4 rows, 50.0 ms | 1.0 % | {missing} | 1.0 % | {missing} | {missing} |" in pages[table.README]
    for name, one_in, start in (("every step", "", ""), ("default", "12.5", "0.75")):
        line = f"{name} | 1.00 | 0.10 | 1.00 | 4.0 | 0.50 | 1.0 % | {one_in} | {start} | 2 | 2,048 | 1,024 | 3 |"
        assert f"| **wandb_gradwatch**, {line}" in pages[table.PAGE]
    assert "an abacus" in pages[table.README]
    # The first results are the newest; a model that they do not have is shown from older results.
    newer = results | {"tasks": [task | {"step_ms": 25.0}]}
    older = results | {"tasks": [task, task | {"name": "another"}]}
    readme = table.pages(README, [newer, older])[table.README]
    assert (readme.count("| a model | 4 rows, 25.0 ms | 2.0 % |"), readme.count("| a model |")) == (1, 1)
    assert readme.count("| another | 4 rows, 50.0 ms | 1.0 % |") == 1


def test_the_readmes_columns_are_monitors_of_the_bench() -> None:
    assert set(table.SUMMARY.values()) <= {monitor.name for monitor in MONITORS}


def test_the_site_builds_and_every_public_name_has_a_place_in_it(tmp_path: Path) -> None:
    # Strict mode: a broken link is an error.
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    page = (tmp_path / "api/index.html").read_text(encoding="utf-8")
    public = {
        f"{module.__name__}.{name}"
        for module in (wandb_gradwatch, wandb_gradwatch.metrics, wandb_gradwatch.rules)
        for name in module.__all__
        if inspect.isclass(member := getattr(module, name)) or inspect.isfunction(member)
    }
    places = set(re.findall(r'id="([\w.]+)"', page))
    at_the_top = {name for name in wandb_gradwatch.__all__ if name != "__version__"}
    assert {f"wandb_gradwatch.{name}" for name in at_the_top} <= places
    assert {name for name in public - places if name.rpartition(".")[2] not in at_the_top} == set()


def _modules() -> list[str]:
    found = pkgutil.walk_packages(wandb_gradwatch.__path__, "wandb_gradwatch.")
    return [module.name for module in found if not module.name.endswith(("__main__", ".cuda"))]


def test_the_oldest_versions_are_those_that_the_program_is_run_with() -> None:
    pyproject = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    pattern = r"^dependencies = .*\"wandb>=([0-9.]*)\".*"  # .ci/run finds the version with the same expression
    assert re.search(pattern, pyproject, re.MULTILINE), "the dependencies are written in another way"
    assert "tests/oldest_versions.py" in (ROOT / ".ci/run").read_text(encoding="utf-8")


def test_todays_versions_do_what_is_asked_of_the_oldest(tmp_path: Path) -> None:
    done = script(ROOT / "tests/oldest_versions.py", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("watches with torch")
