"""Format the results of kernel_code.py as the section of docs/gpu.md about the kernels' machine code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results/kernel_code.json"

# An H200 has 132 multiprocessors at 1.755 GHz and copies memory at 4.3 TB/s. Per cycle, a multiprocessor issues 128
# instructions, at most 64 of them to the unit for integers, comparisons and selections, and accesses 32 adjacent words
# of shared memory.
_BYTES_PER_CYCLE = 4.3e12 / 132 / 1.755e9
_INSTRUCTIONS, _INTEGER_INSTRUCTIONS, _SHARED_WORDS = 128, 64, 32
_READ = {"": "columns", " histogram": "columns and histogram"}  # suffix of the variant's name -> the variant's results
_SHOWN = (("registers", 0), ("instructions", 1), ("integer", 1))  # (key in the results, number of decimals)


def largest_share_of_a_copy(taken: dict[str, float], itemsize: int, passes: float) -> float:
    """Return the largest share of a copy's bandwidth that the instructions allow on an H200, at most 1.

    Args:
        taken: the number of instructions per element by kind, from a variant's results.
        itemsize: the size of an element in bytes.
        passes: the number of passes over shared memory per atomic instruction of a warp.
    """
    cycles = max(
        taken["instructions"] / _INSTRUCTIONS,
        taken["integer"] / _INTEGER_INSTRUCTIONS,
        taken["atomics"] * passes / _SHARED_WORDS,
    )
    return min(itemsize / _BYTES_PER_CYCLE / cycles, 1.0)


def render(results: dict[str, dict[str, Any]]) -> str:
    """Return the section: the kernels' resources at both commits, the host's work, and every variant's resources."""
    before, now = results.get("before", results["now"]), results["now"]
    lines = [
        f"The first table shows the kernels' main loop, compiled by Triton {now['machine']['versions']['triton']} for "
        f"sm_90, at commits {before['machine']['commit']} -> {now['machine']['commit']}. The last three columns are "
        "upper bounds for the kernel's bandwidth on an H200, as a share of a copy's bandwidth: without bank conflicts "
        "in shared memory; with the bank conflicts for normally distributed gradients; and with those for gradients "
        "of which nine of ten elements are 0. The actual bandwidth is lower, and has not been measured.",
        "",
        "| | registers | instructions per element | integer instructions per element | bound without conflicts "
        "| bound, normal | bound, mostly 0 |",
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
        f"A sample of GPT-2 small, of gradients and parameters, takes "
        f"{_change([str(one['launches']) for one in host])} launches, "
        f"{_change([str(one['calls']) for one in host])} calls of Python functions and "
        f"{_change([format(one['ms'], '.2f') for one in host])} ms on the host "
        f"({now['machine']['device']}, the fastest of 300 samples) with a mock driver that launches no kernel.",
        "",
        "The second table shows for each kernel: registers per thread / bytes of stack per thread / bytes of shared "
        "memory per program / instructions per element (only for kernels that read one dtype).",
        "",
        "| | " + " | ".join(f"sm_{capability}" for capability in now["variants"]) + " |",
        "|---|" + "--:|" * len(now["variants"]),
    ]
    for name in next(iter(now["variants"].values())):
        found = [of[name] for of in now["variants"].values()]
        cells = ["{registers} / {stack} / {shared}".format(**taken) for taken in found]
        if "float" in name:  # the other kernels read several dtypes, or partial results
            cells = [f"{cell} / {taken['instructions']:.1f}" for cell, taken in zip(cells, found, strict=True)]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _change(shown: list[str]) -> str:
    return " -> ".join(dict.fromkeys(shown))
