"""What `make` installs: the demo only what it needs, and everything in the versions of constraints.txt."""

from __future__ import annotations

import re
import shutil
import subprocess
from importlib.metadata import PackageNotFoundError, metadata
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

ROOT = Path(__file__).parent.parent


def test_every_pin_can_be_installed_by_the_oldest_python_that_make_accepts():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    found = re.search(r"sys\.version_info < \((\d+), (\d+)\)", makefile)
    assert found, "the Makefile no longer tests the version of Python"
    oldest = f"{found[1]}.{found[2]}.0"
    judged, refused = 0, []
    for name, pinned in re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE):
        try:
            about = metadata(name)
        except PackageNotFoundError:  # pinned for another platform
            continue
        wanted = about["Requires-Python"] or ""
        judged += about["Version"].split("+")[0] == pinned
        if oldest not in SpecifierSet(wanted):
            refused.append(f"{name} {about['Version']} needs Python {wanted}")
    assert judged > 50, "the installed packages are not those of constraints.txt"
    assert not refused


def installed_by(target: str, folder: Path) -> list[str]:
    """The arguments of `pip install` that a target would run, in order, if `folder` held no environment yet."""
    command = ["make", "--no-print-directory", "--dry-run", f"VENV={folder / 'venv'}", target]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=60).stdout
    return re.findall(r"pip .*?\binstall (.+?) \|\|", printed)


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_the_demo_installs_the_package_with_numba_and_the_tests_everything_else(tmp_path):
    demo, tests = (installed_by(target, tmp_path) for target in ("demo", "test"))
    assert [line.removeprefix("-c constraints.txt ") for line in demo] == [
        "torch",
        "hatchling editables",
        "--no-build-isolation -e '.[fast]'",
    ]
    assert tests == [*demo, "-c constraints.txt -r requirements-dev.txt"]
    assert all(line.startswith("-c constraints.txt ") for line in tests)
