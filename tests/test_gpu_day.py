"""The benchmarks of `make gpu`, without a GPU: a failed part stops no other, and each part's results are saved."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from benchmarks import gpu_day, kernel_code_table, kernel_table, table
from benchmarks.gpu_day import Part
from benchmarks.kernel_step import AddedTime


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
                "candidates": {"columns": {"gpu_ms": 1.0, "host_ms": 0.2, "of_copy": 0.5}},
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
