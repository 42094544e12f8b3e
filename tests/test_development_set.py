"""constraints.txt and the Makefile agree on which Python can make the development environment."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, metadata
from pathlib import Path

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
