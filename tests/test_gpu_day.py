"""The benchmarks of `make gpu`, without a GPU: a failed part stops no other, and each part's results are saved."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from benchmarks import gpu_day, kernel_code_table, kernel_table, table
from benchmarks.gpu_day import Part
from benchmarks.kernel_step import AddedTime
from benchmarks.models import TASKS
from benchmarks.shapes import gpt_1b


def test_parts_fail_alone_and_results_are_written_after_each(tmp_path: Path) -> None:
    path = tmp_path / "results" / "gpu.json"
    writes = "import sys; open(sys.argv[1], 'w').write('[1]')"
    parts = [
        Part("fails", ("-c", "raise SystemExit('no such device')"), 60),
        Part("takes too long", ("-c", "import time; print('began', flush=True); time.sleep(60)"), 2),
        Part("lacks something", ("-c", ""), 60, ("no_such_package",)),
        # The last part finds the results of the parts before it.
        Part("reads", ("-c", f"print(len(__import__('json').load(open({str(path)!r}))['parts']))"), 60),
        Part("writes", ("-c", writes, "{json}"), 60),
    ]
    gpu_day.run_all(parts, path)
    found = json.loads(path.read_text())["parts"]
    assert [part["outcome"] for part in found] == [
        "failed with 1",
        "not done after 2 seconds",
        "left out: no_such_package is not installed",
        "passed",
        "passed",
    ]
    assert [part["output"] for part in found] == [["no such device"], ["began"], [], ["3"], []]
    assert [part["figures"] for part in found] == [None, None, None, None, [1]]


def test_a_second_call_continues_with_what_has_not_run_and_then_with_what_has_not_passed(tmp_path: Path) -> None:
    path, log = tmp_path / "gpu.json", tmp_path / "log"

    def part(name: str, then: str) -> Part:
        return Part(name, ("-c", f"open({str(log)!r}, 'a').write({name!r} + ' '); {then}"), 60)

    skip = "print('SKIPPED [1] tests/test_gpu_regimes.py:9: the card has no float8')"
    fails, passes, skipped, late = part("f", "raise SystemExit(1)"), part("p", ""), part("s", skip), part("l", "")
    gpu_day.run_all([fails, passes, skipped], path)
    results = gpu_day.run_all([fails, passes, skipped, late], path)
    assert log.read_text().split() == ["f", "p", "s", "l", "f"]
    assert [gpu_day.is_done(one) for one in results["parts"]] == [False, True, True, True]
    assert results["parts"][2]["outcome"] == "passed, but some tests were skipped: the card has no float8"
    assert json.loads(path.read_text()) == results
    gpu_day.run_all([fails, passes, skipped, late], path, only=["p", "l"])
    assert log.read_text().split()[5:] == []
    gpu_day.run_all([fails, passes, skipped, late], path, only=["p"], fresh=True)
    assert log.read_text().split()[5:] == ["p"]
    path.write_text(path.read_text().replace('"device": "', '"device": "another '))
    gpu_day.run_all([passes], path)  # the results of another machine are not continued
    assert log.read_text().split()[6:] == ["p"]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: `make gpu` runs on it")
def test_every_part_runs_on_a_simulated_gpu_within_its_limit(tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    path = tmp_path / "gpu.json"
    status = gpu_day.main(["--dry", "--json", str(path)])
    parts = {part["name"]: part for part in json.loads(path.read_text())["parts"]}
    assert {name: part["output"] for name, part in parts.items() if not gpu_day.is_done(part)} == {}
    assert status == 0
    assert [part.name for part in gpu_day.PARTS] == list(parts)
    assert all(parts[part.name]["seconds"] <= part.seconds for part in gpu_day.PARTS)
    for name, task in (("GPT-2 small", "gpt2"), ("1.2 B parameters", "1b"), ("tiny MLP", "mlp")):
        (measured,) = parts[name]["figures"]["tasks"]
        assert measured["name"] == TASKS[task].name
        assert len(measured["costs"]) == 7  # nothing, twice ours, and four others
    page = gpu_day.page_of(json.loads(path.read_text()), None)
    assert "| tiny, bfloat16 | all |" in page


def test_the_model_of_1_2_billion_parameters_has_the_shapes_that_the_kernels_are_timed_with() -> None:
    model = TASKS["1b"].make(torch.device("meta"))
    assert sorted(tuple(parameter.shape) for parameter in model.parameters()) == sorted(gpt_1b())


def test_every_part_is_a_command_that_exists() -> None:
    for part in gpu_day.PARTS:
        files = [word for word in part.command if word.endswith(".py")]
        assert all((gpu_day.ROOT / file).exists() for file in files)
    assert sum(part.seconds for part in gpu_day.PARTS) <= 9 * 60


def test_pages_are_written_for_the_results_that_exist(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    page, readme = gpu_day.PAGE.read_text(), table.README.read_text()
    monkeypatch.setattr(gpu_day, "PAGE", tmp_path / "gpu.md")
    monkeypatch.setattr(table, "README", tmp_path / "README.md")
    table.README.write_text(readme)
    gpu_day.write_pages(gpu_day.RESULTS)
    assert gpu_day.PAGE.read_text() == page
    assert table.README.read_text() == readme


def test_a_page_names_what_failed_and_shows_what_was_measured() -> None:
    machine = {"device": "NVIDIA H200", "versions": {"torch": "2.13.0"}, "python": "3.11.7", "commit": "abc"}
    figures = {
        "machine": machine,
        "results": [
            {
                "model": "GPT 1.2B",
                "dtype": "bfloat16",
                "candidates": {"columns": {"gpu_ms": 1.0, "host_ms": 0.2, "gb_per_s": 2400.0, "of_copy": 0.5}},
                "failures": {},
            }
        ],
        "added_time": None,
        "failures": {},
    }
    parts = [
        {"name": "tests", "outcome": "failed with 1", "seconds": 3.5, "output": ["E  assert 1 == 2"], "figures": None},
        {"name": "bandwidth", "outcome": "passed", "seconds": 60.0, "output": [], "figures": figures},
    ]
    results = {"machine": machine, "parts": parts}
    page = gpu_day.page_of(results, None)
    assert "Measured on NVIDIA H200, Python 3.11.7, torch 2.13.0, commit abc." in page
    assert "| tests | failed with 1 | 3.5 |" in page
    assert "E  assert 1 == 2" in page
    row = "| GPT 1.2B, bfloat16 | 1.000 (50%) / 0.20 |"
    assert row in page
    # 2,400 GB/s for 1 ms; a copy at twice the bandwidth takes half of the time.
    assert "| GPT 1.2B, bfloat16 | columns | 2400.0 | 0.500 | 1.000 | 2.00 |" in page
    assert "| GPT 1.2B, bfloat16 | all | not done | not done | not done | not done |" in page
    readme = f"before\n{kernel_table.BEGIN}\n{kernel_table.END}\nafter\n"
    assert gpu_day.readme_with(None, readme) == readme
    figures["added_time"] = asdict(AddedTime(30.0, 0.15, 0.01, 0.2, 1.0, 0.1, 0.1, 0))
    assert "On an NVIDIA H200: a training step of" in gpu_day.readme_with(results, readme)
    assert "adds 0.15 ms (0.5%), and the host never waits" in gpu_day.readme_with(results, readme)
    assert "MISSED  1.2B bf16, columns" in page


@pytest.mark.parametrize(
    ("instructions", "integer", "atomics", "passes", "share"),
    [
        # A core gets 4.3e12 / 132 / 1.755e9 = 18.56 bytes a cycle, so an element of 4 bytes takes it 0.2155 cycles.
        (10.0, 5.0, 0.0, 1.0, 1.0),  # 10 / 128 = 0.078 cycles, far below the limit
        (55.2, 5.0, 0.0, 1.0, 0.5),  # 55.2 / 128 = 0.431
        (30.0, 27.6, 0.0, 1.0, 0.5),  # 27.6 / 64 = 0.431
        (10.0, 5.0, 1.0, 13.8, 0.5),  # 13.8 / 32 = 0.431
    ],
)
def test_the_share_of_a_copy_is_limited_by_the_busiest_unit(
    instructions: float, integer: float, atomics: float, passes: float, share: float
) -> None:
    taken = {"instructions": instructions, "integer": integer, "atomics": atomics}
    assert kernel_code_table.largest_share_of_a_copy(taken, 4, passes) == pytest.approx(share, rel=1e-3)


def test_without_a_gpu_nothing_is_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_day.torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="needs a CUDA device"):
        gpu_day.main([])
