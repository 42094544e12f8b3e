"""The first bad operation that an alert's text names, in parts."""

from __future__ import annotations

import re
from typing import Final

from .._analysis.formatting import FOUND_PREFIX

_HEAD: Final = re.compile(
    r"(?P<Operation>\S+) (?:in )?(?P<Module>.+?), (?P<Line>[^,]+|at a place that is not known), made "
    r"(?P<Made>.+)"
)
_LINES: Final = re.compile(
    r"(?P<Read>It read )|(?P<Reached>From there it reached )|(?P<Near>Within )|(?P<Remedy>Remedy: )"
)


def without_finding(text: str) -> tuple[str, list[tuple[str, str]]]:
    """An alert's text without the first bad operation, and this in parts: (name, value); none where none is named.

    Example:
        >>> _, parts = without_finding("found by running the step again. aten.log in a, b.py:3, made 1 NaN of 2.")
        >>> parts
        [('Operation', 'aten.log'), ('Module', 'a'), ('Line', 'b.py:3'), ('Made', '1 NaN of 2')]
    """
    before, prefix, found = text.partition(FOUND_PREFIX)
    if not found:
        return text, []
    head, *lines = found.splitlines()
    match = _HEAD.fullmatch(head.removesuffix("."))
    parts = [("Found", head)] if match is None else list(match.groupdict().items())
    for line in lines:
        begin = _LINES.match(line)
        name = "Found" if begin is None else str(begin.lastgroup)
        value = line if begin is None or name == "Near" else line[begin.end() :]
        parts.append((name, value.removesuffix(".")))
    return before + prefix.rstrip(), parts
