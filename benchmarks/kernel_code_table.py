"""What kernel_code.py has read from the machine code, in words: part of docs/gpu.md."""

from __future__ import annotations

from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results/kernel_code.json"

# An H200: 132 cores at 1.755 GHz, of which a copy between two places gets 4.3 TB/s; a core begins 128 instructions per
# cycle, 64 of them on the unit for integers, comparisons and choices, and 32 adjacent words of shared memory.
_BYTES_PER_CYCLE = 4.3e12 / 132 / 1.755e9
_INSTRUCTIONS, _INTEGER_INSTRUCTIONS, _SHARED_WORDS = 128, 64, 32
_READ = {"": "columns", " histogram": "columns and histogram"}  # by the variant's name
_SHOWN = (("registers", 0), ("instructions", 1), ("integer", 1))  # with so many digits


def largest_share_of_a_copy(taken: dict[str, float], itemsize: int, passes: float) -> float:
    """The share of a copy's bandwidth on an H200 that instructions leave room for; no more than 1.

    Args:
        taken: by a variant, as in the results.
        itemsize: bytes of an element.
        passes: of an atomic instruction over shared memory.
    """
    cycles = max(
        taken["instructions"] / _INSTRUCTIONS,
        taken["integer"] / _INTEGER_INSTRUCTIONS,
        taken["atomics"] * passes / _SHARED_WORDS,
    )
    return min(itemsize / _BYTES_PER_CYCLE / cycles, 1.0)


def render(results: dict[str, dict[str, Any]]) -> str:
    """What the kernels took before and what they take now, the host's work, and what every variant takes."""
    before, now = results.get("before", results["now"]), results["now"]
    lines = [
        f"Triton {now['machine']['versions']['triton']}, sm_90, the loop that reads; commit "
        f"{before['machine']['commit']} -> {now['machine']['commit']}. The last columns say what share of a copy's "
        "bandwidth an H200 can reach at most with so many instructions; and if besides lanes wait for each other where "
        "they count in one bank of shared memory, with gradients that are normal, and with those of which nine of ten "
        "elements are 0. What it does reach is less, and not known.",
        "",
        "| | registers | instructions per element | integer | at most | lanes wait, normal | mostly 0 |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    for dtype, itemsize in (("bfloat16", 2), ("float32", 4)):
        for suffix, read in _READ.items():
            pairs = [one["variants"]["90"][f"measure_chunks {dtype}{suffix}"] for one in (before, now)]
            cells = [_change([f"{pair[key]:.{digits}f}" for pair in pairs]) for key, digits in _SHOWN]
            for passes in zip((1.0, *before["passes"].values()), (1.0, *now["passes"].values()), strict=True):
                shares = [
                    largest_share_of_a_copy(*one) for one in zip(pairs, (itemsize, itemsize), passes, strict=True)
                ]
                cells.append(_change([f"{share:.0%}" for share in shares]))
            lines.append(f"| {dtype}, {read} | " + " | ".join(cells) + " |")
    host = [one["host"] for one in (before, now)]
    lines += [
        "",
        f"A sample of GPT-2 small and its parameters is {_change([str(one['launches']) for one in host])} launches and "
        f"{_change([str(one['calls']) for one in host])} calls of Python functions, "
        f"{_change([format(one['ms'], '.2f') for one in host])} ms of the host "
        f"({now['machine']['device']}, the fastest of 300) with a driver that launches nothing.",
        "",
        "Registers of a thread / bytes of its stack / bytes of a program's shared memory / instructions per element:",
        "",
        "| | " + " | ".join(f"sm_{capability}" for capability in now["variants"]) + " |",
        "|---|" + "--:|" * len(now["variants"]),
    ]
    for name in next(iter(now["variants"].values())):
        found = [of[name] for of in now["variants"].values()]
        cells = ["{registers} / {stack} / {shared}".format(**taken) for taken in found]
        if "float" in name:  # the others read several dtypes, or partial results
            cells = [f"{cell} / {taken['instructions']:.1f}" for cell, taken in zip(cells, found, strict=True)]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _change(shown: list[str]) -> str:
    return " -> ".join(dict.fromkeys(shown))
